"""Run attempts on an executor until every part exists."""

from __future__ import annotations

import multiprocessing
import os
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from ..files.errors import UserError, explain, one_line
from ..threads import get_num_threads
from .attempt import Job, Part, attempt


class Processes:
    """A pool of processes that is recreated if one of them is killed.

    The processes exit when their parent does, even if the parent is killed. Together they use as many threads as the
    parent would. At the end of a ``with`` block they finish the running parts, unless the block was interrupted.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._threads = max(1, get_num_threads() // workers)
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._reader, self._writer = context.Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(
            self.workers, mp_context=context, initializer=_begin_worker, initargs=(self._reader, self._threads)
        )

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        try:
            return self._pool.submit(function, *arguments)
        except BrokenExecutor:
            self.close()
            self._start()
            return self._pool.submit(function, *arguments)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.close(now=kind is not None and not issubclass(kind, Exception))

    def close(self, now: bool = False) -> None:
        """End the processes; with `now`, without waiting for them to finish their work."""
        if now:
            self._writer.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._writer.close()
        self._reader.close()


def _begin_worker(parent: Connection, threads: int) -> None:
    import signal

    from ..threads import set_num_threads

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver stops its workers itself
    set_num_threads(threads)
    threading.Thread(target=_end_with, args=(parent,), name="sjlt-parent", daemon=True).start()


def _end_with(parent: Connection) -> None:
    """Exit once the other end of the pipe, which only the parent holds, is closed."""
    try:
        parent.poll(None)
    finally:
        os._exit(1)


def run_parts(
    job: Job,
    parts: dict[int, Part],
    executor: Executor | Processes,
    retries: int,
    done: Callable[[int], None],
) -> None:
    """Attempt every part until it exists.

    A failed part is attempted again, at most `retries` times, unless its data is bad. If a process of the default pool
    dies, the parts that were running are attempted again one at a time, to identify a part that kills its process.

    Parameters
    ----------
    job : Job
    parts : dict of Part by index
    executor : Executor or Processes
    retries : int
    done : callable
        Called with the index of each finished part.

    Raises
    ------
    UserError
        For bad data, for a part that fails more than `retries` times, and if the executor accepts no more work.
    """
    max_running = 2 * executor.workers if isinstance(executor, Processes) else len(parts)
    own = isinstance(executor, Processes)
    todo, suspects = deque(parts), deque[int]()
    failures, run = dict.fromkeys(parts, 0), uuid.uuid4().hex
    running: dict[Future[Any], int] = {}
    finished: SimpleQueue[Future[Any]] = SimpleQueue()

    def submit(i: int) -> None:
        try:
            future = executor.submit(attempt, job, parts[i], f"{run} {failures[i]}")
        except RuntimeError as e:  # broken or shut down
            raise _lost(running, e) from e
        running[future] = i
        future.add_done_callback(finished.put)

    while todo or suspects or running:
        if suspects:
            if not running:
                submit(suspects.popleft())
        else:
            while todo and len(running) < max_running:
                submit(todo.popleft())
        alone = len(running) == 1
        future = finished.get()
        i = running.pop(future)
        try:
            error = future.exception()
        except CancelledError as e:  # dask cancels its futures when the scheduler dies
            raise _lost(running, e) from e
        if error is None:
            done(i)
            continue
        if isinstance(error, UserError):
            _cancel(running)
            raise UserError(f"part {i}: {error}") from None
        died = own and isinstance(error, BrokenExecutor)
        failures[i] += alone or not died
        if failures[i] > retries or (not own and isinstance(error, BrokenExecutor)):
            _cancel(running)
            what = "its process died" if died else explain(error)
            raise UserError(f"part {i} ({parts[i].path}): failed {failures[i]} times: {what}") from error
        (suspects if died else todo).append(i)


def _lost(running: Iterable[Future[Any]], e: Exception) -> UserError:
    _cancel(running)
    return UserError(f"the executor was lost: {one_line(e) or 'running parts were cancelled'}")


def _cancel(running: Iterable[Future[Any]]) -> None:
    for future in running:
        future.cancel()
