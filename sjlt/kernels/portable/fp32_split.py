"""How data is multiplied by entries of 16 bits: fp16 and bf16 as they are, fp32 in parts.

Data in fp32 is multiplied as a pair of fp16 numbers: x scale = high + low, exact to 2^-22, where scale is a power of
two of the data vector's own. `project_hopper` lets it follow the data; adjoints have all of a vector at hand. Elsewhere
it comes from a sample of the features. If others are 2^9 times larger, fp16 overflows: the result is not finite, and
the work is done again with three bf16 numbers, whose range is that of fp32. (Three bf16 numbers bind on the tensor
cores: they take 1.13 times as long as the pair, H200.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..config import exact as launch

# How the data is multiplied.
NATIVE = tl.constexpr(launch.NATIVE)  # fp16 or bf16 data, as it is
BF16_PAIR = tl.constexpr(launch.BF16_PAIR)  # fp32 as 2 numbers in bf16, 16 bits; BF16 is 1 of them, 8 bits
BF16_TRIPLE = tl.constexpr(launch.BF16_TRIPLE)  # 3 of them, 24 bits
FP16_PAIR = tl.constexpr(launch.FP16_PAIR)  # fp32 as a scaled pair in fp16: 22 bits


@triton.jit
def largest_of(x):
    """The bits of the largest magnitude in each row of x, fp32."""
    return tl.max(tl.abs(x), 1).to(tl.uint32, bitcast=True)


@triton.jit
def scale_of(largest, TARGET: tl.constexpr):
    """The powers of two that take numbers of these bits, of fp32, into [2^TARGET, 2^(TARGET+1)). 0 gets the largest."""
    exponent = tl.maximum(largest & 0x7F800000, (TARGET + 1) << 23)  # biased, in place
    return (0 - exponent + ((254 + TARGET) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def inverse(scale):
    """1/scale, for a power of two."""
    return (0 - scale.to(tl.uint32, bitcast=True) + (254 << 23)).to(tl.float32, bitcast=True)


@triton.jit
def pair_of(x, scale):
    """x scale as a pair of fp16 numbers, high + low."""
    scaled = x * scale[:, None]
    high = scaled.to(tl.float16)
    return high, (scaled - high.to(tl.float32)).to(tl.float16)


@triton.jit
def scale_vectors(x, scales, n, d, stride_xv, stride_xf, V: tl.constexpr, SAMPLE: tl.constexpr, LINE: tl.constexpr):
    """scales[v] for FP16_PAIR, fp32 (n), from SAMPLE features in the middle of x; grid (blocks of V vectors).

    While fewer than two of what was seen of a vector are not 0, LINE features elsewhere are looked at, eight times at
    most. (One alone may be a small one, once in 200 times of normal data.) The scales leave room for features 2^9 times
    larger than those seen; after zeros alone, for almost none: what overflows is found out.
    """
    v = tl.program_id(0).to(tl.int64) * V + tl.arange(0, V)
    j = (d // 2 // SAMPLE * SAMPLE + tl.arange(0, SAMPLE)).to(tl.int64)
    z = tl.load(x + v[:, None] * stride_xv + (j * stride_xf)[None, :], mask=(v < n)[:, None], other=0.0)
    largest = largest_of(z)
    found = tl.where(v < n, tl.sum((z != 0).to(tl.int32), 1), 2)
    look = 0
    while (tl.min(found, 0) < 2) & (look < 8):
        eighth = (look & 1) << 2 | (look & 2) | look >> 2  # 0, 4, 2, 6, 1, 5, 3, 7
        k = ((2 * eighth + 1) * tl.cdiv(d, LINE) // 16 * LINE + tl.arange(0, LINE)).to(tl.int64)
        mask = (found < 2)[:, None] & (k < d)[None, :]
        line = tl.load(x + v[:, None] * stride_xv + (k * stride_xf)[None, :], mask=mask, other=0.0)
        largest = tl.maximum(largest, largest_of(line))
        found += tl.sum((line != 0).to(tl.int32), 1)
        look += 1
    tl.store(scales + v, scale_of(largest, 6), mask=v < n)


@triton.jit
def truncated(x):
    """fp32 x as bf16 and the exact rest: by bits, since conversions back and forth are slow (16 a clock and core)."""
    bits = x.to(tl.uint32, bitcast=True)
    high = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return high, x - (bits & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def dot(a, b, acc, INTERPRETED: tl.constexpr):
    if INTERPRETED:  # the interpreter multiplies bit patterns of bf16, and adds in fp16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _product(x, tile, acc, ROWS_FIRST: tl.constexpr, INTERPRETED: tl.constexpr):
    return dot(tl.trans(tile), tl.trans(x), acc, INTERPRETED) if ROWS_FIRST else dot(x, tile, acc, INTERPRETED)


@triton.jit
def multiply(x, scale, tile, acc, MODE: tl.constexpr, ROWS_FIRST: tl.constexpr, INTERPRETED: tl.constexpr):
    """acc + x tile, for x in parts by MODE; of the transposed sums where ROWS_FIRST: acc + tile' x'."""
    if MODE == NATIVE:
        acc = _product(x, tile, acc, ROWS_FIRST, INTERPRETED)
    elif MODE == FP16_PAIR:
        high, low = pair_of(x, scale)
        acc = _product(high, tile, acc, ROWS_FIRST, INTERPRETED)
        acc = _product(low, tile, acc, ROWS_FIRST, INTERPRETED)
    else:
        rest = x
        for _ in tl.static_range(MODE - 1):
            part, rest = truncated(rest)
            acc = _product(part, tile, acc, ROWS_FIRST, INTERPRETED)
        acc = _product(rest.to(tl.bfloat16), tile, acc, ROWS_FIRST, INTERPRETED)
    return acc
