"""The dropout law: which elements of a tensor are kept, as a function of seed, step and logical position only.

x is viewed as 2-D, (product of the leading dimensions, last dimension), in its logical shape. Element (row, col) has
the 64-bit index e = offset + row * row_stride + col: strides, tiles, dtype, device and sharding do not change a mask.
One call of Philox decides L = 128/bits consecutive elements, with a *lane* of `bits` bits for each:

- **Lane** (`lane_of`): the four words of Philox(counter = e div L, step, tag 0; key = seed) form a 128-bit number,
  lowest word first; u is its lane e mod L, an unsigned number of `bits` bits.
- **Keep** if u >= T (`threshold`): T = floor(p 2^bits + 1/2).
- **Scale** (`scale`): 2^bits/(2^bits - T), the reciprocal of the *realised* probability of keeping, so that the mean is
  exact for any number of bits. It is computed in fp64 and applied in fp32 (in fp64 to fp64 data), and the product is
  rounded once. A dropped NaN is 0.

The last word of the counter is tag 0. Streams of sketches have other tags, from `exact.TAG_KEYS` on, so one seed can
serve both.

Reference: Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting", JMLR 2014; lanes
of 8 bits as in Dao et al., "FlashAttention", NeurIPS 2022.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .exact import select_word
from .philox import HALF, LOW, philox

TAG_DROPOUT = 0
WIDTHS = (8, 16, 32)  # values of `bits`
ONE, TWO = 1, 2


class Rule(NamedTuple):
    """The checked parameters of one call of dropout.

    Attributes
    ----------
    bits : {8, 16, 32}
        Width of a lane.
    threshold : int
        T, 0 < T < 2^bits.
    scale : float
        Factor of kept elements.
    seed : int
        The 64-bit seed as a signed integer.
    step : int
    offset : int
        The law's index of the first element.
    row_stride : int or None
        Step of the index from row to row; None for the length of the last axis.
    seeds : array of int64 or None
        Replaces `seed`; shape (x.shape[0],) or x.shape[:-1].
    steps : array or None
        Replaces `step`: one integer in memory, of which the low 32 bits are used.
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
    """T = floor(p 2^bits + 1/2) for 0 <= p <= 1, computed exactly (in floating point, the sum could be rounded)."""
    exact = p * 2**bits
    whole = int(exact)
    return whole + (exact - whole >= 0.5)


def scale(t: int, bits: int) -> float:
    """2^bits / (2^bits - T) in fp64, 0 <= T < 2^bits."""
    return 2**bits / (2**bits - t)


def log_lanes(bits: int) -> int:
    """log2 of the number of lanes in a word."""
    return (HALF // bits).bit_length() - 1


# Word functions, which `define(FUNCTIONS, jit, word)` binds to a backend. Their `log_lanes` is `log_lanes(bits)`.


def lane_words(index, step, k0, k1):
    """The four words of the call of Philox with a 64-bit index."""
    return philox(index & LOW, index >> HALF, step, TAG_DROPOUT, k0, k1)


def lane(i, w0, w1, w2, w3, log_lanes):
    """Lane i, 0 <= i < 128/bits, of the four words."""
    word = select_word(i >> log_lanes, w0, w1, w2, w3)
    shifted = word >> ((i & ((ONE << log_lanes) - ONE)) * (HALF >> log_lanes))
    return shifted & ((ONE << (HALF >> log_lanes)) - ONE)


def lane_of(e, step, k0, k1, log_lanes):
    """The lane u of element e."""
    w0, w1, w2, w3 = lane_words(e >> (log_lanes + TWO), step, k0, k1)
    return lane(e & ((ONE << (log_lanes + TWO)) - ONE), w0, w1, w2, w3, log_lanes)


FUNCTIONS = (philox, select_word, lane_words, lane, lane_of)
