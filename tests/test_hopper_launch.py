"""Which products of the exact law run on the Hopper kernels, and with which launch; decided without a GPU."""

import random
from itertools import product as grid

import pytest
import torch
from helpers.choices import H200, HOPPER, all_tensors_on, exact_product

from sjlt import Sketch
from sjlt.backends.triton import exact as triton_exact
from sjlt.kernels.config import exact as config
from sjlt.kernels.config import hopper
from sjlt.kernels.config.product import ITEM_BYTES


def eligible(**changes):
    product = exact_product(device=HOPPER, **changes)
    assert not isinstance(config.choose(product._replace(plain=False)), hopper.Hopper)
    assert not isinstance(config.choose(product._replace(device=H200)), hopper.Hopper)
    return isinstance(config.choose(product), hopper.Hopper)


@pytest.mark.parametrize("adjoint", [False, True])
def test_eligible_products(adjoint):
    def is_eligible(**changes):
        return eligible(adjoint=adjoint, **changes)

    assert is_eligible()
    assert is_eligible(k=128)
    assert is_eligible(n=1 << 18, d=4096, k=512)
    assert is_eligible(n=1 << 16, d=16384, k=2048)
    assert is_eligible(d=100, k=128)
    assert is_eligible(offset=2**40 + 64)
    assert is_eligible(x_strides=(800, 1), y_strides=(260, 1))
    assert is_eligible(dtype="bfloat16") == is_eligible(dtype="float16") == (not adjoint)
    assert is_eligible(precision="high")
    assert not is_eligible(precision="medium")
    assert is_eligible(precision="medium", nnz=8) == (not adjoint)
    assert not is_eligible(dtype="float64")
    assert is_eligible(nnz=1)
    assert is_eligible(nnz=2)
    assert is_eligible(nnz=8) == (not adjoint)
    assert not is_eligible(nnz=16)
    assert not is_eligible(nnz=3)
    assert not is_eligible(k=384)
    assert not is_eligible(k=200)
    assert not is_eligible(offset=32)
    assert is_eligible(d=2**20)
    assert is_eligible(d=2**20, dtype="bfloat16") == (not adjoint)
    assert not is_eligible(d=2**30)
    assert is_eligible(d=766, x_strides=(768, 1)) == (not adjoint)
    assert not is_eligible(n=10_000)
    assert not is_eligible(n=1 << 31)
    assert is_eligible(n=1 << 20, d=32)
    assert not is_eligible(n=1 << 20, d=31, x_strides=(32, 1))
    assert not is_eligible(n=1 << 17, d=32)
    assert not is_eligible(x_strides=(770, 1))
    assert not is_eligible(x_strides=(0, 1))
    assert not is_eligible(x_strides=(760, 1))
    assert not is_eligible(x_strides=(1536, 2))
    assert not is_eligible(y_strides=(258, 1))
    assert not is_eligible(y_strides=(1, 1 << 20))
    assert not is_eligible(x_strides=(1, 1 << 20))
    assert not is_eligible(x_strides=(1 << 39, 1))


def test_idle_multiprocessors():
    """X S' of n vectors by programs of 128 vectors, of which 132 run at a time."""

    def is_eligible(n, d=4096, k=512, **changes):
        return eligible(n=n, d=d, k=k, **changes)

    assert is_eligible(128 * 33)  # 4 tiles of the sketch: 132 programs
    assert is_eligible(128 * 25, d=8000)
    assert not is_eligible(128 * 24, d=8000)
    assert not is_eligible(128 * 25, d=8000, dtype="float16")
    assert is_eligible(128 * 30, d=8000, dtype="float16")
    assert not is_eligible(128 * 35)
    assert is_eligible(128 * 50)
    assert not is_eligible(128 * 33, adjoint=True)
    assert is_eligible(128 * 132, adjoint=True)
    assert is_eligible(512, d=2**16, k=256)  # 8 output tiles, 16 splits each
    assert not is_eligible(512, d=2**16, k=256, nnz=1)  # 8 splits


@pytest.mark.parametrize("nnz", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_few_vectors_use_other_kernels(dtype, nnz):
    """Regardless of their number of features: a program would generate entries for 128 vectors."""
    for n, d, k in ((1, 2**28, 4096), (8, 2**27, 4096), (16, 2**20, 128), (64, 2**20, 256), (256, 2**20, 128)):
        assert not eligible(n=n, d=d, k=k, nnz=nnz, dtype=dtype)


def test_left_products_of_row_major_matrices():
    """S A with a row-major A and a row-major result."""

    def is_eligible(n=512, d=1 << 18, k=1024, **changes):
        return eligible(n=n, d=d, k=k, **{"x_strides": (1, n), "y_strides": (1, n), **changes})

    for nnz in (2, 4, 8):
        assert is_eligible(nnz=nnz)
        assert is_eligible(nnz=nnz, dtype="bfloat16")
        assert is_eligible(nnz=nnz, precision="medium")
        assert is_eligible(nnz=nnz, n=1 << 15, d=1 << 10)
    assert not is_eligible(nnz=1)  # `project_few_vectors` is faster
    assert is_eligible(nnz=1, dtype="float16")
    assert not is_eligible(adjoint=True)
    assert not is_eligible(dtype="float64")
    assert not is_eligible(y_strides=(1024, 1))
    assert not is_eligible(x_strides=(1 << 18, 1))
    assert is_eligible(x_strides=(1, 800), y_strides=(1, 516))
    assert not is_eligible(x_strides=(1, 513))
    assert not is_eligible(y_strides=(1, 513))
    assert not is_eligible(x_strides=(1, 508))
    assert not is_eligible(x_strides=(2, 1024))
    assert not is_eligible(d=1 << 14)
    assert not is_eligible(n=124)
    assert not is_eligible(n=516, dtype="bfloat16")
    assert is_eligible(n=520, dtype="bfloat16")
    for n, whole_blocks in ((128, True), (192, False), (320, False), (576, True), (512, True)):
        assert is_eligible(n=n) == whole_blocks  # otherwise `row_gather` is faster
        assert is_eligible(n=n + 4)
        assert is_eligible(n=n, nnz=8)
        assert is_eligible(n=n, dtype="float16")


def test_launches():
    def launched(d, nnz, dtype="float32", adjoint=False):
        chosen = hopper.launch(exact_product(1 << 20, d, 256, nnz, dtype=dtype, adjoint=adjoint, device=HOPPER))
        return chosen.columns, chosen.blocks, chosen.splits, chosen.blocks_per_split

    assert launched(768, 1) == (32, 12, 1, 12)  # 3 groups of 2 chunks of 128 features
    assert launched(768, 2) == (32, 12, 1, 12)
    assert launched(768, 4) == (32, 12, 1, 12)
    assert launched(768, 8) == (16, 24, 1, 24)
    assert launched(772, 8) == (16, 25, 1, 28) == launched(776, 8, "bfloat16")  # rounded up to whole steps
    assert launched(8196, 2) == (32, 130, 1, 130)
    assert launched(2**14, 4) == (32, 256, 1, 256)  # 128 steps
    assert launched(2**14 + 4, 4) == (32, 257, 2, 130)
    assert launched(2**15, 2) == (32, 512, 2, 256)
    assert launched(2**15, 1) == (32, 512, 1, 512)  # 128 chunks
    assert launched(2**16, 4, "bfloat16") == (32, 1024, 1, 1024)
    assert launched(2**18, 4, "bfloat16") == (32, 4096, 4, 1024)
    assert launched(2**14, 4, adjoint=True) == (32, 256, 1, 256)
    assert launched(2**18, 4, adjoint=True) == (32, 4096, 1, 4096)


@pytest.mark.usefixtures("hopper_sizes")
def test_accepted_tensors(monkeypatch):
    all_tensors_on(monkeypatch, HOPPER)
    S, wide, narrow = Sketch(256, 128), torch.zeros(300, 320), torch.zeros(300, 160)
    for x, y, add, expected in (
        (wide[:, :256], narrow[:, :128], False, True),
        (wide[:, 4:260], narrow[:, 4:132], False, True),
        (wide[:, :256], narrow[:, :128], True, False),
        (wide[:, 1:257], narrow[:, :128], False, False),  # not aligned
        (wide[:, :256], narrow[:, 1:129], False, False),
        (wide[:, :256].half(), narrow[:, :128], False, False),
        (wide[:, :256].double(), narrow[:, :128].double(), False, False),
        (wide[:1, :256].expand(300, 256), narrow[:, :128], False, False),
    ):
        for adjoint in (False, True) if x.stride(0) else (False,):
            product = triton_exact.describe(S.spec, x, y, add, adjoint)
            assert isinstance(config.choose(product), hopper.Hopper) == expected, product


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("nnz", [1, 2, 4, 8])
def test_splits_use_little_memory(nnz, dtype, every):
    """At most 4 % of the data or 64 MiB, for any number of columns, including one chunk more."""
    n_split = 0
    sizes = list(grid(range(7, 21, 2), range(8, 30, 2), (0, 16), range(7, 15), (False, True)))
    for log_n, log_d, more, log_k, contiguous in random.Random(nnz).sample(sizes, len(sizes) // every):
        n, d, k = 1 << log_n, (1 << log_d) + more, 1 << log_k
        strides = {"x_strides": (1, n), "y_strides": (1, n)} if contiguous else {}
        chosen = config.choose(exact_product(n, d, k, nnz, dtype=dtype, device=HOPPER, **strides))
        if isinstance(chosen, hopper.Hopper) and chosen.splits > 1:
            n_split += 1
            assert chosen.splits * 4 * n * k <= max(64 << 20, 0.04 * n * d * ITEM_BYTES[dtype])
    assert n_split > 50 / every


def test_splits_keep_all_multiprocessors_busy():
    def launched(n, d, k, nnz=4, dtype="float32"):
        strides = {"x_strides": (1, n), "y_strides": (1, n)}
        chosen = config.choose(exact_product(n, d, k, nnz, dtype=dtype, device=HOPPER, **strides))
        assert chosen.vectors_contiguous
        assert (chosen.splits - 1) * chosen.blocks_per_split < chosen.blocks
        assert chosen.splits * chosen.blocks_per_split >= chosen.blocks
        return chosen.programs, chosen.splits, chosen.blocks_per_split

    assert launched(512, 1 << 18, 1024) == (128, 4, 256)
    assert launched(512, 1 << 18, 1024, 8) == (128, 4, 512)
    assert launched(512, 1 << 18, 1024, 2, "float16") == (128, 4, 256)
    assert launched(1024, 1 << 16, 4096) == (132, 1, 64)  # 256 output tiles
    assert launched(1024, 1 << 14, 1024) == (128, 2, 32)
    assert launched(128, 1 << 20, 128) == (128, 128, 256)  # split for accuracy
    assert launched(1 << 16, 1 << 12, 512) == (132, 1, 32)
    assert launched(128, 1 << 18, 1 << 17)[1] == 1  # 1024 output tiles
    assert launched(1 << 16, 1 << 18, 128) == (132, 32, 256)  # 512 output tiles; split for accuracy
    assert launched(1 << 16, 1 << 18, 128, 8, "float16") == (132, 16, 1024)
