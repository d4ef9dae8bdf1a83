"""Kernels of the exact law on sparse data: X (n, n_features) as the three arrays of CSR or CSC.

Sums are computed in fp64 in the order of a row's nonzeros, so CSR and CSC give the same bits if that order is the same.
For fp64 data (and integers), sums are divided into segments of L = max(512, n_components) nonzeros. Segments are added
to totals; the rounding error of each of these additions is kept and added at the end. For every input (underflow and
overflow aside), with m the number of nonzeros of the row,

    |result_r - exact_r| <= c u sum over j of |S_rj x_j|,   c = 2, u = 2^-24 for fp32 (m <= 2^28),
                                                            c = min(L, m) + 4, u = 2^-53 for fp64,

plus one rounding to a result of fewer bits. (fp32: m + 2 roundings in fp64 contribute less than u, and that of the
result u. fp64: L - 1 for the additions in a segment, 2 for the compensated totals, 3 for the scale; see
`dense_kernels`.)
"""

from __future__ import annotations

import numpy as np
from numba import types

from .bits import store_element
from .dense_kernels import two_sum
from .entries import CODES_STEP, generate_codes, generate_column
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
# Sums of the current segment; totals of earlier segments; rounding errors of these. The last two are empty for fp32.
SUMS = (FLOAT64S, FLOAT64S, FLOAT64S)
COLUMN_CODES = (CODES, CODES)  # codes of all columns, or empty; a buffer for the codes of one column
HITS = Array(types.uint64, 1)  # one bit per component


@leaf
def _segment(k, sums):
    """The nonzeros in a segment: at least k, so that closing it is no more work than adding them; no limit for fp32."""
    return max(512, k) if sums[1].size else np.int64(1) << np.int64(62)


@inlined
def _add_codes(value, codes, j, sums, base):
    """sums[base:] += value times the column with the codes ``codes[j]``."""
    for t in range(codes.shape[1]):
        code = np.uint32(codes[j, t])
        sums[base + np.uint64(code >> 1)] += -value if code & 1 else value


@inlined
def _add_column(value, j, first_column, codes, geometry, sums):
    """sums += value times column j, whose codes are in the table or, if that is empty, are generated."""
    table, one_column = codes
    if table.shape[0] > 0:
        _add_codes(value, table, np.uint64(j), sums, ZERO)
    else:
        generate_column(first_column + np.uint64(j), one_column, geometry)
        _add_codes(value, one_column, ZERO, sums, ZERO)


@inlined
def _mark_codes(codes, j, hits):
    """Set the bits of the components that ``codes[j]`` hits."""
    for t in range(codes.shape[1]):
        row = np.uint64(codes[j, t] >> 1)
        hits[row >> SIX] |= ONE << (row & SIX_BITS)


@inlined
def _mark_column(j, first_column, codes, geometry, hits):
    """Set the bits of the components that column j hits; arguments as in `_add_column`."""
    table, one_column = codes
    if table.shape[0] > 0:
        _mark_codes(table, np.uint64(j), hits)
    else:
        generate_column(first_column + np.uint64(j), one_column, geometry)
        _mark_codes(one_column, ZERO, hits)


@leaf
def _count_bits(word):
    """The number of 1 bits in a 64-bit word (Warren, Hacker's Delight, section 5-1)."""
    word -= (word >> ONE) & np.uint64(0x5555555555555555)
    word = (word & np.uint64(0x3333333333333333)) + ((word >> TWO) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return (word * np.uint64(0x0101010101010101)) >> np.uint64(56)


@leaf
def close_segment(sums, base, k):
    """Add sums base .. base + k - 1 to the totals, keep the rounding errors, and clear the sums."""
    segment, totals, compensation = sums
    for r in range(base, base + k):
        totals[r], error = two_sum(totals[r], segment[r])
        compensation[r] += error
        segment[r] = 0


@leaf
def clear_sums(sums, base, k, segmented):
    """Clear sums before the first segment. segmented : whether there may be several segments, which need totals."""
    segment, totals, compensation = sums
    segment[base : base + k] = 0
    if segmented:
        totals[base : base + k] = 0
        compensation[base : base + k] = 0


@leaf
def sum_of(sums, r, segmented):
    """The sum of all segments. If it is not finite, the uncompensated total."""
    segment, totals, compensation = sums
    if not segmented:
        return segment[r]
    total, error = two_sum(totals[r], segment[r])
    result = total + (compensation[r] + error)
    return result if np.isfinite(result) else total


@leaf
def store_sums(sums, base, k, segmented, out, i, o0, scale, accumulate):
    """out[i, o0 : o0 + k] (+)= scale times the sums."""
    if segmented:
        for r in range(k):
            store_element(scale * sum_of(sums, base + r, True), out, i, o0 + r, accumulate)
    else:  # vectorized by the compiler
        for r in range(k):
            store_element(scale * sums[0][base + r], out, i, o0 + r, accumulate)


@inlined
def _sum_row(indices, data, start, begin, end, first_column, codes, geometry, sums):
    """Add nonzeros begin .. end - 1 of a row to its sums. start : the row's first nonzero."""
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
    """Project the nonzeros in a range of rows of a CSR matrix. Sums of a divided row are carried between calls."""
    k = out.shape[1]
    for i in range(rows[0], rows[1]):
        start, stop = np.int64(indptr[i]), np.int64(indptr[i + 1])
        begin, end = max(start, nonzeros[0]), min(stop, nonzeros[1])
        segmented = stop - start > _segment(k, sums)
        if begin == start:
            clear_sums(sums, 0, k, segmented)
        _sum_row(indices, data, start, begin, end, first_column, codes, geometry, sums)
        if end == stop:
            store_sums(sums, 0, k, segmented, out, i, 0, scale, accumulate)


@kernel(types.int64, indptr=INDICES, indices=INDICES)
def count_unsorted(indptr, indices):
    """The number of columns (rows) of a CSC (CSR) matrix whose indices do not ascend."""
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

    sums : k for each row, row by row.  counts : the nonzeros so far in each row's current segment.
    """
    segment, counted = _segment(k, sums), sums[1].size > 0
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
                    if counted:
                        if counts[i] == segment:
                            close_segment(sums, i * k, k)
                            counts[i] = 0
                        counts[i] += 1
                    _add_codes(np.float64(data[e]), codes, np.uint64(j), sums[0], np.uint64(i * k))


@kernel(rows=RANGE, sums=SUMS, out=OUT_2D, scale=types.float64, accumulate=types.boolean)
def store_rows(rows, sums, out, scale, accumulate):
    """Store rows of out. sums : k for each row, row by row."""
    k = out.shape[1]
    for i in range(rows[0], rows[1]):
        store_sums(sums, (i - rows[0]) * k, k, sums[1].size > 0, out, i, 0, scale, accumulate)


@kernel(
    indptr=INDICES, indices=INDICES, rows=RANGE, nonzeros=RANGE, first_column=types.uint64, codes=COLUMN_CODES,
    geometry=LAW, hits=HITS, out_indptr=Array(OUT_INDEX, 1),
)  # fmt: skip
def count_csr(indptr, indices, rows, nonzeros, first_column, codes, geometry, hits, out_indptr):
    """out_indptr[i + 1] = the number of components that row i of a CSR matrix hits.

    hits : all 0 before the first call. Hits of a divided row are carried between calls.
    """
    for i in range(rows[0], rows[1]):
        for e in range(max(indptr[i], nonzeros[0]), min(indptr[i + 1], nonzeros[1])):
            _mark_column(indices[e], first_column, codes, geometry, hits)
        if indptr[i + 1] <= nonzeros[1]:
            count = np.int64(0)
            for w in range(hits.size):
                count += np.int64(_count_bits(hits[w]))
                hits[w] = 0
            out_indptr[i + 1] = count


@kernel(
    indptr=INDICES, indices=INDICES, data=VALUES, rows=RANGE, nonzeros=RANGE, first_column=types.uint64,
    codes=COLUMN_CODES, geometry=LAW, scratch=(HITS, *SUMS),
    out=(Array(OUT_INDEX, 1), Array(OUT_INDEX, 1), Array(OUT, 1)), scale=types.float64,
)  # fmt: skip
def fill_csr(indptr, indices, data, rows, nonzeros, first_column, codes, geometry, scratch, out, scale):
    """Store the rows that `count_csr` counted, with ascending indices. A row may be divided as in `project_csr`.

    scratch : hits, all 0; sums.  out : indptr, indices and data.
    """
    hits, row_sums, totals, compensation = scratch
    sums = row_sums, totals, compensation
    out_indptr, out_indices, out_data = out
    k = row_sums.size
    for i in range(rows[0], rows[1]):
        start, stop = np.int64(indptr[i]), np.int64(indptr[i + 1])
        begin, end = max(start, nonzeros[0]), min(stop, nonzeros[1])
        segmented = stop - start > _segment(k, sums)
        if begin == start and segmented:
            clear_sums(sums, 0, k, True)
        for e in range(begin, end):
            _mark_column(indices[e], first_column, codes, geometry, hits)
        _sum_row(indices, data, start, begin, end, first_column, codes, geometry, sums)
        if end < stop:
            continue
        at = out_indptr[i]
        for w in range(hits.size):
            word = hits[w]
            while word:
                r = 64 * w + np.int64(_count_bits((word & (~word + ONE)) - ONE))
                out_indices[at] = r
                out_data[at] = scale * sum_of(sums, r, segmented)
                row_sums[r] = 0
                at += 1
                word &= word - ONE
            hits[w] = 0
