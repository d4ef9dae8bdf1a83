"""The rows of columns of a sub-block, in few instructions for each column."""

from __future__ import annotations

import triton
import triton.language as tl

from ..portable.law import part_start, row_theta, sub_block_of_row


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
def _slot_word(i, first, second, p):
    """(slot, fraction) of columns i of their chunks, in the top p and the other bits of a word."""
    mask = ((tl.full((), 0xFFFFFFFF, tl.uint32) >> p) ^ 0xFFFFFFFF) | 1
    z = ((i << 8) | 1) * first
    z = (z ^ (z >> tl.maximum((p + 1) >> 1, 1))) & mask
    return z * second


@triton.jit
def row_of(i, first, second, row, p):
    """The row of columns i of their chunks, from the words of `words_of_rows`; modulo 2^24."""
    return tl.umulhi(_slot_word(i, first, second, p), row & 255) + (row >> 8)


@triton.jit
def place_of(i, first, second, place, p):
    """The place of columns i of their chunks among sums that are ordered by sub-block, by row mod 4, and by slot.

    place : as `row` of `words_of_rows`, with the first place of the sub-block instead of its first row; p > 0. A slot
    meets at most three consecutive rows, since a sub-block has at most 2^(p + 1) rows.
    """
    word = _slot_word(i, first, second, p)
    row = tl.umulhi(word, place & 255)  # in the sub-block
    return (((row << p) | (word >> (32 - p))) & ((tl.full((), 4, tl.uint32) << p) - 1)) | (place >> 8)


@triton.jit
def first_place(r, k, n_tiles, p, NNZ: tl.constexpr):
    """(place of the first sum of row r, whether the next place has another of its sums), in the order of `place_of`.

    Rows are counted over all stacks.

    Slot i meets the rows that overlap with [i b / 2^p, (i + 1) b / 2^p) in a sub-block of b rows.
    """
    k, tiles = k.to(tl.uint32), n_tiles.to(tl.uint32)
    stack, row = r // k, r % k
    m = sub_block_of_row(row, tiles, k)
    start = part_start(m, k, tiles)
    rows = part_start(m + 1, k, tiles) - start
    t = sub_block_of_row(row - start, NNZ, rows)
    begin = part_start(t, rows, NNZ)
    b = part_start(t + 1, rows, NNZ) - begin
    row = row - start - begin
    slot = (row << p) // b
    place = ((((stack * tiles + m) * NNZ + t) << 2 | row & 3) << p) + slot
    return place.to(tl.int32), (slot + 1) * b < (row + 1) << p
