"""CPU projections that read columns in place: bitwise equal to those from tiles."""

from itertools import count

import numpy as np
import pytest
from helpers.cases import pairwise

import sjlt
from sjlt import Sketch
from sjlt.backends.cpu import by_component, listed_vectors
from sjlt.backends.cpu.bits import compute_dtype, kernel_view
from sjlt.backends.cpu.contiguous import is_contiguous
from sjlt.backends.cpu.dense import project_exact
from sjlt.backends.cpu.plan import exact_plan

pytestmark = pytest.mark.usefixtures("restored_num_threads")
SENTINEL = 777
seeds = count(10**9)  # of sketches that no other test has used


def column_major(n, d, dtype, padding, is_reversed):
    """Numbers of many magnitudes, among them a subnormal, a NaN and an infinite one, in columns with padding of NaN."""
    rng = np.random.default_rng(n)
    columns = rng.normal(size=(d, n + padding)) * 2.0 ** rng.integers(-12, 12, (d, n + padding))
    columns = columns.astype(dtype)
    columns[0, 0], columns[d // 2, n // 2], columns[-1, n - 1] = np.finfo(dtype).smallest_subnormal, np.nan, np.inf
    columns[:, n:] = np.nan
    x = columns.T[:n]
    return x[:, ::-1] if is_reversed else x


@pairwise(
    n=[1, 7, 20, 37, 64, 200, 1100],
    d=[30, 237, 1000],
    k=[16, 301],
    nnz=[1, 2, 3, 8],
    dtype=["float16", "float32", "float64"],
    layout=[(0, False, 0), (3, True, 1234), (0, True, 0), (3, False, 1234)],
    accumulate=[False, True],
    threads=[1, 3],
)
def test_results_are_bitwise_those_of_tiles(n, d, k, nnz, dtype, layout, accumulate, threads, monkeypatch):
    padding, is_reversed, offset = layout
    accumulate = accumulate and dtype != "float16"  # which kernels do not support
    sjlt.set_num_threads(threads)
    monkeypatch.setattr(by_component, "MAX_SCALAR_VECTORS", 0)
    plan = exact_plan(Sketch(offset + d, k, nnz=nnz, seed=d)[:, offset:].spec)
    x = column_major(n, d, dtype, padding, is_reversed)
    results = []
    for in_place, order in [(False, "C"), (True, "C"), (True, "F")]:
        monkeypatch.setattr(by_component, "is_contiguous", lambda *_, in_place=in_place: in_place)
        whole = np.full((n + 1, k + 2), SENTINEL, dtype, order=order)
        if not accumulate:
            whole[:n, :k] = np.nan
        with np.errstate(invalid="ignore"):
            out = kernel_view(whole)[:n, :k]
            call = by_component.project_by_component(plan, kernel_view(x), out, accumulate, compute_dtype(x))
            call(kernel_view(x), out)
        results.append(whole)
    assert_same_bits(results)
    assert (results[0][n:] == SENTINEL).all()
    assert (results[0][:, k:] == SENTINEL).all()


@pairwise(
    n=[1, 2],
    d=[30, 5003],
    k=[16, 301],
    nnz=[1, 3, 8],
    dtype=["float16", "float32", "float64", "int32"],
    step=[1, -2],
    accumulate=[False, True],
    threads=[1, 3],
    has_fast_gathers=[False, listed_vectors.HAS_FAST_GATHERS],
)
def test_single_vectors_from_lists_are_bitwise_those_from_codes(
    n, d, k, nnz, dtype, step, accumulate, threads, has_fast_gathers, monkeypatch
):
    sjlt.set_num_threads(threads)
    monkeypatch.setattr(listed_vectors, "HAS_FAST_GATHERS", has_fast_gathers)
    monkeypatch.setattr(listed_vectors, "LISTED_WORK", 1 << 30)  # so that threads share the components
    spec = Sketch(d, k, nnz=nnz, seed=d).spec
    x = (64 * np.random.default_rng(d).normal(size=(n, 2 * d))).astype(dtype)[:, :: 2 * step // abs(step)]
    x = x if step < 0 else np.ascontiguousarray(x)
    x[0, d // 2] = 0 if dtype == "int32" else np.nan
    results = []
    for from_lists in (False, True):
        monkeypatch.setattr(by_component, "eligible", lambda *_, from_lists=from_lists: from_lists)
        exact_plan(spec).calls.clear()
        whole = np.full((n + 1, k + 2), SENTINEL, "float64" if dtype == "int32" else "float32")
        if not accumulate:
            whole[:n, :k] = np.nan
        project_exact(spec, x, whole[:n, :k], accumulate)
        results.append(whole)
    assert_same_bits(results)
    assert (results[0][n:] == SENTINEL).all()
    assert (results[0][:, k:] == SENTINEL).all()


@pytest.mark.parametrize("has_fast_gathers", [False, True])
def test_medium_sketches_of_single_vectors_are_listed(has_fast_gathers, monkeypatch):
    """Without fast gathers, only if sub-blocks are not square: those are looked up in registers."""
    monkeypatch.setattr(by_component, "HAS_FAST_GATHERS", has_fast_gathers)
    monkeypatch.setattr("sjlt.backends.cpu.plan.LISTING_PRODUCTS", 2)
    x, out = np.zeros((1, 60_000), np.float32), np.zeros((1, 600), np.float32)
    plan, square = (exact_plan(Sketch(60_000, k, nnz=4, seed=next(seeds)).spec) for k in (600, 512))
    for uses in range(4):
        assert by_component.eligible(plan, x, out, x.dtype) == (uses > 2)
        assert by_component.eligible(square, x, out[:, :512], x.dtype) == (uses > 2 and has_fast_gathers)
        plan.use()
        square.use()


def assert_same_bits(results):
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
        np.testing.assert_array_equal(*(np.signbit(r) | np.isnan(r) for r in (result, results[0])))


@pairwise(
    n=[3, 8, 9, 16, 31, 37, 64, 200, 1100],
    d=[30, 237, 1000],
    k=[16, 130, 301],
    nnz=[1, 3, 4, 8],
    dtypes=[("float32", "float32"), ("float16", "float16"), ("float64", "float64"), ("float16", "float32")],
    order=["C", "F"],
    accumulate=[False, True],
    threads=[1, 3],
)
def test_columns_of_results_are_bitwise_rows(n, d, k, nnz, dtypes, order, accumulate, threads, monkeypatch):
    """Sums are stored at once if the result is column-major, else in a tile first."""
    dtype, out_dtype = dtypes
    accumulate = accumulate and out_dtype != "float16"  # which kernels do not support
    sjlt.set_num_threads(threads)
    monkeypatch.setattr(by_component, "eligible", lambda *_: True)
    spec = Sketch(d, k, nnz=nnz, seed=d).spec
    x = np.asarray((8 * np.random.default_rng(n).normal(size=(n, d))).astype(dtype), order=order)
    results = []
    for result_order in "CF":
        whole = np.full((n + 1, k + 2), SENTINEL, out_dtype, order=result_order)
        if not accumulate:
            whole[:n, :k] = np.nan
        project_exact(spec, x, whole[:n, :k], accumulate)
        results.append(whole)
    assert_same_bits(results)
    assert (results[1][n:] == SENTINEL).all()
    assert (results[1][:, k:] == SENTINEL).all()
    expected = x @ np.sign(Sketch(d, k, nnz=nnz, seed=d).toarray()).T / np.sqrt(nnz) + SENTINEL * accumulate
    np.testing.assert_allclose(results[1][:n, :k], expected, rtol=4e-3, atol=0.5 if out_dtype == "float16" else 0.02)


def test_where_columns_are_read():
    x = np.zeros((1000, 1024), np.float32)
    single, double = np.dtype(np.float32), np.dtype(float)
    assert is_contiguous(x.T, single)
    assert not is_contiguous(x, single)
    assert is_contiguous(x.T[3:19], single)
    assert is_contiguous(x[:, :1000].T, single)
    assert not is_contiguous(x.T[::2], single)
    assert is_contiguous(x.astype(np.uint16).T, single)
    assert not is_contiguous(x.astype(np.int64).T, double)


def test_many_more_components_than_entries():
    """Most lists are empty, which takes long only where columns are not read and written in place."""
    plan = exact_plan(Sketch(100, 900, nnz=2).spec)
    columns, sums = np.empty((100, 20_000), np.float32).T, np.empty((900, 20_000), np.float32).T
    rows, row_sums = np.empty((20_000, 100), np.float32), np.empty((20_000, 900), np.float32)
    assert by_component.eligible(plan, columns, sums, sums.dtype)
    assert not by_component.eligible(plan, rows, row_sums, sums.dtype)
    assert not by_component.eligible(plan, columns, row_sums, sums.dtype)
    assert by_component.eligible(exact_plan(Sketch(100, 800, nnz=2).spec), rows, row_sums[:, :800], sums.dtype)
