"""Comparison with scikit-learn: the same distribution for the iid law, a narrower one for exactly nnz per column.

Seeds are fixed, so a test always passes or always fails. Each states its false-alarm rate: how often it would fail for
a correct sketch if the seeds were drawn anew.
"""

import functools
import math

import numpy as np
import pytest
from helpers.cases import each_value
from scipy import sparse, stats
from sklearn import random_projection
from sklearn.datasets import load_sample_images
from sklearn.random_projection import johnson_lindenstrauss_min_dim
from sklearn.utils._testing import ignore_warnings

from sjlt import Sketch

D, K, SEEDS = 900, 64, 300
DENSITIES = ["auto", 0.125, 1.0]  # 1/30, and two that lanes represent exactly
FAMILIES = ["normal", "2-sparse", "power law"]


def points(family):
    """Three points whose pairwise differences also belong to the family."""
    rng = np.random.default_rng(7)
    if family == "normal":
        return rng.normal(size=(3, D))
    if family == "2-sparse":
        return np.eye(D)[[3, 400, 801]]
    return np.stack([rng.permutation(np.arange(1.0, D + 1) ** -1) * rng.choice([-1, 1], D) for _ in range(3)])


def squared_distances(projected):
    return np.array([((projected[i] - projected[j]) ** 2).sum() for i, j in ((0, 1), (0, 2), (1, 2))])


@functools.cache
def ratios(family, law):
    """(SEEDS, pairs): squared distances after over before; law is ("iid" or "sklearn", density) or ("exact", nnz)."""
    X = points(family)
    before = squared_distances(X)
    kind, value = law
    found = []
    for seed in range(SEEDS):
        if kind == "sklearn":
            density = Sketch(D, K, density=value).density
            theirs = random_projection.SparseRandomProjection(K, density=density, random_state=seed)
            found.append(squared_distances(theirs.fit_transform(X)) / before)
        else:
            S = Sketch(D, K, seed=seed, **({"nnz": value} if kind == "exact" else {"density": value}))
            found.append(squared_distances(X @ S.T) / before)
    return np.array(found)


# --------------------------------------------------------------------------------- the iid law matches scikit-learn


@each_value(density=DENSITIES, family=FAMILIES)
def test_distance_ratios_match_scikit_learn(family, density):
    """Two-sample Kolmogorov-Smirnov test for each pair, over seeds; false-alarm rate 3e-6 per test.

    Ratios with few distinct values tie, which makes false alarms rarer still.
    """
    ours, theirs = ratios(family, ("iid", density)), ratios(family, ("sklearn", density))
    for pair in range(3):
        assert stats.ks_2samp(ours[:, pair], theirs[:, pair]).pvalue > 1e-6
    # Compare the widths too, which that test is insensitive to: five standard errors of the mean squares, 6e-7.
    a, b = (ours - 1) ** 2, (theirs - 1) ** 2
    error = math.sqrt((a.mean(1).var() + b.mean(1).var()) / SEEDS)
    assert abs(a.mean() - b.mean()) <= 5 * error


def test_comparison_detects_another_density():
    """On sparse inputs, which alone distinguish few nonzeros from many."""
    ours, theirs = ratios("2-sparse", ("iid", 0.0078125)), ratios("2-sparse", ("sklearn", 0.125))
    assert stats.ks_2samp(ours[:, 0], theirs[:, 0]).pvalue < 1e-6


# --------------------------------------------------------------------------------- the exact-nnz law is narrower


@each_value(family=FAMILIES, nnz=[2, 8])
def test_exact_nnz_is_never_wider_and_narrower_on_sparse_inputs(family, nnz):
    """Mean squared errors over seeds at equal density, compared within five standard errors: 3e-7 per test."""
    exact, theirs = ratios(family, ("exact", nnz)), ratios(family, ("sklearn", nnz / K))
    a, b = ((exact - 1) ** 2).mean(1), ((theirs - 1) ** 2).mean(1)
    error = math.sqrt((a.var() + b.var()) / SEEDS)
    assert a.mean() <= b.mean() + 5 * error
    if family == "2-sparse":  # theory: 1/k against 1/k + (1/density - 1)/(2 k)
        assert a.mean() < b.mean() - 5 * error
        assert b.mean() / a.mean() > 1 + (K / nnz - 1) / 4


# --------------------------------------------------------------------------------- within the lemma's bound

LAWS = [{"nnz": 1}, {"nnz": 4}, {"density": "auto"}, {"density": 1 / 3}, {"density": 1}]


def all_ratios(X, S):
    before, after = (np.asarray(Z.toarray() if sparse.issparse(Z) else Z, np.float64) for Z in (X, X @ S.T))
    i, j = np.triu_indices(before.shape[0], 1)
    return ((after[i] - after[j]) ** 2).sum(1) / ((before[i] - before[j]) ** 2).sum(1)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_scikit_learns_own_quality_test(law):
    """scikit-learn's own test: 8 samples, 5000 features, 15000 nonzeros, eps = 0.2, n_components by the lemma.

    eps is 3.1 standard deviations of a ratio, so about 5 % of seeds have one of the 28 pairs outside. More than 5
    of 20
    seeds do with probability 3e-4.
    """
    rng = np.random.RandomState(0)
    places = rng.randint(8, size=15_000), rng.randint(5000, size=15_000)
    X = sparse.coo_matrix((rng.randn(15_000), places), shape=(8, 5000)).tocsr()
    k = int(johnson_lindenstrauss_min_dim(8, eps=0.2))
    good = [np.abs(all_ratios(X, Sketch(5000, k, seed=seed, **law)) - 1).max() <= 0.2 for seed in range(20)]
    assert sum(good) >= 15


@pytest.mark.parametrize("law", LAWS[1:], ids=str)
@ignore_warnings
def test_johnson_lindenstrauss_dimension_on_photographs(law):
    """Patches of scikit-learn's sample photographs: every squared distance within 1 +- eps, for 5 seeds.

    eps = 0.3 is 4.5 standard deviations of a ratio: one of the 4950 pairs is outside for at most 2 % of seeds, far
    fewer
    as pairs that share a patch are correlated; the false-alarm rate is below 0.1 per test.
    """
    rng = np.random.default_rng(0)
    images = load_sample_images().images
    patches = []
    for _ in range(100):
        image = images[rng.integers(2)]
        r, c = rng.integers(image.shape[0] - 16), rng.integers(image.shape[1] - 16)
        patches.append(image[r : r + 16, c : c + 16].ravel() / 255)
    X = np.array(patches)
    k = int(johnson_lindenstrauss_min_dim(len(X), eps=0.3))
    assert k < X.shape[1]
    for seed in range(5):
        assert np.abs(all_ratios(X, Sketch(768, k, seed=seed, **law)) - 1).max() <= 0.3
