"""Kernels of the iid law: every task makes the entries that it multiplies by, some features at a time.

One kernel serves X S' and Y S. A task owns rows of the data and a range of the result's columns, here *outer*, and runs
over all that is summed, *inner*: outer are components and inner features in X S' (`forward`), and the other way round
in Y S. Where the density is high (`dense`), entries are floats, and a register holds a sum while inner numbers pass by;
where it is low, they are codes of the nonzeros.

Sums in the data's precision run over one block of inner numbers at a time, whose bounds the sketch alone decides; the
blocks are added in their order in fp64. So results depend neither on the tasks nor on the rows projected together.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .dense_kernels import _fold
from .iid_entries import ROUND, fill_floats, find_codes, round_up
from .jit import leaf
from .simd import HELD, define_add_lanes, define_multiply_lanes
from .tiles import load_tile, sign_of

LANES = (32, 8)  # of a tile
INNER = ROUND  # numbers taken at a time
SEGMENT = 4096  # terms of a sum in fp64, after which another begins

_multiply_32, _multiply_8 = define_multiply_lanes(32, HELD), define_multiply_lanes(8, HELD)
_multiply_32_1, _multiply_8_1 = define_multiply_lanes(32, 1), define_multiply_lanes(8, 1)


@leaf
def _multiply(entries, outer_step, inner_step, inner, tile, sums, base, outer):
    """sums[base + o] += sum over i < inner of entries[o outer_step + i inner_step] tile[i], for o < outer."""
    whole = outer // HELD * HELD
    if tile.shape[1] == 32:
        for o in range(0, whole, HELD):
            _multiply_32(entries, o * outer_step, outer_step, inner_step, inner, tile, sums, base + o)
        for o in range(whole, outer):
            _multiply_32_1(entries, o * outer_step, outer_step, inner_step, inner, tile, sums, base + o)
    else:
        for o in range(0, whole, HELD):
            _multiply_8(entries, o * outer_step, outer_step, inner_step, inner, tile, sums, base + o)
        for o in range(whole, outer):
            _multiply_8_1(entries, o * outer_step, outer_step, inner_step, inner, tile, sums, base + o)


def _define_add(lanes: int) -> tuple[Any, Any]:
    add_lanes = define_add_lanes(lanes)

    def scatter(found, begin, end, features, j, components, base):
        for e in range(begin, end):
            sign = components.dtype.type(sign_of(found[e]))
            add_lanes(components, base + np.int64(found[e] >> 1), features, j, sign)

    def gather(found, begin, end, features, j, components):
        for e in range(begin, end):
            sign = components.dtype.type(sign_of(found[e]))
            add_lanes(features, j, components, np.int64(found[e] >> 1), sign)

    # As in `tiles`: names that Numba's cache can tell apart.
    scatter.__qualname__, gather.__qualname__ = f"scatter_column_{lanes}", f"gather_column_{lanes}"
    return leaf(scatter), leaf(gather)


(_scatter_32, _gather_32), (_scatter_8, _gather_8) = map(_define_add, LANES)


@leaf
def _add_codes(found, places, forward, nt, tile, sums, base, outer):
    """What `_multiply` does, by the codes of the columns."""
    if forward:
        for j in range(nt):
            if tile.shape[1] == 32:
                _scatter_32(found, places[j], places[j + 1], tile, j, sums, base)
            else:
                _scatter_8(found, places[j], places[j + 1], tile, j, sums, base)
    else:
        for j in range(outer):
            if tile.shape[1] == 32:
                _gather_32(found, places[j], places[j + 1], sums, base + j, tile)
            else:
                _gather_8(found, places[j], places[j + 1], sums, base + j, tile)


@leaf
def _fill(column, columns, row, rows, dense, rule, words, entries, found, places):
    """The entries of some columns and rows: floats, `round_up(rows)` to a column, or codes between `places`."""
    if dense:
        fill_floats(column, columns, row, round_up(rows), rule, entries)
    else:
        places[0] = 0
        for c in range(columns):
            places[c + 1] = find_codes(column + np.uint64(c), row, rows, rule, words, found, places[c])


def multiply(
    x, i0, i1, o0, o1, first_column, block, forward, dense, rule, words, entries, found, places, tile, sums, totals,
    out, scale, accumulate,
):  # fmt: skip
    """out[i0:i1, o0:o1] (+)= scale/2 times x[i0:i1] times twice the entries.

    first_column : the law's index of x's first column (`forward`) or out's.  block : inner numbers of a sum in x's
    precision; blocks begin at its multiples by the law's index.  sums, totals : o1 - o0 rows for each tile of data.
    """
    lanes, outer, inner = tile.shape[1], o1 - o0, x.shape[1]
    tiles = (i1 - i0 + lanes - 1) // lanes
    phase = np.int64(first_column % np.uint64(block)) if forward else 0
    for b0 in range(-phase, inner, block):
        begin, end = max(b0, 0), min(b0 + block, inner)
        sums[: tiles * outer] = 0
        for t in range(begin, end, INNER):
            nt = min(INNER, end - t)
            if forward:
                _fill(first_column + np.uint64(t), nt, o0, outer, dense, rule, words, entries, found, places)
            else:
                _fill(first_column + np.uint64(o0), outer, t, nt, dense, rule, words, entries, found, places)
            for v in range(tiles):
                i = i0 + v * lanes
                load_tile(x, i, min(lanes, i1 - i), t, nt, tile, 0)
                if not dense:
                    _add_codes(found, places, forward, nt, tile, sums, v * outer, outer)
                elif forward:
                    _multiply(entries, 1, round_up(outer), nt, tile, sums, v * outer, outer)
                else:
                    _multiply(entries, round_up(nt), 1, nt, tile, sums, v * outer, outer)
        _fold(sums, totals, 0, i0, i1, outer, begin == 0, end == inner, out[:, o0:o1], scale, accumulate)


@leaf
def _add_column(value, found, begin, end, sums, base):
    """sums[base:] += value times the column with these codes."""
    for c in range(begin, end):
        code = found[c]
        sums[base + np.int64(code >> 1)] += -value if code & 1 else value


@leaf
def _fold_row(sums, totals, base, outer):
    for r in range(base, base + outer):
        totals[r] += sums[r]
        sums[r] = 0


@leaf
def _store_row(sums, totals, base, out, i, o0, o1, scale, accumulate):
    for r in range(o1 - o0):
        result = scale * (sums[base + r] + totals[base + r])
        out[i, o0 + r] = out[i, o0 + r] + result if accumulate else result


def multiply_csr(
    indptr, indices, data, i0, i1, found, counts, row_sums, row_totals, out, scale, accumulate
):  # fmt: skip
    """Rows i0..i1 of a CSR matrix, where all columns' codes are at hand, found[counts[j] : counts[j + 1]] of column j.

    row_sums, row_totals : room for a row of out.
    """
    for i in range(i0, i1):
        row_sums[:] = 0
        row_totals[:] = 0
        for e in range(indptr[i], indptr[i + 1]):
            if e > indptr[i] and (e - indptr[i]) % SEGMENT == 0:
                _fold_row(row_sums, row_totals, 0, row_sums.size)
            j = np.int64(indices[e])
            _add_column(np.float64(data[e]), found, counts[j], counts[j + 1], row_sums, 0)
        _store_row(row_sums, row_totals, 0, out, i, 0, row_sums.size, scale, accumulate)


def multiply_sorted(
    row_of, indices, data, o0, o1, first_column, dense, rule, words, entries, found, places, row_sums, row_totals,
    counts, out, scale, accumulate,
):  # fmt: skip
    """out[:, o0:o1] (+)= scale/2 times x times twice the entries, for numbers data[e] in x[row_of[e], indices[e]].

    indices ascend, so that a column's entries are made once.  row_sums, row_totals : n (o1 - o0), the components of
    each row one after the other.  counts : n.
    """
    outer = o1 - o0
    row_sums[:] = 0
    row_totals[:] = 0
    counts[:] = 0
    for e in range(data.size):
        if e == 0 or indices[e] != indices[e - 1]:
            _fill(
                first_column + np.uint64(indices[e]), 1, o0, outer, dense, rule, words, entries, found, places
            )  # fmt: skip
        i, value = np.int64(row_of[e]), np.float64(data[e])
        if counts[i] == SEGMENT:
            _fold_row(row_sums, row_totals, i * outer, outer)
            counts[i] = 0
        counts[i] += 1
        if dense:
            for r in range(outer):
                row_sums[i * outer + r] += value * entries[r]
        else:
            _add_column(value, found, 0, places[1], row_sums, i * outer)
    for row in range(out.shape[0]):
        _store_row(row_sums, row_totals, row * outer, out, row, o0, o1, scale, accumulate)


def fill_columns(first_column, k, rule, words, found, counts):
    """found[counts[c] : counts[c + 1]] = the codes of whole columns; counts : one more than there are columns."""
    counts[0] = 0
    for c in range(counts.size - 1):
        counts[c + 1] = find_codes(first_column + np.uint64(c), 0, k, rule, words, found, counts[c])
