"""Launches that bypass Triton's lookup run the kernel that Triton would have selected."""

import inspect
import os
import random
import subprocess
import sys
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import triton
from helpers.compilation import source_of
from triton.compiler import CompiledKernel
from triton.runtime import _async_compile

from sjlt import Sketch
from sjlt.backends.triton import launcher as triton_launches
from sjlt.backends.triton import prepared
from sjlt.backends.triton.device import GLUON_VERSIONS
from sjlt.backends.triton.launcher import Launch, compiled_together, kind, run


class Kernel:
    """Stand-in for a kernel's source: `searched` are launches through it, `launched` those that bypass it."""

    __name__ = "Kernel of tests"
    arg_names = ("x", "n", "BLOCK", "UNMASKED")

    def __init__(self):
        self.searched, self.launched, self.compiled = [], [], []

    def warmup(self, *arguments, grid, **constants):
        """Compile as Triton does within its AsyncCompileMode."""
        mode = _async_compile.active_mode.get()
        compiled = SimpleNamespace(src="source", metadata="metadata")
        return mode.submit(arguments, lambda: compiled, lambda found: self.compiled.append((arguments, constants)))

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.searched.append((grid, arguments, constants))
            return Compiled(self, constants)

        return launch


class Compiled:
    """Stand-in for a compiled kernel. Calls that a profiler should see are marked "with hooks"."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel, constants):
        self.kernel, self.constants = kernel, constants

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.launched.append(("with hooks", grid, arguments, self.constants))

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        assert (function, metadata) == ("function", "metadata")
        assert launch_metadata is enter is leave is None
        self.kernel.launched.append((stream, (x, y, z), arguments, self.constants))


@pytest.fixture(autouse=True)
def nothing_cached(monkeypatch, request):
    """Nothing is compiled yet; except in GPU tests, the current stream of device i is "stream i"."""
    monkeypatch.setattr(triton_launches, "_compiled", {})
    if request.node.get_closest_marker("gpu"):
        return
    active = SimpleNamespace(get_current_stream=lambda device: f"stream {device}")
    monkeypatch.setattr(triton_launches, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(triton_launches, "DIRECT", True)


def constants(block=64):
    return {"num_warps": 8, "UNMASKED": True, "BLOCK": block}  # options may be given anywhere, constants in any order


def passed(block=64):
    return {**constants(block), **triton_launches.OPTIONS}


def test_second_launch_bypasses_the_lookup():
    kernel = Kernel()
    run(kernel, (3, 1, 1), 0, ("x", 7), "key", constants)
    run(kernel, (5, 1, 1), 0, ("y", 9), "key", lambda: pytest.fail("constants are computed again"))
    assert kernel.searched == [((3, 1, 1), ("x", 7), passed())]
    assert kernel.launched == [("stream 0", (5, 1, 1), ("y", 9, 64, True), passed())]


def test_differences_use_the_lookup():
    kernel = Kernel()
    for device, key, block in ((0, "a", 64), (0, "b", 128), (1, "a", 256)):
        run(kernel, (1, 1, 1), device, ("x", 7), key, lambda block=block: constants(block))
    assert [options["BLOCK"] for _, _, options in kernel.searched] == [64, 128, 256]
    run(kernel, (1, 1, 1), 1, ("x", 7), "a", constants)
    assert [(stream, arguments[2]) for stream, _, arguments, _ in kernel.launched] == [("stream 1", 256)]


def test_tensor_kinds():
    x = torch.empty(32)
    assert x.data_ptr() % 16 == 0
    assert kind(x) == kind(x[4:]) != kind(x[1:])
    assert kind(x) != kind(x.to(torch.bfloat16))


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(triton_launches, "MAX_KEPT", 3)
    kernel = Kernel()
    for key in range(10):
        run(kernel, (1, 1, 1), 0, ("x", 7), key, constants)
        assert 0 < len(triton_launches._compiled) <= 3
    run(kernel, (1, 1, 1), 0, ("x", 7), 9, lambda: pytest.fail("forgotten"))


def test_prepared_launches():
    """The first call uses the lookup; the next ones pass addresses and previously known integers."""
    kernel, x, y = Kernel(), torch.empty(3), torch.empty(3)
    kernel.arg_names = ("x", "y", "before", "number", "after", "BLOCK", "UNMASKED")
    launch = Launch(kernel, (3, 1, 1), 1, ("before",), ("after",), "key", constants)
    launch((x, y), 7)
    assert kernel.searched == [((3, 1, 1), (x, y, "before", 7, "after"), passed())]
    launch((y, x), 8)
    other = Launch(kernel, (5, 1, 1), 1, ("other",), ("other",), "key", constants)
    other((x, y), 9)  # another shape finds the kernel by its key
    other((x, y), 9)
    addresses = x.data_ptr(), y.data_ptr()
    assert [call[:3] for call in kernel.launched] == [
        ("stream 1", (3, 1, 1), (*addresses[::-1], "before", 8, "after", 64, True)),
        ("stream 1", (5, 1, 1), (x, y, "other", 9, "other", 64, True)),
        ("stream 1", (5, 1, 1), (*addresses, "other", 9, "other", 64, True)),
    ]
    assert len(kernel.searched) == 1


def test_launches_by_address():
    """A caller that knows addresses creates tensors only for the first launch."""
    kernel, x = Kernel(), torch.empty(3)
    launch = Launch(kernel, (3, 1, 1), 1, (), ("after",), "key", constants)
    assert not launch.start((x.data_ptr(),), 7)
    assert kernel.searched == kernel.launched == []
    kernel.arg_names = ("x", "number", "after", "BLOCK", "UNMASKED")
    launch.search((x,), 7)
    assert kernel.searched == [((3, 1, 1), (x, 7, "after"), passed())]
    assert launch.start((x.data_ptr() + 4,), 8)
    assert kernel.launched == [("stream 1", (3, 1, 1), (x.data_ptr() + 4, 8, "after", 64, True), passed())]


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_called(name, monkeypatch):
    """While a hook is set, as profilers do, launches go through Triton; hooks may be set at any time."""
    kernel = Kernel()
    for _ in range(2):
        run(kernel, (3, 1, 1), 0, ("x", 7), "key", constants)
    monkeypatch.setattr(triton.knobs.runtime, name, lambda metadata: None)
    run(kernel, (3, 1, 1), 0, ("x", 7), "key", constants)
    assert [call[0] for call in kernel.launched] == ["stream 0", "with hooks"]


def test_other_versions_launch_through_triton(monkeypatch):
    monkeypatch.setattr(triton_launches, "DIRECT", False)
    kernel = Kernel()
    for _ in range(2):
        run(kernel, (3, 1, 1), 0, ("x", 7), "key", constants)
    assert kernel.launched == [("with hooks", (3, 1, 1), ("x", 7, 64, True), passed())]


def test_interface_of_tested_versions():
    """Without a GPU: the arguments that a compiled kernel passes to `run`, according to Triton's source."""
    if not triton.__version__.startswith(("3.6.", "3.7.")):
        pytest.skip("launches go through Triton in this version")
    source = inspect.getsource(CompiledKernel.__getitem__)
    expected = (
        "self.run(grid[0], grid[1], grid[2], stream, self.function, self.packed_metadata, launch_metadata, "
        "knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *args)"
    )
    assert "".join(expected.split()) in "".join(source.split())


def test_kernels_of_a_new_call_are_compiled_together(monkeypatch):
    """Each once, in threads that also create what launches it, and only if there are several new ones."""
    created = []
    active = SimpleNamespace(launcher_cls=lambda *given: created.append((threading.get_ident(), *given)))
    monkeypatch.setattr(triton_launches, "driver", SimpleNamespace(active=active))
    kernel = Kernel()

    def launch(*keys):
        for key in keys:
            run(kernel, (1, 1, 1), 0, (key, 7), key, constants)

    with compiled_together():
        launch("a", "b", "b")
        assert kernel.compiled == []
    assert sorted(kernel.compiled) == [(("a", 7), passed()), (("b", 7), passed())]
    assert [given for _, *given in created] == [["source", "metadata"]] * 2
    assert threading.get_ident() not in {thread for thread, *_ in created}
    assert kernel.searched == kernel.launched == []
    with compiled_together():
        launch("c")
    launch("a", "b")
    with compiled_together():
        launch("a", "b", "c")
    with triton.AsyncCompileMode(None), compiled_together():  # the caller's own executor compiles what is launched
        launch("c", "d")
    assert len(kernel.compiled) == len(kernel.searched) == 2


def test_errors_of_the_compiler_are_raised(monkeypatch):
    """And leave nothing behind that would affect other kernels."""
    kernel = Kernel()
    monkeypatch.setattr(triton_launches, "driver", SimpleNamespace(active=SimpleNamespace(launcher_cls=None)))

    def launch():
        with compiled_together():
            for key in "ab":
                run(kernel, (1, 1, 1), 0, (key, 7), key, constants)

    for _ in range(2):
        with pytest.raises(TypeError, match="not callable"):
            launch()
    assert _async_compile.active_mode.get() is None


def prepare(calls, spec, data, out, accumulate):
    calls.append(spec)
    return lambda spec, data, out: out.fill_(spec.seed)


def test_products_are_prepared_once_for_all_seeds(monkeypatch):
    monkeypatch.setattr(prepared, "_prepared", {})
    monkeypatch.setattr(triton_launches, "MAX_KEPT", 4)
    calls, memory = [], torch.empty(300)
    law = partial(prepare, calls)
    x, out = torch.empty(4, 50), torch.empty(4, 16)
    for seed in (1, 2, 3):
        prepared.multiply(law, Sketch(50, 16, seed=seed).spec, x, out, False)
        assert (out == seed).all()
    assert len(calls) == 1
    spec = Sketch(50, 16).spec
    others = [
        (spec, x, out, True),
        (Sketch(100, 16)[:, 50:].spec, x, out, False),
        (Sketch(50, 16, nnz=2).spec, x, out, False),
        (Sketch(50, 16, density=0.5).spec, x, out, False),
        (spec, x[:3], out[:3], False),
        (spec, x.t().contiguous().t(), out, False),
        (spec, x, out.t().contiguous().t(), False),
        (spec, x.double(), out, False),
        (spec, x, out.double(), False),
        (spec, memory[1:201].view(4, 50), out, False),  # not aligned to 16 bytes
        (spec, x, memory[3:67].view(4, 16), False),
    ]
    for n, other in enumerate(others):
        for _ in range(2):
            prepared.multiply(law, *other)
        assert len(calls) == n + 2
        assert len(prepared._prepared) <= 4
    try:
        torch.set_float32_matmul_precision("high")
        prepared.multiply(law, *others[-1])
    finally:
        torch.set_float32_matmul_precision("highest")
    assert len(calls) == len(others) + 2


@pytest.mark.exhaustive
def test_equal_keys_mean_equal_kernels():
    """Triton would compile the same kernel for launches with equal keys. (In a separate process: see `helpers`.)"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    met = dict(line.split() for line in result.stdout.splitlines())
    kinds = ("tensor_core", "row_gather", "few_vectors")
    kernels = {f"{way}_{kind}" for way in ("project", "adjoint") for kind in kinds}
    kernels |= {"scale_vectors", "reduce_partial_sums", "multiply_iid", "dropout_flat", "dropout_tiles"}
    if triton.__version__.startswith(GLUON_VERSIONS):
        kernels |= {"encode_chunks", "project_codes_hopper"}
    assert {name for name, times in met.items() if int(times) > 20} >= kernels, "equal keys are what this is about"


def compare_launches():
    """Make calls, compare their keys with Triton's, and print how often each kernel's keys recurred."""
    from helpers.kernels import adjoint, project

    from sjlt.backends.triton import device, dropout, hopper
    from sjlt.kernels.config.product import Device
    from sjlt.laws.dropout import Rule

    seen, again, draw = {}, {}, random.Random(0)

    def compare(kernel, grid, index, arguments, key, constants):
        source, options = source_of(kernel, arguments, constants())
        compiled = str(source.signature), str(source.constants), str(source.attrs), str(options)
        name = kernel.__name__
        again[name] = again.get(name, 0) + ((name, key) in seen)
        assert seen.setdefault((name, key), compiled) == compiled, (name, key, arguments)

    for module in (triton_launches, dropout, hopper):
        module.run = compare
    for _ in range(300):
        n, d = draw.choice([1, 3, 16, 70, 512, 1 << 16, 1 << 18]), draw.choice([33, 512, 4096, 1 << 14])
        k = draw.choice([100, 128, 1024])
        law = draw.choice([{"nnz": 1}, {"nnz": 3}, {"nnz": 4}, {"nnz": 8}, {"density": 0.1}])
        dtype = draw.choice([torch.float64, torch.float32, torch.float32, torch.bfloat16])
        by_rows, add = draw.random() < 0.6, draw.random() < 0.3
        described = Device(132, 227 << 10, hopper=draw.random() < 0.5)
        device.describe = lambda _, described=described: described
        prepared._prepared.clear()
        x, y = (torch.empty((n, w) if by_rows else (w, n), dtype=dtype, device="meta") for w in (d, k))
        x, y = (x, y) if by_rows else (x.t(), y.t())
        for start in (0, 16, 37, 1 << 12, (1 << 31) - 64, 1 << 31, 1 << 32, 1 << 50):
            S = Sketch(1 << 60, k, seed=draw.choice([0, 1, 16, 2**40, 2**64 - 1]), **law)[:, start : start + d]
            project(S, x, y, add)
            adjoint(S, y, x, add)
    for _ in range(150):
        shape = draw.choice([1, 7, 64, 4096]), draw.choice([1, 30, 64, 1000])
        x = torch.empty(shape, dtype=draw.choice([torch.float32, torch.bfloat16]), device="meta")
        out, bits = torch.empty_like(x), draw.choice([8, 16, 32])
        x = draw.choice([x, torch.empty(shape[::-1], dtype=x.dtype, device="meta").t(), x[:1].expand(shape)])
        for i in (0, 1, 16, 2**31, 2**40):
            seeds = draw.choice([None, torch.empty(shape[0], dtype=torch.int64, device="meta")])
            steps = draw.choice([None, torch.empty((), dtype=draw.choice([torch.int32, torch.int64]), device="meta")])
            rule = Rule(bits, 1 + i % 200, 1.5, i, i % 2**32, i, None, seeds, steps)
            dropout.drop(rule, x, out)
            dropout.drop_add(rule, x, out, out)
    for name, times in again.items():
        print(name, times)


@pytest.mark.gpu
@pytest.mark.parametrize("law", [{"nnz": 4}, {"density": 0.1}])
@pytest.mark.parametrize(("n", "k"), [(3, 128), (20, 100), (70000, 256)])
def test_one_kernel_for_all_seeds_and_slices(law, n, k):
    """For 70000 rows and k = 256 these are the Hopper kernels, on a GPU that has them."""
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


@pytest.mark.gpu
@pytest.mark.parametrize("law", [{"nnz": 4}, {"density": 0.1}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 8, 70])
def test_slices_at_any_offset(n, dtype, law):
    """Consecutive slices of one shape: no kernel for 32-bit offsets runs those that need more."""
    x, y = (torch.ones(n, width, device="cuda", dtype=dtype) for width in (512, 256))
    rounding = 1e-6 if dtype == torch.float32 else 1e-12
    for start in (0, 1 << 12, 1 << 31, 1 << 32, 1 << 50):
        S = Sketch(1 << 60, 256, **law)[:, start : start + 512]
        dense = torch.from_numpy(S.to_scipy().toarray())
        for result, expected in ((S.project(x), dense.sum(1)), (S.project_adjoint(y), dense.sum(0))):
            assert ((result.cpu().double() - expected).norm(dim=1) <= rounding * expected.norm()).all()


if __name__ == "__main__":
    compare_launches()
