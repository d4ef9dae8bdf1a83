"""Residuals of least-squares problems in doubled precision: two float64 per number, for tensors on any device.

On the host, extended precision takes minutes for matrices of a GPU's size. Here all operations are elementwise, and
products and sums are free of error up to the last rounding to two float64.

Dekker, "A floating-point technique for extending the available precision", Numerische Mathematik 18, 1971.
"""

from __future__ import annotations

import torch
from torch import Tensor

ELEMENTS = 1 << 25  # of A per block; a block needs about 12 times its memory
SPLITTER = 2.0**27 + 1  # separates the upper 26 bits of a float64
Doubled = tuple[Tensor, Tensor]  # the unevaluated sum of a number and its rounding error


def residual_sums(A: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, float]:
    """Return A'(b - A x), rounded to float64 at the end, and ||b - A x||^2, for float64 tensors."""
    rows = max(1, ELEMENTS // A.shape[1])
    gradient: Doubled = torch.zeros_like(x), torch.zeros_like(x)
    squares = 0.0
    for i in range(0, A.shape[0], rows):
        block, halves = A[i : i + rows], _split(A[i : i + rows])
        image = _sum(_times(block, halves, x))
        residual, error = _two_sum(b[i : i + rows], -image[0])
        residual, error = _two_sum(residual, error - image[1])
        high, low = _times(block, halves, residual[:, None])
        gradient = _add(gradient, _sum((high.T, (low + block * error[:, None]).T)))
        squares += float(residual @ residual)
    return gradient[0] + gradient[1], squares


def _split(a: Tensor) -> Doubled:
    """Two numbers of at most 26 bits with the sum a."""
    scaled = SPLITTER * a
    high = scaled - (scaled - a)
    return high, a - high


def _times(a: Tensor, halves: Doubled, y: Tensor) -> Doubled:
    """The products a y, given `_split` (a)."""
    (high, low), (y_high, y_low) = halves, _split(y)
    product = a * y
    return product, ((high * y_high - product) + high * y_low + low * y_high) + low * y_low


def _two_sum(a: Tensor, b: Tensor) -> Doubled:
    """The sum a + b and its rounding error."""
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)


def _add(a: Doubled, b: Doubled) -> Doubled:
    total, error = _two_sum(a[0], b[0])
    return _two_sum(total, error + (a[1] + b[1]))


def _sum(terms: Doubled) -> Doubled:
    """The sums of the rows, each of halves of a row, down to single elements."""
    high, low = terms
    while (n := high.shape[1]) > 1:
        half = n // 2
        total = _add((high[:, :half], low[:, :half]), (high[:, half : 2 * half], low[:, half : 2 * half]))
        if n % 2:
            total = tuple(  # type: ignore[assignment]
                torch.cat([part, rest[:, -1:]], 1) for part, rest in zip(total, (high, low), strict=True)
            )
        high, low = total
    return high[:, 0], low[:, 0]
