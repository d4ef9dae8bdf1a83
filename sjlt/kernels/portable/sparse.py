"""Kernels for sparse data, X (n, n_features) in CSR, that need no floating-point atomics.

Under the exact law, each nonzero is added to nnz components. `encode_columns` writes their codes, 2 row + (1 where
negative), one nonzero per thread. `project_sparse` adds the nonzeros of a row one after the other to sums in memory,
for ROWS rows side by side, so that all addresses of a step differ. A row is always summed in the order of its nonzeros,
so results are bitwise reproducible. Long rows are split into parts that have sums of their own.

Under the iid law, a nonzero may be added to any component: programs own a block of components of one row, and keep
their sums in registers.

A part of m nonzeros is summed with at most m roundings, and adding the parts (`reduce`) takes few more: c <= m + 4 in
the error bound, besides one rounding of the result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...laws import iid as iid_law
from ...laws import philox
from .law import (
    chunk_keys,
    chunk_signs,
    chunk_tile,
    part_start,
    philox_words,
    row_in_sub_block,
    seed_words,
    select_word,
    sign_bit,
)

_iid = philox.define(
    iid_law.FUNCTIONS,
    triton.jit,
    tl.constexpr,
    tl.static_range,
    philox=philox_words,
    select_word=select_word,
    tl=tl,
)
entry_words, lane = _iid.entry_words, _iid.lane


@triton.jit
def column_codes(column, t: tl.constexpr, k0, k1, GEOMETRY: tl.constexpr, stack: tl.constexpr):
    """2 row + (1 where negative) of the entries of columns [E] in sub-block t of a stack, with rows of the stack."""
    LOG_CHUNK: tl.constexpr = GEOMETRY.log_chunk
    c = column >> LOG_CHUNK
    i = (column & ((1 << LOG_CHUNK) - 1)).to(tl.uint32)
    m = chunk_tile(c, GEOMETRY.n_tiles, GEOMETRY.log_group, k0, k1, stack).to(tl.int64)
    first = part_start(m, GEOMETRY.k, GEOMETRY.n_tiles)
    rows = (part_start(m + 1, GEOMETRY.k, GEOMETRY.n_tiles) - first).to(tl.uint32)
    begin = part_start(rows * 0 + t, rows, GEOMETRY.nnz)
    size = part_start(rows * 0 + (t + 1), rows, GEOMETRY.nnz) - begin
    w0, w1, w2, w3 = chunk_keys(c, (rows * 0 + (t >> 2)), k0, k1, stack)
    w = select_word(rows * 0 + (t & 3), w0, w1, w2, w3)
    g0, g1, g2, g3 = chunk_signs(c, k0, k1, stack)
    row = first.to(tl.uint32) + begin + row_in_sub_block(i, w, size, LOG_CHUNK)
    return (row << 1) | sign_bit(i, t, LOG_CHUNK, g0, g1, g2, g3)


@triton.jit(do_not_specialize=["count", "feature_offset", "seed"])
def encode_columns(
    columns, codes, count, feature_offset: tl.int64, seed: tl.int64, GEOMETRY: tl.constexpr, STACKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """codes[e] = the codes of the column of nonzero e, stack by stack; grid (blocks of e,).

    codes : (count, STACKS nnz) int32.  columns : the column of each nonzero, or None for a table of all columns, where
    e is the column.
    """
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = e < count
    column = e if columns is None else tl.load(columns + e, mask=inside, other=0).to(tl.int64)
    column += feature_offset
    k0, k1 = seed_words(seed)
    NNZ: tl.constexpr = GEOMETRY.nnz
    for stack in tl.static_range(STACKS):
        for t in tl.static_range(NNZ):
            code = column_codes(column, t, k0, k1, GEOMETRY, stack).to(tl.int32) + 2 * stack * GEOMETRY.k
            tl.store(codes + e * (STACKS * NNZ) + (stack * NNZ + t), code, mask=inside)


@triton.jit
def part_of_row(indptr, row, split, splits, inside):
    """(begin, end) of a split's nonzeros of a row; an empty range where not `inside`."""
    start = tl.load(indptr + row, mask=inside, other=0).to(tl.int64)
    length = tl.load(indptr + row + 1, mask=inside, other=0).to(tl.int64) - start
    return start + length * split // splits, start + length * (split + 1) // splits


@triton.jit(do_not_specialize=["rows", "splits", "first", "stop"])
def project_sparse(
    values, indptr, codes, target, rows, splits, first, stop, stride_ts, stride_tr, stride_tk, SCALE: tl.constexpr,
    SUM_DTYPE: tl.constexpr, NNZ: tl.constexpr, NNZ_BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add the nonzeros first .. stop - 1 to target (splits, rows, k); grid (blocks of ROWS (row, split) pairs,).

    codes : from `encode_columns`, for the nonzeros from `first` on.  NNZ_BLOCK : NNZ rounded up to a power of two.
    """
    pair = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = pair < rows.to(tl.int64) * splits
    row, split = pair // splits, pair % splits
    begin, end = part_of_row(indptr, row, split, splits, inside)
    begin, end = tl.maximum(begin, first), tl.minimum(end, stop)
    base = target + split * stride_ts + row * stride_tr
    t = tl.arange(0, NNZ_BLOCK)
    steps = tl.max(tl.where(inside, end - begin, 0), 0)
    for i in range(steps):
        e = begin + i
        live = inside & (e < end)
        keep = live[:, None] & (t < NNZ)[None, :]
        x = tl.load(values + e, mask=live, other=0).to(SUM_DTYPE) * SCALE
        code = tl.load(codes + ((e - first) * NNZ)[:, None] + t[None, :], mask=keep, other=0)
        pointers = base[:, None] + (code >> 1).to(tl.int64) * stride_tk
        sums = tl.load(pointers, mask=keep, other=0)
        tl.store(pointers, sums + tl.where((code & 1) == 1, -x[:, None], x[:, None]), mask=keep)
        tl.debug_barrier()  # other threads may add to the same components in the next step


@triton.jit(do_not_specialize=["count", "feature_offset", "seed"])
def gather_sparse(
    gradient, rows, columns, out, count, stride_gr, stride_gk, feature_offset: tl.int64, seed: tl.int64,
    SCALE: tl.constexpr, SUM_DTYPE: tl.constexpr, GEOMETRY: tl.constexpr, STACKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[e] = SCALE * (gradient S)[rows[e], columns[e]]; grid (blocks of e,)."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = e < count
    column = tl.load(columns + e, mask=inside, other=0).to(tl.int64) + feature_offset
    base = gradient + tl.load(rows + e, mask=inside, other=0).to(tl.int64) * stride_gr
    k0, k1 = seed_words(seed)
    total = tl.zeros((BLOCK,), SUM_DTYPE)
    NNZ: tl.constexpr = GEOMETRY.nnz
    for stack in tl.static_range(STACKS):
        for t in tl.static_range(NNZ):
            code = column_codes(column, t, k0, k1, GEOMETRY, stack)
            component = (code >> 1).to(tl.int64) + stack * GEOMETRY.k
            value = tl.load(base + component * stride_gk, mask=inside, other=0).to(SUM_DTYPE)
            total += tl.where((code & 1) == 1, -value, value)
    tl.store(out + e, (total * SCALE).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _iid_signs(column, call, k0, k1, threshold, BITS: tl.constexpr):
    """The unscaled entries, 1, -1 or 0, of one column in the rows of calls `call` [C]: int32 [C, 128/BITS]."""
    LANES: tl.constexpr = 128 // BITS
    LOG_LANES: tl.constexpr = 2 if BITS == 8 else 1
    w0, w1, w2, w3 = entry_words(call[:, None].to(tl.int64) * 0 + column, call[:, None].to(tl.uint32), k0, k1)
    u = lane(tl.arange(0, LANES)[None, :].to(tl.uint32), w0, w1, w2, w3, LOG_LANES)
    kept = (u & ((1 << (BITS - 1)) - 1)) < threshold.to(tl.uint32)
    return tl.where(kept, 1 - 2 * (u >> (BITS - 1)).to(tl.int32), 0)


@triton.jit(do_not_specialize=["splits", "feature_offset", "seed", "threshold"])
def project_sparse_iid(
    values, indptr, columns, target, splits, k, stride_ts, stride_tr, stride_tk, feature_offset: tl.int64,
    seed: tl.int64, threshold, SCALE: tl.constexpr, SUM_DTYPE: tl.constexpr, BITS: tl.constexpr, CALLS: tl.constexpr,
):  # fmt: skip
    """Add X Sᵀ to target (splits, rows, k); grid ((row, split) pairs, blocks of CALLS * 128/BITS components)."""
    LANES: tl.constexpr = 128 // BITS
    pair = tl.program_id(0).to(tl.int64)
    row, split = pair // splits, pair % splits
    start = tl.load(indptr + row).to(tl.int64)
    length = tl.load(indptr + row + 1).to(tl.int64) - start
    begin, end = start + length * split // splits, start + length * (split + 1) // splits
    call = tl.program_id(1) * CALLS + tl.arange(0, CALLS)
    r = call[:, None] * LANES + tl.arange(0, LANES)[None, :]
    k0, k1 = seed_words(seed)
    sums = tl.zeros((CALLS, LANES), SUM_DTYPE)
    for e in range(begin, end):
        x = tl.load(values + e).to(SUM_DTYPE)
        sign = _iid_signs(tl.load(columns + e).to(tl.int64) + feature_offset, call, k0, k1, threshold, BITS)
        sums += tl.where(sign > 0, x, tl.where(sign < 0, -x, 0))
    pointers = target + split * stride_ts + row * stride_tr + r.to(tl.int64) * stride_tk
    old = tl.load(pointers, mask=r < k, other=0)
    tl.store(pointers, old + sums * SCALE, mask=r < k)


@triton.jit(do_not_specialize=["feature_offset", "seed", "threshold"])
def gather_sparse_iid(
    gradient, rows, columns, out, k, stride_gr, stride_gk, feature_offset: tl.int64, seed: tl.int64, threshold,
    SCALE: tl.constexpr, SUM_DTYPE: tl.constexpr, BITS: tl.constexpr, CALLS: tl.constexpr,
):  # fmt: skip
    """out[e] = SCALE * (gradient S)[rows[e], columns[e]]; grid (count,)."""
    LANES: tl.constexpr = 128 // BITS
    e = tl.program_id(0).to(tl.int64)
    column = tl.load(columns + e).to(tl.int64) + feature_offset
    base = gradient + tl.load(rows + e).to(tl.int64) * stride_gr
    k0, k1 = seed_words(seed)
    total = tl.zeros((CALLS, LANES), SUM_DTYPE)
    for first in range(0, k, CALLS * LANES):
        call = first // LANES + tl.arange(0, CALLS)
        r = call[:, None] * LANES + tl.arange(0, LANES)[None, :]
        value = tl.load(base + r.to(tl.int64) * stride_gk, mask=r < k, other=0).to(SUM_DTYPE)
        sign = _iid_signs(column, call, k0, k1, threshold, BITS)
        total += tl.where(sign > 0, value, tl.where(sign < 0, -value, 0))
    tl.store(out + e, (tl.sum(tl.sum(total, 1), 0) * SCALE).to(out.dtype.element_ty))
