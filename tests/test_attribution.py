"""Gradient projectors: one sketch for all parameters, the scale and identity that TRAK needs, clear refusals."""

import math
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch
from helpers.cases import exhaustive_except

from sjlt import Sketch
from sjlt.attribution import DattriProjector, TrakProjector, dattri_projections

GRADIENTS = {"weight": torch.randn(5, 4, 8), "scalar": torch.randn(5), "bias": torch.randn(5, 2, 2)}  # for 5 examples
D, K = 37, 16
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def flat(gradients):
    return torch.cat([g.reshape(5, -1) for g in gradients.values()], 1)


@pytest.mark.parametrize("dtype", exhaustive_except([torch.float32], FLOATS), ids=str)
def test_dicts_and_tensors(dtype):
    gradients = {name: g.to(dtype) for name, g in GRADIENTS.items()}
    expected = Sketch(D, K, seed=3).project(flat(gradients).to(torch.promote_types(dtype, torch.float32)))
    for projector, factor in (
        (TrakProjector(D, K, 3, "sjlt", "cpu"), math.sqrt(K)),
        (DattriProjector(D, K, 3), 1.0),
    ):
        for data in (gradients, flat(gradients)):
            result = projector.project(data, 0)
            assert result.dtype == expected.dtype
            assert torch.allclose(result, factor * expected, rtol=1e-6, atol=1e-5)


def test_results_are_fresh_and_reproducible():
    projector = TrakProjector(D, K, device="cpu")
    first = projector.project(GRADIENTS, model_id=0)
    kept = first.clone()
    first /= 7  # TRAK works in place
    projector.free_memory()
    assert torch.equal(projector.project(GRADIENTS, model_id=0), kept)


def test_each_model_has_its_own_sketch():
    projector = TrakProjector(D, K, seed=5, device="cpu")
    results = [projector.project(GRADIENTS, model_id=i) for i in (0, 1, 2, 0)]
    assert torch.equal(results[0], results[3])
    assert not torch.equal(results[0], results[1])
    assert not torch.equal(results[1], results[2])
    expected = math.sqrt(K) * Sketch(D, K, seed=5 + 2**32).project(flat(GRADIENTS))
    assert torch.allclose(results[1], expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("law", [{"nnz": 8}, {"stacks": 2, "nnz": 2}, {"density": 0.5}])
def test_description_identifies_the_sketch(law):
    projector = TrakProjector(D, K, seed=9, device="cpu", **law)
    assert TrakProjector(D, K, 9, projector.proj_type, "cpu", **law).proj_type == projector.proj_type
    others = [TrakProjector(D, K, seed=8, device="cpu", **law), TrakProjector(D, K, seed=9, device="cpu", nnz=3)]
    assert projector.proj_type not in [other.proj_type for other in others]
    S = Sketch(D, K, seed=9, **law)
    assert torch.allclose(projector.project(GRADIENTS, 0), math.sqrt(K) * S.project(flat(GRADIENTS)), atol=1e-5)


def test_gradients_requiring_grad():
    gradients = {name: g.clone().requires_grad_() for name, g in GRADIENTS.items()}
    assert not TrakProjector(D, K, device="cpu").project(gradients, 0).requires_grad


def test_refusals():
    projector = TrakProjector(D, K, device="cpu")
    with pytest.raises(ValueError, match="proj_type must be 'sjlt', got 'normal'"):
        TrakProjector(D, K, 0, "normal", "cpu")
    with pytest.raises(ValueError, match="proj_type must be 'sjlt', got 'sjlt law 1, nnz 4, seed 1'"):
        TrakProjector(D, K, 0, "sjlt law 1, nnz 4, seed 1", "cpu")
    with pytest.raises(ValueError, match="n_features = 37 elements per element of the batch, got 36"):
        projector.project(torch.zeros(5, 36), 0)
    with pytest.raises(ValueError, match=r"must have shape \(batch, 37\), got \(37,\)"):
        projector.project(torch.zeros(37), 0)
    with pytest.raises(ValueError, match="same leading dimension"):
        projector.project({"a": torch.zeros(5, 30), "b": torch.zeros(4, 7)}, 0)
    with pytest.raises(TypeError, match="got list"):
        projector.project([torch.zeros(5, 37)], 0)
    with pytest.raises(ValueError, match="ensemble_id must be from 0 to 2147483647, got -1"):
        DattriProjector(D, K).project(torch.zeros(5, D), -1)


@pytest.mark.parametrize("order", [1, -1])
def test_float64_promotes_the_result(order):
    gradients = {"a": torch.randn(5, 30), "b": torch.randn(5, 7, dtype=torch.float64)}
    result = TrakProjector(D, K, device="cpu").project(dict(list(gradients.items())[::order]), 0)
    assert result.dtype == torch.float64


@pytest.fixture
def dattri(monkeypatch):
    """A stand-in for dattri's module, whose projectors are represented by their type names."""

    def make_random_projector(param_shape_list, proj_dim, proj_type="normal", proj_seed=0, device="cpu"):
        return f"dattri's {proj_type}"

    projection = ModuleType("dattri.func.projection")
    projection.make_random_projector = make_random_projector
    package = ModuleType("dattri.func")
    package.projection = projection
    monkeypatch.setitem(sys.modules, "dattri", ModuleType("dattri"))
    monkeypatch.setitem(sys.modules, "dattri.func", package)
    return projection


def test_overlapping_contexts(dattri):
    original, made = dattri.make_random_projector, lambda: dattri.make_random_projector([30, 7], K).sketch.nnz
    first, second = dattri_projections(nnz=2), dattri_projections(nnz=3)
    first.__enter__()
    assert made() == 2
    second.__enter__()
    assert made() == 3
    assert dattri.make_random_projector([30, 7], K, proj_type="identity") == "dattri's identity"
    first.__exit__(None, None, None)
    assert made() == 3
    second.__exit__(None, None, None)
    assert dattri.make_random_projector is original
    with dattri_projections(nnz=2), dattri_projections(nnz=2):
        assert made() == 2
    assert dattri.make_random_projector is original


def test_contexts_in_threads(dattri):
    original, meet = dattri.make_random_projector, threading.Barrier(4)

    def work(nnz):
        for _ in range(50):
            with dattri_projections(nnz=nnz):
                meet.wait()
                assert dattri.make_random_projector([30, 7], K).sketch.nnz in (1, 2, 3, 4)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, (1, 2, 3, 4)))
    assert dattri.make_random_projector is original


def test_functions_replaced_inside_a_context_are_kept(dattri):
    with dattri_projections():
        ours = dattri.make_random_projector
        other = dattri.make_random_projector = lambda *args, **kwargs: ours(*args, **kwargs)
    assert dattri.make_random_projector is other
    assert other([30, 7], K) == "dattri's normal"


def test_missing_dattri_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "dattri", None)
    monkeypatch.setitem(sys.modules, "dattri.func", None)
    with pytest.raises(ImportError, match=r"sjlt-triton\[attribution\]"), dattri_projections():
        pass
