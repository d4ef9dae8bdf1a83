"""Products where the elements of a feature are contiguous in memory: S A and S' B for row-major A and B.

A feature of all vectors is then one stretch of memory, which is added to rows of sums directly: data need not be copied
into tiles, and memory is read in order. A task is a run of blocks of features (`dense_kernels`) for a group of vectors,
which is as wide as memory for the sums allows. (On Zen 5, groups of 32 of 256 vectors take 6 times as long.) Blocks are
added in order, so results are bitwise equal to those of the other paths (`dense`). The adjoint adds rows of components
in the same way.

Sums of up to four SIMD vectors stay in registers if the lists of components are kept (`ExactPlan.lists`): S A of (20,
314829) to 16 with four nonzeros takes 0.4 of the time, of (8, 146184) to 32 with eight, 0.45 (Sapphire Rapids).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numba import types

from ... import threads
from .dense_kernels import add_compensation, add_to_totals
from .entries import CODES_STEP, generate_codes
from .jit import (
    CODES,
    COMPUTE,
    DATA_2D,
    FLAGS,
    INT32S,
    INT64S,
    LAW,
    OUT_2D,
    RANGE,
    TILE,
    TOTALS,
    Array,
    compiled,
    kernel,
)  # fmt: skip
from .plan import (
    STEP_WORK,
    STORE_WORK,
    THREAD_WORK,
    ExactPlan,
    Scratch,
    aligned,
    row_ranges,
    total_parts,
)
from .rows import gather_row, scatter_row, sum_columns
from .simd import SQUARE_BYTES
from .tiles import load_tile, store_tile

SUMS_BYTES = 36 << 20  # for the sums of the blocks in progress and the totals
AHEAD_BYTES = 2560  # prefetch distance: saves 30 % of the time for rows of 160 bytes on Zen 5
MIN_VECTORS = 4  # with fewer vectors, tiles are faster
MIN_WIDTH, MAX_WIDTH = 128, 1024  # fewest vectors in a group where there are more, and most
MIN_TERMS = 8  # with fewer additions per sum, the sums must fit into CACHE_BYTES
CACHE_BYTES = 1 << 20  # a core's cache
MAX_LISTED_BYTES = 256  # in a feature whose sums are computed from lists: four SIMD vectors, all of a list in one pass
FOLD_ELEMENTS = 1 << 18  # sums that a task adds to totals


@kernel(
    x=DATA_2D, bounds=INT64S, first_column=types.uint64, geometry=LAW, codes=CODES, listed=types.boolean,
    sums=Array(COMPUTE, 3),
)  # fmt: skip
def scatter_blocks(x, bounds, first_column, geometry, codes, listed, sums):
    """Add the terms of all features of x to the sums of their blocks. x is contiguous along its first axis.

    bounds : block b consists of the columns ``bounds[b]:bounds[b + 1]`` of x. The first block may begin before x and
        the last one end after it. Sums are cleared where a block begins.
    first_column : the law's index of x's column 0.
    codes : if `listed`, the codes of all columns of x, else a buffer for those of some.
    sums : (blocks, components, vectors).
    """
    s, stride = codes.shape[1], x.strides[1]
    ahead = stride * max(1, AHEAD_BYTES // max(1, abs(stride)))
    for b in range(bounds.size - 1):
        begin, end = max(bounds[b], 0), min(bounds[b + 1], x.shape[1])
        if bounds[b] >= 0:
            sums[b] = 0
        for j in range(begin, end, codes.shape[0]):
            nj, first = min(codes.shape[0], end - j), j if listed else 0
            if not listed:
                generate_codes(first_column + np.uint64(j), codes[:nj], geometry)
            for i in range(nj):
                scatter_row(codes, (first + i) * s, (first + i + 1) * s, x, j + i, ahead, sums[b])


@kernel(
    x=DATA_2D, starts=INT64S, entries=INT32S, first=types.int64, n_blocks=types.int64, sums=Array(COMPUTE, 3),
)  # fmt: skip
def sum_blocks(x, starts, entries, first, n_blocks, sums):
    """Compute the sums of blocks `first` and up of the sketch's `n_blocks`. x is contiguous along its first axis.

    starts, entries : `ExactPlan.lists`.  sums : (blocks, components, vectors), rows of whole SIMD vectors.
    """
    for b in range(sums.shape[0]):
        sum_columns(entries, starts, first + b, n_blocks, sums.shape[1], x.T, sums[b])


@kernel(
    sums=Array(COMPUTE, 3), totals=TOTALS, rows=RANGE, ends=FLAGS, out=OUT_2D, scale=types.float64,
    accumulate=types.boolean,
)  # fmt: skip
def fold_components(sums, totals, rows, ends, out, scale, accumulate):
    """Add the blocks' sums of a range of components to the totals; after the last block, store the totals in `out`.

    sums : (blocks, components, vectors).  ends : whether these include the sketch's first and last block.
    """
    n = out.shape[0]
    (r0, r1), (first, last) = rows, ends
    if first and last and sums.shape[0] == 1:
        store_tile(sums[0], r0, out, 0, n, r0, r1 - r0, scale, accumulate)
        return
    compensated = totals.shape[0] == 2
    for r in range(r0, r1):
        total, compensation = totals[0, r], totals[-1, r]
        if first:
            total[:] = 0
            compensation[:] = 0
        for b in range(sums.shape[0]):
            add_to_totals(sums[b, r], total, compensation, compensated)
        if last and compensated:
            add_compensation(total, compensation)
    if last:
        store_tile(totals[0], r0, out, 0, n, r0, r1 - r0, scale, accumulate)


def is_contiguous(x: np.ndarray, compute: np.dtype) -> bool:
    """Whether x is contiguous along its first axis, and its dtype is `compute` or is decoded to it when loaded."""
    return x.strides[0] == x.itemsize and (x.dtype == compute or (x.itemsize == 2 and compute == np.float32))


def _kept_codes(plan: ExactPlan) -> tuple[np.ndarray | None, Scratch]:
    """The codes of all columns, if the plan keeps them, and otherwise buffers for those of some."""
    table = plan.codes[0] if plan.keeps_codes else None
    return table, Scratch(lambda: (np.empty((CODES_STEP if table is None else 0, plan.s), np.int32),))


_Task = Callable[[np.ndarray, np.ndarray, int, int], Any]  # task(x, sums, b0, b1)


class _Partition(NamedTuple):
    """How `project_contiguous` divides vectors and blocks.

    Attributes
    ----------
    group : vectors in a group
    width : `group` rounded up to whole SIMD vectors, the width of the sums
    groups, blocks : the groups and the blocks that are processed at the same time
    """

    group: int
    width: int
    groups: int
    blocks: int


def _partition(plan: ExactPlan, n: int, workers: int, compute: np.dtype) -> _Partition | None:
    """None where tiles are faster: if the sums would take longer than the features."""
    lanes = SQUARE_BYTES // compute.itemsize
    groups = -(-workers // plan.n_blocks)
    parts = 0 if plan.n_blocks == 1 else total_parts(compute)
    totals_bytes = 8 * parts * groups  # per vector and component
    needed = compute.itemsize * groups * min(-(-workers // groups), plan.n_blocks) + totals_bytes
    max_group = min(MAX_WIDTH, SUMS_BYTES // (plan.k * needed)) // lanes * lanes
    group = -(-n // (groups * -(-n // (groups * max_group)))) if max_group else 0
    width = -(-group // lanes) * lanes
    too_many_sums = plan.d * plan.s < MIN_TERMS * plan.k and plan.k * width * compute.itemsize > CACHE_BYTES
    if max_group < min(n, MIN_WIDTH) or too_many_sums:
        return None
    blocks = (SUMS_BYTES // (plan.k * width) - totals_bytes) // (groups * compute.itemsize)
    return _Partition(group, width, groups, min(plan.n_blocks, blocks))


def _add_generated_blocks(plan: ExactPlan, data: np.dtype, compute: np.dtype, width: int) -> _Task:
    """A task that computes the sums of blocks b0 .. b1 - 1."""
    scatter = compiled(scatter_blocks, data=data, compute=compute)
    table, codes = _kept_codes(plan)
    step = max(1, STEP_WORK // (width * plan.s))  # features between two checks for interrupts

    def task(x: np.ndarray, sums: np.ndarray, b0: int, b1: int) -> Iterator[None]:
        bounds = plan.bounds(b0, b1)
        with codes.borrow() as (buffer,):
            for j in range(bounds[0], bounds[-1], step):
                end = min(j + step, bounds[-1])
                listed = buffer if table is None else table[j:end]
                scatter(x[:, j:end], bounds - j, plan.column(j), plan.geometry, listed, table is not None, sums)
                yield

    return task


def _add_listed_blocks(plan: ExactPlan, data: np.dtype, compute: np.dtype, width: int) -> _Task:
    """The same from the lists of components, where sums stay in registers."""
    sum_all, (starts, entries) = compiled(sum_blocks, data=data, compute=compute), plan.lists

    def task(x: np.ndarray, sums: np.ndarray, b0: int, b1: int) -> None:
        sum_all(x, starts, entries, b0, plan.n_blocks, sums)

    return task


def project_contiguous(plan: ExactPlan, x: np.ndarray, out: np.ndarray, accumulate: bool, compute: np.dtype) -> bool:
    """Compute out (n, k) = x (n, d) S', or out +=, for x that `is_contiguous`.

    Returns
    -------
    bool
        False if tiles are faster: nothing is computed.
    """
    n, k = out.shape
    is_listed = n > 1 and plan.keeps_lists and n * compute.itemsize <= MAX_LISTED_BYTES
    if n < MIN_VECTORS and not is_listed:
        return False
    workers = plan.workers(n, plan.d, k, compute.itemsize, generates=not is_listed)
    partition = _partition(plan, n, workers, compute)
    if partition is None:
        return False
    fold = compiled(fold_components, compute=compute, out=out.dtype)
    sums = np.empty((partition.groups, partition.blocks, k, partition.width), compute)
    totals = np.empty((partition.groups, total_parts(compute), k if plan.n_blocks > 1 else 0, partition.width))
    per_task = max(1, min(THREAD_WORK // (plan.block * plan.s * partition.width), partition.blocks // (4 * workers)))
    rows = max(1, FOLD_ELEMENTS // (partition.blocks * partition.width))

    add_blocks = _add_listed_blocks if is_listed else _add_generated_blocks
    task = add_blocks(plan, x.dtype, compute, partition.width)

    for i in range(0, n, partition.group * partition.groups):
        begins = range(i, min(n, i + partition.group * partition.groups), partition.group)
        groups = [(g, slice(begin, min(n, begin + partition.group))) for g, begin in enumerate(begins)]
        for b0 in range(0, plan.n_blocks, partition.blocks):
            stop = min(b0 + partition.blocks, plan.n_blocks)
            runs = [(b, min(b + per_task, stop)) for b in range(b0, stop, per_task)]
            tasks = [(x[part], sums[g, b - b0 : end - b0], b, end) for b, end in runs for g, part in groups]
            threads.run(task, tasks, workers)
            ends = b0 == 0, stop == plan.n_blocks
            folds = [
                (sums[g, : stop - b0], totals[g], (r, min(r + rows, k)), ends, out[part], plan.scale, accumulate)
                for g, part in groups
                for r in range(0, k, rows)
            ]
            threads.run(fold, folds, workers)
    return True


# ------------------------------------------------------------------------------------- adjoint


@kernel(y=DATA_2D, components=TILE)
def load_components(y, components):
    """components[:, :n] = y', where n is the number of rows of y."""
    load_tile(y, 0, y.shape[0], 0, y.shape[1], components, 0)


@kernel(
    components=Array(COMPUTE, 2, "A", readonly=True), first_column=types.uint64, geometry=LAW, codes=CODES,
    listed=types.boolean, out=OUT_2D, scale=types.float64,
)  # fmt: skip
def gather_features(components, first_column, geometry, codes, listed, out, scale):
    """Compute all columns of out.

    components : contiguous along its last axis.  first_column : the law's index of column 0.  codes : if `listed`, the
    codes of all columns, else a buffer for those of some.
    """
    s = codes.shape[1]
    for j in range(0, out.shape[1], codes.shape[0]):
        nj = min(codes.shape[0], out.shape[1] - j)
        if not listed:
            generate_codes(first_column + np.uint64(j), codes[:nj], geometry)
        for i in range(nj):
            gather_row(codes, i * s, (i + 1) * s, components, out, j + i, scale)


def reads_components(y: np.ndarray, out: np.ndarray, compute: np.dtype) -> bool:
    """Whether `adjoint_contiguous` reads the components of y in place: those of a row-major B, for a row-major S' B."""
    in_rows = y.strides[0] == y.itemsize and out.strides[0] == out.itemsize
    return in_rows and y.dtype == compute and len(y) >= SQUARE_BYTES // y.itemsize


def adjoint_contiguous(plan: ExactPlan, y: np.ndarray, out: np.ndarray, compute: np.dtype) -> bool:
    """Compute out (n, d) = y (n, k) S.

    Returns
    -------
    bool
        False if `out` is not contiguous along its first axis, or tiles are faster: nothing is computed.
    """
    n, k = y.shape
    lanes = SQUARE_BYTES // compute.itemsize
    in_place = reads_components(y, out, compute)
    max_group = MAX_WIDTH if in_place else min(MAX_WIDTH, SUMS_BYTES // (k * compute.itemsize)) // lanes * lanes
    if n < MIN_VECTORS or max_group < min(n, MIN_WIDTH) or out.strides[0] != out.itemsize:
        return False
    gather = compiled(gather_features, compute=compute, out=out.dtype)
    table, codes = _kept_codes(plan)
    workers = plan.workers(n, k, plan.d, compute.itemsize, generates=table is None)

    def task(begin: int, end: int, components: np.ndarray, out: np.ndarray) -> None:
        with codes.borrow() as (buffer,):
            listed = buffer if table is None else table[begin:end]
            arrays = listed, table is not None, out[:, begin:end]
            gather(components, plan.column(begin), plan.geometry, *arrays, plan.scale)

    count = -(-n // max_group)  # of groups of vectors
    groups = [slice(g * n // count, (g + 1) * n // count) for g in range(count)]
    ranges = row_ranges(plan.d, 1, workers, n // count * (plan.s + STORE_WORK))
    if in_place:
        threads.run(task, [(*r, y[part].T, out[part]) for part in groups for r in ranges], workers)
        return True
    load = compiled(load_components, data=y.dtype, compute=compute)
    components = aligned((k, -(-n // (count * lanes)) * lanes), compute)
    for part in groups:
        load(y[part], components)
        threads.run(task, [(*r, components, out[part]) for r in ranges], workers)
    return True
