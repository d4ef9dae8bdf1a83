"""``sjlt lstsq`` and ``sjlt svd``: results, one-line errors, kills, and files that change while they are read."""

import contextlib
import os
import signal
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import torch
from helpers.cli import run as run

from sjlt.cli import app, matrices
from sjlt.linalg import lstsq, svd_lowrank

M, N = 3000, 12
COMMANDS = {"lstsq": ["lstsq", "A.npy", "b.npy", "x.npy"], "svd": ["svd", "A.npy", "x.npz", "--rank", 3]}
each_command = pytest.mark.parametrize("name", COMMANDS)


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    """A directory with a matrix of rank N and a right-hand side."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    np.save("A.npy", rng.standard_normal((M, N)) * np.geomspace(1, 1e-6, N))
    np.save("b.npy", rng.standard_normal(M))


def files():
    return {path.name: path.read_bytes() for path in Path().iterdir() if path.is_file()}


def assert_refused(run, message, *arguments):
    before = files()
    result = run(*arguments)
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("Error: ")
    assert message in result.err
    assert result.err.count("\n") == 1
    assert files() == before


def test_lstsq(run):
    A, b = np.load("A.npy"), np.load("b.npy")
    result = run(*COMMANDS["lstsq"])
    assert result.code == 0
    assert result.err == ""
    expected = lstsq("A.npy", b)
    x = np.load("x.npy")
    assert np.array_equal(x, expected.x)
    residual = np.linalg.norm(b - A @ x)
    assert result.out.startswith(f"x.npy: rank 12 of 12, 3 passes, residual {residual:.4g}, backward error ")
    assert sorted(files()) == ["A.npy", "b.npy", "x.npy"]


def test_lstsq_with_options(run):
    """Ridge, several right-hand sides, rank deficiency, a sparse matrix."""
    A = np.load("A.npy")
    B = np.stack([np.load("b.npy"), np.ones(M)], 1)
    np.save("B.npy", B)
    assert run("lstsq", "A.npy", "B.npy", "x.npy", "--damp", "0.5", "--seed", 7).code == 0
    expected = np.linalg.solve(A.T @ A + 0.25 * np.eye(N), A.T @ B)
    np.testing.assert_allclose(np.load("x.npy"), expected, rtol=1e-9)
    result = run("lstsq", "A.npy", "B.npy", "x.npy", "--rcond", "1e-3", "--force")
    rank = np.linalg.matrix_rank(A, rtol=1e-3)
    assert 0 < rank < N
    assert f"rank {rank} of 12" in result.out
    assert "the largest of 2" in result.out
    assert "solution of minimum norm" in result.err
    scipy.sparse.save_npz("A.npz", scipy.sparse.csr_array(A * (np.abs(A) > 0.01)))
    assert run("lstsq", "A.npz", "b.npy", "sparse.npy").code == 0
    S = scipy.sparse.load_npz("A.npz")
    np.testing.assert_allclose(np.load("sparse.npy"), lstsq(S, np.load("b.npy")).x)


def test_svd(run):
    result = run(*COMMANDS["svd"])
    assert result.code == 0
    assert result.err == ""
    with np.load("x.npz") as held:
        assert sorted(held.files) == ["U", "Vh", "s"]
        for found, expected in zip((held["U"], held["s"], held["Vh"]), svd_lowrank("A.npy", 3), strict=True):
            assert np.array_equal(found, expected)
        s = held["s"]
    assert result.out == f"x.npz: U (3000, 3), s (3,) from {s[0]:.4g} to {s[2]:.4g}, Vh (3, 12)\n"
    assert run(*COMMANDS["svd"], "--n-iter", 1, "--oversampling", 2, "--seed", 5, "--force").code == 0
    with np.load("x.npz") as held:
        np.testing.assert_allclose(held["s"], np.linalg.svd(np.load("A.npy"))[1][:3], rtol=1e-3)


@each_command
def test_an_existing_result_is_kept_unless_forced(run, name):
    out = Path(str(COMMANDS[name][-1 if name == "lstsq" else 2]))
    out.write_bytes(b"old")
    assert_refused(run, f"{out}: exists (--force replaces it)", *COMMANDS[name])
    assert run(*COMMANDS[name], "--force").code == 0
    assert out.read_bytes() != b"old"


def test_without_a_gpu(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused(run, "no device cuda: torch", *COMMANDS["lstsq"], "--device", "cuda")
    scipy.sparse.save_npz("A.npz", scipy.sparse.csr_matrix(np.load("A.npy")))
    result = run("lstsq", "A.npz", "b.npy", "x.npy", "--device", "cuda")
    assert result.code == 2
    assert "A.npz: a sparse matrix is solved on the CPU only" in result.err


@pytest.mark.gpu
def test_lstsq_on_a_gpu(run):
    result = run(*COMMANDS["lstsq"], "--device", "cuda")
    assert result.code == 0
    expected = lstsq("A.npy", np.load("b.npy"))
    np.testing.assert_allclose(np.load("x.npy"), expected.x, rtol=1e-8)


BAD_B = {
    "missing": (lambda: os.unlink("b.npy"), "b.npy: No such file or directory"),
    "directory": (lambda: (os.unlink("b.npy"), os.mkdir("b.npy")), "b.npy: not a regular file"),
    "text": (lambda: Path("b.npy").write_text("1 2 3\n"), "b.npy: not a readable .npy file"),
    "empty file": (lambda: Path("b.npy").write_bytes(b""), "b.npy: not a readable .npy file"),
    "objects": (lambda: np.save("b.npy", np.array([{}] * M, object), allow_pickle=True), "b.npy: not a readable"),
    "too short": (lambda: np.save("b.npy", np.ones(M - 1)), f"shape ({M - 1},); needs ({M},) or ({M}, columns)"),
    "empty": (lambda: np.save("b.npy", np.ones((M, 0))), f"shape ({M}, 0)"),
    "complex": (lambda: np.save("b.npy", np.ones(M, complex)), "b must be real, dtype complex128"),
    "zip's first bytes": (lambda: Path("b.npy").write_bytes(b"PK\x03\x04" + bytes(50)), "b.npy: not a readable"),
    "unterminated header": (
        lambda: Path("b.npy").write_bytes(b"\x93NUMPY\x01\x00\x10\x00{'shape': ((((   "),
        "b.npy: not a readable .npy file",
    ),
    "nan": (lambda: np.save("b.npy", np.where(np.arange(M) == 77, np.nan, 1)), "b[77] is nan"),
}


@pytest.mark.parametrize("case", BAD_B)
def test_bad_right_hand_sides(run, case):
    make, message = BAD_B[case]
    make()
    result = run(*COMMANDS["lstsq"])
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("Error: ")
    assert message in result.err
    assert result.err.count("\n") == 1
    assert not Path("x.npy").exists()


def with_infinity():
    A = np.load("A.npy")
    A[1234, 5] = np.inf
    return A


BAD_A = {
    "missing": (lambda: os.unlink("A.npy"), "A.npy: No such file or directory"),
    "text": (lambda: Path("A.npy").write_text("1,2\n"), "A.npy: neither .npy nor .npz"),
    "vector": (lambda: np.save("A.npy", np.ones(M)), f"A.npy: holds an array of shape ({M},)"),
    "truncated": (lambda: os.truncate("A.npy", 5000), "A.npy: truncated"),
    "integers": (lambda: np.save("A.npy", np.ones((M, N), int)), "dtype int64"),
    "complex": (lambda: np.save("A.npy", np.ones((M, N), complex)), "dtype complex128"),
    "no columns": (lambda: np.save("A.npy", np.ones((M, 0))), f"must not be empty, got shape ({M}, 0)"),
    "infinity": (lambda: np.save("A.npy", with_infinity()), "inf"),
}


@each_command
@pytest.mark.parametrize("case", BAD_A)
def test_bad_matrices(run, name, case):
    make, message = BAD_A[case]
    make()
    assert_refused(run, message, *COMMANDS[name])


@each_command
@pytest.mark.parametrize(
    ("changes", "more", "message"),
    [
        ({"x.npy": "x.txt", "x.npz": "x.txt"}, [], "x.txt: a result's name must end in .np"),
        ({"x.npy": "none/x.npy", "x.npz": "none/x.npz"}, [], "none: no such directory"),
        ({}, ["--seed", 2**64], f"seed must be from -9223372036854775808 to 18446744073709551615, got {2**64}"),
        ({}, ["--threads", "0"], "0"),
    ],
)
def test_bad_arguments(run, name, changes, more, message):
    assert_refused(run, message, *(changes.get(argument, argument) for argument in COMMANDS[name]), *more)


def test_bad_ranks(run):
    for rank in (0, 13, 10**12):  # before a result of that size is allocated
        assert_refused(run, f"rank must be from 1 to 12 for shape ({M}, 12), got {rank}", *COMMANDS["svd"][:-1], rank)


def test_bad_numbers(run):
    for option in (["--damp", "-1"], ["--damp", "nan"], ["--damp", "much"], ["--rcond", "1"]):
        assert_refused(run, option[1], *COMMANDS["lstsq"], *option)


@each_command
def test_one_array_of_several_in_a_file(run, name):
    with pytest.importorskip("h5py").File("A.h5", "w") as file:
        file["other"], file["v"] = np.ones((M, N)), np.load("A.npy")
    command = ["A.h5" if argument == "A.npy" else argument for argument in COMMANDS[name]]
    assert_refused(run, "A.h5: has several datasets with 2 dimensions; name one with --column: other, v", *command)
    assert_refused(run, "A.h5: has no dataset 'w'", *command, "--column", "w")
    result = run(*command, "--column", "v")
    assert (result.code, result.err) == (0, "")
    expected = run(*COMMANDS[name], "--force")
    assert result.out.replace("x.np", "") == expected.out.replace("x.np", "")


def test_a_sparse_array_in_an_h5ad_file(run):
    h5py = pytest.importorskip("h5py")
    A = scipy.sparse.csr_array(np.load("A.npy") * (np.abs(np.load("A.npy")) > 0.01))
    with h5py.File("A.h5ad", "w") as file:
        group = file.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "shape": A.shape})
        for part in ("data", "indices", "indptr"):
            group[part] = getattr(A, part)
    result = run("lstsq", "A.h5ad", "b.npy", "x.npy")
    assert result.code == 0
    assert result.err.startswith("A.h5ad: sparse, so it is loaded whole into memory\n")
    np.testing.assert_allclose(np.load("x.npy"), lstsq(A, np.load("b.npy")).x)


@each_command
def test_links_and_long_names_are_refused_before_any_work(run, name):
    arguments = list(COMMANDS[name])
    place = -1 if name == "lstsq" else 2
    suffix = Path(str(arguments[place])).suffix
    Path("precious").write_bytes(b"precious")
    Path("link" + suffix).symlink_to("precious")
    arguments[place] = "link" + suffix
    assert_refused(run, "is a symbolic link to precious", *arguments, "--force")
    assert Path("link" + suffix).readlink() == Path("precious")
    arguments[place] = "a" * (255 - len(suffix)) + suffix
    assert_refused(run, "bytes too long for that of a temporary file", *arguments)


def test_the_result_may_not_be_a_source(run):
    for command in (["lstsq", "A.npy", "b.npy", "A.npy"], ["lstsq", "A.npy", "b.npy", "b.npy"]):
        assert_refused(run, "is the source", *command, "--force")


# ------------------------------------------------------------------------------------- interruptions


def arguments_of(name, *more):
    return ["sjlt", *map(str, COMMANDS[name]), *more]


def stop_at(monkeypatch, number, action):
    """Do `action` when the first rows of pass `number` have been read."""

    def show(self, rows, of, stage=""):
        if stage == f"pass {number}":
            action()

    monkeypatch.setattr(matrices.ProgressBar, "show", show)


@each_command
def test_an_interruption_leaves_nothing(run, name, monkeypatch):
    before = files()

    def interrupt():
        raise KeyboardInterrupt

    last = {"lstsq": 3, "svd": 1}[name]
    for number in range(1, last + 1):
        stop_at(monkeypatch, number, interrupt)
        result = run(*COMMANDS[name])
        assert result.code == 130
        assert result.err == f"Interrupted in pass {number}: nothing was written; the same command starts over\n"
        assert files() == before


def killed(monkeypatch, name, prepare, *more):
    """Run a command in a child that kills itself when `prepare` has arranged; return whether it did."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer versions of Python warn about forking with threads
        child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            prepare()
            sys.argv = arguments_of(name, *more)
            app.main()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def die(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)


POINTS = ["fsync", "link", "replace", "unlink"]


@pytest.mark.parametrize(
    ("name", "point"),
    [
        *(("lstsq", point) for point in ("pass 1", "pass 3", *POINTS)),
        *(("svd", point) for point in ("pass 1", *POINTS)),
    ],
)
def test_a_kill_leaves_nothing_and_the_same_command_succeeds(run, name, point, monkeypatch):
    """Killed in a pass, while the file is written, or just before or after it gets its name."""
    forced = point == "replace"
    out = Path({"lstsq": "x.npy", "svd": "x.npz"}[name])
    if forced:
        out.write_bytes(b"old")
    before = files()

    def prepare():
        if point.startswith("pass"):
            stop_at(monkeypatch, int(point[5:]), die)
        else:
            setattr(os, point, die)

    assert killed(monkeypatch, name, prepare, *["--force"] * forced)
    after = {path: content for path, content in files().items() if not path.startswith(".sjlt-")}
    complete = out.name in after and after[out.name] != b"old"
    assert complete == (point == "unlink")  # the hard link exists, and the temporary name is not yet removed
    assert {path: after[path] for path in before} == before
    result = run(*COMMANDS[name], *["--force"] * (forced or complete))
    assert result.code == 0, result.err
    assert sorted(files()) == sorted({*before, out.name})  # the killed run's temporary files are removed
    if complete and name == "lstsq":
        assert out.read_bytes() == after[out.name]


@each_command
@pytest.mark.parametrize("change", ["touched", "truncated", "replaced"])
def test_a_file_that_changes_while_it_is_read(run, name, change, monkeypatch):
    def modify():
        if change == "touched":
            os.utime("A.npy", ns=(1, 1))
        elif change == "truncated":
            os.truncate("A.npy", 5000)
        else:
            np.save("other.npy", np.load("A.npy") + 1)
            os.replace("other.npy", "A.npy")

    stop_at(monkeypatch, {"lstsq": 2, "svd": 1}[name], modify)
    result = run(*COMMANDS[name])
    assert (result.code, result.out) == (2, "")
    assert "A.npy changed" in result.err
    assert result.err.count("\n") == 1
    assert sorted(files()) == ["A.npy", "b.npy"]
