"""Kernels of the iid law on dense data. Each task generates the entries that it multiplies by, some at a time.

One kernel computes X S' and Y S. A task owns rows of the data and a range of columns of the result (`out_dim`), and
sums over all terms (`reduce_dim`). For X S', the columns are components and the sum is over features; for the adjoint
Y S, it is the other way round. At high density, entries are floats, and sums stay in registers while the terms are
added; at low density, entries are codes of the nonzeros.

As in `dense_kernels`, sums are computed in the data's precision within blocks of terms, whose bounds depend on the
sketch only, and then added to fp64 totals. Results therefore depend neither on the tasks nor on the rows projected
together, and

    |result_r - exact_r| <= (N + 4) u sum over j of |S_rj x_j|,

where N is the largest number of nonzeros that a row of S (for the adjoint, a column) has in one block: MAX_TERMS on
average, and at most the length of a block. Adding a zero term and multiplying by +-2 are exact.
"""

from __future__ import annotations

import numpy as np
from numba import types

from .dense_kernels import fold
from .iid_entries import ROW_BATCH, RULE, generate_floats, generate_nonzeros, round_up
from .jit import COMPUTE, DATA_2D, OUT_2D, RANGE, TILE, TOTALS, Array, kernel, leaf
from .simd import REGISTER_ROWS, define_apply_codes, define_multiply_rows
from .tiles import load_tile

IID_TILE_VECTORS = (32, 8)
REDUCE_STEP = ROW_BATCH  # terms for which entries are generated at a time
TERMS = (types.int64,) * 4
# Buffers for a column's marks; for entries as floats, or as codes; for the start of each column's codes.
ENTRIES = (Array(types.uint32, 1), Array(COMPUTE, 1), Array(types.int32, 1), Array(types.int32, 1))

_multiply_32, _multiply_8 = define_multiply_rows(32, REGISTER_ROWS), define_multiply_rows(8, REGISTER_ROWS)
_multiply_32_1, _multiply_8_1 = define_multiply_rows(32, 1), define_multiply_rows(8, 1)


@leaf
def _add_floats(floats, out_step, reduce_step, reduce_dim, tile, sums, base, out_dim):
    """sums[base + o] += sum over i < reduce_dim of floats[o out_step + i reduce_step] tile[i], for o < out_dim."""
    whole = out_dim // REGISTER_ROWS * REGISTER_ROWS
    if tile.shape[1] == 32:
        for o in range(0, whole, REGISTER_ROWS):
            _multiply_32(floats, o * out_step, out_step, reduce_step, reduce_dim, tile, sums, base + o)
        for o in range(whole, out_dim):
            _multiply_32_1(floats, o * out_step, out_step, reduce_step, reduce_dim, tile, sums, base + o)
    else:
        for o in range(0, whole, REGISTER_ROWS):
            _multiply_8(floats, o * out_step, out_step, reduce_step, reduce_dim, tile, sums, base + o)
        for o in range(whole, out_dim):
            _multiply_8_1(floats, o * out_step, out_step, reduce_step, reduce_dim, tile, sums, base + o)


_scatter_32, _gather_32 = (define_apply_codes(32, adjoint) for adjoint in (False, True))
_scatter_8, _gather_8 = (define_apply_codes(8, adjoint) for adjoint in (False, True))


@leaf
def _add_nonzeros(codes, starts, adjoint, reduce_dim, tile, sums, base, out_dim):
    """The same as `_add_floats`, by the codes of the columns."""
    if adjoint:
        for j in range(out_dim):
            if tile.shape[1] == 32:
                _gather_32(codes, starts[j], starts[j + 1], sums, base + j, tile, 0)
            else:
                _gather_8(codes, starts[j], starts[j + 1], sums, base + j, tile, 0)
    else:
        for j in range(reduce_dim):
            if tile.shape[1] == 32:
                _scatter_32(codes, starts[j], starts[j + 1], tile, j, sums, base)
            else:
                _scatter_8(codes, starts[j], starts[j + 1], tile, j, sums, base)


@leaf
def generate_entries(column, columns, row, rows, rule, entries):
    """Generate the entries of some columns and rows: as floats if the buffer for these is not empty, else as codes.

    Floats are twice the unscaled entries, `round_up(rows)` for each column.
    """
    words, floats, codes, starts = entries
    if floats.size > 0:
        generate_floats(column, columns, row, round_up(rows), rule, floats)
    else:
        starts[0] = 0
        for c in range(columns):
            starts[c + 1] = generate_nonzeros(column + np.uint64(c), row, rows, rule, words, codes, starts[c])


@kernel(
    types.int64, x=DATA_2D, rows=RANGE, columns=RANGE, terms=TERMS, first_column=types.uint64, adjoint=types.boolean,
    rule=RULE, entries=ENTRIES, scratch=(TILE, TILE, TOTALS), out=OUT_2D, scale=types.float64,
    accumulate=types.boolean,
)  # fmt: skip
def multiply_entries(x, rows, columns, terms, first_column, adjoint, rule, entries, scratch, out, scale, accumulate):
    """Add some terms of out[rows, columns] (+)= scale * x times the entries; return the first term not yet added.

    x : these rows, and the terms from `x_begin` on.
    terms : (begin, stop, x_begin, number of all terms): begin at term `begin`, return at or after `stop`. Sums are
        carried between calls in `scratch` and stored after the last term.
    first_column : the law's index of term 0 or, in an adjoint, of column 0 of out.
    rule : its last element is the length of a block. Blocks begin at multiples of it, by the law's index.
    scratch : a tile of data; the sums and totals of the columns, for each tile of rows.
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
            fold(sums, totals, 0, i0, i1, o0, out_dim, begin == 0, end == reduce_dim, out, scale, accumulate)
    return t
