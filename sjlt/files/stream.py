"""The rows of a file through a GPU: reading, copying, projecting, copying back and writing overlap.

Each batch of rows on its way has a slot: memory on the host, pinned so that the device copies it by itself, memory on
the device, and a stream there that takes the batch's steps in order. Threads read the parts of batches; the one that
reads a batch's last part launches its steps. The caller takes the results in order and writes them, and what it has
written makes room for reading. So while one slot's rows are read, those of a second are on the bus, those of a third
are projected, and the result of a fourth is written.

A batch takes about 0.36 ms whatever its size, in which all these threads share one interpreter, and 0.19 ms for every
16 MiB. So a batch's steps are one CUDA graph, launched by one call. From file to file this runs at 29 to 47 GB/s where
the bus has 55 and reading alone 42 to 53 (H200, five hosts with 16 CPUs, 768 features in fp32 from the page cache to
16 components). Batches of 16 MiB (`io.GPU_BATCH_BYTES` is 32) come to two thirds of it, those of 48 MiB to 0.8, as they
fall out of the processor's cache, in which the bus finds what was just read; 8 readers to 0.7, 6 slots, or parts of 2
or 8 MiB, to 0.75 to 0.85. To have the device read the page cache itself, from pages that are mapped and pinned instead
of read, is slower: 0.6 where every second batch does, 0.4 where all do, as pinning and unpinning hold up the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from ..threads import get_num_threads

if TYPE_CHECKING:
    from ..sketch import Sketch
    from .io import NpySource

SLOTS = 4
READERS = 12  # threads, at most
PART_BYTES = 4 << 20  # that a reader reads at a time

_Tasks = SimpleQueue[Callable[[], None] | None]


def projected(
    source: NpySource, sketch: Sketch, dtype: np.dtype, start: int, rows: int, device: torch.device
) -> Generator[np.ndarray]:
    """The projections of rows start, start + 1, ... of `source`, `rows` at a time, in `dtype`.

    A result is overwritten once the next is asked for. Leave early by ``close()``: it returns when nothing is under
    way any more. On the device "cpu" the same threads read, and take the steps themselves.

    Raises what reading raises, and torch's errors where host or device have too little memory.
    """
    n = source.shape[0]
    starts = range(start, n, rows)
    slots = [_Slot(source, sketch, dtype, min(rows, n), device) for _ in starts[:SLOTS]]
    tasks: _Tasks = SimpleQueue()
    readers = [
        Thread(target=_work, args=(tasks,), name="sjlt-read", daemon=True)
        for _ in range(min(READERS, get_num_threads()))
    ]
    try:
        for reader in readers:
            reader.start()
        ahead = iter(starts)
        for slot, i in zip(slots, ahead, strict=False):
            slot.begin(i, tasks)
        for j in range(len(starts)):
            slot = slots[j % SLOTS]
            yield slot.result()
            if (following := next(ahead, None)) is not None:
                slot.begin(following, tasks)
    finally:
        _end(readers, tasks)
        for slot in slots:
            slot.wait()


def _work(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        task()


def _end(readers: list[Thread], tasks: _Tasks) -> None:
    """Let the readers finish what they are doing, and nothing else."""
    try:
        while True:
            tasks.get_nowait()
    except Empty:
        pass
    for _ in readers:
        tasks.put(None)
    for reader in readers:
        if reader.ident is not None:  # it was started
            reader.join()


class _Slot:
    """Memory for a batch of `rows` rows, on the host and on the device."""

    def __init__(self, source: NpySource, sketch: Sketch, dtype: np.dtype, rows: int, device: torch.device) -> None:
        self.source, self.sketch = source, sketch
        given, wanted = getattr(torch, source.dtype.name), getattr(torch, dtype.name)
        on_gpu = device.type == "cuda"
        shape = (rows, source.shape[1])
        self.read_x = torch.empty(shape if source.order == "C" else shape[::-1], dtype=given, pin_memory=on_gpu)
        if source.order == "F":
            self.read_x = self.read_x.T
        self.x = torch.empty_like(self.read_x, device=device)
        self.y = torch.empty((rows, sketch.n_components), dtype=wanted, device=device)
        self.read_y = torch.empty(self.y.shape, dtype=wanted, pin_memory=on_gpu)
        self._host_x, self._host_y = self.read_x.numpy(), self.read_y.numpy()
        self.rows = 0
        self.stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._graph = self._captured() if on_gpu else None
        self._lock = Lock()
        self._unread, self._failure = 0, cast(BaseException | None, None)
        self._launched = SimpleQueue[BaseException | None]()

    def begin(self, i: int, tasks: _Tasks) -> None:
        """Have the rows from i on read, and whatever follows launched."""
        self.rows = min(len(self._host_x), self.source.shape[0] - i)
        self._host_x[self.rows :] = 0
        parts = self.source.parts(self._host_x[: self.rows], i, PART_BYTES)
        together = max(1, PART_BYTES // max(1, parts[0][0].nbytes)) if parts else 1  # columns may be short
        groups = [parts[t : t + together] for t in range(0, len(parts), together)] or [[]]
        self._unread, self._failure = len(groups), None
        for group in groups:
            tasks.put(partial(self._read, group))

    def _read(self, parts: list[tuple[np.ndarray, int]]) -> None:
        try:
            self.source.fill(parts)
        except BaseException as e:
            self._failure = e
        with self._lock:
            self._unread -= 1
            last = self._unread == 0
        if last:
            self._launched.put(self._failure or self._launch())

    def _steps(self) -> None:
        """What the device does with a batch.

        A batch that is not full is projected like a full one, with zeros behind its rows: so no kernel is compiled for
        it, and its result does not depend on how many rows the file has.
        """
        self.x.copy_(self.read_x, non_blocking=True)
        self.sketch.project(self.x, out=self.y)
        self.read_y.copy_(self.y, non_blocking=True)

    def _captured(self) -> torch.cuda.CUDAGraph:
        """The steps as one launch."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            self._steps()  # compiles, which a graph cannot hold
            self.wait()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._steps()
            finally:
                graph.capture_end()
        return graph

    def _launch(self) -> BaseException | None:
        """Let the device take the steps; what went wrong with that."""
        try:
            if self._graph is None:
                self._steps()
            else:
                with torch.cuda.stream(self.stream):
                    self._graph.replay()
        except BaseException as e:
            return e
        return None

    def wait(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()

    def result(self) -> np.ndarray:
        """The projected rows, once they are there."""
        failure = self._launched.get()
        if failure is not None:
            raise failure
        self.wait()
        return self._host_y[: self.rows]
