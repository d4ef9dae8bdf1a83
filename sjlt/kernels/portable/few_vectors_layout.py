"""The tensor axes of the kernels for few vectors, and the entries computed along them.

A step processes chunks_outer * chunks_inner chunks in tensors with the axes

    [chunks_outer, sub_blocks, rows_outer, chunks_inner, rows_inner],

the fields of `config.exact.ThreadLayout`, which kernels receive as LAYOUT. All lengths are powers of two; sub_blocks >=
nnz, and rows_outer * rows_inner covers the rows of a sub-block (in `adjoint_few_vectors`, the columns of a chunk). The
data vectors are a sixth axis: the last where they are contiguous in memory (VECTORS_CONTIGUOUS), so that loads
coalesce, otherwise the first.

Memory is addressed by tensors flattened to one axis (two with contiguous vectors). All versions of Triton then
distribute rows_inner (or rows_inner and vectors) over the lanes of a warp, chunks_inner over warps and all other axes
over registers. So a warp processes whole chunks, and its gathers stay within the few cache lines of a chunk.

Values that belong to a chunk (Philox's words, the inverse keys) are computed once per chunk, or once per chunk and
sub-block, and only then broadcast to the rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .law import chunk_keys, chunk_signs, inverse_keys, pair, part_start, row_theta, select_word


@triton.jit
def broadcast_chunks(z, segment, SUB_BLOCKS: tl.constexpr, LAYOUT: tl.constexpr):
    """One segment of z on the five axes, for broadcasting to rows.

    z : 1-D, several segments, with one element per chunk (SUB_BLOCKS = 1) or per chunk and sub-block.

    A gather rather than a slice, because the compiler moves no computation past a gather: it would otherwise compute
    Philox in every thread.
    """
    CHUNKS_OUTER: tl.constexpr = LAYOUT.chunks_outer
    CHUNKS_INNER: tl.constexpr = LAYOUT.chunks_inner
    SIZE: tl.constexpr = CHUNKS_OUTER * SUB_BLOCKS * CHUNKS_INNER  # of a segment
    z = tl.gather(z, segment * SIZE + tl.arange(0, SIZE), 0)
    return tl.reshape(z, CHUNKS_OUTER, SUB_BLOCKS, 1, CHUNKS_INNER, 1)


@triton.jit
def along_axis(i, AXIS: tl.constexpr, RANK: tl.constexpr = 5):
    """1-D i as a tensor of rank RANK, with i along AXIS and length 1 along all other axes."""
    for a in tl.static_range(RANK):
        if a != AXIS:
            i = tl.expand_dims(i, a)
    return i


@triton.jit
def chunk_and_sub_block(SUB_BLOCKS: tl.constexpr, CHUNKS_OUTER: tl.constexpr, CHUNKS_INNER: tl.constexpr):
    """(chunk, sub-block) of each element of the flattened axes [chunks_outer, sub_blocks, chunks_inner]."""
    e = tl.arange(0, CHUNKS_OUTER * SUB_BLOCKS * CHUNKS_INNER)
    return e // (SUB_BLOCKS * CHUNKS_INNER) * CHUNKS_INNER + e % CHUNKS_INNER, e // CHUNKS_INNER % SUB_BLOCKS


@triton.jit
def key_words(
    c, SUB_BLOCKS: tl.constexpr, CHUNKS_OUTER: tl.constexpr, CHUNKS_INNER: tl.constexpr, STACK: tl.constexpr, k0, k1
):
    """The key word of each sub-block of chunks c, in the order of `chunk_and_sub_block`."""
    q, t = chunk_and_sub_block(SUB_BLOCKS, CHUNKS_OUTER, CHUNKS_INNER)
    t = t.to(tl.uint32)
    w0, w1, w2, w3 = chunk_keys(tl.gather(c, q, 0), t >> 2, k0, k1, STACK)
    return select_word(t & 3, w0, w1, w2, w3)


@triton.jit
def broadcast_keys(c, tile_rows, segment, GEOMETRY: tl.constexpr, LAYOUT: tl.constexpr, k0, k1):
    """(inverse keys, thetas) of the sub-blocks of one segment of chunks c, on the five axes.

    An inverse key is that of `permute` from a row of a sub-block to the column of the chunk in which it has its entry.
    """
    SUB_BLOCKS: tl.constexpr = LAYOUT.sub_blocks
    CHUNKS_OUTER: tl.constexpr = LAYOUT.chunks_outer
    CHUNKS_INNER: tl.constexpr = LAYOUT.chunks_inner
    LOG_CHUNK: tl.constexpr = GEOMETRY.log_chunk
    NNZ: tl.constexpr = GEOMETRY.nnz
    if SUB_BLOCKS <= 4:  # a thread computes all keys of a chunk
        w0, w1, w2, w3 = chunk_keys(c, (c & 0).to(tl.uint32), k0, k1, GEOMETRY.stack)
        keys = tl.zeros((CHUNKS_OUTER, SUB_BLOCKS, 1, CHUNKS_INNER, 1), tl.uint64)
        theta = tl.zeros((CHUNKS_OUTER, SUB_BLOCKS, 1, CHUNKS_INNER, 1), tl.uint32)
        t = along_axis(tl.arange(0, SUB_BLOCKS), 1)
        for i in tl.static_range(SUB_BLOCKS):
            w = w0 if i == 0 else (w1 if i == 1 else (w2 if i == 2 else w3))
            b = part_start(i + 1, tile_rows, NNZ) - part_start(i, tile_rows, NNZ)
            keys = tl.where(t == i, broadcast_chunks(inverse_keys(w, LOG_CHUNK), segment, 1, LAYOUT), keys)
            theta = tl.where(t == i, broadcast_chunks(row_theta(w, b.to(tl.uint32)), segment, 1, LAYOUT), theta)
    else:  # a thread computes the key of a sub-block
        ALL_OUTER: tl.constexpr = c.numel // CHUNKS_INNER  # chunks_outer of all segments
        _, i = chunk_and_sub_block(SUB_BLOCKS, ALL_OUTER, CHUNKS_INNER)
        b = part_start(i + 1, tile_rows, NNZ) - part_start(i, tile_rows, NNZ)
        w = key_words(c, SUB_BLOCKS, ALL_OUTER, CHUNKS_INNER, GEOMETRY.stack, k0, k1)
        keys = broadcast_chunks(inverse_keys(w, LOG_CHUNK), segment, SUB_BLOCKS, LAYOUT)
        theta = broadcast_chunks(row_theta(w, b.to(tl.uint32)), segment, SUB_BLOCKS, LAYOUT)
    return keys, theta


@triton.jit
def row_indices(LAYOUT: tl.constexpr):
    """The index 0, 1, ... of each row in its sub-block, along the axes rows_outer and rows_inner."""
    first = along_axis(tl.arange(0, LAYOUT.rows_outer), 2) * LAYOUT.rows_inner
    return (first + along_axis(tl.arange(0, LAYOUT.rows_inner), 4)).to(tl.uint32)


@triton.jit
def addresses(z, stride, v, VECTORS_CONTIGUOUS: tl.constexpr):
    """z * stride plus pointers v [V], for z of N elements: [N, V] with contiguous vectors, else flattened [V N]."""
    z = tl.reshape(z, z.numel) * stride  # reshaped first: the compiler knows more about stride than about z
    return z[:, None] + v[None, :] if VECTORS_CONTIGUOUS else tl.reshape(v[:, None] + z[None, :], v.numel * z.numel)


@triton.jit
def unflatten(z, BLOCK_VECTORS: tl.constexpr, LAYOUT: tl.constexpr, VECTORS_LAST: tl.constexpr):
    """Elements loaded from `addresses`, on the five axes and the vectors' axis, which is the last or the first."""
    SUB_BLOCKS: tl.constexpr = LAYOUT.sub_blocks
    ROWS_OUTER: tl.constexpr = LAYOUT.rows_outer
    ROWS_INNER: tl.constexpr = LAYOUT.rows_inner
    CHUNKS_OUTER: tl.constexpr = LAYOUT.chunks_outer
    CHUNKS_INNER: tl.constexpr = LAYOUT.chunks_inner
    if VECTORS_LAST:
        z = tl.reshape(z, CHUNKS_OUTER, SUB_BLOCKS, ROWS_OUTER, CHUNKS_INNER, ROWS_INNER, BLOCK_VECTORS)
    else:
        z = tl.reshape(z, BLOCK_VECTORS, CHUNKS_OUTER, SUB_BLOCKS, ROWS_OUTER, CHUNKS_INNER, ROWS_INNER)
    return z


@triton.jit
def and_vectors(z, v, VECTORS_CONTIGUOUS: tl.constexpr):
    """Masks z and v, combined in the shape of `addresses`."""
    z = tl.reshape(z, z.numel)
    return z[:, None] & v[None, :] if VECTORS_CONTIGUOUS else tl.reshape(v[:, None] & z[None, :], v.numel * z.numel)


@triton.jit
def expand(z, VECTORS_LAST: tl.constexpr):
    """z with one more axis for the vectors, the last or the first."""
    return tl.expand_dims(z, len(z.shape)) if VECTORS_LAST else tl.expand_dims(z, 0)


@triton.jit
def _sign_words(c, segment, GEOMETRY: tl.constexpr, LAYOUT: tl.constexpr, k0, k1):
    """Sign words of one segment's chunks of 128 columns, on the five axes, of which rows_inner has length 32.

    Index l along rows_inner holds the word of columns 4 l to 4 l + 3, so each of the four words occurs eight times.
    """
    CHUNKS_OUTER: tl.constexpr = LAYOUT.chunks_outer
    CHUNKS_INNER: tl.constexpr = LAYOUT.chunks_inner
    SIZE: tl.constexpr = CHUNKS_OUTER * CHUNKS_INNER * 32  # of a segment
    g0, g1, g2, g3 = chunk_signs(c, k0, k1, GEOMETRY.stack)
    g = tl.reshape(tl.join(tl.join(g0, g2), tl.join(g1, g3)), 4 * c.numel)
    g = tl.gather(g, (segment * SIZE + tl.arange(0, SIZE)) // 8, 0)
    return tl.reshape(g, CHUNKS_OUTER, 1, 1, CHUNKS_INNER, 32)


@triton.jit
def _rotate(word, i):
    """word rotated right by i mod 32, which compiles to one instruction: bit i mod 32 becomes the lowest."""
    return (word >> (i & 31)) | (word << ((0 - i) & 31))


@triton.jit
def entry_sign(
    c, i, segment, GEOMETRY: tl.constexpr, LAYOUT: tl.constexpr, DTYPE: tl.constexpr, PERMUTED: tl.constexpr, k0, k1
):
    """The signs, +-1, of the entries in columns i (on the five axes) of one segment of chunks c.

    PERMUTED : i does not ascend along rows.
    """
    LOG_CHUNK: tl.constexpr = GEOMETRY.log_chunk
    if PERMUTED and LOG_CHUNK == 7 and i.shape[4] == 32:  # shuffling words takes fewer instructions than selecting
        words = tl.broadcast_to(_sign_words(c, segment, GEOMETRY, LAYOUT, k0, k1), i.shape)
        bit = _rotate(tl.gather(words, (i >> 2).to(tl.int32), 4), i)
    else:
        g0, g1, g2, g3 = chunk_signs(c, k0, k1, GEOMETRY.stack)
        low = broadcast_chunks(pair(g0, g1), segment, 1, LAYOUT)
        high = broadcast_chunks(pair(g2, g3), segment, 1, LAYOUT)
        first = (along_axis(tl.arange(0, LAYOUT.sub_blocks), 1) << LOG_CHUNK).to(tl.uint32)
        if LOG_CHUNK == 7:
            word, shift = tl.where(i < 64, low, high), i & 63
        else:  # resolved at compile time where sub-blocks are distributed over registers
            word, shift = tl.where(first < 64, low, high), i
            if LOG_CHUNK <= 5:
                word = tl.where((first & 32) == 0, word.to(tl.uint32), (word >> 32).to(tl.uint32))
                shift = (first & 31) + i
        bit = (word >> shift).to(tl.uint32)
    bit <<= 31
    if tl.float32 == DTYPE:
        sign = (bit | 0x3F800000).to(tl.float32, bitcast=True)
    else:
        sign = tl.where(bit == 0, 1.0, -1.0).to(DTYPE)
    return sign
