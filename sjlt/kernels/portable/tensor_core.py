"""Kernels for many data vectors: tensor cores multiply blocks of vectors by one-hot blocks of the sketch.

A chunk of 2^log_chunk columns meets one tile of at most 128 rows. A program owns a tile and a block of vectors, so it
reads only the chunks that meet its tile, and all programs together read the data once. `entry_generation` generates the
entries; `fp32_split` multiplies fp32 data as 16-bit parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..config import arithmetic
from .entry_generation import GROUPS_PER_STEP, TILE, entries, groups_of_split, step_words
from .fp32_split import (
    BF16_TRIPLE,
    FP16_PAIR,
    NATIVE,
    dot,
    has_overflow,
    inverse,
    multiply_split,
    multiply_vectors,
    split_vectors,
)
from .law import seed_words
from .program import (
    known_multiple,
    rows_of_tile,
    stack_tile_and_vectors,
    start_dependents,
    store_result,
    store_sums,
    tile_and_vectors,
)

CHUNKS_PER_SUM = tl.constexpr(arithmetic.CHUNKS_PER_SUM)
ONE_FP16, ONE_BF16 = tl.constexpr(arithmetic.ONE_FP16), tl.constexpr(arithmetic.ONE_BF16)


@triton.jit
def _one_hot(i, negative, LOG_CHUNK: tl.constexpr, DTYPE: tl.constexpr):
    """The entries, +-1 or 0, of chunks in their tile: [columns of all chunks, 128].

    i, negative : [chunks, 128], from `entries`.
    """
    CHUNK: tl.constexpr = 1 << LOG_CHUNK
    one = ONE_FP16 if tl.float16 == DTYPE else ONE_BF16
    value = negative << 15 | one
    column = tl.arange(0, CHUNK).to(tl.uint32)[None, :, None]
    tile = tl.where(i[:, None, :] == column, value[:, None, :], 0)
    return tl.reshape(tile.to(tl.uint16), i.shape[0] * CHUNK, TILE).to(DTYPE, bitcast=True)


@triton.jit
def _one_hot_rows(i, negative, LOG_CHUNK: tl.constexpr, DTYPE: tl.constexpr):
    """The entries of `_one_hot`, transposed: [128, columns of all chunks].

    They are computed in pairs of columns, so that each thread computes what it passes to the tensor cores.
    """
    CHUNK: tl.constexpr = 1 << LOG_CHUNK
    COLUMNS: tl.constexpr = i.shape[0] * CHUNK
    one = ONE_FP16 if tl.float16 == DTYPE else ONE_BF16
    pair = (negative << 15 | one) << ((i & 1) << 4)
    column_pair = tl.arange(0, CHUNK // 2).to(tl.uint32)[None, :, None]
    tile = tl.where((i >> 1)[:, None, :] == column_pair, pair[:, None, :], 0)
    tile = tl.trans(tl.reshape(tile, COLUMNS // 2, TILE))
    tile = tl.join(tile.to(tl.uint16), (tile >> 16).to(tl.uint16))
    return tl.reshape(tile, TILE, COLUMNS).to(DTYPE, bitcast=True)


@triton.jit
def _load_chunks(
    data, v, chunk_columns, chunk, LOG_CHUNK: tl.constexpr, CHUNKS: tl.constexpr, UNMASKED: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """X at vectors v and the columns of CHUNKS of the step's chunks, from index `chunk` on: [vectors, columns].

    chunk_columns : from `step_words`.
    """
    x, n, d, stride_xv, stride_xf, feature_offset = data
    CHUNK: tl.constexpr = 1 << LOG_CHUNK
    e = tl.arange(0, CHUNKS * CHUNK)
    j = tl.gather(chunk_columns, chunk + (e >> LOG_CHUNK), 0)
    found = j >= 0
    j = j - feature_offset + (e & (CHUNK - 1))
    if ALIGN > 1:
        j = tl.max_contiguous(tl.multiple_of(j, ALIGN), ALIGN)
    address = x + v[:, None] * stride_xv + (j * stride_xf)[None, :]
    if UNMASKED:
        z = tl.load(address)
    else:
        mask = found & (j >= 0) & (j < d)
        if ALIGN > 1:
            mask = tl.max_constancy(mask, ALIGN)
        z = tl.load(address, mask=(v < n)[:, None] & mask[None, :], other=0.0)
    return z


@triton.jit
def _sum_of_chunks(
    data, v, scale, stack, m, first_group, groups, k0, k1, GEOMETRY: tl.constexpr, CHUNKS_PER_DOT: tl.constexpr,
    UNMASKED: tl.constexpr, ALIGN: tl.constexpr, CHUNKED_SUM: tl.constexpr, MODE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """X Sᵀ for tile m of a stack, summed over `groups` groups from first_group on: [vectors, 128] fp32.

    16-bit data is multiplied as (S Xᵀ)ᵀ: tensor cores read the second operand, the data, from shared memory, where
    loads put it, and the first operand, the entries, from registers. With the operands in the other order, entries pass
    through shared memory, whose bandwidth then limits the kernel: 1.22 times the memory floor instead of 1.18, with
    nnz 1 1.88 instead of 1.10 (H200, without the Hopper kernels). Data that is split into parts passes through
    registers, so it is the first operand; likewise in geometries that are not powers of two, whose entries cost more.
    """
    BLOCK_VECTORS: tl.constexpr = v.shape[0]
    LOG_CHUNK: tl.constexpr = GEOMETRY.log_chunk
    SWAP_OPERANDS: tl.constexpr = MODE == NATIVE and GEOMETRY.power_of_two and LOG_CHUNK > 0
    HALF: tl.constexpr = tl.float16 if MODE == FP16_PAIR else tl.bfloat16
    DTYPE: tl.constexpr = data[0].dtype.element_ty if MODE == NATIVE else HALF
    # With CHUNKED_SUM, a step may use only the first of the groups that `step_words` derives words for.
    GROUPS: tl.constexpr = max(CHUNKS_PER_SUM, CHUNKS_PER_DOT) if CHUNKED_SUM else GROUPS_PER_STEP
    total = tl.zeros((TILE, BLOCK_VECTORS) if SWAP_OPERANDS else (BLOCK_VECTORS, TILE), tl.float32)
    acc = tl.zeros_like(total)
    for start in range(0, groups, GROUPS):
        chunk_columns, words = step_words(m, first_group + start, k0, k1, GEOMETRY, stack=stack)
        for chunk in range(0, tl.minimum(GROUPS, groups - start), CHUNKS_PER_DOT):
            z = _load_chunks(data, v, chunk_columns, chunk, LOG_CHUNK, CHUNKS_PER_DOT, UNMASKED, ALIGN)
            i, negative = entries(chunk, words, m, GEOMETRY, CHUNKS_PER_DOT)
            if SWAP_OPERANDS:
                tile = _one_hot_rows(i, negative, LOG_CHUNK, DTYPE)
                # `scale` is 1, which the compiler cannot know. Unless the loop uses the sums, Triton 3.6 and 3.7 let
                # tensor cores read the entries while the next step overwrites them, and results are wrong.
                acc = dot(tile, tl.trans(z), acc * scale, INTERPRETED)
            else:
                tile = _one_hot(i, negative, LOG_CHUNK, DTYPE)
                acc = multiply_split(z, scale, tile, acc, MODE, False, INTERPRETED)
        if CHUNKED_SUM:
            total += acc
            acc = tl.zeros_like(total)
    if CHUNKED_SUM:
        acc = total
    return tl.trans(acc) if SWAP_OPERANDS else acc


@triton.jit(do_not_specialize=["seed", "feature_offset", "groups_per_split"])
def project_tensor_core(
    x,
    out,
    scales,
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
    CHUNKS_PER_DOT: tl.constexpr,
    UNMASKED: tl.constexpr,
    ALIGN: tl.constexpr,
    VECTOR_ALIGN: tl.constexpr,
    CHUNKED_SUM: tl.constexpr,
    MODE: tl.constexpr,
    SINGLE_SPLIT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PROGRAMMATIC_LAUNCH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """out[split, v, r] = sum over the split's columns j of x[v, j] S[r, j].

    Grid: (fused * n_tiles * blocks of vectors, splits).

    x : (n, d).  out : (splits, n, k) fp32 sums or, with SINGLE_SPLIT, the result (n, k): scaled, added to `out` if
    ACCUMULATE, and rounded once.  scales : (n,) fp32 from `scale_vectors`, read if MODE is FP16_PAIR.  UNMASKED : all
    columns of all groups exist.  ALIGN : divides d, the offset and the row stride.  VECTOR_ALIGN : divides n and
    stride_xf unless it is 1.  CHUNKS_PER_DOT : chunks per `tl.dot`.  CHUNKED_SUM : tensor cores sum CHUNKS_PER_SUM
    chunks at a time; these sums are added in fp32.
    """
    start_dependents(PROGRAMMATIC_LAUNCH)
    k0, k1 = seed_words(seed)
    stack, m, rows_v = stack_tile_and_vectors(GEOMETRY, BLOCK_VECTORS)
    v = tl.minimum(rows_v, n - 1) if UNMASKED else rows_v
    stride_xv, d = known_multiple(stride_xv, ALIGN), known_multiple(d, ALIGN)
    stride_xf, n = known_multiple(stride_xf, VECTOR_ALIGN), known_multiple(n, VECTOR_ALIGN)
    first_group, groups = groups_of_split(tl.program_id(1), groups_per_split, feature_offset, d, GEOMETRY)

    scale = tl.minimum(groups_per_split, 1).to(tl.float32)  # 1
    if MODE == FP16_PAIR:
        # The compiler moves data from shared memory straight to the registers of a tensor-core operand only if all that
        # multiplies the data in the loop is loaded.
        scale = tl.load(scales + v, mask=v < n, other=1.0)
    data = (x, n, d, stride_xv, stride_xf, feature_offset)
    acc = _sum_of_chunks(
        data, v, scale, stack, m, first_group, groups, k0, k1, GEOMETRY, CHUNKS_PER_DOT, UNMASKED, ALIGN, CHUNKED_SUM,
        MODE, INTERPRETED,
    )  # fmt: skip
    if MODE == FP16_PAIR:
        acc *= inverse(scale)[:, None]
        if has_overflow(acc):
            acc = _sum_of_chunks(
                data, v, 1.0, stack, m, first_group, groups, k0, k1, GEOMETRY, CHUNKS_PER_DOT, UNMASKED, ALIGN,
                CHUNKED_SUM, BF16_TRIPLE, INTERPRETED,
            )  # fmt: skip

    tile_begin, tile_end = rows_of_tile(m, GEOMETRY)
    if GEOMETRY.fused > 1:
        out += stack.to(tl.int64) * GEOMETRY.k * stride_or
    r = tl.arange(0, TILE)
    keep = (rows_v < n)[:, None] & (tile_begin + r < tile_end)[None, :]
    split_offset = tl.program_id(1).to(tl.int64) * stride_os
    out += split_offset + rows_v[:, None] * stride_ov + (tile_begin + r)[None, :] * stride_or
    store_sums(acc, out, keep, GEOMETRY.scale, SINGLE_SPLIT, ACCUMULATE)


@triton.jit(do_not_specialize=["seed", "feature_offset", "groups_per_split"])
def adjoint_tensor_core(
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
    CHUNKS_PER_DOT: tl.constexpr,
    UNMASKED: tl.constexpr,
    ALIGN: tl.constexpr,
    VECTOR_ALIGN: tl.constexpr,
    MODE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """out[v, j] = sum over rows r of y[v, r] S[r, j]; grid (n_tiles * blocks of vectors, splits of the columns).

    y : (n, k).  out : (n, d).  A program holds its vectors' components in one tile, 128 at most, and writes the columns
    of the chunks that meet the tile, so every element of out is written once.  VECTOR_ALIGN : divides n, stride_yr
    and stride_of unless it is 1. Other arguments are as in `project_tensor_core`.
    """
    LOG_CHUNK: tl.constexpr = GEOMETRY.log_chunk
    CHUNK: tl.constexpr = 1 << LOG_CHUNK
    k0, k1 = seed_words(seed)
    m, v = tile_and_vectors(GEOMETRY.n_tiles, BLOCK_VECTORS)
    m = m.to(tl.uint32)
    stride_ov, d = known_multiple(stride_ov, ALIGN), known_multiple(d, ALIGN)
    stride_yr, stride_of = known_multiple(stride_yr, VECTOR_ALIGN), known_multiple(stride_of, VECTOR_ALIGN)
    n = known_multiple(n, VECTOR_ALIGN)
    first_group, groups = groups_of_split(tl.program_id(1), groups_per_split, feature_offset, d, GEOMETRY)

    tile_begin, tile_end = rows_of_tile(m, GEOMETRY)
    r = tl.arange(0, TILE)
    keep = (v < n)[:, None] & (tile_begin + r < tile_end)[None, :]
    z = tl.load(y + v[:, None] * stride_yv + (tile_begin + r)[None, :] * stride_yr, mask=keep, other=0.0)
    HALF: tl.constexpr = tl.float16 if MODE == FP16_PAIR else tl.bfloat16
    DTYPE: tl.constexpr = y.dtype.element_ty if MODE == NATIVE else HALF
    high, low, scale = split_vectors(z, MODE)
    for start in range(0, groups, GROUPS_PER_STEP):
        chunk_columns, words = step_words(m, first_group + start, k0, k1, GEOMETRY)
        for chunk in range(0, tl.minimum(GROUPS_PER_STEP, groups - start), CHUNKS_PER_DOT):
            i, negative = entries(chunk, words, m, GEOMETRY, CHUNKS_PER_DOT)
            tile = tl.trans(_one_hot(i, negative, LOG_CHUNK, DTYPE))
            acc = multiply_vectors(high, low, scale, tile, MODE, INTERPRETED) * GEOMETRY.scale
            e = tl.arange(0, CHUNKS_PER_DOT * CHUNK)
            j = tl.gather(chunk_columns, chunk + (e >> LOG_CHUNK), 0)
            mask = (j >= 0) & (chunk + (e >> LOG_CHUNK) < groups - start)
            j = j - feature_offset + (e & (CHUNK - 1))
            mask &= (j >= 0) & (j < d)
            if ALIGN > 1:
                j = tl.max_contiguous(tl.multiple_of(j, ALIGN), ALIGN)
                mask = tl.max_constancy(mask, ALIGN)
            address = out + v[:, None] * stride_ov + (j * stride_of)[None, :]
            store_result(acc, address, (v < n)[:, None] & mask[None, :], ACCUMULATE)
