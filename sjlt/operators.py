"""What a sketch and its transpose have in common: linear operators, for NumPy, scipy and torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from . import frontends

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike

    from .sketch import Sketch


class Operator:
    """Products of a linear operator of `shape` (m, n) from either side, and scipy's LinearOperator protocol."""

    shape: tuple[int, int]

    __array_ufunc__ = None  # ndarray @ operator is left to the operator
    __array_priority__ = 1000  # numpy.matrix and scipy.sparse look at this one
    ndim = 2
    dtype = np.dtype(np.float64)  # what scipy's solvers should work in; results have the dtype of the data

    def __matmul__(self, a: Any) -> Any:
        raise NotImplementedError

    def __rmatmul__(self, x: Any) -> Any:
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """tensor @ operator and torch.matmul are left to the operator. (Without this, @ arrives after an error.)"""
        if function.__name__ != "matmul" or len(args) != 2 or kwargs:
            return NotImplemented
        import torch

        left, right = args
        if isinstance(left, Operator):
            return left.__matmul__(right)
        if function is not torch.matmul and torch.compiler.is_dynamo_compiling():
            return right._from_either_side(left)
        return right.__rmatmul__(left)

    def _from_either_side(self, x: Any) -> Any:
        """x @ self or self @ x: torch.compile does not tell which of the two it saw, so that the shapes have to."""
        m, n = self.shape
        before, after = x.ndim in (1, 2) and x.shape[0] == n, x.ndim > 0 and x.shape[-1] == m
        if before and after:
            raise ValueError(
                f"torch.compile cannot tell A @ S from S @ A where both are possible, with shapes {tuple(x.shape)} and "
                f"{self.shape}: call S.project(X) for X @ S.T, S.project_adjoint(Y) for Y @ S, and torch.matmul(S, A)"
            )
        return self.__matmul__(x) if before else self.__rmatmul__(x)

    @property
    def T(self) -> Operator:
        raise NotImplementedError

    def matvec(self, x: ArrayLike) -> np.ndarray:
        """The operator times a vector of shape (n,) or (n, 1)."""
        return np.asarray(self @ x)

    def rmatvec(self, y: ArrayLike) -> np.ndarray:
        """The transpose times a vector of shape (m,) or (m, 1)."""
        return np.asarray(self.T @ y)

    def matmat(self, a: ArrayLike) -> np.ndarray:
        """The operator times a matrix of shape (n, columns)."""
        return np.asarray(self @ a)

    def rmatmat(self, b: ArrayLike) -> np.ndarray:
        """The transpose times a matrix of shape (m, columns)."""
        return np.asarray(self.T @ b)


@dataclass(frozen=True, repr=False)
class Transposed(Operator):
    """The transpose of a sketch, ``S.T``: an operator of shape (n_features, n_components)."""

    sketch: Sketch

    @property
    def shape(self) -> tuple[int, int]:  # type: ignore[override]
        return (self.sketch.n_features, self.sketch.n_components)

    @property
    def T(self) -> Sketch:
        return self.sketch

    def __repr__(self) -> str:
        return f"{self.sketch!r}.T"

    def __matmul__(self, b: Any) -> Any:
        """S.T @ B for B (n_components,) or (n_components, n)."""
        return frontends.multiply_transposed(self.sketch.spec, b)

    def __rmatmul__(self, x: Any) -> Any:
        """X @ S.T: `Sketch.project`."""
        return self.sketch.project(x)

    def to_scipy(self, format: Literal["csc", "csr", "coo"] = "csr", dtype: DTypeLike = np.float64) -> Any:
        """The transpose as a `scipy.sparse` array of shape (n_features, n_components)."""
        return self.sketch.to_scipy(dtype=dtype).T.asformat(format)

    def toarray(self, dtype: DTypeLike = np.float64) -> np.ndarray:
        """The transpose as a dense array of shape (n_features, n_components)."""
        return self.sketch.toarray(dtype).T
