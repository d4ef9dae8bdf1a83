"""Kernels of the iid law on sparse data. Sums are as in `sparse_kernels`: fp64, in the order of a row's nonzeros."""

from __future__ import annotations

import numpy as np
from numba import types

from .iid_entries import RULE, generate_nonzeros
from .iid_kernels import ENTRIES, generate_entries
from .jit import INDICES, INT64S, OUT_2D, RANGE, VALUES, Array, kernel, leaf
from .sparse_kernels import SUMS, clear_sums, close_segment, store_sums

INT32S = Array(types.int32, 1)
UINT32S = Array(types.uint32, 1)
RANGES = (types.int64,) * 6  # begin and end of rows, columns and components
TABLE = (INT32S, INT64S)  # codes of all columns; the start of each column's codes


@leaf
def _add_codes(value, codes, begin, end, sums, base):
    """sums[base:] += value times the column with the codes ``codes[begin:end]``."""
    for c in range(begin, end):
        code = codes[c]
        sums[base + np.int64(code >> 1)] += -value if code & 1 else value


@kernel(
    indptr=INDICES, indices=INDICES, data=VALUES, rows=RANGE, nonzeros=RANGE, table=TABLE, segment=types.int64,
    sums=SUMS, out=OUT_2D, scale=types.float64, accumulate=types.boolean,
)  # fmt: skip
def project_csr_by_table(
    indptr, indices, data, rows, nonzeros, table, segment, sums, out, scale, accumulate
):  # fmt: skip
    """Project the nonzeros in a range of rows of a CSR matrix. Sums of a divided row are carried between calls."""
    codes, starts = table
    k = out.shape[1]
    for i in range(rows[0], rows[1]):
        start, stop = np.int64(indptr[i]), np.int64(indptr[i + 1])
        begin, end = max(start, nonzeros[0]), min(stop, nonzeros[1])
        segmented = sums[1].size > 0 and stop - start > segment
        if begin == start:
            clear_sums(sums, 0, k, segmented)
        for e in range(begin, end):
            if segmented and e > start and (e - start) % segment == 0:
                close_segment(sums, 0, k)
            j = np.int64(indices[e])
            _add_codes(np.float64(data[e]), codes, starts[j], starts[j + 1], sums[0], 0)
        if end == stop:
            store_sums(sums, 0, k, segmented, out, i, 0, scale, accumulate)


@kernel(
    column_of=INDICES, indptr=INDICES, indices=INDICES, data=VALUES, is_sorted=types.boolean, ranges=RANGES,
    first_column=types.uint64, rule=RULE, entries=ENTRIES, sums=SUMS, counts=INT64S,
)  # fmt: skip
def add_columns(column_of, indptr, indices, data, is_sorted, ranges, first_column, rule, entries, sums, counts):
    """Add some columns of a CSC matrix to sums of a range of rows and components; generate a column's entries once.

    column_of : the feature of each column; empty if there is a column for every feature.
    rule : its last element is the length of a segment.
    sums : those of a range of components for each row, row by row.
    counts : the nonzeros so far in each row's current segment.
    """
    i0, i1, c0, c1, o0, o1 = ranges
    width, segment = o1 - o0, np.int64(rule[5])
    row_sums = sums[0]
    _, floats, codes, starts = entries
    for c in range(c0, c1):
        begin, end = np.int64(indptr[c]), np.int64(indptr[c + 1])
        if is_sorted and i0 > 0:
            begin += np.searchsorted(indices[begin:end], i0)
        is_generated = False
        for e in range(begin, end):
            i, value = np.int64(indices[e]) - i0, np.float64(data[e])
            if is_sorted and i >= i1 - i0:
                break
            if not 0 <= i < i1 - i0:
                continue
            if not is_generated:
                j = np.uint64(column_of[c]) if column_of.size else np.uint64(c)
                generate_entries(first_column + j, 1, o0, width, rule, entries)
                is_generated = True
            base = i * width
            if sums[1].size:
                if counts[i] == segment:
                    close_segment(sums, base, width)
                    counts[i] = 0
                counts[i] += 1
            if floats.size > 0:
                for r in range(width):
                    row_sums[base + r] += value * floats[r]
            else:
                _add_codes(value, codes, 0, starts[1], row_sums, base)


@kernel(rows=RANGE, components=RANGE, sums=SUMS, out=OUT_2D, scale=types.float64, accumulate=types.boolean)
def store_components(rows, components, sums, out, scale, accumulate):
    """Store the sums of `add_columns` in out[rows, components]."""
    width = components[1] - components[0]
    for i in range(rows[0], rows[1]):
        base = (i - rows[0]) * width
        store_sums(sums, base, width, sums[1].size > 0, out, i, components[0], scale, accumulate)


@kernel(first_column=types.uint64, k=types.int64, rule=RULE, words=UINT32S, codes=INT32S, starts=INT64S)
def fill_columns(first_column, k, rule, words, codes, starts):
    """codes[starts[c]:starts[c + 1]] = the codes of column first_column + c, for c < len(starts) - 1."""
    starts[0] = 0
    for c in range(starts.size - 1):
        starts[c + 1] = generate_nonzeros(first_column + np.uint64(c), 0, k, rule, words, codes, starts[c])
