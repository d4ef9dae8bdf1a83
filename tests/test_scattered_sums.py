"""Few long vectors whose columns add to sums in shared memory: eligible products, and exactness."""

import random

import numpy as np
import pytest
import torch
from helpers.cases import each_value_then_pairs, exhaustive_except, pairwise
from helpers.choices import H200, HOPPER, all_tensors_on, changed_choices, exact_product
from helpers.kernels import check_project, product_error
from helpers.shared_memory import emulate
from hypothesis import given
from hypothesis import strategies as st

from sjlt import Sketch
from sjlt.backends.triton import device
from sjlt.kernels.config import scattered_layouts, scattered_rules, scattered_sums
from sjlt.kernels.config.codes import Codes
from sjlt.kernels.config.exact import FewVectors, TensorCore, choose
from sjlt.kernels.config.product import SCRATCH_BYTES, count_groups
from sjlt.kernels.config.scattered_sums import ScatteredSums
from sjlt.laws import exact as law

EMULATED = HOPPER._replace(multiprocessors=2, hopper=False, programmatic_launch=False, nvidia=False, interpreted=True)
A100 = HOPPER._replace(shared_memory=163 << 10, multiprocessors=108, hopper=False)
LONG = {"n": 4, "d": 1 << 22, "k": 300, "device": HOPPER}
SMALL = {"scattered_rules.MIN_BYTES": 0, "scattered_rules.MIN_FEATURES": 0}


@pytest.mark.parametrize(
    ("case", "takes"),
    [
        ({}, True),
        ({"dtype": "bfloat16", "n": 24, "nnz": 8}, True),
        ({"k": 1024}, False),  # sums in registers
        ({"k": 512}, True),
        ({"k": 512, "n": 1}, False),
        ({"k": 512, "nnz": 1}, False),
        ({"k": 512, "d": 1 << 24}, False),
        ({"k": 512, "x_strides": (1, 4)}, False),
        ({"k": 512, "x_strides": (1, 4), "dtype": "float16"}, True),
        ({"k": 1024, "n": 9}, True),
        ({"k": 1024, "n": 15, "nnz": 1}, False),
        ({"k": 1024, "n": 16, "nnz": 1}, True),
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
        ({"n": 3072, "d": 1000}, True),
        ({"n": 3073, "d": 1000}, False),
        ({"k": 128}, False),  # a power-of-two geometry
        ({"k": 129}, False),  # two tiles
        ({"k": 17}, True),
        ({"k": 16}, False),  # sub-blocks of 4 rows
        ({"k": 33, "n": 641}, True),
        ({"k": 32, "n": 641}, False),
        ({"nnz": 1}, False),
        ({"nnz": 12}, True),
        ({"nnz": 13}, False),
        ({"d": 500}, False),  # less than 1 MiB
        ({"d": 8388}, True),
        ({"d": 8389}, False),  # too many terms
        ({"d": 4194, "dtype": "float16"}, True),
        ({"d": 4195, "dtype": "float16"}, False),
        ({"dtype": "float64"}, False),
        ({"k": 129, "device": A100}, True),
        ({"k": 129, "device": A100, "n": 641}, False),
        ({"d": 16_777, "device": A100}, True),
        ({"d": 16_778, "device": A100}, False),
        ({"x_strides": (1, 500)}, False),  # contiguous vectors
        ({"adjoint": True}, False),
    ],
)
def test_eligible_short_rows(case, takes):
    product = exact_product(**({"n": 500, "d": 2000, "k": 50, "nnz": 4, "device": HOPPER} | case))
    assert scattered_rules.eligible_small(product) == takes
    if takes:
        assert isinstance(choose(product), scattered_sums.ScatteredSums)


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
        ({"nnz": 1}, False),
    ],
)
def test_eligible_products_of_more_vectors(case, takes):
    wide = {"n": 100, "d": 7_000_000, "k": 18, "nnz": 3, "x_strides": (1, 100), "dtype": "float16", "device": A100}
    assert isinstance(choose(exact_product(**(wide | case))), scattered_sums.ScatteredSums) == takes


@pytest.mark.parametrize(
    ("dtype", "n", "stride", "aligned", "width"),
    [
        ("float16", 32, 32, True, 8),
        ("float16", 32, 34, True, 2),
        ("float16", 30, 32, True, 2),  # a word would extend past the last element
        ("float16", 32, 32, False, 1),
        ("float32", 6, 6, True, 2),
        ("float32", 5, 6, True, 1),
        ("float64", 4, 4, True, 1),
    ],
)
def test_width_of_loads_of_contiguous_vectors(dtype, n, stride, aligned, width):
    product = exact_product(n, 1 << 22, 20, 2, x_strides=(1, stride), dtype=dtype, device=HOPPER, data_aligned=aligned)
    assert scattered_layouts.contiguous_vectors(product) == width
    kernel = scattered_sums.launch(product).kernel
    assert kernel.width == min(width, kernel.layout.lane_vectors)


@given(
    n=st.integers(1, 32), d=st.integers(1, (1 << 30) - 1), k=st.integers(1, 20_000), nnz=st.integers(1, 16),
    stacks=st.sampled_from([1, 2, 4]), dtype=st.sampled_from(["bfloat16", "float32", "float64"]), columns=st.booleans(),
    offset=st.sampled_from([0, 64, 12_345, 1 << 40]), described=st.sampled_from([HOPPER, A100]),
)  # fmt: skip
def test_launches_cover_the_product(n, d, k, nnz, stacks, dtype, columns, offset, described):
    if nnz > law.max_nnz(k):
        return
    strides = (1, n) if columns else (d, 1)
    product = exact_product(n, d, k, nnz, offset, x_strides=strides, dtype=dtype, device=described, stacks=stacks)
    if not scattered_rules.eligible(product):
        return
    launch = scattered_sums.launch(product)
    kernel, layout, g, item = launch.kernel, launch.kernel.layout, product.geometry, max(4, product.item_bytes)
    batch = kernel.chunks << g.log_chunk
    batches = (offset + d - 1) // batch - offset // batch + 1
    assert (launch.splits - 1) * launch.batches_per_split < batches <= launch.splits * launch.batches_per_split
    assert launch.terms >= min(count_groups(product), launch.batches_per_split * max(1, kernel.chunks >> g.log_group))
    assert kernel.rows >= k * stacks
    assert kernel.rows % 32 == 0
    # A warp's lanes, and the window between two barriers, cover columns of one group, or use replicas.
    group = 1 << g.log_group + g.log_chunk
    window = layout.columns * kernel.together * (layout.sets if layout.shared else 1)
    assert kernel.groups == max(1, layout.columns // group)
    assert layout.replicas % kernel.groups == layout.vectors % layout.unit == 0
    assert layout.unit * item <= 16
    assert kernel.rotations in (1, 2, 4, 8, 16)
    assert layout.lane_vectors // layout.unit % kernel.rotations == 0
    assert window <= group or (kernel.together == 1 and not layout.shared)
    assert layout.parts == layout.replicas * (1 if layout.shared else layout.sets)
    assert nnz * stacks % layout.team == layout.warps % layout.team == 0
    # Batches consist of whole steps.
    assert kernel.chunks in (32, 64, 128, 256, 512)
    assert kernel.chunks <= 32 * layout.warps
    assert batch % (layout.columns * kernel.loaded * layout.sets) == 0
    assert kernel.loaded % kernel.together == 0
    assert kernel.width == 0 or layout.lane_vectors % kernel.width == n % kernel.width == 0
    assert layout.column_lanes == 1 or kernel.width > 1
    table = (kernel.chunks << kernel.log_parts) * nnz * stacks * 16
    sums = layout.parts * layout.vectors * kernel.rows * item
    assert table + sums + 16 <= kernel.shared_bytes <= described.shared_memory - 1024
    assert 32 << kernel.log_parts == max(32, 1 << g.log_chunk)
    sums = launch.splits * n * k * stacks * item
    assert sums <= 2 * max(SCRATCH_BYTES, n * d * product.item_bytes // 16)


CASES = [  # (k, nnz, stacks, n): each follows another path through the kernel
    (300, 4, 1, 3),
    (20, 4, 1, 2),  # replicas
    (20, 1, 1, 9),
    (1, 1, 1, 1),  # chunks of one column
    (100, 1, 1, 5),  # chunks of 64 columns
    (2000, 3, 1, 6),  # sums shared by the warps
    (2000, 1, 1, 1),
    (1000, 16, 1, 8),
    (320, 8, 1, 8),  # teams
    (256, 4, 2, 3),
    (1200, 12, 4, 1),
]


@pytest.mark.skipif(not device.INTERPRETED, reason="shared memory is emulated in Triton's interpreter")
@each_value_then_pairs(
    case=CASES, dtype=["float32", "float64", "bfloat16", "float16"], d=[300, 1, 6000], offset=[0, 345],
    x_in=["rows", "inner part", "columns"], out_in=["rows", "columns"], add=[False, True],
)  # fmt: skip
def test_products_emulated(monkeypatch, case, dtype, d, offset, x_in, out_in, add):
    k, nnz, stacks, n = case
    emulate(monkeypatch)
    all_tensors_on(monkeypatch, EMULATED)
    S = Sketch(offset + d, k, nnz=nnz, stacks=stacks, seed=3)[:, offset:]
    with changed_choices(SMALL):
        check_project(S, n, dtype, x_in=x_in, out_in=out_in, add=add and dtype in ("float32", "float64"))


@pytest.mark.skipif(not device.INTERPRETED, reason="shared memory is emulated in Triton's interpreter")
@pytest.mark.parametrize("seed", exhaustive_except([1, 4, 7], range(100)))
def test_any_layout_of_sums_emulated(monkeypatch, seed):
    emulate(monkeypatch)
    all_tensors_on(monkeypatch, EMULATED)
    rng = random.Random(seed)
    k, nnz, stacks, n = rng.choice([*CASES, (23, 2, 1, 32), (40, 8, 1, 16), (700, 4, 1, 16)])
    dtype, x_in = rng.choice(["float32", "float64", "float16"]), rng.choice(["rows", "columns"])
    S = Sketch(700, k, nnz=nnz, stacks=stacks, seed=seed)[:, rng.choice([0, 33]) :]
    with changed_choices(SMALL | {"scattered_sums._time": lambda *_: rng.random()}):
        check_project(S, n, dtype, x_in=x_in)


@pytest.mark.skipif(not device.INTERPRETED, reason="shared memory is emulated in Triton's interpreter")
@pytest.mark.parametrize(("n", "k", "nnz", "dtype"), [(45, 40, 4, "float16"), (150, 13, 2, "float32")])
def test_many_unaligned_rows_emulated(monkeypatch, n, k, nnz, dtype):
    emulate(monkeypatch)
    all_tensors_on(monkeypatch, EMULATED)
    with changed_choices(SMALL):
        assert scattered_rules.eligible(exact_product(n, 1301, k, nnz, dtype=dtype, device=EMULATED))
        check_project(Sketch(1301, k, nnz=nnz, seed=3), n, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k", "nnz", "dtype"), [(45, 90, 4, "float16"), (2000, 32, 3, "bfloat16")])
def test_many_unaligned_rows(n, k, nnz, dtype):
    d = 3001
    always = {"scattered_rules.MAX_CYCLES": dict.fromkeys(scattered_rules.MAX_CYCLES, 1 << 40)}
    with changed_choices(SMALL | always):
        assert isinstance(choose(exact_product(n, d, k, nnz, dtype=dtype, device=HOPPER)), scattered_sums.ScatteredSums)
        check_project(Sketch(d, k, nnz=nnz, seed=3), n, dtype, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_any_layout_of_sums(seed):
    rng = random.Random(seed)
    k, nnz, stacks, n = rng.choice([*CASES, (23, 2, 1, 32), (40, 8, 1, 16), (700, 4, 1, 16)])
    dtype, x_in = rng.choice(["float32", "float64"]), rng.choice(["rows", "columns"])
    S = Sketch(100_000, k, nnz=nnz, stacks=stacks, seed=seed)[:, rng.choice([0, 33]) :]
    with changed_choices(SMALL | {"scattered_sums._time": lambda *_: rng.random()}):
        check_project(S, n, dtype, device="cuda", x_in=x_in)


@pytest.mark.gpu
@pairwise(
    lambda case, dtype, d, *_: "16" not in dtype or d < 10_000,  # its results are exact in 16 bits
    case=[*CASES, (4096, 4, 4, 2), (1088, 8, 1, 1), (23, 2, 1, 32), (16_000, 2, 1, 1), (383, 3, 1, 17)],
    dtype=["float32", "float64", "bfloat16", "float16"], d=[3000, 100_000, 1_234_567],
    offset=[0, 12_345, (1 << 40) + 7], x_in=["rows", "inner part", "columns", "inner part of columns"],
    out_in=["rows", "columns"], add=[False, True],
)  # fmt: skip
def test_products(case, dtype, d, offset, x_in, out_in, add):
    k, nnz, stacks, n = case
    S = Sketch(offset + d, k, nnz=nnz, stacks=stacks, seed=-3)[:, offset:]
    with changed_choices(SMALL):
        check_project(S, n, dtype, device="cuda", x_in=x_in, out_in=out_in, add=add and dtype in ("float32", "float64"))


@pytest.mark.gpu
@pytest.mark.parametrize(("k", "nnz", "stacks", "n"), CASES)
def test_non_finite_values_reach_only_their_rows(k, nnz, stacks, n):
    S = Sketch(50_000, k, nnz=nnz, stacks=stacks, seed=3)
    x = torch.randn(n, 50_000, device="cuda")
    x[n - 1, 4000] = torch.inf
    with changed_choices(SMALL):
        y = S.project(x)
    rows, _ = S.entries(4000, 4001)
    expected = np.zeros((n, k), bool)
    expected[n - 1, rows.ravel()] = True
    np.testing.assert_array_equal(~y.isfinite().cpu().numpy(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize(("k", "nnz", "stacks", "n"), [(16, 3, 1, 1), (300, 4, 1, 8), (2048, 4, 4, 2)])
def test_errors(k, nnz, stacks, n, dtype, limit):
    S = Sketch(20_000_000, k, nnz=nnz, stacks=stacks, seed=3)
    x = torch.randn(n, S.n_features, device="cuda", dtype=dtype)
    exact = torch.from_numpy(S.project(x.double().cpu().numpy())).cuda()
    first = S.project(x)
    assert product_error(first, exact) < limit
    assert torch.equal(S.project(x), first)
