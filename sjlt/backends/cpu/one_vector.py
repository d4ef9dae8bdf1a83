"""Project a single vector, in one of two ways with the same result: each component gets its terms in the same order.

- If the chunks of a sketch have as many columns as their sub-blocks have rows, a chunk contributes one element to each
  row of a sub-block, and inverting the law's bijection finds it. Sums are then contiguous SIMD vectors, to which
  gathered elements are added: no entry is stored, and an addition takes half the time of the other way.
- Otherwise, codes are generated and elements added one by one.
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
from .entries import (
    KEYS,
    TILE,
    batch_columns,
    fill_words,
    generate_batch,
    odd_inverse,
    select_word,
    word,
    words_table,
)
from .jit import leaf, overload
from .simd import SQUARE_BYTES, load_elements, loads_by_squares

intrinsic: Any = extending.intrinsic  # Any: in kernels, intrinsics are called without a typing context

ROWS = HalfWordVector.width  # rows of a sub-block that are processed together
LOG_ROWS = ROWS.bit_length() - 1
PADDING = 2 * law.TILE_ROWS  # elements that pad a buffer of features: those of a chunk before and after it

ONE, FOUR, FIVE, SIX, SEVEN, SIXTEEN, FIVE_BITS = (np.uint64(v) for v in (1, 4, 5, 6, 7, 16, 31))


def _define_add_rows(log_chunk: int) -> Any:
    @intrinsic
    def add_rows(typing_context, features, at, sums, base, p, inverses, words):
        """sums[base + r] += sign * features[at + i] for each row r of a sub-block, where column i of the chunk hits it.

        The chunk has 2^p <= 2^log_chunk columns, the sub-block as many rows, a multiple of ROWS.
        inverses : of the two factors of `beta`.
        words : the key word, and four words of signs; bit i is 1 if the entry of column i is negative.
        """

        def codegen(context, builder, signature, arguments):
            features, at, sums, base, p, inverses, words = arguments
            element, bits = context.get_data_type(signature.args[0].dtype), signature.args[0].dtype.bitwidth
            integers, vector_type = ir.VectorType(ir.IntType(bits), ROWS), ir.VectorType(element, ROWS)

            def splats(pack):
                return [HalfWordVector.splat(builder, scalar) for scalar in cgutils.unpack_tuple(builder, pack)]

            rows = builder.shl(ir.Constant(p.type, 1), p)
            p, (i1, i2), (w, *signs) = HalfWordVector.splat(builder, p), splats(inverses), splats(words)
            signs = [word.value for word in signs[: 1 << (log_chunk - 5)]]
            table = builder.gep(context.make_array(signature.args[0])(context, builder, features).data, [at])
            look_up = define_look_up(builder, table, vector_type, log_chunk)
            target = builder.gep(context.make_array(signature.args[2])(context, builder, sums).data, [base])
            step = ir.Constant(rows.type, ROWS)
            with cgutils.for_range_slice(builder, ir.Constant(rows.type, 0), rows, step, rows.type) as (first, _):
                slots = HalfWordVector.count_from(builder, first)
                position = law.undo_beta(slots, i1, w >> 8, i2, w >> 24, p)
                word = HalfWordVector(builder, _select(builder, signs, position.value, 5))
                flips = ((word >> (position & 31)) & 1).value
                flips = flips if bits == 32 else builder.zext(flips, integers)
                flips = builder.shl(flips, ir.Constant(integers, [bits - 1] * ROWS))
                values = builder.xor(builder.bitcast(look_up(position.value), integers), flips)
                pointer = builder.bitcast(builder.gep(target, [first]), vector_type.as_pointer())
                total = builder.fadd(builder.load(pointer, align=bits // 8), builder.bitcast(values, vector_type))
                builder.store(total, pointer, align=bits // 8)
            return context.get_dummy_value()

        word, integer = types.uint64, types.int64
        return types.void(
            features, integer, sums, integer, word, types.UniTuple(word, 2), types.UniTuple(word, 5)
        ), codegen

    return add_rows


def _select(builder: Any, vectors: list[Any], positions: Any, bit: int) -> Any:
    """Select among 2^n vectors, lane by lane, by bits `bit` to `bit` + n - 1 of the lane's position."""
    while len(vectors) > 1:
        part = builder.and_(positions, ir.Constant(positions.type, [1 << bit] * positions.type.count))
        is_odd = builder.icmp_unsigned("!=", part, ir.Constant(part.type, None))
        vectors = [builder.select(is_odd, odd, even) for even, odd in zip(vectors[::2], vectors[1::2], strict=True)]
        bit += 1
    return vectors[0]


def define_look_up(builder: Any, table: Any, vector_type: Any, log_size: int) -> Callable[[Any], Any]:
    """A function that emits the look-up of a vector of positions (32 bits) in a table of 2^log_size elements."""
    lanes = 16 if isinstance(vector_type.element, ir.FloatType) else 8  # in an AVX-512 register
    if not has_feature("avx512f"):
        return lambda positions: gather(builder, table, positions, vector_type)
    vector = ir.VectorType(vector_type.element, lanes)
    starts = (builder.gep(table, [ir.Constant(ir.IntType(64), start)]) for start in range(0, 1 << log_size, lanes))
    align = 64 // lanes
    registers = [builder.load(builder.bitcast(start, vector.as_pointer()), align=align) for start in starts]

    def look_up(positions: Any) -> Any:
        parts = []
        for first in range(0, ROWS, lanes):
            part = builder.shuffle_vector(positions, positions, shuffle_mask(list(range(first, first + lanes))))
            parts.append(permute(builder, registers, part))
        return parts[0] if len(parts) == 1 else builder.shuffle_vector(*parts, shuffle_mask(list(range(ROWS))))

    return look_up


def permute(builder: Any, registers: list[Any], positions: Any) -> Any:
    """Emit the look-up of a vector of positions (32 bits) in AVX-512 registers, 2^n of them.

    Higher bits of the positions are ignored.
    """
    vector = registers[0].type
    lanes = vector.count
    integers = ir.VectorType(ir.IntType(512 // lanes), lanes)
    positions = positions if lanes == 16 else builder.zext(positions, integers)

    def instruction(name: str, *operands: Any) -> Any:
        signature = ir.FunctionType(vector, [operand.type for operand in operands])
        return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), operands)

    if len(registers) == 1:
        kind = "sf" if lanes == 16 else "df"
        return instruction(f"llvm.x86.avx512.permvar.{kind}.512", registers[0], positions)
    kind, pairs = "ps" if lanes == 16 else "pd", zip(registers[::2], registers[1::2], strict=True)
    candidates = [instruction(f"llvm.x86.avx512.vpermi2var.{kind}.512", low, positions, high) for low, high in pairs]
    return _select(builder, candidates, positions, lanes.bit_length())


def gather(builder: Any, table: Any, positions: Any, vector_type: Any, mask: Any = None) -> Any:
    """Emit the same look-up as a gather, where the mask is set; elsewhere the result is 0."""
    pointers = builder.gep(table, [positions], source_etype=vector_type.element)
    pointers.type = ir.VectorType(table.type, ROWS)
    element = vector_type.element
    kind, size = f"v{ROWS}{element.intrinsic_name}", 4 if isinstance(element, ir.FloatType) else 8
    mask = ir.Constant(ir.VectorType(ir.IntType(1), ROWS), [1] * ROWS) if mask is None else mask
    arguments = [pointers, ir.Constant(ir.IntType(32), size), mask, ir.Constant(vector_type, None)]
    signature = ir.FunctionType(vector_type, [argument.type for argument in arguments])
    masked_gather = cgutils.get_or_insert_function(builder.module, signature, f"llvm.masked.gather.{kind}.v{ROWS}p0")
    return builder.call(masked_gather, arguments)


_add_rows_32, _add_rows_64, _add_rows_128 = map(_define_add_rows, (5, 6, 7))


@leaf
def _load_one_by_one(x, begin, end, features, at):
    """features[at + j] = x[0, j] for begin <= j < end."""
    for j in range(begin, end):
        features[at + j] = decoded(x[0, j], features)


def load_features(x, begin, end, features, at):
    """`_load_one_by_one`, by vectors where elements are contiguous (in kernels)."""
    raise NotImplementedError


@overload(load_features)
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
def vector_scratch(geometry):
    """The buffers of `accumulate_vector` for the words of chunks and for codes."""
    return words_table(geometry), np.empty(np.int64(geometry[1]) * batch_columns(geometry), np.int32)


@leaf
def accumulate_vector(x, begin, end, first_column, geometry, features, scratch, sums):
    """sums[r] += the terms of x[0, begin:end].

    first_column : the law's index of x's column `begin`.
    features : a flat buffer of end - begin + PADDING elements.
    scratch : from `vector_scratch`.
    sums : flat, one for each component.
    """
    before, count = PADDING // 2, end - begin
    load_features(x, begin, end, features, before - begin)
    is_square, p = _has_square_sub_blocks(geometry, sums.itemsize), geometry[4]
    table, codes = scratch
    if is_square:  # the first and the last chunk may begin or end beyond the features
        features[:before] = 0
        features[before + count : PADDING + count] = 0
    stop = ((first_column + np.uint64(count) - ONE) >> p) + ONE
    for stack in range(geometry[7]):
        for c in range(first_column >> p, stop, WIDTH):
            chunks = np.int64(min(stop - c, np.uint64(WIDTH)))
            start = int(np.int64((c << p) - first_column))  # of the chunks in the features; may be negative
            fill_words(table, c, stack, geometry)
            if is_square:
                for i in range(chunks):
                    _accumulate_chunk(before + start + (i << p), table, i, stack, geometry, features, sums)
            else:
                j0, j1 = max(0, -start), min(chunks << p, count - start)
                generate_batch(table, j0, j1, stack, geometry, codes)
                _accumulate_columns(features[before + start + j0 : before + start + j1], j0, codes, geometry, sums)


def has_square_sub_blocks(geometry, itemsize):
    """Whether sub-blocks have as many rows as chunks have columns, and enough of them for `_accumulate_chunk`.

    itemsize : bytes of a sum.
    """
    k, s, n_tiles, _, p, _, _, _ = geometry
    is_fast = s > ONE or (p > FOUR and itemsize == 4)
    return k == (n_tiles * s) << p and p >= FOUR and is_fast


_has_square_sub_blocks = leaf(has_square_sub_blocks)


@leaf
def _add_term(feature, code, sums):
    """Add or subtract a feature, as its code says."""
    code = np.uint32(code)
    sums[code >> 1] += -feature if code & 1 else feature


@leaf
def _accumulate_columns(features, first, codes, geometry, sums):
    """Add the terms of features that begin at column `first` of a batch of codes.

    Sub-blocks have different components. Four at a time, so that an addition need not wait for the one before it, which
    may be to the same component.
    """
    columns, s, size = batch_columns(geometry), np.int64(geometry[1]), features.size
    whole = s & -4
    for t in range(0, whole, 4):
        at = t * columns + first
        part0, part1 = codes[at : at + size], codes[at + columns : at + columns + size]
        at += 2 * columns
        part2, part3 = codes[at : at + size], codes[at + columns : at + columns + size]
        for j in range(size):
            _add_term(features[j], part0[j], sums)
            _add_term(features[j], part1[j], sums)
            _add_term(features[j], part2[j], sums)
            _add_term(features[j], part3[j], sums)
    for t in range(whole, s):
        part = codes[t * columns + first : t * columns + first + size]
        for j in range(size):
            _add_term(features[j], part[j], sums)


@leaf
def _accumulate_chunk(at, table, i, stack, geometry, features, sums):
    """Add the terms of the chunk that is column i of the table and begins at features[at]."""
    k, s, _, _, p, _, _, _ = geometry
    first_row = stack * k + word(table, TILE, i) * (s << p)
    g0, g1, g2, g3 = word(table, 1, i), word(table, 2, i), word(table, 3, i), word(table, 4, i)
    for t in range(s):
        w = word(table, KEYS + np.int64(t), i)
        base = np.int64(first_row + (t << p))
        inverses = odd_inverse(w | ONE), odd_inverse((w >> SIXTEEN) | ONE)
        if p == SEVEN:
            _add_rows_128(features, at, sums, base, p, inverses, (w, g0, g1, g2, g3))
        elif p == SIX:
            words = (w, g0, g1, g0, g1) if t == 0 else (w, g2, g3, g2, g3)
            _add_rows_64(features, at, sums, base, p, inverses, words)
        else:
            signs = select_word((t << p) >> FIVE, g0, g1, g2, g3) >> ((t << p) & FIVE_BITS)
            _add_rows_32(features, at, sums, base, p, inverses, (w, signs, g0, g0, g0))
