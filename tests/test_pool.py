"""The thread pool under stress: threads that cannot be started or are busy, failing tasks, interpreter exit."""

import itertools
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from sjlt import threads

LONG = 30  # seconds, for what should be immediate


@pytest.fixture(autouse=True)
def _pool_of_its_own(monkeypatch):
    """A pool without threads; the shared pool is restored afterwards."""
    monkeypatch.setattr(threads, "_pool", None)
    monkeypatch.setattr(threads, "_pool_size", 0)


class Log:
    """The tasks that began and those that ended, in order."""

    def __init__(self):
        self.begun, self.ended = [], []

    def task(self, i):
        self.begun.append(i)
        time.sleep(0.01)
        self.ended.append(i)


def in_thread(function, *arguments):
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


# --------------------------------------------------------------------------------- threads that cannot be started


def fail_from(monkeypatch, function, nth, applies=lambda self: True):
    """Make a method fail from its nth call on, as when the system is out of threads."""
    owner, name = function
    original, calls = getattr(owner, name), itertools.count(1)

    def limited(self, *arguments, **options):
        if applies(self) and next(calls) >= nth:
            raise RuntimeError("can't start new thread")
        return original(self, *arguments, **options)

    monkeypatch.setattr(owner, name, limited)


def is_pool_thread(thread):
    return thread.name.startswith("sjlt")


FAILURES = {
    "submit": lambda m, nth: fail_from(m, (ThreadPoolExecutor, "submit"), nth),
    "start": lambda m, nth: fail_from(m, (threading.Thread, "start"), nth, is_pool_thread),
}
each_failure = pytest.mark.parametrize("failure", FAILURES)


@each_failure
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_all_tasks_run_once_on_the_available_threads(monkeypatch, failure, nth):
    FAILURES[failure](monkeypatch, nth)
    for _ in range(3):
        log = Log()
        threads.run(log.task, [(i,) for i in range(20)], 4)
        assert sorted(log.begun) == sorted(log.ended) == list(range(20))


@each_failure
@pytest.mark.parametrize("nth", [1, 2])
def test_failing_task_when_threads_cannot_be_started(monkeypatch, failure, nth):
    FAILURES[failure](monkeypatch, nth)
    log = Log()

    def task(i):
        if i == 3:
            raise LookupError("task 3")
        log.task(i)

    with pytest.raises(LookupError, match="task 3"):
        threads.run(task, [(i,) for i in range(20)], 4)
    assert sorted(log.begun) == sorted(log.ended)


def test_call_returns_after_its_last_task(monkeypatch):
    """Tasks whose thread cannot be started stay in the pool's queue, where another caller's thread may run them."""
    FAILURES["start"](monkeypatch, 2)
    leave = threading.Event()
    busy = threading.Semaphore(0)

    def occupy():
        busy.release()
        leave.wait(LONG)

    other = in_thread(threads.run, occupy, [()] * 3, 3)  # occupies one pool thread and its own
    for _ in range(2):
        assert busy.acquire(timeout=LONG)

    began = [threading.Event(), threading.Event()]
    go_on = [threading.Event(), threading.Event()]
    order, ended, ended_at_return = itertools.count(), [], []

    def task():
        i = next(order)
        began[i].set()
        go_on[i].wait(LONG)
        ended.append(i)

    def caller():
        threads.run(task, [()] * 2, 3)
        ended_at_return.append(list(ended))

    calling = in_thread(caller)
    assert began[0].wait(LONG)
    leave.set()  # the pool thread becomes free
    began[1].wait(1)  # set only if that thread runs the second task
    go_on[0].set()
    calling.join(0.3)
    go_on[1].set()
    calling.join(LONG)
    other.join(LONG)
    assert ended_at_return == [[0, 1]]


# --------------------------------------------------------------------------------- tasks that fail


def test_no_task_runs_after_an_exception():
    log = Log()

    def task(i):
        if i == 5:
            raise LookupError("task 5")
        log.task(i)

    for workers in (1, 2, 4):
        with pytest.raises(LookupError, match="task 5"):
            threads.run(task, [(i,) for i in range(100)], workers)
        begun, ended = list(log.begun), list(log.ended)
        time.sleep(0.05)
        assert len(begun) < 100
        assert sorted(begun) == sorted(ended)
        assert log.begun == begun


@pytest.mark.parametrize("where", ["caller", "worker"])
def test_exceptions_of_any_thread_are_raised(where):
    caller, both = threading.current_thread(), threading.Barrier(2)

    def task():
        both.wait(LONG)
        if (threading.current_thread() is caller) == (where == "caller"):
            raise LookupError(where)

    with pytest.raises(LookupError, match=where):
        threads.run(task, [()] * 2, 2)


# --------------------------------------------------------------------------------- interrupts


@pytest.mark.parametrize("workers", [1, 3])
def test_no_step_starts_after_an_exception(workers):
    steps = []

    def task(i):
        for step in range(1000):
            steps.append((i, step))
            if (i, step) == (0, 3):
                raise LookupError("step 3")
            time.sleep(0.001)
            yield

    with pytest.raises(LookupError, match="step 3"):
        threads.run(task, [(i,) for i in range(3)], workers)
    made = len(steps)
    time.sleep(0.05)
    assert len(steps) == made < 100


INTERRUPTED = """
import signal, sys, threading, time
import numpy as np, scipy.sparse as sp, sjlt
from sjlt import Sketch

function, x = CASE
sjlt.set_num_threads(int(sys.argv[1]))
few = x[:, :5000]  # more entries than sketches whose lists are kept have: the same kernel
began = []

small = Sketch(5000, function.n_components, nnz=function.nnz, density=function.density)
small.project(few)  # compiles
timer = threading.Timer(1.0, lambda: (began.append(time.perf_counter()), signal.pthread_kill(MAIN, signal.SIGINT)))
MAIN = threading.main_thread().ident
timer.start()
try:
    function.project(x)
    print("finished")
except KeyboardInterrupt:
    print(time.perf_counter() - began[0])
"""


@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_interrupt_ends_a_call(n):
    """Half a second of work, plus the delays of a busy machine. (`test_interrupts` measures the work.)"""
    case = "Sketch(2**31, 1000, nnz=8), np.broadcast_to(np.float32(1), (500, 2**31))"
    code = INTERRUPTED.replace("CASE", case)
    result = subprocess.run([sys.executable, "-c", code, str(n)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 5


# --------------------------------------------------------------------------------- busy threads


def test_call_does_not_wait_for_other_callers_work():
    leave, busy = threading.Event(), threading.Semaphore(0)

    def occupy():
        busy.release()
        leave.wait(4 * LONG)

    big = in_thread(threads.run, occupy, [()] * 3, 3)
    try:
        for _ in range(3):
            assert busy.acquire(timeout=LONG), "the pool has two threads"
        log = Log()
        small = in_thread(threads.run, log.task, [(i,) for i in range(7)], 3)
        small.join(LONG)
        assert not small.is_alive(), "waits for the other caller"
        assert sorted(log.ended) == list(range(7))
    finally:
        leave.set()
        big.join(LONG)
    assert not big.is_alive()
    threads.run(log.task, [(i,) for i in range(7, 12)], 3)
    assert sorted(log.ended) == list(range(12))


# --------------------------------------------------------------------------------- interpreter exit

LATE = """
import atexit, threading, time
from concurrent.futures import ThreadPoolExecutor
import numpy as np, sjlt

S = sjlt.Sketch(3000, 100, nnz=4)
x = np.random.default_rng(0).normal(size=(200, 3000))
sjlt.set_num_threads(3)
expected = x @ S.T

def is_right(word):
    for threads in (3, 5):  # with the pool there is, and with a larger one
        sjlt.set_num_threads(threads)
        assert (x @ S.T == expected).all()
    print(word, flush=True)

def late():
    executor = ThreadPoolExecutor(1)
    try:
        while True:
            executor.submit(int)
            time.sleep(0.01)
    except RuntimeError:  # the main thread has ended: executors take no more work
        is_right("thread")

atexit.register(is_right, "atexit")
threading.Thread(target=late).start()
"""


@pytest.mark.exhaustive
def test_call_during_interpreter_exit():
    result = subprocess.run([sys.executable, "-W", "error", "-c", LATE], capture_output=True, text=True, timeout=120)
    assert result.stdout.split() == ["thread", "atexit"], result.stderr
    assert result.returncode == 0
    assert not result.stderr
