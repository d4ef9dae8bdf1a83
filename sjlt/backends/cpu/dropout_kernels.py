"""Dropout kernels on the CPU.

Elements are taken CHUNK neighbouring columns at a time: the words of their calls, side by side in memory, are their
lanes, whatever the width and wherever the first element's lane lies in its call; a byte for each element says whether
it is kept; then one loop, which the compiler turns into vector instructions, does the arithmetic. Rows whose elements
do not lie side by side pass through a buffer, or, where columns' do in all arrays, their decisions are transposed.

Numbers of 16 bits come as their bits. They are computed with in fp32, as everything but fp64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types
from numba.np.numpy_support import carray

from ...laws import dropout as dropout_law
from .jit import leaf

intrinsic: Any = extending.intrinsic  # its own types are those of the functions that make code

CHUNK = 1024  # columns taken at a time
WIDTH = 8  # calls of Philox made together, in vectors of 64-bit numbers: one with AVX-512
WORDS = CHUNK + 4 * WIDTH
TURNED = 64  # rows taken at a time where columns are contiguous
TURNED_CHUNK = 256  # columns then: the calls' vectors are full, and their decisions stay in the L1 cache

LOW, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


class _Vector:
    """A vector of WIDTH words for the law's functions, which make it into instructions."""

    type = ir.VectorType(ir.IntType(64), WIDTH)

    def __init__(self, builder: Any, value: Any) -> None:
        self.builder, self.value = builder, value

    @classmethod
    def splat(cls, builder: Any, scalar: Any) -> _Vector:
        undefined = ir.Constant(cls.type, ir.Undefined)
        first = builder.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
        return cls(builder, builder.shuffle_vector(first, undefined, _places([0] * WIDTH)))

    def _operation(self, name: str, other: Any) -> _Vector:
        operand = other.value if isinstance(other, _Vector) else ir.Constant(self.type, [other] * WIDTH)
        return _Vector(self.builder, getattr(self.builder, name)(self.value, operand))

    def __add__(self, other: Any) -> _Vector:
        return self._operation("add", other)

    def __mul__(self, other: Any) -> _Vector:
        return self._operation("mul", other)

    def __and__(self, other: Any) -> _Vector:
        return self._operation("and_", other)

    def __xor__(self, other: Any) -> _Vector:
        return self._operation("xor", other)

    def __rshift__(self, other: Any) -> _Vector:
        return self._operation("lshr", other)


def _places(numbers: list[int]) -> Any:
    """For a shuffle."""
    return ir.Constant(ir.VectorType(ir.IntType(32), len(numbers)), numbers)


@intrinsic
def _store_words(typing_context, words, at, index, step, k0, k1):
    """words[at : at + 4 WIDTH] = the words of the WIDTH calls from `index` on, a call's side by side.

    Left to itself, the compiler makes one call at a time: 6 times as slow on Zen 5.
    """

    def codegen(context, builder, signature, arguments):
        words, at, index, *scalars = arguments
        calls = _Vector.splat(builder, index)
        calls.value = builder.add(calls.value, ir.Constant(calls.type, list(range(WIDTH))))
        made = dropout_law.lane_words(calls, *(_Vector.splat(builder, scalar) for scalar in scalars))
        w0, w1, w2, w3 = (builder.trunc(w.value, ir.VectorType(ir.IntType(32), WIDTH)) for w in made)
        pairs = _places([place for i in range(WIDTH) for place in (i, WIDTH + i)])
        fours = _places(
            [place for i in range(0, 2 * WIDTH, 2) for place in (i, i + 1, 2 * WIDTH + i, 2 * WIDTH + i + 1)]
        )
        low, high = builder.shuffle_vector(w0, w1, pairs), builder.shuffle_vector(w2, w3, pairs)
        vector = builder.shuffle_vector(low, high, fours)
        data = builder.gep(context.make_array(signature.args[0])(context, builder, words).data, [at])
        builder.store(vector, builder.bitcast(data, vector.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(words, types.int64, types.uint64, types.uint64, types.uint64, types.uint64), codegen


@intrinsic
def _at(typing_context, array, offset):
    """A pointer to the number `offset` bytes after the array's first."""

    def codegen(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer = builder.gep(builder.bitcast(data, ir.IntType(8).as_pointer()), [arguments[1]])
        return builder.bitcast(pointer, context.get_value_type(signature.return_type))

    return types.CPointer(array.dtype)(array, types.int64), codegen


def _define_bitcast(source: Any, target: Any) -> Any:
    @intrinsic
    def bitcast(typing_context, value):
        def codegen(context, builder, signature, arguments):
            return builder.bitcast(arguments[0], context.get_value_type(target))

        return target(source), codegen

    return bitcast


_bits, _number = _define_bitcast(types.float32, types.uint32), _define_bitcast(types.uint32, types.float32)


# ------------------------------------------------------------------------------------- decisions


@leaf
def fill_keep(e, n, seed, step, log_lanes, t, words, keep):
    """keep[:n] = whether elements from index e on are kept. `words`: WORDS words, as numbers of 8, 16 and 32 bits."""
    words8, words16, words32 = words
    log_call = log_lanes + np.uint64(2)
    first = np.int64(e & ((np.uint64(1) << log_call) - np.uint64(1)))
    index, k0, k1 = e >> log_call, seed & LOW, seed >> HALF
    calls = (first + n + (np.int64(1) << np.int64(log_call)) - 1) >> np.int64(log_call)
    for call in range(0, calls, WIDTH):
        _store_words(words32, 4 * call, index + np.uint64(call), step, k0, k1)
    if log_lanes == 0:
        for i in range(n):
            keep[i] = words32[first + i] >= np.uint32(t)
    elif log_lanes == 1:
        for i in range(n):
            keep[i] = words16[first + i] >= np.uint16(t)
    else:
        for i in range(n):
            keep[i] = words8[first + i] >= np.uint8(t)


# ------------------------------------------------------------------------------------- arithmetic


@leaf
def _from_bits(bits, bfloat):
    """The fp32 of a bf16's or an fp16's bits."""
    word = np.uint32(bits)
    if bfloat:
        return _number(word << np.uint32(16))
    magnitude = (word & np.uint32(0x7FFF)) << np.uint32(13)
    number = _bits(_number(magnitude) * np.float32(2.0**112))  # the exponent's bias moved
    special = magnitude | np.uint32(0x7F800000)
    finite = magnitude < np.uint32(0x7C00 << 13)
    return _number((number if finite else special) | ((word & np.uint32(0x8000)) << np.uint32(16)))


@leaf
def _to_bits(number, bfloat):
    """The bits of the bf16 or fp16 nearest to an fp32, of two the even one."""
    word = _bits(number)
    magnitude = word & np.uint32(0x7FFFFFFF)
    sign = (word >> np.uint32(16)) & np.uint32(0x8000)
    nan = magnitude > np.uint32(0x7F800000)
    if bfloat:
        rounded = (magnitude + np.uint32(0x7FFF) + ((magnitude >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return np.uint16(sign | (np.uint32(0x7FC0) if nan else rounded))
    odd = (magnitude >> np.uint32(13)) & np.uint32(1)
    normal = min((magnitude + np.uint32(0xFFF) + odd - np.uint32(112 << 23)) >> np.uint32(13), np.uint32(0x7C00))
    # Below 2^-14, fp16's numbers are multiples of 2^-24, and so are fp32's around 1/2: an addition rounds.
    small = _bits(_number(magnitude) + np.float32(0.5)) - np.uint32(0x3F000000)
    finite = small if magnitude < np.uint32(0x38800000) else normal
    return np.uint16(sign | (np.uint32(0x7E00) if nan else finite))


def apply(x, y, out, keep, n, scale, add, bfloat):
    """out[:n] = x scale where kept, else 0; and y more if `add`."""


@extending.overload(apply, jit_options={"nogil": True, "error_model": "numpy"})
def _apply(x, y, out, keep, n, scale, add, bfloat):
    if x.dtype is types.uint16:

        def apply_bits(x, y, out, keep, n, scale, add, bfloat):
            factor, zero = np.float32(scale), np.float32(0)
            if add:
                for i in range(n):
                    value = _from_bits(x[i], bfloat) * factor
                    out[i] = _to_bits((value if keep[i] else zero) + _from_bits(y[i], bfloat), bfloat)
            elif bfloat:  # a constant in the loop
                for i in range(n):
                    value = _to_bits(_from_bits(x[i], True) * factor, True)
                    out[i] = value if keep[i] else np.uint16(0)
            else:
                for i in range(n):
                    value = _to_bits(_from_bits(x[i], False) * factor, False)
                    out[i] = value if keep[i] else np.uint16(0)

        return apply_bits

    def apply_numbers(x, y, out, keep, n, scale, add, bfloat):
        factor, zero = x.dtype.type(scale), x.dtype.type(0)
        if add:
            for i in range(n):
                value = x[i] * factor
                out[i] = (value if keep[i] else zero) + y[i]
        else:
            for i in range(n):
                value = x[i] * factor
                out[i] = value if keep[i] else zero

    return apply_numbers


# ------------------------------------------------------------------------------------- rows in memory


@leaf
def _read(x, offset, step, n, buffer):
    """n numbers, `step` bytes apart, side by side: where they lie, or in the buffer."""
    if step == x.itemsize:
        return carray(_at(x, offset), n)
    for i in range(n):
        buffer[i] = carray(_at(x, offset + i * step), 1)[0]
    return carray(_at(buffer, 0), n)


@leaf
def _room(out, offset, step, n, buffer):
    """Where n numbers can be written side by side before `_flush`."""
    return carray(_at(out, offset), n) if step == out.itemsize else carray(_at(buffer, 0), n)


@leaf
def _flush(out, offset, step, n, buffer):
    if step != out.itemsize:
        for i in range(n):
            carray(_at(out, offset + i * step), 1)[0] = buffer[i]


# ------------------------------------------------------------------------------------- kernels
#
# What a kernel works on has rows, columns, and places: those of all other axes. Each of these begins somewhere in the
# law's index, in the seeds, in x, y and out:
#
# places (P, 5), steps (5, 2) : there, where each place begins, and how far it is to the next row and column. For x, y
#     and out in bytes from the array's first number.
# task : the rows i0 .. i1 and columns j0 .. j1 of every place.
# rule : step, log_lanes, T of the law.
# words, keep, buffers : room for the words and the decisions (`fill_keep`), and for CHUNK numbers of x, y and out each.

INDEX, SEEDS, X, Y, OUT = range(5)


@leaf
def _begin(which, place, steps, i, j):
    return place[which] + i * steps[which, 0] + j * steps[which, 1]


@leaf
def _decide(place, steps, i, j, n, seeds, rule, words, keep):
    """`fill_keep` of a piece."""
    step, log_lanes, t = rule
    seed = np.uint64(seeds[_begin(SEEDS, place, steps, i, j)])
    fill_keep(np.uint64(_begin(INDEX, place, steps, i, j)), n, seed, step, log_lanes, t, words, keep)


def drop_rows(x, y, out, places, steps, task, seeds, rule, words, keep, buffers, scale, add, bfloat):
    """out = dropout of x, plus y if `add`."""
    i0, i1, j0, j1 = task
    x_buffer, y_buffer, out_buffer = buffers
    for p in range(places.shape[0]):
        place = places[p]
        for i in range(i0, i1):
            for j in range(j0, j1, CHUNK):
                n = min(CHUNK, j1 - j)
                _decide(place, steps, i, j, n, seeds, rule, words, keep)
                x_part = _read(x, _begin(X, place, steps, i, j), steps[X, 1], n, x_buffer)
                y_part = _read(y, _begin(Y, place, steps, i, j), steps[Y, 1], n, y_buffer) if add else x_part
                begin = _begin(OUT, place, steps, i, j)
                apply(x_part, y_part, _room(out, begin, steps[OUT, 1], n, out_buffer), keep, n, scale, add, bfloat)
                _flush(out, begin, steps[OUT, 1], n, out_buffer)


def drop_turned(x, y, out, places, steps, task, seeds, rule, words, keep, turned, scale, add, bfloat):
    """The same where a column's numbers lie side by side in all arrays; turned (TURNED_CHUNK, TURNED): for `keep`."""
    i0, i1, j0, j1 = task
    for p in range(places.shape[0]):
        place = places[p]
        for i in range(i0, i1, TURNED):
            rows = min(TURNED, i1 - i)
            for j in range(j0, j1, TURNED_CHUNK):
                columns = min(TURNED_CHUNK, j1 - j)
                for r in range(rows):
                    _decide(place, steps, i + r, j, columns, seeds, rule, words, keep)
                    for c in range(columns):
                        turned[c, r] = keep[c]
                for c in range(columns):
                    x_part = carray(_at(x, _begin(X, place, steps, i, j + c)), rows)
                    y_part = carray(_at(y, _begin(Y, place, steps, i, j + c)), rows)
                    out_part = carray(_at(out, _begin(OUT, place, steps, i, j + c)), rows)
                    apply(x_part, y_part, out_part, turned[c], rows, scale, add, bfloat)


def stored_rows(x, kept, out, places, steps, task, keep, buffers, scale, bfloat):
    """out = x scale where `kept`, bytes, is not 0."""
    i0, i1, j0, j1 = task
    x_buffer, _, out_buffer = buffers
    for p in range(places.shape[0]):
        place = places[p]
        for i in range(i0, i1):
            for j in range(j0, j1, CHUNK):
                n = min(CHUNK, j1 - j)
                keep_part = _read(kept, _begin(Y, place, steps, i, j), steps[Y, 1], n, keep)
                x_part = _read(x, _begin(X, place, steps, i, j), steps[X, 1], n, x_buffer)
                begin = _begin(OUT, place, steps, i, j)
                out_part = _room(out, begin, steps[OUT, 1], n, out_buffer)
                apply(x_part, x_part, out_part, keep_part, n, scale, False, bfloat)
                _flush(out, begin, steps[OUT, 1], n, out_buffer)


def mask_rows(kept, places, steps, task, seeds, rule, words, keep):
    """kept, bytes, = whether each element is kept."""
    i0, i1, j0, j1 = task
    for p in range(places.shape[0]):
        place = places[p]
        for i in range(i0, i1):
            for j in range(j0, j1, CHUNK):
                n = min(CHUNK, j1 - j)
                begin = _begin(OUT, place, steps, i, j)
                _decide(place, steps, i, j, n, seeds, rule, words, _room(kept, begin, steps[OUT, 1], n, keep))
                _flush(kept, begin, steps[OUT, 1], n, keep)
