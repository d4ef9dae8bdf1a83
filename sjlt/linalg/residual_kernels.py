"""Numba kernels for the gradient of a least-squares problem."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types

from ..backends.cpu.jit import DATA, FLOAT64S, OPTIONS, Array, kernel

ROWS = 4  # that share each read of x and each update of the gradient
VECTOR = Array(types.float64, 1, readonly=True)


def _vectorized(function: Any) -> Any:
    """Compile a function whose sums may be vectorized, in the same order in every call."""
    return numba.njit(function, fastmath={"reassoc", "contract"}, **OPTIONS)


@_vectorized
def _add_rows(a0: Any, a1: Any, a2: Any, a3: Any, x: Any, b: Any, gradient: Any) -> Any:
    """Add a'(b - a x) to `gradient` for ROWS rows; return the sum of squares of b - a x."""
    s0, s1, s2, s3 = 0.0, 0.0, 0.0, 0.0
    for j in range(x.size):
        s0 += a0[j] * x[j]
        s1 += a1[j] * x[j]
        s2 += a2[j] * x[j]
        s3 += a3[j] * x[j]
    s0, s1, s2, s3 = b[0] - s0, b[1] - s1, b[2] - s2, b[3] - s3
    for j in range(x.size):
        gradient[j] += (a0[j] * s0 + a1[j] * s1) + (a2[j] * s2 + a3[j] * s3)
    return (s0 * s0 + s1 * s1) + (s2 * s2 + s3 * s3)


@kernel(types.float64, a=Array(DATA, 2, readonly=True), x=VECTOR, b=VECTOR, gradient=FLOAT64S)
def add_gradient(a: Any, x: Any, b: Any, gradient: Any) -> Any:
    """Add a'(b - a x) to `gradient`, in float64; return the sum of squares of b - a x."""
    total, m = 0.0, b.size
    whole = m // ROWS * ROWS
    for i in range(0, whole, ROWS):
        total += _add_rows(a[i], a[i + 1], a[i + 2], a[i + 3], x, b[i : i + ROWS], gradient)
    if whole < m:  # pad the last rows with zeros
        rest, rest_b = np.zeros((ROWS, x.size), a.dtype), np.zeros(ROWS)
        for i in range(m - whole):  # assigning slices would take seconds to compile, for the texts of its errors
            rest_b[i] = b[whole + i]
            for j in range(x.size):
                rest[i, j] = a[whole + i, j]
        total += _add_rows(rest[0], rest[1], rest[2], rest[3], x, rest_b, gradient)
    return total
