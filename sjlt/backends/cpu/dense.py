"""Dense data on the CPU, any strides: 2-D arrays, one data vector a row.

There are two ways. With many rows, the codes of a span of features go into a table that all threads share, and a task
is a range of rows. With few rows, a task is a run of features and makes its own codes. Both add the same blocks of
features in the same order, so their results are equal to the bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ... import threads
from . import dense_kernels as kernels
from .bits import BFLOAT16
from .dense_kernels import TILE_FEATURES
from .entries import FILL
from .jit import compiled
from .plan import SCRATCH_BYTES, STAGE_BYTES, TABLE_CODES, Plan, Scratch, row_tasks, staged

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec

TOTALS_BYTES = 16 << 20  # fp64 totals of the rows under way
TOGETHER_BYTES = 1 << 19  # tiles that one thread works on together: they should stay in its L2 cache
RUN_FEATURES = 1 << 16  # features of a task where a task is a run of features
STAGED = (np.float16, BFLOAT16)  # what results are rounded to from a wider dtype


def _is_foreign(x: np.ndarray) -> bool:
    """Whether the kernels cannot read x where it lies: another machine's byte order, or unaligned numbers."""
    return not (x.dtype.isnative and x.flags.aligned)


def _native(x: np.ndarray) -> np.ndarray:
    return x.astype(x.dtype.newbyteorder("=")) if _is_foreign(x) else x


def _readable(x: np.ndarray) -> np.ndarray:
    """`x` as the kernels read it: copied if it is foreign, fp16 and bf16 as their bits."""
    x = _native(x)
    bits = {np.dtype(np.float16): np.uint16, BFLOAT16: np.int16}.get(x.dtype)
    return x if bits is None else x.view(bits)


def _compute_dtype(x: np.ndarray) -> np.dtype:
    """What sums over x run in."""
    return np.dtype(np.float32 if x.dtype.kind in "fV" and x.dtype.itemsize <= 4 else np.float64)


def _together(x: np.ndarray, tile_bytes: int, rows: int) -> int:
    """How many tiles a thread works on at a time, where `rows` rows give every thread one."""
    if abs(x.strides[0]) >= abs(x.strides[1]):
        return 1
    # Column-major: tiles side by side touch whole stretches of memory.
    return max(1, min(TOGETHER_BYTES // tile_bytes, -(-x.shape[0] // rows)))


def project(spec: SketchSpec, x: np.ndarray, out: np.ndarray, accumulate: bool) -> None:
    """out (n, k) = x (n, d) S', or out += that."""
    if out.dtype in STAGED:
        staged(project, spec, x, out)
        return
    plan = Plan(spec)
    n = x.shape[0]
    if n == 0 or plan.d == 0:
        if not accumulate:
            out[...] = 0
        return
    compute = _compute_dtype(x)
    rows = n
    if _is_foreign(x):  # the few rows that are copied at a time, a run of features of them
        rows = max(1, min(8, STAGE_BYTES // (x.itemsize * max(plan.block, RUN_FEATURES))))
    lanes, workers = plan.lanes_and_workers(rows, compute.itemsize)
    if _is_foreign(x):
        workers = 1
    elif n > lanes and (-(-n // lanes) >= workers or plan.n_blocks == 1):
        _project_many(plan, _readable(x), out, accumulate, compute, lanes, workers)
        return
    step = min(rows, lanes)
    for i in range(0, n, step):
        _project_few(plan, x[i : i + step], out[i : i + step], accumulate, compute, lanes, workers)


def _project_many(
    plan: Plan, x: np.ndarray, out: np.ndarray, accumulate: bool, compute: np.dtype, lanes: int, workers: int
) -> None:
    n, k = out.shape
    kernel = compiled(kernels.project_rows, x.dtype, compute, out.dtype)
    together = _together(x, k * lanes * compute.itemsize, lanes * workers)
    scratch = Scratch(lambda: (np.zeros((TILE_FEATURES, lanes), compute), np.empty((together * k, lanes), compute)))

    def task(
        i: int, end: int, x: np.ndarray, out: np.ndarray, totals: np.ndarray, b0: int, b1: int, table: np.ndarray
    ) -> None:
        tile, sums = arrays = scratch.take()
        bounds = plan.bounds(b0, b1)
        columns = x[:, bounds[0] : bounds[-1]]
        kernel(
            columns, table, bounds - bounds[0], i, end, k, b0 == 0, b1 == plan.n_blocks, tile, sums, totals,
            out, plan.scale, accumulate,
        )  # fmt: skip
        scratch.give(arrays)

    # Totals go from block to block, for as many rows at a time as there is memory for.
    group = n if plan.n_blocks == 1 else max(1, TOTALS_BYTES // (8 * k * lanes)) * lanes
    per_table = max(1, TABLE_CODES // (plan.block * plan.s))
    table = plan.no_table()
    for g in range(0, n, group):
        rows, result = x[g : g + group], out[g : g + group]
        tiles = 0 if plan.n_blocks == 1 else -(-rows.shape[0] // lanes)
        totals = np.empty((tiles * k, lanes))
        for b0 in range(0, plan.n_blocks, per_table):
            b1 = min(b0 + per_table, plan.n_blocks)
            if g == 0 or plan.n_blocks > per_table:
                del table  # before the next is made
                bounds = plan.bounds(b0, b1)
                table = plan.table(bounds[0], bounds[-1])
            ranges = row_tasks(rows.shape[0], lanes * together, workers)
            threads.run(task, [(*r, rows, result, totals, b0, b1, table) for r in ranges], workers)


def _project_few(
    plan: Plan, x: np.ndarray, out: np.ndarray, accumulate: bool, compute: np.dtype, lanes: int, workers: int
) -> None:
    n, k = out.shape
    project_blocks = compiled(kernels.project_blocks, _readable(x[:0]).dtype, compute)
    fold_blocks = compiled(kernels.fold_blocks, compute=compute, out=out.dtype)
    fitting = SCRATCH_BYTES // (workers * k * lanes * compute.itemsize)
    per_task = max(1, min(RUN_FEATURES // plan.block, fitting))
    workers = min(workers, -(-plan.n_blocks // per_task))
    scratch = [
        (
            np.empty((FILL, plan.s), np.int32),
            np.zeros((TILE_FEATURES, lanes), compute),
            np.empty((min(per_task, plan.n_blocks) * k, lanes), compute),
        )
        for _ in range(workers)
    ]
    totals = np.empty((k if plan.n_blocks > 1 else 0, lanes))

    def task(worker: int, begin: int, end: int) -> None:
        codes, tile, sums = scratch[worker]
        bounds = plan.bounds(begin, end)
        first, last = bounds[0], bounds[-1]
        features, sums = _readable(x[:, first:last]), sums[: (end - begin) * k]
        project_blocks(features, bounds - first, plan.column(first), plan.geometry, k, codes, tile, sums)

    for b in range(0, plan.n_blocks, per_task * workers):
        starts = range(b, min(b + per_task * workers, plan.n_blocks), per_task)
        tasks = [(w, start, min(start + per_task, plan.n_blocks)) for w, start in enumerate(starts)]
        threads.run(task, tasks, workers)
        for worker, start, end in tasks:
            sums = scratch[worker][2][: (end - start) * k]
            fold_blocks(
                sums, totals, n, k, start == 0, end == plan.n_blocks, out, plan.scale, accumulate
            )  # fmt: skip


def adjoint(spec: SketchSpec, y: np.ndarray, out: np.ndarray, accumulate: bool) -> None:
    """out (n, d) = y (n, k) S, or out += that."""
    if out.dtype in STAGED:
        for j in range(0, out.shape[1], RUN_FEATURES):
            staged(adjoint, spec.columns(j, min(j + RUN_FEATURES, out.shape[1])), y, out[:, j : j + RUN_FEATURES])
        return
    plan = Plan(spec)
    n = y.shape[0]
    if n == 0 or plan.d == 0:
        return
    if _is_foreign(y):
        step = max(1, STAGE_BYTES // (y.itemsize * y.shape[1]))
        for i in range(0, n, step):
            adjoint(spec, _native(y[i : i + step]), out[i : i + step], accumulate)
        return
    compute = _compute_dtype(y)
    y = _readable(y)
    lanes, workers = plan.lanes_and_workers(n, compute.itemsize)
    if n <= lanes or -(-n // lanes) < workers:
        for i in range(0, n, lanes):
            _adjoint_few(plan, y[i : i + lanes], out[i : i + lanes], accumulate, compute, lanes, workers)
    else:
        _adjoint_many(plan, y, out, accumulate, compute, lanes, workers)


def _adjoint_many(
    plan: Plan, y: np.ndarray, out: np.ndarray, accumulate: bool, compute: np.dtype, lanes: int, workers: int
) -> None:
    n, k = y.shape
    kernel = compiled(kernels.adjoint_rows, y.dtype, compute, out.dtype)
    together = _together(out, k * lanes * compute.itemsize, lanes * workers)
    scratch = Scratch(lambda: (np.empty((TILE_FEATURES, lanes), compute), np.zeros((together * k, lanes), compute)))

    def task(i: int, end: int, columns: np.ndarray, table: np.ndarray) -> None:
        tile, components = arrays = scratch.take()
        kernel(y, table, i, end, k, tile, components, columns, plan.scale, accumulate)
        scratch.give(arrays)

    span = TABLE_CODES // plan.s
    ranges = row_tasks(n, lanes * together, workers)
    for j in range(0, plan.d, span):
        columns = out[:, j : j + span]
        table = plan.table(j, j + columns.shape[1])
        threads.run(task, [(*r, columns, table) for r in ranges], workers)
        del table  # before the next is made


def _adjoint_few(
    plan: Plan, y: np.ndarray, out: np.ndarray, accumulate: bool, compute: np.dtype, lanes: int, workers: int
) -> None:
    k = y.shape[1]
    kernel = compiled(kernels.adjoint_run, y.dtype, compute, out.dtype)
    scratch = Scratch(
        lambda: (
            np.empty((FILL, plan.s), np.int32),
            np.empty((TILE_FEATURES, lanes), compute),
            np.zeros((k, lanes), compute),
        )
    )

    def task(j: int) -> None:
        codes, tile, components = arrays = scratch.take()
        columns = out[:, j : j + RUN_FEATURES]
        kernel(y, plan.column(j), plan.geometry, k, codes, tile, components, columns, plan.scale, accumulate)
        scratch.give(arrays)

    threads.run(task, ((j,) for j in range(0, plan.d, RUN_FEATURES)), workers)
