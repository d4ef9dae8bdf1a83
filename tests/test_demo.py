"""The demo, end to end on fewer patches."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.cli import run as run

from sjlt.cli import app as cli
from sjlt.evaluation import demo
from sjlt.evaluation.figures import PLOT_SUFFIXES


def test_patches(tmp_path: Path) -> None:
    from sklearn.datasets import load_sample_images

    n = demo.write_patches(tmp_path / "patches.npy", stride=100)
    vectors = np.load(tmp_path / "patches.npy")
    assert vectors.shape == (n, 768)
    assert vectors.dtype == np.float32
    first, second = load_sample_images().images
    assert np.array_equal(vectors[0], first[:16, :16].ravel() / np.float32(255))
    assert np.array_equal(vectors[-1], second[400:416, 600:616].ravel() / np.float32(255))


def test_default_stride_gives_enough_vectors() -> None:
    assert 2 * len(range(0, 427 - 15, 2)) * len(range(0, 640 - 15, 2)) == 128_956


def test_neighbours_exclude_the_query() -> None:
    line = np.arange(100.0)[:, None]
    (found,) = demo._neighbours(line, np.array([50]))
    assert found == {*range(45, 56)} - {50}


@pytest.mark.exhaustive
def test_whole_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "RUNS", 1)
    monkeypatch.setattr(demo, "MATRICES", 4)
    monkeypatch.setattr(sys, "argv", ["sjlt", "demo", "--stride", "16", "--keep", "kept", "--plot", "demo.png"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    assert (ended.value.code or 0, said.err) == (0, "")
    on = json.loads(Path("kept/sjlt.npy.json").read_text())["device"]
    assert ("sjlt on" in said.out) == (on != "cpu")
    for shown in ("2,080 image patches, 768 dimensions to 256", "peak memory", "50 % quantile", "Plot: demo.png"):
        assert shown in said.out
    assert Path("demo.png").read_bytes().startswith(b"\x89PNG")
    n = len(np.load("kept/patches.npy", mmap_mode="r"))
    for name in ("sjlt", "scikit-learn"):
        assert np.load(f"kept/{name}.npy", mmap_mode="r").shape == (n, 256)
    assert {path.name for path in Path("kept").iterdir()} == set(demo.FILES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--plot", "nowhere/demo.png"), "nowhere: no such directory"),
        (("--plot", "demo.xyz"), "demo.xyz: a plot's name must end in .png or .pdf or .svg"),
        (("--plot", "demo"), "demo: a plot's name must end in .png or .pdf or .svg"),
        (("--stride", "0"), "stride must be from 1 to 32, got 0"),
    ],
)
def test_early_refusals(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    command = [sys.executable, "-m", "sjlt", "demo", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"Error: {message}\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["plot.png", "kept/patches.npy", "kept/sjlt.npy.json"])
def test_existing_files_are_kept_unless_forced(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("kept").mkdir()
    Path(name).write_bytes(b"mine")
    result = run("demo", "--stride", 32, "--keep", "kept", "--plot", "plot.png")
    assert (result.code, result.out, result.err) == (2, "", f"Error: {name}: exists (--force replaces it)\n")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / name]
    assert Path(name).read_bytes() == b"mine"


@pytest.mark.parametrize("suffix", PLOT_SUFFIXES)
def test_plot_formats(tmp_path: Path, suffix: str) -> None:
    side = demo.Side("sjlt", "4", (), (), np.linspace(0.9, 1.1, 20).reshape(4, 5))
    demo.plot(demo.Report(5, (side, side)), tmp_path / f"plot{suffix}")
    assert [path.name for path in tmp_path.iterdir()] == [f"plot{suffix}"]


def test_band_covers_95_percent_of_a_normal() -> None:
    low, high = demo.band()
    squares = 1 + np.sqrt(2 / demo.N_COMPONENTS) * np.random.default_rng(0).normal(size=10**6)
    assert np.mean((squares > low**2) & (squares < high**2)) == pytest.approx(0.95, abs=1e-3)
