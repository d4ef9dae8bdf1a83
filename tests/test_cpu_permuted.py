"""Projections on the CPU that permute features in registers: bitwise the same as by tiles."""

import numpy as np
import pytest
from helpers.cases import pairwise

from sjlt import Sketch
from sjlt.backends.cpu import permuted
from sjlt.backends.cpu.bits import BFLOAT16
from sjlt.backends.cpu.dense import project_exact
from sjlt.backends.cpu.plan import ExactPlan, exact_plan

SENTINEL = 777
SIZES = [
    (12, 1, 1),
    (16, 1, 1),
    (16, 8, 1),
    (16, 16, 1),
    (24, 3, 1),
    (30, 1, 1),
    (60, 3, 1),
    (64, 1, 1),
    (64, 8, 1),
    (128, 4, 1),
    (17, 2, 1),
    (19, 4, 1),
    (39, 8, 1),
    (100, 2, 1),
    (100, 4, 1),
]
FLOAT32 = np.dtype(np.float32)
needs_avx512 = pytest.mark.skipif(not permuted._HAS_PERMUTATIONS, reason="needs AVX-512")


def data(n, d, dtype, padding):
    """Numbers of many magnitudes, among them a subnormal, a NaN and an infinite one, in rows with padding of NaN."""
    rng = np.random.default_rng(n)
    x = rng.normal(size=(n, d + padding)) * 2.0 ** rng.integers(-12, 12, (n, d + padding))
    x[0, 0], x[n // 2, d // 2], x[-1, d - 1], x[:, d:] = 1e-6 if dtype == "float16" else 1e-40, np.nan, np.inf, np.nan
    if dtype == "bfloat16":
        return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(BFLOAT16)[:, :d]
    return x.astype(dtype)[:, :d]


def results(S, x, out_dtype, monkeypatch):
    """The bits of the result in rows with padding, which must not be written: by permutation, and by tiles."""
    for is_eligible in (True, False):
        if not is_eligible:
            monkeypatch.setattr(permuted, "eligible", lambda *_: False)
            exact_plan(S.spec).calls.clear()
        k = S.n_components
        whole = np.full((x.shape[0] + 1, k + 3), SENTINEL, f"u{out_dtype.itemsize}")
        with np.errstate(all="ignore"):
            project_exact(S.spec, x, whole[:-1, :k].view(out_dtype), False)
        assert (whole[-1] == SENTINEL).all()
        assert (whole[:, k:] == SENTINEL).all()
        yield whole


def as_floats(bits, dtype):
    return (bits.astype(np.uint32) << 16).view(np.float32) if dtype == BFLOAT16 else bits.view(dtype)


@pairwise(
    n=[1, 3, 8, 13, 100],
    d=[1, 15, 16, 33, 384, 1000],
    sizes=[*SIZES, (64, 4, 2), (128, 8, 4)],
    dtype=["float32", "float16", "bfloat16"],
    padding=[0, 5],
    offset=[0, 64, 12345],
)
def test_results_are_bitwise_those_of_tiles(n, d, sizes, dtype, padding, offset, monkeypatch):
    k, nnz, stacks = sizes
    S = Sketch(offset + d, k, nnz=nnz, stacks=stacks, seed=d)[:, offset:]
    x = data(n, d, dtype, padding)
    got, want = results(S, x, x.dtype, monkeypatch)
    is_nan = np.isnan(as_floats(want, x.dtype))
    np.testing.assert_array_equal(np.isnan(as_floats(got, x.dtype)), is_nan)
    np.testing.assert_array_equal(got[~is_nan], want[~is_nan])  # NaNs may differ in their payload


@pytest.mark.parametrize("out_dtype", ["float16", "float64"])
def test_results_of_another_dtype(out_dtype, monkeypatch):
    x = np.random.default_rng(0).normal(size=(20, 700)).astype(np.float32)
    got, want = results(Sketch(700, 64, nnz=3, seed=1), x, np.dtype(out_dtype), monkeypatch)
    np.testing.assert_array_equal(got, want)


@needs_avx512
@pytest.mark.parametrize("n_features", [100, 5000])
def test_threads_do_not_matter(n_features, monkeypatch):
    """With several tasks, which begin at any multiple of the rows that are processed together."""
    monkeypatch.setattr(permuted, "useful_threads", lambda _: 3)
    x = np.random.default_rng(0).normal(size=(1000, n_features)).astype(np.float32)
    got, want = results(Sketch(n_features, 32, nnz=4, seed=1), x, FLOAT32, monkeypatch)
    np.testing.assert_array_equal(got, want)


@needs_avx512
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_is_used_for_few_components(sizes):
    k, nnz, stacks = sizes
    x, out = np.zeros((3, 500), np.float32), np.zeros((3, k), np.float32)
    plan = exact_plan(Sketch(500, k, nnz=nnz, stacks=stacks).spec)
    assert permuted.eligible(plan, x, out, FLOAT32)
    assert not permuted.eligible(plan, np.asfortranarray(x), out, FLOAT32)
    assert not permuted.eligible(plan, x.astype(float), out, np.dtype(float))


@needs_avx512
def test_larger_sketches_need_many_rows_or_a_second_call():
    n = permuted.MIN_ROWS
    x, out = np.zeros((n, 20_000), np.float32), np.zeros((n, 64), np.float32)
    plan = ExactPlan(Sketch(20_000, 64, nnz=4).spec)
    assert [permuted.eligible(plan, x[:m], out[:m], FLOAT32) for m in (1, n - 1, n)] == [False, False, True]
    plan.use()
    plan.use()
    assert permuted.eligible(plan, x[:1], out[:1], FLOAT32)


@needs_avx512
@pytest.mark.parametrize("n", [1, permuted.MIN_ROWS])
def test_words_of_larger_sketches(n, monkeypatch):
    """Listed by several tasks, in one call and then between calls."""
    S = Sketch(50_000, 48, nnz=3, seed=n)[:, 16 * 7 :]
    x = np.random.default_rng(0).normal(size=(n, S.n_features)).astype(np.float32)
    exact_plan.cache_clear()
    once, again = x @ S.T, x @ S.T
    assert "words" in exact_plan(S.spec)._kept
    monkeypatch.setattr(permuted, "eligible", lambda *_: False)
    exact_plan(S.spec).calls.clear()
    want = x @ S.T
    np.testing.assert_array_equal(once, want)
    np.testing.assert_array_equal(again, want)


@needs_avx512
@pytest.mark.parametrize("sizes", [(128, 1, 3), (256, 4, 3), (39, 8, 32)], ids=str)
def test_tiles_are_used_where_most_words_are_empty_or_chunks_are_long(sizes):
    k, nnz, n = sizes
    plan = exact_plan(Sketch(500, k, nnz=nnz).spec)
    assert not permuted.eligible(plan, np.zeros((n, 500), np.float32), np.zeros((n, k), np.float32), FLOAT32)
