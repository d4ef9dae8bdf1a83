"""Files that appear atomically: existing files of the same name, and which hidden files are swept."""

import errno
import os
import socket
import subprocess
import sys

import pytest
from helpers.plans import ROWS, K, result, shards

import sjlt
from sjlt.files import atomic, attempts
from sjlt.files.errors import UserError


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("hard_links", [True, False])
@pytest.mark.parametrize("existing", ["replace", "keep", "refuse"])
def test_existing_file(tmp_path, monkeypatch, existing, hard_links):
    def refuse(*arguments, **options):
        raise OSError(errno.EPERM, "no hard links")

    if not hard_links:
        monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "y.npy"
    with attempts.appearing(path, existing=existing) as temporary:
        temporary.write_bytes(b"first")
    assert contents(tmp_path) == {"y.npy": b"first"}

    def write_again():
        with attempts.appearing(path, existing=existing) as temporary:
            temporary.write_bytes(b"second")

    if existing == "refuse":
        with pytest.raises(UserError, match=r"y\.npy: appeared during this run and is kept"):
            write_again()
    else:
        write_again()
    assert contents(tmp_path) == {"y.npy": b"second" if existing == "replace" else b"first"}


def test_file_created_between_check_and_rename_is_kept(tmp_path, monkeypatch):
    path = tmp_path / "y.npy"
    fsync = os.fsync

    def fsync_while_another_writer_finishes(descriptor):
        fsync(descriptor)
        monkeypatch.setattr(attempts.Path, "exists", lambda path: False)  # an existence check would come too early
        path.write_bytes(b"first")

    monkeypatch.setattr(os, "fsync", fsync_while_another_writer_finishes)
    with attempts.appearing(path, existing="keep") as temporary:
        temporary.write_bytes(b"second")
    monkeypatch.undo()
    assert contents(tmp_path) == {"y.npy": b"first"}


# ------------------------------------------------------------------------------------- orphans


def orphan(folder, name, host="elsewhere", pid=1):
    path = folder / f".sjlt-{name}~{host}-{pid}-0123456789ab.tmp"
    path.write_bytes(b"half")
    return path


def without_locks(descriptor, operation):
    raise OSError(errno.ENOLCK, "No locks available")


def dead_process():
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    return int(done.stdout)


def test_without_locks_only_dead_local_processes_are_swept(tmp_path, monkeypatch):
    monkeypatch.setattr(attempts.fcntl, "flock", without_locks)
    here, dead = socket.gethostname(), dead_process()
    own = orphan(tmp_path, "y.npy", here, dead)
    kept = [
        orphan(tmp_path, "y.npy", f"not-{here}", dead),
        orphan(tmp_path, "y.npy", here, os.getppid()),
        orphan(tmp_path, "y.npy", here, "1" * 30),
        orphan(tmp_path, "y.npy", here, "x"),
    ]
    with attempts.appearing(tmp_path / "y.npy") as living:
        assert attempts.sweep(tmp_path) == [own.name]
        assert sorted(tmp_path.iterdir()) == sorted([living, *kept])
    assert (tmp_path / "y.npy").exists()


def test_without_locks_files_can_be_continued(tmp_path, monkeypatch):
    monkeypatch.setattr(attempts.fcntl, "flock", without_locks)
    for _ in range(2):
        attempts.unlock_and_close(atomic.open_locked(tmp_path / "y.npy.partial"))


def test_plans_run_without_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(attempts.fcntl, "flock", without_locks)
    shards(tmp_path / "in")
    sjlt.plan(tmp_path / "in", tmp_path / "out", K).run(workers=1)
    assert len(result(tmp_path / "out")) == sum(ROWS)


def test_forked_children_keep_no_plan_locked(tmp_path, copied_descriptors):
    shards(tmp_path / "in")
    plan = sjlt.plan(tmp_path / "in", tmp_path / "out", K)
    plan.run_part(0)
    plan.run(workers=1)
    plan.commit()
    assert len(result(tmp_path / "out")) == sum(ROWS)
    assert copied_descriptors


def test_forked_children_keep_no_file_locked(tmp_path, copied_descriptors):
    for _ in range(2):
        attempts.unlock_and_close(atomic.open_locked(tmp_path / "y.npy.partial"))
    with pytest.raises(FileNotFoundError), attempts.appearing(tmp_path / "z.npy") as temporary:
        temporary.rename(hidden := orphan(tmp_path, "z.npy"))
    assert attempts.sweep(tmp_path) == [hidden.name]
    assert copied_descriptors


@pytest.mark.parametrize("name", ["o**.npy", "o[1].parquet", "a~b.npy", "[", "-", "y.npy"])
def test_names_are_not_patterns(tmp_path, name):
    own = orphan(tmp_path, name)
    others = [orphan(tmp_path, other) for other in ("o1.parquet", "b.npy", f"{name}~b", f"{name}.json", "oo.npy")]
    assert attempts.sweep(tmp_path, name) == [own.name]
    assert attempts.sweep(tmp_path) == sorted(other.name for other in others)


def test_only_regular_files_are_swept(tmp_path):
    folder, link, pipe = (tmp_path / f".sjlt-y.npy~{name}.tmp" for name in "abc")
    folder.mkdir()
    link.symlink_to(tmp_path / "precious")
    (tmp_path / "precious").touch()
    os.mkfifo(pipe)
    assert attempts.sweep(tmp_path, "y.npy") == attempts.sweep(tmp_path) == []
    assert sorted(tmp_path.iterdir()) == sorted([folder, link, pipe, tmp_path / "precious"])
    assert attempts.sweep(tmp_path / "absent") == []
