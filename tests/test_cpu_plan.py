"""Codes that the CPU backend keeps between calls: of which sketches, and that results do not depend on them."""

from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np
import pytest
from helpers.cases import each_value
from helpers.data import same

from sjlt import Sketch
from sjlt.backends.cpu import plan

seeds = count(10**9)  # of sketches that no other test has used


@pytest.fixture
def medium(monkeypatch):
    """Sketches of 100 to 4000 entries are of medium size, of which two are kept."""
    monkeypatch.setattr(plan, "KEPT_CODES", 100)
    monkeypatch.setattr(plan, "REUSED_CODES", 4000)
    monkeypatch.setattr(plan, "REUSED_BYTES", 40_000)  # a sketch of the tests below keeps about 16,000
    monkeypatch.setattr(plan, "FORGETFUL_CALLS", 2)
    monkeypatch.setattr(plan, "_reused", {})


@each_value(dtype=["float16", "float32", "float64"], n=[1, 5, 70], stacks=[1, 2])
def test_kept_codes_do_not_change_bits(dtype, n, stacks, monkeypatch):
    seed = next(seeds)
    x = np.random.default_rng(n).normal(size=(n, 997)).astype(dtype)
    results = []
    for kept, reused in ((0, 0), (0, 4000), (4000, 4000)):
        monkeypatch.setattr(plan, "KEPT_CODES", kept)
        monkeypatch.setattr(plan, "REUSED_CODES", reused)
        monkeypatch.setattr(plan, "REUSED_WORDS", reused)
        plan.exact_plan.cache_clear()
        S = Sketch(1000, 96, nnz=4, stacks=stacks, seed=seed)[:, 3:]
        results += [(x @ S.T, x[:, :96] @ S) for _ in range(3)]
        assert plan.exact_plan(S.spec).keeps_codes == (reused > 0)
    for result in results[1:]:
        same(results[0][0], result[0])
        same(results[0][1], result[1])


def test_codes_of_few_reused_sketches_are_kept(medium):
    x = np.random.default_rng(0).normal(size=(3, 500))
    sketches = [Sketch(500, 40, nnz=4, seed=next(seeds)) for _ in range(3)]
    plans = [plan.exact_plan(S.spec) for S in sketches]
    once = [x @ S.T for S in sketches]
    assert not any(p.keeps_codes or p._kept for p in plans)
    for S, before in zip(sketches, once, strict=True):
        same(x @ S.T, before)
    assert [p.keeps_codes for p in plans] == [bool(p._kept) for p in plans] == [False, True, True]
    same(x @ sketches[0].T, once[0])
    assert not plans[0].keeps_codes  # not until it is used more often
    for _ in range(5):
        same(x @ sketches[0].T, once[0])
    assert [p.keeps_codes for p in plans] == [True, False, True]


def test_threads_share_kept_codes(medium):
    x = np.random.default_rng(0).normal(size=(2, 500))
    sketches = [Sketch(500, 40, nnz=4, seed=next(seeds)) for _ in range(5)]
    want = [x @ S.T for S in sketches]
    with ThreadPoolExecutor(8) as pool:
        for i, result in enumerate(pool.map(lambda i: x @ sketches[i % 5].T, range(1000))):
            same(result, want[i % 5])
    plans = [plan.exact_plan(S.spec) for S in sketches]
    assert 0 < sum(p.kept_bytes for p in plans) <= 40_000


@each_value(k=[40, 300], n=[1, 2, 3, 20], dtype=["float16", "float32", "float64"], accumulate=[False, True])
def test_remembered_calls(k, n, dtype, accumulate):
    """The second product of arrays with the same layouts is a remembered call, which must read and write only them."""
    rng, S = np.random.default_rng(k), Sketch(200, k, nnz=4, seed=next(seeds))
    out_dtype = "float32" if accumulate and dtype == "float16" else dtype
    kept = plan.exact_plan(S.spec)
    for direction, width, other in ((S.project, 200, k), (S.project_adjoint, k, 200)):
        matrix = S.toarray().T if direction == S.project else S.toarray()
        for order in "CF":
            for product in range(4):
                known = len(kept.calls)
                x = np.asarray(rng.integers(-8, 9, (n, width)).astype(dtype), order=order)
                out = np.asarray(rng.integers(-8, 9, (n, other)).astype(out_dtype), order=order)
                expected = x.astype(float) @ matrix + (out if accumulate else 0)
                direction(x, out=out, accumulate=accumulate)
                same(out, expected.astype(out_dtype))
                assert product == 0 or len(kept.calls) == known
    assert len(kept.calls) >= 2


def test_calls_are_remembered_by_layout(medium):
    S = Sketch(500, 40, nnz=4, seed=next(seeds))
    x, kept = np.ones((3, 500)), plan.exact_plan(S.spec)
    layouts = [x, x.T.copy().T, x[::-1], x[:2], x.astype(np.float32), np.broadcast_to(x[:1], x.shape)]
    want = [data @ S.T for data in layouts]  # the first product is not remembered: it keeps no codes
    calls = [len(kept.calls)]
    for data, expected in zip(layouts, want, strict=True):
        same(data @ S.T, expected)
        calls.append(len(kept.calls))
    assert calls[-1] >= len(layouts) - 1
    swapped, unaligned = x.astype(">f8"), np.ones(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    unaligned[:] = x
    for data in (swapped, unaligned):
        same(data @ S.T, want[0])
    assert len(kept.calls) == calls[-1]
    for n in range(1, plan.MAX_CALLS + 10):
        x[:1].repeat(n, 0) @ S.T
        assert len(kept.calls) <= plan.MAX_CALLS
    kept.forget()
    assert not kept.calls
