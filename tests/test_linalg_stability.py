"""The backward error of `lstsq` is that of Householder QR, whatever the condition number and the residual."""

import numpy as np
import pytest
from helpers.cases import pairwise
from helpers.matrices import backward_error, householder, problem
from threadpoolctl import threadpool_limits

from sjlt.linalg import lstsq

METHODS = ["cg", "passes"]


CONDITIONS = [1, 1e4, 1e8, 1e10, 1e12, 1e14]
RESIDUALS = [1e-12, 1e-6, 1e-3, 1]


@pytest.fixture(autouse=True)
def one_thread():
    """On a busy machine the threads of a BLAS wait for each other most of the time with matrices this small."""
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
        np.testing.assert_allclose(solution.residuals, ((b - A @ solution.x) ** 2).sum(), rtol=1e-6, atol=1e-29)


@pairwise(method=METHODS, condition=CONDITIONS, residual=RESIDUALS, seed=range(3))
def test_backward_error(method, condition, residual, seed):
    check(*problem(1600, 24, condition, residual, seed), [method], seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("condition", CONDITIONS)
def test_backward_error_of_twenty_seeds(condition, residual):
    for seed in range(20):
        check(*problem(1200, 30, condition, residual, seed), METHODS, seed)


@pytest.mark.parametrize("method", METHODS)
def test_passes_over_the_data(method):
    """A file of moderate condition is read 4 times: the sketch, the Gram matrix, a correction, and the check of it."""
    A, b = problem(6000, 60, 1e6, 1, 0)
    solution = lstsq(A, b, method=method)
    assert solution.iterations <= (4 if method == "passes" else 40)


@pytest.mark.parametrize("method", METHODS)
def test_columns_of_different_scales(method):
    """Accurate column by column, as QR is and the singular value decomposition is not: x / scales has all digits."""
    rng = np.random.default_rng(0)
    A, b = rng.standard_normal((5000, 40)), rng.standard_normal(5000)
    scales = 10.0 ** rng.integers(-6, 7, 40)
    plain, scaled = lstsq(A, b, method=method).x, lstsq(A * scales, b, method=method).x
    np.testing.assert_allclose(scaled * scales, plain, rtol=1e-10)
