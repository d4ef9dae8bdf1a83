"""A basis from a Gram matrix of a sketch, for well-conditioned matrices; for arrays in float32 where that suffices."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .products import add_gram, in_parallel, one_blas_thread
from .sketching import STACKS
from .sums import Gram
from .triangular import like, lower_cholesky
from .whitening import Whitening, power_of_two

COLUMNS = 64  # per task that scales and converts a sketch
# Largest `_deviation` for which the factor is computed in float32. The estimate is far above the true deviation of the
# whitened sketch from orthonormality: conjugate gradients take as many steps as with a factor in float64.
MAX_DEVIATION = 2.0
POWER_STEPS = 6


@one_blas_thread()
def gram_basis(xp: Any, SA: Any, may_be_single: bool) -> tuple[Whitening, np.ndarray] | None:
    """Return (basis, scales of SA's columns) from a Cholesky factorization of (SA)'SA; None if it is ill-conditioned.

    For arrays, one stack of the sketch is factored in float32 first, which succeeds up to a condition number of about
    3e3. This avoids forming the Gram matrix in float64 in vain; for 1500 columns it takes a quarter of the time. If
    `may_be_single`, the basis of the whole sketch in float32 is returned up to a condition number of about 1e3.
    """
    rows = SA.shape[0] // STACKS
    if xp is np and rows >= SA.shape[1]:
        single, scales = _scaled(SA if may_be_single else SA[:rows])
        factor = _single_factor(single, rows)
        if factor is None:
            return None
        if may_be_single:
            whitening = Whitening.triangular(xp, factor.astype(np.float64))
            if whitening is not None and _deviation(whitening) <= MAX_DEVIATION:
                return whitening, scales
    total = Gram(None)
    total.add(0, SA)
    gram = total.value
    scales = np.array([power_of_two(math.sqrt(value)) for value in xp.diagonal(gram).tolist()])
    divisors = xp.asarray(scales, **like(xp, gram))
    double = Whitening.from_gram(xp, gram / divisors / divisors[:, None])
    return None if double is None else (double, scales)


def _scaled(SA: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return SA in float32, with columns scaled to norms from 0.5 to 1 by powers of two, and the scales."""
    scaled, scales = np.empty(SA.shape, np.float32, order="F"), np.empty(SA.shape[1])

    def task(i: int) -> None:
        part = SA[:, i : i + COLUMNS]
        norms = np.sqrt(np.einsum("ij,ij->j", part, part))
        scales[i : i + COLUMNS] = [power_of_two(norm) for norm in norms.tolist()]
        np.divide(part, scales[i : i + COLUMNS], out=scaled[:, i : i + COLUMNS], casting="same_kind")

    in_parallel(task, ((i,) for i in range(0, SA.shape[1], COLUMNS)))
    return scaled, scales


def _single_factor(SA: np.ndarray, rows: int) -> Any:
    """Return the upper triangular Cholesky factor of (SA)'SA in float32.

    Returns None if SA or its first `rows` rows, which are tried before the others, have no such factor.
    """
    gram = np.zeros((SA.shape[1],) * 2, np.float32)
    try:
        for part in (SA[:rows], SA[rows:]):
            if part.size:
                add_gram(gram, part)
                factor = lower_cholesky(np, gram.T).T
    except np.linalg.LinAlgError:
        return None
    return factor


def _deviation(whitening: Whitening) -> float:
    """Estimate the norm of W'EW for the rounding errors E of a Gram matrix in float32 of columns of norm 1."""
    W = whitening.matrix()
    x = np.random.default_rng(0).standard_normal(W.shape[1])
    square = 0.0
    for _ in range(POWER_STEPS):
        x = W.T @ (W @ (x / np.linalg.norm(x)))
        square = float(np.linalg.norm(x))
    return float(np.finfo(np.float32).eps) * math.sqrt(W.shape[1]) * square
