"""Read int8 results as floats."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np

from .files.encoding import SCALE
from .files.errors import one_line
from .files.parquet_vectors import is_parquet


def load_int8(
    path: str | os.PathLike[str], start: int = 0, stop: int | None = None, *, column: str | None = None
) -> np.ndarray:
    """Read vectors stored as int8 by ``sjlt project --dtype int8``, a plan, or `sjlt.arrow.Projector`.

    Parameters
    ----------
    path : path
        An ``.npy`` file with the fields "codes" and "scale"; a parquet file with a column of int8 lists and a column of
        scales named ``<column>_scale``; or a folder of such files committed by a plan.
    start, stop : int, optional
        The range of rows, as in a slice. By default all rows. Only files that contain some of them are read.
    column : str, optional
        The column of codes in a parquet file. Required if several columns have scales.

    Returns
    -------
    ndarray of shape (stop - start, n_components), float32
        codes * scale; NaN for vectors that were not finite.

    Raises
    ------
    ValueError
        If a file has other contents; the message names it.
    sjlt.files.errors.UserError, OSError
        If a folder is not committed, or a file cannot be read.

    Notes
    -----
    ``np.load(path, mmap_mode="r")["codes"]`` gives the int8 codes without a copy. Cosine similarities do not depend on
    the scales, so the codes can be searched directly.

    Examples
    --------
    >>> import numpy as np, pathlib, tempfile, sjlt
    >>> from sjlt.files.projection import project_file
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> X = np.random.default_rng(0).normal(size=(10, 500)).astype(np.float32)
    >>> np.save(folder / "x.npy", X)
    >>> project_file(folder / "x.npy", folder / "y.npy", 64, dtype="int8")
    >>> Y = sjlt.load_int8(folder / "y.npy", 2, 5)
    >>> bool(np.abs(Y - sjlt.project(X, 64)[2:5]).max() < 0.01 * np.abs(Y).max())
    True
    """
    files = [_opened(each, column) for each in _paths(Path(path))]
    rows = sum(file.shape[0] for file in files)
    start, stop, _ = slice(start, stop).indices(rows)
    result = np.empty((max(0, stop - start), files[0].shape[1]), np.float32)
    first = 0  # first row of the current file
    for file in files:
        n, k = file.shape
        if k != result.shape[1]:
            raise ValueError(f"{file.path}: vectors have length {k}, but {result.shape[1]} in {files[0].path}")
        a, b = max(start, first), min(stop, first + n)
        if a < b:
            file.read(a - first, b - first, result[a - start : b - start])
        first += n
    return result


def _paths(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    from .plans import committed_parts

    return committed_parts(path)


class _Int8(ABC):
    """A file of codes and scales."""

    path: Path
    shape: tuple[int, int]

    @abstractmethod
    def read(self, start: int, stop: int, out: np.ndarray) -> None:
        """Write codes * scale of rows `start` to `stop` - 1 to `out`."""


def _opened(path: Path, column: str | None) -> _Int8:
    if is_parquet(path):
        return _Parquet(path, column)
    if column is not None:
        raise ValueError(f"{path}: not a parquet file: it has no column {column!r}")
    return _Npy(path)


def _scaled(codes: np.ndarray, scale: np.ndarray, out: np.ndarray) -> None:
    with np.errstate(invalid="ignore"):
        np.multiply(codes, scale[:, None], out=out, dtype=np.float32)


class _Npy(_Int8):
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._stored = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError):  # NumPy's own messages recommend allow_pickle
            raise ValueError(f"{path}: not a readable .npy file") from None
        dtype = getattr(self._stored, "dtype", None)
        if dtype is None or dtype.names != ("codes", "scale"):
            raise ValueError(f"{path}: holds {dtype or 'several arrays'}, not int8 codes with a scale")
        codes, scale = dtype["codes"], dtype["scale"]
        if self._stored.ndim != 1 or codes.base != np.int8 or len(codes.shape) != 1 or scale != np.float32:
            raise ValueError(
                f"{path}: holds {dtype} of shape {self._stored.shape}, not vectors of int8 codes with a scale"
            )
        self.shape = len(self._stored), int(codes.shape[0])

    def read(self, start: int, stop: int, out: np.ndarray) -> None:
        rows = self._stored[start:stop]
        _scaled(rows["codes"], rows["scale"], out)


class _Parquet(_Int8):
    def __init__(self, path: Path, column: str | None) -> None:
        import pyarrow.parquet

        from .files.parquet_vectors import ParquetVectors

        self.path = path
        try:
            with open(path, "rb") as file:  # pyarrow itself does not open names that are not UTF-8
                schema = pyarrow.parquet.read_schema(file)
        except (ValueError, OSError) as e:
            raise ValueError(f"{path}: {one_line(e)}") from None
        scaled = [field.name for field in schema if field.name + SCALE in schema.names and _holds_int8(field.type)]
        held = f"int8 columns with a scale: {', '.join(scaled) or 'none'}"
        if column is None and len(scaled) != 1:
            raise ValueError(f"{path}: name one column; {held}" if scaled else f"{path}: {held}")
        if column is not None and column not in scaled:
            raise ValueError(f"{path}: {column!r} is not a column of int8 codes; {held}")
        self._column = column or scaled[0]
        with ParquetVectors(path, self._column) as vectors:
            self.shape = vectors.shape

    def read(self, start: int, stop: int, out: np.ndarray) -> None:
        from .arrow import vectors_of
        from .files.parquet_vectors import ParquetVectors

        name, done = self._column, 0
        with ParquetVectors(self.path, name) as vectors:
            for batch in vectors.tables(start, stop, 16384, [name, name + SCALE]):
                codes = vectors_of(name, batch.column(name), self.shape[1], start + done)
                scale = batch.column(name + SCALE).to_numpy(zero_copy_only=False)
                _scaled(codes, scale, out[done : done + len(batch)])
                done += len(batch)


def _holds_int8(kind: Any) -> bool:
    import pyarrow.types as types

    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(lists and types.is_int8(kind.value_type))
