"""Dropout on the CPU backend: NumPy arrays of any strides; torch's bf16 in arrays of dtype `BFLOAT16`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numba
import numpy as np
from numba import types
from numpy.lib.stride_tricks import as_strided

from ... import threads
from ...inputs.dropout_axes import LENGTH, OPERANDS, Axis, Grid, grid
from ...laws import dropout as dropout_law
from ...laws.dropout import Rule
from ...laws.philox import LOW
from . import dropout_kernels as kernels
from .bits import BFLOAT16
from .dropout_kernels import CHUNK, TURNED, TURNED_CHUNK, WORDS
from .jit import with_types

TASK = 1 << 17  # elements of a thread's task, about

# ------------------------------------------------------------------------------------- machine code


def _argument_type(name: str, number: Any) -> types.Type:
    """The type of a kernel's argument; `number` is that of x."""
    arrays = {"x": number, "y": number, "out": number, "kept": types.uint8, "seeds": types.int64}
    if name in arrays:
        return types.Array(arrays[name], 1, "A" if name != "seeds" else "C", readonly=name in ("x", "y", "seeds"))
    words = [types.Array(dtype, 1, "C") for dtype in (types.uint8, types.uint16, types.uint32)]
    return {
        "places": types.Array(types.int64, 2, "C"),
        "steps": types.Array(types.int64, 2, "C"),
        "task": types.UniTuple(types.int64, 4),
        "rule": types.UniTuple(types.uint64, 3),
        "words": types.Tuple(words),
        "keep": words[0],
        "turned": types.Array(types.uint8, 2, "C"),
        "buffers": types.UniTuple(types.Array(number, 1, "C"), 3),
        "scale": types.float64,
    }.get(name, types.boolean)


@cache
def _compiled(kernel: Any, number: np.dtype) -> Callable[..., None]:
    """`kernel` as machine code for numbers of this dtype, from the cache on disk where an earlier process made it."""
    named = inspect.signature(kernel).parameters
    return with_types(kernel, *(_argument_type(name, numba.from_dtype(number)) for name in named))


# ------------------------------------------------------------------------------------- calls


def drop(rule: Rule, x: np.ndarray, out: np.ndarray) -> None:
    """out = dropout of x; they may be one array."""
    _drop(rule, x, x, out, False)


def drop_add(rule: Rule, x: np.ndarray, residual: np.ndarray, out: np.ndarray) -> None:
    """out = residual + dropout of x."""
    _drop(rule, x, residual, out, True)


def _drop(rule: Rule, x: np.ndarray, y: np.ndarray, out: np.ndarray, add: bool) -> None:
    bfloat = x.dtype == BFLOAT16
    x, y, out = _bits(x), _bits(y), _bits(out)
    seeds, law = _seeds(rule), _law(rule)

    def task(places: np.ndarray, steps: np.ndarray, part: tuple[int, ...], turned: bool) -> None:
        kernel = _compiled(kernels.drop_turned if turned else kernels.drop_rows, x.dtype)
        room: Any = np.empty((TURNED_CHUNK, TURNED), np.uint8) if turned else _buffers(x.dtype)
        arrays = _base(x), _base(y), _base(out), places, steps
        kernel(*arrays, part, seeds, law, _words(), np.empty(CHUNK, np.uint8), room, rule.scale, add, bfloat)

    _run(task, rule, x, y, out)


def drop_stored(scale: float, x: np.ndarray, keep: np.ndarray, out: np.ndarray) -> None:
    """out = x scale where keep, of bool, else 0; x and out may be one array."""
    bfloat = x.dtype == BFLOAT16
    x, keep, out = _bits(x), keep.view(np.uint8), _bits(out)
    kernel = _compiled(kernels.stored_rows, x.dtype)

    def task(places: np.ndarray, steps: np.ndarray, part: tuple[int, ...], _: bool) -> None:
        arrays = _base(x), _base(keep), _base(out), places, steps
        kernel(*arrays, part, np.empty(CHUNK, np.uint8), _buffers(x.dtype), scale, bfloat)

    _run(task, Rule(16, 1, scale), x, keep, out)


def mask(rule: Rule, out: np.ndarray) -> None:
    """out, of bool, = which elements of its shape live."""
    out = out.view(np.uint8)
    kernel = _compiled(kernels.mask_rows, np.dtype(np.float32))
    seeds, law = _seeds(rule), _law(rule)

    def task(places: np.ndarray, steps: np.ndarray, part: tuple[int, ...], _: bool) -> None:
        kernel(_base(out), places, steps, part, seeds, law, _words(), np.empty(CHUNK, np.uint8))

    _run(task, rule, out, out, out)


# ------------------------------------------------------------------------------------- arguments


def _bits(x: np.ndarray) -> np.ndarray:
    """fp16 and bf16 as kernels take them."""
    return x.view(np.uint16) if x.dtype in (np.float16, BFLOAT16) else x


def _base(x: np.ndarray) -> np.ndarray:
    """The memory from the first number on."""
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
    """Calls `task` for parts of the arrays' axes, on the threads."""
    if out.size == 0:
        return
    row_stride = rule.row_stride if rule.row_stride is not None else out.shape[-1] if out.ndim else 1
    seeds = () if rule.seeds is None else _dense(rule.seeds.shape)
    axes = grid(out.shape, row_stride, seeds, x.strides, y.strides, out.strides)
    steps = np.array([axes.rows[1:], axes.columns[1:]], np.int64).T.copy()
    turned = axes.rows[OPERANDS:] == tuple(a.itemsize for a in (x, y, out)) != axes.columns[OPERANDS:]
    parts = list(_parts(axes, turned))
    together = max(1, TASK // (axes.rows[LENGTH] * axes.columns[LENGTH]))
    todo = ((places, steps, part, turned) for places in _places(axes.others, rule.offset, together) for part in parts)
    if out.size <= TASK:
        for arguments in todo:
            task(*arguments)
    else:
        threads.run(task, todo, threads.get_num_threads())


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous array, in numbers."""
    return tuple(int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape)))


def _parts(axes: Grid, turned: bool) -> Iterator[tuple[int, int, int, int]]:
    """Rows and columns of tasks."""
    rows, columns = axes.rows[LENGTH], axes.columns[LENGTH]
    in_memory = not turned and any(
        abs(r) < abs(c) for r, c in zip(axes.rows[OPERANDS:], axes.columns[OPERANDS:], strict=True)
    )
    width = min(columns, TURNED_CHUNK if turned else CHUNK if rows > 1 and in_memory else TASK)
    height = max(1, TASK // width)
    for i in range(0, rows, height):
        for j in range(0, columns, width):
            yield i, min(i + height, rows), j, min(j + width, columns)


def _places(axes: tuple[Axis, ...], offset: int, together: int) -> Iterator[np.ndarray]:
    """Where the places of these axes begin, so many at a time."""
    lengths = [axis[LENGTH] for axis in axes]
    total = int(np.prod(lengths, dtype=np.int64))
    for first in range(0, total, together):
        place = np.unravel_index(np.arange(first, min(first + together, total)), lengths or (1,))
        begins = np.zeros((place[0].size, 5), np.int64)
        for i, axis in zip(place, axes, strict=False):
            begins += i[:, None] * np.array(axis[1:], np.int64)
        begins[:, kernels.INDEX] += offset
        yield begins
