"""QR factorization with column pivoting, and leverage scores, of tall matrices."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import scipy.linalg

from ..inputs.checks import below_one, integer
from .matrix import Matrix, Progress, check_finite, like_input, matrix_of
from .sketching import embedding
from .sums import Gram, Sum
from .whitening import NOISE, Whitening, cholesky


def qr(
    A: Any,
    *,
    pivoting: bool = True,
    mode: Literal["reduced", "r"] = "reduced",
    seed: int = 0,
    callback: Progress | None = None,
) -> Any:
    """QR factorization of a tall matrix: A[:, J] = Q R.

    The pivots and a first R come from a sketch of A; one Cholesky factorization of the then well-conditioned A R^-1
    makes it exact. Numerically this is as stable as Householder QR, whatever A's condition number.

    Parameters
    ----------
    A : {ndarray, CSR or CSC matrix or array, tensor, path of an .npy file} of shape (m, n), m >= n, float32 or float64
    pivoting : bool, default True
        Whether to reveal A's numerical rank r by column pivoting. Without it A must have full rank.
    mode : {"reduced", "r"}, default "reduced"
        "r" leaves out Q.
    seed : int, -2^63 to 2^64 - 1, default 0
    callback : callable, optional
        As in `lstsq`.

    Returns
    -------
    Q : {ndarray, tensor} of shape (m, r), orthonormal columns; with mode "reduced" only
    R : {ndarray, tensor} of shape (r, n), upper triangular (trapezoidal where r < n)
    J : ndarray of shape (n,), int64, the columns' order; with `pivoting` only

    Raises
    ------
    TypeError, ValueError
        For data as `lstsq` refuses it, and for m < n.
    numpy.linalg.LinAlgError
        Without pivoting, where A does not have full rank.

    References
    ----------
    Melnichenko, Balabanov, Murray, Demmel, Mahoney, Luszczek, "CholeskyQR with randomization and pivoting for tall
    matrices (CQRRPT)", 2023 (arXiv 2311.08316).

    Examples
    --------
    >>> import numpy as np, sjlt.linalg
    >>> A = np.random.default_rng(0).normal(size=(5000, 20))
    >>> Q, R, J = sjlt.linalg.qr(A)
    >>> bool(np.allclose(Q @ R, A[:, J])), bool(np.allclose(Q.T @ Q, np.eye(20)))
    (True, True)
    """
    if mode not in ("reduced", "r"):
        raise ValueError(f'mode must be "reduced" or "r", got {mode!r}')
    matrix = matrix_of(A, "A", callback)
    try:
        m, n = matrix.shape
        if m < n:
            raise ValueError(f"A must have at least as many rows as columns, got shape {matrix.shape}")
        xp = matrix.xp
        R, J = _pivoted(matrix, pivoting, integer("seed", seed, -(2**63), 2**64 - 1))
        r = R.shape[0]
        triangle, columns = R[:, :r], matrix.indices(J[:r])
        solved = _Solved(m, xp, triangle, columns, keep=mode == "reduced")
        matrix.run(solved, width=r)
        correction = cholesky(xp, solved.gram).T
        R = correction @ R
        order = (J,) if pivoting else ()
        if mode == "r":
            return like_input(A, R) if not pivoting else (like_input(A, R), *order)
        Q = solved.value
        for i in range(0, m, 1 << 16):
            Q[i : i + (1 << 16)] = _solve_right(xp, Q[i : i + (1 << 16)], correction)
        return like_input(A, Q), like_input(A, R), *order
    finally:
        matrix.close()


def _pivoted(matrix: Matrix, pivoting: bool, seed: int) -> tuple[Any, np.ndarray]:
    """(R, J) of the sketch's QR factorization, cut at its numerical rank."""
    SA = _sketched(matrix, seed)
    host = SA if matrix.xp is np else SA.cpu().numpy()  # torch has no pivoted QR
    if pivoting:
        R, J = scipy.linalg.qr(host, mode="r", pivoting=True, check_finite=False)
    else:
        R, J = np.linalg.qr(host, mode="r"), np.arange(host.shape[1])
    n = host.shape[1]
    diagonal = np.abs(np.diagonal(R))
    if pivoting:
        r = int((diagonal > NOISE * math.sqrt(n) * diagonal[0]).sum())
    elif diagonal.min() > NOISE * diagonal.max():
        r = n
    else:
        j = int(diagonal.argmin())
        raise np.linalg.LinAlgError(
            f"A does not have full rank: column {j} adds {diagonal[j]:.1e} to those before it, the largest "
            f"{diagonal.max():.1e}; use pivoting=True"
        )
    return matrix.array(np.triu(R[:r])), np.asarray(J, np.int64)


def _sketched(matrix: Matrix, seed: int) -> Any:
    m, n = matrix.shape
    S = embedding(m, n, 4 * n, seed)
    SA = matrix.dense() if S is None else matrix.sketch(S)
    check_finite(matrix, SA)
    return SA


def _solve_right(xp: Any, a: Any, triangle: Any) -> Any:
    """a R^-1 for an upper triangular R."""
    if xp is not np:
        return xp.linalg.solve_triangular(triangle, a, upper=True, left=False)
    return scipy.linalg.solve_triangular(triangle, a.T, trans="T", check_finite=False).T


class _Solved(Sum):
    """P = A[:, columns] R^-1, row by row, and P' P."""

    def __init__(self, m: int, xp: Any, triangle: Any, columns: Any, keep: bool):
        self._xp, self._triangle, self._columns = xp, triangle, columns
        self.gram: Any = 0
        self.value = triangle.new_empty((m, triangle.shape[0])) if xp is not np else np.empty((m, triangle.shape[0]))
        if not keep:
            self.value = None

    def add(self, start: int, block: Any) -> None:
        chosen = block[:, self._columns]
        if hasattr(chosen, "tocoo"):
            chosen = chosen.toarray()
        part = _solve_right(self._xp, chosen, self._triangle)
        self.gram = self.gram + part.T @ part
        if self.value is not None:
            self.value[start : start + part.shape[0]] = part


# ------------------------------------------------------------------------------------- leverage scores


def leverage_scores(A: Any, *, rcond: float | None = None, seed: int = 0, callback: Progress | None = None) -> Any:
    """The leverage scores of A's rows: the squared row norms of an orthonormal basis of A's range.

    Exact up to rounding (times A's condition number), in three passes: a sketch whitens A, and a Cholesky factorization
    does the rest.

    Parameters
    ----------
    A : {ndarray, CSR or CSC matrix or array, tensor, path of an .npy file} of shape (m, n), float32 or float64
    rcond : float in [0, 1), optional
        Singular values of A's sketch up to rcond times the largest count as zero; by default 10 machine epsilons.
    seed : int, -2^63 to 2^64 - 1, default 0
    callback : callable, optional
        As in `lstsq`.

    Returns
    -------
    {ndarray, tensor} of shape (m,), float64, from 0 to 1; they sum to A's rank

    Raises
    ------
    TypeError, ValueError
        For data as `lstsq` refuses it, and for rcond out of range.

    References
    ----------
    Drineas, Magdon-Ismail, Mahoney, Woodruff, "Fast approximation of matrix coherence and statistical leverage", JMLR
    13, 2012, whose approximate scores these refine.

    Examples
    --------
    >>> import numpy as np, sjlt.linalg
    >>> A = np.random.default_rng(0).normal(size=(5000, 20))
    >>> scores = sjlt.linalg.leverage_scores(A)
    >>> bool(np.isclose(scores.sum(), 20))
    True
    """
    rcond = None if rcond is None else below_one("rcond", rcond)
    matrix = matrix_of(A, "A", callback)
    try:
        xp = matrix.xp
        SA = _sketched(matrix, integer("seed", seed, -(2**63), 2**64 - 1))
        R = xp.linalg.qr(SA, mode="r") if xp is np else xp.linalg.qr(SA, mode="r").R
        scores = _RowNorms(matrix.shape[0], xp, R)
        if float(abs(R).max()) == 0:
            return like_input(A, scores.value)
        cut = NOISE if rcond is None else rcond
        whitening = Whitening.triangular(xp, R) if cut <= NOISE else None
        if whitening is None:
            whitening = Whitening.by_singular_vectors(xp, R, cut)
        W = whitening.matrix()
        gram = Gram(W)
        matrix.run(gram, width=whitening.rank)
        scores.basis = _solve_right(xp, W, cholesky(xp, gram.value).T)
        matrix.run(scores, width=whitening.rank)
        return like_input(A, scores.value)
    finally:
        matrix.close()


class _RowNorms(Sum):
    """The squared norms of the rows of A times a basis."""

    def __init__(self, m: int, xp: Any, like: Any):
        self.basis: Any = None
        self.value = np.zeros(m) if xp is np else like.new_zeros(m)

    def add(self, start: int, block: Any) -> None:
        product = block @ self.basis
        self.value[start : start + product.shape[0]] = (product * product).sum(1)
