"""Launches that call Triton's compiled function directly pass what Triton itself would pass to it. No GPU is needed."""

import gc
import operator
import weakref
from functools import reduce
from types import SimpleNamespace

import pytest
import torch
import triton

from sjlt.backends.triton import direct as direct_launches
from sjlt.backends.triton import launcher
from sjlt.backends.triton.device import GLUON_VERSIONS

if not triton.__version__.startswith(GLUON_VERSIONS):
    pytest.skip("launches go through Triton in this version", allow_module_level=True)

from triton.backends.nvidia.driver import CudaLauncher, wrap_handle_tensordesc

from sjlt.backends.triton.descriptors import Blocks

METADATA = {"swizzle": 3, "elem_size": 4, "elem_type": 7, "block_size": [64, 32], "fp4_padded": False}
SIGNATURES = {"x": "tensordesc<fp32[64, 32],x>", "y": "tensordesc<fp32[64, 32],y>"}


class Recorder:
    """Stand-in for the compiled function: the arguments of all calls, with those of the kernel in one list."""

    def __init__(self):
        self.calls = []

    def __call__(self, *arguments):
        if triton.__version__.startswith("3.7."):
            *arguments, last = arguments
            arguments = (*arguments, *last)
        self.calls.append(tuple(arguments))


class Compiled:
    """Stand-in for a compiled kernel, which Triton's own code launches."""

    function, packed_metadata = "function", "packed metadata"

    def __init__(self, signature, metadata, scratch=0):
        self.recorder = Recorder()
        self.run = object.__new__(CudaLauncher)
        options = {"arg_annotations": "annotations", "kernel_signature": "signature", "num_ctas": 1}
        options |= {"launch_cooperative_grid": False, "launch_pdl": True}
        for which in ("global", "profile"):
            options |= {f"{which}_scratch_size": scratch, f"{which}_scratch_align": 1}
        launch = wrap_handle_tensordesc(self.recorder, signature, metadata)
        vars(self.run).update(options, launch=launch)

    def __getitem__(self, grid):
        metadata = None, None, None
        return lambda *arguments: self.run(*grid, 77, self.function, self.packed_metadata, *metadata, *arguments)


class Kernel:
    """Stand-in for a kernel's source."""

    __name__ = "Kernel of tests"

    def __init__(self, compiled, names):
        self.compiled, self.arg_names = compiled, (*names, "number", "SIZE")

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.compiled[grid](*arguments, constants["SIZE"])
            return self.compiled

        return launch


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    """Encoding a descriptor returns (and records) its description; the current stream of each device is 77."""
    encoded = []

    def encode(*description):
        encoded.append(("encoded", *map(repr, description)))
        return encoded[-1]

    utils = SimpleNamespace(fill_tma_descriptor=encode, fill_tma_descriptor_tiled=encode)
    active = SimpleNamespace(utils=utils, get_current_stream=lambda device: 77)
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    monkeypatch.setattr(launcher, "_compiled", {})
    return encoded


def blocks(offset=0, shape=(100, 48), strides=(48, 1)):
    return Blocks(torch.float32, shape, strides, (64, 32), offset)


def launched(blocks, signature, metadata=None, tensors=2, scratch=0):
    """A launch of that many tensors whose kernel is known, and the stand-in for the compiled function."""
    if metadata is None:
        metadata = [METADATA] * sum(kind.startswith("tensordesc") for kind in signature.values())
    compiled = Compiled({**signature, "number": "i64", "SIZE": "constexpr"}, metadata, scratch)
    kernel = Kernel(compiled, signature)
    launch = launcher.Launch(kernel, (5, 2, 1), 0, (), (), "key", lambda: {"SIZE": 9}, blocks)
    launch(tuple(torch.empty(0) for _ in range(tensors)), 8)
    return launch, compiled


def encoded_in(compiled):
    """The addresses of the encoded descriptors in the last call."""
    return [argument[1] for argument in compiled.recorder.calls[-1] if type(argument) is tuple]


POINTERS = {"x": "*fp32", "y": "*fp32"}
CASES = [
    ((), POINTERS),
    ((None, None), POINTERS),
    ((blocks(), blocks(shape=(7, 60), strides=(60, 1))), SIGNATURES),
    ((None, blocks()), {**POINTERS, "y": SIGNATURES["y"]}),
    ((blocks(),), {**POINTERS, "x": SIGNATURES["x"]}),
    ((blocks() + blocks(192, (99, 48)), blocks()), {"x": SIGNATURES["x"], "x1": SIGNATURES["x"], **SIGNATURES}),
]


@pytest.mark.parametrize(("given", "signature"), CASES)
def test_arguments_are_those_of_triton(given, signature, stand_ins):
    """For new and for known addresses: compared with launches by Triton's own code."""
    signature = {f"{name}{place}": kind for place, (name, kind) in enumerate(signature.items())}
    launch, compiled = launched(given, signature)
    for addresses in ((1 << 40, 1 << 41), (1 << 40, 1 << 42), (1 << 40, 1 << 41)):
        compiled.recorder.calls.clear()
        assert launch.start(addresses, 1 << 35)
        arguments = []
        for place, address in enumerate(addresses):
            each = given[place] if place < len(given) else None
            arguments += [address] if each is None else each.at(address)
        compiled[5, 2, 1](*arguments, 1 << 35, 9)
        ours, expected = compiled.recorder.calls
        assert ours == expected
        assert ours[:4] == (5, 2, 1, 77)
        assert ours[-2:] == (1 << 35, 9)
    assert len(encoded_in(compiled)) == sum(map(len, filter(None, given)))
    before = len(stand_ins)
    launch.start((1 << 40, 1 << 42), 3)
    assert len(stand_ins) == before, "these addresses are known"


def test_descriptors_of_one_tensor():
    """Eight views of one tensor are eight arguments, encoded once for each address."""
    many = reduce(operator.add, (blocks(192 * i, (100 - i, 6), (384, 1)) for i in range(8)))
    launch, compiled = launched((many,), {f"x{i}": SIGNATURES["x"] for i in range(8)}, tensors=1)
    launch.start((1 << 40,), 0)
    assert encoded_in(compiled) == [repr((1 << 40) + 192 * i) for i in range(8)]


def test_kept_descriptors_are_bounded(monkeypatch, stand_ins):
    monkeypatch.setattr(direct_launches, "MAX_ENCODED", 3)
    launch, compiled = launched((blocks(),), {"x": SIGNATURES["x"]}, tensors=1)
    (encoded,) = launch._found[-1]
    for address in range(0, 1600, 16):
        launch.start((address,), 0)
        launch.start((address,), 0)
        assert 0 < len(encoded.kept) <= 3
        assert encoded_in(compiled) == [repr(address)]
    assert len(stand_ins) == 1 + 100, "the first launch, and one for each address"


def test_no_tensor_is_kept_alive():
    launch, _ = launched((blocks(), blocks()), SIGNATURES)
    tensors = tuple(torch.empty(32) for _ in range(2))
    alive = [weakref.ref(tensor) for tensor in tensors]
    launch(tensors, 3)
    launch.search(tensors, 3)
    del tensors
    gc.collect()
    assert [tensor() for tensor in alive] == [None, None]


def test_kernels_without_descriptors_on_the_device():
    """Triton passes a pointer, sizes and strides if the kernel does not use the accelerator."""
    launch, compiled = launched((blocks(),), {"x": SIGNATURES["x"]}, metadata=[], tensors=1)
    launch.start((1 << 40,), 0)
    ours = compiled.recorder.calls[-1]
    compiled[5, 2, 1](*blocks().at(1 << 40), 0, 9)
    assert ours == compiled.recorder.calls[-1]


@pytest.mark.parametrize("why", ["hook", "scratch memory", "another version"])
def test_other_launches_go_through_triton(why, monkeypatch):
    """Triton then receives descriptors, also for known addresses."""
    given = []
    monkeypatch.setattr(CudaLauncher, "__call__", lambda self, *arguments: given.append(arguments[9:]))
    if why == "another version":
        monkeypatch.setattr(direct_launches, "_VERSION", "9.9.")
    scratch = 128 if why == "scratch memory" else 0
    launch, _ = launched((blocks(), None), {**SIGNATURES, "y": "*fp32"}, scratch=scratch)
    for _ in range(2):
        given.clear()
        if why == "hook":
            launch.start((1 << 40, 1 << 41), 6)
            assert not given, "without a hook, launches are direct"
            monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", lambda metadata: None)
        assert launch.start((1 << 40, 1 << 41), 6)
        ((descriptor, *rest),) = given
        assert descriptor.base.data_ptr() == 1 << 40
        assert (descriptor.shape, descriptor.block_shape) == ([100, 48], [64, 32])
        assert rest == [1 << 41, 6, 9]
        monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", None)
