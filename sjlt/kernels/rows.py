"""A kernel for many data vectors that are contiguous in memory, as the columns of a row-major A in S A.

A program owns (tile, block of vectors) and reads only the chunks of its tile: each of the tile's 128 rows adds its one
row of A from the chunk, a run of neighbouring numbers, with its sign. With nnz > 1 a row of A is read nnz times, but
from the L1 cache but for the first. (On tensor cores the data would cross shared memory transposed: 1.7 times the
memory floor where this takes 1.35, H200, fp32, nnz 4.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from .batch import BATCH, TILE, batch, entries
from .words import part_start, seed_words


@triton.jit
def _hand_out(z):
    """z, [128], by a shuffle to where it is: the compiler moves no computation past it, into the threads of a row."""
    lane = tl.broadcast_to(tl.arange(0, BATCH)[None, :], 4, BATCH)
    return tl.reshape(tl.gather(tl.reshape(z, 4, BATCH), lane, 1), TILE)


@triton.jit(do_not_specialize=["seed", "feature_offset", "groups_per_split"])
def project_rows(
    x,
    out,
    n,
    d,
    stride_xv,
    stride_xf,
    stride_os,
    stride_ov,
    stride_or,
    seed: tl.int64,
    feature_offset: tl.int64,
    groups_per_split,
    K: tl.constexpr,
    NNZ: tl.constexpr,
    N_TILES: tl.constexpr,
    LOG_GROUP: tl.constexpr,
    LOG_CHUNK: tl.constexpr,
    WHOLE: tl.constexpr,
    KEYS: tl.constexpr,
    SIGNS: tl.constexpr,
    V: tl.constexpr,
    EVEN: tl.constexpr,
    ALIGN: tl.constexpr,
    FOLD: tl.constexpr,
    FINAL: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """out[split, v, r] = sum over a split's columns j of x[v, j] S[r, j]; grid (N_TILES * blocks of V vectors, splits).

    A partial sum (FINAL = False) is stored as it is, in fp32; else it is scaled, added to `out` where ACCUMULATE, and
    rounded to out's dtype. ALIGN divides stride_xf: neighbouring vectors that one access may take.
    """
    LOG_WIDTH: tl.constexpr = LOG_GROUP + LOG_CHUNK
    k0, k1 = seed_words(seed)
    m = (tl.program_id(0) % N_TILES).to(tl.uint32)
    v = (tl.program_id(0) // N_TILES).to(tl.int64) * V + tl.arange(0, V)
    split = tl.program_id(1).to(tl.int64)
    end = ((feature_offset + d - 1) >> LOG_WIDTH) + 1
    first_group = (feature_offset >> LOG_WIDTH) + split * groups_per_split
    groups = tl.minimum(end - first_group, groups_per_split).to(tl.int32)

    acc = tl.zeros((TILE, V), tl.float32)
    total = tl.zeros((TILE, V), tl.float32)
    for start in range(0, groups, BATCH):
        column, keys, thetas, signs = batch(
            m, first_group + start, k0, k1, K, NNZ, N_TILES, LOG_GROUP, LOG_CHUNK, WHOLE, KEYS, SIGNS
        )
        column = tl.broadcast_to(column[None, :], 4, BATCH)
        for chunk in range(tl.minimum(BATCH, groups - start)):
            i, negative = entries(chunk, keys, thetas, signs, m, K, NNZ, N_TILES, LOG_CHUNK, WHOLE, 1)
            i, negative = tl.reshape(i, TILE), tl.reshape(negative, TILE)
            j = tl.reshape(tl.gather(column, tl.full([4, BATCH], 0, tl.int32) + chunk, 1), TILE)
            found = (j >= 0) & (i < (1 << LOG_CHUNK))
            j = j + i.to(tl.int64) - feature_offset
            offset = j * (stride_xf // ALIGN)
            if not EVEN:
                offset = tl.where(found & (j >= 0) & (j < d), offset, -1)
            offset = _hand_out(offset)
            sign = _hand_out((negative << 31 | 0x3F800000).to(tl.float32, bitcast=True))
            address = x + (offset * ALIGN)[:, None] + (v * stride_xv)[None, :]
            if EVEN:
                z = tl.load(address)
            else:
                z = tl.load(address, mask=(offset >= 0)[:, None] & (v < n)[None, :], other=0.0)
            acc += z.to(tl.float32) * sign[:, None]
        if FOLD:
            total += acc
            acc = tl.zeros((TILE, V), tl.float32)
    if FOLD:
        acc = total

    tile_row = part_start(m.to(tl.int64), K, N_TILES)
    r = tl.arange(0, TILE)
    keep = (tile_row + r < part_start(m.to(tl.int64) + 1, K, N_TILES))[:, None] & (v < n)[None, :]
    out += split * stride_os + (tile_row + r)[:, None] * stride_or + v[None, :] * stride_ov
    if FINAL:
        acc *= NNZ**-0.5
        if ACCUMULATE:
            acc += tl.load(out, mask=keep)
    tl.store(out, acc.to(out.dtype.element_ty), mask=keep)
