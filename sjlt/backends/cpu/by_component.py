"""Projections by a sketch with few entries, computed one component at a time.

The entries of each component are listed once and kept for later calls (`ExactPlan.lists`). A sum then stays in a
register, whereas the other paths (`dense`, `contiguous`) read and write it once per entry, in a tile of all components
that may exceed the caches. Projecting (1826, 512) to 512, or one vector of 768 elements, takes half the time (Zen 5).
Features are copied to a tile first, unless `reads_columns`. Terms are added in the order of `dense_kernels`, so results
are bitwise equal to those of the other paths.
"""

from __future__ import annotations

import numpy as np
from numba import types

from ... import threads
from .bits import decoded, store_element
from .dense_kernels import TILE_FEATURES, fold, two_sum
from .jit import COMPUTE, DATA_2D, INT32S, INT64S, OUT_2D, RANGE, TILE, TOTALS, Array, compiled, kernel, leaf
from .plan import STORE_WORK, Borrowed, Call, ExactPlan, row_ranges, total_parts, useful_threads
from .rows import LISTS, store_sums, sum_entries
from .simd import SQUARE_BYTES
from .tiles import load_tile

MAX_SCALAR_VECTORS = 2  # up to this many vectors are summed one by one; more are usually faster in tiles
TILE_COMPONENTS = 64  # components in a tile: 16 KiB of the L1 cache with 64 vectors of fp32
TILE_BYTES = 1 << 20  # for a tile of all features, which should stay in a core's L2 cache
MAX_WIDTH = 4 * SQUARE_BYTES  # bytes in a row of a tile: what one loop over the entries sums
MAX_CONTIGUOUS_WIDTH = 2048  # the same for column-major data, which is then read in long stretches
MAX_COLUMN_WIDTH, COLUMN_COMPONENTS = 2560, 128  # of a tile of sums where columns are read in place
MAX_LISTS = 4  # per entry
MAX_DIRECT_TERMS, CONFLICT_STRIDE = 3, 2048  # per feature; bytes between columns, in `reads_columns`


def eligible(plan: ExactPlan, x: np.ndarray, out: np.ndarray) -> bool:
    """Whether to project native data here: with kept sketches whose lists are neither mostly empty nor long.

    Otherwise tiles are faster: on Zen 5, (7444, 109) to 764 with one nonzero per column would take 1.4 times as long
    here as in tiles, (300, 16000) to 512 1.1 to 1.7 times. With four nonzeros, (2348, 217) to 960 takes 0.73 of the
    time here (Sapphire Rapids). A tile of many components takes longer, too, than reading and writing columns in place:
    S A of (768, 11896) to 2048 with two nonzeros would take four times as long in tiles.
    """
    in_place = x.strides[0] == x.itemsize and out.strides[0] == out.itemsize
    fits = plan.d * MAX_WIDTH <= TILE_BYTES and (in_place or plan.k <= MAX_LISTS * plan.d * plan.s)
    return plan.keeps_codes and (fits or plan.is_small(x.shape[0]))


def project_by_component(plan: ExactPlan, x: np.ndarray, out: np.ndarray, accumulate: bool, compute: np.dtype) -> Call:
    """The call for out (n, k) = x (n, d) S', or out +=, for a product that is `eligible`."""
    starts, entries = plan.lists
    (n, d), scale = x.shape, plan.scale
    if n <= MAX_SCALAR_VECTORS:
        project_few = compiled(sum_vectors, data=x.dtype, compute=compute, out=out.dtype)
        return lambda x, out: project_few(x, starts, entries, np.empty(2 * d, compute), out, scale, accumulate)
    work = plan.work(n, d, plan.k, compute.itemsize, generates=False)
    if reads_columns(plan, x, compute):
        return lambda x, out: _project_all_columns(plan, x, out, accumulate, work)
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

        if workers == 1:
            task(0, n)
        else:
            threads.run(task, row_ranges(n, width, workers, row_work), workers)

    return call


def reads_columns(plan: ExactPlan, x: np.ndarray, compute: np.dtype) -> bool:
    """Whether to sum the columns of x in place.

    For column-major data and few terms, that mostly takes 0.5 to 0.9 of the time of copying them to a tile first. With
    more terms, each column is read too often, and columns at multiples of a power of two evict each other from caches.
    """
    if x.strides[0] != x.itemsize or x.dtype != compute or x.shape[0] < SQUARE_BYTES // x.itemsize:
        return False
    return plan.s == 1 or (plan.s <= MAX_DIRECT_TERMS and x.strides[1] % CONFLICT_STRIDE != 0)


def _project_all_columns(plan: ExactPlan, x: np.ndarray, out: np.ndarray, accumulate: bool, work: int) -> None:
    workers = useful_threads(work)
    whole = len(x) - len(x) % (SQUARE_BYTES // x.itemsize) if accumulate else len(x)
    _project_columns(plan, x[:whole], out[:whole], accumulate, workers)
    if whole < len(x):
        project_by_component(plan, x[whole:], out[whole:], accumulate, x.dtype)(x[whole:], out[whole:])


def _project_columns(plan: ExactPlan, x: np.ndarray, out: np.ndarray, accumulate: bool, workers: int) -> None:
    """`project_by_component` for an x that `reads_columns`; to accumulate, its rows must be whole SIMD vectors."""
    starts, entries = plan.lists
    n, lanes = x.shape[0], SQUARE_BYTES // x.itemsize
    groups = max(workers, -(-n // (MAX_COLUMN_WIDTH // SQUARE_BYTES * lanes)))
    squares = -(-n // (groups * lanes))
    # Rows of the tile have an odd number of cache lines: otherwise, many would use the same cache sets.
    width, row = squares * lanes, (squares | 1) * lanes
    project = compiled(sum_columns, data=x.dtype, compute=x.dtype, out=out.dtype)
    parts = total_parts(x.dtype) if plan.n_blocks > 1 else 0

    def task(begin: int, end: int) -> None:
        with Borrowed(COLUMN_COMPONENTS * row, x.dtype) as memory:
            scratch = memory.reshape(COLUMN_COMPONENTS, row), np.empty((parts, COLUMN_COMPONENTS, row))
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
def _span(starts, r, n_blocks, b):
    """Begin and end of the list of component r in block b, or of the last component if there is no component r."""
    i = min(r, (starts.size - 1) // n_blocks - 1) * n_blocks + b
    return np.uint64(starts[i]), np.uint64(starts[i + 1])


@leaf
def _add_list(total, entries, begin, end, signed):
    for e in range(begin, end):
        total += signed[np.uint32(entries[e])]
    return total


@leaf
def _sum_lists(entries, starts, first, n_blocks, block, signed):
    """The sums of components `first` to `first` + 3 in a block, in turns, which hides the latency of additions."""
    (a, a_end), (b, b_end) = _span(starts, first, n_blocks, block), _span(starts, first + 1, n_blocks, block)
    (c, c_end), (d, d_end) = _span(starts, first + 2, n_blocks, block), _span(starts, first + 3, n_blocks, block)
    common = min(a_end - a, b_end - b, c_end - c, d_end - d)
    p = q = r = s = signed.dtype.type(0)
    for e in range(common):
        p += signed[np.uint32(entries[a + e])]
        q += signed[np.uint32(entries[b + e])]
        r += signed[np.uint32(entries[c + e])]
        s += signed[np.uint32(entries[d + e])]
    p = _add_list(p, entries, a + common, a_end, signed)
    q = _add_list(q, entries, b + common, b_end, signed)
    r = _add_list(r, entries, c + common, c_end, signed)
    s = _add_list(s, entries, d + common, d_end, signed)
    return p, q, r, s


@kernel(
    x=DATA_2D, starts=INT64S, entries=INT32S, signed=Array(COMPUTE, 1), out=OUT_2D, scale=types.float64,
    accumulate=types.boolean,
)  # fmt: skip
def sum_vectors(x, starts, entries, signed, out, scale, accumulate):
    """Compute all of out, vector by vector. signed : a buffer for each feature of a vector and its negative."""
    d, k = x.shape[1], out.shape[1]
    n_blocks = (starts.size - 1) // k
    compensated = signed.itemsize == 8
    totals = np.empty((2, k + LISTS))
    for i in range(x.shape[0]):
        for j in range(d):
            value = decoded(x[i, j], signed)
            signed[2 * j] = value
            signed[2 * j + 1] = -value
        totals[:] = 0
        for r in range(0, k, LISTS):
            for b in range(n_blocks):
                blocks = _sum_lists(entries, starts, r, n_blocks, b, signed)
                for c in range(LISTS):
                    totals[0, r + c], error = two_sum(totals[0, r + c], np.float64(blocks[c]))
                    totals[1, r + c] += error
        for r in range(k):
            total = totals[0, r]
            if compensated and np.isfinite(total + totals[1, r]):
                total += totals[1, r]
            store_element(scale * total, out, i, r, accumulate)


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
def sum_columns(x, starts, entries, rows, width, scratch, out, scale, accumulate):
    """Compute a range of rows of out. x : column-major, in the dtype of the sums, at least one SIMD vector of rows.

    The last rows of x, if they fill no vector, are computed together with some before them, which are then stored
    twice, perhaps by two threads. That does not change them unless results accumulate.
    """
    sums, totals = scratch
    lanes = SQUARE_BYTES // sums.itemsize
    i = rows[0]
    while i < rows[1]:
        n = min(width, (rows[1] - i) // lanes * lanes)
        if n == 0:
            i, n = x.shape[0] - lanes, lanes
        _sum_all(x[i : i + n].T, starts, entries, i, n, n, sums, totals, out, scale, accumulate)
        i += n
