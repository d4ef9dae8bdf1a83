"""The seeds of the rows of a CountSketch table, specified in README.md."""

from __future__ import annotations

from .philox import HALF, LOW, philox

TAG_ROWS = 5
MAX_ROWS = 2**20  # more than anyone needs; the index of a row must fit in a word


def row_seed(row: int, seed: int) -> int:
    """The seed of row `row` of the table with seed `seed`, -2^63 <= seed < 2^64: two words from one call of Philox."""
    w0, w1, _, _ = philox(row, 0, 0, TAG_ROWS, seed & LOW, seed >> HALF & LOW)
    return w0 | w1 << HALF
