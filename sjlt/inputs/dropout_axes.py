"""How the elements of a tensor lie in memory and in the law's index: axes, merged until few are left.

An axis is (length, step in the law's index, step in the seeds, step in the memory of each operand). Steps may be 0
(expanded tensors, and axes that seeds distinguish) or negative (NumPy). Units are the caller's.
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
    columns : the axis along which the law's index grows by 1
    rows : the remaining axis with the smallest step in the result
    others : the remaining axes, the longest first
    """

    columns: Axis
    rows: Axis
    others: tuple[Axis, ...]

    @property
    def flat(self) -> bool:
        """Whether every operand's elements lie side by side in the order of the law's indices."""
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

    shape : the logical shape; none of its lengths is 0.
    row_stride : the law's step from row to row of (product of leading dimensions, last dimension).
    seeds : the strides of the tensor of seeds, of shape ``shape[:len(seeds)]``; () for one seed.
    operands : each tensor's strides.
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
    merged.sort(key=lambda axis: (abs(axis[-1]), -axis[LENGTH]))  # by the result's steps
    rows: Axis = merged.pop(0) if merged else (1, 0, 0, *none)
    return Grid(columns, rows, tuple(sorted(merged, reverse=True)))


def _index_steps(shape: Sequence[int], row_stride: int, n_seeds: int) -> list[int]:
    """Steps in the law's index; axes of the seeds have none."""
    steps, step = [], row_stride
    for axis in reversed(range(len(shape))):
        if axis < n_seeds:
            steps.append(0)
        elif axis == len(shape) - 1:
            steps.append(1)
        else:
            steps.append(step)
            step *= shape[axis]
    return steps[::-1]


def last_index(shape: Sequence[int], row_stride: int, n_seeds: int) -> int:
    """The largest index of an element, the offset aside; no length of the shape is 0."""
    return sum((n - 1) * step for n, step in zip(shape, _index_steps(shape, row_stride, n_seeds), strict=True))


def offsets(axes: Sequence[Axis]) -> Iterator[tuple[int, ...]]:
    """The offset of each place on these axes: in the law's index, in the seeds and in each operand."""
    for place in product(*(range(axis[LENGTH]) for axis in axes)):
        yield tuple(sum(i * step for i, step in zip(place, steps, strict=True)) for steps in _by_step(axes))


def _by_step(axes: Sequence[Axis]) -> list[tuple[int, ...]]:
    return [tuple(axis[which] for axis in axes) for which in range(1, len(axes[0]))] if axes else []
