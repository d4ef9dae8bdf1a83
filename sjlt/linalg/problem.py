"""A scaled least-squares problem: its sketch, gradient and normal equations, and the backward error of a solution."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .checks import check_finite
from .matrix import Matrix
from .products import add_gram
from .sketching import STACKS, embedding
from .sums import Gradient, Gram, Normal, Sum
from .triangular import r_factor
from .whitening import EPS, NOISE, LostRangeError, Whitening, power_of_two, rounding_level

TARGET = EPS / 4  # backward error at which refinement ends; Householder QR reaches about the same
MAX_COLUMN_RATIO = 16.0  # of column norms, up to which scaling them is not worth a second SVD
MAX_RIDGE = 2.0**30  # relative to A: beyond, x is A'b / d^2 to rounding, and its backward error says nothing


class Problem:
    """The problem scaled by powers of two to ||A|| and ||b|| of about 1, one column per (ridge, column of b).

    b_scale : factors of the scaled right-hand sides.
    rcond : relative cut of singular values, None for the default.
    """

    def __init__(self, matrix: Matrix, B: Any, ridges: np.ndarray, rcond: float | None):
        self.matrix, self.xp = matrix, matrix.xp
        self.ridges = matrix.array(ridges)
        self.rcond = None if rcond is None else max(rcond, EPS)
        self.cuts_spectrum = rcond is not None and rcond > NOISE
        xp = self.xp
        top = abs(B).max(0) if xp is np else abs(B).amax(0)
        scales = matrix.array([power_of_two(value) for value in top.tolist()])
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
        cut = self._cut(S is None)
        if (found := self._by_gram(SA, SB, cut)) is not None:
            whitening, columns, solution = found
        else:
            R = r_factor(xp, SAB, n)
            whitening, columns = self._whitening(R[:, :n], cut)
            self.scale = top * columns
            if S is None and self._leave_out_rounding_errors(whitening, cut):
                solution = self.matrix.zeros((n, len(self.ridge_of)))
            else:
                solution = whitening.sketched_solution(R[:, n:][:, self.columns], self.damp)
        self.scale = top * columns
        if not whitening.is_triangular:
            whitening.factor = whitening.factor * top
        return whitening, solution, S is None

    def _by_gram(self, SA: Any, SB: Any, cut: float) -> tuple[Whitening, Any, Any] | None:
        """(basis, scales of SA's columns, sketched solution) by a Cholesky factorization of (SA)'SA, or None.

        None where A is ill-conditioned, or where its singular values are wanted.
        """
        xp = self.xp
        if SA.shape[0] < SA.shape[1] or self.needs_singular_values or not _may_be_moderate(xp, SA):
            return None
        total = Gram(None)
        total.add(0, SA)
        gram = total.value
        scales = self.matrix.array([power_of_two(math.sqrt(value)) for value in xp.diagonal(gram).tolist()])[:, None]
        whitening = Whitening.of_gram(xp, gram / scales / scales.T)
        if whitening is None or not _has_full_rank(whitening, scales, cut):
            return None
        return whitening, scales, (whitening.normal_solution((SA.T @ SB) / scales))[:, self.columns]

    def _cut(self, is_direct: bool) -> float:
        """The relative size up to which singular values of the sketch, or of A itself, count as zero."""
        if self.rcond is None:
            return NOISE
        # A sketch's singular values are A's within a factor of 2 only: `rcond` is applied to A's own later.
        return self.rcond if is_direct else min(self.rcond, NOISE)

    @property
    def needs_singular_values(self) -> bool:
        """Whether the solution depends on the singular values of A with its columns unscaled: by rcond, or a ridge."""
        return self.cuts_spectrum or bool((self.ridges > 0).any())

    def _whitening(self, R: Any, cut: float) -> tuple[Whitening, Any]:
        """(the basis for R / scales, the scales of R's columns).

        Scaled columns make the solution accurate column by column, as Householder QR does. A ridge, and the cut of
        singular values, refer to A with its columns unscaled, though: there all columns have one scale.
        """
        xp = self.xp
        norms = xp.sqrt((R * R).sum(0)).tolist()
        scales = self.matrix.array([power_of_two(norm) for norm in norms])[:, None]
        ratio = float(scales.max() / scales.min())
        plain = power_of_two(max(norms)) + 0 * scales
        if not self.needs_singular_values:
            scaled = Whitening.triangular(xp, R / scales.T)
            if scaled is not None and _has_full_rank(scaled, scales, cut):
                return scaled, scales
        whitening = Whitening.by_singular_vectors(xp, R / plain.T, cut)
        if whitening.rank == R.shape[1] and ratio > MAX_COLUMN_RATIO and not self.needs_singular_values:
            scaled = Whitening.by_singular_vectors(xp, R / scales.T, NOISE)
            if scaled.rank == R.shape[1]:
                scaled.factor = whitening.factor * float(plain[0, 0])
                return scaled, scales
        whitening.factor = whitening.factor * float(plain[0, 0])
        return whitening, plain

    def _leave_out_rounding_errors(self, whitening: Whitening, cut: float) -> bool:
        """Whether some of the smallest singular values from a factorization of A itself were found to be its errors.

        These reach max(m, n) eps, beyond some of A's own singular values at a condition number of 1e13. A times their
        vectors tells them apart, to a few eps.
        """
        if whitening.is_triangular or whitening.rank == 0:
            return False
        first = whitening.count_above(rounding_level(self.matrix.shape, is_direct=True))
        if first == whitening.rank:
            return False
        return whitening.leave_out_rounding_errors(self.matrix.dense() / self.scale.T, first, cut)

    def set_rank(self, whitening: Whitening) -> None:
        """Keep the rank, and a matrix of A's singular values, or those themselves."""
        self.rank = whitening.rank
        self.factor = whitening.factor * self.scale.T if whitening.is_triangular else whitening.factor

    @property
    def damp(self) -> Any:
        """Each column's ridge in the scaled problem."""
        return self.scaled_ridges[self.ridge_of]

    @property
    def scaled_ridges(self) -> Any:
        """The ridges in the scaled problem, at most MAX_RIDGE. All columns have one scale where a ridge is not 0."""
        with np.errstate(over="ignore"):
            return (self.ridges / self.scale[0]).clip(max=MAX_RIDGE)

    def unscaled(self, X: Any) -> Any:
        """The scaled solutions X in the units of A and b, or a LinAlgError where they overflow."""
        with np.errstate(over="ignore"):
            shrunk = (MAX_RIDGE / (self.ridges / self.scale[0]).clip(min=MAX_RIDGE))[self.ridge_of]
            x = self.xp.where(X == 0, X, X * shrunk**2 * (self.b_scale / self.scale))
        if not bool(self.xp.isfinite(x).all()):
            raise np.linalg.LinAlgError(
                f"the solution is beyond the largest float64: A of norm {float(self.scale.max()):.0e}, b of norm "
                f"{float(self.b_scale.max()):.0e}"
            )
        return x

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
        if whitening is None:
            return Gram(None)
        return Gram(whitening.matrix() / self.scale, whitening.is_triangular)

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

    def check_size(self, whitening: Whitening, X: Any) -> None:
        """Raise LostRangeError where X is larger than any singular value above machine epsilon allows."""
        xp = self.xp
        limit = 10 * math.sqrt(X.shape[0]) / EPS
        growth = xp.sqrt((X * X).sum(0)) * whitening.norm
        b_norms = xp.sqrt((self.B * self.B).sum(0))[self.columns]
        if not bool((growth <= limit * b_norms).all()):
            worst = float((growth / xp.where(b_norms > 0, b_norms, 1.0 + 0 * b_norms)).max())
            raise LostRangeError(f"||x|| ||A|| / ||b|| = {worst:.1e}: rounding errors count as rank")

    def cg_floor(self, whitening: Whitening, X: Any) -> Any:
        """Residuals of the whitened normal equations that no longer count, one per column."""
        xp, norm = self.xp, max(whitening.norm, EPS)
        b_norms = xp.sqrt((self.B * self.B).sum(0))[self.columns]
        return TARGET / 4 * xp.sqrt(b_norms**2 + norm**2 * (X * X).sum(0))


def _has_full_rank(whitening: Whitening, scales: Any, cut: float) -> bool:
    """Whether no singular value is near the cut, in the matrix of unscaled columns."""
    return bool(whitening.condition * float(scales.max() / scales.min()) < 0.01 / cut)


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
