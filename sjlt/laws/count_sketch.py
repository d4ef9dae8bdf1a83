"""The seeds of the rows of a CountSketch table. README.md specifies them."""

from __future__ import annotations

from .philox import HALF, LOW, philox

TAG_ROWS = 5
MAX_ROWS = 2**20  # far beyond use; a row's index must fit a word


def row_seed(row: int, seed: int) -> int:
    """The seed of row `row` of the table with seed `seed`, -2^63 <= seed < 2^64: two words of one call of Philox."""
    w0, w1, _, _ = philox(row, 0, 0, TAG_ROWS, seed & LOW, seed >> HALF & LOW)
    return w0 | w1 << HALF
