"""Products whose data is staged once in shared memory for all stacks: eligible products, and exactness."""

import numpy as np
import pytest
import torch
from helpers.cases import each_value, exhaustive_except, pairwise
from helpers.choices import A100, HOPPER, all_tensors_on, changed_choices, exact_product
from helpers.data import integers
from helpers.kernels import check_project, product_error
from helpers.shared_memory import emulate
from hypothesis import given
from hypothesis import strategies as st

from sjlt import Sketch
from sjlt.backends.triton import device, exact
from sjlt.kernels.config import exact as config
from sjlt.kernels.config import staged_gather
from sjlt.kernels.config.chunk_codes import encoding
from sjlt.kernels.config.product import SCRATCH_BYTES, count_groups
from sjlt.kernels.portable.group_words import encode_groups
from sjlt.laws import exact as law

DEVICE = "cpu" if device.INTERPRETED else "cuda"
EMULATED = HOPPER._replace(multiprocessors=4, hopper=False, programmatic_launch=False, nvidia=False, interpreted=True)


@pytest.mark.parametrize(
    ("case", "takes"),
    [
        ({"stacks": 4, "nnz": 1}, True),
        ({"stacks": 2, "nnz": 2}, True),
        ({"stacks": 2, "k": 350}, False),  # run on tensor cores
        ({"stacks": 2, "k": 350, "n": 768, "d": 1 << 16, "x_strides": (1, 768)}, True),
        ({"stacks": 1}, False),  # run on tensor cores
        ({"stacks": 1, "dtype": "float64"}, True),
        ({"stacks": 1, "nnz": 1, "dtype": "float64"}, False),
        ({"stacks": 4, "dtype": "bfloat16"}, False),
        ({"stacks": 4, "adjoint": True}, False),
        ({"stacks": 4, "n": 8}, False),
        ({"stacks": 4, "d": 1 << 10, "n": 1 << 8}, False),
        ({"stacks": 4, "x_strides": (2000, 2)}, False),
        ({"stacks": 4, "device": HOPPER._replace(asynchronous_copies=False)}, False),
    ],
)
def test_eligible_products(case, takes):
    assert staged_gather.eligible(exact_product(**{"device": HOPPER, **case})) == takes


@given(
    n=st.integers(16, 5000), d=st.integers(1000, 1 << 22), k=st.integers(1, 3000), nnz=st.integers(1, 9),
    stacks=st.sampled_from([1, 2, 4, 8]), contiguous=st.booleans(), dtype=st.sampled_from(["float32", "float64"]),
    offset=st.sampled_from([0, 64, 12_345]), described=st.sampled_from([HOPPER, A100]), in_rows=st.booleans(),
    add=st.booleans(),
)  # fmt: skip
def test_launches_cover_the_product(
    n, d, k, nnz, stacks, contiguous, dtype, offset, described, in_rows, add
):  # fmt: skip
    if nnz > law.max_nnz(k):
        return
    x_strides = (1, n + 3) if contiguous else (d + 1, 1)
    y_strides = (k * stacks, 1) if in_rows else (1, n)
    product = exact_product(
        n, d, k, nnz, offset, x_strides, y_strides, dtype, plain=not add, device=described, stacks=stacks
    )  # fmt: skip
    if not staged_gather.eligible(product):
        return
    launch = staged_gather.launch(product)
    kernel, groups = launch.kernel, count_groups(product)
    assert launch.parts * kernel.rows >= 128 * product.geometry.n_tiles * stacks
    assert (launch.splits - 1) * launch.groups_per_split < groups <= launch.splits * launch.groups_per_split
    assert launch.groups_per_split <= staged_gather.MAX_TERMS[dtype]
    assert kernel.columns == 1 << product.geometry.log_group + product.geometry.log_chunk
    assert kernel.shared_bytes + (16 << 10) <= described.shared_memory
    assert max(x_strides) * product.item_bytes % kernel.copy_bytes == 0
    words = 4 * launch.parts * kernel.rows * launch.groups_per_split * launch.splits_per_pass
    is_direct = launch.splits == 1 and not (contiguous and in_rows) and not add
    sums = 0 if is_direct else launch.splits * n * k * stacks * product.item_bytes
    assert words + sums <= max(SCRATCH_BYTES, n * d * product.item_bytes // 20)


@each_value(
    sketch=[(1024, 4, 4), (300, 3, 1), (1088, 8, 2), (700, 4, 2), (20, 4, 4)], first_group=[0, 3],
)  # fmt: skip
def test_words_follow_the_law(sketch, first_group):
    k, nnz, stacks = sketch
    part, part_nnz, seed, groups = k // stacks, nnz // stacks, -5, 11
    g = law.geometry(part, part_nnz, 0)
    lists, width, row_bytes = stacks * g.n_tiles, 1 << g.log_group + g.log_chunk, 32
    padded = lists + 2
    words = torch.full((groups, padded, 128), -7, dtype=torch.int32, device=DEVICE)
    encode_groups[(-(-groups // 8), padded)](
        words, seed, part, part_nnz, g.n_tiles, g.log_group, g.log_chunk, first_group, groups, lists, row_bytes,
        SUB_BLOCKS=encoding(1, part_nnz).sub_blocks,
    )  # fmt: skip
    words = words.cpu().numpy()
    places, signs = (words & 0x7FFFFFFF) // row_bytes, np.where(words < 0, -1, 1)
    assert (places[:, lists:] == width).all()
    found = np.zeros((k, groups * width), np.int64)
    for tile in range(lists):
        stack, m = divmod(tile, g.n_tiles)
        first, end = m * part // g.n_tiles, (m + 1) * part // g.n_tiles
        assert (places[:, tile, end - first :] == width).all()
        for row in range(end - first):
            for group in np.flatnonzero(places[:, tile, row] < width):
                found[stack * part + first + row, group * width + places[group, tile, row]] += signs[group, tile, row]
    start, stop = first_group * width, (first_group + groups) * width
    rows, expected = Sketch(stop, k, nnz=nnz, stacks=stacks, seed=seed).entries(start)
    dense = np.zeros_like(found)
    dense[rows, np.arange(stop - start)] = expected
    np.testing.assert_array_equal(found, dense)


# ------------------------------------------------------------------------------------- on a GPU

SMALL = {"staged_gather.MIN_BYTES": 0}
SKETCHES = [
    (1024, 4, 4),
    (512, 4, 2),
    (4096, 4, 4),
    (600, 4, 2),
    (1200, 4, 4),
    (1000, 16, 4),
    (100, 4, 1),
    (512, 16, 1),
]
IN = ["rows", "columns", "inner part", "inner part of columns", "aligned part", "padded rows"]


@pytest.mark.skipif(not device.INTERPRETED, reason="shared memory is emulated in Triton's interpreter")
@each_value(
    case=[(512, 4, 4, "rows", False), (600, 4, 2, "columns", True)], dtype=["float32", "float64"],
    data=[("rows", 33), ("columns", 36), ("inner part of columns", 33)],
)  # fmt: skip
def test_addresses(monkeypatch, case, dtype, data):
    (k, nnz, stacks, out_in, add), (x_in, n) = case, data
    emulate(monkeypatch)
    all_tensors_on(monkeypatch, EMULATED)
    S = Sketch(500, k, nnz=nnz, stacks=stacks, seed=3)[:, 345:]
    with changed_choices(SMALL):
        check_project(S, n, dtype, x_in=x_in, out_in=out_in, add=add)


@pytest.mark.skipif(not device.INTERPRETED, reason="shared memory is emulated in Triton's interpreter")
@pytest.mark.parametrize("dtype", exhaustive_except(["float32"], ["float32", "float64"]))
def test_last_vectors_of_padded_rows(monkeypatch, dtype):
    """Rows of A start at multiples of 16 bytes and end between them."""
    emulate(monkeypatch)
    all_tensors_on(monkeypatch, EMULATED)
    S, array = Sketch(100, 512, nnz=4, stacks=4, seed=3), integers((35, 100), dtype).astype(float)
    memory = torch.full((100, 36), torch.nan, dtype=getattr(torch, dtype))
    x = memory[:, :35].T.copy_(torch.from_numpy(array))
    with changed_choices(SMALL):
        launch = staged_gather.launch(
            exact_product(35, 100, 128, 1, 0, x.stride(), dtype=dtype, device=EMULATED, stacks=4)
        )
        assert launch.kernel.copy_bytes == 16
        check_project(S, 35, dtype, x=(array, x))


@pytest.mark.gpu
@pairwise(
    lambda sketch, dtype, *_: dtype == "float64" or sketch[2] > 1,
    sketch=SKETCHES, dtype=["float32", "float64"], x_in=IN, n=[64, 301], d=[20_001], offset=[0, 12_345],
    add=[False, True], out_in=["rows", "columns"],
)  # fmt: skip
def test_products(sketch, dtype, x_in, n, d, offset, add, out_in):
    k, nnz, stacks = sketch
    S = Sketch(offset + d, k, nnz=nnz, stacks=stacks, seed=3)[:, offset:]
    with changed_choices(SMALL):
        check_project(S, n, dtype, device="cuda", x_in=x_in, out_in=out_in, add=add)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("x_in", ["rows", "columns"])
def test_passes_and_splits(dtype, x_in):
    S = Sketch(200_000, 512, nnz=4, stacks=4, seed=3)
    settings = {"staged_gather.WORD_BYTES": 400_000, "staged_gather.MAX_TERMS": {"float32": 100, "float64": 60}}
    with changed_choices(settings):
        product = exact_product(64, 200_000, 128, 1, dtype=dtype, x_strides=(200_000, 1), device=HOPPER, stacks=4)
        launch = staged_gather.launch(product)
        assert launch.splits > launch.splits_per_pass
        check_project(S, 64, dtype, device="cuda", x_in=x_in)


@pytest.mark.gpu
@pytest.mark.parametrize(("k", "nnz", "stacks", "x_in"), [(1024, 4, 4, "rows"), (1200, 4, 4, "columns")])
def test_non_finite_values_reach_only_their_rows(k, nnz, stacks, x_in):
    S = Sketch(5000, k, nnz=nnz, stacks=stacks, seed=3)
    x = torch.randn(64, 5000, device="cuda")
    x[7, 4000] = torch.inf
    x = x if x_in == "rows" else x.T.contiguous().T
    with changed_choices(SMALL):
        y = S.project(x)
    rows, _ = S.entries(4000, 4001)
    expected = np.zeros((64, k), bool)
    expected[7, rows.ravel()] = True
    np.testing.assert_array_equal(~y.isfinite().cpu().numpy(), expected)


@pytest.mark.gpu
def test_errors_of_one_split():
    S, x = Sketch(2000, 999, nnz=3, seed=3), torch.randn(4096, 2000, device="cuda", dtype=torch.float64)
    chosen = config.choose(exact.describe(S.spec, x, x.new_empty(4096, 999), False, adjoint=False))
    assert isinstance(chosen, staged_gather.StagedGather)
    assert chosen.splits == 1
    expected = torch.from_numpy(S.project(x.cpu().numpy())).cuda()
    assert product_error(S.project(x), expected) < 1e-15


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_errors(dtype, limit):
    S = Sketch(1 << 20, 1024, nnz=8, stacks=4, seed=3)
    a = torch.randn(1 << 20, 128, device="cuda", dtype=dtype)
    expected = torch.from_numpy(S.project(a.double().cpu().numpy().T)).cuda()
    first = (S @ a).T
    assert product_error(first, expected) < limit
    assert torch.equal((S @ a).T, first)
