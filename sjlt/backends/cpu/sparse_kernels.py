"""Kernels of the exact law on sparse data: X (n, n_features) as the three arrays of CSR or CSC.

Sums run in fp64 in the order of a row's nonzeros, so that CSR and CSC give the same bits where these come in the same
order. For fp64 data (and integers) they run in segments of L = max(512, n_components) nonzeros; segments are added to
totals, and the error of each of these additions is kept and added at the end. For every input (underflow and overflow
aside), with m the nonzeros of the row,

    |result_r - exact_r| <= c u sum over j of |S_rj x_j|,   c = 2, u = 2^-24 for fp32 (m <= 2^28),
                                                            c = min(L, m) + 4, u = 2^-53 for fp64,

plus one rounding to a result of fewer bits. (fp32: m + 2 roundings in fp64 are less than u, the result's is u. fp64:
L - 1 additions in a segment, 2 for the compensated totals, 3 for the scale; see `dense_kernels`.)
"""

from __future__ import annotations

import numpy as np
from numba import types

from .bits import store_number
from .dense_kernels import two_sum
from .entries import CODES_STEP, generate_codes
from .jit import (
    CODES,
    FLOAT64S,
    INDICES,
    INT64S,
    LAW,
    OUT,
    OUT_2D,
    OUT_INDEX,
    RANGE,
    VALUES,
    Array,
    inlined,
    kernel,
    leaf,
)

ZERO, ONE, TWO, SIX, SIX_BITS = (np.uint64(v) for v in (0, 1, 2, 6, 63))
# Sums of a segment; of the segments before it; what their additions lost. The last two are empty for fp32 data.
SUMS = (FLOAT64S, FLOAT64S, FLOAT64S)
COLUMN_CODES = (CODES, CODES)  # of all columns, or empty; room for those of one column
HITS = Array(types.uint64, 1)  # a bit for each component


@leaf
def _segment(k, sums):
    """Nonzeros in a segment: adding k sums is no more work than adding these."""
    return max(512, k) if sums[1].size else np.int64(1) << np.int64(62)


@inlined
def _add_codes(value, codes, j, sums, base):
    """sums[base:] += value times the column whose codes are codes[j]."""
    for t in range(codes.shape[1]):
        code = np.uint32(codes[j, t])
        sums[base + np.uint64(code >> 1)] += -value if code & 1 else value


@inlined
def _add_column(value, j, first_column, codes, geometry, sums):
    """sums += value times column j, whose codes are in a table or, where that is empty, are generated."""
    table, one = codes
    if table.shape[0] > 0:
        _add_codes(value, table, np.uint64(j), sums, ZERO)
    else:
        generate_codes(first_column + np.uint64(j), one, geometry)
        _add_codes(value, one, ZERO, sums, ZERO)


@inlined
def _mark_codes(codes, j, hit):
    for t in range(codes.shape[1]):
        row = np.uint64(codes[j, t] >> 1)
        hit[row >> SIX] |= ONE << (row & SIX_BITS)


@inlined
def _mark_column(j, first_column, codes, geometry, hit):
    """Set the bits of the components that column j reaches; the arguments are those of `_add_column`."""
    table, one = codes
    if table.shape[0] > 0:
        _mark_codes(table, np.uint64(j), hit)
    else:
        generate_codes(first_column + np.uint64(j), one, geometry)
        _mark_codes(one, ZERO, hit)


@leaf
def _count_bits(word):
    """The ones among the 64 bits of a word (Warren, Hacker's Delight, section 5-1)."""
    word -= (word >> ONE) & np.uint64(0x5555555555555555)
    word = (word & np.uint64(0x3333333333333333)) + ((word >> TWO) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return (word * np.uint64(0x0101010101010101)) >> np.uint64(56)


@leaf
def close_segment(sums, base, k):
    """Add the sums base .. base + k - 1 of a segment to the totals, keep the error of that, and begin anew."""
    segment, totals, lost = sums
    for r in range(base, base + k):
        totals[r], error = two_sum(totals[r], segment[r])
        lost[r] += error
        segment[r] = 0


@leaf
def clear_sums(sums, base, k, several):
    """Before the first segment. several : whether there may be several segments, and totals matter."""
    segment, totals, lost = sums
    segment[base : base + k] = 0
    if several:
        totals[base : base + k] = 0
        lost[base : base + k] = 0


@leaf
def sum_of(sums, r, several):
    """The sum of all segments; one that is not finite is the total's."""
    segment, totals, lost = sums
    if not several:
        return segment[r]
    total, error = two_sum(totals[r], segment[r])
    result = total + (lost[r] + error)
    return result if np.isfinite(result) else total


@leaf
def store_sums(sums, base, k, several, out, i, o0, scale, accumulate):
    """out[i, o0 : o0 + k] (+)= scale times the sums."""
    for r in range(k):
        store_number(scale * sum_of(sums, base + r, several), out, i, o0 + r, accumulate)


@inlined
def _sum_row(indices, data, start, begin, end, first_column, codes, geometry, sums):
    """Add the nonzeros begin .. end - 1 of a row whose first is `start` to its sums."""
    row_sums = sums[0]
    segment = _segment(row_sums.size, sums)
    e = begin
    while e < end:
        if e > start and (e - start) % segment == 0:
            close_segment(sums, 0, row_sums.size)
        stop = min(end, start + ((e - start) // segment + 1) * segment)
        for f in range(e, stop):
            _add_column(np.float64(data[f]), indices[f], first_column, codes, geometry, row_sums)
        e = stop


@kernel(
    indptr=INDICES, indices=INDICES, data=VALUES, rows=RANGE, nonzeros=RANGE, first_column=types.uint64,
    codes=COLUMN_CODES, geometry=LAW, sums=SUMS, out=OUT_2D, scale=types.float64, accumulate=types.boolean,
)  # fmt: skip
def project_csr(
    indptr, indices, data, rows, nonzeros, first_column, codes, geometry, sums, out, scale, accumulate
):  # fmt: skip
    """The nonzeros in a range of rows of a CSR matrix. Sums of a row that is cut come from or go to another call."""
    k = out.shape[1]
    for i in range(rows[0], rows[1]):
        start, stop = np.int64(indptr[i]), np.int64(indptr[i + 1])
        begin, end = max(start, nonzeros[0]), min(stop, nonzeros[1])
        several = stop - start > _segment(k, sums)
        if begin == start:
            clear_sums(sums, 0, k, several)
        _sum_row(indices, data, start, begin, end, first_column, codes, geometry, sums)
        if end == stop:
            store_sums(sums, 0, k, several, out, i, 0, scale, accumulate)


@kernel(types.int64, indptr=INDICES, indices=INDICES)
def count_unsorted(indptr, indices):
    """The columns (rows) of a CSC (CSR) matrix whose indices do not ascend."""
    count = 0
    for j in range(indptr.size - 1):
        for e in range(indptr[j] + 1, indptr[j + 1]):
            if indices[e] < indices[e - 1]:
                count += 1
                break
    return count


@kernel(
    indptr=INDICES, indices=INDICES, data=VALUES, is_sorted=types.boolean, rows=RANGE, columns=RANGE,
    first_column=types.uint64, k=types.int64, codes=CODES, geometry=LAW, sums=SUMS, counts=INT64S,
)  # fmt: skip
def add_csc(
    indptr, indices, data, is_sorted, rows, columns, first_column, k, codes, geometry, sums, counts
):  # fmt: skip
    """Add a range of columns of a CSC matrix to the sums of a range of rows.

    sums : k for each row, one after the other.  counts : the nonzeros in each row's segment.
    """
    segment = _segment(k, sums)
    i0, i1 = rows
    for j0 in range(columns[0], columns[1], CODES_STEP):
        nj = min(CODES_STEP, columns[1] - j0)
        generate_codes(first_column + np.uint64(j0), codes[:nj], geometry)
        for j in range(nj):
            begin, end = indptr[j0 + j], indptr[j0 + j + 1]
            if is_sorted:
                begin += np.searchsorted(indices[begin:end], i0)
            for e in range(begin, end):
                i = indices[e] - i0
                if is_sorted and i >= i1 - i0:
                    break
                if 0 <= i < i1 - i0:
                    if counts[i] == segment:
                        close_segment(sums, i * k, k)
                        counts[i] = 0
                    counts[i] += 1
                    _add_codes(np.float64(data[e]), codes, np.uint64(j), sums[0], np.uint64(i * k))


@kernel(rows=RANGE, sums=SUMS, out=OUT_2D, scale=types.float64, accumulate=types.boolean)
def store_rows(rows, sums, out, scale, accumulate):
    """Rows of out from their sums, k for each row, one after the other."""
    k = out.shape[1]
    for i in range(rows[0], rows[1]):
        store_sums(sums, (i - rows[0]) * k, k, sums[1].size > 0, out, i, 0, scale, accumulate)


@kernel(
    indptr=INDICES, indices=INDICES, rows=RANGE, nonzeros=RANGE, first_column=types.uint64, codes=COLUMN_CODES,
    geometry=LAW, hit=HITS, out_indptr=Array(OUT_INDEX, 1),
)  # fmt: skip
def count_csr(indptr, indices, rows, nonzeros, first_column, codes, geometry, hit, out_indptr):
    """out_indptr[i + 1] = the number of components that row i of a CSR matrix reaches; hit : all 0.

    Hits of a row that is cut come from or go to another call.
    """
    for i in range(rows[0], rows[1]):
        for e in range(max(indptr[i], nonzeros[0]), min(indptr[i + 1], nonzeros[1])):
            _mark_column(indices[e], first_column, codes, geometry, hit)
        if indptr[i + 1] <= nonzeros[1]:
            count = np.int64(0)
            for w in range(hit.size):
                count += np.int64(_count_bits(hit[w]))
                hit[w] = 0
            out_indptr[i + 1] = count


@kernel(
    indptr=INDICES, indices=INDICES, data=VALUES, rows=RANGE, nonzeros=RANGE, first_column=types.uint64,
    codes=COLUMN_CODES, geometry=LAW, scratch=(HITS, *SUMS),
    out=(Array(OUT_INDEX, 1), Array(OUT_INDEX, 1), Array(OUT, 1)), scale=types.float64,
)  # fmt: skip
def fill_csr(indptr, indices, data, rows, nonzeros, first_column, codes, geometry, scratch, out, scale):
    """The rows that `count_csr` counted, their indices ascending.

    scratch : hits, all 0; sums.  out : indptr, indices and data.  A row may be cut as in `project_csr`.
    """
    hit, row_sums, totals, lost = scratch
    sums = row_sums, totals, lost
    out_indptr, out_indices, out_data = out
    k = row_sums.size
    for i in range(rows[0], rows[1]):
        start, stop = np.int64(indptr[i]), np.int64(indptr[i + 1])
        begin, end = max(start, nonzeros[0]), min(stop, nonzeros[1])
        several = stop - start > _segment(k, sums)
        if begin == start and several:
            clear_sums(sums, 0, k, True)
        for e in range(begin, end):
            _mark_column(indices[e], first_column, codes, geometry, hit)
        _sum_row(indices, data, start, begin, end, first_column, codes, geometry, sums)
        if end < stop:
            continue
        at = out_indptr[i]
        for w in range(hit.size):
            word = hit[w]
            while word:
                r = 64 * w + np.int64(_count_bits((word & (~word + ONE)) - ONE))
                out_indices[at] = r
                out_data[at] = scale * sum_of(sums, r, several)
                row_sums[r] = 0
                at += 1
                word &= word - ONE
            hit[w] = 0
