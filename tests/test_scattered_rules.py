"""Products of few long vectors, or of little data, that `scattered_sums` computes, and those that others compute."""

import pytest
from helpers.choices import A100, H200, HOPPER, NO_WARP_TILES, changed_choices, exact_product

from sjlt.kernels.config import scattered_rules, scattered_sums
from sjlt.kernels.config.codes import Codes
from sjlt.kernels.config.exact import FewVectors, TensorCore, choose
from sjlt.kernels.config.scattered_sums import ScatteredSums

LONG = {"n": 4, "d": 1 << 22, "k": 300, "device": HOPPER}


@pytest.mark.parametrize(
    ("case", "takes"),
    [
        ({}, True),
        ({"dtype": "bfloat16", "n": 24, "nnz": 8}, True),
        ({"k": 1024}, True),
        ({"k": 4096, "nnz": 8, "d": 1 << 25}, False),  # sums in registers
        ({"k": 4096, "n": 16, "d": 1 << 24}, False),
        ({"k": 8192, "n": 16, "d": 1 << 24, "nnz": 8}, True),  # others would use tensor cores
        ({"k": 1024, "nnz": 1, "d": 1 << 26}, False),
        ({"k": 512}, True),
        ({"k": 512, "n": 1}, False),
        ({"k": 512, "nnz": 1}, True),
        ({"k": 512, "d": 1 << 23}, True),
        ({"k": 512, "x_strides": (1, 4)}, True),
        ({"k": 1024, "x_strides": (1, 4)}, False),
        ({"k": 1024, "x_strides": (1, 7), "n": 7}, True),  # registers would hold vectors that do not exist
        ({"k": 512, "x_strides": (1, 4), "dtype": "float16"}, True),
        ({"k": 1024, "n": 9}, True),
        ({"k": 1024, "n": 15, "nnz": 1}, False),
        ({"k": 1024, "n": 16, "nnz": 1, "d": 1 << 20}, True),
        ({"k": 512, "nnz": 3}, True),
        ({"k": 512, "dtype": "float64"}, True),
        ({"k": 512, "stacks": 2}, True),
        ({"k": 512, "n": 16}, True),  # sums of many rows of X do not fit in registers
        ({"n": 33}, True),  # rows in fp32 with few terms
        ({"n": 128, "nnz": 1}, True),
        ({"n": 129, "nnz": 1}, False),
        ({"n": 64, "nnz": 8}, False),
        ({"n": 64, "nnz": 2, "dtype": "float64", "device": A100}, False),
        ({"n": 64, "nnz": 2, "dtype": "float16"}, True),
        ({"n": 64, "nnz": 8, "dtype": "float16"}, False),
        ({"n": 64, "nnz": 2, "dtype": "float16", "k": 512}, False),  # a power of two of tiles
        ({"n": 64, "nnz": 4, "dtype": "float16", "k": 700, "d": 400_000}, False),
        ({"n": 64, "nnz": 4, "dtype": "float16", "k": 700, "d": 30_000}, True),  # codes take longer to write
        ({"n": 64, "nnz": 2, "dtype": "float16", "d": (1 << 22) - 1}, True),  # elements loaded one by one
        ({"n": 64, "nnz": 2, "dtype": "float16", "data_aligned": False}, True),
        ({"n": 64, "nnz": 2, "dtype": "float16", "offset": 1}, True),
        ({"n": 64, "nnz": 8, "k": 900, "dtype": "float16", "d": (1 << 22) - 1}, False),
        ({"n": 2000, "k": 32, "nnz": 1, "dtype": "float16", "d": 8001, "x_strides": (8001, 1)}, True),
        ({"n": 2000, "k": 32, "nnz": 3, "dtype": "float16", "d": 8001, "x_strides": (8001, 1)}, False),
        ({"n": 2000, "k": 300, "nnz": 2, "dtype": "float16", "d": 8001, "x_strides": (8001, 1)}, False),
        ({"n": 64, "nnz": 2, "x_strides": (1, 64)}, True),
        ({"n": 65, "nnz": 2, "x_strides": (1, 65)}, False),
        ({"n": 64, "nnz": 2, "x_strides": (1, 64), "dtype": "float16"}, False),
        ({"d": (1 << 16) - 1}, False),  # less than 1 MiB
        ({"n": 16, "d": 1 << 16, "nnz": 1}, False),  # small, with one term
        ({"n": 16, "d": 1 << 16, "nnz": 1, "k": 9000}, True),
        ({"n": 15, "d": 1 << 16, "nnz": 1}, True),
        ({"nnz": 17}, False),
        ({"nnz": 8, "stacks": 4}, False),
        ({"adjoint": True}, False),
        ({"x_strides": (1, 4)}, True),  # contiguous vectors
        ({"x_strides": (2, 8)}, False),
        ({"x_strides": (1, 32), "n": 32, "k": 16}, True),
        ({"x_strides": (1, 32), "n": 32, "nnz": 1}, False),
        ({"x_strides": (1, 24), "n": 24, "nnz": 1}, True),
        ({"x_strides": (1, 31), "n": 31, "nnz": 1}, False),  # elements loaded one by one
        ({"x_strides": (0, 1)}, False),
        ({"n": 1, "x_strides": (0, 1)}, True),
        ({"d": 1 << 30, "n": 1}, False),
        ({"k": 100_000}, False),  # exceeds shared memory
        ({"device": H200}, False),  # described without asynchronous copies
    ],
)
def test_eligible_products(case, takes):
    product = exact_product(**(LONG | case))
    assert scattered_rules.eligible(product) == takes
    if product.stacks == 1 and not product.adjoint:
        with changed_choices(NO_WARP_TILES):
            assert isinstance(choose(product), scattered_sums.ScatteredSums) == takes


@pytest.mark.parametrize(
    ("case", "takes"),
    [
        ({"n": 32, "d": 3_106_848, "k": 2048, "nnz": 4}, TensorCore),
        ({"n": 32, "d": 3_106_849, "k": 2048, "nnz": 4}, ScatteredSums),  # elements loaded one by one
        ({"n": 32, "d": 154_816, "k": 2048, "nnz": 1}, TensorCore),  # short rows
        ({"n": 32, "d": 1_548_160, "k": 2048, "nnz": 1}, ScatteredSums),
        ({"n": 16, "d": 228_896, "k": 256, "nnz": 8}, TensorCore),
        ({"n": 16, "d": 228_896, "k": 256, "nnz": 4}, ScatteredSums),
        ({"n": 32, "d": 3_106_848, "k": 2000, "nnz": 3}, ScatteredSums),  # not a power-of-two geometry
        ({"n": 64, "d": 3_402_166, "k": 128, "nnz": 4}, TensorCore),
        ({"n": 64, "d": 3_402_167, "k": 128, "nnz": 4}, ScatteredSums),
        ({"n": 64, "d": 200_928, "k": 256, "nnz": 3}, TensorCore),
        ({"n": 64, "d": 446_064, "k": 692, "nnz": 4}, Codes),
        ({"n": 64, "d": 446_064, "k": 692, "nnz": 1}, ScatteredSums),
        ({"n": 16, "d": 151_648, "k": 2048, "nnz": 3, "x_strides": (1, 16)}, TensorCore),
        ({"n": 16, "d": 351_648, "k": 2048, "nnz": 3, "x_strides": (1, 16)}, ScatteredSums),
        ({"n": 16, "d": 7_666_831, "k": 1024, "nnz": 4, "x_strides": (1, 16)}, ScatteredSums),
        ({"n": 20, "d": 3_313_127, "k": 256, "nnz": 2, "x_strides": (1, 20)}, ScatteredSums),
        ({"n": 24, "d": 3_533_361, "k": 128, "nnz": 1, "x_strides": (1, 24)}, ScatteredSums),
        ({"n": 32, "d": 3_533_361, "k": 128, "nnz": 1, "x_strides": (1, 32)}, FewVectors),
        ({"n": 32, "d": 5_054_743, "k": 320, "nnz": 1, "x_strides": (1, 32)}, ScatteredSums),
        ({"n": 64, "d": 5_054_743, "k": 320, "nnz": 1, "x_strides": (1, 64)}, Codes),
        ({"n": 64, "d": 528_145, "k": 320, "nnz": 4, "x_strides": (1, 64)}, Codes),
        ({"n": 64, "d": 50_816, "k": 320, "nnz": 4, "x_strides": (1, 64)}, TensorCore),
    ],
)
def test_kernels_for_few_16_bit_vectors(case, takes):
    with changed_choices(NO_WARP_TILES):
        assert isinstance(choose(exact_product(**({"dtype": "float16", "device": HOPPER} | case))), takes)


def test_columns_left_to_codes():
    for case, target, takes in (
        ({}, HOPPER, True),
        ({"nnz": 8, "k": 3000}, HOPPER, False),
        ({"nnz": 8, "k": 3000}, A100, True),
        ({"dtype": "float16", "k": 3000}, HOPPER, False),
        ({"dtype": "float16", "nnz": 2}, HOPPER, True),
    ):
        product = exact_product(**(LONG | {"x_strides": (1, 32), "n": 32, "device": target} | case))
        assert scattered_rules.eligible(product)
        assert isinstance(choose(product), scattered_sums.ScatteredSums) == takes


@pytest.mark.parametrize(
    ("case", "takes"),
    [
        ({}, True),
        ({"n": 32, "d": 20_000}, False),  # `eligible` decides
        ({"d": 500}, False),  # less than 1 MiB
        ({"d": 5000}, False),  # too slow
        ({"n": 3000}, False),
        ({"n": 3000, "device": A100}, True),
        ({"n": 1500}, True),
        ({"n": 1500, "k": 100}, False),  # one tile, for which others are faster
        ({"n": 1500, "k": 100, "device": A100}, True),
        ({"n": 4000, "d": 300, "k": 100}, True),
        ({"n": 8192, "d": 1024, "nnz": 1}, True),
        ({"n": 8193, "d": 1024, "nnz": 1}, False),  # more than 32 MiB
        ({"k": 4096}, False),
        ({"k": 30_000}, False),  # more sums than fit in shared memory
        ({"k": 128}, True),  # a power-of-two geometry
        ({"k": 128, "dtype": "float16"}, False),
        ({"dtype": "float16"}, True),
        ({"dtype": "float16", "nnz": 1}, False),
        ({"dtype": "float64"}, False),
        ({"nnz": 1}, True),
        ({"nnz": 16}, False),
        ({"nnz": 17}, False),
        ({"x_strides": (1, 500)}, True),  # contiguous vectors
        ({"x_strides": (1, 500), "k": 128}, False),  # sums in registers
        ({"adjoint": True}, False),
    ],
)
def test_eligible_with_little_data(case, takes):
    product = exact_product(**({"n": 500, "d": 2000, "k": 200, "nnz": 4, "device": HOPPER} | case))
    assert scattered_rules.eligible_small(product) == takes
    if takes:
        assert isinstance(choose(product), scattered_sums.ScatteredSums)


def test_large_products_are_not_searched(monkeypatch):
    """The search of all layouts takes milliseconds, and so is only for what could be fast."""
    monkeypatch.setattr(scattered_rules, "can_run", None)
    product = exact_product(n=8000, d=1000, k=200, nnz=12, device=HOPPER)
    assert not scattered_rules.eligible_small(product)


@pytest.mark.parametrize(
    ("case", "takes"),
    [
        ({}, True),
        ({"device": HOPPER}, False),  # from codes
        ({"d": 500_000, "k": 16, "nnz": 4, "dtype": "float32", "device": HOPPER}, False),  # the same
        ({"d": 500_000, "k": 16, "nnz": 4, "dtype": "float32"}, True),
        ({"k": 100}, False),  # tiles with more rows
        ({"n": 129, "x_strides": (1, 129)}, False),
        ({"x_strides": (7_000_000, 1)}, True),
        ({"x_strides": (7_000_000, 1), "device": HOPPER}, False),
        ({"x_strides": (7_000_000, 1), "k": 300, "nnz": 5, "device": HOPPER}, False),
        ({"x_strides": (7_000_000, 1), "nnz": 4, "k": 16, "device": HOPPER, "n": 60}, True),  # too few bytes per code
        ({"nnz": 1}, True),
        ({"nnz": 1, "device": HOPPER}, False),
    ],
)
def test_eligible_products_of_more_vectors(case, takes):
    wide = {"n": 100, "d": 7_000_000, "k": 18, "nnz": 3, "x_strides": (1, 100), "dtype": "float16", "device": A100}
    with changed_choices(NO_WARP_TILES):
        assert isinstance(choose(exact_product(**(wide | case))), scattered_sums.ScatteredSums) == takes
