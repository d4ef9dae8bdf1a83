"""The transformer itself: its attributes, results and refusals."""

import pickle
import tracemalloc

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
from helpers.cases import each_value
from sklearn.base import clone
from sklearn.exceptions import DataDimensionalityWarning
from sklearn.random_projection import johnson_lindenstrauss_min_dim
from sklearn.utils import estimator_html_repr
from sklearn.utils._param_validation import InvalidParameterError

import sjlt
from sjlt import Sketch, SparseRandomProjection

CONTAINERS = [scipy.sparse.csr_matrix, scipy.sparse.csr_array, scipy.sparse.csc_matrix, scipy.sparse.csc_array]


def integers(shape=(7, 300), dtype=np.float64, density=1.0):
    """Small integers: with nnz=4 (entries +-1/2) every sum of their products is exact."""
    rng = np.random.default_rng(0)
    return (rng.integers(-8, 9, shape) * (rng.random(shape) < density)).astype(dtype)


# ------------------------------------------------------------------------------------- fitted state


def test_fit_stores_only_the_sketch():
    X = integers()
    transformer = SparseRandomProjection(64, random_state=5).fit(X)
    fitted = {k: v for k, v in vars(transformer).items() if k not in transformer.get_params()}
    assert fitted == {"n_features_in_": 300, "sketch_": Sketch(300, 64, seed=5), "_fit_dtype": np.dtype("float64")}


def test_fit_of_a_million_features_is_small():
    X = scipy.sparse.csr_matrix((1, 10**6), dtype=np.float32)
    transformer = SparseRandomProjection(1024, random_state=0).fit(X)
    assert len(pickle.dumps(transformer)) < 2000


def test_fit_copies_nothing():
    X = np.ones((1000, 1000))
    SparseRandomProjection(10).fit(X)
    tracemalloc.start()
    try:
        SparseRandomProjection(10).fit(X)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < X.nbytes / 20


def test_fit_on_a_shape():
    shape = 100_000, 10**10  # dense, this would be 4 PB
    transformer = SparseRandomProjection(eps=0.5, random_state=1).fit(scipy.sparse.csr_matrix(shape, dtype=np.float32))
    k = johnson_lindenstrauss_min_dim(shape[0], eps=0.5)
    assert transformer.sketch_ == Sketch(10**10, k, seed=1)
    X = scipy.sparse.csr_matrix(([2.0, 4.0], ([0, 0], [7, 10**10 - 1])), shape=(1, 10**10))
    first, last = transformer.sketch_[:, 7:8].toarray(), transformer.sketch_[:, 10**10 - 1 :].toarray()
    np.testing.assert_array_equal(transformer.transform(X).toarray(), (2 * first + 4 * last).T)


def test_fit_on_a_shape_equals_fit_on_data():
    X = integers(dtype=np.float32)
    by_data = SparseRandomProjection(64, random_state=0).fit(X)
    by_shape = SparseRandomProjection(64, random_state=0).fit(scipy.sparse.csr_matrix((1, 300), dtype=np.float32))
    assert vars(by_data) == vars(by_shape)


def test_repr_does_not_build_components(monkeypatch):
    transformer = SparseRandomProjection(16).fit(integers())

    def build(*args, **kwargs):
        raise AssertionError("components_ was built")

    monkeypatch.setattr(Sketch, "to_scipy", build)
    assert "SparseRandomProjection" in repr(transformer)
    assert "SparseRandomProjection" in estimator_html_repr(transformer)
    assert "n_components_" in dir(transformer)
    with pytest.raises(AssertionError, match="was built"):
        transformer.components_  # noqa: B018


def test_fitted_attributes_do_not_exist_before_fit():
    for name in ("sketch_", "components_", "n_components_", "density_", "inverse_components_", "n_features_in_"):
        assert not hasattr(SparseRandomProjection(4), name)


# ------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_transform_multiplies_by_components(dtype):
    X = integers(dtype=dtype)
    transformer = SparseRandomProjection(50, nnz=4, random_state=3).fit(X)
    components = transformer.components_
    assert components.dtype == dtype
    np.testing.assert_array_equal(transformer.transform(X), X @ components.toarray().T)


@pytest.mark.parametrize("nnz", [1, 4, 7])
def test_components_have_nnz_per_column(nnz):
    transformer = SparseRandomProjection(50, nnz=nnz, random_state=3).fit(integers())
    components = transformer.components_
    assert components.has_canonical_format
    np.testing.assert_array_equal(np.bincount(components.indices, minlength=300), nnz)
    np.testing.assert_array_equal(np.unique(components.data), [-1 / np.sqrt(nnz), 1 / np.sqrt(nnz)])
    assert transformer.density_ == nnz / 50 == components.nnz / 50 / 300


@pytest.mark.parametrize(("n_components", "nnz"), [(3, 3), (4, 4), (129, 4)])
def test_auto_nnz(n_components, nnz):
    assert SparseRandomProjection(n_components).fit(integers()).sketch_.nnz == nnz


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sparse_input(container, dtype):
    dense = integers(dtype=dtype, density=0.1)
    X = container(dense)
    transformer = SparseRandomProjection(50, random_state=3).fit(X)
    projected = transformer.transform(X)
    assert projected.format == X.format
    assert projected.dtype == dtype
    np.testing.assert_array_equal(projected.toarray(), transformer.transform(dense))
    transformer.set_params(dense_output=True)
    projected = transformer.transform(X)
    assert isinstance(projected, np.ndarray)
    assert projected.dtype == dtype
    np.testing.assert_array_equal(projected, transformer.transform(dense))


@pytest.mark.parametrize("make", [np.asfortranarray, lambda x: np.repeat(x, 2, axis=1)[:, ::2], np.ndarray.tolist])
def test_layouts_and_lists(make):
    X = integers()
    transformer = SparseRandomProjection(50, random_state=3).fit(X)
    np.testing.assert_array_equal(transformer.transform(make(X)), transformer.transform(X))


@pytest.mark.parametrize("dtype", [np.float16, np.int8, np.int64, np.bool_])
def test_other_dtypes_become_float64(dtype):
    X = integers(dtype=dtype)
    projected = SparseRandomProjection(50, random_state=3).fit_transform(X)
    assert projected.dtype == np.float64
    np.testing.assert_array_equal(
        projected, SparseRandomProjection(50, random_state=3).fit_transform(X.astype(np.float64))
    )


@each_value(
    fit_dtype=[np.float32, np.float64], dtype=[np.float32, np.float64], compute_inverse_components=[True, False]
)
def test_results_keep_the_dtype(fit_dtype, dtype, compute_inverse_components):
    transformer = SparseRandomProjection(50, compute_inverse_components=compute_inverse_components)
    transformer.fit(integers(dtype=fit_dtype))
    assert transformer.components_.dtype == fit_dtype
    projected = transformer.transform(integers(dtype=dtype))
    assert projected.dtype == dtype
    assert transformer.inverse_transform(projected).dtype == dtype


# ------------------------------------------------------------------------------------- the inverse


@pytest.mark.parametrize("n_features", [2, 9, 10, 11, 300])
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.DataDimensionalityWarning")
def test_inverse_components_are_the_pseudo_inverse(n_features):
    transformer = SparseRandomProjection(10, compute_inverse_components=True, random_state=0)
    transformer.fit(integers((4, n_features)))
    expected = scipy.linalg.pinv(transformer.components_.toarray())
    np.testing.assert_allclose(transformer.inverse_components_, expected, atol=1e-12)


@pytest.mark.parametrize(("dtype", "atol"), [(np.float32, 1e-5), (np.float64, 1e-13)])
@pytest.mark.parametrize("container", [np.asarray, scipy.sparse.csr_matrix, scipy.sparse.csc_array])
def test_both_ways_to_invert_agree(dtype, atol, container):
    X = integers(dtype=dtype, density=0.1)
    stored = SparseRandomProjection(20, compute_inverse_components=True, random_state=0).fit(X)
    not_stored = SparseRandomProjection(20, random_state=0).fit(X)
    assert stored.inverse_components_.dtype == dtype
    assert not hasattr(not_stored, "inverse_components_")
    Y = container(stored.transform(X))
    back = not_stored.inverse_transform(Y)
    assert isinstance(back, np.ndarray)
    np.testing.assert_allclose(stored.inverse_transform(Y), back, atol=atol * abs(back).max())
    np.testing.assert_allclose(stored.transform(back), stored.transform(X), atol=atol * 100)


def test_inverse_of_many_features_stays_sparse():
    transformer = SparseRandomProjection(100, random_state=0)
    transformer.fit(scipy.sparse.csr_matrix((1, 10**5)))  # as a dense matrix, components_ would need 80 MB
    Y = integers((1, 100))
    transformer.transform(transformer.inverse_transform(Y))
    tracemalloc.start()
    try:
        back = transformer.inverse_transform(Y)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40e6
    np.testing.assert_allclose(transformer.transform(back), Y, atol=1e-12)


def test_inverse_refuses_other_widths():
    transformer = SparseRandomProjection(20).fit(integers())
    with pytest.raises(ValueError, match=r"\b19\b.*\b20\b"):
        transformer.inverse_transform(np.ones((3, 19)))


# ------------------------------------------------------------------------------------- random_state


@pytest.mark.parametrize("seed", [0, 17, 2**32 - 1, np.int64(17), np.uint8(17)])
def test_int_random_state_is_the_seed(seed):
    assert SparseRandomProjection(20, random_state=seed).fit(integers()).sketch_ == Sketch(300, 20, seed=int(seed))


@pytest.mark.parametrize("make", [np.random.RandomState, np.random.default_rng])
def test_generators_supply_the_seed(make):
    X, generator = integers(), make(3)
    seeds = [SparseRandomProjection(20, random_state=generator).fit(X).sketch_.seed for _ in range(20)]
    assert len(set(seeds)) == 20
    assert max(seeds) >= 2**63 > min(seeds)  # all 20 on one side of 2^63 for one in 2^19 initial seeds
    again = make(3)
    assert seeds[0] == SparseRandomProjection(20, random_state=again).fit(X).sketch_.seed


def test_none_redraws_at_every_fit():
    X = integers()
    transformer = SparseRandomProjection(20)
    first = transformer.fit_transform(X)
    np.testing.assert_array_equal(transformer.transform(X), first)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(transformer)).transform(X), first)
    assert not np.array_equal(transformer.fit_transform(X), first)


def test_none_uses_numpys_global_generator():
    state = np.random.get_state()  # noqa: NPY002
    try:
        seeds = []
        for _ in range(2):
            np.random.seed(3)  # noqa: NPY002
            seeds.append(SparseRandomProjection(20).fit(integers()).sketch_.seed)
        assert seeds[0] == seeds[1]
    finally:
        np.random.set_state(state)  # noqa: NPY002


def test_same_random_state_same_result():
    X = integers()
    transformer = SparseRandomProjection(20, random_state=4)
    first = transformer.fit_transform(X)
    np.testing.assert_array_equal(clone(transformer).fit_transform(X), first)
    np.testing.assert_array_equal(sjlt.project(X, 20, seed=4), first)
    assert not np.array_equal(SparseRandomProjection(20, random_state=5).fit_transform(X), first)


# ------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "bad",
    [
        *({"density": v} for v in (0, -0.5, 1.5, "sparse", [0.5])),
        *({"nnz": v} for v in (0, -1, 2.0, "all", None)),
        *({"random_state": v} for v in (-1, 2**32, 1.5, "seed")),
    ],
    ids=str,
)
def test_invalid_parameters_come_first(bad):
    (name,) = bad
    with pytest.raises(InvalidParameterError, match=f"'{name}' parameter of SparseRandomProjection"):
        SparseRandomProjection(20, **{"density": "auto", **bad}).fit(integers())


@pytest.mark.parametrize(("n_components", "nnz", "most"), [(3, 4, 3), (100, 101, 100), (129, 65, 64)])
def test_nnz_too_large(n_components, nnz, most):
    with pytest.raises(ValueError, match=rf"(?s)(?=.*\b{most}\b)(?=.*\b{n_components}\b)(?=.*\b{nnz}\b)"):
        SparseRandomProjection(n_components, nnz=nnz).fit(integers())
    SparseRandomProjection(n_components, nnz=most).fit(integers())


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.DataDimensionalityWarning")
def test_n_components_too_large():
    with pytest.raises(ValueError, match=r"n_components.*\b8388480\b.*\b8388481\b"):
        SparseRandomProjection(8388481).fit(integers())


def test_warning_points_at_the_caller():
    with pytest.warns(DataDimensionalityWarning) as caught:
        SparseRandomProjection(21).fit(integers((5, 20)))
    assert [w.filename for w in caught] == [__file__]
