"""QR factorization with column pivoting, and leverage scores, for tall matrices."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import scipy.linalg

from ..inputs.checks import below_one, seed_number
from .checks import check_finite
from .containers import as_matrix, like_input
from .matrix import Matrix, Progress
from .sketching import embedding
from .sums import Gram, Sum
from .triangular import r_factor, solve_right
from .whitening import EPS, MAX_TRIANGULAR_CONDITION, NOISE, Whitening, cholesky, power_of_two, rounding_level

MIN_NORM = power_of_two(math.ulp(0.0))  # of a column: the reciprocal of smaller numbers may be infinite
MAX_DEVIATION = 0.9  # of the squared column norms of A R^-1 from 1; a sketch keeps it below 0.75


def qr(
    A: Any,
    *,
    pivoting: bool = True,
    mode: Literal["reduced", "r"] = "reduced",
    seed: int = 0,
    callback: Progress | None = None,
) -> Any:
    """QR factorization of a tall matrix: A[:, J] = Q R.

    The pivots and a first R come from a sketch of A. One Cholesky factorization for A R^-1, which is well conditioned,
    then makes the factors exact up to rounding. This is as stable as Householder QR for condition numbers up to about
    1e13.

    Parameters
    ----------
    A : {ndarray, CSR or CSC matrix or array, tensor, path of an .npy file} of shape (m, n), m >= n, float32 or float64
    pivoting : bool, default True
        Whether to pivot columns, which reveals A's numerical rank r. Without pivoting A must have full rank: its
        columns may have any scale, but none may lie, up to rounding, in the span of the columns before it.
    mode : {"reduced", "r"}, default "reduced"
        "r" returns no Q.
    seed : int, -2^63 to 2^64 - 1, default 0
        Seed of the sketch.
    callback : callable, optional
        As in `lstsq`.

    Returns
    -------
    Q : {ndarray, tensor} of shape (m, r), float64
        Orthonormal columns; only for mode "reduced".
    R : {ndarray, tensor} of shape (r, n), float64
        Upper triangular, or trapezoidal if r < n.
    J : ndarray of shape (n,), int64
        Order of the columns; only with `pivoting`.

    Raises
    ------
    TypeError, ValueError
        As for `lstsq`; ValueError also if m < n.
    numpy.linalg.LinAlgError
        If A does not have full rank and `pivoting` is False.

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
    matrix = as_matrix(A, "A", callback)
    try:
        m, n = matrix.shape
        if m < n:
            raise ValueError(f"A must have at least as many rows as columns, got shape {matrix.shape}")
        xp = matrix.xp
        R, J = _sketched_qr(matrix, pivoting, seed)
        r = R.shape[0]
        triangle, columns = R[:, :r], matrix.indices(J[:r])
        preconditioned = _Preconditioned(m, xp, triangle, columns, keep=mode == "reduced")
        matrix.run(preconditioned, width=r)
        if not pivoting:
            _check_nearly_orthonormal(xp, preconditioned.gram)
        correction = cholesky(xp, preconditioned.gram).T
        R = correction @ R
        if mode == "r":
            return (like_input(A, R), J) if pivoting else like_input(A, R)
        Q = preconditioned.value
        for i in range(0, m, 1 << 16):
            Q[i : i + (1 << 16)] = solve_right(xp, Q[i : i + (1 << 16)], correction)
        Q, R = like_input(A, Q), like_input(A, R)
        return (Q, R, J) if pivoting else (Q, R)
    finally:
        matrix.close()


def _sketched_qr(matrix: Matrix, pivoting: bool, seed: int) -> tuple[Any, np.ndarray]:
    """Return (R, J) of the sketch's QR factorization, truncated to its numerical rank."""
    factor, cut = _sketched_factor(matrix, seed)
    n = matrix.shape[1]
    if not pivoting:
        _check_full_rank(matrix.xp, factor)
        return factor, np.arange(n)
    host = factor if matrix.xp is np else factor.cpu().numpy()  # torch has no QR with pivoting
    R, J = scipy.linalg.qr(host, mode="r", pivoting=True, check_finite=False)
    diagonal = np.abs(np.diagonal(R))
    r = int((diagonal > max(cut, NOISE * math.sqrt(n)) * diagonal[0]).sum())
    return matrix.array(np.triu(R[:r])), np.asarray(J, np.int64)


def _check_full_rank(xp: Any, R: Any) -> None:
    """Raise LinAlgError if a column of any scale lies, up to rounding, in the span of the columns before it."""
    outside = abs(xp.diagonal(R)) / _column_norms(xp, R)
    j = int(outside.argmin())
    if not float(outside[j]) > NOISE:
        raise np.linalg.LinAlgError(
            f"A does not have full rank: a fraction {float(outside[j]):.1e} of column {j} lies outside the span of the "
            f"columns before it, and up to {NOISE:.1e} counts as zero; use pivoting=True"
        )


def _check_nearly_orthonormal(xp: Any, gram: Any) -> None:
    """Raise LinAlgError if A R^-1, whose Gram matrix this is, is far from orthonormal: R contains rounding errors."""
    squares = xp.diagonal(gram)
    j = int(abs(squares - 1).argmax())
    if not abs(float(squares[j]) - 1) < MAX_DEVIATION:
        raise np.linalg.LinAlgError(
            f"A does not have full rank: column {j} adds only rounding errors to those before it; use pivoting=True"
        )


def _sketched_factor(matrix: Matrix, seed: int) -> tuple[Any, float]:
    """Return R of the QR factorization of A's sketch, or of A itself, and the relative size of its rounding errors."""
    m, n = matrix.shape
    S = embedding(m, n, 4 * n, seed)
    SA = matrix.dense() if S is None else matrix.sketch(S)
    check_finite(matrix, SA)
    R = r_factor(matrix.xp, SA)
    _check_normal(matrix.xp, R)
    return R, rounding_level((SA.shape[0], n), S is None)


def _check_normal(xp: Any, R: Any) -> None:
    """Raise ValueError if a column, unless it is zero, is so small that the reciprocal of its norm is not finite."""
    norms = _column_norms(xp, R)
    j = int(norms.argmin())
    if float(norms[j]) < MIN_NORM:
        raise ValueError(
            f"column {j} of A has a norm of about {float(norms[j]):.1e}, and at least {MIN_NORM:.1e} is needed unless "
            "it is zero: multiply A by a power of two"
        )


def _column_norms(xp: Any, R: Any) -> Any:
    """Return the norms of R's columns, and 1 for columns of zeros."""
    top = abs(R).max(0) if xp is np else abs(R).amax(0)
    top = xp.where(top > 0, top, 1 + 0 * top)
    norms = xp.sqrt(((R / top) ** 2).sum(0)) * top  # R**2 might overflow
    return xp.where(norms > 0, norms, 1 + 0 * norms)


class _Preconditioned(Sum):
    """P = A[:, columns] R^-1, if `keep`, and its Gram matrix P'P."""

    def __init__(self, m: int, xp: Any, triangle: Any, columns: Any, keep: bool):
        self._xp, self._triangle, self._columns = xp, triangle, columns
        self.gram: Any = 0
        shape = m, triangle.shape[0]
        self.value: Any = None
        if keep:
            self.value = np.empty(shape) if xp is np else triangle.new_empty(shape)

    def add(self, start: int, block: Any) -> None:
        selected = block[:, self._columns]
        if hasattr(selected, "tocoo"):
            selected = selected.toarray()
        rows = solve_right(self._xp, selected, self._triangle)
        self.gram = self.gram + rows.T @ rows
        if self.value is not None:
            self.value[start : start + rows.shape[0]] = rows


# ------------------------------------------------------------------------------------- leverage scores


def leverage_scores(A: Any, *, rcond: float | None = None, seed: int = 0, callback: Progress | None = None) -> Any:
    """Leverage scores of A's rows: the squared row norms of an orthonormal basis of A's range.

    The scores are exact up to rounding errors times A's condition number. Three passes over A: one for a sketch, which
    gives a basis in which A is well conditioned; one for a Cholesky factorization, which makes the basis orthonormal;
    and one for the row norms.

    Parameters
    ----------
    A : {ndarray, CSR or CSC matrix or array, tensor, path of an .npy file} of shape (m, n), float32 or float64
    rcond : float in [0, 1), optional
        Singular values of A's sketch up to rcond times the largest count as zero. By default the columns of A are
        scaled to equal norms, and rcond is 10 machine epsilons; if A itself is factored (see the notes of `lstsq`), at
        least max(m, n) of them.
    seed : int, -2^63 to 2^64 - 1, default 0
        Seed of the sketch.
    callback : callable, optional
        As in `lstsq`.

    Returns
    -------
    {ndarray, tensor} of shape (m,), float64
        Scores from 0 to 1, whose sum is A's rank.

    Raises
    ------
    TypeError, ValueError
        As for `lstsq`.

    References
    ----------
    Drineas, Magdon-Ismail, Mahoney, Woodruff, "Fast approximation of matrix coherence and statistical leverage", JMLR
    13, 2012: approximate scores, which this function refines.

    Examples
    --------
    >>> import numpy as np, sjlt.linalg
    >>> A = np.random.default_rng(0).normal(size=(5000, 20))
    >>> scores = sjlt.linalg.leverage_scores(A)
    >>> bool(np.isclose(scores.sum(), 20))
    True
    """
    rcond, seed = None if rcond is None else below_one("rcond", rcond), seed_number(seed)
    matrix = as_matrix(A, "A", callback)
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
                whitening = Whitening.from_singular_vectors(xp, R / norms, cut)
            W = whitening.matrix() / norms[:, None]
        else:
            whitening = Whitening.from_singular_vectors(xp, R, max(rcond, EPS))
            W = whitening.matrix()
        gram = Gram(W, whitening.is_triangular)
        matrix.run(gram, width=whitening.rank)
        scores.basis = solve_right(xp, W, cholesky(xp, gram.value).T)
        matrix.run(scores, width=whitening.rank)
        return like_input(A, scores.value.clip(max=1))  # rounding may exceed it
    finally:
        matrix.close()


class _RowNorms(Sum):
    """Squared norms of the rows of A times `basis`, which is set before the pass."""

    def __init__(self, m: int, xp: Any, like: Any):
        self.basis: Any = None
        self.value = np.zeros(m) if xp is np else like.new_zeros(m)

    def add(self, start: int, block: Any) -> None:
        product = block @ self.basis
        self.value[start : start + product.shape[0]] = (product * product).sum(1)
