"""Stores by kernels that read codes, of windows or of several elements at a time: the choice, without a GPU."""

import math

import pytest
from helpers.choices import HOPPER, chosen, exact_product

from sjlt.kernels.config import ampere_codes, hopper_codes, stores


@pytest.mark.parametrize(
    ("k", "nnz", "d", "windows"),
    [
        (1344, 3, 384, True),
        (1340, 3, 384, False),  # the TMA cannot store rows that end within 16 bytes
        (1341, 3, 384, False),
        (1984, 2, 768, True),
        (1408, 3, 384, False),  # tiles are windows
        (1344, 3, 900, False),  # results do not outweigh data
        (1344, 1, 900, True),
        (1344, 8, 900, False),
        (1344, 8, 384, True),
        (1344, 3, 771, False),  # rows that are staged
        (1344, 3, 385, True),
        (120, 3, 60, False),
    ],
)
def test_windows(k, nnz, d, windows):
    kernel = chosen(k=k, nnz=nnz, d=d, dtype="bfloat16").kernel
    assert kernel.windows == windows
    assert kernel.rows == 128 - 64 * (k < 64)
    if windows:
        assert kernel.tma_store


@pytest.mark.parametrize(("n", "windows"), [(100_000, True), (100_001, False)])
def test_windows_of_contiguous_vectors(n, windows):
    """Consumers store them by threads if vectors are loaded by the TMA; otherwise tiles are staged."""
    kernel = chosen(n=n, k=1340, nnz=3, d=384, dtype="bfloat16", x_strides=(1, n)).kernel
    assert kernel.windows == windows
    assert not kernel.tma_store
    assert (kernel.result_line_bytes == 0) == windows
    assert kernel.store_width == (4 if windows else 1)


@pytest.mark.parametrize(
    "changed",
    [
        {"plain": False},  # accumulates, or rounds to another dtype
        {"stacks": 2},
        {"n": 100, "d": 1 << 18, "k": 60_008},  # splits
        {"y_strides": (1352 + 1, 1)},
        {"y_strides": (1, 100_003)},
    ],
)
def test_results_that_windows_do_not_reach(changed):
    assert chosen(k=1352, nnz=4, d=200, dtype="bfloat16").kernel.windows
    changed = {"k": 1352, "nnz": 4, "d": 200, "dtype": "bfloat16"} | changed
    assert not hopper_codes.launch(exact_product(**changed, device=HOPPER)).kernel.windows


def test_codes_of_windows_fit_in_memory():
    """The largest sketches of the fewest columns."""
    for k in (60_008, 8_000_008):
        launch = chosen(n=200, d=10_000, k=k, nnz=1, dtype="bfloat16")
        assert launch.kernel.windows
        assert launch.splits == 1
        assert launch.capacity * 132 * -(-k // 128) <= 64 << 20


def test_windows_of_fp32_are_stored_by_the_tma():
    """Threads would gain too little."""
    assert chosen(k=1340, nnz=3, d=384).kernel.windows
    assert not chosen(k=1346, nnz=3, d=384).kernel.windows


@pytest.mark.parametrize(
    ("k", "strides", "dtype", "splits", "width"),
    [
        (1024, (1024, 1), "bfloat16", 1, 8),
        (1024, (1024, 1), "float32", 1, 4),
        (1024, (1026, 1), "bfloat16", 1, 2),
        (1024, (1025, 1), "bfloat16", 1, 1),
        (1024, (2048, 2), "bfloat16", 1, 1),
        (600, (600, 1), "bfloat16", 1, 8),  # five tiles of 120 rows
        (620, (624, 1), "bfloat16", 1, 4),  # of 124
        (601, (608, 1), "bfloat16", 1, 1),  # of 120 or 121
        (601, (608, 1), "float32", 3, 1),
        (620, (621, 1), "bfloat16", 3, 4),  # partial sums have no gaps
        (100, (100, 1), "bfloat16", 1, 4),
        (1024, (1, 5000), "bfloat16", 1, 8),
        (601, (1, 5000), "bfloat16", 1, 8),  # vectors are contiguous
        (601, (1, 5002), "bfloat16", 1, 2),
        (601, (1, 5002), "float32", 2, 4),
    ],
)
def test_elements_stored_at_a_time(k, strides, dtype, splits, width):
    product = exact_product(n=5000, d=300, k=k, nnz=4, y_strides=strides, dtype=dtype, device=HOPPER)
    assert stores.store_width(product, splits) == width
    if splits == 1:
        assert ampere_codes.kernel_of(product, 1, 1 << 20).store_width == width
        assert stores.store_width(product._replace(plain=False), 1) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_tma_stores_whole_units_only(dtype):
    """It would overwrite the rest of the 16 bytes in which a line ends."""
    item = 4 if dtype == "float32" else 2
    whole = 16 // item
    for n in range(200, 217):
        strides = (1, -(-n // whole) * whole)
        product = exact_product(n=n, d=100, k=640, nnz=4, y_strides=strides, dtype=dtype, device=HOPPER)
        kernel = hopper_codes.launch(product).kernel
        assert kernel.tma_store == (n % whole == 0)
        by_consumers = not kernel.tma_store and dtype == "float32"
        assert kernel.store_width == (math.gcd(n, whole) if by_consumers else 1)
    for k in range(1336, 1344):
        product = exact_product(k=k, d=200, nnz=3, y_strides=(1344, 1), dtype=dtype, device=HOPPER)
        assert hopper_codes.launch(product).kernel.tma_store == (k % whole == 0)
