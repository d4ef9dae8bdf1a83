"""`lstsq` has the backward error of Householder QR, for any condition number and residual."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers.cases import pairwise
from helpers.matrices import backward_error, householder, problem
from threadpoolctl import threadpool_info, threadpool_limits

from sjlt import threads
from sjlt.linalg import lstsq, products
from sjlt.linalg.matrix import DenseMatrix
from sjlt.linalg.problem import Problem
from sjlt.linalg.residuals import normal_product, residual_gradient
from sjlt.linalg.sums import Gram
from sjlt.linalg.whitening import Whitening

METHODS = ["cg", "passes"]
CONDITIONS = [1, 1e4, 1e8, 1e10, 1e12, 1e14]
RESIDUALS = [1e-12, 1e-6, 1e-3, 1]


@pytest.fixture(autouse=True)
def one_thread():
    """On a busy machine, BLAS threads mostly wait for each other with matrices this small."""
    with threadpool_limits(1, "blas"):
        yield


def check(A, b, methods, seed):
    limit = 10 * backward_error(A, b, householder(A, b))
    for method in methods:
        solution = lstsq(A, b, method=method, seed=seed)
        error = backward_error(A, b, solution.x)
        assert error <= limit, method
        assert solution.rank == A.shape[1]
        # The estimate uses sketched singular values, which are within a factor of 2.
        assert error / 4 - 1e-18 <= solution.backward_error <= 1.2e-16
        norm = np.linalg.norm(b - A @ solution.x)  # rounding changes it by some 1e-16 of ||b||
        np.testing.assert_allclose(solution.residuals, norm**2, rtol=1e-6, atol=1e-15 * np.linalg.norm(b) * norm)


@pairwise(method=METHODS, condition=CONDITIONS, residual=RESIDUALS, seed=range(3))
def test_backward_error(method, condition, residual, seed):
    check(*problem(1600, 24, condition, residual, seed), [method], seed)


@pytest.mark.exhaustive
@pairwise(method=METHODS, condition=CONDITIONS, residual=RESIDUALS)
def test_backward_error_with_many_columns(method, condition, residual):
    """From 100 columns on, the compiled gradient is used."""
    check(*problem(2000, 120, condition, residual, 0), [method], 1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("condition", [1e6, 1e10])
def test_the_estimate_for_several_right_hand_sides(method, condition):
    """With residuals from 1e-12 to 1, each backward error is small, and the estimate covers the largest."""
    A, b = problem(2000, 40, condition, 1, 0)
    B = np.stack([A @ np.ones(40) + r * b for r in RESIDUALS], 1)
    solution = lstsq(A, B, method=method)
    errors = [backward_error(A, B[:, j], solution.x[:, j]) for j in range(B.shape[1])]
    assert max(errors) / 4 - 1e-18 <= solution.backward_error <= 1.2e-16


@pytest.mark.parametrize("condition", [1, 300, 1e3, 1e4, 1e5, 1e6, 1e7])
def test_backward_error_with_passes_in_float32(monkeypatch, condition):
    """Conjugate gradients read a rounded copy unless A is ill-conditioned; up to about 1e3, W is rounded too."""
    rounded, calls = DenseMatrix.rounded, []
    monkeypatch.setattr(DenseMatrix, "rounded", lambda self: calls.append(self) or rounded(self))
    check(*problem(4000, 120, condition, 1e-3, 0), ["cg"], 1)
    assert len(calls) == (condition <= 1e6)


def test_a_poor_copy_in_float32_is_given_up(monkeypatch):
    """If refinement stalls because rounding changed A too much, it goes on with A itself, without another sketch."""
    noise = 3e-5 * np.random.default_rng(1).standard_normal((4000, 120), np.float32)  # ||noise|| > 1e-3
    rounded, sketched = DenseMatrix.rounded, Problem.sketched
    calls = []

    def poor(self):
        calls.append("rounded")
        return rounded(self) + noise

    def recorded(self, *arguments, **options):
        calls.append("sketched")
        return sketched(self, *arguments, **options)

    monkeypatch.setattr(DenseMatrix, "rounded", poor)
    monkeypatch.setattr(Problem, "sketched", recorded)
    check(*problem(4000, 120, 1e3, 1e-3, 0), ["cg"], 1)
    assert calls == ["sketched", "rounded"]


@pytest.mark.parametrize("condition", [1, 1e3, 1e8])
def test_weighted_norms_are_upper_bounds_within_a_tenth(condition):
    """Whether conjugate gradients, a Cholesky factor or QR computes them."""
    rng = np.random.default_rng(0)
    R = np.linalg.qr(problem(500, 120, condition, 1, 0)[0], mode="r")
    whitening = Whitening.triangular(np, np.asfortranarray(R))
    _, sigma, Vh = np.linalg.svd(R)
    G = rng.standard_normal((120, 1))
    for eta in (1e-9, 1e-4, 1e-2, 1, 100):
        exact = np.linalg.norm(Vh @ G / np.sqrt(sigma[:, None] ** 2 + (eta * whitening.norm) ** 2))
        found = whitening.weighted_norms(G, np.zeros(1), np.array([eta * whitening.norm]), np.zeros(1))[0]
        assert 0.999 * exact <= found <= 1.11 * exact


@pytest.mark.exhaustive
@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("condition", CONDITIONS)
def test_backward_error_of_twenty_seeds(condition, residual):
    for seed in range(20):
        check(*problem(1200, 30, condition, residual, seed), METHODS, seed)


@pytest.mark.parametrize("method", METHODS)
def test_passes_over_the_data(method):
    """At a moderate condition number A is read 4 times: sketch, Gram matrix, a correction, and its check."""
    A, b = problem(6000, 60, 1e6, 1, 0)
    solution = lstsq(A, b, method=method)
    assert solution.iterations <= (4 if method == "passes" else 40)


@pytest.mark.parametrize("method", METHODS)
def test_columns_of_different_scales(method):
    """The solution is accurate column by column, like that from QR but unlike that from an SVD."""
    rng = np.random.default_rng(0)
    A, b = rng.standard_normal((5000, 40)), rng.standard_normal(5000)
    scales = 10.0 ** rng.integers(-6, 7, 40)
    plain, scaled = lstsq(A, b, method=method).x, lstsq(A * scales, b, method=method).x
    np.testing.assert_allclose(scaled * scales, plain, rtol=1e-10)


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("m", [1, 3, 4, 6, 5000])
def test_products_are_exact_for_any_number_of_threads(m, columns):
    """Full and partial groups of rows, several pieces, partial tiles; sums of integers are exact."""
    rng = np.random.default_rng(m)
    A, X, B = (rng.integers(-8, 9, shape).astype(float) for shape in ((m, 300), (300, columns), (m, columns)))
    before = threads.get_num_threads()
    try:
        for count in (1, 3):
            threads.set_num_threads(count)
            for a in (A, np.asfortranarray(A)):
                for given in (a, a.astype(np.float32)):  # float32 data is summed in float64
                    gradient, squares = residual_gradient(given, X + 2**-8, B)
                    np.testing.assert_array_equal(gradient, A.T @ (B - A @ (X + 2**-8)))
                    np.testing.assert_array_equal(squares, ((B - A @ (X + 2**-8)) ** 2).sum(0))
                    np.testing.assert_array_equal(normal_product(given, X + 2**-8), A.T @ (A @ (X + 2**-8)))
                np.testing.assert_array_equal(products.multiply(a, X), A @ X)
                gram = Gram(None)
                gram.add(0, a)
                np.testing.assert_array_equal(gram.value, A.T @ A)
            R = np.triu(np.resize(A, (300, 300)))
            np.testing.assert_array_equal(np.triu(products.triangular_gram(R)), np.triu(R.T @ R))
    finally:
        threads.set_num_threads(before)


def test_concurrent_callers_restore_the_number_of_blas_threads():
    limits = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    A, b = np.random.default_rng(0).standard_normal((4000, 50)), np.ones(4000)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda seed: lstsq(A, b, method="passes", seed=seed), range(12)))
    assert [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"] == limits
