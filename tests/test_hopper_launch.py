"""Which products of the exact law run on the Hopper kernels, and how; decided without a GPU."""

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
    def suit(**changes):
        return eligible(adjoint=adjoint, **changes)

    assert suit()
    assert suit(k=128)
    assert suit(n=1 << 18, d=4096, k=512)
    assert suit(n=1 << 16, d=16384, k=2048)
    assert suit(d=100, k=128)
    assert suit(offset=2**40 + 64)
    assert suit(x_strides=(800, 1), y_strides=(260, 1))
    assert suit(dtype="bfloat16") == suit(dtype="float16") == (not adjoint)
    assert suit(precision="high")
    assert not suit(precision="medium")
    assert suit(precision="medium", nnz=8) == (not adjoint)
    assert not suit(dtype="float64")
    assert suit(nnz=1)
    assert suit(nnz=2)
    assert suit(nnz=8) == (not adjoint)
    assert not suit(nnz=16)
    assert not suit(nnz=3)
    assert not suit(k=384)
    assert not suit(k=200)
    assert not suit(offset=32)
    assert suit(d=2**20)
    assert suit(d=2**20, dtype="bfloat16") == (not adjoint)
    assert not suit(d=2**30)
    assert suit(d=766, x_strides=(768, 1)) == (not adjoint)
    assert not suit(n=10_000)
    assert not suit(n=1 << 31)
    assert suit(n=1 << 20, d=32)
    assert not suit(n=1 << 20, d=31, x_strides=(32, 1))
    assert not suit(n=1 << 17, d=32)
    assert not suit(x_strides=(770, 1))
    assert not suit(x_strides=(0, 1))
    assert not suit(x_strides=(760, 1))
    assert not suit(x_strides=(1536, 2))
    assert not suit(y_strides=(258, 1))
    assert not suit(y_strides=(1, 1 << 20))
    assert not suit(x_strides=(1, 1 << 20))
    assert not suit(x_strides=(1 << 39, 1))


def test_products_that_leave_multiprocessors_idle():
    """X S' of n vectors by programs of 128: 132 run at a time."""

    def suit(n, d=4096, k=512, **changes):
        return eligible(n=n, d=d, k=k, **changes)

    assert suit(128 * 33)  # 4 tiles of the sketch: 132 programs
    assert suit(128 * 25, d=8000)
    assert not suit(128 * 24, d=8000)
    assert not suit(128 * 25, d=8000, dtype="float16")
    assert suit(128 * 30, d=8000, dtype="float16")
    assert not suit(128 * 35)
    assert suit(128 * 50)
    assert not suit(128 * 33, adjoint=True)
    assert suit(128 * 132, adjoint=True)
    assert suit(512, d=2**16, k=256)  # 8 products, each in 16 splits
    assert not suit(512, d=2**16, k=256, nnz=1)  # 8 splits


@pytest.mark.parametrize("nnz", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_few_vectors_run_on_other_kernels(dtype, nnz):
    """However many features they have: a program would make entries for 128 vectors."""
    for n, d, k in ((1, 2**28, 4096), (8, 2**27, 4096), (16, 2**20, 128), (64, 2**20, 256), (256, 2**20, 128)):
        assert not eligible(n=n, d=d, k=k, nnz=nnz, dtype=dtype)


def test_row_major_matrices_on_the_right():
    """S A, where A is row-major, and so is the result."""

    def suit(n=512, d=1 << 18, k=1024, **changes):
        return eligible(n=n, d=d, k=k, **{"x_strides": (1, n), "y_strides": (1, n), **changes})

    for nnz in (2, 4, 8):
        assert suit(nnz=nnz)
        assert suit(nnz=nnz, dtype="bfloat16")
        assert suit(nnz=nnz, precision="medium")
        assert suit(nnz=nnz, n=1 << 15, d=1 << 10)
    assert not suit(nnz=1)  # `project_few_vectors` is faster
    assert suit(nnz=1, dtype="float16")
    assert not suit(adjoint=True)
    assert not suit(dtype="float64")
    assert not suit(y_strides=(1024, 1))
    assert not suit(x_strides=(1 << 18, 1))
    assert suit(x_strides=(1, 800), y_strides=(1, 516))
    assert not suit(x_strides=(1, 513))
    assert not suit(y_strides=(1, 513))
    assert not suit(x_strides=(1, 508))
    assert not suit(x_strides=(2, 1024))
    assert not suit(d=1 << 14)
    assert not suit(n=124)
    assert not suit(n=516, dtype="bfloat16")
    assert suit(n=520, dtype="bfloat16")
    for n, whole_blocks in ((128, True), (192, False), (320, False), (576, True), (512, True)):
        assert suit(n=n) == whole_blocks  # else `row_gather` is faster
        assert suit(n=n + 4)
        assert suit(n=n, nnz=8)
        assert suit(n=n, dtype="float16")


def test_their_launches():
    def launched(d, nnz, dtype="float32", adjoint=False):
        chosen = hopper.launch(exact_product(1 << 20, d, 256, nnz, dtype=dtype, adjoint=adjoint, device=HOPPER))
        return chosen.columns, chosen.blocks, chosen.splits, chosen.blocks_per_split

    assert launched(768, 1) == (32, 12, 1, 12)  # 3 groups of 2 chunks of 128 features
    assert launched(768, 2) == (32, 12, 1, 12)
    assert launched(768, 4) == (32, 12, 1, 12)
    assert launched(768, 8) == (16, 24, 1, 24)
    assert launched(772, 8) == (16, 25, 1, 28) == launched(776, 8, "bfloat16")  # whole steps
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
def test_tensors_that_the_kernels_accept(monkeypatch):
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


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("nnz", [1, 2, 4, 8])
def test_splits_take_little_memory(nnz, dtype):
    """At most 4 % of the data or 64 MiB, however many columns there are, or by one chunk more."""
    met = 0
    sizes = grid(range(7, 21, 2), range(7, 30), (0, 16), range(7, 15), (False, True))
    for log_n, log_d, more, log_k, contiguous in sizes:
        n, d, k = 1 << log_n, (1 << log_d) + more, 1 << log_k
        strides = {"x_strides": (1, n), "y_strides": (1, n)} if contiguous else {}
        chosen = config.choose(exact_product(n, d, k, nnz, dtype=dtype, device=HOPPER, **strides))
        if isinstance(chosen, hopper.Hopper) and chosen.splits > 1:
            met += 1
            assert chosen.splits * 4 * n * k <= max(64 << 20, 0.04 * n * d * ITEM_BYTES[dtype])
    assert met > 50


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
    assert launched(1024, 1 << 16, 4096) == (132, 1, 64)  # 256 products
    assert launched(1024, 1 << 14, 1024) == (128, 2, 32)
    assert launched(128, 1 << 20, 128) == (128, 128, 256)  # for accuracy
    assert launched(1 << 16, 1 << 12, 512) == (132, 1, 32)
    assert launched(128, 1 << 18, 1 << 17)[1] == 1  # 1024 products
    assert launched(1 << 16, 1 << 18, 128) == (132, 32, 256)  # of 512 products: for accuracy
    assert launched(1 << 16, 1 << 18, 128, 8, "float16") == (132, 16, 1024)
