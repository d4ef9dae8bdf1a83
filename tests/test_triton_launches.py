"""Launches that skip Triton's search: what is launched is what the kernel itself would launch."""

import pytest
import torch

from sjlt import Sketch
from sjlt.backends import triton_launches
from sjlt.backends.triton_launches import kind, run


class Kernel:
    """Stands for a compiled kernel's source: `searched` are launches through it, `launched` those that skip it."""

    __name__ = "Kernel of tests"
    arg_names = ("x", "n", "BLOCK", "EVEN")

    def __init__(self):
        self.searched, self.launched = [], []

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.searched.append((grid, arguments, constants))
            return Compiled(self, constants)

        return launch


class Compiled:
    def __init__(self, kernel, constants):
        self.kernel, self.constants = kernel, constants

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.launched.append((grid, arguments, self.constants))


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    monkeypatch.setattr(triton_launches, "_compiled", {})


def constants(block=64):
    return {"num_warps": 8, "EVEN": True, "BLOCK": block}  # options may stand anywhere, constants in any order


def test_the_second_launch_skips_the_search():
    kernel = Kernel()
    run(kernel, (3, 1, 1), 0, ("x", 7), "key", constants)
    run(kernel, (5, 1, 1), 0, ("y", 9), "key", lambda: pytest.fail("asked for again"))
    assert kernel.searched == [((3, 1, 1), ("x", 7), constants())]
    assert kernel.launched == [((5, 1, 1), ("y", 9, 64, True), constants())]


def test_what_differs_is_searched_for():
    kernel = Kernel()
    for device, key, block in ((0, "a", 64), (0, "b", 128), (1, "a", 256)):
        run(kernel, (1, 1, 1), device, ("x", 7), key, lambda block=block: constants(block))
    assert [options["BLOCK"] for _, _, options in kernel.searched] == [64, 128, 256]
    run(kernel, (1, 1, 1), 1, ("x", 7), "a", constants)
    assert [arguments[2] for _, arguments, _ in kernel.launched] == [256]


def test_kinds_of_tensors():
    x = torch.empty(32)
    assert x.data_ptr() % 16 == 0
    assert kind(x) == kind(x[4:]) != kind(x[1:])
    assert kind(x) != kind(x.to(torch.bfloat16))


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(triton_launches, "MOST_COMPILED", 3)
    kernel = Kernel()
    for key in range(10):
        run(kernel, (1, 1, 1), 0, ("x", 7), key, constants)
        assert 0 < len(triton_launches._compiled) <= 3
    run(kernel, (1, 1, 1), 0, ("x", 7), 9, lambda: pytest.fail("forgotten"))


@pytest.mark.gpu
@pytest.mark.parametrize("law", [{"nnz": 4}, {"density": 0.1}])
@pytest.mark.parametrize(("n", "k"), [(20, 100), (70000, 256)])
def test_one_kernel_serves_all_seeds_and_slices(law, n, k):
    """(With 70000 rows and k = 256, on a GPU that has them, the kernels for Hopper.)"""
    x = torch.ones(n, 512, device="cuda")

    def products(seed, start):
        S = Sketch(1 << 33, k, seed=seed, **law)[:, start : start + 512]
        for dtype in (torch.float32, torch.bfloat16):
            S.project_adjoint(S.project(x.to(dtype)))

    products(0, 1 << 12)
    known = len(triton_launches._compiled)
    for i, seed in enumerate((1, 16, 2**31, 2**63, 2**64 - 1)):
        products(seed, 1 << 13 + 4 * i)
    assert known == len(triton_launches._compiled) > 0
