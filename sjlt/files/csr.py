"""Sparse ``.npz`` files written by `scipy.sparse.save_npz`."""

from __future__ import annotations

from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from .errors import UserError, one_line
from .source import Source, check_matrix

_WANTED = "a sparse 2-D CSR"


class CsrMatrix(Source):
    """A CSR matrix or array in an ``.npz`` file. It is loaded whole; `note` is called with a line that says so."""

    order = "CSR"

    def __init__(self, path: Path, file: FileIO, note: Callable[[str], None]) -> None:
        import scipy.sparse

        try:
            held = _contents(file)
            if held == _WANTED:
                note(f"{path}: sparse, so it is loaded whole into memory")
                file.seek(0)
                matrix = scipy.sparse.load_npz(file)  # without pickles
                matrix.check_format(full_check=True)
        except MemoryError:  # not a fault of the file's contents
            raise
        except Exception as e:
            raise UserError(f"{path}: not a readable sparse .npz file: {one_line(e)}") from None
        if held != _WANTED:
            raise UserError(f"{path}: holds {held}; needs {_WANTED} (.tocsr(), scipy.sparse.save_npz)")
        shape = tuple(map(int, matrix.shape))
        check_matrix(path, shape, matrix.dtype)
        if matrix.dtype == np.float16:
            raise UserError(f"{path}: sparse float16 is refused: convert it with .astype(np.float32)")
        self._file, self._matrix = file, matrix
        self.path, self.shape, self.dtype = path, (shape[0], shape[1]), matrix.dtype
        self.row_bytes = (matrix.data.nbytes + matrix.indices.nbytes) // max(1, shape[0])

    def close(self) -> None:
        self._file.close()

    def read(self, start: int, stop: int, out: np.ndarray | None = None) -> Any:
        return self._matrix[start:stop]

    def rows(self, chosen: np.ndarray) -> Any:
        return self._matrix[chosen]

    def gpu_obstacle(self) -> str | None:
        return "sparse, and a GPU needs dense rows"


def _contents(file: FileIO) -> str:
    """Describe the contents of the file, without loading the large members."""
    with np.load(file, allow_pickle=False) as members:
        if not {"format", "shape"} <= set(members):
            return f"the arrays {', '.join(members)}"
        for name in ("indices", "indptr"):  # SciPy would silently truncate other dtypes to integers
            if name in members and _dtype(members, name).kind not in "iu":
                raise ValueError(f"{name} must be integers, got {_dtype(members, name)}")
        return f"a sparse {len(members['shape'])}-D {str(members['format'].astype(str)).upper()}"


def _dtype(members: Any, name: str) -> np.dtype:
    """The dtype of a member, read from its header."""
    with members.zip.open(f"{name}.npy") as member:
        version = np.lib.format.read_magic(member)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        return read(member)[2]
