"""Triangular factors and systems: LAPACK for NumPy arrays, torch for tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.linalg

from .cholesky_qr import cholesky_qr
from .products import one_blas_thread
from .tensor_products import gram

# Shift eta, relative to the Frobenius norm of the triangular factor R, from which on the rounding errors of R'R + eta^2
# are below 1 % of eta^2.
MIN_SUM_SHIFT = 1e-6
# Size of tensors for which Householder reflections are faster than Cholesky factorizations: (1024, 32), (2048, 128) and
# (8192, 256) take 0.3, 0.9 and 2.9 ms against 1.9, 1.7 and 2.4 on an H100.
SMALL_ROWS, SMALL_COLUMNS = 8192, 128


def r_factor(xp: Any, a: Any, columns: int | None = None) -> Any:
    """Return the first min(m, columns) rows of R in the QR factorization of the first `columns` columns of `a`.

    The remaining columns of R are Q' times those of `a`. By default `columns` is all of them. `a` may be overwritten.
    """
    n = a.shape[1] if columns is None else columns
    if xp is not np:
        return _tensor_r_factor(xp, a, n)
    # Recursive panels take half the time of numpy.linalg.qr for (10240, 1501); this block size is the fastest.
    size = min(a.shape)
    return np.triu(scipy.linalg.lapack.dgeqrt(min(128, size), a, overwrite_a=True)[0][: min(size, n)])


def _tensor_r_factor(xp: Any, a: Any, n: int) -> Any:
    """See `r_factor`."""
    found = cholesky_qr(xp, a[:, :n])
    if found is None:
        return xp.linalg.qr(a, mode="r").R[:n]
    P, C, R = found
    return R if n == a.shape[1] else xp.concatenate([R, solve_transposed(xp, C, P.T @ a[:, n:])], 1)


def reduced_qr(xp: Any, a: Any) -> tuple[Any, Any]:
    """Return (Q, R) of the reduced QR factorization of `a`."""
    is_small = a.shape[0] <= SMALL_ROWS and a.shape[1] <= SMALL_COLUMNS
    found = None if xp is np or is_small else cholesky_qr(xp, a)
    if found is None:
        Q, R = xp.linalg.qr(a)
        return Q, R
    P, C, R = found
    return solve_right(xp, P, C), R


def inverse(xp: Any, R: Any) -> Any:
    """Return the inverse of an upper triangular matrix without zeros on its diagonal."""
    if xp is not np:
        return xp.linalg.solve_triangular(R, xp.eye(R.shape[0], **_like(xp, R)), upper=True)
    return scipy.linalg.lapack.dtrtri(R)[0]


def shifted_factor(xp: Any, R: Any, eta: float) -> Any:
    """Return the upper triangular factor of R'R + eta^2 for an upper triangular R.

    Computed by QR of [R; eta I], because the sum would lose R's small singular values. For tensors and eta of at least
    MIN_SUM_SHIFT ||R||_F it is the Cholesky factor of the sum: the singular values lost are far below eta.
    """
    n = R.shape[1]
    if xp is not np:
        if eta < MIN_SUM_SHIFT * float(xp.linalg.norm(R)):
            return xp.linalg.qr(xp.concatenate([R, eta * xp.eye(n, **_like(xp, R))]), mode="r").R
        total = gram(R)
        total.diagonal().add_(eta**2)
        return xp.linalg.cholesky(total, upper=True)
    # dtpqrt exploits that both blocks are triangular, in half the time of a QR factorization of 2 n rows. For n = 1500,
    # panels of 32 columns are the fastest, and one thread is as fast as two.
    with one_blas_thread():
        return scipy.linalg.lapack.dtpqrt(n, min(32, n), R, eta * np.eye(n))[0]


def solve_transposed(xp: Any, R: Any, G: Any) -> Any:
    """Return R^-T G for an upper triangular R."""
    if xp is not np:
        return xp.linalg.solve_triangular(R.T, G, upper=False)
    return scipy.linalg.solve_triangular(R, G, trans="T", check_finite=False)


def solve_right(xp: Any, a: Any, R: Any) -> Any:
    """Return a R^-1 for an upper triangular R."""
    if xp is not np:
        return xp.linalg.solve_triangular(R, a, upper=True, left=False)
    return scipy.linalg.solve_triangular(R, a.T, trans="T", check_finite=False).T


def cholesky_solve(xp: Any, factor: Any, right: Any) -> Any:
    """Solve L L' x = right for the lower triangular `factor` L."""
    if xp is not np:
        return xp.cholesky_solve(right, factor)
    return scipy.linalg.cho_solve((factor, True), right, check_finite=False)


def _like(xp: Any, x: Any) -> dict[str, Any]:
    return {"dtype": x.dtype} if xp is np else {"dtype": x.dtype, "device": x.device}
