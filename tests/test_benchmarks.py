"""The rivals in the benchmarks compute the same product as the sketch, so their times are comparable."""

import importlib
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
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


@pytest.mark.parametrize("condition", [1e2, 1e10])
def test_backward_errors_of_tensors_and_arrays_agree(benchmarks, condition, monkeypatch):
    """Residuals in doubled precision give the estimate of extended precision, in one block of rows and in several."""
    doubled, on_gpu, on_host = (
        importlib.import_module(f"benchmarks.{name}") for name in ("doubled", "linalg_gpu", "linalg")
    )
    given = on_gpu.problem(5000, 37, condition, "cpu")
    arrays = given.A.numpy(), given.b.numpy()
    exact = np.linalg.svd(arrays[0], compute_uv=False)
    np.testing.assert_allclose(given.s, exact, rtol=0, atol=1e-14)
    stable = torch.linalg.lstsq(given.A, given.b[:, None], driver="gelsd").solution[:, 0]
    for x, largest in ((stable, 1e-15), (stable * (1 + 1e-12), 1e-11), (torch.zeros_like(stable), 1.0)):
        expected = on_host.backward_error(*arrays, x.numpy(), given.s, given.Vh)
        for elements in (1 << 25, 37 * 300):
            monkeypatch.setattr(doubled, "ELEMENTS", elements)
            assert given.backward_error(x) == pytest.approx(expected, rel=1e-6 if largest > 1e-15 else 0.05)
        assert expected < largest


def test_sums_in_doubled_precision(benchmarks):
    """Gradients of about 1e-18, of residuals of about 1, are as in rational arithmetic."""
    doubled = importlib.import_module("benchmarks.doubled")
    generator = torch.Generator().manual_seed(0)
    A = torch.randn((53, 7), dtype=torch.float64, generator=generator)
    b = torch.randn(53, dtype=torch.float64, generator=generator)
    x = torch.linalg.lstsq(A, b[:, None]).solution[:, 0]
    rows = [[Fraction(value) for value in row] for row in A.tolist()]
    residual = [
        Fraction(right) - sum(a * Fraction(each) for a, each in zip(row, x.tolist(), strict=True))
        for row, right in zip(rows, b.tolist(), strict=True)
    ]
    exact = [float(sum(row[j] * r for row, r in zip(rows, residual, strict=True))) for j in range(7)]
    gradient, squares = doubled.residual_sums(A, b, x)
    assert max(map(abs, exact)) < 1e-13
    np.testing.assert_allclose(gradient.numpy(), exact, rtol=1e-12)
    assert squares == pytest.approx(float(sum(r * r for r in residual)), rel=1e-14)
