"""Kernels for many data vectors: tensor cores multiply a block of them by one-hot tiles of the sketch.

A chunk of B = 2^log_chunk features meets one tile of at most 128 rows. A program that owns (tile, block of vectors)
therefore reads only the chunks of its tile, and all programs together read the data once. `entry_generation` makes the
entries; `fp32_split` multiplies fp32 data in 16-bit parts.
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


@triton.jit
def _one_hot(i, negative, LOG_CHUNK: tl.constexpr, DTYPE: tl.constexpr):
    """The entries, +-1 or 0, of U chunks in their tile, from `entries`: [U B, 128]."""
    B: tl.constexpr = 1 << LOG_CHUNK
    U: tl.constexpr = i.shape[0]
    one = 0x3C00 if tl.float16 == DTYPE else 0x3F80
    value = negative << 15 | one
    j = tl.arange(0, B).to(tl.uint32)[None, :, None]
    tile = tl.where(i[:, None, :] == j, value[:, None, :], 0)
    return tl.reshape(tile.to(tl.uint16), U * B, TILE).to(DTYPE, bitcast=True)


@triton.jit
def _one_hot_rows(i, negative, LOG_CHUNK: tl.constexpr, DTYPE: tl.constexpr):
    """The same as [128, U B], made from pairs of features: a thread makes what it passes to the tensor cores."""
    B: tl.constexpr = 1 << LOG_CHUNK
    U: tl.constexpr = i.shape[0]
    one = 0x3C00 if tl.float16 == DTYPE else 0x3F80
    pair = (negative << 15 | one) << ((i & 1) << 4)
    j = tl.arange(0, B // 2).to(tl.uint32)[None, :, None]
    tile = tl.where((i >> 1)[:, None, :] == j, pair[:, None, :], 0)
    tile = tl.trans(tl.reshape(tile, U * B // 2, TILE))
    tile = tl.join(tile.to(tl.uint16), (tile >> 16).to(tl.uint16))
    return tl.reshape(tile, TILE, U * B).to(DTYPE, bitcast=True)


@triton.jit
def _load_chunks(
    data, v, column, chunk, LOG_CHUNK: tl.constexpr, U: tl.constexpr, UNMASKED: tl.constexpr, ALIGN: tl.constexpr
):
    """X at vectors v and the features of the step's chunks `chunk` to `chunk` + U - 1: [V, U B]."""
    x, n, d, stride_xv, stride_xf, feature_offset = data
    B: tl.constexpr = 1 << LOG_CHUNK
    k = tl.arange(0, U * B)
    j = tl.gather(column, chunk + (k >> LOG_CHUNK), 0)
    found = j >= 0
    j = j - feature_offset + (k & (B - 1))
    if ALIGN > 1:
        j = tl.max_contiguous(tl.multiple_of(j, ALIGN), ALIGN)
    address = x + v[:, None] * stride_xv + (j * stride_xf)[None, :]
    if UNMASKED:
        z = tl.load(address)
    else:
        known = found & (j >= 0) & (j < d)
        if ALIGN > 1:
            known = tl.max_constancy(known, ALIGN)
        z = tl.load(address, mask=(v < n)[:, None] & known[None, :], other=0.0)
    return z


@triton.jit
def _sum_of_chunks(
    data, v, scale, stack, m, first_group, groups, k0, k1, GEOMETRY: tl.constexpr, U: tl.constexpr,
    UNMASKED: tl.constexpr, ALIGN: tl.constexpr, CHUNKED_SUM: tl.constexpr, MODE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """X Sᵀ for tile m of a stack, summed over `groups` groups from first_group on: [V, 128] fp32. U is CHUNKS_PER_DOT.

    16-bit data is multiplied as (S Xᵀ)ᵀ. Tensor cores read the second factor, the data, from shared memory, where it
    was loaded to, and the first factor, the entries, from registers. The other way round, entries pass through shared
    memory, which then binds: 1.22 times the memory floor where this takes 1.18, and 1.88 where it takes 1.10 with nnz 1
    (H200, without the Hopper kernels). Data that is split into parts passes through registers, so it is the first
    factor; likewise in other geometries, where entries cost more to make.
    """
    V: tl.constexpr = v.shape[0]
    LOG_CHUNK: tl.constexpr = GEOMETRY.log_chunk
    SWAP_OPERANDS: tl.constexpr = MODE == NATIVE and GEOMETRY.power_of_two and LOG_CHUNK > 0
    HALF: tl.constexpr = tl.float16 if MODE == FP16_PAIR else tl.bfloat16
    DTYPE: tl.constexpr = data[0].dtype.element_ty if MODE == NATIVE else HALF
    # With CHUNKED_SUM only the first groups of each step's words are used.
    GROUPS: tl.constexpr = max(CHUNKS_PER_SUM, U) if CHUNKED_SUM else GROUPS_PER_STEP
    total = tl.zeros((TILE, V) if SWAP_OPERANDS else (V, TILE), tl.float32)
    acc = tl.zeros_like(total)
    for start in range(0, groups, GROUPS):
        column, words = step_words(m, first_group + start, k0, k1, GEOMETRY, stack=stack)
        for chunk in range(0, tl.minimum(GROUPS, groups - start), U):
            z = _load_chunks(data, v, column, chunk, LOG_CHUNK, U, UNMASKED, ALIGN)
            i, negative = entries(chunk, words, m, GEOMETRY, U)
            if SWAP_OPERANDS:
                tile = _one_hot_rows(i, negative, LOG_CHUNK, DTYPE)
                # `scale` is a 1 that the compiler does not know. Where nothing uses the sums in the loop, Triton 3.6
                # and 3.7 let the tensor cores read the entries while the next step overwrites them: wrong results.
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
    CHUNKED_SUM: tl.constexpr,
    MODE: tl.constexpr,
    SINGLE_SPLIT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PROGRAMMATIC_LAUNCH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """out[split, v, r] = sum over a split's columns j of x[v, j] S[r, j]; grid (fused * n_tiles * blocks of
    vectors, splits).

    x : (n, d).  out : (splits, n, k) fp32 sums or, with SINGLE_SPLIT, the result (n, k), scaled, added to `out` if
    ACCUMULATE, and rounded once.  scales : (n,) fp32 from `scale_vectors`, read if MODE is FP16_PAIR.  UNMASKED : all
    columns of all groups exist.  ALIGN : divides d, the offset and the row stride.  CHUNKED_SUM : tensor cores sum
    CHUNKS_PER_SUM chunks at a time; these sums are added in fp32.
    """
    start_dependents(PROGRAMMATIC_LAUNCH)
    k0, k1 = seed_words(seed)
    stack, m, rows_v = stack_tile_and_vectors(GEOMETRY, BLOCK_VECTORS)
    v = tl.minimum(rows_v, n - 1) if UNMASKED else rows_v
    stride_xv, d = known_multiple(stride_xv, ALIGN), known_multiple(d, ALIGN)
    first_group, groups = groups_of_split(tl.program_id(1), groups_per_split, feature_offset, d, GEOMETRY)

    scale = tl.minimum(groups_per_split, 1).to(tl.float32)  # 1
    if MODE == FP16_PAIR:
        # Loaded, like all that the data is multiplied by in the loop: only then the compiler moves the data from shared
        # memory straight to the tensor cores' registers.
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

    tile_row, tile_end = rows_of_tile(m, GEOMETRY)
    if GEOMETRY.fused > 1:
        out += stack.to(tl.int64) * GEOMETRY.k * stride_or
    r = tl.arange(0, TILE)
    keep = (rows_v < n)[:, None] & (tile_row + r < tile_end)[None, :]
    out += tl.program_id(1).to(tl.int64) * stride_os + rows_v[:, None] * stride_ov + (tile_row + r)[None, :] * stride_or
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
    MODE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """out[v, j] = sum over rows r of y[v, r] S[r, j]; grid (n_tiles * blocks of vectors, splits of the columns).

    y : (n, k).  out : (n, d).  A program holds the 128 components of one tile of its vectors, and writes the columns of
    the chunks that meet the tile: every element of out is written once.
    """
    LOG_CHUNK: tl.constexpr = GEOMETRY.log_chunk
    B: tl.constexpr = 1 << LOG_CHUNK
    U: tl.constexpr = CHUNKS_PER_DOT
    k0, k1 = seed_words(seed)
    m, v = tile_and_vectors(GEOMETRY.n_tiles, BLOCK_VECTORS)
    m = m.to(tl.uint32)
    stride_ov, d = known_multiple(stride_ov, ALIGN), known_multiple(d, ALIGN)
    first_group, groups = groups_of_split(tl.program_id(1), groups_per_split, feature_offset, d, GEOMETRY)

    tile_row, tile_end = rows_of_tile(m, GEOMETRY)
    r = tl.arange(0, TILE)
    keep = (v < n)[:, None] & (tile_row + r < tile_end)[None, :]
    z = tl.load(y + v[:, None] * stride_yv + (tile_row + r)[None, :] * stride_yr, mask=keep, other=0.0)
    HALF: tl.constexpr = tl.float16 if MODE == FP16_PAIR else tl.bfloat16
    DTYPE: tl.constexpr = y.dtype.element_ty if MODE == NATIVE else HALF
    high, low, scale = split_vectors(z, MODE)
    for start in range(0, groups, GROUPS_PER_STEP):
        column, words = step_words(m, first_group + start, k0, k1, GEOMETRY)
        for chunk in range(0, tl.minimum(GROUPS_PER_STEP, groups - start), U):
            i, negative = entries(chunk, words, m, GEOMETRY, U)
            tile = tl.trans(_one_hot(i, negative, LOG_CHUNK, DTYPE))
            acc = multiply_vectors(high, low, scale, tile, MODE, INTERPRETED) * GEOMETRY.scale
            k = tl.arange(0, U * B)
            j = tl.gather(column, chunk + (k >> LOG_CHUNK), 0)
            known = (j >= 0) & (chunk + (k >> LOG_CHUNK) < groups - start)
            j = j - feature_offset + (k & (B - 1))
            known &= (j >= 0) & (j < d)
            if ALIGN > 1:
                j = tl.max_contiguous(tl.multiple_of(j, ALIGN), ALIGN)
                known = tl.max_constancy(known, ALIGN)
            address = out + v[:, None] * stride_ov + (j * stride_of)[None, :]
            store_result(acc, address, (v < n)[:, None] & known[None, :], ACCUMULATE)
