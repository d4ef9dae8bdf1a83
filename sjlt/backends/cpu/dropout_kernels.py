"""Dropout kernels on the CPU.

Elements are processed CHUNK adjacent columns at a time. The words of their Philox calls are stored contiguously and
read as an array of lanes of any width, from any lane of a call on. From these, a byte per element is computed that says
whether it is kept; then a single loop, which the compiler vectorizes, does the arithmetic. Rows whose elements are not
contiguous are copied to and from buffers. If columns are contiguous in all arrays, the bytes are transposed instead.

16-bit floats are passed as their bits (`bits.kernel_view`). Everything but fp64 is computed in fp32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types
from numba.np.numpy_support import carray

from ...laws import dropout as dropout_law
from .bits import DECODE_SCALAR, ENCODE_SCALAR, WIDTH, WordVector, interleave, store_vector
from .jit import DATA, Array, kernel, leaf, overload

intrinsic: Any = extending.intrinsic  # Any: in kernels, intrinsics are called without a typing context

CHUNK = 1024  # columns processed at a time
WORDS = CHUNK + 4 * WIDTH
TRANSPOSED_ROWS = 64  # rows processed at a time if columns are contiguous
TRANSPOSED_COLUMNS = 256  # columns in that case: vectors of calls are full, and the bytes stay in the L1 cache

LOW, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


@intrinsic
def _store_words(typing_context, words, at, index, step, k0, k1):
    """words[at:at + 4 WIDTH] = the words of the WIDTH calls from `index` on; those of a call are adjacent."""

    def codegen(context, builder, signature, arguments):
        words, at, index, *scalars = arguments
        scalars = (WordVector.splat(builder, scalar) for scalar in scalars)
        vectors = dropout_law.lane_words(WordVector.count_from(builder, index), *scalars)
        return store_vector(context, builder, signature.args[0], words, at, interleave(builder, vectors))

    return types.void(words, types.int64, types.uint64, types.uint64, types.uint64, types.uint64), codegen


@intrinsic
def _at(typing_context, array, offset):
    """A pointer to the element `offset` bytes after the array's first."""

    def codegen(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer = builder.gep(builder.bitcast(data, ir.IntType(8).as_pointer()), [arguments[1]])
        return builder.bitcast(pointer, context.get_value_type(signature.return_type))

    return types.CPointer(array.dtype)(array, types.int64), codegen


# ------------------------------------------------------------------------------------- decisions


@leaf
def fill_keep(e, n, seed, step, log_lanes, threshold, words, keep):
    """keep[:n] = whether the elements from index e on are kept. words : a buffer of WORDS words, as `LANES`."""
    words8, words16, words32 = words
    log_call = log_lanes + np.uint64(2)
    first = np.int64(e & ((np.uint64(1) << log_call) - np.uint64(1)))
    index, k0, k1 = e >> log_call, seed & LOW, seed >> HALF
    calls = (first + n + (np.int64(1) << np.int64(log_call)) - 1) >> np.int64(log_call)
    for call in range(0, calls, WIDTH):
        _store_words(words32, 4 * call, index + np.uint64(call), step, k0, k1)
    if log_lanes == 0:
        for i in range(n):
            keep[i] = words32[first + i] >= np.uint32(threshold)
    elif log_lanes == 1:
        for i in range(n):
            keep[i] = words16[first + i] >= np.uint16(threshold)
    else:
        for i in range(n):
            keep[i] = words8[first + i] >= np.uint8(threshold)


# ------------------------------------------------------------------------------------- arithmetic


def apply(x, y, out, keep, n, scale, add):
    """out[:n] = scale * x where kept, 0 elsewhere; plus y if `add` (in kernels)."""


@overload(apply)
def _apply(x, y, out, keep, n, scale, add):
    if x.dtype in DECODE_SCALAR:
        decode, encode, dtype = DECODE_SCALAR[x.dtype], ENCODE_SCALAR[x.dtype], x.dtype

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


# ------------------------------------------------------------------------------------- strided rows


@leaf
def _read(x, offset, step, n, buffer):
    """A contiguous array of n elements that are `step` bytes apart: a view if possible, or the buffer."""
    if step == x.itemsize:
        return carray(_at(x, offset), n)
    for i in range(n):
        buffer[i] = carray(_at(x, offset + i * step), 1)[0]
    return carray(_at(buffer, 0), n)


@leaf
def _target(out, offset, step, n, buffer):
    """A contiguous array into which n elements can be written before `_flush`: a view if possible, or the buffer."""
    return carray(_at(out, offset), n) if step == out.itemsize else carray(_at(buffer, 0), n)


@leaf
def _flush(out, offset, step, n, buffer):
    """Copy n elements from the buffer of `_target` to `out`, unless it returned a view."""
    if step != out.itemsize:
        for i in range(n):
            carray(_at(out, offset + i * step), 1)[0] = buffer[i]


# ------------------------------------------------------------------------------------- kernels
#
# A kernel processes a range of rows and of columns at each position along all other axes. It addresses five things: the
# law's index, the seeds, x, y and out.
#
# origins (P, 5) : the offset in each of the five of row 0 and column 0, for each of P positions along the other axes
# steps (5, 2) : the steps in each of the five to the next row and to the next column
# task : (i0, i1, j0, j1), the range of rows and of columns
# rule : (step, log_lanes, threshold) of the law
#
# Offsets and steps are in bytes for x, y and out, in elements for the index and the seeds.

INDEX, SEEDS, X, Y, OUT = range(5)

READ, WRITTEN = Array(DATA, 1, "A", readonly=True), Array(DATA, 1, "A")
BYTES = Array(types.uint8, 1)
LANES = (BYTES, Array(types.uint16, 1), Array(types.uint32, 1))  # views of one buffer as lanes of 8, 16 and 32 bits
BUFFER = Array(DATA, 1)
INT64S_2D = Array(types.int64, 2)
TASK = (types.int64,) * 4
RULE = (types.uint64,) * 3
SEED_ARRAY = Array(types.int64, 1, readonly=True)


@leaf
def _begin(which, origin, steps, i, j):
    return origin[which] + i * steps[which, 0] + j * steps[which, 1]


@leaf
def _decide(origin, steps, i, j, n, seeds, rule, words, keep):
    """`fill_keep` for n elements of row i from column j on."""
    step, log_lanes, threshold = rule
    seed = np.uint64(seeds[_begin(SEEDS, origin, steps, i, j)])
    fill_keep(np.uint64(_begin(INDEX, origin, steps, i, j)), n, seed, step, log_lanes, threshold, words, keep)


@kernel(
    x=READ, y=READ, out=WRITTEN, origins=INT64S_2D, steps=INT64S_2D, task=TASK, seeds=SEED_ARRAY, rule=RULE,
    buffers=(LANES, BYTES, (BUFFER,) * 3), scale=types.float64, add=types.boolean,
)  # fmt: skip
def drop_rows(x, y, out, origins, steps, task, seeds, rule, buffers, scale, add):
    """out = dropout of x, plus y if `add`. buffers : for words, decisions, and CHUNK elements of x, y and out each."""
    i0, i1, j0, j1 = task
    words, keep, (x_buffer, y_buffer, out_buffer) = buffers
    for p in range(origins.shape[0]):
        origin = origins[p]
        for i in range(i0, i1):
            for j in range(j0, j1, CHUNK):
                n = min(CHUNK, j1 - j)
                _decide(origin, steps, i, j, n, seeds, rule, words, keep)
                x_part = _read(x, _begin(X, origin, steps, i, j), steps[X, 1], n, x_buffer)
                y_part = _read(y, _begin(Y, origin, steps, i, j), steps[Y, 1], n, y_buffer) if add else x_part
                begin = _begin(OUT, origin, steps, i, j)
                apply(x_part, y_part, _target(out, begin, steps[OUT, 1], n, out_buffer), keep, n, scale, add)
                _flush(out, begin, steps[OUT, 1], n, out_buffer)


@kernel(
    x=READ, y=READ, out=WRITTEN, origins=INT64S_2D, steps=INT64S_2D, task=TASK, seeds=SEED_ARRAY, rule=RULE,
    buffers=(LANES, BYTES, Array(types.uint8, 2)), scale=types.float64, add=types.boolean,
)  # fmt: skip
def drop_columns(x, y, out, origins, steps, task, seeds, rule, buffers, scale, add):
    """`drop_rows` for arrays whose columns are contiguous.

    buffers : for words, decisions, and transposed decisions of shape (TRANSPOSED_COLUMNS, TRANSPOSED_ROWS).
    """
    i0, i1, j0, j1 = task
    words, keep, transposed = buffers
    for p in range(origins.shape[0]):
        origin = origins[p]
        for i in range(i0, i1, TRANSPOSED_ROWS):
            rows = min(TRANSPOSED_ROWS, i1 - i)
            for j in range(j0, j1, TRANSPOSED_COLUMNS):
                columns = min(TRANSPOSED_COLUMNS, j1 - j)
                for r in range(rows):
                    _decide(origin, steps, i + r, j, columns, seeds, rule, words, keep)
                    for c in range(columns):
                        transposed[c, r] = keep[c]
                for c in range(columns):
                    x_part = carray(_at(x, _begin(X, origin, steps, i, j + c)), rows)
                    y_part = carray(_at(y, _begin(Y, origin, steps, i, j + c)), rows)
                    out_part = carray(_at(out, _begin(OUT, origin, steps, i, j + c)), rows)
                    apply(x_part, y_part, out_part, transposed[c], rows, scale, add)


@kernel(
    x=READ, kept=Array(types.uint8, 1, "A", readonly=True), out=WRITTEN, origins=INT64S_2D, steps=INT64S_2D, task=TASK,
    buffers=(BYTES, (BUFFER,) * 3), scale=types.float64,
)  # fmt: skip
def mask_rows(x, kept, out, origins, steps, task, buffers, scale):
    """out = scale * x where `kept`, an array of bytes, is not 0; 0 elsewhere."""
    i0, i1, j0, j1 = task
    keep, (x_buffer, _, out_buffer) = buffers
    for p in range(origins.shape[0]):
        origin = origins[p]
        for i in range(i0, i1):
            for j in range(j0, j1, CHUNK):
                n = min(CHUNK, j1 - j)
                keep_part = _read(kept, _begin(Y, origin, steps, i, j), steps[Y, 1], n, keep)
                x_part = _read(x, _begin(X, origin, steps, i, j), steps[X, 1], n, x_buffer)
                begin = _begin(OUT, origin, steps, i, j)
                out_part = _target(out, begin, steps[OUT, 1], n, out_buffer)
                apply(x_part, x_part, out_part, keep_part, n, scale, False)
                _flush(out, begin, steps[OUT, 1], n, out_buffer)


@kernel(
    kept=Array(types.uint8, 1, "A"), origins=INT64S_2D, steps=INT64S_2D, task=TASK, seeds=SEED_ARRAY, rule=RULE,
    words=LANES, keep=BYTES,
)  # fmt: skip
def write_mask(kept, origins, steps, task, seeds, rule, words, keep):
    """Store in `kept`, an array of bytes, whether each element is kept."""
    i0, i1, j0, j1 = task
    for p in range(origins.shape[0]):
        origin = origins[p]
        for i in range(i0, i1):
            for j in range(j0, j1, CHUNK):
                n = min(CHUNK, j1 - j)
                begin = _begin(OUT, origin, steps, i, j)
                _decide(origin, steps, i, j, n, seeds, rule, words, _target(kept, begin, steps[OUT, 1], n, keep))
                _flush(kept, begin, steps[OUT, 1], n, keep)
