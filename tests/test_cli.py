"""The command line: output, and refusals in one line with exit code 2."""

import json
import os
import pickle
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from helpers.cli import on_a_terminal
from helpers.cli import run as run

import sjlt

N, D, K = 50, 30, 16

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test in an empty directory with one valid source."""
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.ones((N, D), np.float32))


def assert_refused(run: Run, message: str, *arguments: object, loaded: bool = False) -> None:
    before = {path: path.stat().st_mtime_ns for path in Path().iterdir()}
    result = run("project", *arguments)
    assert result.code == 2
    assert result.out == ""
    *notes, line = result.err.splitlines()
    assert line.startswith("Error: ")
    assert message in line
    notes = [note for note in notes if "nothing is compressed" not in note and "more than the" not in note]
    assert len(notes) == loaded
    assert all("loaded whole" in note for note in notes)
    assert {path: path.stat().st_mtime_ns for path in Path().iterdir()} == before  # nothing created or modified


# ------------------------------------------------------------------------------------- the source


def save_object_array() -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, ("loaded",)

    np.save("bad.npy", np.array([[Trap()]], object), allow_pickle=True)


def save_pickle() -> None:
    Path("bad.npy").write_bytes(pickle.dumps(np.ones((N, D))))


def truncate(by: int) -> Callable[[], None]:
    return lambda: Path("bad.npy").write_bytes(Path("x.npy").read_bytes()[:-by])


def saver(array: np.ndarray) -> Callable[[], None]:
    return lambda: np.save("bad.npy", array)


SHORT = 128 + N * D * 4
BAD_SOURCES = {
    "missing": (lambda: None, "bad.npy: No such file or directory"),
    "directory": (lambda: Path("bad.npy").mkdir(), "no files"),
    "empty": (lambda: Path("bad.npy").touch(), "bad.npy: is empty"),
    "garbage": (lambda: Path("bad.npy").write_text("0.1,0.2\n"), "begins with b'0.1,0.'"),
    "object array": (save_object_array, "(dtype object): pickles are never loaded"),
    "pickle": (save_pickle, "neither .npy nor .npz"),
    "short by a byte": (truncate(1), "truncated: (50, 30) of float32 needs 6000 bytes, the file has 5999"),
    "without data": (truncate(N * D * 4), "needs 6000 bytes, the file has 0"),
    "half a header": (truncate(SHORT - 50), "not a readable .npy file"),
    "half a magic": (truncate(SHORT - 4), "neither .npy nor .npz"),
    "a header of nonsense": (
        lambda: Path("bad.npy").write_bytes(b"\x93NUMPY\x01\x00\x06\x00{'a':("),
        "not a readable .npy file",
    ),
    "a header that is too long": (
        lambda: Path("bad.npy").write_bytes(b"\x93NUMPY\x01\x00\xff\xff" + b" " * 65535),
        "not a readable .npy file",
    ),
    "negative shape": (
        lambda: Path("bad.npy").write_bytes(Path("x.npy").read_bytes().replace(b"(50, 30)", b"(50,-30)")),
        "(50, -30)",
    ),
    "0-D": (saver(np.array(1.0)), "an array of shape (); needs 2 dimensions"),
    "1-D": (saver(np.ones(5)), "an array of shape (5,); needs 2 dimensions"),
    "3-D": (saver(np.ones((2, 3, 4))), "an array of shape (2, 3, 4); needs 2 dimensions"),
    "complex": (saver(np.ones((2, 3), complex)), "dtype complex128 is refused"),
    "text": (saver(np.array([["a"]])), "dtype <U1 is refused"),
    "dates": (saver(np.zeros((2, 2), "M8[s]")), "dtype datetime64[s] is refused"),
    "structured": (saver(np.zeros((2, 2), [("a", "f4")])), "is refused"),
    "longdouble": (saver(np.ones((2, 2), np.longdouble)), "is refused"),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_bad_sources(run: Run, case: str) -> None:
    make, message = BAD_SOURCES[case]
    make()
    assert_refused(run, message, "bad.npy", "y.npy", "-k", K)


def save_npz(form: str) -> Callable[[], None]:
    return lambda: scipy.sparse.save_npz("bad.npz", scipy.sparse.eye_array(4, format=form))


def save_indices_out_of_range() -> None:
    x = scipy.sparse.csr_array(np.eye(4))
    x.indices[:] = 10**6
    scipy.sparse.save_npz("bad.npz", x)


BAD_NPZ = {
    "csc": (save_npz("csc"), "holds a sparse 2-D CSC; needs a sparse 2-D CSR"),
    "coo": (save_npz("coo"), "holds a sparse 2-D COO; needs a sparse 2-D CSR"),
    "1-D": (
        lambda: np.savez("bad.npz", format=b"csr", shape=[4], _is_array=True),
        "holds a sparse 1-D CSR; needs a sparse 2-D CSR",
    ),
    "dense arrays": (lambda: np.savez("bad.npz", a=1, b=2), "bad.npz: holds the arrays a, b; needs a sparse 2-D CSR"),
    "objects": (
        lambda: np.savez("bad.npz", format=np.array([{}], object), shape=[1, 1], allow_pickle=True),
        "Object arrays cannot be loaded",
    ),
    "indices out of range": (save_indices_out_of_range, "not a readable sparse .npz file"),
    "truncated": (lambda: Path("bad.npz").write_bytes(b"PK\x03\x04 and no more"), "not a readable sparse .npz file"),
}


@pytest.mark.parametrize("case", BAD_NPZ)
def test_bad_sparse_sources(run: Run, case: str) -> None:
    make, message = BAD_NPZ[case]
    make()
    assert_refused(run, message, "bad.npz", "y.npy", "-k", K, loaded=case == "indices out of range")


# ------------------------------------------------------------------------------------- the parameters


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-k", 0), "n_components must be from 1 to 8388480, got 0"),
        (("-k", 8_388_481), "n_components must be from 1 to 8388480, got 8388481"),
        (("-k", 16, "--nnz", 17), "for n_components = 16, got 17"),
        (("-k", 129, "--nnz", 65), "for n_components = 129, got 65"),
        (("-k", 16, "--nnz", 0), ", got 0"),
        (("-k", 16, "--seed", 2**64), f"got {2**64}"),
        (("-k", 16, "--seed", -(2**63) - 1), f"got {-(2**63) - 1}"),
        (("-k", 16, "--batch-rows", 0), f"batch_rows must be from 1 to {2**62}, got 0"),
        (("-k", 16, "--batch-rows", 10**20), f"batch_rows must be from 1 to {2**62}, got {10**20}"),
        (("-k", 16, "--threads", 0), "must be an integer from 1 to 65536, got 0"),
    ],
)
def test_parameters_out_of_range(run: Run, arguments: tuple[object, ...], message: str) -> None:
    assert_refused(run, message, "x.npy", "y.npy", *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("project", "x.npy", "y.npy"), "Missing option '-k'"),
        (("project", "x.npy", "-k", K), "Missing argument 'OUT'"),
        (("project", "x.npy", "y.npy", "z.npy", "-k", K), "unexpected extra argument"),
        (("project", "x.npy", "y.npy", "-k"), "'-k' requires an argument"),
        (("project", "x.npy", "y.npy", "-k", "many"), "'many' is not an integer"),
        (("project", "x.npy", "y.npy", "-k", "16.5"), "'16.5' is not an integer"),
        (("project", "x.npy", "y.npy", "-k", K, "--nnz", "a\nb"), r"'a\nb' is neither an integer nor 'auto'"),
        (("project", "x.npy", "y.npy", "-k", K, "--seed", "s"), "Invalid value for '--seed': 's' is not an integer"),
        (("project", "x.npy", "y.npy", "-k", K, "--batch-rows", ""), "'' is not an integer"),
        (("project", "x.npy", "y.npy", "-k", K, "--threads", "1e3"), "'1e3' is not an integer"),
        (("project", "x.npy", "y.npy", "-k", K, "--dtype", "int16"), "'int16' is not one of 'float16', 'float32', "),
        (("project", "x.npy", "y.npy", "-k", K, "--device", "gpu"), "'gpu' is not one of 'auto', 'cpu', 'cuda'"),
        (("project", "x.npy", "y.npy", "-k", K, "--quick"), "No such option: --quick"),
        (("project", "x.npy", "y.npy", "-k", K, "--qui\nck"), "No such option: --qui"),
        (("info",), "Missing argument 'OUT'"),
        (("demo", "--stride", "wide"), "'wide' is not an integer"),
        (("undo",), "No such command 'undo'"),
        (("--quick",), "No such option: --quick"),
    ],
)
def test_usage_errors(run: Run, arguments: tuple[object, ...], message: str) -> None:
    result = run(*arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("Error: ")
    assert message in result.err
    assert len(result.err.splitlines()) == 1
    assert sorted(path.name for path in Path().iterdir()) == ["x.npy"]


def test_help(run: Run) -> None:
    for arguments in ("--help",), ("project", "--help"):
        result = run(*arguments)
        assert (result.code, result.err) == (0, "")
        assert result.out.startswith("Usage: sjlt ")
    nothing = run()
    assert "Usage: sjlt " in nothing.out + nothing.err
    assert "Error" not in nothing.err


@pytest.mark.parametrize(("raised", "code"), [(KeyboardInterrupt, 130), (EOFError, 1)])
def test_abrupt_end(run: Run, monkeypatch: pytest.MonkeyPatch, raised: type[BaseException], code: int) -> None:
    def end(*arguments: object, **options: object) -> None:
        raise raised

    monkeypatch.setattr("sjlt.files.description.read_description", end)
    assert run("info", "a.json").code == code


# ------------------------------------------------------------------------------------- the output path


def test_overwriting_a_result_needs_force(run: Run) -> None:
    assert run("project", "x.npy", "y.npy", "-k", K).code == 0
    assert_refused(run, "y.npy: exists (--force replaces it)", "x.npy", "y.npy", "-k", 8)
    assert run("project", "x.npy", "y.npy", "-k", 8, "--force").code == 0
    assert np.load("y.npy").shape == (N, 8)
    assert json.loads(Path("y.npy.json").read_text())["sketch"]["n_components"] == 8


def test_overwriting_a_description_needs_force(run: Run) -> None:
    Path("y.npy.json").write_text("{}")
    assert_refused(run, "y.npy.json: exists (--force replaces it)", "x.npy", "y.npy", "-k", K)
    assert run("project", "x.npy", "y.npy", "-k", K, "--force").code == 0


@pytest.mark.parametrize("force", [(), ("--force",)])
@pytest.mark.parametrize("made", ["y.npy", "y.npy.json", "y.npy.partial", "y.npy.partial.json"])
def test_source_is_never_overwritten(run: Run, made: str, force: tuple[str, ...]) -> None:
    os.link("x.npy", made)
    assert_refused(run, f"{made}: is the source x.npy itself", "x.npy", "y.npy", "-k", K, *force)


def test_source_under_another_path(run: Run) -> None:
    assert_refused(run, "while it is read", "x.npy", Path.cwd() / "x.npy", "-k", K, "--force")


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("nowhere/y.npy", "nowhere: no such directory"),
        ("/dev/full", "/dev/full: exists and is not a regular file"),
        (".", ".: exists and is not a regular file"),
        ("y.parquet", "y.parquet: the result is one dense array: its name must end in .npy"),
        ("y.PARQUET", "y.PARQUET: the result is one dense array: its name must end in .npy"),
        *(
            (f"y{suffix}", f"y{suffix}: cannot write {suffix} files; name the result .npy")
            for suffix in (".npz", ".CSV", ".fbin", ".u8bin", ".safetensors", ".h5", ".H5AD", ".zarr")
        ),
    ],
)
def test_bad_output_paths(run: Run, out: str, message: str) -> None:
    assert_refused(run, message, "x.npy", out, "-k", K, "--force")


def test_unwritable_directory(run: Run) -> None:
    if os.geteuid() == 0:  # root ignores permissions
        place = Path("/sys")
        if not place.is_dir():
            pytest.skip("needs a directory that root cannot write")
    else:
        place = Path("locked")
        place.mkdir(mode=0o555)
    result = run("project", "x.npy", place / "y.npy", "-k", K)
    assert result.code == 2
    assert result.err.startswith("Error: ")
    assert "y.npy" in result.err
    assert result.err.count("\n") == 1


def test_result_larger_than_the_disk(run: Run) -> None:
    header = b"(%d, 0), }"
    np.save("x.npy", np.ones((10**6, 0), np.float32))
    Path("x.npy").write_bytes(Path("x.npy").read_bytes().replace(header % 10**6 + b" " * 9, header % 10**15))
    assert_refused(run, "y.npy: needs 64000000000000128 bytes, the file system has", "x.npy", "y.npy", "-k", K)


# ------------------------------------------------------------------------------------- subprocesses


def sjlt_program(*command: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60, check=False, **options)


PROGRAMS = (
    [Path(sysconfig.get_path("scripts")) / "sjlt"],
    pytest.param([sys.executable, "-m", "sjlt"], marks=pytest.mark.exhaustive),
)


@pytest.mark.parametrize("program", PROGRAMS)
def test_as_a_program(program: list[object]) -> None:
    done = sjlt_program(*program, "project", "x.npy", "y.npy", "-k", K, "--seed", 3, "--threads", 2)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")  # quiet when stderr is not a terminal
    assert np.array_equal(np.load("y.npy"), np.load("x.npy") @ sjlt.Sketch(D, K, seed=3).T)
    refused = sjlt_program(*program, "project", "x.npy", "y.npy", "-k", K)
    assert (refused.returncode, refused.stderr) == (2, "Error: y.npy: exists (--force replaces it)\n")
    shown = sjlt_program(*program, "--version")
    assert (shown.returncode, shown.stdout) == (0, f"sjlt {sjlt.__version__}\n")


def test_progress_bar_on_a_terminal() -> None:
    code, shown = on_a_terminal("project", "x.npy", "y.npy", "-k", K, "--batch-rows", 5, COLUMNS="100")
    assert code == 0
    assert f"{N}/{N}" in shown
    assert "rows/s" in shown


def test_disk_fills_up(run: Run) -> None:
    import resource

    np.save("x.npy", np.ones((20_000, D), np.float32))
    arguments = ("project", "x.npy", "y.npy", "-k", K, "--batch-rows", 100, "--device", "cpu")
    assert run(*arguments).code == 0  # fills the cache of compiled code, which is larger than the limit
    Path("y.npy").unlink()
    Path("y.npy.json").unlink()
    limit = (100_000, 100_000)
    done = sjlt_program(
        sys.executable, "-m", "sjlt", *arguments, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    )
    assert (done.returncode, done.stdout) == (2, "")
    kept = re.fullmatch(
        r"Error: y.npy.partial: File too large; (\d+) of 20000 rows are kept(, --res.*)?\n", done.stderr
    )
    assert kept
    left = ["x.npy"] if kept[1] == "0" else ["x.npy", "y.npy.partial", "y.npy.partial.json"]
    assert sorted(path.name for path in Path().iterdir()) == left


def test_help_is_fast() -> None:
    heavy = "{'numpy', 'numba', 'sklearn', 'matplotlib', 'scipy', 'torch', 'rich.table'}"
    done = sjlt_program(
        sys.executable, "-c",
        f"import sys; from sjlt import cli; assert not {heavy} & set(sys.modules), sys.modules.keys()",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [["project", "", "y.npy", "-k", 4], ["project", "x.npy", ""], ["info", ""]])
def test_empty_arguments(run: Run, arguments: list[object]) -> None:
    """As a path, an empty string would be the current folder."""
    result = run(*arguments)
    assert result.code == 2
    assert result.err == "Error: an argument is empty: is a variable not set?\n"


def test_empty_name_of_the_output_column(run: Run) -> None:
    assert_refused(run, "--output-column is empty", "x.npy", "y.npy", "-k", K, "--output-column", "")
