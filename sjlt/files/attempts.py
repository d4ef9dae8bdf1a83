"""Files that appear under their name only when they are complete and on disk.

A writer fills a hidden file with a unique name, keeps it locked, and renames it at the end. Each writer of the same
file has its own hidden file. The lock distinguishes hidden files of live writers from orphans. On a file system without
locks, the host and process ID in the name are used instead, which works only on the writer's host.
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
    """Yield a temporary path to write to; rename it to `path` on success, remove it after an exception.

    Parameters
    ----------
    path : Path
    existing : {"replace", "keep", "refuse"}
        What to do if `path` exists by the end: replace it, or keep it and discard the new file; "refuse" also raises
        an error.

    Raises
    ------
    UserError
        If `existing` is "refuse" and `path` exists on exit.
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
        unlock_and_close(descriptor)


def _rename_or_discard(temporary: Path, path: Path, refuse: bool) -> None:
    try:
        rename_new(temporary, path)
    except FileExistsError:
        if refuse:
            raise UserError(
                f"{path}: appeared during this run and is kept; this result was discarded (--force replaces it)"
            ) from None
        temporary.unlink()


def rename_new(old: Path, new: Path) -> None:
    """Rename `old` to `new`; raise FileExistsError if `new` exists, even if it appeared just now.

    On a file system without hard links, the check and the rename are two separate steps.
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
    """Remove hidden files that dead writers of `name`, or of any file, left in `folder`; return their names."""
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
    """Whether `hidden` is a name that `create` gives to hidden files for the file `name`, or for any file if empty."""
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
        unlock_and_close(descriptor)


def _writer_is_dead(hidden: str) -> bool:
    """Whether a hidden file's name says that its writer was a process on this host, and that process has ended."""
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
        False if another process holds the lock; None if the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def unlock_and_close(descriptor: int) -> None:
    """Undo `lock` and close the file.

    Closing alone would leave it locked for as long as a child process that was forked meanwhile has a copy of the
    descriptor: until the child calls exec, which takes long on a busy machine.
    """
    try:
        with contextlib.suppress(OSError):  # the file system has no locks
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Make the directory entries of `folder` survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def named(out: Path) -> Iterator[None]:
    """Name the result in errors without a file name, as of writes, and in errors about hidden files."""
    try:
        yield
    except OSError as e:
        if e.errno is None or (e.filename is not None and not Path(e.filename).name.startswith(PREFIX)):
            raise
        raise OSError(e.errno, os.strerror(e.errno), str(out)) from None


def hidden_name(name: str) -> str:
    """A new name of a hidden file for one with the given name."""
    return f"{PREFIX}{name}~{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}{SUFFIX}"


def create(path: Path) -> tuple[Path, int]:
    """Create and lock a new hidden file for `path`; return its path and descriptor."""
    while True:
        temporary = path.with_name(hidden_name(path.name))
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        if lock(descriptor) is not False and temporary.exists():
            return temporary, descriptor
        unlock_and_close(descriptor)  # another process swept it before it was locked
