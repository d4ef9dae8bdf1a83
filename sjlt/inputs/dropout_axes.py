"""The axes of a dropout call, with their strides in memory and in the index of the law, merged where possible.

An axis is (length, step in the index, step in the seeds, step in the memory of each operand). Steps may be 0 (expanded
tensors, and the index along axes of the seeds) or negative (NumPy). The caller chooses the unit of memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

Axis = tuple[int, ...]
LENGTH, INDEX, SEEDS, OPERANDS = 0, 1, 2, 3


class Grid(NamedTuple):
    """The axes of a call.

    Attributes
    ----------
    columns : the axis along which the index increases by 1
    rows : of the remaining axes, the one with the smallest step in the result
    others : all other axes, the longest first
    """

    columns: Axis
    rows: Axis
    others: tuple[Axis, ...]

    @property
    def flat(self) -> bool:
        """Whether the elements of every operand are contiguous, in the order of their indices."""
        steps = self.columns[OPERANDS:]
        return self.rows[LENGTH] == 1 and not self.others and all(step == 1 for step in steps)


@lru_cache(maxsize=4096)
def grid(
    shape: tuple[int, ...],
    row_stride: int,
    seeds: tuple[int, ...],
    *operands: tuple[int, ...],
) -> Grid:
    """The axes of a call.

    shape : the logical shape, without zeros.
    row_stride : the difference between the indices of consecutive rows.
    seeds : the strides of the tensor of seeds, which has shape ``shape[:len(seeds)]``; () for a single seed.
    operands : the strides of each tensor; the result is the last one.
    """
    seed_steps = (*seeds, *(0,) * (len(shape) - len(seeds)))
    axes = list(zip(shape, _index_steps(shape, row_stride, len(seeds)), seed_steps, *operands, strict=True))
    merged: list[Axis] = []
    for axis in reversed(axes):
        inner = merged[-1] if merged else None
        if axis[LENGTH] == 1:
            continue
        if inner and all(step == inner[LENGTH] * below for step, below in zip(axis[1:], inner[1:], strict=True)):
            merged[-1] = (axis[LENGTH] * inner[LENGTH], *inner[1:])
        else:
            merged.append(axis)
    none = (0,) * len(operands)
    columns: Axis = merged.pop(0) if merged and merged[0][INDEX] == 1 else (1, 1, 0, *(1 for _ in operands))
    merged.sort(key=lambda axis: (abs(axis[-1]), -axis[LENGTH]))  # by step in the result
    rows: Axis = merged.pop(0) if merged else (1, 0, 0, *none)
    return Grid(columns, rows, tuple(sorted(merged, reverse=True)))


def _index_steps(shape: Sequence[int], row_stride: int, seeds_ndim: int) -> list[int]:
    """The step in the index along each axis, which is 0 along the axes of the seeds."""
    steps, step = [], row_stride
    for axis in reversed(range(len(shape))):
        if axis < seeds_ndim:
            steps.append(0)
        elif axis == len(shape) - 1:
            steps.append(1)
        else:
            steps.append(step)
            step *= shape[axis]
    return steps[::-1]


def last_index(shape: Sequence[int], row_stride: int, seeds_ndim: int) -> int:
    """The largest index of an element, not counting the offset; `shape` must not contain 0."""
    return sum((n - 1) * step for n, step in zip(shape, _index_steps(shape, row_stride, seeds_ndim), strict=True))


def offsets(axes: Sequence[Axis]) -> Iterator[tuple[int, ...]]:
    """The offset of each position on these axes: in the index, in the seeds and in each operand."""
    for position in product(*(range(axis[LENGTH]) for axis in axes)):
        yield tuple(sum(i * step for i, step in zip(position, steps, strict=True)) for steps in _by_step(axes))


def _by_step(axes: Sequence[Axis]) -> list[tuple[int, ...]]:
    return [tuple(axis[which] for axis in axes) for which in range(1, len(axes[0]))] if axes else []
