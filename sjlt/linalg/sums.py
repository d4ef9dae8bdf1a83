"""Sums over the blocks of rows of a matrix, for one pass over it; each holds its result in `value`."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from ..sketch import Sketch


class Sum(Protocol):
    """A sum over the blocks of rows of a matrix."""

    def add(self, start: int, block: Any) -> None:
        """Add the term of the rows from `start` on, float64."""


class Sketched:
    """S A, slice by slice of S."""

    def __init__(self, S: Sketch, transposed: Any):
        """`transposed` : zeros of shape (n, k), for the result's transpose."""
        self._S, self._transposed = S, transposed

    def add(self, start: int, block: Any) -> None:
        part = self._S[:, start : start + block.shape[0]]
        part.project(block.T, out=self._transposed, accumulate=True)

    @property
    def value(self) -> Any:
        return self._transposed.T


class Projected:
    """A Omega', row by row, into `value`."""

    def __init__(self, omega: Sketch, value: Any):
        self._omega, self.value = omega, value

    def add(self, start: int, block: Any) -> None:
        self._omega.project(block, out=self.value[start : start + block.shape[0]])


class Product:
    """A V, row by row."""

    def __init__(self, m: int, V: Any):
        self._V = V
        self.value = np.empty((m, V.shape[1])) if isinstance(V, np.ndarray) else V.new_empty((m, V.shape[1]))

    def add(self, start: int, block: Any) -> None:
        self.value[start : start + block.shape[0]] = block @ self._V


class Normal:
    """A' A Z."""

    def __init__(self, Z: Any):
        self._Z = Z
        self.value: Any = 0

    def add(self, start: int, block: Any) -> None:
        self.value = self.value + block.T @ (block @ self._Z)


class Gram:
    """(A W)' (A W), or A'A for W = None."""

    def __init__(self, W: Any):
        self._W = W
        self.value: Any = 0

    def add(self, start: int, block: Any) -> None:
        product = block if self._W is None else block @ self._W
        term = product.T @ product
        self.value = self.value + (term.toarray() if hasattr(term, "tocoo") else term)


class Gradient:
    """A' R for the residuals R = B - A X, and the squared norms of R's columns.

    `columns` says which column of B belongs to each column of X.
    """

    def __init__(self, X: Any, B: Any, columns: Any):
        self._X, self._B, self._columns = X, B, columns
        self.value: Any = 0
        self.squares: Any = 0

    def add(self, start: int, block: Any) -> None:
        residual = self._B[start : start + block.shape[0]][:, self._columns] - block @ self._X
        self.value = self.value + block.T @ residual
        self.squares = self.squares + (residual * residual).sum(0)
