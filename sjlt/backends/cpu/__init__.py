"""The CPU backend, on Numba.

Every function takes 2-D data, one data vector a row, and writes an `out` of that many rows. Where torch's bf16 comes in
or goes out, the array's dtype is `BFLOAT16`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .dense import adjoint, project
from .plan import BFLOAT16, Plan
from .sparse import adjoint_sparse, project_sparse, project_to_csr

if TYPE_CHECKING:
    import numpy as np

    from ...sketch import Sketch

__all__ = ["BFLOAT16", "adjoint", "adjoint_sparse", "codes", "project", "project_sparse", "project_to_csr"]


def codes(sketch: Sketch, start: int, stop: int) -> np.ndarray:
    """(stop - start, nnz) int32: 2 row + (1 where negative) of each entry of columns start .. stop - 1."""
    return Plan(sketch).table(start, stop)
