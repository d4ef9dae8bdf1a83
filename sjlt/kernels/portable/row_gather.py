"""Kernels for many data vectors that are contiguous in memory, as the columns of a row-major A in S A.

A program owns (tile, block of vectors) and reads only the chunks of its tile: each of the tile's 128 rows adds its one
row of A from the chunk, a run of neighbouring numbers, with its sign. With nnz > 1 a row of A is read nnz times, but
from the L1 cache but for the first; with nnz 8 and more the time is in proportion to these reads. (On tensor cores the
data crosses shared memory transposed: 1.7 times the memory floor where this takes 1.27, H200, fp32, nnz 4; with nnz 8
2.6 and 2.2, with nnz 16 3.3 and 4.4.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from .entry_generation import BATCH, TILE, batch, entries, from_batch, groups_of_split, rows_of_tile, stay
from .law import permute, seed_words


@triton.jit
def _prefetch(x, first, chunk, d, stride_xf, v, LOG_CHUNK: tl.constexpr, V: tl.constexpr):
    """Asks for a chunk's rows, at the program's vectors, in the L2 cache: a hint, without registers to wait for."""
    SECTORS: tl.constexpr = V * x.dtype.element_ty.primitive_bitwidth // 256
    p = tl.arange(0, SECTORS << LOG_CHUNK)
    j = tl.gather(first, p * 0 + chunk, 0) + p // SECTORS
    j = tl.minimum(tl.maximum(j, 0), d - 1)
    address = x + j * stride_xf + tl.min(v, 0) + p % SECTORS * (V // SECTORS)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], tl.int32, False, 1)


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
    PREFETCH: tl.constexpr,
    FINAL: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out[split, v, r] = sum over a split's columns j of x[v, j] S[r, j]; grid (N_TILES * blocks of V vectors, splits).

    A partial sum (FINAL = False) is stored as it is, in fp32; else it is scaled, added to `out` where ACCUMULATE, and
    rounded to out's dtype. ALIGN divides stride_xf: neighbouring vectors that one access may take. OVERLAP : see
    `reduce`.
    """
    LOG_WIDTH: tl.constexpr = LOG_GROUP + LOG_CHUNK
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    k0, k1 = seed_words(seed)
    m = (tl.program_id(0) % N_TILES).to(tl.uint32)
    v = (tl.program_id(0) // N_TILES).to(tl.int64) * V + tl.arange(0, V)
    split = tl.program_id(1).to(tl.int64)
    first_group, groups = groups_of_split(split, groups_per_split, feature_offset, d, LOG_WIDTH)

    acc = tl.zeros((TILE, V), tl.float32)
    total = tl.zeros((TILE, V), tl.float32)
    for start in range(0, groups, BATCH):
        column, keys, thetas, signs = batch(
            m, first_group + start, k0, k1, K, NNZ, N_TILES, LOG_GROUP, LOG_CHUNK, WHOLE, KEYS, SIGNS
        )
        first = column - feature_offset
        column = tl.broadcast_to(column[None, :], 4, BATCH)
        for chunk in range(tl.minimum(BATCH, groups - start)):
            if PREFETCH:
                _prefetch(x, first, tl.minimum(chunk + 1, BATCH - 1), d, stride_xf, v, LOG_CHUNK, V)
            i, negative = entries(chunk, keys, thetas, signs, m, K, NNZ, N_TILES, LOG_CHUNK, WHOLE, 1)
            i, negative = tl.reshape(i, TILE), tl.reshape(negative, TILE)
            j = tl.reshape(tl.gather(column, tl.full([4, BATCH], 0, tl.int32) + chunk, 1), TILE)
            found = (j >= 0) & (i < (1 << LOG_CHUNK))
            j = j + i.to(tl.int64) - feature_offset
            offset = j * (stride_xf // ALIGN)
            if not EVEN:
                offset = tl.where(found & (j >= 0) & (j < d), offset, -1)
            offset = stay(offset)  # else each thread of a row would compute it again
            sign = stay((negative << 31 | 0x3F800000).to(tl.float32, bitcast=True))
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

    tile_row, tile_end = rows_of_tile(m, K, N_TILES)
    r = tl.arange(0, TILE)
    keep = (tile_row + r < tile_end)[:, None] & (v < n)[None, :]
    out += split * stride_os + (tile_row + r)[:, None] * stride_or + v[None, :] * stride_ov
    if FINAL:
        acc *= NNZ**-0.5
        if ACCUMULATE:
            acc += tl.load(out, mask=keep)
    tl.store(out, acc.to(out.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["seed", "feature_offset", "groups_per_split"])
def adjoint_rows(
    y,
    out,
    n,
    d,
    stride_yv,
    stride_yr,
    stride_ov,
    stride_of,
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
    ACCUMULATE: tl.constexpr,
):
    """out[v, j] = sum over rows r of y[v, r] S[r, j]; grid (N_TILES * blocks of V vectors, splits of the columns).

    Whole geometries only. A program writes the columns of the chunks that meet its tile; the tile's rows of y stay in
    the L1 cache.
    """
    tl.static_assert(WHOLE)
    B: tl.constexpr = 1 << LOG_CHUNK
    LOG_WIDTH: tl.constexpr = LOG_GROUP + LOG_CHUNK
    k0, k1 = seed_words(seed)
    m = (tl.program_id(0) % N_TILES).to(tl.uint32)
    v = (tl.program_id(0) // N_TILES).to(tl.int64) * V + tl.arange(0, V)
    first_group, groups = groups_of_split(tl.program_id(1), groups_per_split, feature_offset, d, LOG_WIDTH)
    y += m.to(tl.int64) * TILE * stride_yr
    live = v < n
    e = tl.arange(0, TILE).to(tl.uint32)  # t B + i: sub-block and place
    t = e >> LOG_CHUNK
    i = tl.arange(0, B)
    for start in range(0, groups, BATCH):
        column, keys, _, signs = batch(
            m, first_group + start, k0, k1, K, NNZ, N_TILES, LOG_GROUP, LOG_CHUNK, WHOLE, KEYS, SIGNS, FORWARD=True
        )
        for chunk in range(tl.minimum(BATCH, groups - start)):
            which = (t % KEYS)[None, :]
            row = t * B + permute(e & (B - 1), tl.reshape(from_batch(keys, chunk, which), TILE), LOG_CHUNK)
            word = tl.reshape(from_batch(signs, chunk, ((e >> 5) % SIGNS)[None, :]), TILE)
            offset = stay(row.to(tl.int64) * (stride_yr // ALIGN))
            sign = stay(((word >> (e & 31)) << 31 | 0x3F800000).to(tl.float32, bitcast=True))
            address = y + (offset * ALIGN)[:, None] + (v * stride_yv)[None, :]
            z = tl.load(address) if EVEN else tl.load(address, mask=live[None, :], other=0.0)
            z = tl.sum(tl.reshape(z.to(tl.float32) * sign[:, None], NNZ, B, V), 0) * NNZ**-0.5
            j = tl.max(tl.where(tl.arange(0, BATCH) == chunk, column, -1), 0) - feature_offset + i
            address = out + (j * stride_of)[:, None] + (v * stride_ov)[None, :]
            mask = ((j >= 0) & (j < d))[:, None] & live[None, :]
            if ACCUMULATE:
                z += tl.load(address, mask=mask)
            tl.store(address, z.to(out.dtype.element_ty), mask=mask)
