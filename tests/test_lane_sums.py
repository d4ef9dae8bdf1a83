"""Few long vectors to at most 128 components, with sums for each lane: launches, the choice, and exactness."""

import random

import numpy as np
import pytest
import torch
from helpers.cases import each_value_then_pairs, exhaustive_except
from helpers.choices import A100, EMULATED, HOPPER, SMALL_DEVICE, all_tensors_on, exact_product, fixture_of_one_launch
from helpers.data import integers
from helpers.kernels import check_project
from helpers.shared_memory import emulate
from hypothesis import given
from hypothesis import strategies as st

from sjlt import Sketch
from sjlt.backends.triton import device
from sjlt.kernels.config import lane_sums
from sjlt.kernels.config.accuracy import error_bound
from sjlt.kernels.config.exact import choose
from sjlt.kernels.config.product import SCRATCH_BYTES
from sjlt.laws import exact as law

# (k, nnz): chunks of 2 to 128 columns, in sub-blocks of equal and of unequal numbers of rows.
SKETCHES = [(4, 2), (16, 8), (17, 8), (5, 1), (16, 4), (30, 6), (22, 3), (50, 4), (75, 5), (64, 4), (99, 4), (128, 8)]
SKETCHES += [(70, 2), (128, 4), (100, 1), (128, 2), (128, 1)]
LAYOUTS = ["rows", "padded rows", "columns", "padded columns", "every second column"]
LAYOUTS += ["one row", "one column", "one element"]  # that are read again and again


@given(
    n=st.integers(1, 300), d=st.integers(1, (1 << 30) - 1), k=st.integers(2, 128), nnz=st.integers(1, 64),
    layout=st.sampled_from(LAYOUTS),
    offset=st.sampled_from([0, 64, 12_345, 1 << 40]), dtype=st.sampled_from(["float16", "float32"]),
    described=st.sampled_from([HOPPER, A100, SMALL_DEVICE]), aligned=st.booleans(),
)  # fmt: skip
def test_launches_cover_the_product(n, d, k, nnz, layout, offset, dtype, described, aligned):
    if nnz > law.max_nnz(k):
        return
    far = (n if "columns" in layout else d) + ("padded" in layout)
    others = {"every second column": (2 * d, 2), "one row": (0, 1), "one column": (1, 0), "one element": (0, 0)}
    strides = others.get(layout, (1, far) if "columns" in layout else (far, 1))
    product = exact_product(
        n, d, k, nnz, offset, x_strides=strides, dtype=dtype, device=described, data_aligned=aligned
    )
    if not lane_sums.can_run(product):
        assert k // nnz < 2 or d * n * k > 1 << 30
        return
    launch = lane_sums.launch(product)
    kernel, part = launch.kernel, 1 << launch.kernel.log_held
    lanes = 32 * kernel.warps
    parts = (offset + d - 1) // part - offset // part + 1
    assert kernel.log_held <= kernel.log_chunk == product.geometry.log_chunk
    assert (launch.steps - 1) * lanes < parts <= launch.steps * lanes
    assert (launch.splits - 1) * launch.steps_per_split < launch.steps <= launch.splits * launch.steps_per_split
    assert launch.splits * n * k * 4 <= max(SCRATCH_BYTES, product.x_bytes // 16)
    assert launch.splits <= 65535
    assert kernel.vectors in (1, 2, 4)
    assert kernel.vectors < 2 * n
    assert kernel.sharers <= nnz
    row_bytes = kernel.vectors * 128 // kernel.sharers
    assert 128 * row_bytes <= 1 << 16  # rows in fields of 16 bits, above as many bits as a slot has
    assert row_bytes >= 1 << kernel.log_chunk
    held = kernel.staged * kernel.vectors * part * 128
    assert (k * row_bytes + held) * kernel.warps + 128 <= kernel.shared_bytes <= described.shared_memory - 1024
    # Accesses are aligned, and none extends past the last element.
    if kernel.row_run > 1:
        assert aligned
        assert strides[1] == 1
        assert n == 1 or strides[0] % kernel.row_run == 0
        assert d % kernel.row_run == offset % kernel.row_run == 0
    assert (kernel.row_run > 0) == (strides[1] == 1 and not (n > 1 and "columns" in layout))
    assert kernel.row_run > 0 or kernel.staged
    assert not kernel.staged or kernel.row_run <= 1
    if kernel.column_run > 1:
        assert aligned
        assert far % kernel.column_run == n % kernel.column_run == kernel.vectors % kernel.column_run == 0
    assert max(kernel.row_run, kernel.column_run) * product.item_bytes <= 16
    assert error_bound(product, launch).c >= launch.steps_per_split * kernel.sharers


@pytest.mark.parametrize(
    ("n", "d", "k", "nnz", "strides", "chosen"),
    [
        (1, 163_414_568, 50, 4, (163_414_568, 1), True),
        (1, 2_000_000, 16, 8, (1, 1), True),
        (2, 18_337_607, 38, 8, (18_337_607, 1), True),
        (4, 94_354_532, 27, 4, (1, 4), True),
        (8, 307_171, 8, 4, (307_184, 1), True),
        (1, 20_000, 16, 4, (20_000, 1), False),  # less than 1 MiB
        (1, 163_414_568, 300, 4, (163_414_568, 1), False),  # three tiles
        (4, 6_801_016, 128, 4, (1, 4), False),
        (12, 3_396_806, 64, 1, (3_396_806, 1), False),
        (16, 843_977, 32, 2, (1, 16), False),  # programs read parts of columns
        (64, 1_653_535, 49, 4, (1, 64), False),
        (64, 1_000_000, 24, 4, (1_000_001, 1), True),
        (64, 1_000_000, 24, 4, (1, 64), False),
    ],
)
def test_choice(n, d, k, nnz, strides, chosen):
    for described in (HOPPER, HOPPER._replace(hopper=False)):
        product = exact_product(n, d, k, nnz, x_strides=strides, dtype="float16", device=described)
        assert isinstance(choose(product), lane_sums.LaneSums) == chosen


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float64"},
        {"stacks": 2},
        {"adjoint": True},
        {"k": 129},  # two tiles
        {"k": 8, "nnz": 8},  # chunks of one column
        {"device": HOPPER._replace(asynchronous_copies=False)},
    ],
)
def test_products_that_it_cannot_run(change):
    product = exact_product(2, 1 << 22, 100, 4, device=HOPPER)
    assert lane_sums.can_run(product)
    assert not lane_sums.can_run(product._replace(**change))


always = fixture_of_one_launch(lane_sums.launch)


@pytest.mark.skipif(not device.INTERPRETED, reason="shared memory is emulated in Triton's interpreter")
@each_value_then_pairs(
    case=SKETCHES, n=[1, 2, 3, 4, 9], dtype=["float32", "bfloat16", "float16"], d=[400, 5, 2503], offset=[0, 345],
    x_in=["rows", "inner part", "columns", "every second column"], out_in=["rows", "columns"],
)  # fmt: skip
def test_products_emulated(monkeypatch, always, case, n, dtype, d, offset, x_in, out_in):
    k, nnz = case
    emulate(monkeypatch)
    all_tensors_on(monkeypatch, EMULATED)
    check_project(Sketch(offset + d, k, nnz=nnz, seed=3)[:, offset:], n, dtype, x_in=x_in, out_in=out_in)


def random_case(seed):
    """(sketch, number of vectors, dtype, order) of a product with columns at the edges of chunks and beyond."""
    rng = random.Random(seed)
    k = rng.randint(2, 128)
    nnz = rng.randint(1, k // 2)
    d, offset = rng.choice([rng.randint(1, 3000), 16 * rng.randint(1, 200)]), rng.choice([0, 8, 77, (1 << 33) + 5])
    S = Sketch(offset + d, k, nnz=min(nnz, 16), seed=seed)[:, offset:]
    return S, rng.randint(1, 9), rng.choice(["float32", "bfloat16", "float16"]), rng.choice(["rows", "columns"])


def check_expanded(shape, d, device):
    """Elements that are read again and again, as from the gradient of a sum."""
    array = integers(shape, "float64", seed=1)
    tensor = torch.from_numpy(np.array(array, np.float32)).to(device).expand(3, d)
    check_project(Sketch(d, 50, nnz=4, seed=3), 3, x=(np.broadcast_to(array, (3, d)), tensor), device=device)


@pytest.mark.skipif(not device.INTERPRETED, reason="shared memory is emulated in Triton's interpreter")
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 700), (3, 700)])
def test_expanded_data_emulated(monkeypatch, always, shape):
    emulate(monkeypatch)
    all_tensors_on(monkeypatch, EMULATED)
    check_expanded(shape, 700, "cpu")


def test_many_splits():
    """CUDA limits the second dimension of a grid."""
    product = exact_product(4, (1 << 30) - 1, 112, 37, x_strides=(1, 4), dtype="float16", device=SMALL_DEVICE)
    launch = lane_sums.launch(product)
    assert launch.splits <= 65535
    assert launch.splits * launch.steps_per_split >= launch.steps


@pytest.mark.skipif(not device.INTERPRETED, reason="shared memory is emulated in Triton's interpreter")
@pytest.mark.parametrize("seed", exhaustive_except([2, 4], range(30)))
def test_any_columns_emulated(monkeypatch, always, seed):
    S, n, dtype, x_in = random_case(seed)
    emulate(monkeypatch)
    all_tensors_on(monkeypatch, EMULATED)
    check_project(S, n, dtype, x_in=x_in)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 70_000), (3, 70_000)])
def test_expanded_data(always, shape):
    check_expanded(shape, 70_000, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(40))
def test_any_columns(always, seed):
    S, n, dtype, x_in = random_case(seed)
    check_project(S, n, dtype, x_in=x_in, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("k", "nnz"), SKETCHES)
def test_results_are_reproducible(always, k, nnz):
    S = Sketch(1_000_001, k, nnz=nnz, seed=3)
    x = torch.randn(3, S.n_features, device="cuda", dtype=torch.float16)
    assert torch.equal(S.project(x), S.project(x))
