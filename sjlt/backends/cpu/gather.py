"""The adjoint of one vector for a sketch with nnz = 1, where each feature is a signed component.

The general adjoint (`dense`) first copies all components into a tile, which is most of the work when there are many of
them and few features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import types

from ... import threads
from .entries import CODES_STEP, generate_codes, generate_column
from .jit import CODES, DATA, INT64S, LAW, OUT, Array, compiled, kernel
from .plan import exact_plan

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec

TASK_FEATURES = 16 * CODES_STEP  # features in a task


@kernel(first_column=types.uint64, y=Array(DATA, 1, "A", readonly=True), codes=CODES, geometry=LAW, out=Array(OUT, 1))
def gather_run(first_column, y, codes, geometry, out):
    """out[j] = the component that column first_column + j selects, times its sign."""
    for start in range(0, out.size, codes.shape[0]):
        stop = min(start + codes.shape[0], out.size)
        generate_codes(first_column + np.uint64(start), codes[: stop - start], geometry)
        for j in range(start, stop):
            code = np.uint32(codes[j - start, 0])
            value = y[code >> 1]
            out[j] = -value if code & 1 else value


@kernel(
    columns=INT64S, first_column=types.uint64, y=Array(DATA, 1, "A", readonly=True), codes=CODES, geometry=LAW,
    out=Array(OUT, 1),
)  # fmt: skip
def gather_columns(columns, first_column, y, codes, geometry, out):
    """out[i] = the component that column first_column + columns[i] selects, times its sign."""
    for i in range(columns.size):
        generate_column(first_column + np.uint64(columns[i]), codes, geometry)
        code = np.uint32(codes[0, 0])
        value = y[code >> 1]
        out[i] = -value if code & 1 else value


def gather(spec: SketchSpec, y: np.ndarray) -> np.ndarray:
    """y S for y of shape (n_components,) and dtype float32 or float64, and nnz = 1."""
    plan = exact_plan(spec)
    out = np.empty(spec.n_features, y.dtype)
    run = compiled(gather_run, data=y.dtype, out=out.dtype)

    def task(start: int) -> None:
        codes = np.empty((CODES_STEP, 1), np.int32)
        run(plan.column(start), y, codes, plan.geometry, out[start : start + TASK_FEATURES])

    threads.run(task, ((j,) for j in range(0, out.size, TASK_FEATURES)), threads.get_num_threads())
    return out


def gather_at(spec: SketchSpec, y: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The elements of `gather`'s result at some columns, which must be int64 and in range."""
    plan = exact_plan(spec)
    out = np.empty(columns.size, y.dtype)
    run = compiled(gather_columns, data=y.dtype, out=out.dtype)
    run(np.ascontiguousarray(columns), plan.column(0), y, np.empty((1, 1), np.int32), plan.geometry, out)
    return out
