"""Streaming a file through a GPU: the same pipeline on CPU tensors, and on a GPU if available."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sjlt
from sjlt.files import device as devices
from sjlt.files import output, stream
from sjlt.files.errors import UserError
from sjlt.files.opening import open_source
from sjlt.files.projection import project_file
from sjlt.files.raw import Pieces, RawMatrix

N, D, K = 333, 70, 24
CASES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]


def integers(shape: tuple[int, int], dtype: str = "float32", order: Any = "C") -> np.ndarray:
    """Small integers: with nnz=4 every device gives exact results."""
    return np.asarray(np.random.default_rng(0).integers(-8, 9, shape), dtype, order=order)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty directory and small parts; afterwards check that no reader is still running."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stream, "PIECE_BYTES", 2000)
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "sjlt-read"]


def source(array: np.ndarray) -> RawMatrix:
    np.save("x.npy", array)
    opened = open_source(Path("x.npy"), print)
    assert isinstance(opened, RawMatrix)
    return opened


def through(array: np.ndarray, device: str, rows: int, dtype: str | None = None, start: int = 0) -> list[np.ndarray]:
    """The batches that the pipeline yields."""
    sketch, wanted = sjlt.Sketch(array.shape[1], K, seed=5), np.dtype(dtype or array.dtype)
    with source(array) as opened:
        return [y.copy() for y in stream.projected(opened, sketch, wanted, start, rows, torch.device(device))]


# ------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("device", CASES)
@pytest.mark.parametrize("rows", [1, 7, 111, N - 1, N, 10**6])
@pytest.mark.parametrize("order", ["C", "F"])
def test_batches(order: str, rows: int, device: str) -> None:
    x = integers((N, D), order=order)
    batches = through(x, device, rows)
    assert [len(batch) for batch in batches] == [min(rows, N - i) for i in range(0, N, rows)]
    np.testing.assert_array_equal(np.concatenate(batches), sjlt.Sketch(D, K, seed=5).project(x))


@pytest.mark.parametrize("device", CASES)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(0, D), (N, 0), (0, 0), (1, 1), (1, D), (N, 1)])
def test_thin_and_empty_files(shape: tuple[int, int], order: str, device: str) -> None:
    x = integers(shape, order=order)
    batches = through(x, device, 50)
    y = np.concatenate(batches) if batches else np.empty((0, K), np.float32)
    np.testing.assert_array_equal(y, sjlt.Sketch(shape[1], K, seed=5).project(x))


@pytest.mark.parametrize("device", CASES)
@pytest.mark.parametrize("given", ["float16", "float32", "float64"])
@pytest.mark.parametrize("wanted", ["float16", "float32", "float64"])
def test_dtypes(given: str, wanted: str, device: str) -> None:
    x = integers((N, D), given)
    y = np.concatenate(through(x, device, 100, wanted))
    assert y.dtype == wanted
    np.testing.assert_array_equal(y, sjlt.Sketch(D, K, seed=5).project(x.astype("float64")).astype(wanted))


@pytest.mark.parametrize("device", CASES)
@pytest.mark.parametrize("rest", [1, 49, 50, 51, 173])
def test_starting_at_a_later_row_gives_the_same_bytes(rest: int, device: str) -> None:
    """Including when fewer rows than a batch remain, which are projected like a full batch."""
    x = np.random.default_rng(0).normal(size=(200 + rest, D)).astype(np.float32)
    whole = np.concatenate(through(x, device, 50))
    assert np.concatenate(through(x, device, 50, start=200)).tobytes() == whole[200:].tobytes()


@pytest.mark.parametrize("readers", [1, 2, 30])
@pytest.mark.parametrize("slots", [1, 2, 9])
def test_readers_and_slots_do_not_matter(slots: int, readers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SLOTS", slots)
    monkeypatch.setattr(stream, "get_num_threads", lambda: readers)
    x = integers((N, D))
    np.testing.assert_array_equal(np.concatenate(through(x, "cpu", 20)), sjlt.Sketch(D, K, seed=5).project(x))


def test_parts_cover_a_batch_once() -> None:
    for order in "CF":
        x = integers((N, D), order=order)
        with source(x) as opened:
            batch = np.full((40, D), np.nan, np.float32, order=order)  # type: ignore[call-overload]
            for part in opened.pieces(batch, 100, 1000):
                opened.fill([part])
        np.testing.assert_array_equal(batch, x[100:140])


def test_reading_and_writing_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the caller holds a result, further batches are read into all other slots."""
    x, began, fill = integers((N, D)), list[int](), RawMatrix.fill

    def slow(self: RawMatrix, parts: Pieces) -> None:
        began.append(parts[0][1])
        fill(self, parts)

    monkeypatch.setattr(RawMatrix, "fill", slow)
    monkeypatch.setattr(stream, "PIECE_BYTES", 1 << 20)  # a batch is one part
    with (
        source(x) as opened,
        closing(stream.projected(opened, sjlt.Sketch(D, K), x.dtype, 0, 10, torch.device("cpu"))) as batches,
    ):
        for held in range(1, 5):
            next(batches)
            deadline = time.monotonic() + 10
            while len(began) < held + stream.SLOTS - 1 and time.monotonic() < deadline:
                time.sleep(0.001)
            assert len(began) == held + stream.SLOTS - 1


# ------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("device", CASES)
@pytest.mark.parametrize("order", ["C", "F"])
def test_failing_read_is_raised_after_the_batches_before_it(
    order: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, fill = integers((N, D), order=order), RawMatrix.fill
    broken = {"C": 205 * D * 4, "F": 205 * 4}[order]  # row 205: in Fortran order, within the first of the 70 columns

    def failing(self: RawMatrix, parts: Pieces) -> None:
        for part, position in parts:
            if position <= broken < position + part.nbytes:
                raise OSError(5, "Input/output error", "x.npy")
        fill(self, parts)

    monkeypatch.setattr(RawMatrix, "fill", failing)
    good = list[np.ndarray]()
    with source(x) as opened:
        batches = stream.projected(opened, sjlt.Sketch(D, K), x.dtype, 0, 50, torch.device(device))
        with pytest.raises(OSError, match="Input/output error"):
            good.extend(y.copy() for y in batches)
    np.testing.assert_array_equal(np.concatenate(good), sjlt.Sketch(D, K).project(x[:200]))


def test_failing_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr(sjlt.Sketch, "project", failing)
    with pytest.raises(RuntimeError, match="no more"):
        through(integers((N, D)), "cpu", 50)


@pytest.mark.parametrize("device", CASES)
def test_leaving_early(device: str) -> None:
    with source(integers((N, D))) as opened:
        batches = stream.projected(opened, sjlt.Sketch(D, K), np.dtype("float32"), 0, 10, torch.device(device))
        next(batches)
        batches.close()  # the fixture checks that no reader is left


# ------------------------------------------------------------------------------------- files


@pytest.fixture(params=CASES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device that `project_file` uses as a GPU: a real one, or the CPU through the same pipeline."""
    if request.param == "cpu":
        projected = stream.projected
        monkeypatch.setattr(devices, "use_gpu", lambda device, *_: device == "cuda")
        monkeypatch.setattr(devices, "device_name", lambda gpu: "Stand-in" if gpu else "cpu")
        monkeypatch.setattr(stream, "projected", lambda *a: projected(*a[:-1], torch.device("cpu")))
    return request.param


def project(**options: Any) -> None:
    given = {"source": Path("x.npy"), "out": Path("y.npy"), "n_components": K, "batch_rows": 10, "device": "cuda"}
    project_file(**{**given, **options})


def interrupted(rows: int, error: type[BaseException] = KeyboardInterrupt) -> Any:
    def progress(done: int, of: int) -> None:
        if done >= rows:
            raise error

    return progress


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("rows", [1, 100, None])
def test_file(rows: int | None) -> None:
    x = integers((N, D))
    np.save("x.npy", x)
    seen: list[tuple[int, int]] = []
    project(batch_rows=rows, progress=lambda *rows: seen.append(rows))
    np.save("expected.npy", sjlt.Sketch(D, K).project(x))
    assert Path("y.npy").read_bytes() == Path("expected.npy").read_bytes()
    assert not list(Path().glob("*partial*"))
    step = rows or N
    assert seen == [(min(i, N), N) for i in range(0, N + step, step)]


def test_description_names_the_device(device: str) -> None:
    np.save("x.npy", integers((N, D)))
    project()
    content = json.loads(Path("y.npy.json").read_text())
    assert content["device"] == ("Stand-in" if device == "cpu" else torch.cuda.get_device_name())
    project(device="cpu", out=Path("z.npy"))
    assert json.loads(Path("z.npy.json").read_text())["device"] == "cpu"


@pytest.mark.usefixtures("device")
def test_interrupted_run_continues_to_the_same_bytes() -> None:
    np.save("x.npy", np.random.default_rng(0).normal(size=(N, D)))
    project(out=Path("whole.npy"))
    for rows in (50, 120, 330):
        with pytest.raises(KeyboardInterrupt, match=f"^{rows} of {N} rows are kept, --resume continues$"):
            project(resume=rows > 50, progress=interrupted(rows))
    project(resume=True)
    assert Path("y.npy").read_bytes() == Path("whole.npy").read_bytes()
    assert not list(Path().glob("*partial*"))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("options", "message"),
    [({"device": "cpu"}, "device is cpu, was "), ({"batch_rows": 20}, "batch_rows is 20, was 10")],
)
def test_resume_requires_the_same_device_and_batches(options: dict[str, Any], message: str) -> None:
    np.save("x.npy", integers((N, D)))
    with pytest.raises(KeyboardInterrupt):
        project(progress=interrupted(100))
    with pytest.raises(UserError, match=message):
        project(resume=True, **options)


@pytest.mark.usefixtures("device")
def test_source_truncated_during_the_run() -> None:
    np.save("x.npy", integers((5000, D)))

    def cut(rows: int, of: int) -> None:
        with open("x.npy", "r+b") as file:
            file.truncate(1000)

    with pytest.raises(UserError, match=r"x.npy: (ends early|changed while it was read)"):
        project(progress=cut)
    assert [path.name for path in Path().iterdir()] == ["x.npy"]


@pytest.mark.usefixtures("device")
def test_disk_failure_during_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    np.save("x.npy", integers((N, D)))
    monkeypatch.setattr(output, "CHECKPOINT_SECONDS", 0)  # after each batch
    fill = RawMatrix.fill

    def failing(self: RawMatrix, parts: Pieces) -> None:
        if parts[0][1] > 200 * D * 4:
            raise OSError(5, "Input/output error", "x.npy")
        fill(self, parts)

    with monkeypatch.context() as patch:
        patch.setattr(RawMatrix, "fill", failing)
        with pytest.raises(UserError, match=f"^x.npy: Input/output error; 200 of {N} rows are kept, --resume"):
            project()
    project(resume=True)
    np.testing.assert_array_equal(np.load("y.npy"), sjlt.Sketch(D, K).project(np.load("x.npy")))


@pytest.mark.usefixtures("device")
def test_device_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    np.save("x.npy", integers((N, D)))

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 EiB.\nSee the documentation.")

    monkeypatch.setattr(torch, "empty_like", full)
    with pytest.raises(UserError, match=rf": CUDA out of memory. Tried to allocate 3 EiB.; 0 of {N} rows are kept$"):
        project()


@pytest.mark.gpu
def test_accuracy_equals_the_cpus() -> None:
    x = np.random.default_rng(0).normal(size=(20_000, 768)).astype(np.float32)
    np.save("x.npy", x)
    project(n_components=256, batch_rows=None)
    exact = sjlt.Sketch(768, 256).project(x.astype(np.float64))
    error = np.linalg.norm(np.load("y.npy") - exact, axis=1) / np.linalg.norm(x, axis=1)
    assert error.max() <= 1e-6


@pytest.mark.gpu
def test_file_of_many_batches() -> None:
    """With the parts and batches of a large file."""
    stream.PIECE_BYTES = 4 << 20  # the fixture restores it
    x = integers((300_001, 100))
    np.save("x.npy", x)
    project(batch_rows=None)
    np.testing.assert_array_equal(np.load("y.npy"), sjlt.Sketch(100, K).project(x))
