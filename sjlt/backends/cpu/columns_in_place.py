"""Adjoints of a column-major matrix to a row-major result, of which each component is needed a few times at most.

The terms of a feature are added where they lie in memory, for 128 vectors at a time; only the features are copied, to
transpose them. Other paths first copy all components, of which there may be many more: (1356, 2657) to 47 with two
nonzeros per column reads 94 of them, in a tenth of the time. Terms are added in the same order, so results are bitwise
equal to those of the other paths (`dense`).
"""

from __future__ import annotations

import numpy as np
from numba import types

from .jit import CODES, DATA_2D, OUT_2D, RANGE, TILE, compiled, kernel
from .plan import STORE_WORK, Borrowed, Call, ExactPlan, run_rows
from .rows import gather_row
from .simd import SQUARE_BYTES
from .tiles import store_tile

TILE_VECTORS, TILE_FEATURES = 128, 256  # long rows of the result: with 32 features, some products take 3 times as long
# How often a component is read, at most on average: beyond that, copying all components to tiles, or looking them up in
# registers, is faster for random sizes (Sapphire Rapids).
MAX_READS, MAX_READS_LOOKED_UP = 4, 0.75


@kernel(
    y=DATA_2D, codes=CODES, units=RANGE, n_units=types.int64, tile=TILE, out=OUT_2D, scale=types.float64,
    accumulate=types.boolean,
)  # fmt: skip
def gather_rows(y, codes, units, n_units, tile, out, scale, accumulate):
    """Compute a range of units of rows of out; all rows are divided evenly into `n_units`, which fit into the tile.

    y : contiguous along its first axis.  codes : of all columns of out.  tile : (features, vectors).
    """
    (n, d), s = out.shape, codes.shape[1]
    for unit in range(units[0], units[1]):
        begin, end = unit * n // n_units, (unit + 1) * n // n_units
        components, features = y.T[:, begin:end], tile.T[: end - begin]
        for j in range(0, d, tile.shape[0]):
            nj = min(tile.shape[0], d - j)
            for i in range(nj):
                gather_row(codes, (j + i) * s, (j + i + 1) * s, components, features, i, 1.0)
            store_tile(tile, 0, out, begin, end - begin, j, nj, scale, accumulate)


def eligible(plan: ExactPlan, y: np.ndarray, out: np.ndarray, compute: np.dtype, can_look_up: bool) -> bool:
    """Whether to compute the product here. can_look_up : whether `look_up` is the alternative, and not tiles."""
    is_transposed = y.strides[0] == y.itemsize and out.strides[0] != out.itemsize
    max_reads = MAX_READS_LOOKED_UP if can_look_up else MAX_READS
    few_reads = plan.keeps_codes and plan.d * plan.s <= max_reads * plan.k
    return is_transposed and few_reads and y.dtype == compute and len(y) >= SQUARE_BYTES // y.itemsize


def adjoint_in_place(plan: ExactPlan, y: np.ndarray, out: np.ndarray, accumulate: bool) -> Call:
    """The call for out (n, d) = y (n, k) S, or out +=, for a product that is `eligible`."""
    codes, scale = plan.codes[0], plan.scale
    gather = compiled(gather_rows, compute=y.dtype, data=y.dtype, out=out.dtype)
    n_units = -(-len(y) // TILE_VECTORS)  # each with half a tile or all rows, so at least a SIMD vector
    workers = plan.workers(len(y), plan.k, plan.d, y.itemsize, generates=False)
    work = TILE_VECTORS * plan.d * (plan.s + STORE_WORK)

    def call(y: np.ndarray, out: np.ndarray) -> None:
        def task(begin: int, end: int) -> None:
            with Borrowed(TILE_FEATURES * TILE_VECTORS, y.dtype) as memory:
                tile = memory.reshape(TILE_FEATURES, TILE_VECTORS)
                gather(y, codes, (begin, end), n_units, tile, out, scale, accumulate)

        run_rows(task, n_units, 1, workers, work)

    return call
