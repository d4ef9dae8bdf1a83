"""The dropout law in plain Python integers: the independent reference for every backend.

Written from the law's description rather than its code, like `reference`, whose Philox it shares.
"""

from fractions import Fraction
from functools import lru_cache
from itertools import product

from reference import words

TAG_DROPOUT = 0


@lru_cache(maxsize=1 << 16)
def call(index, step, seed):
    """The 128 bits of a Philox call, lowest word first."""
    return sum(word << 32 * i for i, word in enumerate(words(index, step, TAG_DROPOUT, seed)))


def lane(e, step, bits, seed):
    """The lane value u of element e."""
    lanes = 128 // bits
    return call(e // lanes, step, seed) >> bits * (e % lanes) & (1 << bits) - 1


def threshold(p, bits):
    numerator, denominator = Fraction(p).as_integer_ratio()
    return (2 * numerator * 2**bits + denominator) // (2 * denominator)


def scale(p, bits):
    return 2**bits / (2**bits - threshold(p, bits))


def index(place, shape, offset=0, row_stride=None):
    """The index e of the element at a position of a tensor of this shape."""
    if not shape:
        return offset
    row = 0
    for i, n in zip(place[:-1], shape[:-1], strict=True):
        row = row * n + i
    return offset + row * (shape[-1] if row_stride is None else row_stride) + place[-1]


def mask(shape, p, seed, *, step=0, offset=0, row_stride=None, bits=16):
    """Whether each element is kept, as a flat list in row-major order. `seed` is an integer or nested lists."""
    t = threshold(p, bits)
    kept = []
    for place in product(*map(range, shape)):
        own, rest, sizes = seed, place, shape
        while isinstance(own, list):  # seeds cover the leading axes
            own, rest, sizes = own[rest[0]], rest[1:], sizes[1:]
        kept.append(lane(index(rest, sizes, offset, row_stride), step, bits, own) >= t)
    return kept
