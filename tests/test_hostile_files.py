"""Hostile files and command lines: each ends promptly in one line and exit code 2, and changes nothing."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from helpers.cases import exhaustive_except
from helpers.cli import run as run

import sjlt
from sjlt.files.description import read_description
from sjlt.files.errors import UserError, printable
from sjlt.files.projection import project_file

N, D, K = 50, 30, 16
Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.ones((N, D), np.float32))


def assert_one_line(result: Any, *named: str) -> None:
    assert (result.code, result.out) == (2, ""), result
    *notes, line = result.err.splitlines()
    assert all("loaded whole" in note for note in notes)
    assert line.startswith("Error: ")
    assert all(name in line for name in named), line
    assert not any(ord(c) < 32 for c in line)


# ------------------------------------------------------------------------------------- sources


def header(text: str, size: int = N * D * 4) -> bytes:
    """An ``.npy`` file with the given header."""
    padded = text.encode() + b" " * (-len(text) - 11 % 64 - 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded + bytes(size)


HEADERS = {
    "a bool in the shape": "{'descr': '<f4', 'fortran_order': False, 'shape': (True, 4)}",
    "a subarray": "{'descr': ('<f4', (2,)), 'fortran_order': False, 'shape': (3, 4)}",
    "no numbers": "{'descr': '|V0', 'fortran_order': False, 'shape': (3, 4)}",
    "empty text": "{'descr': '<U0', 'fortran_order': False, 'shape': (3, 4)}",
    "huge": "{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387904, 4611686018427387904)}",
    "huge and empty": "{'descr': '<f4', 'fortran_order': False, 'shape': (0, 9223372036854775807)}",
    "very huge and empty": "{'descr': '<f4', 'fortran_order': False, 'shape': (0, 18446744073709551616)}",
    "many empty rows": "{'descr': '<f4', 'fortran_order': False, 'shape': (18446744073709551616, 0)}",
    "strings": "{'descr': '<f4', 'fortran_order': False, 'shape': ('3', '4')}",
    "a large type": "{'descr': '<f16', 'fortran_order': False, 'shape': (1, 4)}",
    "unknown": "{'descr': '<q9', 'fortran_order': False, 'shape': (3, 4)}",
}


@pytest.mark.parametrize("command", ["project", "quality"])
@pytest.mark.parametrize("case", HEADERS)
def test_headers(run: Run, case: str, command: str) -> None:
    Path("bad.npy").write_bytes(header(HEADERS[case]))
    arguments = ("project", "bad.npy", "y.npy", "-k", K) if command == "project" else ("quality", "bad.npy")
    result = run(*arguments)
    if "huge and empty" in case and result.code == 0:
        assert np.load("y.npy").shape == (0, K)  # (0, 2^63 - 1) is a valid shape
    else:
        assert_one_line(result)
        assert sorted(path.name for path in Path().iterdir()) == ["bad.npy", "x.npy"]


def save_csr(**changes: Any) -> None:
    x = scipy.sparse.csr_array(np.eye(4, dtype=np.float32))
    content = {"format": b"csr", "shape": x.shape, "data": x.data, "indices": x.indices, "indptr": x.indptr}
    np.savez("bad.npz", **{**content, "_is_array": True, **changes})


SPARSE = {
    "float16 data": {"data": np.ones(4, np.float16)},
    "complex data": {"data": np.ones(4, complex)},
    "text": {"data": np.array(list("abcd"))},
    "float indices": {"indices": np.array([0.5, 1.5, 2.5, 3])},
    "complex indices": {"indices": np.array([0, 1, 2, 3j])},
    "negative indices": {"indices": np.array([-1, 1, 2, 3])},
    "descending indptr": {"indptr": np.array([0, 3, 2, 1, 4])},
    "a short indptr": {"indptr": np.array([0, 4])},
    "a negative shape": {"shape": (-4, 4)},
    "a shape of text": {"shape": np.array(["4", "4"])},
    "a format of numbers": {"format": np.array(3)},
}


@pytest.mark.parametrize("case", SPARSE)
def test_sparse_members(run: Run, case: str) -> None:
    save_csr(**SPARSE[case])
    assert_one_line(run("project", "bad.npz", "y.npy", "-k", K), "bad.npz")


def test_fifos_are_refused_without_blocking(run: Run) -> None:
    os.mkfifo("pipe")
    assert_one_line(run("project", "pipe", "y.npy", "-k", K), "pipe: not a regular file")
    assert_one_line(run("quality", "pipe"), "pipe: not a regular file")
    assert_one_line(run("info", "pipe"), "pipe")
    os.rename("pipe", "y.npy.json")
    for options in ((), ("--force",), ("--resume",)):
        assert_one_line(run("project", "x.npy", "y.npy", "-k", K, *options), "y.npy.json")
    assert_one_line(run("info", "y.npy"), "y.npy.json: not a regular file")


@pytest.mark.parametrize("names", [("-", "y.npy"), ("x.npy", "-"), (".", "-"), ("-", "out/")])
@pytest.mark.parametrize("content", [None, b"\x93NUMPY\x01", b"PAR1"])
def test_dash_is_not_a_file(run: Run, names: tuple[str, str], content: bytes | None) -> None:
    if content is not None:
        Path("-").write_bytes(content)
    for options in ((), ("--force",), ("--workers", 1)):
        result = run("project", *names, "-k", K, *options)
        assert_one_line(result, "standard input and output are not supported: name a file, or give the absolute path")
    assert content == (Path("-").read_bytes() if Path("-").exists() else None)


@pytest.mark.parametrize("path", [".", "..", "/", "x.npy/y"])
@pytest.mark.parametrize("command", ["info", "quality"])
def test_directories(run: Run, command: str, path: str) -> None:
    assert_one_line(run(command, path), path)


@pytest.mark.parametrize("stride", ["0", "-1", "33", "1000000", str(10**30)])
def test_demo_strides(run: Run, stride: str) -> None:
    assert_one_line(run("demo", "--stride", stride), f"stride must be from 1 to 32, got {stride}")


def test_absurd_thread_counts(run: Run) -> None:
    result = run("project", "x.npy", "y.npy", "-k", K, "--threads", 2**70)
    sjlt.set_num_threads(2)
    if result.code:
        assert_one_line(result)


@pytest.mark.parametrize("budget", [60, pytest.param(1500, marks=pytest.mark.exhaustive)])
def test_randomly_damaged_sources(run: Run, budget: int) -> None:
    """Alter a few bytes of a valid file, or truncate it: the command reports one line or gives a result."""
    scipy.sparse.save_npz("x.npz", scipy.sparse.random_array((N, D), density=0.1, format="csr"), compressed=False)
    rng = random.Random(0)
    good = {name: Path(name).read_bytes() for name in ("x.npy", "x.npz")}
    for number in range(budget):
        name = rng.choice(["x.npy", "x.npz"])
        content = bytearray(good[name])
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(300 if rng.random() < 0.7 else len(content))] = rng.randrange(256)
        Path(f"bad{name[1:]}").write_bytes(content[: rng.choice([len(content), rng.randrange(len(content))])])
        result = run("project", f"bad{name[1:]}", "y.npy", "-k", K, "--force")
        if result.code:
            assert_one_line(result, "bad"), number
        assert not list(Path().glob(".sjlt*"))
        assert not list(Path().glob("*partial*"))


# ------------------------------------------------------------------------------------- descriptions


def nested(levels: int) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


@pytest.mark.parametrize("content", [nested(100_000), b"[" * 10**6, b'{"a": 1e999999}', b"NaN", b'"\\ud800"', b"\x00"])
def test_json_that_is_not_a_description(run: Run, content: bytes) -> None:
    Path("y.npy.json").write_bytes(content)
    Path("y.npy").write_bytes(b"")
    assert_one_line(run("info", "y.npy"), "y.npy.json: not")


def test_too_large_description(run: Run) -> None:
    Path("y.npy.json").touch()
    os.truncate("y.npy.json", 10**12)
    assert_one_line(run("info", "y.npy"), "y.npy.json: too large for a description: 1000000000000 bytes")


VALUES = [None, True, -1, 0, 2**63, 10**400, 1.5, "", "x", [], {}, [[]], [1, 2, 3], [-1, 2], ["a", "b"], "O", "f4,f4"]


def value_paths(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to all values in nested containers."""
    if not isinstance(content, dict):
        return [path]
    return [path, *(place for key, value in content.items() for place in value_paths(value, (*path, key)))]


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_tampered_values(run: Run, step: int) -> None:
    """Replace every value of a description by values of every other kind: `info` shows it or refuses it in one line."""
    project_file(Path("x.npy"), Path("y.npy"), K)
    good = json.loads(Path("y.npy.json").read_bytes())
    refused = 0
    for number, path in enumerate(value_paths(good)[1:]):
        for value in VALUES[number % step :: step]:
            content = json.loads(json.dumps(good))
            part = content
            for key in path[:-1]:
                part = part[key]
            part[path[-1]] = value
            Path("y.npy.json").write_text(json.dumps(content))
            result = run("info", "y.npy")
            if result.code:
                refused += 1
                assert_one_line(result, "y.npy.json")
            else:
                assert isinstance(value, (str, int)), (path, value)
    assert refused > 150 / step


@pytest.mark.parametrize("options", [("--resume",), ("--resume", "--force")])
def test_tampered_states(run: Run, options: tuple[str, ...]) -> None:
    """Malformed segments."""

    def stop(rows: int, of: int) -> None:
        if rows == 20:
            raise KeyboardInterrupt

    for segments in (
        None,
        1,
        [1],
        [[1, 2, 3]],
        [[20, -1]],
        [[20, "a"]],
        [[0, 1], [20, 1]],
        [[10, 0]],
        [[2**70, 0]],
        {},
    ):
        with pytest.raises(KeyboardInterrupt):
            project_file(Path("x.npy"), Path("y.npy"), K, batch_rows=10, progress=stop, force=True)
        state = json.loads(Path("y.npy.partial.json").read_bytes())
        Path("y.npy.partial.json").write_text(json.dumps({**state, "segments": segments}))
        assert_one_line(run("project", "x.npy", "y.npy", "-k", K, *options), "y.npy.partial.json: not a description")


def test_descriptions_have_one_reader() -> None:
    project_file(Path("x.npy"), Path("y.npy"), K)
    assert read_description(Path("y.npy.json"))["sketch"] == sjlt.Sketch(D, K).to_dict()
    with pytest.raises(UserError, match=r"^x.npy: not JSON"):
        read_description(Path("x.npy"))


# ------------------------------------------------------------------------------------- the terminal

NAMES = [
    "[bold]x.npy",
    "[red]a\\[b].npy",
    "a\x1b[2Jb.npy",
    "a\nb.npy",
    "a\rb.npy",
    "a\u202eb.npy",
    "\udcff.npy",
    "a\x9bb.npy",
]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_shown_literally(run: Run, name: str) -> None:
    """In errors, notes and tables: no markup, and control characters escaped."""
    assert_one_line(run("project", name, "y.npy", "-k", K), printable(name))
    np.save("x.npy", np.ones((N, 4), np.float32))
    os.rename("x.npy", name)
    assert run("project", name, f"y{name}", "-k", K).code == 0
    shown = run("info", f"y{name}")
    assert shown.code == 0
    assert printable(name) in shown.out
    assert not {"\x1b", "\r", "\u202e", "\x9b"} & set(shown.out)


@pytest.mark.parametrize("name", exhaustive_except(NAMES[:1], NAMES[:3]))
def test_names_in_progress_bars(name: str) -> None:
    import pty

    os.rename("x.npy", "in.npy")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "sjlt", "project", "in.npy", name, "-k", str(K)]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200"}
    with subprocess.Popen(command, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 4096):
                shown += part
        except OSError:  # Linux reports that the other end is closed
            pass
    os.close(ours)
    assert process.returncode == 0
    assert printable(name).encode() in shown
    assert b"\x1b[2J" not in shown


STREAMS = ["2>&-", "1>&-", "0<&-", "0<&- 1>&- 2>&-", "2>/dev/full"]


@pytest.mark.parametrize("closed", exhaustive_except(["2>&-", "2>/dev/full"], STREAMS))
@pytest.mark.parametrize("command", ["project x.npy y.npy -k 16", "project x.npy no/y.npy -k 16"])
def test_closed_standard_streams(command: str, closed: str) -> None:
    """The result is unchanged: nothing meant for a closed stream is written into it."""
    if closed == "2>/dev/full" and not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    program = f"exec {sys.executable} -m sjlt {command} {closed}"
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}  # lines that cannot be written remain in a buffer
    done = subprocess.run(
        ["sh", "-c", program], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    if "no/" in command:
        assert done.returncode == 2
        return
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    np.save("expected.npy", np.load("x.npy") @ sjlt.Sketch(D, 16).T)
    assert Path("y.npy").read_bytes() == Path("expected.npy").read_bytes()


def test_printable() -> None:
    assert printable("naïve/[b]日本.npy") == "naïve/[b]日本.npy"
    assert printable("\x00\x1b\x7f\x85\u2028\u202e\u200b\udc80\n") == (
        "\\x00\\x1b\\x7f\\x85\\u2028\\u202e\\u200b\\udc80\\n"
    )
