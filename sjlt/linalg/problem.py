"""A least-squares problem, scaled, and what a solver asks of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .matrix import Matrix, check_finite
from .products import add_gram
from .sketching import STACKS, embedding
from .sums import Gradient, Gram, Normal, Sum
from .whitening import NOISE, Whitening, power_of_two

EPS = float(np.finfo(np.float64).eps)
TARGET = EPS / 4  # backward error at which refinement ends; Householder QR reaches about the same
MAX_COLUMN_RATIO = 16.0  # of column norms, up to which scaling them is not worth a second SVD


class Problem:
    """The problem scaled by powers of two to ||A|| and ||b|| of about 1, one column per (ridge, column of b).

    x_scale, b_scale : what the scaled solutions, right-hand sides are to be multiplied by.
    """

    def __init__(self, matrix: Matrix, B: Any, ridges: np.ndarray, rcond: float | None):
        self.matrix, self.xp = matrix, matrix.xp
        self.ridges = matrix.array(ridges)
        self.rcond = NOISE if rcond is None else max(rcond, EPS)
        self.rcond_given = rcond is not None and rcond > NOISE
        xp = self.xp
        top = abs(B).max(0) if xp is np else abs(B).amax(0)
        scales = matrix.array([power_of_two(float(value)) for value in top])
        self.B = B / scales
        q = B.shape[1]
        self.columns = matrix.indices(np.tile(np.arange(q), ridges.size))
        self.ridge_of = np.repeat(np.arange(ridges.size), q)
        self.b_scale = scales[self.columns]
        self.scale: Any = 1.0  # (n, 1), of A's columns; the scaled problem has the matrix A / scale.T
        self.rank, self.factor = 0, None

    def sketched(self, seed: int, is_small: bool) -> tuple[Whitening, Any, bool]:
        """(W, sketched solutions, whether A itself stands for its sketch)."""
        m, n = self.matrix.shape
        xp = self.xp
        # More rows than 4 n save iterations as long as factoring them costs less than those.
        S = embedding(m, n, 4 * n if is_small else min(max(m // 5, 4 * n), 12 * n), seed)
        SAB = xp.concatenate([self.matrix.dense(), self.B], 1) if S is None else self.matrix.sketch(S, self.B)
        SA, SB = SAB[:, :n], SAB[:, n:]
        top = max(float(SA.max()), -float(SA.min()))
        if not math.isfinite(top):
            check_finite(self.matrix, SA)
        top = 1.0 if 1e-60 < top < 1e60 else power_of_two(top)  # squares neither overflow nor vanish
        if top != 1:
            SA /= top
        if (found := self._by_gram(SA, SB)) is not None:
            whitening, columns, solution = found
        else:
            p = min(SAB.shape[0], n)
            R = _r_factor(xp, SAB)
            whitening, columns = self._whitening(R[:p, :n])
            self.scale = top * columns
            solution = whitening.sketched_solution(R[:p, n:][:, self.columns], self.damp)
        self.scale = top * columns
        if not whitening.is_triangular:
            whitening.factor = whitening.factor * top
        return whitening, solution, S is None

    def _by_gram(self, SA: Any, SB: Any) -> tuple[Whitening, Any, Any] | None:
        """(basis, scales of SA's columns, sketched solution) by a Cholesky factorization of (SA)'SA, or None.

        None where A is ill-conditioned, or where its singular values are wanted.
        """
        xp = self.xp
        if self.needs_singular_values or not _may_be_moderate(xp, SA):
            return None
        total = Gram(None)
        total.add(0, SA)
        gram = total.value
        scales = self.matrix.array([power_of_two(math.sqrt(value)) for value in xp.diagonal(gram).tolist()])[:, None]
        whitening = Whitening.of_gram(xp, gram / scales / scales.T)
        if whitening is None or not self._has_full_rank(whitening, scales):
            return None
        return whitening, scales, (whitening.normal_solution((SA.T @ SB) / scales))[:, self.columns]

    @property
    def needs_singular_values(self) -> bool:
        """Whether which singular values count, or a ridge, is a question to the matrix as it is, columns not scaled."""
        return self.rcond_given or bool((self.ridges > 0).any())

    def _has_full_rank(self, whitening: Whitening, scales: Any) -> bool:
        """Whether no singular value is near the cut, in the matrix of unscaled columns."""
        return bool(whitening.condition * float(scales.max() / scales.min()) < 0.01 / self.rcond)

    def _whitening(self, R: Any) -> tuple[Whitening, Any]:
        """(the basis for R / scales, the scales of R's columns).

        Scaled columns make the solution accurate column by column, as Householder QR does. Which singular values count
        is a question to the matrix as it is, though, and so is a ridge: there all columns have one scale.
        """
        xp = self.xp
        norms = [float(value) for value in xp.sqrt((R * R).sum(0))]
        scales = self.matrix.array([power_of_two(norm) for norm in norms])[:, None]
        ratio = float(scales.max() / scales.min())
        plain = power_of_two(max(norms)) + 0 * scales
        if not self.needs_singular_values:
            scaled = Whitening.triangular(xp, R / scales.T)
            if scaled is not None and self._has_full_rank(scaled, scales):
                return scaled, scales
        whitening = Whitening.by_singular_vectors(xp, R / plain.T, NOISE if self.rcond_given else self.rcond)
        if whitening.rank == R.shape[1] and ratio > MAX_COLUMN_RATIO and not self.needs_singular_values:
            scaled = Whitening.by_singular_vectors(xp, R / scales.T, NOISE)
            if scaled.rank == R.shape[1]:
                scaled.factor = whitening.factor * float(plain[0, 0])
                return scaled, scales
        whitening.factor = whitening.factor * float(plain[0, 0])
        return whitening, plain

    def found(self, whitening: Whitening) -> None:
        """Keep the rank, and a matrix of A's singular values, or those themselves."""
        self.rank = whitening.rank
        self.factor = whitening.factor * self.scale.T if whitening.is_triangular else whitening.factor

    @property
    def damp(self) -> Any:
        """Each column's ridge, in the scaled problem: all scales are equal where one is not 0."""
        return (self.ridges / self.scale[0])[self.ridge_of]

    @property
    def x_scale(self) -> Any:
        return self.b_scale / self.scale

    def gradient(self, X: Any, *others: Sum, width: int = 1) -> tuple[Any, Any]:
        """A'(B - A X) - d^2 X and the squared norms of B - A X."""
        total = Gradient(X / self.scale, self.B, self.columns)
        self.matrix.run(total, *others, width=max(width, X.shape[1]))
        return total.value / self.scale - self.damp**2 * X, total.squares

    def normal(self, Z: Any) -> Any:
        """(A'A + d^2) Z."""
        total = Normal(Z / self.scale)
        self.matrix.run(total, width=Z.shape[1])
        return total.value / self.scale + self.damp**2 * Z

    def gram(self, whitening: Whitening | None = None) -> Gram:
        """(A W)'(A W) of the scaled problem, or A'A without its scales, to be summed in a pass."""
        return Gram(None if whitening is None else whitening.matrix() / self.scale)

    def backward_errors(self, whitening: Whitening, X: Any, G: Any, squares: Any, is_first: bool = False) -> Any:
        """Karlson-Walden estimates relative to ||A||_F, one per column; for the first solution upper bounds will do."""
        xp, norm = self.xp, max(whitening.norm, EPS)
        b_norms = xp.sqrt((self.B * self.B).sum(0))[self.columns]
        is_zero = b_norms == 0
        theta = norm / xp.where(is_zero, 1.0 + 0 * b_norms, b_norms)
        x_squares = (X * X).sum(0)
        root = xp.sqrt(1 + theta**2 * x_squares)
        eta = theta * xp.sqrt(squares + self.damp**2 * x_squares) / root
        enough = (math.inf if is_first else TARGET) * norm * root / theta
        errors = theta / root * whitening.weighted_norms(G, self.damp, eta, enough) / norm
        return xp.where(is_zero & (x_squares == 0), 0.0 * errors, errors)

    def cg_floor(self, whitening: Whitening, X: Any) -> Any:
        """Residuals of the whitened normal equations that no longer count, one per column."""
        xp, norm = self.xp, max(whitening.norm, EPS)
        b_norms = xp.sqrt((self.B * self.B).sum(0))[self.columns]
        return TARGET / 4 * xp.sqrt(b_norms**2 + norm**2 * (X * X).sum(0))


def _may_be_moderate(xp: Any, SA: Any) -> bool:
    """Whether one stack of the sketch has a Cholesky factor in float32: up to a condition number of about 3e3.

    For 1500 columns this look takes a sixth of the time of the Gram matrix that is formed in vain otherwise.
    """
    rows, n = SA.shape[0] // STACKS, SA.shape[1]
    if xp is not np or rows < n:
        return True
    norms = np.linalg.norm(SA[:rows], axis=0)
    gram = np.zeros((n, n), np.float32)
    add_gram(gram, (SA[:rows] / np.where(norms > 0, norms, 1)).astype(np.float32))
    try:
        np.linalg.cholesky(gram.T)
    except np.linalg.LinAlgError:
        return False
    return True


def _r_factor(xp: Any, a: Any) -> Any:
    """R of a's QR factorization; `a` is overwritten where that saves a copy."""
    if xp is not np:
        return xp.linalg.qr(a, mode="r").R
    import scipy.linalg

    # Its recursive panels take half of the time of numpy.linalg.qr's for (10240, 1501), the least at this block size.
    size = min(a.shape)
    return np.triu(scipy.linalg.lapack.dgeqrt(min(128, size), a, overwrite_a=True)[0][:size])
