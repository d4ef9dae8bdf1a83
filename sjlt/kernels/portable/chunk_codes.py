"""The entries of a whole sketch in a compact form, written once for kernels that read them many times.

A code is one byte for each block of columns and row of its tile. Bits 0 to 6 are the column within the block that holds
the row's entry, bit 7 is the sign (1 is negative); NO_ENTRY means that there is none. A block is a chunk or, for wider
chunks, 2^log_block columns of one. A kernel that reads codes needs neither Philox nor k, nnz or the law, so one
compiled kernel serves all sketches. Codes of blocks of 32 columns take 4 bytes per column.

Blocks are listed by split of the columns and by tile: list l = split * tiles + tile has ``counts[l]`` blocks. Block i
of the list begins at column ``columns[l * capacity + i]`` of the data and has the codes ``codes[l * capacity + i]``.
The tiles of stacked sketches are numbered stack by stack.

Philox is computed for many chunks at once, one chunk or sub-block per thread; entries then look up the words of their
sub-block in shared memory. (When each warp computed the words of a few chunks redundantly in all its lanes, codes took
2 ns per chunk on an H200.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...laws import exact as law
from ..config import chunk_codes as config
from .law import chunk_keys, chunk_signs, pair, part_start, row_in_sub_block, seed_words, tile_place
from .program import start_dependents

TILE = tl.constexpr(law.TILE_ROWS)
NO_ENTRY = tl.constexpr(127)  # no column of a block, except in blocks of 128 columns, where every row has an entry
NO_COLUMN = tl.constexpr(1 << 30)  # the first column of a block that lies outside the data
SEARCH = tl.constexpr(128)  # groups searched at a time for preceding chunks of a tile
CHUNKS, MAX_KEYS = tl.constexpr(config.CHUNKS), tl.constexpr(config.MAX_KEYS)
ENTRIES = tl.constexpr(512)  # encoded at a time
WORDS = tl.constexpr(256)  # of 8 codes each, written at a time
NO_ENTRIES = tl.constexpr(NO_ENTRY.value * 0x0101010101010101)

INTEGERS = ["seed", "offset", "d", "k", "nnz", "n_tiles", "log_group", "log_chunk", "log_block", "first_group"]
INTEGERS += ["groups", "groups_per_split", "groups_per_program", "capacity"]


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


@triton.jit
def sub_block_words(c, rows, s, k0, k1, stack, SUB_BLOCKS: tl.constexpr):
    """(words of sub-blocks [chunks * SUB_BLOCKS], sign words [chunks * 4]) of the chunks c of a tile of `rows` rows.

    The low half of a sub-block's word is its key word. The high half has its number of rows in the lowest byte, and
    above this its first row within the tile.

    s : nnz.  SUB_BLOCKS : a power of two, at least 4 and s.
    """
    keys = key_words(c, k0, k1, stack, SUB_BLOCKS)
    t = tl.minimum(tl.arange(0, SUB_BLOCKS).to(tl.uint32), s - 1)
    begin = part_start(t, rows, s)
    b = part_start(t + 1, rows, s) - begin
    return tl.reshape(pair(keys, (b | begin << 8)[None, :]), keys.numel), sign_words(c, k0, k1, stack)


@triton.jit
def entries_of_columns(q, e, words, p, SUB_BLOCKS: tl.constexpr):
    """(row within the tile, column within the chunk, negative) of entries e of the chunks with words number q."""
    sub_blocks, signs = words
    i = e & ((tl.full((), 1, tl.uint32) << p) - 1)
    word = tl.gather(sub_blocks, q * SUB_BLOCKS + (e >> p).to(tl.int32), 0)
    rows = (word >> 32).to(tl.uint32)
    row = (rows >> 8) + row_in_sub_block(i, word.to(tl.uint32), rows & 255, p)
    sign = tl.gather(signs, q * 4 + (e >> 5).to(tl.int32), 0)
    return row, i, (sign >> (e & 31)) & 1


@triton.jit
def _count_chunks(tile, begin, end, first_group, n_tiles, log_group, k0, k1, stack):
    """The number of chunks of a tile in groups [begin, end), counted from first_group on."""
    count = end - begin
    if (n_tiles & (n_tiles - 1)) != 0:  # otherwise, every group has one
        count = count * 0
        for searched in range(begin, end, SEARCH):
            g = searched + tl.arange(0, SEARCH)
            _, found = tile_place(tile, first_group + g.to(tl.int64), n_tiles, log_group, k0, k1, stack)
            count += tl.sum((found & (g < end)).to(tl.int32), 0)
    return count


@triton.jit
def _chunks_of_tile(tile, begin, end, first_group, n_tiles, log_group, k0, k1, stack, GROUPS: tl.constexpr):
    """(chunks [GROUPS], count): a tile's chunks in up to GROUPS groups. All after the first `count` are arbitrary."""
    n = tl.arange(0, GROUPS)
    group = first_group + (begin + n).to(tl.int64)
    place, found = tile_place(tile, group, n_tiles, log_group, k0, k1, stack)
    found = found & (begin + n < end)
    c = (group << log_group.to(tl.int64)) + place.to(tl.int64)
    if (n_tiles & (n_tiles - 1)) != 0:
        chunks_to = tl.cumsum(found.to(tl.int32), 0)
        which = tl.sum((chunks_to[None, :] <= n[:, None]).to(tl.int32), 1)
        c = tl.gather(c, tl.minimum(which, GROUPS - 1), 0)
    return c, tl.sum(found.to(tl.int32), 0)


@triton.jit
def _clear(codes, blocks):
    """Write NO_ENTRY to all codes of a number of blocks, before any thread of the program writes others."""
    words, word = blocks * (TILE // 8), tl.arange(0, WORDS)
    for written in range(0, words, WORDS):
        pointers = codes.to(tl.pointer_type(tl.uint64)) + written + word
        tl.store(pointers, tl.full([WORDS], NO_ENTRIES, tl.uint64), mask=written + word < words)
    tl.debug_barrier()


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
    before = _count_chunks(tile, start, first, first_group, tiles, pm, k0, k1, stack)
    end_of_program = tl.minimum(first + groups_per_program, end)
    c, count = _chunks_of_tile(tile, first, end_of_program, first_group, tiles, pm, k0, k1, stack, GROUPS)
    n = tl.arange(0, GROUPS)
    blocks = 1 << (log_chunk - log_block)
    column = (c << log_chunk.to(tl.int64)) - offset
    column = tl.where((column < d) & (column + (1 << log_chunk) > 0), column, NO_COLUMN).to(tl.int32)
    begin = list_index.to(tl.int64) * capacity + before * blocks
    for h in range(blocks):
        tl.store(columns + begin + n * blocks + h, column + (h << log_block), mask=n < count)
    if (first < end) & (first + groups_per_program >= end):
        tl.store(counts + list_index, (before + count) * blocks)

    codes += begin * TILE
    _clear(codes, count * blocks)
    words = sub_block_words(c, tile_rows(m, k, n_tiles), s, k0, k1, stack, SUB_BLOCKS)
    size = nnz << log_chunk  # entries of a chunk
    reciprocal = ((1 << 20) + size - 1) // size  # z // size == z * reciprocal >> 20, for z < 2^13 and size <= 128
    for done in range(0, count * size, ENTRIES):
        z = tl.minimum(done + tl.arange(0, ENTRIES), count * size - 1)  # past the last entry, this one again
        q = z * reciprocal >> 20
        row, i, negative = entries_of_columns(q, (z - q * size).to(tl.uint32), words, p, SUB_BLOCKS)
        code = (i & ((1 << log_block) - 1).to(tl.uint32)) | (negative << 7)
        block = q * blocks + (i >> log_block.to(tl.uint32)).to(tl.int32)
        tl.store(codes + block * TILE + row.to(tl.int32), code.to(tl.uint8))
