"""QR of tall tensors by Cholesky factorizations, which use a GPU better than Householder reflections.

On an H200, cuSOLVER's Householder QR of (8192, 2048) in float64 takes 29 ms, at 2 Tflop/s.

Fukaya, Kannan, Nakatsukasa, Yamamoto, Yanagisawa, "Shifted Cholesky QR for computing the QR factorization of
ill-conditioned matrices", SIAM J. Sci. Comput. 42(1), 2020.
"""

from __future__ import annotations

from typing import Any

from .tensor_products import gram

MAX_STEPS = 3
# Added to the first Gram matrix, relative to its trace: far above its rounding errors. The shift that is proved to
# suffice, 11 (m n + n^2) u, would leave too large a condition number for the second step.
SHIFT = 2e-15
MAX_DEVIATION = 0.1  # of the Gram matrix from I, in the Frobenius norm, for a step to be the last
# Diagonal of R relative to its norm: below this, R's smallest singular values may consist of rounding errors, which are
# larger here than with Householder reflections.
MIN_PIVOT = 1e-13


def cholesky_qr(xp: Any, a: Any) -> tuple[Any, Any, Any] | None:
    """Return (P, C, R) with a = P C^-1 R, P C^-1 orthonormal, and C and R upper triangular.

    As stable as Householder QR, column by column. Returns None if Householder QR must be used: for a wide matrix, or if
    the condition number, with columns scaled to equal norms, exceeds about 1e13.
    """
    if a.shape[0] < a.shape[1]:
        return None
    scales = _scales(xp, a)
    P, R = a / scales, None
    for step in range(MAX_STEPS):
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
    """Return the largest power of two up to each column's norm; 1 for columns of zeros."""
    top = abs(a).amax(0)
    top = xp.where(top > 0, top, 1.0)
    norms = top * xp.sqrt(((a / top) ** 2).sum(0))  # a**2 might overflow
    mantissas = xp.frexp(norms).mantissa
    return xp.where(norms > 0, norms / (2 * mantissas), 1.0)
