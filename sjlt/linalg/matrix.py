"""Tall matrices as blocks of rows: arrays, sparse matrices and files.

Every algorithm of `sjlt.linalg` reads A in passes. A pass gives blocks of rows to one or more `Sum` objects. The
algorithms therefore work for an array, a sparse matrix, a CUDA tensor or a file larger than memory, and several sums
share one read of the data.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..files.description import differences
from ..files.opening import open_source
from ..files.source import Source
from ..inputs.containers import is_tensor
from ..sketch import Sketch
from .products import in_parallel, multiply, normal_product, row_pieces
from .residuals import is_compiled_for
from .sums import Normal, Product, Projected, Sketched, Sum

FILE_BYTES = 64 << 20  # per block of a file, or of an array that is converted to float64
ARRAY_BYTES = 128 << 20  # per block of a float64 array

Progress = Callable[[int, int, int], None]


def one_pass(method: Callable[..., Any]) -> Callable[..., Any]:
    """Count and report each call of a method as one pass."""

    @functools.wraps(method)
    def counted(self: Matrix, *arguments: Any) -> Any:
        value = method(self, *arguments)
        self.count_pass()
        return value

    return counted


class Matrix:
    """A matrix A that is read in passes over its rows.

    Attributes
    ----------
    shape : tuple of two ints, (m, n)
    dtype : str
        Name of A's dtype. Products with a float32 A may be computed in float32.
    xp : module
        numpy or torch; small results are its arrays.
    device : torch.device or None
        Device of small results; None for NumPy.
    passes : int
        Number of passes so far.
    max_gram_columns : float
        Number of columns up to which forming A'A is faster than about 25 passes over A; infinite if forming
        (A W)'(A W) is, too.
    """

    max_gram_columns: float

    def __init__(
        self, shape: tuple[int, int], dtype: Any, xp: Any = np, device: Any = None, progress: Progress | None = None
    ):
        self.shape = shape
        self.dtype = str(dtype).removeprefix("torch.")
        self.xp, self.device = xp, device
        self.passes = 0
        self._progress = progress

    def blocks(self, width: int) -> Iterator[tuple[int, Any]]:
        """Yield (index of the first row, rows) of each block.

        Blocks are float64, except that NumPy arrays have A's own dtype. `width` is the number of columns of the widest
        product with a block, which determines the blocks' size.
        """
        raise NotImplementedError

    def sketch(self, S: Sketch, B: Any = None) -> Any:
        """Return S A, or [S A, S B], in float64, from one pass."""
        n, q = self.shape[1], 0 if B is None else B.shape[1]
        # Fortran order for LAPACK; one allocation, since a concatenation would need the memory twice.
        transposed = self.zeros((n + q, S.n_components))
        self.sketch_into(S, transposed[:n])
        if B is not None:
            S.project(B.T, out=transposed[n:])
        return transposed.T

    def sketch_into(self, S: Sketch, transposed: Any) -> None:
        """Write (S A)' to `transposed`, which is float64 and zero, in one pass."""
        total = Sketched(S, transposed)
        self.run(total)
        total.store()

    def quick_sketch(self, S: Sketch) -> Any:
        """Return S A, to the accuracy of A's dtype, from one pass."""
        return self.sketch(S)

    def dense(self) -> Any:
        """Return A as a dense float64 array, from one pass."""
        raise NotImplementedError

    def rounded(self) -> Any:
        """Return A in float32, from one pass, or None if passes over it would not be faster."""
        return None

    def random(self, shape: tuple[int, int], seed: int) -> Any:
        """Return standard normal numbers, float64; the same for all containers in the host's memory."""
        return self.array(np.random.default_rng(seed).standard_normal(shape))

    def zeros(self, shape: tuple[int, int]) -> Any:
        """Return float64 zeros of the kind of small results."""
        if self.device is None:
            return np.zeros(shape)
        return self.xp.zeros(shape, dtype=self.xp.float64, device=self.device)

    def indices(self, x: np.ndarray) -> Any:
        """Return `x` as an index array for small results and blocks."""
        return x if self.device is None else self.xp.as_tensor(x, device=self.device)

    def sketch_both(self, omega: Sketch, psi: Sketch) -> tuple[Any, Any]:
        """Return A Omega' and Psi A in float64, from one pass or from one each."""
        projected = Projected(omega, self.zeros((self.shape[0], omega.n_components)))
        sketched = Sketched(psi, self.zeros((self.shape[1], psi.n_components)))
        self.run(projected, sketched)
        return projected.value, sketched.store()

    def project(self, omega: Sketch) -> Any:
        """Return A Omega' in float64, from one pass."""
        total = Projected(omega, self.zeros((self.shape[0], omega.n_components)))
        self.run(total)
        return total.value

    def times(self, V: Any) -> Any:
        """Return A V, from one pass; for a float32 array in float32, the dtype in which it is computed."""
        total = Product(self.shape[0], V)
        self.run(total, width=V.shape[1])
        return total.value

    def normal_times(self, V: Any) -> Any:
        """Return A' A V, from one pass."""
        total = Normal(V)
        self.run(total, width=V.shape[1])
        return total.value

    def close(self) -> None:
        """Close the file, if there is one."""

    def run(self, *sums: Sum, width: int = 1) -> None:
        """Add all blocks to each of the sums, in one pass; `width` as in `blocks`."""
        self.passes += 1
        all_accept_float32 = all(each.accepts_float32 for each in sums)
        for start, block in self.blocks(width):
            if not all_accept_float32 and isinstance(block, np.ndarray):
                block = block.astype(np.float64, copy=False)
            for each in sums:
                each.add(start, block)
            self.report(start + block.shape[0])

    def count_pass(self) -> None:
        """Count and report a pass that one call made."""
        self.passes += 1
        self.report(self.shape[0])

    def report(self, rows: int) -> None:
        """Report the number of rows read so far in this pass."""
        if self._progress is not None:
            self._progress(self.passes, rows, self.shape[0])

    def array(self, x: Any) -> Any:
        """Return `x` as a float64 array of the kind of small results."""
        if self.device is None:
            x = x.detach().cpu().double().numpy() if is_tensor(x) else x  # NumPy has no bfloat16
            return np.asarray(x, np.float64)
        return self.xp.as_tensor(x, dtype=self.xp.float64, device=self.device)


class DenseMatrix(Matrix):
    """A 2-D NumPy array, float32 or float64, with any strides."""

    max_gram_columns = 400

    def __init__(self, a: np.ndarray, progress: Progress | None = None):
        super().__init__(a.shape, a.dtype, progress=progress)
        self._a = a

    def blocks(self, width: int) -> Iterator[tuple[int, np.ndarray]]:
        is_converted = self._a.dtype != np.float64
        size = FILE_BYTES if is_converted else ARRAY_BYTES
        rows = max(64, size // (8 * max(self.shape[1], width)))
        for i in range(0, self.shape[0], rows):
            yield i, self._a[i : i + rows]

    def sketch_into(self, S: Sketch, transposed: np.ndarray) -> None:
        if self._a.dtype != np.float64:  # a float32 sketch would not show which singular values are zero
            super().sketch_into(S, transposed)
            return
        S.project(self._a.T, out=transposed)
        self.count_pass()

    @one_pass
    def quick_sketch(self, S: Sketch) -> np.ndarray:
        return np.asarray(S.project(self._a.T), np.float64).T

    def sketch_both(self, omega: Sketch, psi: Sketch) -> tuple[np.ndarray, np.ndarray]:
        return self.project(omega), self.quick_sketch(psi)

    @one_pass
    def project(self, omega: Sketch) -> np.ndarray:
        return np.asarray(omega.project(self._a), np.float64)

    @one_pass
    def times(self, V: np.ndarray) -> np.ndarray:
        return multiply(self._a, V.astype(self._a.dtype))

    @one_pass
    def normal_times(self, V: np.ndarray) -> np.ndarray:
        return normal_product(self._a, V.astype(self._a.dtype)).astype(np.float64, copy=False)

    @one_pass
    def dense(self) -> np.ndarray:
        return self._a.astype(np.float64)

    def rounded(self) -> np.ndarray | None:
        if self._a.dtype != np.float64 or not is_compiled_for(self._a, columns=1):
            return None
        out = np.empty(self.shape, np.float32)

        def task(piece: slice) -> None:
            out[piece] = self._a[piece]

        in_parallel(task, ((piece,) for piece in row_pieces(self._a)))
        self.count_pass()
        return out


class SparseMatrix(Matrix):
    """A SciPy CSR or CSC matrix or array."""

    max_gram_columns = 0

    def __init__(self, a: Any, progress: Progress | None = None):
        super().__init__(a.shape, "float64", progress=progress)
        self._a = a.astype(np.float64, copy=False)

    def blocks(self, width: int) -> Iterator[tuple[int, Any]]:
        if width <= 64:
            yield 0, self._a
            return
        rows = max(64, FILE_BYTES // (8 * width))
        a = self._a.tocsr()
        for i in range(0, self.shape[0], rows):
            yield i, a[i : i + rows]

    def sketch_into(self, S: Sketch, transposed: np.ndarray) -> None:
        S.project(self._a.T, out=transposed)
        self.count_pass()

    def sketch_both(self, omega: Sketch, psi: Sketch) -> tuple[np.ndarray, np.ndarray]:
        return self.project(omega), self.sketch(psi)

    @one_pass
    def project(self, omega: Sketch) -> np.ndarray:
        return np.asarray(omega.project(self._a))

    @one_pass
    def dense(self) -> np.ndarray:
        return np.asarray(self._a.toarray())


class FileMatrix(Matrix):
    """A 2-D array in a file, float32 or float64, read a block of rows at a time.

    `file` is a path or an open `Source`, which may be one of several arrays in a file. `close` closes either.
    """

    max_gram_columns = float("inf")

    def __init__(self, file: Path | Source, progress: Progress | None = None):
        self._source = file if isinstance(file, Source) else open_source(file, lambda line: None)
        self._path = path = self._source.path
        if self._source.order == "CSR":
            self._source.close()
            raise TypeError(f"{path}: holds a sparse matrix: load it with scipy.sparse.load_npz")
        super().__init__(self._source.shape, self._source.dtype, progress=progress)
        self._initial = self._stamp()

    def close(self) -> None:
        self._source.close()

    def _stamp(self) -> dict[str, Any]:
        """Return properties that show whether the file, or one of a zarr store's files, was changed or replaced."""
        inode = {} if self._path.is_dir() else {"inode": os.stat(self._path).st_ino}
        return {**self._source.description(), **inode}

    def check_unchanged(self) -> None:
        """Raise ValueError if the file has changed since it was opened."""
        if changes := differences(self._initial, self._stamp()):
            raise ValueError(f"{self._path} changed between passes: {'; '.join(changes)}")

    def blocks(self, width: int, new_buffer: Callable[..., np.ndarray] = np.empty) -> Iterator[tuple[int, np.ndarray]]:
        """See `Matrix.blocks`; a thread reads the next block into the other of two buffers meanwhile.

        `new_buffer` allocates the buffers, and is called like `numpy.empty`.
        """
        m, n = self.shape
        rows = min(m, max(64, FILE_BYTES // (8 * max(n, width))))
        order: Literal["C", "F"] = "F" if self._source.order == "F" else "C"
        buffers = itertools.cycle([new_buffer((rows, n), self.dtype, order=order) for _ in range(2)])

        def read(start: int) -> Any:
            stop = min(start + rows, m)
            return self._source.read(start, stop, next(buffers)[: stop - start])

        self.check_unchanged()
        with ThreadPoolExecutor(1) as reader:
            next_block = reader.submit(read, 0)
            for i in range(0, m, rows):
                block = next_block.result()
                if i + rows < m:
                    next_block = reader.submit(read, i + rows)
                yield i, block
        self.check_unchanged()

    def dense(self) -> np.ndarray:
        self.passes += 1
        value = np.empty(self.shape)
        for start, block in self.blocks(1):
            value[start : start + block.shape[0]] = block
            self.report(start + block.shape[0])
        return value
