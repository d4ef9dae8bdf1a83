"""Entries for kernels whose programs own one tile and many vectors, GROUPS_PER_STEP groups of chunks at a time.

`step_words` runs Philox once per step, with one group per lane, in tensors of shape

    [sub-blocks or sign words, 1, 4, GROUPS_PER_STEP],

whose last two axes are distributed over the 4 warps and their lanes, the others over registers. `entries` then
distributes the words of a chunk to the rows of its tile by shuffles (gathers within a warp): row r of the tile belongs
to lane r mod 32 of warp r div 32. Running Philox for each row, or once per warp and chunk, took as long as all the rest
of a projection (H200).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...laws import exact as law
from ..config import product
from .law import (
    chunk_keys,
    chunk_signs,
    forward_keys,
    inverse_keys,
    part_start,
    permute,
    row_theta,
    scale_index,
    select_word,
    sub_block_of_row,
    tile_place,
    unscale_index,
)
from .program import rows_of_tile

GROUPS_PER_STEP = tl.constexpr(product.GROUPS_PER_STEP)
TILE = tl.constexpr(law.TILE_ROWS)


@triton.jit
def pin_layout(z):
    """z [..., 128], shuffled onto itself: a no-op past which the compiler moves no computation."""
    SIZE: tl.constexpr = z.numel // TILE
    lane = tl.broadcast_to(tl.arange(0, GROUPS_PER_STEP)[None, None, :], SIZE, 4, GROUPS_PER_STEP)
    return tl.reshape(tl.gather(tl.reshape(z, SIZE, 4, GROUPS_PER_STEP), lane, 2), z.shape)


@triton.jit
def groups_of_split(split, groups_per_split, feature_offset, d, GEOMETRY: tl.constexpr):
    """(first, count) of a split's groups of chunks, for the d columns from feature_offset on."""
    LOG_WIDTH: tl.constexpr = GEOMETRY.log_group + GEOMETRY.log_chunk  # columns of a group
    first = (feature_offset >> LOG_WIDTH) + split.to(tl.int64) * groups_per_split
    end = ((feature_offset + d - 1) >> LOG_WIDTH) + 1
    return first, tl.minimum(end - first, groups_per_split).to(tl.int32)


@triton.jit
def _sub_block(m, t, GEOMETRY: tl.constexpr):
    """(first row within the tile, number of rows) of sub-blocks t of tile m."""
    first, end = rows_of_tile(m, GEOMETRY)
    rows = (end - first).to(tl.uint32)
    begin = part_start(t, rows, GEOMETRY.nnz)
    return begin, part_start(t + 1, rows, GEOMETRY.nnz) - begin


@triton.jit
def step_words(m, group, k0, k1, GEOMETRY: tl.constexpr, COLUMN_TO_ROW: tl.constexpr = False, stack=0):
    """The words of tile m for GROUPS_PER_STEP groups, from `group` on: (chunk columns, (keys, thetas, sign words)).

    stack : the stack of the tile, used only where GEOMETRY.fused > 1.

    chunk columns : [GROUPS_PER_STEP], the first column of each group's chunk that meets the tile, or -1.
    keys, thetas : [n_keys, 1, 4, GROUPS_PER_STEP]. Keys (see `law.permute`) map the rows of a sub-block to columns of
    the chunk or, with COLUMN_TO_ROW, columns to rows.
    sign words : [n_sign_words, 1, 4, GROUPS_PER_STEP].

    In power-of-two geometries, each warp (third axis) has only the few keys and sign words that its 32 rows need;
    otherwise it has those of all sub-blocks.
    """
    N_TILES: tl.constexpr = GEOMETRY.n_tiles
    LOG_GROUP: tl.constexpr = GEOMETRY.log_group
    LOG_CHUNK: tl.constexpr = GEOMETRY.log_chunk
    NNZ: tl.constexpr = GEOMETRY.nnz
    # The chunks are located twice, here for loads, which need the columns in other threads and one step ahead of the
    # entries: that is cheaper than converting the layout.
    g = group + tl.arange(0, GROUPS_PER_STEP)
    place, found = tile_place(m, g, N_TILES, LOG_GROUP, k0, k1, stack if GEOMETRY.fused > 1 else GEOMETRY.stack)
    chunk_columns = tl.where(found, ((g << LOG_GROUP) + place.to(tl.int64)) << LOG_CHUNK, -1)

    g = group + tl.arange(0, GROUPS_PER_STEP)[None, None, None, :]
    warp = tl.arange(0, 4).to(tl.uint32)[None, None, :, None]
    place, found = tile_place(
        m, g + (warp * 0).to(tl.int64), N_TILES, LOG_GROUP, k0, k1, stack if GEOMETRY.fused > 1 else GEOMETRY.stack
    )
    c = (g << LOG_GROUP) + place.to(tl.int64)
    t = tl.arange(0, GEOMETRY.n_keys).to(tl.uint32)[:, None, None, None]
    word = tl.arange(0, GEOMETRY.n_sign_words).to(tl.uint32)[:, None, None, None]
    if GEOMETRY.power_of_two:
        t += warp * NNZ // 4
        word += warp * NNZ // 4 << LOG_CHUNK >> 5
    w0, w1, w2, w3 = chunk_keys(c, t >> 2, k0, k1, stack if GEOMETRY.fused > 1 else GEOMETRY.stack)
    w = select_word(t & 3, w0, w1, w2, w3)
    theta = w
    if not GEOMETRY.power_of_two:
        _, b = _sub_block(m, t, GEOMETRY)
        theta = row_theta(w, b)
    g0, g1, g2, g3 = chunk_signs(c, k0, k1, stack if GEOMETRY.fused > 1 else GEOMETRY.stack)
    keys = forward_keys(w, LOG_CHUNK) if COLUMN_TO_ROW else inverse_keys(w, LOG_CHUNK)
    return chunk_columns, (keys, theta, select_word(word, g0, g1, g2, g3))


@triton.jit
def word_of_rows(z, chunk, which):
    """The word of each row for the step's chunks from index `chunk` on: [chunks, 128].

    z : [words, 1, 4, GROUPS_PER_STEP], from `step_words`.  which : [chunks, 128], which of the words a row needs.
    """
    WORDS: tl.constexpr = z.shape[0]
    CHUNKS: tl.constexpr = which.shape[0]
    index = chunk + tl.arange(0, CHUNKS)[None, :, None, None]
    z = tl.broadcast_to(z, WORDS, CHUNKS, 4, GROUPS_PER_STEP)
    z = tl.gather(z, tl.broadcast_to(index, z.shape), 3)
    if WORDS == 1:
        z = tl.reshape(z, CHUNKS, TILE)
    else:
        which = tl.reshape(which, 1, CHUNKS, 4, GROUPS_PER_STEP).to(tl.int32)
        z = tl.where(which == tl.arange(0, WORDS)[:, None, None, None], z, 0)
        z = tl.reshape(tl.sum(z, 0), CHUNKS, TILE)
    return z


@triton.jit
def entries(chunk, words, m, GEOMETRY: tl.constexpr, CHUNKS: tl.constexpr):
    """(column, negative) of each row's entry in CHUNKS of the step's chunks, from index `chunk` on: both [CHUNKS, 128].

    words : the second result of `step_words`.

    Columns are counted within the chunk; a row without an entry has column 2^log_chunk.
    """
    LOG_CHUNK: tl.constexpr = GEOMETRY.log_chunk
    CHUNK: tl.constexpr = 1 << LOG_CHUNK
    keys, thetas, signs = words
    r = tl.broadcast_to(tl.arange(0, TILE).to(tl.uint32)[None, :], CHUNKS, TILE)
    if GEOMETRY.power_of_two:
        t = r >> LOG_CHUNK
        i = permute(r & (CHUNK - 1), word_of_rows(keys, chunk, t % keys.shape[0]), LOG_CHUNK)
    else:
        tile_begin, tile_end = rows_of_tile(m, GEOMETRY)
        rows = (tile_end - tile_begin).to(tl.uint32)
        inside = r < rows
        t = tl.where(inside, sub_block_of_row(r, GEOMETRY.nnz, rows), 0)
        first, b = _sub_block(m, t, GEOMETRY)
        theta = word_of_rows(thetas, chunk, t)
        slot = unscale_index(r - first, b, theta, LOG_CHUNK)
        has_entry = inside & (scale_index(slot, b, theta, LOG_CHUNK) == r - first)
        i = tl.where(has_entry, permute(slot, word_of_rows(keys, chunk, t), LOG_CHUNK), CHUNK)
    if CHUNKS > 1:
        # Otherwise LLVM vectorizes the comparisons in `tensor_core` over chunks and packs them into bits, at twice the
        # instructions.
        i = pin_layout(i)
    e = (t << LOG_CHUNK) + i
    word = word_of_rows(signs, chunk, (e >> 5) % signs.shape[0])
    return i, (word >> (e & 31)) & 1
