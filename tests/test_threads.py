"""Results are bitwise independent of threads and batches; concurrent callers; forks and spawned processes."""

import json
import multiprocessing
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.cases import exhaustive_except
from numba.core.compiler_lock import global_compiler_lock

import sjlt
from sjlt import Sketch
from sjlt.backends.cpu import jit

pytestmark = pytest.mark.usefixtures("restored_num_threads")

# Sums in one block of features and in many; many components; more features than one table or task holds.
WIDE = Sketch(70_000, 64, nnz=63)
SKETCHES = [Sketch(3000, 100, nnz=3), Sketch(5000, 3, nnz=2), Sketch(200, 5000, nnz=7), WIDE]
each_sketch = pytest.mark.parametrize("S", SKETCHES, ids=repr)
N = 75  # rows: two full tiles and a partial one for any power of two from 8 to 64


def normal(shape, dtype="float32", seed=0):
    """Values whose sums depend on the order of the terms."""
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def make(S, container):
    """(function, data rows) that project in the given container, or apply the adjoint."""
    kind, _, dtype = container.partition(" ")
    if kind == "adjoint":
        return lambda y: y @ S, normal((N, S.n_components), dtype)
    if kind in ("C", "F"):
        return lambda x: x @ S.T, np.asarray(normal((N, S.n_features), dtype), order=kind)
    keep = np.random.default_rng(1).random((N, S.n_features)) < (0.2 if S.n_features < 10_000 else 0.003)
    x = sp.csr_array(normal((N, S.n_features), dtype) * keep).asformat(kind.removesuffix("->csr"))
    if kind.endswith("->csr"):
        return lambda x: S.project(x, dense_output=False), x
    return lambda x: x @ S.T, x


CONTAINERS = ["C float16", "C float32", "C float64", "F float32", "adjoint float16", "adjoint float32"]
CONTAINERS += ["adjoint float64", "csr float32", "csr float64", "csc float32", "csc float64", "csr->csr float32"]
each_case = pytest.mark.parametrize(
    ("S", "container"),
    [(S, c) for S in SKETCHES for c in CONTAINERS if S is not WIDE or (c.endswith("float32") and c != "csc float32")],
    ids=str,
)


def bits(result):
    return b"".join(a.tobytes() for a in ((result.data, result.indices) if sp.issparse(result) else (result,)))


@each_case
def test_threads(S, container):
    function, x = make(S, container)
    for rows in (x, x[:2]):
        results = []
        for threads in (1, 2, 3, 5):
            sjlt.set_num_threads(threads)
            results.append(bits(function(rows)))
        assert results == results[:1] * 4


@each_case
@pytest.mark.parametrize("threads", exhaustive_except([3], [1, 3]))
def test_batches(S, container, threads):
    sjlt.set_num_threads(threads)
    function, x = make(S, container)
    whole = function(x)
    stack = sp.vstack if sp.issparse(whole) else np.concatenate
    for batch in (7, 32):
        assert bits(stack([function(x[i : i + batch]) for i in range(0, N, batch)])) == bits(whole)
    for i in range(N) if S.n_features < 10_000 else (0, 31, 32, N - 1):
        assert bits(function(x[i : i + 1])) == bits(whole[i : i + 1])
    if container.startswith(("C", "adjoint")):
        assert bits(function(x[40])) == bits(whole[40])


@each_sketch
def test_entries(S):
    results = []
    for threads in (1, 2, 3, 5):
        sjlt.set_num_threads(threads)
        results.append([a.tobytes() for a in S.entries()])
    assert results == results[:1] * 4


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("container", ["C", "F", "csr_array", "csc_array", "adjoint C", "adjoint F"])
def test_signs_of_zeros(dtype, container):
    """Half of the smallest negative number rounds to -0, anywhere in a batch and with any instructions."""
    S, is_adjoint, kind = Sketch(300, 100, nnz=4), container.startswith("adjoint"), container.split()[-1]
    product = (lambda x: x @ S) if is_adjoint else (lambda x: x @ S.T)
    x = np.zeros((300, 100 if is_adjoint else 300), dtype)
    x[:, 0] = -np.finfo(dtype).smallest_subnormal
    x = np.asarray(x, order=kind) if kind in ("C", "F") else getattr(sp, kind)(x)
    for threads in (1, 3):
        sjlt.set_num_threads(threads)
        results = [product(rows) for rows in (x, x[:1], x[4:9], x[100:133])]
        assert len({row.tobytes() for result in results for row in result}) == 1
        assert np.signbit(results[0]).any()
        assert not results[0].any()


def test_repeated_calls():
    for container in ("C float32", "csr float32", "csc float32", "adjoint float32"):
        function, x = make(SKETCHES[1], container)
        assert len({bits(function(x)) for _ in range(5)}) == 1


# --------------------------------------------------------------------------------- callers


def test_concurrent_callers():
    """Each has its own data, sketch and, occasionally, number of threads."""
    work = [make(S, container) for S in SKETCHES[:2] for container in ("C float32", "csr float32", "adjoint float32")]
    expected = [bits(function(x)) for function, x in work]
    start, wrong = threading.Barrier(len(work)), []

    def caller(i):
        function, x = work[i]
        start.wait()
        for repeat in range(8):
            sjlt.set_num_threads(1 + (i + repeat) % 4)
            if bits(function(x)) != expected[i]:
                wrong.append(i)

    callers = [threading.Thread(target=caller, args=(i,)) for i in range(len(work))]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(60)
    assert not any(thread.is_alive() for thread in callers)
    assert not wrong


def test_exception_in_one_caller_does_not_affect_others():
    sjlt.set_num_threads(3)
    function, x = make(SKETCHES[0], "C float32")
    expected = bits(function(x))
    with pytest.raises(ValueError, match="shape"):
        SKETCHES[0].project(x, out=np.empty((1, 1)))
    assert bits(function(x)) == expected


# --------------------------------------------------------------------------------- processes


def child(S, threads, queue):
    """Runs in another process; sends the bits of the results."""
    if threads:
        sjlt.set_num_threads(threads)
    x = normal((N, S.n_features))
    queue.put([bits(x @ S.T), bits(sp.csr_array(x) @ S.T), bits(normal((N, S.n_components)) @ S)])


def compiling_child(S, threads, queue):
    """`child`, without machine code in memory."""
    jit._compiled.clear()
    child(S, threads, queue)


def results_of_child(context, S, threads=3, child=child):
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(S, threads, queue), daemon=True)
    with warnings.catch_warnings():
        # Python 3.12 and later warn about any fork of a process with threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    results = receive(queue, process)
    process.join(30)
    assert process.exitcode == 0
    return results


def receive(queue, process, seconds=60):
    """Receive the child's object, which may exceed the capacity of a pipe; fail if the child hangs."""
    if not queue._reader.poll(seconds):
        process.kill()
        pytest.fail("the child hangs")
    return queue.get()


forks = pytest.mark.skipif(sys.platform != "linux", reason="the fork start method is Linux's")


@forks
@pytest.mark.parametrize("S", SKETCHES[:2], ids=repr)
def test_after_a_fork(S):
    """A forked child has none of the pool's threads; the parent's pool keeps working."""
    sjlt.set_num_threads(3)
    x = normal((N, S.n_features))
    expected = [bits(x @ S.T), bits(sp.csr_array(x) @ S.T), bits(normal((N, S.n_components)) @ S)]
    for threads in (3, 5, None):
        assert results_of_child(multiprocessing.get_context("fork"), S, threads) == expected
    assert bits(x @ S.T) == expected[0]


@forks
def test_fork_while_others_project():
    S, stop = SKETCHES[0], threading.Event()
    sjlt.set_num_threads(3)
    x = normal((N, S.n_features))
    expected = [bits(x @ S.T), bits(sp.csr_array(x) @ S.T), bits(normal((N, S.n_components)) @ S)]

    def keep_busy():
        while not stop.is_set():
            x @ S.T

    busy = [threading.Thread(target=keep_busy) for _ in range(2)]
    for thread in busy:
        thread.start()
    try:
        for _ in range(5):
            assert results_of_child(multiprocessing.get_context("fork"), S) == expected
    finally:
        stop.set()
        for thread in busy:
            thread.join()


@forks
def test_fork_while_another_thread_compiles():
    """The child would otherwise inherit the compiler's lock and never acquire it."""
    S, held = SKETCHES[1], threading.Event()
    x = normal((N, S.n_features))
    expected = [bits(x @ S.T), bits(sp.csr_array(x) @ S.T), bits(normal((N, S.n_components)) @ S)]

    def compile_for_a_while():
        with global_compiler_lock:
            held.set()
            time.sleep(1)

    compiling = threading.Thread(target=compile_for_a_while)
    compiling.start()
    assert held.wait(30)
    try:
        assert results_of_child(multiprocessing.get_context("fork"), S, child=compiling_child) == expected
    finally:
        compiling.join()
    # Both processes have released the lock.
    other = threading.Thread(target=compile_for_a_while, daemon=True)
    other.start()
    other.join(30)
    assert not other.is_alive()


FORKS_DURING_FIRST_CALL = """
import os, signal, sys, threading, time
import numpy as np, sjlt

S, x, children = sjlt.Sketch(300, 40), np.ones((3, 300), np.float32), []
first = threading.Thread(target=lambda: x @ S.T)
first.start()
while "sjlt.backends.cpu.jit" not in sys.modules:  # its import, and that of Numba, have begun
    time.sleep(0.001)
while first.is_alive() and len(children) < 25:
    pid = os.fork()
    if pid == 0:
        signal.alarm(100)
        os._exit(0 if (x @ S.T).shape == (3, 40) else 1)
    children.append(pid)
    time.sleep(0.01)
first.join()
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children])
"""


@forks
@pytest.mark.exhaustive
def test_forks_during_the_first_call_of_another_thread():
    """A child would otherwise inherit a partially imported module and its import lock, held forever."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS_DURING_FIRST_CALL], capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr
    exit_codes = json.loads(result.stdout)
    assert exit_codes == [0] * len(exit_codes)
    assert exit_codes


def test_spawned_process():
    S = SKETCHES[1]
    x = normal((N, S.n_features))
    expected = [bits(x @ S.T), bits(sp.csr_array(x) @ S.T), bits(normal((N, S.n_components)) @ S)]
    assert results_of_child(multiprocessing.get_context("spawn"), S) == expected


# --------------------------------------------------------------------------------- number of threads


@pytest.mark.parametrize("dtype", ["int64", "uint8"])
def test_numpy_integers_as_thread_counts(dtype):
    sjlt.set_num_threads(np.dtype(dtype).type(2))
    assert type(sjlt.get_num_threads()) is int
    assert sjlt.get_num_threads() == 2


@pytest.mark.parametrize("n", [0, -1, 2**16 + 1, 2**70, 1.0, "2", None, True])
def test_invalid_thread_counts(n):
    before = sjlt.get_num_threads()
    with pytest.raises(ValueError, match=r"integer from 1 to 65536, got"):
        sjlt.set_num_threads(n)
    assert sjlt.get_num_threads() == before


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SJLT_NUM_THREADS": str(2**70), "OMP_NUM_THREADS": "6"}, 6),
        ({"SJLT_NUM_THREADS": "\u00b2", "OMP_NUM_THREADS": "6"}, 6),
        ({"SJLT_NUM_THREADS": "7", "NUMBA_NUM_THREADS": "5", "OMP_NUM_THREADS": "6"}, 7),
        ({"NUMBA_NUM_THREADS": "5", "OMP_NUM_THREADS": "6"}, 5),
        ({"OMP_NUM_THREADS": "6"}, 6),
        ({"SJLT_NUM_THREADS": "many", "OMP_NUM_THREADS": "6"}, 6),
        ({"SJLT_NUM_THREADS": "0", "OMP_NUM_THREADS": "6"}, 6),
    ],
)
def test_number_of_threads_from_the_environment(monkeypatch, environment, expected):
    monkeypatch.setattr("sjlt.threads._num_threads", None)
    for name in ("SJLT_NUM_THREADS", "NUMBA_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    assert sjlt.get_num_threads() >= 1
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert sjlt.get_num_threads() == expected
    sjlt.set_num_threads(2)
    assert sjlt.get_num_threads() == 2
