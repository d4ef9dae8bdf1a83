"""Products with vectors that lie side by side in memory: S A and S' B for row-major A and B.

A feature of all vectors is then a stretch of memory, which is added to rows of sums as it is: no tile of features is
laid out, and memory is read in its order. A task is a block of features (`dense_kernels`) and a group of vectors, as
wide as memory for the sums allows. (On Zen 5, groups of 32 of 256 vectors take 6 times as long.) Blocks are added in
their order, so that results are those of the other ways to the bit. The adjoint adds rows of components likewise.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numba import types

from ... import threads
from .dense_kernels import add_lost, add_to_totals
from .entries import CODES_STEP, generate_codes
from .jit import CODES, COMPUTE, DATA_2D, FLAGS, INT64S, LAW, OUT_2D, RANGE, TILE, TOTALS, Array, compiled, kernel
from .plan import (
    STEP_WORK,
    STORE_WORK,
    THREAD_WORK,
    ExactPlan,
    Scratch,
    aligned,
    row_ranges,
    total_parts,
    useful_threads,
)
from .rows import gather_row, scatter_row
from .simd import SQUARE_BYTES
from .tiles import load_tile, store_tile

SUMS_BYTES = 36 << 20  # sums of the blocks under way, and totals
AHEAD_BYTES = 2560  # of memory that are fetched before they are added: 30 % less time for rows of 160 bytes on Zen 5
MIN_VECTORS = 4  # fewer are faster in tiles
MIN_WIDTH, MAX_WIDTH = 128, 1024  # vectors of a group, where there are more
MIN_TERMS = 8  # additions to a sum; where there are fewer, sums must fit into a core's cache
CACHE_BYTES = 1 << 20  # of a core
FOLD_NUMBERS = 1 << 18  # sums of a task that adds them to totals


@kernel(x=DATA_2D, bounds=INT64S, first_column=types.uint64, geometry=LAW, codes=CODES, sums=Array(COMPUTE, 3))
def scatter_blocks(x, bounds, first_column, geometry, codes, sums):
    """Add the terms of all features of x, contiguous along its vectors, to the sums of their blocks.

    bounds : block b is the columns ``bounds[b]:bounds[b+1]`` of x, of which the first and the last block may lie partly
        before and after it. Sums begin anew where a block begins.
    first_column : the law's index of x's column 0.
    codes : room for those of some columns.
    sums : (blocks, components, vectors).
    """
    s, stride = codes.shape[1], x.strides[1]
    ahead = stride * max(1, AHEAD_BYTES // max(1, abs(stride)))
    for b in range(bounds.size - 1):
        begin, end = max(bounds[b], 0), min(bounds[b + 1], x.shape[1])
        if bounds[b] >= 0:
            sums[b] = 0
        for j in range(begin, end, codes.shape[0]):
            nj = min(codes.shape[0], end - j)
            generate_codes(first_column + np.uint64(j), codes[:nj], geometry)
            for i in range(nj):
                scatter_row(codes, i * s, (i + 1) * s, x, j + i, ahead, sums[b])


@kernel(
    sums=Array(COMPUTE, 3), totals=TOTALS, rows=RANGE, ends=FLAGS, out=OUT_2D, scale=types.float64,
    accumulate=types.boolean,
)  # fmt: skip
def fold_components(sums, totals, rows, ends, out, scale, accumulate):
    """Add the blocks' sums of a range of components to the totals, and store these after the last block.

    sums : (blocks, components, vectors).  ends : whether these are the first and the last blocks.
    """
    n = out.shape[0]
    (r0, r1), (first, last) = rows, ends
    if first and last and sums.shape[0] == 1:
        store_tile(sums[0], r0, out, 0, n, r0, r1 - r0, scale, accumulate)
        return
    compensated = totals.shape[0] == 2
    for r in range(r0, r1):
        total, lost = totals[0, r], totals[-1, r]
        if first:
            total[:] = 0
            lost[:] = 0
        for b in range(sums.shape[0]):
            add_to_totals(sums[b, r], total, lost, compensated)
        if last and compensated:
            add_lost(total, lost)
    if last:
        store_tile(totals[0], r0, out, 0, n, r0, r1 - r0, scale, accumulate)


def is_contiguous(x: np.ndarray, compute: np.dtype) -> bool:
    """Whether x is contiguous along its vectors, and of a dtype that is added, or decoded, as it is loaded."""
    return x.strides[0] == x.itemsize and (x.dtype == compute or (x.itemsize == 2 and compute == np.float32))


class _Cut(NamedTuple):
    """Groups of `group` vectors, whose sums are `width` wide; `groups` of them and `blocks` are worked on together."""

    group: int
    width: int
    groups: int
    blocks: int


def _cut(plan: ExactPlan, n: int, workers: int, compute: np.dtype) -> _Cut | None:
    """None where tiles are faster: for very few vectors, or where sums would be more work than the features."""
    lanes = SQUARE_BYTES // compute.itemsize
    groups = -(-workers // plan.n_blocks)
    parts = 0 if plan.n_blocks == 1 else total_parts(compute)
    totals = 8 * parts * groups  # bytes, for a vector and a component
    needed = compute.itemsize * groups * min(-(-workers // groups), plan.n_blocks) + totals
    most = min(MAX_WIDTH, SUMS_BYTES // (plan.k * needed)) // lanes * lanes
    group = -(-n // (groups * -(-n // (groups * most)))) if most else 0
    width = -(-group // lanes) * lanes
    are_many = plan.d * plan.s < MIN_TERMS * plan.k and plan.k * width * compute.itemsize > CACHE_BYTES
    if n < MIN_VECTORS or most < min(n, MIN_WIDTH) or are_many:
        return None
    blocks = (SUMS_BYTES // (plan.k * width) - totals) // (groups * compute.itemsize)
    return _Cut(group, width, groups, min(plan.n_blocks, blocks))


def project_contiguous(plan: ExactPlan, x: np.ndarray, out: np.ndarray, accumulate: bool, compute: np.dtype) -> bool:
    """out (n, k) = x (n, d) S', or out += that, for x contiguous along its vectors; False where tiles are faster."""
    n, k = out.shape
    workers = useful_threads(n * plan.d * plan.s)
    cut = _cut(plan, n, workers, compute)
    if cut is None:
        return False
    scatter = compiled(scatter_blocks, data=x.dtype, compute=compute)
    fold = compiled(fold_components, compute=compute, out=out.dtype)
    codes = Scratch(lambda: (np.empty((CODES_STEP, plan.s), np.int32),))
    sums = np.empty((cut.groups, cut.blocks, k, cut.width), compute)
    totals = np.empty((cut.groups, total_parts(compute), k if plan.n_blocks > 1 else 0, cut.width))
    step = max(1, STEP_WORK // (cut.width * plan.s))  # features between two looks for an interrupt
    run = max(1, min(THREAD_WORK // (plan.block * plan.s * cut.width), cut.blocks // (4 * workers)))  # blocks of a task
    rows = max(1, FOLD_NUMBERS // (cut.blocks * cut.width))

    def add_blocks(x: np.ndarray, sums: np.ndarray, b0: int, b1: int) -> Iterator[None]:
        bounds = plan.bounds(b0, b1)
        with codes.borrow() as (room,):
            for j in range(bounds[0], bounds[-1], step):
                features = x[:, j : min(j + step, bounds[-1])]
                scatter(features, bounds - j, plan.column(j), plan.geometry, room, sums)
                yield

    for i in range(0, n, cut.group * cut.groups):
        begins = range(i, min(n, i + cut.group * cut.groups), cut.group)
        groups = [(g, slice(begin, min(n, begin + cut.group))) for g, begin in enumerate(begins)]
        for b0 in range(0, plan.n_blocks, cut.blocks):
            stop = min(b0 + cut.blocks, plan.n_blocks)
            runs = [(b, min(b + run, stop)) for b in range(b0, stop, run)]
            tasks = [(x[part], sums[g, b - b0 : end - b0], b, end) for b, end in runs for g, part in groups]
            threads.run(add_blocks, tasks, workers)
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
    """components[:, :n] = y', for y of n rows."""
    load_tile(y, 0, y.shape[0], 0, y.shape[1], components, 0)


@kernel(components=TILE, first_column=types.uint64, geometry=LAW, codes=CODES, out=OUT_2D, scale=types.float64)
def gather_features(components, first_column, geometry, codes, out, scale):
    """All columns of out, the first of which is the law's `first_column`. codes : room for those of some columns."""
    s = codes.shape[1]
    for j in range(0, out.shape[1], codes.shape[0]):
        nj = min(codes.shape[0], out.shape[1] - j)
        generate_codes(first_column + np.uint64(j), codes[:nj], geometry)
        for i in range(nj):
            gather_row(codes, i * s, (i + 1) * s, components, out, j + i, scale)


def adjoint_contiguous(plan: ExactPlan, y: np.ndarray, out: np.ndarray, compute: np.dtype) -> bool:
    """out (n, d) = y (n, k) S for out contiguous along its vectors; False where tiles are faster."""
    n, k = y.shape
    lanes = SQUARE_BYTES // compute.itemsize
    most = min(MAX_WIDTH, SUMS_BYTES // (k * compute.itemsize)) // lanes * lanes
    if n < MIN_VECTORS or most < min(n, MIN_WIDTH) or out.strides[0] != out.itemsize:
        return False
    load, gather = (
        compiled(load_components, data=y.dtype, compute=compute),
        compiled(gather_features, compute=compute, out=out.dtype),
    )
    group = -(-n // -(-n // most))
    components = aligned((k, -(-group // lanes) * lanes), compute)
    codes = Scratch(lambda: (np.empty((CODES_STEP, plan.s), np.int32),))
    workers = useful_threads(n * plan.d * plan.s)

    def task(begin: int, end: int, out: np.ndarray) -> None:
        with codes.borrow() as (room,):
            gather(components, plan.column(begin), plan.geometry, room, out[:, begin:end], plan.scale)

    for i in range(0, n, group):
        load(y[i : i + group], components)
        ranges = row_ranges(plan.d, 1, workers, components.shape[1] * (plan.s + STORE_WORK))
        threads.run(task, [(*r, out[i : i + group]) for r in ranges], workers)
    return True
