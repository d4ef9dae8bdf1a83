"""`lstsq` agrees with LAPACK on matrices that are hard for a sketch or for a solver."""

import numpy as np
import pytest
import scipy.linalg
from helpers.cases import each_value, exhaustive_except
from helpers.matrices import backward_error, isolated_blocks, orthonormal

from sjlt.linalg import lstsq

M, N = 4000, 64


def incoherent(rng):
    return rng.standard_normal((M, N))


def coherent(rng):
    """Return a matrix dominated by a few rows, as in PARLA's tests: scaled unit vectors above weak noise."""
    return np.vstack([1e4 * np.eye(N), 1e-2 * rng.standard_normal((M, N))])


def one_hot(rng):
    """Return two one-hot encoded variables; the columns of each sum to 1, so one column depends on the others."""
    return np.hstack([np.eye(N // 2)[rng.zipf(1.3, M) % (N // 2)], np.eye(N // 2)[rng.integers(0, N // 2, M)]])


MATRICES = {
    "incoherent": incoherent,
    "coherent": coherent,
    "one-hot": one_hot,
    **{f"blocks of {w}": lambda rng, w=w: isolated_blocks(rng, 8 * M, 128, w) for w in (1, 8, 32, 128)},
    "low rank": lambda rng: rng.standard_normal((M, 20)) @ rng.standard_normal((20, N)),
    "duplicated columns": lambda rng: np.tile(rng.standard_normal((M, N // 2)), 2),
    "zero columns": lambda rng: rng.standard_normal((M, N)) * (np.arange(N) % 7 > 0),
    "columns of 1e-150 and 1e150": lambda rng: rng.standard_normal((M, N)) * np.where(np.arange(N) % 2, 1e150, 1e-150),
    "columns of 1e-5 to 1e5": lambda rng: rng.standard_normal((M, N)) * np.geomspace(1e-5, 1e5, N),
    "tiny": lambda rng: rng.standard_normal((M, N)) * 1e-140,
    "m = n": lambda rng: rng.standard_normal((N, N)),
    "m = n + 1": lambda rng: rng.standard_normal((N + 1, N)),
    "m = 8 n": lambda rng: rng.standard_normal((8 * N, N)),
    "m just large enough for a sketch": lambda rng: rng.standard_normal((1024, N)),
    "coherent, badly scaled columns": lambda rng: coherent(rng) * np.geomspace(1e-4, 1e4, N),
    "wide": lambda rng: rng.standard_normal((40, N)),
    "one column": lambda rng: rng.standard_normal((M, 1)),
    "float32": lambda rng: rng.standard_normal((M, N)).astype(np.float32),
}


@each_value(name=list(MATRICES), method=["cg", "passes"])
def test_the_solution_agrees_with_lapack(name, method):
    rng = np.random.default_rng(5)
    A = MATRICES[name](rng)
    b = rng.standard_normal(A.shape[0])
    # gelsd's own rounding errors exceed machine epsilon; 1e-13 separates them from these matrices' singular values.
    reference, _, rank, s = scipy.linalg.lstsq(A.astype(float), b, cond=1e-13)
    solution = lstsq(A, b, method=method, seed=3)
    assert solution.rank == rank
    condition = s[0] / s[rank - 1]
    fit = np.linalg.norm(A.astype(float) @ reference) / np.linalg.norm(b)
    tolerance = 1e-13 * condition * max(1, condition * np.sqrt(1 - min(1, fit) ** 2) / max(fit, 1e-3))
    scale = np.abs(reference).max()
    np.testing.assert_allclose(solution.x / scale, reference / scale, atol=min(tolerance, 1e-3), rtol=0)
    assert solution.residuals <= (1 + 1e-12) * ((b - A.astype(float) @ reference) ** 2).sum() + 1e-24


@pytest.mark.parametrize("method", ["cg", "passes"])
def test_zero_matrix(method):
    solution = lstsq(np.zeros((2000, 5)), np.ones(2000), method=method)
    assert solution.rank == 0
    assert not solution.x.any()
    assert solution.residuals == 2000


@pytest.mark.parametrize("method", ["cg", "passes"])
def test_zero_right_hand_side(method):
    A = np.random.default_rng(0).standard_normal((2000, 5))
    solution = lstsq(A, np.stack([np.zeros(2000), A[:, 0]], 1), method=method)
    assert not solution.x[:, 0].any()
    np.testing.assert_allclose(solution.x[:, 1], np.eye(5)[0], atol=1e-14)


@pytest.mark.parametrize("method", ["cg", "passes"])
@pytest.mark.parametrize("rcond", [1.2e-2, 3e-4, 1e-9])  # none of them at a singular value
def test_rcond_cuts_a_spectrum_without_gaps(rcond, method):
    """`rcond` applies to A's own singular values, not to its sketch's, even if the spectrum has no gap."""
    rng = np.random.default_rng(1)
    A = orthonormal(rng, M, N) * np.geomspace(1, 1e-7, N) @ orthonormal(rng, N, N).T
    b = rng.standard_normal(M)
    reference, _, rank, _ = scipy.linalg.lstsq(A, b, cond=rcond)
    solution = lstsq(A, b, rcond=rcond, method=method)
    assert solution.rank == rank
    np.testing.assert_allclose(
        solution.x, reference, rtol=0, atol=1e-9 / max(rcond, 1e-7) * np.abs(reference).max() * 1e-3
    )
    np.testing.assert_allclose(solution.singular_values[:rank], np.geomspace(1, 1e-7, N)[:rank], rtol=1e-6)


@pytest.mark.parametrize("method", ["cg", "passes"])
@pytest.mark.parametrize("condition", [1e2, 1e6, 1e10, 1e14])
def test_singular_values_are_within_a_factor_of_2(condition, method):
    rng = np.random.default_rng(1)
    s = 1e-3 * np.geomspace(1, 1 / condition, N)
    A = orthonormal(rng, M, N) * s @ orthonormal(rng, N, N).T
    solution = lstsq(A, rng.standard_normal(M), method=method)
    assert ((solution.singular_values < 2 * s) & (solution.singular_values > s / 2)).all()


@pytest.mark.parametrize("method", exhaustive_except(["passes"], ["cg", "passes"]))
def test_ridge(method):
    """With several ridges and right-hand sides, each solution solves its augmented problem."""
    rng = np.random.default_rng(2)
    A = orthonormal(rng, M, N) * np.geomspace(1, 1e-10, N) @ orthonormal(rng, N, N).T
    B = rng.standard_normal((M, 3))
    ridges = [0.0, 1e-8, 1e-3, 10.0]
    solution = lstsq(A, B, damp=ridges, method=method)
    assert solution.x.shape == (4, N, 3)
    assert solution.residuals.shape == (4, 3)
    for d, X, squares in zip(ridges, solution.x, solution.residuals, strict=True):
        augmented = np.vstack([A, d * np.eye(N)])
        for j in range(3):
            b = np.concatenate([B[:, j], np.zeros(N)])
            assert backward_error(augmented, b, X[:, j]) < 3e-16
        np.testing.assert_allclose(squares, ((B - A @ X) ** 2).sum(0), rtol=1e-6)
    single = lstsq(A, B[:, 0], damp=1e-3, method=method)
    np.testing.assert_allclose(single.x, solution.x[2, :, 0], rtol=1e-9)
    assert single.residuals.shape == ()


def test_ridge_of_a_rank_deficient_matrix():
    rng = np.random.default_rng(3)
    A = rng.standard_normal((M, 10)) @ rng.standard_normal((10, 20))
    b = rng.standard_normal(M)
    expected = np.linalg.solve(A.T @ A + 4 * np.eye(20), A.T @ b)
    np.testing.assert_allclose(lstsq(A, b, damp=2.0).x, expected, rtol=1e-9, atol=1e-12)


def test_a_sketch_that_loses_the_range_is_redrawn(monkeypatch):
    """A sketch of lower rank than A is detected with A itself, and another seed is tried."""
    from sjlt.linalg import problem
    from sjlt.linalg.sketching import embedding

    rng = np.random.default_rng(4)
    A, b = rng.standard_normal((M, N)), rng.standard_normal(M)
    seeds = []

    class Losing:
        """A sketch that maps two columns of A to the same vector."""

        def __init__(self, sketch):
            self.sketch, self.n_components = sketch, sketch.n_components

        def project(self, x, out):
            self.sketch.project(x, out=out)
            if len(out) > 1:
                out[1] = out[0]

    def lossy(m, n, k, seed):
        seeds.append(seed)
        sketch = embedding(m, n, k, seed)
        return Losing(sketch) if seed < lost else sketch

    monkeypatch.setattr(problem, "embedding", lossy)
    lost = 1
    solution = lstsq(A, b)
    assert seeds == [0, 1]
    np.testing.assert_allclose(solution.x, np.linalg.lstsq(A, b)[0], atol=1e-13)
    lost = 9
    with pytest.raises(np.linalg.LinAlgError, match=r"from 3 sketches: .*lower rank than A"):
        lstsq(A, b)
