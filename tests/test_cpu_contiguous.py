"""CPU projections of data with contiguous features: bitwise the same from lists and from codes."""

import numpy as np
import pytest
from helpers.cases import pairwise

import sjlt
from sjlt import Sketch
from sjlt.backends.cpu import contiguous
from sjlt.backends.cpu.bits import compute_dtype, kernel_view
from sjlt.backends.cpu.plan import exact_plan

pytestmark = pytest.mark.usefixtures("restored_num_threads")
SENTINEL = 777


@pairwise(
    n=[4, 7, 16, 20, 31, 33, 50, 64],
    d=[700, 5003, 40_000],
    k=[16, 130, 301],
    nnz=[1, 3, 8],
    stacks=[1, 2],
    dtype=["float16", "float32", "float64"],
    padding=[0, 5],
    order=["C", "F"],
    accumulate=[False, True],
    threads=[1, 3],
    offset=[0, 1234],
)
def test_sums_from_lists_are_bitwise_those_from_codes(
    n, d, k, nnz, stacks, dtype, padding, order, accumulate, threads, offset, monkeypatch
):
    accumulate = accumulate and dtype != "float16"  # which kernels do not support
    sjlt.set_num_threads(threads)
    k, nnz = k * stacks, nnz * stacks
    plan = exact_plan(Sketch(offset + d, k, nnz=nnz, stacks=stacks, seed=d)[:, offset:].spec)
    plan._uses = 100  # lists are kept
    rng = np.random.default_rng(n)
    columns = (rng.normal(size=(d, n + padding)) * 2.0 ** rng.integers(-8, 8, (d, 1))).astype(dtype)
    columns[:, n:], columns[0, 0], columns[-1, n - 1] = np.nan, np.nan, np.inf
    x, results = columns.T[:n], []
    for listed_bytes in (0, 512):
        monkeypatch.setattr(contiguous, "MAX_LISTED_BYTES", listed_bytes)
        whole = np.full((n + 1, k + 2), SENTINEL, dtype, order=order)
        if not accumulate:
            whole[:n, :k] = np.nan
        out = kernel_view(whole)[:n, :k]
        with np.errstate(invalid="ignore"):
            if not contiguous.project_contiguous(plan, kernel_view(x), out, accumulate, compute_dtype(x)):
                pytest.skip("tiles are faster")
        results.append(whole)
    np.testing.assert_array_equal(*results)
    np.testing.assert_array_equal(*(np.signbit(r) | np.isnan(r) for r in results))
    assert (results[0][n:] == SENTINEL).all()
    assert (results[0][:, k:] == SENTINEL).all()
