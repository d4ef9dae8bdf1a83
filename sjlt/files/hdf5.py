"""Read ranges of rows from HDF5 files: 2-D datasets, and the CSR matrices of AnnData's ``.h5ad`` files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .errors import UserError, one_line
from .safetensors import choose
from .source import Source
from .stored import CSR_PARTS, StoredCsr, StoredMatrix, is_csr, refuse_csc

MAGIC = b"\x89HDF\r\n"


def open_hdf5(path: Path, name: str | None) -> Source:
    """Open the dataset or CSR group `name`; by default "X" of an ``.h5ad`` file, otherwise the only matrix."""
    try:
        import h5py
    except ImportError:
        raise UserError(f"{path}: HDF5 files need h5py: pip install 'sjlt-triton[hdf5]'") from None
    try:
        file = h5py.File(path, "r")
    except OSError as e:
        raise UserError(f"{path}: not a readable HDF5 file: {one_line(e)}") from None
    try:
        found = _items(file)
        groups = {key for key, item in found.items() if isinstance(item, h5py.Group) and is_csr(item)}
        inside = {f"{key}/{part}" for key in groups for part in CSR_PARTS}
        arrays = {key: item for key, item in found.items() if isinstance(item, h5py.Dataset) and key not in inside}
        matrices = sorted(groups | {key for key, item in arrays.items() if len(item.shape or ()) == 2})
        if name is None and path.suffix == ".h5ad" and "X" in found:
            name = "X"
        refuse_csc(path, name, found)
        chosen = choose(path, "dataset", name, sorted(groups | set(arrays)), matrices)
        return _Hdf5Csr(path, chosen, file) if chosen in groups else _Hdf5Matrix(path, chosen, file)
    except (ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError) as e:  # the file is damaged
        file.close()
        raise UserError(f"{path}: not a readable HDF5 file: {one_line(e)}") from None
    except BaseException:
        file.close()
        raise


def _items(file: Any) -> dict[str, Any]:
    """All groups and datasets, by name."""
    found: dict[str, Any] = {}

    def visit(name: str, item: Any) -> None:  # returning anything but None would stop `visititems`
        found[name] = item

    file.visititems(visit)
    return found


class _Hdf5Matrix(StoredMatrix):
    def __init__(self, path: Path, name: str, file: Any) -> None:
        self._file = file
        super().__init__(path, name, file[name])

    def close(self) -> None:
        self._file.close()

    def _fill(self, out: np.ndarray, start: int, stop: int) -> None:
        try:
            self._array.read_direct(out, np.s_[start:stop])
        except self.failures as e:
            raise self._error(e) from None


class _Hdf5Csr(StoredCsr):
    def __init__(self, path: Path, name: str, file: Any) -> None:
        self._file = file
        super().__init__(path, name, file[name])

    def close(self) -> None:
        self._file.close()
