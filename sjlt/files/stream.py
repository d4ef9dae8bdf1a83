"""Stream the rows of a file through a GPU: reading, copying, projecting, copying back and writing overlap.

Each batch in flight occupies a slot: host memory, pinned so that the device copies it by itself, device memory, and a
stream that runs the batch's steps in order. Reader threads fill the pieces of batches; the thread that reads a batch's
last piece launches its steps. The caller takes results in order and writes them, and each written result makes room
for another batch. So while one slot is read, a second is on the bus, a third is projected, and the result of a fourth
is written.

A batch costs about 0.36 ms whatever its size, during which all these threads share one interpreter, plus 0.19 ms per
16 MiB; its steps are therefore one CUDA graph, launched by one call. From file to file this reaches 29 to 47 GB/s where
the bus reaches 55 and reading alone 42 to 53 (H200, five hosts with 16 CPUs, 768 fp32 features from the page cache to
16 components). Measured alternatives, relative to that: batches of 16 MiB 0.67, of 48 MiB 0.8 (they fall out of the
processor's cache, in which the bus finds what was just read); 8 readers 0.7; 6 slots, or pieces of 2 or 8 MiB, 0.75 to
0.85. Letting the device read the page cache through mapped and pinned pages: 0.6 for every second batch, 0.4 for all,
because pinning and unpinning hold up the driver.
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
    from .raw import Pieces, RawMatrix

SLOTS = 4
MAX_READERS = 12  # threads
PIECE_BYTES = 4 << 20  # read at a time by a reader

_Tasks = SimpleQueue[Callable[[], None] | None]


def projected(
    source: RawMatrix, sketch: Sketch, dtype: np.dtype, start: int, rows: int, device: torch.device
) -> Generator[np.ndarray]:
    """The projections of rows `start`, `start` + 1, ... of `source`, `rows` at a time.

    Parameters
    ----------
    source : RawMatrix
        With dtype float16, float32 or float64.
    sketch : Sketch
    dtype : dtype
        Dtype of the results: float16, float32 or float64.
    start, rows : int
    device : torch.device
        A CUDA device, or "cpu": then the reader threads carry out the steps themselves.

    Yields
    ------
    ndarray of shape (up to `rows`, n_components)
        It is overwritten after the next one is taken. To leave early, call ``close()``, which returns when nothing is
        in flight.

    Raises
    ------
    UserError, OSError
        From reading.
    torch.OutOfMemoryError, torch.AcceleratorError
        Where host or device have too little memory.
    """
    n = source.shape[0]
    starts = range(start, n, rows)
    slots = [_Slot(source, sketch, dtype, min(rows, n), device) for _ in starts[:SLOTS]]
    tasks: _Tasks = SimpleQueue()
    readers = [
        Thread(target=_work, args=(tasks,), name="sjlt-read", daemon=True)
        for _ in range(min(MAX_READERS, get_num_threads()))
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
    """Let the readers finish their current tasks and stop."""
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
    """Memory for one batch of `rows` rows, on the host and on the device."""

    def __init__(self, source: RawMatrix, sketch: Sketch, dtype: np.dtype, rows: int, device: torch.device) -> None:
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
        """Start reading the rows from i on; the steps follow by themselves."""
        self.rows = min(len(self._host_x), self.source.shape[0] - i)
        self._host_x[self.rows :] = 0
        pieces = self.source.pieces(self._host_x[: self.rows], i, PIECE_BYTES)
        together = max(1, PIECE_BYTES // max(1, pieces[0][0].nbytes)) if pieces else 1  # columns may be short
        groups = [pieces[t : t + together] for t in range(0, len(pieces), together)] or [[]]
        self._unread, self._failure = len(groups), None
        for group in groups:
            tasks.put(partial(self._read, group))

    def _read(self, pieces: Pieces) -> None:
        try:
            self.source.fill(pieces)
        except BaseException as e:
            self._failure = e
        with self._lock:
            self._unread -= 1
            last = self._unread == 0
        if last:
            self._launched.put(self._failure or self._launch())

    def _steps(self) -> None:
        """The device's work on one batch.

        A batch that is not full is padded with zeros and projected like a full one: no kernel is compiled for it, and
        its result does not depend on the number of rows in the file.
        """
        self.x.copy_(self.read_x, non_blocking=True)
        self.sketch.project(self.x, out=self.y)
        self.read_y.copy_(self.y, non_blocking=True)

    def _captured(self) -> torch.cuda.CUDAGraph:
        """The steps as one CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            self._steps()  # compiles, which a graph cannot capture
            self.wait()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._steps()
            finally:
                graph.capture_end()
        return graph

    def _launch(self) -> BaseException | None:
        """Launch the steps. Returns the exception, if one was raised."""
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
        """Wait for the projected rows."""
        failure = self._launched.get()
        if failure is not None:
            raise failure
        self.wait()
        return self._host_y[: self.rows]
