"""The exact law compiled by Triton, and faster forms of some of its functions.

Words are uint32; indices of chunks and of groups of chunks are int64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...laws import exact as law
from ...laws import philox

_MULTIPLIER_0, _MULTIPLIER_1 = tl.constexpr(philox.MULTIPLIER_0), tl.constexpr(philox.MULTIPLIER_1)
_WEYL_0, _WEYL_1 = tl.constexpr(philox.WEYL_0), tl.constexpr(philox.WEYL_1)


@triton.jit
def philox_words(c0, c1, c2, c3, k0, k1):
    """`sjlt.laws.philox.philox` in 32-bit words: GPUs compute the high half of a product in one instruction.

    With 64-bit words, whole projections take up to 1.2 times as long (H200).
    """
    c0, c1, c2 = c0.to(tl.uint32), c1.to(tl.uint32), c2.to(tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, c0 * 0 + _MULTIPLIER_0), c0 * _MULTIPLIER_0
        high1, low1 = tl.umulhi(c2, c2 * 0 + _MULTIPLIER_1), c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += _WEYL_0
        k1 += _WEYL_1
    return c0, c1, c2, c3


@triton.jit
def select_word(i, w0, w1, w2, w3):
    """`sjlt.laws.exact.select_word` by comparisons instead of 64-bit arithmetic."""
    return tl.where((i & 2) == 0, tl.where((i & 1) == 0, w0, w1), tl.where((i & 1) == 0, w2, w3))


# (`tl` is passed because Triton's interpreter looks for it in every function's scope.)
words = philox.define(
    law.FUNCTIONS, triton.jit, tl.constexpr, tl.static_range, philox=philox_words, select_word=select_word, tl=tl
)
part_start, row_theta, sub_block_of_row = words.part_start, words.row_theta, words.sub_block_of_row
chunk_tile, chunk_keys = words.chunk_tile, words.chunk_keys
chunk_signs, tile_place = words.chunk_signs, words.tile_place
scale_index, unscale_index = words.scale_index, words.unscale_index
row_in_sub_block, sign_bit = words.row_in_sub_block, words.sign_bit
beta, group_words, tile_theta = words.beta, words.group_words, words.tile_theta


@triton.jit
def reciprocal_of(b):
    """The integer for which ``z // b == z * reciprocal_of(b) >> 22``, if 0 <= z < b (b + 1) and b <= 128."""
    return ((1 << 22) + b - 1) // b


@triton.jit
def unscale_by(row, b, theta, reciprocal, p):
    """`unscale_index` of a row of a sub-block of b >= 2^p rows, by `reciprocal_of` b instead of a division."""
    return ((row << p) + (b - 1 - theta)) * reciprocal >> 22


@triton.jit
def seed_words(seed):
    """Philox's key (low word, high word), from a 64-bit seed."""
    seed = seed.to(tl.int64)
    return (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def pair(low, high):
    """Two words as one 64-bit word."""
    return low.to(tl.uint64) | (high.to(tl.uint64) << 32)


@triton.jit
def key_pair(a1, b1, a2, b2, LOG_CHUNK: tl.constexpr):
    """The keys with which `permute` computes a1 x + b1, the xor-shift and a2 x + b2, mod 2^LOG_CHUNK."""
    MASK: tl.constexpr = (1 << LOG_CHUNK) - 1
    if LOG_CHUNK == 0:
        keys = pair(a1 & 0, a1 & 0)
    else:
        first = (b1 << (32 - LOG_CHUNK)) | ((a1 & MASK) << (24 - LOG_CHUNK)) | 1
        keys = pair(first, (b2 << (32 - LOG_CHUNK)) | (a2 & MASK))
    return keys


@triton.jit
def forward_keys(w, LOG_CHUNK: tl.constexpr):
    """The keys with which `permute` is the law's `beta` for key word w."""
    return key_pair(w | 1, w >> 8, (w >> 16) | 1, w >> 24, LOG_CHUNK)


@triton.jit
def odd_inverse(a, LOG_CHUNK: tl.constexpr):
    """The inverse of an odd a mod 2^LOG_CHUNK, for LOG_CHUNK <= 7; higher bits are arbitrary."""
    x = (a * 3) ^ 2
    if LOG_CHUNK > 5:
        x = x * (2 - a * x)
    return x


@triton.jit
def inverse_keys(w, LOG_CHUNK: tl.constexpr):
    """The keys with which `permute` is the inverse of the law's `beta` for key word w."""
    a, b = odd_inverse((w >> 16) | 1, LOG_CHUNK), odd_inverse(w | 1, LOG_CHUNK)
    return key_pair(a, a * (0 - (w >> 24)), b, b * (0 - (w >> 8)), LOG_CHUNK)


@triton.jit
def permute(x, keys, LOG_CHUNK: tl.constexpr):
    """The law's `beta` or its inverse in few instructions; keys from `forward_keys` or `inverse_keys`.

    Between its two multiplications, a number mod 2^p, p = LOG_CHUNK, is kept in the top p bits of a word whose lowest
    bit is 1. Multiplying this word by 2^(32-p) b + a computes a x + b in one instruction: the lowest bit contributes b.
    The first multiplication takes x in bits 8 and up, and its key contributes the lowest bit of the product. No carry
    reaches the top p bits or the lowest one.
    """
    TOP: tl.constexpr = 32 - LOG_CHUNK
    if LOG_CHUNK == 0:
        x = x * 0 + keys.to(tl.uint32) * 0
    else:
        x = ((x << 8) | 1) * keys.to(tl.uint32)
        x = (x ^ (x >> ((LOG_CHUNK + 1) // 2))) & ((((1 << LOG_CHUNK) - 1) << TOP) | 1)
        x = (x * (keys >> 32).to(tl.uint32)) >> TOP
    return x
