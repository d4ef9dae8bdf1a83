"""Generate the entries of the exact law as codes: int32, 2 row + (1 where negative); rows are below 2^23."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

from ...laws import exact as law
from ...laws.philox import define
from .bits import WIDTH, WordVector, store_vector
from .jit import CODES, INT32S, INT64S, LAW, kernel, leaf

intrinsic: Any = extending.intrinsic  # Any: in kernels, intrinsics are called without a typing context

CODES_STEP = 1024  # columns generated at a time where tasks do not share a table of codes

_words = define(law.FUNCTIONS, leaf, np.uint64)
part_start, select_word, sign_bit = _words.part_start, _words.select_word, _words.sign_bit
chunk_tile, chunk_keys, chunk_signs = _words.chunk_tile, _words.chunk_keys, _words.chunk_signs
row_in_sub_block, odd_inverse = _words.row_in_sub_block, _words.odd_inverse

ONE, TWO, THREE = (np.uint64(v) for v in (1, 2, 3))
TILE, SIGNS, KEYS = 0, 1, 5  # first rows of each kind of word in a table for WIDTH chunks (see `fill_words`)
MIN_VECTOR_CHUNKS = 4  # with fewer chunks, scalar code is faster


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
def fill_words(table, c, count, stack, geometry):
    """Store the words of chunk c + i of a stack in column i of the table, for i < count <= WIDTH.

    Row TILE holds the chunk's tile, the four rows from SIGNS the sign words, and the rows from KEYS the key words of
    the sub-blocks. The table is flat: element (row, i) is ``table[row * WIDTH + i]``.
    """
    _, s, n_tiles, log_group, _, k0, k1, _ = geometry
    if count >= MIN_VECTOR_CHUNKS:
        if n_tiles > ONE:
            _store_tiles(table, TILE, c, (n_tiles, log_group, k0, k1, np.uint64(stack)))
        _store_signs(table, SIGNS, c, (k0, k1, np.uint64(stack)))
        for quad in range((s + THREE) >> TWO):
            _store_keys(table, KEYS + 4 * np.int64(quad), c, (np.uint64(quad), k0, k1, np.uint64(stack)))
        return
    for i in range(count):
        chunk = c + np.uint64(i)
        if n_tiles > ONE:
            table[TILE * WIDTH + i] = chunk_tile(chunk, n_tiles, log_group, k0, k1, stack)
        signs = chunk_signs(chunk, k0, k1, stack)
        for n in range(4):
            table[(SIGNS + n) * WIDTH + i] = signs[n]
        for quad in range((s + THREE) >> TWO):
            keys = chunk_keys(chunk, quad, k0, k1, stack)
            for n in range(4):
                table[(KEYS + 4 * np.int64(quad) + n) * WIDTH + i] = keys[n]


@leaf
def word(table, row, i):
    """Element (row, i) of a table of `fill_words`."""
    return np.uint64(table[row * WIDTH + i])


# ------------------------------------------------------------------------------------- codes


@leaf
def generate_codes(first_column, codes, geometry):
    """Store the code of column ``first_column + j`` in sub-block t in ``codes[j, t]``; stacks follow one another.

    geometry : `exact_law.Geometry` in uint64.
    """
    if codes.shape[0] == 0:
        return
    table = words_table(geometry)
    p = geometry[4]
    end = ((first_column + np.uint64(codes.shape[0]) - ONE) >> p) + ONE
    for stack in range(geometry[7]):
        for c in range(first_column >> p, end, WIDTH):
            count = np.int64(min(end - c, np.uint64(WIDTH)))
            fill_words(table, c, count, stack, geometry)
            for i in range(count):
                _generate_chunk(first_column, codes, c + np.uint64(i), table, i, stack, geometry)


@leaf
def _generate_chunk(first_column, codes, c, table, i, stack, geometry):
    """The codes of chunk c of one stack, whose words are column i of the table."""
    k, s, n_tiles, _, p, _, _, _ = geometry
    m = word(table, TILE, i)
    first_row = part_start(m, k, n_tiles)
    tile_rows = part_start(m + ONE, k, n_tiles) - first_row
    tile_row = stack * k + first_row
    g0, g1, g2, g3 = word(table, 1, i), word(table, 2, i), word(table, 3, i), word(table, 4, i)
    start = c << p
    begin, stop = max(first_column, start), min(first_column + np.uint64(codes.shape[0]), start + (ONE << p))
    for t in range(s):
        w = word(table, KEYS + np.int64(t), i)
        block_row = part_start(t, tile_rows, s)
        b = part_start(t + ONE, tile_rows, s) - block_row
        for j in range(begin, stop):
            position = j - start
            row = tile_row + block_row + row_in_sub_block(position, w, b, p)
            code = (row << ONE) | sign_bit(position, t, p, g0, g1, g2, g3)
            codes[np.int64(j - first_column), np.int64(stack * s + t)] = np.int32(code)


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
