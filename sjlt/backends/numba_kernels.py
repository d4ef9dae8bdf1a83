"""The CPU's kernels, compiled by Numba: loops over arrays they are handed, no choices, no allocation of results.

An entry of the sketch is a *code*: 2 row + (1 where negative), an int32 (rows are below 2^23).

A *tile* holds several data vectors side by side, one a lane: ``tile[i, l]`` is feature (or component) i of vector
l. Adding an entry of the sketch is then one SIMD operation over the lanes, `add_lanes`, whatever the memory
layout of the data, which only `load_tile` and `store_tile` see.

Dense data comes as 2-D arrays of any strides, one data vector a row: X (n, n_features), Y (n, n_components).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from .. import law
from ..philox import define

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}

LANES = (32, 8, 1)  # a tile has one of these; 32 fp32 are two AVX-512 registers
TILE_FEATURES = 64  # rows of a tile of features: with 32 lanes of fp32, 8 KiB of the L1 cache
FILL = 1024  # columns whose codes are made at a time where no table is shared


def _leaf(function: Callable[..., Any]) -> Any:
    return numba.njit(function, **OPTIONS)


# ------------------------------------------------------------------------------------- entries of the sketch

_words = define(law.FUNCTIONS, _leaf, np.uint64)
part_start, pick, sign_bit = _words.part_start, _words.pick, _words.sign_bit
chunk_tile, chunk_keys, chunk_signs = _words.chunk_tile, _words.chunk_keys, _words.chunk_signs
row_in_sub_block = _words.row_in_sub_block

ONE, TWO, THREE = np.uint64(1), np.uint64(2), np.uint64(3)


@_leaf
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


@_leaf
def sign_of(code):
    return 1 - 2 * (code & 1)


# ------------------------------------------------------------------------------------- tiles


def _define_add_lanes(lanes: int) -> Any:
    # LLVM vector instructions by hand: from a loop over the lanes the compiler makes a run-time check of whether
    # the two tiles overlap before every few additions, and the projection takes twice as long (Zen 5).
    @intrinsic
    def add_lanes(typing_context, target, i, source, j, sign):
        """target[i, :] += sign * source[j, :]; both tiles have `lanes` lanes of one dtype."""

        def codegen(context, builder, signature, arguments):
            target, i, source, j, sign = arguments
            vector = ir.VectorType(sign.type, lanes)
            align = signature.args[0].dtype.bitwidth // 8

            def pointer(array_type, array, row):
                data = context.make_array(array_type)(context, builder, array).data
                data = builder.gep(data, [builder.mul(row, ir.Constant(row.type, lanes))])
                return builder.bitcast(data, ir.PointerType(vector))

            into = pointer(signature.args[0], target, i)
            from_ = pointer(signature.args[2], source, j)
            undefined = ir.Constant(vector, ir.Undefined)
            signs = builder.insert_element(undefined, sign, ir.Constant(ir.IntType(32), 0))
            everywhere = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
            signs = builder.shuffle_vector(signs, undefined, everywhere)
            addend = builder.fmul(signs, builder.load(from_, align=align))
            builder.store(builder.fadd(builder.load(into, align=align), addend), into, align=align)
            return context.get_dummy_value()

        return types.void(target, types.int64, source, types.int64, target.dtype), codegen

    return add_lanes


def _define_add_entries(lanes: int) -> tuple[Any, Any]:
    add_lanes = _define_add_lanes(lanes)

    @_leaf
    def scatter(codes, j0, nj, features, components, base):
        for j in range(nj):
            for t in range(codes.shape[1]):
                code = codes[j0 + j, t]
                add_lanes(components, base + (code >> 1), features, j, components.dtype.type(sign_of(code)))

    @_leaf
    def gather(codes, j0, nj, features, components, base):
        for j in range(nj):
            for t in range(codes.shape[1]):
                code = codes[j0 + j, t]
                add_lanes(features, j, components, base + (code >> 1), components.dtype.type(sign_of(code)))

    return scatter, gather


(_scatter_32, _gather_32), (_scatter_8, _gather_8), (_scatter_1, _gather_1) = map(_define_add_entries, LANES)


@_leaf
def scatter(codes, j0, nj, features, components, base):
    """components[base + row] += sign * features[j] for each entry of columns j0 + j, j < nj."""
    if features.shape[1] == 32:
        _scatter_32(codes, j0, nj, features, components, base)
    elif features.shape[1] == 8:
        _scatter_8(codes, j0, nj, features, components, base)
    else:
        _scatter_1(codes, j0, nj, features, components, base)


@_leaf
def gather(codes, j0, nj, features, components, base):
    """features[j] += sign * components[base + row] for each entry of columns j0 + j, j < nj."""
    if features.shape[1] == 32:
        _gather_32(codes, j0, nj, features, components, base)
    elif features.shape[1] == 8:
        _gather_8(codes, j0, nj, features, components, base)
    else:
        _gather_1(codes, j0, nj, features, components, base)


def convert(value, tile):
    """`value` in the tile's dtype. Numba's CPU target has no half: uint16 into an fp32 tile is a half's bits."""
    raise NotImplementedError


@overload(convert)
def _convert(value, tile):
    dtype = tile.dtype
    if value is types.uint16 and dtype is types.float32:

        def half(value, tile):
            magnitude = (np.uint32(value) & np.uint32(0x7FFF)) << np.uint32(13)
            number = np.uint32(magnitude).view(np.float32) * np.float32(2.0**112)  # the exponents' biases; exact
            is_finite = magnitude < np.uint32(0x7C00 << 13)
            bits = np.float32(number).view(np.uint32) if is_finite else magnitude | np.uint32(0x7F800000)
            sign = (np.uint32(value) & np.uint32(0x8000)) << np.uint32(16)
            return np.uint32(bits | sign).view(np.float32)

        return half
    return lambda value, tile: dtype(value)


@_leaf
def load_tile(x, i, n, j0, nj, tile, base):
    """tile[base + j, l] = x[i + l, j0 + j] for l < n, j < nj, in the order of x's memory."""
    if abs(x.strides[0]) < abs(x.strides[1]):
        for j in range(nj):
            for lane in range(n):
                tile[base + j, lane] = convert(x[i + lane, j0 + j], tile)
    else:
        for lane in range(n):
            for j in range(nj):
                tile[base + j, lane] = convert(x[i + lane, j0 + j], tile)


@_leaf
def store_tile(tile, base, out, i, n, j0, nj, scale, accumulate):
    """out[i + l, j0 + j] = (that, where accumulating, +) scale * tile[base + j, l], rounded once from fp64."""
    if abs(out.strides[0]) < abs(out.strides[1]):
        for j in range(nj):
            for lane in range(n):
                before = out[i + lane, j0 + j] if accumulate else 0.0
                out[i + lane, j0 + j] = before + scale * tile[base + j, lane]
    else:
        for lane in range(n):
            for j in range(nj):
                before = out[i + lane, j0 + j] if accumulate else 0.0
                out[i + lane, j0 + j] = before + scale * tile[base + j, lane]


# ------------------------------------------------------------------------------------- dense data
#
# Sums in the data's precision run over one block of features at a time; the blocks, whose bounds follow from the
# sketch alone, are added in their order in fp64. So the error does not grow with n_features, and the result does
# not depend on which rows or blocks are worked on together.


@_leaf
def _accumulate(x, i0, i1, codes, j0, j1, k, tile, sums):
    """Add columns j0..j1 of rows i0..i1 of x to `sums`, a tile of k components for every `lanes` rows."""
    lanes = tile.shape[1]
    for j in range(j0, j1, TILE_FEATURES):
        nj = min(TILE_FEATURES, j1 - j)
        for v in range((i1 - i0 + lanes - 1) // lanes):
            i = i0 + v * lanes
            load_tile(x, i, min(lanes, i1 - i), j, nj, tile, 0)
            scatter(codes, j, nj, tile, sums, v * k)


@_leaf
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


@_leaf
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


@_leaf
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
# Each result is one fp64 sum over its nonzeros in their order, so CSR and CSC give the same bits where the
# nonzeros of a row come in the same order.


@_leaf
def _column(j, first_column, table, one, geometry):
    """The codes of column j: from the table, or where that is empty made into `one`."""
    if table.shape[0] > 0:
        return table[j]
    fill(first_column + np.uint64(j), one, geometry)
    return one[0]


def project_csr(indptr, indices, data, i0, i1, first_column, table, one, geometry, sums, out, scale, accumulate):
    """Rows i0..i1 of a CSR matrix; sums : (1, k) fp64."""
    for i in range(i0, i1):
        sums[:] = 0
        for e in range(indptr[i], indptr[i + 1]):
            value = np.float64(data[e])
            for code in _column(indices[e], first_column, table, one, geometry):
                sums[0, code >> 1] += sign_of(code) * value
        for r in range(out.shape[1]):
            before = out[i, r] if accumulate else 0.0
            out[i, r] = before + scale * sums[0, r]


def project_csc(indptr, indices, data, is_sorted, i0, i1, first_column, codes, geometry, sums, out, scale, accumulate):
    """Rows i0..i1 of a CSC matrix; sums : (i1 - i0, k) fp64."""
    sums[:] = 0
    for j0 in range(0, indptr.size - 1, FILL):
        nj = min(FILL, indptr.size - 1 - j0)
        fill(first_column + np.uint64(j0), codes[:nj], geometry)
        for j in range(nj):
            begin, end = indptr[j0 + j], indptr[j0 + j + 1]
            if is_sorted:
                begin += np.searchsorted(indices[begin:end], i0)
            for e in range(begin, end):
                i = indices[e]
                if i >= i1 and is_sorted:
                    break
                if i0 <= i < i1:
                    value = np.float64(data[e])
                    for code in codes[j]:
                        sums[i - i0, code >> 1] += sign_of(code) * value
    for i in range(i0, i1):
        for r in range(out.shape[1]):
            before = out[i, r] if accumulate else 0.0
            out[i, r] = before + scale * sums[i - i0, r]


def count_csr(indptr, indices, i0, i1, first_column, table, one, geometry, hit, counts):
    """counts[i] = the components that row i of a CSR matrix reaches; hit : a zero bit for each component."""
    for i in range(i0, i1):
        counts[i] = 0
        for e in range(indptr[i], indptr[i + 1]):
            for code in _column(indices[e], first_column, table, one, geometry):
                bit = np.uint64(1) << np.uint64((code >> 1) & 63)
                if not hit[code >> 7] & bit:
                    hit[code >> 7] |= bit
                    counts[i] += 1
        hit[:] = 0


def fill_csr(
    indptr,
    indices,
    data,
    i0,
    i1,
    first_column,
    table,
    one,
    geometry,
    hit,
    sums,
    out_indptr,
    out_indices,
    out_data,
    scale,
):
    """The rows that `count_csr` counted, their indices ascending; hit, sums : zeros for each component."""
    for i in range(i0, i1):
        for e in range(indptr[i], indptr[i + 1]):
            value = np.float64(data[e])
            for code in _column(indices[e], first_column, table, one, geometry):
                hit[code >> 7] |= np.uint64(1) << np.uint64((code >> 1) & 63)
                sums[0, code >> 1] += sign_of(code) * value
        at = out_indptr[i]
        for w in range(hit.size):
            bits = hit[w]
            r = 64 * w
            while bits:
                if bits & ONE:
                    out_indices[at] = r
                    out_data[at] = scale * sums[0, r]
                    sums[0, r] = 0
                    at += 1
                bits >>= ONE
                r += 1
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
