"""Products of one-tile sketches, whose entries are stored first or generated in every program: exact on integers."""

import pytest
import torch
from helpers.cases import each_value, exhaustive_except
from helpers.choices import H200, HOPPER, NONE_GENERATED, changed_choices, exact_product
from helpers.kernels import LAYOUTS, check_adjoint, check_project

from sjlt import Sketch
from sjlt.backends.triton import exact
from sjlt.kernels.config import one_tile, staged_adjoint
from sjlt.kernels.config.arithmetic import FP16_PAIR
from sjlt.kernels.config.exact import choose

# As in test_kernels_products: an fp16 result that overflows is recomputed.
pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered in (cast|multiply):RuntimeWarning", "ignore:invalid value encountered:RuntimeWarning"
)
ALL_SIZES = {"one_tile.MIN_ELEMENTS": 0, "one_tile.MIN_VECTORS": 1, "hopper_codes.MIN_BYTES": 1 << 60}
ALL_SIZES |= {"staged_adjoint.MIN_VECTORS": 1 << 60}
STORED = ALL_SIZES | NONE_GENERATED
GENERATED = ALL_SIZES | {"one_tile.MAX_SMALL": ((128, 1 << 60),), "one_tile.MIN_SMALL_VECTORS": 1}
GENERATED |= {"one_tile.MIN_SMALL_FEATURES": 1, "one_tile.MAX_SMALL_FEW": 1 << 60}
GENERATED |= {"one_tile.MAX_SMALL_ADJOINT": ((128, 1 << 60),), "one_tile.MIN_ADJOINT_NNZ": 1}
GENERATED |= {"gathers.MIN_SMALL": 1 << 60}  # no small gathers
SHORT = {  # splits and sums of a few chunks, and fp32 data as pairs of fp16 values
    "one_tile.MAX_CHUNKS": 3,
    "arithmetic.MIN_PAIR_ELEMENTS": 0,
}


@pytest.fixture
def launches(monkeypatch):
    """Record (whether it is an adjoint, its launch) for each product; products of all sizes are eligible."""
    launches, launch = [], one_tile.launch

    def record(product):
        launches.append((product.adjoint, launch(product)))
        return launches[-1][1]

    monkeypatch.setattr(one_tile, "launch", record)
    with changed_choices(STORED):
        yield launches


def check_both(S, n, dtype, out_dtype, device, launches, layouts=("rows", "rows"), add=False, generated=False):
    launches.clear()
    check_project(S, n, dtype, out_dtype, device, *layouts, add=add)
    check_adjoint(S, n, dtype, out_dtype, device, *layouts, add=add)
    assert {adjoint for adjoint, _ in launches} == {False, True}
    assert all(bool(launch.sub_blocks) == generated for _, launch in launches)


SKETCHES = [(1, 1), (6, 2), (33, 1), (64, 8), (100, 3), (127, 127)]
CASES = [  # every sketch in every dtype, cycling through the other parameters
    (k, nnz, dtype, (5, 65, 130)[(i + j) % 3], (33, 200)[j % 2], (0, 7, 2**33 + 5)[(i + 2 * j) % 3], i % 2 == j % 2)
    for i, (k, nnz) in enumerate(SKETCHES)
    for j, dtype in enumerate(("float32", "float16", "bfloat16"))
]


@pytest.mark.parametrize("case", exhaustive_except(CASES[::4], CASES), ids=str)
def test_products_are_exact(kernels_on, launches, case):
    k, nnz, dtype, n, d, offset, add = case
    S = Sketch(2**40, k, nnz=nnz, seed=2**63 + k)[:, offset : offset + d]
    check_both(S, n, dtype, "float32", kernels_on, launches, add=add)


IN_AND_OUT = list(zip(LAYOUTS, [*list(LAYOUTS)[4:], *list(LAYOUTS)[:4]], strict=True))


@pytest.mark.parametrize("layouts", exhaustive_except(IN_AND_OUT[::4], IN_AND_OUT))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layouts(kernels_on, launches, layouts, dtype):
    check_both(Sketch(90, 60, nnz=4, seed=1), 66, dtype, dtype, kernels_on, launches, layouts)


@each_value(dtype=["float32", "float16"], nnz=[1, 4, pytest.param(16, marks=pytest.mark.exhaustive)], n=[20, 66])
def test_splits_and_sums_add_up(kernels_on, launches, dtype, nnz, n):
    with changed_choices(STORED | SHORT):
        check_both(Sketch(900, 100, nnz=nnz, seed=2), n, dtype, "float32", kernels_on, launches)
    assert all(launch.splits > 1 for _, launch in launches)
    assert any(launch.chunked_sum for _, launch in launches)


def check_generated(S, n, dtype, device, launches, layouts=("rows", "rows"), add=False, settings=None):
    with changed_choices(GENERATED | (settings or {})):
        check_both(S, n, dtype, "float32", device, launches, layouts, add, generated=True)


@pytest.mark.parametrize("case", exhaustive_except(CASES[1:15:4], CASES[:15]), ids=str)
def test_generated_entries(kernels_on, launches, case):
    k, nnz, dtype, n, d, offset, add = case
    S = Sketch(2**40, k, nnz=nnz, seed=2**63 + k)[:, offset : offset + d]
    check_generated(S, n, dtype, kernels_on, launches, add=add)


@pytest.mark.parametrize("layouts", exhaustive_except(IN_AND_OUT[1::4], IN_AND_OUT))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layouts_with_generated_entries(kernels_on, launches, layouts, dtype):
    check_generated(Sketch(90, 60, nnz=4, seed=1), 66, dtype, kernels_on, launches, layouts)


@each_value(dtype=["float32", "float16"], nnz=[1, 3, 8], n=[20, 66])
def test_splits_with_generated_entries(kernels_on, launches, dtype, nnz, n):
    check_generated(Sketch(900, 30, nnz=nnz, seed=2), n, dtype, kernels_on, launches, settings=SHORT)
    assert all(launch.splits > 1 for _, launch in launches)
    assert all(launch.chunked_sum for adjoint, launch in launches if not adjoint)


def test_underestimated_scale_is_recovered(kernels_on, launches):
    """Values far larger than the sampled ones overflow as fp16 pairs; the product is recomputed."""
    S = Sketch(400, 60, nnz=4, seed=3)
    x = torch.ones(70, 400, device=kernels_on)
    x[3, 7], x[69, 399] = 2.0**20, -(2.0**20)
    out = torch.empty(70, 60, device=kernels_on)
    with changed_choices(STORED | SHORT):
        exact.project(S.spec, x, out, False)
    assert launches[-1][1].mode == FP16_PAIR
    assert torch.equal(out.cpu().double(), x.cpu().double() @ torch.from_numpy(S.toarray()).T)  # integers / 2


def test_choice():
    """One tile, not a power-of-two geometry, enough vectors; whole steps within the promised memory."""
    assert isinstance(choose(exact_product(k=100)), one_tile.OneTile)
    assert isinstance(choose(exact_product(k=60, adjoint=True, device=HOPPER)), one_tile.OneTile)
    assert isinstance(choose(exact_product(k=100, adjoint=True, device=HOPPER)), staged_adjoint.StagedAdjoint)
    assert isinstance(choose(exact_product(k=100, nnz=8, adjoint=True, device=HOPPER)), one_tile.OneTile)
    for others in ({"k": 128}, {"k": 300}, {"k": 100, "n": 50}, {"k": 100, "dtype": "float64"}):
        assert not one_tile.eligible(exact_product(**others))
    for device in (H200, HOPPER):
        assert choose(exact_product(n=3000, d=1000, k=32, nnz=8, device=device)).sub_blocks == one_tile.SUB_BLOCKS
    for others in ({"nnz": 9}, {"stacks": 2}, {"n": 30_000}, {"n": 10}, {"d": 60}, {"k": 128}):
        assert not one_tile.is_small(exact_product(**{"n": 1000, "d": 768, "k": 32} | others))
        assert not one_tile.is_small(exact_product(**{"n": 1000, "d": 768, "k": 32, "adjoint": True} | others))
    for d in (1, 64, 65, 4096, 100_003, 190_000):
        for k, nnz, n in ((100, 4, 64), (20, 1, 5000), (127, 120, 1000)):
            for adjoint in (False, True):
                product = exact_product(n=n, d=d, k=k, nnz=nnz, adjoint=adjoint, device=H200)
                chosen, chunk = one_tile.launch(product), 1 << product.geometry.log_chunk
                chunks = -(-d // chunk)
                assert (chosen.splits - 1) * chosen.chunks_per_split < chunks <= chosen.splits * chosen.chunks_per_split
                assert chosen.splits == 1 or chosen.chunks_per_split * chunk % one_tile.STEP == 0
                if one_tile.eligible(product) and not adjoint and chosen.splits > 1:
                    entries = chunks * chunk * chosen.rows * 2
                    assert entries + 4 * chosen.splits * n * k <= 64 << 20


@pytest.mark.parametrize(
    ("case", "narrow"),
    [
        ({}, True),
        ({"n": 48}, False),
        ({"n": 65}, False),
        ({"k": 33}, False),
        ({"nnz": 1}, False),
        ({"nnz": 8, "n": 24, "k": 64}, True),
        ({"nnz": 8, "n": 23, "k": 64}, False),
        ({"nnz": 8, "k": 65}, False),
        ({"nnz": 9}, False),
        ({"x_strides": (1 << 20, 1)}, False),
        ({"x_strides": (1 << 20, 1), "nnz": 5, "n": 40, "k": 64}, True),
        ({"x_strides": (1 << 20, 1), "nnz": 5, "n": 39, "k": 64}, False),
        ({"d": (1 << 18) - 1}, True),
        ({"d": 1 << 18}, False),  # 64 MiB
        ({"d": 1 << 23, "k": 16}, True),
        ({"d": (1 << 23) + 1, "k": 16}, False),  # too many partial sums
        ({"stacks": 2}, False),
        ({"dtype": "float64"}, False),
        ({"adjoint": True}, False),
    ],
)
def test_narrow_products(case, narrow):
    shape = {"n": 64, "d": 1 << 17, "k": 32, "nnz": 4, "device": HOPPER} | case
    product = exact_product(**{"x_strides": (1, shape["n"])} | shape)
    assert one_tile.is_narrow(product) == narrow
    if narrow:
        chosen, width = choose(product), 1 << product.geometry.log_chunk
        assert chosen.sub_blocks == one_tile.SUB_BLOCKS
        assert chosen.chunks_per_split * width <= (one_tile.MAX_STEPS + 1) * one_tile.STEP
        assert 4 * chosen.splits * product.n * product.k <= 64 << 20


@pytest.mark.parametrize(
    ("case", "vectors", "warps"),
    [
        ({"k": 80}, 128, 4),
        ({"k": 64, "nnz": 3}, 64, 4),
        ({"k": 50, "x_strides": (1025, 1)}, 64, 4),
        ({"k": 80, "x_strides": (1, 100_000)}, 128, 8),
        ({"k": 50, "x_strides": (1, 100_000)}, 128, 4),
        ({"k": 50, "n": 64}, 64, 4),
        ({"k": 80, "dtype": "float32"}, 64, 4),
        ({"k": 60, "adjoint": True}, 128, 4),
        ({"k": 60, "adjoint": True, "x_strides": (1025, 1)}, 64, 4),
        ({"k": 22, "nnz": 8, "adjoint": True}, 64, 4),  # chunks of 2 columns
        ({"k": 100, "adjoint": True}, 128, 8),
    ],
)
def test_vectors_of_a_program(case, vectors, warps):
    product = exact_product(**{"n": 100_000, "d": 1024, "nnz": 4, "dtype": "bfloat16", "device": H200} | case)
    chosen = one_tile.launch(product)
    assert (chosen.block_vectors, chosen.num_warps) == (vectors, warps)


@pytest.mark.parametrize(
    ("case", "kernel"),
    [
        ({}, one_tile.OneTile),
        ({"n": 24_000}, staged_adjoint.StagedAdjoint),
        ({"nnz": 1}, staged_adjoint.StagedAdjoint),
        ({"k": 80}, staged_adjoint.StagedAdjoint),
        ({"dtype": "float32"}, staged_adjoint.StagedAdjoint),
    ],
)
def test_adjoints_with_two_terms(case, kernel):
    product = exact_product(
        **{"n": 25_000, "d": 1024, "k": 30, "nnz": 2, "dtype": "float16", "adjoint": True, "device": HOPPER} | case
    )
    assert isinstance(choose(product), kernel)
