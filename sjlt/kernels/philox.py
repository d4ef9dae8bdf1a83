"""The random numbers of seeded dropout, for your own Triton kernels.

These functions keep and drop exactly the elements that `sjlt.dropout` and `sjlt.dropout_mask` do, on every device
(`sjlt.laws.dropout` has the law). So a kernel may regenerate a mask in its backward pass, tile by tile, in another
order or with another tile size, and a test may compare it with `sjlt.dropout_mask`.

One call of Philox4x32-10 returns the lanes of LANES = 128 // BITS elements with consecutive indices: random unsigned
integers of BITS bits, 16, 8 or 4 of them for BITS = 8, 16 or 32. Philox takes about 60 instructions, so a
memory-bound kernel should process whole groups of elements with `dropout_lanes` or `dropout_keep_lanes`;
`dropout_lane` and `dropout_keep` accept any indices and call Philox for each.

Parameters of all functions:

- seed : the 64-bit seed, an integer or an int64 tensor that broadcasts with the indices. Annotate a kernel's parameter
  as ``seed: tl.int64`` and list it in ``triton.jit(do_not_specialize=["seed"])``, so that one compiled kernel serves
  all seeds; pass a seed of 2^63 or more as seed - 2^64.
- step : a 32-bit integer, the same for all elements. From a tensor on the device: ``tl.load(step_pointer)``.
- e : 64-bit indices of elements, a tensor of any shape; e = offset + row * row_stride + col for `sjlt.dropout`.
- index : 64-bit indices of calls: e // LANES for the elements e of the call.
- threshold : T of `sjlt.laws.dropout.threshold`, from 1 to 2^BITS - 1. An element is kept if its lane u >= T.
- BITS : 8, 16 or 32; a constant.

Example: dropout of BLOCK consecutive elements with 16-bit lanes, eight per call; BLOCK is a multiple of 8::

    @triton.jit(do_not_specialize=["seed", "threshold"])
    def drop(x, out, n, seed: tl.int64, threshold, scale, BLOCK: tl.constexpr):
        start = tl.program_id(0).to(tl.int64) * BLOCK
        index = start // 8 + tl.arange(0, BLOCK // 8)
        keep = dropout_keep_lanes(seed, index, 0, threshold, 16)
        i = start + tl.arange(0, BLOCK)
        value = tl.load(x + i, mask=i < n)
        tl.store(out + i, tl.where(keep, value * scale, 0.0), mask=i < n)

For a tile [M, N] of a matrix, if N, the width of the matrix and the tile's first column are multiples of LANES, `index`
has shape [M, N // LANES] and `dropout_keep_lanes` returns [M, N].

Reference: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..laws import dropout as dropout_law
from ..laws import philox
from .portable.law import select_word

_MULTIPLIER_0, _MULTIPLIER_1 = tl.constexpr(philox.MULTIPLIER_0), tl.constexpr(philox.MULTIPLIER_1)
_WEYL_0, _WEYL_1 = tl.constexpr(philox.WEYL_0), tl.constexpr(philox.WEYL_1)


@triton.jit
def philox_wide(c0, c1, c2, c3, k0, k1):
    """`sjlt.laws.philox.philox` with 32-bit words and 64-bit products, each a single instruction.

    For a tensor of calls this is up to 1.06 times as fast as computing the two halves of a product separately (dropout,
    H200).
    """
    c0, c1, c2 = c0.to(tl.uint32), c1.to(tl.uint32), c2.to(tl.uint32)
    for _ in tl.static_range(10):
        p0, p1 = c0.to(tl.uint64) * _MULTIPLIER_0, c2.to(tl.uint64) * _MULTIPLIER_1
        c0, c1 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, p1.to(tl.uint32)
        c2, c3 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1, p0.to(tl.uint32)
        k0 += _WEYL_0
        k1 += _WEYL_1
    return c0, c1, c2, c3


_words = philox.define(
    dropout_law.FUNCTIONS, triton.jit, tl.constexpr, tl.static_range, philox=philox_wide, select_word=select_word, tl=tl
)
_lane_words, _lane_of = _words.lane_words, _words.lane_of


@triton.jit
def _key(seed):
    """Philox's key (low word, high word), from a 64-bit seed."""
    seed = tl.cast(seed, tl.int64)
    return (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def dropout_words(seed, index, step):
    """The four random words of the calls at `index`: uint32, of the shape of `index`; they hold lanes, lowest first."""
    k0, k1 = _key(seed)
    return _lane_words(tl.cast(index, tl.int64), tl.cast(step, tl.uint32), k0, k1)


@triton.jit
def dropout_lane(seed, e, step, BITS: tl.constexpr):
    """The lane u (uint32, below 2^BITS) of each element e. Calls Philox for each element; see `dropout_lanes`."""
    k0, k1 = _key(seed)
    LOG_LANES: tl.constexpr = 0 if BITS == 32 else (1 if BITS == 16 else 2)
    return _lane_of(tl.cast(e, tl.int64), tl.cast(step, tl.uint32), k0, k1, LOG_LANES)


@triton.jit
def dropout_keep(seed, e, step, threshold, BITS: tl.constexpr):
    """Whether each element e is kept. Calls Philox for each element; see `dropout_keep_lanes`."""
    return dropout_lane(seed, e, step, BITS) >= tl.cast(threshold, tl.uint32)


@triton.jit
def flat_groups(joined, w, N: tl.constexpr):
    """Values joined to [..., G, 2, 2, ...], N per group, reshaped to [..., G * N]; w is [..., G]."""
    rank: tl.constexpr = len(w.shape)
    shape: tl.constexpr = w.shape[: rank - 1] + [w.shape[rank - 1] * N]  # noqa: RUF005 (no * in Triton)
    return tl.reshape(joined, shape)


@triton.jit
def lanes_at_top(w0, w1, w2, w3, BITS: tl.constexpr):
    """The lanes of four words [..., G] as uint32 [..., G * LANES], each in the top BITS bits, with other bits below.

    Comparisons need no more: u >= T if and only if the uint32 is >= T * 2^(32 - BITS).
    """
    w = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [..., G, 2, 2]: word 2 i + j at (i, j)
    if BITS == 16:
        w = tl.join(w << 16, w)
    if BITS == 8:
        w = tl.join(tl.join(w << 24, w << 8), tl.join(w << 16, w))
    return flat_groups(w, w0, 128 // BITS)


@triton.jit
def dropout_lanes(seed, index, step, BITS: tl.constexpr):
    """The lanes u (uint32, below 2^BITS) of the calls at `index` [..., G]: [..., G * LANES], call after call.

    Element ``index * LANES + i`` has lane i of its call.
    """
    w0, w1, w2, w3 = dropout_words(seed, index, step)
    return lanes_at_top(w0, w1, w2, w3, BITS) >> (32 - BITS)


@triton.jit
def dropout_keep_lanes(seed, index, step, threshold, BITS: tl.constexpr):
    """Whether each element of the calls at `index` [..., G] is kept: [..., G * LANES], call after call."""
    w0, w1, w2, w3 = dropout_words(seed, index, step)
    return lanes_at_top(w0, w1, w2, w3, BITS) >= (tl.cast(threshold, tl.uint32) << (32 - BITS))
