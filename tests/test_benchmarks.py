"""The rivals in the benchmarks compute the same product as the sketch, so their times are comparable."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("benchmarks.gpu")


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("adjoint", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("stacks", "dtype"), [(1, torch.float32), (4, torch.float32), (2, torch.float64)])
def test_rivals_agree_with_the_reference(benchmarks, axis, adjoint, stacks, dtype):
    if stacks > 1 and adjoint:
        return  # the separate sketches of `projection` have no common adjoint
    case = benchmarks.Product(10, 300, 64, axis=axis, adjoint=adjoint, stacks=stacks, dtype=dtype)
    x = case.data("cpu")
    want = benchmarks.baselines.reference(case, x)
    for name, method in benchmarks.methods(case).items():
        if method.error is None:
            assert name in ("copy", "separate")
        else:
            call = method.prepare(case, "cpu")
            assert benchmarks.baselines.relative_error(case, call(x), want) <= method.error, name
    if stacks > 1:
        assert benchmarks.baselines.separate(case, "cpu")(x).shape == case.result_shape
    wrong = benchmarks.baselines.indexed(case, x, *benchmarks.baselines.scaled_entries(case, "cpu", x.dtype)) * 1.1
    assert benchmarks.baselines.relative_error(case, wrong, want) > 0.05


def test_too_large_stored_matrix(benchmarks):
    case = benchmarks.Product(1, 2**28, 4096)
    for baseline in (benchmarks.baselines.stored_dense, benchmarks.baselines.stored_csr):
        with pytest.raises(benchmarks.AbsentError, match="GB"):
            baseline(case, "cpu")
    with pytest.raises(benchmarks.AbsentError, match="bf16"):
        benchmarks.baselines.index_add(replace(case, dtype=torch.bfloat16), "cpu")
