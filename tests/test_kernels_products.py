"""Exact products of the kernels on integer data: shapes, dtypes, strides, slices, splits."""

import itertools

import pytest
import torch
from helpers import kernels
from helpers.data import integers
from helpers.kernels import FLOATS, LAYOUTS, check_adjoint, check_project, drawn, filled, integral_matrix, poisoned

from sjlt import Sketch

# A vector whose sampled features are small or 0 seems to need a large scale: its result overflows and is recomputed.
pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered in (cast|multiply):RuntimeWarning", "ignore:invalid value encountered:RuntimeWarning"
)
on_gpu = pytest.mark.gpu


def marked(cases, default, exhaustive=()):
    """Run all cases on a GPU; in the interpreter, which is slow, only the default and the exhaustive ones."""
    marks = dict.fromkeys(exhaustive, pytest.mark.exhaustive) | dict.fromkeys(default, ())
    return [pytest.param(*case, marks=marks.get(case, on_gpu)) for case in cases]


# --------------------------------------------------------------------------------- shapes

# (n_components, nnz): one row, k < 128, most nonzeros, full and partial tiles, primes, one-column chunks.
SKETCHES = [(1, 1), (6, 4), (100, 3), (127, 63), (127, 127), (128, 1), (128, 16), (128, 128), (256, 2), (256, 4),
            (257, 5), (384, 4), (512, 128), (700, 5), (1000, 4), (1009, 8), (1024, 32)]  # fmt: skip


@pytest.mark.parametrize(("k", "nnz"), marked(SKETCHES, [(100, 3)], SKETCHES))
def test_sketches(k, nnz, kernels_on):
    """Each sketch with few and many vectors, starting in the middle of a chunk of features."""
    S = Sketch(2**40, k, nnz=nnz, seed=2**63 + k)
    for n, first, d, dtype in ((3, 2**33 + 5, 50, "float32"), (65, 77, 90, "bfloat16")):
        part = S[:, first : first + d]
        check_project(part, n, dtype, "float32", kernels_on)
        check_adjoint(part, n, dtype, "float32", kernels_on)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("n", "d"), [(0, 0), (0, 5), (3, 0), (70, 0)])
def test_empty_data(n, d, dtype, kernels_on):
    for add in (False, True):
        check_project(Sketch(d, 300, nnz=4), n, dtype, device=kernels_on, add=add)
        check_adjoint(Sketch(d, 300, nnz=4), n, dtype, device=kernels_on, add=add)


COUNTS = [(1, 1), (2, 5), (17, 31), (64, 256), (65, 50), (130, 300), (129, 1)]  # vectors, features


@pytest.mark.parametrize(
    ("n", "d", "k", "dtype"),
    marked(
        [(n, d, k, t) for n, d in COUNTS for k in (128, 300) for t in FLOATS],
        [(2, 5, 128, "float32"), (65, 50, 128, "float32")],
        [(n, d, 128, "float32") for n, d in COUNTS]
        + [(1, 1, 300, "float64"), (17, 31, 300, "float64"), (65, 50, 300, "float64"), (130, 300, 300, "float32")],
    ),
)
def test_counts(n, d, k, dtype, kernels_on):
    check_project(Sketch(d, k, nnz=4, seed=d), n, dtype, "float64", kernels_on, add=True)
    check_adjoint(Sketch(d, k, nnz=4, seed=d), n, dtype, "float64", kernels_on)


@on_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("k", "nnz"), [*SKETCHES, (5000, 1), (8_388_480, 2)])
def test_every_shape_on_a_gpu(k, nnz, dtype):
    for n, d in itertools.product((1, 8, 130), (31, 8192)):  # each takes minutes to compile over all sketches
        if n * k > 10**8:
            continue
        S = Sketch(d + 3, k, nnz=nnz, seed=d)[:, 3:]
        check_project(S, n, dtype, "float32", "cuda")
        check_adjoint(S, n, dtype, "float32", "cuda")


# --------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize(
    ("n", "dtype", "out_dtype"),
    [
        pytest.param(n, t, u, marks=() if n == 2 and t == u else pytest.mark.exhaustive)
        for n in (2, 70)
        for t, u in itertools.product(FLOATS, FLOATS)
    ],
)
def test_dtypes(n, dtype, out_dtype, kernels_on):
    if (kernels_on, dtype, out_dtype) == ("cpu", "float64", "bfloat16"):
        pytest.skip("the interpreter stores bit patterns")
    S = Sketch(43, 128, nnz=4, seed=1)[:, 3:]
    add = out_dtype in ("float32", "float64")
    check_project(S, n, dtype, out_dtype, kernels_on, add=add)
    check_adjoint(S, n, dtype, out_dtype, kernels_on, add=add)


# --------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize(
    ("layout", "dtype", "n"),
    marked(
        [*itertools.product(LAYOUTS, ["bfloat16", "float32", "float64"], (8, 66))],
        [(layout, "float32", 8) for layout in list(LAYOUTS)[::4]] + [("columns", "bfloat16", 8)],
        [(layout, t, n) for layout in LAYOUTS for t, n in (("float32", 8), ("float32", 66), ("float64", 8))]
        + [("columns", "float64", 66), ("rows", "bfloat16", 66)],
    ),
)
@pytest.mark.parametrize("parts", ["pair"], indirect=True)
def test_layouts(layout, dtype, n, parts, kernels_on):
    """Slices of the input and the result: nothing around them is read or written."""
    S = Sketch(56, 128, nnz=4, seed=3)
    for check in (check_project, check_adjoint):
        check(S, n, dtype, device=kernels_on, x_in=layout, out_in="rows" if layout != "rows" else "columns")
        check(S, n, dtype, device=kernels_on, x_in="rows" if layout != "rows" else "columns", out_in=layout)
        check(S, n, dtype, device=kernels_on, x_in=layout, out_in=layout, add=dtype != "bfloat16")


@pytest.mark.parametrize(
    ("n", "dtype"),
    marked([*itertools.product((3, 66), FLOATS)], [(3, "float32")], [(66, "float32"), (3, "float64"), (3, "float16")]),
)
def test_zero_and_overlapping_strides(n, dtype, kernels_on):
    S = Sketch(56, 128, nnz=4, seed=3)
    for check, width in ((check_project, 56), (check_adjoint, 128)):
        row = filled("rows", integers((1, width)), dtype, kernels_on)
        column = filled("rows", integers((n, 1)), dtype, kernels_on)
        line = filled("rows", integers((1, n + width)), dtype, kernels_on)
        for tensor in (
            row.expand(n, width),
            column.expand(n, width),
            row[:, :1].expand(n, width),
            line.as_strided((n, width), (1, 1)),
        ):
            check(S, n, dtype, device=kernels_on, x=(tensor.cpu().double().numpy(), tensor))


@pytest.mark.parametrize(
    ("start", "d"),
    marked(
        [*itertools.product((0, 32, 36, 64, 128), (64, 128, 256, 384))],
        [(36, 64)],
        [(0, 128), (0, 256), (64, 128), (32, 128), (64, 384)],
    ),
)
def test_aligned_slices(start, d, parts, kernels_on):
    """Sizes for which accesses may be wide and masks may be omitted."""
    S = Sketch(1024, 256, nnz=4, seed=3)[:, start : start + d]
    for dtype, n in (("float32", 128),) if parts == "pair" else (("float32", 5), ("bfloat16", 5)):
        check_project(S, n, dtype, "float32", kernels_on)
        check_adjoint(S, n, dtype, "float32", kernels_on)


COLUMNS = [(n, dtype, out) for n in (66, 68, 72) for dtype in ("float32", "float16") for out in ("columns", "rows")]


@pytest.mark.parametrize(("n", "dtype", "out_in"), marked(COLUMNS, [], COLUMNS))
def test_accesses_of_several_contiguous_vectors(n, dtype, out_in, kernels_on):
    """Numbers of contiguous vectors that 2, 4 or 8 divide, next to NaN; by each kernel that may run such a product."""
    for i, (k, nnz) in enumerate(((100, 4), (300, 2), (300, 3), (256, 4))):
        S = Sketch(200, k, nnz=nnz, seed=n)
        x_in = ("columns", "inner part of columns")[(i + n // 2) % 2]
        check_project(S, n, dtype, device=kernels_on, x_in=x_in, out_in=out_in)
        check_adjoint(S, n, dtype, device=kernels_on, x_in=x_in, out_in=out_in)


# --------------------------------------------------------------------------------- slices of the features


@pytest.mark.parametrize(
    ("k", "nnz", "n", "dtype"),
    marked(
        [*itertools.product((128, 300), (1, 4), (2, 70), FLOATS)],
        [(128, 1, 2, "float32")],
        [(128, 4, 70, "float32"), (300, 4, 70, "bfloat16"), (300, 4, 2, "float64")],
    ),
)
def test_slices_of_features_add_up(k, nnz, n, dtype, kernels_on):
    S = Sketch(2**33 + 130, k, nnz=nnz, seed=4)[:, 2**33 - 20 :]
    _, x = drawn(n, S.n_features, dtype, "rows", kernels_on)
    whole, parts = (torch.zeros(n, k, device=kernels_on, dtype=torch.float64) for _ in range(2))
    kernels.project(S, x, whole, False)
    cuts = [0, 1, 17, 130, 131, 150]
    for a, b in itertools.pairwise(cuts):
        kernels.project(S[:, a:b], x[:, a:b], parts, True)
    assert torch.equal(whole, parts)
    _, y = drawn(n, k, dtype, "rows", kernels_on)
    whole, parts = (torch.zeros(n, 150, device=kernels_on, dtype=torch.float32) for _ in range(2))
    kernels.adjoint(S, y, whole, False)
    for a, b in itertools.pairwise(cuts):
        kernels.adjoint(S[:, a:b], y, parts[:, a:b], False)
    assert torch.equal(whole, parts)


# --------------------------------------------------------------------------------- sizes that only a GPU has


def dense(S):
    """sqrt(nnz) S as a tensor on the GPU."""
    return torch.from_numpy(integral_matrix(S).toarray()).cuda()


def drawn_on_gpu(n, d, dtype, layout):
    shape = (n, d) if layout == "rows" else (d, n)
    x = torch.randint(-3, 4, shape, device="cuda", dtype=torch.int8).to(FLOATS[dtype])
    return x if layout == "rows" else x.t()


@on_gpu
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_more_blocks_than_a_grid_axis_allows(dtype, layout):
    n, S = 65_536 * 128 + 3, Sketch(8, 4, nnz=1)
    x = drawn_on_gpu(n, 8, dtype, layout)
    out = poisoned(layout, (n, 4), dtype, "cuda")
    kernels.project(S, x, out, False)
    assert torch.equal(out.double(), x.double() @ dense(S).T)
    y = drawn_on_gpu(n, 4, dtype, layout)
    out = poisoned(layout, (n, 8), dtype, "cuda")
    kernels.adjoint(S, y, out, False)
    assert torch.equal(out.double(), y.double() @ dense(S))


@on_gpu
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize(("n", "d"), [(2**22 + 1, 1100), (3, 2**30 + 1100)], ids=["tall", "wide"])
def test_more_than_2_31_elements(n, d, layout):
    """Zeros except for the last vectors and features; the whole result is checked."""
    if torch.cuda.mem_get_info()[0] < 64 << 30:
        pytest.skip("needs 64 GB of memory")
    S = Sketch(d, 128, nnz=4, seed=1)
    end = S[:, d - 1000 :]
    rows = slice(max(0, n - 70), n)
    x = poisoned(layout, (n, d), "float32", "cuda").zero_()
    x[rows, d - 1000 :] = drawn_on_gpu(n - rows.start, 1000, "float32", "rows")
    out = poisoned(layout, (n, 128), "float32", "cuda")
    kernels.project(S, x, out, False)
    assert torch.equal(out[rows].double(), x[rows, d - 1000 :].double() @ dense(end).T / 2)
    assert not out[: rows.start].any()
    y = torch.zeros_like(out)
    y[rows] = drawn_on_gpu(n - rows.start, 128, "float32", "rows")
    x.fill_(torch.nan)
    kernels.adjoint(S, y, x, False)
    assert torch.equal(x[rows, d - 1000 :].double(), y[rows].double() @ dense(end) / 2)
    assert not x[: rows.start].any()
    assert not x[rows, : d - 1000].isnan().any()
