"""``sjlt quality``, and the results of `sjlt.quality` as a table, as JSON and as a figure."""

import dataclasses
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse
from helpers.cases import exhaustive_except
from rich.console import Console
from sklearn.random_projection import SparseRandomProjection

import sjlt
from sjlt import Sketch
from sjlt.cli import app as cli
from sjlt.evaluation import figures, measures
from sjlt.evaluation import report as quality_report
from sjlt.evaluation.sketches import standard_sketches

NAMES = ["nnz 1", "nnz 2", "nnz 4", "nnz 8", "4 stacks", "iid auto", "iid 1/3", "Rademacher", "scikit-learn"]
SMALL = ("--rows", 40, "--pairs", 100, "--queries", 10, "--seeds", 2)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Run every test in an empty directory with one valid source."""
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.random.default_rng(0).normal(size=(60, 50)).astype(np.float32))


@pytest.fixture
def run(monkeypatch, capsys):
    """Run ``sjlt quality`` with the given arguments in this process."""

    def call(*arguments, options=("--laws",)):
        monkeypatch.setattr(sys, "argv", ["sjlt", "quality", *options, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return SimpleNamespace(code=ended.value.code or 0, out=captured.out, err=captured.err)

    return call


@pytest.fixture(scope="module")
def report():
    X = np.random.default_rng(0).normal(size=(300, 200))
    sketches = [
        sketch
        for k in (16, 64)
        for sketch in (
            ("nnz 4", Sketch(200, k)),
            ("scikit-learn", SparseRandomProjection(k)),
            ("[bold]mine", Sketch(200, k, nnz=1)),
        )
    ]
    return sjlt.quality(X, sketches, seeds=3, queries=20, pairs=1000)


# ------------------------------------------------------------------------------------- the command


def test_file_to_table_json_and_plot(run):
    result = run("x.npy", "-k", 8, "-k", 16, "--eps", 0.5, *SMALL, "--json", "out.json", "--plot", "out.png")
    assert (result.code, result.err) == (0, "")
    assert "50 to 8 components" in result.out
    assert "50 to 16 components" in result.out
    assert "Sampled with seed 0 from 60 rows of 50 features: 40 rows, 100 pairs" in result.out
    assert result.out.endswith("JSON: out.json\nPlot: out.png\n")
    assert all(result.out.count(f"\n{name} ") == 2 for name in NAMES)
    content = json.loads(Path("out.json").read_bytes())
    assert content["source"] == "x.npy"
    assert [(sketch["name"], sketch["n_components"]) for sketch in content["sketches"]] == [
        (name, k) for k in (8, 16) for name in NAMES
    ]
    assert Path("out.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in Path().iterdir()) == ["out.json", "out.png", "x.npy"]

    in_python = sjlt.quality(
        np.load("x.npy"), standard_sketches(50, 8), eps=0.5, rows=40, pairs=100, queries=10, seeds=2
    )
    expected = json.loads(json.dumps(in_python.to_dict()))["sketches"]
    for found, sketch in zip(content["sketches"][: len(NAMES)], expected, strict=True):
        assert found | {"seconds": 0} == sketch | {"seconds": 0}


def test_sparse_file_matches_dense_file(run):
    X = np.random.default_rng(0).integers(-1, 2, (60, 50)).astype(float)
    scipy.sparse.save_npz("x.npz", scipy.sparse.csr_array(X))
    np.save("x.npy", X)
    found = []
    for name in ("x.npy", "x.npz"):
        result = run(name, "-k", 16, *SMALL, "--json", "out.json", "--force")
        assert result.code == 0
        found.append(json.loads(Path("out.json").read_bytes()))
    assert result.err == "x.npz: sparse, so it is loaded whole into memory\n"
    for dense, sparse in zip(*(content["sketches"] for content in found), strict=True):
        for key in ("ratio_mean", "ratio_std", "inner_std", "norm_std"):
            assert sparse[key] == pytest.approx(dense[key], rel=1e-12)


def test_defaults(run):
    np.save("x.npy", np.random.default_rng(0).normal(size=(20, 300)).astype(np.float32))
    result = run("x.npy", "--seeds", 2)
    assert result.code == 0
    assert "300 to 64 components" in result.out
    assert "300 to 256 components" in result.out
    assert "20 rows, 190 pairs of these, 20 queries. 2 seeds" in " ".join(result.out.split())
    help_text = " ".join(run("--help").out.replace("│", " ").split())
    for default in ("0.2", "1000", "10000", "200", "10", "100", "0"):
        assert f"[default: {default}]" in help_text


def nan():
    X = np.ones((60, 50))
    X[7, 11] = np.nan
    np.save("x.npy", X)


def existing():
    for name in ("x.json", "x.png"):
        Path(name).write_text("mine")


BAD = {
    "no source": (("y.npy",), "y.npy: No such file or directory", None),
    "a NaN": (("x.npy",), "x.npy: X[7, 11] is nan: distances need finite values", nan),
    "text": (("x.npy",), "x.npy: dtype <U1 is refused", lambda: np.save("x.npy", np.full((60, 50), "a"))),
    "a vector": (("x.npy",), "x.npy: holds an array of shape (60,)", lambda: np.save("x.npy", np.ones(60))),
    "few rows": (("x.npy",), "X has 11 rows, 11 of them sampled", lambda: np.save("x.npy", np.ones((11, 50)))),
    "no rows": (("x.npy",), "X has 0 rows, 0 of them sampled", lambda: np.save("x.npy", np.ones((0, 50)))),
    "no columns": (("x.npy",), "60 of them sampled, 0 of these not 0", lambda: np.save("x.npy", np.ones((60, 0)))),
    "few sampled": (("x.npy", "--rows", 5), "X has 60 rows, 5 of them sampled", None),
    "k": (("x.npy", "-k", 0), "n_components must be from 1 to 8388480, got 0", None),
    "k of letters": (("x.npy", "-k", "many"), "'many' is not an integer", None),
    "eps": (("x.npy", "--eps", 1), "eps must be between 0 and 1, got 1", None),
    "eps of letters": (("x.npy", "--eps", "small"), "'small' is not a number", None),
    "seeds": (("x.npy", "--seeds", 1), "seeds must be from 2 to ", None),
    "pairs": (("x.npy", "--pairs", 0), "pairs must be from 1 to ", None),
    "plot's suffix": (("x.npy", "--plot", "x.gif"), "x.gif: a plot's name must end in .png or .pdf or .svg", None),
    "plot's directory": (("x.npy", "--plot", "no/x.png"), "no: no such directory", None),
    "JSON's directory": (("x.npy", "--json", "no/x.json"), "no: no such directory", None),
    "a directory": (("x.npy", "--json", "d.json"), "d.json: exists and is not a", lambda: Path("d.json").mkdir()),
    "JSON's suffix": (("x.npy", "--json", "x.npy"), "x.npy: a JSON file's name must end in .json", None),
    "one name": (("x.npy", "--json", "x.svg", "--plot", "x.svg"), "x.svg: a JSON file's name must end in .json", None),
    "the source": (
        ("x.npy", "--json", "x.json", "--force"),
        "x.json: is the source x.npy",
        lambda: Path("x.json").symlink_to("x.npy"),
    ),
    "an existing JSON file": (("x.npy", "--json", "x.json"), "x.json: exists (--force replaces it)", existing),
    "an existing plot": (("x.npy", "--plot", "x.png"), "x.png: exists (--force replaces it)", existing),
}


@pytest.mark.parametrize("case", BAD)
def test_refusals(run, case):
    arguments, message, make = BAD[case]
    if make:
        make()
    before = {path: path.stat().st_mtime_ns for path in Path().iterdir()}
    result = run(*arguments)
    assert (result.code, result.out) == (2, "")
    (line,) = result.err.splitlines()
    assert line.startswith("Error: ")
    assert message in line
    assert {path: path.stat().st_mtime_ns for path in Path().iterdir()} == before


def test_force_replaces_files(run):
    existing()
    assert run("x.npy", "-k", 8, *SMALL, "--json", "x.json", "--plot", "x.png", "--force").code == 0
    assert json.loads(Path("x.json").read_bytes())["version"] == 1
    assert Path("x.png").read_bytes().startswith(b"\x89PNG")


def test_file_that_appears_during_the_run_is_kept(run, monkeypatch):
    monkeypatch.setattr(quality_report, "tables", lambda report: existing())
    result = run("x.npy", "-k", 8, *SMALL, "--json", "x.json")
    assert (result.code, result.err) == (2, "Error: x.json: File exists\n")
    assert Path("x.json").read_text() == "mine"


def test_unwritable_folder_is_refused_early(run, monkeypatch):
    """os.access is patched because root, as which tests may run, can write to any folder."""
    Path("locked").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: str(path) != "locked")
    for option, name in (("--json", "locked/x.json"), ("--plot", "locked/x.png")):
        result = run("absent.npy", option, name)
        assert (result.code, result.err) == (2, "Error: locked: not writable\n")


# ------------------------------------------------------------------------------------- the table


def shown(report, width=60):
    console = Console(file=io.StringIO(), width=width)
    console.print(quality_report.tables(report))
    return console.file.getvalue()


def test_table_fits_60_columns(report):
    text = shown(report)
    assert max(map(len, text.splitlines())) <= 60
    assert "…" not in text
    assert "[bold]mine" in text  # a name is not markup
    line = next(line for line in text.splitlines() if line.startswith("nnz 4"))
    first = report.sketches[0]
    cells = [f"{first.ratio_quantiles[i]:.2f}" for i in (0, 8)]
    cells += [f"{first.ratio_std:.3f}", f"{100 * first.outside:.2f}", f"{first.inner_std:.3f}"]
    cells += [f"{first.norm_std:.3f}", f"{100 * first.recall:.1f}"]
    assert line.split()[2:-1] == cells


def test_exclusions_are_reported(report):
    assert "left out" not in shown(report)
    changed = dataclasses.replace(report, duplicates=1234, zero_rows=56)
    text = " ".join(shown(changed).split())
    assert "56 of norm 0 left out" in text
    assert "1,234 of duplicates left out" in text


@pytest.mark.parametrize(
    ("share", "text"), [(0, "0.00"), (1e-9, "<0.01"), (5e-5, "0.01"), (0.25462, "25.46"), (1, "100.00")]
)
def test_percentages(share, text):
    assert quality_report._percent(share) == text


# ------------------------------------------------------------------------------------- the figure


@pytest.mark.parametrize("suffix", exhaustive_except([".svg"], figures.PLOT_SUFFIXES))
def test_figure_formats(report, suffix):
    figures.plot_laws(report, Path(f"one{suffix}"))
    figures.plot_datasets({"a": report, "b": report}, Path(f"many{suffix}"), "title")
    magic = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}[suffix]
    for path in (Path(f"one{suffix}"), Path(f"many{suffix}")):
        assert path.read_bytes().startswith(magic)
    if suffix == ".svg":  # text stays text, so that it can be edited
        assert ">scikit-learn</text>" in Path("one.svg").read_text(encoding="utf-8")
    assert not list(Path().glob("*.tmp"))


@pytest.mark.parametrize("name", ["p", "p.gif", ".png"])
def test_unknown_figure_formats_are_refused(report, name):
    with pytest.raises(ValueError, match=r"a plot's name must end in .png or .pdf or .svg"):
        report.plot(name)
    with pytest.raises(ValueError, match=r"a plot's name must end in"):
        figures.plot_datasets({"a": report}, Path(name))
    assert not Path(name).exists()


def test_failed_figure_leaves_no_file(report, monkeypatch):
    figures.plot_laws(report, Path("out.png"))
    before = Path("out.png").read_bytes()

    def broken(self, file, **options):
        file.write(b"half a")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", broken)
    with pytest.raises(OSError, match="No space"):
        figures.plot_laws(report, Path("out.png"))
    assert Path("out.png").read_bytes() == before
    with pytest.raises(TypeError):
        quality_report.write_json({"a": object()}, Path("out.json"))
    assert sorted(path.name for path in Path().iterdir()) == ["out.png", "x.npy"]


def test_tails():
    """The share of ratios beyond each distance from 1, compared with counting."""
    k = 32
    ratios = np.random.default_rng(0).gamma(k / 2, 2 / k, 10_000)
    edges = measures.bins(k)
    shares = np.histogram(np.clip(ratios, edges[0], edges[-1]), edges)[0] / 10_000
    t = edges[len(edges) // 2 : -1] - 1
    counted = [np.mean(np.abs(ratios - 1) >= distance - 1e-12) for distance in t]
    np.testing.assert_allclose(figures._beyond(shares), counted, atol=1e-12)
