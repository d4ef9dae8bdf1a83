"""Dropout on the CPU, on arrays of any strides. bf16 arrays have the dtype `BFLOAT16`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ... import threads
from ...inputs.dropout_axes import LENGTH, OPERANDS, Axis, Grid, grid
from ...laws import dropout as dropout_law
from ...laws.dropout import Rule
from ...laws.philox import LOW
from . import dropout_kernels as kernels
from .bits import kernel_view
from .dropout_kernels import CHUNK, TRANSPOSED_COLUMNS, TRANSPOSED_ROWS, WORDS
from .jit import compiled

TASK_ELEMENTS = 1 << 17  # elements in a task, approximately

# ------------------------------------------------------------------------------------- calls


def drop(rule: Rule, x: np.ndarray, out: np.ndarray) -> None:
    """out = dropout of x. They may be the same array."""
    _drop(rule, x, x, out, False)


def drop_add(rule: Rule, x: np.ndarray, residual: np.ndarray, out: np.ndarray) -> None:
    """out = residual + dropout of x."""
    _drop(rule, x, residual, out, True)


def _drop(rule: Rule, x: np.ndarray, y: np.ndarray, out: np.ndarray, add: bool) -> None:
    x, y, out = kernel_view(x), kernel_view(y), kernel_view(out)
    seeds, law = _seeds(rule), _law(rule)

    def task(origins: np.ndarray, steps: np.ndarray, part: tuple[int, ...], by_columns: bool) -> None:
        kernel = compiled(kernels.drop_columns if by_columns else kernels.drop_rows, data=x.dtype)
        last: Any = np.empty((TRANSPOSED_COLUMNS, TRANSPOSED_ROWS), np.uint8) if by_columns else _buffers(x.dtype)
        buffers = _words(), np.empty(CHUNK, np.uint8), last
        kernel(_base(x), _base(y), _base(out), origins, steps, part, seeds, law, buffers, rule.scale, add)

    _run(task, rule, x, y, out)


def drop_stored(scale: float, x: np.ndarray, keep: np.ndarray, out: np.ndarray) -> None:
    """out = scale * x where `keep` (bool) is True, 0 elsewhere. x and out may be the same array."""
    x, keep, out = kernel_view(x), keep.view(np.uint8), kernel_view(out)
    kernel = compiled(kernels.mask_rows, data=x.dtype)

    def task(origins: np.ndarray, steps: np.ndarray, part: tuple[int, ...], _: bool) -> None:
        buffers = np.empty(CHUNK, np.uint8), _buffers(x.dtype)
        kernel(_base(x), _base(keep), _base(out), origins, steps, part, buffers, scale)

    _run(task, Rule(16, 1, scale), x, keep, out)


def mask(rule: Rule, out: np.ndarray) -> None:
    """Store in out (bool) which elements of an array of its shape are kept."""
    out = out.view(np.uint8)
    kernel = compiled(kernels.write_mask)
    seeds, law = _seeds(rule), _law(rule)

    def task(origins: np.ndarray, steps: np.ndarray, part: tuple[int, ...], _: bool) -> None:
        kernel(_base(out), origins, steps, part, seeds, law, _words(), np.empty(CHUNK, np.uint8))

    _run(task, rule, out, out, out)


# ------------------------------------------------------------------------------------- arguments


def _base(x: np.ndarray) -> np.ndarray:
    """A view of the first element, from which kernels address the others by offsets."""
    return as_strided(x, (1,), (x.itemsize,))


def _words() -> tuple[np.ndarray, ...]:
    words = np.empty(WORDS, np.uint32)
    return words.view(np.uint8), words.view(np.uint16), words


def _buffers(dtype: np.dtype) -> tuple[np.ndarray, ...]:
    return tuple(np.empty((3, CHUNK), dtype))


def _seeds(rule: Rule) -> np.ndarray:
    return np.array([rule.seed]) if rule.seeds is None else np.ascontiguousarray(rule.seeds).reshape(-1)


def _law(rule: Rule) -> tuple[np.uint64, ...]:
    step = rule.step if rule.steps is None else rule.steps.item() & LOW
    return tuple(np.uint64(v) for v in (step, dropout_law.log_lanes(rule.bits), rule.threshold))


# ------------------------------------------------------------------------------------- tasks


def _run(task: Callable[..., None], rule: Rule, x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    """Call `task` for all parts of the arrays, on the threads if there are more than TASK_ELEMENTS elements."""
    if out.size == 0:
        return
    row_stride = rule.row_stride if rule.row_stride is not None else out.shape[-1] if out.ndim else 1
    seeds = () if rule.seeds is None else _contiguous_strides(rule.seeds.shape)
    axes = grid(out.shape, row_stride, seeds, x.strides, y.strides, out.strides)
    steps = np.array([axes.rows[1:], axes.columns[1:]], np.int64).T.copy()
    by_columns = axes.rows[OPERANDS:] == tuple(a.itemsize for a in (x, y, out)) != axes.columns[OPERANDS:]
    parts = list(_parts(axes, by_columns))
    batch = max(1, TASK_ELEMENTS // (axes.rows[LENGTH] * axes.columns[LENGTH]))
    todo = (
        (origins, steps, part, by_columns) for origins in _origins(axes.others, rule.offset, batch) for part in parts
    )
    if out.size <= TASK_ELEMENTS:
        for arguments in todo:
            task(*arguments)
    else:
        threads.run(task, todo, threads.get_num_threads())


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous array, in elements."""
    return tuple(int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape)))


def _parts(axes: Grid, by_columns: bool) -> Iterator[tuple[int, int, int, int]]:
    """The ranges of rows and columns of tasks: (i0, i1, j0, j1)."""
    rows, columns = axes.rows[LENGTH], axes.columns[LENGTH]
    in_memory = not by_columns and any(
        abs(r) < abs(c) for r, c in zip(axes.rows[OPERANDS:], axes.columns[OPERANDS:], strict=True)
    )
    width = min(columns, TRANSPOSED_COLUMNS if by_columns else CHUNK if rows > 1 and in_memory else TASK_ELEMENTS)
    height = max(1, TASK_ELEMENTS // width)
    for i in range(0, rows, height):
        for j in range(0, columns, width):
            yield i, min(i + height, rows), j, min(j + width, columns)


def _origins(axes: tuple[Axis, ...], offset: int, batch: int) -> Iterator[np.ndarray]:
    """The origins of all positions along these axes (see `dropout_kernels`), in batches."""
    lengths = [axis[LENGTH] for axis in axes]
    total = int(np.prod(lengths, dtype=np.int64))
    for first in range(0, total, batch):
        position = np.unravel_index(np.arange(first, min(first + batch, total)), lengths or (1,))
        origins = np.zeros((position[0].size, 5), np.int64)
        for i, axis in zip(position, axes, strict=False):
            origins += i[:, None] * np.array(axis[1:], np.int64)
        origins[:, kernels.INDEX] += offset
        yield origins
