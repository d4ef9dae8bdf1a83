"""Low-rank approximation from one pass over the data, in any order of rows, by any number of workers."""

from __future__ import annotations

import contextlib
import io
import json
import os
from typing import Any

import numpy as np

from ..inputs.checks import integer
from ..inputs.containers import is_tensor
from ..ledger import Ledger
from ..sketch import Sketch
from .checks import check_finite
from .matrix import Matrix, Progress, like_input, matrix_of
from .products import multiply, normal_product, one_blas_thread
from .sketching import STACKS, embedding
from .sums import Gram
from .triangular import inverse
from .whitening import NOISE, cholesky, power_of_two

ERROR_ROWS = 64  # of the independent sketch that estimates the error: its relative standard deviation is below 1/8
SKETCH_ROWS = 16  # of the sketch for n_iter > 0, per column of V: within 1 to 3 % of the best error
SKETCH_ITERATIONS = 6  # subspace iterations on that sketch
MODERATE = 1e2  # condition number of Y up to which Y'Y is good enough: Q'Q = I up to its square times eps
FORMAT = 1  # of `to_bytes`
SMALL = 1e8  # operations of a factorization of (n, columns): one thread of BLAS does not wait for others
SPARE_COLUMNS = 16  # of a dense Omega for all of A's range, which it then loses with a probability of about 2^-16
MIN_EMBEDDING = 0.01  # smallest singular value of Psi Q; a sketch of twice as many rows keeps it above 0.2


class SVDSketch:
    """A sketch of A for its truncated SVD, made in one pass: rows in any order, from any number of workers.

    Kept are Y = A Omega' of a few columns, Z = Psi A of twice as many rows, and a small independent sketch that
    estimates the error: about 2 (rank + oversampling) (m + 2 n) bytes times 4. No block of A is needed twice.

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
        self.seed = integer("seed", seed, -(2**63), 2**64 - 1) % 2**64
        self._omega, self._psi, self._phi = _sketches(self.shape, self.rank + self.oversampling, self.seed)
        self.rows = Ledger()
        self._Y: dict[int, np.ndarray] = {}  # by the first row of each block
        self._Z = np.zeros((self._psi.n_components, n))
        self._E = np.zeros((self._phi.n_components, n))

    def update(self, row_offset: int, block: Any) -> None:
        """See the rows of A from `row_offset` on.

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
            numbers that are not finite. The sketch is as before then.
        """
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
        Z = _host(source.quick_sketch(self._psi[:, start:stop]))
        E = _host(source.quick_sketch(self._phi[:, start:stop]))
        self._Z += Z  # after all that may be interrupted for lack of time or memory: an update is whole or not made
        self._E += E
        self._Y[start] = Y
        self.rows.add(start, stop)

    def merge(self, other: SVDSketch) -> None:
        """See what another worker's sketch has seen.

        Raises
        ------
        TypeError, ValueError
            Unless `other` is an SVDSketch of the same parameters that has seen other rows. The sketch is as before.
        """
        if not isinstance(other, SVDSketch):
            raise TypeError(f"an SVDSketch merges with another, got {type(other).__name__}")
        if self._parameters() != other._parameters():
            raise ValueError(f"sketches of different parameters: {self._parameters()} and {other._parameters()}")
        self.rows.merge(other.rows)
        self._Y.update(other._Y)
        self._Z += other._Z
        self._E += other._E

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
        """
        self._check_complete()
        Y = np.concatenate([self._Y[start] for start in sorted(self._Y)])
        return _from_sketches(np, Y, self._psi, self._Z, self.rank, self.rank + self.oversampling)

    def error(self, U: np.ndarray, s: np.ndarray, Vh: np.ndarray) -> float:
        """An estimate of ||A - U diag(s) Vh||_F, by a sketch of A that had no part in finding U, s and Vh.

        Its relative standard deviation is below 1/8 for a residual of many directions, and at most sqrt(2)/8.
        """
        self._check_complete()
        return float(np.linalg.norm(self._E - ((self._phi @ U) * s) @ Vh))

    def to_bytes(self) -> bytes:
        """All of the sketch; `from_bytes` makes an equal one of it."""
        stream = io.BytesIO()
        starts = np.array(sorted(self._Y), np.int64)
        header = json.dumps({"format": FORMAT, **self._parameters(), "rows": list(self.rows)}).encode()
        Y = np.concatenate([self._Y[int(start)] for start in starts]) if starts.size else np.empty((0, 0))
        np.savez(stream, header=np.frombuffer(header, np.uint8), starts=starts, Y=Y, Z=self._Z, E=self._E)
        return stream.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> SVDSketch:
        """The sketch that `to_bytes` described; ValueError where the bytes are not one."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as held:
                arrays = {name: held[name] for name in ("header", "starts", "Y", "Z", "E")}
            header = json.loads(arrays["header"].tobytes())
            version, ranges = header.pop("format"), header.pop("rows")
            if version != FORMAT:
                raise ValueError(f"format {version}, this version of sjlt knows {FORMAT}")
            sketch = cls(tuple(header.pop("shape")), **header)
            sketch.rows = Ledger((start, stop) for start, stop in ranges)
            starts = [int(start) for start in arrays["starts"]]
            if any(arrays[name].shape != held.shape for name, held in (("Z", sketch._Z), ("E", sketch._E))):
                raise ValueError(f"sums of shapes {arrays['Z'].shape} and {arrays['E'].shape}")
            if arrays["Y"].shape[0] != len(sketch.rows):
                raise ValueError(f"{arrays['Y'].shape[0]} rows for the {len(sketch.rows)} seen")
        except Exception as e:
            raise ValueError(f"not an SVDSketch: {e}") from None
        sketch._Z, sketch._E = arrays["Z"], arrays["E"]
        stops = [*starts[1:], sketch.shape[0]]
        at = 0
        for start, stop in zip(starts, stops, strict=True):
            end = next(b for a, b in sketch.rows if a <= start < b)
            size = min(stop, end) - start
            sketch._Y[start] = arrays["Y"][at : at + size]
            at += size
        return sketch

    def _parameters(self) -> dict[str, Any]:
        return {"shape": self.shape, "rank": self.rank, "oversampling": self.oversampling, "seed": self.seed}

    def _check_complete(self) -> None:
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
        For data as `lstsq` refuses it, and parameters out of range.

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
    seed = integer("seed", seed, -(2**63), 2**64 - 1) % 2**64
    matrix = matrix_of(A, "A", callback)
    try:
        rank, oversampling = _sizes(matrix.shape, rank, oversampling, share=4 if n_iter else 1)
        width = rank + oversampling
        is_small = matrix.xp is np and matrix.shape[1] * width**2 < SMALL
        with one_blas_thread() if is_small else contextlib.nullcontext():
            if n_iter == 0:
                omega, psi, _ = _sketches(matrix.shape, width, seed)
                Y, Z = matrix.sketch_both(omega, psi)
                check_finite(matrix, Y)
                factors = _from_sketches(matrix.xp, Y, psi, Z, rank, width)
            else:
                factors = _by_iterations(matrix, rank, width, n_iter, seed)
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


def _sketches(shape: tuple[int, int], width: int, seed: int) -> tuple[Sketch, Sketch, Sketch]:
    """Omega for `width` columns, Psi for twice as many rows, and the sketch that estimates the error."""
    m, n = shape
    rows = (-(-size // 4) * 4 for size in (width, 2 * width, ERROR_ROWS))  # 4 stacks divide them
    words = np.random.SeedSequence(seed).generate_state(3, np.uint64)
    sizes = zip((n, m, m), rows, words, strict=True)
    omega, psi, phi = (Sketch(size, k, stacks=4, seed=int(word)) for size, k, word in sizes)
    if width == min(shape):  # a sparse Omega that is square, or nearly, is often singular
        omega = Sketch(n, width + SPARE_COLUMNS, density=1, seed=int(words[0]))
    return omega, psi, phi


def _from_sketches(xp: Any, Y: Any, psi: Sketch, Z: Any, rank: int, width: int) -> tuple[Any, Any, Any]:
    """The truncated SVD from Y = A Omega' and Z = Psi A, by way of `width` directions of the range of Y."""
    if Y.shape[1] >= width + SPARE_COLUMNS:  # stacks round the width up by 3 at most
        P = xp.linalg.svd(Y, full_matrices=False)[0][:, :width]
        E, core = None, psi @ P
    else:
        P, E, _, core = _orthonormal(xp, Y, psi)
    # Psi A = Psi Q X by least squares: neither a pseudoinverse nor a product of ill-conditioned factors is formed.
    core_U, core_s, core_Vh = xp.linalg.svd(core, full_matrices=False)
    if float(core_s[-1]) < MIN_EMBEDDING:
        raise np.linalg.LinAlgError(
            f"the sketch lost part of A's range (smallest singular value {float(core_s[-1]):.1e}): use another seed"
        )
    X = core_Vh.T @ ((core_U.T @ Z) / core_s[:, None])
    U, s, Vh = xp.linalg.svd(X, full_matrices=False)
    return _times(P, E, U[:, :rank]), s[:rank], Vh[:rank]


def _by_iterations(matrix: Matrix, rank: int, width: int, n_iter: int, seed: int) -> tuple[Any, Any, Any]:
    """The truncated SVD of A V for singular vectors V of a sketch of A, refined by n_iter - 1 subspace iterations.

    The sketch has so many more rows than V columns that its singular vectors are nearly A's, and it is small: finding
    them costs next to nothing beside a pass over A.
    """
    xp = matrix.xp
    S = embedding(*matrix.shape, SKETCH_ROWS * width, seed, nnz=STACKS)
    Z = matrix.dense() if S is None else matrix.quick_sketch(S)
    check_finite(matrix, Z)
    top = power_of_two(float(abs(Z).max()))  # A'A might overflow
    Z = Z / top
    V = matrix.array(np.random.default_rng(seed).standard_normal((matrix.shape[1], width)))
    for _ in range(SKETCH_ITERATIONS):
        V, _ = xp.linalg.qr(normal_product(Z, V) if xp is np else Z.T @ (Z @ V))
    for _ in range(n_iter - 1):
        V, _ = xp.linalg.qr(matrix.normal_times(V / top))
    P, E, T, _ = _orthonormal(xp, matrix.times(V), S)
    U, s, Vh = xp.linalg.svd(T, full_matrices=False)
    return _times(P, E, U[:, :rank]), s[:rank], Vh[:rank] @ V.T


def _orthonormal(xp: Any, Y: Any, S: Sketch | None) -> tuple[Any, Any, Any, Any]:
    """(P, E, T, S P E) for a tall Y = P E T, where Q = P E is orthonormal; E = None stands for the identity.

    Householder QR, or a fraction of its time where a sketch shows that Y has full rank: in a basis in which Y is well
    conditioned a Cholesky factorization is as good.
    """
    SY = None if S is None else S @ Y
    if SY is not None:
        U, sigma, Vh = xp.linalg.svd(SY, full_matrices=False)
        if float(sigma[-1]) > NOISE * float(sigma[0]):
            W = Vh.T / sigma
            if float(sigma[0]) < MODERATE * float(sigma[-1]):
                C = cholesky(xp, W.T @ _gram(Y) @ W).T
                E = inverse(xp, C)
                return Y, W @ E, (C * sigma) @ Vh, U @ E
            P = _times(Y, None, W)
            C = cholesky(xp, _gram(P)).T
            E = inverse(xp, C)
            return P, E, (C * sigma) @ Vh, U @ E
    Q, R = xp.linalg.qr(Y)
    return Q, None, R, None if S is None else S @ Q


def _gram(Y: Any) -> Any:
    total = Gram(None)
    total.add(0, Y)
    return total.value


def _times(P: Any, E: Any, U: Any) -> Any:
    U = U if E is None else E @ U
    return multiply(P, U) if isinstance(P, np.ndarray) else P @ U
