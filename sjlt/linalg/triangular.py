"""Triangular factors and systems: LAPACK for NumPy arrays, torch for tensors.

Only QR factorizations use several BLAS threads. For 0.1 s after their last product, BLAS threads wait in busy loops,
which slow down passes over A and the threads of the other BLAS (NumPy and SciPy each have their own). For 1500 columns,
an inverse takes 20 ms with two threads and 34 ms with one, but two threads lengthen the next passes by 30 ms.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.linalg

from .cholesky_qr import cholesky_qr
from .products import one_blas_thread, triangular_gram
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
    factored = scipy.linalg.lapack.dgeqrt(min(128, size), a, overwrite_a=True)[0]
    return np.tril(factored[: min(size, n)].T).T  # in Fortran order, for LAPACK


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
        return xp.linalg.solve_triangular(R, xp.eye(R.shape[0], **like(xp, R)), upper=True)
    with one_blas_thread():
        return scipy.linalg.lapack.dtrtri(R)[0]


def lower_cholesky(xp: Any, a: Any) -> Any:
    """Return the lower Cholesky factor of a symmetric matrix; raise LinAlgError if it is not positive definite."""
    if xp is not np:
        return xp.linalg.cholesky(a)
    with one_blas_thread():
        return scipy.linalg.cholesky(a.T, check_finite=False).T


def upper_product(xp: Any, W: Any, Y: Any, transposed: bool = False) -> Any:
    """Return W Y, or W' Y, for an upper triangular W."""
    if xp is np and Y.shape[1] == 1:  # half the memory traffic
        return scipy.linalg.blas.dtrmv(W, Y[:, 0], trans=int(transposed))[:, None]
    return (W.T if transposed else W) @ Y


def shifted_factor(xp: Any, R: Any, eta: float) -> Any:
    """Return the upper triangular factor of R'R + eta^2 for an upper triangular R.

    For eta of at least MIN_SUM_SHIFT ||R||_F it is the Cholesky factor of the sum, in which only singular values far
    below eta are lost. For a smaller eta it comes from QR of [R; eta I].
    """
    n = R.shape[1]
    if eta >= MIN_SUM_SHIFT * float(xp.linalg.norm(R)):
        total = triangular_gram(R) if xp is np else gram(R)
        total.reshape(-1)[:: n + 1] += eta**2
        return lower_cholesky(np, total.T).T if xp is np else xp.linalg.cholesky(total, upper=True)
    if xp is not np:
        return xp.linalg.qr(xp.concatenate([R, eta * xp.eye(n, **like(xp, R))]), mode="r").R
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


def on_host(x: Any) -> np.ndarray:
    """Return a small array or tensor as a NumPy array."""
    return x if isinstance(x, np.ndarray) else np.asarray(x.cpu())


def like(xp: Any, x: Any) -> dict[str, Any]:
    """Return the arguments for creating an array of x's dtype on its device."""
    return {"dtype": x.dtype} if xp is np else {"dtype": x.dtype, "device": x.device}
