"""HDF5 files: 2-D datasets, and the CSR matrices of AnnData's ``.h5ad``, read in ranges of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .errors import UserError, one_line
from .safetensors import choose
from .source import Source, check_matrix

MAGIC = b"\x89HDF\r\n"


def open_hdf5(path: Path, name: str | None) -> Source:
    """The dataset or CSR group `name`; by default "X" of an ``.h5ad`` file, else the only matrix."""
    try:
        import h5py
    except ImportError:
        raise UserError(f"{path}: HDF5 files need h5py: pip install 'sjlt-triton[hdf5]'") from None
    try:
        file = h5py.File(path, "r")
    except OSError as e:
        raise UserError(f"{path}: not a readable HDF5 file: {one_line(e)}") from None
    try:
        found = dict[str, Any]()
        file.visititems(lambda key, item: found.setdefault(key, item) and None)
        groups = {key for key, item in found.items() if _is_csr(item)}
        inside = {f"{key}/{part}" for key in groups for part in ("data", "indices", "indptr")}
        arrays = {key: item for key, item in found.items() if isinstance(item, h5py.Dataset) and key not in inside}
        matrices = sorted(groups | {key for key, item in arrays.items() if len(item.shape or ()) == 2})
        if name is None and path.suffix == ".h5ad" and "X" in found:
            name = "X"
        chosen = choose(path, "dataset", name, sorted(groups | set(arrays)), matrices)
        return Hdf5Csr(path, file, chosen) if chosen in groups else Hdf5Dataset(path, file, chosen)
    except (OSError, RuntimeError, KeyError, TypeError, ValueError) as e:  # of damaged files
        file.close()
        raise UserError(f"{path}: not a readable HDF5 file: {one_line(e)}") from None
    except BaseException:
        file.close()
        raise


def _is_csr(item: Any) -> bool:
    encoding = item.attrs.get("encoding-type", item.attrs.get("h5sparse_format", b""))
    encoding = encoding.decode() if isinstance(encoding, bytes) else str(encoding)
    return encoding in ("csr_matrix", "csr") and {"data", "indices", "indptr"} <= set(item)


class _Hdf5(Source):
    def __init__(self, path: Path, file: Any, name: str) -> None:
        self.path, self._file, self._name = path, file, name

    def close(self) -> None:
        self._file.close()

    def description(self) -> dict[str, Any]:
        return {**super().description(), "column": self._name}

    def _error(self, e: Exception) -> UserError:
        return UserError(f"{self.path}: {self._name} cannot be read: {one_line(e)}")


class Hdf5Dataset(_Hdf5):
    """A dense 2-D dataset."""

    order = "C"

    def __init__(self, path: Path, file: Any, name: str) -> None:
        super().__init__(path, file, name)
        self._dataset = file[name]
        shape = tuple(map(int, self._dataset.shape or ()))
        check_matrix(path, shape, self._dataset.dtype)
        self.shape, self.dtype = (shape[0], shape[1]), self._dataset.dtype
        self.row_bytes = shape[1] * self.dtype.itemsize

    def read(self, start: int, stop: int, out: np.ndarray | None = None) -> np.ndarray:
        if out is None:
            out = np.empty((stop - start, self.shape[1]), self.dtype)
        try:
            if out.size:
                self._dataset.read_direct(out, np.s_[start:stop])
        except (OSError, RuntimeError) as e:
            raise self._error(e) from None
        return out


class Hdf5Csr(_Hdf5):
    """A CSR matrix whose parts are three datasets. The row pointers alone are held in memory."""

    order = "CSR"

    def __init__(self, path: Path, file: Any, name: str) -> None:
        super().__init__(path, file, name)
        group = file[name]
        attributes = group.attrs
        shape = tuple(map(int, attributes["shape"] if "shape" in attributes else attributes["h5sparse_shape"]))
        self._data, self._indices, self._indptr = group["data"], group["indices"], group["indptr"][:]
        check_matrix(path, shape, self._data.dtype)
        if self._data.dtype == np.float16:
            raise UserError(f"{path}: sparse float16 is refused: convert it to float32")
        if any(array.dtype.kind not in "iu" for array in (self._indices, self._indptr)):
            raise ValueError(f"indices must be integers, got {self._indices.dtype} and {self._indptr.dtype}")
        held = min(len(self._data), len(self._indices))
        if self._indptr.shape != (shape[0] + 1,) or self._indptr[0] != 0 or (np.diff(self._indptr) < 0).any():
            raise ValueError(f"malformed CSR: indptr must be {shape[0] + 1} numbers that ascend from 0")
        if self._indptr[-1] > held:
            raise ValueError(f"malformed CSR: indptr ends at {self._indptr[-1]}, but {held} numbers are there")
        self.shape, self.dtype = (shape[0], shape[1]), self._data.dtype
        size = self._data.dtype.itemsize + self._indices.dtype.itemsize
        self.row_bytes = int(self._indptr[-1]) * size // max(1, shape[0])

    def read(self, start: int, stop: int, out: np.ndarray | None = None) -> Any:
        import scipy.sparse

        indptr = self._indptr[start : stop + 1].astype(np.int64)
        first, last = int(indptr[0]), int(indptr[-1])
        try:
            data, indices = self._data[first:last], self._indices[first:last]
        except (OSError, RuntimeError) as e:
            raise self._error(e) from None
        try:
            rows = scipy.sparse.csr_array((data, indices, indptr - first), shape=(stop - start, self.shape[1]))
            rows.check_format(full_check=True)
        except ValueError as e:
            raise self._error(e) from None
        return rows
