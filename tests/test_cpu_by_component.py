"""CPU projections that read columns in place: bitwise equal to those from tiles."""

import numpy as np
import pytest
from helpers.cases import pairwise

import sjlt
from sjlt import Sketch
from sjlt.backends.cpu import by_component
from sjlt.backends.cpu.plan import exact_plan

pytestmark = pytest.mark.usefixtures("restored_num_threads")
SENTINEL = 777


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
    n=[16, 37, 200, 1100],
    d=[30, 237, 1000],
    k=[16, 130, 300],
    nnz=[1, 2, 3],
    dtype=["float32", "float64"],
    padding=[0, 3],
    is_reversed=[False, True],
    accumulate=[False, True],
    threads=[1, 3],
    offset=[0, 1234],
)
def test_results_are_bitwise_those_of_tiles(
    n, d, k, nnz, dtype, padding, is_reversed, accumulate, threads, offset, monkeypatch
):
    sjlt.set_num_threads(threads)
    plan = exact_plan(Sketch(offset + d, k, nnz=nnz, seed=d)[:, offset:].spec)
    x = column_major(n, d, dtype, padding, is_reversed)
    assert by_component.reads_columns(plan, x, x.dtype)
    results = []
    for most_terms in (3, 0):
        monkeypatch.setattr(by_component, "MAX_DIRECT_TERMS", most_terms)
        whole = np.full((n + 1, k + 2), SENTINEL, dtype)
        with np.errstate(invalid="ignore"):
            by_component.project_by_component(plan, x, whole[:n, :k], accumulate, x.dtype)
        results.append(whole)
    np.testing.assert_array_equal(*results)
    np.testing.assert_array_equal(*(np.signbit(r) | np.isnan(r) for r in results))
    assert (results[0][n:] == SENTINEL).all()
    assert (results[0][:, k:] == SENTINEL).all()


def test_where_columns_are_read():
    plan = exact_plan(Sketch(1000, 100, nnz=2).spec)
    x = np.zeros((1000, 1000), np.float32)
    single, double = np.dtype(np.float32), np.dtype(float)
    assert by_component.reads_columns(plan, x.T, single)
    assert not by_component.reads_columns(plan, x, single)
    assert by_component.reads_columns(plan, x.T[3:19], single)
    assert not by_component.reads_columns(plan, x.T[:15], single)
    assert not by_component.reads_columns(plan, x.T[::2], single)
    assert not by_component.reads_columns(plan, x.astype(np.float16).T, single)
    assert not by_component.reads_columns(plan, x.astype(np.int64).T, double)
    assert not by_component.reads_columns(exact_plan(Sketch(1000, 100, nnz=4).spec), x.T, single)
    strided = np.zeros((1000, 1024), np.float32)[:, :1000].T  # columns begin at multiples of 4096 bytes
    assert not by_component.reads_columns(plan, strided, single)
    assert by_component.reads_columns(exact_plan(Sketch(1000, 100, nnz=1).spec), strided, single)
