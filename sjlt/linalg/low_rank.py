"""Low-rank approximation from one pass over the data, in any order of rows, by any number of workers."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import os
from typing import Any

import numpy as np

from ..inputs.checks import integer, seed_number
from ..inputs.containers import is_tensor
from ..ledger import Ledger
from ..sketch import Sketch
from .checks import check_finite
from .containers import like_input, matrix_of
from .matrix import Matrix, Progress
from .products import one_blas_thread
from .truncated_svd import by_iterations, from_sketches
from .whitening import LostRangeError

ERROR_ROWS = 64  # of the independent sketch that estimates the error: its relative standard deviation is below 1/8
FORMAT = 1  # of `to_bytes`
SMALL = 1e8  # operations of a factorization of (n, columns): one thread of BLAS does not wait for others
SPARE_COLUMNS = 16  # of a dense Omega for all of A's range, which it then loses with a probability of about 2^-16
REDRAWS = 3  # of a Psi that lost part of A's range


class SVDSketch:
    """A sketch of A for its truncated SVD, made in one pass: rows in any order, from any number of workers.

    Kept are Y = A Omega' of a few columns, Z = Psi A of twice as many rows, and a small independent sketch that
    estimates the error: about 8 (rank + oversampling) (m + 2 n) bytes. No block of A is needed twice.

    Parameters
    ----------
    shape : (m, n)
        Of A.
    rank : int, 1 to min(m, n)
    oversampling : int >= 0, optional
        Columns of Y beyond the rank; by default as many as the rank, at least 8. Together at most min(m, n).
    seed : int, -2^63 to 2^64 - 1, default 0
        Sketches can be merged where shape, rank, oversampling and seed are equal.

    Attributes
    ----------
    shape, rank, oversampling, seed
    rows : Ledger, the ranges of rows seen

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
        """Add the rows of A that start at `row_offset`.

        Parameters
        ----------
        row_offset : int >= 0
        block : {ndarray, CSR or CSC matrix, CPU or CUDA tensor} of shape (rows, n), float32 or float64

        Raises
        ------
        TypeError
            For other containers.
        ValueError
            For rows seen before (an update that is retried would count twice), rows beyond m, another width than n and
            numbers that are not finite, or whose sums overflow. The sketch is as before then.
        RuntimeError
            Where an earlier update or merge was interrupted while its result was added.
        """
        self.rows.check_current()
        if isinstance(block, str | os.PathLike):
            raise TypeError(f"block must be an array, a sparse matrix or a tensor, got the path {str(block)!r}")
        source = matrix_of(block, "block")
        start = integer("row_offset", row_offset, 0, self.shape[0])
        rows, width = source.shape
        stop = start + rows
        if width != self.shape[1] or stop > self.shape[0]:
            raise ValueError(f"rows {start} to {stop} of width {width} are not rows of A of shape {self.shape}")
        self.rows.check(start, stop)
        Y = _host(source.project(self._omega))
        if not np.isfinite(Y).all():
            row = start + int(np.flatnonzero(~np.isfinite(Y).all(1))[0])
            raise ValueError(f"row {row} of A holds numbers that are not finite, or too large")
        if self._psi is None:
            Z = np.zeros_like(self._Z)
            Z[start:stop] = _host(source.dense())
        else:
            Z = _host(source.quick_sketch(self._psi[:, start:stop]))
        E = _host(source.quick_sketch(self._phi[:, start:stop]))
        self._add({start: Y}, Z, E, [(start, stop)], source.dtype)

    def merge(self, other: SVDSketch) -> None:
        """Add another worker's sketch.

        Raises
        ------
        TypeError, ValueError
            Unless `other` is an SVDSketch of the same parameters that has seen other rows. The sketch is as before.
        RuntimeError
            Where an earlier update or merge of either was interrupted while its result was added.
        """
        if not isinstance(other, SVDSketch):
            raise TypeError(f"an SVDSketch merges with another, got {type(other).__name__}")
        if self._parameters() != other._parameters():
            raise ValueError(f"sketches of different parameters: {self._parameters()} and {other._parameters()}")
        self.rows.check_current()
        other.rows.check_current()
        for start, stop in other.rows:
            self.rows.check(start, stop)
        self._add(other._Y, other._Z, other._E, list(other.rows), "float64")

    def _add(
        self, Y: dict[int, np.ndarray], Z: np.ndarray, E: np.ndarray, ranges: list[tuple[int, int]], dtype: str
    ) -> None:
        """Add the terms of ranges of rows, all or none; the message of an overflow names `dtype`."""
        with np.errstate(over="ignore", invalid="ignore"):
            Z, E = self._Z + Z, self._E + E
        if not (np.isfinite(Z).all() and np.isfinite(E).all()):
            start, stop = ranges[0][0], ranges[-1][1]
            raise ValueError(
                f"the sketch overflows with rows {start} to {stop} (exclusive) of A: it holds numbers too close to the "
                f"largest {dtype}"
            )
        with self.rows.adding(ranges):
            self._Y.update(Y)
            self._Z, self._E = Z, E

    def finalize(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The truncated SVD of A.

        Returns
        -------
        U : ndarray of shape (m, rank), orthonormal columns
        s : ndarray of shape (rank,), descending
        Vh : ndarray of shape (rank, n), orthonormal rows

        Raises
        ------
        ValueError
            If rows are missing; the message names them.
        numpy.linalg.LinAlgError
            Where the sketch lost part of A's range, which is very unlikely: sketch A with another seed.
        """
        self._check_complete()
        Y = np.concatenate([self._Y[start] for start in sorted(self._Y)])
        return from_sketches(np, Y, self._psi, self._Z, self.rank)

    def error(self, U: np.ndarray, s: np.ndarray, Vh: np.ndarray) -> float:
        """An estimate of ||A - U diag(s) Vh||_F, by a sketch of A that had no part in finding U, s and Vh.

        Its relative standard deviation is below 1/8 for a residual of many directions, and at most sqrt(2)/8.
        """
        self._check_complete()
        return float(np.linalg.norm(self._E - ((self._phi @ U) * s) @ Vh))

    def to_bytes(self) -> bytes:
        """Serialize the sketch."""
        self.rows.check_current()
        stream = io.BytesIO()
        starts = np.array(sorted(self._Y), np.int64)
        header = json.dumps({"format": FORMAT, **self._parameters(), "rows": list(self.rows)}).encode()
        Y = np.concatenate([np.empty((0, self._omega.n_components)), *(self._Y[int(start)] for start in starts)])
        np.savez(stream, header=np.frombuffer(header, np.uint8), starts=starts, Y=Y, Z=self._Z, E=self._E)
        return stream.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> SVDSketch:
        """The sketch from the bytes of `to_bytes`; ValueError for other bytes."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as held:
                arrays = {name: held[name] for name in ("header", "starts", "Y", "Z", "E")}
            header = json.loads(arrays.pop("header").tobytes())
            version, ranges = header.pop("format"), header.pop("rows")
            if version != FORMAT:
                raise ValueError(f"format {version}, this version of sjlt knows {FORMAT}")
            sketch = cls(tuple(header.pop("shape")), **header)
            sketch.rows = Ledger((start, stop) for start, stop in ranges)
            sketch._restore(**arrays)
        except Exception as e:
            raise ValueError(f"not an SVDSketch: {e}") from None
        return sketch

    def _restore(self, starts: np.ndarray, **arrays: np.ndarray) -> None:
        """Set the sums to the arrays Y, Z and E, or raise ValueError; `starts` are the first rows of Y's blocks."""
        m = self.shape[0]
        shapes = {"Y": (len(self.rows), self._omega.n_components), "Z": self._Z.shape, "E": self._E.shape}
        for name, shape in shapes.items():
            given = arrays[name]
            if given.shape != shape or given.dtype != np.float64:
                raise ValueError(f"{name} must be float64 of shape {shape}, is {given.dtype} of shape {given.shape}")
            if not np.isfinite(given).all():
                raise ValueError(f"{name} holds numbers that are not finite")
        if starts.dtype != np.int64 or starts.ndim != 1 or any(stop > m for _, stop in self.rows):
            raise ValueError(f"starts of dtype {starts.dtype}, rows {list(self.rows)} of {m}")
        edges = [*starts.tolist(), m]
        at = 0
        for start, following in itertools.pairwise(edges):
            end = next((b for a, b in self.rows if a <= start < b), start)
            if not start < min(end, following):
                raise ValueError(f"a block of rows from {start} to {min(end, following)}, rows seen {list(self.rows)}")
            size = min(end, following) - start
            self._Y[start] = arrays["Y"][at : at + size]
            at += size
        if at != len(self.rows):
            raise ValueError(f"blocks of {at} rows for the {len(self.rows)} seen")
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
    """The truncated SVD of A from sketches of it.

    Parameters
    ----------
    A : {ndarray, CSR or CSC matrix or array, tensor, path of an .npy file} of shape (m, n), float32 or float64
        A file may be larger than memory; a result of (m, rank) fits there.
    rank : int, 1 to min(m, n)
    oversampling : int >= 0, optional
        Further columns; by default as many as the rank, with n_iter > 0 a quarter of that, at least 8, up to the next
        multiple of 16 columns. Together at most min(m, n).
    n_iter : int >= 0, default 0
        Passes over A after the first. 0: the method of `SVDSketch`. 1: A is multiplied by singular vectors of a sketch,
        which comes within 1 to 3 % of the best error. More: each is a subspace iteration, for slow decay.
    seed : int, -2^63 to 2^64 - 1, default 0
    callback : callable, optional
        Called as ``callback(pass, rows done, m)`` while A is read.

    Returns
    -------
    U : {ndarray, tensor} of shape (m, rank), orthonormal columns
    s : {ndarray, tensor} of shape (rank,), descending
    Vh : {ndarray, tensor} of shape (rank, n), orthonormal rows
        float64, tensors on A's device where A is a tensor.

    Raises
    ------
    TypeError, ValueError
        As for `lstsq`, and for parameters out of range.
    numpy.linalg.LinAlgError
        For n_iter = 0, where four sketches lost part of A's range, which is very unlikely.

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
    matrix = matrix_of(A, "A", callback)
    try:
        rank, oversampling = _sizes(matrix.shape, rank, oversampling, share=4 if n_iter else 1)
        width = rank + oversampling
        is_small = matrix.xp is np and matrix.shape[1] * width**2 < SMALL
        with one_blas_thread() if is_small else contextlib.nullcontext():
            if n_iter == 0:
                factors = _in_one_pass(matrix, rank, width, seed)
            else:
                factors = by_iterations(matrix, rank, width, n_iter, seed)
    finally:
        matrix.close()
    return tuple(like_input(A, factor) for factor in factors)


def _host(x: Any) -> np.ndarray:
    return np.asarray(x.cpu() if is_tensor(x) else x)


def _sizes(shape: tuple[int, int], rank: int, oversampling: int | None, share: int = 1) -> tuple[int, int]:
    """(rank, oversampling), by default rank / share columns."""
    rank = integer("rank", rank, 1, min(shape), f" for shape {shape}")
    most = min(shape) - rank
    if oversampling is None:
        oversampling = max(rank // share, 8)
        if share > 1:  # a product with 64 columns takes less time than one with 62
            oversampling += -(rank + oversampling) % 16
        return rank, min(oversampling, most)
    return rank, integer("oversampling", oversampling, 0, most, f" for rank {rank} and shape {shape}")


def _in_one_pass(matrix: Matrix, rank: int, width: int, seed: int) -> tuple[Any, Any, Any]:
    """The truncated SVD by the method of `SVDSketch`; one more pass where Psi lost part of A's range."""
    omega, psi, _ = _sketches(matrix.shape, width, seed)
    if psi is None:
        Y, Z = matrix.project(omega), matrix.dense()
    else:
        Y, Z = matrix.sketch_both(omega, psi)
    check_finite(matrix, Y)
    words = iter(np.random.SeedSequence(seed).generate_state(3 + REDRAWS, np.uint64)[3:])
    while True:
        check_finite(matrix, Z)
        try:
            return from_sketches(matrix.xp, Y, psi, Z, rank)
        except LostRangeError:
            if psi is None or (word := next(words, None)) is None:
                raise
            psi = dataclasses.replace(psi, seed=int(word))
            Z = matrix.quick_sketch(psi)


def _sketches(shape: tuple[int, int], width: int, seed: int) -> tuple[Sketch, Sketch | None, Sketch]:
    """Omega for `width` columns, Psi for twice as many rows, and the sketch that estimates the error.

    Psi is None, for the identity, where A has less than twice as many rows.
    """
    m, n = shape
    rows = (-(-size // 4) * 4 for size in (width, 2 * width, ERROR_ROWS))  # 4 stacks divide them
    words = np.random.SeedSequence(seed).generate_state(3, np.uint64)
    sizes = zip((n, m, m), rows, words, strict=True)
    omega, psi, phi = (Sketch(size, k, stacks=4, seed=int(word)) for size, k, word in sizes)
    if width == min(shape):  # a sparse Omega that is square, or nearly, is often singular
        omega = Sketch(n, width + SPARE_COLUMNS, density=1, seed=int(words[0]))
    return omega, None if m < 2 * psi.n_components else psi, phi
