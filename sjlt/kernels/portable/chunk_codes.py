"""The entries of a whole sketch in a compact form, written once for kernels that read them many times.

A code is one byte for each block of columns and row of its tile. Bits 0 to 6 are the column within the block that holds
the row's entry, bit 7 is the sign (1 is negative); NO_ENTRY means that there is none. A block is a chunk or, for wider
chunks, 2^log_block columns of one. A kernel that reads codes needs neither Philox nor k, nnz or the law, so one
compiled kernel serves all sketches. Codes of blocks of 32 columns take 4 bytes per column.

Blocks are listed by split of the columns and by tile: list l = split * tiles + tile has ``counts[l]`` blocks. Block i
of the list begins at column ``columns[l * capacity + i]`` of the data and has the codes ``codes[l * capacity + i]``.
The tiles of stacked sketches are numbered stack by stack.

Philox and the inverse permutations of sub-blocks are computed for many chunks at once, one chunk or sub-block per
thread; rows then look up the words of their sub-block in shared memory. (When each warp computed the words of a few
chunks redundantly in all its lanes, codes took 2 ns per chunk on an H200.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...laws import exact as law
from ..config import chunk_codes as config
from .law import (
    chunk_keys,
    chunk_signs,
    odd_inverse,
    pair,
    reciprocal_of,
    row_theta,
    scale_index,
    seed_words,
    tile_place,
    unscale_by,
)
from .program import start_dependents

TILE = tl.constexpr(law.TILE_ROWS)
NO_ENTRY = tl.constexpr(127)  # no column of a block, except in blocks of 128 columns, where every row has an entry
NO_COLUMN = tl.constexpr(1 << 30)  # the first column of a block that lies outside the data
SEARCH = tl.constexpr(128)  # groups searched at a time for preceding chunks of a tile
CHUNKS, MAX_KEYS = tl.constexpr(config.CHUNKS), tl.constexpr(config.MAX_KEYS)

INTEGERS = ["seed", "offset", "d", "k", "nnz", "n_tiles", "log_group", "log_chunk", "log_block", "first_group"]
INTEGERS += ["groups", "groups_per_split", "groups_per_program", "capacity"]


@triton.jit
def _quotient(a, b):
    """a // b for integers 0 <= a < 2^15 and 0 < b < 2^8, by fp32 division: faster, and exact because of the 0.5."""
    return ((a.to(tl.float32) + 0.5) / b.to(tl.float32)).to(tl.uint32)


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
def sub_blocks_of_rows(rows, s):
    """(sub-block, row within it, its number of rows b, `reciprocal_of` b) for each row [128] of a tile of `rows` rows.

    Beyond the tile's last row, the row within the sub-block is b.
    """
    r = tl.arange(0, TILE).to(tl.uint32)
    t = tl.where(r < rows, _quotient((r + 1) * s - 1, rows), 0)
    begin = _quotient(t * rows, s)
    b = _quotient((t + 1) * rows, s) - begin
    return t, tl.where(r < rows, r - begin, b), b, reciprocal_of(b)


@triton.jit
def chunk_words(c, rows, s, k0, k1, stack, SUB_BLOCKS: tl.constexpr):
    """The words of chunks c: (keys [chunks * SUB_BLOCKS], signs [chunks * 4]).

    A key describes the inverse of `beta`. Its four low bytes, from the lowest on, are the factor and the addend of the
    inverse's first step and those of its second step, mod 2^7; its high word is theta.

    s : nnz.  SUB_BLOCKS : a power of two, at least 4 and s.
    """
    CHUNK_COUNT: tl.constexpr = c.shape[0]
    quad = tl.arange(0, SUB_BLOCKS // 4).to(tl.uint32)[None, :]
    w0, w1, w2, w3 = chunk_keys(c[:, None] + (quad * 0).to(tl.int64), quad, k0, k1, stack)
    w = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), CHUNK_COUNT, SUB_BLOCKS)
    t = tl.arange(0, SUB_BLOCKS).to(tl.uint32)
    t = tl.minimum(t, s - 1)
    b = _quotient((t + 1) * rows, s) - _quotient(t * rows, s)
    first, second = odd_inverse(w | 1, 7), odd_inverse((w >> 16) | 1, 7)
    key = (second & 127) | (((0 - (w >> 24)) * second & 127) << 8)
    key |= ((first & 127) << 16) | (((0 - (w >> 8)) * first & 127) << 24)
    keys = pair(key, row_theta(w, b[None, :]))
    s0, s1, s2, s3 = chunk_signs(c, k0, k1, stack)
    signs = tl.join(tl.join(s0, s2), tl.join(s1, s3))
    return tl.reshape(keys, CHUNK_COUNT * SUB_BLOCKS), tl.reshape(signs, CHUNK_COUNT * 4)


@triton.jit
def chunk_entries(q, words, rows_in_tile, p, SUB_BLOCKS: tl.constexpr):
    """(column, negative, has_entry) of the tile's rows in chunks q [Q]: [Q, 128] each; columns are within the chunk.

    q : indices of chunks in `words`, from `chunk_words`.  rows_in_tile : from `sub_blocks_of_rows`.  p : log_chunk,
    uint32.
    """
    keys, signs = words
    t, row, b, reciprocal = rows_in_tile
    Q: tl.constexpr = q.shape[0]
    index = q[:, None] * SUB_BLOCKS + t.to(tl.int32)[None, :]
    key = tl.reshape(tl.gather(keys, tl.reshape(index, Q * TILE), 0), Q, TILE)
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
    sign = tl.reshape(tl.gather(signs, tl.reshape(word, Q * TILE), 0), Q, TILE)
    return i, (sign >> (e & 31)) & 1, has_entry


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
    groups_per_program: tl.int32,
    capacity: tl.int32,
    SUB_BLOCKS: tl.constexpr,
    PROGRAMMATIC_LAUNCH: tl.constexpr,
):
    """Write the codes of columns [offset, offset + d); grid (blocks of a split's groups, tiles of all stacks, splits).

    codes : uint8 (splits * tiles * capacity, 128).  columns : int32 (splits * tiles * capacity,).
    counts : int32 (splits * tiles,).  k, nnz, n_tiles : of one stack.  groups : the number of groups, of which the
    first is first_group; each split has groups_per_split of them, each program groups_per_program.
    groups_per_program, SUB_BLOCKS : from `config.chunk_codes.encoding`.
    """
    start_dependents(PROGRAMMATIC_LAUNCH)
    GROUPS: tl.constexpr = max(MAX_KEYS // SUB_BLOCKS, CHUNKS)
    k0, k1 = seed_words(seed)
    tile_of_stacks, split = tl.program_id(1), tl.program_id(2)
    stack, m = (tile_of_stacks // n_tiles).to(tl.uint32), tile_of_stacks % n_tiles
    tile, tiles = m.to(tl.uint32), n_tiles.to(tl.uint32)
    pm, p, s = log_group.to(tl.uint32), log_chunk.to(tl.uint32), nnz.to(tl.uint32)
    list_index = split * tl.num_programs(1) + tile_of_stacks
    start = split * groups_per_split
    end = tl.minimum(start + groups_per_split, groups)
    first = start + tl.program_id(0) * groups_per_program
    before = first - start  # the tile's chunks in the split's groups that precede this program's
    if (n_tiles & (n_tiles - 1)) != 0:  # not every group has a chunk of the tile
        before = before * 0
        for searched in range(start, first, SEARCH):
            g = searched + tl.arange(0, SEARCH)
            _, found = tile_place(tile, first_group + g.to(tl.int64), tiles, pm, k0, k1, stack)
            before += tl.sum((found & (g < first)).to(tl.int32), 0)
    g = first + tl.arange(0, GROUPS)
    group = first_group + g.to(tl.int64)
    place, found = tile_place(tile, group, tiles, pm, k0, k1, stack)
    found = found & (g < tl.minimum(first + groups_per_program, end))
    blocks = 1 << (log_chunk - log_block)
    has_chunk = found.to(tl.int32)
    position = tl.where(found, (before + tl.cumsum(has_chunk, 0) - 1) * blocks, -1)  # in the list
    c = (group << log_group.to(tl.int64)) + place.to(tl.int64)
    column = (c << log_chunk.to(tl.int64)) - offset
    column = tl.where((column < d) & (column + (1 << log_chunk) > 0), column, NO_COLUMN).to(tl.int32)
    list_begin = list_index.to(tl.int64) * capacity
    for h in range(blocks):
        tl.store(columns + list_begin + position + h, column + (h << log_block), mask=found)
    if (first < end) & (first + groups_per_program >= end):
        tl.store(counts + list_index, (before + tl.sum(has_chunk, 0)) * blocks)

    rows = tile_rows(m, k, n_tiles)
    rows_in_tile = sub_blocks_of_rows(rows, s)
    words = chunk_words(c, rows, s, k0, k1, stack, SUB_BLOCKS)
    r = tl.arange(0, TILE)
    for batch in range(0, tl.minimum(groups_per_program, end - first), CHUNKS):
        q = batch + tl.arange(0, CHUNKS)
        i, negative, has_entry = chunk_entries(q, words, rows_in_tile, p, SUB_BLOCKS)
        chunk_position = tl.gather(position, q, 0)
        for h in range(blocks):
            inside = has_entry & ((i >> log_block.to(tl.uint32)).to(tl.int32) == h)
            code = tl.where(inside, (i & ((1 << log_block) - 1).to(tl.uint32)) | (negative << 7), NO_ENTRY)
            pointers = codes + (list_begin + chunk_position + h)[:, None] * TILE + r[None, :]
            tl.store(pointers, code.to(tl.uint8), mask=(chunk_position >= 0)[:, None])
