"""Kernels on sparse data: X (n, n_features) as the three arrays of CSR or CSC.

Sums run in fp64, in the order of a row's nonzeros, and begin anew after a segment of them; the segments are added in
fp64 too. So CSR and CSC give the same bits where the nonzeros of a row come in the same order.

The functions without a decorator are kernels: `compiled` makes machine code of them.
"""

from __future__ import annotations

import numpy as np

from .entries import FILL, fill
from .jit import inlined, leaf

ZERO, ONE, TWO, SIX, SIX_BITS = (np.uint64(v) for v in (0, 1, 2, 6, 63))


@leaf
def _segment(k):
    """Nonzeros of a segment: adding k sums is no more work than adding these."""
    return max(4096, k)


@inlined
def _add_codes(value, codes, j, sums, base):
    """sums[base:] += value times the column whose codes are codes[j]."""
    for t in range(codes.shape[1]):
        code = np.uint32(codes[j, t])
        sums[base + np.uint64(code >> 1)] += -value if code & 1 else value


@inlined
def _add_column(value, j, first_column, table, one, geometry, sums):
    """sums += value times column j, whose codes stand in the table, or where that is empty are made into `one`."""
    if table.shape[0] > 0:
        _add_codes(value, table, np.uint64(j), sums, ZERO)
    else:
        fill(first_column + np.uint64(j), one, geometry)
        _add_codes(value, one, ZERO, sums, ZERO)


@inlined
def _mark_codes(codes, j, hit):
    for t in range(codes.shape[1]):
        row = np.uint64(codes[j, t] >> 1)
        hit[row >> SIX] |= ONE << (row & SIX_BITS)


@inlined
def _mark_column(j, first_column, table, one, geometry, hit):
    """Set the bits of the components that column j reaches; the arguments are `_add_column`'s."""
    if table.shape[0] > 0:
        _mark_codes(table, np.uint64(j), hit)
    else:
        fill(first_column + np.uint64(j), one, geometry)
        _mark_codes(one, ZERO, hit)


@leaf
def _count_bits(word):
    """The ones among the 64 bits of a word (Warren, Hacker's Delight, section 5-1)."""
    word -= (word >> ONE) & np.uint64(0x5555555555555555)
    word = (word & np.uint64(0x3333333333333333)) + ((word >> TWO) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return (word * np.uint64(0x0101010101010101)) >> np.uint64(56)


@leaf
def _store_row(sums, out, i, scale, accumulate):
    for r in range(out.shape[1]):
        value = scale * sums[r]
        out[i, r] = out[i, r] + value if accumulate else value


@inlined
def _sum_row(indices, data, begin, end, first_column, table, one, geometry, row_sums, row_totals):
    """row_sums += the nonzeros begin..end times their columns; row_totals : room for k numbers."""
    segment = _segment(row_sums.size)
    for e0 in range(begin, end, segment):
        for e in range(e0, min(e0 + segment, end)):
            _add_column(np.float64(data[e]), indices[e], first_column, table, one, geometry, row_sums)
        if end - begin > segment:
            for r in range(row_sums.size):
                row_totals[r] = (row_totals[r] if e0 > begin else 0.0) + row_sums[r]
                row_sums[r] = 0
    if end - begin > segment:
        row_sums[:] = row_totals


def project_csr(
    indptr, indices, data, i0, i1, first_column, table, one, geometry, row_sums, row_totals, out, scale, accumulate
):
    """Rows i0..i1 of a CSR matrix."""
    for i in range(i0, i1):
        row_sums[:] = 0
        _sum_row(indices, data, indptr[i], indptr[i + 1], first_column, table, one, geometry, row_sums, row_totals)
        _store_row(row_sums, out, i, scale, accumulate)


def find_unsorted(indptr, indices, counts):
    """counts[0] = the columns (rows) of a CSC (CSR) matrix whose indices do not ascend."""
    counts[0] = 0
    for j in range(indptr.size - 1):
        for e in range(indptr[j] + 1, indptr[j + 1]):
            if indices[e] < indices[e - 1]:
                counts[0] += 1
                break


def project_csc(
    indptr, indices, data, is_sorted, i0, i1, first_column, k, codes, geometry, row_sums, row_totals, counts,
    out, scale, accumulate,
):  # fmt: skip
    """Rows i0..i1 of a CSC matrix; row_sums, row_totals : k for each row, one after the other; counts : one a row."""
    segment = _segment(k)
    row_sums[:] = 0
    row_totals[:] = 0
    counts[:] = 0
    for j0 in range(0, indptr.size - 1, FILL):
        nj = min(FILL, indptr.size - 1 - j0)
        fill(first_column + np.uint64(j0), codes[:nj], geometry)
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
                        for r in range(i * k, (i + 1) * k):
                            row_totals[r] += row_sums[r]
                            row_sums[r] = 0
                        counts[i] = 0
                    counts[i] += 1
                    _add_codes(np.float64(data[e]), codes, np.uint64(j), row_sums, np.uint64(i * k))
    for r in range((i1 - i0) * k):
        row_sums[r] += row_totals[r]
    for i in range(i0, i1):
        _store_row(row_sums[(i - i0) * k : (i - i0 + 1) * k], out, i, scale, accumulate)


def count_csr(indptr, indices, i0, i1, first_column, table, one, geometry, hit, out_indptr):
    """out_indptr[i + 1] = the components that row i of a CSR matrix reaches; hit : a bit for each, all 0."""
    for i in range(i0, i1):
        for e in range(indptr[i], indptr[i + 1]):
            _mark_column(indices[e], first_column, table, one, geometry, hit)
        count = np.int64(0)
        for w in range(hit.size):
            count += np.int64(_count_bits(hit[w]))
            hit[w] = 0
        out_indptr[i + 1] = count


def fill_csr(
    indptr, indices, data, i0, i1, first_column, table, one, geometry, hit, row_sums, row_totals,
    out_indptr, out_indices, out_data, scale,
):  # fmt: skip
    """The rows that `count_csr` counted, their indices ascending; hit, row_sums : all 0."""
    for i in range(i0, i1):
        for e in range(indptr[i], indptr[i + 1]):
            _mark_column(indices[e], first_column, table, one, geometry, hit)
        _sum_row(indices, data, indptr[i], indptr[i + 1], first_column, table, one, geometry, row_sums, row_totals)
        at = out_indptr[i]
        for w in range(hit.size):
            bits = hit[w]
            while bits:
                r = 64 * w + np.int64(_count_bits((bits & (~bits + ONE)) - ONE))
                out_indices[at] = r
                out_data[at] = scale * row_sums[r]
                row_sums[r] = 0
                at += 1
                bits &= bits - ONE
            hit[w] = 0
