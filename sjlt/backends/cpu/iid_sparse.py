"""The iid law on sparse data on the CPU: CSR and CSC matrices, one data vector per row; and its entries as codes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import scipy.sparse

from ... import threads
from . import iid_sparse_kernels as kernels
from .bits import kernel_view
from .iid_dense import IidPlan, iid_plan
from .iid_entries import rounded_up
from .jit import compiled
from .plan import (
    MIB,
    SCRATCH_BYTES,
    SPARSE_WORK,
    STEP_WORK,
    STORE_WORK,
    TABLE_CODES,
    Scratch,
    row_ranges,
    useful_threads,
)
from .sparse import csc_steps, csr_steps, has_sorted_indices, new_sums

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec

TASK_COMPONENTS = 128  # components in a task
BATCH_NONZEROS = MIB  # nonzeros of CSR rows that are sorted by column at a time
STAGE_NUMBERS = 2 * MIB  # elements of a result computed as a dense array before it is converted to CSR
PART_CODES = MIB // 8  # codes that `column_codes` has memory for in one task
MAX_CODES_PER_NONZERO = 100  # a table of more codes per nonzero of the data than this is not worthwhile

Table = tuple[np.ndarray, np.ndarray]  # codes of all columns; the start of each column's codes


def project_iid_sparse(spec: SketchSpec, x: Any, out: np.ndarray, accumulate: bool) -> None:
    """out (n, k) = x (n, d) S', or out += that, for x in CSR or CSC."""
    plan, out = iid_plan(spec), kernel_view(out)
    if x.format == "csc":
        _project_csc(plan, x, out, accumulate)
    else:
        _project_csr(plan, x, out, accumulate, _table(plan, x))


def _table(plan: IidPlan, x: Any) -> Table | None:
    """The codes of all columns, or None if they are too many or too few of them would be used."""
    codes = plan.d * plan.k * plan.density
    return None if plan.dense or codes > min(TABLE_CODES, MAX_CODES_PER_NONZERO * x.nnz) else column_codes(plan)


def _segment(plan: IidPlan) -> int:
    return max(512, plan.k)


# ------------------------------------------------------------------------------------- CSR with a table


def _project_csr(plan: IidPlan, x: Any, out: np.ndarray, accumulate: bool, table: Table | None) -> None:
    if table is None:
        _project_csr_rows(plan, x, out, accumulate)
        return
    n, k = out.shape
    kernel = compiled(kernels.project_csr_by_table, data=x.data.dtype, out=out.dtype, index=x.indices.dtype)
    scratch = Scratch(lambda: new_sums(x, k))
    per_nonzero = 1 + int(plan.density * k)

    def task(i: int, end: int) -> Iterator[None]:
        with scratch.borrow() as sums:
            for rows, nonzeros in csr_steps(x.indptr, (i, end), max(1, STEP_WORK // (4 * per_nonzero))):
                kernel(
                    x.indptr, x.indices, x.data, rows, nonzeros, table, _segment(plan), sums, out, plan.scale,
                    accumulate,
                )  # fmt: skip
                yield

    workers = min(useful_threads(SPARSE_WORK * (x.nnz * per_nonzero + n * k)), max(1, SCRATCH_BYTES // (24 * k)))
    threads.run(task, row_ranges(n, 1, workers, STORE_WORK * k), workers)


# ------------------------------------------------------------------------------------- by column


class Columns(NamedTuple):
    """Nonzeros in CSC format, for some or all features. The arrays other than `data` have the same dtype.

    Attributes
    ----------
    column_of : the feature of each column; empty if there is a column for every feature
    indptr, indices, data : as in CSC
    """

    column_of: np.ndarray
    indptr: np.ndarray
    indices: np.ndarray
    data: np.ndarray


def _max_rows(x: Any, workers: int) -> int:
    """The largest number of rows in a task for which SCRATCH_BYTES hold the sums of all threads."""
    return max(1, SCRATCH_BYTES // (workers * sum(part.nbytes for part in new_sums(x, TASK_COMPONENTS))))


def _project_csc(plan: IidPlan, x: Any, out: np.ndarray, accumulate: bool) -> None:
    part = Columns(np.empty(0, x.indices.dtype), x.indptr, x.indices, x.data)
    _project_columns(plan, x, lambda: iter([part]), has_sorted_indices(x), out, accumulate)


def _project_csr_rows(plan: IidPlan, x: Any, out: np.ndarray, accumulate: bool) -> None:
    """Project a CSR matrix without a table: sort a bounded number of nonzeros at a time by column."""
    n, start, max_rows = x.shape[0], 0, _max_rows(x, threads.get_num_threads())
    nonzeros = BATCH_NONZEROS if x.shape[1] <= BATCH_NONZEROS else BATCH_NONZEROS // 4  # sorting needs more memory
    while start < n:
        rows = start, min(start + max_rows, n)
        (start, stop), (_, last) = next(csr_steps(x.indptr, rows, max(1, nonzeros)))
        if last < x.indptr[stop]:  # one long row
            parts: Any = partial(_row_in_parts, x, start)
        else:
            batch = _by_columns(x, start, stop)
            parts = partial(iter, [batch])
        _project_columns(plan, x, parts, True, out[start:stop], accumulate)
        start = stop


def _by_columns(x: Any, start: int, stop: int) -> Columns:
    """The nonzeros of rows start .. stop - 1 of a CSR matrix by column."""
    first, last, index = x.indptr[start], x.indptr[stop], x.indices.dtype
    indptr, indices, data = x.indptr[start : stop + 1] - first, x.indices[first:last], x.data[first:last]
    if x.shape[1] <= len(data) + BATCH_NONZEROS // 8:
        matrix = scipy.sparse.csr_array((data, indices, indptr), shape=(stop - start, x.shape[1])).tocsc()
        return Columns(np.empty(0, index), matrix.indptr.astype(index), matrix.indices.astype(index), matrix.data)
    order = np.argsort(indices, kind="stable")
    columns = indices[order]
    begins = np.flatnonzero(np.diff(columns, prepend=-1)).astype(index)
    rows = np.repeat(np.arange(stop - start, dtype=index), np.diff(indptr))
    return Columns(columns[begins], np.append(begins, index.type(len(data))), rows[order], data[order])


def _row_in_parts(x: Any, row: int) -> Iterator[Columns]:
    """One row of a CSR matrix in parts, in the order of its nonzeros: each nonzero is a column of its own."""
    index, (first, last) = x.indices.dtype, x.indptr[row : row + 2]
    indptr, zeros = np.arange(BATCH_NONZEROS + 1, dtype=index), np.zeros(BATCH_NONZEROS, index)
    for e in range(first, last, BATCH_NONZEROS):
        part = slice(e, min(e + BATCH_NONZEROS, last))
        size = part.stop - part.start
        yield Columns(x.indices[part], indptr[: size + 1], zeros[:size], x.data[part])


def _project_columns(
    plan: IidPlan, x: Any, parts: Callable[[], Iterator[Columns]], is_sorted: bool, out: np.ndarray, accumulate: bool
) -> None:
    """out (+)= the sum of the parts times S'. A task is a range of rows and a range of components."""
    n, k = out.shape
    if n == 0:
        return
    add = compiled(kernels.add_columns, data=x.data.dtype, compute="f8", index=x.indices.dtype)
    store = compiled(kernels.store_components, out=out.dtype)
    workers, ranges = threads.get_num_threads(), range(0, k, TASK_COMPONENTS)
    rows = -(-n // max(-(-n // _max_rows(x, workers)), -(-workers // len(ranges))))
    rule, width = plan.rule(_segment(plan)), min(k, TASK_COMPONENTS)
    scratch = Scratch(
        lambda: (plan.new_entries(1, TASK_COMPONENTS, "f8"), new_sums(x, rows * width), np.empty(rows, np.int64))
    )

    def task(i: int, o: int) -> Iterator[None]:
        stop, end = min(i + rows, n), min(o + TASK_COMPONENTS, k)
        with scratch.borrow() as (entries, buffers, counts):
            sums = tuple(part[: (stop - i) * (end - o)] for part in buffers)
            for array in (*sums, counts):
                array[:] = 0
            for part in parts():
                for columns in csc_steps(part.indptr, STEP_WORK // (4 * TASK_COMPONENTS)):
                    task_ranges = (i, stop, *columns, o, end)
                    add(*part, is_sorted, task_ranges, plan.column(0), rule, entries, sums, counts)
                    yield
            store((i, stop), (o, end), sums, out, plan.entry_scale, accumulate)

    threads.run(task, [(i, o) for i in range(0, n, rows) for o in ranges], workers)


# ------------------------------------------------------------------------------------- sparse results


class _GrowingArray:
    """An array that grows at its end; in place, if the system can remap pages instead of copying elements."""

    def __init__(self, dtype: Any) -> None:
        self.array, self.size = np.empty(0, dtype), 0

    def append(self, values: np.ndarray) -> None:
        end = self.size + len(values)
        if end > len(self.array):
            self.array.resize(end + MIB + end // 64, refcheck=False)
        self.array[self.size : end] = values
        self.size = end

    def finish(self) -> np.ndarray:
        self.array.resize(self.size, refcheck=False)
        return self.array


def project_iid_to_csr(spec: SketchSpec, x: Any, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(data, indices, indptr) of x S' for x (n, d) in CSR; indices are sorted, zeros are left out."""
    plan, n, k = iid_plan(spec), x.shape[0], spec.n_components
    table = _table(plan, x)
    index = np.dtype(np.int32 if n * k <= np.iinfo(np.int32).max else np.int64)
    indptr, indices, data = np.zeros(n + 1, index), _GrowingArray(index), _GrowingArray(dtype)
    step, block = max(1, STAGE_NUMBERS // k), max(1, STAGE_NUMBERS // (16 * k))
    stage = np.empty((min(step, n), k), dtype)
    for i in range(0, n, step):
        rows = slice(i, min(i + step, n))
        result = stage[: rows.stop - i]
        _project_csr(plan, _rows(x, rows), kernel_view(result), False, table)
        for b in range(0, len(result), block):
            part = result[b : b + block]
            row, column = np.nonzero(part)
            indptr[i + b + 1 : i + b + 1 + len(part)] = np.bincount(row, minlength=len(part))
            indices.append(column)
            data.append(part[row, column])
    np.cumsum(indptr, dtype=index, out=indptr)
    return data.finish(), indices.finish(), indptr


class _Csr(NamedTuple):
    """Rows of a CSR matrix, not copied."""

    shape: tuple[int, int]
    dtype: np.dtype
    nnz: int
    indptr: np.ndarray
    indices: np.ndarray
    data: np.ndarray


def _rows(x: Any, rows: slice) -> _Csr:
    first, last = x.indptr[rows.start], x.indptr[rows.stop]
    indptr = x.indptr[rows.start : rows.stop + 1] - first
    return _Csr(
        (rows.stop - rows.start, x.shape[1]), x.dtype, int(last - first), indptr, x.indices[first:last],
        x.data[first:last],
    )  # fmt: skip


# ------------------------------------------------------------------------------------- entries


def column_codes(plan: IidPlan) -> Table:
    """(codes, starts) of all columns, generated in parts by all threads. A code is 2 row + (1 where negative)."""
    k, d, workers = plan.k, plan.d, threads.get_num_threads()
    fill = compiled(kernels.fill_columns)
    step = max(1, min(-(-d // workers), PART_CODES // k))
    parts: list[Any] = [np.empty(0, np.int32)] * -(-d // step)
    starts = np.zeros(d + 1, np.int64)
    scratch = Scratch(lambda: (np.empty(rounded_up(k) // 2, np.uint32), np.empty(step * k, np.int32)))

    def task(part: int) -> None:
        first, last = part * step, min((part + 1) * step, d)
        with scratch.borrow() as (words, buffer):
            ends = np.empty(last - first + 1, np.int64)
            fill(plan.column(first), k, plan.rule(0), words, buffer, ends)
            parts[part] = buffer[: ends[-1]].copy()
            starts[first + 1 : last + 1] = np.diff(ends)

    threads.run(task, ((part,) for part in range(len(parts))), workers)
    np.cumsum(starts, out=starts)
    codes, end = np.empty(starts[-1], np.int32), 0
    for i, part in enumerate(parts):
        codes[end : end + len(part)] = part
        end += len(part)
        parts[i] = None  # free memory as early as possible
    return codes, starts


def columns_iid(spec: SketchSpec) -> tuple[np.ndarray, np.ndarray, float]:
    """(codes, starts, scale) of all columns; a code is 2 row + (1 where negative), and rows ascend within a column.

    The codes of column j are codes[starts[j]:starts[j + 1]]; its entries are +-scale.
    """
    plan = iid_plan(spec)
    return *column_codes(plan), plan.scale
