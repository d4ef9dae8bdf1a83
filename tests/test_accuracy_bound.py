"""The componentwise error bound, valid for every input, on inputs that try to break it.

|result_r - exact_r| <= c u sum over j of |S_rj x_j|, where c and u are derived next to the summation code
(`dense_kernels`, `sparse_kernels`, `iid_kernels`).
"""

import math

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.adversarial import DATA, U, check_bound, signs_of_row
from helpers.cases import each_value, pairwise

from sjlt import Sketch
from sjlt.backends.cpu import iid_dense, plan

DTYPES = ["float32", "float64"]


def check(S, x, result, c, u):
    scale = math.sqrt(1 / S.nnz if S.nnz else 1 / (S.n_components * S.density))
    check_bound(S.to_scipy("csr"), scale, x, result, c, u)


@pairwise(
    kind=DATA,
    dtype=DTYPES,
    n=[1, 40],
    shape=[(2**14, 16, 1), (2**15, 300, 4), (5000, 3, 2), (70_000, 1000, 1)],
)
def test_dense(kind, dtype, n, shape):
    d, k, nnz = shape
    S = Sketch(d, k, nnz=nnz, seed=695)
    x = DATA[kind](S, np.random.default_rng(0)).astype(dtype)
    rows = np.zeros((n, d), dtype)
    rows[n // 2] = x
    check(S, x, (rows @ S.T)[n // 2], plan.MAX_TERMS + 4, U[dtype])
    check(S, x, (S @ np.asfortranarray(rows.T))[:, n // 2], plan.MAX_TERMS + 4, U[dtype])


def test_sums_overflow_only_beyond_the_stated_limit():
    S = Sketch(2 * plan.MAX_TERMS, 1, nnz=1, seed=1)  # two blocks of one term per feature
    signs = (np.ones((1, 1)) @ S)[0] * np.repeat([1, -1], plan.MAX_TERMS)  # whose sums cancel
    limit = np.finfo(np.float32).max / plan.MAX_TERMS
    for n in (1, 5):
        inside, outside = (np.tile(signs * x, (n, 1)).astype("float32") for x in (limit, 2 * limit))
        assert (inside @ S.T == 0).all()
        assert np.isnan(outside @ S.T).all()


@pairwise(kind=DATA, dtype=DTYPES, format=["csr", "csc"])
def test_sparse(kind, dtype, format):
    S = Sketch(2**14, 16, nnz=1, seed=695)
    x = DATA[kind](S, np.random.default_rng(0)).astype(dtype)
    c = 2 if dtype == "float32" else 512 + 4
    matrix = sp.csr_array(x[None]).asformat(format)
    check(S, x, (matrix @ S.T)[0], c, U[dtype])
    check(S, x, S.project(matrix, dense_output=False).toarray()[0], c, U[dtype])


@each_value(kind=list(DATA), dtype=DTYPES, density=[1.0, 0.25, 0.015625])
def test_independent_entries(kind, dtype, density):
    S = Sketch(2**14, 16, density=density, seed=5)
    x = DATA[kind](S, np.random.default_rng(0)).astype(dtype)
    block = iid_dense.iid_plan(S.spec).block
    nonzeros = S.to_scipy("csr") != 0
    most = max(nonzeros[:, j : j + block].sum(1).max() for j in range(0, S.n_features, block))
    check(S, x, x @ S.T, most + 4, U[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_adjoint(dtype):
    S = Sketch(4000, 257, nnz=85)
    y = np.where(np.arange(257) < 3, 1.0, 2.0**-23).astype(dtype)
    result, exact = (y @ S).astype(np.float64), S.T.toarray() @ y.astype(np.float64)
    size = np.abs(S.T.toarray()) @ np.abs(y.astype(np.float64))
    assert (np.abs(result - exact) <= ((85 + 3) * U[dtype] + 100 * 2.0**-53 * (dtype == "float32")) * size).all()


def test_many_equal_fp64_features():
    """Totals are compensated, so the error does not grow with the number of blocks."""
    S = Sketch(2**21, 1, nnz=1, seed=3)
    x = signs_of_row(S) / 3
    assert abs((x @ S.T)[0] - math.fsum(np.abs(x))) <= 20 * 2.0**-53 * math.fsum(np.abs(x))


@pytest.mark.parametrize(("dtype", "largest"), [("float32", 2.0**122), ("float64", 2.0**1010)])
@pytest.mark.parametrize("n", [1, 40])
def test_sums_in_the_stated_range_do_not_overflow(dtype, largest, n):
    """64 terms of one sign, then 64 of the other: the partial sum between may be 64 times as large."""
    S = Sketch(2**13, 16, nnz=1, seed=1)
    row = S.to_scipy("csr").indices[: 2**9]
    x = np.zeros((n, 2**13), dtype)
    signs = signs_of_row(S)[row]
    x[:, row] = largest / 32 * signs * np.where(np.arange(len(row)) < len(row) // 2, 1, -1)
    result = x @ S.T
    assert np.isfinite(result).all()
    assert (result[:, 0] == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("nnz", [64, 128])
def test_adjoints_in_the_stated_range_do_not_overflow(dtype, nnz):
    """All nnz terms of one sign, the largest permitted."""
    S = Sketch(10, 128, nnz=nnz, seed=1)
    largest = np.finfo(dtype).max / nnz * (1 - 2.0**-10)
    y = np.tile((np.sign(S.toarray()[:, 0]) * largest).astype(dtype), (3, 1))
    np.testing.assert_allclose((y @ S)[:, 0], largest * nnz**0.5, rtol=(nnz + 3) * np.finfo(dtype).eps)


def test_fp64_sums_in_the_stated_range_do_not_overflow():
    """Their total is the largest permitted before it is scaled."""
    S = Sketch(3000, 256, nnz=16, seed=1)
    row = S.toarray()[0]
    columns = np.flatnonzero(row)[:128]
    x = np.zeros(3000)
    x[columns] = np.sign(row[columns]) * np.finfo("float64").max / 128 * (1 - 2.0**-10)
    np.testing.assert_allclose((x @ S.T)[0], np.finfo("float64").max / 4 * (1 - 2.0**-10), rtol=1e-15)
