"""The entries of a whole sketch in a compact form, made once for kernels that multiply by them many times.

A code is one byte per (block of columns, row of its tile): in bits 0 to 6 the column of the block where the row's entry
lies, in bit 7 its sign (1 is negative); or NO_ENTRY. A block is a chunk or, of a chunk with more columns, 2^log_block
of them. So a kernel that reads codes needs neither Philox nor k, nnz or the law, and one compiled kernel serves all
sketches. Codes of blocks of 32 columns take 4 bytes per column.

Blocks are listed by split of the columns and by tile: list l = split * n_tiles + tile holds ``counts[l]`` blocks, of
which block i begins at column ``columns[l * capacity + i]`` of the data and has the codes ``codes[l * capacity + i]``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...laws import exact as law
from .law import chunk_keys, chunk_signs, row_theta, scale_index, seed_words, select_word, tile_place, words

TILE = tl.constexpr(law.TILE_ROWS)
NO_ENTRY = tl.constexpr(127)  # beyond the columns of all blocks but those of 128 columns, where every row has an entry
NO_COLUMN = tl.constexpr(1 << 30)  # where a block's columns all lie outside the data
SEARCH = tl.constexpr(128)  # groups searched at a time for the chunks that precede

_beta_inverse = words.beta_inverse

INTEGERS = [
    "seed",
    "offset",
    "d",
    "k",
    "nnz",
    "n_tiles",
    "log_group",
    "log_chunk",
    "log_block",
    "first_group",
    "groups",
]
INTEGERS += ["groups_per_split", "capacity"]


@triton.jit
def _quotient(a, b):
    """a // b for integers 0 <= a < 2^15 and 0 < b < 2^8, by fp32 division: faster, and exact with half a unit added."""
    return ((a.to(tl.float32) + 0.5) / b.to(tl.float32)).to(tl.uint32)


@triton.jit
def _tile_start(m, k, n_tiles):
    """floor(m k / n_tiles), for m <= n_tiles < 2^16: no product exceeds 32 bits without a sign."""
    m, rest, tiles = m.to(tl.uint32), (k % n_tiles).to(tl.uint32), n_tiles.to(tl.uint32)
    return m * (k // n_tiles).to(tl.uint32) + m * rest // tiles


@triton.jit
def chunk_entries(c, m, seed, k, nnz, n_tiles, log_chunk):
    """(place, negative, there) of the entries of tile m in chunks c, all of which meet it: [chunks, 128] each."""
    CHUNKS: tl.constexpr = c.shape[0]
    k0, k1 = seed_words(seed)
    tile, p = m.to(tl.uint32), log_chunk.to(tl.uint32)
    first_row = _tile_start(m, k, n_tiles)
    rows = _tile_start(m + 1, k, n_tiles) - first_row
    s = nnz.to(tl.uint32)
    r = tl.arange(0, TILE).to(tl.uint32)
    t = tl.where(r < rows, _quotient((r + 1) * s - 1, rows), 0)
    begin = _quotient(t * rows, s)
    b = _quotient((t + 1) * rows, s) - begin
    w = tl.zeros((CHUNKS, TILE), tl.uint32)
    for quad in range((nnz + 3) // 4):
        w0, w1, w2, w3 = chunk_keys(c, (quad + tl.zeros((CHUNKS,), tl.int32)).to(tl.uint32), k0, k1)
        word = select_word((t & 3)[None, :], w0[:, None], w1[:, None], w2[:, None], w3[:, None])
        w = tl.where((t >> 2).to(tl.int32)[None, :] == quad, word, w)
    theta = row_theta(w, b[None, :])
    row = (r - begin)[None, :]
    i = _quotient((row << p) + (b[None, :] - 1 - theta), b[None, :])  # `unscale_index`
    there = (r < rows)[None, :] & (i < (tile * 0 + 1 << p)) & (scale_index(i, b[None, :], theta, p) == row)
    i = _beta_inverse(i, w, w >> 8, w >> 16, w >> 24, p)
    s0, s1, s2, s3 = chunk_signs(c, k0, k1)
    e = (t[None, :] << p) + i
    negative = (select_word(e >> 5, s0[:, None], s1[:, None], s2[:, None], s3[:, None]) >> (e & 31)) & 1
    return i, negative, there


@triton.jit(do_not_specialize=INTEGERS)
def encode_chunks(
    codes,
    columns,
    counts,
    seed: tl.int64,
    offset: tl.int64,
    d: tl.int32,
    k: tl.int32,
    nnz: tl.int32,
    n_tiles: tl.int32,
    log_group: tl.int32,
    log_chunk: tl.int32,
    log_block: tl.int32,
    first_group: tl.int64,
    groups: tl.int32,
    groups_per_split: tl.int32,
    capacity: tl.int32,
    CHUNKS: tl.constexpr,
):
    """Write the codes of columns [offset, offset + d); grid (parts of CHUNKS groups, n_tiles, splits).

    codes : uint8 (splits * n_tiles * capacity, 128).  columns : int32 (splits * n_tiles * capacity,).
    counts : int32 (splits * n_tiles,).  Split i has the groups from first_group + i * groups_per_split on, of `groups`.
    """
    k0, k1 = seed_words(seed)
    part, m, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tile, tiles = m.to(tl.uint32), n_tiles.to(tl.uint32)
    pm = log_group.to(tl.uint32)
    start = split * groups_per_split
    end = tl.minimum(start + groups_per_split, groups)
    first = start + part * CHUNKS
    before = first - start  # chunks of this tile in the groups before
    if (n_tiles & (n_tiles - 1)) != 0:  # not every group has one
        before = before * 0
        for searched in range(start, first, SEARCH):
            g = searched + tl.arange(0, SEARCH)
            _, found = tile_place(tile, first_group + g.to(tl.int64), tiles, pm, k0, k1)
            before += tl.sum((found & (g < first)).to(tl.int32), 0)
    g = first + tl.arange(0, CHUNKS)
    group = first_group + g.to(tl.int64)
    place, found = tile_place(tile, group, tiles, pm, k0, k1)
    found = found & (g < end)
    blocks = 1 << (log_chunk - log_block)
    here = found.to(tl.int32)
    slot = (split * n_tiles + m).to(tl.int64) * capacity + (before + tl.cumsum(here, 0) - 1) * blocks
    c = (group << log_group.to(tl.int64)) + place.to(tl.int64)
    column = (c << log_chunk.to(tl.int64)) - offset
    column = tl.where((column < d) & (column + (1 << log_chunk) > 0), column, NO_COLUMN).to(tl.int32)
    for h in range(blocks):
        tl.store(columns + slot + h, column + (h << log_block), mask=found)
    if (first < end) & (first + CHUNKS >= end):
        tl.store(counts + split * n_tiles + m, (before + tl.sum(here, 0)) * blocks)

    i, negative, there = chunk_entries(c, m, seed, k, nnz, n_tiles, log_chunk)
    r = tl.arange(0, TILE)
    for h in range(blocks):
        inside = there & ((i >> log_block.to(tl.uint32)).to(tl.int32) == h)
        code = tl.where(inside, (i & ((1 << log_block) - 1).to(tl.uint32)) | (negative << 7), NO_ENTRY)
        tl.store(codes + (slot[:, None] + h) * TILE + r[None, :], code.to(tl.uint8), mask=found[:, None])
