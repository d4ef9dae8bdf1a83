"""Dropout kernels on the CPU.

Elements are processed CHUNK neighbouring columns at a time. The words of their Philox calls, side by side in memory,
are their lanes, whatever the width and wherever in its call the first element's lane lies; a byte per element says
whether it is kept; then one loop, which the compiler vectorises, does the arithmetic. Rows whose elements are not
contiguous pass through a buffer; where columns are contiguous in all arrays, the decisions are transposed instead.

16-bit numbers come as their bits (`bits.kernel_view`) and are computed with in fp32, as everything but fp64 is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types
from numba.np.numpy_support import carray

from ...laws import dropout as dropout_law
from .bits import DECODE_NUMBER, ENCODE_NUMBER, WIDTH, WordVector, interleave, store_vector
from .jit import DATA, Array, kernel, leaf

intrinsic: Any = extending.intrinsic  # its own types are those of the functions that emit code

CHUNK = 1024  # columns taken at a time
WORDS = CHUNK + 4 * WIDTH
TRANSPOSED_ROWS = 64  # rows taken at a time where columns are contiguous
TRANSPOSED_COLUMNS = 256  # columns then: the calls' vectors are full, and their decisions stay in the L1 cache

LOW, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


@intrinsic
def _store_words(typing_context, words, at, index, step, k0, k1):
    """words[at : at + 4 WIDTH] = the words of the WIDTH calls from `index` on, those of a call side by side."""

    def codegen(context, builder, signature, arguments):
        words, at, index, *scalars = arguments
        scalars = (WordVector.splat(builder, scalar) for scalar in scalars)
        made = dropout_law.lane_words(WordVector.count_from(builder, index), *scalars)
        return store_vector(context, builder, signature.args[0], words, at, interleave(builder, made))

    return types.void(words, types.int64, types.uint64, types.uint64, types.uint64, types.uint64), codegen


@intrinsic
def _at(typing_context, array, offset):
    """A pointer to the number `offset` bytes after the array's first."""

    def codegen(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer = builder.gep(builder.bitcast(data, ir.IntType(8).as_pointer()), [arguments[1]])
        return builder.bitcast(pointer, context.get_value_type(signature.return_type))

    return types.CPointer(array.dtype)(array, types.int64), codegen


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


def apply(x, y, out, keep, n, scale, add):
    """out[:n] = x scale where kept, else 0; and y more if `add`."""


@extending.overload(apply, jit_options={"nogil": True, "error_model": "numpy"})
def _apply(x, y, out, keep, n, scale, add):
    if x.dtype in DECODE_NUMBER:
        decode, encode, dtype = DECODE_NUMBER[x.dtype], ENCODE_NUMBER[x.dtype], x.dtype

        def apply_bits(x, y, out, keep, n, scale, add):
            factor, zero = np.float32(scale), np.float32(0)
            if add:
                for i in range(n):
                    value = decode(x[i]) * factor
                    out[i] = encode((value if keep[i] else zero) + decode(y[i]))
            else:
                for i in range(n):
                    value = encode(decode(x[i]) * factor)
                    out[i] = value if keep[i] else dtype(0)

        return apply_bits

    def apply_numbers(x, y, out, keep, n, scale, add):
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
    """The position at which n numbers can be written side by side before `_flush`."""
    return carray(_at(out, offset), n) if step == out.itemsize else carray(_at(buffer, 0), n)


@leaf
def _flush(out, offset, step, n, buffer):
    if step != out.itemsize:
        for i in range(n):
            carray(_at(out, offset + i * step), 1)[0] = buffer[i]


# ------------------------------------------------------------------------------------- kernels
#
# A kernel works on rows, columns, and places: those of all other axes. Each of these begins somewhere in the law's
# index, in the seeds, in x, y and out:
#
# places (P, 5), steps (5, 2) : there, where each place begins, and how far it is to the next row and column. For x, y
#     and out in bytes from the array's first number.
# task : the rows i0 .. i1 and columns j0 .. j1 of every place.
# rule : step, log_lanes, T of the law.
# room : for the words and the decisions (`fill_keep`), and for CHUNK numbers of x, y and out each.

INDEX, SEEDS, X, Y, OUT = range(5)

READ, WRITTEN = Array(DATA, 1, "A", readonly=True), Array(DATA, 1, "A")
BYTES = Array(types.uint8, 1)
LANES = (BYTES, Array(types.uint16, 1), Array(types.uint32, 1))  # the words as numbers of 8, 16 and 32 bits
BUFFER = Array(DATA, 1)
PLACES = Array(types.int64, 2)
TASK = (types.int64,) * 4
RULE = (types.uint64,) * 3
SEED_ARRAY = Array(types.int64, 1, readonly=True)


@leaf
def _begin(which, place, steps, i, j):
    return place[which] + i * steps[which, 0] + j * steps[which, 1]


@leaf
def _decide(place, steps, i, j, n, seeds, rule, words, keep):
    """`fill_keep` of a piece."""
    step, log_lanes, t = rule
    seed = np.uint64(seeds[_begin(SEEDS, place, steps, i, j)])
    fill_keep(np.uint64(_begin(INDEX, place, steps, i, j)), n, seed, step, log_lanes, t, words, keep)


@kernel(
    x=READ, y=READ, out=WRITTEN, places=PLACES, steps=PLACES, task=TASK, seeds=SEED_ARRAY, rule=RULE,
    room=(LANES, BYTES, (BUFFER,) * 3), scale=types.float64, add=types.boolean,
)  # fmt: skip
def drop_rows(x, y, out, places, steps, task, seeds, rule, room, scale, add):
    """out = dropout of x, plus y if `add`."""
    i0, i1, j0, j1 = task
    words, keep, (x_buffer, y_buffer, out_buffer) = room
    for p in range(places.shape[0]):
        place = places[p]
        for i in range(i0, i1):
            for j in range(j0, j1, CHUNK):
                n = min(CHUNK, j1 - j)
                _decide(place, steps, i, j, n, seeds, rule, words, keep)
                x_part = _read(x, _begin(X, place, steps, i, j), steps[X, 1], n, x_buffer)
                y_part = _read(y, _begin(Y, place, steps, i, j), steps[Y, 1], n, y_buffer) if add else x_part
                begin = _begin(OUT, place, steps, i, j)
                apply(x_part, y_part, _room(out, begin, steps[OUT, 1], n, out_buffer), keep, n, scale, add)
                _flush(out, begin, steps[OUT, 1], n, out_buffer)


@kernel(
    x=READ, y=READ, out=WRITTEN, places=PLACES, steps=PLACES, task=TASK, seeds=SEED_ARRAY, rule=RULE,
    room=(LANES, BYTES, Array(types.uint8, 2)), scale=types.float64, add=types.boolean,
)  # fmt: skip
def drop_columns(x, y, out, places, steps, task, seeds, rule, room, scale, add):
    """The same where columns are contiguous in all arrays.

    room : its last is for decisions by columns, (TRANSPOSED_COLUMNS, TRANSPOSED_ROWS).
    """
    i0, i1, j0, j1 = task
    words, keep, transposed = room
    for p in range(places.shape[0]):
        place = places[p]
        for i in range(i0, i1, TRANSPOSED_ROWS):
            rows = min(TRANSPOSED_ROWS, i1 - i)
            for j in range(j0, j1, TRANSPOSED_COLUMNS):
                columns = min(TRANSPOSED_COLUMNS, j1 - j)
                for r in range(rows):
                    _decide(place, steps, i + r, j, columns, seeds, rule, words, keep)
                    for c in range(columns):
                        transposed[c, r] = keep[c]
                for c in range(columns):
                    x_part = carray(_at(x, _begin(X, place, steps, i, j + c)), rows)
                    y_part = carray(_at(y, _begin(Y, place, steps, i, j + c)), rows)
                    out_part = carray(_at(out, _begin(OUT, place, steps, i, j + c)), rows)
                    apply(x_part, y_part, out_part, transposed[c], rows, scale, add)


@kernel(
    x=READ, kept=Array(types.uint8, 1, "A"), out=WRITTEN, places=PLACES, steps=PLACES, task=TASK,
    room=(BYTES, (BUFFER,) * 3), scale=types.float64,
)  # fmt: skip
def mask_rows(x, kept, out, places, steps, task, room, scale):
    """out = x scale where `kept`, bytes, is not 0."""
    i0, i1, j0, j1 = task
    keep, (x_buffer, _, out_buffer) = room
    for p in range(places.shape[0]):
        place = places[p]
        for i in range(i0, i1):
            for j in range(j0, j1, CHUNK):
                n = min(CHUNK, j1 - j)
                keep_part = _read(kept, _begin(Y, place, steps, i, j), steps[Y, 1], n, keep)
                x_part = _read(x, _begin(X, place, steps, i, j), steps[X, 1], n, x_buffer)
                begin = _begin(OUT, place, steps, i, j)
                out_part = _room(out, begin, steps[OUT, 1], n, out_buffer)
                apply(x_part, x_part, out_part, keep_part, n, scale, False)
                _flush(out, begin, steps[OUT, 1], n, out_buffer)


@kernel(
    kept=Array(types.uint8, 1, "A"), places=PLACES, steps=PLACES, task=TASK, seeds=SEED_ARRAY, rule=RULE,
    words=LANES, keep=BYTES,
)  # fmt: skip
def write_mask(kept, places, steps, task, seeds, rule, words, keep):
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
