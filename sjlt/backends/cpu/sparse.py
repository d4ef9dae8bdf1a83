"""The exact law on sparse data on the CPU: CSR and CSC matrices, one data vector per row."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import threads
from . import sparse_kernels as kernels
from .bits import kernel_view
from .entries import CODES_STEP
from .jit import compiled
from .plan import (
    SCRATCH_BYTES,
    SPARSE_WORK,
    STEP_WORK,
    STORE_WORK,
    TABLE_CODES,
    ExactPlan,
    Scratch,
    exact_plan,
    row_ranges,
    useful_threads,
)

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec

Step = tuple[tuple[int, int], tuple[int, int]]  # a range of rows, and one of nonzeros


def project_exact_sparse(spec: SketchSpec, x: Any, out: np.ndarray, accumulate: bool) -> None:
    """out (n, k) = x (n, d) S', or out += that, for x in CSR or CSC."""
    project = _project_csr if x.format == "csr" else _project_csc
    project(exact_plan(spec), x, kernel_view(out), accumulate)


def _csr_table(plan: ExactPlan, x: Any) -> np.ndarray:
    """The codes of all columns; empty if too many or not worthwhile, so that codes are generated per nonzero."""
    codes = plan.d * plan.s
    # On Zen 5, a code in a table takes 1.5 ns to generate, the codes of a single column 150 ns.
    return plan.table(0, plan.d) if codes <= min(TABLE_CODES, 100 * x.nnz) else plan.no_table()


# ------------------------------------------------------------------------------------- steps


def csr_steps(indptr: np.ndarray, rows: tuple[int, int], max_nonzeros: int) -> Iterator[Step]:
    """Divide a range of rows into steps of at most `max_nonzeros` nonzeros; a row may be divided, too."""
    i, end = rows
    while i < end:
        first, last = int(indptr[i]), int(indptr[end])
        stop = end
        if last - first > max_nonzeros:
            stop = int(np.searchsorted(indptr[i : end + 1], first + max_nonzeros, "right")) + i - 1
        if stop > i:
            yield (i, stop), (first, int(indptr[stop]))
        else:
            stop, last = i + 1, int(indptr[i + 1])
            for e in range(first, last, max_nonzeros):
                yield (i, stop), (e, min(e + max_nonzeros, last))
        i = stop


def csc_steps(indptr: np.ndarray, max_work: int) -> Iterator[tuple[int, int]]:
    """Ranges of columns, each a single column or with at most `max_work` columns and nonzeros in total."""
    j, d = 0, indptr.size - 1
    while j < d:
        limit = int(indptr[j]) + j + max_work
        stop = d if int(indptr[d]) + d <= limit else bisect_left(range(d), limit, j, key=lambda c: int(indptr[c]) + c)
        stop = max(stop, j + 1)
        yield j, stop
        j = stop


def has_sorted_indices(x: Any) -> bool:
    """Whether the indices of each column of a CSC matrix ascend. (SciPy's own flag may be stale.)"""
    count = compiled(kernels.count_unsorted, index=x.indices.dtype)
    return all(count(x.indptr[j : stop + 1], x.indices) == 0 for j, stop in csc_steps(x.indptr, STEP_WORK))


# ------------------------------------------------------------------------------------- sums


def needs_segments(x: Any) -> bool:
    """Whether sums over x are divided into segments. For fp32 data, plain fp64 sums are accurate enough."""
    return bool(x.dtype.itemsize > 4 or x.dtype.kind != "f")


def new_sums(x: Any, size: int) -> tuple[np.ndarray, ...]:
    """Zeros for the sums, totals and compensations of `sparse_kernels.SUMS`."""
    return tuple(np.zeros(size if needs_segments(x) or part == 0 else 0) for part in range(3))


# ------------------------------------------------------------------------------------- products


def _project_csr(plan: ExactPlan, x: Any, out: np.ndarray, accumulate: bool) -> None:
    n, k = out.shape
    kernel = compiled(kernels.project_csr, data=x.data.dtype, out=out.dtype, index=x.indices.dtype)
    table, workers = _csr_table(plan, x), _csr_workers(plan, x)
    scratch = Scratch(lambda: (np.empty((1, plan.s), np.int32), *new_sums(x, k)))

    def task(i: int, end: int) -> Iterator[None]:
        with scratch.borrow() as (one_column, *sums):
            for rows, nonzeros in csr_steps(x.indptr, (i, end), _step_nonzeros(plan, table)):
                kernel(
                    x.indptr, x.indices, x.data, rows, nonzeros, plan.column(0), (table, one_column), plan.geometry,
                    tuple(sums), out, plan.scale, accumulate,
                )  # fmt: skip
                yield

    threads.run(task, row_ranges(n, 1, workers, STORE_WORK * k), workers)


def _csr_workers(plan: ExactPlan, x: Any) -> int:
    """The number of threads whose sums and hits of a row fit in SCRATCH_BYTES."""
    return min(
        useful_threads(SPARSE_WORK * (x.nnz * plan.s + x.shape[0] * plan.k)), max(1, SCRATCH_BYTES // (25 * plan.k))
    )


def _step_nonzeros(plan: ExactPlan, table: np.ndarray) -> int:
    """The nonzeros in a step. Each takes s additions and, without a table, 150 ns to generate codes."""
    return STEP_WORK // (4 * plan.s if len(table) else 200 + 8 * plan.s)


def _project_csc(plan: ExactPlan, x: Any, out: np.ndarray, accumulate: bool) -> None:
    n, k = out.shape
    dtypes = {"data": x.data.dtype, "index": x.indices.dtype}
    add = compiled(kernels.add_csc, **dtypes)
    store = compiled(kernels.store_rows, out=out.dtype)
    workers = useful_threads(SPARSE_WORK * (x.nnz + plan.d) * plan.s)
    row_bytes = 8 * k * (3 if needs_segments(x) else 1)
    rows = max(1, min(-(-n // workers), SCRATCH_BYTES // (row_bytes * workers)))
    workers = min(workers, max(1, SCRATCH_BYTES // (row_bytes * rows)))
    is_sorted = has_sorted_indices(x)
    scratch = Scratch(
        lambda: (
            np.empty((CODES_STEP, plan.s), np.int32),
            np.empty(rows, np.int64),
            *new_sums(x, rows * k),
        )
    )

    def task(i: int, end: int) -> Iterator[None]:
        with scratch.borrow() as (codes, counts, *buffers):
            sums = tuple(part[: (end - i) * k] for part in buffers)
            for array in (*buffers, counts):
                array[:] = 0
            for columns in csc_steps(x.indptr, STEP_WORK // (4 * plan.s)):
                add(
                    x.indptr, x.indices, x.data, is_sorted, (i, end), columns, plan.column(0), k, codes,
                    plan.geometry, sums, counts,
                )  # fmt: skip
                yield
            store((i, end), sums, out, plan.scale, accumulate)

    threads.run(task, [(i, min(i + rows, n)) for i in range(0, n, rows)], workers)


def project_exact_to_csr(spec: SketchSpec, x: Any, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(data, indices, indptr) of x S' for x (n, d) in CSR; indices are sorted, one per component that a row hits."""
    plan = exact_plan(spec)
    n, k = x.shape[0], plan.k
    table, workers = _csr_table(plan, x), _csr_workers(plan, x)
    scratch = Scratch(
        lambda: (
            np.empty((1, plan.s), np.int32),
            np.zeros(-(-k // 64), np.uint64),
            *new_sums(x, k),
        )
    )
    index = np.dtype(np.int32 if min(x.nnz * plan.s, n * k) <= np.iinfo(np.int32).max else np.int64)
    indptr = np.zeros(n + 1, index)
    count = compiled(kernels.count_csr, index=x.indices.dtype, out_index=index)
    tasks, max_nonzeros = row_ranges(n, 1, workers, STORE_WORK * k), _step_nonzeros(plan, table)
    first_column = plan.column(0)

    def count_task(i: int, end: int) -> Iterator[None]:
        with scratch.borrow() as (one_column, hits, *_):
            for rows, nonzeros in csr_steps(x.indptr, (i, end), max_nonzeros):
                count(
                    x.indptr, x.indices, rows, nonzeros, first_column, (table, one_column), plan.geometry, hits, indptr,
                )  # fmt: skip
                yield

    threads.run(count_task, tasks, workers)
    np.cumsum(indptr, dtype=index, out=indptr)
    indices, data = np.empty(indptr[-1], index), np.empty(indptr[-1], dtype)
    fill = compiled(kernels.fill_csr, data=x.data.dtype, out=dtype, index=x.indices.dtype, out_index=index)

    def fill_task(i: int, end: int) -> Iterator[None]:
        with scratch.borrow() as (one_column, *buffers):
            for rows, nonzeros in csr_steps(x.indptr, (i, end), max_nonzeros):
                fill(
                    x.indptr, x.indices, x.data, rows, nonzeros, first_column, (table, one_column), plan.geometry,
                    tuple(buffers), (indptr, indices, data), plan.scale,
                )  # fmt: skip
                yield

    threads.run(fill_task, tasks, workers)
    return data, indices, indptr
