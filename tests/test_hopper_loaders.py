"""Loads and stores of `project_codes_hopper`, and its number of expanders: the choice, without a GPU."""

import pytest
from helpers.choices import HOPPER, chosen, exact_product

from sjlt.kernels.config import hopper_codes
from sjlt.kernels.config.hopper_loaders import COPY, LOAD, STAGE, TMA, slot_bytes


@pytest.mark.parametrize(
    ("dtype", "d", "data_aligned", "loader", "vector"),
    [
        ("float32", 768, True, TMA, 1),
        ("float32", 770, True, STAGE, 1),
        ("float32", 769, True, STAGE, 1),
        ("float32", 768, False, STAGE, 1),
        ("bfloat16", 768, True, TMA, 1),
        ("bfloat16", 772, True, STAGE, 1),
        ("bfloat16", 770, True, STAGE, 1),
        ("bfloat16", 769, True, STAGE, 1),
        ("bfloat16", 768, False, STAGE, 1),
    ],
)
def test_loader_follows_the_alignment(dtype, d, data_aligned, loader, vector):
    kernel = chosen(k=64, d=d, dtype=dtype, plain=data_aligned, data_aligned=data_aligned).kernel
    assert (kernel.loader, kernel.vector) == (loader, vector)
    assert kernel.tma_store == data_aligned


@pytest.mark.parametrize(("d", "loader", "vector"), [(772, COPY, 4), (770, COPY, 2), (769, STAGE, 1)])
def test_rows_are_not_staged_if_threads_store_them(d, loader, vector):
    """Unless single elements would be loaded."""
    kernel = chosen(k=64, d=d, dtype="bfloat16", plain=False).kernel
    assert (kernel.loader, kernel.vector, kernel.tma_store) == (loader, vector, False)


@pytest.mark.parametrize(
    ("dtype", "x_strides", "offset", "k", "nnz", "loader"),
    [
        ("float16", (769, 1), 0, 300, 4, STAGE),
        ("float16", (1, 100_003), 0, 300, 4, STAGE),
        ("float16", (769, 1), 16, 300, 4, STAGE),
        ("float16", (769, 1), 8, 300, 4, LOAD),  # a block that begins before the data
        ("float16", (769, 1), 0, 300, 8, STAGE),  # chunks of 8 columns
        ("float16", (769, 1), 0, 300, 16, LOAD),  # chunks of 4 columns
        ("float16", (769, 1), 0, 100, 16, STAGE),  # chunks of 4 columns, but adjacent
        ("float16", (2 * 769, 2), 0, 300, 4, LOAD),
        ("float32", (769, 1), 0, 300, 4, STAGE),
        ("float32", (1, 100_003), 0, 300, 4, STAGE),
        ("float32", (769, 1), 8, 300, 4, COPY),
        ("float32", (769, 1), 0, 300, 8, STAGE),  # chunks of 8 columns
        ("float32", (769, 1), 0, 300, 16, COPY),  # chunks of 4 columns
        ("float32", (2 * 769, 2), 0, 300, 4, COPY),
    ],
)
def test_what_can_be_staged(dtype, x_strides, offset, k, nnz, loader):
    product = exact_product(
        n=100_003, d=769, k=k, nnz=nnz, dtype=dtype, x_strides=x_strides, offset=offset, device=HOPPER
    )
    assert hopper_codes.launch(product).kernel.loader == loader


@pytest.mark.parametrize(
    ("dtype", "d", "nnz", "loader"),
    [
        ("bfloat16", 20_000_001, 4, STAGE),
        ("bfloat16", 20_000_000, 4, TMA),
        ("bfloat16", 20_000_000, 8, STAGE),  # boxes with rows of 16 bytes
        ("bfloat16", 16_000_000, 8, COPY),
        ("float32", 20_000_000, 4, TMA),
        ("float32", 20_000_002, 4, STAGE),
    ],
)
def test_rows_far_apart(dtype, d, nnz, loader):
    """Copies that compute addresses within a block in 32 bits cannot load these."""
    product = exact_product(n=64, d=d, k=300, nnz=nnz, dtype=dtype, x_strides=(d, 1), device=HOPPER)
    assert hopper_codes.eligible(product)
    assert hopper_codes.launch(product).kernel.loader == loader
    assert not hopper_codes.eligible(product._replace(d=d // 2, x_strides=(2 * d, 2)))


@pytest.mark.parametrize("k", [40, 100, 130, 256, 300, 1000, 2047])
@pytest.mark.parametrize("nnz", [1, 3, 4, 8])
@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize(("dtype", "item"), [("float16", 2), ("float32", 4)])
def test_staged_lines_fit_in_shared_memory(dtype, item, contiguous, nnz, k):
    n = 10_001
    strides = {"x_strides": (1, n), "y_strides": (1, n)} if contiguous else {"x_strides": (769, 1)}
    product = exact_product(n=n, d=768, k=k, nnz=nnz, dtype=dtype, device=HOPPER, **strides)
    kernel = hopper_codes.launch(product).kernel
    assert kernel.loader == STAGE
    assert kernel.slots >= (3 if dtype == "float16" else 2)
    assert kernel.line_bytes % 32 == 16  # neighbouring lines begin in different banks
    used = kernel.slots * (slot_bytes(kernel) + 2 * kernel.rows * 64) + item * 128 * kernel.rows
    assert used < HOPPER.shared_memory


COLUMNS = {"x_strides": (1, 1 << 20), "y_strides": (1, 1 << 20)}


@pytest.mark.parametrize(
    ("product", "expanders"),
    [
        ({"k": 64}, 1),
        ({"k": 64, "dtype": "bfloat16"}, 1),
        ({"k": 64, **COLUMNS}, 1),
        ({"k": 64, "dtype": "bfloat16", **COLUMNS}, 2),
        ({"k": 64, "n": 100_001, "dtype": "bfloat16", "x_strides": (1, 100_001)}, 1),  # the TMA cannot load them
        ({"k": 384, "dtype": "bfloat16", **COLUMNS}, 0),  # consumers expand the codes
        ({"k": 384, **COLUMNS}, 1),
        ({"k": 100, "nnz": 8, "dtype": "bfloat16"}, 2),  # many codes
        ({"k": 100, "nnz": 8}, 1),
        ({"k": 100, "nnz": 8, "dtype": "bfloat16", "n": 30_000}, 1),
        ({"k": 60, "nnz": 8, "dtype": "bfloat16"}, 1),
        ({"k": 100, "nnz": 4, "dtype": "bfloat16"}, 1),
    ],
)
def test_number_of_expanders(product, expanders):
    assert chosen(**product).kernel.expanders == expanders


@pytest.mark.parametrize(
    ("product", "first"),
    [
        ({"k": 384, "dtype": "float16", **COLUMNS}, True),
        ({"k": 300, "dtype": "bfloat16", "x_strides": (1, 1 << 20)}, True),
        ({"k": 384, **COLUMNS}, False),
        ({"k": 384, "dtype": "float16"}, False),  # rows
        ({"k": 100, "dtype": "float16", **COLUMNS}, False),  # one tile
        ({"k": 384, "nnz": 20, "dtype": "float16", **COLUMNS}, False),  # blocks of 4 columns
        ({"k": 384, "dtype": "float16", "n": 1001, "x_strides": (1, 1001)}, False),  # the TMA cannot load them
    ],
)
def test_which_operand_the_entries_are(product, first):
    kernel = chosen(**product).kernel
    assert kernel.entries_first == first
    assert (kernel.part_rows, kernel.part_vectors) == ((64, 128) if first else (kernel.rows, 64))


def test_small_panels_are_copied():
    assert chosen(k=300, nnz=4).kernel.loader == COPY  # chunks of 16 columns
    assert chosen(k=384, nnz=4).kernel.loader == TMA  # chunks of 32 columns
    assert chosen(k=384, nnz=4, dtype="bfloat16").kernel.loader == COPY
    assert chosen(k=384, nnz=4, dtype="bfloat16", d=4096).kernel.loader == TMA  # rows of 64 bytes of long vectors
    assert chosen(k=300, nnz=4, d=1 << 15, n=10_000).kernel.loader == TMA


@pytest.mark.parametrize(
    ("k", "stores"), [(300, True), (301, False), (1000, False), (64, True), (98, False), (384, True)]
)
def test_equal_tiles_are_stored_by_tma(k, stores):
    assert chosen(k=k).kernel.tma_store == stores
