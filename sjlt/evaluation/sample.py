"""The rows, pairs and queries that `sjlt.quality` samples, and how a projection distorts them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..files.source import Source
from ..inputs.containers import as_container, is_sparse, is_tensor
from .measures import distances_from, distinct_pairs, recall, squared_distances, squared_norms


def rows_of(X: Any, chosen: np.ndarray) -> Any:
    """Rows `chosen` of X (ascending indices) in float64, as an array or a CSR matrix."""
    if isinstance(X, Source):
        X = X.rows(chosen)
    elif is_tensor(X):
        import torch

        X = as_array(X[torch.from_numpy(chosen).to(X.device)])
    else:
        X = X[chosen]
    X = as_container(X).astype(np.float64)
    if is_sparse(X):
        X.sum_duplicates()
    return X


def as_array(tensor: Any) -> np.ndarray:
    """Convert a tensor to a NumPy array; bfloat16, which NumPy lacks, becomes float32."""
    import torch

    held = tensor.detach().cpu().resolve_neg()
    array: np.ndarray = (held.float() if held.dtype == torch.bfloat16 else held).numpy()
    return array


def refuse_non_finite(X: Any, chosen: np.ndarray) -> None:
    """Raise ValueError if X has a NaN or infinity; `chosen` are the numbers of its rows, for the message."""
    finite = np.isfinite(X.data if is_sparse(X) else X)
    if finite.all():
        return
    if is_sparse(X):
        position = int(np.argmin(finite))
        row, column = int(np.searchsorted(X.indptr, position, side="right")) - 1, int(X.indices[position])
    else:
        row, column = map(int, np.unravel_index(np.argmin(finite), X.shape))
    raise ValueError(f"X[{chosen[row]}, {column}] is {X[row, column]}: distances need finite values")


def _scaled(X: Any) -> Any:
    """X times a power of two, so that squares neither overflow nor underflow. The scaling is exact."""
    values = X.data if is_sparse(X) else X
    exponent = int(np.frexp(np.abs(values).max(initial=0))[1])
    return X * 2.0 ** -max(-1000, min(exponent, 1000))


class Sample:
    """Sampled rows, and their pairs, distances and neighbours before projection."""

    def __init__(self, X: Any, rows: int, pairs: int, queries: int, neighbours: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        chosen = np.sort(rng.choice(X.shape[0], min(rows, X.shape[0]), replace=False))
        sampled = rows_of(X, chosen)
        refuse_non_finite(sampled, chosen)
        sampled = _scaled(sampled)
        nonzero = squared_norms(sampled) > 0
        self.X = sampled[nonzero]
        self.norms = squared_norms(self.X)
        self.zero_rows, rows = len(chosen) - len(self.norms), len(self.norms)
        if rows < neighbours + 2:
            raise ValueError(
                f"{neighbours} nearest neighbours need at least {neighbours + 2} rows that are not 0: X has "
                f"{X.shape[0]} rows, {len(chosen)} of them sampled, {rows} of these not 0"
            )

        first, second = distinct_pairs(rows, min(pairs, rows * (rows - 1) // 2), rng)
        distances = squared_distances(self.X, first, second)
        apart = distances > 0
        self.duplicates = int(len(apart) - apart.sum())
        if not apart.any():
            raise ValueError(f"all {len(apart)} sampled pairs of rows are duplicates: no distances to compare")
        self.first, self.second, self.distances = first[apart], second[apart], distances[apart]
        self.cosines = self._inner(self.norms, self.distances)

        self.queries, self.neighbours = rng.choice(rows, min(queries, rows), replace=False), neighbours
        self.around = distances_from(self.X, self.queries)
        self._slack = 1e-12 * np.max(self.around, axis=1, where=np.isfinite(self.around), initial=0)

    def _inner(self, norms: np.ndarray, distances: np.ndarray) -> np.ndarray:
        """Inner products of the pairs, divided by their norms before projection."""
        inner: np.ndarray = (norms[self.first] + norms[self.second] - distances) / 2
        inner /= np.sqrt(self.norms[self.first] * self.norms[self.second])
        return inner

    def compare(self, Y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
        """Compare with the projected sample.

        Returns
        -------
        ratios : ndarray of shape (pairs,)
            Squared distances, after / before.
        errors : ndarray of shape (pairs,)
            Errors of inner products, relative to both norms.
        norms : ndarray of shape (rows,)
            Squared norms, after / before.
        recall : float
        """
        distances, norms = squared_distances(Y, self.first, self.second), squared_norms(Y)
        errors = self._inner(norms, distances) - self.cosines
        kept = recall(self.around, distances_from(Y, self.queries), self.neighbours, self._slack)
        return distances / self.distances, errors, norms / self.norms, kept
