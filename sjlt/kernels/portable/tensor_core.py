"""Kernels for many data vectors: tensor cores multiply a block of them by one-hot tiles of the sketch.

A chunk of B = 2^p features meets one tile of at most 128 rows, so a program that owns (tile, block of vectors) reads
only the chunks of its tile, and all programs together read the data once. Entries come by batches (see `batch`).

Data in fp32 is multiplied in parts (see `parts`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..config import exact as launch
from .entry_generation import BATCH, TILE, batch, entries, groups_of_split, rows_of_tile
from .fp32_split import (
    BF16_PAIR,
    BF16_TRIPLE,
    FP16_PAIR,
    NATIVE,
    dot,
    inverse,
    largest_of,
    multiply,
    pair_of,
    scale_of,
    truncated,
)
from .law import seed_words

PART = tl.constexpr(launch.PART)


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
    """The same as [128, U B], made of pairs of features: so a thread makes what it gives to the tensor cores."""
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
    x,
    v,
    n,
    d,
    stride_xv,
    stride_xf,
    column,
    chunk,
    offset,
    LOG_CHUNK: tl.constexpr,
    U: tl.constexpr,
    EVEN: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """x at vectors v and the features of chunks `chunk` .. `chunk` + U - 1 of the batch: [V, U B]."""
    B: tl.constexpr = 1 << LOG_CHUNK
    k = tl.arange(0, U * B)
    j = tl.gather(column, chunk + (k >> LOG_CHUNK), 0)
    found = j >= 0
    j = j - offset + (k & (B - 1))
    if ALIGN > 1:
        j = tl.max_contiguous(tl.multiple_of(j, ALIGN), ALIGN)
    address = x + v[:, None] * stride_xv + (j * stride_xf)[None, :]
    if EVEN:
        z = tl.load(address)
    else:
        known = found & (j >= 0) & (j < d)
        if ALIGN > 1:
            known = tl.max_constancy(known, ALIGN)
        z = tl.load(address, mask=(v < n)[:, None] & known[None, :], other=0.0)
    return z


@triton.jit
def _sum_of_chunks(
    x,
    n,
    d,
    stride_xv,
    stride_xf,
    v,
    scale,
    m,
    first_group,
    groups,
    offset,
    k0,
    k1,
    K: tl.constexpr,
    NNZ: tl.constexpr,
    N_TILES: tl.constexpr,
    LOG_GROUP: tl.constexpr,
    LOG_CHUNK: tl.constexpr,
    WHOLE: tl.constexpr,
    KEYS: tl.constexpr,
    SIGNS: tl.constexpr,
    U: tl.constexpr,
    EVEN: tl.constexpr,
    ALIGN: tl.constexpr,
    FOLD: tl.constexpr,
    MODE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The sum over groups first_group .. first_group + groups - 1 of x S' for tile m: [V, 128] fp32.

    Of 16-bit data it is made as (S x')': the tensor cores read the second factor, the data, where it is loaded to,
    shared memory, and the first, the entries, from registers. (The other way round, entries pass through shared memory
    and bind there: 1.22 times the memory floor where this takes 1.18, with nnz 1 1.88 and 1.10, H200 without the
    kernels for Hopper.) Data that is split into parts passes through registers, and is the first factor; so it is where
    entries cost more to make.
    """
    V: tl.constexpr = v.shape[0]
    ROWS_FIRST: tl.constexpr = MODE == NATIVE and WHOLE and LOG_CHUNK > 0
    HALF: tl.constexpr = tl.float16 if MODE == FP16_PAIR else tl.bfloat16
    DTYPE: tl.constexpr = x.dtype.element_ty if MODE == NATIVE else HALF
    SPAN: tl.constexpr = max(PART, U) if FOLD else BATCH  # chunks that take words, of the BATCH that have some
    total = tl.zeros((TILE, V) if ROWS_FIRST else (V, TILE), tl.float32)
    acc = tl.zeros_like(total)
    for start in range(0, groups, SPAN):
        column, keys, thetas, signs = batch(
            m, first_group + start, k0, k1, K, NNZ, N_TILES, LOG_GROUP, LOG_CHUNK, WHOLE, KEYS, SIGNS
        )
        for chunk in range(0, tl.minimum(SPAN, groups - start), U):
            z = _load_chunks(x, v, n, d, stride_xv, stride_xf, column, chunk, offset, LOG_CHUNK, U, EVEN, ALIGN)
            i, negative = entries(chunk, keys, thetas, signs, m, K, NNZ, N_TILES, LOG_CHUNK, WHOLE, U)
            if ROWS_FIRST:
                tile = _one_hot_rows(i, negative, LOG_CHUNK, DTYPE)
                # `scale` is a 1 that the compiler does not know. Where nothing uses the sums in the loop, Triton 3.6
                # and 3.7 let the tensor cores read the entries while the next step overwrites them (wrong results).
                acc = dot(tile, tl.trans(z), acc * scale, INTERPRETED)
            else:
                tile = _one_hot(i, negative, LOG_CHUNK, DTYPE)
                acc = multiply(z, scale, tile, acc, MODE, False, INTERPRETED)
        if FOLD:
            total += acc
            acc = tl.zeros_like(total)
    if FOLD:
        acc = total
    return tl.trans(acc) if ROWS_FIRST else acc


@triton.jit(do_not_specialize=["seed", "feature_offset", "groups_per_split"])
def project_tiles(
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
    K: tl.constexpr,
    NNZ: tl.constexpr,
    N_TILES: tl.constexpr,
    LOG_GROUP: tl.constexpr,
    LOG_CHUNK: tl.constexpr,
    WHOLE: tl.constexpr,
    KEYS: tl.constexpr,
    SIGNS: tl.constexpr,
    V: tl.constexpr,
    U: tl.constexpr,
    EVEN: tl.constexpr,
    ALIGN: tl.constexpr,
    FOLD: tl.constexpr,
    MODE: tl.constexpr,
    FINAL: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    OVERLAP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """out[split, v, r] = sum over a split's columns j of x[v, j] S[r, j]; grid (N_TILES * blocks of V vectors, splits).

    A partial sum (FINAL = False) is stored as it is, in fp32; else it is scaled, added to `out` where ACCUMULATE, and
    rounded to out's dtype. `scales` (n), of `scale_vectors`, is read where MODE is FP16_PAIR. FOLD : tensor cores sum
    PART chunks, whose sums are added in fp32. OVERLAP : see `reduce`.
    """
    LOG_WIDTH: tl.constexpr = LOG_GROUP + LOG_CHUNK  # columns of a group
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    k0, k1 = seed_words(seed)
    m = (tl.program_id(0) % N_TILES).to(tl.uint32)
    rows_v = (tl.program_id(0) // N_TILES).to(tl.int64) * V + tl.arange(0, V)
    v = tl.minimum(rows_v, n - 1) if EVEN else rows_v
    if ALIGN > 1:
        stride_xv = stride_xv // ALIGN * ALIGN  # for the compiler to see
        d = d // ALIGN * ALIGN
    first_group, groups = groups_of_split(tl.program_id(1), groups_per_split, feature_offset, d, LOG_WIDTH)

    scale = tl.minimum(groups_per_split, 1).to(tl.float32)  # 1
    if MODE == FP16_PAIR:
        # Loaded, as is all that the data is multiplied by in the loop: only then the compiler takes the data from
        # shared memory straight to the tensor cores' registers.
        scale = tl.load(scales + v, mask=v < n, other=1.0)
    acc = _sum_of_chunks(
        x, n, d, stride_xv, stride_xf, v, scale, m, first_group, groups, feature_offset, k0, k1,
        K, NNZ, N_TILES, LOG_GROUP, LOG_CHUNK, WHOLE, KEYS, SIGNS, U, EVEN, ALIGN, FOLD, MODE, INTERPRETED,
    )  # fmt: skip
    if MODE == FP16_PAIR:
        acc *= inverse(scale)[:, None]
        overflown = tl.max(tl.max((tl.abs(acc) < float("inf")).to(tl.int32) ^ 1, 1), 0)
        if overflown != 0:
            acc = _sum_of_chunks(
                x, n, d, stride_xv, stride_xf, v, 1.0, m, first_group, groups, feature_offset, k0, k1,
                K, NNZ, N_TILES, LOG_GROUP, LOG_CHUNK, WHOLE, KEYS, SIGNS, U, EVEN, ALIGN, FOLD, BF16_TRIPLE,
                INTERPRETED,
            )  # fmt: skip

    tile_row, tile_end = rows_of_tile(m, K, N_TILES)
    r = tl.arange(0, TILE)
    keep = (rows_v < n)[:, None] & (tile_row + r < tile_end)[None, :]
    out += tl.program_id(1).to(tl.int64) * stride_os + rows_v[:, None] * stride_ov + (tile_row + r)[None, :] * stride_or
    if FINAL:
        acc *= NNZ**-0.5
        if ACCUMULATE:
            acc += tl.load(out, mask=keep)
    tl.store(out, acc.to(out.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["seed", "feature_offset", "groups_per_split"])
def adjoint_tiles(
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
    U: tl.constexpr,
    EVEN: tl.constexpr,
    ALIGN: tl.constexpr,
    MODE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """out[v, j] = sum over rows r of y[v, r] S[r, j]; grid (N_TILES * blocks of V vectors, splits of the
    columns).

    A program holds its vectors' 128 components of one tile and writes the columns of the chunks that meet it: every
    element of out is written once.
    """
    LOG_WIDTH: tl.constexpr = LOG_GROUP + LOG_CHUNK
    B: tl.constexpr = 1 << LOG_CHUNK
    k0, k1 = seed_words(seed)
    m = (tl.program_id(0) % N_TILES).to(tl.uint32)
    v = (tl.program_id(0) // N_TILES).to(tl.int64) * V + tl.arange(0, V)
    if ALIGN > 1:
        stride_ov = stride_ov // ALIGN * ALIGN
        d = d // ALIGN * ALIGN
    first_group, groups = groups_of_split(tl.program_id(1), groups_per_split, feature_offset, d, LOG_WIDTH)

    tile_row, tile_end = rows_of_tile(m, K, N_TILES)
    r = tl.arange(0, TILE)
    keep = (v < n)[:, None] & (tile_row + r < tile_end)[None, :]
    z = tl.load(y + v[:, None] * stride_yv + (tile_row + r)[None, :] * stride_yr, mask=keep, other=0.0)
    HALF: tl.constexpr = tl.float16 if MODE == FP16_PAIR else tl.bfloat16
    DTYPE: tl.constexpr = y.dtype.element_ty if MODE == NATIVE else HALF
    if MODE == FP16_PAIR:
        scale = scale_of(largest_of(z), 14)
        z, low = pair_of(z, scale)
    elif MODE == BF16_PAIR:
        z, rest = truncated(z)
        low = rest.to(tl.bfloat16)
    elif MODE != NATIVE:
        z = z.to(tl.bfloat16)
    for start in range(0, groups, BATCH):
        column, keys, thetas, signs = batch(
            m, first_group + start, k0, k1, K, NNZ, N_TILES, LOG_GROUP, LOG_CHUNK, WHOLE, KEYS, SIGNS
        )
        for chunk in range(0, tl.minimum(BATCH, groups - start), U):
            i, negative = entries(chunk, keys, thetas, signs, m, K, NNZ, N_TILES, LOG_CHUNK, WHOLE, U)
            tile = tl.trans(_one_hot(i, negative, LOG_CHUNK, DTYPE))
            acc = dot(z, tile, tl.zeros((V, U * B), tl.float32), INTERPRETED)
            if (MODE == FP16_PAIR) | (MODE == BF16_PAIR):
                acc = dot(low, tile, acc, INTERPRETED)
            if MODE == FP16_PAIR:
                acc = acc * inverse(scale)[:, None]
            acc *= NNZ**-0.5
            k = tl.arange(0, U * B)
            j = tl.gather(column, chunk + (k >> LOG_CHUNK), 0)
            known = (j >= 0) & (chunk + (k >> LOG_CHUNK) < groups - start)
            j = j - feature_offset + (k & (B - 1))
            known &= (j >= 0) & (j < d)
            if ALIGN > 1:
                j = tl.max_contiguous(tl.multiple_of(j, ALIGN), ALIGN)
                known = tl.max_constancy(known, ALIGN)
            address = out + v[:, None] * stride_ov + (j * stride_of)[None, :]
            mask = (v < n)[:, None] & known[None, :]
            if ACCUMULATE:
                acc += tl.load(address, mask=mask)
            tl.store(address, acc.to(out.dtype.element_ty), mask=mask)
