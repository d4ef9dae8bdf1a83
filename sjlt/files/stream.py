"""Stream the rows of a file through a GPU, overlapping reading, copying, projecting, copying back and writing.

Each batch in flight occupies a slot: pinned host memory, device memory, and a CUDA stream that runs the steps of the
batch in order. Reader threads fill the host memory piece by piece; the thread that reads the last piece of a batch
launches its steps. The caller takes results in order and writes them, which frees the slot for another batch. Thus one
slot is being read while a second is on the bus, a third is projected, and the result of a fourth is written.

A batch costs 0.19 ms per 16 MiB plus about 0.36 ms whatever its size, during which all these threads share one
interpreter. The steps are therefore a single CUDA graph, launched by one call. Throughput from file to file is 29 to
47 GB/s, where the bus reaches 55 and reading alone 42 to 53 (H200, five hosts with 16 CPUs, 768 fp32 features from the
page cache to 16 components). Relative throughput of alternatives: batches of 16 MiB 0.67, of 48 MiB 0.8 (they no longer
fit the CPU cache, where the bus finds what was just read); 8 readers 0.7; 6 slots, or pieces of 2 or 8 MiB,
0.75 to 0.85. Letting the device read the page cache through mapped, pinned pages: 0.6 if for every second batch, 0.4 if
for all, because pinning and unpinning block the driver.
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
PIECE_BYTES = 4 << 20  # per read

_Tasks = SimpleQueue[Callable[[], None] | None]


def projected(
    source: RawMatrix, sketch: Sketch, dtype: np.dtype, start: int, rows: int, device: torch.device
) -> Generator[np.ndarray]:
    """Yield the projections of the rows of `source` from `start` on, `rows` at a time.

    Parameters
    ----------
    source : RawMatrix
        With dtype float16, float32 or float64.
    sketch : Sketch
    dtype : dtype
        Dtype of the results: float16, float32 or float64.
    start, rows : int
    device : torch.device
        A CUDA device, or "cpu", for which the reader threads run the steps themselves.

    Yields
    ------
    ndarray of shape (up to `rows`, n_components)
        Valid until the next one is taken. To stop early, call ``close()``, which returns when nothing is in flight.

    Raises
    ------
    UserError, OSError
        From reading.
    torch.OutOfMemoryError, torch.AcceleratorError
        If the host or the device has too little memory.
    """
    n = source.shape[0]
    starts = range(start, n, rows)
    slots = [_Slot(source, sketch, dtype, min(rows, n), device) for _ in starts[:SLOTS]]
    tasks: _Tasks = SimpleQueue()
    readers = [
        Thread(target=_run_tasks, args=(tasks,), name="sjlt-read", daemon=True)
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
        _stop(readers, tasks)
        for slot in slots:
            slot.wait()


def _run_tasks(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        task()


def _stop(readers: list[Thread], tasks: _Tasks) -> None:
    """Discard pending tasks, and wait until the readers have finished their current ones."""
    try:
        while True:
            tasks.get_nowait()
    except Empty:
        pass
    for _ in readers:
        tasks.put(None)
    for reader in readers:
        if reader.ident is not None:  # it has been started
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
        """Start reading the rows from i on. The thread that reads the last piece launches the steps."""
        self.rows = min(len(self._host_x), self.source.shape[0] - i)
        self._host_x[self.rows :] = 0
        pieces = self.source.pieces(self._host_x[: self.rows], i, PIECE_BYTES)
        per_task = max(1, PIECE_BYTES // max(1, pieces[0][0].nbytes)) if pieces else 1  # pieces by column may be short
        groups = [pieces[t : t + per_task] for t in range(0, len(pieces), per_task)] or [[]]
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
        """Copy a batch to the device, project it, and copy the result back.

        The last batch is padded with zeros, so that no kernel is compiled for it and its result does not depend on the
        number of rows in the file.
        """
        self.x.copy_(self.read_x, non_blocking=True)
        self.sketch.project(self.x, out=self.y)
        self.read_y.copy_(self.y, non_blocking=True)

    def _captured(self) -> torch.cuda.CUDAGraph:
        """Capture the steps in a CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            self._steps()  # compiles the kernels, which cannot happen during capture
            self.wait()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._steps()
            finally:
                graph.capture_end()
        return graph

    def _launch(self) -> BaseException | None:
        """Launch the steps. Return the exception if one was raised."""
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
        """Wait for the device to finish the steps."""
        if self.stream is not None:
            self.stream.synchronize()

    def result(self) -> np.ndarray:
        """Wait for the projected rows and return them."""
        failure = self._launched.get()
        if failure is not None:
            raise failure
        self.wait()
        return self._host_y[: self.rows]
