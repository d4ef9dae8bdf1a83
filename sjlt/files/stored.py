"""Matrices in hierarchical formats (HDF5, zarr): 2-D arrays, and CSR matrices stored as groups of three arrays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .errors import UserError, one_line
from .source import Source, check_matrix

CSR_PARTS = ("data", "indices", "indptr")


def is_csr(group: Any) -> bool:
    """Whether a group is a CSR matrix in the format of AnnData."""
    return _is_compressed(group, "csr")


def refuse_csc(path: Path, name: str | None, found: dict[str, Any]) -> None:
    """Raise UserError if the item `name` is a CSC matrix, whose rows cannot be read in ranges."""
    if name in found and not hasattr(found[name], "dtype") and _is_compressed(found[name], "csc"):
        how = "adata.X = adata.X.tocsr()" if name == "X" else ".tocsr()"
        raise UserError(f"{path}: {name} is a CSC matrix: store it as CSR ({how})")


def _is_compressed(group: Any, kind: str) -> bool:
    """Whether a group is a sparse matrix of this kind, "csr" or "csc"."""
    encoding = group.attrs.get("encoding-type", group.attrs.get("h5sparse_format", b""))
    encoding = encoding.decode() if isinstance(encoding, bytes) else str(encoding)
    return encoding in (f"{kind}_matrix", kind) and set(CSR_PARTS) <= set(group)


class Stored(Source):
    """A matrix named `name` in the hierarchy; an empty name means the root."""

    failures: tuple[type[Exception], ...] = (OSError, RuntimeError, ValueError)  # exceptions raised by failed reads

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name

    def close(self) -> None:
        """Do nothing: no file is kept open."""

    def description(self) -> dict[str, Any]:
        return {**super().description(), **({"column": self.name} if self.name else {})}

    def _slice(self, array: Any, start: int, stop: int) -> Any:
        try:
            return array[start:stop]
        except self.failures as e:
            raise self._error(e) from None

    def _error(self, e: Exception) -> UserError:
        return UserError(f"{self.path}: {self.name or 'the array'} cannot be read: {one_line(e)}")


class StoredMatrix(Stored):
    """A dense 2-D array.

    Parameters
    ----------
    path, name
    array : h5py.Dataset or zarr.Array
    """

    order = "C"

    def __init__(self, path: Path, name: str, array: Any) -> None:
        super().__init__(path, name)
        shape = tuple(map(int, array.shape or ()))
        _refuse_objects(path, name, array.dtype)
        check_matrix(path, shape, array.dtype)
        self._array, self.shape, self.dtype = array, (shape[0], shape[1]), array.dtype
        self.row_bytes = shape[1] * self.dtype.itemsize
        self.chunk_rows = int(array.chunks[0]) if array.chunks else 1

    def read(self, start: int, stop: int, out: np.ndarray | None = None) -> np.ndarray:
        if out is None:
            out = np.empty((stop - start, self.shape[1]), self.dtype)
        if out.size:
            self._fill(out, start, stop)
        return out

    def _fill(self, out: np.ndarray, start: int, stop: int) -> None:
        out[...] = self._slice(self._array, start, stop)


class StoredCsr(Stored):
    """A CSR matrix. All row pointers are held in memory; data and indices are read in ranges of rows.

    Parameters
    ----------
    path, name
    group : h5py.Group or zarr.Group
    """

    order = "CSR"

    def __init__(self, path: Path, name: str, group: Any) -> None:
        super().__init__(path, name)
        shape = _shape_of(group)
        for part in CSR_PARTS:
            if len(getattr(group[part], "shape", ())) != 1:
                raise ValueError(f"malformed CSR: {part} must be a 1-D array")
        self._data, self._indices, self._indptr = group["data"], group["indices"], group["indptr"][:]
        _refuse_objects(path, name, self._data.dtype)
        check_matrix(path, shape, self._data.dtype)
        if self._data.dtype == np.float16:
            raise UserError(f"{path}: sparse float16 is refused: convert it to float32")
        if any(array.dtype.kind not in "iu" for array in (self._indices, self._indptr)):
            raise ValueError(f"indices must be integers, got {self._indices.dtype} and {self._indptr.dtype}")
        held = min(self._data.shape[0], self._indices.shape[0])
        if self._indptr.shape != (shape[0] + 1,) or self._indptr[0] != 0 or (np.diff(self._indptr) < 0).any():
            raise ValueError(f"malformed CSR: indptr must be {shape[0] + 1} nondecreasing integers from 0")
        if self._indptr[-1] > held:
            raise ValueError(f"malformed CSR: indptr ends at {self._indptr[-1]}, but only {held} entries are stored")
        self.shape, self.dtype = (shape[0], shape[1]), self._data.dtype
        size = self._data.dtype.itemsize + self._indices.dtype.itemsize
        self.row_bytes = int(self._indptr[-1]) * size // max(1, shape[0])

    def read(self, start: int, stop: int, out: np.ndarray | None = None) -> Any:
        import scipy.sparse

        indptr = self._indptr[start : stop + 1].astype(np.int64)
        first, last = int(indptr[0]), int(indptr[-1])
        data, indices = self._slice(self._data, first, last), self._slice(self._indices, first, last)
        try:
            rows = scipy.sparse.csr_array((data, indices, indptr - first), shape=(stop - start, self.shape[1]))
            rows.check_format(full_check=True)
        except ValueError as e:
            raise self._error(e) from None
        return rows


def _shape_of(group: Any) -> tuple[int, ...]:
    """The shape in the attributes of a CSR matrix."""
    for name in ("shape", "h5sparse_shape"):
        if name in group.attrs:
            return tuple(map(int, group.attrs[name]))
    raise ValueError("malformed CSR: it has no attribute 'shape'")


def _refuse_objects(path: Path, name: str, dtype: np.dtype) -> None:
    """Raise UserError for arrays of strings or other objects, which these formats store without pickles."""
    if dtype.hasobject:
        metadata: Mapping[str, Any] = dtype.metadata or {}
        strings = dtype.kind == "T" or metadata.get("vlen") in (str, bytes)
        what = "strings" if strings else "objects"
        raise UserError(f"{path}: {name or 'the array'} holds {what} (dtype {dtype}); needs a numeric matrix")
