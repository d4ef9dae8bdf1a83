"""Numerical rank when rounding errors are largest: constant and repeated columns, with and without a sketch."""

import numpy as np
import pytest
from helpers.cases import each_value

from sjlt.linalg import leverage_scores, lstsq, qr

SHAPES = [(3, 3), (20, 3), (50, 50), (5, 40), (1000, 3), (1000, 10), (3000, 3), (1500, 300)]
LARGE = SHAPES[-1:]


def ones(m, n, rng):
    return np.ones((m, n))


def constant_columns(m, n, rng):
    return np.outer(np.ones(m), rng.normal(size=n))


def constant_rows(m, n, rng):
    return np.outer(rng.normal(size=m), np.ones(n))


def outer(m, n, rng):
    return np.outer(rng.normal(size=m), rng.normal(size=n))


MATRICES = {each.__name__: each for each in (ones, constant_columns, constant_rows, outer)}


def matrices(name, shape):
    for seed in range(1 if shape in LARGE else 8):
        rng = np.random.default_rng(seed)
        yield seed, MATRICES[name](*shape, rng), rng.normal(size=shape[0]) + 1


@each_value(name=list(MATRICES), shape=SHAPES, method=["auto", "cg", "passes"])
def test_least_squares_of_rank_1_agrees_with_numpy(name, shape, method):
    for seed, A, b in matrices(name, shape):
        reference, _, rank, _ = np.linalg.lstsq(A, b)
        solution = lstsq(A, b, method=method, seed=seed)
        assert solution.rank == rank == 1
        np.testing.assert_allclose(solution.x, reference, atol=1e-12 * np.abs(reference).max())


@each_value(name=list(MATRICES), shape=SHAPES)
def test_factors_of_rank_1(name, shape):
    for seed, A, _ in matrices(name, shape):
        scores = leverage_scores(A, seed=seed)
        np.testing.assert_allclose(scores.sum(), 1)
        if shape[0] >= shape[1]:
            Q, R, J = qr(A, seed=seed)
            assert R.shape[0] == 1
            np.testing.assert_allclose(Q @ R, A[:, J], atol=1e-12 * np.abs(A).max())
            np.testing.assert_allclose(scores, Q[:, 0] ** 2, atol=1e-12)


@pytest.mark.parametrize("seed", [1, 9, 29])
def test_rounding_errors_of_a_sketch_are_not_rank(seed):
    """Without AVX-512, those of the QR factorization of a sketch of this matrix reach 20 eps."""
    b = np.random.default_rng(seed).normal(size=5000) + 1
    solution = lstsq(np.ones((5000, 50)), b, seed=seed)
    assert solution.rank == 1
    np.testing.assert_allclose(solution.x, b.mean() / 50)


def test_cases_that_once_failed():
    b = np.arange(1000.0) + 1
    solution = lstsq(np.ones((1000, 10)), b)
    assert solution.rank == 1
    np.testing.assert_allclose(solution.x, b.mean() / 10)
    A = np.outer(np.ones(1000), np.random.default_rng(294).normal(size=10))
    b = np.random.default_rng(1).normal(size=1000)
    np.testing.assert_allclose(lstsq(A, b, method="passes", seed=294).x, np.linalg.lstsq(A, b)[0], atol=1e-13)


@pytest.mark.parametrize("rows", [600, 3000])
def test_rcond_if_a_itself_is_factored(rows):
    rng = np.random.default_rng(0)
    A = rng.normal(size=(rows, 8)) * 10.0 ** -np.arange(8)
    for rcond, rank in ((3e-3, 3), (3e-6, 6), (1e-14, 8)):
        reference, _, expected, _ = np.linalg.lstsq(A, A.sum(1), rcond)
        solution = lstsq(A, A.sum(1), rcond=rcond)
        assert solution.rank == expected == rank
        np.testing.assert_allclose(solution.x, reference, rtol=1e-6)


def test_a_solution_that_consists_of_rounding_errors_is_refused():
    """With rcond = 0 rounding errors count as rank: an error is raised, or the solution is at most about 1 / eps."""
    for seed in range(20):
        A = np.outer(np.ones(1000), np.random.default_rng(seed).normal(size=10))
        b = np.random.default_rng(seed + 100).normal(size=1000)
        for method in ("cg", "passes"):
            try:
                x = lstsq(A, b, rcond=0.0, method=method).x
            except np.linalg.LinAlgError:
                continue
            assert np.linalg.norm(x) <= 100 / 2**-52 * np.linalg.norm(b) / np.linalg.norm(A)


# ------------------------------------------------------------------------------------- scales


@pytest.mark.parametrize("rows", [600, 3000])
@pytest.mark.parametrize("scales", [[1, 1, 1, 1e-16, 1e-20], [1, 1e-200, 1, 1e200, 1]])
def test_columns_of_different_scales_have_full_rank(rows, scales):
    A = np.random.default_rng(0).normal(size=(rows, 5)) * scales
    Q, R = qr(A, pivoting=False)
    np.testing.assert_allclose(Q.T @ Q, np.eye(5), atol=1e-14)
    np.testing.assert_allclose((Q @ R) / scales, A / scales, atol=1e-13)
    np.testing.assert_allclose(leverage_scores(A), (Q**2).sum(1), atol=1e-14)


def test_a_column_in_the_span_of_others_is_refused_at_any_scale():
    A = np.random.default_rng(0).normal(size=(3000, 3))
    A[:, 2] = 1e-20 * (A[:, 0] - A[:, 1])
    with pytest.raises(np.linalg.LinAlgError, match="of column 2 lies outside the span"):
        qr(A, pivoting=False)


def test_leverage_scores_do_not_exceed_1():
    for seed in range(10):
        A = np.vstack([np.diag(np.random.default_rng(seed).normal(size=7)), np.zeros((60, 7))])
        assert leverage_scores(A).max() <= 1


def test_data_near_the_limits_of_float64():
    assert lstsq(np.ones((2, 1)), np.full(2, 2.0**700)).residuals == 0
    A, b = np.random.default_rng(0).normal(size=(600, 5)), np.random.default_rng(1).normal(size=600)
    for method in ("cg", "passes"):
        with pytest.raises(np.linalg.LinAlgError, match=r"solution overflows float64: A has norm .*e-19"):
            lstsq(A * 1e-200, b * 1e200, method=method)


@pytest.mark.parametrize("rows", [600, 3000])
@pytest.mark.parametrize("method", ["cg", "passes"])
def test_large_ridges(rows, method):
    A, b = np.random.default_rng(0).normal(size=(rows, 5)), np.random.default_rng(1).normal(size=rows)
    ridges = [1e6, 1e10, 1e30, 1e140, 1e160, 1e308]
    solution = lstsq(A, b, damp=[0, *ridges], method=method)
    np.testing.assert_allclose(solution.x[0], np.linalg.lstsq(A, b)[0], atol=1e-14)
    for d, x in zip(ridges, solution.x[1:], strict=True):
        expected = np.linalg.solve(A.T @ A / d / d + np.eye(5), A.T @ b / d / d)
        np.testing.assert_allclose(x, expected, rtol=1e-9, atol=1e-310)


def test_the_gram_matrix_of_a_wide_matrix_is_not_formed(monkeypatch):
    """Its Gram matrix would be singular, and much larger than A."""
    from sjlt.linalg import problem

    def refused(*_):
        raise AssertionError

    monkeypatch.setattr(problem, "Gram", refused)
    A, b = np.random.default_rng(0).normal(size=(10, 2000)), np.ones(10)
    for method in ("auto", "cg"):
        np.testing.assert_allclose(lstsq(A, b, method=method).x, np.linalg.lstsq(A, b)[0], atol=1e-14)


# ------------------------------------------------------------------------------------- ill-conditioned, not singular


@pytest.mark.parametrize("shape", [(200, 20), (900, 300), (1000, 50)])
@pytest.mark.parametrize("method", ["cg", "passes"])
def test_small_singular_values_count_if_a_itself_is_factored(shape, method):
    """They are no larger than a factorization's rounding errors may be, but they are A's."""
    m, n = shape
    rng = np.random.default_rng(m)
    U, V = (np.linalg.qr(rng.normal(size=(size, n)))[0] for size in (m, n))
    for condition in (1e13, 1e14):
        A = U * np.geomspace(1, 1 / condition, n) @ V.T
        solution = lstsq(A, A @ rng.normal(size=n) + 1e-6 * rng.normal(size=m), method=method)
        assert solution.rank == n
        assert solution.backward_error < 2e-16


def test_singular_values_and_rounding_errors_of_the_same_size():
    """Constant columns next to tiny orthogonal ones: the former have rank 1, and each of the latter counts."""
    rng = np.random.default_rng(0)
    tiny = 1e-13 * np.linalg.qr(rng.normal(size=(1000, 5)))[0] * 1000
    A = np.concatenate([np.ones((1000, 10)), tiny], 1)
    solution = lstsq(A, rng.normal(size=1000))
    assert solution.rank == 6
    assert solution.backward_error < 2e-16


def test_a_factor_of_rounding_errors_is_refused_without_pivoting():
    for A in (np.ones((1000, 10)), np.outer(np.ones(900), np.random.default_rng(0).normal(size=30))):
        with pytest.raises(np.linalg.LinAlgError, match="does not have full rank"):
            qr(A, pivoting=False)
    U, V = (np.linalg.qr(np.random.default_rng(0).normal(size=(size, 20)))[0] for size in (900, 20))
    A = U * np.geomspace(1, 1e-13, 20) @ V.T
    Q, R = qr(A, pivoting=False)
    np.testing.assert_allclose(Q.T @ Q, np.eye(20), atol=1e-14)
    np.testing.assert_allclose(Q @ R, A, atol=1e-15)
