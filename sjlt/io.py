"""Projecting one file into another, batch by batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from . import __version__
from .output import Output, UserError, differences, explain, one_line
from .sketch import Sketch

BATCH_BYTES = 16 << 20  # of input or output, whichever is more; 4 to 32 MiB are equally fast with 768 features


class Source:
    """A file that holds a matrix, one data vector a row. Leaving its ``with`` block closes it."""

    order: str
    shape: tuple[int, int]
    dtype: np.dtype
    row_bytes: int

    def __init__(self, path: Path, file: FileIO) -> None:
        self.path, self.file = path, file

    def batches(self, start: int, rows: int) -> Iterator[Any]:
        """Rows start, start + 1, ..., `rows` of them at a time. A batch may overwrite the one before it."""
        raise NotImplementedError

    def description(self) -> dict[str, Any]:
        status = os.fstat(self.file.fileno())
        return {
            "name": self.path.name,
            "size": status.st_size,
            "mtime_ns": status.st_mtime_ns,
            "shape": list(self.shape),
            "dtype": str(self.dtype),
            "order": self.order,
        }

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exception: object) -> None:
        self.file.close()


class NpySource(Source):
    """A 2-D array in an ``.npy`` file.

    It is read into a buffer instead of being mapped: memory use stays flat, a failing disk or a file that shrinks is
    an exception instead of a SIGBUS, and without page faults it is cheaper (2.1 GB to 256 components from the page
    cache on 2 cores: 0.75 s of CPU time against 1.2 s). Reading ahead on a thread of its own was no faster.
    """

    def __init__(self, path: Path, file: FileIO) -> None:
        super().__init__(path, file)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        try:
            version = np.lib.format.read_magic(file)
            if version not in read_header:
                raise ValueError(f"version {version} of the format is for structured dtypes")
            shape, fortran, self.dtype = read_header[version](file)
        except Exception as e:  # whatever a parser says of bytes that are not its format
            raise UserError(f"{path}: not a readable .npy file: {one_line(e)}") from None
        if self.dtype.hasobject:
            raise UserError(f"{path}: holds Python objects (dtype {self.dtype}): pickles are refused, never loaded")
        if len(shape) != 2 or min(shape) < 0:
            raise UserError(f"{path}: holds an array of shape {shape}; needs 2 dimensions, one data vector a row")
        self.shape, self.order = shape, "F" if fortran else "C"
        self.row_bytes = shape[1] * self.dtype.itemsize
        self._start = file.tell()
        needed, held = shape[0] * self.row_bytes, os.fstat(file.fileno()).st_size - self._start
        if held < needed:
            raise UserError(f"{path}: truncated: {shape} of {self.dtype} take {needed} bytes, the file has {held}")

    def batches(self, start: int, rows: int) -> Iterator[np.ndarray]:
        n, width = self.shape
        buffer = np.empty(min(rows, n) * width, self.dtype)
        read = self._read_columns if self.order == "F" else self._read_rows
        for i in range(start, n, rows):
            yield read(i, min(i + rows, n), buffer)

    def _read_rows(self, i: int, end: int, buffer: np.ndarray) -> np.ndarray:
        batch = buffer[: (end - i) * self.shape[1]]
        self._fill(batch, i * self.row_bytes)
        return batch.reshape(end - i, self.shape[1])

    def _read_columns(self, i: int, end: int, buffer: np.ndarray) -> np.ndarray:
        n, width = self.shape
        batch = buffer[: width * (end - i)].reshape(width, end - i)
        for j, column in enumerate(batch):
            self._fill(column, (j * n + i) * self.dtype.itemsize)
        return batch.T

    def _fill(self, part: np.ndarray, position: int) -> None:
        left = memoryview(part.view(np.uint8))  # type: ignore[arg-type]  # NumPy's stubs before Python 3.12
        self.file.seek(self._start + position)
        while left:
            count = self.file.readinto(left)
            if not count:
                raise UserError(f"{self.path}: ends early: it was truncated while it was read")
            left = left[count:]


class CsrSource(Source):
    """A CSR matrix or array in an ``.npz`` file of `scipy.sparse.save_npz`. It is loaded whole."""

    order = "CSR"
    _WANTED = "a sparse 2-D CSR"

    def __init__(self, path: Path, file: FileIO, note: Callable[[str], None]) -> None:
        super().__init__(path, file)
        import scipy.sparse

        try:
            held = self._held(file)
            if held == self._WANTED:
                note(f"{path}: sparse, so it is loaded whole into memory")
                file.seek(0)
                matrix = scipy.sparse.load_npz(file)  # without pickles
                matrix.check_format(full_check=True)
        except MemoryError:  # nothing is wrong with the file
            raise
        except Exception as e:
            raise UserError(f"{path}: not a readable sparse .npz file: {one_line(e)}") from None
        if held != self._WANTED:
            raise UserError(f"{path}: holds {held}; needs {self._WANTED} (.tocsr(), scipy.sparse.save_npz)")
        self._matrix, self.shape, self.dtype = matrix, matrix.shape, matrix.dtype
        self.row_bytes = (matrix.data.nbytes + matrix.indices.nbytes) // max(1, matrix.shape[0])

    @staticmethod
    def _held(file: FileIO) -> str:
        """What the file holds, by its small members."""
        with np.load(file, allow_pickle=False) as members:
            if not {"format", "shape"} <= set(members):
                return f"the arrays {', '.join(members)}"
            return f"a sparse {len(members['shape'])}-D {str(members['format'].astype(str)).upper()}"

    def batches(self, start: int, rows: int) -> Iterator[Any]:
        for i in range(start, self.shape[0], rows):
            yield self._matrix[i : i + rows]


def open_source(path: Path, note: Callable[[str], None]) -> Source:
    """The source of the kind that the file's first bytes show."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: not a regular file")
    file = open(path, "rb", buffering=0)  # noqa: SIM115  # the source closes it
    try:
        magic = file.read(len(np.lib.format.MAGIC_PREFIX))
        file.seek(0)
        if magic == np.lib.format.MAGIC_PREFIX:
            return NpySource(path, file)
        if magic.startswith(b"PK"):
            return CsrSource(path, file, note)
        raise UserError(f"{path}: neither .npy nor .npz: it begins with {magic!r}")
    except BaseException:
        file.close()
        raise


# ------------------------------------------------------------------------------------- project


def project_file(
    source: Path,
    out: Path,
    n_components: int,
    *,
    nnz: int | Literal["auto"] = "auto",
    seed: int = 0,
    dtype: str | None = None,
    batch_rows: int | None = None,
    resume: bool = False,
    force: bool = False,
    progress: Callable[[int, int], None] = lambda rows, of: None,
    note: Callable[[str], None] = lambda line: None,
) -> None:
    """Write the projection of the rows of `source` (.npy, or CSR .npz) to `out` (.npy), described in ``out.json``.

    Parameters
    ----------
    source, out : Path
    n_components, nnz, seed
        As for `Sketch`.
    dtype : {"float16", "float32", "float64"}, optional
        Of the result; by default that of `Sketch.project`.
    batch_rows : int >= 1, optional
        Rows in memory at a time, by default about 16 MiB of them. Results do not depend on it.
    resume : bool
        Continue an interrupted run of the same parameters on the same source.
    force : bool
        Replace what stands in the way.
    progress : callable
        Called with the rows that are done and the rows there are.
    note : callable
        Called with lines that the user should see.

    Raises
    ------
    UserError, OSError
        UserError's message is one line with the numbers.
    KeyboardInterrupt
        With a message that says how many rows are kept for `resume`.
    """
    if batch_rows is not None and batch_rows < 1:
        raise UserError(f"a batch must have at least 1 row, got {batch_rows}")
    _refuse_names(source, out)
    with open_source(source, note) as rows:
        sketch, result = _operator(rows, n_components, nnz, seed, dtype)
        if batch_rows is None:
            batch_rows = _batch_rows(max(1, rows.row_bytes, n_components * result.itemsize))
        description: dict[str, Any] = {
            "sjlt": __version__,
            "sketch": sketch.to_dict(),
            "source": rows.description(),
            "result": {"shape": [rows.shape[0], n_components], "dtype": str(result)},
            "batch_rows": batch_rows,
        }
        output = Output(out, description, resume=resume, force=force, note=note)
        if output.complete:
            note(f"{out}: complete already, from the same source and parameters")
            return
        try:
            with output, np.errstate(over="ignore", invalid="ignore"):  # inf and NaN go their way unremarked
                buffer = np.empty((min(batch_rows, rows.shape[0]), n_components), result)
                progress(output.rows, rows.shape[0])
                for batch in rows.batches(output.rows, batch_rows):
                    output.append(sketch.project(batch, out=buffer[: batch.shape[0]]))
                    progress(output.rows, rows.shape[0])
                if different := differences(description["source"], rows.description(), "source."):
                    output.discard()
                    raise UserError(f"{source}: changed while it was read: {'; '.join(different)}")
                output.commit()
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_kept(output)) from None
        except (OSError, MemoryError) as e:
            raise UserError(f"{explain(e)}; {_kept(output)}") from None


def _refuse_names(source: Path, out: Path) -> None:
    if os.path.lexists(out) and not out.is_file():
        raise UserError(f"{out}: exists and is not a regular file")
    if out.suffix == ".npz":
        raise UserError(f"{out}: the result is one dense array: give it a name that ends in .npy")
    if not out.parent.is_dir():
        raise UserError(f"{out.parent}: no such directory")
    for end in ("", ".json", ".partial", ".partial.json"):
        path = out.with_name(out.name + end)
        if path.exists() and source.exists() and path.samefile(source):
            raise UserError(f"{path}: would be written while it is read: it is the source {source}")


def _operator(
    rows: Source, n_components: int, nnz: int | Literal["auto"], seed: int, dtype: str | None
) -> tuple[Sketch, np.dtype]:
    """The sketch for such rows and the dtype of the result."""
    try:
        sketch = Sketch(rows.shape[1], n_components, nnz=cast(int, nnz), seed=seed)
        natural = sketch.project(np.empty((0, rows.shape[1]), rows.dtype)).dtype  # refuses what it cannot take
    except (TypeError, ValueError) as e:
        raise UserError(one_line(e)) from None
    return sketch, np.dtype(dtype or natural)


def _batch_rows(row_bytes: int) -> int:
    """As many as fill a batch, but 16 of long rows if they stay below 256 MiB: they share the work per feature."""
    return max(1, BATCH_BYTES // row_bytes, min(16, (256 << 20) // row_bytes))


def _kept(output: Output) -> str:
    return f"{output.safe} of {output.shape[0]} rows are kept" + (", --resume continues" if output.safe else "")
