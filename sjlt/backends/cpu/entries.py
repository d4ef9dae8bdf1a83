"""Generate the entries of the exact law as codes: int32, 2 row + (1 where negative); rows are below 2^23."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

from ...laws import exact as law
from ...laws.philox import define
from .bits import WIDTH, HalfWordVector, WordVector, shuffle_mask, store_vector
from .jit import CODES, INT32S, INT64S, LAW, kernel, leaf

intrinsic: Any = extending.intrinsic  # Any: in kernels, intrinsics are called without a typing context

CODES_STEP = 1024  # columns generated at a time where tasks do not share a table of codes

_words = define(law.FUNCTIONS, leaf, np.uint64)
part_start, select_word, sign_bit = _words.part_start, _words.select_word, _words.sign_bit
chunk_tile, chunk_keys, chunk_signs = _words.chunk_tile, _words.chunk_keys, _words.chunk_signs
row_in_sub_block, odd_inverse = _words.row_in_sub_block, _words.odd_inverse

ZERO, ONE, TWO, THREE = (np.uint64(v) for v in range(4))
TILE, SIGNS, KEYS = 0, 1, 5  # first rows of each kind of word in a table for WIDTH chunks (see `fill_words`)
LANES = HalfWordVector.width  # columns whose codes are computed together
LOG_LANES = np.uint64(LANES.bit_length() - 1)


# ------------------------------------------------------------------------------------- words of chunks


def _store_words(context: Any, builder: Any, table_type: Any, table: Any, row: Any, vectors: list[Any]) -> None:
    """Store vector i in ``table[row + i, :]``, where the table is flat and has WIDTH columns of 32 bits."""
    for i, vector in enumerate(vectors):
        at = builder.mul(builder.add(row, ir.Constant(row.type, i)), ir.Constant(row.type, WIDTH))
        words = builder.trunc(vector.value, ir.VectorType(ir.IntType(32), WIDTH))
        store_vector(context, builder, table_type, table, at, words)


def _define_store(function: Any, n_words: int) -> Any:
    @intrinsic
    def store(typing_context, table, row, c, scalars):
        """Store the words that the law's `function` returns for chunk c + i in ``table[row:, i]``, for i < WIDTH."""

        def codegen(context, builder, signature, arguments):
            table, row, c, packed = arguments
            scalars = [WordVector.splat(builder, word) for word in cgutils.unpack_tuple(builder, packed)]
            words = function(WordVector.count_from(builder, c), *scalars)
            _store_words(context, builder, signature.args[0], table, row, list(words) if n_words > 1 else [words])
            return context.get_dummy_value()

        return types.void(table, types.int64, types.uint64, scalars), codegen

    return store


_store_tiles, _store_signs, _store_keys = (
    _define_store(function, n_words)
    for function, n_words in ((law.chunk_tile, 1), (law.chunk_signs, 4), (law.chunk_keys, 4))
)


@leaf
def words_table(geometry):
    """A flat array for the words of WIDTH chunks, as `fill_words` lays them out."""
    return np.zeros((KEYS + ((np.int64(geometry[1]) + 3) & ~3)) * WIDTH, np.uint32)


@leaf
def fill_words(table, c, stack, geometry):
    """Store the words of chunk c + i of a stack in column i of the table, for i < WIDTH.

    Row TILE holds the chunk's tile, the four rows from SIGNS the sign words, and the rows from KEYS the key words of
    the sub-blocks. The table is flat: element (row, i) is ``table[row * WIDTH + i]``.
    """
    _, s, n_tiles, log_group, _, k0, k1, _ = geometry
    if n_tiles > ONE:
        _store_tiles(table, TILE, c, (n_tiles, log_group, k0, k1, np.uint64(stack)))
    _store_signs(table, SIGNS, c, (k0, k1, np.uint64(stack)))
    for quad in range((s + THREE) >> TWO):
        _store_keys(table, KEYS + 4 * np.int64(quad), c, (np.uint64(quad), k0, k1, np.uint64(stack)))


@leaf
def word(table, row, i):
    """Element (row, i) of a table of `fill_words`."""
    return np.uint64(table[row * WIDTH + i])


# ------------------------------------------------------------------------------------- codes


@intrinsic
def _store_chunk_codes(typing_context, codes, at, position, p, sub_block, words):
    """codes[at + i] = the code of column position + i of a chunk in one sub-block, for i < LANES.

    sub_block : (first row, number of rows).  words : the key word and the sign word.
    """

    def codegen(context, builder, signature, arguments):
        codes, at, position, p, sub_block, words = arguments
        first_row, rows, key, signs, p = (
            HalfWordVector.splat(builder, scalar)
            for scalar in (*cgutils.unpack_tuple(builder, sub_block), *cgutils.unpack_tuple(builder, words), p)
        )
        i = HalfWordVector.count_from(builder, position) & ((1 << p) - 1)
        code = _code_of(i, key, signs, first_row, rows, p)
        return store_vector(context, builder, signature.args[0], codes, at, code.value)

    integer, word = types.int64, types.uint64
    return types.void(codes, integer, integer, word, types.UniTuple(word, 2), types.UniTuple(word, 2)), codegen


def _code_of(i: Any, key: Any, signs: Any, first_row: Any, rows: Any, p: Any) -> Any:
    """The codes of columns i of chunks with these words, in a sub-block."""
    row = first_row + law.row_in_sub_block(i, key, rows, p)
    return (row << 1) | ((signs >> (i & 31)) & 1)


def _define_store_lane_codes(log_chunk: int) -> Any:
    @intrinsic
    def store_lane_codes(typing_context, codes, at, table, key_row, sign_row, shift, sub_block):
        """codes[at + j] = the code of column j of WIDTH chunks of 2^log_chunk columns in one sub-block.

        key_row, sign_row : of the table of `fill_words`.  shift : the chunks' first bit in their sign words.
        sub_block : (first row, number of rows).
        """

        def codegen(context, builder, signature, arguments):
            codes, at, table, key_row, sign_row, shift, sub_block = arguments
            first_row, rows = (HalfWordVector.splat(builder, n) for n in cgutils.unpack_tuple(builder, sub_block))
            width = ir.Constant(key_row.type, WIDTH)
            keys, signs = (
                _load_words(context, builder, signature.args[2], table, builder.mul(row, width))
                for row in (key_row, sign_row)
            )
            signs = builder.lshr(signs, builder.trunc(WordVector.splat(builder, shift).value, signs.type))
            p = HalfWordVector.constant(builder, [log_chunk] * LANES)
            for first in range(0, max(WIDTH << log_chunk, LANES), LANES):
                columns = range(first, first + LANES)
                chunks = shuffle_mask([(j >> log_chunk) % WIDTH for j in columns])
                i = HalfWordVector.constant(builder, [j & ((1 << log_chunk) - 1) for j in columns])
                key, sign = (HalfWordVector(builder, builder.shuffle_vector(w, w, chunks)) for w in (keys, signs))
                code = _code_of(i, key, sign, first_row, rows, p)
                start = builder.add(at, ir.Constant(at.type, first))
                store_vector(context, builder, signature.args[0], codes, start, code.value)
            return context.get_dummy_value()

        integer, word = types.int64, types.uint64
        return types.void(codes, integer, table, integer, integer, word, types.UniTuple(word, 2)), codegen

    return store_lane_codes


_store_codes_of_1, _store_codes_of_2, _store_codes_of_4, _store_codes_of_8 = map(_define_store_lane_codes, range(4))


def _load_words(context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> Any:
    data = builder.gep(context.make_array(array_type)(context, builder, array).data, [at])
    return builder.load(builder.bitcast(data, ir.VectorType(ir.IntType(32), WIDTH).as_pointer()), align=4)


@leaf
def batch_columns(geometry):
    """The columns of WIDTH chunks, and LANES more: the length of a row of codes from `generate_batch`."""
    return (WIDTH << np.int64(geometry[4])) + LANES


@leaf
def generate_batch(table, begin, end, stack, geometry, codes):
    """codes[t * batch_columns + j] = the code of column j in sub-block t of a stack, for begin <= j < end.

    Columns are counted from the first chunk of the table (`fill_words`). codes : flat; others may be overwritten, too.
    """
    if geometry[2] == ONE and geometry[4] < LOG_LANES:
        _generate_by_lane(table, stack, geometry, codes)
    else:
        _generate_by_chunk(table, begin, end, stack, geometry, codes)


@leaf
def _generate_by_chunk(table, begin, end, stack, geometry, codes):
    """`generate_batch` where the lanes of a vector belong to one chunk."""
    k, s, n_tiles, columns = geometry[0], geometry[1], geometry[2], batch_columns(geometry)
    p = np.int64(geometry[4])
    for i in range(begin >> p, ((end - 1) >> p) + 1):
        first_row, rows = stack * k, k
        if n_tiles > ONE:
            m = word(table, TILE, i)
            tile_row = part_start(m, k, n_tiles)
            first_row, rows = first_row + tile_row, part_start(m + ONE, k, n_tiles) - tile_row
        start, block_row = i << p, np.uint64(0)
        for t in range(np.int64(s)):
            next_row, key, e = part_start(np.uint64(t + 1), rows, s), word(table, KEYS + t, i), t << p
            for v in range(max(begin - start, 0) & -LANES, min(end - start, 1 << p), LANES):
                signs = word(table, SIGNS + ((e + v) >> 5), i) >> np.uint64(e & 31)
                sub_block = first_row + block_row, next_row - block_row
                _store_chunk_codes(codes, t * columns + start + v, v, geometry[4], sub_block, (key, signs))
            block_row = next_row


@leaf
def _generate_by_lane(table, stack, geometry, codes):
    """`generate_batch` for one tile and small chunks, all columns of the table at once."""
    s, p, columns = np.int64(geometry[1]), geometry[4], batch_columns(geometry)
    block_row = np.uint64(0)
    for t in range(s):
        e = t << np.int64(p)
        next_row = part_start(np.uint64(t + 1), geometry[0], geometry[1])
        sub_block = stack * geometry[0] + block_row, next_row - block_row
        at, key_row, sign_row, shift = t * columns, KEYS + t, SIGNS + (e >> 5), np.uint64(e & 31)
        if p == ZERO:
            _store_codes_of_1(codes, at, table, key_row, sign_row, shift, sub_block)
        elif p == ONE:
            _store_codes_of_2(codes, at, table, key_row, sign_row, shift, sub_block)
        elif p == TWO:
            _store_codes_of_4(codes, at, table, key_row, sign_row, shift, sub_block)
        else:
            _store_codes_of_8(codes, at, table, key_row, sign_row, shift, sub_block)
        block_row = next_row


@leaf
def generate_codes(first_column, codes, geometry):
    """Store the code of column ``first_column + j`` in sub-block t in ``codes[j, t]``; stacks follow one another.

    geometry : `exact_law.Geometry` in uint64.
    """
    if codes.shape[0] == 0:
        return
    s, p, columns = np.int64(geometry[1]), geometry[4], batch_columns(geometry)
    table, batch = words_table(geometry), np.empty(s * columns, np.int32)
    end = ((first_column + np.uint64(codes.shape[0]) - ONE) >> p) + ONE
    for stack in range(geometry[7]):
        for c in range(first_column >> p, end, WIDTH):
            count = min(end - c, np.uint64(WIDTH))
            fill_words(table, c, stack, geometry)
            first = int(np.int64((c << p) - first_column))  # may be negative
            begin, stop = max(0, -first), min(int(np.int64(count << p)), codes.shape[0] - first)
            generate_batch(table, begin, stop, stack, geometry, batch)
            for t in range(s):
                source = batch[t * columns + begin : t * columns + stop]
                target = codes[first + begin :, np.int64(stack) * s + t]
                for j in range(source.size):
                    target[j] = source[j]


@leaf
def generate_column(column, codes, geometry):
    """`generate_codes` for a single column, in scalar code: ``codes[0, t]``."""
    k, s, n_tiles, log_group, p, k0, k1, stacks = geometry
    c, entry = column >> p, 0
    position = column - (c << p)
    for stack in range(stacks):
        first_row, rows = stack * k, k
        if n_tiles > ONE:
            m = chunk_tile(c, n_tiles, log_group, k0, k1, stack)
            tile_row = part_start(m, k, n_tiles)
            first_row, rows = first_row + tile_row, part_start(m + ONE, k, n_tiles) - tile_row
        g0, g1, g2, g3 = chunk_signs(c, k0, k1, stack)
        w0 = w1 = w2 = w3 = block_row = np.uint64(0)
        for t in range(s):
            if t & THREE == 0:
                w0, w1, w2, w3 = chunk_keys(c, t >> TWO, k0, k1, stack)
            next_row = part_start(t + ONE, rows, s)
            w = select_word(t & THREE, w0, w1, w2, w3)
            row = first_row + block_row + row_in_sub_block(position, w, next_row - block_row, p)
            codes[0, entry] = np.int32((row << ONE) | sign_bit(position, t, p, g0, g1, g2, g3))
            block_row, entry = next_row, entry + 1


@kernel(first_column=types.uint64, codes=CODES, geometry=LAW)
def fill_table(first_column, codes, geometry):
    """Fill a table with the codes of the columns from `first_column` on."""
    generate_codes(first_column, codes, geometry)


@kernel(table=CODES, bounds=INT64S, starts=INT64S, entries=INT32S)
def list_entries(table, bounds, starts, entries):
    """Sort the codes of a table by component, then by block of columns, then by column; see `ExactPlan.lists`.

    bounds : block b consists of the columns ``bounds[b]:bounds[b + 1]``.
    """
    n_blocks = bounds.size - 1
    starts[:] = 0
    for b in range(n_blocks):
        for j in range(bounds[b], bounds[b + 1]):
            for t in range(table.shape[1]):
                starts[(table[j, t] >> 1) * n_blocks + b] += 1
    begin = 0
    for i in range(starts.size):
        begin, starts[i] = begin + starts[i], begin
    for b in range(n_blocks):
        for j in range(bounds[b], bounds[b + 1]):
            for t in range(table.shape[1]):
                i = (table[j, t] >> 1) * n_blocks + b
                entries[starts[i]] = 2 * j + (table[j, t] & 1)
                starts[i] += 1
    for i in range(starts.size - 1, 0, -1):  # each start now is the end of its list
        starts[i] = starts[i - 1]
    starts[0] = 0
