"""QR factorization with column pivoting, and leverage scores, of tall matrices."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import scipy.linalg

from ..inputs.checks import below_one, seed_number
from .checks import check_finite
from .containers import like_input, matrix_of
from .matrix import Matrix, Progress
from .sketching import embedding
from .sums import Gram, Sum
from .triangular import r_factor, solve_right
from .whitening import EPS, MAX_TRIANGULAR_CONDITION, NOISE, Whitening, cholesky, rounding_level

MAX_DEVIATION = 0.9  # of a squared column norm of A R^-1 from 1; a sketch leaves less than 0.75


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
    makes it exact. Numerically this is as stable as Householder QR, at any condition number up to about 1e13.

    Parameters
    ----------
    A : {ndarray, CSR or CSC matrix or array, tensor, path of an .npy file} of shape (m, n), m >= n, float32 or float64
    pivoting : bool, default True
        Whether to reveal A's numerical rank r by column pivoting. Without it A must have full rank: its columns may
        have any scales, but none may lie in the span of those before it, up to rounding.
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
        As for `lstsq`, and for m < n.
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
    seed = seed_number(seed)
    matrix = matrix_of(A, "A", callback)
    try:
        m, n = matrix.shape
        if m < n:
            raise ValueError(f"A must have at least as many rows as columns, got shape {matrix.shape}")
        xp = matrix.xp
        R, J = _pivoted(matrix, pivoting, seed)
        r = R.shape[0]
        triangle, columns = R[:, :r], matrix.indices(J[:r])
        solved = _Solved(m, xp, triangle, columns, keep=mode == "reduced")
        matrix.run(solved, width=r)
        if not pivoting:
            _check_basis(xp, solved.gram)
        correction = cholesky(xp, solved.gram).T
        R = correction @ R
        order = (J,) if pivoting else ()
        if mode == "r":
            return like_input(A, R) if not pivoting else (like_input(A, R), *order)
        Q = solved.value
        for i in range(0, m, 1 << 16):
            Q[i : i + (1 << 16)] = solve_right(xp, Q[i : i + (1 << 16)], correction)
        return like_input(A, Q), like_input(A, R), *order
    finally:
        matrix.close()


def _pivoted(matrix: Matrix, pivoting: bool, seed: int) -> tuple[Any, np.ndarray]:
    """(R, J) of the sketch's QR factorization, cut at its numerical rank."""
    factor, cut = _sketched_factor(matrix, seed)
    n = matrix.shape[1]
    if not pivoting:
        _check_full_rank(matrix.xp, factor)
        return factor, np.arange(n)
    host = factor if matrix.xp is np else factor.cpu().numpy()  # torch has no pivoted QR
    R, J = scipy.linalg.qr(host, mode="r", pivoting=True, check_finite=False)
    diagonal = np.abs(np.diagonal(R))
    r = int((diagonal > max(cut, NOISE * math.sqrt(n)) * diagonal[0]).sum())
    return matrix.array(np.triu(R[:r])), np.asarray(J, np.int64)


def _check_full_rank(xp: Any, R: Any) -> None:
    """Raise LinAlgError where a column lies in the span of those before it, whatever the scales of the columns."""
    added = abs(xp.diagonal(R)) / _column_norms(xp, R)
    j = int(added.argmin())
    if not float(added[j]) > NOISE:
        raise np.linalg.LinAlgError(
            f"A does not have full rank: of column {j} a fraction of {float(added[j]):.1e} is not in the span of the "
            f"columns before it, at most {NOISE:.1e} counts as zero; use pivoting=True"
        )


def _check_basis(xp: Any, gram: Any) -> None:
    """Raise LinAlgError where A R^-1 is far from orthonormal: a column added but rounding errors to R."""
    squares = xp.diagonal(gram)
    j = int(abs(squares - 1).argmax())
    if not abs(float(squares[j]) - 1) < MAX_DEVIATION:
        raise np.linalg.LinAlgError(
            f"A does not have full rank: what column {j} adds to those before it are rounding errors; use pivoting=True"
        )


def _sketched_factor(matrix: Matrix, seed: int) -> tuple[Any, float]:
    """(R of the QR factorization of A's sketch or of A itself, the relative size of its rounding errors)."""
    m, n = matrix.shape
    S = embedding(m, n, 4 * n, seed)
    SA = matrix.dense() if S is None else matrix.sketch(S)
    check_finite(matrix, SA)
    return r_factor(matrix.xp, SA), rounding_level((m, n), S is None)


def _column_norms(xp: Any, R: Any) -> Any:
    """The norms of R's columns, 1 for columns of zeros."""
    top = abs(R).max(0) if xp is np else abs(R).amax(0)
    top = xp.where(top > 0, top, 1 + 0 * top)
    norms = xp.sqrt(((R / top) ** 2).sum(0)) * top  # squares of R might overflow
    return xp.where(norms > 0, norms, 1 + 0 * norms)


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
        part = solve_right(self._xp, chosen, self._triangle)
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
        Singular values of A's sketch up to rcond times the largest count as zero; by default 10 machine epsilons (where
        A itself is factored at least max(m, n) of them), with columns of A scaled to one norm.
    seed : int, -2^63 to 2^64 - 1, default 0
    callback : callable, optional
        As in `lstsq`.

    Returns
    -------
    {ndarray, tensor} of shape (m,), float64, from 0 to 1; they sum to A's rank

    Raises
    ------
    TypeError, ValueError
        As for `lstsq`, and for rcond out of range.

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
    rcond, seed = None if rcond is None else below_one("rcond", rcond), seed_number(seed)
    matrix = matrix_of(A, "A", callback)
    try:
        xp = matrix.xp
        R, cut = _sketched_factor(matrix, seed)
        scores = _RowNorms(matrix.shape[0], xp, R)
        if float(abs(R).max()) == 0:
            return like_input(A, scores.value)
        if rcond is None:  # the range of A does not depend on the scales of its columns
            norms = _column_norms(xp, R)
            whitening = Whitening.triangular(xp, R / norms, min(MAX_TRIANGULAR_CONDITION, 1 / cut))
            if whitening is None:
                whitening = Whitening.by_singular_vectors(xp, R / norms, cut)
            W = whitening.matrix() / norms[:, None]
        else:
            whitening = Whitening.by_singular_vectors(xp, R, max(rcond, EPS))
            W = whitening.matrix()
        gram = Gram(W, whitening.is_triangular)
        matrix.run(gram, width=whitening.rank)
        scores.basis = solve_right(xp, W, cholesky(xp, gram.value).T)
        matrix.run(scores, width=whitening.rank)
        return like_input(A, scores.value.clip(max=1))  # rounding may exceed 1
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
