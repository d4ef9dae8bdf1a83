"""Codes of a whole sketch, for kernels that read them; `portable.chunk_codes` describes them.

Philox is computed for many chunks at once, one chunk or sub-block per thread, and a table in shared memory keeps the
words of each sub-block. Threads then compute the rows of up to PART adjacent columns of a sub-block, one after the
other, and write their codes to shared memory, from which they are copied. (When threads looked up the words of every
entry, and wrote codes to global memory, most codes took 1.4 to 2 times as long.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..config import chunk_codes as config
from ..portable.chunk_codes import NO_COLUMN, NO_ENTRY, TILE, key_words, sign_words, tile_rows, tile_start
from ..portable.law import part_start, seed_words, tile_place
from ..portable.program import start_dependents
from .row_words import fraction_step, row_of, words_of_rows
from .shared_memory import (
    load_word,
    load_words,
    shared_begin,
    store_byte,
    store_byte_where,
    store_word,
    store_words,
)

THREADS = tl.constexpr(128)
SEARCH = tl.constexpr(128)  # groups searched at a time for preceding chunks of a tile
LINES = tl.constexpr(config.LINES)  # blocks encoded at a time
LOG_PART = tl.constexpr(4)
CHUNKS, MAX_KEYS = tl.constexpr(config.CHUNKS), tl.constexpr(config.MAX_KEYS)
WORD_BYTES, ENTRY_BYTES = tl.constexpr(config.WORD_BYTES), tl.constexpr(config.ENTRY_BYTES)
LOG_WORD_BYTES = tl.constexpr(config.WORD_BYTES.bit_length() - 1)
SIGN_WORDS = tl.constexpr(config.SIGN_WORDS)  # of a chunk
NO_ENTRIES = tl.constexpr(NO_ENTRY.value * 0x01010101)

INTEGERS = ["seed", "offset", "d", "k", "nnz", "n_tiles", "log_group", "log_chunk", "log_block", "first_group"]
INTEGERS += ["groups", "groups_per_split", "groups_per_program", "capacity", "log_rows", "log_run"]


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
def _write_tables(table, signs, c, first_row, rows, s, p, k0, k1, stack, SUB_BLOCKS: tl.constexpr):
    """Write the words of all sub-blocks of chunks c, of a tile of `rows` rows, and their sign words.

    first_row : of the tile, counted from the first of the list.
    """
    keys = key_words(c, k0, k1, stack, SUB_BLOCKS)
    t = tl.minimum(tl.arange(0, SUB_BLOCKS).to(tl.uint32), s - 1)
    begin = part_start(t, rows, s)
    b = part_start(t + 1, rows, s) - begin
    zero, begin = keys * 0, begin + first_row
    first, second, row = words_of_rows(keys, zero + begin[None, :], zero + b[None, :], fraction_step(b, p)[None, :], p)
    place = tl.arange(0, keys.numel).reshape(keys.shape)
    store_words(table + place * ENTRY_BYTES, first, second, row, zero)
    words = sign_words(c, k0, k1, stack)
    store_word(signs + tl.arange(0, words.numel) * WORD_BYTES, words.to(tl.int32, bitcast=True))


@triton.jit
def _encode_parts(
    lines, table, signs, first_chunk, chunks, nnz, log_chunk, log_block, log_rows, log_run, SUB_BLOCKS: tl.constexpr,
    WINDOWS: tl.constexpr,
):  # fmt: skip
    """Write the codes of `chunks` chunks, whose words are in the tables from first_chunk on, to `lines`.

    With WINDOWS, rows of a tile that are not among the TILE rows of the list are left out.
    """
    in_run = (1 << log_run) - 1
    thread = tl.arange(0, THREADS)
    p, log_part = log_chunk.to(tl.uint32), tl.minimum(log_chunk, LOG_PART)
    log_parts = log_chunk - log_part
    parts = nnz << log_parts  # of a chunk
    reciprocal = ((1 << 20) + parts - 1) // parts  # z // parts == z * reciprocal >> 20, for z < 2^13 and parts <= 128
    for done in range(0, chunks * parts, THREADS):
        z = tl.minimum(done + thread, chunks * parts - 1)  # past the last part, this one again
        q = z * reciprocal >> 20
        part = z - q * parts
        t = part >> log_parts
        i = (part & ((1 << log_parts) - 1)) << log_part  # the part's first column
        e = (t << log_chunk) + i
        first, second, row, _ = load_words(table + ((first_chunk + q) * SUB_BLOCKS + t) * ENTRY_BYTES)
        word = load_word(signs + ((first_chunk + q) * SIGN_WORDS + (e >> 5)) * WORD_BYTES).to(tl.uint32, bitcast=True)
        word >>= (e & 31).to(tl.uint32)
        block = (q << (log_chunk - log_block)) + (i >> log_block)
        line = lines + (block >> log_run << (log_rows + log_run)) + (block & in_run)
        code = (i & ((1 << log_block) - 1)).to(tl.uint32)
        column = i.to(tl.uint32)
        for _ in range(1 << log_part):
            r = row_of(column, first, second, row, p).to(tl.int32)
            if WINDOWS:
                r &= (1 << 24) - 1
                store_byte_where(line + r, code | ((word & 1) << 7), r < TILE)
            else:
                store_byte(line + (r << log_run), code | ((word & 1) << 7))
            column += 1
            code += 1
            word >>= 1


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
    log_rows: tl.int32,
    log_run: tl.int32,
    SUB_BLOCKS: tl.constexpr,
    WINDOWS: tl.constexpr,
    PROGRAMMATIC_LAUNCH: tl.constexpr,
    SHARED_BYTES: tl.constexpr,
):
    """Write the codes of columns [offset, offset + d); grid (blocks of a split's groups, tiles of all stacks, splits).

    codes : uint8 (splits * tiles * capacity, 2^log_rows).  columns : int32 (splits * tiles * capacity,).
    counts : int32 (splits * tiles + 1,); the last one becomes zero.  k, nnz, n_tiles : of one stack.  groups : the
    number of groups, of which the first is first_group; each split has groups_per_split of them, each program
    groups_per_program.  log_run : of the blocks in a run; capacity is a multiple of these.  log_rows : 7 with WINDOWS.
    groups_per_program, SUB_BLOCKS : from `config.chunk_codes.encoding`.  WINDOWS : whether lists are of windows instead
    of tiles; the second axis of the grid is then twice as long.
    """
    start_dependents(PROGRAMMATIC_LAUNCH)
    GROUPS: tl.constexpr = max(MAX_KEYS // SUB_BLOCKS, CHUNKS)
    k0, k1 = seed_words(seed)
    tile_of_stacks, split = tl.program_id(1) >> WINDOWS, tl.program_id(2)
    stack, m = (tile_of_stacks // n_tiles).to(tl.uint32), tile_of_stacks % n_tiles
    tile, tiles = m.to(tl.uint32), n_tiles.to(tl.uint32)
    pm, p, s = log_group.to(tl.uint32), log_chunk.to(tl.uint32), nnz.to(tl.uint32)
    list_index = split * (tl.num_programs(1) >> WINDOWS) + tile_of_stacks
    start = split * groups_per_split
    end = tl.minimum(start + groups_per_split, groups)
    first = start + tl.program_id(0) * groups_per_program
    end_of_tile, is_last, first_row = end, first < end, 0
    if WINDOWS:  # the list has the chunks of tile m and then those of m + 1, if there is one
        second = tl.program_id(1) & 1
        tile += second.to(tl.uint32)
        first_row = tile_start(tile, k, n_tiles) - m.to(tl.uint32) * TILE
        is_last &= second > 0
        end_of_tile, end_of_first = tl.where(tile < tiles, end, start), tl.where(second > 0, end, start)
        before = _count_chunks(tile - 1, start, end_of_first, first_group, tiles, pm, k0, k1, stack)
        before += _count_chunks(tile, start, tl.minimum(first, end_of_tile), first_group, tiles, pm, k0, k1, stack)
    else:
        before = _count_chunks(tile, start, first, first_group, tiles, pm, k0, k1, stack)
    end_of_program = tl.minimum(first + groups_per_program, end_of_tile)
    c, count = _chunks_of_tile(tile, first, end_of_program, first_group, tiles, pm, k0, k1, stack, GROUPS)
    n = tl.arange(0, GROUPS)
    blocks = 1 << (log_chunk - log_block)
    column = (c << log_chunk.to(tl.int64)) - offset
    column = tl.where((column < d) & (column + (1 << log_chunk) > 0), column, NO_COLUMN).to(tl.int32)
    begin = list_index.to(tl.int64) * capacity + before * blocks
    for h in range(blocks):
        tl.store(columns + begin + n * blocks + h, column + (h << log_block), mask=n < count)
    if is_last & (first + groups_per_program >= end):
        tl.store(counts + list_index, (before + count) * blocks)
        if list_index == 0:
            tl.store(counts + tl.num_programs(2) * (tl.num_programs(1) >> WINDOWS), 0)

    lines = shared_begin(SHARED_BYTES) & -ENTRY_BYTES
    table = lines + LINES * TILE
    signs = table + GROUPS * SUB_BLOCKS * ENTRY_BYTES
    _write_tables(table, signs, c, first_row, tile_rows(tile, k, n_tiles), s, p, k0, k1, stack, SUB_BLOCKS)
    thread = tl.arange(0, THREADS)
    none = (thread * 0).to(tl.uint32) + NO_ENTRIES
    pointers = (codes + (begin << log_rows.to(tl.int64))).to(tl.pointer_type(tl.int32)) + thread
    log_words, in_run = log_rows - LOG_WORD_BYTES, (1 << log_run) - 1
    at_once = tl.full((), LINES, tl.int32) // blocks
    for batch in range((count + at_once - 1) // at_once):
        done = at_once * batch
        chunks = tl.minimum(at_once, count - done)
        for line in range(0, at_once * blocks << log_rows, THREADS * ENTRY_BYTES):
            store_words(lines + line + thread * ENTRY_BYTES, none, none, none, none)
        tl.debug_barrier()
        _encode_parts(
            lines, table, signs, done, chunks, nnz, log_chunk, log_block, log_rows, log_run, SUB_BLOCKS, WINDOWS
        )
        tl.debug_barrier()
        words = ((chunks * blocks + in_run) & ~in_run) << log_words
        for word in range(0, words, THREADS):
            mask = word + thread < words
            four_codes = load_word(lines + tl.minimum(word + thread, words - 1) * WORD_BYTES)
            tl.store(pointers + (done * blocks << log_words) + word, four_codes, mask=mask)
        tl.debug_barrier()
