"""Whether search survives: recall against plain definitions, for arrays, files and tensors; the advice; the command."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import torch
from helpers.cases import each_value, exhaustive_except
from helpers.cli import run as run

import sjlt
from sjlt import Sketch
from sjlt.evaluation import search
from sjlt.evaluation.advice import advice
from sjlt.evaluation.results import SearchQuality
from sjlt.files.opening import open_source


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty directory, and small blocks, so that there are many."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(search, "BLOCK_BYTES", 4 * 40 * 110)


def data(n=300, d=40):
    """Clustered rows with a decaying spectrum and different lengths."""
    rng = np.random.default_rng(0)
    spectrum = 1 / np.sqrt(np.arange(1, d + 1))
    centres = rng.normal(size=(10, d))
    x = (centres[rng.integers(0, 10, n)] + rng.normal(size=(n, d))) * spectrum * rng.uniform(0.5, 2, (n, 1))
    return x.astype(np.float32)


def expected_recall(x, y, queries, within, cosine):
    """Recall by full sorting in float64."""
    shares = []
    for scores in (a @ a.T / (np.outer(*[np.linalg.norm(a, axis=1)] * 2) if cosine else 1) for a in (x, y)):
        np.fill_diagonal(scores, -np.inf)
        shares.append(np.argsort(-scores, axis=1))
    exact, found = shares
    return np.mean([len({*exact[q, :10]} & {*found[q, :within]}) / 10 for q in queries])


def stored_as_int8(y):
    scale = np.abs(y).max(axis=1, keepdims=True) / 127
    return np.rint(y / scale) * scale


def test_against_plain_definitions():
    """All rows are queries; for int8, whose queries are not rounded, one neighbour in a hundred may differ."""
    x = data()
    report = sjlt.quality(x, Sketch(40, 16, seed=3), queries=10**6)
    assert (report.shape, report.queries, report.original_bytes) == ((300, 40), 300, 160)
    found = {method.name: method for method in report.methods}
    x = x.astype(np.float64)
    rotation = np.linalg.svd(x)[2][:16].T
    expected = {
        "sketch, 16": (x @ Sketch(40, 16, seed=3).toarray().T, 64, 0.002),
        "sketch, 16, float16": (x @ Sketch(40, 16, seed=3).toarray().T, 32, 0.005),
        "sketch, 16, int8": (stored_as_int8(x @ Sketch(40, 16, seed=3).toarray().T), 20, 0.02),
        "PCA, 16": (x @ rotation, 64, 0.002),
        "PCA, 16, int8": (stored_as_int8(x @ rotation), 20, 0.02),
        "first 16 numbers": (x[:, :16], 64, 0.002),
        "originals, float16": (x, 80, 0.005),
        "originals, int8": (stored_as_int8(x), 44, 0.02),
    }
    assert found.keys() == expected.keys()
    for name, (y, size, slack) in expected.items():
        method = found[name]
        assert method.bytes == size
        for cosine, near, among in ((True, "cosine", "cosine_shortlist"), (False, "inner", "inner_shortlist")):
            assert getattr(method, near) == pytest.approx(expected_recall(x, y, range(300), 10, cosine), abs=slack)
            assert getattr(method, among) == pytest.approx(expected_recall(x, y, range(300), 100, cosine), abs=slack)


SOURCES = {
    "array": lambda x: x,
    "Fortran": np.asfortranarray,
    "float64": lambda x: x.astype(np.float64),
    "tensor": torch.from_numpy,
    "a power of two": lambda x: x * np.float32(2.0**90),
    "a tiny one": lambda x: x * np.float32(2.0**-90),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_containers_give_one_report(kind):
    x = data()
    expected = sjlt.quality(x, Sketch(40, 16), queries=50)
    found = sjlt.quality(SOURCES[kind](x), Sketch(40, 16), queries=50)
    for a, b in zip(found.methods, expected.methods, strict=True):
        assert (a.name, a.bytes) == (b.name, b.bytes)
        if not ("float16" in a.name and "power" in kind):  # float16 lacks this range
            assert a.cosine == pytest.approx(b.cosine, abs=0.011)  # a tie or two


def shares(report, skip=()):
    """The shares of neighbours found by each method."""
    return {m.name: (m.cosine, m.inner, m.cosine_shortlist) for m in report.methods if m.name not in skip}


@pytest.mark.parametrize("exponent", [-1000, 900])
@pytest.mark.parametrize("container", [np.asarray, torch.from_numpy, scipy.sparse.csr_array])
def test_data_of_any_scale(container, exponent):
    x = data(60).astype(np.float64)
    found = sjlt.quality(container(x * 2.0**exponent), Sketch(40, 16))
    assert shares(found) == shares(sjlt.quality(container(x), Sketch(40, 16)))


def test_smallest_float64_values():
    """Multiples of the smallest float64: storing them loses digits, but searching them does not."""
    x = np.rint(data(60).astype(np.float64) * 1000)
    assert shares(sjlt.quality(x * 5e-324, Sketch(40, 16))) == shares(sjlt.quality(x, Sketch(40, 16)))


def test_float16_is_searched_like_float32():
    """As scaled float16, the rows would round to subnormals and the large one would overflow."""
    x = (data() * 1e-3).astype(np.float16)
    x[7] = 60000
    for queries in (3, 300):
        found, expected = (sjlt.quality(y, Sketch(40, 16), queries=queries) for y in (x, x.astype(np.float32)))
        assert shares(found) == shares(expected)


@pytest.mark.filterwarnings("error")
@each_value(container=[np.asarray, torch.from_numpy, scipy.sparse.csr_array], factor=[1e45, 1e-45])
def test_row_of_another_magnitude(container, factor):
    """Scaling a row changes neither its cosines nor any others."""
    x = data().astype(np.float64)
    y = x.copy()
    y[7] *= factor
    for queries in (3, 300):
        found = sjlt.quality(container(y), Sketch(40, 16), queries=queries)
        expected = sjlt.quality(container(x), Sketch(40, 16), queries=queries)
        for a, b in zip(found.methods, expected.methods, strict=True):
            if a.name.startswith(("sketch, 16", "originals, int8")) and "float16" not in a.name:
                assert a.cosine == pytest.approx(b.cosine, abs=1e-3)


@pytest.mark.parametrize("container", [np.asarray, torch.from_numpy, scipy.sparse.csr_array])
def test_non_finite_values_are_refused_anywhere(container):
    for value in (np.nan, np.inf, -np.inf):
        x = data()
        x[211, 7] = value
        with pytest.raises(ValueError, match=rf"X\[211, 7\] is {value}"):
            sjlt.quality(container(x), Sketch(40, 16), queries=1)


def test_more_neighbours_than_the_shortlist():
    x = data()
    report = sjlt.quality(x, Sketch(40, 16), neighbours=150, queries=300)
    assert report.shortlist == 150
    for method in report.methods:
        assert method.cosine == method.cosine_shortlist
    assert sjlt.quality(x, Sketch(40, 16), neighbours=298, queries=5).shortlist == 298
    with pytest.raises(ValueError, match="299 nearest neighbours need at least 301 rows, X has 300"):
        sjlt.quality(x, Sketch(40, 16), neighbours=299)


@pytest.mark.parametrize("kind", exhaustive_except(["parquet"], ["parquet", "h5", "zarr"]))
def test_formats_are_sampled_in_one_pass(kind, run):
    """Not row by row, which would decode a row group for each row."""
    x, name = data(), f"x.{kind}"
    if kind == "parquet":
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        lists = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 40)
        pq.write_table(pa.table({"v": lists, "w": lists}), name, row_group_size=70)
    elif kind == "h5":
        with pytest.importorskip("h5py").File(name, "w") as file:
            file.create_dataset("v", data=x, chunks=(70, 40), compression="gzip")
            file["w"] = x
    else:
        root = pytest.importorskip("zarr").create_group(name)
        for column in "vw":
            root.create_array(column, data=x, chunks=(70, 40))
    with open_source(Path(name), print, "v") as source:
        reads, read = [], source.read
        source.read = lambda start, stop, out=None: (reads.append(stop - start), read(start, stop, out))[1]
        chosen = np.array([0, 3, 69, 70, 71, 200, 299])
        np.testing.assert_array_equal(source.rows(chosen), x[chosen])
        assert len(reads) <= 3
        assert source.rows(chosen[:0]).shape == (0, 40)
        assert sjlt.quality(source, Sketch(40, 16)) == sjlt.quality(x, Sketch(40, 16))
    assert "name one" in run("quality", name).err
    assert run("quality", name, "--column", "w", "-k", 16).code == 0


@pytest.mark.parametrize("order", exhaustive_except(["F"], ["C", "F"]))
def test_whole_files_are_searched(order):
    x = data()
    np.save("x.npy", np.asarray(x, order=order))
    expected = sjlt.quality(x, Sketch(40, 16))
    with open_source(Path("x.npy"), print) as source:
        assert sjlt.quality(source, Sketch(40, 16)) == expected
    assert sjlt.quality("x.npy", Sketch(40, 16)) == expected


@pytest.mark.exhaustive
def test_sparse_rows_are_only_projected():
    x = scipy.sparse.random_array((300, 500), density=0.05, format="csr", rng=np.random.default_rng(0))
    report = sjlt.quality(x, Sketch(500, 64), queries=300)
    assert [method.name for method in report.methods] == ["sketch, 64", "sketch, 64, float16", "sketch, 64, int8"]
    dense = sjlt.quality(x.toarray(), Sketch(500, 64), queries=300)
    assert report.methods[0].cosine == pytest.approx(dense.methods[2].cosine, abs=0.01)


def test_defaults():
    assert {m.n_components for m in sjlt.quality(data(50, 300)).methods} == {300, 64, 256}
    assert {m.n_components for m in sjlt.quality(data(50, 100)).methods} == {100, 64}
    assert {m.n_components for m in sjlt.quality(data(50, 40)).methods} == {40, 10}
    assert {m.n_components for m in sjlt.quality(data(50, 40), n_components=[8]).methods} == {40, 8}
    several = sjlt.quality(data(50, 40), [Sketch(40, 8), ("other", Sketch(40, 8, nnz=1))], laws=False)
    assert {"sketch nnz 4, 8", "sketch other, 8"} <= {method.name for method in several.methods}
    laws = sjlt.quality(data(50, 40), laws=True, n_components=[8], seeds=2)
    assert [sketch.name for sketch in laws.sketches][:2] == ["nnz 1", "nnz 2"]


def test_equal_rows_are_interchangeable():
    x = np.repeat(data(30), 11, axis=0)
    for method in sjlt.quality(x, Sketch(40, 16), queries=330).methods:
        if "int8" not in method.name:
            assert method.cosine == 1


def test_zero_rows_are_never_neighbours():
    x = data()
    x[5] = 0
    assert all(0 < method.cosine <= 1 for method in sjlt.quality(x, Sketch(40, 16)).methods)


@pytest.mark.parametrize("container", [np.asarray, torch.from_numpy, scipy.sparse.csr_array])
def test_zero_rows_are_no_queries(container):
    x = data()
    x[::3] = 0
    report = sjlt.quality(container(x), Sketch(40, 4), queries=300)
    assert report.queries == 200
    lowest = sjlt.quality(
        container(x[x.any(axis=1)]), Sketch(40, 4), queries=200
    )  # without rows that are never nearest
    assert [method.cosine for method in report.methods] == [method.cosine for method in lowest.methods]
    with pytest.raises(ValueError, match="all 200 rows sampled as queries are zero"):
        sjlt.quality(container(np.zeros_like(x)), Sketch(40, 16))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("row", [0, 137, 299])
def test_non_finite_values_are_located(value, row):
    x = data()
    x[row, 7] = value
    with pytest.raises(ValueError, match=rf"X\[{row}, 7\] is {value}"):
        sjlt.quality(x, Sketch(40, 16), queries=3)


def test_refusals():
    with pytest.raises(ValueError, match="10 nearest neighbours need at least 12 rows, X has 11"):
        sjlt.quality(data(11), Sketch(40, 16))
    with pytest.raises(ValueError, match="pass either it or sketches"):
        sjlt.quality(data(), Sketch(40, 16), n_components=[8])
    with pytest.raises(TypeError, match="transformers need laws=True"):
        sjlt.quality(data(), [sjlt.SparseRandomProjection(8)], laws=False)
    with pytest.raises(TypeError, match="got 16: see n_components"):
        sjlt.quality(data(), [16])
    with pytest.raises(TypeError, match=r"a sjlt.Sketch or a list, got 16: for 16 components pass n_components=\[16\]"):
        sjlt.quality(data(), 16)
    with pytest.raises(TypeError, match=r"a sjlt.Sketch or a list, got SparseRandomProjection"):
        sjlt.quality(data(), sjlt.SparseRandomProjection(8))
    with pytest.raises(TypeError, match=r"n_components must be a list of integers, such as \[16\], got 16"):
        sjlt.quality(data(), n_components=16)
    with pytest.raises(TypeError, match=r"eps must be a number, got '0.1' of type str"):
        sjlt.quality(data(), eps="0.1")
    with pytest.raises(FileNotFoundError, match="absent"):
        sjlt.quality(Path("absent.npy"))
    with pytest.raises(ValueError, match="projects 41 features, X has 40"):
        sjlt.quality(data(), Sketch(41, 8))


def test_dask_arrays_are_refused():
    dask_array = pytest.importorskip("dask.array")
    with pytest.raises(TypeError, match=r"X is a dask array, .* pass X.compute\(\), or the path of a zarr store"):
        sjlt.quality(dask_array.from_array(data()))


def method(name, size, cosine, among=1.0):
    return SearchQuality(name, name.partition(",")[0], 1, size, cosine, among, cosine, among)


@pytest.mark.parametrize(
    ("methods", "sentence"),
    [
        ([("sketch, 8", 50, 0.95), ("int8", 100, 0.99)], "Project: sketch, 8 keeps 95 % of the 10 nearest in 50 bytes"),
        ([("sketch, 8", 50, 0.6), ("int8", 100, 0.99)], "Don't project: int8 keeps 99 % of the 10 nearest in 100 "),
        ([("sketch, 8", 104, 0.97), ("PCA, 8", 100, 0.98)], "Don't project: PCA, 8 keeps 98 %"),
        ([("sketch, 8", 100, 0.99), ("PCA, 8", 104, 0.98)], "Project: sketch, 8 keeps 99 %"),
        ([("sketch, 8", 50, 0.5), ("PCA, 8", 60, 0.5)], "Project: sketch, 8 keeps 100.0 % of the 10 nearest among 50-"),
        ([("sketch, 8", 50, 0.5, 0.8), ("int8", 60, 0.5, 0.8)], "Keep the originals"),
        ([("sketch, 8", 5000, 0.99)], "Keep the originals"),
    ],
)
def test_advice(methods, sentence):
    assert advice([method(*m) for m in methods], 1000, 10).startswith(sentence)


def test_command(run):
    np.save("x.npy", data())
    result = run("quality", "x.npy", "-k", 8, "-k", 16, "--queries", 50, "--json", "out.json", "--plot", "out.svg")
    assert (result.code, result.err) == (0, "")
    report = sjlt.quality(data(), n_components=[8, 16], queries=50)
    assert all(line.strip() in result.out for line in str(report).splitlines()[:8])
    content = json.loads(Path("out.json").read_bytes())
    assert content == {"source": "x.npy", **json.loads(json.dumps(report.to_dict()))}
    assert ">sketch, int8</text>" in Path("out.svg").read_text(encoding="utf-8")
    report.plot("again.png")
    assert Path("again.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("option", ["--eps", "--rows", "--pairs", "--seeds"])
def test_options_of_laws_alone(run, option):
    np.save("x.npy", data())
    result = run("quality", "x.npy", option, 100)
    assert (result.code, result.out) == (2, "")
    assert result.err == f"Error: {option} has no effect without --laws\n"


def test_results_are_saved_before_they_are_shown(run, monkeypatch):
    np.save("x.npy", data())

    def broken(_):
        raise BrokenPipeError

    monkeypatch.setattr("sjlt.cli.quality.show", broken)
    assert run("quality", "x.npy", "-k", 8, "--json", "out.json", "--plot", "out.png").code != 0
    assert json.loads(Path("out.json").read_bytes())["methods"]
    assert Path("out.png").read_bytes().startswith(b"\x89PNG")


def test_table_fits_60_columns():
    text = str(sjlt.quality(data(300, 300), n_components=[8, 100]))
    assert max(map(len, text.splitlines())) <= 60
    assert "…" not in text


def test_many_equal_scores_are_equivalent():
    """More rows than the shortlist holds score like the nearest ones."""
    X = np.zeros((5000, 20), np.float32)
    X[:, :6] = np.random.default_rng(0).random((5000, 6)) < 0.5  # rank 6, so 16 principal components lose nothing
    methods = sjlt.quality(X, n_components=[16]).methods
    assert [method.inner for method in methods if method.family in ("PCA", "originals, float16")] == [1, 1]
