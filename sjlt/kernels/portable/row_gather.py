"""Kernels for many data vectors that are contiguous in memory, such as the columns of a row-major A in S A.

A program owns (tile, block of vectors) and reads only the chunks of its tile: each of the tile's 128 rows adds its one
row of A from the chunk, a run of consecutive numbers, with its sign. A row of A is read nnz times, all but the first
time from the L1 cache; from nnz 8 on, time is proportional to these reads. On tensor cores the data crosses shared
memory transposed, which takes 1.7 times the memory floor where this takes 1.27 (H200, fp32, nnz 4), 2.6 against 2.2
with nnz 8, and 3.3 against 4.4 with nnz 16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .entry_generation import GROUPS_PER_STEP, TILE, entries, groups_of_split, pin_layout, step_words, word_of_rows
from .law import permute, seed_words
from .program import rows_of_tile, stack_tile_and_vectors, start_dependents, store_result, store_sums, tile_and_vectors


@triton.jit
def _prefetch(x, first, chunk, d, stride_xf, v, LOG_CHUNK: tl.constexpr):
    """Prefetch a chunk's rows, at the program's vectors, into the L2 cache: no register waits for it."""
    V: tl.constexpr = v.shape[0]
    SECTORS: tl.constexpr = V * x.dtype.element_ty.primitive_bitwidth // 256
    p = tl.arange(0, SECTORS << LOG_CHUNK)
    j = tl.gather(first, p * 0 + chunk, 0) + p // SECTORS
    j = tl.minimum(tl.maximum(j, 0), d - 1)
    address = x + j * stride_xf + tl.min(v, 0) + p % SECTORS * (V // SECTORS)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], tl.int32, False, 1)


@triton.jit(do_not_specialize=["seed", "feature_offset", "groups_per_split"])
def project_row_gather(
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
    GEOMETRY: tl.constexpr,
    BLOCK_VECTORS: tl.constexpr,
    UNMASKED: tl.constexpr,
    ALIGN: tl.constexpr,
    CHUNKED_SUM: tl.constexpr,
    PREFETCH: tl.constexpr,
    SINGLE_SPLIT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PROGRAMMATIC_LAUNCH: tl.constexpr,
):
    """out[split, v, r] = sum over a split's columns j of x[v, j] S[r, j]; grid (fused * n_tiles * blocks of
    vectors, splits).

    Arguments are as in `project_tensor_core`. UNMASKED : in addition, BLOCK_VECTORS divides n.  ALIGN : divides
    stride_xf; the number of consecutive vectors that one access may cover.  CHUNKED_SUM : the sums over each step are
    added to a total.
    """
    LOG_CHUNK: tl.constexpr = GEOMETRY.log_chunk
    start_dependents(PROGRAMMATIC_LAUNCH)
    k0, k1 = seed_words(seed)
    stack, m, v = stack_tile_and_vectors(GEOMETRY, BLOCK_VECTORS)
    split = tl.program_id(1).to(tl.int64)
    first_group, groups = groups_of_split(split, groups_per_split, feature_offset, d, GEOMETRY)

    acc = tl.zeros((TILE, BLOCK_VECTORS), tl.float32)
    total = tl.zeros((TILE, BLOCK_VECTORS), tl.float32)
    for start in range(0, groups, GROUPS_PER_STEP):
        column, words = step_words(m, first_group + start, k0, k1, GEOMETRY, stack=stack)
        first = column - feature_offset
        column = tl.broadcast_to(column[None, :], 4, GROUPS_PER_STEP)
        for chunk in range(tl.minimum(GROUPS_PER_STEP, groups - start)):
            if PREFETCH:
                _prefetch(x, first, tl.minimum(chunk + 1, GROUPS_PER_STEP - 1), d, stride_xf, v, LOG_CHUNK)
            i, negative = entries(chunk, words, m, GEOMETRY, 1)
            i, negative = tl.reshape(i, TILE), tl.reshape(negative, TILE)
            j = tl.reshape(tl.gather(column, tl.full([4, GROUPS_PER_STEP], 0, tl.int32) + chunk, 1), TILE)
            found = (j >= 0) & (i < (1 << LOG_CHUNK))
            j = j + i.to(tl.int64) - feature_offset
            offset = j * (stride_xf // ALIGN)
            if not UNMASKED:
                offset = tl.where(found & (j >= 0) & (j < d), offset, -1)
            offset = pin_layout(offset)  # else each thread of a row would compute it again
            sign = pin_layout((negative << 31 | 0x3F800000).to(tl.float32, bitcast=True))
            address = x + (offset * ALIGN)[:, None] + (v * stride_xv)[None, :]
            if UNMASKED:
                z = tl.load(address)
            else:
                z = tl.load(address, mask=(offset >= 0)[:, None] & (v < n)[None, :], other=0.0)
            acc += z.to(tl.float32) * sign[:, None]
        if CHUNKED_SUM:
            total += acc
            acc = tl.zeros((TILE, BLOCK_VECTORS), tl.float32)
    if CHUNKED_SUM:
        acc = total

    tile_row, tile_end = rows_of_tile(m, GEOMETRY)
    if GEOMETRY.fused > 1:
        out += stack.to(tl.int64) * GEOMETRY.k * stride_or
    r = tl.arange(0, TILE)
    keep = (tile_row + r < tile_end)[:, None] & (v < n)[None, :]
    out += split * stride_os + (tile_row + r)[:, None] * stride_or + v[None, :] * stride_ov
    store_sums(acc, out, keep, GEOMETRY.scale, SINGLE_SPLIT, ACCUMULATE)


@triton.jit(do_not_specialize=["seed", "feature_offset", "groups_per_split"])
def adjoint_row_gather(
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
    GEOMETRY: tl.constexpr,
    BLOCK_VECTORS: tl.constexpr,
    UNMASKED: tl.constexpr,
    ALIGN: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """out[v, j] = sum over rows r of y[v, r] S[r, j]; grid (n_tiles * blocks of vectors, splits of the columns).

    For power-of-two geometries only. A program writes the columns of the chunks that meet its tile; the tile's rows of
    y stay in the L1 cache. UNMASKED : BLOCK_VECTORS divides n.
    """
    tl.static_assert(GEOMETRY.power_of_two)
    LOG_CHUNK: tl.constexpr = GEOMETRY.log_chunk
    NNZ: tl.constexpr = GEOMETRY.nnz
    B: tl.constexpr = 1 << LOG_CHUNK
    k0, k1 = seed_words(seed)
    m, v = tile_and_vectors(GEOMETRY.n_tiles, BLOCK_VECTORS)
    m = m.to(tl.uint32)
    first_group, groups = groups_of_split(tl.program_id(1), groups_per_split, feature_offset, d, GEOMETRY)
    y += m.to(tl.int64) * TILE * stride_yr
    live = v < n
    e = tl.arange(0, TILE).to(tl.uint32)  # t B + i: sub-block and place
    t = e >> LOG_CHUNK
    i = tl.arange(0, B)
    for start in range(0, groups, GROUPS_PER_STEP):
        column, words = step_words(m, first_group + start, k0, k1, GEOMETRY, ROW_OF_PLACE=True)
        keys, _, signs = words
        for chunk in range(tl.minimum(GROUPS_PER_STEP, groups - start)):
            which = (t % GEOMETRY.n_keys)[None, :]
            row = t * B + permute(e & (B - 1), tl.reshape(word_of_rows(keys, chunk, which), TILE), LOG_CHUNK)
            word = tl.reshape(word_of_rows(signs, chunk, ((e >> 5) % GEOMETRY.n_sign_words)[None, :]), TILE)
            offset = pin_layout(row.to(tl.int64) * (stride_yr // ALIGN))
            sign = pin_layout(((word >> (e & 31)) << 31 | 0x3F800000).to(tl.float32, bitcast=True))
            address = y + (offset * ALIGN)[:, None] + (v * stride_yv)[None, :]
            z = tl.load(address) if UNMASKED else tl.load(address, mask=live[None, :], other=0.0)
            z = tl.sum(tl.reshape(z.to(tl.float32) * sign[:, None], NNZ, B, BLOCK_VECTORS), 0) * GEOMETRY.scale
            j = tl.max(tl.where(tl.arange(0, GROUPS_PER_STEP) == chunk, column, -1), 0) - feature_offset + i
            address = out + (j * stride_of)[:, None] + (v * stride_ov)[None, :]
            store_result(z, address, ((j >= 0) & (j < d))[:, None] & live[None, :], ACCUMULATE)
