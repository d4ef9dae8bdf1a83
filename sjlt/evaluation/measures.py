"""Measures of how a projection changes distances, inner products and neighbours, and theory for a Gaussian matrix.

Pure functions of arrays and sparse matrices in float64, used by `sjlt.quality`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..inputs.containers import is_sparse

QUANTILES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)
BLOCK = 1 << 17  # values in the differences of one block of pairs: 1 MiB, which fits in a core's cache


def squared_norms(X: Any) -> np.ndarray:
    """|x|^2 for each row x of an array or sparse matrix."""
    if is_sparse(X):
        return np.asarray(X.multiply(X).sum(axis=1)).ravel()
    return np.asarray(np.einsum("ij,ij->i", X, X))


def squared_distances(X: Any, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """|x_i - x_j|^2 for the pairs (i, j) of rows in `first` and `second`; exactly 0 for equal rows."""
    stored = X.nnz // max(1, X.shape[0]) if is_sparse(X) else X.shape[1]
    step = max(1, BLOCK // max(1, stored))
    starts = range(0, len(first), step)
    blocks = [squared_norms(X[first[a : a + step]] - X[second[a : a + step]]) for a in starts]
    return np.concatenate(blocks) if blocks else np.empty(0)


def distinct_pairs(n: int, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw `count` distinct unordered pairs of distinct integers below n uniformly, in a cache-friendly order.

    Pair r < n(n-1)/2 is (i, (i + r div n + 1) mod n) with i = r mod n. For the distances r div n + 1 around a circle of
    n integers, this enumerates every pair once.
    """
    chosen = np.sort(rng.choice(n * (n - 1) // 2, count, replace=False))
    first = chosen % n
    return first, (first + chosen // n + 1) % n


def distances_from(X: Any, queries: np.ndarray) -> np.ndarray:
    """|x_q - x|^2 from each query row to every row, of shape (queries, rows); inf from a query to itself.

    Distances are computed from inner products.
    """
    if not is_sparse(X):
        X = X - X.mean(axis=0)  # the same distances, with less cancellation
    norms, inner = squared_norms(X), X[queries] @ X.T
    if is_sparse(inner):
        inner = inner.toarray()
    result: np.ndarray = norms[queries, None] + norms - 2 * inner
    result[np.arange(len(queries)), queries] = np.inf
    return result


def recall(before: np.ndarray, after: np.ndarray, neighbours: int, slack: np.ndarray | float = 0) -> float:
    """The share of nearest neighbours that remain nearest neighbours.

    A row among the nearest in `after` counts if its distance in `before` is at most that of the last nearest neighbour,
    so rows at equal distances are interchangeable.

    Parameters
    ----------
    before, after : ndarray of shape (queries, rows)
        Distances.
    neighbours : int
        Number of nearest neighbours per query.
    slack : {float, ndarray of shape (queries,)}
        Tolerance for distances that are equal except for rounding.
    """
    found = np.argpartition(after, neighbours - 1, axis=1)[:, :neighbours]
    farthest = np.partition(before, neighbours - 1, axis=1)[:, neighbours - 1] + slack
    return float(np.mean(np.take_along_axis(before, found, axis=1) <= farthest[:, None]))


def bins(n_components: int) -> np.ndarray:
    """Bin edges for ratios: 1 +- 10 standard deviations of a Gaussian sketch, in steps of 0.05."""
    return 1 + math.sqrt(2 / n_components) * np.linspace(-10, 10, 401)


@dataclass(frozen=True)
class Theory:
    """Theory for a dense Gaussian S and any data: ratios follow chi^2 / k with k = n_components degrees of freedom."""

    n_components: int
    ratio_quantiles: tuple[float, ...]  # at QUANTILES
    ratio_std: float  # sqrt(2/k), also for squared norms
    outside: float  # probability that a ratio is outside [1 - eps, 1 + eps]
    inner_std: float  # sqrt((1 + mean cos^2) / k), over the sampled pairs
    any_outside: float  # upper bound on the probability that any of the n(n-1)/2 pairs is outside (union bound)


def gaussian(n_components: int, eps: float, n: int, mean_square_cosine: float) -> Theory:
    """Theory for n vectors with this mean of cos^2 over their pairs."""
    from scipy.stats import chi2

    k = n_components
    outside = float(chi2.cdf(k * (1 - eps), k) + chi2.sf(k * (1 + eps), k))
    return Theory(
        n_components=k,
        ratio_quantiles=tuple(float(chi2.ppf(q, k) / k) for q in QUANTILES),
        ratio_std=math.sqrt(2 / k),
        outside=outside,
        inner_std=math.sqrt((1 + mean_square_cosine) / k),
        any_outside=min(1.0, n * (n - 1) / 2 * outside),
    )
