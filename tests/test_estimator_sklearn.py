"""The transformer as a replacement for scikit-learn's: contract, behaviour, and tools."""

import inspect
import itertools
import re
import warnings

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import sklearn
from helpers.cases import pairwise
from sklearn import random_projection
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.exceptions import DataDimensionalityWarning, NotFittedError
from sklearn.linear_model import Ridge
from sklearn.metrics import euclidean_distances
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline, make_union
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from sjlt import SparseRandomProjection

BOTH = [SparseRandomProjection, random_projection.SparseRandomProjection]
CONTAINERS = [np.asarray, scipy.sparse.csr_matrix, scipy.sparse.csr_array, scipy.sparse.csc_matrix]


def sparse_normals(shape, n_nonzeros, seed=0):
    rng = np.random.default_rng(seed)
    X = np.zeros(shape)
    np.add.at(X, tuple(rng.integers(n, size=n_nonzeros) for n in shape), rng.normal(size=n_nonzeros))
    return X


def raised(function):
    """The exception's type and its message; both transformers have the same class name."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function()
    return type(caught.value), str(caught.value)


def numbers(message):
    return [float(x) for x in re.findall(r"-?\d+(?:\.\d+)?", message)]


# ------------------------------------------------------------------------------------- the contract


@parametrize_with_checks(
    [
        SparseRandomProjection(n_components=2),
        SparseRandomProjection(n_components=1, dense_output=True),
        SparseRandomProjection(n_components=2, nnz=1, random_state=7),
        SparseRandomProjection(n_components=2, compute_inverse_components=True),
    ]
)
def test_scikit_learn_checks(estimator, check):
    check(estimator)


def test_has_all_of_scikit_learns_parameters():
    ours, theirs = (inspect.signature(cls.__init__).parameters for cls in BOTH)
    assert [name for name in ours if name not in ("nnz", "stacks")] == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind
        assert ours[name].default == (None if name == "density" else parameter.default)


def test_has_all_of_scikit_learns_public_names():
    X = np.ones((4, 30))
    ours, theirs = (cls(5, compute_inverse_components=True).fit(X) for cls in BOTH)
    for name in dir(theirs):
        assert name.startswith("_") or hasattr(ours, name), name


# ------------------------------------------------------------------------------------- errors and warnings


def shaped(n_samples, n_features):
    return np.random.default_rng(0).normal(size=(n_samples, n_features))


@pytest.mark.parametrize(
    ("parameters", "X"),
    [
        ({}, shaped(1000, 100)),
        ({}, [[0, 1, 2]]),
        ({}, shaped(1, 100)),
        ({"eps": 0.01}, shaped(10, 50)),
        ({"eps": 0.9}, scipy.sparse.csr_matrix((10, 5))),
        ({"eps": 1.0}, shaped(10, 50)),
        ({"eps": 1.5}, shaped(10, 50)),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else "",
)
def test_impossible_auto_n_components(parameters, X):
    ours, theirs = (raised(lambda cls=cls: cls(**parameters).fit(X)) for cls in BOTH)
    assert ours[0] == theirs[0]
    assert numbers(ours[1]) == numbers(theirs[1])


@pytest.mark.parametrize(
    "bad",
    [
        *({"n_components": v} for v in (0, -3, 2.5, "many", None)),
        *({"eps": v} for v in (0, -0.5, "small", None)),
        {"dense_output": "yes"},
        {"compute_inverse_components": None},
    ],
    ids=str,
)
def test_invalid_parameters(bad):
    ours, theirs = (raised(lambda cls=cls: cls(**bad).fit(shaped(4, 30))) for cls in BOTH)
    assert ours == theirs


@pytest.mark.parametrize(
    "X",
    [
        np.ones(3),
        np.ones((2, 3, 4)),
        np.ones((0, 30)),
        np.ones((4, 0)),
        np.full((4, 30), np.nan),
        np.full((4, 30), np.inf),
        np.ones((4, 30), complex),
        np.full((4, 30), "a"),
        "X",
    ],
    ids=lambda x: f"{type(x).__name__} {getattr(x, 'shape', '')} {getattr(x, 'dtype', '')}",
)
def test_fit_refuses(X):
    ours, theirs = (raised(lambda cls=cls: cls(5).fit(X)) for cls in BOTH)
    assert ours == theirs


@pytest.mark.parametrize(
    "X",
    [
        shaped(4, 29),
        scipy.sparse.csr_matrix((4, 31)),
        np.ones(30),
        np.full((4, 30), np.nan),
        pd.DataFrame(shaped(4, 30), columns=[f"other{i}" for i in range(30)]),
    ],
    ids=lambda x: f"{type(x).__name__} {x.shape}",
)
def test_transform_refuses(X):
    seen = pd.DataFrame(shaped(4, 30), columns=[f"x{i}" for i in range(30)])
    ours, theirs = (raised(lambda cls=cls: cls(5).fit(seen).transform(X)) for cls in BOTH)
    assert ours == theirs


@pytest.mark.parametrize("method", ["transform", "inverse_transform", "get_feature_names_out"])
def test_unfitted(method):
    arguments = [] if method == "get_feature_names_out" else [shaped(4, 30)]
    ours, theirs = (raised(lambda cls=cls: getattr(cls(5), method)(*arguments)) for cls in BOTH)
    assert ours == theirs
    assert ours[0] is NotFittedError


@pytest.mark.parametrize("container", CONTAINERS)
def test_more_components_than_features(container):
    messages = []
    for cls in BOTH:
        with pytest.warns(DataDimensionalityWarning) as caught:
            projected = cls(21).fit_transform(container(shaped(5, 20)))
        assert projected.shape == (5, 21)
        messages.append([numbers(str(w.message)) for w in caught])
    assert messages[0] == messages[1] == [[20, 21]]


# ------------------------------------------------------------------------------------- results


@pytest.mark.parametrize(
    ("container", "dtype"),
    [
        *itertools.product(CONTAINERS, [np.float32, np.float64, np.int32, np.int64, np.bool_]),
        (np.asarray, np.float16),  # not supported by scipy.sparse
    ],
)
@pytest.mark.parametrize("dense_output", [False, True])
def test_containers_dtypes_and_shapes(container, dtype, dense_output):
    X = container((10 * sparse_normals((10, 1000), 100)).astype(dtype))
    results = []
    for cls in BOTH:
        transformer = cls(20, dense_output=dense_output, random_state=0)
        results += [(transformer.fit_transform(X), transformer.components_)]
    for ours, theirs in zip(*results, strict=True):
        assert type(ours) is type(theirs)
        assert getattr(ours, "format", None) == getattr(theirs, "format", None)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


@pytest.mark.skipif("sparse_interface" not in sklearn.get_config(), reason="a setting of scikit-learn 1.9")
@pytest.mark.parametrize("interface", ["spmatrix", "sparray"])
def test_sparse_interface(interface):
    X = sparse_normals((10, 100), 50)
    with sklearn.config_context(sparse_interface=interface):
        for container in CONTAINERS[1:]:
            ours, theirs = (cls(20).fit(container(X)) for cls in BOTH)
            assert type(ours.components_) is type(theirs.components_)
            assert type(ours.transform(container(X))) is type(theirs.transform(container(X)))


@pytest.mark.parametrize("container", CONTAINERS)
def test_embedding_dimension(container):
    X = sparse_normals((10, 1000), 100)
    transformer = SparseRandomProjection(random_state=0, eps=0.5).fit(container(X))
    assert transformer.n_components == "auto"
    assert transformer.nnz == "auto"
    assert transformer.density is None
    assert transformer.n_components_ == 110
    assert transformer.density_ == pytest.approx(0.036, abs=0.001)
    assert transformer.components_.shape == (110, 1000)
    projected = transformer.transform(X)
    assert projected.shape == (10, 110)
    np.testing.assert_array_equal(transformer.transform(X), projected)
    np.testing.assert_array_equal(SparseRandomProjection(random_state=0, eps=0.5).fit_transform(X), projected)


def test_dense_and_sparse_data_get_the_same_components():
    X = sparse_normals((5, 20), 5)
    by_dense = SparseRandomProjection(3, random_state=1).fit(X)
    by_sparse = SparseRandomProjection(3, random_state=1).fit(scipy.sparse.csr_matrix(X))
    assert (by_dense.components_ != by_sparse.components_).nnz == 0


def test_float32_and_float64_agree():
    X = shaped(25, 3000)
    by_32, by_64 = SparseRandomProjection(random_state=0), SparseRandomProjection(random_state=0)
    np.testing.assert_allclose(by_32.fit_transform(X.astype(np.float32)), by_64.fit_transform(X), atol=1e-4, rtol=1e-6)
    np.testing.assert_allclose(by_32.components_.toarray(), by_64.components_.toarray())


def test_distances_are_kept():
    X = sparse_normals((8, 5000), 15000)
    pairs = np.triu_indices(8, 1)
    before = euclidean_distances(X, squared=True)[pairs]
    errors = {cls: [] for cls in BOTH}
    for seed in range(10):
        for cls in BOTH:
            after = euclidean_distances(cls(eps=0.2, random_state=seed).fit_transform(X), squared=True)[pairs]
            errors[cls].append(after / before - 1)
    assert abs(errors[BOTH[0]][0]).max() < 0.2  # the bound and the one seed of scikit-learn's own test
    ours, theirs = (np.sqrt(np.mean(np.square(errors[cls]))) for cls in BOTH)
    # Both should be about sqrt(2/479), which 10 seeds estimate to within about 6 %.
    assert ours < 1.25 * theirs


@pairwise(
    n_samples=[2, 10, 1000],
    n_features=[2, 9, 10, 11, 1000],
    compute_inverse_components=[True, False],
    seed=[0, 1],
)
def test_inverse_transform(n_samples, n_features, compute_inverse_components, seed):
    X = sparse_normals((n_samples, n_features), n_samples * n_features // 100 + 1, seed)
    for container in (np.asarray, scipy.sparse.csr_matrix):
        transformer = SparseRandomProjection(
            10, compute_inverse_components=compute_inverse_components, random_state=seed
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DataDimensionalityWarning)
            projected = transformer.fit_transform(container(X))
        assert hasattr(transformer, "inverse_components_") == compute_inverse_components
        if compute_inverse_components:
            assert transformer.inverse_components_.shape == (n_features, 10)
        back = transformer.inverse_transform(projected)
        assert back.shape == X.shape
        if scipy.sparse.issparse(projected):
            projected = projected.toarray()
        np.testing.assert_allclose(transformer.transform(back), projected, rtol=1e-7, atol=1e-10)


# ------------------------------------------------------------------------------------- names and frames


def test_names_out():
    X = shaped(4, 30)
    ours, theirs = (cls(3).fit(X).get_feature_names_out() for cls in BOTH)
    np.testing.assert_array_equal(ours, theirs)
    assert ours.tolist() == ["sparserandomprojection0", "sparserandomprojection1", "sparserandomprojection2"]


def test_names_and_frames_with_auto_n_components():
    X = pd.DataFrame(shaped(25, 3000), index=range(100, 125), columns=[f"x{i}" for i in range(3000)])
    transformer = SparseRandomProjection(random_state=0).set_output(transform="pandas")
    frame = transformer.fit_transform(X)
    names = [f"sparserandomprojection{i}" for i in range(2759)]
    assert transformer.get_feature_names_out().tolist() == names
    assert isinstance(frame, pd.DataFrame)
    assert frame.columns.tolist() == names
    assert frame.index.tolist() == X.index.tolist()
    np.testing.assert_array_equal(frame, transformer.set_output(transform="default").transform(X))
    np.testing.assert_array_equal(transformer.feature_names_in_, X.columns)


def test_column_transformer():
    X = pd.DataFrame(shaped(6, 20), columns=[f"x{i}" for i in range(20)])
    parts = [("srp", SparseRandomProjection(4, random_state=0), X.columns[:18].tolist())]
    frame = ColumnTransformer(parts, remainder="passthrough").set_output(transform="pandas").fit_transform(X)
    assert frame.columns.tolist() == [
        *(f"srp__sparserandomprojection{i}" for i in range(4)),
        "remainder__x18",
        "remainder__x19",
    ]
    expected = SparseRandomProjection(4, random_state=0).fit_transform(X.iloc[:, :18])
    np.testing.assert_array_equal(frame.iloc[:, :4], expected)


# ------------------------------------------------------------------------------------- pipelines


def test_pipeline():
    X = abs(shaped(30, 200))
    steps = FunctionTransformer(np.log1p), StandardScaler(), SparseRandomProjection(20, random_state=0)
    pipeline = make_pipeline(*steps, Ridge()).fit(X, X[:, 0])
    assert pipeline[:-1].transform(X).shape == (30, 20)
    assert np.isfinite(pipeline.predict(X)).all()
    assert clone(pipeline).fit(X, X[:, 0]).predict(X).tolist() == pipeline.predict(X).tolist()


def test_union_stacks_two_seeds():
    X = shaped(5, 100)
    union = make_union(*(SparseRandomProjection(8, random_state=seed) for seed in (0, 1)))
    expected = [SparseRandomProjection(8, random_state=seed).fit_transform(X) for seed in (0, 1)]
    np.testing.assert_array_equal(union.fit_transform(X), np.hstack(expected))


@pytest.mark.parametrize("n_jobs", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_grid_search(n_jobs):
    X = shaped(40, 100)
    y = X @ np.arange(100)
    pipeline = make_pipeline(SparseRandomProjection(random_state=0), Ridge())
    grid = {"sparserandomprojection__n_components": [4, 64], "sparserandomprojection__nnz": ["auto", 1, 2]}
    search = GridSearchCV(pipeline, grid, cv=3, n_jobs=n_jobs, error_score="raise").fit(X, y)
    assert search.best_params_["sparserandomprojection__n_components"] == 64
    assert search.best_estimator_[0].sketch_.n_components == 64
