"""How the kernels for few vectors lay numbers out over threads, and what each thread computes of its chunk.

They work on steps of chunks_outer * chunks_inner chunks and hold their numbers in tensors of axes

    chunks_outer, sub_blocks, rows_outer, chunks_inner, rows_inner

(in `adjoint_few_vectors`, columns of the chunk for rows of the sub-block), all powers of two with sub_blocks >= nnz:
the fields of `config.exact.ThreadLayout`, the constant LAYOUT. The data vectors are one more axis: the last where they
are contiguous in memory (VECTORS_CONTIGUOUS), so that their loads coalesce, and the first elsewhere. Memory is
addressed in tensors flattened to one axis (two with contiguous vectors). Lanes of a warp then fall to rows_inner (or
vectors and rows_inner), warps to chunks_inner, and all other axes to the registers of a thread, whatever the version of
Triton: a warp works on whole chunks, and its gathers stay within a chunk's few cache lines. Numbers that belong to a
chunk (Philox, the inverse keys) are computed in tensors with one element per chunk, or per chunk and sub-block, and
only then broadcast to the threads of its rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .law import chunk_keys, chunk_signs, inverse_keys, pair, part_start, row_theta, select_word


@triton.jit
def broadcast_chunks(z, segment, SUB_BLOCKS: tl.constexpr, LAYOUT: tl.constexpr):
    """One step of z, with one element per chunk (SUB_BLOCKS = 1) or per chunk and sub-block, on the five axes.

    z holds several segments, each for one step. This is a gather because the compiler moves no computation past one: it
    would otherwise move Philox into every thread.
    """
    QI: tl.constexpr = LAYOUT.chunks_outer
    QW: tl.constexpr = LAYOUT.chunks_inner
    N: tl.constexpr = QI * SUB_BLOCKS * QW
    return tl.reshape(tl.gather(z, segment * N + tl.arange(0, N), 0), QI, SUB_BLOCKS, 1, QW, 1)


@triton.jit
def along_axis(i, AXIS: tl.constexpr, RANK: tl.constexpr = 5):
    """The 1-D i along axis AXIS of RANK."""
    for a in tl.static_range(RANK):
        if a != AXIS:
            i = tl.expand_dims(i, a)
    return i


@triton.jit
def chunk_and_sub_block(T: tl.constexpr, QI: tl.constexpr, QW: tl.constexpr):
    """(chunk, sub-block) of the elements of [QI T QW]."""
    e = tl.arange(0, QI * T * QW)
    return e // (T * QW) * QW + e % QW, e // QW % T


@triton.jit
def key_words(c, T: tl.constexpr, QI: tl.constexpr, QW: tl.constexpr, STACK: tl.constexpr, k0, k1):
    """The key word of each sub-block of chunks c: [QI QW] -> [QI T QW]."""
    q, t = chunk_and_sub_block(T, QI, QW)
    t = t.to(tl.uint32)
    w0, w1, w2, w3 = chunk_keys(tl.gather(c, q, 0), t >> 2, k0, k1, STACK)
    return select_word(t & 3, w0, w1, w2, w3)


@triton.jit
def broadcast_keys(c, tile_rows, segment, GEOMETRY: tl.constexpr, LAYOUT: tl.constexpr, k0, k1):
    """(keys from a tile's rows to places, thetas) for one segment of chunks c, on the axes chunk and sub-block."""
    T: tl.constexpr = LAYOUT.sub_blocks
    QI: tl.constexpr = LAYOUT.chunks_outer
    QW: tl.constexpr = LAYOUT.chunks_inner
    LOG_CHUNK: tl.constexpr = GEOMETRY.log_chunk
    NNZ: tl.constexpr = GEOMETRY.nnz
    if T <= 4:  # a thread computes all keys of a chunk
        w0, w1, w2, w3 = chunk_keys(c, (c & 0).to(tl.uint32), k0, k1, GEOMETRY.stack)
        keys = tl.zeros((QI, T, 1, QW, 1), tl.uint64)
        theta = tl.zeros((QI, T, 1, QW, 1), tl.uint32)
        t = along_axis(tl.arange(0, T), 1)
        for i in tl.static_range(T):
            w = w0 if i == 0 else (w1 if i == 1 else (w2 if i == 2 else w3))
            b = part_start(i + 1, tile_rows, NNZ) - part_start(i, tile_rows, NNZ)
            keys = tl.where(t == i, broadcast_chunks(inverse_keys(w, LOG_CHUNK), segment, 1, LAYOUT), keys)
            theta = tl.where(t == i, broadcast_chunks(row_theta(w, b.to(tl.uint32)), segment, 1, LAYOUT), theta)
    else:  # a thread computes the keys of a sub-block
        Q: tl.constexpr = c.numel
        _, i = chunk_and_sub_block(T, Q // QW, QW)
        b = part_start(i + 1, tile_rows, NNZ) - part_start(i, tile_rows, NNZ)
        w = key_words(c, T, Q // QW, QW, GEOMETRY.stack, k0, k1)
        keys = broadcast_chunks(inverse_keys(w, LOG_CHUNK), segment, T, LAYOUT)
        theta = broadcast_chunks(row_theta(w, b.to(tl.uint32)), segment, T, LAYOUT)
    return keys, theta


@triton.jit
def row_indices(LAYOUT: tl.constexpr):
    """0, 1, ... along the axes rows_outer and rows_inner."""
    first = along_axis(tl.arange(0, LAYOUT.rows_outer), 2) * LAYOUT.rows_inner
    return (first + along_axis(tl.arange(0, LAYOUT.rows_inner), 4)).to(tl.uint32)


@triton.jit
def addresses(z, stride, v, VECTORS_CONTIGUOUS: tl.constexpr):
    """z * stride, z of any shape, plus pointers v [V], flattened: to [N, V] with contiguous vectors, else to [V N]."""
    z = tl.reshape(z, z.numel) * stride  # in this order: the compiler knows more of stride than of z
    return z[:, None] + v[None, :] if VECTORS_CONTIGUOUS else tl.reshape(v[:, None] + z[None, :], v.numel * z.numel)


@triton.jit
def and_vectors(z, v, VECTORS_CONTIGUOUS: tl.constexpr):
    """Masks z and v, combined and flattened as `addresses` does."""
    z = tl.reshape(z, z.numel)
    return z[:, None] & v[None, :] if VECTORS_CONTIGUOUS else tl.reshape(v[:, None] & z[None, :], v.numel * z.numel)


@triton.jit
def expand(z, VECTORS_LAST: tl.constexpr):
    """z with one more axis, for the vectors: the last or the first."""
    return tl.expand_dims(z, len(z.shape)) if VECTORS_LAST else tl.expand_dims(z, 0)


@triton.jit
def _sign_words(c, segment, GEOMETRY: tl.constexpr, LAYOUT: tl.constexpr, k0, k1):
    """One segment's sign words of chunks of 128 places, [.., 32]: index L holds the word of places 4 L to 4 L + 3."""
    QI: tl.constexpr = LAYOUT.chunks_outer
    QW: tl.constexpr = LAYOUT.chunks_inner
    N: tl.constexpr = QI * QW * 32
    g0, g1, g2, g3 = chunk_signs(c, k0, k1, GEOMETRY.stack)
    g = tl.reshape(tl.join(tl.join(g0, g2), tl.join(g1, g3)), 4 * c.numel)
    return tl.reshape(tl.gather(g, (segment * N + tl.arange(0, N)) // 8, 0), QI, 1, 1, QW, 32)


@triton.jit
def _rotate(word, i):
    """word rotated right by i mod 32, in one instruction: bit i mod 32 becomes the lowest."""
    return (word >> (i & 31)) | (word << ((0 - i) & 31))


@triton.jit
def entry_sign(
    c, i, segment, GEOMETRY: tl.constexpr, LAYOUT: tl.constexpr, DTYPE: tl.constexpr, PERMUTED: tl.constexpr, k0, k1
):
    """+-1 for the places i, on the five axes, of one segment of chunks c. PERMUTED: i does not ascend along rows."""
    LOG_CHUNK: tl.constexpr = GEOMETRY.log_chunk
    if PERMUTED and LOG_CHUNK == 7 and i.shape[4] == 32:  # shuffling a word takes fewer instructions than selecting it
        words = tl.broadcast_to(_sign_words(c, segment, GEOMETRY, LAYOUT, k0, k1), i.shape)
        bit = _rotate(tl.gather(words, (i >> 2).to(tl.int32), 4), i)
    else:
        g0, g1, g2, g3 = chunk_signs(c, k0, k1, GEOMETRY.stack)
        low = broadcast_chunks(pair(g0, g1), segment, 1, LAYOUT)
        high = broadcast_chunks(pair(g2, g3), segment, 1, LAYOUT)
        first = (along_axis(tl.arange(0, LAYOUT.sub_blocks), 1) << LOG_CHUNK).to(tl.uint32)
        if LOG_CHUNK == 7:
            word, shift = tl.where(i < 64, low, high), i & 63
        else:  # the compiler resolves these selections where sub-blocks fall to registers
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
