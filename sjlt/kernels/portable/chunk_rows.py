"""The entries of chunks by row, for kernels that write words for the rows of a tile."""

from __future__ import annotations

import triton
import triton.language as tl

from .chunk_codes import TILE, key_words, sign_words
from .law import odd_inverse, pair, reciprocal_of, row_theta, scale_index, unscale_by


@triton.jit
def _quotient(a, b):
    """a // b for integers 0 <= a < 2^15 and 0 < b < 2^8, by fp32 division: faster, and exact because of the 0.5."""
    return ((a.to(tl.float32) + 0.5) / b.to(tl.float32)).to(tl.uint32)


@triton.jit
def sub_blocks_of_rows(rows, s, ROWS: tl.constexpr = TILE):
    """(sub-block, row within it, its number of rows b, `reciprocal_of` b) for each row [ROWS] of a tile of `rows` rows.

    Beyond the tile's last row, the row within the sub-block is b.
    """
    r = tl.arange(0, ROWS).to(tl.uint32)
    t = tl.where(r < rows, _quotient((r + 1) * s - 1, rows), 0)
    begin = _quotient(t * rows, s)
    b = _quotient((t + 1) * rows, s) - begin
    return t, tl.where(r < rows, r - begin, b), b, reciprocal_of(b)


@triton.jit
def row_words(c, rows, s, k0, k1, stack, SUB_BLOCKS: tl.constexpr):
    """The words of chunks c: (keys [chunks * SUB_BLOCKS], signs [chunks * 4]).

    A key describes the inverse of `beta`. Its four low bytes, from the lowest on, are the factor and the addend of the
    inverse's first step and those of its second step, mod 2^7; its high word is theta.

    s : nnz.  SUB_BLOCKS : a power of two, at least 4 and s.
    """
    w = key_words(c, k0, k1, stack, SUB_BLOCKS)
    t = tl.arange(0, SUB_BLOCKS).to(tl.uint32)
    t = tl.minimum(t, s - 1)
    b = _quotient((t + 1) * rows, s) - _quotient(t * rows, s)
    first, second = odd_inverse(w | 1, 7), odd_inverse((w >> 16) | 1, 7)
    key = (second & 127) | (((0 - (w >> 24)) * second & 127) << 8)
    key |= ((first & 127) << 16) | (((0 - (w >> 8)) * first & 127) << 24)
    keys = pair(key, row_theta(w, b[None, :]))
    return tl.reshape(keys, keys.numel), sign_words(c, k0, k1, stack)


@triton.jit
def entries_of_rows(q, words, rows_in_tile, p, SUB_BLOCKS: tl.constexpr):
    """(column, negative, has_entry) of the tile's rows in chunks q [Q]: [Q, ROWS] each; columns are within the chunk.

    q : indices of chunks in `words`, from `row_words`.  rows_in_tile : from `sub_blocks_of_rows`.  p : log_chunk,
    uint32.
    """
    keys, signs = words
    t, row, b, reciprocal = rows_in_tile
    Q: tl.constexpr = q.shape[0]
    ROWS: tl.constexpr = t.shape[0]
    index = q[:, None] * SUB_BLOCKS + t.to(tl.int32)[None, :]
    key = tl.reshape(tl.gather(keys, tl.reshape(index, Q * ROWS), 0), Q, ROWS)
    theta, key = (key >> 32).to(tl.uint32), key.to(tl.uint32)
    row, b = row[None, :], b[None, :]
    i = unscale_by(row, b, theta, reciprocal[None, :], p)
    mask = (tl.full((), 1, tl.uint32) << p) - 1
    has_entry = (row < b) & (i <= mask) & (scale_index(i, b, theta, p) == row)
    i = (i * key + (key >> 8)) & mask  # `beta_inverse`; higher bits of the factor do not matter
    i = i ^ (i >> ((p + 1) >> 1))
    i = (i * (key >> 16) + (key >> 24)) & mask
    e = (t[None, :] << p) + i
    word = q[:, None] * 4 + ((e >> 5) & 3).to(tl.int32)
    sign = tl.reshape(tl.gather(signs, tl.reshape(word, Q * ROWS), 0), Q, ROWS)
    return i, (sign >> (e & 31)) & 1, has_entry
