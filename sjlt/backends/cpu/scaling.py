"""Multiply vectors of sums by the scale of a sketch, rounded once, as LLVM instructions."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .bits import ENCODE, doubles_to_odd_floats, has_feature, splat

_HAS_FMA = has_feature("fma")  # otherwise LLVM would call a function that Numba does not link
GROUP = 2  # vectors that share a branch: with 16, registers spill
# For each type of 16 bits: the highest bit of an fp32 that rounding drops, and the bits of the smallest fp32 from which
# on this position and the error bound of `_is_uncertain` hold.
_DROPPED = {types.uint16: 1 << 12, types.int16: 1 << 15}
_SMALLEST = {types.uint16: (127 - 14) << 23, types.int16: (127 - 100) << 23}


def scaled(builder: Any, vectors: list[Any], scale: Any, dtype: Any) -> list[Any]:
    """Vectors of sums times the fp64 `scale`, computed in fp64 and rounded once to the array dtype `dtype`.

    If sums are in fp32 and results have 16 bits, products are first computed in fp32, and in fp64 only if that might
    give other bits.
    """
    if dtype in ENCODE and _HAS_FMA and isinstance(vectors[0].type.element, ir.FloatType):
        groups = [vectors[i : i + GROUP] for i in range(0, len(vectors), GROUP)]
        return [result for group in groups for result in _scaled_to_16_bits(builder, group, scale, dtype)]
    return [_scaled_in_fp64(builder, vector, scale, dtype) for vector in vectors]


def _scaled_in_fp64(builder: Any, vector: Any, scale: Any, dtype: Any) -> Any:
    scales = splat(builder, scale, vector.type.count)
    if isinstance(vector.type.element, ir.FloatType):
        vector = builder.fpext(vector, scales.type)
    vector = builder.fmul(scales, vector)
    if dtype is types.float32:
        return builder.fptrunc(vector, ir.VectorType(ir.FloatType(), vector.type.count))
    return ENCODE[dtype](builder, doubles_to_odd_floats(builder, vector)) if dtype in ENCODE else vector


def _is_power_of_two(builder: Any, scale: Any) -> Any:
    """Whether a positive, normal fp64 is a power of two."""
    bits = builder.bitcast(scale, ir.IntType(64))
    return builder.icmp_unsigned("==", builder.and_(bits, bits.type((1 << 52) - 1)), bits.type(0))


def _scaled_to_16_bits(builder: Any, vectors: list[Any], scale: Any, dtype: Any) -> list[Any]:
    """Products in fp32, all computed again in fp64 if any `_is_uncertain`."""
    width = vectors[0].type.count
    high, low = (splat(builder, part, width) for part in _split(builder, scale))
    floats = vectors[0].type
    name = f"llvm.fma.v{width}f32"
    fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(floats, [floats] * 3), name)
    is_inexact = splat(builder, builder.not_(_is_power_of_two(builder, scale)), width)
    products = [builder.call(fma, (vector, high, builder.fmul(vector, low))) for vector in vectors]
    uncertain = ir.Constant(is_inexact.type, [0] * width)
    for product in products:
        uncertain = builder.or_(uncertain, _is_uncertain(builder, product, is_inexact, dtype))
    results = []
    for product in products:
        result = ENCODE[dtype](builder, product)
        results.append(cgutils.alloca_once(builder, result.type))
        builder.store(result, results[-1])
    mask = builder.bitcast(uncertain, ir.IntType(width))
    with builder.if_then(builder.icmp_unsigned("!=", mask, mask.type(0)), likely=False):
        for vector, result in zip(vectors, results, strict=True):
            builder.store(_scaled_in_fp64(builder, vector, scale, dtype), result)
    return [builder.load(result) for result in results]


def _split(builder: Any, scale: Any) -> tuple[Any, Any]:
    """(high, low): two fp32 whose sum equals the fp64 `scale` to within 2^-47, relative to it.

    `high` is the largest fp32 below the scale, so that `low` is positive. Signs of zeros and infinities then survive
    the product in two parts.
    """
    nearest = builder.fptrunc(scale, ir.FloatType())
    below = builder.bitcast(nearest, ir.IntType(32))
    below = builder.bitcast(builder.sub(below, below.type(1)), ir.FloatType())
    is_below = builder.fcmp_ordered("<", builder.fpext(nearest, scale.type), scale)
    high = builder.select(is_below, nearest, below)
    low = builder.fsub(scale, builder.fpext(high, scale.type))
    return high, builder.fptrunc(low, ir.FloatType())


def _is_uncertain(builder: Any, product: Any, is_inexact: Any, dtype: Any) -> Any:
    """Whether an fp32 product, off by less than one unit in its last place, might round to another 16-bit number.

    That takes a product that lies halfway between two 16-bit numbers while the exact one does not. Halfway numbers are
    recognised by the bits after a 16-bit number's last; products so small that these are others are all uncertain.
    """
    half = _DROPPED[dtype]
    bits = builder.bitcast(product, ir.VectorType(ir.IntType(32), product.type.count))

    def constant(number: int) -> Any:
        return ir.Constant(bits.type, [number] * product.type.count)

    is_halfway = builder.icmp_unsigned("==", builder.and_(bits, constant(2 * half - 1)), constant(half))
    magnitude = builder.and_(bits, constant(0x7FFFFFFF))
    is_small = builder.icmp_unsigned("<", builder.sub(magnitude, constant(1)), constant(_SMALLEST[dtype] - 1))  # not 0
    if dtype is types.uint16:  # a product by a power of two is exact
        return builder.and_(builder.or_(is_halfway, is_small), is_inexact)
    return builder.or_(builder.and_(is_halfway, is_inexact), is_small)
