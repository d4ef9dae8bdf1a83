"""Threads for CPU work: their number, and a pool that supports forks and concurrent callers.

Kernels release the interpreter lock, so ordinary threads run them in parallel. All callers in a process share one pool;
a forked child starts without a pool and creates its own. (GNU OpenMP aborts in a forked child, and Numba's workqueue
does not support concurrent callers, so neither is used.)
"""

from __future__ import annotations

import contextlib
import importlib
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_ENVIRONMENT = ("SJLT_NUM_THREADS", "NUMBA_NUM_THREADS", "OMP_NUM_THREADS")
MAX_THREADS = 1 << 16

_num_threads: int | None = None
_pool: ThreadPoolExecutor | None = None
_pool_size = 0
_lock = threading.Lock()


def get_num_threads() -> int:
    """Return the number of threads used for work on the CPU. Results do not depend on it.

    Returns
    -------
    int
        The number last set by `set_num_threads` in this process. If there is none, the value of the first of the
        environment variables ``SJLT_NUM_THREADS``, ``NUMBA_NUM_THREADS`` and ``OMP_NUM_THREADS`` that is an integer
        from 1 to 65536 (joblib sets the last two in its workers); otherwise the number of CPUs available to this
        process.

    Examples
    --------
    >>> import sjlt
    >>> sjlt.get_num_threads() >= 1
    True
    """
    if _num_threads is not None:
        return _num_threads
    for name in _ENVIRONMENT:
        value = os.environ.get(name, "")
        if value.isdecimal() and 1 <= int(value) <= MAX_THREADS:
            return int(value)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_num_threads(n: int) -> None:
    """Set the number of threads used for work on the CPU in this process. Results do not depend on it.

    Calls that are already running keep their number of threads.

    Parameters
    ----------
    n : int
        From 1 to 65536.

    Raises
    ------
    ValueError
        If `n` is not an integer in this range.

    Examples
    --------
    >>> import sjlt
    >>> sjlt.set_num_threads(sjlt.get_num_threads())
    """
    global _num_threads
    try:
        number = 0 if isinstance(n, bool) else operator.index(n)
    except TypeError:
        number = 0
    if not 1 <= number <= MAX_THREADS:
        raise ValueError(f"the number of threads must be an integer from 1 to {MAX_THREADS}, got {n!r}")
    _num_threads = number


def run(task: Callable[..., Any], arguments: Iterable[tuple[Any, ...]], workers: int) -> None:
    """Call ``task(*a)`` for each a in `arguments` on at most `workers` threads, and return when all calls have ended.

    A long task should be a generator function: it may be stopped at each ``yield``. After an exception, or an interrupt
    of the caller, no other task and no other step of a task starts. Steps that are running are waited for, because they
    write to the caller's arrays; then the exception is raised. A task must not call `run`.
    """
    todo = list(arguments)
    workers = min(workers, len(todo))
    if workers <= 1:
        for a in todo:
            for _ in task(*a) or ():
                pass
        return
    todo.reverse()  # tasks are taken from the end
    working, failures, changed = 0, list[BaseException](), threading.Condition()

    def work() -> None:
        while not failures:
            try:
                a = todo.pop()  # atomic
            except IndexError:
                return
            for _ in task(*a) or ():
                if failures:
                    return

    def work_in_pool() -> None:
        nonlocal working
        with changed:
            working += 1
        try:
            work()
        except BaseException as failure:
            fail(failure)
        finally:
            with changed:
                working -= 1
                changed.notify_all()

    def fail(failure: BaseException) -> None:
        failures.append(failure)
        todo.clear()

    try:
        with contextlib.suppress(RuntimeError):  # no thread can start: too many, or the interpreter is exiting
            executor = _executor(workers - 1)
            for _ in range(workers - 1):
                executor.submit(work_in_pool)  # the pool may run it even if this raises
        work()
    except BaseException as failure:
        fail(failure)
    # No task is left: a `work_in_pool` that starts only now, after those of another caller, returns at once.
    while True:
        try:
            with changed:
                changed.wait_for(lambda: working == 0)
            break
        except BaseException as failure:  # an interrupt; other threads are still writing to the caller's arrays
            fail(failure)
    if failures:
        raise failures[0]


def _executor(size: int) -> ThreadPoolExecutor:
    """The pool of the process, with at least `size` threads. A smaller pool is replaced; it ends after its callers."""
    global _pool, _pool_size
    with _lock:
        if _pool is None or _pool_size < size:
            _pool, _pool_size = ThreadPoolExecutor(size, thread_name_prefix="sjlt"), size
        return _pool


# Locks that a fork must acquire, so that the child does not inherit them locked. Other modules append theirs.
fork_locks: list[Any] = []


def _importing() -> list[str]:
    """The modules of this package whose import has not finished."""
    ours = [(name, module) for name, module in sys.modules.items() if name.partition(".")[0] == __package__]
    return [name for name, module in ours if getattr(module.__spec__, "_initializing", False)]


def _before_fork() -> None:
    """Wait until no other thread imports a module of this package or holds a lock; the child would deadlock.

    An import may need the locks, so none is held while waiting for one.
    """
    for attempt in range(8):  # not forever: an import by this thread itself does not finish here
        for name in _importing():
            with contextlib.suppress(Exception):  # the import failed; the other thread raises the exception
                importlib.import_module(name)
        for lock in fork_locks:
            lock.acquire()
        if attempt == 7 or not _importing():
            return
        _after_fork_in_parent()


def _after_fork_in_parent() -> None:
    for lock in fork_locks:
        lock.release()


def _after_fork_in_child() -> None:
    global _pool, _lock
    _pool = None  # its threads did not survive the fork
    _lock = threading.Lock()
    _after_fork_in_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
