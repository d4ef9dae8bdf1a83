"""Distance of results from exact arithmetic, and propagation of non-finite values."""

import itertools
import math

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.cases import each_value, exhaustive_except
from helpers.data import exact_adjoint, exact_project, integers

from sjlt import Sketch

DATA = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "all positive": lambda rng, shape: rng.uniform(0.5, 1.5, shape),
    "all positive and alike": lambda rng, shape: 1 + 1e-3 * rng.random(shape),
    "wide range": lambda rng, shape: rng.normal(size=shape) * np.exp(3 * rng.normal(size=shape)),
    "large, then small": lambda rng, shape: rng.random(shape) * np.geomspace(1e4, 1e-4, shape[-1]),
    "one outweighs all": lambda rng, shape: np.where(np.arange(shape[-1]) == 0, 16_400, rng.normal(size=shape)),
}
BOUNDS = dict.fromkeys(DATA, 1e-6) | {"one outweighs all": 2e-6}  # just above 2^14, where fp32 is coarsest
# (rows, features, n_components, nnz): few rows and many; one term in each of 2^20, 2^16 and 2^13.
SIZES = [(2, 2**20, 1, 1), (2, 2**20, 16, 4), (2, 2**20, 200, 3), (40, 2**15, 1, 1), (40, 2**17, 16, 4)]


def error(actual, expected, norm):
    """Worst error norm over the vectors, relative to the norm of the data: ||S x|| may be near 0 for small k."""
    assert np.isfinite(actual).all()
    return (np.linalg.norm(actual.astype(np.float64) - expected, axis=-1) / norm).max()


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("size", exhaustive_except(SIZES[2:3], SIZES))
def test_fp32(kind, size):
    n, d, k, nnz = size
    x = DATA[kind](np.random.default_rng(1), (n, d)).astype(np.float32)
    S = Sketch(d, k, nnz=nnz, seed=2)
    expected = (S.to_scipy() @ x.T.astype(np.float64)).T  # exact to 1e-13
    norm = np.linalg.norm(x.astype(np.float64), axis=1)
    assert error(x @ S.T, expected, norm) <= BOUNDS[kind]
    assert error((S @ x.T.copy()).T, expected, norm) <= BOUNDS[kind]


@pytest.mark.parametrize("format", ["csr", "csc"])
@pytest.mark.parametrize("kind", DATA)
def test_fp32_sparse(kind, format):
    d = 2**18
    S = Sketch(d, 16, nnz=4)
    dense = DATA[kind](np.random.default_rng(1), (2, d)).astype(np.float32)
    expected = (S.to_scipy() @ dense.T.astype(np.float64)).T
    norm = np.linalg.norm(dense.astype(np.float64), axis=1)
    assert error(sp.csr_array(dense).asformat(format) @ S.T, expected, norm) <= BOUNDS[kind]


def exact_sums(S, x):
    """x S' for nnz = 1, where entries are +-1, correctly rounded."""
    assert S.nnz == 1
    matrix = S.to_scipy("csr")
    expected = np.empty((len(x), S.n_components))
    for r, (a, b) in enumerate(itertools.pairwise(matrix.indptr)):
        for i, row in enumerate(x):
            expected[i, r] = math.fsum(row[matrix.indices[a:b]] * matrix.data[a:b])
    return expected


@each_value(kind=list(DATA), size=[(2, 2**19), (40, 2**14)])
def test_fp64(kind, size):
    n, d = size
    S = Sketch(d, 8, nnz=1)
    x = DATA[kind](np.random.default_rng(1), (n, d))
    assert error(x @ S.T, exact_sums(S, x), np.linalg.norm(x, axis=1)) <= 1e-14


@pytest.mark.parametrize("format", ["csr", "csc"])
@pytest.mark.parametrize("kind", DATA)
def test_fp64_sparse(kind, format):
    S = Sketch(2**19, 8, nnz=1)
    x = DATA[kind](np.random.default_rng(1), (2, 2**19))
    norm = np.linalg.norm(x, axis=1)
    assert error(sp.csr_array(x).asformat(format) @ S.T, exact_sums(S, x), norm) <= 1e-14


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_adjoint(dtype):
    S = Sketch(5000, 257, nnz=85)
    y = np.random.default_rng(1).normal(size=(40, 257)).astype(dtype)
    expected = y.astype(np.float64) @ S.toarray()
    bound = 1e-6 if dtype == "float32" else 1e-14
    assert error(y @ S, expected, np.linalg.norm(expected, axis=1)) <= bound
    assert error(y[:1] @ S, expected[:1], np.linalg.norm(expected[:1], axis=1)) <= bound


@each_value(kind=["normal", "all positive"], shape=[(2, 2**17), (40, 2**13)])
def test_fp16_results_are_rounded_once(kind, shape):
    """Sums run in fp32 or better, so the error barely exceeds half a unit in the last place of fp16."""
    n, d = shape
    S = Sketch(d, 64, nnz=4)
    x = DATA[kind](np.random.default_rng(1), (n, d)).astype(np.float16)
    expected = (S.to_scipy() @ x.T.astype(np.float64)).T
    result = x @ S.T
    assert result.dtype == np.float16
    half_unit = np.spacing(np.abs(expected).astype(np.float16)).astype(np.float64) / 2
    slack = 1e-6 * np.linalg.norm(x.astype(np.float64), axis=1, keepdims=True)
    assert (np.abs(result.astype(np.float64) - expected) <= half_unit + slack).all()


def test_fp32_accumulates_into_fp64_without_rounding():
    # Rounding to fp32 between streamed slices would show.
    S = Sketch(2**15, 16, nnz=4)
    x = np.random.default_rng(0).uniform(0.5, 1.5, (3, 2**15)).astype(np.float32)
    out = np.zeros((3, 16))
    for a in range(0, 2**15, 64):
        S[:, a : a + 64].project(x[:, a : a + 64], out=out, accumulate=True)
    expected = (S.to_scipy() @ x.T.astype(np.float64)).T
    assert error(out, expected, np.linalg.norm(x.astype(np.float64), axis=1)) <= 2e-7


# --------------------------------------------------------------------------------- non-finite values


@each_value(value=[np.nan, np.inf, -np.inf], dtype=["float16", "float32", "float64"], n=[3, 70], order=["C", "F"])
def test_non_finite_feature_reaches_exactly_nnz_components(value, dtype, n, order):
    S = Sketch(500, 300, nnz=16, seed=4)
    x = integers((n, 500), dtype)
    expected = exact_project(S, x)
    rows, signs = S.entries()
    for i, j in ((0, 0), (n - 1, 499), (n // 2, 77)):
        x[i, j] = value
        expected[i, rows[:, j]] = value * signs[:, j]
    result = np.asarray(x, order=order) @ S.T
    np.testing.assert_array_equal(result, expected)
    for kind in (sp.csr_array, sp.csc_array) if dtype != "float16" else ():
        np.testing.assert_array_equal(kind(x) @ S.T, expected)
        np.testing.assert_array_equal(S.project(kind(x), dense_output=False).toarray(), expected)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("n", [3, 70])
def test_non_finite_component_reaches_exactly_its_features(value, dtype, n):
    S = Sketch(500, 300, nnz=16, seed=4)
    y = integers((n, 300), dtype)
    expected = exact_adjoint(S, y)
    dense = S.toarray()
    for i, r in ((0, 0), (n - 1, 299), (n // 2, 77)):
        y[i, r] = value
        touched = dense[r] != 0
        expected[i, touched] = value * np.sign(dense[r, touched])
    np.testing.assert_array_equal(y @ S, expected)


def test_non_finite_values_that_collide():
    S = Sketch(4, 1, nnz=1)
    signs = S.entries()[1][0].astype(np.float32)
    opposite = np.where(np.arange(4) < 2, np.inf, -np.inf).astype(np.float32) * signs
    assert np.isnan(opposite @ S.T).all()
    assert (np.abs(opposite) * signs @ S.T == np.inf).all()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_extreme_magnitudes(dtype):
    """The largest, smallest and subnormal values pass unchanged through columns with a single +-1."""
    info = np.finfo(dtype)
    values = np.array([info.max, -info.max, info.tiny, info.smallest_subnormal, -info.smallest_subnormal, 0, 1], dtype)
    S = Sketch(64, 64, nnz=1)  # chunks of 64 columns: a signed permutation
    for n in (3, 70):
        x = np.resize(values, (n, 64))
        np.testing.assert_array_equal((x @ S.T) @ S, x)
