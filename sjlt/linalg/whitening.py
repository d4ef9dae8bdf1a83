"""Bases in which a matrix is well conditioned, from a sketch of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .triangular import (
    MIN_SUM_SHIFT,
    inverse,
    like,
    lower_cholesky,
    on_host,
    shifted_factor,
    solve_transposed,
    upper_product,
)

# Condition number (in the Frobenius norm, which bounds the one in the 2-norm) up to which R^-1 is as good a basis as
# the singular vectors of R, which take 40 times as long for 1500 columns. Refinement recovers the loss of accuracy.
MAX_TRIANGULAR_CONDITION = 1e13
# Condition number up to which the Cholesky factor of a Gram matrix replaces R of a QR factorization, in a fifth of the
# time: its relative error, eps times the condition number squared, stays below 1e-3.
MAX_GRAM_CONDITION = 1e6
EPS = float(np.finfo(np.float64).eps)
# Largest Frobenius norm of eta W for which conjugate gradients with R'R + eta^2 are tried, and their maximum number of
# steps. For 1500 columns a step takes 0.5 ms, and factoring R'R + eta^2 60 ms.
MAX_SHIFTED_BASIS, MAX_SHIFTED_STEPS = 100.0, 20
# R'R + eta^2 is factored for a shift smaller than eta by this factor, so that later shifts, which are close to the
# first, may use the same factorization.
SHIFT_MARGIN = 0.95
# Singular values of a sketch below this times the largest are rounding errors, which reach a few eps.
NOISE = 10 * EPS


class LostRangeError(np.linalg.LinAlgError):
    """Raised if a sketch has lost part of A's range."""


def rounding_level(shape: tuple[int, int], is_direct: bool) -> float:
    """Return the size up to which singular values, relative to the largest, may be rounding errors of a factorization.

    `shape` is that of the factored matrix. If it is A itself (`is_direct`) the level is NumPy's max(m, n) eps: in
    constant columns rounding errors have one sign and add up, to 150 eps for (1500, 300). A sketch's signs are random:
    with OpenBLAS's kernels for AVX2, errors reach 16 eps for (36, 3) and 30 eps for 50 columns.
    """
    return max(NOISE, EPS * (max(shape) if is_direct else 4 * math.sqrt(shape[0])))


def cholesky(xp: Any, a: Any) -> Any:
    """Return the lower Cholesky factor of a whitened Gram matrix; raise LostRangeError if it is singular."""
    try:
        return lower_cholesky(xp, a)
    except (np.linalg.LinAlgError, RuntimeError):  # torch's LinAlgError is a RuntimeError
        raise LostRangeError("the whitened matrix is singular: the sketch lost part of A's range") from None


class Whitening:
    """A matrix W of shape (n, r) such that A W is close to orthonormal, computed from the R of SA = Q R.

    W is R^-1, or V / sigma for the r singular values of R that do not count as zero. With a ridge d,
    W = V / sqrt(sigma^2 + d^2) whitens [A; d I].

    Attributes
    ----------
    rank : int
        r.
    factor : array
        R; if W is V / sigma, its singular values in descending order.
    norm : float
        Frobenius norm of R.
    condition : float
        Upper bound on the condition number of R, in the Frobenius norm; infinite if r < n.
    null : array of shape (n, n - r)
        Singular vectors of the singular values that count as zero.
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
        self._shifted: tuple[float, Any, bool] = 0.0, R, False  # (eta, its `_shifted_factor`)
        self._svd: Any = None  # (sigma, Vh) of R

    @classmethod
    def triangular(cls, xp: Any, R: Any, limit: float = MAX_TRIANGULAR_CONDITION) -> Whitening | None:
        """Use W = R^-1; return None if R is not square or its condition number may exceed `limit`."""
        self = cls(xp, R)
        # ||R^-1|| is at least 1 / min |R_ii|.
        if R.shape[0] != R.shape[1] or self.norm >= limit * float(abs(xp.diagonal(R)).min()):
            return None
        self._basis, self.rank, self.null = inverse(xp, R), R.shape[1], R[:0].T
        self.condition = self.norm * float(xp.linalg.norm(self._basis))
        return self if self.condition < limit else None

    @classmethod
    def from_gram(cls, xp: Any, gram: Any) -> Whitening | None:
        """Use W = R^-1 with the Cholesky factor R'R = gram; return None if gram is too ill-conditioned."""
        try:
            R = cholesky(xp, gram).T
        except LostRangeError:
            return None
        return cls.triangular(xp, R, MAX_GRAM_CONDITION)

    @classmethod
    def from_singular_vectors(cls, xp: Any, R: Any, rcond: float) -> Whitening:
        """Use W = V / sigma for the singular values above rcond times the largest."""
        self = cls(xp, R)
        U, sigma, Vh = xp.linalg.svd(R, full_matrices=False)
        self.factor = sigma
        self.rank = r = int((sigma > rcond * sigma[0]).sum())
        self._sigma, self._basis, self._U = sigma[:r], Vh[:r].T, U[:, :r]
        self.null = Vh[r:].T
        self.condition = float(xp.linalg.norm(1 / sigma)) * self.norm if r == R.shape[1] else float("inf")
        return self

    def refined(self, C: Any, rcond: float) -> Whitening:
        """Return the basis of A's own singular vectors, truncated by `rcond`, given (A W)'(A W) = C'C."""
        return self.from_singular_vectors(self.xp, (C * self._sigma) @ self._basis.T, rcond)

    def count_above(self, level: float) -> int:
        """Return how many of the r singular values are above `level` times the largest."""
        return int((self._sigma > level * self._sigma[0]).sum())

    def drop_rounding_errors(self, A: Any, first: int, cut: float) -> bool:
        """Drop the singular values with index >= `first` that are rounding errors of A's factorization.

        The singular values in doubt are computed anew from A times their vectors, after removing the components of the
        other vectors that rounding mixed in; those up to `cut` times the largest are dropped. Returns whether there
        were any; `sketched_solution` is meaningless then.
        """
        xp, largest = self.xp, self._sigma[0]
        images = A @ self._basis
        certain, doubtful = images[:, :first], images[:, first:]
        mixed = (certain.T @ doubtful) / (certain * certain).sum(0)[:, None]
        _, sigma, Wh = xp.linalg.svd(doubtful - certain @ mixed, full_matrices=False)
        kept = int((sigma > cut * largest).sum())
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
        """Whether W is R^-1."""
        return self._sigma is None

    def matrix(self) -> Any:
        """Return W for no ridge."""
        return self._basis if self.is_triangular else self._basis / self._sigma

    def scales(self, damp: Any) -> Any:
        """Return sqrt(sigma^2 + d^2) for each column's ridge d, of shape (r, columns), if W is V / sigma."""
        return self.xp.sqrt(self._sigma[:, None] ** 2 + damp[None, :] ** 2)

    def ridges(self, damp: float) -> Any:
        """Return d / sigma, the ridges in the basis W = V / sigma, of shape (r,)."""
        return damp / self._sigma

    def apply(self, Y: Any, damp: Any) -> Any:
        """Return W Y, of shape (n, columns)."""
        return self._times(Y if self.is_triangular else Y / self.scales(damp))

    def apply_transposed(self, G: Any, damp: Any) -> Any:
        """Return W' G, of shape (r, columns)."""
        white = self._transposed_times(G)
        return white if self.is_triangular else white / self.scales(damp)

    def _times(self, Y: Any) -> Any:
        """Return R^-1 Y, or V Y."""
        return upper_product(self.xp, self._basis, Y) if self.is_triangular else self._basis @ Y

    def _transposed_times(self, G: Any) -> Any:
        """Return R^-T G, or V' G."""
        return upper_product(self.xp, self._basis, G, transposed=True) if self.is_triangular else self._basis.T @ G

    def sketched_solution(self, Z: Any, damp: Any) -> Any:
        """Return the minimizer of ||SA x - Sb||^2 + d^2 ||x||^2, given Z = Q' Sb."""
        if self.is_triangular:
            return self._times(Z)
        return self._basis @ ((self._U.T @ Z) * (self._sigma[:, None] / self.scales(damp) ** 2))

    def normal_solution(self, G: Any) -> Any:
        """Return W W' G for W = R^-1, the solution of R'R X = G."""
        return self._times(self._transposed_times(G))

    def weighted_norms(self, G: Any, damp: Any, eta: np.ndarray, sufficient: np.ndarray) -> np.ndarray:
        """Estimate ||(A'A + (d^2 + eta^2) I)^(-1/2) g|| for each column g of G, from the sketch.

        A norm may be overestimated: by at most 12 % or, if the estimate is at most `sufficient`, by any factor.
        """
        xp = self.xp
        if not self.is_triangular:
            return _column_norms((self._basis.T @ G) / xp.sqrt(self.scales(damp) ** 2 + self._row(eta) ** 2))
        white = self._transposed_times(G)
        norms = _column_norms(white)
        exceeding = np.flatnonzero(norms > sufficient)
        if exceeding.size == 1:
            j = int(exceeding[0])
            norm = self._shifted_norm(white[:, j : j + 1], float(eta[j]))
            if norm is None:
                factor, is_white = self._shifted_factor(float(eta[j]))
                norm = float(xp.linalg.norm(solve_transposed(xp, factor, (white if is_white else G)[:, j : j + 1])))
            norms[j] = norm
        elif exceeding.size:  # one SVD serves all
            if self._svd is None:
                self._svd = xp.linalg.svd(self.factor)[1:]
            sigma, Vh = self._svd
            norms = _column_norms((Vh @ G) / xp.sqrt(sigma[:, None] ** 2 + self._row(eta) ** 2))
        return norms

    def _row(self, values: np.ndarray) -> Any:
        """Return one number per column as a row of the kind of R."""
        return self.xp.asarray(values, **like(self.xp, self.factor))[None, :]

    def _shifted_norm(self, white: Any, eta: float) -> float | None:
        """Return an upper bound within 1 % on ||(R'R + eta^2)^(-1/2) g||, given W' g; None if it takes too many steps.

        With w = W' g, the square of the norm is w'(1 + eta^2 W'W)^-1 w. Conjugate gradients solve this system. For the
        residual r of an approximate solution y, the square is y'(w + r) plus at most r'r.
        """
        if self.xp is not np or eta * self.condition > MAX_SHIFTED_BASIS * self.norm:
            return None
        y, residual, direction = np.zeros_like(white), white, white
        squares = float((white * white).sum())
        for _ in range(MAX_SHIFTED_STEPS):
            image = direction + eta**2 * self._transposed_times(self._times(direction))
            step = squares / float((direction * image).sum())
            y, residual = y + step * direction, residual - step * image
            before, squares = squares, float((residual * residual).sum())
            value = float((y * (white + residual)).sum())
            if squares <= 0.01 * value:
                return math.sqrt(value + squares)
            direction = residual + direction * (squares / before)
        return None

    def _shifted_factor(self, eta: float) -> tuple[Any, bool]:
        """Return (F, is_white) such that ||F^-T g|| or, if is_white, ||F^-T W' g|| is ||(R'R + eta^2)^(-1/2) g||.

        F is for a shift smaller by up to 10 %, which gives an upper bound, and is cached. It is the Cholesky factor of
        R'R + eta^2 if eta is large and, for tensors, of (eta W)'(eta W) + 1 = W'(R'R + eta^2) W if eta is small.
        Otherwise, which for tensors requires a condition number above 1e12, F comes from QR. Rounding changes the norm
        by less than 1 %: in W' g by eps times R's condition number, since the same W is used for both, and in the sum
        by eps times its condition number.
        """
        cached_eta, factor, is_white = self._shifted
        if not 0.9 * eta <= cached_eta <= eta:
            eta *= SHIFT_MARGIN
            largest = eta * self.condition / self.norm  # ||eta W||_F
            is_white = self.xp is not np and eta < MIN_SUM_SHIFT * self.norm and MIN_SUM_SHIFT * largest <= 1
            triangle, shift = (eta * self._basis, 1.0) if is_white else (self.factor, eta)
            factor = shifted_factor(self.xp, triangle, shift)
            self._shifted = eta, factor, is_white
        return factor, is_white


def power_of_two(value: float) -> float:
    """Return the power of two just above a positive number, and 1 for 0; one whose reciprocal is finite."""
    if value == 0:
        return 1.0
    return math.ldexp(1.0, max(-1021, min(math.frexp(value)[1], 1023)))


def _column_norms(x: Any) -> np.ndarray:
    """Return the 2-norms of the columns."""
    norms: np.ndarray = np.sqrt(on_host((x * x).sum(0)))
    return norms
