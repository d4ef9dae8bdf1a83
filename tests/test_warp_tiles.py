"""Few long vectors in 16 bits whose tiles belong to single warps: launches, the choice, and exactness."""

import random

import pytest
import torch
from helpers.cases import each_value_then_pairs, exhaustive_except
from helpers.choices import A100, EMULATED, HOPPER, all_tensors_on, exact_product, fixture_of_one_launch
from helpers.kernels import check_project
from helpers.shared_memory import emulate
from hypothesis import given
from hypothesis import strategies as st

from sjlt import Sketch
from sjlt.backends.triton import device
from sjlt.kernels.config import warp_tiles
from sjlt.kernels.config.accuracy import error_bound
from sjlt.kernels.config.arithmetic import MAX_CHUNKS
from sjlt.kernels.config.exact import choose
from sjlt.kernels.config.product import SCRATCH_BYTES, count_groups
from sjlt.laws import exact as law


@pytest.mark.parametrize(
    ("n", "d", "k", "nnz", "columns", "chosen"),
    [
        (100, 6_302_279, 22, 8, False, True),
        (395, 583_863, 29, 8, False, True),
        (65, 172_839, 115, 4, True, True),
        (100, 1_285_427, 125, 8, True, False),  # from codes
        (100, 118_421, 29, 4, False, False),
        (100, 6_302_279, 128, 8, False, False),  # a power-of-two geometry
        (100, 6_302_279, 300, 8, False, False),  # three tiles
        (600, 583_863, 29, 8, False, False),
    ],
)
def test_choice_for_several_blocks(n, d, k, nnz, columns, chosen):
    strides = (1, n) if columns else (d, 1)
    product = exact_product(n, d, k, nnz, x_strides=strides, dtype="float16", device=HOPPER._replace(hopper=False))
    assert isinstance(choose(product), warp_tiles.WarpTiles) == chosen
    assert not isinstance(choose(product._replace(device=HOPPER)), warp_tiles.WarpTiles)


@given(
    n=st.integers(1, 300), d=st.integers(1, (1 << 30) - 1), k=st.integers(1, 20_000), nnz=st.integers(1, 8),
    layout=st.sampled_from(["rows", "odd rows", "columns", "odd columns"]),
    offset=st.sampled_from([0, 64, 12_345, 1 << 40]), described=st.sampled_from([HOPPER, A100]), aligned=st.booleans(),
)  # fmt: skip
def test_launches_cover_the_product(n, d, k, nnz, layout, offset, described, aligned):
    if nnz > law.max_nnz(k):
        return
    far = (-(-(n if "columns" in layout else d) // 8) * 8) + ("odd" in layout)
    strides = (1, far) if "columns" in layout else (far, 1)
    product = exact_product(
        n, d, k, nnz, offset, x_strides=strides, dtype="float16", device=described, data_aligned=aligned
    )
    if not warp_tiles.can_run(product):
        return
    launch, groups, g = warp_tiles.launch(product), count_groups(product), product.geometry
    kernel = launch.kernel
    assert (launch.splits - 1) * launch.groups_per_split < groups <= launch.splits * launch.groups_per_split
    assert launch.splits == 1 or launch.groups_per_split <= MAX_CHUNKS + 32
    assert g.n_tiles > 1 or launch.groups_per_split % 32 == 0
    assert launch.splits * n * k * 4 <= max(SCRATCH_BYTES, product.x_bytes // 16)
    assert 16 * kernel.row_blocks >= -(-k // g.n_tiles)
    assert kernel.row_blocks * kernel.vector_blocks <= 16
    assert kernel.shared_bytes + 1024 <= described.shared_memory // 4
    # Runs begin at multiples of kernel.align bytes, and lie within their units.
    run = kernel.run if not kernel.vectors_contiguous else 8 * kernel.vector_blocks
    assert kernel.units * 16 >= 2 * run + (16 - kernel.align if kernel.align < 16 else 0)
    assert kernel.run in (8, 16, 32, 64)
    assert kernel.run == 64 or 1 << g.log_chunk == kernel.run
    step = far if kernel.vectors_contiguous else offset
    assert (2 * far) % kernel.align == 0 or n == 1
    assert (2 * step) % kernel.align == 0
    assert aligned or kernel.align == 2
    assert error_bound(product, launch).c >= 4 * launch.groups_per_split


@pytest.mark.parametrize(
    ("n", "d", "k", "nnz", "strides", "chosen"),
    [
        (16, 6_966_866, 2048, 8, (6_966_874, 1), True),
        (24, 12_342_368, 512, 8, (12_342_381, 1), True),
        (13, 3_320_695, 2048, 3, (1, 13), True),
        (64, 1_653_535, 49, 4, (1, 64), True),
        (64, 2_715_541, 4096, 4, (1, 64), False),
        (64, 3_533_592, 512, 3, (1, 64), False),
        (8, 64_600_909, 1984, 2, (64_600_909, 1), False),
        (100, 6_579_977, 640, 3, (6_579_977, 1), False),
        (16, 391_371, 1344, 3, (391_371, 1), False),
        (32, 288_612, 592, 4, (288_620, 1), False),
        (40, 344_169, 690, 8, (344_169, 1), True),
        (48, 1_186_515, 1700, 4, (1_186_523, 1), True),
        (64, 557_305, 1044, 4, (557_306, 1), True),
        (64, 177_028, 1857, 8, (177_029, 1), False),
        (64, 422_489, 3750, 8, (422_489, 1), False),  # 30 tiles
        (64, 557_305, 1000, 4, (557_305, 1), False),  # 8 tiles
    ],
)
def test_choice(n, d, k, nnz, strides, chosen):
    for described in (HOPPER, HOPPER._replace(hopper=False)):
        product = exact_product(n, d, k, nnz, x_strides=strides, dtype="bfloat16", device=described)
        assert isinstance(choose(product), warp_tiles.WarpTiles) == chosen


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float32"},
        {"stacks": 2},
        {"adjoint": True},
        {"x_strides": (2 << 20, 2)},
        {"k": 700, "nnz": 20},  # chunks of 4 columns
        {"k": 8, "nnz": 8},  # of one column
        {"device": HOPPER._replace(asynchronous_copies=False)},
    ],
)
def test_products_that_it_cannot_run(change):
    product = exact_product(16, 1 << 20, 512, 4, dtype="float16", device=HOPPER)
    assert warp_tiles.can_run(product)
    assert not warp_tiles.can_run(product._replace(**change))


CASES = [(16, 4, 9), (22, 8, 40), (30, 8, 70), (45, 3, 3), (100, 1, 8)]
CASES += [(128, 2, 16), (130, 5, 13), (300, 4, 20), (700, 8, 8)]


always = fixture_of_one_launch(warp_tiles.launch)


@pytest.mark.skipif(not device.INTERPRETED, reason="shared memory is emulated in Triton's interpreter")
@each_value_then_pairs(
    case=CASES, dtype=["bfloat16", "float16"], d=[300, 5, 1300], offset=[0, 345],
    x_in=["rows", "inner part", "columns"], out_in=["rows", "columns"],
)  # fmt: skip
def test_products_emulated(monkeypatch, always, case, dtype, d, offset, x_in, out_in):
    k, nnz, n = case
    emulate(monkeypatch)
    all_tensors_on(monkeypatch, EMULATED)
    check_project(Sketch(offset + d, k, nnz=nnz, seed=3)[:, offset:], n, dtype, x_in=x_in, out_in=out_in)


def random_case(seed):
    """(sketch, number of vectors, dtype, order) of a product with columns at the edges of chunks and beyond."""
    rng = random.Random(seed)
    k, nnz, n = rng.choice(CASES)
    d, offset = rng.randint(1, 3000), rng.choice([0, 8, 77, 1000, (1 << 33) + 5])
    S = Sketch(offset + d, k, nnz=nnz, seed=seed)[:, offset:]
    x_in = rng.choice(["rows", "columns"])  # a single column of A is not contiguous
    return S, rng.choice([1 if x_in == "rows" else n, n, n + 8]), rng.choice(["bfloat16", "float16"]), x_in


@pytest.mark.skipif(not device.INTERPRETED, reason="shared memory is emulated in Triton's interpreter")
@pytest.mark.parametrize("seed", exhaustive_except([2, 4], range(30)))
def test_any_columns_emulated(monkeypatch, always, seed):
    S, n, dtype, x_in = random_case(seed)
    emulate(monkeypatch)
    all_tensors_on(monkeypatch, EMULATED)
    check_project(S, n, dtype, x_in=x_in)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(40))
def test_any_columns(always, seed):
    S, n, dtype, x_in = random_case(seed)
    check_project(S, n, dtype, x_in=x_in, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("k", "nnz", "n"), CASES)
def test_results_are_reproducible(always, k, nnz, n):
    S = Sketch(1_000_001, k, nnz=nnz, seed=3)
    x = torch.randn(n, S.n_features, device="cuda", dtype=torch.float16)
    assert torch.equal(S.project(x), S.project(x))
