"""Other files, links and FIFOs with a result's names: none is lost, followed or waited for."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sjlt
from sjlt.files import atomic, output
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


def names() -> list[str]:
    return sorted(path.name for path in Path().iterdir())


def assert_is_result(k: int = K) -> None:
    np.save("reference.npy", np.load("x.npy") @ sjlt.Sketch(D, k).T)
    assert Path("y.npy").read_bytes() == Path("reference.npy").read_bytes()
    Path("reference.npy").unlink()
    assert names() == ["x.npy", "y.npy", "y.npy.json"]


@pytest.mark.parametrize("name", ["y.npy", "y.npy.json"])
def test_files_that_appear_during_the_run_are_kept(name: str) -> None:
    def appear(rows: int, of: int) -> None:
        Path(name).write_bytes(b"precious")

    with pytest.raises(UserError) as refused:
        project(progress=appear)
    assert str(refused.value) == (
        f"{name}: appeared during this run and is kept; all {N} rows are in y.npy.partial (--resume --force puts them "
        "in its place)"
    )
    assert Path(name).read_bytes() == b"precious"
    assert names() == sorted(["x.npy", "y.npy.partial", "y.npy.partial.json", name])
    project(resume=True, force=True)
    assert_is_result()


@pytest.mark.parametrize("step", ["link", "rename"])
def test_file_that_appears_at_the_last_moment_is_kept(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the last check and the rename, on file systems with and without hard links."""
    link = os.link

    def racing(old: Any, new: Any, **options: Any) -> None:
        if Path(new).name == "y.npy":
            Path("y.npy").write_bytes(b"precious")
        if step == "rename":
            raise PermissionError(1, "Operation not permitted")
        link(old, new, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", racing)
        with pytest.raises(UserError, match=r"^y.npy: appeared during this run and is kept"):
            project()
    assert Path("y.npy").read_bytes() == b"precious"
    assert names() == ["x.npy", "y.npy", "y.npy.partial", "y.npy.partial.json"]


def test_file_systems_without_hard_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    project()
    assert_is_result()


@pytest.mark.parametrize("change", [lambda: os.unlink("y.npy.partial"), lambda: os.replace("z", "y.npy.partial")])
def test_lost_partial_file_is_reported(change: Callable[[], None]) -> None:
    Path("z").write_bytes(b"precious")

    def once(rows: int, of: int) -> None:
        if rows == 500:
            change()

    with pytest.raises(UserError, match=r"^y.npy.partial: was removed or replaced while it was written: nothing is"):
        project(progress=once)
    assert "y.npy" not in names()
    assert Path("z" if Path("z").exists() else "y.npy.partial").read_bytes() == b"precious"


def test_force_keeps_the_old_result_until_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("y.npy").write_bytes(b"old")
    replace = os.replace

    def failing(old: Any, new: Any) -> None:
        if Path(new).name == "y.npy":
            raise OSError(5, "Input/output error", str(new))
        replace(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing)
        with pytest.raises(UserError, match=r"^y.npy: Input/output error"):
            project(force=True)
    assert Path("y.npy").read_bytes() == b"old"


@pytest.mark.parametrize("name", ["y.npy.partial", "y.npy.partial.json", "y.npy.json"])
@pytest.mark.parametrize("kind", ["symbolic link", "FIFO", "directory"])
@pytest.mark.parametrize("options", [{}, {"force": True}, {"resume": True}])
def test_special_files_are_not_followed_or_waited_for(name: str, kind: str, options: dict[str, Any]) -> None:
    Path("precious").write_bytes(b"precious")
    make: dict[str, Callable[[], object]] = {
        "symbolic link": lambda: os.symlink("precious", name),
        "FIFO": lambda: os.mkfifo(name),
        "directory": lambda: os.mkdir(name),
    }
    make[kind]()
    with pytest.raises(UserError, match=f"^{name}: exists and is not a regular file$"):
        project(**options)
    assert Path("precious").read_bytes() == b"precious"
    assert names() == sorted(["x.npy", "precious", name])


def test_planted_link_is_not_written_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the checks and the creation of OUT.partial."""
    Path("precious").write_bytes(b"precious")
    check = output.Output._check_space

    def plant(self: output.Output) -> None:
        check(self)
        os.symlink("precious", "y.npy.partial")

    monkeypatch.setattr(output.Output, "_check_space", plant)
    with pytest.raises(OSError, match=r"y\.npy\.partial"):
        project(force=True)
    assert Path("precious").read_bytes() == b"precious"


@pytest.mark.parametrize("name", ["y.npy.json.tmp", "y.npy.partial.json.tmp"])
def test_files_with_temporary_names_are_left_alone(name: str) -> None:
    """Names that older versions used."""
    os.rename("x.npy", name)
    Path("precious").write_bytes(b"precious")
    os.symlink("precious", "y.npy.partial.json.tmp" if name == "y.npy.json.tmp" else "y.npy.json.tmp")
    before = Path(name).read_bytes()
    project(source=Path(name))
    assert Path(name).read_bytes() == before
    assert Path("precious").read_bytes() == b"precious"


def test_source_with_a_hidden_name_is_refused() -> None:
    name = ".sjlt-y.npy.json~host-1-00.tmp"
    os.rename("x.npy", name)
    with pytest.raises(UserError, match=r"has the name of a temporary file for y.npy.json: rename it first"):
        project(source=Path(name))


def test_errors_name_the_visible_file(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError) as absent:
        atomic.write_whole(Path("absent/y.json"), b"", replace=True)
    with pytest.raises(FileExistsError) as existing:
        atomic.write_whole(Path("x.npy"), b"", replace=False)
    Path("d").mkdir()
    with pytest.raises(IsADirectoryError) as folder:
        atomic.write_whole(Path("d"), b"", replace=True)
    assert [e.value.filename for e in (absent, existing, folder)] == ["absent/y.json", "x.npy", "d"]

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(5, "Input/output error", str(next(Path().glob(".sjlt-*"))))

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match=r"\[Errno 5\] Input/output error: 'y.json'"):
        atomic.write_whole(Path("y.json"), b"", replace=True)
    assert names() == ["d", "x.npy"]


def test_a_result_with_two_names_is_not_emptied() -> None:
    """A kill between the two steps of a rename leaves OUT.partial as another name of OUT."""
    project()
    old = Path("y.npy").read_bytes()
    os.link("y.npy", "y.npy.partial")

    def interrupt(rows: int, of: int) -> None:
        assert Path("y.npy").read_bytes() == old
        raise RuntimeError

    with pytest.raises(RuntimeError):
        project(force=True, n_components=K + 1, progress=interrupt)
    assert Path("y.npy").read_bytes() == old
    os.link("y.npy", "y.npy.partial")
    project(force=True, n_components=K + 1)
    assert_is_result(K + 1)


def test_links_are_not_replaced() -> None:
    Path("precious").write_bytes(b"precious")
    os.symlink("precious", "y.npy")
    with pytest.raises(UserError, match=r"^y\.npy: is a symbolic link to precious, which the result would replace$"):
        project(force=True)
    assert Path("y.npy").readlink() == Path("precious")
    assert names() == ["precious", "x.npy", "y.npy"]


def test_sources_older_than_1970() -> None:
    os.utime("x.npy", (-315_619_200, -315_619_200))

    def interrupt(rows: int, of: int) -> None:
        if rows > N // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        project(progress=interrupt)
    project(resume=True)
    assert_is_result()
