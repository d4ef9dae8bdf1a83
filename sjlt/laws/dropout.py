"""The dropout law: which elements of a tensor are kept, from a seed, a step and their logical places alone.

x is seen as 2-D, (product of the leading dimensions, last dimension), in its logical shape. Element (row, col) has
the 64-bit index e = offset + row row_stride + col, never a memory address: strides, tiles, dtype, device and sharding
do not change a mask. One call of Philox decides 128/bits consecutive elements, a *lane* of `bits` bits each:

- **Lane.** `lane_of`: with L = 128/bits, the four words of Philox(counter = e div L, step, tag 0; key = seed) are a
  number of 128 bits, lowest word first; u is its lane e mod L, an unsigned number of `bits` bits.
- **Keep** where u >= T, `threshold`: T = floor(p 2^bits + 1/2).
- **Scale**, `scale`: 2^bits/(2^bits - T), one over the *realised* probability to keep, so that the mean is exact at
  any width. Computed in fp64, applied in fp32 (in fp64 to fp64), rounded once. A dropped NaN is 0.

The last word of Philox's counter is the tag 0, which no stream of a sketch has (theirs begin at `exact.TAG_KEYS`), so
one seed can serve both.

Reference: Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting", JMLR 2014; lanes
of 8 bits as in Dao et al., "FlashAttention", NeurIPS 2022.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .exact import select_word
from .philox import HALF, LOW, philox

TAG_DROPOUT = 0
WIDTHS = (8, 16, 32)  # bits of a lane
ONE, TWO = 1, 2


class Rule(NamedTuple):
    """The numbers of one call of dropout, checked.

    bits, threshold, scale : the width, T and the scale above; 0 < T < 2^bits.
    seed, step : the seed as a signed number of 64 bits, the step.  offset : the index of the first element.
    row_stride : None for the length of the last axis.
    seeds : instead of `seed`, int64 of the shape (x.shape[0],) or x.shape[:-1].
    steps : instead of `step`, one integer in memory; its low 32 bits count.
    """

    bits: int
    threshold: int
    scale: float
    seed: int = 0
    step: int = 0
    offset: int = 0
    row_stride: int | None = None
    seeds: Any = None
    steps: Any = None


def threshold(p: float, bits: int) -> int:
    """T = floor(p 2^bits + 1/2), exactly, for 0 <= p <= 1. (The sum itself may be rounded.)"""
    exact = p * 2**bits
    whole = int(exact)
    return whole + (exact - whole >= 0.5)


def scale(t: int, bits: int) -> float:
    """2^bits / (2^bits - T) in fp64, 0 <= T < 2^bits."""
    return 2**bits / (2**bits - t)


def log_lanes(bits: int) -> int:
    """log2 of the lanes in a word."""
    return (HALF // bits).bit_length() - 1


# Below: functions of words. `define(FUNCTIONS, jit, word)` binds them to a backend. `log_lanes` is that of a word.


def lane_words(index, step, k0, k1):
    """The four words that hold the lanes of the call at a 64-bit index."""
    return philox(index & LOW, index >> HALF, step, TAG_DROPOUT, k0, k1)


def lane(i, w0, w1, w2, w3, log_lanes):
    """Lane i of the four words."""
    word = select_word(i >> log_lanes, w0, w1, w2, w3)
    shifted = word >> ((i & ((ONE << log_lanes) - ONE)) * (HALF >> log_lanes))
    return shifted & ((ONE << (HALF >> log_lanes)) - ONE)


def lane_of(e, step, k0, k1, log_lanes):
    """The lane u of element e."""
    w0, w1, w2, w3 = lane_words(e >> (log_lanes + TWO), step, k0, k1)
    return lane(e & ((ONE << (log_lanes + TWO)) - ONE), w0, w1, w2, w3, log_lanes)


FUNCTIONS = (philox, select_word, lane_words, lane, lane_of)
