"""The threads that CPU work runs on: how many, and a pool that survives forks and concurrent callers.

Kernels release the interpreter lock, so plain threads run them side by side. One pool serves every caller in a
process; a forked child starts with none and makes its own. (GNU OpenMP dies in a forked child, and Numba's own
workqueue refuses two callers at once, so neither is used.)
"""

from __future__ import annotations

import contextlib
import operator
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_ENVIRONMENT = ("SJLT_NUM_THREADS", "NUMBA_NUM_THREADS", "OMP_NUM_THREADS")

_num_threads: int | None = None
_pool: ThreadPoolExecutor | None = None
_pool_size = 0
_lock = threading.Lock()


def get_num_threads() -> int:
    """The number of threads that CPU work uses.

    What `set_num_threads` last set in this process; before that the first of the environment variables
    ``SJLT_NUM_THREADS``, ``NUMBA_NUM_THREADS`` and ``OMP_NUM_THREADS`` that holds a positive number (joblib sets
    the last two in its workers), or else the CPUs this process may run on. Results never depend on it.
    """
    if _num_threads is not None:
        return _num_threads
    for name in _ENVIRONMENT:
        value = os.environ.get(name, "")
        if value.isdigit() and int(value) > 0:
            return int(value)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_num_threads(n: int) -> None:
    """Use `n` >= 1 threads for CPU work in this process, from the next call on. Results do not depend on it."""
    global _num_threads
    try:
        number = 0 if isinstance(n, bool) else operator.index(n)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"the number of threads must be an integer >= 1, got {n!r}")
    _num_threads = number


def run(task: Callable[..., Any], arguments: Iterable[tuple[Any, ...]], workers: int) -> None:
    """Call ``task(*a)`` for each a of `arguments` on at most `workers` threads; return when all have ended.

    After an exception no further task starts, those under way end (they write to the caller's arrays), and the
    exception is raised. A task must not call `run`.
    """
    todo = list(arguments)
    workers = min(workers, len(todo))
    if workers <= 1:
        for a in todo:
            task(*a)
        return
    todo.reverse()
    working, failures, changed = 0, list[BaseException](), threading.Condition()

    def work() -> None:
        nonlocal working
        with changed:
            working += 1
        try:
            while True:
                try:
                    a = todo.pop()  # atomic
                except IndexError:
                    return
                task(*a)
        except BaseException as failure:
            todo.clear()
            failures.append(failure)
        finally:
            with changed:
                working -= 1
                changed.notify_all()

    with contextlib.suppress(RuntimeError):  # no thread can be started: too many, or the interpreter is ending
        executor = _executor(workers - 1)
        for _ in range(workers - 1):
            executor.submit(work)  # even where this raises, the pool may have taken it
    work()
    # No task is left. Work that begins from now on, because it waited behind another caller's, finds none.
    with changed:
        changed.wait_for(lambda: working == 0)
    if failures:
        raise failures[0]


def _executor(size: int) -> ThreadPoolExecutor:
    """The process's pool, with at least `size` threads. One that is too small ends when its callers are done."""
    global _pool, _pool_size
    with _lock:
        if _pool is None or _pool_size < size:
            _pool, _pool_size = ThreadPoolExecutor(size, thread_name_prefix="sjlt"), size
        return _pool


def _after_fork_in_child() -> None:
    global _pool, _lock
    _pool = None  # its threads did not survive the fork
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
