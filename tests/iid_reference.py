"""The iid law in plain Python integers: an independent reference that shares no line with the implementations."""

from fractions import Fraction

from reference import words

TAG_ENTRIES = 4


def lane_bits(density):
    """Bits per lane."""
    return 8 if density >= Fraction(1, 16) else 16


def threshold(density):
    """The threshold T, out of 2^(bits - 1)."""
    return int(Fraction(density) * 2 ** (lane_bits(density) - 1) + Fraction(1, 2))


def realised(density):
    return Fraction(threshold(density), 2 ** (lane_bits(density) - 1))


def entry(density, seed, row, column):
    """-1, 0 or 1; the value is that times sqrt(1 / (k realised))."""
    bits = lane_bits(density)
    lanes = 128 // bits
    number = sum(word << (32 * i) for i, word in enumerate(words(column, row // lanes, TAG_ENTRIES, seed)))
    lane = number >> (bits * (row % lanes)) & (2**bits - 1)
    sign, magnitude = divmod(lane, 2 ** (bits - 1))
    return (1 - 2 * sign) * (magnitude < threshold(density))


def columns(n_components, density, seed, start, stop):
    """Columns start to stop - 1, each a list of n_components entries."""
    return [[entry(density, seed, r, j) for r in range(n_components)] for j in range(start, stop)]
