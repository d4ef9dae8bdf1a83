"""QR with pivoting, and leverage scores: LAPACK's accuracy at any condition number."""

import numpy as np
import pytest
import scipy.linalg
from helpers.matrices import orthonormal

from sjlt.linalg import leverage_scores, qr

M, N = 3000, 40
EPS = np.finfo(float).eps


def matrix(condition, seed=0):
    rng = np.random.default_rng(seed)
    return orthonormal(rng, M, N) * np.geomspace(1, 1 / condition, N) @ orthonormal(rng, N, N).T


@pytest.mark.parametrize("pivoting", [True, False])
@pytest.mark.parametrize("condition", [1, 1e7, 1e13])
def test_qr(condition, pivoting):
    A = matrix(condition)
    Q, R, *order = qr(A, pivoting=pivoting)
    J = order[0] if pivoting else np.arange(N)
    assert sorted(J) == list(range(N))
    assert np.array_equal(R, np.triu(R))
    assert np.linalg.norm(A[:, J] - Q @ R) <= EPS**0.75 * np.linalg.norm(A)  # RandLAPACK's own tolerance is this one
    assert np.linalg.norm(A[:, J] - Q @ R) <= 1e-15 * N * np.linalg.norm(A)
    np.testing.assert_allclose(Q.T @ Q, np.eye(N), atol=1e-13)
    only = qr(A, pivoting=pivoting, mode="r")
    np.testing.assert_array_equal(only[0] if pivoting else only, R)


def test_pivots_reveal_the_rank():
    rng = np.random.default_rng(0)
    A = rng.standard_normal((M, 12)) @ rng.standard_normal((12, N))
    Q, R, J = qr(A)
    assert Q.shape == (M, 12)
    assert R.shape == (12, N)
    np.testing.assert_allclose(Q @ R, A[:, J], atol=1e-12)


def test_pivots_are_as_good_as_lapacks():
    """The diagonal entries of R are within a factor of 3 of those from pivoting with A itself."""
    A = matrix(1e10)
    _, R, _ = qr(A)
    reference, _ = scipy.linalg.qr(A, mode="r", pivoting=True)
    ratio = np.abs(np.diagonal(R) / np.diagonal(reference[:N]))
    assert ratio.min() > 0.3
    assert ratio.max() < 3


@pytest.mark.parametrize("condition", [1, 1e6])
def test_leverage_scores(condition):
    A = matrix(condition)
    expected = (np.linalg.qr(A)[0] ** 2).sum(1)
    np.testing.assert_allclose(leverage_scores(A), expected, atol=1e-15 * condition * 10)


def test_leverage_scores_of_few_heavy_rows():
    A = np.vstack([1e3 * np.eye(N), 1e-3 * np.random.default_rng(0).standard_normal((M, N))])
    scores = leverage_scores(A)
    np.testing.assert_allclose(scores[:N], 1, atol=1e-6)
    np.testing.assert_allclose(scores.sum(), N)


def test_leverage_scores_sum_to_the_rank():
    rng = np.random.default_rng(0)
    A = rng.standard_normal((M, 7)) @ rng.standard_normal((7, N))
    np.testing.assert_allclose(leverage_scores(A).sum(), 7)
    assert not leverage_scores(np.zeros((50, 3))).any()
