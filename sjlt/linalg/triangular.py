"""Triangular factors and systems, by LAPACK for NumPy arrays and by torch for tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.linalg

from .cholesky_qr import cholesky_qr
from .products import one_blas_thread
from .tensor_products import gram

# Of a shift eta, relative to the Frobenius norm of the triangular factor R: from here on the rounding errors of the sum
# R'R + eta^2 are below 1 % of eta^2.
MIN_SUM_SHIFT = 1e-6


def r_factor(xp: Any, a: Any, columns: int | None = None) -> Any:
    """The first min(m, columns) rows of R of a's QR factorization; `a` is overwritten where that saves a copy.

    columns : those that are to be made triangular: R holds Q' times the others. By default all.
    """
    n = a.shape[1] if columns is None else columns
    if xp is not np:
        return _tensor_r_factor(xp, a, n)
    # Its recursive panels take half of the time of numpy.linalg.qr's for (10240, 1501), the least at this block size.
    size = min(a.shape)
    return np.triu(scipy.linalg.lapack.dgeqrt(min(128, size), a, overwrite_a=True)[0][: min(size, n)])


def _tensor_r_factor(xp: Any, a: Any, n: int) -> Any:
    found = cholesky_qr(xp, a[:, :n])
    if found is None:
        return xp.linalg.qr(a, mode="r").R[:n]
    P, C, R = found
    return R if n == a.shape[1] else xp.concatenate([R, solve_transposed(xp, C, P.T @ a[:, n:])], 1)


def reduced_qr(xp: Any, a: Any) -> tuple[Any, Any]:
    """(Q, R) of a's reduced QR factorization."""
    found = None if xp is np else cholesky_qr(xp, a)
    if found is None:
        Q, R = xp.linalg.qr(a)
        return Q, R
    P, C, R = found
    return solve_right(xp, P, C), R


def inverse(xp: Any, R: Any) -> Any:
    """The inverse of an upper triangular matrix."""
    if xp is not np:
        return xp.linalg.solve_triangular(R, xp.eye(R.shape[0], **_like(xp, R)), upper=True)
    return scipy.linalg.lapack.dtrtri(R)[0]  # no zero on the diagonal: the caller has looked


def shifted_factor(xp: Any, R: Any, eta: float) -> Any:
    """The triangular factor of R'R + eta^2 for an upper triangular R, by QR: a sum would lose R's small directions.

    On tensors by the sum where eta is at least MIN_SUM_SHIFT ||R||_F: what it would lose lies far below eta.
    """
    n = R.shape[1]
    if xp is not np:
        if eta < MIN_SUM_SHIFT * float(xp.linalg.norm(R)):
            return xp.linalg.qr(xp.concatenate([R, eta * xp.eye(n, **_like(xp, R))]), mode="r").R
        total = gram(R)
        total.diagonal().add_(eta**2)
        return xp.linalg.cholesky(total, upper=True)
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
