"""The entries of whole columns of a tile, by rows: every row looks up the nonzero of its sub-block."""

from __future__ import annotations

import triton
import triton.language as tl

from .chunk_codes import key_words
from .law import chunk_signs, part_start, row_in_sub_block, sign_bit, sub_block_of_row


@triton.jit
def sub_blocks_of(rows, nnz, ROWS: tl.constexpr, SUB_BLOCKS: tl.constexpr):
    """(first row, number of rows) of each sub-block [SUB_BLOCKS] of a tile, and the sub-block of each row [ROWS].

    rows : the rows of the tile, at most ROWS.  From index nnz on, sub-blocks repeat the last one.
    """
    rows, s = rows.to(tl.uint32), nnz.to(tl.uint32)
    t = tl.minimum(tl.arange(0, SUB_BLOCKS).to(tl.uint32), s - 1)
    begin = part_start(t, rows, s)
    r = tl.arange(0, ROWS).to(tl.uint32)
    return begin, part_start(t + 1, rows, s) - begin, tl.minimum(sub_block_of_row(r, s, rows), s - 1).to(tl.int32)


@triton.jit
def generate_entries(column, sub_blocks, log_chunk, k0, k1, one, ROWS: tl.constexpr, SUB_BLOCKS: tl.constexpr):
    """The entries of the sketch's columns with indices `column` (int64), as if all met one tile: [columns, ROWS].

    They are the bits (uint16) of 0, 1 and -1 in a 16-bit floating-point type; `one` is those of 1. Rows beyond those of
    the tile are meaningless.  sub_blocks : from `sub_blocks_of`.
    """
    COLUMNS: tl.constexpr = column.shape[0]
    begin, b, of_row = sub_blocks
    c, p = column >> log_chunk.to(tl.int64), log_chunk.to(tl.uint32)
    i = (column & ((1 << log_chunk) - 1)).to(tl.uint32)[:, None]
    row = begin[None, :] + row_in_sub_block(i, key_words(c, k0, k1, 0, SUB_BLOCKS), b[None, :], p)
    t = tl.arange(0, SUB_BLOCKS).to(tl.uint32)[None, :]
    g0, g1, g2, g3 = chunk_signs(c, k0, k1)
    negative = sign_bit(i, t, p, g0[:, None], g1[:, None], g2[:, None], g3[:, None])
    entry = tl.gather(row | (negative << 15), tl.broadcast_to(of_row[None, :], COLUMNS, ROWS), 1)
    r = tl.arange(0, ROWS).to(tl.uint32)[None, :]
    value = tl.where((entry & 0x7FFF) == r, (entry & 0x8000) | one, 0)
    return value.to(tl.uint16)
