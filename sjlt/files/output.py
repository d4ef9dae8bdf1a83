"""`Output`: a resumable ``.npy`` file of rows that appears under its name only when it is complete.

A run uses four names. Rows are written to ``OUT.partial``; ``OUT.partial.json`` describes the result, and records how
many rows would survive even a power failure, with their checksums. When all rows are written, ``OUT.json`` is created
and ``OUT.partial`` is renamed to OUT.

The order of the steps makes a kill at any point recoverable:

1. ``OUT.partial`` is created or emptied, and locked. While it is empty, a later run starts over, whatever
   ``OUT.partial.json`` says.
2. ``OUT.partial.json`` is written, then the header, then rows. A checkpoint flushes the rows, then updates the JSON.
3. ``OUT.json`` appears while ``OUT.partial`` still exists, so that an interrupted commit is detected and repeated.
4. ``OUT.partial`` is renamed, without replacing a file that appeared in the meantime unless `force` is given.
5. ``OUT.partial.json`` is removed; it means nothing without ``OUT.partial``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from . import atomic, attempts
from .checksums import Written, row_checksum
from .description import differences, read_description, to_json
from .errors import UserError, explain
from .names import check_space
from .npy import npy_header

SUFFIXES = ("", ".json", ".partial", ".partial.json")  # of all files that a run writes
CHECKPOINT_SECONDS = 1.0  # a kill loses about this much work
VERIFY_BYTES = 4 << 20  # bytes per read when rows are compared with their checksums


class Output:
    """A file of rows that can be resumed after a kill. Use it in a ``with`` block: `append` all rows, then `commit`.

    Parameters
    ----------
    path : Path
        OUT.
    shape : tuple of int
        Shape of the array, rows first.
    dtype : dtype
    description : dict
        The content of OUT.json.
    resume : bool
        Continue an earlier run with an equal description.
    force : bool
        Replace an existing result, or the rows of an interrupted run.
    adopt : tuple of str
        Keys of the description for which a resumed run uses the recorded values.
    note : callable
        Called with messages for the user.

    Attributes
    ----------
    safe : int
        Number of rows from which a later run can continue.
    complete : bool
        Whether the result exists already, so that there is nothing to do.

    Raises
    ------
    UserError, OSError
        Before anything is changed, if the result cannot be written or the earlier run cannot be continued.
    """

    def __init__(
        self,
        path: Path,
        shape: tuple[int, ...],
        dtype: np.dtype,
        description: dict[str, Any],
        *,
        resume: bool,
        force: bool,
        adopt: tuple[str, ...] = (),
        note: Callable[[str], None],
    ) -> None:
        self.path, self.shape, self.dtype, self.description = path, shape, dtype, description
        self.sidecar, self.partial, self.state = (path.with_name(path.name + suffix) for suffix in SUFFIXES[1:])
        self._force, self._note = force, note
        self._header = npy_header(shape, dtype)
        self._row_bytes = dtype.itemsize * int(np.prod(shape[1:], dtype=object))
        self.safe = 0
        self._written = Written([], 0, 0, 0)
        self._descriptor: int | None = None
        self._check_names()
        self.complete = resume and not self.partial.exists() and self._is_complete(adopt)
        if self.complete:
            self._remove_state()
            return
        if not force:
            self._refuse_to_overwrite(resume)
        if resume and not self.partial.exists():
            note(f"{self.partial}: no such file, so there is nothing to resume: starting from the first row")
        self._check_space()
        self._descriptor = atomic.open_locked(self.partial)
        if not resume and os.fstat(self._descriptor).st_nlink > 1:  # also OUT, which must not be emptied
            os.unlink(self.partial)
            self._release()
            self._descriptor = atomic.open_locked(self.partial)
        try:
            if resume:
                self._restore(adopt)
        except BaseException:
            self._release()
            raise
        try:
            self._begin()
        except BaseException:
            self._close()
            raise

    # ---------------------------------------------------------------------------- checks before writing

    def _check_names(self) -> None:
        for path in (self.sidecar, self.partial, self.state):
            if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
                raise UserError(f"{path}: exists and is not a regular file")

    def _is_complete(self, adopt: tuple[str, ...]) -> bool:
        """Whether the result exists already. Raise UserError for another file of this name, unless `force` is given."""
        if not self.path.exists():
            return False
        try:
            recorded = read_description(self.sidecar)
        except (UserError, FileNotFoundError) as e:
            different = [explain(e)]
        else:
            self._adopt(recorded, adopt)
            different = differences(recorded, self.description)
        size, wanted = self.path.stat().st_size, self._position(self.shape[0])
        if size != wanted:
            different.append(f"size is {wanted}, was {size}")
        if different and not self._force:
            raise UserError(f"{self.path}: exists and is not this result: {'; '.join(different)} (--force replaces it)")
        return not different

    def _adopt(self, recorded: dict[str, Any], keys: tuple[str, ...]) -> None:
        """Use the recorded values of `keys` if everything else agrees."""
        adopted = {**self.description, **{key: recorded[key] for key in keys}}
        if not differences({key: recorded.get(key) for key in adopted}, adopted):
            self.description.update(adopted)

    def _refuse_to_overwrite(self, resume: bool) -> None:
        if os.path.lexists(self.path) and not (resume and self._is_half_renamed()):
            raise UserError(f"{self.path}: exists (--force replaces it)")
        described = not os.path.lexists(self.sidecar) or self._is_described()
        if not described and not (resume and self.partial.exists()):
            raise UserError(f"{self.sidecar}: exists (--force replaces it)")
        if self.partial.exists() and not resume:
            raise UserError(f"{self.partial}: left by an interrupted run (--resume continues it, --force starts over)")
        if self.state.exists() and not self.partial.exists():
            read_description(self.state)  # raises for a file that is not ours and would be lost

    def _is_described(self) -> bool:
        """Whether OUT.json is the description of this result."""
        try:
            return read_description(self.sidecar) == self.description
        except (UserError, FileNotFoundError):
            return False

    def _is_half_renamed(self) -> bool:
        """Whether OUT and OUT.partial are the same file: a kill between the two steps of a rename by hard link."""
        return self.partial.exists() and self.path.exists() and self.partial.samefile(self.path)

    def _check_space(self) -> None:
        held = self.partial.stat().st_size if self.partial.exists() else 0
        check_space(self.path, self._position(self.shape[0]) - held)

    def _restore(self, adopt: tuple[str, ...]) -> None:
        """Keep the leading segments of the partial file that match their checksums."""
        size = os.fstat(self._file).st_size
        if size == 0:  # new, or killed before anything was written
            return
        if not self.state.exists():
            raise UserError(f"{self.partial}: cannot be resumed without {self.state} (--force alone starts over)")
        state = read_description(self.state)
        recorded, segments = state.pop("rows_done", 0), state.pop("segments", [])
        self._adopt(state, adopt)
        if different := differences(state, self.description):
            raise UserError(f"{self.partial}: cannot be resumed: {'; '.join(different)} (--force alone starts over)")
        for rows, checksum in segments if self._has_header() else []:
            if self._checksum_of(self.rows, rows) != checksum:
                break
            self._written = self._written.added(rows, checksum).as_segment()
        self.safe = self.rows
        if self.rows < recorded:
            self._note(
                f"{self.partial}: damaged from row {self.rows} on: {recorded - self.rows} of {recorded} rows are "
                "projected again"
            )

    def _has_header(self) -> bool:
        return os.pread(self._file, len(self._header), 0) == self._header

    def _checksum_of(self, start: int, rows: int) -> int | None:
        """The checksum of rows of the partial file; None if the file is too short."""
        checksum, step = 0, max(1, VERIFY_BYTES // self._row_bytes)
        for row in range(start, start + rows, step):
            count = min(step, start + rows - row)
            content = os.pread(self._file, count * self._row_bytes, self._position(row))
            if len(content) < count * self._row_bytes:
                return None
            checksum = row_checksum(np.frombuffer(content, np.uint8).reshape(count, -1), checksum)
        return checksum

    # ---------------------------------------------------------------------------- writing

    @property
    def rows(self) -> int:
        """The number of rows appended by this run and the runs that it continues."""
        return self._written.segment_rows + self._written.rows

    @property
    def _file(self) -> int:
        if self._descriptor is None:
            raise ValueError(f"{self.partial} is closed")
        return self._descriptor

    def _position(self, row: int) -> int:
        """The byte offset of a row in the file."""
        return len(self._header) + row * self._row_bytes

    def _begin(self) -> None:
        for path in (self.sidecar, self.state):
            attempts.sweep(path.parent, path.name)
        if self.rows == 0:
            with self._named_errors():
                os.ftruncate(self._file, 0)  # until the JSON is written, an empty file means nothing to resume
            self._write_state()
            self._write(self._header)
        else:
            with self._named_errors():
                os.ftruncate(self._file, self._position(self.rows))
                os.lseek(self._file, 0, os.SEEK_END)
        self._checked = time.monotonic()

    def _write(self, content: bytes | memoryview) -> None:
        with self._named_errors():
            atomic.write_all(self._file, content)

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Add the file name to errors of system calls on the descriptor."""
        try:
            yield
        except OSError as e:
            raise OSError(e.errno, e.strerror, str(self.partial)) from None

    def append(self, rows: np.ndarray) -> None:
        """Append C-contiguous rows of the result's width and dtype."""
        content = rows.view(np.uint8).reshape(len(rows), self._row_bytes)
        self._write(content.reshape(-1).data)
        self._written = self._written.added(len(rows), row_checksum(content, self._written.checksum))
        if time.monotonic() - self._checked > CHECKPOINT_SECONDS:
            self._checkpoint()

    def _sync(self) -> None:
        with self._named_errors():
            os.fsync(self._file)

    def _checkpoint(self) -> None:
        self._sync()
        self._written = self._written.as_segment()
        self._write_state()
        self.safe, self._checked = self.rows, time.monotonic()

    def _write_state(self) -> None:
        state = {**self.description, "rows_done": self.rows, "segments": self._written.segments}
        atomic.write_whole(self.state, to_json(state), replace=True)

    # ---------------------------------------------------------------------------- finishing

    def commit(self) -> None:
        """Create OUT.json and rename OUT.partial to OUT.

        Raises UserError, keeping all rows, if OUT or OUT.json appeared during the run and `force` is not given.
        """
        if self.rows != self.shape[0]:
            raise ValueError(f"{self.rows} of {self.shape[0]} rows have been appended")
        self._sync()
        if not self._owns_partial():
            self.safe = 0
            raise UserError(f"{self.partial}: was removed or replaced while it was written: nothing is kept")
        try:
            self._rename()
        except FileExistsError as e:
            self._checkpoint()
            raise UserError(
                f"{e.filename2 or e.filename}: appeared during this run and is kept; all {self.rows} rows are in "
                f"{self.partial} (--resume --force puts them in its place)"
            ) from None
        atomic.sync_names(self.path)
        self._release()
        self._remove_state()

    def _rename(self) -> None:
        """Steps 3 and 4. Raises FileExistsError if OUT or OUT.json is another file."""
        half_renamed = self._is_half_renamed()
        if not self._force and not half_renamed and os.path.lexists(self.path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self.path))
        if self._force:
            atomic.write_whole(self.sidecar, to_json(self.description), replace=True)
            os.replace(self.partial, self.path)
            return
        described = False
        if not self._is_described():
            atomic.write_whole(self.sidecar, to_json(self.description), replace=False)
            described = True
        if half_renamed:
            os.unlink(self.partial)
            return
        try:
            attempts.rename_new(self.partial, self.path)
        except FileExistsError:
            if described:
                os.unlink(self.sidecar)
            raise

    def discard(self) -> None:
        """Close, and remove everything that has been written."""
        self.safe = 0
        self._close()

    def _owns_partial(self) -> bool:
        """Whether OUT.partial is still the file that is being written."""
        try:
            return os.path.samestat(os.lstat(self.partial), os.fstat(self._file))
        except FileNotFoundError:
            return False

    def _remove_state(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.state)

    def _close(self) -> None:
        try:
            if self.safe == 0 and self._owns_partial():  # nothing to resume
                os.unlink(self.partial)
                self._remove_state()
        finally:
            self._release()

    def _release(self) -> None:
        """Unlock and close the file."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            attempts.unlock_and_close(descriptor)

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        if self._descriptor is None:
            return
        if kind is KeyboardInterrupt:  # but not after a failed write or fsync, when a later fsync proves nothing
            with contextlib.suppress(OSError):
                self._checkpoint()
        self._close()
