"""Kills and failures at every system call by which `project_file` changes the file system.

After each one the result is absent, the old one, or complete with its description; and a resumed run, which may itself
be killed, ends with the same bytes and leaves nothing else behind.
"""

import contextlib
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sjlt
from sjlt.files import output
from sjlt.files.errors import UserError
from sjlt.files.projection import project_file

N, D, K = 60, 20, 8
CHANGES = ("open", "write", "ftruncate", "fsync", "replace", "rename", "link", "unlink")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set up a directory with a source, checkpoints after each batch, and no fsync."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(output, "CHECKPOINT_SECONDS", 0)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    np.save("x.npy", np.random.default_rng(0).normal(size=(N, D)).astype(np.float32))
    project(out=Path("expected"))
    os.unlink("expected.json")


def project(**options: Any) -> None:
    project_file(**{"source": Path("x.npy"), "out": Path("y.npy"), "n_components": K, "batch_rows": 20, **options})


def changes_files(name: str, arguments: tuple[Any, ...]) -> bool:
    return name != "open" or bool(arguments[1] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR))


def fail_at(point: int, failure: Callable[[str, tuple[Any, ...]], None]) -> Callable[[], None]:
    """Make the file change with index `point` call `failure` instead; return a function that undoes this."""
    calls, real = itertools.count(), {name: getattr(os, name) for name in CHANGES}

    def replacement(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if changes_files(name, arguments) and next(calls) == point:
                failure(name, arguments)
            return real[name](*arguments, **options)

        return call

    for name in CHANGES:
        setattr(os, name, replacement(name))

    def undo() -> None:
        for name in CHANGES:
            setattr(os, name, real[name])

    return undo


def killed_at(point: int, **options: Any) -> bool:
    """Project in a child process that is killed at that point, and return whether it was killed before it ended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer versions of Python warn about fork with threads
        child = os.fork()
    if child == 0:
        write = os.write

        def die(name: str, arguments: tuple[Any, ...]) -> None:
            if name == "write":  # half of the bytes have been written
                write(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

        fail_at(point, die)
        code = 1
        try:
            with contextlib.suppress(UserError):  # resuming an old run with other parameters is refused
                project(**options)
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def prepare(scenario: str) -> dict[str, Any]:
    """Create the files that precede the run, and return its options."""
    for path in Path().glob("*y.npy*"):
        path.unlink()
    if scenario == "over an old result":
        Path("y.npy").write_bytes(b"old")
        Path("y.npy.json").write_bytes(b"{}")
        return {"force": True}
    if scenario == "over an interrupted run of other parameters":
        interrupt(seed=1)
        return {"force": True}
    if scenario == "a resumed run":
        interrupt()
        return {"resume": True}
    return {}


def interrupt(**options: Any) -> None:
    def stop(rows: int, of: int) -> None:
        if rows == 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        project(progress=stop, **options)


SCENARIOS = ["a new result", "over an old result", "over an interrupted run of other parameters", "a resumed run"]


def assert_nothing_is_lost(scenario: str) -> None:
    if scenario == "over an old result":
        assert Path("y.npy").read_bytes() in (b"old", Path("expected").read_bytes())
    elif Path("y.npy").exists():
        assert Path("y.npy").read_bytes() == Path("expected").read_bytes()
        assert Path("y.npy.json").exists()


def recover(options: dict[str, Any]) -> None:
    """Resume, or start anew if the old run of other parameters is still untouched."""
    try:
        project(**{**options, "resume": True})
    except UserError as e:
        if "sketch.seed is 0, was 1" not in str(e):
            raise
        project(force=True)


def assert_is_result() -> None:
    assert Path("y.npy").read_bytes() == Path("expected").read_bytes()
    assert sorted(path.name for path in Path().iterdir()) == ["expected", "x.npy", "y.npy", "y.npy.json"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_kill_at_every_file_change(scenario: str) -> None:
    for point in itertools.count():
        options = prepare(scenario)
        killed = killed_at(point, **options)
        assert_nothing_is_lost(scenario)
        recover(options)
        assert_is_result()
        if not killed:
            break
    assert point > 15


def two_kills() -> Iterator[tuple[str, int, int]]:
    for scenario in SCENARIOS:
        yield from ((scenario, first, second) for first in range(60) for second in range(60))


@pytest.mark.exhaustive
@pytest.mark.parametrize("share", [0.002, pytest.param(0.025, marks=pytest.mark.exhaustive)])
def test_kill_during_a_resumed_run(share: float) -> None:
    cases = list(two_kills())
    for scenario, first, second in random.Random(0).sample(cases, int(share * len(cases))):
        options = prepare(scenario)
        killed_at(first, **options)
        killed_at(second, **{**options, "resume": True})
        assert_nothing_is_lost(scenario)
        recover(options)
        assert_is_result()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_failure_of_every_file_change(scenario: str) -> None:
    """With a full disk the message is one line that names a file, and a later run succeeds."""

    def fail(name: str, arguments: tuple[Any, ...]) -> None:
        path = arguments[0] if isinstance(arguments[0], (str, os.PathLike)) else None
        raise OSError(28, "No space left on device", *([str(path)] if path else []))

    failures = 0
    for point in itertools.count():
        options = prepare(scenario)
        undo = fail_at(point, fail)
        message = None
        try:
            project(**options)
        except (UserError, OSError) as e:
            message = str(e)
        finally:
            undo()
        failures += message is not None
        assert message is None or ("y.npy" in message and "\n" not in message), (point, message)
        assert_nothing_is_lost(scenario)
        recover(options)
        assert_is_result()
        if point > 80:
            break
    assert failures > 15


@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace")
def test_no_other_system_calls_change_files(tmp_path: Path) -> None:
    """According to strace, no other call creates, writes, renames or removes a file of the result."""
    program = (
        "from pathlib import Path; from sjlt.files import output; from sjlt.files.projection import project_file\n"
        "output.CHECKPOINT_SECONDS = 0\n"
        f"project_file(Path('x.npy'), Path('y.npy'), {K}, batch_rows=20)"
    )
    log = tmp_path / "strace"
    command = ["strace", "-f", "-y", "-o", log, "-e", "trace=!read,pread64,mmap,futex", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if "ptrace" in done.stderr or "PTRACE" in done.stderr:
        pytest.skip(f"strace is not allowed: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    called = {match[1] for line in log.read_text().splitlines() if (match := _CALL.match(line)) and "y.npy" in line}
    reading = {"newfstatat", "fstat", "stat", "lstat", "statfs", "statx", "close", "lseek", "flock", "ioctl", "fcntl"}
    counted = {"openat", "write", "ftruncate", "fsync", "rename", "link", "linkat", "unlink"}
    assert called - reading - {"access", "readlink", "getdents64", "poll"} <= counted
    assert {"openat", "write", "fsync", "rename", "unlink"} <= called


_CALL = re.compile(r"\d+ +(\w+)\(")


@pytest.mark.parametrize("budget", [1, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_random_kills(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL after a random time, repeatedly, until a run completes."""
    monkeypatch.undo()
    os.chdir(Path(__file__).parent)  # undo has left the test's directory
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        x = np.random.default_rng(0).normal(size=(20_000, 768)).astype(np.float32)
        np.save(f"{folder}/x.npy", x)
        np.save(f"{folder}/expected.npy", sjlt.Sketch(768, 64).project(x))
        command = [sys.executable, "-m", "sjlt", "project", "x.npy", "y.npy", "-k", "64", "--batch-rows", "50"]
        rng = random.Random(0)
        for number in range(budget):
            for path in Path(folder).glob("y.npy*"):
                path.unlink()
            options: list[str] = []
            for kill in itertools.count():
                with subprocess.Popen([*command, *options], cwd=folder, stderr=subprocess.PIPE, text=True) as process:
                    try:
                        said = process.communicate(timeout=rng.uniform(0.3, 1.5) + 0.2 * kill)[1]
                    except subprocess.TimeoutExpired:
                        process.kill()
                        said = process.communicate()[1]
                if process.returncode == 0:
                    break
                assert process.returncode == -signal.SIGKILL, said
                # A run that is killed after the commit, or the next one, reports that the result is complete.
                assert said == "" or "starting from the first row" in said or "complete already" in said
                options = ["--resume"]
            written = Path(folder, "y.npy").read_bytes()
            assert written == Path(folder, "expected.npy").read_bytes(), f"run {number}"
            left = sorted(path.name for path in Path(folder).iterdir())
            assert left == ["expected.npy", "x.npy", "y.npy", "y.npy.json"]
