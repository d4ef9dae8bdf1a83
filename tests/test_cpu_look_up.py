"""Adjoints on the CPU that look up components in registers: bitwise the same as by tiles."""

from itertools import product

import numpy as np
import pytest
from helpers.cases import exhaustive_except, pairwise
from helpers.data import before_protected_page

from sjlt import Sketch
from sjlt.backends.cpu import look_up
from sjlt.backends.cpu.bits import BFLOAT16
from sjlt.backends.cpu.dense import adjoint_exact
from sjlt.backends.cpu.plan import THREAD_WORK, ExactPlan, exact_plan

SENTINEL = 777
SIZES = [(16, 1, 1), (16, 8, 1), (21, 2, 1), (33, 1, 1), (61, 1, 1), (100, 3, 1), (128, 1, 1), (128, 8, 1), (128, 8, 4)]
SIZES += [(129, 4, 1), (300, 4, 1), (301, 1, 1), (640, 8, 1), (1000, 3, 1), (1022, 6, 2), (5000, 2, 1)]  # several tiles


def bits_of(dtype):
    return {"float32": np.uint32}.get(dtype, np.uint16)


def random_bits(shape, dtype, seed):
    """Random floats of all magnitudes, including subnormal and non-finite ones."""
    rng = np.random.default_rng(seed)
    if dtype == "float32":
        return rng.integers(0, 1 << 32, shape, np.uint32).view(np.float32)
    bits = rng.integers(0, 1 << 16, shape, np.uint16)
    return bits.view(np.float16) if dtype == "float16" else bits.view(BFLOAT16)


@pairwise(
    n=[1, 5, 32, 47, 200],
    d=[1, 31, 64, 1000, 5001],
    sizes=SIZES,
    dtype=["float32", "float16", "bfloat16"],
    layout=["rows", "padded rows", "columns"],
    offset=[0, 4112, 12345],
)
def test_results_are_bitwise_those_of_tiles(n, d, sizes, dtype, layout, offset, monkeypatch):
    k, nnz, stacks = sizes
    S = Sketch(offset + d, k, nnz=nnz, stacks=stacks, seed=d)[:, offset:]
    y = random_bits((k, n) if layout == "columns" else (n, k + 3 * (layout == "padded rows")), dtype, n)
    y = y.T if layout == "columns" else y[:, :k]
    results = []
    for is_eligible in (True, False):
        if not is_eligible:
            monkeypatch.setattr(look_up, "eligible", lambda *_: False)
            exact_plan(S.spec).calls.clear()
        whole = np.full((n + 1, d + 3), SENTINEL, bits_of(dtype))
        out = whole[:n, :d].view(y.dtype)
        with np.errstate(all="ignore"):
            adjoint_exact(S.spec, y, out, False)
        results.append(whole)
    as_floats = [r.astype(np.uint32) << 16 if dtype == "bfloat16" else r for r in results]
    as_floats = [r.view(np.float16 if dtype == "float16" else np.float32) for r in as_floats]
    is_nan = np.isnan(as_floats[0])
    np.testing.assert_array_equal(is_nan, np.isnan(as_floats[1]))
    np.testing.assert_array_equal(results[0][~is_nan], results[1][~is_nan])  # NaNs may differ in their payload
    assert (results[0][n:] == SENTINEL).all()
    assert (results[0][:, d:] == SENTINEL).all()


@pytest.mark.parametrize("k", [16, 45, 100])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_nothing_is_read_beyond_the_data(k, dtype):
    """The data ends where a protected page begins."""
    y = before_protected_page((33, k), dtype)
    out = np.full((33, 100), np.nan, np.float32)
    adjoint_exact(Sketch(100, k, nnz=4).spec, y, out, False)
    assert not out.any()


OTHER_DTYPES = list(product([1, 3, 4], ["float16", "float32", "float64"], ["float32", "float16"]))


@pytest.mark.parametrize("case", exhaustive_except([(4, "float64", "float16")], OTHER_DTYPES), ids=str)
def test_results_of_another_dtype(case):
    nnz, out_dtype, dtype = case
    S = Sketch(500, 64, nnz=nnz, seed=1)
    y = np.random.default_rng(0).integers(-4, 5, (40, 64)).astype(dtype)
    out = np.full((40, 500), np.nan, out_dtype)
    adjoint_exact(S.spec, y, out, False)
    sums = y.astype(float) @ np.sign(S.toarray())  # integers
    np.testing.assert_array_equal(out, (sums * exact_plan(S.spec).scale).astype(out_dtype))


@pytest.mark.skipif(not look_up._HAS_LOOK_UPS, reason="needs AVX-512")
@pytest.mark.parametrize("k", [64, 500])
def test_columns_beyond_one_table(k, monkeypatch):
    monkeypatch.setattr(look_up, "TABLE_CODES", 4 * 1000)
    S = Sketch(2345, k, nnz=4, seed=1)
    y = np.random.default_rng(0).integers(-4, 5, (40, k)).astype(np.float32)
    out = np.full((40, 2345), np.nan, np.float32)
    look_up.adjoint_by_look_up(exact_plan(S.spec), y, out, 2 * THREAD_WORK)(y, out)
    np.testing.assert_array_equal(out, (y.astype(float) @ S.toarray()).astype(np.float32))


@pytest.mark.skipif(not look_up._HAS_LOOK_UPS, reason="needs AVX-512")
def test_it_is_used_for_few_terms():
    def is_eligible(S, y, out):
        return look_up.eligible(exact_plan(S.spec), y, out, np.dtype(np.float32))

    y, out = np.zeros((32, 64), np.float32), np.zeros((32, 500), np.float32)
    S = Sketch(500, 64, nnz=4)
    assert is_eligible(S, y[:1], out[:1])
    assert is_eligible(S, y, out)
    assert not is_eligible(S, y, out.T.copy().T)
    y = np.zeros((32, 1000), np.float32)
    assert is_eligible(Sketch(500, 1000, nnz=4), y, out)
    assert is_eligible(Sketch(548, 1000, nnz=4)[:, 48:], y, out)
    assert not is_eligible(Sketch(508, 1000, nnz=4)[:, 8:], y, out)  # 16 adjacent columns may belong to two tiles
    assert not is_eligible(Sketch(500, 1000, nnz=8), y, out)  # chunks of 8 columns


@pytest.mark.skipif(not look_up._HAS_LOOK_UPS, reason="needs AVX-512")
def test_few_rows_use_words_that_are_kept(monkeypatch):
    y, out = np.zeros((32, 64), np.float32), np.zeros((32, 20_000), np.float32)
    plan = ExactPlan(Sketch(20_000, 64, nnz=4).spec)
    assert [look_up.eligible(plan, y[:n], out[:n], np.dtype(np.float32)) for n in (1, 31, 32)] == [False, False, True]
    plan.use()
    plan.use()
    assert look_up.eligible(plan, y[:1], out[:1], np.dtype(np.float32))
    monkeypatch.setattr(look_up, "TABLE_CODES", 4 * 10_000)  # two tables, which are not kept
    assert not look_up.eligible(plan, y[:1], out[:1], np.dtype(np.float32))
