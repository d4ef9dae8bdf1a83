"""Base class of a sketch and its transpose: a linear operator for NumPy, SciPy and torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, overload

import numpy as np

from .frontends import multiply_transposed, project, refuse_symbolic

if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike, DTypeLike, NDArray

    from .sketch import Sketch

    Float = TypeVar("Float", bound=np.floating[Any])
    Data = TypeVar("Data", torch.Tensor, NDArray[Any])


class Operator:
    """A linear operator of `shape` (m, n): ``@`` from either side, and SciPy's LinearOperator protocol."""

    shape: tuple[int, int]

    __array_ufunc__ = None  # makes ndarray @ operator call the operator
    __array_priority__ = 1000  # respected by numpy.matrix and scipy.sparse
    ndim = 2
    dtype = np.dtype(np.float64)  # the working dtype of SciPy's solvers; results have the dtype of the data

    @property
    def T(self) -> Operator:
        raise NotImplementedError

    @overload
    def __matmul__(self, a: torch.Tensor) -> torch.Tensor: ...
    @overload
    def __matmul__(self, a: NDArray[Float]) -> NDArray[Float]: ...
    @overload
    def __matmul__(self, a: ArrayLike) -> NDArray[Any]: ...
    def __matmul__(self, a: Any) -> Any:
        return self._multiply(a)

    @overload
    def __rmatmul__(self, x: torch.Tensor) -> torch.Tensor: ...
    @overload
    def __rmatmul__(self, x: NDArray[Float]) -> NDArray[Float]: ...
    @overload
    def __rmatmul__(self, x: ArrayLike) -> NDArray[Any]: ...
    def __rmatmul__(self, x: Any) -> Any:
        return self._multiply_from_left(x)

    def _multiply(self, a: Any) -> Any:
        """self @ a."""
        raise NotImplementedError

    def _multiply_from_left(self, x: Any) -> Any:
        """x @ self."""
        raise NotImplementedError

    def matvec(self, x: ArrayLike) -> NDArray[Any]:
        """Multiply a vector of shape (n,) or (n, 1)."""
        return np.asarray(self._multiply(x))

    def rmatvec(self, y: ArrayLike) -> NDArray[Any]:
        """Multiply a vector of shape (m,) or (m, 1) by the transpose."""
        return np.asarray(self.T._multiply(y))

    def matmat(self, a: ArrayLike) -> NDArray[Any]:
        """Multiply a matrix of shape (n, columns)."""
        return np.asarray(self._multiply(a))

    def rmatmat(self, b: ArrayLike) -> NDArray[Any]:
        """Multiply a matrix of shape (m, columns) by the transpose."""
        return np.asarray(self.T._multiply(b))

    # --------------------------------------------------------------------------------- unsupported conversions

    if not TYPE_CHECKING:  # type checkers would treat the operator as an array

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
            """Raise TypeError: implicit conversion would store all of the sketch's zeros."""
            caller = sys._getframe(1)
            if caller.f_code.co_name == "_matmul_dispatch" and caller.f_globals["__name__"].startswith("scipy.sparse"):
                # scipy.sparse calls __rmatmul__ of its right operand only if NumPy cannot convert that operand.
                unconverted = np.empty((), object)
                unconverted[()] = self
                return unconverted
            raise TypeError(
                f"{self!r} is not converted to an array implicitly: call S.toarray() or S.to_scipy() for the matrix, "
                "S.project(X) or X @ S.T to project an array, and S.project(df) to project a data frame"
            )

    def __fx_create_arg__(self, tracer: Any) -> NoReturn:
        """Raise TypeError for a product with a symbolic value, as in torch.fx.symbolic_trace."""
        refuse_symbolic()

    # --------------------------------------------------------------------------------- torch

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Implement tensor @ operator and torch.matmul."""
        if function.__name__ != "matmul" or len(args) != 2 or kwargs:
            return NotImplemented
        import torch

        left, right = args
        if isinstance(left, Operator):
            return left._multiply(right)
        if function is not torch.matmul and torch.compiler.is_dynamo_compiling():
            return right._multiply_by_shape(left)
        return right._multiply_from_left(left)

    def _multiply_by_shape(self, x: Any) -> Any:
        """x @ self or self @ x, whichever the shapes allow: torch.compile reports both in the same way."""
        m, n = self.shape
        fits_right, fits_left = x.ndim in (1, 2) and x.shape[0] == n, x.ndim > 0 and x.shape[-1] == m
        if fits_right and fits_left:
            raise ValueError(
                f"torch.compile cannot tell A @ S from S @ A if both are possible, as with shapes {tuple(x.shape)} and "
                f"{self.shape}: call S.project(X) for X @ S.T, S.project_adjoint(Y) for Y @ S, and torch.matmul(S, A)"
            )
        return self._multiply(x) if fits_right else self._multiply_from_left(x)


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

    def _multiply(self, b: Any) -> Any:
        """S.T @ B for B of shape (n_components,) or (n_components, n)."""
        return multiply_transposed(self.sketch.spec, b)

    def _multiply_from_left(self, x: Any) -> Any:
        """X @ S.T: `Sketch.project`."""
        return project(self.sketch.spec, x, None, False, True)

    def to_scipy(self, format: Literal["csc", "csr", "coo"] = "csr", dtype: DTypeLike = np.float64) -> Any:
        """Return the transpose as a `scipy.sparse` array of shape (n_features, n_components)."""
        return self.sketch.to_scipy(dtype=dtype).T.asformat(format)

    def toarray(self, dtype: DTypeLike = np.float64) -> NDArray[Any]:
        """Return the transpose as a dense array of shape (n_features, n_components)."""
        return self.sketch.toarray(dtype).T
