"""The law bound to Triton: words are uint32, indices of chunks and of groups of chunks int64."""

from __future__ import annotations

import triton
import triton.language as tl

from ...laws import exact as law
from ...laws import philox

_MULTIPLIER_0, _MULTIPLIER_1 = tl.constexpr(philox.MULTIPLIER_0), tl.constexpr(philox.MULTIPLIER_1)
_WEYL_0, _WEYL_1 = tl.constexpr(philox.WEYL_0), tl.constexpr(philox.WEYL_1)


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    """`sjlt.laws.philox.philox` with 32-bit words: a GPU has the high half of their product as an instruction.

    64-bit words cost up to 1.2 times the time of a whole projection (H200).
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
def _select_word(i, w0, w1, w2, w3):
    """`sjlt.laws.exact.select_word` by selection: a 64-bit word for it is not at hand."""
    return tl.where((i & 2) == 0, tl.where((i & 1) == 0, w0, w1), tl.where((i & 1) == 0, w2, w3))


# (tl is there for Triton's interpreter, which looks for it in every function's scope.)
_words = philox.define(
    law.FUNCTIONS, triton.jit, tl.constexpr, tl.static_range, philox=_philox, select_word=_select_word, tl=tl
)
part_start, select_word = _words.part_start, _words.select_word
chunk_tile, chunk_keys, chunk_signs, tile_place = (
    _words.chunk_tile,
    _words.chunk_keys,
    _words.chunk_signs,
    _words.tile_place,
)
scale_index, unscale_index, row_theta, sub_block_of_row = (
    _words.scale_index,
    _words.unscale_index,
    _words.row_theta,
    _words.sub_block_of_row,
)


@triton.jit
def seed_words(seed):
    """The key of Philox."""
    seed = seed.to(tl.int64)
    return (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def pair(low, high):
    """Two words as one of 64 bits."""
    return low.to(tl.uint64) | (high.to(tl.uint64) << 32)


@triton.jit
def _key_pair(a1, b1, a2, b2, LOG_CHUNK: tl.constexpr):
    """What `permute` takes for x -> a1 x + b1 and then, after the xor, x -> a2 x + b2, each mod 2^p."""
    MASK: tl.constexpr = (1 << LOG_CHUNK) - 1
    if LOG_CHUNK == 0:
        keys = pair(a1 & 0, a1 & 0)
    else:
        first = (b1 << (32 - LOG_CHUNK)) | ((a1 & MASK) << (24 - LOG_CHUNK)) | 1
        keys = pair(first, (b2 << (32 - LOG_CHUNK)) | (a2 & MASK))
    return keys


@triton.jit
def forward_keys(w, LOG_CHUNK: tl.constexpr):
    """The keys with which `permute` is the law's `beta` under word w."""
    return _key_pair(w | 1, w >> 8, (w >> 16) | 1, w >> 24, LOG_CHUNK)


@triton.jit
def _odd_inverse(a, LOG_CHUNK: tl.constexpr):
    """The inverse of an odd a mod 2^p, p <= 7: the law's, cut short, for a word whose higher bits do not matter."""
    x = (a * 3) ^ 2
    if LOG_CHUNK > 5:
        x = x * (2 - a * x)
    return x


@triton.jit
def inverse_keys(w, LOG_CHUNK: tl.constexpr):
    """The keys with which `permute` is the inverse of the law's `beta` under word w."""
    a, b = _odd_inverse((w >> 16) | 1, LOG_CHUNK), _odd_inverse(w | 1, LOG_CHUNK)
    return _key_pair(a, a * (0 - (w >> 24)), b, b * (0 - (w >> 8)), LOG_CHUNK)


@triton.jit
def permute(x, keys, LOG_CHUNK: tl.constexpr):
    """The law's `beta` in few instructions: numbers mod 2^p are the top p bits of words.

    There a product with 2^(32-p) b + a adds b as well, where the other factor has a 1 in its lowest bit. That 1 is in
    the first key too, and neither what is multiplied nor the xor carries anything to where it, or the number, is.
    """
    TOP: tl.constexpr = 32 - LOG_CHUNK
    if LOG_CHUNK == 0:
        x = x * 0 + keys.to(tl.uint32) * 0
    else:
        x = ((x << 8) | 1) * keys.to(tl.uint32)
        x = (x ^ (x >> ((LOG_CHUNK + 1) // 2))) & ((((1 << LOG_CHUNK) - 1) << TOP) | 1)
        x = (x * (keys >> 32).to(tl.uint32)) >> TOP
    return x
