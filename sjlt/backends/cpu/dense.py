"""The exact law on dense data on the CPU: 2-D arrays of any strides, one data vector per row.

A projection takes one of six paths:

- For few components, terms are selected by permutations of features in registers (`permuted`).
- For a small sketch, or a medium-sized one that is used again, codes are sorted by component and kept between calls
  (`by_component`).
- For more components than entries, sums are gathered row by row and expanded to all components (`expanded_rows`).
- If the elements of a feature are contiguous in memory, whole features are added at once (`contiguous`).
- With many rows, the codes of a span of features go into a table that all threads share, and a task is a range of rows.
- With few rows, a task is a run of features and generates its own codes.

All of them add the same blocks of features in the same order, so their results are bitwise equal. Adjoints that need
few components of a column-major matrix add them in place (`columns_in_place`); others with few terms look components up
in registers (`look_up`); the rest takes the last three paths.

Paths that use kept codes return their product as a `Call`, which the plan remembers for arrays with the same layouts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from ... import threads
from . import by_component, columns_in_place, expanded_rows, look_up, permuted
from . import dense_kernels as kernels
from .bits import compute_dtype, is_native, kernel_view, to_native
from .contiguous import adjoint_contiguous, is_contiguous, project_contiguous, reads_components
from .dense_kernels import TILE_FEATURES
from .entries import CODES_STEP, LANES
from .jit import compiled
from .one_vector import LOG_ROWS, PADDING
from .plan import (
    SCRATCH_BYTES,
    STAGE_BYTES,
    STEP_WORK,
    STORE_WORK,
    TABLE_CODES,
    Borrowed,
    Call,
    ExactPlan,
    Scratch,
    aligned,
    exact_plan,
    row_ranges,
    run_rows,
    total_parts,
    useful_threads,
)

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec

TOTALS_BYTES = 16 << 20  # for totals that are carried from one table of codes to the next
STACKED_BYTES = 1 << 19  # for the tiles that a thread works on at a time: they should stay in its L2 cache
RUN_FEATURES = 1 << 16  # most features of a task that is a run of features


def _stacked_tiles(x: np.ndarray, tile_bytes: int, rows: int) -> int:
    """The number of tiles that a thread works on at a time, where `rows` rows are one tile for each thread."""
    if abs(x.strides[0]) >= abs(x.strides[1]):
        return 1
    # Column-major: several tiles together access longer stretches of memory.
    return max(1, min(STACKED_BYTES // tile_bytes, -(-x.shape[0] // rows)))


def _run_features(plan: ExactPlan, vectors: int) -> int:
    """The features of a task that is a run: a quarter of a step, because tiles of many components miss the caches."""
    return max(CODES_STEP, min(RUN_FEATURES, STEP_WORK // (4 * plan.s * vectors)))


def _layouts(data: np.ndarray, out: np.ndarray, accumulate: bool, is_adjoint: bool) -> Hashable:
    """The properties of arrays on which the choice and preparation of a path depend."""
    return (
        data.shape, data.strides, data.dtype, data.flags.aligned, out.shape, out.strides, out.dtype, accumulate,
        is_adjoint,
    )  # fmt: skip


def _call_first(plan: ExactPlan, call: Call, layouts: Hashable, data: np.ndarray, out: np.ndarray) -> None:
    """Make a call. If entries are kept, the next products of arrays with the same layouts consist of this call alone.

    Choosing and preparing a path takes 5 us, as long as the product of a vector of 512 elements.
    """
    if plan.keeps_words:
        plan.remember(layouts, call)
    call(data, out)


# ------------------------------------------------------------------------------------- projection


def project_exact(spec: SketchSpec, x: np.ndarray, out: np.ndarray, accumulate: bool) -> None:
    """out (n, k) = x (n, d) S', or out += that."""
    plan, layouts = exact_plan(spec), _layouts(x, out, accumulate, False)
    if (call := plan.calls.get(layouts)) is not None:
        call(kernel_view(x), kernel_view(out))
        return
    n, d = x.shape
    if n == 0 or d == 0:
        if not accumulate:
            out[...] = 0
        return
    compute, out = compute_dtype(x), kernel_view(out)
    plan.use()
    native = is_native(x)
    if native and (call := _call_of_kept(plan, x, out, accumulate, compute)) is not None:
        _call_first(plan, call, layouts, kernel_view(x), out)
        return
    rows = n
    if not native:  # few rows at a time, of which a run of features is copied
        rows = max(1, min(8, STAGE_BYTES // (x.itemsize * max(plan.block, RUN_FEATURES))))
    one_by_one = rows == 2 and plan.log_chunk >= LOG_ROWS  # 0.4 to 1 of the time of a tile for both
    workers = plan.workers(rows, d, plan.k, compute.itemsize)
    vectors, workers = plan.vectors_and_workers(1 if one_by_one else rows, compute.itemsize, workers)
    if not native:
        workers = 1
    elif is_contiguous(x, compute) and project_contiguous(plan, kernel_view(x), out, accumulate, compute):
        return
    elif n > vectors and not one_by_one and (-(-n // vectors) >= workers or plan.n_blocks == 1):
        _project_many(plan, kernel_view(x), out, accumulate, compute, vectors, workers)
        return
    step = min(rows, vectors)
    for i in range(0, n, step):
        _project_few(plan, x[i : i + step], out[i : i + step], accumulate, compute, vectors, workers)


def _call_of_kept(plan: ExactPlan, x: np.ndarray, out: np.ndarray, accumulate: bool, compute: np.dtype) -> Call | None:
    """The call for a native x by the first path that uses kept entries and is eligible, or None."""
    if not accumulate and permuted.eligible(plan, x, out, compute):
        return permuted.project_by_permutation(plan, kernel_view(x), out)
    if not accumulate and expanded_rows.eligible(plan, x, out, compute):
        return expanded_rows.project_by_expansion(plan, kernel_view(x), out, compute)
    if by_component.eligible(plan, x, out, compute):
        return by_component.project_by_component(plan, kernel_view(x), out, accumulate, compute)
    return None


def _project_many(
    plan: ExactPlan, x: np.ndarray, out: np.ndarray, accumulate: bool, compute: np.dtype, vectors: int, workers: int
) -> None:
    n, k = out.shape
    kernel = compiled(kernels.project_rows, data=x.dtype, compute=compute, out=out.dtype)
    stacked = _stacked_tiles(x, k * vectors * compute.itemsize, vectors * workers)
    parts, unit = total_parts(compute), vectors * stacked
    codes = plan.block * plan.s
    per_table = max(1, TABLE_CODES // codes)
    own_totals = 0 if plan.n_blocks == 1 else stacked if plan.n_blocks <= per_table else None
    scratch = Scratch(
        lambda: (
            aligned((TILE_FEATURES, vectors), compute),
            aligned((stacked * k, vectors), compute),
            np.empty((parts, (own_totals or 0) * k, vectors)),
        )
    )

    def task(
        i: int, end: int, x: np.ndarray, out: np.ndarray, totals: np.ndarray | None, b0: int, b1: int, table: np.ndarray
    ) -> Iterator[None]:
        max_blocks = max(1, STEP_WORK // (unit * codes))  # in a step
        begins, step = range(i, end, unit), unit
        if max_blocks >= b1 - b0:
            begins, step = range(i, i + 1), end - i
        start = plan.bounds(b0, b0 + 1)[0]
        with scratch.borrow() as (tile, sums, own):
            for r in begins:
                rows, kept = (r, min(r + step, end)), own if totals is None else totals
                for c in range(b0, b1, max_blocks):
                    stop = min(c + max_blocks, b1)
                    bounds = plan.bounds(c, stop)
                    first, last = bounds[0], bounds[-1]
                    kernel(
                        x[:, first:last], table[first - start : last - start], bounds - first, rows,
                        (c == 0, stop == plan.n_blocks), totals is None, (tile, sums, kept), out, plan.scale,
                        accumulate,
                    )  # fmt: skip
                    yield

    # If there are several tables, totals are carried from one to the next, for as many rows as TOTALS_BYTES allows.
    group = n if own_totals is not None else max(1, TOTALS_BYTES // (8 * parts * k * vectors)) * vectors
    table, totals = plan.no_table(), None
    for g in range(0, n, group):
        rows, result = x[g : g + group], out[g : g + group]
        if own_totals is None:
            totals = np.empty((parts, -(-rows.shape[0] // vectors) * k, vectors))
        for b0 in range(0, plan.n_blocks, per_table):
            b1 = min(b0 + per_table, plan.n_blocks)
            if g == 0 or plan.n_blocks > per_table:
                del table  # before the next one is allocated
                bounds = plan.bounds(b0, b1)
                table = plan.table(bounds[0], bounds[-1])
            ranges = row_ranges(rows.shape[0], unit, workers, STORE_WORK * k + table.size)
            threads.run(task, [(*r, rows, result, totals, b0, b1, table) for r in ranges], workers)


def _project_few(
    plan: ExactPlan, x: np.ndarray, out: np.ndarray, accumulate: bool, compute: np.dtype, vectors: int, workers: int
) -> None:
    k = out.shape[1]
    project = compiled(kernels.project_blocks, data=kernel_view(to_native(x[:0])).dtype, compute=compute)
    fold = compiled(kernels.fold_blocks, compute=compute, out=out.dtype)
    # Between two rounds of tasks, workers wait for each other: few rounds, in which all have the same work.
    features = STEP_WORK // (4 * plan.s * vectors) if is_native(x) else _run_features(plan, vectors)
    sums_bytes = min(STACKED_BYTES, SCRATCH_BYTES // workers)
    max_blocks = max(1, min(features // plan.block, sums_bytes // (k * vectors * compute.itemsize)))
    rounds = -(-plan.n_blocks // (workers * max_blocks))
    per_task = -(-plan.n_blocks // (workers * rounds))
    workers = min(workers, -(-plan.n_blocks // per_task))
    tile_rows, sum_rows = TILE_FEATURES if vectors > 1 else CODES_STEP + PADDING, -(-per_task * k // LANES) * LANES
    tiles = aligned((workers, tile_rows + sum_rows, vectors), compute)
    scratch = [(np.empty((CODES_STEP, plan.s), np.int32), both[:tile_rows], both[tile_rows:]) for both in tiles]
    totals = np.empty((total_parts(compute), k if plan.n_blocks > 1 else 0, vectors))

    def task(worker: int, begin: int, end: int) -> None:
        codes, tile, sums = scratch[worker]
        bounds = plan.bounds(begin, end)
        first, last = bounds[0], bounds[-1]
        features = kernel_view(to_native(x[:, first:last]))
        project(features, bounds - first, plan.column(first), plan.geometry, (codes, tile, sums[: (end - begin) * k]))

    for b in range(0, plan.n_blocks, per_task * workers):
        starts = range(b, min(b + per_task * workers, plan.n_blocks), per_task)
        tasks = [(w, start, min(start + per_task, plan.n_blocks)) for w, start in enumerate(starts)]
        threads.run(task, tasks, workers)
        for worker, start, end in tasks:
            sums, ends = scratch[worker][2][: (end - start) * k], (start == 0, end == plan.n_blocks)
            fold(sums, totals, ends, out, plan.scale, accumulate)


# ------------------------------------------------------------------------------------- adjoint


def adjoint_exact(spec: SketchSpec, y: np.ndarray, out: np.ndarray, accumulate: bool) -> None:
    """out (n, d) = y (n, k) S, or out += that."""
    plan, layouts = exact_plan(spec), _layouts(y, out, accumulate, True)
    if (call := plan.calls.get(layouts)) is not None:
        call(kernel_view(y), kernel_view(out))
        return
    n, d = out.shape
    if n == 0 or d == 0:
        return
    if not is_native(y):
        step = max(1, STAGE_BYTES // (y.itemsize * y.shape[1]))
        for i in range(0, n, step):
            adjoint_exact(spec, to_native(y[i : i + step]), out[i : i + step], accumulate)
        return
    compute = compute_dtype(y)
    plan.use()
    y, out = kernel_view(y), kernel_view(out)
    work = plan.work(n, plan.k, d, compute.itemsize)
    can_look_up = not accumulate and look_up.eligible(plan, y, out, compute)
    if columns_in_place.eligible(plan, y, out, compute, can_look_up):
        _call_first(plan, columns_in_place.adjoint_in_place(plan, y, out, accumulate), layouts, y, out)
        return
    if can_look_up:
        _call_first(plan, look_up.adjoint_by_look_up(plan, y, out, work), layouts, y, out)
        return
    vectors, workers = plan.vectors_and_workers(n, compute.itemsize, useful_threads(work))
    if plan.is_small(n) and (accumulate or not reads_components(y, out, compute)):
        call = _adjoint_small(plan, y, out, accumulate, compute, vectors, work)
        _call_first(plan, call, layouts, y, out)
    elif not accumulate and adjoint_contiguous(plan, y, out, compute):
        return
    elif n <= vectors or -(-n // vectors) < workers:
        for i in range(0, n, vectors):
            _adjoint_few(plan, y[i : i + vectors], out[i : i + vectors], accumulate, compute, vectors, workers)
    else:
        _adjoint_many(plan, y, out, accumulate, compute, vectors, workers)


def _adjoint_small(
    plan: ExactPlan, y: np.ndarray, out: np.ndarray, accumulate: bool, compute: np.dtype, vectors: int, work: int
) -> Call:
    (n, k), codes, scale = y.shape, plan.codes[0], plan.scale
    kernel = compiled(kernels.adjoint_rows, data=y.dtype, compute=compute, out=out.dtype)
    row_work = (plan.s + STORE_WORK) * plan.d

    def call(y: np.ndarray, out: np.ndarray) -> None:
        def task(begin: int, end: int) -> None:
            with Borrowed((TILE_FEATURES + k) * vectors, compute) as memory:
                tiles = memory.reshape(-1, vectors)
                scratch = tiles[:TILE_FEATURES], tiles[TILE_FEATURES:]
                _clear_rest(scratch[1], end - begin)
                kernel(y, codes, (begin, end), scratch, out, scale, accumulate)

        run_rows(task, n, vectors, useful_threads(work), row_work)

    return call


def _clear_rest(tile: np.ndarray, n: int) -> None:
    """Clear the unused columns of a tile for n vectors: subnormals left by an earlier call would slow additions."""
    if rest := n % tile.shape[1]:
        tile[:, rest:] = 0


def _adjoint_many(
    plan: ExactPlan, y: np.ndarray, out: np.ndarray, accumulate: bool, compute: np.dtype, vectors: int, workers: int
) -> None:
    n, k = y.shape
    kernel = compiled(kernels.adjoint_rows, data=y.dtype, compute=compute, out=out.dtype)
    stacked = _stacked_tiles(out, k * vectors * compute.itemsize, vectors * workers)
    scratch = Scratch(lambda: (aligned((TILE_FEATURES, vectors), compute), aligned((stacked * k, vectors), compute)))

    def task(i: int, end: int, columns: np.ndarray, table: np.ndarray) -> None:
        with scratch.borrow() as arrays:
            kernel(y, table, (i, end), arrays, columns, plan.scale, accumulate)

    unit = vectors * stacked
    span = max(1, min(TABLE_CODES // plan.s, STEP_WORK // (unit * (plan.s + STORE_WORK))))
    for j in range(0, plan.d, span):
        columns = out[:, j : j + span]
        table = plan.table(j, j + columns.shape[1])
        ranges = row_ranges(n, unit, workers, STORE_WORK * columns.shape[1] + table.size)
        threads.run(task, [(*r, columns, table) for r in ranges], workers)
        del table  # before the next one is allocated


def _adjoint_few(
    plan: ExactPlan, y: np.ndarray, out: np.ndarray, accumulate: bool, compute: np.dtype, vectors: int, workers: int
) -> None:
    k, run = y.shape[1], _run_features(plan, vectors)
    kernel = compiled(kernels.adjoint_run, data=y.dtype, compute=compute, out=out.dtype)
    scratch = Scratch(
        lambda: (
            np.empty((CODES_STEP, plan.s), np.int32),
            aligned((TILE_FEATURES, vectors), compute),
            aligned((k, vectors), compute),
        )
    )

    def task(j: int) -> None:
        with scratch.borrow() as arrays:
            columns = out[:, j : j + run]
            kernel(y, plan.column(j), plan.geometry, arrays, columns, plan.scale, accumulate)

    threads.run(task, ((j,) for j in range(0, plan.d, run)), workers)
