"""Multiplication of data by 16-bit entries on tensor cores: 16-bit data as it is, fp32 data split into 16-bit parts.

fp32 data is multiplied as pairs of fp16 numbers: x * scale = high + low, exact to 2^-22, with a power of two as the
scale of each data vector. `project_hopper` adapts the scale while it reads the data, and adjoints derive it from whole
vectors. Other kernels derive it from a sample of the features (`scale_vectors`). If other features are more than 2^9
times larger, fp16 overflows and the result is not finite; the sum is then computed again with three bf16 numbers, whose
range is that of fp32. (Three bf16 numbers throughout take 1.13 times as long as the pair, limited by tensor cores;
H200.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..config import arithmetic

NATIVE = tl.constexpr(arithmetic.NATIVE)
BF16_PAIR = tl.constexpr(arithmetic.BF16_PAIR)
BF16_TRIPLE = tl.constexpr(arithmetic.BF16_TRIPLE)
FP16_PAIR = tl.constexpr(arithmetic.FP16_PAIR)


@triton.jit
def largest_of(x):
    """The largest magnitude in each row of x, fp32, as its bits."""
    return tl.max(tl.abs(x), 1).to(tl.uint32, bitcast=True)


@triton.jit
def scale_of(largest, TARGET: tl.constexpr):
    """The powers of two that scale fp32 numbers with these bits into [2^TARGET, 2^(TARGET+1)).

    The scale of 0 is the largest one.
    """
    exponent = tl.maximum(largest & 0x7F800000, (TARGET + 1) << 23)  # biased, at its position in the word
    return (0 - exponent + ((254 + TARGET) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def inverse(scale):
    """1/scale, for a power of two."""
    return (0 - scale.to(tl.uint32, bitcast=True) + (254 << 23)).to(tl.float32, bitcast=True)


@triton.jit
def has_overflow(sums):
    """Whether any sum is inf or NaN."""
    return tl.max(tl.max((tl.abs(sums) < float("inf")).to(tl.int32) ^ 1, 1), 0) != 0


@triton.jit
def high_of(x, scale):
    """x * scale, rounded to fp16."""
    return (x * scale[:, None]).to(tl.float16)


@triton.jit
def low_of(x, scale, high):
    """The rest of x * scale, whose `high_of` is known, rounded to fp16."""
    return (x * scale[:, None] - high.to(tl.float32)).to(tl.float16)


@triton.jit
def pair_of(x, scale):
    """x * scale as a pair of fp16 numbers, high + low."""
    high = high_of(x, scale)
    return high, low_of(x, scale, high)


@triton.jit(do_not_specialize=["n", "d"], do_not_specialize_on_alignment=["stride_xf"])
def scale_vectors(
    x,
    scales,
    n,
    d,
    stride_xv,
    stride_xf,
    BLOCK_VECTORS: tl.constexpr,
    SAMPLE_FEATURES: tl.constexpr,
    LINE_FEATURES: tl.constexpr,
):
    """scales[v] for FP16_PAIR, fp32 (n,), from SAMPLE_FEATURES features in the middle of x; grid (blocks of vectors).

    While a vector has shown fewer than two nonzeros, LINE_FEATURES further features elsewhere are examined, up to eight
    times. (One nonzero is not enough: in normal data it is too small once in 200 times.) The scales leave room for
    features 2^9 times larger than the largest sampled, and hardly any if only zeros were sampled; kernels detect
    overflow.
    """
    v = tl.program_id(0).to(tl.int64) * BLOCK_VECTORS + tl.arange(0, BLOCK_VECTORS)
    j = (d // 2 // SAMPLE_FEATURES * SAMPLE_FEATURES + tl.arange(0, SAMPLE_FEATURES)).to(tl.int64)
    z = tl.load(x + v[:, None] * stride_xv + (j * stride_xf)[None, :], mask=(v < n)[:, None], other=0.0)
    largest = largest_of(z)
    found = tl.where(v < n, tl.sum((z != 0).to(tl.int32), 1), 2)
    attempt = 0
    while (tl.min(found, 0) < 2) & (attempt < 8):
        eighth = (attempt & 1) << 2 | (attempt & 2) | attempt >> 2  # 0, 4, 2, 6, 1, 5, 3, 7
        middle = (2 * eighth + 1) * tl.cdiv(d, LINE_FEATURES) // 16 * LINE_FEATURES
        line_j = (middle + tl.arange(0, LINE_FEATURES)).to(tl.int64)
        mask = (found < 2)[:, None] & (line_j < d)[None, :]
        line = tl.load(x + v[:, None] * stride_xv + (line_j * stride_xf)[None, :], mask=mask, other=0.0)
        largest = tl.maximum(largest, largest_of(line))
        found += tl.sum((line != 0).to(tl.int32), 1)
        attempt += 1
    tl.store(scales + v, scale_of(largest, 6), mask=v < n)


@triton.jit
def truncated(x):
    """fp32 x as (bf16, exact rest), by bits: conversions are slow (16 per clock and multiprocessor)."""
    bits = x.to(tl.uint32, bitcast=True)
    high = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return high, x - (bits & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def dot(a, b, acc, INTERPRETED: tl.constexpr):
    """acc + a b, in fp32."""
    if INTERPRETED:  # the interpreter multiplies the bit patterns of bf16, and sums in fp16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _dot_swapped_or_not(x, tile, acc, SWAP_OPERANDS: tl.constexpr, INTERPRETED: tl.constexpr):
    """acc + x tile or, with SWAP_OPERANDS, acc + tileᵀ xᵀ."""
    return dot(tl.trans(tile), tl.trans(x), acc, INTERPRETED) if SWAP_OPERANDS else dot(x, tile, acc, INTERPRETED)


@triton.jit
def multiply_split(x, scale, tile, acc, MODE: tl.constexpr, SWAP_OPERANDS: tl.constexpr, INTERPRETED: tl.constexpr):
    """acc + x tile, with x split into parts according to MODE; with SWAP_OPERANDS, acc + tileᵀ xᵀ."""
    if MODE == NATIVE:
        acc = _dot_swapped_or_not(x, tile, acc, SWAP_OPERANDS, INTERPRETED)
    elif MODE == FP16_PAIR:
        high, low = pair_of(x, scale)
        acc = _dot_swapped_or_not(high, tile, acc, SWAP_OPERANDS, INTERPRETED)
        acc = _dot_swapped_or_not(low, tile, acc, SWAP_OPERANDS, INTERPRETED)
    else:
        rest = x
        for _ in tl.static_range(MODE - 1):
            part, rest = truncated(rest)
            acc = _dot_swapped_or_not(part, tile, acc, SWAP_OPERANDS, INTERPRETED)
        acc = _dot_swapped_or_not(rest.to(tl.bfloat16), tile, acc, SWAP_OPERANDS, INTERPRETED)
    return acc


@triton.jit
def split_vectors(z, MODE: tl.constexpr):
    """(first part, second part, scales) of whole vectors z [vectors, components], for `multiply_vectors`.

    Parts and scales that MODE does not use are z.
    """
    low, scale = z, z
    if MODE == FP16_PAIR:
        scale = scale_of(largest_of(z), 14)
        z, low = pair_of(z, scale)
    elif MODE == BF16_PAIR:
        z, rest = truncated(z)
        low = rest.to(tl.bfloat16)
    elif MODE != NATIVE:
        z = z.to(tl.bfloat16)
    return z, low, scale


@triton.jit
def multiply_vectors(high, low, scale, tile, MODE: tl.constexpr, INTERPRETED: tl.constexpr):
    """The product of vectors, split by `split_vectors`, with tile [components, columns], in fp32."""
    acc = dot(high, tile, tl.zeros((high.shape[0], tile.shape[1]), tl.float32), INTERPRETED)
    if (MODE == FP16_PAIR) | (MODE == BF16_PAIR):
        acc = dot(low, tile, acc, INTERPRETED)
    if MODE == FP16_PAIR:
        acc = acc * inverse(scale)[:, None]
    return acc
