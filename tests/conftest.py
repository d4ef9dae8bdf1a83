"""What the tests of torch tensors and of kernels share: where the tensors lie, and which backend takes them."""

import math
import os
from functools import cache
from types import SimpleNamespace

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not CUDA:
        pytest.skip("needs a CUDA device")


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernels_on(request):
    """The device whose tensors kernels take: Triton's interpreter takes a CPU's where there is no GPU."""
    if request.param == "cuda":
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the kernels are compiled in this process")
    return "cpu"


@pytest.fixture(params=["pair", "triple"])
def parts(request, monkeypatch):
    """fp32 data as two numbers in fp16, which large products take, or as three in bf16."""
    from sjlt.kernels import launch

    choose = launch.choose
    monkeypatch.setattr(launch, "PAIR_ELEMENTS", 0 if request.param == "pair" else math.inf)
    choose.cache_clear()
    yield request.param
    choose.cache_clear()


@cache
def _matrix(sketch):
    return torch.from_numpy(sketch.toarray())


def _stand_in():
    """A backend by torch.matmul with the materialised sketch, where the kernels cannot run, or take long."""

    def product(x, matrix, out, accumulate):
        assert x.ndim == out.ndim == 2
        assert x.data_ptr() is not None  # a kernel follows it
        result = x.double() @ matrix
        out.copy_(out + result if accumulate else result)

    return SimpleNamespace(
        project=lambda sketch, x, out, accumulate: product(x, _matrix(sketch).T, out, accumulate),
        adjoint=lambda sketch, y, out, accumulate: product(y, _matrix(sketch), out, accumulate),
    )


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """Where a test's tensors lie: on a GPU, and, refused no longer, on the CPU, where the backend is a stand-in."""
    from sjlt import tensors

    if request.param == "cpu":
        monkeypatch.setattr(tensors, "refuse_device", lambda x: None)
        monkeypatch.setattr(tensors, "_triton", _stand_in)
    return request.param


@pytest.fixture
def calls(device, monkeypatch):
    """The (x, out) of each call of the backend."""
    from sjlt import tensors

    made, backend = [], tensors._triton()

    def recorded(function):
        def call(sketch, x, out, accumulate):
            made.append((x, out))
            function(sketch, x, out, accumulate)

        return call

    recorder = SimpleNamespace(project=recorded(backend.project), adjoint=recorded(backend.adjoint))
    monkeypatch.setattr(tensors, "_triton", lambda: recorder)
    return made
