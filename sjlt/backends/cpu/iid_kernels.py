"""Kernels of the iid law on dense data: every task generates the entries that it multiplies by, some at a time.

One kernel serves X S' and Y S. A task owns rows of the data and a range of the result's columns (`out_dim`), and runs
over all that is summed (`reduce_dim`): for X S', the result's columns are components and the sum is over features; for
the adjoint Y S it is the other way round. Where the density is high, entries are floats, and registers hold sums while
the terms pass by; where it is low, they are codes of the nonzeros.

Sums in the data's precision run over one block of terms at a time, whose bounds the sketch alone decides, as in
`dense_kernels`, and so does the rest. So results depend neither on the tasks nor on the rows projected together, and

    |result_r - exact_r| <= (N + 4) u sum over j of |S_rj x_j|,

where N is the most nonzeros that a row of S (the adjoint: a column) has in one block: MAX_TERMS on average, and never
more than a block is long. Terms that are zero are added exactly, and so are products with entries of +-2.
"""

from __future__ import annotations

import numpy as np
from numba import types

from .dense_kernels import fold
from .iid_entries import ROUND, RULE, generate_floats, generate_nonzeros, round_up
from .jit import COMPUTE, DATA_2D, OUT_2D, RANGE, TILE, TOTALS, Array, kernel, leaf
from .simd import HELD_ROWS, define_apply_codes, define_multiply_rows
from .tiles import load_tile

IID_TILE_VECTORS = (32, 8)
REDUCE_STEP = ROUND  # terms for which entries are generated at a time
# Room for a column's marks; for entries as floats, or as codes; where each column's codes begin.
TERMS = (types.int64,) * 4
ENTRIES = (Array(types.uint32, 1), Array(COMPUTE, 1), Array(types.int32, 1), Array(types.int32, 1))

_multiply_32, _multiply_8 = define_multiply_rows(32, HELD_ROWS), define_multiply_rows(8, HELD_ROWS)
_multiply_32_1, _multiply_8_1 = define_multiply_rows(32, 1), define_multiply_rows(8, 1)


@leaf
def _add_floats(floats, out_step, reduce_step, reduce_dim, tile, sums, base, out_dim):
    """sums[base + o] += sum over i < reduce_dim of floats[o out_step + i reduce_step] tile[i], for o < out_dim."""
    whole = out_dim // HELD_ROWS * HELD_ROWS
    if tile.shape[1] == 32:
        for o in range(0, whole, HELD_ROWS):
            _multiply_32(floats, o * out_step, out_step, reduce_step, reduce_dim, tile, sums, base + o)
        for o in range(whole, out_dim):
            _multiply_32_1(floats, o * out_step, out_step, reduce_step, reduce_dim, tile, sums, base + o)
    else:
        for o in range(0, whole, HELD_ROWS):
            _multiply_8(floats, o * out_step, out_step, reduce_step, reduce_dim, tile, sums, base + o)
        for o in range(whole, out_dim):
            _multiply_8_1(floats, o * out_step, out_step, reduce_step, reduce_dim, tile, sums, base + o)


_scatter_32, _gather_32 = (define_apply_codes(32, adjoint) for adjoint in (False, True))
_scatter_8, _gather_8 = (define_apply_codes(8, adjoint) for adjoint in (False, True))


@leaf
def _add_nonzeros(found, places, adjoint, reduce_dim, tile, sums, base, out_dim):
    """As `_add_floats`, by the codes of the columns."""
    if adjoint:
        for j in range(out_dim):
            if tile.shape[1] == 32:
                _gather_32(found, places[j], places[j + 1], sums, base + j, tile, 0)
            else:
                _gather_8(found, places[j], places[j + 1], sums, base + j, tile, 0)
    else:
        for j in range(reduce_dim):
            if tile.shape[1] == 32:
                _scatter_32(found, places[j], places[j + 1], tile, j, sums, base)
            else:
                _scatter_8(found, places[j], places[j + 1], tile, j, sums, base)


@leaf
def generate_entries(column, columns, row, rows, rule, entries):
    """The entries of some columns and rows as floats, where there is room for them, or as codes.

    Floats are twice the unscaled entries, `round_up(rows)` for each column.
    """
    words, floats, found, places = entries
    if floats.size > 0:
        generate_floats(column, columns, row, round_up(rows), rule, floats)
    else:
        places[0] = 0
        for c in range(columns):
            places[c + 1] = generate_nonzeros(column + np.uint64(c), row, rows, rule, words, found, places[c])


@kernel(
    types.int64, x=DATA_2D, rows=RANGE, columns=RANGE, terms=TERMS, first_column=types.uint64, adjoint=types.boolean,
    rule=RULE, entries=ENTRIES, scratch=(TILE, TILE, TOTALS), out=OUT_2D, scale=types.float64,
    accumulate=types.boolean,
)  # fmt: skip
def multiply_entries(x, rows, columns, terms, first_column, adjoint, rule, entries, scratch, out, scale, accumulate):
    """Some terms of out[rows, columns] (+)= scale times x times the entries; returns the term to go on with.

    x : these rows, and the terms from the third of `terms` on.
    terms : where to begin, and from where on to return; the first that x has; the number of all. Sums come from and go
        to other calls in `scratch`; they are stored after the last term.
    first_column : the law's index of the first term or, in an adjoint, of out's first column.
    rule : its last number is the length of a block. Blocks begin at its multiples by the law's index.
    scratch : a tile of data; for each tile of rows, sums and totals of the columns.
    """
    i0, i1 = rows
    o0, o1 = columns
    tile, sums, totals = scratch
    t, stop, x_begin, reduce_dim = terms
    vectors, out_dim, block = tile.shape[1], o1 - o0, np.int64(rule[5])
    tiles = (i1 - i0 + vectors - 1) // vectors
    phase = 0 if adjoint else np.int64(first_column % np.uint64(block))
    dense = entries[1].size > 0
    while t < stop:
        b = (t + phase) // block * block - phase
        begin, end = max(b, 0), min(b + block, reduce_dim)
        if t == begin:
            sums[: tiles * out_dim] = 0
        nt = min(REDUCE_STEP, end - t)
        if adjoint:
            generate_entries(first_column + np.uint64(o0), out_dim, t, nt, rule, entries)
        else:
            generate_entries(first_column + np.uint64(t), nt, o0, out_dim, rule, entries)
        for v in range(tiles):
            i = i0 + v * vectors
            load_tile(x, i - i0, min(vectors, i1 - i), t - x_begin, nt, tile, 0)
            if not dense:
                _add_nonzeros(entries[2], entries[3], adjoint, nt, tile, sums, v * out_dim, out_dim)
            elif adjoint:
                _add_floats(entries[1], round_up(nt), 1, nt, tile, sums, v * out_dim, out_dim)
            else:
                _add_floats(entries[1], 1, round_up(out_dim), nt, tile, sums, v * out_dim, out_dim)
        t += nt
        if t == end:
            fold(sums, totals, 0, i0, i1, out_dim, begin == 0, end == reduce_dim, out[:, o0:o1], scale, accumulate)
    return t
