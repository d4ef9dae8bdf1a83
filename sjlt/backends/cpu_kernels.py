"""The CPU's kernels, compiled by Numba: loops over arrays they are handed, no choices, no allocation of results.

An entry of the sketch is a *code*: 2 row + (1 where negative), an int32 (rows are below 2^23).

Dense data comes as 2-D arrays of any strides, one data vector a row: X (n, n_features), Y (n, n_components). The
functions without a decorator are kernels; `compiled` makes machine code of them for given dtypes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types

from .. import law
from ..philox import define
from .cpu_tiles import OPTIONS, gather, inlined, leaf, load_tile, scatter, store_tile

TILE_FEATURES = 64  # rows of a tile of features: with 32 lanes of fp32, 8 KiB of the L1 cache
FILL = 1024  # columns whose codes are made at a time where no table is shared


# ------------------------------------------------------------------------------------- entries of the sketch

_words = define(law.FUNCTIONS, leaf, np.uint64)
part_start, pick, sign_bit = _words.part_start, _words.pick, _words.sign_bit
chunk_tile, chunk_keys, chunk_signs = _words.chunk_tile, _words.chunk_keys, _words.chunk_signs
row_in_sub_block = _words.row_in_sub_block

ZERO, ONE, TWO, THREE, SIX, SIX_BITS = (np.uint64(v) for v in (0, 1, 2, 3, 6, 63))


@leaf
def fill(first, codes, geometry):
    """codes[j, t] of columns first + j; `geometry` is `law.Geometry` in uint64. Philox runs once a chunk."""
    k, s, n_tiles, log_group, p, k0, k1 = geometry
    end = first + np.uint64(codes.shape[0])
    if end == first:
        return
    for c in range(first >> p, ((end - ONE) >> p) + ONE):
        m = chunk_tile(c, n_tiles, log_group, k0, k1)
        tile_row = part_start(m, k, n_tiles)
        tile_rows = part_start(m + ONE, k, n_tiles) - tile_row
        g0, g1, g2, g3 = chunk_signs(c, k0, k1)
        begin, stop = max(first, c << p), min(end, (c + ONE) << p)
        for quad in range((s + THREE) >> TWO):
            w0, w1, w2, w3 = chunk_keys(c, quad, k0, k1)
            for t in range(quad << TWO, min(s, (quad + ONE) << TWO)):
                w = pick(t & THREE, w0, w1, w2, w3)
                block_row = part_start(t, tile_rows, s)
                b = part_start(t + ONE, tile_rows, s) - block_row
                for j in range(begin, stop):
                    i = j - (c << p)
                    row = tile_row + block_row + row_in_sub_block(i, w, b, p)
                    code = (row << ONE) | sign_bit(i, t, p, g0, g1, g2, g3)
                    codes[np.int64(j - first), np.int64(t)] = np.int32(code)


def fill_codes(first_column, codes, geometry):
    """`fill`, for callers outside this module."""
    fill(first_column, codes, geometry)


# ------------------------------------------------------------------------------------- dense data
#
# Sums in the data's precision run over one block of features at a time; the blocks, whose bounds follow from the
# sketch alone, are added in their order in fp64. So the error does not grow with n_features, and the result does
# not depend on which rows or blocks are worked on together.


@leaf
def _accumulate(x, i0, i1, codes, j0, j1, k, tile, sums):
    """Add columns j0..j1 of rows i0..i1 of x to `sums`, a tile of k components for every `lanes` rows."""
    lanes = tile.shape[1]
    for j in range(j0, j1, TILE_FEATURES):
        nj = min(TILE_FEATURES, j1 - j)
        for v in range((i1 - i0 + lanes - 1) // lanes):
            i = i0 + v * lanes
            load_tile(x, i, min(lanes, i1 - i), j, nj, tile, 0)
            scatter(codes, j, nj, tile, sums, v * k)


@leaf
def _fold(sums, totals, base, i0, i1, k, first, last, out, scale, accumulate):
    """Add a block's sums of rows i0..i1 to the totals (from row `base` on), and store them after the last block."""
    lanes = sums.shape[1]
    for v in range((i1 - i0 + lanes - 1) // lanes):
        i = i0 + v * lanes
        n = min(lanes, i1 - i)
        if first and last:
            store_tile(sums, v * k, out, i, n, 0, k, scale, accumulate)
            continue
        for r in range(v * k, (v + 1) * k):
            for lane in range(lanes):
                before = 0.0 if first else totals[base + r, lane]
                totals[base + r, lane] = before + sums[r, lane]
        if last:
            store_tile(totals, base + v * k, out, i, n, 0, k, scale, accumulate)


def project_rows(x, codes, bounds, i0, i1, k, first, last, tile, sums, totals, out, scale, accumulate):
    """Rows i0..i1 of x through the blocks ``bounds[b]:bounds[b+1]`` of features; i0 is a multiple of the lanes.

    first, last : whether these are the first, the last features, or `totals` comes from, goes to another call.
    sums : a stack of tiles; as many rows are taken together as it holds.
    totals : the tiles of all rows of x, fp64; empty where there is only one block.
    """
    lanes = tile.shape[1]
    together = sums.shape[0] // k * lanes
    for i in range(i0, i1, together):
        end = min(i + together, i1)
        for b in range(bounds.size - 1):
            sums[:] = 0
            _accumulate(x, i, end, codes, bounds[b], bounds[b + 1], k, tile, sums)
            begins, ends = first and b == 0, last and b == bounds.size - 2
            _fold(sums, totals, i // lanes * k, i, end, k, begins, ends, out, scale, accumulate)


def project_blocks(x, bounds, first_column, geometry, k, codes, tile, sums):
    """The sums of each block ``bounds[b]:bounds[b+1]`` of features over the few rows of x: one tile a block.

    first_column : the law's index of x's column 0. codes : room for FILL columns.
    """
    sums[:] = 0
    for b in range(bounds.size - 1):
        for j in range(bounds[b], bounds[b + 1], FILL):
            nj = min(FILL, bounds[b + 1] - j)
            fill(first_column + np.uint64(j), codes[:nj], geometry)
            _accumulate(x[:, j : j + nj], 0, x.shape[0], codes, 0, nj, k, tile, sums[b * k : (b + 1) * k])


def fold_blocks(sums, totals, n, k, first, last, out, scale, accumulate):
    """Add the sums of `project_blocks` to the totals; calls come in the order of the blocks."""
    n_blocks = sums.shape[0] // k
    for b in range(n_blocks):
        begins, ends = first and b == 0, last and b == n_blocks - 1
        _fold(sums[b * k : (b + 1) * k], totals, 0, 0, n, k, begins, ends, out, scale, accumulate)


@leaf
def _spread(codes, nj, components, k, tile, out, i0, i1, j0, scale, accumulate):
    """out[i0:i1, j0:j0 + nj] from a stack of tiles of components; codes[0] is column j0's."""
    lanes = tile.shape[1]
    for j in range(0, nj, TILE_FEATURES):
        count = min(TILE_FEATURES, nj - j)
        for v in range((i1 - i0 + lanes - 1) // lanes):
            i = i0 + v * lanes
            tile[:] = 0
            gather(codes, j, count, tile, components, v * k)
            store_tile(tile, 0, out, i, min(lanes, i1 - i), j0 + j, count, scale, accumulate)


@leaf
def _load_components(y, i0, i1, k, components):
    lanes = components.shape[1]
    for v in range((i1 - i0 + lanes - 1) // lanes):
        i = i0 + v * lanes
        load_tile(y, i, min(lanes, i1 - i), 0, k, components, v * k)


def adjoint_rows(y, codes, i0, i1, k, tile, components, out, scale, accumulate):
    """Rows i0..i1 of out from those of y. components : a stack of tiles, as in `project_rows`."""
    together = components.shape[0] // k * tile.shape[1]
    for i in range(i0, i1, together):
        end = min(i + together, i1)
        _load_components(y, i, end, k, components)
        _spread(codes, codes.shape[0], components, k, tile, out, i, end, 0, scale, accumulate)


def adjoint_run(y, first_column, geometry, k, codes, tile, components, out, scale, accumulate):
    """A run of features, all of out's columns, for the few rows of y; codes are made on the way."""
    _load_components(y, 0, y.shape[0], k, components)
    for j in range(0, out.shape[1], FILL):
        nj = min(FILL, out.shape[1] - j)
        fill(first_column + np.uint64(j), codes[:nj], geometry)
        _spread(codes, nj, components, k, tile, out, 0, y.shape[0], j, scale, accumulate)


# ------------------------------------------------------------------------------------- sparse data
#
# Sums run in fp64, in the order of a row's nonzeros, and begin anew after a segment of them; the segments are added
# in fp64 too. So CSR and CSC give the same bits where the nonzeros of a row come in the same order.


@leaf
def _segment(k):
    """Nonzeros of a segment: adding k sums is no more work than adding these."""
    return max(4096, k)


@inlined
def _add_codes(value, codes, j, sums, base):
    """sums[base:] += value times the column whose codes are codes[j]."""
    for t in range(codes.shape[1]):
        code = np.uint32(codes[j, t])
        sums[base + np.uint64(code >> 1)] += -value if code & 1 else value


@inlined
def _add_column(value, j, first_column, table, one, geometry, sums):
    """sums += value times column j, whose codes stand in the table, or where that is empty are made into `one`."""
    if table.shape[0] > 0:
        _add_codes(value, table, np.uint64(j), sums, ZERO)
    else:
        fill(first_column + np.uint64(j), one, geometry)
        _add_codes(value, one, ZERO, sums, ZERO)


@inlined
def _mark_codes(codes, j, hit):
    for t in range(codes.shape[1]):
        row = np.uint64(codes[j, t] >> 1)
        hit[row >> SIX] |= ONE << (row & SIX_BITS)


@inlined
def _mark_column(j, first_column, table, one, geometry, hit):
    """Set the bits of the components that column j reaches; the arguments are `_add_column`'s."""
    if table.shape[0] > 0:
        _mark_codes(table, np.uint64(j), hit)
    else:
        fill(first_column + np.uint64(j), one, geometry)
        _mark_codes(one, ZERO, hit)


@leaf
def _count_bits(word):
    """The ones among the 64 bits of a word (Warren, Hacker's Delight, section 5-1)."""
    word -= (word >> ONE) & np.uint64(0x5555555555555555)
    word = (word & np.uint64(0x3333333333333333)) + ((word >> TWO) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return (word * np.uint64(0x0101010101010101)) >> np.uint64(56)


@leaf
def _store_row(sums, out, i, scale, accumulate):
    for r in range(out.shape[1]):
        before = out[i, r] if accumulate else 0.0
        out[i, r] = before + scale * sums[r]


@inlined
def _sum_row(indices, data, begin, end, first_column, table, one, geometry, row_sums, row_totals):
    """row_sums += the nonzeros begin..end times their columns; row_totals : room for k numbers."""
    segment = _segment(row_sums.size)
    for e0 in range(begin, end, segment):
        for e in range(e0, min(e0 + segment, end)):
            _add_column(np.float64(data[e]), indices[e], first_column, table, one, geometry, row_sums)
        if end - begin > segment:
            for r in range(row_sums.size):
                row_totals[r] = (row_totals[r] if e0 > begin else 0.0) + row_sums[r]
                row_sums[r] = 0
    if end - begin > segment:
        row_sums[:] = row_totals


def project_csr(
    indptr, indices, data, i0, i1, first_column, table, one, geometry, row_sums, row_totals, out, scale, accumulate
):
    """Rows i0..i1 of a CSR matrix."""
    for i in range(i0, i1):
        row_sums[:] = 0
        _sum_row(indices, data, indptr[i], indptr[i + 1], first_column, table, one, geometry, row_sums, row_totals)
        _store_row(row_sums, out, i, scale, accumulate)


def project_csc(
    indptr, indices, data, is_sorted, i0, i1, first_column, k, codes, geometry, row_sums, row_totals, counts,
    out, scale, accumulate,
):  # fmt: skip
    """Rows i0..i1 of a CSC matrix; row_sums, row_totals : k for each row, one after the other; counts : one a row."""
    segment = _segment(k)
    row_sums[:] = 0
    row_totals[:] = 0
    counts[:] = 0
    for j0 in range(0, indptr.size - 1, FILL):
        nj = min(FILL, indptr.size - 1 - j0)
        fill(first_column + np.uint64(j0), codes[:nj], geometry)
        for j in range(nj):
            begin, end = indptr[j0 + j], indptr[j0 + j + 1]
            if is_sorted:
                begin += np.searchsorted(indices[begin:end], i0)
            for e in range(begin, end):
                i = indices[e] - i0
                if is_sorted and i >= i1 - i0:
                    break
                if 0 <= i < i1 - i0:
                    if counts[i] == segment:
                        for r in range(i * k, (i + 1) * k):
                            row_totals[r] += row_sums[r]
                            row_sums[r] = 0
                        counts[i] = 0
                    counts[i] += 1
                    _add_codes(np.float64(data[e]), codes, np.uint64(j), row_sums, np.uint64(i * k))
    for r in range((i1 - i0) * k):
        row_sums[r] += row_totals[r]
    for i in range(i0, i1):
        _store_row(row_sums[(i - i0) * k : (i - i0 + 1) * k], out, i, scale, accumulate)


def count_csr(indptr, indices, i0, i1, first_column, table, one, geometry, hit, counts):
    """counts[i] = the components that row i of a CSR matrix reaches; hit : a bit for each component, all 0."""
    for i in range(i0, i1):
        for e in range(indptr[i], indptr[i + 1]):
            _mark_column(indices[e], first_column, table, one, geometry, hit)
        counts[i] = 0
        for w in range(hit.size):
            counts[i] += np.int64(_count_bits(hit[w]))
            hit[w] = 0


def fill_csr(
    indptr, indices, data, i0, i1, first_column, table, one, geometry, hit, row_sums, row_totals,
    out_indptr, out_indices, out_data, scale,
):  # fmt: skip
    """The rows that `count_csr` counted, their indices ascending; hit, row_sums : all 0."""
    for i in range(i0, i1):
        for e in range(indptr[i], indptr[i + 1]):
            _mark_column(indices[e], first_column, table, one, geometry, hit)
        _sum_row(indices, data, indptr[i], indptr[i + 1], first_column, table, one, geometry, row_sums, row_totals)
        at = out_indptr[i]
        for w in range(hit.size):
            bits = hit[w]
            while bits:
                r = 64 * w + np.int64(_count_bits((bits & (~bits + ONE)) - ONE))
                out_indices[at] = r
                out_data[at] = scale * row_sums[r]
                row_sums[r] = 0
                at += 1
                bits &= bits - ONE
            hit[w] = 0


# ------------------------------------------------------------------------------------- compilation


def _argument_type(name: str, data: Any, compute: Any, out: Any, index: Any, out_index: Any) -> types.Type:
    """The type of a kernel's argument: one name has one type in every kernel."""

    def array(dtype: Any, ndim: int, layout: Any = "C", readonly: bool = False) -> Any:
        return types.Array(dtype, ndim, layout, readonly=readonly)

    if name in ("x", "y"):
        return array(data, 2, "A", readonly=True)
    if name == "out":
        return array(out, 2, "A")
    if name in ("tile", "sums", "components"):
        return array(compute, 2)
    if name == "totals":
        return array(types.float64, 2)
    if name in ("row_sums", "row_totals"):
        return array(types.float64, 1)
    if name in ("codes", "table", "one"):
        return array(types.int32, 2)
    if name in ("indptr", "indices"):
        return array(index, 1, readonly=True)
    if name == "data":
        return array(data, 1, readonly=True)
    if name in ("bounds", "counts", "out_indptr"):
        return array(types.int64, 1)
    if name == "hit":
        return array(types.uint64, 1)
    if name == "out_indices":
        return array(out_index, 1)
    if name == "out_data":
        return array(out, 1)
    if name == "geometry":
        return types.UniTuple(types.uint64, len(law.Geometry._fields))
    if name in ("first", "last", "is_sorted", "accumulate"):
        return types.boolean
    return {"scale": types.float64, "first_column": types.uint64}.get(name, types.int64)


@functools.cache
def compiled(
    kernel: Callable[..., None],
    data: Any = "f4",
    compute: Any = "f4",
    out: Any = "f4",
    index: Any = "i4",
    out_index: Any = "i4",
) -> Callable[..., None]:
    """`kernel` as machine code for these dtypes, from the cache on disk where an earlier process made it."""
    dtypes = [numba.from_dtype(np.dtype(d)) for d in (data, compute, out, index, out_index)]
    signature = types.void(*(_argument_type(name, *dtypes) for name in inspect.signature(kernel).parameters))
    try:
        return numba.njit(signature, cache=True, **OPTIONS)(kernel)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return numba.njit(signature, **OPTIONS)(kernel)
