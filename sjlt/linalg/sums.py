"""Sums over the blocks of rows of a matrix, in one pass; the result is in `value`, or returned by `store`."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from ..inputs.containers import is_tensor
from ..sketch import Sketch
from . import tensor_products
from .products import add_gram, multiply
from .residuals import normal_product, residual_gradient
from .tensor_products import add_upper_gram, symmetric, times_upper


class Sum(Protocol):
    """A sum over the blocks of rows of a matrix.

    Attributes
    ----------
    accepts_float32 : bool
        Whether `add` accepts float32 arrays, which it sums in float64.
    """

    accepts_float32: bool = False

    def add(self, start: int, block: Any) -> None:
        """Add a block of rows, the first of which is row `start`; float64 unless `accepts_float32`."""


class Sketched(Sum):
    """S A, from one slice of S per block.

    (S A)' is written to `transposed`, zeros of shape (n, k), by `store`. Arrays are summed in the memory order of S A,
    because adding a block in the other one takes as long as sketching it.
    """

    def __init__(self, S: Sketch, transposed: Any):
        self._S, self._transposed = S, transposed
        self._sums = np.zeros(transposed.shape, order="F") if isinstance(transposed, np.ndarray) else transposed

    def add(self, start: int, block: Any) -> None:
        part = self._S[:, start : start + block.shape[0]]
        part.project(block.T, out=self._sums, accumulate=True)

    def store(self) -> Any:
        """Write (S A)' to `transposed`; return S A, its transpose."""
        if self._sums is not self._transposed:
            self._transposed[...] = self._sums
        return self._transposed.T


class Projected(Sum):
    """A Omega', written to the rows of `value`."""

    def __init__(self, omega: Sketch, value: Any):
        self._omega, self.value = omega, value

    def add(self, start: int, block: Any) -> None:
        self._omega.project(block, out=self.value[start : start + block.shape[0]])


class Product(Sum):
    """A V."""

    def __init__(self, m: int, V: Any):
        self._V = V
        self.value = np.empty((m, V.shape[1])) if isinstance(V, np.ndarray) else V.new_empty((m, V.shape[1]))

    def add(self, start: int, block: Any) -> None:
        product = multiply(block, self._V) if isinstance(block, np.ndarray) else block @ self._V
        self.value[start : start + block.shape[0]] = product


class Normal(Sum):
    """A' A Z."""

    accepts_float32 = True

    def __init__(self, Z: Any):
        self._Z = Z
        self.value: Any = None

    def add(self, start: int, block: Any) -> None:
        if isinstance(block, np.ndarray):
            term = normal_product(block, self._Z)
        elif is_tensor(block):
            term = tensor_products.normal_product(block, self._Z)
        else:
            term = block.T @ (block @ self._Z)
        self.value = term if self.value is None else self.value + term


class Gram(Sum):
    """(A W)' (A W), or A'A for W = None.

    `is_triangular` says that W is upper triangular, which saves operations for tensors.
    """

    def __init__(self, W: Any, is_triangular: bool = False):
        self._W, self._is_triangular = W, is_triangular
        self._total: Any = 0

    def add(self, start: int, block: Any) -> None:
        if is_tensor(block):
            self._add_tensor(block)
        elif isinstance(block, np.ndarray):
            product = block if self._W is None else multiply(block, self._W)
            if isinstance(self._total, int):
                self._total = np.zeros((product.shape[1],) * 2)
            add_gram(self._total, product)
        else:
            product = block if self._W is None else block @ self._W
            term = product.T @ product
            self._total = self._total + (term.toarray() if hasattr(term, "tocoo") else term)

    def _add_tensor(self, block: Any) -> None:
        if self._is_triangular:
            block = times_upper(block, self._W)
        elif self._W is not None:
            block = block @ self._W
        if isinstance(self._total, int):
            self._total = block.new_zeros((block.shape[1],) * 2)
        add_upper_gram(self._total, block)

    @property
    def value(self) -> Any:
        if is_tensor(self._total):
            return symmetric(self._total)
        if isinstance(self._total, np.ndarray):
            return np.triu(self._total) + np.triu(self._total, 1).T
        return self._total


class Gradient(Sum):
    """A' R for the residuals R = B - A X, and the squared column norms of R.

    Column j of X belongs to column j of B[:, columns].
    """

    accepts_float32 = True

    def __init__(self, X: Any, B: Any, columns: Any):
        self._X, self._B, self._columns = X, B, columns
        self.value: Any = None
        self.squares: Any = None

    def add(self, start: int, block: Any) -> None:
        right = self._B[start : start + block.shape[0]][:, self._columns]
        if isinstance(block, np.ndarray):
            term, squares = residual_gradient(block, self._X, right)
        elif is_tensor(block):
            term, squares = tensor_products.residual_gradient(block, self._X, right)
        else:
            residual = right - block @ self._X
            term, squares = block.T @ residual, (residual * residual).sum(0)
        is_first = self.value is None
        self.value = term if is_first else self.value + term
        self.squares = squares if is_first else self.squares + squares
