"""Small files written atomically, without ever replacing a file by accident.

Content is first written to a hidden file (see `attempts`). That file is created with O_EXCL, so neither an existing
file nor the target of a planted link is ever overwritten.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

from .attempts import PREFIX, SUFFIX, create, lock, rename_new, sync_folder, unlock_and_close
from .errors import UserError


def write_whole(path: Path, content: bytes, *, replace: bool) -> None:
    """Write a file that appears only when it is complete and on disk.

    Raises FileExistsError if `replace` is False and `path` exists, even if it appeared just now.
    """
    write_by(path, lambda descriptor: write_all(descriptor, content), replace=replace)


def write_by(path: Path, write: Callable[[int], None], *, replace: bool) -> None:
    """Like `write_whole`, but `write` writes the content to an open descriptor."""
    try:
        temporary, descriptor = create(path)
    except OSError as e:  # it names the hidden file
        raise OSError(e.errno, e.strerror, str(path)) from None
    try:
        write(descriptor)
        os.fsync(descriptor)
        if replace:
            os.replace(temporary, path)
        else:
            rename_new(temporary, path)
    except BaseException as e:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(e, OSError) and e.errno is not None and e.filename in (None, str(temporary), temporary):
            raise OSError(e.errno, e.strerror, str(path)) from None
        raise
    finally:
        unlock_and_close(descriptor)
    sync_names(path)


def sync_names(path: Path) -> None:
    """Make the directory entry of `path` survive a power failure."""
    try:
        sync_folder(path.parent)
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from None


@contextlib.contextmanager
def whole_file(path: Path, *, replace: bool = True) -> Iterator[BytesIO]:
    """Yield a buffer; write its content with `write_whole` if the block ends without an exception."""
    buffer = BytesIO()
    yield buffer
    write_whole(path, buffer.getvalue(), replace=replace)


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    """Write all bytes at the descriptor's current position."""
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def is_temporary_of(path: Path, name: str) -> bool:
    """Whether `name` could be the hidden file of a writer of `path`."""
    return name.startswith(f"{PREFIX}{path.name}~") and name.endswith(SUFFIX)


def open_locked(path: Path) -> int:
    """Open or create the regular file `path` and lock it against other writers until `unlock_and_close`."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o666)
    try:
        if lock(descriptor) is False:
            raise UserError(f"{path}: another process is writing it")
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path}: exists and is not a regular file")
        try:
            same = os.path.samestat(os.lstat(path), status)
        except FileNotFoundError:
            same = False
        if not same:
            raise UserError(f"{path}: another process has just finished it")
    except BaseException:
        unlock_and_close(descriptor)
        raise
    return descriptor
