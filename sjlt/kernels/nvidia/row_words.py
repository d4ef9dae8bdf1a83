"""The rows of columns of a sub-block, in few instructions for each column."""

from __future__ import annotations

import triton
import triton.language as tl

from ..portable.law import row_theta


@triton.jit
def fraction_step(b, p):
    """2^(32 - p) / b, rounded up, for `words_of_rows`."""
    return (tl.full((), 0xFFFFFFFF, tl.uint32) >> p) // b + 1


@triton.jit
def words_of_rows(w, first_row, b, step, p):
    """Three words from which `row_of` finds the row of a column, for key words w and sub-blocks of b rows.

    first_row : modulo 2^24.

    Numbers mod 2^p are kept in the top p bits of a word, as in `portable.law.permute`. The lower 32 - p bits of the
    second word are a fraction, of 2^(32 - p), between theta / b and (theta + 1) / b; its lowest p bits are replaced by
    the multiplier. The high word of the product of b and the word (slot, fraction) is then (slot * b + theta) >> p, the
    row. `step` is the `fraction_step` of b.
    """
    mask = (tl.full((), 1, tl.uint32) << p) - 1
    top = (tl.full((), 0xFFFFFFFF, tl.uint32) >> p) ^ 0xFFFFFFFF
    first = ((w << (24 - p)) & (top | (mask << (24 - p)))) | (tl.full((), 1, tl.uint32) << (24 - p)) | 1
    fraction = row_theta(w, b) * step + (mask + 1)  # 2^p more, as its lowest bits are replaced
    second = ((w << (8 - p)) & top) | fraction
    second = ((w >> 16) & mask) | (second & (mask ^ 0xFFFFFFFF)) | 1
    return first, second, (first_row << 8) | b


@triton.jit
def row_of(i, first, second, row, p):
    """The row of columns i of their chunks, from the words of `words_of_rows`; modulo 2^24."""
    mask = ((tl.full((), 0xFFFFFFFF, tl.uint32) >> p) ^ 0xFFFFFFFF) | 1
    z = ((i << 8) | 1) * first
    z = (z ^ (z >> tl.maximum((p + 1) >> 1, 1))) & mask
    return tl.umulhi(z * second, row & 255) + (row >> 8)
