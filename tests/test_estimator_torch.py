"""The transformer on torch tensors, on the CPU and on a GPU: results, checks and refusals."""

import os
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pandas as pd
import pytest
import sklearn
import torch
from helpers.cases import exhaustive_except
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.pipeline import make_pipeline

from sjlt import Sketch, SparseRandomProjection

D, K = 300, 64
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


def integers(device, dtype=torch.float32, shape=(7, D)):
    """Small integers: with nnz=4 (entries +-1/2) every sum of their products is exact."""
    return torch.from_numpy(np.random.default_rng(0).integers(-3, 4, shape)).to(device, dtype)


def normals(device, dtype=torch.float64, shape=(7, D)):
    return torch.from_numpy(np.random.default_rng(1).normal(size=shape)).to(device, dtype)


def assert_like(actual, X, expected):
    """Assert that `actual` is a tensor with the dtype and device of X and the values of the array `expected`."""
    assert (type(actual), actual.device, actual.dtype) == (torch.Tensor, X.device, X.dtype)
    np.testing.assert_array_equal(actual.double().numpy(force=True), expected)


# ------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("dtype", exhaustive_except([torch.bfloat16, torch.float32], FLOATS))
def test_tensors_give_tensors_on_the_same_device(device, dtype):
    X = integers(device, dtype)
    transformer = SparseRandomProjection(K, random_state=3)
    expected = transformer.fit_transform(integers("cpu", torch.float64).numpy())
    for Y in (clone(transformer).fit_transform(X), clone(transformer).fit(X).transform(X), transformer.transform(X)):
        assert_like(Y, X, expected)


def test_strides_do_not_matter(device):
    X = integers(device, shape=(D, 2 * D))
    transformer = SparseRandomProjection(K, random_state=3).fit(X[:, :D])
    for view in (X[:, ::2], X[:, :D].T, X[:1, :D].expand(5, D)):
        assert_like(transformer.transform(view), X, transformer.transform(view.numpy(force=True)))


def test_fitted_state_matches_arrays(device):
    X = integers(device, torch.float64)
    by_tensor, by_array = (SparseRandomProjection(K, random_state=5).fit(x) for x in (X, X.numpy(force=True)))
    assert vars(by_tensor) == vars(by_array)
    assert by_tensor.n_features_in_ == D
    assert len(pickle.dumps(by_tensor)) < 2000


@pytest.mark.parametrize(
    ("dtype", "of_components"), list(zip(FLOATS, [np.float32, np.float32, np.float32, np.float64], strict=True))
)
def test_components(device, dtype, of_components):
    transformer = SparseRandomProjection(K, random_state=0).fit(integers(device, dtype))
    assert transformer.components_.dtype == of_components
    assert (transformer.components_ != Sketch(D, K).to_scipy("csr")).nnz == 0
    assert transformer.density_ == 4 / K


def test_auto_n_components(device):
    X = integers(device, shape=(25, 3000))
    assert SparseRandomProjection(random_state=0).fit(X).n_components_ == 2759
    with pytest.raises(ValueError, match=r"target dimension of 2759.*n_features=300"):
        SparseRandomProjection().fit(X[:, :300])


@pytest.mark.parametrize("components", exhaustive_except([False], [False, True]))
@pytest.mark.parametrize(("dtype", "error"), list(zip(FLOATS, [3e-3, 2e-2, 1e-5, 1e-12], strict=True)))
def test_inverse(device, dtype, error, components):
    X = normals(device, dtype)
    transformer = SparseRandomProjection(K, random_state=0, compute_inverse_components=components)
    Y = transformer.fit(X).transform(X)
    Z = transformer.inverse_transform(Y)
    assert (type(Z), Z.device, Z.dtype, Z.shape) == (torch.Tensor, X.device, dtype, X.shape)
    pseudo_inverse = np.linalg.pinv(transformer.sketch_.toarray()).T
    expected = Y.double().numpy(force=True) @ pseudo_inverse
    assert np.linalg.norm(Z.double().numpy(force=True) - expected) <= error * np.linalg.norm(expected)
    if components:
        held = transformer.inverse_components_
        assert (held.device, held.shape) == (X.device, (D, K))
        assert held.dtype == (dtype if dtype.itemsize > 2 else torch.float32)


@pytest.mark.parametrize("components", [False, True])
def test_fit_and_transform_mix_arrays_and_tensors(device, components):
    X = normals(device)
    array = X.numpy(force=True)
    transformer = SparseRandomProjection(K, random_state=0, compute_inverse_components=components)
    for fitted in (clone(transformer).fit(X), clone(transformer).fit(array)):
        Y, y = fitted.transform(X), fitted.transform(array)
        assert isinstance(y, np.ndarray)
        assert Y.device == X.device
        np.testing.assert_allclose(Y.numpy(force=True), y, atol=1e-12)
        Z, z = fitted.inverse_transform(Y), fitted.inverse_transform(y)
        assert isinstance(z, np.ndarray)
        assert Z.device == X.device
        np.testing.assert_allclose(Z.numpy(force=True), z, atol=1e-12)


def test_gradients(device):
    X = integers(device).requires_grad_()
    transformer = SparseRandomProjection(K, random_state=0).fit(X)
    transformer.transform(X).sum().backward()
    expected = transformer.sketch_.project_adjoint(torch.ones(7, K, device=device))
    assert torch.equal(X.grad, expected)


# ------------------------------------------------------------------------------------- checks


@pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC) tensor support is in beta state")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_coo])
def test_sparse_tensors_are_checked_like_dense_ones(layout):
    transformer = SparseRandomProjection(5, random_state=0)
    large = (torch.eye(30, 20) * 3e38).to_sparse(layout=layout)  # finite, but not their sum
    assert transformer.fit_transform(large).shape == (30, 5)
    for value, name in ((np.nan, "NaN"), (np.inf, "infinity")):
        with pytest.raises(ValueError, match=f"^Input X contains {name}.$"):
            transformer.transform(torch.full((3, 20), value).to_sparse(layout=layout))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("value", "name"), [(np.nan, "NaN"), (np.inf, "infinity"), (-np.inf, "infinity")])
def test_non_finite_values_are_refused(device, dtype, value, name):
    good = integers(device, dtype)
    transformer = SparseRandomProjection(K, compute_inverse_components=True).fit(good)
    bad = good.clone()
    bad[3, 5] = value
    for function in (transformer.fit, transformer.transform, lambda X: transformer.inverse_transform(X[:, :K])):
        with pytest.raises(ValueError, match=f"^Input X contains {name}.$"):
            function(bad)
    with sklearn.config_context(assume_finite=True):
        Y = transformer.transform(bad)
    assert not Y[3].isfinite().all()
    assert Y[:3].isfinite().all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_finite_values_whose_sum_overflows(device, dtype):
    X = torch.full((3, D), torch.finfo(dtype).max, dtype=dtype, device=device)
    X[:, 1::2] /= 2
    SparseRandomProjection(K).fit(X)


def test_shape_and_dtype_refusals(device):
    transformer = SparseRandomProjection(K).fit(integers(device))
    for function in (transformer.fit, transformer.transform, transformer.inverse_transform):
        with pytest.raises(ValueError, match=r"2-D tensor, .*, got one of shape \(300,\)"):
            function(torch.ones(D, device=device))
        with pytest.raises(ValueError, match=r"at least 1 sample and 1 feature .* shape \(0, 300\)"):
            function(torch.ones(0, D, device=device))
        for dtype in (torch.int64, torch.bool, torch.complex64):
            with pytest.raises(TypeError, match=f"got {dtype}"):
                function(torch.ones(7, D, device=device).to(dtype))
    with pytest.raises(ValueError, match="X has 299 features, but SparseRandomProjection is expecting 300"):
        transformer.transform(torch.ones(7, D - 1, device=device))
    with pytest.raises(ValueError, match="X has 65 components, inverse_transform expects 64"):
        transformer.inverse_transform(torch.ones(7, K + 1, device=device))
    with pytest.raises(NotFittedError):
        SparseRandomProjection(K).transform(torch.ones(7, D, device=device))


def test_feature_names(device):
    X = integers(device)
    transformer = SparseRandomProjection(K).fit(pd.DataFrame(X.numpy(force=True)).add_prefix("a"))
    with pytest.warns(UserWarning, match="X does not have valid feature names"):
        transformer.transform(X)
    assert not hasattr(transformer.fit(X), "feature_names_in_")
    assert list(transformer.get_feature_names_out()[:2]) == ["sparserandomprojection0", "sparserandomprojection1"]


def test_pandas_output_is_refused_for_tensors(device):
    X = integers(device)
    transformer = SparseRandomProjection(K).fit(X).set_output(transform="pandas")
    with pytest.raises(ValueError, match=r"transform='pandas'.*X.numpy\(force=True\)"):
        transformer.transform(X)
    assert isinstance(transformer.transform(X.numpy(force=True)), pd.DataFrame)
    assert isinstance(transformer.set_output(transform="default").transform(X), torch.Tensor)


def test_pipeline(device):
    X = integers(device, shape=(7, 1000))
    pipeline = make_pipeline(SparseRandomProjection(256, random_state=1), SparseRandomProjection(K, random_state=2))
    assert_like(pipeline.fit_transform(X), X, pipeline.fit_transform(X.numpy(force=True)))


ARRAY_API = """
import sys
import numpy as np, sklearn, torch
from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sjlt import SparseRandomProjection

X = torch.from_numpy(np.random.default_rng(0).normal(size=(20, 300))).to(sys.argv[1])
plain = SparseRandomProjection(64, random_state=0, compute_inverse_components=True)
off = plain.fit_transform(X)
with sklearn.config_context(array_api_dispatch=True):
    on = clone(plain).fit(X)
    assert torch.equal(on.transform(X), off)
    assert torch.equal(on.inverse_transform(off), plain.inverse_transform(off))
    assert on.inverse_components_.device == X.device
    array = X.numpy(force=True)
    assert isinstance(on.transform(array), np.ndarray)
    assert np.array_equal(on.transform(array), clone(plain).fit_transform(array))
    scaled = make_pipeline(StandardScaler(), plain).fit_transform(X)
    assert scaled.device == X.device
wanted = make_pipeline(StandardScaler(), plain).fit_transform(array)
np.testing.assert_allclose(scaled.numpy(force=True), wanted, atol=1e-10)
"""


@pytest.mark.exhaustive
def test_array_api_dispatch(device):
    """Runs in its own process: SciPy reads the setting when it is imported."""
    environment = {**os.environ, "SCIPY_ARRAY_API": "1"}
    command = [sys.executable, "-c", ARRAY_API, device]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_no_synchronization_without_the_finite_check():
    X = integers("cuda")
    transformer = SparseRandomProjection(K).fit(X)
    with sklearn.config_context(assume_finite=True):
        transformer.transform(X)  # compile
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "a prototype feature"
            torch.cuda.set_sync_debug_mode("error")
        try:
            transformer.transform(X)
        finally:
            torch.cuda.set_sync_debug_mode("default")
