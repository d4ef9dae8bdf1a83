"""Sparse data on the CPU: CSR and CSC matrices, one data vector a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ... import threads
from . import sparse_kernels as kernels
from .entries import FILL
from .jit import compiled
from .plan import SCRATCH_BYTES, TABLE_CODES, Plan, Scratch, row_tasks, staged

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec


def project_sparse(spec: SketchSpec, x: Any, out: np.ndarray, accumulate: bool) -> None:
    """out (n, k) = x (n, d) S', or out += that, for x in CSR or CSC."""
    if out.dtype == np.float16:
        staged(project_sparse, spec, x, out)
        return
    plan = Plan(spec)
    if x.format == "csr":
        _project_csr(plan, x, out, accumulate)
    else:
        _project_csc(plan, x, out, accumulate)


def _csr_table(plan: Plan, x: Any) -> np.ndarray:
    """A table of all columns where it fits and pays; else none, and each nonzero of x makes its own codes."""
    codes = plan.d * plan.s
    # Measured on Zen 5: 1.5 ns a code in a table, 150 ns for those of one column alone.
    return plan.table(0, plan.d) if codes <= min(TABLE_CODES, 100 * x.nnz) else plan.no_table()


def _project_csr(plan: Plan, x: Any, out: np.ndarray, accumulate: bool) -> None:
    n, k = out.shape
    kernel = compiled(kernels.project_csr, x.data.dtype, out=out.dtype, index=x.indices.dtype)
    table = _csr_table(plan, x)
    _, workers = plan.lanes_and_workers(1, 16)
    scratch = Scratch(lambda: (np.empty((1, plan.s), np.int32), np.empty(k), np.empty(k)))

    def task(i: int, end: int) -> None:
        one, sums, totals = arrays = scratch.take()
        kernel(
            x.indptr, x.indices, x.data, i, end, plan.column(0), table, one, plan.geometry, sums, totals,
            out, plan.scale, accumulate,
        )  # fmt: skip
        scratch.give(arrays)

    threads.run(task, row_tasks(n, 1, workers), workers)


def _project_csc(plan: Plan, x: Any, out: np.ndarray, accumulate: bool) -> None:
    n, k = out.shape
    kernel = compiled(kernels.project_csc, x.data.dtype, out=out.dtype, index=x.indices.dtype)
    workers = threads.get_num_threads()
    rows = max(1, min(-(-n // workers), SCRATCH_BYTES // (16 * k * workers)))
    workers = min(workers, max(1, SCRATCH_BYTES // (16 * k * rows)))
    unsorted = np.empty(1, np.int64)  # scipy's own flag is stale after the indices have been written to
    compiled(kernels.find_unsorted, index=x.indices.dtype)(x.indptr, x.indices, unsorted)
    is_sorted = bool(unsorted[0] == 0)
    scratch = Scratch(
        lambda: (
            np.empty((FILL, plan.s), np.int32),
            np.empty(rows * k),
            np.empty(rows * k),
            np.empty(rows, np.int64),
        )
    )

    def task(i: int, end: int) -> None:
        codes, sums, totals, counts = arrays = scratch.take()
        used = slice((end - i) * k)
        kernel(
            x.indptr, x.indices, x.data, is_sorted, i, end, plan.column(0), k, codes, plan.geometry,
            sums[used], totals[used], counts, out, plan.scale, accumulate,
        )  # fmt: skip
        scratch.give(arrays)

    threads.run(task, [(i, min(i + rows, n)) for i in range(0, n, rows)], workers)


def project_to_csr(spec: SketchSpec, x: Any, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(data, indices, indptr) of x S' for x (n, d) in CSR: sorted indices, one for each component that x reaches."""
    plan = Plan(spec)
    n, k = x.shape[0], plan.k
    table = _csr_table(plan, x)
    _, workers = plan.lanes_and_workers(1, 17)
    scratch = Scratch(
        lambda: (np.empty((1, plan.s), np.int32), np.zeros(-(-k // 64), np.uint64), np.zeros(k), np.empty(k))
    )
    index = np.dtype(np.int32 if min(x.nnz * plan.s, n * k) <= np.iinfo(np.int32).max else np.int64)
    indptr = np.zeros(n + 1, index)
    count = compiled(kernels.count_csr, index=x.indices.dtype, out_index=index)
    tasks = row_tasks(n, 1, workers)

    def count_task(i: int, end: int) -> None:
        one, hit, *_ = arrays = scratch.take()
        count(x.indptr, x.indices, i, end, plan.column(0), table, one, plan.geometry, hit, indptr)
        scratch.give(arrays)

    threads.run(count_task, tasks, workers)
    np.cumsum(indptr, dtype=index, out=indptr)
    indices, data = np.empty(indptr[-1], index), np.empty(indptr[-1], dtype)
    fill = compiled(kernels.fill_csr, x.data.dtype, out=dtype, index=x.indices.dtype, out_index=index)

    def fill_task(i: int, end: int) -> None:
        one, hit, sums, totals = arrays = scratch.take()
        fill(
            x.indptr, x.indices, x.data, i, end, plan.column(0), table, one, plan.geometry, hit, sums, totals,
            indptr, indices, data, plan.scale,
        )  # fmt: skip
        scratch.give(arrays)

    threads.run(fill_task, tasks, workers)
    return data, indices, indptr
