"""A scaled least-squares problem: its sketch, gradient, normal equations, and the backward error of solutions."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from ..sketch import Sketch
from .checks import check_finite
from .matrix import Matrix
from .products import one_blas_thread
from .residuals import normal_product
from .sketch_gram import gram_basis
from .sketching import embedding, sketch_rows
from .sums import Gradient, Gram, Normal, Sum
from .triangular import on_host, r_factor
from .whitening import EPS, NOISE, LostRangeError, Whitening, power_of_two, rounding_level

TARGET = EPS / 4  # backward error at which refinement ends; Householder QR reaches about the same
MAX_COLUMN_RATIO = 16.0  # ratio of column norms up to which scaling the columns is not worth a second SVD
MAX_ROUNDED_CONDITION = 1e7  # in the Frobenius norm, up to which conjugate gradients read A in float32
MIN_ROUNDED_SCALE = 1e-18  # norm of a column from which on float32 loses only entries below 1e-20 times the norm
MAX_RIDGE = 2.0**30  # relative to A; beyond, x is A'b / d^2 up to rounding, and its backward error is meaningless


class Problem:
    """The problem scaled by powers of two such that ||A|| and ||b|| are about 1.

    Its solutions have one column per pair of a ridge and a column of b, ridge by ridge. The scaled matrix is
    A / scale.T. Numbers of which there is one per column, such as backward errors, are NumPy arrays also on a GPU: a
    dozen operations on them would keep it waiting for longer than the transfer to the host.

    Attributes
    ----------
    columns : int array, or a slice of all columns
        For each column of the solutions, its column of `B`.
    ridges : NumPy array
        The ridges of the unscaled problem.
    has_ridge : bool
        Whether one of them is positive.
    scaled_ridges, damp_on_host : NumPy arrays
        The ridges in the scaled problem, at most MAX_RIDGE, and that of each column; set by `sketched`.
    damp : array
        `damp_on_host`, of the kind of the solutions.
    B : array of shape (m, q)
        The scaled right-hand sides.
    b_scale : array
        Their scales, one per column of the solutions.
    scale : array of shape (n, 1)
        The scales of A's columns; set by `sketched`.
    rcond : float or None
        Singular values up to rcond times the largest count as zero; None for the default.
    """

    scale: Any
    scaled_ridges: np.ndarray
    damp_on_host: np.ndarray
    damp: Any

    def __init__(self, matrix: Matrix, B: Any, ridges: np.ndarray, rcond: float | None):
        self.matrix, self.xp = matrix, matrix.xp
        self.ridges, self.has_ridge = ridges, bool((ridges > 0).any())
        self.rcond = None if rcond is None else max(rcond, EPS)
        self.cuts_spectrum = rcond is not None and rcond > NOISE
        xp = self.xp
        top = abs(B).max(0) if xp is np else abs(B).amax(0)
        scales = matrix.array([power_of_two(value) for value in top.tolist()])
        self.B = B / scales
        q = B.shape[1]
        self.columns = slice(None) if ridges.size == 1 else matrix.indices(np.tile(np.arange(q), ridges.size))
        self.b_scale = scales[self.columns]
        self.rank, self.factor = 0, None
        self._rounded: Any = None  # A in float32
        self._may_be_single = True

    def sketched(self, seed: int, is_small: bool, may_be_single: bool) -> tuple[Whitening, Any, bool]:
        """Return (W, sketched solutions, whether A itself was factored).

        `is_small`: use only about 4 n rows. `may_be_single`: W may be computed in float32.
        """
        self._rounded, self._may_be_single = None, may_be_single
        m, n = self.matrix.shape
        xp = self.xp
        S = embedding(m, n, 4 * n if is_small else sketch_rows(m, n, xp is np), seed)
        SAB = xp.concatenate([self.matrix.dense(), self.B], 1) if S is None else self.matrix.sketch(S, self.B)
        SA, SB = SAB[:, :n], SAB[:, n:]
        top = max(float(SA.max()), -float(SA.min()))
        if not math.isfinite(top):
            check_finite(self.matrix, SA)
        top = 1.0 if 1e-60 < top < 1e60 else power_of_two(top)  # squares neither overflow nor vanish
        if top != 1:
            SA /= top
        cut = self._cut(S is None)
        if (found := self._by_gram(SA, SB, cut, may_be_single and S is not None)) is not None:
            whitening, columns, solution = found
            self._set_scale(top * columns)
        else:
            R = r_factor(xp, SAB, n)
            whitening, columns = self._whitening(R[:, :n], cut)
            self._set_scale(top * columns)
            if self._drop_rounding_errors(whitening, S, SA.shape[0], cut):
                solution = self.matrix.zeros((n, self.b_scale.shape[0]))
            else:
                with one_blas_thread():
                    solution = whitening.sketched_solution(R[:, n:][:, self.columns], self.damp)
        if not whitening.is_triangular:
            whitening.factor = whitening.factor * top
        return whitening, solution, S is None

    def _set_scale(self, scales: np.ndarray) -> None:
        """Set the scales of A's columns, which are equal if there is a ridge."""
        self.scale = self.matrix.array(scales)[:, None]
        with np.errstate(over="ignore"):
            self.scaled_ridges = np.minimum(self.ridges / scales[0], MAX_RIDGE) if self.has_ridge else self.ridges
        self.damp_on_host = np.repeat(self.scaled_ridges, self.B.shape[1])
        self.damp = self.matrix.array(self.damp_on_host)

    def _by_gram(self, SA: Any, SB: Any, cut: float, may_be_single: bool) -> tuple[Whitening, np.ndarray, Any] | None:
        """Return (basis, scales of SA's columns, sketched solution) from a Cholesky factorization of (SA)'SA.

        Returns None if A is ill-conditioned or wide, or its singular values are needed.
        """
        xp = self.xp
        if SA.shape[0] < SA.shape[1] or self.needs_singular_values:
            return None
        if (found := gram_basis(xp, SA, may_be_single)) is None:
            return None
        whitening, scales = found
        if not _has_full_rank(whitening, scales, cut):
            return None
        with one_blas_thread():
            right = (SA.T @ SB) / self.matrix.array(scales)[:, None]
            return whitening, scales, whitening.normal_solution(right)[:, self.columns]

    def _cut(self, is_direct: bool) -> float:
        """Return the relative size up to which singular values of the sketch, or of A itself, count as zero."""
        if self.rcond is None:
            return NOISE
        # A sketch's singular values are only within a factor of 2 of A's, to which `rcond` is applied later.
        return self.rcond if is_direct else min(self.rcond, NOISE)

    @property
    def needs_singular_values(self) -> bool:
        """Whether rcond or a ridge makes the solution depend on the singular values of A with unscaled columns."""
        return self.cuts_spectrum or self.has_ridge

    def _whitening(self, R: Any, cut: float) -> tuple[Whitening, np.ndarray]:
        """Return (the basis for R / scales, the scales of R's columns).

        Scaling the columns makes the solution accurate column by column, like that of Householder QR. With a ridge, or
        if some singular values count as zero, all columns get the same scale: both refer to A with unscaled columns.
        """
        xp = self.xp
        norms = np.sqrt(on_host((R * R).sum(0))).tolist()
        scales, largest = np.array([power_of_two(norm) for norm in norms]), power_of_two(max(norms))
        if not self.needs_singular_values:
            scaled = Whitening.triangular(xp, R / self.matrix.array(scales))
            if scaled is not None and _has_full_rank(scaled, scales, cut):
                return scaled, scales
        whitening = Whitening.from_singular_vectors(xp, R / largest, cut)
        is_scaled = largest > MAX_COLUMN_RATIO * scales.min()
        if whitening.rank == R.shape[1] and is_scaled and not self.needs_singular_values:
            scaled = Whitening.from_singular_vectors(xp, R / self.matrix.array(scales), NOISE)
            if scaled.rank == R.shape[1]:
                scaled.factor = whitening.factor * largest
                return scaled, scales
        whitening.factor = whitening.factor * largest
        return whitening, np.full(scales.shape, largest)

    def _drop_rounding_errors(self, whitening: Whitening, S: Sketch | None, rows: int, cut: float) -> bool:
        """Drop small singular values that are rounding errors of a factorization; return whether there were any.

        `rows` are those of the factored matrix, A or SA. Rounding errors reach max(rows, n) eps, and A's own singular
        values may be smaller at a condition number of 1e13. Multiplying the matrix by their vectors distinguishes them,
        to a few eps. The factorization has overwritten SA, which is computed again.
        """
        if whitening.is_triangular or whitening.rank == 0:
            return False
        n = self.matrix.shape[1]
        # The level for A itself, for a sketch, too: values in doubt are computed anew, so too many only take longer.
        first = whitening.count_above(rounding_level((rows, n), is_direct=True))
        if first == whitening.rank:
            return False
        factored = self.matrix.dense() if S is None else self.matrix.sketch(S)[:, :n]
        return whitening.drop_rounding_errors(factored / self.scale.T, first, cut)

    def set_rank(self, whitening: Whitening) -> None:
        """Store the rank, and A's singular values or a matrix that has them."""
        self.rank = whitening.rank
        self.factor = whitening.factor * self.scale.T if whitening.is_triangular else whitening.factor

    def unscaled(self, X: Any) -> Any:
        """Return the scaled solutions X in the units of A and b; raise LinAlgError if they overflow."""
        with np.errstate(over="ignore"):
            if self.has_ridge:
                excess = np.maximum(self.ridges / float(self.scale[0, 0]), MAX_RIDGE) / MAX_RIDGE
                X = X / self.matrix.array(np.repeat(excess, self.B.shape[1])) ** 2
            x = self.xp.where(X == 0, X, X * (self.b_scale / self.scale))
        if not bool(self.xp.isfinite(x).all()):
            raise np.linalg.LinAlgError(
                f"the solution overflows float64: A has norm {float(self.scale.max()):.0e}, and b has norm "
                f"{float(self.b_scale.max()):.0e}"
            )
        return x

    def gradient(self, X: Any, *others: Sum, width: int = 1) -> tuple[Any, Any]:
        """Return A'(B - A X) - d^2 X and the squared column norms of B - A X; add to `others` in the same pass."""
        total = Gradient(X / self.scale, self.B, self.columns)
        self.matrix.run(total, *others, width=max(width, X.shape[1]))
        G = total.value / self.scale
        return G - self.damp**2 * X if self.has_ridge else G, on_host(total.squares)

    def normal(self, Z: Any) -> Any:
        """Return (A'A + d^2) Z, for A rounded to float32 after `round_matrix`."""
        if self._rounded is None:
            total = Normal(Z / self.scale)
            self.matrix.run(total, width=Z.shape[1])
            product = total.value
        else:
            product = normal_product(self._rounded, Z / self.scale)
            self.matrix.count_pass()
        product = product / self.scale
        return product + self.damp**2 * Z if self.has_ridge else product

    def round_matrix(self, whitening: Whitening) -> bool:
        """Let `normal` use A in float32, if that is faster and changes A W little; return whether it does."""
        if not self._may_be_single or whitening.condition > MAX_ROUNDED_CONDITION or self.damp.shape[0] > 1:
            return False
        if not MIN_ROUNDED_SCALE < float(self.scale.min()) <= float(self.scale.max()) < 1 / MIN_ROUNDED_SCALE:
            return False
        if self._rounded is None:
            self._rounded = self.matrix.rounded()
        return self._rounded is not None

    def keep_double(self) -> None:
        """Let `normal` use A in float64."""
        self._rounded, self._may_be_single = None, False

    def gram(self, whitening: Whitening | None = None) -> Gram:
        """Return the sum for (A W)'(A W) of the scaled problem or, without W, for A'A of the unscaled one."""
        if whitening is None:
            return Gram(None)
        return Gram(whitening.matrix() / self.scale, whitening.is_triangular)

    @functools.cached_property
    def b_norms(self) -> np.ndarray:
        """The norm of each column of B[:, columns]."""
        norms: np.ndarray = np.sqrt(on_host((self.B * self.B).sum(0)[self.columns]))
        return norms

    def backward_errors(
        self, whitening: Whitening, X: Any, G: Any, squares: np.ndarray, is_first: bool = False
    ) -> np.ndarray:
        """Return the Karlson-Walden estimate relative to ||A||_F per column; an upper bound for the first solution."""
        norm, is_zero = max(whitening.norm, EPS), self.b_norms == 0
        theta = norm / np.where(is_zero, 1.0, self.b_norms)
        x_squares = on_host((X * X).sum(0))
        root = np.sqrt(1 + theta**2 * x_squares)
        eta = theta * np.sqrt(squares + self.damp_on_host**2 * x_squares) / root
        sufficient = (math.inf if is_first else TARGET) * norm * root / theta
        errors = theta / root * whitening.weighted_norms(G, self.damp, eta, sufficient) / norm
        return np.where(is_zero & (x_squares == 0), 0.0, errors)

    def check_size(self, whitening: Whitening, X: Any) -> None:
        """Raise LostRangeError if X is larger than singular values above machine epsilon allow."""
        limit = 10 * math.sqrt(X.shape[0]) / EPS
        growth = np.sqrt(on_host((X * X).sum(0))) * whitening.norm
        if not (growth <= limit * self.b_norms).all():
            worst = float((growth / np.where(self.b_norms > 0, self.b_norms, 1.0)).max())
            raise LostRangeError(f"||x|| ||A|| / ||b|| = {worst:.1e}: rounding errors were counted as rank")

    def factors(self, numerators: np.ndarray, denominators: np.ndarray) -> Any:
        """Return a factor per column of the solutions: the quotient, or 0 for denominators that are not positive."""
        positive = denominators > 0
        quotients = np.where(positive, numerators, 0.0) / np.where(positive, denominators, 1.0)
        return float(quotients[0]) if quotients.size == 1 else self.matrix.array(quotients)

    def cg_floor(self, whitening: Whitening, X: Any) -> np.ndarray:
        """Return the residual norm of the whitened normal equations, per column, at which CG may stop."""
        norm = max(whitening.norm, EPS)
        floors: np.ndarray = TARGET / 4 * np.sqrt(self.b_norms**2 + norm**2 * on_host((X * X).sum(0)))
        return floors


def _has_full_rank(whitening: Whitening, scales: np.ndarray, cut: float) -> bool:
    """Whether no singular value of the matrix with unscaled columns is near the cut."""
    return bool(whitening.condition * float(scales.max() / scales.min()) < 0.01 / cut)
