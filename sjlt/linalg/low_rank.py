"""Low-rank approximation: from one pass, with rows in any order and from any number of workers, or from several."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..inputs.checks import integer, seed_number
from ..inputs.containers import is_tensor
from ..ledger import Ledger
from ..sketch import Sketch
from .checks import check_finite
from .containers import as_matrix, like_input
from .matrix import Matrix, Progress
from .products import one_blas_thread
from .truncated_svd import by_iterations, from_sketches
from .whitening import LostRangeError

ERROR_ROWS = 64  # of the sketch that estimates the error
FORMAT = 1  # of `to_bytes`
SINGLE_THREAD_OPERATIONS = 1e8  # n * width**2 below which BLAS threads would mostly wait for each other
SPARE_COLUMNS = 16  # of a dense Omega for all of A's range: it then loses part of it with a probability of about 2^-16
MAX_REDRAWS = 3  # of a Psi that lost part of A's range


class SVDSketch:
    """A sketch of A from which its truncated SVD is computed, without a second look at A.

    Rows may be added in any order, by any number of workers. The sketch stores Y = A Omega', which has few columns;
    Z = Psi A, with twice as many rows; and a small independent sketch that estimates the error: about
    8 (rank + oversampling) (m + 2 n) bytes.

    Parameters
    ----------
    shape : tuple of two ints, (m, n)
        Shape of A.
    rank : int, 1 to min(m, n)
        Rank of the truncated SVD.
    oversampling : int >= 0, optional
        Number of columns of Y beyond the rank. The default is max(rank, 8), limited such that rank + oversampling is at
        most min(m, n), as it must always be.
    seed : int, -2^63 to 2^64 - 1, default 0
        Sketches can be merged if they have the same shape, rank, oversampling and seed.

    Attributes
    ----------
    shape, rank, oversampling, seed
        The parameters.
    rows : Ledger
        The ranges of rows added so far.

    References
    ----------
    Tropp, Yurtsever, Udell, Cevher, "Practical sketching algorithms for low-rank matrix approximation", SIMAX 38(4),
    2017, algorithm 7. Nakatsukasa, "Fast and stable randomized low-rank matrix approximation", 2020 (arXiv 2009.11392).

    Examples
    --------
    >>> import numpy as np
    >>> from sjlt.linalg import SVDSketch
    >>> rng = np.random.default_rng(0)
    >>> A = rng.normal(size=(2000, 5)) @ rng.normal(size=(5, 300))
    >>> first, second = SVDSketch(A.shape, 5), SVDSketch(A.shape, 5)
    >>> first.update(0, A[:1200])
    >>> second.update(1200, A[1200:])
    >>> first.merge(second)
    >>> U, s, Vh = first.finalize()
    >>> bool(np.allclose((U * s) @ Vh, A))
    True
    """

    def __init__(self, shape: tuple[int, int], rank: int, *, oversampling: int | None = None, seed: int = 0):
        if not isinstance(shape, Sequence) or len(shape) != 2:
            raise TypeError(f"shape must be a tuple of two integers, (m, n), got {shape!r}")
        m, n = (integer(f"shape[{i}]", size, 1, 2**63 - 1) for i, size in enumerate(shape))
        self.shape = m, n
        self.rank, self.oversampling = _sizes(self.shape, rank, oversampling)
        self.seed = seed_number(seed) % 2**64
        self._omega, self._psi, self._phi = _sketches(self.shape, self.rank + self.oversampling, self.seed)
        self.rows = Ledger()
        self._Y: dict[int, np.ndarray] = {}  # by the first row of each block
        self._Z = np.zeros((m if self._psi is None else self._psi.n_components, n))
        self._E = np.zeros((self._phi.n_components, n))

    def update(self, row_offset: int, block: Any) -> None:
        """Add a block of consecutive rows of A.

        Parameters
        ----------
        row_offset : int >= 0
            Index of the block's first row in A.
        block : {ndarray, CSR or CSC matrix, CPU or CUDA tensor} of shape (rows, n), float32 or float64

        Raises
        ------
        TypeError
            If the block is in another container or dtype.
        ValueError
            If some rows have been added before (a retried update would count twice) or lie beyond m, the width is not
            n, or values are not finite or their sums overflow. The sketch is unchanged.
        RuntimeError
            If an earlier update or merge was interrupted while its result was added.
        """
        self.rows.check_current()
        if isinstance(block, str | os.PathLike):
            raise TypeError(f"block must be an array, a sparse matrix or a tensor, got the path {str(block)!r}")
        source = as_matrix(block, "block")
        start = integer("row_offset", row_offset, 0, self.shape[0])
        rows, width = source.shape
        stop = start + rows
        if width != self.shape[1] or stop > self.shape[0]:
            raise ValueError(f"rows {start} to {stop} of width {width} are not rows of A of shape {self.shape}")
        self.rows.check(start, stop)
        Y = _host(source.project(self._omega))
        if not np.isfinite(Y).all():
            row = start + int(np.flatnonzero(~np.isfinite(Y).all(1))[0])
            raise ValueError(f"row {row} of A has values that are not finite or too large")
        if self._psi is None:
            Z = np.zeros_like(self._Z)
            Z[start:stop] = _host(source.dense())
        else:
            Z = _host(source.quick_sketch(self._psi[:, start:stop]))
        E = _host(source.quick_sketch(self._phi[:, start:stop]))
        self._add({start: Y}, Z, E, [(start, stop)], source.dtype)

    def merge(self, other: SVDSketch) -> None:
        """Add another worker's sketch to this one.

        Raises
        ------
        TypeError, ValueError
            If `other` is not an SVDSketch with the same parameters, or has rows that this one has. The sketch is
            unchanged.
        RuntimeError
            If an earlier update or merge of either sketch was interrupted while its result was added.
        """
        if not isinstance(other, SVDSketch):
            raise TypeError(f"an SVDSketch merges with another, got {type(other).__name__}")
        if self._parameters() != other._parameters():
            raise ValueError(f"the sketches have different parameters: {self._parameters()} and {other._parameters()}")
        self.rows.check_current()
        other.rows.check_current()
        for start, stop in other.rows:
            self.rows.check(start, stop)
        self._add(other._Y, other._Z, other._E, list(other.rows), "float64")

    def _add(
        self, Y: dict[int, np.ndarray], Z: np.ndarray, E: np.ndarray, ranges: list[tuple[int, int]], dtype: str
    ) -> None:
        """Add the contributions of ranges of rows, all or none; if they overflow, the error names `dtype`."""
        with np.errstate(over="ignore", invalid="ignore"):
            Z, E = self._Z + Z, self._E + E
        if not (np.isfinite(Z).all() and np.isfinite(E).all()):
            start, stop = ranges[0][0], ranges[-1][1]
            raise ValueError(
                f"the sketch overflows with rows {start} to {stop} (exclusive) of A: they have values too close to the "
                f"largest {dtype}"
            )
        with self.rows.adding(ranges):
            self._Y.update(Y)
            self._Z, self._E = Z, E

    def finalize(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Compute the truncated SVD of A.

        Returns
        -------
        U : ndarray of shape (m, rank), float64
            Left singular vectors, as orthonormal columns.
        s : ndarray of shape (rank,), float64
            Singular values, in descending order.
        Vh : ndarray of shape (rank, n), float64
            Right singular vectors, as orthonormal rows.

        Raises
        ------
        ValueError
            If rows are missing; the message lists them.
        numpy.linalg.LinAlgError
            If the sketch lost part of A's range, which is very unlikely. Sketch A with another seed then.
        RuntimeError
            If an earlier update or merge was interrupted while its result was added.
        """
        self._check_complete()
        Y = np.concatenate([self._Y[start] for start in sorted(self._Y)])
        return from_sketches(np, Y, self._psi, self._Z, self.rank)

    def error(self, U: np.ndarray, s: np.ndarray, Vh: np.ndarray) -> float:
        """Estimate ||A - U diag(s) Vh||_F from a sketch of A that is independent of U, s and Vh.

        The relative standard deviation is at most sqrt(2)/8, and below 1/8 if the residual has many directions.
        """
        self._check_complete()
        return float(np.linalg.norm(self._E - ((self._phi @ U) * s) @ Vh))

    def to_bytes(self) -> bytes:
        """Serialize the sketch; `from_bytes` restores it."""
        self.rows.check_current()
        stream = io.BytesIO()
        starts = np.array(sorted(self._Y), np.int64)
        header = json.dumps({"format": FORMAT, **self._parameters(), "rows": list(self.rows)}).encode()
        Y = np.concatenate([np.empty((0, self._omega.n_components)), *(self._Y[int(start)] for start in starts)])
        np.savez(stream, header=np.frombuffer(header, np.uint8), starts=starts, Y=Y, Z=self._Z, E=self._E)
        return stream.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> SVDSketch:
        """Restore a sketch from the result of `to_bytes`; raise ValueError for other bytes."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in ("header", "starts", "Y", "Z", "E")}
        except Exception:  # BadZipFile, KeyError, EOFError, TokenError, ...; NumPy's messages recommend allow_pickle
            raise ValueError(f"not an SVDSketch: {len(data)} bytes that to_bytes has not written, or damaged") from None
        try:
            header = json.loads(arrays.pop("header").tobytes())
            version, ranges = header.pop("format"), header.pop("rows")
            if version != FORMAT:
                raise ValueError(f"its format is {version}; this version of sjlt reads format {FORMAT}")
            sketch = cls(tuple(header.pop("shape")), **header)
            sketch.rows = Ledger((start, stop) for start, stop in ranges)
            sketch._restore(**arrays)
        except Exception as e:
            raise ValueError(f"not an SVDSketch: {e}") from None
        return sketch

    def _restore(self, starts: np.ndarray, **arrays: np.ndarray) -> None:
        """Set Y, Z and E, or raise ValueError; `starts` are the first rows of Y's blocks."""
        m = self.shape[0]
        shapes = {"Y": (len(self.rows), self._omega.n_components), "Z": self._Z.shape, "E": self._E.shape}
        for name, shape in shapes.items():
            given = arrays[name]
            if given.shape != shape or given.dtype != np.float64:
                raise ValueError(f"{name} must be float64 of shape {shape}, got {given.dtype} of shape {given.shape}")
            if not np.isfinite(given).all():
                raise ValueError(f"{name} has values that are not finite")
        if starts.dtype != np.int64 or starts.ndim != 1 or any(stop > m for _, stop in self.rows):
            raise ValueError(f"starts of dtype {starts.dtype}, rows {list(self.rows)} of {m}")
        offset = 0
        for start, next_start in itertools.pairwise([*starts.tolist(), m]):
            range_stop = next((b for a, b in self.rows if a <= start < b), start)
            stop = min(range_stop, next_start)
            if not start < stop:
                raise ValueError(f"Y has a block of rows from {start} to {stop}, the rows seen are {list(self.rows)}")
            size = stop - start
            self._Y[start] = arrays["Y"][offset : offset + size]
            offset += size
        if offset != len(self.rows):
            raise ValueError(f"Y has blocks of {offset} rows for the {len(self.rows)} seen")
        self._Z, self._E = arrays["Z"], arrays["E"]

    def _parameters(self) -> dict[str, Any]:
        return {"shape": self.shape, "rank": self.rank, "oversampling": self.oversampling, "seed": self.seed}

    def _check_complete(self) -> None:
        self.rows.check_current()
        if gaps := self.rows.missing(0, self.shape[0]):
            shown = ", ".join(f"{a} to {b}" for a, b in gaps[:4]) + (", ..." if len(gaps) > 4 else "")
            missing = sum(b - a for a, b in gaps)
            raise ValueError(f"{missing} of {self.shape[0]} rows have not been seen: {shown} (exclusive)")


def svd_lowrank(
    A: Any,
    rank: int,
    *,
    oversampling: int | None = None,
    n_iter: int = 0,
    seed: int = 0,
    callback: Progress | None = None,
) -> tuple[Any, Any, Any]:
    """Truncated SVD of A from sketches of it.

    Parameters
    ----------
    A : {ndarray, CSR or CSC matrix or array, tensor, path of an .npy file} of shape (m, n), float32 or float64
        A file may be larger than memory; arrays of shape (m, rank) must fit in memory.
    rank : int, 1 to min(m, n)
        Rank of the truncated SVD.
    oversampling : int >= 0, optional
        Number of columns of the sketch beyond the rank. The default is max(rank, 8), and with n_iter > 0
        max(rank // 4, 8), rounded up to make rank + oversampling a multiple of 16; it is limited such that rank +
        oversampling is at most min(m, n), as it must always be.
    n_iter : int >= 0, default 0
        Number of passes over A after the first. 0: the method of `SVDSketch`. 1: A is multiplied by singular vectors of
        a sketch, which comes within 1 to 3 % of the best error. Each further pass is a subspace iteration, for singular
        values that decay slowly.
    seed : int, -2^63 to 2^64 - 1, default 0
        Seed of the sketches.
    callback : callable, optional
        As in `lstsq`.

    Returns
    -------
    U : {ndarray, tensor} of shape (m, rank), float64
        Left singular vectors, as orthonormal columns. All results are tensors on A's device if A is a tensor.
    s : {ndarray, tensor} of shape (rank,), float64
        Singular values, in descending order.
    Vh : {ndarray, tensor} of shape (rank, n), float64
        Right singular vectors, as orthonormal rows.

    Raises
    ------
    TypeError, ValueError
        As for `lstsq`.
    numpy.linalg.LinAlgError
        If n_iter is 0 and four sketches lost part of A's range, which is very unlikely.

    References
    ----------
    See `SVDSketch`; for n_iter > 0 Halko, Martinsson, Tropp, "Finding structure with randomness", SIAM Review 53(2),
    2011, algorithms 4.4 and 5.1, and Cohen, Elder, Musco, Musco, Persu, "Dimensionality reduction for k-means
    clustering and low rank approximation", STOC 2015: a sketch preserves the costs of all projections.

    Examples
    --------
    >>> import numpy as np, sjlt.linalg
    >>> rng = np.random.default_rng(0)
    >>> A = rng.normal(size=(2000, 5)) @ rng.normal(size=(5, 300))
    >>> U, s, Vh = sjlt.linalg.svd_lowrank(A, 5)
    >>> bool(np.allclose((U * s) @ Vh, A))
    True
    """
    n_iter = integer("n_iter", n_iter, 0, 1000)
    seed = seed_number(seed) % 2**64
    matrix = as_matrix(A, "A", callback)
    try:
        rank, oversampling = _sizes(matrix.shape, rank, oversampling, share=4 if n_iter else 1)
        width = rank + oversampling
        is_small = matrix.xp is np and matrix.shape[1] * width**2 < SINGLE_THREAD_OPERATIONS
        with one_blas_thread() if is_small else contextlib.nullcontext():
            if n_iter == 0:
                factors = _in_one_pass(matrix, rank, width, seed)
            else:
                factors = by_iterations(matrix, rank, width, n_iter, seed)
    finally:
        matrix.close()
    return tuple(like_input(A, factor) for factor in factors)


def _host(x: Any) -> np.ndarray:
    """Return x as a NumPy array."""
    return np.asarray(x.cpu() if is_tensor(x) else x)


def _sizes(shape: tuple[int, int], rank: int, oversampling: int | None, share: int = 1) -> tuple[int, int]:
    """Return (rank, oversampling), checked; by default rank / share columns, at least 8."""
    rank = integer("rank", rank, 1, min(shape), f" for shape {shape}")
    most = min(shape) - rank
    if oversampling is None:
        oversampling = max(rank // share, 8)
        if share > 1:  # a product with 64 columns is faster than one with 62
            oversampling += -(rank + oversampling) % 16
        return rank, min(oversampling, most)
    return rank, integer("oversampling", oversampling, 0, most, f" for rank {rank} and shape {shape}")


def _in_one_pass(matrix: Matrix, rank: int, width: int, seed: int) -> tuple[Any, Any, Any]:
    """Compute the truncated SVD as `SVDSketch` does, with one more pass for each Psi that lost part of A's range."""
    omega, psi, _ = _sketches(matrix.shape, width, seed)
    if psi is None:
        Y, Z = matrix.project(omega), matrix.dense()
    else:
        Y, Z = matrix.sketch_both(omega, psi)
    check_finite(matrix, Y)
    spare_seeds = iter(np.random.SeedSequence(seed).generate_state(3 + MAX_REDRAWS, np.uint64)[3:])
    while True:
        check_finite(matrix, Z)
        try:
            return from_sketches(matrix.xp, Y, psi, Z, rank)
        except LostRangeError:
            if psi is None or (spare_seed := next(spare_seeds, None)) is None:
                raise
            psi = dataclasses.replace(psi, seed=int(spare_seed))
            Z = matrix.quick_sketch(psi)


def _sketches(shape: tuple[int, int], width: int, seed: int) -> tuple[Sketch, Sketch | None, Sketch]:
    """Return Omega with `width` rows, Psi with twice as many, and the sketch that estimates the error.

    Psi is None, which stands for the identity, if A has fewer than twice as many rows as Psi would have.
    """
    m, n = shape
    rows = (-(-size // 4) * 4 for size in (width, 2 * width, ERROR_ROWS))  # divisible by the 4 stacks
    seeds = np.random.SeedSequence(seed).generate_state(3, np.uint64)
    parameters = zip((n, m, m), rows, seeds, strict=True)
    omega, psi, phi = (Sketch(size, k, stacks=4, seed=int(sketch_seed)) for size, k, sketch_seed in parameters)
    if width == min(shape):  # a sparse Omega that is square or nearly square is often singular
        omega = Sketch(n, width + SPARE_COLUMNS, density=1, seed=int(seeds[0]))
    return omega, None if m < 2 * psi.n_components else psi, phi
