"""A file that is written row by row, can be continued after a kill, and bears its name only when it is whole.

The result OUT has four names. While rows are being written they lie in ``OUT.partial``, and ``OUT.partial.json``
says what they are and how many of them even a power cut would leave. When all are there ``OUT.json`` is written,
and then ``OUT.partial`` becomes OUT: so OUT never stands without its description.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable
from io import BytesIO, FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

CHECKPOINT_SECONDS = 1.0  # about as much work is lost by a kill


class UserError(Exception):
    """A request that cannot be met. The message is one line for whoever asked, with the numbers."""


class Output:
    """An ``.npy`` file of which whole rows are appended, which bears its name only when all of them are there.

    Use it in a ``with`` block: append to it, then `commit`. `rows` counts what has been appended, in this process
    and in those before it; `safe` what a later one can continue from.
    """

    def __init__(
        self,
        path: Path,
        description: dict[str, Any],
        *,
        resume: bool,
        force: bool,
        note: Callable[[str], None],
    ) -> None:
        self.path, self.description = path, description
        self.sidecar, self.partial = _beside(path, ".json"), _beside(path, ".partial")
        self.state = _beside(self.partial, ".json")
        self.shape: tuple[int, int] = tuple(description["result"]["shape"])
        self.dtype: np.dtype = np.dtype(description["result"]["dtype"])
        self.rows = self.safe = 0
        self.complete = resume and not self.partial.exists() and self._is_complete(force)
        if self.complete:
            self.state.unlink(missing_ok=True)
            return
        if not force:
            self._refuse_to_overwrite(resume)
        if resume and not self.partial.exists():
            note(f"{self.partial}: no such file, nothing to resume: starting from the first row")
        self._check_space()
        self._file = _open_locked(self.partial)
        try:
            if resume:
                self.rows = self.safe = self._resumed_rows()
        except BaseException:
            self._file.close()
            raise
        try:
            self._begin()
        except BaseException:
            self._close()
            raise

    # ---------------------------------------------------------------------------- may it begin, and where

    def _is_complete(self, force: bool) -> bool:
        """Whether the result is there already. If there is another in its place, only `force` goes on."""
        if not self.path.exists():
            return False
        different = differences(read_json(self.sidecar), self.description) if self.sidecar.exists() else ["no JSON"]
        size, wanted = self.path.stat().st_size, self._position(self.shape[0])
        if size != wanted:
            different.append(f"size is {wanted}, was {size}")
        if different and not force:
            raise UserError(f"{self.path}: exists and is not this result: {'; '.join(different)} (--force replaces it)")
        return not different

    def _refuse_to_overwrite(self, resume: bool) -> None:
        if os.path.lexists(self.path):
            raise UserError(f"{self.path}: exists (--force replaces it)")
        if self.sidecar.exists() and read_json(self.sidecar) != self.description:
            raise UserError(f"{self.sidecar}: exists (--force replaces it)")
        if self.partial.exists() and not resume:
            raise UserError(f"{self.partial}: left by an interrupted run (--resume continues it, --force starts anew)")

    def _check_space(self) -> None:
        held = self.partial.stat().st_size if self.partial.exists() else 0
        needed, free = self._position(self.shape[0]) - held, shutil.disk_usage(self.path.parent).free
        if needed > free:
            raise UserError(f"{self.path}: needs {needed} bytes, the file system has {free} free")

    def _resumed_rows(self) -> int:
        """The rows of the partial file up to its last checkpoint."""
        size = os.fstat(self._file.fileno()).st_size
        if size == 0:  # killed before it wrote anything, or never begun
            return 0
        if not self.state.exists():
            raise UserError(f"{self.partial}: cannot be resumed without {self.state} (--force alone starts anew)")
        state = read_json(self.state)
        rows: Any = state.pop("rows_done", None)
        if different := differences(state, self.description):
            raise UserError(f"{self.partial}: cannot be resumed: {'; '.join(different)} (--force alone starts anew)")
        if type(rows) is not int or not 0 <= rows <= self.shape[0]:
            raise UserError(f"{self.state}: rows_done is {rows!r}, must be from 0 to {self.shape[0]}")
        if rows and size < self._position(rows):
            raise UserError(
                f"{self.partial}: truncated: {rows} rows take {self._position(rows)} bytes, it has {size} "
                "(--force alone starts anew)"
            )
        return int(rows)

    # ---------------------------------------------------------------------------- writing

    def _header(self) -> bytes:
        stream = BytesIO()
        described = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": self.shape}
        np.lib.format.write_array_header_1_0(stream, described)
        return stream.getvalue()

    def _position(self, row: int) -> int:
        """The byte at which a row begins."""
        return len(self._header()) + row * self.shape[1] * self.dtype.itemsize

    def _begin(self) -> None:
        if self.rows == 0:
            self._file.truncate(0)
            self._write(self._header())
            self._checkpoint()
        else:
            self._file.seek(self._position(self.rows))
            self._checked = time.monotonic()

    def _write(self, data: Any) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as e:
            raise OSError(e.errno, e.strerror, str(self.partial)) from None

    def append(self, rows: np.ndarray) -> None:
        """Write some more rows, C-contiguous and of the result's width and dtype."""
        self._write(rows.reshape(-1).view(np.uint8))
        self.rows += rows.shape[0]
        if time.monotonic() - self._checked > CHECKPOINT_SECONDS:
            self._checkpoint()

    def _checkpoint(self) -> None:
        os.fsync(self._file.fileno())
        _write_json(self.state, {**self.description, "rows_done": self.rows})
        self.safe, self._checked = self.rows, time.monotonic()

    def commit(self) -> None:
        """Give the file its name."""
        if self.rows != self.shape[0]:
            raise ValueError(f"{self.rows} of {self.shape[0]} rows are there")
        os.fsync(self._file.fileno())
        self.path.unlink(missing_ok=True)  # an older result never stands beside the new one's description
        _write_json(self.sidecar, self.description)
        os.replace(self.partial, self.path)
        _sync_directory(self.path)
        self._file.close()
        self.state.unlink(missing_ok=True)

    def discard(self) -> None:
        """Keep nothing of what has been written."""
        self.safe = 0
        self._close()

    def _close(self) -> None:
        if self.safe == 0:  # nothing that a later run could use
            self.partial.unlink(missing_ok=True)
            self.state.unlink(missing_ok=True)
        self._file.close()

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        if self.complete or self._file.closed:
            return
        if kind is KeyboardInterrupt:  # not so after a failed write or fsync: a later fsync then proves nothing
            with contextlib.suppress(OSError):
                self._checkpoint()
        self._close()


def differences(was: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """What differs between two descriptions, each with both values."""
    found = []
    for key in {**now, **was}:
        a, b = was.get(key), now.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key} is {b}, was {a}")
    return found


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def one_line(e: BaseException) -> str:
    """An exception's message without line breaks."""
    return " ".join(str(e).split())


def explain(e: BaseException) -> str:
    """What went wrong, in one line without numbers of the operating system."""
    if isinstance(e, OSError) and e.strerror:
        return f"{e.filename}: {e.strerror}" if e.filename else e.strerror
    return one_line(e) or type(e).__name__


def _open_locked(path: Path) -> FileIO:
    """The file `path`, to which no other process of this kind writes until it is closed."""
    file = FileIO(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError(f"{path}: another process is writing it") from None
    except OSError:
        pass  # a file system without locks
    if not path.exists() or not os.path.samefile(path, file.fileno()):
        file.close()
        raise UserError(f"{path}: another process has just finished it")
    return file


def read_json(path: Path) -> dict[str, Any]:
    """The description of a result, or of a partial one."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError as e:
        raise UserError(f"{path}: not JSON: {one_line(e)}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a description of a sketched file")
    return content


def _write_json(path: Path, content: dict[str, Any]) -> None:
    temporary = _beside(path, ".tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path)


def _sync_directory(path: Path) -> None:
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
