"""Divide work on the CPU into tasks for the threads, within bounded memory."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

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
TABLE_CODES = 4 * MIB  # largest number of codes (4 bytes each) in a table
SCRATCH_BYTES = 20 * MIB  # for the tiles of all threads
STAGE_BYTES = 4 * MIB  # data converted at a time
MAX_TERMS = 64  # terms summed in the data's precision before the sum is added to an fp64 total
STEP_WORK = 1 << 27  # additions per kernel call, about 0.1 s; interrupts are checked between calls
GENERATION_WORK, LOAD_WORK, REUSED_WORK = 24, 2, 3  # additions per entry, element loaded, or stored in memory in use
STORE_WORK = 8  # storing an element in memory not yet in use takes as long as this many additions
THREAD_WORK = 1 << 20  # fewest additions of a thread, about 0.1 ms: starting it takes 20 us, 100 us on virtual machines
SPARSE_WORK = 8  # adding a term of sparse data, or storing a sum of it, takes as long as this many additions
KEPT_CODES = 1 << 15  # most codes of a sketch whose plan keeps them, and what is derived from them, between calls
REUSED_CODES = 1 << 17  # the same from the second product on, because listing codes takes longer than one product
REUSED_WORDS = 1 << 21  # the same for the words of `permuted` and `look_up`, which are the fastest to use
LISTING_PRODUCTS = 8  # after which as many entries are listed: that takes as long as 5 to 12 products of one vector
REUSED_BYTES = 32 * MIB  # kept by all plans with more than KEPT_CODES codes together
MAX_CALLS = 64  # remembered by a plan
FORGETFUL_CALLS = 16  # products for which a plan whose memory was freed keeps nothing
KEPT_BYTES, KEPT_TILES = 5 << 18, 8  # largest size and number of borrowed tiles kept for later calls
_WIDTHS = sorted(TILE_VECTORS)
Value = TypeVar("Value")
Call = Callable[[np.ndarray, np.ndarray], None]  # call(data, out): a product of data of one layout, for one of `out`


class ExactPlan:
    """A sketch of the exact law as the kernels see it, divided into blocks of features.

    A block consists of whole groups of chunks; a component gets at most one term from a group. Blocks begin at fixed
    columns of the law, whatever the data and the number of threads, and so fix the order of every sum.
    """

    def __init__(self, spec: SketchSpec) -> None:
        geometry = law.geometry(spec.n_components // spec.stacks, spec.nnz // spec.stacks, spec.seed, spec.stacks)
        self.geometry = tuple(np.uint64(v) for v in geometry)
        self.k, self.s, self.d = spec.n_components, spec.nnz, spec.n_features
        self.stacks, self.log_chunk = spec.stacks, geometry.log_chunk
        self.scale = 1 / math.sqrt(self.s)
        self.offset = spec.feature_offset
        group = 1 << (geometry.log_group + geometry.log_chunk)  # at most TABLE_CODES / s with one stack
        self.block = group * min(MAX_TERMS, max(1, TABLE_CODES // (group * self.s)))
        self.n_blocks = -(-(self.offset % self.block + self.d) // self.block)
        self.size = max(self.d * self.s, self.k * self.n_blocks)  # the number of codes, or of lists if that is greater
        self._uses = 0
        # Not cached properties: until Python 3.12 these hold a lock, which a forked child would never acquire.
        self._kept: dict[str, Any] = {}
        self.calls: dict[Hashable, Call] = {}

    def bounds(self, b0: int, b1: int) -> np.ndarray:
        """The first columns of blocks b0 .. b1 - 1, and the end of the last one: b1 - b0 + 1 values."""
        starts = np.arange(b0, b1 + 1, dtype=np.int64) * self.block - self.offset % self.block
        return np.minimum(np.maximum(starts, 0), self.d)  # 5 us faster than np.clip

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

    def use_codes(self, j0: int, j1: int, step: int, use: Callable[[int, np.ndarray], None]) -> None:
        """Call ``use(j, codes)`` with the codes of columns j0 .. j1 - 1, `step` columns at a time, on all threads.

        codes : of the columns from j on.
        """
        fill = compiled(fill_table)  # here, lest every thread compile it

        def task(j: int) -> None:
            codes = np.empty((min(step, j1 - j), self.s), np.int32)
            fill(self.column(j), codes, self.geometry)
            use(j, codes)

        threads.run(task, ((j,) for j in range(j0, j1, step)), threads.get_num_threads())

    def use(self) -> None:
        """Count a product, which decides what is kept."""
        self._uses += 1

    @property
    def keeps_codes(self) -> bool:
        """Whether to keep `codes` between calls: those of small sketches, and of larger ones if they are used again."""
        return self.size <= KEPT_CODES or (self._uses > 1 and self.size <= REUSED_CODES)

    @property
    def keeps_words(self) -> bool:
        """The same for words, which take the place of codes in `permuted` and `look_up`."""
        return self.size <= KEPT_CODES or (self._uses > 1 and self.can_keep_words)

    @property
    def can_keep_words(self) -> bool:
        """Whether the sketch is small enough for its words to be kept if it is used again."""
        return self.size <= REUSED_WORDS

    @property
    def keeps_lists(self) -> bool:
        """Whether to keep `lists` between calls: with `codes`, and those of larger sketches if they are used often."""
        return self.keeps_codes or (self._uses > LISTING_PRODUCTS and self.can_keep_words)

    def keep(self, name: str, make: Callable[[], Value], keeps: bool) -> Value:
        """The value of `make`, a tuple; if `keeps`, it is kept under this name for later calls."""
        value = self._kept.get(name)
        if value is None:
            value = make()
            if keeps:
                self._kept[name] = value
                if self.size > KEPT_CODES:
                    _free_others(self)
        return value

    @property
    def kept_bytes(self) -> int:
        return sum(v.nbytes for value in list(self._kept.values()) for v in value if isinstance(v, np.ndarray))

    def forget(self) -> None:
        """Free everything kept, and keep nothing for the next products.

        Otherwise sketches that are used in turns would replace each other at every call.
        """
        self._uses, self._kept, self.calls = 1 - FORGETFUL_CALLS, {}, {}

    def remember(self, layouts: Hashable, call: Call) -> None:
        """Keep `call` for later products of arrays with the same layouts. It may hold what the plan keeps."""
        if len(self.calls) >= MAX_CALLS:
            self.calls = {}
        if self._kept:  # else another thread has just freed it
            self.calls[layouts] = call

    @property
    def codes(self) -> tuple[np.ndarray, np.ndarray]:
        """The codes of all columns and the bounds of all blocks."""
        return self.keep("codes", lambda: (self.table(0, self.d), self.bounds(0, self.n_blocks)), self.keeps_codes)

    @property
    def lists(self) -> tuple[np.ndarray, np.ndarray]:
        """(starts, entries): the entries of each component and block.

        The entries of component r in block b are ``entries[starts[i]:starts[i + 1]]`` with i = r n_blocks + b, each
        2 column + (1 where negative), by ascending column.
        """
        return self.keep("lists", self._list, self.keeps_lists)

    def _list(self) -> tuple[np.ndarray, np.ndarray]:
        table, bounds = self.codes
        starts = np.empty(self.k * self.n_blocks + 1, np.int64)
        entries = np.empty(table.size, np.int32)
        compiled(list_entries)(table, bounds, starts, entries)
        return starts, entries

    def is_small(self, n: int) -> bool:
        """Whether a product of n rows is so small that codes kept between calls save much of its time."""
        return self.keeps_codes and n * self.d * self.s < THREAD_WORK

    def workers(self, n: int, loaded: int, stored: int, itemsize: int, generates: bool = True) -> int:
        """The number of threads that speed up a product of n rows; see `work`."""
        return useful_threads(self.work(n, loaded, stored, itemsize, generates))

    def work(self, n: int, loaded: int, stored: int, itemsize: int, generates: bool = True) -> int:
        """The work of a product of n rows, in additions, as far as threads speed it up.

        For (1195, 384) to 1402 with two nonzeros per column, storing takes most of the time; for one vector of 44680,
        generating the entries.

        loaded, stored : elements in a row of the data, of the result.
        itemsize : bytes of a sum; sums in fp64 take twice as long.
        """
        units = n * itemsize // 4
        additions = units * self.d * self.s
        rest = units * (LOAD_WORK * loaded + REUSED_WORK * stored)
        if generates:
            rest += GENERATION_WORK * self.d * self.s
        return max(additions, (additions + rest) // 2)  # half, for small products gain little

    def no_table(self) -> np.ndarray:
        return np.empty((0, self.s), np.int32)

    def vectors_and_workers(self, n: int, itemsize: int, workers: int) -> tuple[int, int]:
        """Vectors per tile for n rows, and the number of threads whose tiles of k components fit in SCRATCH_BYTES."""
        sufficient = min(bisect_left(_WIDTHS, n), len(_WIDTHS) - 1)  # the narrowest that holds all rows, or the widest
        for vectors in reversed(_WIDTHS[: sufficient + 1]):
            if SCRATCH_BYTES // (self.k * vectors * itemsize) >= workers:
                return vectors, workers
        return 1, max(1, SCRATCH_BYTES // (self.k * itemsize))


_reused: dict[ExactPlan, None] = {}  # plans with more than KEPT_CODES codes that keep anything, the oldest first


def _free_others(plan: ExactPlan) -> None:
    """Free what other plans keep, the oldest first, until all plans together keep at most REUSED_BYTES."""
    _reused.setdefault(plan)
    for oldest in list(_reused):
        if oldest is not plan and sum(p.kept_bytes for p in list(_reused)) > REUSED_BYTES:
            _reused.pop(oldest, None)  # another thread may be faster
            oldest.forget()


@lru_cache(maxsize=64)
def exact_plan(spec: SketchSpec) -> ExactPlan:
    return ExactPlan(spec)


def useful_threads(work: int) -> int:
    """The number of threads that speed up a call with `work` additions."""
    shares = work // THREAD_WORK
    return min(threads.get_num_threads(), shares) if shares > 1 else 1  # get_num_threads takes 4 us


def total_parts(compute: np.dtype) -> int:
    """The number of arrays that totals need: two where sums are in fp64, for the totals and their rounding errors."""
    return 2 if compute == np.float64 else 1


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros that begin at a cache line, so that no vector of a tile crosses one, which saves 20 % of the time."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % LINE_BYTES
    return memory[start : start + size].view(dtype).reshape(shape)


_free_memory: deque[np.ndarray] = deque(maxlen=KEPT_TILES)


class Borrowed:
    """A context in which memory for `size` numbers is borrowed, from the start of a cache line on.

    It is not cleared: it holds values of earlier calls. (A generator as a context takes 1 us longer.)
    """

    def __init__(self, size: int, dtype: np.dtype) -> None:
        self._bytes, self._dtype = size * dtype.itemsize, dtype

    def __enter__(self) -> np.ndarray:
        try:
            memory = _free_memory.pop()
        except IndexError:  # another thread may have taken the last one
            memory = None
        if memory is None or memory.size < self._bytes:
            memory = aligned((self._bytes,), np.dtype(np.uint8))
        self._memory = memory
        return memory[: self._bytes].view(self._dtype)

    def __exit__(self, *exception: object) -> None:
        if self._memory.size <= KEPT_BYTES:
            _free_memory.append(self._memory)


class Scratch:
    """Arrays that the tasks of one call borrow, allocated as needed."""

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


def run_rows(task: Callable[[int, int], Any], n: int, unit: int, workers: int, work: int) -> None:
    """Call ``task(begin, end)`` for the `row_ranges` of n rows: at once, without a list of tasks, if that is short.

    Interrupts are checked between tasks, so a long product is divided also on one thread.
    """
    if workers == 1 and n * work < STEP_WORK:
        task(0, n)
    else:
        threads.run(task, row_ranges(n, unit, workers, work), workers)


def row_ranges(n: int, unit: int, workers: int, work: int) -> list[tuple[int, int]]:
    """Divide n rows into ranges, one per task: whole units of rows (but for the last), the same number per worker.

    work : additions per row. A task has at least about THREAD_WORK additions and at most STEP_WORK, or is one unit.
    """
    if workers == 1 and n * work < THREAD_WORK:
        return [(0, n)]
    tasks = min(8, max(1, n * work // (THREAD_WORK * workers))) * workers
    step = max(1, min(-(-n // (tasks * unit)), STEP_WORK // (work * unit))) * unit
    return [(i, min(i + step, n)) for i in range(0, n, step)]
