"""`Source`: the interface of every readable file format."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from .errors import UserError

Order = Literal["C", "F", "CSR"]


class Source(ABC):
    """A stored matrix with one data vector per row. Use it in a ``with`` block, which closes it.

    Attributes
    ----------
    path : Path
        The file, for messages and for the description.
    shape : (int, int)
    dtype : dtype
        Dtype of the rows that `read` returns: bool, an integer type, float16, float32 or float64 in any byte order.
    order : {"C", "F", "CSR"}
        How the rows are stored.
    row_bytes : int
        Bytes of memory per row, used to choose the batch size.
    chunk_rows : int
        Number of rows that are decoded together. If batches are multiples of it, no row is decoded twice.
    """

    path: Path
    shape: tuple[int, int]
    dtype: np.dtype
    order: Order
    row_bytes: int
    chunk_rows: int = 1

    @abstractmethod
    def read(self, start: int, stop: int, out: np.ndarray | None = None) -> Any:
        """Read rows `start` to `stop` - 1.

        Parameters
        ----------
        start, stop : int, 0 <= start <= stop <= shape[0]
        out : ndarray of shape (stop - start, shape[1]) and the source's dtype and order, optional
            Dense rows are written to it.

        Returns
        -------
        {ndarray, CSR array} of shape (stop - start, shape[1])

        Raises
        ------
        UserError, OSError
            The message names the file.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the file."""

    def batches(self, start: int, rows: int) -> Iterator[Any]:
        """Yield the rows from `start` on, `rows` at a time. A batch may overwrite the previous one."""
        n, width = self.shape
        out = None
        for i in range(start, n, rows):
            stop = min(i + rows, n)
            if self.order != "CSR" and out is None:
                out = np.empty((stop - i, width), self.dtype, order=self.order)
            yield self.read(i, stop, None if out is None else out[: stop - i])

    def rows(self, chosen: np.ndarray) -> Any:
        """Read selected rows, in one pass over the file.

        Parameters
        ----------
        chosen : ndarray of int64
            Row indices, ascending.
        """
        found, row = [self.read(0, 0)], 0
        for batch in self.batches(0, self.batch_rows(4 << 20)):
            here = chosen[slice(*np.searchsorted(chosen, [row, row + batch.shape[0]]))] - row
            found.append(batch[here])
            row += batch.shape[0]
            if row > chosen.max(initial=-1):
                break
        if self.order != "CSR":
            return np.concatenate(found)
        import scipy.sparse

        return scipy.sparse.vstack(found, format="csr")

    def batch_rows(self, size: int) -> int:
        """The number of rows that fill `size` bytes, rounded up to a multiple of `chunk_rows`."""
        rows = max(1, size // max(1, self.row_bytes))
        return -(-rows // self.chunk_rows) * self.chunk_rows

    def gpu_obstacle(self) -> str | None:
        """The reason these rows cannot be projected on a GPU, or None if they can."""
        return f"{self.order} rows of {self.path.suffix or self.path.name} files are not streamed through a GPU"

    def description(self) -> dict[str, Any]:
        """Describe the data for JSON, in enough detail to detect that it has changed."""
        status = os.stat(self.path)
        return {
            "name": self.path.name,
            "size": status.st_size,
            "mtime_ns": status.st_mtime_ns,
            "shape": list(self.shape),
            "dtype": str(self.dtype),
            "order": self.order,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def check_matrix(path: Path, shape: tuple[Any, ...], dtype: np.dtype) -> None:
    """Raise UserError unless `shape` and `dtype` are those of a numeric matrix."""
    if dtype.hasobject:
        raise UserError(f"{path}: holds Python objects (dtype {dtype}): pickles are never loaded")
    if len(shape) != 2 or any(type(n) is not int or not 0 <= n < 2**63 for n in shape):
        raise UserError(f"{path}: holds an array of shape {shape}; needs 2 dimensions, one data vector per row")
    if dtype.subdtype or not (dtype.kind in "iub" or (dtype.kind == "f" and dtype.itemsize <= 8)):
        raise UserError(f"{path}: dtype {dtype} is refused: needs float16, float32, float64, integers or bool")
