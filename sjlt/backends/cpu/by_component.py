"""Projections of one or a few vectors by a small sketch: each component is summed on its own.

The entries of each component are listed once, and kept for the next calls. A sum then stays in a register: one vector
of 768 numbers takes a third of the time that it takes in a tile, whose sums go through memory. Terms are added in the
order of `dense_kernels`, so that results are those of the other ways to the bit.
"""

from __future__ import annotations

import numpy as np
from numba import types

from .bits import decoded, store_number
from .dense_kernels import two_sum
from .jit import COMPUTE, DATA_2D, INT32S, INT64S, OUT_2D, Array, compiled, kernel
from .plan import ExactPlan

MAX_VECTORS = 2  # more are faster in tiles, most often


@kernel(
    x=DATA_2D, starts=INT64S, entries=INT32S, signed=Array(COMPUTE, 1), out=OUT_2D, scale=types.float64,
    accumulate=types.boolean,
)  # fmt: skip
def sum_components(x, starts, entries, signed, out, scale, accumulate):
    """All of out, from the lists of `ExactPlan.lists`. signed : room for each feature of a vector and its negative."""
    d, k = x.shape[1], out.shape[1]
    n_blocks = (starts.size - 1) // k
    compensated = signed.itemsize == 8
    for i in range(x.shape[0]):
        for j in range(d):
            value = decoded(x[i, j], signed)
            signed[2 * j] = value
            signed[2 * j + 1] = -value
        for r in range(k):
            total = lost = 0.0
            for b in range(r * n_blocks, (r + 1) * n_blocks):
                block = signed.dtype.type(0)
                for e in range(starts[b], starts[b + 1]):
                    block += signed[entries[e]]
                total, error = two_sum(total, np.float64(block))
                lost += error
            if compensated and np.isfinite(total + lost):
                total += lost
            store_number(scale * total, out, i, r, accumulate)


def project_by_component(plan: ExactPlan, x: np.ndarray, out: np.ndarray, accumulate: bool, compute: np.dtype) -> None:
    """out (n, k) = x (n, d) S', or out += that, for native data and a small product (`ExactPlan.is_small`)."""
    project = compiled(sum_components, data=x.dtype, compute=compute, out=out.dtype)
    starts, entries = plan.lists
    project(x, starts, entries, np.empty(2 * plan.d, compute), out, plan.scale, accumulate)
