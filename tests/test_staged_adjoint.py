"""Adjoints whose data is looked up in shared memory: eligible products, launches, words, and exactness."""

import numpy as np
import pytest
import torch
from helpers.cases import each_value, each_value_then_pairs, pairwise
from helpers.choices import A100, HOPPER, STAGED_ADJOINTS, all_tensors_on, changed_choices, exact_product
from helpers.kernels import check_adjoint, product_error
from helpers.shared_memory import emulate
from hypothesis import assume, example, given
from hypothesis import strategies as st

from sjlt import Sketch
from sjlt.backends.triton import device
from sjlt.backends.triton import staged_adjoint as launches
from sjlt.kernels.config import exact, staged_adjoint
from sjlt.kernels.config.product import ITEM_BYTES, SCRATCH_BYTES
from sjlt.kernels.portable.column_words import encode_offsets
from sjlt.laws import exact as law

DEVICE = "cpu" if device.INTERPRETED else "cuda"
EMULATED = HOPPER._replace(multiprocessors=4, hopper=False, programmatic_launch=False, nvidia=False, interpreted=True)


@pytest.mark.parametrize(
    ("case", "takes"),
    [
        ({}, True),
        ({"dtype": "float16"}, True),
        ({"dtype": "float64"}, True),
        ({"n": 5000, "d": 500}, True),
        ({"stacks": 4, "k": 75, "nnz": 1}, True),
        ({"adjoint": False}, False),
        ({"n": 8}, False),
        ({"k": 60}, False),  # one_tile
        ({"k": 60, "nnz": 1}, True),
        ({"k": 100}, True),
        ({"k": 100, "dtype": "bfloat16", "d": 1000}, True),  # rows of the result begin off multiples of 32 bytes
        ({"k": 60, "dtype": "bfloat16", "d": 1000}, True),
        ({"k": 60, "dtype": "bfloat16", "d": 1000, "nnz": 8}, False),  # one_tile
        ({"k": 60, "dtype": "bfloat16", "d": 200}, False),
        ({"k": 20_000}, False),  # too large for shared memory
        ({"nnz": 17}, False),
        ({"d": 1 << 24, "n": 16}, False),  # too many words
        ({"x_strides": (2000, 2)}, False),
        ({"y_strides": (2000, 2)}, False),
        ({"k": 512, "x_strides": (1, 1 << 20), "y_strides": (1, 1 << 20)}, False),  # row_gather
        ({"device": HOPPER._replace(asynchronous_copies=False)}, False),
    ],
)
def test_eligible_products(case, takes):
    product = exact_product(**{"device": HOPPER, "k": 300, "adjoint": True, **case})
    assert staged_adjoint.eligible(product) == takes
    if not case.get("stacks"):
        assert isinstance(exact.choose(product), exact.StagedAdjoint) == takes


@given(
    n=st.integers(16, 5000), d=st.integers(1, 1 << 20), k=st.integers(1, 7000), nnz=st.integers(1, 9),
    stacks=st.sampled_from([1, 2]), columns=st.tuples(st.booleans(), st.booleans()), padding=st.integers(0, 16),
    dtype=st.sampled_from(sorted(ITEM_BYTES)), described=st.sampled_from([HOPPER, A100]), plain=st.booleans(),
)  # fmt: skip
@example(
    n=16, d=1, k=164, nnz=1, stacks=2, columns=(False, False), padding=0, dtype="float32", described=A100, plain=False
)  # just fits in the shared memory of six programs
def test_launches_cover_the_product(n, d, k, nnz, stacks, columns, padding, dtype, described, plain):
    assume(nnz <= law.max_nnz(k))
    x_strides = (1, n + padding) if columns[0] else (d + padding, 1)
    y_strides = (1, n + padding) if columns[1] else (stacks * k + padding, 1)
    product = exact_product(
        n, d, k, nnz, 0, x_strides, y_strides, dtype, adjoint=True, plain=plain, device=described, stacks=stacks
    )  # fmt: skip
    with changed_choices(STAGED_ADJOINTS):
        assume(staged_adjoint.eligible(product))
        launch = staged_adjoint.launch(product)
    kernel, item = launch.kernel, product.item_bytes
    assert launch.columns >= d > launch.columns - launch.columns_per_split
    assert launch.columns_per_split % kernel.step == 0
    assert 4 * staged_adjoint.words(product, launch) <= SCRATCH_BYTES
    assert launch.spacing * kernel.adjacent >= stacks * k
    rows = launch.spacing * kernel.adjacent + 1
    assert kernel.staged_bytes + rows * kernel.row_bytes + 16 <= launch.shared_bytes <= described.shared_memory
    if kernel.copy_bytes:
        assert y_strides[0] == 1
        assert y_strides[1] * item % kernel.copy_bytes == 0
    elif kernel.adjacent > 1:
        assert y_strides[0] % kernel.adjacent == k * stacks % kernel.adjacent == 0
    if not kernel.staged_bytes:
        assert plain
        assert (n + padding if columns[0] else d + padding) * item % 8 == 0
        assert (n if columns[0] else d) * item % 8 == 0


@each_value(
    sketch=[(1024, 4, 4), (300, 3, 1), (1088, 8, 2), (700, 6, 1), (20, 4, 4)], first=[0, 77],
    layout=[(128, 0, 0, 7), (64, 2, 1, 3), (32, 3, 2, 1), (16, 0, 3, 0), (128, 0, 0, 0)],
)  # fmt: skip
def test_words_follow_the_law(sketch, first, layout):
    """Offsets of different components never overlap, and are those of the entries' rows."""
    (k, nnz, stacks), (row_bytes, log_adjacent, log_rows_per_quad, quad_mask) = sketch, layout
    step, columns, seed = 64, 192, -5
    g, spacing = law.geometry(k // stacks, nnz // stacks, 0), -(-k >> log_adjacent)
    words = torch.full((columns // step, nnz, step), -7, dtype=torch.int32, device=DEVICE)
    encode_offsets[(-(-columns // 128), stacks * -(-(nnz // stacks) // 4))](
        words, seed, k // stacks, nnz // stacks, g.n_tiles, g.log_group, g.log_chunk, first, columns, step, nnz,
        row_bytes, log_adjacent, spacing, log_rows_per_quad, quad_mask, BLOCK=128, PROGRAMMATIC_LAUNCH=False,
    )  # fmt: skip
    words = words.cpu().numpy().transpose(1, 0, 2).reshape(nnz, columns)
    rows, signs = Sketch(first + columns, k, nnz=nnz, stacks=stacks, seed=seed).entries(first)
    component = np.arange(k)
    quad = (component >> log_adjacent >> log_rows_per_quad) & quad_mask
    places = (component % (1 << log_adjacent) * spacing + (component >> log_adjacent)) * row_bytes + quad * 16
    assert len(set((places // row_bytes).tolist())) == k
    np.testing.assert_array_equal(words & 0x7FFFFFFF, places[rows])
    np.testing.assert_array_equal(np.where(words < 0, -1, 1), signs)


SKETCHES = [(300, 3, 1), (512, 4, 2), (1000, 8, 4), (640, 1, 1)]
LAYOUTS = [  # of data and result
    ("rows", "rows"),
    ("columns", "columns"),
    ("inner part", "inner part of columns"),
    ("inner part of columns", "padded rows"),
    ("padded rows", "columns"),
    ("columns", "inner part"),
    ("aligned part", "aligned part"),
]


@pytest.fixture
def emulated(monkeypatch):
    if not device.INTERPRETED:
        pytest.skip("shared memory is emulated in Triton's interpreter")
    emulate(monkeypatch)
    all_tensors_on(monkeypatch, EMULATED)
    started = []
    prepare = launches.prepare
    monkeypatch.setattr(launches, "prepare", lambda chosen, *rest: started.append(chosen) or prepare(chosen, *rest))
    return started


@each_value_then_pairs(
    sketch=SKETCHES, dtype=["float32", "bfloat16", "float16", "float64"], layouts=LAYOUTS,
    size=[(33, 131), (40, 336), (64, 130)], add=[False, True],
)  # fmt: skip
def test_addresses(emulated, sketch, dtype, layouts, size, add):
    (k, nnz, stacks), (x_in, out_in), (n, d) = sketch, layouts, size
    S = Sketch(345 + d, k, nnz=nnz, stacks=stacks, seed=3)[:, 345:]
    with changed_choices(STAGED_ADJOINTS | {"staged_adjoint.MAX_GATHERED": 0}):
        check_adjoint(S, n, dtype, x_in=x_in, out_in=out_in, add=add)
    assert emulated, "another kernel was chosen"


@each_value(layouts=[("rows", "rows"), ("columns", "columns"), ("rows", "columns")], row_bytes=[16, 32, 64, 128])
def test_blocks_of_every_width(emulated, layouts, row_bytes):
    x_in, out_in = layouts
    with changed_choices(STAGED_ADJOINTS | {"staged_adjoint.ROW_BYTES": (row_bytes,)}):
        check_adjoint(Sketch(200, 260, nnz=2, seed=3), 40, x_in=x_in, out_in=out_in)
    assert [chosen.kernel.row_bytes for chosen in emulated] == [row_bytes]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_other_dtypes_of_results(emulated, dtype):
    out_dtype = {"float32": "float64", "bfloat16": "float32", "float64": "float32"}[dtype]
    with changed_choices(STAGED_ADJOINTS):
        check_adjoint(Sketch(200, 300, nnz=4, seed=3), 40, dtype, out_dtype)
    assert emulated, "another kernel was chosen"


# ------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pairwise(
    sketch=SKETCHES, dtype=["float32", "bfloat16", "float16", "float64"], layouts=LAYOUTS,
    size=[(64, 1024, 0), (301, 1, 0), (5000, 131, 12_345), (64, 20_001, 12_345)], add=[False, True],
)  # fmt: skip
def test_products(sketch, dtype, layouts, size, add):
    (k, nnz, stacks), (x_in, out_in), (n, d, offset) = sketch, layouts, size
    S = Sketch(offset + d, k, nnz=nnz, stacks=stacks, seed=3)[:, offset:]
    with changed_choices(STAGED_ADJOINTS | {"staged_adjoint.MAX_GATHERED": 0}):
        check_adjoint(S, n, dtype, device="cuda", x_in=x_in, out_in=out_in, add=add)


@pytest.mark.gpu
@pytest.mark.parametrize("x_in", ["rows", "columns"])
def test_non_finite_values_reach_only_their_columns(x_in):
    S = Sketch(3000, 300, nnz=4, seed=3)
    y = torch.randn(70, 300, device="cuda")
    y[7, 200] = torch.inf
    y = y if x_in == "rows" else y.T.contiguous().T
    with changed_choices(STAGED_ADJOINTS):
        x = y @ S
    rows, _ = S.entries(0)
    expected = np.zeros((70, 3000), bool)
    expected[7, (rows == 200).any(0)] = True
    np.testing.assert_array_equal(~x.isfinite().cpu().numpy(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 2e-7), (torch.float64, 1e-15), (torch.float16, 4e-4), (torch.bfloat16, 3e-3)]
)
def test_errors(dtype, limit):
    S = Sketch(3000, 1000, nnz=7, seed=3)
    y = torch.randn(2000, 1000, device="cuda", dtype=dtype)
    exact_result = torch.from_numpy(y.double().cpu().numpy() @ S).cuda()
    with changed_choices(STAGED_ADJOINTS):
        first = y @ S
        assert product_error(first, exact_result) < limit
        assert torch.equal(y @ S, first)
