"""Which kernel runs a product of the exact law, where several could."""

import pytest
from helpers.choices import HOPPER, exact_product

from sjlt.kernels.config import exact as config
from sjlt.kernels.config.product import is_small_and_narrow, suits_half_blocks


def test_contiguous_vectors():
    """S A with a row-major A: rows of A are read nnz times, or multiplied by tensor cores."""
    product = exact_product(512, 2**18, 1024, 4, x_strides=(1, 512), y_strides=(1, 512))
    for changes, kind in (
        ({}, config.RowGather),
        ({"nnz": 8}, config.RowGather),
        ({"nnz": 16}, config.TensorCore),
        ({"nnz": 8, "k": 1000}, config.TensorCore),
        ({"nnz": 8, "dtype": "bfloat16"}, config.TensorCore),
        ({"nnz": 4, "dtype": "bfloat16"}, config.TensorCore),
        ({"nnz": 4, "stacks": 2, "dtype": "bfloat16"}, config.RowGather),
        ({"d": 2**18 - 1}, config.TensorCore),  # needs masks
        ({"d": 2**18 - 1, "n": 64, "x_strides": (1, 64)}, config.TensorCore),
        ({"n": 64, "x_strides": (1, 64)}, config.RowGather),
        ({"n": 32, "x_strides": (1, 32)}, config.FewVectors),
        ({"d": 2**12 - 1}, config.FewVectors),  # few terms
        ({"d": 2**12 - 1, "nnz": 8}, config.TensorCore),
        ({"d": 500, "nnz": 8}, config.RowGather),
        ({"k": 1000}, config.TensorCore),
        ({"k": 1000, "nnz": 2}, config.TensorCore),
        ({"k": 1000, "nnz": 2, "n": 64, "x_strides": (1, 64)}, config.FewVectors),
        ({"k": 1000, "nnz": 2, "d": 2**14}, config.FewVectors),
        ({"k": 100, "d": 2**16}, config.OneTile),
        ({"k": 100, "nnz": 2, "d": 2**16}, config.TensorCore),
        ({"k": 60, "nnz": 2, "d": 2**16}, config.OneTile),
        ({"k": 60, "nnz": 1, "dtype": "bfloat16"}, config.OneTile),
        ({"k": 60, "nnz": 1, "dtype": "bfloat16", "d": 2**12}, config.FewVectors),
        ({"k": 700, "nnz": 1, "dtype": "bfloat16"}, config.TensorCore),
        ({"k": 700, "nnz": 1, "dtype": "bfloat16", "d": 2**12}, config.FewVectors),
        ({"nnz": 1}, config.FewVectors),
        ({"adjoint": True}, config.RowGather),
        ({"nnz": 8, "adjoint": True}, config.TensorCore),
        ({"dtype": "float64"}, config.FewVectors),
        ({"n": 15, "x_strides": (1, 15)}, config.FewVectors),
        ({"nnz": 8, "device": HOPPER}, config.Hopper),
        ({"nnz": 8, "device": HOPPER, "plain": False}, config.Codes),
    ):
        assert isinstance(config.choose(product._replace(**changes)), kind), changes


def test_small_products():
    """Products that gather in one launch, and products worth a second launch for codes."""
    columns, rows = {"n": 360, "d": 1500, "x_strides": (1, 360)}, {"n": 1000, "d": 4000}
    without_sums = {"device": HOPPER._replace(asynchronous_copies=False)}
    adjoint = rows | {"adjoint": True} | without_sums
    for changes, expected in (
        (columns, config.ScatteredSums),
        (columns | without_sums, config.FewVectors),
        (columns | {"k": 256}, config.FewVectors),
        (columns | {"k": 256, "d": 12_000}, config.Codes),
        (columns | {"k": 256, "d": 3000, "nnz": 8}, config.Codes),
        (columns | {"nnz": 3, "d": 3000}, config.ScatteredSums),
        (columns | {"nnz": 3, "d": 3000} | without_sums, config.FewVectors),
        (columns | {"nnz": 4, "d": 3000} | without_sums, config.Codes),
        (columns | {"dtype": "float16"} | without_sums, config.Codes),
        (columns | {"dtype": "float16", "nnz": 1}, config.FewVectors),
        (columns | {"dtype": "float16", "nnz": 1, "k": 2000}, config.Codes),
        (columns | {"d": 700}, config.RowGather),
        (adjoint | {"d": 2000}, config.FewVectors),
        (adjoint | {"d": 2000, "k": 256}, config.FewVectors),
        (adjoint | {"d": 2000, "k": 256, "nnz": 1}, config.TensorCore),
        (adjoint | {"d": 1000, "k": 60}, config.FewVectors),
        (rows | {"adjoint": True, "d": 1100, "k": 60, "nnz": 3}, config.FewVectors),
        (rows | {"adjoint": True, "n": 2049, "d": 400, "k": 60}, config.OneTile),
        (rows | {"adjoint": True, "n": 2049, "d": 400, "k": 60, "nnz": 2}, config.StagedAdjoint),
        (adjoint | {"d": 2000, "nnz": 8}, config.TensorCore),
        (adjoint, config.TensorCore),
        (adjoint | {"d": 4001}, config.FewVectors),  # stored one element at a time
        (adjoint | {"d": 4001, "n": 100_000, "k": 256}, config.FewVectors),
        (rows | {"adjoint": True}, config.StagedAdjoint),
        (rows | {"n": 300, "nnz": 1}, config.ScatteredSums),
        (rows | {"n": 300, "nnz": 1} | without_sums, config.FewVectors),
        (rows | {"n": 500, "nnz": 1} | without_sums, config.Codes),
        (rows | {"dtype": "float16", "n": 900}, config.Codes),
        (rows | {"dtype": "float16", "n": 900, "k": 256}, config.TensorCore),
        (rows | {"dtype": "float16", "n": 900, "x_strides": (4001, 1), "k": 256}, config.Codes),
        (rows | {"dtype": "float16", "n": 100, "x_strides": (4001, 1)}, config.TensorCore),
    ):
        product = exact_product(**{"k": 300, "device": HOPPER, **changes})
        assert isinstance(config.choose(product), expected), changes


def test_few_long_vectors():
    """Rows that would leave tensor-core blocks mostly empty, for small nnz."""
    for n, changes, expected in (
        (32, {}, config.FewVectors),
        (33, {}, config.TensorCore),
        (32, {"nnz": 8}, config.TensorCore),
        (32, {"d": 60_000}, config.TensorCore),
        (32, {"adjoint": True}, config.TensorCore),
        (128, {"nnz": 1}, config.FewVectors),
        (128, {"nnz": 1, "device": HOPPER}, config.ScatteredSums),
        (128, {"nnz": 1, "dtype": "bfloat16"}, config.TensorCore),
        (129, {"nnz": 1}, config.TensorCore),
    ):
        product = exact_product(**{"n": n, "d": 1 << 20, "k": 300, **changes})
        assert isinstance(config.choose(product), expected), (n, changes)


@pytest.mark.parametrize(
    ("n", "k", "nnz", "expected"),
    [
        (33, 1664, 2, config.Codes),  # loaded one by one
        (34, 1664, 2, config.ScatteredSums),
        (33, 1024, 2, config.Codes),
        (50, 832, 1, config.ScatteredSums),  # loaded by twos, of a block of 64
        (48, 832, 1, config.FewVectors),
    ],
)
def test_narrow_columns_of_few_entries(n, k, nnz, expected):
    product = exact_product(n=n, d=1_400_000, k=k, nnz=nnz, device=HOPPER, x_strides=(1, n))
    assert isinstance(config.choose(product), expected)


@pytest.mark.parametrize(
    ("n", "d", "k", "nnz", "dtype", "suits"),
    [
        (64, 70_000, 384, 4, "float16", True),
        (64, 80_000, 384, 4, "float16", False),  # long columns
        (64, 80_000, 384, 4, "float32", True),
        (64, 100_000, 300, 8, "float16", False),
        (64, 100_000, 256, 8, "float16", True),  # a power-of-two geometry
        (64, 60_000, 300, 8, "float16", True),  # less than 8 MiB
        (64, 100_000, 512, 4, "float16", True),
        (64, 90_000, 513, 4, "float16", False),  # five tiles
        (64, 100_000, 1000, 4, "float16", True),  # eight tiles
        (64, 100_000, 513, 4, "float32", True),
        (62, 70_000, 384, 4, "float16", False),  # loaded 4 bytes at a time
        (62, 100_000, 300, 4, "float32", True),
        (61, 100_000, 300, 4, "float32", False),
    ],
)
def test_half_blocks(n, d, k, nnz, dtype, suits):
    product = exact_product(n=n, d=d, k=k, nnz=nnz, dtype=dtype, device=HOPPER, x_strides=(1, n))
    assert suits_half_blocks(product) == suits
    assert is_small_and_narrow(product) == (suits and product.x_bytes <= 32 << 20)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, config.TensorCore),  # less than 16 MiB, loaded by fours
        ({"d": 9000}, config.Codes),
        ({"n": 1022, "x_strides": (1, 1022)}, config.Codes),
        ({"n": 1028, "x_strides": (1, 1028)}, config.Codes),
        ({"k": 500}, config.Codes),
        ({"dtype": "float32"}, config.Codes),
        ({"n": 64, "d": 1 << 19, "nnz": 8, "x_strides": (1, 64)}, config.TensorCore),  # half of a block would be empty
        ({"n": 64, "d": 1 << 19, "nnz": 16, "x_strides": (1, 64)}, config.Codes),
        ({"n": 64, "d": 1 << 19, "nnz": 8, "x_strides": (1 << 19, 1)}, config.Codes),
    ],
)
def test_contiguous_vectors_in_16_bits(changes, expected):
    product = exact_product(
        **{"n": 1000, "d": 6000, "k": 512, "dtype": "float16", "x_strides": (1, 1000), "device": HOPPER} | changes
    )
    assert isinstance(config.choose(product), expected)
