"""Kernels for many data vectors that are contiguous in memory, such as the columns of a row-major A in S A.

A program owns a tile and a block of vectors, and reads only the chunks that meet its tile. For each chunk, each of the
tile's 128 rows adds one row of A, contiguous in memory, with its sign. Each row of A is read nnz times, all but the
first time from the L1 cache; from nnz 8 on, these reads dominate. Tensor cores need the data transposed through shared
memory, which takes 1.7 times the memory floor where this takes 1.27 (H200, fp32, nnz 4), 2.6 compared with 2.2 for nnz
8, and 3.3 compared with 4.4 for nnz 16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .entry_generation import GROUPS_PER_STEP, TILE, entries, groups_of_split, pin_layout, step_words, word_of_rows
from .law import permute, seed_words
from .program import (
    known_multiple,
    rows_of_tile,
    stack_tile_and_vectors,
    start_dependents,
    store_result,
    store_sums,
    tile_and_vectors,
)


@triton.jit
def _prefetch(x, first, chunk, d, stride_xf, v, LOG_CHUNK: tl.constexpr):
    """Prefetch a chunk's rows of A, at vectors v, into the L2 cache; this occupies no registers.

    first : the chunks' first columns in the data.
    """
    BLOCK_VECTORS: tl.constexpr = v.shape[0]
    SECTORS: tl.constexpr = BLOCK_VECTORS * x.dtype.element_ty.primitive_bitwidth // 256  # of 32 bytes, per row
    e = tl.arange(0, SECTORS << LOG_CHUNK)
    j = tl.gather(first, e * 0 + chunk, 0) + e // SECTORS
    j = tl.minimum(tl.maximum(j, 0), d - 1)
    address = x + j * stride_xf + tl.min(v, 0) + e % SECTORS * (BLOCK_VECTORS // SECTORS)
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
    """out[split, v, r] = sum over the split's columns j of x[v, j] S[r, j].

    Grid: (fused * n_tiles * blocks of vectors, splits).

    UNMASKED : all columns of all groups exist, and BLOCK_VECTORS divides n.  ALIGN : the number of consecutive vectors
    that one access may cover; divides n and stride_xf.  CHUNKED_SUM : the sums of each step are added to a total.
    Other arguments are as in `project_tensor_core`.
    """
    LOG_CHUNK: tl.constexpr = GEOMETRY.log_chunk
    start_dependents(PROGRAMMATIC_LAUNCH)
    k0, k1 = seed_words(seed)
    stack, m, v = stack_tile_and_vectors(GEOMETRY, BLOCK_VECTORS)
    n = known_multiple(n, ALIGN)
    split = tl.program_id(1).to(tl.int64)
    first_group, groups = groups_of_split(split, groups_per_split, feature_offset, d, GEOMETRY)

    acc = tl.zeros((TILE, BLOCK_VECTORS), tl.float32)
    total = tl.zeros((TILE, BLOCK_VECTORS), tl.float32)
    for start in range(0, groups, GROUPS_PER_STEP):
        chunk_columns, words = step_words(m, first_group + start, k0, k1, GEOMETRY, stack=stack)
        first = chunk_columns - feature_offset
        chunk_columns = tl.broadcast_to(chunk_columns[None, :], 4, GROUPS_PER_STEP)
        for chunk in range(tl.minimum(GROUPS_PER_STEP, groups - start)):
            if PREFETCH:
                _prefetch(x, first, tl.minimum(chunk + 1, GROUPS_PER_STEP - 1), d, stride_xf, v, LOG_CHUNK)
            i, negative = entries(chunk, words, m, GEOMETRY, 1)
            i, negative = tl.reshape(i, TILE), tl.reshape(negative, TILE)
            j = tl.reshape(tl.gather(chunk_columns, tl.full([4, GROUPS_PER_STEP], 0, tl.int32) + chunk, 1), TILE)
            found = (j >= 0) & (i < (1 << LOG_CHUNK))
            j = j + i.to(tl.int64) - feature_offset
            offset = j * (stride_xf // ALIGN)
            if not UNMASKED:
                offset = tl.where(found & (j >= 0) & (j < d), offset, -1)
            offset = pin_layout(offset)  # otherwise every thread of a row computes it again
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

    tile_begin, tile_end = rows_of_tile(m, GEOMETRY)
    if GEOMETRY.fused > 1:
        out += stack.to(tl.int64) * GEOMETRY.k * stride_or
    r = tl.arange(0, TILE)
    keep = (tile_begin + r < tile_end)[:, None] & (v < n)[None, :]
    out += split * stride_os + (tile_begin + r)[:, None] * stride_or + v[None, :] * stride_ov
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

    Power-of-two geometries only. A program writes the columns of the chunks that meet its tile; the tile's rows of Yᵀ
    stay in the L1 cache.  UNMASKED : BLOCK_VECTORS divides n.  ALIGN : divides n, stride_yr and stride_of.
    """
    tl.static_assert(GEOMETRY.power_of_two)
    LOG_CHUNK: tl.constexpr = GEOMETRY.log_chunk
    NNZ: tl.constexpr = GEOMETRY.nnz
    CHUNK: tl.constexpr = 1 << LOG_CHUNK
    k0, k1 = seed_words(seed)
    m, v = tile_and_vectors(GEOMETRY.n_tiles, BLOCK_VECTORS)
    m = m.to(tl.uint32)
    n, stride_of = known_multiple(n, ALIGN), known_multiple(stride_of, ALIGN)
    first_group, groups = groups_of_split(tl.program_id(1), groups_per_split, feature_offset, d, GEOMETRY)
    y += m.to(tl.int64) * TILE * stride_yr
    live = v < n
    e = tl.arange(0, TILE).to(tl.uint32)  # the entry of sub-block t and column i of a chunk: t CHUNK + i
    t = e >> LOG_CHUNK
    i = tl.arange(0, CHUNK)
    for start in range(0, groups, GROUPS_PER_STEP):
        chunk_columns, words = step_words(m, first_group + start, k0, k1, GEOMETRY, COLUMN_TO_ROW=True)
        keys, _, signs = words
        for chunk in range(tl.minimum(GROUPS_PER_STEP, groups - start)):
            which = (t % GEOMETRY.n_keys)[None, :]
            row = t * CHUNK + permute(e & (CHUNK - 1), tl.reshape(word_of_rows(keys, chunk, which), TILE), LOG_CHUNK)
            word = tl.reshape(word_of_rows(signs, chunk, ((e >> 5) % GEOMETRY.n_sign_words)[None, :]), TILE)
            offset = pin_layout(row.to(tl.int64) * (stride_yr // ALIGN))
            sign = pin_layout(((word >> (e & 31)) << 31 | 0x3F800000).to(tl.float32, bitcast=True))
            address = y + (offset * ALIGN)[:, None] + (v * stride_yv)[None, :]
            z = tl.load(address) if UNMASKED else tl.load(address, mask=live[None, :], other=0.0)
            z = tl.sum(tl.reshape(z.to(tl.float32) * sign[:, None], NNZ, CHUNK, BLOCK_VECTORS), 0) * GEOMETRY.scale
            first = tl.max(tl.where(tl.arange(0, GROUPS_PER_STEP) == chunk, chunk_columns, -1), 0)
            j = first - feature_offset + i
            address = out + (j * stride_of)[:, None] + (v * stride_ov)[None, :]
            store_result(z, address, ((j >= 0) & (j < d))[:, None] & live[None, :], ACCUMULATE)
