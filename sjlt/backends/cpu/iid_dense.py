"""The iid law on dense data on the CPU: 2-D arrays of any strides, one data vector per row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import threads
from ...laws.philox import HALF, LOW
from . import iid_kernels as kernels
from .bits import compute_dtype, is_native, kernel_view, to_native
from .iid_entries import ROW_BATCH, rounded_up
from .iid_kernels import IID_TILE_VECTORS, REDUCE_STEP
from .jit import compiled
from .plan import MAX_TERMS, MIB, STAGE_BYTES, STEP_WORK, Scratch, useful_threads

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec

MIN_DENSITY = 1 / 10  # at this density and above, multiplying by zeros is faster than finding nonzeros (Zen 5)
MAX_OUT_DIM = 512  # columns of the result in a task
IID_SCRATCH_BYTES = 32 * MIB  # for the entries, tiles and totals of all threads
TASK_BYTES = 4 * MIB  # for those of one thread, which should stay in its L2 cache
FAR_BYTES, MAX_FAR_ROWS = MIB, 128  # rows of a result this far apart may each touch a huge page, cleared at first use
ENTRY_WORK = 8  # generating an entry takes as long as this many additions


class IidPlan:
    """A sketch of the iid law as the kernels see it. It depends on the spec only, and so do all results."""

    def __init__(self, spec: SketchSpec) -> None:
        lanes = spec.lanes
        self.k, self.d, self.offset = spec.n_components, spec.n_features, spec.feature_offset
        self.dense = lanes.density >= MIN_DENSITY
        self.scale = lanes.scale(spec.n_components)
        self.entry_scale = self.scale / 2 if self.dense else self.scale  # of the entries that kernels generate
        self.density = lanes.density
        words = (lanes.bits, lanes.signs, lanes.complement, spec.seed & LOW, spec.seed >> HALF & LOW)
        self._rule = tuple(np.uint64(word) for word in words)
        self.block = math.ceil(MAX_TERMS / lanes.density / REDUCE_STEP) * REDUCE_STEP

    def rule(self, length: int) -> tuple[np.uint64, ...]:
        """The rule for kernels (`iid_entries`), with the length of a block or a segment."""
        return *self._rule, np.uint64(length)

    def column(self, j: int) -> np.uint64:
        """The law's index of the sketch's column j."""
        return np.uint64(self.offset + j)

    def new_entries(self, columns: int, rows: int, compute: Any) -> tuple[np.ndarray, ...]:
        """Buffers for the entries of some columns and rows: `iid_kernels.ENTRIES`."""
        size = columns * rounded_up(rows)
        floats, codes = (size, 0) if self.dense else (0, columns * rows)
        return (
            np.empty(rounded_up(rows) // 2, np.uint32),
            np.empty(floats, compute),
            np.empty(codes, np.int32),
            np.empty(columns + 1, np.int32),
        )


@lru_cache(maxsize=64)
def iid_plan(spec: SketchSpec) -> IidPlan:
    return IidPlan(spec)


def project_iid(spec: SketchSpec, x: np.ndarray, out: np.ndarray, accumulate: bool) -> None:
    """out (n, k) = x (n, d) S', or out += that."""
    if x.size:
        _multiply_iid(spec, x, out, accumulate, adjoint=False)
    elif not accumulate:
        out[...] = 0


def adjoint_iid(spec: SketchSpec, y: np.ndarray, out: np.ndarray, accumulate: bool) -> None:
    """out (n, d) = y (n, k) S, or out += that."""
    if out.size:
        _multiply_iid(spec, y, out, accumulate, adjoint=True)


def _task_shape(n: int, out_dim: int, vectors: int, itemsize: int, workers: int) -> tuple[int, int, int]:
    """(rows, columns of the result, threads): the shape of a task, and how many threads IID_SCRATCH_BYTES allow."""
    totals = 8 * (2 if itemsize == 8 else 1)

    def fixed(width: int) -> int:
        return REDUCE_STEP * (width * max(4, itemsize) + vectors * itemsize)

    def per_row(width: int) -> int:
        return width * (itemsize + totals)

    workers = min(workers, max(1, IID_SCRATCH_BYTES // (fixed(ROW_BATCH) + vectors * per_row(ROW_BATCH))))
    share = min(IID_SCRATCH_BYTES // workers, TASK_BYTES)
    width = min(MAX_OUT_DIM, -(-out_dim // ROW_BATCH) * ROW_BATCH)
    while width > ROW_BATCH and fixed(width) + vectors * per_row(width) > share // 2:
        width = -(-width // 2 // ROW_BATCH) * ROW_BATCH
    rows = max(vectors, min((share - fixed(width)) // per_row(width), -(-n // workers)))
    rows = min(-(-n // vectors), max(1, rows // vectors)) * vectors
    if n <= rows:  # a single range of rows: divide the columns among the threads
        width = min(width, -(-out_dim // (workers * ROW_BATCH)) * ROW_BATCH)
    return rows, width, workers


def _multiply_iid(spec: SketchSpec, x: np.ndarray, out: np.ndarray, accumulate: bool, adjoint: bool) -> None:
    plan, (n, out_dim), reduce_dim = iid_plan(spec), out.shape, x.shape[1]
    compute = compute_dtype(x)
    out, data = kernel_view(out), kernel_view(to_native(x[:0])).dtype
    kernel = compiled(kernels.multiply_entries, data=data, compute=compute, out=out.dtype)
    widest = max(IID_TILE_VECTORS)
    vectors = min(vectors for vectors in IID_TILE_VECTORS if vectors >= min(n, widest))
    workers = useful_threads(reduce_dim * out_dim * (n + ENTRY_WORK))
    rows, width, workers = _task_shape(n, out_dim, vectors, compute.itemsize, workers)
    if abs(out.strides[0]) >= FAR_BYTES:
        rows = min(rows, MAX_FAR_ROWS)
    stacked = rows * min(width, out_dim) // vectors
    step = max(REDUCE_STEP, STEP_WORK // (width * (rows + ENTRY_WORK)))
    if not is_native(x):  # limit the terms that are copied at a time
        step = max(REDUCE_STEP, min(step, STAGE_BYTES // (workers * rows * x.itemsize)))
    rule = plan.rule(plan.block)

    def make() -> tuple[Any, ...]:
        shape = (width, REDUCE_STEP) if adjoint else (REDUCE_STEP, width)
        entries = plan.new_entries(*shape, compute)
        parts = 2 if compute == np.float64 else 1
        tile, sums = np.zeros((REDUCE_STEP, vectors), compute), np.empty((stacked, vectors), compute)
        return entries, (tile, sums, np.empty((parts, stacked, vectors)))

    scratch = Scratch(make)

    def task(i: int, o: int) -> Iterator[None]:
        ranges, t = ((i, min(i + rows, n)), (o, min(o + width, out_dim))), 0
        with scratch.borrow() as (entries, tiles):
            while t < reduce_dim:
                # A kernel ends with a whole step of entries, up to REDUCE_STEP terms beyond the step.
                part = kernel_view(to_native(x[i : i + rows, t : t + step + REDUCE_STEP]))
                t = kernel(
                    part, *ranges, (t, min(t + step, reduce_dim), t, reduce_dim), plan.column(0), adjoint, rule,
                    entries, tiles, out, plan.entry_scale, accumulate,
                )  # fmt: skip
                yield

    threads.run(task, [(i, o) for i in range(0, n, rows) for o in range(0, out_dim, width)], workers)
