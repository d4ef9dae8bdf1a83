"""What the CPU backend keeps of a sketch between calls: for which sketches, and that results do not depend on it."""

from collections import deque

import numpy as np
from helpers.cases import each_value
from helpers.data import same

from sjlt import Sketch
from sjlt.backends.cpu import plan


@each_value(dtype=["float16", "float32", "float64"], n=[1, 5, 70], stacks=[1, 2])
def test_kept_codes_do_not_change_bits(dtype, n, stacks, monkeypatch):
    S = Sketch(1000, 96, nnz=4, stacks=stacks, seed=2)[:, 3:]
    x = np.random.default_rng(n).normal(size=(n, 997)).astype(dtype)
    small = x @ S.T, x[:, :96] @ S
    monkeypatch.setattr(plan, "KEPT_CODES", 0)
    for reused in (0, 4000):
        monkeypatch.setattr(plan, "REUSED_CODES", reused)
        for _ in range(3):
            same(small[0], x @ S.T)
            same(small[1], x[:, :96] @ S)


def test_codes_of_few_reused_sketches_are_kept(monkeypatch):
    monkeypatch.setattr(plan, "KEPT_CODES", 100)
    monkeypatch.setattr(plan, "REUSED_PLANS", 2)
    monkeypatch.setattr(plan, "_reused", deque())
    x = np.random.default_rng(0).normal(size=(3, 500))
    sketches = [Sketch(500, 40, nnz=4, seed=10**9 + seed) for seed in range(3)]
    plans = [plan._make_plan(S.spec) for S in sketches]
    once = [x @ S.T for S in sketches]
    assert not any(p.has_lists for p in plans)
    for _ in range(2):
        for S, before in zip(sketches, once, strict=True):
            same(x @ S.T, before)
            assert sum(p._kept is not None for p in plans) <= 2
    assert plan._make_plan(sketches[2].spec).has_lists
    assert not plan._make_plan(Sketch(500, 40, nnz=4, seed=10**9 + 5).spec).has_lists
