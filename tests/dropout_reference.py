"""The dropout law in plain Python integers: the independent witness of every backend.

Written from the law's description and not from its code, like `reference`, whose Philox it shares.
"""

from fractions import Fraction
from functools import lru_cache
from itertools import product

from reference import words

TAG_DROPOUT = 0


@lru_cache(maxsize=1 << 16)
def call(index, step, seed):
    """The 128 bits of a call of Philox, the lowest word first."""
    return sum(word << 32 * i for i, word in enumerate(words(index, step, TAG_DROPOUT, seed)))


def lane(e, step, bits, seed):
    """u of element e."""
    lanes = 128 // bits
    return call(e // lanes, step, seed) >> bits * (e % lanes) & (1 << bits) - 1


def threshold(p, bits):
    numerator, denominator = Fraction(p).as_integer_ratio()
    return (2 * numerator * 2**bits + denominator) // (2 * denominator)


def scale(p, bits):
    return 2**bits / (2**bits - threshold(p, bits))


def index(place, shape, offset=0, row_stride=None):
    """e of the element at a place of a tensor of this shape."""
    if not shape:
        return offset
    row = 0
    for i, n in zip(place[:-1], shape[:-1], strict=True):
        row = row * n + i
    return offset + row * (shape[-1] if row_stride is None else row_stride) + place[-1]


def mask(shape, p, seed, *, step=0, offset=0, row_stride=None, bits=16):
    """Whether each element of the shape is kept, by rows: a flat list. `seed` is a number or a nested list of seeds."""
    t = threshold(p, bits)
    kept = []
    for place in product(*map(range, shape)):
        own, rest, sizes = seed, place, shape
        while isinstance(own, list):  # the last axis of a tensor that has a seed each is never the seeds' alone
            own, rest, sizes = own[rest[0]], rest[1:], sizes[1:]
        kept.append(lane(index(rest, sizes, offset, row_stride), step, bits, own) >= t)
    return kept
