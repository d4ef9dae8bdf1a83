"""QR factorization of tall tensors by Cholesky factorizations, which keep a GPU busier than Householder reflections.

cuSOLVER's Householder QR of (8192, 2048) in float64 takes 29 ms on an H200, at 2 Tflop/s.

Fukaya, Kannan, Nakatsukasa, Yamamoto, Yanagisawa, "Shifted Cholesky QR for computing the QR factorization of
ill-conditioned matrices", SIAM J. Sci. Comput. 42(1), 2020.
"""

from __future__ import annotations

from typing import Any

from .tensor_products import gram

STEPS = 3
# Of the first Gram matrix, relative to its trace: far above its rounding errors. The shift that is proved to be enough,
# 11 (m n + n^2) u, would leave too large a condition number for the second step.
SHIFT = 2e-15
MAX_DEVIATION = 0.1  # of a Gram matrix from I, in the Frobenius norm, at the last step
# Of R's diagonal relative to R's norm: below, R's smallest singular values may consist of rounding errors, which are
# larger here than those of Householder reflections.
MIN_PIVOT = 1e-13


def cholesky_qr(xp: Any, a: Any) -> tuple[Any, Any, Any] | None:
    """(P, C, R) with a = P C^-1 R: P C^-1 is orthonormal, C and R are upper triangular.

    As stable as Householder QR, column by column. None where that is due: for a wide matrix, and for one of a condition
    number, with its columns scaled to one norm, above about 1e13.
    """
    if a.shape[0] < a.shape[1]:
        return None
    scales = _scales(xp, a)
    P, R = a / scales, None
    for step in range(STEPS):
        squares = gram(P)
        is_last = float(xp.linalg.norm(squares - xp.eye(a.shape[1], dtype=a.dtype, device=a.device))) < MAX_DEVIATION
        if step == 0 and not is_last:
            squares.diagonal().add_(SHIFT * squares.trace())
        C, info = xp.linalg.cholesky_ex(squares, upper=True)
        if int(info) != 0:
            return None
        R = C if R is None else C @ R
        if is_last:
            pivots = abs(R.diagonal())
            return (P, C, R * scales) if float(pivots.min() / xp.linalg.norm(R)) > MIN_PIVOT else None
        P = xp.linalg.solve_triangular(C, P, upper=True, left=False)
    return None


def _scales(xp: Any, a: Any) -> Any:
    """The powers of two up to the norms of the columns; 1 for columns of zeros."""
    top = abs(a).amax(0)
    top = xp.where(top > 0, top, 1.0)
    norms = top * xp.sqrt(((a / top) ** 2).sum(0))  # squares of a might overflow
    mantissas = xp.frexp(norms).mantissa
    return xp.where(norms > 0, norms / (2 * mantissas), 1.0)
