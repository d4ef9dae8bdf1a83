"""Interrupted runs: the files they leave, how they continue, and when that is refused. (Kills: test_kills.)"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sjlt
from sjlt.files import output
from sjlt.files.checksums import row_checksum
from sjlt.files.errors import UserError
from sjlt.files.projection import project_file

N, D, K = 1000, 40, 16


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.random.default_rng(0).normal(size=(N, D)).astype(np.float32))


def project(**options: Any) -> list[str]:
    """Project x.npy to y.npy and return the notes shown to the user."""
    notes: list[str] = []
    parameters = {"source": Path("x.npy"), "out": Path("y.npy"), "n_components": K, "batch_rows": 10}
    project_file(**{**parameters, "note": notes.append, **options})
    return notes


def stop_at(rows: int, error: type[BaseException] = KeyboardInterrupt) -> Callable[[int, int], None]:
    def progress(done: int, of: int) -> None:
        if done >= rows:
            raise error

    return progress


def interrupt(rows: int = 500, **options: Any) -> None:
    with pytest.raises(KeyboardInterrupt, match=f"^{rows} of {N} rows are kept, --resume continues$"):
        project(progress=stop_at(rows), **options)


def names() -> list[str]:
    return sorted(path.name for path in Path().iterdir())


def assert_is_result(k: int = K) -> None:
    np.save("reference.npy", np.load("x.npy") @ sjlt.Sketch(D, k).T)
    assert Path("y.npy").read_bytes() == Path("reference.npy").read_bytes()
    Path("reference.npy").unlink()
    assert names() == ["x.npy", "y.npy", "y.npy.json"]


# ------------------------------------------------------------------------------------- continuing


@pytest.mark.usefixtures("copied_descriptors")
def test_interrupted_run_continues() -> None:
    interrupt()
    assert names() == ["x.npy", "y.npy.partial", "y.npy.partial.json"]
    seen: list[int] = []
    assert project(resume=True, progress=lambda rows, of: seen.append(rows)) == []
    assert seen == list(range(500, N + 1, 10))
    assert_is_result()


def test_resume_starts_at_the_last_checkpoint() -> None:
    """Data after it is ignored, as after a kill: half a batch, or values that never reached the disk."""
    interrupt()
    with open("y.npy.partial", "r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(b"\xff" * 1001)
    project(resume=True)
    assert_is_result()


def zero_a_row() -> None:
    with open("y.npy.partial", "r+b") as file:
        file.seek(128 + 350 * K * 4)
        file.write(bytes(K * 4))


def swap_rows() -> None:
    with open("y.npy.partial", "r+b") as file:
        file.seek(128 + 350 * K * 4)
        first, second = file.read(K * 4), file.read(K * 4)
        file.seek(128 + 350 * K * 4)
        file.write(second + first)


def change_the_header() -> None:
    with open("y.npy.partial", "r+b") as file:
        file.seek(20)
        file.write(b"f8")


@pytest.mark.parametrize(
    ("damage", "kept"),
    [
        (zero_a_row, 300),
        (swap_rows, 300),
        (lambda: os.truncate("y.npy.partial", 128 + 250 * K * 4 + 3), 200),
        (lambda: os.truncate("y.npy.partial", 5), 0),
        (change_the_header, 0),
    ],
)
def test_damaged_rows_are_projected_again(damage: Callable[[], None], kept: int) -> None:
    interrupt(100)
    for rows in range(200, 600, 100):  # a segment with its own checksum ends at each of them
        interrupt(rows, resume=True)
    damage()
    (note,) = project(resume=True)
    assert note == (f"y.npy.partial: damaged from row {kept} on: {500 - kept} of 500 rows are projected again")
    assert_is_result()


@pytest.mark.parametrize("width", [1, 2, 3, 8, 11, 256, 260])
def test_checksums_detect_changes(width: int) -> None:
    """Checksums detect any changed byte, swapped words and swapped rows, and do not depend on batches."""
    rng = np.random.default_rng(0)
    content = rng.integers(0, 256, (6, width), np.uint8)
    whole = row_checksum(content, 0)
    assert row_checksum(content[2:], row_checksum(content[:2], 0)) == whole
    for place in range(content.size):
        changed = content.copy()
        changed.flat[place] ^= rng.integers(1, 256, dtype=np.uint8)
        assert row_checksum(changed, 0) != whole
    assert row_checksum(content[[1, 0, 2, 3, 4, 5]], 0) != whole
    if width > 8:
        assert row_checksum(np.roll(content, 8, axis=1), 0) != whole


def test_resumed_cpu_run_uses_the_recorded_batch_size() -> None:
    """Batch sizes do not affect the bytes, so another one is accepted, and the recorded one is used."""
    interrupt()
    assert project(resume=True, batch_rows=20) == []
    assert json.loads(Path("y.npy.json").read_text())["batch_rows"] == 10
    assert project(resume=True, batch_rows=None) == ["y.npy: complete already, from the same source and parameters"]
    assert_is_result()


def test_repeated_interrupts() -> None:
    interrupt(100)
    for rows in range(200, N, 100):
        interrupt(rows, resume=True)
    project(resume=True)
    assert_is_result()


def test_interrupt_before_the_first_row_leaves_nothing() -> None:
    with pytest.raises(KeyboardInterrupt, match=f"^0 of {N} rows are kept$"):
        project(progress=stop_at(0))
    assert names() == ["x.npy"]


def test_resume_without_a_leftover_starts_anew() -> None:
    assert project(resume=True) == [
        "y.npy.partial: no such file, so there is nothing to resume: starting from the first row"
    ]
    assert_is_result()


def test_resume_of_a_complete_result_does_nothing() -> None:
    project()
    before = Path("y.npy").stat()
    assert project(resume=True) == ["y.npy: complete already, from the same source and parameters"]
    assert Path("y.npy").stat() == before
    with pytest.raises(UserError, match=r"y.npy: exists and is not this result: sketch.n_components is 8, was 16"):
        project(resume=True, n_components=8)
    project(resume=True, force=True, n_components=8)
    assert_is_result(8)


def test_leftover_needs_resume_or_force() -> None:
    interrupt()
    with pytest.raises(UserError, match=r"y.npy.partial: left by an interrupted run \(--resume continues it, --force"):
        project()
    project(force=True)
    assert_is_result()


def test_old_result_is_kept_until_the_new_one_is_complete() -> None:
    project(n_components=8)
    old = Path("y.npy").read_bytes()
    interrupt(force=True)
    assert Path("y.npy").read_bytes() == old
    with pytest.raises(UserError, match=r"y.npy: exists \(--force replaces it\)"):
        project(resume=True)
    project(resume=True, force=True)
    assert_is_result()


# ------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_components": 8}, "sketch.n_components is 8, was 16; result.shape is [1000, 8], was [1000, 16]"),
        ({"nnz": 2}, "sketch.nnz is 2, was 4"),
        ({"seed": 7}, "sketch.seed is 7, was 0"),
        ({"dtype": "float64"}, "result.dtype is float64, was float32"),
    ],
)
def test_other_parameters(options: dict[str, Any], message: str) -> None:
    interrupt()
    before = {name: Path(name).read_bytes() for name in names()}
    with pytest.raises(UserError) as refused:
        project(resume=True, **options)
    assert str(refused.value) == f"y.npy.partial: cannot be resumed: {message} (--force alone starts over)"
    assert {name: Path(name).read_bytes() for name in names()} == before


def touch() -> None:
    os.utime("x.npy", ns=(1, 1))


def replace_with(array: np.ndarray) -> Callable[[], None]:
    return lambda: np.save("x.npy", array)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (touch, "source.mtime_ns is 1, was "),
        (replace_with(np.zeros((N, D))), "source.dtype is float64, was float32"),
        (replace_with(np.zeros((N + 1, D), np.float32)), "source.shape is [1001, 40], was [1000, 40]"),
        (replace_with(np.zeros((N, D), np.float32, order="F")), "source.order is F, was C"),
        (lambda: os.truncate("x.npy", 160129), "source.size is 160129, was 160128"),
    ],
)
def test_changed_source(change: Callable[[], None], message: str) -> None:
    interrupt()
    change()
    with pytest.raises(UserError) as refused:
        project(resume=True)
    assert message in str(refused.value)


def test_renamed_source() -> None:
    interrupt()
    os.rename("x.npy", "z.npy")
    with pytest.raises(UserError, match=r"source.name is z.npy, was x.npy"):
        project(resume=True, source=Path("z.npy"))


def test_other_library_version(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt()
    monkeypatch.setattr("sjlt.files.projection.__version__", "9.9")
    with pytest.raises(UserError, match=f"sjlt is 9.9, was {sjlt.__version__}"):
        project(resume=True)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda: Path("y.npy.partial.json").unlink(), "cannot be resumed without y.npy.partial.json"),
        (lambda: Path("y.npy.partial.json").write_text("{"), "y.npy.partial.json: not JSON"),
    ],
)
def test_damaged_leftovers(damage: Callable[[], None], message: str) -> None:
    interrupt()
    damage()
    with pytest.raises(UserError) as refused:
        project(resume=True)
    assert message in str(refused.value)


@pytest.mark.parametrize("rows", [-1, N + 1, "500", True, None])
def test_damaged_row_count(rows: object) -> None:
    interrupt()
    state = json.loads(Path("y.npy.partial.json").read_text())
    Path("y.npy.partial.json").write_text(json.dumps({**state, "rows_done": rows}))
    with pytest.raises(UserError, match=f"rows_done is {rows!r}, must be an integer from 0 to {N}"):
        project(resume=True)


@pytest.mark.parametrize("options", [{"resume": True}, {"force": True}])
def test_concurrent_runs(options: dict[str, Any]) -> None:
    def meddle(rows: int, of: int) -> None:
        if rows == 500:
            with pytest.raises(UserError, match=r"y.npy.partial: another process is writing it"):
                project(**options)

    project(progress=meddle)
    assert_is_result()


def test_failing_disk_keeps_the_last_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "CHECKPOINT_SECONDS", 0)
    fsync, calls = os.fsync, []

    def failing(file: int) -> None:
        calls.append(file)
        if len(calls) == 100:
            raise OSError(5, "Input/output error")
        fsync(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(
            UserError, match=r"^y.npy.partial(.json)?: Input/output error; \d+0 of 1000 rows are kept, --resume"
        ):
            project()
    assert "y.npy" not in names()
    project(resume=True)
    assert_is_result()


# ------------------------------------------------------------------------------------- subprocesses


LARGE = (40_000, 768)  # 123 MB


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def receive_sigint() -> Iterator[None]:
    """Make processes receive SIGINT even if this one, from which they inherit it, was started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def start(device: str, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "sjlt", "project", "large.npy", "y.npy", "-k", "256", "--batch-rows", "16"]
    return subprocess.Popen([*command, "--device", device, *options], stderr=subprocess.PIPE, text=True)


def wait_until_part_way(process: subprocess.Popen[str], share: float) -> None:
    partial, size = Path("y.npy.partial"), 128 + LARGE[0] * 256 * 4
    while process.poll() is None:
        with contextlib.suppress(FileNotFoundError):
            if partial.stat().st_size >= share * size:
                return
        time.sleep(0.001)
    pytest.fail(f"ended before it was {share:.0%} on its way: {process.communicate()}")


@pytest.fixture
def large(device: Any) -> bytes:
    """A large file, and the bytes of its uninterrupted projection."""
    x = np.random.default_rng(1).normal(size=(1000, LARGE[1])).astype(np.float32)
    np.save("large.npy", np.concatenate([x + i for i in range(LARGE[0] // 1000)]))
    project_file(Path("large.npy"), Path("whole.npy"), 256, batch_rows=16, device=device)
    return Path("whole.npy").read_bytes()


@pytest.mark.exhaustive
def test_kill_and_resume(large: bytes, device: str) -> None:
    share = random.Random().uniform(0.05, 0.7)
    with start(device) as process:
        wait_until_part_way(process, share)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert not Path("y.npy").exists()
    with start(device, "--resume") as process:  # once more, now that there may be rows to resume from
        wait_until_part_way(process, share + 0.1)
        process.kill()
    assert not Path("y.npy").exists()
    with start(device, "--resume") as process:
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, ""), f"killed at {share:.0%}"
    assert Path("y.npy").read_bytes() == large, f"killed at {share:.0%}"
    assert not list(Path().glob("y.npy.partial*"))


@pytest.mark.usefixtures("receive_sigint")
def test_control_c(large: bytes, device: str) -> None:
    with start(device) as process:
        wait_until_part_way(process, 0.02)  # early: a busy machine may pause us for long
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    command = f"sjlt project large.npy y.npy -k 256 --batch-rows 16 --device {device} --resume"
    assert said.startswith("Interrupted: ")
    assert said.endswith(f" of {LARGE[0]} rows are kept, --resume continues: {command}\n")
    assert said.count("\n") == 1
    done = json.loads(Path("y.npy.partial.json").read_text())["rows_done"]
    assert done >= 0.02 * LARGE[0] - 16
    with start(device, "--resume") as process:
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "")
    assert Path("y.npy").read_bytes() == large
