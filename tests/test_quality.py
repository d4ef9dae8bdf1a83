"""`sjlt.quality`: its measures, checked with plain NumPy; its sampling; its refusals."""

import dataclasses
import json
import math
import os

import numpy as np
import pytest
import scipy.sparse
import torch
from helpers.data import integers
from sklearn.random_projection import GaussianRandomProjection, SparseRandomProjection

import sjlt
from sjlt import Sketch
from sjlt.evaluation import measures
from sjlt.evaluation import quality as evaluation
from sjlt.evaluation.sketches import standard_sketches
from sjlt.files.opening import open_source

ALL = {"rows": 10**6, "pairs": 10**9, "queries": 10**6}  # no sampling


class Unchanged:
    """The identity, as a scikit-learn transformer."""

    def __init__(self, random_state=None):
        self.random_state = random_state

    def get_params(self, deep=True):
        return {"random_state": self.random_state}

    def set_params(self, random_state):
        self.random_state = random_state
        return self

    def fit_transform(self, X):
        return X


def test_against_plain_definitions():
    """Every value against plain NumPy, without sampling."""
    rng = np.random.default_rng(0)
    X, k, seeds, eps = rng.normal(size=(40, 300)) + 0.5, 32, 5, 0.25
    report = sjlt.quality(X, [Sketch(300, k, nnz=2, seed=7)], eps=eps, seeds=seeds, neighbours=3, **ALL)
    assert (report.shape, report.rows, report.pairs, report.queries) == ((40, 300), 40, 780, 40)
    assert (report.duplicates, report.zero_rows) == (0, 0)
    i, j = np.triu_indices(40, 1)
    ratios, errors, norms, recalls = [], [], [], []
    for seed in range(7, 7 + seeds):
        Y = X @ Sketch(300, k, nnz=2, seed=seed).toarray().T
        ratios.append([np.sum((Y[a] - Y[b]) ** 2) / np.sum((X[a] - X[b]) ** 2) for a, b in zip(i, j, strict=True)])
        scale = np.linalg.norm(X, axis=1)
        errors.append(((Y @ Y.T - X @ X.T) / np.outer(scale, scale))[i, j])
        norms.append(np.sum(Y**2, axis=1) / scale**2)
        near = [[{*np.argsort(np.linalg.norm(A - a, axis=1))[1:4].tolist()} for a in A] for A in (X, Y)]
        recalls.append(np.mean([len(a & b) / 3 for a, b in zip(*near, strict=True)]))
    (found,) = report.sketches
    assert (found.name, found.sketch) == ("nnz 2", repr(Sketch(300, k, nnz=2, seed=7)))
    assert found.n_components == k
    assert found.ratio_quantiles == pytest.approx(np.quantile(ratios, measures.QUANTILES))
    assert found.ratio_mean == pytest.approx(np.mean(ratios))
    assert found.ratio_std == pytest.approx(np.std(ratios))
    assert found.outside == pytest.approx(np.mean(np.abs(np.array(ratios) - 1) > eps))
    assert found.inner_std == pytest.approx(np.sqrt(np.mean(np.square(errors))))
    assert found.inner_max == pytest.approx(np.max(np.abs(errors)))
    assert found.norm_std == pytest.approx(np.sqrt(np.var(norms, axis=0, ddof=1).mean()))
    assert found.recall == pytest.approx(np.mean(recalls))
    assert found.recall_range == pytest.approx((min(recalls), max(recalls)))
    assert sum(found.histogram) == seeds * 780
    cosines = (X @ X.T / np.outer(scale, scale))[i, j]
    (theory,) = report.theory
    assert theory.inner_std == pytest.approx(np.sqrt((1 + np.mean(cosines**2)) / k))
    assert theory.outside == measures.gaussian(k, eps, 40, 0).outside


@pytest.mark.parametrize(
    "sketch",
    [Sketch(100, 128, nnz=1), ("unchanged", Unchanged()), Unchanged()],
    ids=["columns of one chunk never meet", "named", "transformer"],
)
@pytest.mark.parametrize("container", [np.asarray, scipy.sparse.csr_array])
def test_lossless_transformers(container, sketch):
    report = sjlt.quality(container(integers((60, 100), "float64")), [sketch], seeds=2, **ALL)
    (found,) = report.sketches
    assert found.ratio_quantiles == (1,) * 9
    assert (found.ratio_mean, found.ratio_std, found.ratio_std_error) == (1, 0, 0)
    assert (found.outside, found.inner_std, found.inner_max, found.norm_std) == (0, 0, 0, 0)
    assert (found.recall, found.recall_range) == (1, (1, 1))


def test_gaussian_matrices_match_theory():
    """False-alarm rate below 1e-5: with 60 seeds the standard errors themselves are accurate to 10 %."""
    X = np.random.default_rng(0).normal(size=(100, 400)) * np.linspace(1, 3, 400)
    report = sjlt.quality(X, [("dense", GaussianRandomProjection(64))], seeds=60, neighbours=1)
    (found,), (theory,) = report.sketches, report.theory
    assert abs(found.ratio_std - theory.ratio_std) < 6 * found.ratio_std_error
    assert abs(found.outside - theory.outside) < 6 * found.outside_error
    # 100 nearly orthogonal rows: 6,000 nearly independent norms; the variance estimate is accurate to sqrt(2/N).
    assert found.norm_std == pytest.approx(theory.ratio_std, rel=6 / math.sqrt(2 * 3000))
    assert found.inner_std == pytest.approx(theory.inner_std, rel=0.05)
    assert found.ratio_quantiles == pytest.approx(theory.ratio_quantiles, rel=0.05)


def test_variance_of_2_sparse_rows():
    """False-alarm rate 1e-6 each: 100 orthogonal rows through 40 matrices, kurtosis below 20.

    Var|Sx|^2 for x = (e_i + e_j)/sqrt(2), with sum of fourth powers 1/2: exact sparsity leaves 2/k (1 - 1/2), due
    to
    collisions; independent entries add (1/density - 1)/k 1/2, due to the random number of nonzeros per column.
    """
    d, k = 4096, 64
    density = 1 / math.sqrt(d)
    places = np.random.default_rng(0).permutation(d)[:200].reshape(100, 2)
    X = scipy.sparse.csr_array((np.ones(200), places.ravel(), np.arange(0, 201, 2)), shape=(100, d))
    laws = [Sketch(d, k, nnz=4), ("scikit-learn", SparseRandomProjection(k))]
    exact, iid = sjlt.quality(X, laws, seeds=40, neighbours=1).sketches
    assert exact.norm_std**2 == pytest.approx(1 / k, rel=4.9 * math.sqrt(20 / 4000))
    assert iid.norm_std**2 == pytest.approx(1 / k + (1 / density - 1) / (2 * k), rel=4.9 * math.sqrt(20 / 4000))
    assert exact.ratio_std < iid.ratio_std / 3


def test_duplicates_are_counted_and_found():
    X = np.repeat(np.random.default_rng(0).normal(size=(6, 80)), 11, axis=0)
    report = sjlt.quality(X, [Sketch(80, 8)], seeds=3, neighbours=10, **ALL)
    assert report.duplicates == 6 * 11 * 10 // 2
    assert report.pairs == 66 * 65 // 2 - report.duplicates
    assert report.sketches[0].recall_range == (1, 1)


def test_zero_rows_are_counted_and_excluded():
    X = np.random.default_rng(0).normal(size=(50, 80))
    X[[3, 4, 17]] = 0
    report = sjlt.quality(X, [Sketch(80, 8)], seeds=2, **ALL)
    assert (report.rows, report.zero_rows, report.pairs, report.queries) == (47, 3, 47 * 46 // 2, 47)
    without = sjlt.quality(np.delete(X, [3, 4, 17], axis=0), [Sketch(80, 8)], seeds=2, **ALL)
    assert report.sketches[0].norm_std == without.sketches[0].norm_std


@pytest.mark.parametrize("exponent", [-600, 600])
def test_data_of_any_scale(exponent):
    X = np.random.default_rng(0).normal(size=(30, 50))
    assert sjlt.quality(X * 2.0**exponent, [Sketch(50, 8)], seeds=2) == sjlt.quality(X, [Sketch(50, 8)], seeds=2)


def test_equal_arguments_give_equal_reports():
    X = np.random.default_rng(0).normal(size=(300, 60))
    sketches = [Sketch(60, 16), ("scikit-learn", SparseRandomProjection(16, random_state=3))]
    small = {"rows": 100, "pairs": 500, "queries": 20, "seeds": 2}
    first = sjlt.quality(X, sketches, **small)
    assert sjlt.quality(X, sketches, **small) == first
    assert sjlt.quality(X, sketches, **small, seed=1) != first
    assert sjlt.quality(X, [Sketch(60, 16, seed=1), sketches[1]], **small) != first
    assert (first.rows, first.pairs, first.queries, first.seeds) == (100, 500, 20, 2)
    assert [sketch.name for sketch in first.sketches] == ["nnz 4", "scikit-learn"]


def test_our_transformers_equal_their_sketches():
    X = np.random.default_rng(0).normal(size=(60, 50))
    ours = ("same", sjlt.SparseRandomProjection(16, random_state=np.int64(5)))
    transformed, sketched = sjlt.quality(X, [ours, ("same", Sketch(50, 16, seed=5))], seeds=3).sketches
    assert transformed.sketch == repr(ours[1])
    assert dataclasses.replace(transformed, sketch=sketched.sketch) == sketched


CONTAINERS = {
    "float16": lambda x: x.astype(np.float16),
    "int8": lambda x: x.astype(np.int8),
    "Fortran": np.asfortranarray,
    "strided": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "CSR array": scipy.sparse.csr_array,
    "CSR matrix of float32": lambda x: scipy.sparse.csr_matrix(x, dtype=np.float32),
    "CSR with duplicates": lambda x: scipy.sparse.csr_array(
        (np.repeat(x.ravel() / 2, 2), np.tile(np.repeat(np.arange(40), 2), 60), np.arange(0, 4801, 80)), shape=(60, 40)
    ),
    "tensor": torch.from_numpy,
    "bfloat16 tensor": lambda x: torch.from_numpy(x).to(torch.bfloat16),
    "transposed tensor": lambda x: torch.from_numpy(x.T.copy()).T,
    "tensor that requires gradients": lambda x: torch.from_numpy(x).requires_grad_(),
    "list": lambda x: x.tolist(),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers(kind):
    """Integers, so every order of summation gives the same sums before any division."""
    X = integers((60, 40), "float64")
    small = {"rows": 50, "pairs": 300, "queries": 20, "seeds": 2}
    expected = sjlt.quality(X, [Sketch(40, 16, nnz=4)], **small)
    found = sjlt.quality(CONTAINERS[kind](X), [Sketch(40, 16, nnz=4)], **small)
    assert found.sketches[0].recall == pytest.approx(expected.sketches[0].recall, abs=0.02)  # ties after projection
    assert found.sketches[0].ratio_quantiles == expected.sketches[0].ratio_quantiles
    assert found.sketches[0].inner_max == expected.sketches[0].inner_max
    assert (found.rows, found.pairs, found.theory) == (expected.rows, expected.pairs, expected.theory)


@pytest.mark.gpu
def test_gpu_tensor():
    X = integers((60, 40), "float32")
    assert sjlt.quality(torch.from_numpy(X).cuda(), [Sketch(40, 16)], seeds=2) == sjlt.quality(
        X, [Sketch(40, 16)], seeds=2
    )


@pytest.mark.parametrize("order", ["C", "F"])
def test_only_the_sampled_rows_are_read(order, tmp_path, monkeypatch):
    """Records the rows read from the file; then all other rows are NaN, in the file and in a memory map."""
    X = np.asarray(np.random.default_rng(0).normal(size=(200, 30)).astype(np.float32), order=order)
    np.save(tmp_path / "x.npy", X)
    touched, preadv = [], os.preadv

    def recorded(file, buffers, position):
        touched.append((position - 128, sum(memoryview(buffer).nbytes for buffer in buffers)))
        return preadv(file, buffers, position)

    small = {"rows": 40, "pairs": 100, "queries": 10, "seeds": 2}
    monkeypatch.setattr(os, "preadv", recorded)
    with open_source(tmp_path / "x.npy", print) as source:
        report = sjlt.quality(source, [Sketch(30, 8)], **small)
    monkeypatch.undo()
    assert sum(size for _, size in touched) == 40 * 30 * 4
    rows = {position // 120 if order == "C" else position % 800 // 4 for position, _ in touched}
    assert len(rows) == 40

    X[[row for row in range(200) if row not in rows]] = np.nan
    np.save(tmp_path / "x.npy", X)
    assert sjlt.quality(np.load(tmp_path / "x.npy", mmap_mode="r"), [Sketch(30, 8)], **small) == report
    assert sjlt.quality(X, [Sketch(30, 8)], **small) == report
    with open_source(tmp_path / "x.npy", print) as source:
        assert sjlt.quality(source, [Sketch(30, 8)], **small) == report


def test_report_as_json():
    X = np.random.default_rng(0).normal(size=(30, 50))
    report = sjlt.quality(X, [Sketch(50, 8), Sketch(50, 16), ("named", Sketch(50, 8, nnz=1))], seeds=2)
    content = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert content["version"] == 1
    assert content["shape"] == [30, 50]
    assert {key: content[key] for key in ("rows", "pairs", "queries", "neighbours", "seeds", "seed", "eps")} == {
        "rows": 30, "pairs": 435, "queries": 30, "neighbours": 10, "seeds": 2, "seed": 0, "eps": 0.2
    }  # fmt: skip
    assert content["jl_n_components"] == math.ceil(4 * math.log(30) / (0.2**2 / 2 - 0.2**3 / 3)) - 1
    assert [theory["n_components"] for theory in content["theory"]] == [8, 16]
    assert [(sketch["name"], sketch["n_components"]) for sketch in content["sketches"]] == [
        ("nnz 4", 8), ("nnz 4", 16), ("named", 8)
    ]  # fmt: skip
    assert content["sketches"][2]["sketch"] == repr(Sketch(50, 8, nnz=1))
    names = {
        "name",
        "sketch",
        "n_components",
        "ratio_quantiles",
        "ratio_mean",
        "ratio_std",
        "ratio_std_error",
        "outside",
    }
    names |= {"outside", "outside_error", "inner_std", "inner_max", "norm_std", "recall", "recall_range", "seconds"}
    for sketch in content["sketches"]:
        assert sketch.keys() == names
        assert list(map(float, sketch["ratio_quantiles"])) == list(measures.QUANTILES)


def test_names():
    laws = [Sketch(50, 8, nnz=2), Sketch(50, 8, density=1 / 3), Sketch(50, 8, density=1), SparseRandomProjection(8)]
    report = sjlt.quality(np.random.default_rng(0).normal(size=(30, 50)), laws, seeds=2)
    assert [found.name for found in report.sketches] == [
        "nnz 2",
        "density 0.336",
        "density 1",
        "SparseRandomProjection",
    ]


@pytest.mark.exhaustive
def test_standard_sketches():
    names = [name for name, _ in standard_sketches(100, 64)]
    assert names == [
        "nnz 1", "nnz 2", "nnz 4", "nnz 8", "4 stacks", "iid auto", "iid 1/3", "Rademacher", "scikit-learn",
    ]  # fmt: skip
    assert dict(standard_sketches(100, 64))["4 stacks"] == sjlt.Sketch(100, 64, nnz=4, stacks=4)
    assert [name for name, _ in standard_sketches(100, 3)][:3] == ["nnz 1", "nnz 2", "iid auto"]
    X = np.random.default_rng(0).normal(size=(40, 100))
    sketches = standard_sketches(100, 64)
    for container in (np.asarray, scipy.sparse.csr_array):
        report = sjlt.quality(container(X), sketches, seeds=10)
        for sketch in report.sketches:  # False-alarm rate 1e-6: 40 nearly orthogonal rows, 10 matrices
            assert abs(sketch.ratio_mean - 1) < 5 * math.sqrt(2 / 64 / 400)


def photographed():
    """60 patches of one photograph, (60, 768)."""
    from sklearn.datasets import load_sample_images

    image = load_sample_images().images[0] / 255
    return np.stack([image[y : y + 16, x : x + 16].ravel() for y in range(0, 300, 50) for x in range(0, 500, 50)])


def sparse_normal():
    """The data of scikit-learn's own test of its projections: 8 rows, 5000 features, 15,000 nonzeros in all."""
    rng = np.random.RandomState(0)
    places = rng.randint(8, size=15_000), rng.randint(5000, size=15_000)
    return scipy.sparse.csr_array((rng.randn(15_000), places), shape=(8, 5000))


@pytest.mark.parametrize(("data", "eps"), [(photographed, 0.35), (sparse_normal, 0.2)])
def test_johnson_lindenstrauss_dimension(data, eps):
    """All pairs stay within 1 +- eps for every law. The lemma allows a false-alarm rate of up to 0.061 per matrix."""
    options = {"eps": eps, "neighbours": 1, "seeds": 2, **ALL}
    X = data()
    k = sjlt.quality(X, [Sketch(X.shape[1], 8)], **options).jl_n_components
    report = sjlt.quality(X, standard_sketches(X.shape[1], k), **options)
    assert report.theory[0].any_outside < 0.061
    assert [sketch.outside for sketch in report.sketches] == [0] * len(report.sketches)


# ------------------------------------------------------------------------------------- refusals


def holding(value, row=17, column=3):
    X = np.ones((40, 20)) * np.arange(40)[:, None] + 1
    X[row, column] = value
    return X


REFUSED = {
    "a vector": (np.ones(5), {}, ValueError, "2 dimensions, one data vector per row, got shape (5,)"),
    "3 dimensions": (np.ones((2, 3, 4)), {}, ValueError, "got shape (2, 3, 4)"),
    "complex": (np.ones((40, 20), complex), {}, TypeError, "complex128"),
    "complex tensor": (torch.ones((40, 20), dtype=torch.complex64), {}, TypeError, "complex64"),
    "text": (np.full((40, 20), "a"), {}, TypeError, "<U1"),
    "CSC": (scipy.sparse.csc_array(np.eye(20)), {}, TypeError, "must be CSR, got CSC"),
    "sparse tensor": (torch.eye(20).to_sparse(), {}, TypeError, "torch.sparse_coo"),
    "NaN": (holding(math.nan), {}, ValueError, "X[17, 3] is nan"),
    "infinity": (holding(-math.inf, 39, 19), {}, ValueError, "X[39, 19] is -inf"),
    "sparse NaN": (scipy.sparse.csr_array(holding(math.nan)), {}, ValueError, "X[17, 3] is nan"),
    "NaN in a tensor": (torch.from_numpy(holding(math.nan)), {}, ValueError, "X[17, 3] is nan"),
    "no rows": (np.ones((0, 20)), {}, ValueError, "need at least 12 rows that are not 0: X has 0 rows, 0 of them"),
    "too few rows": (np.ones((11, 20)), {}, ValueError, "X has 11 rows, 11 of them sampled, 11 of these not 0"),
    "too few sampled": (holding(1), {"rows": 9}, ValueError, "X has 40 rows, 9 of them sampled, 9 of these not 0"),
    "only zeros": (np.zeros((40, 20)), {}, ValueError, "X has 40 rows, 40 of them sampled, 0 of these not 0"),
    "only duplicates": (np.ones((40, 20)), {}, ValueError, "all 780 sampled pairs of rows are duplicates"),
    "eps 0": (holding(1), {"eps": 0}, ValueError, "eps must be between 0 and 1, got 0"),
    "eps 1": (holding(1), {"eps": 1.0}, ValueError, "got 1.0"),
    "eps NaN": (holding(1), {"eps": math.nan}, ValueError, "got nan"),
    "1 seed": (holding(1), {"seeds": 1}, ValueError, "seeds must be from 2 to "),
    "0 pairs": (holding(1), {"pairs": 0}, ValueError, "pairs must be from 1 to "),
    "half a row": (holding(1), {"rows": 20.5}, TypeError, "rows must be an integer, got 20.5"),
    "negative seed": (holding(1), {"seed": -1}, ValueError, "got -1"),
    "another width": (np.ones((40, 21)), {}, ValueError, "projects 20 features, X has 21"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    X, options, error, message = REFUSED[case]
    with pytest.raises(error) as refused:
        sjlt.quality(X, [Sketch(20, 8)], **options)
    assert message in str(refused.value)


@pytest.mark.parametrize("sketches", [["nnz 4"], [("name", np.eye(3))], [(Sketch(20, 8), "name")], [Sketch(20, 8).T]])
def test_invalid_sketches(sketches):
    with pytest.raises(TypeError, match="sketches must be sjlt"):
        sjlt.quality(holding(1), sketches)
    with pytest.raises(ValueError, match="empty list"):
        sjlt.quality(holding(1), [])


def test_docstring_example():
    import doctest

    assert doctest.testmod(evaluation) == (0, 6)
    assert callable(sjlt.quality)  # the function, although a module of this name has been imported
