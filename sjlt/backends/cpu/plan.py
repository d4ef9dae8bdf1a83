"""The division of CPU work into tasks for the threads, within a bounded amount of memory."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import threads
from ...laws import exact as law
from .entries import CODES_STEP, fill_table, list_entries
from .jit import compiled
from .simd import LINE_BYTES
from .tiles import TILE_VECTORS

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec

MIB = 1 << 20
TABLE_CODES = 4 * MIB  # codes in a table of 4-byte codes
SCRATCH_BYTES = 20 * MIB  # tiles of all threads
STAGE_BYTES = 4 * MIB  # data converted, or made dense, at a time
MAX_TERMS = 64  # terms of a sum in the data's precision, before it is added to an fp64 total
STEP_WORK = 1 << 27  # additions of one kernel call, about 0.1 s: between two calls an interrupt is seen
STORE_WORK = 8  # additions that take as long as storing a number in memory that was not in use
THREAD_WORK = 1 << 20  # additions, about 0.1 ms, that are worth another thread: it takes 20 us to begin
KEPT_CODES = 1 << 14  # codes of a whole sketch that are kept between calls, for each of `exact_plan`'s plans
KEPT_BYTES, KEPT_ROOMS = 5 << 18, 8  # of the largest room for tiles that is kept for later calls, and how many are
_WIDTHS = sorted(TILE_VECTORS)


class ExactPlan:
    """A sketch of the exact law as the kernels see it, and its blocks of features.

    A block is a number of whole groups of chunks, in which each component gets at most one term per group. The bounds
    of blocks lie at fixed columns of the law, whatever the data and the threads: they fix the order of every sum.
    """

    def __init__(self, spec: SketchSpec) -> None:
        geometry = law.geometry(spec.n_components // spec.stacks, spec.nnz // spec.stacks, spec.seed, spec.stacks)
        self.geometry = tuple(np.uint64(v) for v in geometry)
        self.k, self.s, self.d = spec.n_components, spec.nnz, spec.n_features
        self.log_chunk = geometry.log_chunk
        self.scale = 1 / math.sqrt(self.s)
        self.offset = spec.feature_offset
        group = 1 << (geometry.log_group + geometry.log_chunk)  # at most TABLE_CODES / s with one stack
        self.block = group * min(MAX_TERMS, max(1, TABLE_CODES // (group * self.s)))
        self.n_blocks = -(-(self.offset % self.block + self.d) // self.block)

    def bounds(self, b0: int, b1: int) -> np.ndarray:
        """The columns at which blocks b0 .. b1 - 1 begin, and the last of them ends."""
        starts = np.arange(b0, b1 + 1, dtype=np.int64) * self.block - self.offset % self.block
        return np.minimum(np.maximum(starts, 0), self.d)  # np.clip takes 5 us longer

    def column(self, j: int) -> np.uint64:
        """The law's index of the sketch's column j."""
        return np.uint64(self.offset + j)

    def table(self, j0: int, j1: int) -> np.ndarray:
        """The codes of columns j0 .. j1 - 1, of shape (j1 - j0, nnz)."""
        codes = np.empty((j1 - j0, self.s), np.int32)
        fill, step = compiled(fill_table), 16 * CODES_STEP
        threads.run(
            lambda j: fill(self.column(j0 + j), codes[j : j + step], self.geometry),
            ((j,) for j in range(0, j1 - j0, step)),
            threads.get_num_threads(),
        )
        return codes

    @cached_property
    def kept(self) -> tuple[np.ndarray, np.ndarray]:
        """The table of all columns and the bounds of all blocks, kept for the next call (at most KEPT_CODES codes)."""
        return self.table(0, self.d), self.bounds(0, self.n_blocks)

    @cached_property
    def lists(self) -> tuple[np.ndarray, np.ndarray]:
        """(starts, entries): the entries of each component and block, kept like `kept`.

        Those of component r and block b are ``entries[starts[i]:starts[i + 1]]``, i = r n_blocks + b, by columns:
        2 column + (1 where negative).
        """
        table, bounds = self.kept
        starts = np.empty(self.k * self.n_blocks + 1, np.int64)
        entries = np.empty(table.size, np.int32)
        compiled(list_entries)(table, bounds, starts, entries)
        return starts, entries

    @property
    def has_lists(self) -> bool:
        """Whether the sketch has few enough entries to keep `kept` and `lists`."""
        return max(self.d * self.s, self.k * self.n_blocks) <= KEPT_CODES

    def is_small(self, n: int) -> bool:
        """Whether a product with n rows is one kernel call by codes that are kept."""
        return self.has_lists and n * self.d * self.s < THREAD_WORK

    def no_table(self) -> np.ndarray:
        return np.empty((0, self.s), np.int32)

    def vectors_and_workers(self, n: int, itemsize: int) -> tuple[int, int]:
        """Vectors in a tile for n rows, and how many threads may hold such tiles of k components at once."""
        workers = useful_threads(n * self.d * self.s)
        narrowest = min(bisect_left(_WIDTHS, n), len(_WIDTHS) - 1)  # that holds all, or the widest
        for vectors in reversed(_WIDTHS[: narrowest + 1]):
            if SCRATCH_BYTES // (self.k * vectors * itemsize) >= workers:
                return vectors, workers
        return 1, max(1, SCRATCH_BYTES // (self.k * itemsize))


@lru_cache(maxsize=64)
def exact_plan(spec: SketchSpec) -> ExactPlan:
    return ExactPlan(spec)


def useful_threads(work: int) -> int:
    """The threads that shorten a call of so many additions."""
    others = work // THREAD_WORK
    return min(threads.get_num_threads(), 1 + others) if others else 1  # the former looks at the environment: 4 us


def total_parts(compute: np.dtype) -> int:
    """Arrays of totals: in fp64 their errors are kept, too."""
    return 2 if compute == np.float64 else 1


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros that begin at a line of the caches, so that no vector of a tile crosses one: 20 % less time."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % LINE_BYTES
    return memory[start : start + size].view(dtype).reshape(shape)


_rooms: deque[np.ndarray] = deque(maxlen=KEPT_ROOMS)


@contextmanager
def room(rows: int, columns: int, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Borrow a tile that begins at a cache line and holds values of earlier calls."""
    size = rows * columns * dtype.itemsize
    memory = _rooms.pop() if _rooms else None
    if memory is None or memory.size < size:
        memory = aligned((size,), np.dtype(np.uint8))
    yield memory[:size].view(dtype).reshape(rows, columns)
    if memory.size <= KEPT_BYTES:
        _rooms.append(memory)


class Scratch:
    """Arrays that the tasks of one call borrow."""

    def __init__(self, make: Callable[[], tuple[Any, ...]]) -> None:
        self._make = make
        self._free: deque[tuple[Any, ...]] = deque()

    @contextmanager
    def borrow(self) -> Iterator[tuple[Any, ...]]:
        try:
            arrays = self._free.pop()
        except IndexError:
            arrays = self._make()
        try:
            yield arrays
        finally:
            self._free.append(arrays)


def row_ranges(n: int, unit: int, workers: int, work: int) -> list[tuple[int, int]]:
    """Ranges of n rows for tasks, as many for each worker and of whole units, but for the last.

    work : additions for a row. A task has at least about THREAD_WORK, and at most STEP_WORK of them or is one unit.
    """
    tasks = min(8, max(1, n * work // (THREAD_WORK * workers))) * workers
    step = max(1, min(-(-n // (tasks * unit)), STEP_WORK // (work * unit))) * unit
    return [(i, min(i + step, n)) for i in range(0, n, step)]
