"""Contiguous vectors (adjacent in memory) give bit for bit the products of vectors stored as rows."""

import numpy as np
import pytest
from helpers.cases import each_value, pairwise
from helpers.data import before_protected_page, sliced

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


@pytest.mark.parametrize("n", [5, 21])
@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.exhaustive)])
def test_nothing_is_read_beyond_the_data(dtype, n):
    """The data ends where a protected page begins."""
    S = sjlt.Sketch(5000, 64, nnz=4, seed=1)
    assert not (S @ before_protected_page((5000, n), dtype)).any()
    assert not (S.T @ before_protected_page((64, n), dtype)).any()


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
