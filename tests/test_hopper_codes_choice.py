"""Products that use codes on Hopper."""

import pytest
from helpers.choices import HOPPER, NO_WARP_TILES, changed_choices, chosen, exact_product

from sjlt.kernels.config import exact
from sjlt.kernels.config.codes import Codes
from sjlt.kernels.config.exact import choose
from sjlt.kernels.config.product import is_small_and_narrow


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("k", "nnz"), [(16, 4), (64, 4), (96, 3), (300, 4), (500, 2), (1000, 8), (128, 5)])
def test_any_sketch_can_use_codes(k, nnz, dtype):
    launch = chosen(k=k, nnz=nnz, dtype=dtype)
    assert isinstance(launch, Codes)
    assert launch.kernel.rows == (64 if k <= 64 else 128)
    assert launch.kernel.one_tile == (k <= 128)


def test_few_bytes_of_data_per_byte_of_codes():
    assert isinstance(chosen(k=300, n=60, d=1 << 18, nnz=8, dtype="bfloat16"), Codes)


@pytest.mark.parametrize(
    ("case", "takes"),
    [
        ({}, True),  # 4 bytes per byte of codes
        ({"nnz": 5}, True),
        ({"n": 64}, False),  # half a block
        ({"d": 60_000}, False),  # less than 8 MB
        ({"k": 65, "nnz": 32}, False),  # codes of 128 rows
        ({"stacks": 2}, False),
    ],
)
def test_sketches_of_few_rows(case, takes):
    launch = choose(
        exact_product(**{"n": 66, "d": 200_000, "k": 16, "nnz": 8, "dtype": "float16"} | case, device=HOPPER)
    )
    assert isinstance(launch, Codes) == takes
    assert not takes or launch.kernel.log_run == 3


@pytest.mark.parametrize("k", [128, 256, 1024])
def test_power_of_two_geometries_keep_their_kernel(k):
    assert not isinstance(chosen(k=k), Codes)
    assert isinstance(chosen(k=k, d=767), Codes)  # rows that the other kernel cannot load


@pytest.mark.parametrize(
    "small",
    [
        {"n": 47},
        {"n": 300, "d": 768},
        {"n": 60, "d": (1 << 18) - 1, "nnz": 16, "dtype": "bfloat16"},
        {"n": 1 << 20, "d": 1 << 29, "k": 3000},  # partial sums of all passes would take too much memory
        {"dtype": "float64"},
        {"adjoint": True},
    ],
)
def test_products_that_do_not_use_codes(small):
    assert not isinstance(chosen(**{"k": 300, **small}), Codes)


@pytest.mark.parametrize(
    ("n", "k", "nnz", "dtype", "takes"),
    [
        (100, 61, 4, "bfloat16", True),
        (64, 61, 4, "bfloat16", True),  # long columns
        (48, 61, 4, "bfloat16", True),
        (48, 8190, 4, "bfloat16", False),  # short columns, 64 tiles
        (64, 128, 4, "bfloat16", False),  # a power-of-two geometry
        (64, 600, 4, "bfloat16", True),  # many tiles in 16 bits
        (64, 600, 1, "bfloat16", True),
        (64, 300, 8, "bfloat16", True),
        (61, 300, 4, "float32", True),  # elements are loaded one by one
        (64, 256, 4, "float32", False),
        (64, 300, 1, "float32", False),
        (64, 600, 4, "float32", False),  # scattered sums
        (64, 600, 8, "float32", True),
        (64, 512, 3, "float32", False),
        (64, 300, 8, "float32", True),
        (65, 300, 4, "float32", True),
        (32, 832, 4, "float16", True),
        (32, 16, 3, "bfloat16", False),  # sums of few rows
        (31, 832, 4, "float16", False),
    ],
)
def test_narrow_matrices(n, k, nnz, dtype, takes):
    """S A: codes where portable kernels, with blocks of fewer vectors, are not faster."""
    product = exact_product(
        n=n, d=1 << 20, k=k, nnz=nnz, dtype=dtype, device=HOPPER, x_strides=(1, n), y_strides=(1, n)
    )
    with changed_choices(NO_WARP_TILES):
        assert isinstance(choose(product), Codes) == takes


@pytest.mark.parametrize(
    ("n", "d", "k", "nnz", "dtype", "takes"),
    [
        (4337, 214, 2048, 2, "float32", True),
        (4054, 384, 2048, 1, "float16", True),
        (1047, 384, 768, 4, "float32", False),
        (4054, 1024, 2048, 1, "float16", False),
    ],
)
def test_matrices_of_few_rows(n, d, k, nnz, dtype, takes):
    """Codes are faster than kernels that gather if A has less than half as many rows as the sketch."""
    strides = {"x_strides": (1, n), "y_strides": (k, 1)}
    product = exact_product(n=n, d=d, k=k, nnz=nnz, dtype=dtype, device=HOPPER, **strides)
    assert isinstance(choose(product), Codes) == takes


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("k", [500, 2048])
def test_small_narrow_matrices_use_tensor_cores(k, dtype):
    size = {"n": 64, "d": 80_000, "k": k, "dtype": dtype, "device": HOPPER, "x_strides": (1, 64)}
    assert isinstance(choose(exact_product(**size)), exact.TensorCore)
    for others in ({"n": 65, "x_strides": (1, 65)}, {"d": 1 << 20}, {"x_strides": (80_000, 1)}, {"adjoint": True}):
        assert not is_small_and_narrow(exact_product(**size | others))
