"""Sparse data X (n, n_features) in CSR under the exact law, with the sums of a few rows in shared memory.

As in `portable.sparse`, the nonzeros of a row are added one after the other, in their order, and those of several rows
side by side: results repeat to the bit. A warp has one program, which loads the next nonzeros and their codes while it
adds: sums in the memory of the device took 5 times as long, in which each addition is a sector read and written (H200).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..portable.sparse import part_of_row
from .shared_memory import add_number, load_number, shared_begin, store_number

LANES = tl.constexpr(32)  # of the warp: (row, nonzero of a column) pairs
BLOCK = tl.constexpr(128)  # sums that the warp clears or stores at a time


@triton.jit
def _load_batch(numbers, i, t, count, BATCH: tl.constexpr, NNZ_BLOCK: tl.constexpr):
    """Values or columns of each row's nonzeros from i on: BATCH / NNZ_BLOCK tensors, a share for each of its lanes."""
    loaded = ()
    for p in tl.static_range(BATCH // NNZ_BLOCK):
        at = i + p * NNZ_BLOCK + t
        loaded += (tl.load(numbers + at, mask=at < count, other=0),)  # type: ignore[assignment]
    return loaded


@triton.jit
def _load_codes(
    codes, columns, i, lane, count, BATCH: tl.constexpr, NNZ: tl.constexpr, NNZ_BLOCK: tl.constexpr,
    TABLE: tl.constexpr,
):  # fmt: skip
    """The codes of the nonzeros that `_load_batch` loaded: BATCH tensors, a code per lane."""
    code = ()
    for u in tl.static_range(BATCH):
        e = i + u
        if TABLE:
            e = tl.gather(columns[u // NNZ_BLOCK], lane // NNZ_BLOCK * NNZ_BLOCK + u % NNZ_BLOCK, 0).to(tl.int32)
        keep = (i + u < count) & (lane % NNZ_BLOCK < NNZ)
        # Past the L1 cache, where each row's next columns and values are.
        code += (tl.load(codes + (e * NNZ + lane % NNZ_BLOCK), mask=keep, other=0, cache_modifier=".cg"),)  # type: ignore[assignment]
    return code


@triton.jit
def _add_batch(sums, x, code, i, lane, count, BATCH: tl.constexpr, NNZ: tl.constexpr, NNZ_BLOCK: tl.constexpr,
               DTYPE: tl.constexpr):  # fmt: skip
    """Add the terms to the sums that begin at the addresses `sums`, one nonzero of each row after the other."""
    for u in tl.static_range(BATCH):
        value = tl.gather(x[u // NNZ_BLOCK], lane // NNZ_BLOCK * NNZ_BLOCK + u % NNZ_BLOCK, 0).to(DTYPE)
        keep = (i + u < count) & (lane % NNZ_BLOCK < NNZ)
        address = sums + (code[u] >> 1) * (DTYPE.primitive_bitwidth // 8)
        add_number(address, tl.where((code[u] & 1) == 1, -value, value), keep)
        tl.debug_barrier()  # the next nonzeros may meet the same components in other lanes


@triton.jit(do_not_specialize=["rows", "splits", "first", "stop", "k", "stride_ts", "stride_tr"])
def project_sparse_shared(
    values, indptr, columns, codes, target, rows: tl.int64, splits: tl.int32, first: tl.int64, stop: tl.int64,
    k: tl.int32, stride_ts: tl.int64, stride_tr: tl.int64, stride_tk: tl.int64,
    SCALE: tl.constexpr, SUM_DTYPE: tl.constexpr, NNZ: tl.constexpr, NNZ_BLOCK: tl.constexpr, ROWS: tl.constexpr,
    BATCH: tl.constexpr, TABLE: tl.constexpr, ACCUMULATE: tl.constexpr, SHARED_BYTES: tl.constexpr,
):  # fmt: skip
    """Write the sums of the nonzeros first .. stop - 1 to target (splits, rows, k), or add them if ACCUMULATE.

    Grid blocks of ROWS (row, split) pairs; one warp.

    codes : with TABLE those of all columns, else of the nonzeros from `first` on.  NNZ_BLOCK : NNZ as a power of two,
    which divides BATCH.  ROWS NNZ_BLOCK <= 32.
    """
    ITEM: tl.constexpr = SUM_DTYPE.primitive_bitwidth // 8
    lane, block = tl.arange(0, LANES), tl.arange(0, BLOCK)
    begin = shared_begin(SHARED_BYTES) & -16
    for c in range(0, ROWS * k, BLOCK):
        store_number(begin + tl.minimum(c + block, ROWS * k - 1) * ITEM, tl.zeros((BLOCK,), SUM_DTYPE))
    pair0 = tl.program_id(0).to(tl.int64) * ROWS
    pair = pair0 + lane // NNZ_BLOCK
    inside = (pair < rows * splits) & (lane // NNZ_BLOCK < ROWS)
    start, end = part_of_row(indptr, pair // splits, pair % splits, splits, inside)
    start = tl.maximum(start, first)
    count = tl.where(inside, tl.maximum(tl.minimum(end, stop) - start, 0), 0).to(tl.int32)
    steps = tl.max(count, 0)
    values += start
    columns += start
    if not TABLE:
        codes += (start - first) * NNZ
    sums, t = begin + lane // NNZ_BLOCK * k * ITEM, lane % NNZ_BLOCK
    tl.debug_barrier()

    x = _load_batch(values, 0, t, count, BATCH, NNZ_BLOCK)
    j = _load_batch(columns, 0, t, count, BATCH, NNZ_BLOCK) if TABLE else x
    code = _load_codes(codes, j, 0, lane, count, BATCH, NNZ, NNZ_BLOCK, TABLE)
    x_next = _load_batch(values, BATCH, t, count, BATCH, NNZ_BLOCK)
    j_next = _load_batch(columns, BATCH, t, count, BATCH, NNZ_BLOCK) if TABLE else x
    for i in range(0, steps, BATCH):
        code_next = _load_codes(codes, j_next, i + BATCH, lane, count, BATCH, NNZ, NNZ_BLOCK, TABLE)
        x_after = _load_batch(values, i + 2 * BATCH, t, count, BATCH, NNZ_BLOCK)
        if TABLE:
            j_next = _load_batch(columns, i + 2 * BATCH, t, count, BATCH, NNZ_BLOCK)
        _add_batch(sums, x, code, i, lane, count, BATCH, NNZ, NNZ_BLOCK, SUM_DTYPE)
        x, code, x_next = x_next, code_next, x_after

    for r in range(ROWS):
        if pair0 + r < rows * splits:
            row, split = (pair0 + r) // splits, (pair0 + r) % splits
            to = target + split * stride_ts + row * stride_tr
            for c in range(0, k, BLOCK):
                component = c + block
                pointers, keep = to + component.to(tl.int64) * stride_tk, component < k
                z = load_number(begin + (r * k + tl.minimum(component, k - 1)) * ITEM, SUM_DTYPE) * SCALE
                if ACCUMULATE:
                    z += tl.load(pointers, mask=keep)
                tl.store(pointers, z.to(target.dtype.element_ty), mask=keep)
