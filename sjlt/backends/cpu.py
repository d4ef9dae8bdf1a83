"""The CPU backend: cuts the work into tasks for the threads, within a bounded amount of scratch memory.

Two ways through dense data. With many rows, the codes of a span of features go into a table that all threads
share, and a task is a range of rows. With few rows, a task is a run of features and makes its own codes. Both
add the same blocks of features in the same order, so their results are equal to the bit.

Everything here takes 2-D arrays, one data vector a row, and writes an `out` of that many rows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import law, threads
from . import cpu_kernels as kernels
from .cpu_kernels import FILL, TILE_FEATURES, compiled
from .cpu_tiles import LANES

if TYPE_CHECKING:
    from ..sketch import Sketch

MIB = 1 << 20
TABLE_CODES = 4 * MIB  # codes in a table of 4-byte codes
TOTALS_BYTES = 16 * MIB  # fp64 totals of the rows under way
SCRATCH_BYTES = 20 * MIB  # tiles of all threads
TOGETHER_BYTES = MIB // 2  # tiles that one thread works on together: they should stay in its L2 cache
STAGE_BYTES = 4 * MIB  # data converted, or made dense, at a time
RUN_FEATURES = 1 << 16  # features of a task where a task is a run of features
TERMS = 256  # terms, about, of a sum in the data's own precision


class _Plan:
    """A sketch as the kernels see it, and its blocks of features.

    The bounds of blocks lie at fixed columns of the law (whatever the data and the threads), so they fix the order
    of every sum.
    """

    def __init__(self, sketch: Sketch) -> None:
        geometry = law.geometry(sketch.n_components, sketch.nnz, sketch.seed)
        self.geometry = tuple(np.uint64(v) for v in geometry)
        self.k, self.s, self.d = sketch.n_components, sketch.nnz, sketch.n_features
        self.scale = 1 / math.sqrt(self.s)
        self.offset = sketch.feature_offset
        chunk = 1 << geometry.log_chunk
        # A chunk adds one term to nearly every component of its tile.
        self.block = min(TERMS * geometry.n_tiles, TABLE_CODES // (chunk * self.s)) * chunk
        self.n_blocks = -(-(self.offset % self.block + self.d) // self.block)

    def bounds(self, b0: int, b1: int) -> np.ndarray:
        """The columns at which blocks b0 .. b1 - 1 begin, and the last of them ends."""
        starts = np.arange(b0, b1 + 1, dtype=np.int64) * self.block - self.offset % self.block
        return np.clip(starts, 0, self.d)

    def column(self, j: int) -> np.uint64:
        """The law's index of the sketch's column j."""
        return np.uint64(self.offset + j)

    def table(self, j0: int, j1: int) -> np.ndarray:
        """The codes of columns j0 .. j1 - 1."""
        codes = np.empty((j1 - j0, self.s), np.int32)
        fill, step = compiled(kernels.fill_codes), 16 * FILL
        threads.run(
            lambda j: fill(self.column(j0 + j), codes[j : j + step], self.geometry),
            ((j,) for j in range(0, j1 - j0, step)),
            threads.get_num_threads(),
        )
        return codes

    def no_table(self) -> np.ndarray:
        return np.empty((0, self.s), np.int32)

    def lanes_and_workers(self, n: int, itemsize: int) -> tuple[int, int]:
        """Lanes of a tile for n rows, and how many threads may hold such tiles of k components at once."""
        workers = threads.get_num_threads()
        enough = min((lanes for lanes in LANES if lanes >= n), default=max(LANES))
        for lanes in sorted(LANES, reverse=True):
            fitting = SCRATCH_BYTES // (self.k * lanes * itemsize)
            if lanes <= enough and fitting >= workers:
                return lanes, workers
        return 1, max(1, SCRATCH_BYTES // (self.k * itemsize))


class _Scratch:
    """Arrays that the tasks of one call take and give back."""

    def __init__(self, make: Callable[[], tuple[np.ndarray, ...]]) -> None:
        self._make = make
        self._free: deque[tuple[np.ndarray, ...]] = deque()

    def take(self) -> tuple[np.ndarray, ...]:
        try:
            return self._free.pop()
        except IndexError:
            return self._make()

    def give(self, arrays: tuple[np.ndarray, ...]) -> None:
        self._free.append(arrays)


def _readable(x: np.ndarray) -> tuple[np.ndarray, np.dtype]:
    """`x` as the kernels read it, and the dtype they compute in."""
    if x.dtype == np.float16:
        return x.view(np.uint16), np.dtype(np.float32)  # the kernels read the bits
    return x, x.dtype if x.dtype == np.float32 else np.dtype(np.float64)


def _is_column_major(x: np.ndarray) -> bool:
    return abs(x.strides[0]) < abs(x.strides[1])


def _staged(function: Callable[..., None], sketch: Sketch, x: Any, out: np.ndarray) -> None:
    """`function` into an fp16 `out`: rounded once from fp64, some rows at a time."""
    step = max(1, STAGE_BYTES // (8 * max(1, out.shape[1])))
    for i in range(0, out.shape[0], step):
        stage = np.empty((min(step, out.shape[0] - i), out.shape[1]))
        function(sketch, x[i : i + step], stage, False)
        out[i : i + step] = stage


# ------------------------------------------------------------------------------------- dense data


def project(sketch: Sketch, x: np.ndarray, out: np.ndarray, accumulate: bool) -> None:
    """out (n, k) = x (n, d) S', or out += that."""
    if out.dtype == np.float16:
        _staged(project, sketch, x, out)
        return
    plan = _Plan(sketch)
    n = x.shape[0]
    if n == 0 or plan.d == 0:
        if not accumulate:
            out[...] = 0
        return
    x, compute = _readable(x)
    lanes, workers = plan.lanes_and_workers(n, compute.itemsize)
    if n <= lanes or (-(-n // lanes) < workers and plan.n_blocks > 1):
        for i in range(0, n, lanes):
            _project_few(plan, x[i : i + lanes], out[i : i + lanes], accumulate, compute, lanes, workers)
    else:
        _project_many(plan, x, out, accumulate, compute, lanes, workers)


def _project_many(
    plan: _Plan, x: np.ndarray, out: np.ndarray, accumulate: bool, compute: np.dtype, lanes: int, workers: int
) -> None:
    n, k = out.shape
    kernel = compiled(kernels.project_rows, x.dtype, compute, out.dtype)
    together = 1
    if _is_column_major(x):  # tiles side by side read whole stretches of memory
        together = max(1, min(TOGETHER_BYTES // (k * lanes * compute.itemsize), -(-n // (lanes * workers))))
    scratch = _Scratch(lambda: (np.zeros((TILE_FEATURES, lanes), compute), np.empty((together * k, lanes), compute)))

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
            ranges = _row_tasks(rows.shape[0], lanes * together, workers)
            threads.run(task, [(*r, rows, result, totals, b0, b1, table) for r in ranges], workers)


def _row_tasks(n: int, unit: int, workers: int) -> list[tuple[int, int]]:
    """Ranges of rows, whole units but for the last, several for each worker."""
    step = max(1, n // (8 * workers * unit)) * unit
    return [(i, min(i + step, n)) for i in range(0, n, step)]


def _project_few(
    plan: _Plan, x: np.ndarray, out: np.ndarray, accumulate: bool, compute: np.dtype, lanes: int, workers: int
) -> None:
    n, k = out.shape
    project_blocks = compiled(kernels.project_blocks, x.dtype, compute)
    fold_blocks = compiled(kernels.fold_blocks, compute=compute, out=out.dtype)
    per_task = max(1, RUN_FEATURES // plan.block)
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
        project_blocks(x, bounds, plan.column(0), plan.geometry, k, codes, tile, sums[: (end - begin) * k])

    for b in range(0, plan.n_blocks, per_task * workers):
        starts = range(b, min(b + per_task * workers, plan.n_blocks), per_task)
        tasks = [(w, start, min(start + per_task, plan.n_blocks)) for w, start in enumerate(starts)]
        threads.run(task, tasks, workers)
        for worker, start, end in tasks:
            sums = scratch[worker][2][: (end - start) * k]
            fold_blocks(
                sums, totals, n, k, start == 0, end == plan.n_blocks, out, plan.scale, accumulate
            )  # fmt: skip


def adjoint(sketch: Sketch, y: np.ndarray, out: np.ndarray, accumulate: bool) -> None:
    """out (n, d) = y (n, k) S, or out += that."""
    if out.dtype == np.float16:
        for j in range(0, out.shape[1], RUN_FEATURES):
            _staged(adjoint, sketch[:, j : min(j + RUN_FEATURES, out.shape[1])], y, out[:, j : j + RUN_FEATURES])
        return
    plan = _Plan(sketch)
    n = y.shape[0]
    if n == 0 or plan.d == 0:
        return
    y, compute = _readable(y)
    lanes, workers = plan.lanes_and_workers(n, compute.itemsize)
    if n <= lanes or -(-n // lanes) < workers:
        for i in range(0, n, lanes):
            _adjoint_few(plan, y[i : i + lanes], out[i : i + lanes], accumulate, compute, lanes, workers)
    else:
        _adjoint_many(plan, y, out, accumulate, compute, lanes, workers)


def _adjoint_many(
    plan: _Plan, y: np.ndarray, out: np.ndarray, accumulate: bool, compute: np.dtype, lanes: int, workers: int
) -> None:
    n, k = y.shape
    kernel = compiled(kernels.adjoint_rows, y.dtype, compute, out.dtype)
    together = 1
    if _is_column_major(out):
        together = max(1, min(TOGETHER_BYTES // (k * lanes * compute.itemsize), -(-n // (lanes * workers))))
    scratch = _Scratch(lambda: (np.empty((TILE_FEATURES, lanes), compute), np.zeros((together * k, lanes), compute)))

    def task(i: int, end: int, columns: np.ndarray, table: np.ndarray) -> None:
        tile, components = arrays = scratch.take()
        kernel(y, table, i, end, k, tile, components, columns, plan.scale, accumulate)
        scratch.give(arrays)

    span = TABLE_CODES // plan.s
    ranges = _row_tasks(n, lanes * together, workers)
    for j in range(0, plan.d, span):
        columns = out[:, j : j + span]
        table = plan.table(j, j + columns.shape[1])
        threads.run(task, [(*r, columns, table) for r in ranges], workers)
        del table  # before the next is made


def _adjoint_few(
    plan: _Plan, y: np.ndarray, out: np.ndarray, accumulate: bool, compute: np.dtype, lanes: int, workers: int
) -> None:
    k = y.shape[1]
    kernel = compiled(kernels.adjoint_run, y.dtype, compute, out.dtype)
    scratch = _Scratch(
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


# ------------------------------------------------------------------------------------- sparse data


def project_sparse(sketch: Sketch, x: Any, out: np.ndarray, accumulate: bool) -> None:
    """out (n, k) = x (n, d) S', or out += that, for x in CSR or CSC."""
    if out.dtype == np.float16:
        _staged(project_sparse, sketch, x, out)
        return
    plan = _Plan(sketch)
    if x.format == "csr":
        _project_csr(plan, x, out, accumulate)
    else:
        _project_csc(plan, x, out, accumulate)


def _csr_table(plan: _Plan, x: Any) -> np.ndarray:
    """A table of all columns where it fits and pays; else none, and each nonzero of x makes its own codes."""
    codes = plan.d * plan.s
    # Measured on Zen 5: 1.5 ns a code in a table, 150 ns for those of one column alone.
    return plan.table(0, plan.d) if codes <= min(TABLE_CODES, 100 * x.nnz) else plan.no_table()


def _project_csr(plan: _Plan, x: Any, out: np.ndarray, accumulate: bool) -> None:
    n, k = out.shape
    kernel = compiled(kernels.project_csr, x.data.dtype, out=out.dtype, index=x.indices.dtype)
    table = _csr_table(plan, x)
    _, workers = plan.lanes_and_workers(1, 16)
    scratch = _Scratch(lambda: (np.empty((1, plan.s), np.int32), np.empty(k), np.empty(k)))

    def task(i: int, end: int) -> None:
        one, sums, totals = arrays = scratch.take()
        kernel(
            x.indptr, x.indices, x.data, i, end, plan.column(0), table, one, plan.geometry, sums, totals,
            out, plan.scale, accumulate,
        )  # fmt: skip
        scratch.give(arrays)

    threads.run(task, _row_tasks(n, 1, workers), workers)


def _project_csc(plan: _Plan, x: Any, out: np.ndarray, accumulate: bool) -> None:
    n, k = out.shape
    kernel = compiled(kernels.project_csc, x.data.dtype, out=out.dtype, index=x.indices.dtype)
    workers = threads.get_num_threads()
    rows = max(1, min(-(-n // workers), SCRATCH_BYTES // (16 * k * workers)))
    workers = min(workers, max(1, SCRATCH_BYTES // (16 * k * rows)))
    is_sorted = bool(x.has_sorted_indices)
    scratch = _Scratch(
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


def project_to_csr(sketch: Sketch, x: Any, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(data, indices, indptr) of x S' for x (n, d) in CSR: sorted indices, one for each component that x reaches."""
    plan = _Plan(sketch)
    n, k = x.shape[0], plan.k
    count = compiled(kernels.count_csr, index=x.indices.dtype)
    table = _csr_table(plan, x)
    _, workers = plan.lanes_and_workers(1, 17)
    scratch = _Scratch(
        lambda: (np.empty((1, plan.s), np.int32), np.zeros(-(-k // 64), np.uint64), np.zeros(k), np.empty(k))
    )
    counts = np.empty(n, np.int64)
    tasks = _row_tasks(n, 1, workers)

    def count_task(i: int, end: int) -> None:
        one, hit, *_ = arrays = scratch.take()
        count(x.indptr, x.indices, i, end, plan.column(0), table, one, plan.geometry, hit, counts)
        scratch.give(arrays)

    threads.run(count_task, tasks, workers)
    indptr = np.zeros(n + 1, np.int64)
    np.cumsum(counts, out=indptr[1:])
    index = np.dtype(np.int32 if indptr[-1] <= np.iinfo(np.int32).max else np.int64)
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
    return data, indices, indptr.astype(index, copy=False)


def adjoint_sparse(sketch: Sketch, y: Any, out: np.ndarray, accumulate: bool) -> None:
    """out (n, d) = y (n, k) S, or out += that, for y in CSR or CSC, made dense some rows at a time."""
    step = max(1, STAGE_BYTES // (8 * sketch.n_components))
    for i in range(0, y.shape[0], step):
        adjoint(sketch, y[i : i + step].toarray(), out[i : i + step], accumulate)


# ------------------------------------------------------------------------------------- entries


def codes(sketch: Sketch, start: int, stop: int) -> np.ndarray:
    """(stop - start, nnz) int32: 2 row + (1 where negative) of each entry of columns start .. stop - 1."""
    return _Plan(sketch).table(start, stop)
