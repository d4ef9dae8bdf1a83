"""The entries of a sketch by group of chunks: which column of the group each row of a tile reads.

A word holds the byte offset of the row's column in a copy of the group whose columns are `row_bytes` apart, and in bit
31 the sign (1 is negative). A row without an entry in the group reads an additional column of zeros after the last one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...laws import exact as law
from ..config import chunk_codes as config
from .chunk_codes import tile_rows
from .chunk_rows import entries_of_rows, row_words, sub_blocks_of_rows
from .law import seed_words, tile_place

TILE = tl.constexpr(law.TILE_ROWS)
CHUNKS = tl.constexpr(config.CHUNKS)
INTEGERS = ["seed", "k", "nnz", "n_tiles", "log_group", "log_chunk", "first_group", "groups", "lists", "row_bytes"]


@triton.jit(do_not_specialize=INTEGERS)
def encode_groups(
    words,
    seed: tl.int64,
    k: tl.int32,
    nnz: tl.int32,
    n_tiles: tl.int32,
    log_group: tl.int32,
    log_chunk: tl.int32,
    first_group: tl.int64,
    groups: tl.int32,
    lists: tl.int32,
    row_bytes: tl.int32,
    SUB_BLOCKS: tl.constexpr,
):
    """Write words (groups, tiles of all stacks and padding, 128) int32; grid (blocks of CHUNKS groups, those tiles).

    k, nnz, n_tiles : of one stack.  lists : the number of tiles of all stacks, without padding.
    """
    k0, k1 = seed_words(seed)
    tile_of_stacks = tl.program_id(1)
    stack, m = (tile_of_stacks // n_tiles).to(tl.uint32), tile_of_stacks % n_tiles
    p, s = log_chunk.to(tl.uint32), nnz.to(tl.uint32)
    q = tl.arange(0, CHUNKS)
    g = tl.program_id(0) * CHUNKS + q
    group = first_group + g.to(tl.int64)
    place, found = tile_place(m.to(tl.uint32), group, n_tiles.to(tl.uint32), log_group.to(tl.uint32), k0, k1, stack)
    found = found & (tile_of_stacks < lists)
    c = (group << log_group.to(tl.int64)) + place.to(tl.int64)
    rows = tile_rows(m, k, n_tiles)
    words_of_chunks = row_words(c, rows, s, k0, k1, stack, SUB_BLOCKS)
    i, negative, has_entry = entries_of_rows(q, words_of_chunks, sub_blocks_of_rows(rows, s), p, SUB_BLOCKS)
    column = (place << p)[:, None].to(tl.int32) + i.to(tl.int32)
    zeros = (1 << (log_group + log_chunk)) + q[:, None] * 0  # the column of zeros
    word = tl.where(found[:, None] & has_entry, column * row_bytes | (negative << 31).to(tl.int32), zeros * row_bytes)
    to = words + (g[:, None].to(tl.int64) * tl.num_programs(1) + tile_of_stacks) * TILE + tl.arange(0, TILE)[None, :]
    tl.store(to, word, mask=(g < groups)[:, None])
