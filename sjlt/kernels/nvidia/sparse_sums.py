"""X Sᵀ of sparse data X (n, n_features) in CSR under the exact law, with the sums of a few rows in shared memory.

As in `portable.sparse`, the nonzeros of a row are added one after the other, in order, and several rows side by side,
so results are bitwise reproducible. A program is one warp, whose lanes are divided evenly among its rows. The lanes of
a row look up the codes of a few nonzeros at a time and add them one after the other, while the next ones are loaded.
Sums in global memory took 6 times as long, because each addition reads and writes a sector (H200).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..portable.sparse import part_of_row
from .shared_memory import add_number, load_number, shared_begin, store_number, synchronize_warp

BLOCK = tl.constexpr(128)  # sums that a warp clears or stores at a time


@triton.jit
def _load_batch(values, i, lane, count, BATCH: tl.constexpr, SHARE: tl.constexpr):
    """Values or columns of BATCH nonzeros of each row, from the row's nonzero i on.

    Each tensor of the returned tuple has SHARE nonzeros per row, one per lane.
    """
    loaded = ()
    for p in tl.static_range(BATCH // SHARE):
        e = i + p * SHARE + lane % SHARE
        loaded += (tl.load(values + e, mask=e < count, other=0),)  # type: ignore[assignment]
    return loaded


@triton.jit
def _values_of_step(loaded, u: tl.constexpr, lane, SHARE: tl.constexpr, NNZ_BLOCK: tl.constexpr):
    """From `_load_batch`, nonzero u of each row and the ones after it, each in NNZ_BLOCK neighbouring lanes."""
    source = lane // SHARE * SHARE + u % SHARE + lane % SHARE // NNZ_BLOCK
    return tl.gather(loaded[u // SHARE], source, 0)


@triton.jit
def _load_codes(
    codes, columns, i, lane, count, BATCH: tl.constexpr, SHARE: tl.constexpr, NNZ: tl.constexpr,
    NNZ_BLOCK: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """The codes of a batch of nonzeros, a tuple of one tensor per step: each lane has one code of one nonzero.

    columns : from `_load_batch`, used with TABLE.
    """
    STEP: tl.constexpr = SHARE // NNZ_BLOCK
    code = ()
    for u in tl.static_range(0, BATCH, STEP):
        e = i + u + lane % SHARE // NNZ_BLOCK
        keep = (e < count) & (lane % NNZ_BLOCK < NNZ)
        if TABLE:
            e = _values_of_step(columns, u, lane, SHARE, NNZ_BLOCK).to(tl.int32)
        # Bypasses the L1 cache, which holds the next columns and values of each row.
        code += (tl.load(codes + (e * NNZ + lane % NNZ_BLOCK), mask=keep, other=0, cache_modifier=".cg"),)  # type: ignore[assignment]
    return code


@triton.jit
def _add_batch(
    sums, x, code, i, lane, count, BATCH: tl.constexpr, SHARE: tl.constexpr, NNZ: tl.constexpr,
    NNZ_BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Add a batch of nonzeros to the rows' sums, which begin at addresses `sums`: each row's one after the other."""
    STEP: tl.constexpr = SHARE // NNZ_BLOCK
    nonzero = lane % SHARE // NNZ_BLOCK  # of the step
    for u in tl.static_range(0, BATCH, STEP):
        value = _values_of_step(x, u, lane, SHARE, NNZ_BLOCK).to(DTYPE)
        keep = (i + u + nonzero < count) & (lane % NNZ_BLOCK < NNZ)
        code_of_step = code[u // STEP]
        address = sums + (code_of_step >> 1) * (DTYPE.primitive_bitwidth // 8)
        value = tl.where((code_of_step & 1) == 1, -value, value)
        for turn in tl.static_range(STEP):
            add_number(address, value, keep & (nonzero == turn))
            synchronize_warp(i)  # other lanes may add to the same components next


@triton.jit(do_not_specialize=["rows", "splits", "first", "stop", "k", "stride_ts", "stride_tr"])
def project_sparse_shared(
    values, indptr, columns, codes, target, rows: tl.int64, splits: tl.int32, first: tl.int64, stop: tl.int64,
    k: tl.int32, stride_ts: tl.int64, stride_tr: tl.int64, stride_tk: tl.int64,
    SCALE: tl.constexpr, SUM_DTYPE: tl.constexpr, NNZ: tl.constexpr, NNZ_BLOCK: tl.constexpr, SHARE: tl.constexpr,
    BATCH: tl.constexpr, TABLE: tl.constexpr, ACCUMULATE: tl.constexpr, SHARED_BYTES: tl.constexpr,
):  # fmt: skip
    """Write the sums of the nonzeros first .. stop - 1 to target (splits, rows, k), or add them if ACCUMULATE.

    Grid: (blocks of 32 / SHARE (row, split) pairs,); one warp.

    codes : from `encode_columns`: with TABLE, of all columns, else of the nonzeros from `first` on.  NNZ_BLOCK : NNZ
    rounded up to a power of two.  SHARE : lanes per row; a multiple of NNZ_BLOCK.  BATCH : nonzeros of a row that are
    loaded at a time; a multiple of SHARE.
    """
    ITEM: tl.constexpr = SUM_DTYPE.primitive_bitwidth // 8
    ROWS: tl.constexpr = 32 // SHARE
    lane, block = tl.arange(0, 32), tl.arange(0, BLOCK)
    begin = shared_begin(SHARED_BYTES) & -16
    for c in range(0, ROWS * k, BLOCK):
        store_number(begin + tl.minimum(c + block, ROWS * k - 1) * ITEM, tl.zeros((BLOCK,), SUM_DTYPE))
    pair0 = tl.program_id(0).to(tl.int64) * ROWS
    row_of_lane = lane // SHARE
    pair = pair0 + row_of_lane
    inside = pair < rows * splits
    start, end = part_of_row(indptr, pair // splits, pair % splits, splits, inside)
    start = tl.maximum(start, first)
    count = tl.where(inside, tl.maximum(tl.minimum(end, stop) - start, 0), 0).to(tl.int32)
    steps = tl.max(count, 0)
    values += start
    columns += start
    if not TABLE:
        codes += (start - first) * NNZ
    sums = begin + row_of_lane * k * ITEM
    tl.debug_barrier()

    x = _load_batch(values, 0, lane, count, BATCH, SHARE)
    j = _load_batch(columns, 0, lane, count, BATCH, SHARE) if TABLE else x
    code = _load_codes(codes, j, 0, lane, count, BATCH, SHARE, NNZ, NNZ_BLOCK, TABLE)
    x_next = _load_batch(values, BATCH, lane, count, BATCH, SHARE)
    j_next = _load_batch(columns, BATCH, lane, count, BATCH, SHARE) if TABLE else x
    for i in range(0, steps, BATCH):
        code_next = _load_codes(codes, j_next, i + BATCH, lane, count, BATCH, SHARE, NNZ, NNZ_BLOCK, TABLE)
        x_after = _load_batch(values, i + 2 * BATCH, lane, count, BATCH, SHARE)
        if TABLE:
            j_next = _load_batch(columns, i + 2 * BATCH, lane, count, BATCH, SHARE)
        _add_batch(sums, x, code, i, lane, count, BATCH, SHARE, NNZ, NNZ_BLOCK, SUM_DTYPE)
        x, code, x_next = x_next, code_next, x_after

    for r in range(ROWS):
        changes = pair0 + r < rows * splits
        if ACCUMULATE:
            changes = changes & (steps > 0)
        if changes:
            row, split = (pair0 + r) // splits, (pair0 + r) % splits
            sums_of_row = target + split * stride_ts + row * stride_tr
            for c in range(0, k, BLOCK):
                component = c + block
                pointers, keep = sums_of_row + component.to(tl.int64) * stride_tk, component < k
                z = load_number(begin + (r * k + tl.minimum(component, k - 1)) * ITEM, SUM_DTYPE) * SCALE
                if ACCUMULATE:
                    z += tl.load(pointers, mask=keep)
                tl.store(pointers, z.to(target.dtype.element_ty), mask=keep)
