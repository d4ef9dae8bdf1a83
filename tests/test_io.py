"""Files: the same bits as `Sketch.project` for any order, dtype and batch size; contents of descriptions and notes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
from helpers.cases import each_value, pairwise

import sjlt
from sjlt.files.errors import UserError
from sjlt.files.projection import project_file

N, D, K = 333, 70, 24


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def saved(path: Path, array: np.ndarray) -> Path:
    np.save(path, array)
    return path


def assert_is_result(out: Path, expected: np.ndarray) -> None:
    """Check for exactly the bytes that np.save would write, and no other files."""
    reference = out.with_name("reference.npy")
    np.save(reference, expected)
    assert out.read_bytes() == reference.read_bytes()
    reference.unlink()
    assert out.with_name(out.name + ".json").exists()
    assert not list(out.parent.glob("*.partial*"))
    assert not list(out.parent.glob("*.tmp"))


@pairwise(dtype=["f2", "f4", "f8", ">f2", ">f8", "i2", "i1", "u1", "?"], order=["C", "F"])
def test_dtypes_and_orders_equal_project(tmp_path: Path, rng: np.random.Generator, dtype: str, order: str) -> None:
    x = np.asarray(rng.normal(size=(N, D)) * 50).astype(dtype, order=order)
    out = tmp_path / "y.npy"
    project_file(saved(tmp_path / "x.npy", x), out, K, seed=5, batch_rows=100)
    if x.itemsize == 1:  # float32 represents all their values
        x = x.astype(np.float32)
    assert_is_result(out, sjlt.Sketch(D, K, seed=5).project(x))


@pairwise(order=["C", "F"], rows=[1, 7, 111, N - 1, N, 10**9, None])
def test_batches_do_not_matter(tmp_path: Path, rng: np.random.Generator, order: str, rows: int | None) -> None:
    x = np.asarray(rng.normal(size=(N, D)), np.float32, order=order)
    out = tmp_path / "y.npy"
    project_file(saved(tmp_path / "x.npy", x), out, K, nnz=3, batch_rows=rows)
    assert_is_result(out, sjlt.Sketch(D, K, nnz=3).project(x))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_do_not_matter(
    tmp_path: Path, rng: np.random.Generator, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sjlt.threads._num_threads", threads)
    x = rng.normal(size=(N, D))
    project_file(saved(tmp_path / "x.npy", x), tmp_path / "y.npy", K, batch_rows=50)
    monkeypatch.setattr("sjlt.threads._num_threads", None)
    assert_is_result(tmp_path / "y.npy", x @ sjlt.Sketch(D, K).T)


@each_value(given=["float16", "float32", "float64"], dtype=["float16", "float32", "float64"])
def test_result_dtype(tmp_path: Path, rng: np.random.Generator, given: str, dtype: str) -> None:
    x = (rng.normal(size=(N, D)) * 9).astype(given)
    out = tmp_path / "y.npy"
    project_file(saved(tmp_path / "x.npy", x), out, K, dtype=dtype, batch_rows=100)
    assert_is_result(out, sjlt.Sketch(D, K).project(x, out=np.empty((N, K), dtype)))


@pairwise(shape=[(0, D), (N, 0), (0, 0), (1, 1), (1, D), (N, 1)], order=["C", "F"])
def test_thin_and_empty_arrays(tmp_path: Path, shape: tuple[int, int], order: str) -> None:
    x = np.ones(shape, np.float32, order=order)
    project_file(saved(tmp_path / "x.npy", x), tmp_path / "y.npy", K)
    assert_is_result(tmp_path / "y.npy", sjlt.Sketch(shape[1], K).project(x))


@pairwise(kind=[scipy.sparse.csr_array, scipy.sparse.csr_matrix], dtype=["float32", "int16"], rows=[1, 50, None])
def test_csr(tmp_path: Path, kind: type, dtype: str, rows: int | None) -> None:
    x = kind(scipy.sparse.random_array((N, D), density=0.1, rng=np.random.default_rng(1)) * 100).astype(dtype)
    scipy.sparse.save_npz(tmp_path / "x.npz", x)
    notes: list[str] = []
    project_file(tmp_path / "x.npz", tmp_path / "y.npy", K, batch_rows=rows, note=notes.append)
    assert_is_result(tmp_path / "y.npy", sjlt.Sketch(D, K).project(x))
    loaded, larger = notes
    assert loaded == f"{tmp_path / 'x.npz'}: sparse, so it is loaded whole into memory"
    assert re.fullmatch(r".*y.npy: will take \d\d,\d{3} bytes, more than the \d+,\d{3} of its source", larger)
    assert json.loads((tmp_path / "y.npy.json").read_text())["source"]["order"] == "CSR"


def test_version_2_headers(tmp_path: Path) -> None:
    x = np.ones((3, D), np.float32)
    with open(tmp_path / "x.npy", "wb") as file:
        np.lib.format.write_array(file, x, version=(2, 0))
    project_file(tmp_path / "x.npy", tmp_path / "y.npy", K)
    assert_is_result(tmp_path / "y.npy", sjlt.Sketch(D, K).project(x))


def test_non_finite_values_reach_only_their_components(tmp_path: Path) -> None:
    x = np.zeros((3, D), np.float32)
    x[0, 3], x[1, 4] = np.nan, np.inf
    project_file(saved(tmp_path / "x.npy", x), tmp_path / "y.npy", K)
    y = np.load(tmp_path / "y.npy")
    hit = np.zeros(y.shape, bool)
    rows, _ = sjlt.Sketch(D, K).entries()
    hit[0, rows[:, 3]] = hit[1, rows[:, 4]] = True
    assert np.array_equal(~np.isfinite(y), hit)


def test_overflow_gives_infinity_without_a_warning(tmp_path: Path) -> None:
    project_file(saved(tmp_path / "x.npy", np.full((2, D), 1e30)), tmp_path / "y.npy", K, dtype="float16")
    assert np.isinf(np.load(tmp_path / "y.npy")).any()


def test_description(tmp_path: Path) -> None:
    source = saved(tmp_path / "x.npy", np.ones((N, D), ">f4"))
    project_file(source, tmp_path / "y.npy", K, seed=-1, batch_rows=17, dtype="float64")
    status = source.stat()
    assert json.loads((tmp_path / "y.npy.json").read_text()) == {
        "sjlt": sjlt.__version__,
        "sketch": sjlt.Sketch(D, K, seed=2**64 - 1).to_dict(),
        "source": {
            "name": "x.npy",
            "size": status.st_size,
            "mtime_ns": status.st_mtime_ns,
            "shape": [N, D],
            "dtype": ">f4",
            "order": "C",
        },
        "result": {"shape": [N, K], "dtype": "float64"},
        "batch_rows": 17,
        "device": "cpu",
    }


def test_progress_counts_rows(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    source = saved(tmp_path / "x.npy", np.ones((10, D)))
    project_file(source, tmp_path / "y.npy", K, batch_rows=4, progress=lambda *rows: seen.append(rows))
    assert seen == [(0, 10), (4, 10), (8, 10), (10, 10)]


def test_long_rows_are_batched(tmp_path: Path) -> None:
    project_file(saved(tmp_path / "x.npy", np.ones((20, 600_000), np.float32)), tmp_path / "y.npy", K)
    assert json.loads((tmp_path / "y.npy.json").read_text())["batch_rows"] == 16


@pytest.mark.parametrize("order", ["C", "F"])
def test_source_modified_during_the_run(tmp_path: Path, order: str) -> None:
    source = saved(tmp_path / "x.npy", np.ones((50_000, D), order=order))

    def change(rows: int, of: int) -> None:
        with open(source, "r+b") as file:
            file.truncate(1000) if order == "C" else file.write(b"\x93")

    with pytest.raises(UserError, match=r"x.npy: (changed while it was read: source|ends early)"):
        project_file(source, tmp_path / "y.npy", K, batch_rows=1000, progress=change)
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("order", ["C", pytest.param("F", marks=pytest.mark.exhaustive)])
def test_memory_is_independent_of_file_size(tmp_path: Path, order: str) -> None:
    program = (
        "import sys; from pathlib import Path; from sjlt.files.projection import project_file\n"
        "project_file(Path(sys.argv[1]), Path(sys.argv[1] + '.y'), 64)\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    peaks = []
    # 25 and 302 MB; the first run may compile, which uses memory of its own.
    for run, rows in enumerate((8192, 8192, 98304)):
        source = saved(tmp_path / f"{run}.npy", np.ones((rows, 768), np.float32, order=order))
        done = subprocess.run([sys.executable, "-c", program, source], capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout) << 10)
    assert peaks[2] - peaks[1] < 96 << 20  # for 277 MB more data; on a busy machine allocators alone vary by 20 MB
