"""Multiply vectors of sums by the scale of a sketch, rounded once, as LLVM instructions."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .bits import ENCODE, doubles_to_odd_floats, has_feature, splat

_HAS_FMA = has_feature("fma")  # otherwise LLVM would call a function that Numba does not link
GROUP = 2  # vectors that share a branch: with 16, registers spill
# For scales 1 / sqrt(m), m <= MAX_NNZ, `_products` have the bits of the fp64 product rounded to fp32, unless tiny:
# all 2^23 significands have been compared for each m, and powers of two do not matter. (For m = 39, one differs.)
MAX_NNZ = 38
# For each type of 16 bits: the highest bit of an fp32 that rounding drops.
_DROPPED = {types.uint16: 1 << 12, types.int16: 1 << 15}
# For each type: the bits of the smallest fp32 product from which on this position and all error bounds hold.
_SMALLEST = {types.uint16: (127 - 14) << 23, types.int16: (127 - 100) << 23, types.float32: (127 - 80) << 23}


def scaled(builder: Any, vectors: list[Any], scale: Any, dtype: Any) -> list[Any]:
    """Vectors of sums times the fp64 `scale`, computed in fp64 and rounded once to the array dtype `dtype`.

    If neither sums nor results are in fp64, products are first computed in fp32, and in fp64 only if that might give
    other bits.
    """
    if dtype in _SMALLEST and _HAS_FMA and isinstance(vectors[0].type.element, ir.FloatType):
        scale_fp32 = _scaled_to_fp32 if dtype is types.float32 else _scaled_to_16_bits
        groups = [vectors[i : i + GROUP] for i in range(0, len(vectors), GROUP)]
        return [result for group in groups for result in scale_fp32(builder, group, scale, dtype)]
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


def _products(builder: Any, vectors: list[Any], scale: Any) -> list[Any]:
    """Vectors of fp32 times the scale, in fp32: off by less than one unit in the last place."""
    floats = vectors[0].type
    high, low = (splat(builder, part, floats.count) for part in _split(builder, scale))
    name = f"llvm.fma.v{floats.count}f32"
    fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(floats, [floats] * 3), name)
    return [builder.call(fma, (vector, high, builder.fmul(vector, low))) for vector in vectors]


def _any(builder: Any, masks: list[Any]) -> Any:
    """Whether an element of any mask is set."""
    union = masks[0]
    for mask in masks[1:]:
        union = builder.or_(union, mask)
    word = builder.bitcast(union, ir.IntType(union.type.count))
    return builder.icmp_unsigned("!=", word, word.type(0))


def _scaled_to_16_bits(builder: Any, vectors: list[Any], scale: Any, dtype: Any) -> list[Any]:
    """Products in fp32, all computed again in fp64 if any `_is_uncertain`."""
    is_inexact = splat(builder, builder.not_(_is_power_of_two(builder, scale)), vectors[0].type.count)
    products = _products(builder, vectors, scale)
    uncertain = [_is_uncertain(builder, product, is_inexact, dtype) for product in products]
    results = [ENCODE[dtype](builder, product) for product in products]
    results = [cgutils.alloca_once_value(builder, result) for result in results]
    _scale_again(builder, _any(builder, uncertain), vectors, scale, dtype, results)
    return [builder.load(result) for result in results]


def _scaled_to_fp32(builder: Any, vectors: list[Any], scale: Any, dtype: Any) -> list[Any]:
    """The vectors if the scale is 1, else products in fp32.

    All are computed in fp64 if any is tiny, or if the scale is none for which both are known to be equal.
    """
    is_scaled = builder.fcmp_unordered("!=", scale, scale.type(1))
    is_uncertain = cgutils.alloca_once_value(builder, is_scaled)
    results = [cgutils.alloca_once_value(builder, vector) for vector in vectors]
    with builder.if_then(builder.and_(is_scaled, _is_known(builder, scale)), likely=True):
        products = _products(builder, vectors, scale)
        for product, result in zip(products, results, strict=True):
            builder.store(product, result)
        builder.store(_any(builder, [_is_small(builder, product, dtype) for product in products]), is_uncertain)
    _scale_again(builder, builder.load(is_uncertain), vectors, scale, dtype, results)
    return [builder.load(result) for result in results]


def _scale_again(builder: Any, condition: Any, vectors: list[Any], scale: Any, dtype: Any, results: list[Any]) -> None:
    """Replace the results by products in fp64 if a condition, which rarely holds, does."""
    with builder.if_then(condition, likely=False):
        for vector, result in zip(vectors, results, strict=True):
            builder.store(_scaled_in_fp64(builder, vector, scale, dtype), result)


def _is_known(builder: Any, scale: Any) -> Any:
    """Whether the scale is 1 / sqrt(m) for an integer m <= MAX_NNZ."""
    double, integer = scale.type, ir.IntType(64)
    square = builder.fdiv(double(1), builder.fmul(scale, scale))
    is_near = builder.and_(
        builder.fcmp_ordered(">=", square, double(0.5)), builder.fcmp_ordered("<", square, double(MAX_NNZ + 0.5))
    )
    square = builder.select(is_near, square, double(1))  # converting numbers beyond integers is undefined
    square = builder.sitofp(builder.fptosi(builder.fadd(square, double(0.5)), integer), double)
    root = cgutils.get_or_insert_function(builder.module, ir.FunctionType(double, [double]), "llvm.sqrt.f64")
    inverse = builder.fdiv(double(1), builder.call(root, [square]))
    return builder.and_(is_near, builder.fcmp_ordered("==", inverse, scale))


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
    after = builder.and_(bits, _constant(bits, 2 * half - 1))
    is_halfway = builder.icmp_unsigned("==", after, _constant(bits, half))
    is_small = _is_small(builder, product, dtype)
    if dtype is types.uint16:  # a product by a power of two is exact
        return builder.and_(builder.or_(is_halfway, is_small), is_inexact)
    return builder.or_(builder.and_(is_halfway, is_inexact), is_small)


def _is_small(builder: Any, product: Any, dtype: Any) -> Any:
    """Whether an fp32 product is below the smallest one of a result's type, but not 0."""
    bits = builder.bitcast(product, ir.VectorType(ir.IntType(32), product.type.count))
    magnitude = builder.and_(bits, _constant(bits, 0x7FFFFFFF))
    below = builder.sub(magnitude, _constant(bits, 1))
    return builder.icmp_unsigned("<", below, _constant(bits, _SMALLEST[dtype] - 1))


def _constant(vector: Any, number: int) -> Any:
    """A number in all elements of a vector of the same type."""
    return ir.Constant(vector.type, [number] * vector.type.count)
