"""How the gather kernels lay numbers out over threads, and what each thread makes of its chunk there.

They work on batches of Q = QI * QW chunks and hold their numbers in tensors of axes

    QI, T, H, QW, L:  chunk (outer part), sub-block, row of it (outer part), chunk (inner part), row (inner part)

(`adjoint_gather`: column of the chunk for row), all powers of two with T >= s. The data vectors V are one more axis:
the last where they are contiguous in memory, so that loads of V coalesce, and the first elsewhere. Memory is
addressed in tensors flattened to one axis (two with vectors last), so that lanes of a warp fall to L (V and L), warps
to QW, and all other axes to the registers of a thread, whatever the version of Triton: a warp works on whole chunks
and its gathers stay in a chunk's few cache lines. What belongs to a chunk (Philox, the inverse keys) is computed in
tensors of [Q] or, for each of its sub-blocks, [Q T], and only then handed to the threads of its rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .law import chunk_keys, chunk_signs, inverse_keys, pair, part_start, row_theta, select_word


@triton.jit
def hand_out(z, part, T: tl.constexpr, QI: tl.constexpr, QW: tl.constexpr):
    """Part `part` of z, [QI QW] with T = 1 or [QI T QW] for each part -> [QI, T, 1, QW, 1].

    A gather, because the compiler moves no computation past one: else it would move Philox into every thread.
    """
    N: tl.constexpr = QI * T * QW
    return tl.reshape(tl.gather(z, part * N + tl.arange(0, N), 0), QI, T, 1, QW, 1)


@triton.jit
def axis(i, AXIS: tl.constexpr, RANK: tl.constexpr = 5):
    """The 1-D i along axis AXIS of RANK."""
    for a in tl.static_range(RANK):
        if a != AXIS:
            i = tl.expand_dims(i, a)
    return i


@triton.jit
def sub_blocks(T: tl.constexpr, QI: tl.constexpr, QW: tl.constexpr):
    """(q, t) for the elements of [QI T QW]."""
    e = tl.arange(0, QI * T * QW)
    return e // (T * QW) * QW + e % QW, e // QW % T


@triton.jit
def key_words(c, T: tl.constexpr, QI: tl.constexpr, QW: tl.constexpr, k0, k1):
    """The key word of each sub-block of chunks c: [Q] -> [QI T QW]."""
    q, t = sub_blocks(T, QI, QW)
    t = t.to(tl.uint32)
    w0, w1, w2, w3 = chunk_keys(tl.gather(c, q, 0), t >> 2, k0, k1)
    return select_word(t & 3, w0, w1, w2, w3)


@triton.jit
def hand_out_keys(
    c,
    tile_rows,
    part,
    NNZ: tl.constexpr,
    LOG_CHUNK: tl.constexpr,
    T: tl.constexpr,
    Q: tl.constexpr,
    QI: tl.constexpr,
    QW: tl.constexpr,
    k0,
    k1,
):
    """The keys from rows of a tile to places in part `part` of chunks c, [Q], and the thetas: [QI, T, 1, QW, 1]."""
    if T <= 4:  # a thread computes a chunk's keys
        w0, w1, w2, w3 = chunk_keys(c, (c & 0).to(tl.uint32), k0, k1)
        keys = tl.zeros((QI, T, 1, QW, 1), tl.uint64)
        theta = tl.zeros((QI, T, 1, QW, 1), tl.uint32)
        t = axis(tl.arange(0, T), 1)
        for i in tl.static_range(T):
            w = w0 if i == 0 else (w1 if i == 1 else (w2 if i == 2 else w3))
            b = part_start(i + 1, tile_rows, NNZ) - part_start(i, tile_rows, NNZ)
            keys = tl.where(t == i, hand_out(inverse_keys(w, LOG_CHUNK), part, 1, QI, QW), keys)
            theta = tl.where(t == i, hand_out(row_theta(w, b.to(tl.uint32)), part, 1, QI, QW), theta)
    else:  # a thread computes a sub-block's keys
        _, i = sub_blocks(T, Q // QW, QW)
        b = part_start(i + 1, tile_rows, NNZ) - part_start(i, tile_rows, NNZ)
        w = key_words(c, T, Q // QW, QW, k0, k1)
        keys = hand_out(inverse_keys(w, LOG_CHUNK), part, T, QI, QW)
        theta = hand_out(row_theta(w, b.to(tl.uint32)), part, T, QI, QW)
    return keys, theta


@triton.jit
def inner(H: tl.constexpr, L: tl.constexpr):
    """0 .. H L - 1 along the axes H and L."""
    return (axis(tl.arange(0, H), 2) * L + axis(tl.arange(0, L), 4)).to(tl.uint32)


@triton.jit
def addresses(z, stride, v, VECTORS_LAST: tl.constexpr):
    """z * stride, z of any shape, plus pointers v, [V], flattened to [N, V] with vectors last, else to [V N]."""
    z = tl.reshape(z, z.numel) * stride  # in this order: the compiler knows more of stride than of z
    return z[:, None] + v[None, :] if VECTORS_LAST else tl.reshape(v[:, None] + z[None, :], v.numel * z.numel)


@triton.jit
def and_vectors(z, v, VECTORS_LAST: tl.constexpr):
    """The same for masks."""
    z = tl.reshape(z, z.numel)
    return z[:, None] & v[None, :] if VECTORS_LAST else tl.reshape(v[:, None] & z[None, :], v.numel * z.numel)


@triton.jit
def expand(z, VECTORS_LAST: tl.constexpr):
    """Adds the axis of vectors."""
    return tl.expand_dims(z, len(z.shape)) if VECTORS_LAST else tl.expand_dims(z, 0)


@triton.jit
def _sign_words(c, part, QI: tl.constexpr, QW: tl.constexpr, k0, k1):
    """Of chunks of 128, [Q], in part `part`: [QI, 1, 1, QW, 32], where L is the sign word of places 4 L to 4 L + 3."""
    N: tl.constexpr = QI * QW * 32
    g0, g1, g2, g3 = chunk_signs(c, k0, k1)
    g = tl.reshape(tl.join(tl.join(g0, g2), tl.join(g1, g3)), 4 * c.numel)
    return tl.reshape(tl.gather(g, (part * N + tl.arange(0, N)) // 8, 0), QI, 1, 1, QW, 32)


@triton.jit
def _rotate(word, i):
    """word to the right by i mod 32, one instruction: bit i mod 32 becomes the lowest."""
    return (word >> (i & 31)) | (word << ((0 - i) & 31))


@triton.jit
def entry_sign(
    c,
    i,
    part,
    T: tl.constexpr,
    QI: tl.constexpr,
    QW: tl.constexpr,
    LOG_CHUNK: tl.constexpr,
    DTYPE: tl.constexpr,
    DRAWN: tl.constexpr,
    k0,
    k1,
):
    """+-1 for the places i, [QI, T, H, QW, L], DRAWN or as they come, of part `part` of chunks c, [Q]."""
    if DRAWN and LOG_CHUNK == 7 and i.shape[4] == 32:  # a shuffle fetches a word in fewer instructions than a choice
        words = tl.broadcast_to(_sign_words(c, part, QI, QW, k0, k1), i.shape)
        bit = _rotate(tl.gather(words, (i >> 2).to(tl.int32), 4), i)
    else:
        g0, g1, g2, g3 = chunk_signs(c, k0, k1)
        low, high = hand_out(pair(g0, g1), part, 1, QI, QW), hand_out(pair(g2, g3), part, 1, QI, QW)
        first = (axis(tl.arange(0, T), 1) << LOG_CHUNK).to(tl.uint32)
        if LOG_CHUNK == 7:
            word, shift = tl.where(i < 64, low, high), i & 63
        else:  # choices that the compiler makes where T falls to registers
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
