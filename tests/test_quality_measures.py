"""The measures of `sjlt.quality` and its theory, compared with plain definitions."""

import itertools
import math

import numpy as np
import pytest
import scipy.sparse
from helpers.data import integers
from scipy import stats

from sjlt.evaluation import measures


@pytest.mark.parametrize("block", [1, 7, 10**6])
@pytest.mark.parametrize("container", [np.asarray, scipy.sparse.csr_array, scipy.sparse.csr_matrix])
def test_distances_of_pairs(container, block, monkeypatch):
    monkeypatch.setattr(measures, "BLOCK", block)
    X = integers((9, 5), "float64")
    X[3] = X[7]
    first, second = map(np.array, zip(*itertools.combinations(range(9), 2), strict=True))
    found = measures.squared_distances(container(X), first, second)
    expected = [sum((a - b) ** 2 for a, b in zip(X[i], X[j], strict=True)) for i, j in zip(first, second, strict=True)]
    assert found.tolist() == expected
    assert found[(first == 3) & (second == 7)] == 0
    assert measures.squared_distances(container(X), first[:0], second[:0]).shape == (0,)
    around = measures.distances_from(container(X), np.array([7, 0]))
    for row, query in zip(around, (7, 0), strict=True):
        direct = measures.squared_distances(X, np.full(9, query), np.arange(9))
        assert row[query] == np.inf
        np.testing.assert_allclose(np.delete(row, query), np.delete(direct, query), atol=1e-12)


@pytest.mark.parametrize("n", [2, 3, 4, 7, 10, 31])
def test_every_pair_occurs_once(n):
    everything = n * (n - 1) // 2
    first, second = measures.distinct_pairs(n, everything, np.random.default_rng(0))
    pairs = {frozenset(pair) for pair in zip(first.tolist(), second.tolist(), strict=True)}
    assert pairs == {frozenset(pair) for pair in itertools.combinations(range(n), 2)}


def test_pairs_are_uniform():
    """False-alarm rate 1e-6: 45 pairs of 10 rows, drawn 20 at a time."""
    drawn = [measures.distinct_pairs(10, 20, np.random.default_rng(seed)) for seed in range(900)]
    codes = np.array([np.sort(pair, axis=0).T @ [10, 1] for pair in drawn])
    assert all(len(set(row)) == 20 for row in codes.tolist())
    counts = np.unique(codes, return_counts=True)[1]
    assert len(counts) == 45
    # Counts drawn without replacement vary less than multinomial ones, so false alarms are rarer than stated.
    assert stats.chisquare(counts).pvalue > 1e-6


@pytest.mark.parametrize("neighbours", [1, 3, 50])
def test_recall(neighbours):
    before, after = np.random.default_rng(0).random((2, 30, 50))
    near = [[{*row[:neighbours]} for row in np.argsort(distances, axis=1)] for distances in (before, after)]
    expected = np.mean([len(a & b) / neighbours for a, b in zip(*near, strict=True)])
    assert measures.recall(before, after, neighbours) == pytest.approx(expected)
    assert measures.recall(before, before, neighbours) == 1


def test_equidistant_rows_are_interchangeable():
    before, found, missed = np.array([[[1.0, 1, 1, 5]], [[9.0, 1, 9, 9]], [[9.0, 9, 9, 1]]])
    assert measures.recall(before, found, 1) == 1
    assert measures.recall(before, missed, 1) == 0
    rounded = before + np.array([0, 1e-13, 0, 0])
    assert measures.recall(rounded, found, 1) == 0
    assert measures.recall(rounded, found, 1, slack=np.array([1e-12])) == 1


def test_theory():
    """False-alarm rate 1e-6 for each comparison with 200,000 drawn chi-squared variables."""
    k, eps, n = 20, 0.3, 50
    theory = measures.gaussian(k, eps, n, mean_square_cosine=0.25)
    ratios = np.square(np.random.default_rng(0).normal(size=(200_000, k))).mean(axis=1)
    for q, value in zip(measures.QUANTILES, theory.ratio_quantiles, strict=True):
        assert abs(np.mean(ratios <= value) - q) < 4.9 * math.sqrt(q * (1 - q) / 200_000)
    outside = np.mean(np.abs(ratios - 1) > eps)
    assert abs(outside - theory.outside) < 4.9 * math.sqrt(outside / 200_000)
    assert theory.ratio_std == math.sqrt(2 / k)
    assert theory.inner_std == math.sqrt(1.25 / k)
    assert theory.any_outside == 1
    assert measures.gaussian(2000, eps, n, 0).any_outside == pytest.approx(
        50 * 49 / 2 * measures.gaussian(2000, eps, n, 0).outside
    )
