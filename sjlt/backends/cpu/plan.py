"""How the CPU cuts work into tasks for the threads, within a bounded amount of memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import threads
from ...laws import exact as law
from .bits import BFLOAT16, to_bfloat16
from .entries import FILL, fill_codes
from .jit import compiled
from .tiles import LANES

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec

MIB = 1 << 20
TABLE_CODES = 4 * MIB  # codes in a table of 4-byte codes
SCRATCH_BYTES = 20 * MIB  # tiles of all threads
STAGE_BYTES = 4 * MIB  # data converted, or made dense, at a time
TERMS = 256  # terms, about, of a sum in the data's own precision


class Plan:
    """A sketch as the kernels see it, and its blocks of features.

    The bounds of blocks lie at fixed columns of the law (whatever the data and the threads), so they fix the order
    of every sum.
    """

    def __init__(self, spec: SketchSpec) -> None:
        geometry = law.geometry(spec.n_components, spec.nnz, spec.seed)
        self.geometry = tuple(np.uint64(v) for v in geometry)
        self.k, self.s, self.d = spec.n_components, spec.nnz, spec.n_features
        self.scale = 1 / math.sqrt(self.s)
        self.offset = spec.feature_offset
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
        fill, step = compiled(fill_codes), 16 * FILL
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


class Scratch:
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


def row_tasks(n: int, unit: int, workers: int) -> list[tuple[int, int]]:
    """Ranges of rows, whole units but for the last, several for each worker."""
    step = max(1, n // (8 * workers * unit)) * unit
    return [(i, min(i + step, n)) for i in range(0, n, step)]


def staged(function: Callable[..., None], spec: SketchSpec, x: Any, out: np.ndarray) -> None:
    """`function` into an `out` of fp16 or bf16 by way of one of fp64 or fp32, some rows at a time."""
    step = max(1, STAGE_BYTES // (8 * max(1, out.shape[1])))
    for i in range(0, out.shape[0], step):
        stage = np.empty(
            (min(step, out.shape[0] - i), out.shape[1]), np.float32 if out.dtype == BFLOAT16 else np.float64
        )
        function(spec, x[i : i + step], stage, False)
        with np.errstate(over="ignore"):  # to inf, as in every other dtype
            out[i : i + step] = to_bfloat16(stage) if out.dtype == BFLOAT16 else stage
