"""Entries by batches of chunks, for kernels whose programs own one tile and many data vectors.

Philox runs once a batch of BATCH groups, one group a lane, in tensors of axes

    [sub-block or sign word, 1, 4, BATCH]:  in registers, registers, warps, lanes,

and a chunk's words reach the rows of its tile by shuffles (a gather within the warp): row r of the tile is lane r mod
32 of warp r div 32. Philox evaluated for each row, or once a warp for each chunk, took as long as all of the rest of
a projection (H200).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...laws import exact as law
from ..config import exact as launch
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

BATCH = tl.constexpr(launch.BATCH)
TILE = tl.constexpr(law.TILE_ROWS)


@triton.jit
def stay(z):
    """z, [.., 128], by a shuffle to where it is: compilers move no computation past one."""
    U: tl.constexpr = z.numel // TILE
    lane = tl.broadcast_to(tl.arange(0, BATCH)[None, None, :], U, 4, BATCH)
    return tl.reshape(tl.gather(tl.reshape(z, U, 4, BATCH), lane, 2), z.shape)


@triton.jit
def rows_of_tile(m, K: tl.constexpr, N_TILES: tl.constexpr):
    """(first, end): the sketch's rows that tile m owns."""
    m = m.to(tl.int64)
    return part_start(m, K, N_TILES), part_start(m + 1, K, N_TILES)


@triton.jit
def groups_of_split(split, groups_per_split, feature_offset, d, LOG_WIDTH: tl.constexpr):
    """(first, number): a split's groups of chunks, 2^LOG_WIDTH columns each, of the d from feature_offset on."""
    first = (feature_offset >> LOG_WIDTH) + split.to(tl.int64) * groups_per_split
    end = ((feature_offset + d - 1) >> LOG_WIDTH) + 1
    return first, tl.minimum(end - first, groups_per_split).to(tl.int32)


@triton.jit
def _sub_block(m, t, K: tl.constexpr, NNZ: tl.constexpr, N_TILES: tl.constexpr):
    """(first row in the tile, rows) of sub-blocks t of tile m."""
    first, end = rows_of_tile(m, K, N_TILES)
    rows = (end - first).to(tl.uint32)
    begin = part_start(t, rows, NNZ)
    return begin, part_start(t + 1, rows, NNZ) - begin


@triton.jit
def batch(
    m,
    group,
    k0,
    k1,
    K: tl.constexpr,
    NNZ: tl.constexpr,
    N_TILES: tl.constexpr,
    LOG_GROUP: tl.constexpr,
    LOG_CHUNK: tl.constexpr,
    WHOLE: tl.constexpr,
    KEYS: tl.constexpr,
    SIGNS: tl.constexpr,
    FORWARD: tl.constexpr = False,
):
    """For BATCH groups: (column of the chunk of tile m, or -1; keys, thetas of KEYS sub-blocks; SIGNS sign words).

    Keys and thetas are [KEYS, 1, 4, BATCH], sign words [SIGNS, 1, 4, BATCH]. In whole geometries, k = 128 2^a and
    nnz = 2^b, block h of 32 rows needs few of the tile's sub-blocks and sign words; in others it has all. Keys are for
    the place of a row, or FORWARD, for the row of a place.
    """
    # The columns are for loads, a step ahead of the entries and in other threads: cheaper made twice than carried over.
    g = group + tl.arange(0, BATCH)
    place, found = tile_place(m, g, N_TILES, LOG_GROUP, k0, k1)
    column = tl.where(found, ((g << LOG_GROUP) + place.to(tl.int64)) << LOG_CHUNK, -1)

    g = group + tl.arange(0, BATCH)[None, None, None, :]
    h = tl.arange(0, 4).to(tl.uint32)[None, None, :, None]
    place, found = tile_place(m, g + (h * 0).to(tl.int64), N_TILES, LOG_GROUP, k0, k1)
    c = (g << LOG_GROUP) + place.to(tl.int64)
    t = tl.arange(0, KEYS).to(tl.uint32)[:, None, None, None]
    word = tl.arange(0, SIGNS).to(tl.uint32)[:, None, None, None]
    if WHOLE:
        t += h * NNZ // 4
        word += h * NNZ // 4 << LOG_CHUNK >> 5
    w0, w1, w2, w3 = chunk_keys(c, t >> 2, k0, k1)
    w = select_word(t & 3, w0, w1, w2, w3)
    theta = w
    if not WHOLE:
        _, b = _sub_block(m, t, K, NNZ, N_TILES)
        theta = row_theta(w, b)
    g0, g1, g2, g3 = chunk_signs(c, k0, k1)
    keys = forward_keys(w, LOG_CHUNK) if FORWARD else inverse_keys(w, LOG_CHUNK)
    return column, keys, theta, select_word(word, g0, g1, g2, g3)


@triton.jit
def from_batch(z, chunk, which):
    """z [Z, 1, 4, BATCH] of the batch's chunks `chunk` + 0 .. U - 1 for each row: [U, 128], entry `which` of Z."""
    Z: tl.constexpr = z.shape[0]
    U: tl.constexpr = which.shape[0]
    index = chunk + tl.arange(0, U)[None, :, None, None]
    z = tl.gather(tl.broadcast_to(z, Z, U, 4, BATCH), tl.broadcast_to(index, Z, U, 4, BATCH), 3)
    if Z == 1:
        z = tl.reshape(z, U, TILE)
    else:
        which = tl.reshape(which, 1, U, 4, BATCH).to(tl.int32)
        z = tl.where(which == tl.arange(0, Z)[:, None, None, None], z, 0)
        z = tl.reshape(tl.sum(z, 0), U, TILE)
    return z


@triton.jit
def entries(
    chunk,
    keys,
    thetas,
    signs,
    m,
    K: tl.constexpr,
    NNZ: tl.constexpr,
    N_TILES: tl.constexpr,
    LOG_CHUNK: tl.constexpr,
    WHOLE: tl.constexpr,
    U: tl.constexpr,
):
    """(place, negative) of the entry of each row of the tile in chunks `chunk` .. `chunk` + U - 1 of the batch.

    Both are [U, 128]; a row without an entry has place B = 2^p.
    """
    B: tl.constexpr = 1 << LOG_CHUNK
    r = tl.broadcast_to(tl.arange(0, TILE).to(tl.uint32)[None, :], U, TILE)
    if WHOLE:
        t = r >> LOG_CHUNK
        i = permute(r & (B - 1), from_batch(keys, chunk, t % keys.shape[0]), LOG_CHUNK)
    else:
        tile_row, tile_end = rows_of_tile(m, K, N_TILES)
        rows = (tile_end - tile_row).to(tl.uint32)
        inside = r < rows
        t = tl.where(inside, sub_block_of_row(r, NNZ, rows), 0)
        first, b = _sub_block(m, t, K, NNZ, N_TILES)
        theta = from_batch(thetas, chunk, t)
        slot = unscale_index(r - first, b, theta, LOG_CHUNK)
        there = inside & (scale_index(slot, b, theta, LOG_CHUNK) == r - first)
        i = tl.where(there, permute(slot, from_batch(keys, chunk, t), LOG_CHUNK), B)
    if U > 1:
        # Past a shuffle LLVM sees no vector of chunks, whose comparisons in `tiles` it would pack
        # into bits, at twice the instructions.
        i = stay(i)
    e = (t << LOG_CHUNK) + i
    word = from_batch(signs, chunk, (e >> 5) % signs.shape[0])
    return i, (word >> (e & 31)) & 1
