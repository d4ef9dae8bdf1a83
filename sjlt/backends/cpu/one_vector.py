"""Project a single vector: entries are generated for 16 rows of a sub-block at a time and never stored.

A chunk contributes at most one element to each row of a sub-block; inverting the law's bijection finds it. Sums are
then contiguous SIMD vectors, to which gathered elements are added in a third of the time of scattering elements one by
one. Each component gets its terms in the order of the chunks, as in a tile of several vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

from ...laws import exact as law
from .bits import WIDTH, HalfWordVector, decoded, has_feature, shuffle_mask
from .entries import KEYS, TILE, fill_words, odd_inverse, part_start, select_word, word, words_table
from .jit import leaf
from .simd import SQUARE_BYTES, load_elements, load_masked, loads_by_squares, store_masked

intrinsic: Any = extending.intrinsic  # Any: in kernels, intrinsics are called without a typing context

ROWS = HalfWordVector.width  # rows of a sub-block that are processed together
LOG_ROWS = 5  # log2 of the rows of a sub-block that fills two such vectors
PADDING = 2 * law.TILE_ROWS  # elements that pad a buffer of features: those of a chunk before and after it

ONE, FIVE, SIX, SEVEN, SIXTEEN, FIVE_BITS, DIVISION_BITS = (np.uint64(v) for v in (1, 5, 6, 7, 16, 31, 22))


class _Divisor(HalfWordVector):
    """The number b of rows of a sub-block. The law's `unscale_index` divides integers below 2^15 by it."""

    reciprocal: HalfWordVector

    def __rfloordiv__(self, dividend: HalfWordVector) -> HalfWordVector:
        """floor(x / b) = (x ceil(2^22 / b)) >> 22: if x < 2^15 and b <= 128, the error is less than 1 / b."""
        return (dividend * self.reciprocal) >> int(DIVISION_BITS)


def _define_add_rows(log_chunk: int, all_rows: bool) -> Any:
    @intrinsic
    def add_rows(typing_context, features, at, sums, base, sub_block, inverses, signs):
        """sums[base + r] += sign * features[at + i] for each row r of a sub-block that some column i of the chunk hits.

        A chunk has at most 2^log_chunk columns; `all_rows` : whether it has as many as the sub-block has rows.
        sub_block : (the number b of rows, ceil(2^22 / b), the chunk's p, the key word w).
        inverses : of the two factors of `beta`.  signs : four words; bit i is 1 if the entry of column i is negative.
        """

        def codegen(context, builder, signature, arguments):
            features, at, sums, base, sub_block, inverses, signs = arguments
            element, bits = context.get_data_type(signature.args[0].dtype), signature.args[0].dtype.bitwidth
            integers, vector_type = ir.VectorType(ir.IntType(bits), ROWS), ir.VectorType(element, ROWS)

            def splats(pack):
                return [HalfWordVector.splat(builder, scalar) for scalar in cgutils.unpack_tuple(builder, pack)]

            b, reciprocal, p, w = splats(sub_block)
            divisor = _Divisor(builder, b.value)
            divisor.reciprocal = reciprocal
            (i1, i2), theta = splats(inverses), law.row_theta(w, b)
            words = [word.value for word in splats(signs)[: 1 << (log_chunk - 5)]]
            table = builder.gep(context.make_array(signature.args[0])(context, builder, features).data, [at])
            look_up = _define_look_up(builder, table, vector_type, log_chunk)
            target = builder.gep(context.make_array(signature.args[2])(context, builder, sums).data, [base])
            count, step = builder.extract_value(sub_block, 0), ir.Constant(ir.IntType(64), ROWS)
            with cgutils.for_range_slice(builder, ir.Constant(count.type, 0), count, step, count.type) as (first, _):
                row = slot = HalfWordVector.count_from(builder, first)
                found = inside = builder.icmp_unsigned("<", row.value, b.value)
                if not all_rows:
                    slot = law.unscale_index(row, divisor, theta, p)
                    is_hit = builder.icmp_unsigned("==", law.scale_index(slot, b, theta, p).value, row.value)
                    is_hit = builder.and_(is_hit, builder.icmp_unsigned("<", slot.value, (1 << p).value))
                    found = builder.and_(inside, is_hit)
                position = law.undo_beta(slot, i1, w >> 8, i2, w >> 24, p)
                word = HalfWordVector(builder, _select(builder, words, position.value, 5))
                flips = ((word >> (position & 31)) & 1).value
                flips = flips if bits == 32 else builder.zext(flips, integers)
                flips = builder.shl(flips, ir.Constant(integers, [bits - 1] * ROWS))
                values = builder.xor(builder.bitcast(look_up(position.value), integers), flips)
                values = builder.bitcast(values, vector_type)
                values = builder.select(found, values, ir.Constant(vector_type, None))
                pointer = builder.bitcast(builder.gep(target, [first]), vector_type.as_pointer())
                total = load_masked(builder, pointer, inside, bits // 8)
                store_masked(builder, builder.fadd(total, values), pointer, inside, bits // 8)
            return context.get_dummy_value()

        word_type, integer = types.uint64, types.int64
        four = types.UniTuple(word_type, 4)
        return types.void(features, integer, sums, integer, four, types.UniTuple(word_type, 2), four), codegen

    return add_rows


def _select(builder: Any, vectors: list[Any], positions: Any, bit: int) -> Any:
    """Select among 2^n vectors, lane by lane, by bits `bit` to `bit` + n - 1 of the lane's position."""
    while len(vectors) > 1:
        part = builder.and_(positions, ir.Constant(positions.type, [1 << bit] * positions.type.count))
        is_odd = builder.icmp_unsigned("!=", part, ir.Constant(part.type, None))
        vectors = [builder.select(is_odd, odd, even) for even, odd in zip(vectors[::2], vectors[1::2], strict=True)]
        bit += 1
    return vectors[0]


def _define_look_up(builder: Any, table: Any, vector_type: Any, log_size: int) -> Callable[[Any], Any]:
    """A function that emits the look-up of a vector of positions (32 bits) in a table of 2^log_size elements."""
    lanes = 16 if isinstance(vector_type.element, ir.FloatType) else 8  # in an AVX-512 register
    if not has_feature("avx512f"):
        return lambda positions: _gather(builder, table, positions, vector_type)
    vector, integers = ir.VectorType(vector_type.element, lanes), ir.VectorType(ir.IntType(512 // lanes), lanes)
    starts = (builder.gep(table, [ir.Constant(ir.IntType(64), start)]) for start in range(0, 1 << log_size, lanes))
    align = 64 // lanes
    registers = [builder.load(builder.bitcast(start, vector.as_pointer()), align=align) for start in starts]
    name = f"llvm.x86.avx512.vpermi2var.{'ps' if lanes == 16 else 'pd'}.512"
    permute = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector, integers, vector]), name)

    def look_up(positions: Any) -> Any:
        parts = []
        for first in range(0, ROWS, lanes):
            part = builder.shuffle_vector(positions, positions, shuffle_mask(list(range(first, first + lanes))))
            part = part if lanes == 16 else builder.zext(part, integers)
            pairs = zip(registers[::2], registers[1::2], strict=True)
            candidates = [builder.call(permute, [low, part, high]) for low, high in pairs]
            parts.append(_select(builder, candidates, part, lanes.bit_length()))
        return parts[0] if len(parts) == 1 else builder.shuffle_vector(*parts, shuffle_mask(list(range(ROWS))))

    return look_up


def _gather(builder: Any, table: Any, positions: Any, vector_type: Any) -> Any:
    """Emit the same look-up as a masked gather."""
    pointers = builder.gep(table, [positions], source_etype=vector_type.element)
    pointers.type = ir.VectorType(table.type, ROWS)
    element = vector_type.element
    kind, size = f"v{ROWS}{element.intrinsic_name}", 4 if isinstance(element, ir.FloatType) else 8
    all_lanes = ir.Constant(ir.VectorType(ir.IntType(1), ROWS), [1] * ROWS)
    arguments = [pointers, ir.Constant(ir.IntType(32), size), all_lanes, ir.Constant(vector_type, None)]
    signature = ir.FunctionType(vector_type, [argument.type for argument in arguments])
    gather = cgutils.get_or_insert_function(builder.module, signature, f"llvm.masked.gather.{kind}.v{ROWS}p0")
    return builder.call(gather, arguments)


_add_rows_32, _add_all_rows_32 = _define_add_rows(5, False), _define_add_rows(5, True)
_add_rows_64, _add_all_rows_64 = _define_add_rows(6, False), _define_add_rows(6, True)
_add_all_rows_128 = _define_add_rows(7, True)


@leaf
def _load_one_by_one(x, begin, end, features, at):
    """features[at + j] = x[0, j] for begin <= j < end."""
    for j in range(begin, end):
        features[at + j] = decoded(x[0, j], features)


def _load_features(x, begin, end, features, at):
    """`_load_one_by_one`, by vectors where elements are contiguous (in kernels)."""
    raise NotImplementedError


@extending.overload(_load_features)
def _overload_load_features(x, begin, end, features, at):
    if not loads_by_squares(x, features):
        return lambda x, begin, end, features, at: _load_one_by_one(x, begin, end, features, at)
    item = x.dtype.bitwidth // 8

    def load(x, begin, end, features, at):
        whole = (end - begin) // SQUARE_BYTES * SQUARE_BYTES if x.strides[1] == item else 0
        load_elements(x, 0, begin, whole, features, at + begin)
        _load_one_by_one(x, begin + whole, end, features, at)

    return load


@leaf
def accumulate_vector(x, begin, end, first_column, geometry, features, sums):
    """sums[r] += the terms of x[0, begin:end].

    first_column : the law's index of x's column `begin`.
    features : a flat buffer of end - begin + PADDING elements.
    sums : flat, one for each component.
    """
    before, count = PADDING // 2, end - begin
    features[:before] = 0
    features[before + count : PADDING + count] = 0
    _load_features(x, begin, end, features, before - begin)
    table, sub_blocks = words_table(geometry), _sub_blocks(geometry)
    for stack in range(geometry[7]):
        _accumulate_stack(first_column, np.uint64(count), stack, geometry, (table, sub_blocks), features, sums)


@leaf
def _sub_blocks(geometry):
    """A table of (first row, b, ceil(2^22 / b)) at [more, t]; more : 1 if the tile has a row more than the smallest."""
    k, s, n_tiles = geometry[:3]
    table = np.empty((2, np.int64(s), 3), np.uint64)
    for more in range(2):
        rows = k // n_tiles + np.uint64(more)
        for t in range(s):
            first = part_start(t, rows, s)
            b = part_start(t + ONE, rows, s) - first
            table[more, t, 0], table[more, t, 1] = first, b
            table[more, t, 2] = ((ONE << DIVISION_BITS) + b - ONE) // b
    return table


@leaf
def _accumulate_stack(first, count, stack, geometry, tables, features, sums):
    table, sub_blocks = tables
    p = geometry[4]
    end = ((first + count - ONE) >> p) + ONE
    for c0 in range(first >> p, end, WIDTH):
        chunks = np.int64(min(end - c0, np.uint64(WIDTH)))
        fill_words(table, c0, chunks, stack, geometry)
        for i in range(chunks):
            start = np.int64(((c0 + np.uint64(i)) << p) - first)  # of the chunk in the features; may be negative
            _accumulate_chunk(PADDING // 2 + start, table, i, sub_blocks, stack, geometry, features, sums)


@leaf
def _accumulate_chunk(at, table, i, sub_blocks, stack, geometry, features, sums):
    """Add the terms of the chunk that is column i of the table and begins at features[at]."""
    k, s, n_tiles, _, p, _, _, _ = geometry
    m = word(table, TILE, i)
    first_row = part_start(m, k, n_tiles)
    more = part_start(m + ONE, k, n_tiles) - first_row - k // n_tiles
    g0, g1, g2, g3 = word(table, 1, i), word(table, 2, i), word(table, 3, i), word(table, 4, i)
    for t in range(s):
        w = word(table, KEYS + np.int64(t), i)
        b = sub_blocks[more, t, 1]
        base = np.int64(stack * k + first_row + sub_blocks[more, t, 0])
        sub_block = b, sub_blocks[more, t, 2], p, w
        inverses = odd_inverse(w | ONE), odd_inverse((w >> SIXTEEN) | ONE)
        if p == SEVEN:
            _add_all_rows_128(features, at, sums, base, sub_block, inverses, (g0, g1, g2, g3))
        elif p == SIX:
            signs = (g0, g1, g0, g1) if t == 0 else (g2, g3, g2, g3)
            if b == ONE << p:
                _add_all_rows_64(features, at, sums, base, sub_block, inverses, signs)
            else:
                _add_rows_64(features, at, sums, base, sub_block, inverses, signs)
        else:
            signs = (select_word((t << p) >> FIVE, g0, g1, g2, g3) >> ((t << p) & FIVE_BITS), g0, g0, g0)
            if b == ONE << p:
                _add_all_rows_32(features, at, sums, base, sub_block, inverses, signs)
            else:
                _add_rows_32(features, at, sums, base, sub_block, inverses, signs)
