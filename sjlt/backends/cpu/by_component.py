"""Projections by a sketch with few entries, computed one component at a time.

The entries of each component are listed once and kept for later calls (`ExactPlan.lists`). A sum then stays in a
register, whereas the other paths (`dense`, `contiguous`) read and write it once per entry, in a tile of all components
that may exceed the caches. Projecting (1826, 512) to 512, or one vector of 768 elements, takes half the time (Zen 5).
Features are copied to a tile first, unless they are contiguous in memory. Terms are added in the order of
`dense_kernels`, so results are bitwise equal to those of the other paths.
"""

from __future__ import annotations

import numpy as np
from numba import types

from ... import threads
from .contiguous import is_contiguous
from .dense_kernels import TILE_FEATURES, fold
from .jit import DATA_2D, INT32S, INT64S, OUT_2D, RANGE, TILE, TOTALS, compiled, kernel, leaf
from .listed_vectors import HAS_FAST_GATHERS, project_vectors
from .one_vector import has_square_sub_blocks
from .plan import STORE_WORK, Borrowed, Call, ExactPlan, row_ranges, run_rows, total_parts, useful_threads
from .rows import store_sums, sum_columns, sum_entries
from .simd import SQUARE_BYTES
from .tiles import load_tile

MAX_SCALAR_VECTORS = 2  # up to this many vectors are summed one by one; more are usually faster in tiles
TILE_COMPONENTS = 64  # components in a tile: 16 KiB of the L1 cache with 64 vectors of fp32
TILE_BYTES = 1 << 20  # for a tile of all features, which should stay in a core's L2 cache
MAX_WIDTH = 4 * SQUARE_BYTES  # bytes in a row of a tile: what one loop over the entries sums
MAX_CONTIGUOUS_WIDTH = 2048  # the same for column-major data, which is then read in long stretches
# Most bytes of a column that are read in place at a time: for S A, and for row-major results. Those are written from a
# tile of SUMS_COMPONENTS sums, in long stretches of rows.
MAX_COLUMN_WIDTH, MAX_SUMS_WIDTH, SUMS_COMPONENTS = 2560, 1024, 256
MAX_LISTS = 4  # per entry


def eligible(plan: ExactPlan, x: np.ndarray, out: np.ndarray, compute: np.dtype) -> bool:
    """Whether to project native data here: with kept sketches whose lists are neither mostly empty nor long.

    Otherwise tiles are faster: on Zen 5, (7444, 109) to 764 with one nonzero per column would take 1.4 times as long
    here as in tiles, (300, 16000) to 512 1.1 to 1.7 times. With four nonzeros, (2348, 217) to 960 takes 0.73 of the
    time here (Sapphire Rapids). A tile of many components takes longer, too, than reading and writing columns in place:
    S A of (768, 11896) to 2048 with two nonzeros would take four times as long in tiles.

    A single vector takes half the time of generating codes, even if its sketch is too large for codes to be kept: (1,
    200000) to 1024 with four nonzeros. Without fast gathers, looking up the terms of square sub-blocks is faster.
    """
    n, in_place = x.shape[0], x.strides[0] == x.itemsize and out.strides[0] == out.itemsize
    fits = plan.d * MAX_WIDTH <= TILE_BYTES and (in_place or plan.k <= MAX_LISTS * plan.d * plan.s)
    if n <= MAX_SCALAR_VECTORS and plan.keeps_lists and not plan.keeps_codes:
        in_rows = n == 1 or x.strides[1] == x.itemsize
        return in_rows and (HAS_FAST_GATHERS or not has_square_sub_blocks(plan.geometry, compute.itemsize))
    return plan.keeps_codes and (fits or plan.is_small(n))


def project_by_component(plan: ExactPlan, x: np.ndarray, out: np.ndarray, accumulate: bool, compute: np.dtype) -> Call:
    """The call for out (n, k) = x (n, d) S', or out +=, for a product that is `eligible`."""
    (n, d), scale = x.shape, plan.scale
    if n <= MAX_SCALAR_VECTORS:
        return project_vectors(plan, x, out, accumulate, compute)
    work = plan.work(n, d, plan.k, compute.itemsize, generates=False)
    if is_contiguous(x, compute):
        return lambda x, out: _project_columns(plan, x, out, accumulate, compute, useful_threads(work))
    starts, entries = plan.lists
    project = compiled(sum_tiles, data=x.dtype, compute=compute, out=out.dtype)
    parts = total_parts(compute) if plan.n_blocks > 1 else 0
    row_work = d * plan.s + STORE_WORK * plan.k

    def call(x: np.ndarray, out: np.ndarray) -> None:
        workers = useful_threads(work)
        width = _tile_width(x, compute.itemsize, workers)
        sums_width = max(width, SQUARE_BYTES // compute.itemsize)
        sums_size = TILE_COMPONENTS * sums_width

        def task(begin: int, end: int) -> None:
            with Borrowed(sums_size + d * width, compute) as memory:
                sums = memory[:sums_size].reshape(TILE_COMPONENTS, sums_width)
                scratch = memory[sums_size:].reshape(d, width), sums, np.empty((parts, TILE_COMPONENTS, sums_width))
                project(x, starts, entries, (begin, end), scratch, out, scale, accumulate)

        run_rows(task, n, width, workers, row_work)

    return call


def _project_columns(
    plan: ExactPlan, x: np.ndarray, out: np.ndarray, accumulate: bool, compute: np.dtype, workers: int
) -> None:
    """`project_by_component` for an x that `is_contiguous`: its columns are summed in place.

    For (18732, 57) to 552 with four nonzeros in a row-major result, that takes 0.6 of the time of copying them to a
    tile first; for products of random sizes whose columns lie at multiples of 2 KiB, 0.76 on average (Sapphire Rapids).
    """
    starts, entries = plan.lists
    n, lanes = x.shape[0], SQUARE_BYTES // compute.itemsize
    max_width = MAX_COLUMN_WIDTH if out.strides[0] == out.itemsize else MAX_SUMS_WIDTH
    groups = max(workers, -(-n // (max_width // SQUARE_BYTES * lanes)))
    squares = -(-n // (groups * lanes))
    # Rows of the tile have an odd number of cache lines: otherwise, many would use the same cache sets.
    width, row = squares * lanes, (squares | 1) * lanes
    project = compiled(project_columns, data=x.dtype, compute=compute, out=out.dtype)
    parts = total_parts(compute) if plan.n_blocks > 1 else 0

    def task(begin: int, end: int) -> None:
        with Borrowed(SUMS_COMPONENTS * row, compute) as memory:
            scratch = memory.reshape(SUMS_COMPONENTS, row), np.empty((parts, SUMS_COMPONENTS, row))
            project(x, starts, entries, (begin, end), width, scratch, out, plan.scale, accumulate)

    threads.run(task, row_ranges(n, width, workers, plan.d * plan.s + STORE_WORK * plan.k), workers)


def _tile_width(x: np.ndarray, itemsize: int, workers: int) -> int:
    """The number of vectors in a tile: whole SIMD vectors, and few enough that every worker gets a tile.

    It is half a SIMD vector if that is enough: the tile then takes half the cache.
    """
    n, d = x.shape
    lanes = SQUARE_BYTES // itemsize
    if n <= lanes // 2:
        return lanes // 2
    max_bytes = MAX_CONTIGUOUS_WIDTH if abs(x.strides[0]) < abs(x.strides[1]) else MAX_WIDTH
    max_squares = max(1, min(max_bytes, TILE_BYTES // d) // SQUARE_BYTES)
    return min(max_squares, -(-n // (workers * lanes))) * lanes


@leaf
def _sum_all(features, starts, entries, i, n, summed, sums, totals, out, scale, accumulate):
    """Compute rows i to i + n - 1 of out. features : one per row, for these n vectors; `summed` elements are read."""
    k, n_blocks = out.shape[1], (starts.size - 1) // out.shape[1]
    is_wide = features.shape[1] * features.itemsize >= SQUARE_BYTES
    if n_blocks == 1 and not accumulate and out.strides[0] == out.itemsize and is_wide:
        store_sums(entries, starts, features, out[i : i + n], scale)
        return
    for r0 in range(0, k, sums.shape[0]):
        r1 = min(r0 + sums.shape[0], k)
        for b in range(n_blocks):
            sum_entries(entries, starts, r0 * n_blocks + b, n_blocks, r1 - r0, features, summed, sums)
            ends = b == 0, b == n_blocks - 1
            fold(sums[: r1 - r0], totals, 0, i, i + n, r0, r1 - r0, ends[0], ends[1], out, scale, accumulate)


@kernel(
    x=DATA_2D, starts=INT64S, entries=INT32S, rows=RANGE, scratch=(TILE, TILE, TOTALS), out=OUT_2D,
    scale=types.float64, accumulate=types.boolean,
)  # fmt: skip
def sum_tiles(x, starts, entries, rows, scratch, out, scale, accumulate):
    """Compute a range of rows of out, a tile of vectors at a time.

    scratch : a tile of all features; one of some components, as wide or, if the first is half a SIMD vector wide, twice
        as wide; totals of these components, used if there are several blocks of features.
    """
    i0, i1 = rows
    features, sums, totals = scratch
    d, vectors = x.shape[1], features.shape[1]
    lanes = SQUARE_BYTES // sums.itemsize
    for i in range(i0, i1, vectors):
        n = min(vectors, i1 - i)
        summed = min((n + lanes - 1) // lanes * lanes, vectors)
        for j in range(0, d, TILE_FEATURES):
            nj = min(TILE_FEATURES, d - j)
            is_filled = load_tile(x, i, n, j, nj, features, j)
            if summed > n and not is_filled:  # subnormals left by an earlier call would slow additions
                features[j : j + nj, n:summed] = 0
        _sum_all(features, starts, entries, i, n, summed, sums, totals, out, scale, accumulate)


@kernel(
    x=DATA_2D, starts=INT64S, entries=INT32S, rows=RANGE, width=types.int64, scratch=(TILE, TOTALS), out=OUT_2D,
    scale=types.float64, accumulate=types.boolean,
)  # fmt: skip
def project_columns(x, starts, entries, rows, width, scratch, out, scale, accumulate):
    """Compute a range of rows of out, `width` at a time. x : contiguous along its first axis.

    scratch : as in `sum_tiles`, of some components.
    """
    sums, totals = scratch
    k, n_blocks = out.shape[1], (starts.size - 1) // out.shape[1]
    for i in range(rows[0], rows[1], width):
        end = min(i + width, rows[1])
        features = x[i:end].T
        if n_blocks == 1 and not accumulate and out.strides[0] == out.itemsize:
            store_sums(entries, starts, features, out[i:end], scale)
            continue
        for r0 in range(0, k, sums.shape[0]):
            r1 = min(r0 + sums.shape[0], k)
            for b in range(n_blocks):
                sum_columns(entries, starts, r0 * n_blocks + b, n_blocks, r1 - r0, features, sums)
                ends = b == 0, b == n_blocks - 1
                fold(sums[: r1 - r0], totals, 0, i, end, r0, r1 - r0, ends[0], ends[1], out, scale, accumulate)
