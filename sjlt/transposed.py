"""The transpose of a sketch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from . import projection
from .operators import Operator

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from .sketch import Sketch


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
        return projection.multiply_transposed(self.sketch, b)

    def __rmatmul__(self, x: Any) -> Any:
        """X @ S.T: `Sketch.project`."""
        return self.sketch.project(x)

    def to_scipy(self, format: Literal["csc", "csr", "coo"] = "csr", dtype: DTypeLike = np.float64) -> Any:
        """The transpose as a `scipy.sparse` array of shape (n_features, n_components)."""
        return self.sketch.to_scipy(dtype=dtype).T.asformat(format)

    def toarray(self, dtype: DTypeLike = np.float64) -> np.ndarray:
        """The transpose as a dense array of shape (n_features, n_components)."""
        return self.sketch.toarray(dtype).T
