"""A basis in which a matrix is well conditioned, from a sketch of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .triangular import MIN_SUM_SHIFT, inverse, shifted_factor, solve_transposed

# Up to this condition number (in the Frobenius norm, at least that in the 2-norm) R^-1 is as accurate a basis as the
# singular vectors of R, which take 40 times as long for 1500 columns. Refinement recovers the loss.
MAX_TRIANGULAR_CONDITION = 1e13
# Up to this one the Cholesky factor of a Gram matrix is as good as R of a QR factorization, in a fifth of the time: its
# relative error, eps times the condition number squared, stays below 1e-3.
MAX_GRAM_CONDITION = 1e6
EPS = float(np.finfo(np.float64).eps)
# Singular values of a sketch below this times the largest are rounding errors: the sketch's own reach a few eps.
NOISE = 10 * EPS


class LostRangeError(np.linalg.LinAlgError):
    """A sketch that lost part of A's range, as the message says."""


def rounding_level(shape: tuple[int, int], is_direct: bool) -> float:
    """The largest rounding error that a factorization may add to a zero singular value, relative to the largest.

    Where A itself is factored (`is_direct`) it is the size that NumPy assumes: constant columns add up rounding errors
    of one sign, to 150 eps for (1500, 300). A sketch has random signs.
    """
    return max(NOISE, EPS * max(shape)) if is_direct else NOISE


def cholesky(xp: Any, a: Any) -> Any:
    """The lower Cholesky factor of a whitened Gram matrix."""
    try:
        return xp.linalg.cholesky(a)
    except (np.linalg.LinAlgError, RuntimeError):  # torch's LinAlgError is a RuntimeError
        raise LostRangeError("the whitened matrix is singular: the sketch lost part of A's range") from None


class Whitening:
    """W, n x r, with A W close to orthonormal: W = R^-1, or V / sigma for the singular values that count.

    Made from SA = Q R. With a ridge d, W = V / sqrt(sigma^2 + d^2) whitens [A; d I].

    Attributes
    ----------
    rank : r
    factor : R, or its singular values, descending, where W is V / sigma
    norm : Frobenius norm of R
    condition : a bound of the condition number of R, in the Frobenius norm; inf where r is below n
    null : (n, n - r), the singular vectors that do not count
    """

    rank: int
    factor: Any
    norm: float
    condition: float
    null: Any
    _basis: Any  # R^-1, or V
    _U: Any

    def __init__(self, xp: Any, R: Any):
        self.xp = xp
        self.factor = R
        self.norm = float(xp.linalg.norm(R))
        self._sigma: Any = None
        self._shifted: tuple[float, Any, bool] = 0.0, R, False
        self._decomposed: Any = None

    @classmethod
    def triangular(cls, xp: Any, R: Any, limit: float = MAX_TRIANGULAR_CONDITION) -> Whitening | None:
        """W = R^-1, or None where R is not square or its condition number may exceed `limit`."""
        self = cls(xp, R)
        # 1 / min |R_ii| is at most ||R^-1||.
        if R.shape[0] != R.shape[1] or self.norm >= limit * float(abs(xp.diagonal(R)).min()):
            return None
        self._basis, self.rank, self.null = inverse(xp, R), R.shape[1], R[:0].T
        self.condition = self.norm * float(xp.linalg.norm(self._basis))
        return self if self.condition < limit else None

    @classmethod
    def of_gram(cls, xp: Any, gram: Any) -> Whitening | None:
        """W = R^-1 for the Cholesky factor R'R = gram, or None where gram is too ill-conditioned for that."""
        try:
            R = cholesky(xp, gram).T
        except LostRangeError:
            return None
        return cls.triangular(xp, R, MAX_GRAM_CONDITION)

    @classmethod
    def by_singular_vectors(cls, xp: Any, R: Any, rcond: float) -> Whitening:
        """W = V / sigma for the singular values above rcond times the largest."""
        self = cls(xp, R)
        U, sigma, Vh = xp.linalg.svd(R, full_matrices=False)
        self.factor = sigma
        self.rank = r = int((sigma > rcond * sigma[0]).sum())
        self._sigma, self._basis, self._U = sigma[:r], Vh[:r].T, U[:, :r]
        self.null = Vh[r:].T
        self.condition = float(xp.linalg.norm(1 / sigma)) * self.norm if r == R.shape[1] else float("inf")
        return self

    def refined(self, C: Any, rcond: float) -> Whitening:
        """The basis of A's own singular vectors, cut at rcond, where (A W)'(A W) = C'C."""
        return self.by_singular_vectors(self.xp, (C * self._sigma) @ self._basis.T, rcond)

    def count_above(self, level: float) -> int:
        """The singular values above `level` times the largest, of those that count."""
        return int((self._sigma > level * self._sigma[0]).sum())

    def leave_out_rounding_errors(self, A: Any, first: int, cut: float) -> bool:
        """Leave out those singular values from `first` on that are errors of A's factorization.

        They are those up to `cut` times the largest in A times their vectors, from which what the errors mixed in of
        the other vectors is removed. Returns whether there were any; `sketched_solution` has no meaning then.
        """
        xp, top = self.xp, self._sigma[0]
        images = A @ self._basis
        sure, doubtful = images[:, :first], images[:, first:]
        mixed = (sure.T @ doubtful) / (sure * sure).sum(0)[:, None]
        _, sigma, Wh = xp.linalg.svd(doubtful - sure @ mixed, full_matrices=False)
        kept = int((sigma > cut * top).sum())
        if kept == sigma.shape[0]:
            return False
        vectors = (self._basis[:, first:] - self._basis[:, :first] @ mixed) @ Wh.T
        self.null = xp.concatenate([vectors[:, kept:], self.null], 1)
        self._basis = xp.concatenate([self._basis[:, :first], vectors[:, :kept]], 1)
        self._sigma = xp.concatenate([self._sigma[:first], sigma[:kept]])
        self.rank, self.condition = first + kept, float("inf")
        return True

    @property
    def is_triangular(self) -> bool:
        return self._sigma is None

    def matrix(self) -> Any:
        """W without a ridge."""
        return self._basis if self.is_triangular else self._basis / self._sigma

    def scales(self, damp: Any) -> Any:
        """(r, columns): sqrt(sigma^2 + d^2) for each column's ridge d; 1 where W is R^-1."""
        if self.is_triangular:
            return 1.0
        return self.xp.sqrt(self._sigma[:, None] ** 2 + damp[None, :] ** 2)

    def ridges(self, damp: Any) -> Any:
        """(r, columns): d / sigma, the ridge as it looks without one in W."""
        return damp[None, :] / self._sigma[:, None]

    def apply(self, Y: Any, damp: Any) -> Any:
        """W Y, (n, columns)."""
        return self._basis @ (Y / self.scales(damp))

    def apply_transposed(self, G: Any, damp: Any) -> Any:
        """W' G, (r, columns)."""
        return (self._basis.T @ G) / self.scales(damp)

    def sketched_solution(self, Z: Any, damp: Any) -> Any:
        """The minimizer of ||SA x - Sb||^2 + d^2 ||x||^2, where Z = Q' Sb."""
        if self.is_triangular:
            return self._basis @ Z
        return self._basis @ ((self._U.T @ Z) * (self._sigma[:, None] / self.scales(damp) ** 2))

    def normal_solution(self, G: Any) -> Any:
        """W W' G, for W = R^-1: the solution of R'R X = G."""
        return self._basis @ (self._basis.T @ G)

    def weighted_norms(self, G: Any, damp: Any, eta: Any, enough: Any) -> Any:
        """||(A'A + (d^2 + eta^2) I)^(-1/2) g|| of each column g of G, by the sketch; an upper bound where that is at
        most `enough`."""
        xp = self.xp
        if not self.is_triangular:
            weights = xp.sqrt(self.scales(damp) ** 2 + eta[None, :] ** 2)
            return _column_norms(xp, (self._basis.T @ G) / weights)
        white = self._basis.T @ G
        norms = _column_norms(xp, white)
        open_ = [j for j, is_open in enumerate((norms > enough).tolist()) if is_open]
        if len(open_) == 1:
            j = open_[0]
            factor, is_white = self._shifted_factor(float(eta[j]))
            norms[j] = xp.linalg.norm(solve_transposed(xp, factor, (white if is_white else G)[:, j : j + 1]))
        elif open_:  # one decomposition serves all
            if self._decomposed is None:
                self._decomposed = xp.linalg.svd(self.factor)[1:]
            sigma, Vh = self._decomposed
            norms = _column_norms(xp, (Vh @ G) / xp.sqrt(sigma[:, None] ** 2 + eta[None, :] ** 2))
        return norms

    def _shifted_factor(self, eta: float) -> tuple[Any, bool]:
        """(F, whether it belongs to W' g): ||F^-T g||, or ||F^-T W' g||, is ||(R'R + eta^2)^(-1/2) g||.

        It may be that of a smaller shift, by at most 10 %: an upper bound is as good. On tensors F is the Cholesky
        factor of R'R + eta^2 for a large eta, and for a small one that of (eta W)'(eta W) + 1 = W'(R'R + eta^2) W.
        Between the two, for condition numbers above 1e12, and for arrays it comes from QR. Rounding changes the norm by
        less than 1 %: that of h = W' g does so by eps times R's condition number, as the same W is used for both, and
        that of the sum by eps times its condition number.
        """
        made, factor, is_white = self._shifted
        if not 0.9 * eta <= made <= eta:
            largest = eta * self.condition / self.norm  # ||eta W||_F
            is_white = self.xp is not np and eta < MIN_SUM_SHIFT * self.norm and MIN_SUM_SHIFT * largest <= 1
            triangle, shift = (eta * self._basis, 1.0) if is_white else (self.factor, eta)
            factor = shifted_factor(self.xp, triangle, shift)
            self._shifted = eta, factor, is_white
        return factor, is_white


def power_of_two(value: float) -> float:
    """The power of two just above a positive number; 1 for 0."""
    if value == 0:
        return 1.0
    return math.ldexp(1.0, min(math.frexp(value)[1], 1023))


def _column_norms(xp: Any, x: Any) -> Any:
    return xp.sqrt((x * x).sum(0))
