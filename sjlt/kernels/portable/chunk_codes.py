"""The entries of a whole sketch in a compact form, written once for kernels that read them many times.

A code is one byte for each block of columns and row of its tile. Bits 0 to 6 are the column within the block that holds
the row's entry, bit 7 is the sign (1 is negative); NO_ENTRY means that there is none. A block is a chunk or, for wider
chunks, 2^log_block columns of one. A kernel that reads codes needs neither Philox nor k, nnz or the law, so one
compiled kernel serves all sketches. Codes of blocks of 32 columns take 4 bytes per column.

Blocks are listed by split of the columns and by tile: list l = split * tiles + tile has ``counts[l]`` blocks. Block i
of the list begins at column ``columns[l * capacity + i]`` of the data and has the codes ``codes[l * capacity + i]``. A
block has codes for as many rows as a tile, or more. The tiles of stacked sketches are numbered stack by stack.

If there is one tile, blocks may form *runs* of 8, in which the codes of one row are adjacent, so that threads load
several at a time: in block i, row r has the code ``codes.reshape(-1, rows, 8)[(l * capacity + i) // 8, r, i % 8]``. The
last run of a list is filled with NO_ENTRY.

Lists may be of windows instead. Window w consists of rows 128 w to 128 w + 127, so that results begin at multiples of
128 components. There are as many windows as tiles, and only tiles w and w + 1 have rows of window w: its list has the
blocks of one after those of the other, with the codes of those rows. Blocks are then listed twice.

`nvidia.encode_chunks` writes the codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...laws import exact as law
from .law import chunk_keys, chunk_signs

TILE = tl.constexpr(law.TILE_ROWS)
NO_ENTRY = tl.constexpr(127)  # no column of a block, except in blocks of 128 columns, where every row has an entry
NO_COLUMN = tl.constexpr(1 << 30)  # the first column of a block that lies outside the data


@triton.jit
def tile_start(m, k, n_tiles):
    """The first row of tile m, floor(m k / n_tiles), for m <= n_tiles < 2^16: all products fit 32 unsigned bits."""
    m, rest, tiles = m.to(tl.uint32), (k % n_tiles).to(tl.uint32), n_tiles.to(tl.uint32)
    return m * (k // n_tiles).to(tl.uint32) + m * rest // tiles


@triton.jit
def tile_rows(m, k, n_tiles):
    """The number of rows of tile m."""
    return tile_start(m + 1, k, n_tiles) - tile_start(m, k, n_tiles)


@triton.jit
def key_words(c, k0, k1, stack, SUB_BLOCKS: tl.constexpr):
    """The key words of chunks c: [chunks, SUB_BLOCKS], a multiple of 4."""
    quad = tl.arange(0, SUB_BLOCKS // 4).to(tl.uint32)[None, :]
    w0, w1, w2, w3 = chunk_keys(c[:, None] + (quad * 0).to(tl.int64), quad, k0, k1, stack)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), c.shape[0], SUB_BLOCKS)


@triton.jit
def sign_words(c, k0, k1, stack):
    """The sign words of chunks c: [chunks * 4]."""
    w0, w1, w2, w3 = chunk_signs(c, k0, k1, stack)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), c.shape[0] * 4)
