"""Kernels of the exact law on dense data: 2-D arrays of any strides, one data vector per row, X or Y.

Order and accuracy of sums
--------------------------
Within a block of features, sums are computed in the data's precision, u = 2^-24 (fp32 and narrower) or 2^-53 (fp64 and
integers). A component gets at most one term per group of chunks, and a block has at most T = MAX_TERMS groups, so these
sums have at most T terms. The bounds of the blocks depend on the sketch only. The sums of the blocks are added to fp64
totals in order; for u = 2^-53, the rounding error of each of these additions is kept and added at the end. Results
therefore do not depend on which rows or blocks are processed together.

For every input (underflow and overflow aside),

    |result_r - exact_r| <= (MAX_TERMS + 4) u sum over j of |S_rj x_j|,

plus one rounding to a 16-bit result. The first term of a block is exact, and the T - 1 additions after it contribute
T - 1 (Higham, "Accuracy and stability of numerical algorithms", section 4.2). The totals contribute at most 1: for
fp32, n_blocks 2^-53 <= u up to 2^29 blocks; for fp64, the final rounding of a compensated sum (section 4.3), whose
second-order term n_blocks^2 u^2 stays below u up to 2^26 blocks. The scale 1/sqrt(nnz) contributes two roundings and
the multiplication by it a third; for fp32, the rounding of the result replaces these fp64 roundings. An adjoint sums
nnz terms, which gives nnz + 3 instead of MAX_TERMS + 4.

No sum overflows if |x| <= max / MAX_TERMS (fp32 and bf16: 2^122, 5e36) and, in fp64, sqrt(nnz) times the sum of
|S_rj x_j| is finite, because sums are scaled last; nor, in an adjoint, if |y| <= max / nnz.
"""

from __future__ import annotations

import numpy as np
from numba import types

from .entries import CODES_STEP, generate_codes
from .jit import CODES, DATA_2D, FLAGS, INT64S, LAW, OUT_2D, RANGE, TILE, TOTALS, kernel, leaf
from .one_vector import accumulate_vector, vector_scratch
from .tiles import gather, load_tile, scatter, store_tile

TILE_FEATURES = 64  # rows of a tile of features: 8 KiB of the L1 cache with 32 vectors of fp32


@leaf
def _accumulate(x, i0, i1, codes, j0, j1, k, tile, sums):
    """Add columns j0..j1 of rows i0..i1 of x to `sums`, a stack of tiles of k components."""
    vectors = tile.shape[1]
    for j in range(j0, j1, TILE_FEATURES):
        nj = min(TILE_FEATURES, j1 - j)
        for v in range((i1 - i0 + vectors - 1) // vectors):
            i = i0 + v * vectors
            load_tile(x, i, min(vectors, i1 - i), j, nj, tile, 0)
            scatter(codes, j, nj, tile, sums, v * k)


@leaf
def two_sum(a, b):
    """(a + b, the rounding error of that addition), by Knuth's TwoSum."""
    total = a + b
    b_rounded = total - a
    return total, (a - (total - b_rounded)) + (b - b_rounded)


@leaf
def add_to_totals(sums, totals, compensation, compensated):
    """totals += sums; if `compensated`, compensation += the rounding errors of these additions. All arrays are flat."""
    if not compensated:
        for r in range(sums.size):
            totals[r] += sums[r]
    else:
        for r in range(sums.size):
            totals[r], error = two_sum(totals[r], np.float64(sums[r]))
            compensation[r] += error


@leaf
def add_compensation(totals, compensation):
    """totals += compensation, except where the result is not finite: there, totals stay unchanged."""
    for r in range(totals.size):
        total = totals[r] + compensation[r]
        totals[r] = total if np.isfinite(total) else totals[r]


@leaf
def fold(sums, totals, base, i0, i1, j0, k, first, last, out, scale, accumulate):
    """Add a block's sums of rows i0..i1 to the totals, from row `base` on; after the last block, store these.

    j0 : the first of the k columns of out to which the sums belong.
    """
    vectors = sums.shape[1]
    for v in range((i1 - i0 + vectors - 1) // vectors):
        i = i0 + v * vectors
        n = min(vectors, i1 - i)
        if first and last:
            store_tile(sums, v * k, out, i, n, j0, k, scale, accumulate)
            continue
        row = base + v * k
        block = slice(row * vectors, (row + k) * vectors)
        total, compensation = totals[0].reshape(-1)[block], totals[-1].reshape(-1)[block]
        compensated = totals.shape[0] == 2
        if first:
            total[:] = 0
            compensation[:] = 0
        add_to_totals(sums[v * k : (v + 1) * k].reshape(-1), total, compensation, compensated)
        if last:
            if compensated:
                add_compensation(total, compensation)
            store_tile(totals[0], row, out, i, n, j0, k, scale, accumulate)


@kernel(
    x=DATA_2D, codes=CODES, bounds=INT64S, rows=RANGE, ends=FLAGS, own_totals=types.boolean,
    scratch=(TILE, TILE, TOTALS), out=OUT_2D, scale=types.float64, accumulate=types.boolean,
)  # fmt: skip
def project_rows(x, codes, bounds, rows, ends, own_totals, scratch, out, scale, accumulate):
    """Project a range of rows of x, over the blocks ``bounds[b]:bounds[b + 1]`` of features.

    rows : begins at a multiple of a tile's vectors.
    ends : whether these include the sketch's first and last block. If not, totals are carried between calls.
    own_totals : whether totals are for the rows that are processed together, rather than for all rows of x.
    scratch : a tile of features; a stack of tiles of k components, for the rows that are processed together; totals.
    """
    i0, i1 = rows
    first, last = ends
    tile, sums, totals = scratch
    k, vectors = out.shape[1], tile.shape[1]
    rows_at_once = sums.shape[0] // k * vectors
    for i in range(i0, i1, rows_at_once):
        end = min(i + rows_at_once, i1)
        base = 0 if own_totals else i // vectors * k
        for b in range(bounds.size - 1):
            sums[:] = 0
            _accumulate(x, i, end, codes, bounds[b], bounds[b + 1], k, tile, sums)
            begins, ends_ = first and b == 0, last and b == bounds.size - 2
            fold(sums, totals, base, i, end, 0, k, begins, ends_, out, scale, accumulate)


@kernel(x=DATA_2D, bounds=INT64S, first_column=types.uint64, geometry=LAW, scratch=(CODES, TILE, TILE))
def project_blocks(x, bounds, first_column, geometry, scratch):
    """Compute the sums of each block ``bounds[b]:bounds[b + 1]`` of features for few rows of x, one tile per block.

    first_column : the law's index of x's column 0.
    scratch : codes of CODES_STEP columns; a tile of features or, for a single vector, the buffer that
        `accumulate_vector` needs for CODES_STEP features; a tile of components for each block.
    """
    codes, tile, sums = scratch
    k = np.int64(geometry[0] * geometry[7])
    sums[:] = 0
    features, of_vector = tile.reshape(-1), vector_scratch(geometry)
    for b in range(bounds.size - 1):
        for j in range(bounds[b], bounds[b + 1], CODES_STEP):
            nj = min(CODES_STEP, bounds[b + 1] - j)
            if sums.shape[1] == 1:
                block = sums[b * k : (b + 1) * k].reshape(-1)
                accumulate_vector(x, j, j + nj, first_column + np.uint64(j), geometry, features, of_vector, block)
                continue
            generate_codes(first_column + np.uint64(j), codes[:nj], geometry)
            _accumulate(x[:, j : j + nj], 0, x.shape[0], codes, 0, nj, k, tile, sums[b * k : (b + 1) * k])


@kernel(sums=TILE, totals=TOTALS, ends=FLAGS, out=OUT_2D, scale=types.float64, accumulate=types.boolean)
def fold_blocks(sums, totals, ends, out, scale, accumulate):
    """Add the sums of `project_blocks` to the totals, in the order of the blocks. ends : as in `project_rows`."""
    n, k = out.shape
    first, last = ends
    size, n_blocks = k * sums.shape[1], sums.shape[0] // k
    flat, total, compensation = sums.reshape(-1), totals[0].reshape(-1), totals[-1].reshape(-1)
    for b in range(n_blocks):
        begins, ends_ = first and b == 0, last and b == n_blocks - 1
        if begins or ends_:
            fold(sums[b * k : (b + 1) * k], totals, 0, 0, n, 0, k, begins, ends_, out, scale, accumulate)
        else:
            add_to_totals(flat[b * size : (b + 1) * size], total, compensation, totals.shape[0] == 2)


@leaf
def _gather_features(codes, nj, components, k, tile, out, i0, i1, j0, scale, accumulate):
    """Compute out[i0:i1, j0:j0 + nj] from a stack of tiles of components. codes : those of column j0 and up."""
    vectors = tile.shape[1]
    for j in range(0, nj, TILE_FEATURES):
        count = min(TILE_FEATURES, nj - j)
        for v in range((i1 - i0 + vectors - 1) // vectors):
            i = i0 + v * vectors
            tile[:] = 0
            gather(codes, j, count, tile, components, v * k)
            store_tile(tile, 0, out, i, min(vectors, i1 - i), j0 + j, count, scale, accumulate)


@leaf
def _load_components(y, i0, i1, k, components):
    vectors = components.shape[1]
    for v in range((i1 - i0 + vectors - 1) // vectors):
        i = i0 + v * vectors
        load_tile(y, i, min(vectors, i1 - i), 0, k, components, v * k)


@kernel(
    y=DATA_2D, codes=CODES, rows=RANGE, scratch=(TILE, TILE), out=OUT_2D, scale=types.float64,
    accumulate=types.boolean,
)  # fmt: skip
def adjoint_rows(y, codes, rows, scratch, out, scale, accumulate):
    """Compute a range of rows of out. scratch : a tile of features; a stack of tiles of components."""
    i0, i1 = rows
    tile, components = scratch
    k = y.shape[1]
    rows_at_once = components.shape[0] // k * tile.shape[1]
    for i in range(i0, i1, rows_at_once):
        end = min(i + rows_at_once, i1)
        _load_components(y, i, end, k, components)
        _gather_features(codes, codes.shape[0], components, k, tile, out, i, end, 0, scale, accumulate)


@kernel(
    y=DATA_2D, first_column=types.uint64, geometry=LAW, scratch=(CODES, TILE, TILE), out=OUT_2D,
    scale=types.float64, accumulate=types.boolean,
)  # fmt: skip
def adjoint_run(y, first_column, geometry, scratch, out, scale, accumulate):
    """Compute a run of features (all columns of out) for few rows of y, generating the codes."""
    codes, tile, components = scratch
    k = y.shape[1]
    _load_components(y, 0, y.shape[0], k, components)
    for j in range(0, out.shape[1], CODES_STEP):
        nj = min(CODES_STEP, out.shape[1] - j)
        generate_codes(first_column + np.uint64(j), codes[:nj], geometry)
        _gather_features(codes, nj, components, k, tile, out, 0, y.shape[0], j, scale, accumulate)
