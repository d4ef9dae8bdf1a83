"""The transformer with independent entries, with scikit-learn's definition of density."""

import numpy as np
import pytest
import scipy.sparse
from sklearn import random_projection
from sklearn.base import clone
from sklearn.utils.estimator_checks import parametrize_with_checks

from sjlt import Sketch, SparseRandomProjection


def data(n=30, d=400):
    return np.random.default_rng(0).normal(size=(n, d))


@pytest.mark.parametrize(("density", "realised"), [("auto", 1 / 20), (1 / 3, 43 / 128), (0.25, 0.25), (1, 1.0)])
def test_density_has_scikit_learns_meaning(density, realised):
    X = data()
    ours = SparseRandomProjection(50, density=density, random_state=3)
    theirs = random_projection.SparseRandomProjection(50, density=density, random_state=3).fit(X)
    projected = ours.fit_transform(X)
    assert ours.sketch_ == Sketch(400, 50, density=density, seed=3)
    np.testing.assert_allclose(projected, X @ ours.components_.T, rtol=1e-12, atol=1e-12)
    assert ours.density_ == pytest.approx(realised, abs=2**-16)
    assert ours.density_ == pytest.approx(theirs.density_, abs=2**-8)
    values = np.unique(np.abs(ours.components_.data))
    assert values == pytest.approx(np.sqrt(1 / (50 * ours.density_)))
    assert values == pytest.approx(np.unique(np.abs(theirs.components_.data)), rel=2**-7)
    # Six standard deviations of a binomial variable.
    n = ours.components_.nnz
    assert abs(n - 20_000 * ours.density_) <= 6 * np.sqrt(20_000 * ours.density_ * (1 - ours.density_))


def test_density_with_other_features():
    X = data(d=120)
    transformer = SparseRandomProjection(20, density="auto", random_state=0, compute_inverse_components=True)
    projected = transformer.fit_transform(X)
    S = transformer.components_.toarray()
    np.testing.assert_allclose(transformer.inverse_transform(projected), projected @ np.linalg.pinv(S).T, atol=1e-9)
    assert transformer.get_feature_names_out()[-1] == "sparserandomprojection19"
    sparse = scipy.sparse.csr_matrix(X)
    reduced = clone(transformer).fit(sparse).transform(sparse)
    assert scipy.sparse.issparse(reduced)
    np.testing.assert_allclose(reduced.toarray(), projected, rtol=1e-12, atol=1e-12)


def test_nnz_and_density_are_exclusive():
    with pytest.raises(ValueError, match=r"nnz=4.*density=0.5"):
        SparseRandomProjection(20, nnz=4, density=0.5).fit(data())
    with pytest.raises(ValueError, match="smallest that works"):
        SparseRandomProjection(20, density=1e-6).fit(data())


@parametrize_with_checks([SparseRandomProjection(2, density="auto"), SparseRandomProjection(2, density=1 / 3)])
def test_scikit_learns_checks(estimator, check):
    check(estimator)
