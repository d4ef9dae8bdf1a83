"""Conversions of 16-bit floats and vectors of Philox words, which NumPy and Numba lack, as LLVM instructions.

NumPy has no bf16, and Numba's CPU target supports neither bf16 nor fp16. Kernels therefore receive 16-bit floats as
arrays of their bits: uint16 for fp16, int16 for bf16 (`kernel_view`). Such arrays are decoded when loaded into an fp32
tile. Loaded into an fp64 tile, which integer data uses, the same dtypes hold plain integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import config
from numba.extending import intrinsic

from .jit import overload

BFLOAT16 = np.dtype([("bfloat16", np.int16)])  # a stand-in for bf16, for which NumPy has no dtype


def has_feature(name: str) -> bool:
    """Whether the CPU that kernels are compiled for has a feature, under its LLVM name."""
    if getattr(config, "CPU_NAME", None) not in (None, "host") or getattr(config, "CPU_FEATURES", None) is not None:
        return False
    switched_off = name.startswith("avx") and not getattr(config, "ENABLE_AVX", True)
    return get_host_cpu_features().get(name, False) and not switched_off


# Without hardware conversion of fp16, LLVM would call a function that Numba does not link.
_HAS_FP16 = has_feature("f16c")


def is_native(x: np.ndarray) -> bool:
    """Whether kernels can read x in place: native byte order, aligned elements."""
    return x.dtype.isnative and x.flags.aligned


def to_native(x: np.ndarray) -> np.ndarray:
    """x, copied if kernels cannot read it in place."""
    return x if is_native(x) else x.astype(x.dtype.newbyteorder("="))


def kernel_view(x: np.ndarray) -> np.ndarray:
    """A view of a native x for kernels: fp16 and bf16 become their bits."""
    code = x.dtype.char
    if code == "V":
        return x["bfloat16"]  # a quarter of the time of `view`
    return x if code != "e" else x.view(np.uint16)


def compute_dtype(x: np.ndarray) -> np.dtype:
    """The dtype of sums over x: fp32 for floats of at most 32 bits, fp64 for fp64 and integers."""
    return np.dtype(np.float32 if x.dtype.kind in "fV" and x.dtype.itemsize <= 4 else np.float64)


# ------------------------------------------------------------------------------------- instructions
#
# The functions below accept and return LLVM values, scalars or vectors.


def _like(value: Any, element: Any) -> Any:
    """The type `element`, or a vector of it as long as `value` if that is a vector."""
    return ir.VectorType(element, value.type.count) if isinstance(value.type, ir.VectorType) else element


def _constant(value: Any, element: Any, number: Any) -> Any:
    kind = _like(value, element)
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


def _word(value: Any, number: int) -> Any:
    return _constant(value, ir.IntType(32), number)


def _as_words(builder: Any, floats: Any) -> Any:
    return builder.bitcast(floats, _like(floats, ir.IntType(32)))


def _as_floats(builder: Any, words: Any) -> Any:
    return builder.bitcast(words, _like(words, ir.FloatType()))


def halves_to_floats(builder: Any, halves: Any) -> Any:
    """Convert the bits of fp16 to fp32, exactly."""
    if _HAS_FP16:
        return builder.fpext(builder.bitcast(halves, _like(halves, ir.HalfType())), _like(halves, ir.FloatType()))
    bits = builder.zext(halves, _like(halves, ir.IntType(32)))
    magnitude = builder.shl(builder.and_(bits, _word(bits, 0x7FFF)), _word(bits, 13))
    scale = _constant(bits, ir.FloatType(), 2.0**112)  # the difference of the two formats' exponent biases
    number = _as_words(builder, builder.fmul(_as_floats(builder, magnitude), scale))
    is_finite = builder.icmp_unsigned("<", magnitude, _word(bits, 0x7C00 << 13))
    number = builder.select(is_finite, number, builder.or_(magnitude, _word(bits, 0x7F800000)))
    sign = builder.shl(builder.and_(bits, _word(bits, 0x8000)), _word(bits, 16))
    return _as_floats(builder, builder.or_(number, sign))


def bfloats_to_floats(builder: Any, bfloats: Any) -> Any:
    """Convert the bits of bf16 to fp32, exactly."""
    bits = builder.zext(bfloats, _like(bfloats, ir.IntType(32)))
    return _as_floats(builder, builder.shl(bits, _word(bits, 16)))


def _with_nan(builder: Any, halves: Any, floats: Any, nan: int) -> Any:
    """16-bit numbers, in place of those whose fp32 is NaN `nan` with the sign of the 16-bit number."""
    short = ir.IntType(16)
    sign = builder.and_(halves, _constant(halves, short, 0x8000))
    is_nan = builder.fcmp_unordered("uno", floats, floats)
    return builder.select(is_nan, builder.or_(sign, _constant(halves, short, nan)), halves)


def floats_to_halves(builder: Any, floats: Any) -> Any:
    """Round fp32 to the bits of the nearest fp16, ties to even."""
    short = _like(floats, ir.IntType(16))
    if _HAS_FP16:
        halves = builder.bitcast(builder.fptrunc(floats, _like(floats, ir.HalfType())), short)
        return _with_nan(builder, halves, floats, 0x7E00)
    bits = _as_words(builder, floats)
    magnitude = builder.and_(bits, _word(bits, 0x7FFFFFFF))
    odd = builder.and_(builder.lshr(magnitude, _word(magnitude, 13)), _word(magnitude, 1))
    normal = builder.add(magnitude, builder.add(odd, _word(magnitude, 0xFFF - (112 << 23) & 0xFFFFFFFF)))
    normal = builder.lshr(normal, _word(magnitude, 13))
    largest = _word(magnitude, 0x7C00)
    normal = builder.select(builder.icmp_unsigned("<", normal, largest), normal, largest)
    # Below 2^-14, fp16 values are multiples of 2^-24, as are fp32 values just above 1/2: adding 1/2 rounds to fp16.
    small = builder.fadd(_as_floats(builder, magnitude), _constant(magnitude, ir.FloatType(), 0.5))
    small = builder.sub(_as_words(builder, small), _word(magnitude, 0x3F000000))
    is_small = builder.icmp_unsigned("<", magnitude, _word(magnitude, 0x38800000))
    sign = builder.and_(builder.lshr(bits, _word(bits, 16)), _word(bits, 0x8000))
    halves = builder.trunc(builder.or_(builder.select(is_small, small, normal), sign), short)
    return _with_nan(builder, halves, floats, 0x7E00)


def floats_to_bfloats(builder: Any, floats: Any) -> Any:
    """Round fp32 to the bits of the nearest bf16, ties to even."""
    bits = _as_words(builder, floats)
    odd = builder.and_(builder.lshr(bits, _word(bits, 16)), _word(bits, 1))
    rounded = builder.add(bits, builder.add(odd, _word(bits, 0x7FFF)))  # may change the sign of NaN
    bfloats = builder.trunc(builder.lshr(rounded, _word(bits, 16)), _like(floats, ir.IntType(16)))
    return _with_nan(builder, bfloats, floats, 0x7FC0)


def doubles_to_odd_floats(builder: Any, doubles: Any) -> Any:
    """Round fp64 to fp32 by rounding to odd, so that rounding the result to 16 bits is the same as rounding once.

    Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd",
    IEEE Transactions on Computers 57(4), 2008.
    """
    nearest = builder.fptrunc(doubles, _like(doubles, ir.FloatType()))
    back, bits = builder.fpext(nearest, doubles.type), _as_words(builder, nearest)

    def magnitude_bits(value: Any) -> Any:
        integers = builder.bitcast(value, _like(value, ir.IntType(64)))
        return builder.and_(integers, _constant(value, ir.IntType(64), (1 << 63) - 1))

    is_away = builder.icmp_unsigned(">", magnitude_bits(back), magnitude_bits(doubles))
    is_inexact = builder.fcmp_ordered("!=", back, doubles)  # False for NaN
    is_away = builder.and_(is_away, is_inexact)
    bits = builder.sub(bits, builder.zext(is_away, bits.type))
    return _as_floats(builder, builder.or_(bits, builder.zext(is_inexact, bits.type)))


DECODE = {types.uint16: halves_to_floats, types.int16: bfloats_to_floats}  # keys: Numba's type of the bits
ENCODE = {types.uint16: floats_to_halves, types.int16: floats_to_bfloats}


# ------------------------------------------------------------------------------------- scalars in kernels


def _define(instructions: Any, source: Any, target: Any) -> Any:
    @intrinsic
    def convert(typing_context, value):
        return target(source), lambda context, builder, signature, arguments: instructions(builder, arguments[0])

    return convert


DECODE_SCALAR = {bits: _define(decode, bits, types.float32) for bits, decode in DECODE.items()}
ENCODE_SCALAR = {bits: _define(encode, types.float32, bits) for bits, encode in ENCODE.items()}
_to_odd = _define(doubles_to_odd_floats, types.float64, types.float32)


def decoded(value, like):
    """Convert an element of a data array to the dtype of the array `like`, fp32 or fp64 (in kernels)."""
    raise NotImplementedError


@overload(decoded)
def _overload_decoded(value, like):
    dtype = like.dtype
    if value in DECODE_SCALAR and dtype is types.float32:
        decode = DECODE_SCALAR[value]
        return lambda value, like: decode(value)
    return lambda value, like: dtype(value)


def encoded(number, out):
    """Convert an fp32 or fp64 to an element of the array `out`, rounded once (in kernels)."""
    raise NotImplementedError


@overload(encoded)
def _overload_encoded(number, out):
    dtype = out.dtype
    if dtype in ENCODE_SCALAR:
        encode = ENCODE_SCALAR[dtype]
        if number is types.float32:
            return lambda number, out: encode(number)
        return lambda number, out: encode(_to_odd(number))
    return lambda number, out: dtype(number)


def store_element(value, out, i, j, accumulate):
    """out[i, j] (+)= an fp64, rounded once; a 16-bit `out` does not support `accumulate` (in kernels)."""
    raise NotImplementedError


@overload(store_element)
def _overload_store_element(value, out, i, j, accumulate):
    if out.dtype in ENCODE_SCALAR:

        def store(value, out, i, j, accumulate):
            out[i, j] = encoded(value, out)

    else:

        def store(value, out, i, j, accumulate):
            out[i, j] = out[i, j] + value if accumulate else value

    return store


# ------------------------------------------------------------------------------------- vectors of words

WIDTH = 8  # calls of Philox computed together, in vectors of 64-bit words: one AVX-512 register


def shuffle_mask(lanes: list[int]) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)


def splat(builder: Any, value: Any, width: int) -> Any:
    """A vector of `width` copies of a scalar."""
    undefined = ir.Constant(ir.VectorType(value.type, width), ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, undefined, shuffle_mask([0] * width))


class WordVector:
    """A vector of WIDTH words. Called with such vectors, the law's functions emit instructions.

    Left to itself, the compiler does not vectorize across calls of Philox, which is 6 times as slow on Zen 5.
    """

    bits, width = 64, WIDTH

    def __init__(self, builder: Any, value: Any) -> None:
        self.builder, self.value = builder, value

    @classmethod
    def _constant(cls, numbers: list[int]) -> Any:
        return ir.Constant(ir.VectorType(ir.IntType(cls.bits), cls.width), numbers)

    @classmethod
    def constant(cls, builder: Any, numbers: list[int]) -> Any:
        """A vector of constants."""
        return cls(builder, cls._constant(numbers))

    @classmethod
    def splat(cls, builder: Any, scalar: Any) -> Any:
        """A vector of copies of a 64-bit scalar."""
        if cls.bits < 64:
            scalar = builder.trunc(scalar, ir.IntType(cls.bits))
        return cls(builder, splat(builder, scalar, cls.width))

    @classmethod
    def count_from(cls, builder: Any, scalar: Any) -> Any:
        """scalar, scalar + 1, ..."""
        return cls(builder, builder.add(cls.splat(builder, scalar).value, cls._constant(list(range(cls.width)))))

    def _operand(self, other: Any) -> Any:
        return other.value if isinstance(other, WordVector) else self._constant([other] * self.width)

    def _operation(self, name: str, other: Any) -> Any:
        return type(self)(self.builder, getattr(self.builder, name)(self.value, self._operand(other)))

    def __add__(self, other: Any) -> Any:
        return self._operation("add", other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._operation("sub", other)

    def __mul__(self, other: Any) -> Any:
        return self._operation("mul", other)

    def __and__(self, other: Any) -> Any:
        return self._operation("and_", other)

    def __or__(self, other: Any) -> Any:
        return self._operation("or_", other)

    def __xor__(self, other: Any) -> Any:
        return self._operation("xor", other)

    def __rshift__(self, other: Any) -> Any:
        return self._operation("lshr", other)

    def __lshift__(self, other: Any) -> Any:
        return self._operation("shl", other)

    def __rlshift__(self, other: int) -> Any:
        return type(self)(self.builder, self.builder.shl(self._operand(other), self.value))


class HalfWordVector(WordVector):
    """A vector of 2 WIDTH words of 32 bits.

    For word functions whose intermediate values stay below 2^32 or matter only mod 2^16, such as
    `sjlt.laws.exact.row_in_sub_block`.
    """

    bits, width = 32, 2 * WIDTH


def interleave(builder: Any, words: Any) -> Any:
    """Combine the four words of WIDTH calls into one vector of 32-bit words, where those of a call are adjacent."""
    w0, w1, w2, w3 = (builder.trunc(w.value, ir.VectorType(ir.IntType(32), WIDTH)) for w in words)
    pairs = shuffle_mask([lane for i in range(WIDTH) for lane in (i, WIDTH + i)])
    evens = range(0, 2 * WIDTH, 2)
    fours = shuffle_mask([lane for i in evens for lane in (i, i + 1, 2 * WIDTH + i, 2 * WIDTH + i + 1)])
    low, high = builder.shuffle_vector(w0, w1, pairs), builder.shuffle_vector(w2, w3, pairs)
    return builder.shuffle_vector(low, high, fours)


def store_vector(context: Any, builder: Any, array_type: Any, array: Any, at: Any, vector: Any) -> Any:
    """Store a vector in a flat array, from index `at` on."""
    data = builder.gep(context.make_array(array_type)(context, builder, array).data, [at])
    builder.store(vector, builder.bitcast(data, vector.type.as_pointer()), align=array_type.dtype.bitwidth // 8)
    return context.get_dummy_value()
