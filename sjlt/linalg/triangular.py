"""Triangular factors and systems, by LAPACK for NumPy arrays and by torch for tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.linalg

from .products import one_blas_thread


def r_factor(xp: Any, a: Any) -> Any:
    """R of a's QR factorization; `a` is overwritten where that saves a copy."""
    if xp is not np:
        return xp.linalg.qr(a, mode="r").R
    # Its recursive panels take half of the time of numpy.linalg.qr's for (10240, 1501), the least at this block size.
    size = min(a.shape)
    return np.triu(scipy.linalg.lapack.dgeqrt(min(128, size), a, overwrite_a=True)[0][:size])


def inverse(xp: Any, R: Any) -> Any:
    """The inverse of an upper triangular matrix."""
    if xp is not np:
        return xp.linalg.solve_triangular(R, xp.eye(R.shape[0], **_like(xp, R)), upper=True)
    return scipy.linalg.lapack.dtrtri(R)[0]  # no zero on the diagonal: the caller has looked


def shifted_factor(xp: Any, R: Any, eta: float) -> Any:
    """The triangular factor of R'R + eta^2 for an upper triangular R, by QR: a sum would lose R's small directions."""
    n = R.shape[1]
    if xp is not np:
        return xp.linalg.qr(xp.concatenate([R, eta * xp.eye(n, **_like(xp, R))]), mode="r").R
    # Both are triangular: half of the time of a QR factorization of 2 n rows, with panels of 32 columns for n = 1500,
    # and no more with one thread than with two.
    with one_blas_thread():
        return scipy.linalg.lapack.dtpqrt(n, min(32, n), R, eta * np.eye(n))[0]


def solve_transposed(xp: Any, R: Any, G: Any) -> Any:
    """R^-T G for an upper triangular R."""
    if xp is not np:
        return xp.linalg.solve_triangular(R.T, G, upper=False)
    return scipy.linalg.solve_triangular(R, G, trans="T", check_finite=False)


def solve_right(xp: Any, a: Any, triangle: Any) -> Any:
    """a R^-1 for an upper triangular R."""
    if xp is not np:
        return xp.linalg.solve_triangular(triangle, a, upper=True, left=False)
    return scipy.linalg.solve_triangular(triangle, a.T, trans="T", check_finite=False).T


def cholesky_solve(xp: Any, factor: Any, right: Any) -> Any:
    """The solution of L L' x = right for a lower triangular factor L."""
    if xp is not np:
        return xp.cholesky_solve(right, factor)
    return scipy.linalg.cho_solve((factor, True), right, check_finite=False)


def _like(xp: Any, x: Any) -> dict[str, Any]:
    return {"dtype": x.dtype} if xp is np else {"dtype": x.dtype, "device": x.device}
