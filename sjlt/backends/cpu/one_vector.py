"""The projection of a single vector: entries are made and added 16 at a time, and never stored.

The columns of a chunk have different rows in each sub-block, so no two of the 16 additions reach one component, and
each component gets its terms in the order of chunks, as in a tile of several vectors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

from ...laws import exact as law
from .bits import HalfWordVector, decoded
from .entries import chunk_keys, chunk_signs, chunk_tile, part_start, select_word
from .jit import leaf

intrinsic: Any = extending.intrinsic  # its own types are those of the functions that emit code

RUN = HalfWordVector.width  # places of a chunk that are worked on together
PADDING = 2 * RUN  # numbers that a buffer of features has beyond them: a run's, before and after

ZERO, ONE, TWO, THREE, FIVE, SIXTEEN = (np.uint64(v) for v in (0, 1, 2, 3, 5, RUN))
LAST_OF_RUN, FIVE_BITS = np.uint64(RUN - 1), np.uint64(31)


@intrinsic
def _add_run(typing_context, features, at, lanes, place, key, geometry, signs, base, sums):
    """sums[base + row of place + l] += sign * features[at + l] for l in a range of lanes of the RUN.

    key : the sub-block's key word.  geometry : (its rows b, the chunk's p).  signs : bit l is 1 where negative.
    """

    def codegen(context, builder, signature, arguments):
        features, at, lanes, place, key, geometry, signs, base, sums = arguments
        number = context.get_data_type(signature.args[0].dtype)
        bits = signature.args[0].dtype.bitwidth
        b, p = (builder.extract_value(geometry, n) for n in range(2))
        words = (HalfWordVector.splat(builder, scalar) for scalar in (key, b, p))
        rows = law.row_in_sub_block(HalfWordVector.count_from(builder, place), *words)
        rows = rows + HalfWordVector.splat(builder, base)

        integers = ir.VectorType(ir.IntType(bits), RUN)
        steps = HalfWordVector.count_from(builder, ir.Constant(ir.IntType(64), 0))
        flips = ((HalfWordVector.splat(builder, signs) >> steps) & 1).value
        flips = flips if bits == 32 else builder.zext(flips, integers)
        flips = builder.shl(flips, ir.Constant(integers, [bits - 1] * RUN))
        data = builder.gep(context.make_array(signature.args[0])(context, builder, features).data, [at])
        loaded = builder.load(builder.bitcast(data, integers.as_pointer()), align=bits // 8)
        values = builder.bitcast(builder.xor(loaded, flips), ir.VectorType(number, RUN))

        row_of, value_of = (cgutils.alloca_once_value(builder, vector) for vector in (rows.value, values))
        row_of = builder.bitcast(row_of, ir.IntType(32).as_pointer())
        value_of = builder.bitcast(value_of, number.as_pointer())
        target = context.make_array(signature.args[8])(context, builder, sums).data

        def add(lane: Any) -> None:
            row = builder.zext(builder.load(builder.gep(row_of, [lane])), ir.IntType(64))
            total = builder.gep(target, [row])
            value = builder.load(builder.gep(value_of, [lane]))
            builder.store(builder.fadd(builder.load(total), value), total)

        first, last = (builder.extract_value(lanes, n) for n in range(2))
        is_whole = builder.icmp_signed("==", builder.sub(last, first), ir.Constant(last.type, RUN))
        with builder.if_else(is_whole) as (whole, part):
            with whole:
                for lane in range(RUN):
                    add(ir.Constant(first.type, lane))
            with part, cgutils.for_range(builder, last, start=first) as loop:
                add(loop.index)
        return context.get_dummy_value()

    word, integer = types.uint64, types.int64
    pair = types.UniTuple(word, 2)
    arguments = features, integer, types.UniTuple(integer, 2), word, word, pair, word, word, sums
    return types.void(*arguments), codegen


@leaf
def accumulate_vector(x, begin, end, first_column, geometry, features, sums):
    """sums[r] += the terms of x[0, begin:end], whose columns are first_column and the next; all sums are flat.

    features : a buffer of end - begin + PADDING numbers.
    """
    for j in range(end - begin):
        features[RUN + j] = decoded(x[0, begin + j], features)
    for stack in range(geometry[7]):
        _accumulate_stack(first_column, np.uint64(end - begin), stack, geometry, features, sums)


@leaf
def _accumulate_stack(first, count, stack, geometry, features, sums):
    k, s, n_tiles, log_group, p, k0, k1, _ = geometry
    if count == ZERO:
        return
    end = first + count
    for c in range(first >> p, ((end - ONE) >> p) + ONE):
        m = chunk_tile(c, n_tiles, log_group, k0, k1, stack)
        first_row = part_start(m, k, n_tiles)
        tile_rows = part_start(m + ONE, k, n_tiles) - first_row
        g0, g1, g2, g3 = chunk_signs(c, k0, k1, stack)
        start = c << p
        begin, stop = max(first, start) - start, min(end, start + (ONE << p)) - start  # places in the chunk
        for quad in range((s + THREE) >> TWO):
            w0, w1, w2, w3 = chunk_keys(c, quad, k0, k1, stack)
            for t in range(quad << TWO, min(s, (quad + ONE) << TWO)):
                w = select_word(t & THREE, w0, w1, w2, w3)
                block_row = part_start(t, tile_rows, s)
                b = part_start(t + ONE, tile_rows, s) - block_row
                base = stack * k + first_row + block_row
                for i in range(begin & ~LAST_OF_RUN, stop, SIXTEEN):
                    e = (t << p) + i
                    signs = select_word(e >> FIVE, g0, g1, g2, g3) >> (e & FIVE_BITS)
                    lanes = np.int64(max(begin, i) - i), np.int64(min(stop, i + SIXTEEN) - i)
                    at = np.int64(start + i + SIXTEEN - first)
                    _add_run(features, at, lanes, i, w, (b, p), signs, base, sums)
