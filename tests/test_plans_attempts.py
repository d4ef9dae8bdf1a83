"""Files that appear whole: what happens to a file that has the name already, and which hidden files are swept."""

import errno
import os

import pytest

from sjlt.files import attempts
from sjlt.files.errors import UserError


def left(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("hard_links", [True, False])
@pytest.mark.parametrize("existing", ["replace", "keep", "refuse"])
def test_a_name_that_was_taken_meanwhile(tmp_path, monkeypatch, existing, hard_links):
    def refuse(*arguments, **options):
        raise OSError(errno.EPERM, "no hard links")

    if not hard_links:
        monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "y.npy"
    with attempts.appearing(path, existing=existing) as temporary:
        temporary.write_bytes(b"first")
    assert left(tmp_path) == {"y.npy": b"first"}

    def write_again():
        with attempts.appearing(path, existing=existing) as temporary:
            temporary.write_bytes(b"second")

    if existing == "refuse":
        with pytest.raises(UserError, match=r"y\.npy: appeared meanwhile and is kept"):
            write_again()
    else:
        write_again()
    assert left(tmp_path) == {"y.npy": b"second" if existing == "replace" else b"first"}


def test_a_name_taken_between_check_and_rename_is_kept(tmp_path, monkeypatch):
    path = tmp_path / "y.npy"
    fsync = os.fsync

    def fsync_while_another_writer_finishes(descriptor):
        fsync(descriptor)
        monkeypatch.setattr(attempts.Path, "exists", lambda path: False)  # a check would have come too early
        path.write_bytes(b"first")

    monkeypatch.setattr(os, "fsync", fsync_while_another_writer_finishes)
    with attempts.appearing(path, existing="keep") as temporary:
        temporary.write_bytes(b"second")
    monkeypatch.undo()
    assert left(tmp_path) == {"y.npy": b"first"}
