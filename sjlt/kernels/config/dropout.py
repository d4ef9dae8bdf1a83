"""The choice of a dropout launch: pure functions of the axes of a call, tuned on an H200 with 2^28 elements."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from ...inputs.dropout_axes import LENGTH, OPERANDS, Grid
from .product import next_power_of_two

FLAT_BYTES = 4096  # of the result per program, for contiguous memory
FLAT_WARPS = 4
TILE_ELEMENTS, TILE_WARPS = 2048, 2  # per program, if columns are contiguous in all tensors
SQUARE_SIDE, SQUARE_WARPS = 64, 4  # per program, if rows are contiguous in some or all tensors
MAX_WASTE = 8  # columns of tiles for each one that may lie beyond the last column


class Tiles(NamedTuple):
    """A launch of `dropout_tiles`.

    Attributes
    ----------
    rows_contiguous, shape, unmasked, align, rows, columns
        Constants of the kernel.
    tiles : int
        Tiles of rows and columns, for each index of the other axes.
    warps : int
    """

    rows_contiguous: bool
    shape: int
    unmasked: bool
    align: int
    rows: int
    columns: int
    tiles: int
    warps: int


def flat_block(bits: int, calls: int, item_bytes: int) -> int:
    """Elements per program of `dropout_flat`, enough for at least one call of Philox per thread."""
    block = max(FLAT_BYTES // item_bytes, 32 * FLAT_WARPS * 128 // bits)
    return 2 * block if calls == 0 and item_bytes == 4 else block


def calls_per_group(bits: int, item_bytes: int, indices: tuple[int, ...]) -> int:
    """The constant CALLS of the kernels, for groups that begin at multiples of 128 / `bits` from each of `indices`."""
    if any(index % (128 // bits) for index in indices):
        return 0
    return 2 if bits == 32 and item_bytes == 2 else 1  # a thread then decides 16 bytes of elements


@lru_cache(maxsize=4096)
def choose_tiles(axes: Grid, lanes: int) -> Tiles:
    """The launch for a grid of axes, with `lanes` elements per call of Philox."""
    rows, columns = axes.rows, axes.columns
    by_operand = [row < column for row, column in zip(rows[OPERANDS:], columns[OPERANDS:], strict=True)]
    rows_contiguous = all(by_operand)
    by_columns = rows[LENGTH] == 1 or not any(by_operand)
    if by_columns:
        elements, width = TILE_ELEMENTS, _width(columns[LENGTH], 2 * lanes)
    else:
        elements = SQUARE_SIDE * SQUARE_SIDE
        width = elements // min(SQUARE_SIDE, next_power_of_two(rows[LENGTH]))
        width = min(width, max(2 * lanes, next_power_of_two(columns[LENGTH])))
    height = min(elements // width, next_power_of_two(rows[LENGTH]))
    fast, slow = (rows, columns) if rows_contiguous else (columns, rows)
    strides = [step for axis in (slow, *axes.others) for step in axis[OPERANDS:]]
    one_tile = (height if rows_contiguous else width) >= fast[LENGTH]
    return Tiles(
        rows_contiguous=rows_contiguous,
        shape=2 if axes.others else 0 if one_tile else 1,
        unmasked=rows[LENGTH] % height == 0 and columns[LENGTH] % width == 0,
        align=math.gcd(16, fast[LENGTH], *strides) if rows_contiguous == any(by_operand) else 1,
        rows=height,
        columns=width,
        tiles=-(-rows[LENGTH] // height) * -(-columns[LENGTH] // width),
        warps=TILE_WARPS if by_columns else SQUARE_WARPS,
    )


def _width(columns: int, minimum: int) -> int:
    """Columns of a tile: as many as possible while few lie beyond the last column."""
    width = min(TILE_ELEMENTS, max(minimum, next_power_of_two(columns)))
    while width > max(minimum, 32) and (-columns % width) * MAX_WASTE > columns:
        width //= 2
    return width
