"""Contiguous vectors (adjacent in memory) give bit for bit the products of vectors stored as rows."""

import numpy as np
import pytest
from helpers.cases import each_value, pairwise
from helpers.data import before_protected_page

import sjlt
from sjlt.backends.cpu import contiguous
from sjlt.backends.cpu.bits import compute_dtype, kernel_view
from sjlt.backends.cpu.plan import exact_plan

SKETCHES = {  # n_features, n_components, nnz, stacks; the keys tell how the features are blocked
    "one block": (6000, 2000, 3, 1),
    "blocks": (20_000, 100, 1, 1),
    "short blocks": (40_000, 20, 4, 1),
    "stacks": (6000, 256, 8, 4),
}


def sliced(data, slices):
    """All or some columns of a row-major matrix."""
    if slices == "part":
        return data[::3, 5:-8]
    if slices == "backwards":
        return data[::-1]
    return np.broadcast_to(data[:1], data.shape) if slices == "repeated" else data


@each_value(
    sketch=list(SKETCHES),
    n=[4, 20, 33, 300],
    dtype=["float64", "float32", "float16"],
    slices=["whole", "part", "backwards", "repeated"],
    accumulate=[False, True],
    memory=[None, 1 << 20],
    threads=[1, 3],
)
def test_products_equal_row_major(sketch, n, dtype, slices, accumulate, memory, threads, monkeypatch):
    if memory:  # so small that groups of vectors and of blocks are processed one after another
        monkeypatch.setattr(contiguous, "SUMS_BYTES", memory)
        monkeypatch.setattr(contiguous, "MAX_WIDTH", 128)
        monkeypatch.setattr(contiguous, "STEP_WORK", 1 << 16)
    d, k, nnz, stacks = SKETCHES[sketch]
    S = sjlt.Sketch(d, k, nnz=nnz, stacks=stacks, seed=3)
    rows = (3 * d, n + 13) if slices == "part" else (d, n)
    columns = sliced(np.random.default_rng(1).standard_normal(rows).astype(dtype), slices)
    x = columns.T
    assert x.shape == (n, d)
    assert x.strides[0] == x.itemsize
    result_dtype = np.float64 if dtype == "float64" else np.float32
    results = [np.ones((n, k), result_dtype) for _ in range(2)]
    before = sjlt.get_num_threads()
    sjlt.set_num_threads(threads)
    try:
        for each, out in zip((x, np.ascontiguousarray(x)), results, strict=True):
            S.project(each, out=out, accumulate=accumulate)
    finally:
        sjlt.set_num_threads(before)
    np.testing.assert_array_equal(*results)


@each_value(
    sketch=list(SKETCHES),
    n=[4, 33, 300],
    dtypes=[
        ("float64", "float64"),
        ("float32", "float32"),
        ("float16", "float16"),
        ("float16", "float64"),
        ("int8", "float32"),
    ],
    slices=["whole", "part", "backwards"],
    order=["C", "F"],
    memory=[None, 1 << 20],
)
def test_adjoints_equal_row_major(sketch, n, dtypes, slices, order, memory, monkeypatch):
    if memory:
        monkeypatch.setattr(contiguous, "SUMS_BYTES", memory)
        monkeypatch.setattr(contiguous, "MAX_WIDTH", 128)
    d, k, nnz, stacks = SKETCHES[sketch]
    S = sjlt.Sketch(d, k, nnz=nnz, stacks=stacks, seed=3)
    y = np.asarray((30 * np.random.default_rng(1).standard_normal((n, k))).astype(dtypes[0]), order=order)
    whole = np.full((3 * d, n + 13) if slices == "part" else (d, n), np.nan, dtypes[1])
    columns = sliced(whole, slices)
    expected = np.full((n, d), np.nan, dtypes[1])
    before = sjlt.get_num_threads()
    sjlt.set_num_threads(3)
    try:
        for out in (columns.T, expected):
            S.project_adjoint(y, out=out)
    finally:
        sjlt.set_num_threads(before)
    np.testing.assert_array_equal(columns.T, expected)
    assert np.isfinite(whole).sum() == columns.size  # nothing is written around it


@each_value(
    n=[8, 15, 16, 17, 31, 129, 300],
    sizes=[(900, 300, 4), (40, 2000, 3), (20_000, 100, 1)],
    dtype=["float32", "float64"],
    slices=["whole", "part", "backwards", "repeated"],
    width=[1024, 128],
    threads=[1, 3],
)
def test_components_are_read_in_place(n, sizes, dtype, slices, width, threads, monkeypatch):
    d, k, nnz = sizes
    monkeypatch.setattr(contiguous, "MAX_WIDTH", width)
    S = sjlt.Sketch(d, k, nnz=nnz, seed=3)
    rows = (3 * k, n + 13) if slices == "part" else (k, n)
    B = sliced(np.random.default_rng(1).standard_normal(rows).astype(dtype), slices)
    whole = np.full((d, n + 5), np.nan, dtype)
    assert contiguous.reads_components(B.T, whole[:, :n].T, B.dtype) == (n >= 64 // B.itemsize)
    before = sjlt.get_num_threads()
    sjlt.set_num_threads(threads)
    try:
        S.project_adjoint(B.T, out=whole[:, :n].T)
    finally:
        sjlt.set_num_threads(before)
    np.testing.assert_array_equal(whole[:, :n].T, S.project_adjoint(np.ascontiguousarray(B.T)))
    assert np.isnan(whole[:, n:]).all()


@pytest.mark.usefixtures("restored_num_threads")
@pairwise(
    n=[7, 16, 129, 300, 1031],
    sizes=[(33, 700, 3), (300, 900, 1), (600, 500, 2), (90, 4000, 8)],
    dtypes=[("float32", "float32"), ("float64", "float64"), ("float32", "float16"), ("float64", "float32")],
    slices=["whole", "part", "backwards", "repeated"],
    layout=["rows", "padded rows", "every other column"],
    accumulate=[False, True],
    threads=[1, 3],
)
def test_components_of_rows_are_read_in_place(n, sizes, dtypes, slices, layout, accumulate, threads, monkeypatch):
    """Adjoints of column-major data to row-major results, compared bit for bit with those of row-major data."""
    (d, k, nnz), (dtype, out_dtype) = sizes, dtypes
    accumulate = accumulate and out_dtype != "float16"  # which kernels do not support
    monkeypatch.setattr(contiguous, "MAX_READS_LOOKED_UP", 100)
    S = sjlt.Sketch(d, k, nnz=nnz, seed=3)
    rng, rows = np.random.default_rng(1), (3 * k, n + 13) if slices == "part" else (k, n)
    columns = (rng.standard_normal(rows) * 2.0 ** rng.integers(-8, 8, rows)).astype(dtype)
    columns[:30, 5:7], columns[30:60, 5], columns[60:90, 6] = -np.finfo(dtype).smallest_subnormal, np.inf, np.nan
    y, results = sliced(columns, slices).T, []
    for data in (y, np.ascontiguousarray(y)):
        whole = np.full((n + 1, 2 * d + 2), 777, out_dtype)
        out = whole[:n, : 2 * d : 2] if layout == "every other column" else whole[:n, :d]
        out = out[::-1] if layout == "padded rows" else out
        if not accumulate:
            out[...] = np.nan
        plan = exact_plan(S.spec)
        in_place = data is y and n >= 64 // y.itemsize and d * nnz <= 4 * k
        assert contiguous.gathers_in_place(plan, data, out, data.dtype, True) == in_place
        sjlt.set_num_threads(threads)
        with np.errstate(invalid="ignore", over="ignore"):
            S.project_adjoint(data, out=out, accumulate=accumulate)
        results.append(whole)
    np.testing.assert_array_equal(*results)
    np.testing.assert_array_equal(*(np.signbit(r) | np.isnan(r) for r in results))
    around = np.ones_like(results[0], bool)
    around[:n, : 2 * d if layout == "every other column" else d] = False
    assert (results[0][around] == 777).all()


@pytest.mark.parametrize("n", [5, 21])
@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.exhaustive)])
def test_nothing_is_read_beyond_the_data(dtype, n):
    """The data ends where a protected page begins."""
    S = sjlt.Sketch(5000, 64, nnz=4, seed=1)
    assert not (S @ before_protected_page((5000, n), dtype)).any()
    assert not (S.T @ before_protected_page((64, n), dtype)).any()


@pytest.mark.parametrize("n", [16, 21, 129, 263])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nothing_is_read_beyond_components(dtype, n):
    S = sjlt.Sketch(30, 200, nnz=2, seed=1)
    y, out = before_protected_page((200, n), dtype).T, before_protected_page((n, 30), dtype)
    assert contiguous.gathers_in_place(exact_plan(S.spec), y, out, y.dtype, True)
    out[...] = 1
    S.project_adjoint(y, out=out)
    assert not out.any()


def test_where_components_are_read_in_place():
    y, out = np.zeros((200, 40), np.float32).T, np.zeros((40, 500), np.float32)

    def is_chosen(y=y, n_features=70, out=out, compute=np.float32, can_look_up=False):
        plan = exact_plan(sjlt.Sketch(n_features, 200, nnz=2).spec)
        return contiguous.gathers_in_place(plan, y, out[:, :n_features], np.dtype(compute), can_look_up)

    assert is_chosen()
    assert is_chosen(can_look_up=True)
    assert is_chosen(n_features=400)
    assert not is_chosen(n_features=80, can_look_up=True)
    assert not is_chosen(n_features=410)
    assert not is_chosen(y=np.ascontiguousarray(y))
    assert not is_chosen(y=y[:15])
    assert not is_chosen(y=y.astype(np.uint16, order="F"))
    assert not is_chosen(out=np.asfortranarray(out))
    assert not is_chosen(y=y[::2])


@pytest.mark.usefixtures("restored_num_threads")
@pairwise(
    n=[4, 7, 20, 33, 64],
    d=[700, 5003, 40_000],
    sizes=[(16, 1, 1), (130, 3, 1), (301, 8, 1), (32, 2, 2)],
    dtype=["float16", "float32", "float64"],
    layout=[(0, "C", 0), (5, "F", 1234), (5, "C", 0)],
    accumulate=[False, True],
    threads=[1, 3],
)
def test_sums_from_lists_are_bitwise_those_from_codes(n, d, sizes, dtype, layout, accumulate, threads, monkeypatch):
    (k, nnz, stacks), (padding, order, offset) = sizes, layout
    accumulate = accumulate and dtype != "float16"  # which kernels do not support
    sjlt.set_num_threads(threads)
    plan = exact_plan(sjlt.Sketch(offset + d, k, nnz=nnz, stacks=stacks, seed=d)[:, offset:].spec)
    plan._uses = 100  # lists are kept
    rng = np.random.default_rng(n)
    columns = (rng.normal(size=(d, n + padding)) * 2.0 ** rng.integers(-8, 8, (d, 1))).astype(dtype)
    columns[:, n:], columns[0, 0], columns[-1, n - 1] = np.nan, np.nan, np.inf
    x, results = columns.T[:n], []
    for listed_bytes in (0, 512):
        monkeypatch.setattr(contiguous, "MAX_LISTED_BYTES", listed_bytes)
        whole = np.full((n + 1, k + 2), 777, dtype, order=order)
        if not accumulate:
            whole[:n, :k] = np.nan
        out = kernel_view(whole)[:n, :k]
        with np.errstate(invalid="ignore"):
            if not contiguous.project_contiguous(plan, kernel_view(x), out, accumulate, compute_dtype(x)):
                pytest.skip("tiles are faster")
        results.append(whole)
    np.testing.assert_array_equal(*results)
    np.testing.assert_array_equal(*(np.signbit(r) | np.isnan(r) for r in results))
    assert (results[0][n:] == 777).all()
    assert (results[0][:, k:] == 777).all()
