"""Fixtures for tests of torch tensors and of kernels: the device, and the backend that handles its tensors."""

import contextlib
import gc
import math
import os
from pathlib import Path

if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    # Before NumPy is imported: workers already share the CPUs.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Before CUDA is initialized: the first GPU of each worker, which most tests use, is another one.
    gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    if gpus > 1:
        turned = ((int(worker.removeprefix("gw")) + i) % gpus for i in range(gpus))
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, turned)))

import hypothesis
import pytest
import torch
from helpers import cases

if worker:
    torch.set_num_threads(1)
hypothesis.settings.register_profile("sjlt", deadline=None)  # how long an example takes depends on other processes
hypothesis.settings.load_profile("sjlt")

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    with contextlib.suppress(ImportError):
        from helpers import interpreter

        interpreter.accelerate()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """For ``pytest -n auto``: one worker per CPU, but at most 8, as each of them imports torch and Numba."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, 8)


def pytest_configure(config):
    """Let `cases.pairwise` leave out what this run would deselect."""
    cases.leaves_out_exhaustive = "not exhaustive" in config.option.markexpr


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect without Python's garbage collector, which would spend 4 s of 14 on looking at the tests again and again.

    Nor does it look at them while they run.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config, items):
    """Without a GPU, deselect the thousands of cases that need one rather than skipping each."""
    if CUDA:
        return
    kept, left_out = [], []
    for item in items:
        (left_out if item.get_closest_marker("gpu") else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


def pytest_runtest_teardown():
    """Return the memory of large tests to the GPU, which the workers of ``pytest -n`` share."""
    if CUDA and torch.cuda.memory_reserved() > 1 << 30:
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def restored_num_threads():
    """The test may set the number of threads."""
    import sjlt

    before = sjlt.get_num_threads()
    yield
    sjlt.set_num_threads(before)


@pytest.fixture
def copied_descriptors(monkeypatch):
    """Copy every descriptor that is locked, as a fork does: the child has copies of all until it calls exec."""
    import fcntl

    flock, copies = fcntl.flock, []

    def copy_and_lock(descriptor, operation):
        if operation & fcntl.LOCK_EX:
            copies.append(os.dup(descriptor))
        return flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", copy_and_lock)
    yield copies
    for copy in copies:
        os.close(copy)


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernels_on(request):
    """The device on which kernels run: CUDA or, without a GPU, the CPU in Triton's interpreter."""
    if request.param == "cuda":
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the kernels are compiled in this process")
    return "cpu"


@pytest.fixture(params=["pair", "triple"])
def parts(request):
    """Multiply fp32 data as two fp16 values, as for large products, or as three bf16 values."""
    from helpers.choices import changed_choices

    with changed_choices({"arithmetic.MIN_PAIR_ELEMENTS": 0 if request.param == "pair" else math.inf}):
        yield request.param


@pytest.fixture
def set_precision():
    """Set torch's fp32 matmul precision for one test."""
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def hopper_sizes():
    """Make products of any size eligible for the Hopper kernels."""
    from helpers.choices import changed_choices

    settings = {"hopper.MIN_ELEMENTS": 0, "hopper.MIN_VECTORS": 0, "hopper.MIN_UTILIZATION": {2: 0, 4: 0}}
    with changed_choices(settings | {"hopper.MIN_PRODUCTS": 0, "iid.MIN_PRODUCTS": 0}):
        yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """The device of a test's tensors."""
    return request.param


@pytest.fixture
def calls(monkeypatch):
    """The (x, out) of each call of a backend by the projection's operators."""
    from sjlt.torch_ops import projection, views

    made, matrices, arrays, columns = [], views.matrices, views.arrays, projection._multiply_columns

    def recorded(x, out, axis):
        for pair in matrices(x, out, axis):
            made.append(pair)
            yield pair

    def recorded_arrays(x, out, axis):
        if x.ndim <= 2:  # of others, arrays are made of matrices
            made.extend(matrices(x, out, axis))
        return arrays(x, out, axis)

    def recorded_columns(function, spec, x, out, accumulate):
        made.append((x.t(), out.t()))
        columns(function, spec, x, out, accumulate)

    monkeypatch.setattr(views, "matrices", recorded)
    monkeypatch.setattr(views, "arrays", recorded_arrays)
    monkeypatch.setattr(projection, "_multiply_columns", recorded_columns)
    return made
