"""Files that appear under their name only once they are whole and on disk.

A writer fills a hidden file with a unique name, which it keeps locked, and renames it at the end. Several writers of
one file each have a hidden file of their own, and a lock tells the hidden files of living writers from orphans. Where
the file system has no locks, the host and process in the name do, but only on the writer's host.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from .errors import UserError

PREFIX, SUFFIX = ".sjlt-", ".tmp"
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


@contextlib.contextmanager
def appearing(path: Path, *, existing: Literal["replace", "keep", "refuse"] = "replace") -> Iterator[Path]:
    """A context in which to write `path` under another name: leaving it renames, an exception removes.

    Parameters
    ----------
    path : Path
    existing : {"replace", "keep", "refuse"}
        What happens to a file that has the name by then. "keep" removes the one that was written; "refuse" also raises.

    Raises
    ------
    UserError
        With "refuse", if the file exists when the context is left.
    """
    temporary, descriptor = create(path)
    try:
        yield temporary
        os.fsync(descriptor)
        if existing == "replace":
            os.replace(temporary, path)
        else:
            _rename_or_discard(temporary, path, refuse=existing == "refuse")
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def _rename_or_discard(temporary: Path, path: Path, refuse: bool) -> None:
    try:
        rename_new(temporary, path)
    except FileExistsError:
        if refuse:
            raise UserError(
                f"{path}: appeared meanwhile and is kept; this result was discarded (--force replaces it)"
            ) from None
        temporary.unlink()


def rename_new(old: Path, new: Path) -> None:
    """Rename `old` to `new`; FileExistsError if `new` exists, even if it appeared just now.

    On a file system without hard links the check and the rename are two steps.
    """
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError as e:
        if e.errno not in _NO_HARD_LINKS:
            raise
        if os.path.lexists(new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new)) from None
        os.rename(old, new)
    else:
        os.unlink(old)


def sweep(folder: Path, name: str = "") -> list[str]:
    """Remove what dead writers of the file `name` left in `folder`, or of all files; return the names removed."""
    swept = []
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if not _is_hidden_file_of(entry.name, name) or not entry.is_file(follow_symlinks=False):
                continue
            with contextlib.suppress(FileNotFoundError, PermissionError):
                if _remove_orphan(Path(entry.path)):
                    swept.append(entry.name)
    return swept


def _is_hidden_file_of(hidden: str, name: str) -> bool:
    """Whether `create` gives such a name to a hidden file for the file `name`, or for any file."""
    of, tilde, _ = hidden.rpartition("~")
    return bool(tilde) and hidden.endswith(SUFFIX) and (of == PREFIX + name if name else of.startswith(PREFIX))


def _remove_orphan(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        locked = lock(descriptor)
        orphan = _writer_is_dead(path.name) if locked is None else locked
        if orphan:
            path.unlink()
        return orphan
    finally:
        os.close(descriptor)


def _writer_is_dead(hidden: str) -> bool:
    """Whether the name of a hidden file tells that its writer was a process of this host that has ended."""
    host, _, pid = hidden.rpartition("~")[2].removesuffix(SUFFIX).rpartition("-")[0].rpartition("-")
    if host != socket.gethostname() or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass
    return False


def lock(descriptor: int) -> bool | None:
    """Lock an open file against other processes.

    Returns
    -------
    bool or None
        False where another process holds the lock; None where the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def create(path: Path) -> tuple[Path, int]:
    """A new, locked hidden file for `path`, and its descriptor."""
    while True:
        unique = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        temporary = path.with_name(f"{PREFIX}{path.name}~{unique}{SUFFIX}")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        if lock(descriptor) is not False and temporary.exists():
            return temporary, descriptor
        os.close(descriptor)  # swept between its creation and its lock
