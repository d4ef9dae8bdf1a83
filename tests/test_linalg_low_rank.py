"""Low-rank approximation: errors relative to the best, the error estimate, and sketches from several workers."""

import io
from itertools import pairwise

import numpy as np
import pytest
from helpers.matrices import orthonormal

from sjlt.ledger import Ledger
from sjlt.linalg import SVDSketch, low_rank, svd_lowrank
from sjlt.linalg.matrix import DenseMatrix
from sjlt.linalg.whitening import LostRangeError

M, N, RANK = 1200, 300, 10
SPECTRA = {
    "polynomial": np.arange(1, N + 1.0) ** -1,
    "exponential": 10.0 ** (-0.1 * np.arange(N)),
    "rank and noise": np.where(np.arange(N) < RANK, 1, 1e-2),
}


def matrix(spectrum, seed=0):
    rng = np.random.default_rng(seed)
    return orthonormal(rng, M, N) * SPECTRA[spectrum] @ orthonormal(rng, N, N).T


def relative_error(A, factors, spectrum):
    """Return the error relative to that of the best approximation."""
    U, s, Vh = factors
    return np.linalg.norm(A - (U * s) @ Vh) / np.linalg.norm(SPECTRA[spectrum][RANK:])


def gaussian(A, seed):
    """Run the same method with dense Gaussian sketches of the same sizes."""
    rng = np.random.default_rng(seed)
    omega, psi = rng.standard_normal((A.shape[1], 2 * RANK)), rng.standard_normal((4 * RANK, A.shape[0]))
    Q = np.linalg.qr(A @ omega)[0]
    U, s, Vh = np.linalg.svd(np.linalg.lstsq(psi @ Q, psi @ A)[0], full_matrices=False)
    return Q @ U[:, :RANK], s[:RANK], Vh[:RANK]


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_one_pass_is_as_good_as_gaussian_sketches(spectrum):
    """Medians of 20 seeds agree within 5 %."""
    A = matrix(spectrum)
    ours = [relative_error(A, svd_lowrank(A, RANK, seed=seed), spectrum) for seed in range(20)]
    theirs = [relative_error(A, gaussian(A, seed), spectrum) for seed in range(20)]
    assert np.median(ours) <= 1.05 * np.median(theirs)


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_iterations_approach_the_best(spectrum):
    A = matrix(spectrum)
    errors = [relative_error(A, svd_lowrank(A, RANK, n_iter=n_iter), spectrum) for n_iter in (0, 1, 2, 4)]
    assert errors[0] < 3
    assert errors[1] < 1.02
    assert errors[3] < 1 + 1e-4
    assert all(a >= b - 1e-12 for a, b in pairwise(errors))


@pytest.mark.parametrize("n_iter", [0, 2])
def test_factors(n_iter):
    U, s, Vh = svd_lowrank(matrix("polynomial"), RANK, n_iter=n_iter)
    assert U.shape == (M, RANK)
    assert Vh.shape == (RANK, N)
    np.testing.assert_allclose(U.T @ U, np.eye(RANK), atol=1e-13)
    np.testing.assert_allclose(Vh @ Vh.T, np.eye(RANK), atol=1e-13)
    assert (np.diff(s) <= 0).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [(7, 5), (5, 300), (300, 5), (1, 1), (40, 40)])
def test_full_rank_is_exact(shape):
    A = np.random.default_rng(0).standard_normal(shape)
    U, s, Vh = svd_lowrank(A, min(shape))
    np.testing.assert_allclose((U * s) @ Vh, A, atol=1e-10)


@pytest.mark.parametrize("n_iter", [0, 1, 2])
def test_values_whose_squares_overflow(n_iter):
    A = matrix("polynomial")
    U, s, Vh = svd_lowrank(A, RANK, n_iter=n_iter)
    for scale in (2.0**510, 2.0**-510, 2.0**520, 2.0**-600, 2.0**900, 2.0**-900):
        found = svd_lowrank(scale * A, RANK, n_iter=n_iter)
        np.testing.assert_allclose(found[1], scale * s, rtol=1e-12)
        np.testing.assert_allclose(found[0] @ found[2], U @ Vh, atol=1e-9)


@pytest.mark.exhaustive
@pytest.mark.parametrize("n_iter", [0, 1, 2])
def test_float32_is_as_accurate(n_iter):
    A = matrix("exponential")
    for data in (A.astype(np.float32), np.asfortranarray(A.astype(np.float32))):
        U, s, _ = svd_lowrank(data, RANK, n_iter=n_iter)
        np.testing.assert_allclose(s, svd_lowrank(A, RANK, n_iter=n_iter)[1], rtol=1e-5)
        np.testing.assert_allclose(U.T @ U, np.eye(RANK), atol=1e-12)


@pytest.mark.parametrize("rank", [4, 8, 20])
def test_all_columns_of_float32_data(rank):
    """Y then has more columns than A, and float32 rounding errors in the extra ones."""
    rng = np.random.default_rng(0)
    for A in (rng.normal(size=(600, rank)), np.outer(rng.normal(size=600), rng.normal(size=rank))):
        for seed in range(10):
            U, s, Vh = svd_lowrank(A.astype(np.float32), rank, seed=seed)
            np.testing.assert_allclose((U * s) @ Vh, A, atol=1e-5)
            np.testing.assert_allclose(U.T @ U, np.eye(rank), atol=1e-12)


def test_rank_below_the_sketch():
    rng = np.random.default_rng(0)
    A = rng.standard_normal((M, 3)) @ rng.standard_normal((3, N))
    for n_iter in (0, 1, 3):
        U, s, Vh = svd_lowrank(A, RANK, n_iter=n_iter)
        np.testing.assert_allclose((U * s) @ Vh, A, atol=1e-10)
        np.testing.assert_allclose(U.T @ U, np.eye(RANK), atol=1e-12)
    assert not svd_lowrank(np.zeros((50, 20)), 4)[1].any()


@pytest.mark.parametrize("n_iter", [0, 1, 2])
@pytest.mark.parametrize("shape", [(200, 50), (50, 200), (3000, 50)])
def test_a_rank_that_is_exact_too_large_or_too_small(shape, n_iter):
    """As in PARLA's tests of its SVD: a matrix of rank 15, approximated with rank 15, more and less."""
    rng = np.random.default_rng(3)
    m, n = shape
    s = np.geomspace(10, 0.1, 15)
    A = orthonormal(rng, m, 15) * s @ orthonormal(rng, n, 15).T
    for rank in (15, 20, 12):
        U, found, Vh = svd_lowrank(A, rank, n_iter=n_iter)
        kept = min(rank, 15)
        assert np.linalg.norm(A - (U * found) @ Vh) <= 1e-12 + 1.5 * np.linalg.norm(s[kept:])
        np.testing.assert_allclose(found[:kept], s[:kept], rtol=1e-12 if rank >= 15 else 0.2)
        assert (found[kept:] < 1e-12).all()
        np.testing.assert_allclose(U.T @ U, np.eye(rank), atol=1e-12)
        np.testing.assert_allclose(Vh @ Vh.T, np.eye(rank), atol=1e-12)


def by_sketch(A, rank, seed):
    sketch = SVDSketch(A.shape, rank, seed=seed)
    sketch.update(0, A)
    return sketch.finalize()


CASES = {
    "identity": (lambda rng: np.eye(2), 1),
    "few rows": (lambda rng: rng.normal(size=(4, 100)), 2),
    "few rows, low rank": (lambda rng: np.outer(rng.normal(size=9), rng.normal(size=100)), 3),
    "constant columns": (lambda rng: np.outer(np.ones(2000), rng.normal(size=10)), 1),
    "constant columns, full width": (lambda rng: np.outer(np.ones(2000), rng.normal(size=9)), 1),
    "few rows that are not 0": (lambda rng: np.eye(500, 20), 20),
    "rank 2": (lambda rng: rng.normal(size=(300, 2)) @ rng.normal(size=(2, 40)), 5),
    "zeros": (lambda rng: np.zeros((300, 40)), 3),
}


@pytest.mark.parametrize("method", [svd_lowrank, by_sketch])
@pytest.mark.parametrize("name", CASES)
def test_every_seed_succeeds(name, method):
    make, rank = CASES[name]
    A = make(np.random.default_rng(0))
    best = np.linalg.svd(A, compute_uv=False)
    for seed in range(30):
        U, s, Vh = method(A, rank, seed=seed)
        np.testing.assert_allclose(U.T @ U, np.eye(rank), atol=1e-12)
        np.testing.assert_allclose(Vh @ Vh.T, np.eye(rank), atol=1e-12)
        assert np.linalg.norm(A - (U * s) @ Vh) <= 1e-12 * best[0] + 3 * np.linalg.norm(best[rank:])


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", [svd_lowrank, by_sketch])
@pytest.mark.parametrize("columns", [9, 10])
def test_every_one_of_many_seeds_succeeds(columns, method):
    A = np.outer(np.ones(2000), np.random.default_rng(0).normal(size=columns))
    for seed in range(600):
        U, s, Vh = method(A, 1, seed=seed)
        np.testing.assert_allclose((U * s) @ Vh, A, atol=1e-12)


def test_a_sketch_that_loses_the_range_is_redrawn(monkeypatch):
    """If Psi loses part of A's range, another one is drawn, up to three times."""
    A = matrix("rank and noise")
    seeds = []
    quick_sketch = DenseMatrix.quick_sketch

    def recording(self, S):
        seeds.append(S.seed)
        return quick_sketch(self, S)

    def failing(xp, Y, psi, Z, rank):
        if len(seeds) <= failures:
            raise LostRangeError("lost")
        return from_sketches(xp, Y, psi, Z, rank)

    from_sketches = low_rank.from_sketches
    monkeypatch.setattr(DenseMatrix, "quick_sketch", recording)
    monkeypatch.setattr(low_rank, "from_sketches", failing)
    failures = 2
    assert relative_error(A, svd_lowrank(A, RANK), "rank and noise") < 3
    assert len(set(seeds)) == 3
    failures = 99
    with pytest.raises(np.linalg.LinAlgError):
        svd_lowrank(A, RANK)


# ------------------------------------------------------------------------------------- workers


def parts(A, seed, pieces=7):
    """Return blocks of rows in random order."""
    rng = np.random.default_rng(seed)
    cuts = [0, *sorted(rng.choice(np.arange(1, M), pieces - 1, replace=False)), M]
    blocks = [(int(a), A[a:b]) for a, b in pairwise(cuts)]
    return [blocks[i] for i in rng.permutation(pieces)]


def test_workers_in_any_order_give_the_same_result():
    A = matrix("polynomial")
    whole = SVDSketch(A.shape, RANK, seed=5)
    whole.update(0, A)
    workers = [SVDSketch(A.shape, RANK, seed=5) for _ in range(3)]
    for i, (start, block) in enumerate(parts(A, 0)):
        workers[i % 3].update(start, block)
        workers[i % 3] = SVDSketch.from_bytes(workers[i % 3].to_bytes())
    total = workers[1]
    total.merge(workers[0])
    total.merge(workers[2])
    for a, b in zip(whole.finalize(), total.finalize(), strict=True):
        np.testing.assert_allclose(np.abs(a), np.abs(b), atol=1e-9)
    for a, b in zip(svd_lowrank(A, RANK, seed=5), whole.finalize(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("rows", [1, 2, 9, 40])
def test_workers_on_few_rows(rows):
    A = np.random.default_rng(0).standard_normal((rows, 100))
    rank = min(rows, 9)
    workers = [SVDSketch(A.shape, rank) for _ in range(2)]
    for i in reversed(range(rows)):
        workers[i % 2].update(i, A[i : i + 1])
    total, other = (SVDSketch.from_bytes(worker.to_bytes()) for worker in workers)
    total.merge(other)
    for a, b in zip(svd_lowrank(A, rank), total.finalize(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-13)
    if rows <= 9:
        U, s, Vh = total.finalize()
        np.testing.assert_allclose((U * s) @ Vh, A, atol=1e-13)
        assert total.error(U, s, Vh) < 1e-12


def test_integers_are_summed_exactly_in_any_order():
    A = np.random.default_rng(0).integers(-4, 5, (M, N)).astype(float)
    results = []
    for seed in range(3):
        sketch = SVDSketch(A.shape, RANK)
        for start, block in parts(A, seed):
            sketch.update(start, block)
        results.append(sketch.finalize())
    for factors in zip(*results, strict=True):
        assert all(np.array_equal(factor, factors[0]) for factor in factors)


def test_the_error_estimate():
    """Each of twenty estimates, from 64 rows, is within 5 standard deviations of sqrt(2 / 64) / 2 of the error."""
    A = matrix("polynomial")
    for seed in range(20):
        sketch = SVDSketch(A.shape, RANK, seed=seed)
        sketch.update(0, A)
        U, s, Vh = sketch.finalize()
        true = np.linalg.norm(A - (U * s) @ Vh)
        assert abs(sketch.error(U, s, Vh) / true - 1) < 5 * np.sqrt(2 / 64) / 2


def test_a_block_may_not_be_a_file(tmp_path):
    np.save(tmp_path / "block.npy", np.ones((50, 40)))
    for block in (tmp_path / "block.npy", str(tmp_path / "block.npy")):
        with pytest.raises(TypeError, match=r"block must be an array, .*block\.npy"):
            SVDSketch((300, 40), 5).update(0, block)


def test_an_update_that_fails_halfway_changes_nothing(monkeypatch):
    """After a MemoryError or an interrupt the update can be repeated, and counts once."""
    A = np.random.default_rng(0).normal(size=(300, 40))
    sketch, twin = SVDSketch(A.shape, 5), SVDSketch(A.shape, 5)
    quick_sketch = DenseMatrix.quick_sketch

    def failing(self, S):
        if S.n_components == sketch._phi.n_components:
            raise MemoryError
        return quick_sketch(self, S)

    with monkeypatch.context() as patch:
        patch.setattr(DenseMatrix, "quick_sketch", failing)
        with pytest.raises(MemoryError):
            sketch.update(0, A[:50])
    for each in (sketch, twin):
        each.update(0, A[:50])
    np.testing.assert_array_equal(sketch._Z, twin._Z)
    np.testing.assert_array_equal(sketch._E, twin._E)


class InterruptedLedger(Ledger):
    def add(self, start, stop):
        raise KeyboardInterrupt


@pytest.mark.parametrize("change", ["update", "merge"])
def test_a_sketch_whose_sum_was_interrupted_is_not_used(change):
    A = np.random.default_rng(0).normal(size=(300, 40))
    sketch, other = SVDSketch(A.shape, 5), SVDSketch(A.shape, 5)
    other.update(50, A[50:])
    sketch.rows = InterruptedLedger()
    with pytest.raises(KeyboardInterrupt):
        sketch.update(0, A[:50]) if change == "update" else sketch.merge(other)
    for use in (
        lambda: sketch.update(0, A[:50]),
        lambda: sketch.merge(other),
        lambda: other.merge(sketch),
        sketch.finalize,
        sketch.to_bytes,
    ):
        with pytest.raises(RuntimeError, match="return to the last saved state"):
            use()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sums_that_overflow(dtype):
    """If A and Y are finite but Z overflows, the update is refused, and the sketch is unchanged."""
    top = np.finfo(dtype).max
    A = np.zeros((3000, 40), dtype)
    A[:, 7] = top * np.float64(0.9)
    sketch = SVDSketch(A.shape, 5)
    before = sketch.to_bytes()
    with pytest.raises(ValueError, match=f"too close to the largest {dtype}"):
        sketch.update(0, A)
    assert sketch.to_bytes() == before
    for n_iter in (0, 1):
        with pytest.raises(ValueError, match=f"too close to the largest {dtype}"):
            svd_lowrank(A, 5, n_iter=n_iter)


def test_a_retried_update_is_refused():
    A = matrix("polynomial")
    sketch, twin = SVDSketch(A.shape, RANK), SVDSketch(A.shape, RANK)
    sketch.update(100, A[100:200])
    before = sketch.to_bytes()
    with pytest.raises(ValueError, match=r"150 to 250 .* overlaps 150 to 200"):
        sketch.update(150, A[150:250])
    twin.update(199, A[199:300])
    with pytest.raises(ValueError, match="overlaps 199 to 200"):
        sketch.merge(twin)
    with pytest.raises(ValueError, match="rows 1150 to 1250 of width 300"):
        sketch.update(1150, A[:100])
    with pytest.raises(ValueError, match="width 299"):
        sketch.update(300, A[:5, 1:])
    bad = A[300:400].copy()
    bad[7, 3] = np.nan
    with pytest.raises(ValueError, match="row 307"):
        sketch.update(300, bad)
    assert sketch.to_bytes() == before
    with pytest.raises(ValueError, match=r"1100 of 1200 rows have not been seen: 0 to 100, 200 to 1200"):
        sketch.finalize()
    with pytest.raises(ValueError, match=r"'seed': 0.*'seed': 1"):
        sketch.merge(SVDSketch(A.shape, RANK, seed=1))
    with pytest.raises(TypeError, match="int"):
        sketch.merge(3)


@pytest.mark.parametrize("data", [b"", b"PK", np.arange(3).tobytes()])
def test_bytes_that_are_not_a_sketch(data):
    with pytest.raises(ValueError, match="not an SVDSketch"):
        SVDSketch.from_bytes(data)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"starts": np.array([0, 60])}, "a block of rows from 60"),
        ({"starts": np.array([20])}, "blocks of 30 rows for the 50 seen"),
        ({"starts": np.array([0, 0])}, "a block of rows from 0 to 0"),
        ({"starts": np.array([0.0])}, "starts of dtype float64"),
        ({"Y": np.zeros((50, 3))}, r"Y must be float64 of shape \(50, 16\), got float64 of shape \(50, 3\)"),
        ({"Z": np.zeros((28, 40), complex)}, r"Z must be float64 of shape \(28, 40\), got complex128"),
        ({"E": np.full((64, 40), np.nan)}, "E has values that are not finite"),
    ],
)
def test_inconsistent_bytes(changes, match):
    sketch = SVDSketch((300, 40), 5)
    sketch.update(0, np.random.default_rng(0).normal(size=(50, 40)))
    with np.load(io.BytesIO(sketch.to_bytes())) as archive:
        arrays = {**archive, **changes}
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    with pytest.raises(ValueError, match=f"not an SVDSketch: .*{match}"):
        SVDSketch.from_bytes(stream.getvalue())
