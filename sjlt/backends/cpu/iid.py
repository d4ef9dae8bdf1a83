"""Sketches of the iid law on the CPU. The interface is that of `dense` and `sparse`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import threads
from ...laws.philox import HALF, LOW
from . import iid_kernels as kernels
from .dense import RUN_FEATURES, STAGED, _compute_dtype, _is_foreign, _native, _readable
from .iid_entries import ROUND, round_up
from .iid_kernels import INNER, LANES
from .jit import compiled
from .plan import STAGE_BYTES, TABLE_CODES, TERMS, Scratch, row_tasks, staged

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec

DENSE = 1 / 10  # from this density on, multiplying by zeros too is faster (Zen 5)
OUTER = 512  # of the result's columns that a task takes at most
TASK_BYTES = 8 << 20  # sums and totals of a task
SPARSE_OUTER, SPARSE_ROWS = 128, 8192  # components and rows of a task on sparse data
PART_CODES = 1 << 20  # room for codes of columns, found at a time
MOST_MADE = 100  # codes made for each nonzero of sparse data, beyond which only those of its columns are


class Plan:
    """A sketch as the kernels see it. All of it follows from the spec, so that results depend on nothing else."""

    def __init__(self, spec: SketchSpec) -> None:
        bits, signs, complement = spec.lanes.bits, spec.lanes.signs, spec.lanes.complement
        words = (bits, signs, complement, spec.seed & LOW, spec.seed >> HALF & LOW)
        self.rule = tuple(np.uint64(word) for word in words)
        self.dense = spec.lanes.density >= DENSE
        self.scale = spec.lanes.scale(spec.n_components)
        self.half = self.scale / 2 if self.dense else self.scale  # of what the kernels sum
        self.block = math.ceil(TERMS / spec.lanes.density / INNER) * INNER

    def scratch(self, columns: int, rows: int, compute: Any) -> tuple[np.ndarray, ...]:
        """Room for entries: words, floats, codes and the codes' places."""
        size = columns * int(round_up(rows))
        floats, codes = (size, 0) if self.dense else (0, columns * rows)
        return (
            np.empty(int(round_up(rows)) // 2, np.uint32),
            np.empty(floats, compute),
            np.empty(codes, np.int32),
            np.empty(columns + 1, np.int32),
        )


def project(spec: SketchSpec, x: np.ndarray, out: np.ndarray, accumulate: bool) -> None:
    """out (n, k) = x (n, d) S', or out += that."""
    if out.dtype in STAGED:
        staged(project, spec, x, out)
    elif _is_foreign(x) and x.shape[0] > 1:
        for i in range(x.shape[0]):
            project(spec, x[i : i + 1], out[i : i + 1], accumulate)
    elif x.size == 0:
        if not accumulate:
            out[...] = 0
    else:
        _multiply(spec, _native(x), out, accumulate, forward=True)


def adjoint(spec: SketchSpec, y: np.ndarray, out: np.ndarray, accumulate: bool) -> None:
    """out (n, d) = y (n, k) S, or out += that."""
    if out.dtype in STAGED:
        for j in range(0, out.shape[1], RUN_FEATURES):
            staged(adjoint, spec.columns(j, min(j + RUN_FEATURES, out.shape[1])), y, out[:, j : j + RUN_FEATURES])
    elif out.size:
        step = max(1, STAGE_BYTES // (y.itemsize * y.shape[1])) if _is_foreign(y) else out.shape[0]
        for i in range(0, out.shape[0], step):
            _multiply(spec, _native(y[i : i + step]), out[i : i + step], accumulate, forward=False)


def _multiply(spec: SketchSpec, x: np.ndarray, out: np.ndarray, accumulate: bool, forward: bool) -> None:
    plan, (n, outer), workers = Plan(spec), out.shape, threads.get_num_threads()
    compute = _compute_dtype(x)
    x = _readable(x)
    kernel = compiled(kernels.multiply, x.dtype, compute, out.dtype)
    lanes = min(lanes for lanes in (*LANES, max(LANES)) if lanes >= min(n, max(LANES)))
    width = min(OUTER, -(-outer // ROUND) * ROUND)
    rows = min(TASK_BYTES // (width * (8 + compute.itemsize)), -(-n // workers))
    rows = -(-rows // lanes) * lanes
    if n <= rows:  # one range of rows: each thread gets a part of the columns
        width = min(width, -(-outer // (workers * ROUND)) * ROUND)
    stacked = rows * min(width, outer) // lanes

    def make() -> tuple[np.ndarray, ...]:
        entries = plan.scratch(INNER, width, compute) if forward else plan.scratch(width, INNER, compute)
        sums = np.empty((stacked, lanes), compute)
        return *entries, np.zeros((INNER, lanes), compute), sums, np.empty((stacked, lanes))

    scratch = Scratch(make)

    def task(i: int, o: int) -> None:
        arrays = scratch.take()
        kernel(
            x, i, min(i + rows, n), o, min(o + width, outer), np.uint64(spec.feature_offset), plan.block, forward,
            plan.dense, plan.rule, *arrays, out, plan.half, accumulate,
        )  # fmt: skip
        scratch.give(arrays)

    threads.run(task, [(i, o) for i in range(0, n, rows) for o in range(0, outer, width)], workers)


def project_sparse(spec: SketchSpec, x: Any, out: np.ndarray, accumulate: bool) -> None:
    """out (n, k) = x (n, d) S', or out += that, for x in CSR or CSC."""
    if out.dtype == np.float16:
        staged(project_sparse, spec, x, out)
        return
    plan, x = Plan(spec), x.tocsr()
    _sparse(plan, spec, x, out, accumulate, _table(plan, spec, x))


def _table(plan: Plan, spec: SketchSpec, x: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """The codes of all columns, where they are few and many of them are asked for."""
    codes = spec.n_features * spec.n_components * spec.lanes.density
    return None if plan.dense or codes > min(TABLE_CODES, MOST_MADE * x.nnz) else _codes(plan, spec)


def _sparse(plan: Plan, spec: SketchSpec, x: Any, out: np.ndarray, accumulate: bool, table: Any) -> None:
    """For x in CSR."""
    n, k = out.shape
    if table is None:
        for i in range(0, n, SPARSE_ROWS):
            _sparse_rows(plan, spec, x[i : i + SPARSE_ROWS], out[i : i + SPARSE_ROWS], accumulate)
        return
    kernel = compiled(kernels.multiply_csr, x.data.dtype, "f8", out.dtype, index=x.indices.dtype)
    scratch = Scratch(lambda: (np.empty(k), np.empty(k)))

    def task(i: int, end: int) -> None:
        arrays = scratch.take()
        kernel(x.indptr, x.indices, x.data, i, end, *table, *arrays, out, plan.scale, accumulate)
        scratch.give(arrays)

    workers = threads.get_num_threads()
    threads.run(task, row_tasks(n, 1, workers), workers)


def _sparse_rows(plan: Plan, spec: SketchSpec, x: Any, out: np.ndarray, accumulate: bool) -> None:
    """Column by column, each made once for all rows."""
    (n, k), d = out.shape, x.shape[1]
    if d <= x.nnz + (1 << 20):
        numbers = x.tocsc().tocoo()
        rows, columns, data = numbers.row, numbers.col, numbers.data
    else:  # not even a number for each column
        numbers = x.tocoo()
        order = np.argsort(numbers.col, kind="stable")
        rows, columns, data = numbers.row[order], numbers.col[order], numbers.data[order]
    index = columns.dtype
    kernel = compiled(kernels.multiply_sorted, data.dtype, "f8", out.dtype, index=index)
    sums = n * min(k, SPARSE_OUTER)
    scratch = Scratch(
        lambda: (*plan.scratch(1, SPARSE_OUTER, "f8"), np.empty(sums), np.empty(sums), np.empty(n, np.int64))
    )

    def task(o: int) -> None:
        *entries, row_sums, row_totals, counts = arrays = scratch.take()
        end = min(o + SPARSE_OUTER, k)
        used = slice(n * (end - o))
        kernel(
            rows.astype(index, copy=False), columns, data, o, end, np.uint64(spec.feature_offset), plan.dense,
            plan.rule, *entries, row_sums[used], row_totals[used], counts, out, plan.half, accumulate,
        )  # fmt: skip
        scratch.give(arrays)

    threads.run(task, ((o,) for o in range(0, k, SPARSE_OUTER)), threads.get_num_threads())


def project_to_csr(spec: SketchSpec, x: Any, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(data, indices, indptr) of x S' for x (n, d) in CSR: sorted indices, of what is not zero."""
    plan, k = Plan(spec), spec.n_components
    table = _table(plan, spec, x)
    step = max(1, min(SPARSE_ROWS, STAGE_BYTES // k))
    counts, indices, data = [np.zeros(1, np.int64)], [np.empty(0, np.int64)], [np.empty(0, dtype)]
    for i in range(0, x.shape[0], step):
        result = np.empty((min(step, x.shape[0] - i), k), dtype)
        _sparse(plan, spec, x[i : i + step], result, False, table)
        rows, found = np.nonzero(result)
        counts.append(np.bincount(rows, minlength=len(result)))
        indices.append(found)
        data.append(result[rows, found])
    indptr = np.cumsum(np.concatenate(counts))
    index = np.int32 if max(indptr[-1], k) <= np.iinfo(np.int32).max else np.int64
    return np.concatenate(data), np.concatenate(indices).astype(index), indptr.astype(index)


def columns(spec: SketchSpec) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """(signs, rows, indptr, scale): the sketch in CSC, rows ascending, entries scale times +-1."""
    plan = Plan(spec)
    codes, indptr = _codes(plan, spec)
    return 1 - 2 * (codes & 1), codes >> 1, indptr, plan.scale


def _codes(plan: Plan, spec: SketchSpec) -> tuple[np.ndarray, np.ndarray]:
    """(codes, indptr) of all columns, 2 row + (1 where negative), found in parts by all threads."""
    k, d, workers = spec.n_components, spec.n_features, threads.get_num_threads()
    find = compiled(kernels.fill_columns)
    step = max(1, min(-(-d // workers), PART_CODES // k))
    parts: list[Any] = [None] * -(-d // step)
    scratch = Scratch(lambda: (np.empty(int(round_up(k)) // 2, np.uint32), np.empty(step * k, np.int32)))

    def task(part: int) -> None:
        words, room = arrays = scratch.take()
        ends = np.empty(min(step, d - part * step) + 1, np.int64)
        find(np.uint64(spec.feature_offset + part * step), k, plan.rule, words, room, ends)
        parts[part] = room[: ends[-1]].copy(), np.diff(ends)
        scratch.give(arrays)

    threads.run(task, ((part,) for part in range(len(parts))), workers)
    codes = np.concatenate([np.empty(0, np.int32), *(part[0] for part in parts)])
    return codes, np.cumsum(np.concatenate([np.zeros(1, np.int64), *(part[1] for part in parts)]))
