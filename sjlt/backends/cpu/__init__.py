"""The CPU backend, on Numba.

Every function takes 2-D data, one data vector a row, and writes an `out` of that many rows. Where torch's bf16 comes in
or goes out, the array's dtype is `BFLOAT16`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from . import dense, iid, sparse
from .plan import BFLOAT16, STAGE_BYTES, Plan

if TYPE_CHECKING:
    from ...sketch import Sketch

__all__ = ["BFLOAT16", "adjoint", "adjoint_sparse", "codes", "columns", "project", "project_sparse", "project_to_csr"]


def project(sketch: Sketch, x: np.ndarray, out: np.ndarray, accumulate: bool) -> None:
    """out (n, k) = x (n, d) S', or out += that."""
    (iid if sketch.lanes else dense).project(sketch, x, out, accumulate)


def adjoint(sketch: Sketch, y: np.ndarray, out: np.ndarray, accumulate: bool) -> None:
    """out (n, d) = y (n, k) S, or out += that."""
    (iid if sketch.lanes else dense).adjoint(sketch, y, out, accumulate)


def project_sparse(sketch: Sketch, x: Any, out: np.ndarray, accumulate: bool) -> None:
    """out (n, k) = x (n, d) S', or out += that, for x in CSR or CSC."""
    (iid if sketch.lanes else sparse).project_sparse(sketch, x, out, accumulate)


def adjoint_sparse(sketch: Sketch, y: Any, out: np.ndarray, accumulate: bool) -> None:
    """out (n, d) = y (n, k) S, or out += that, for y in CSR or CSC, made dense some rows at a time."""
    step = max(1, STAGE_BYTES // (8 * sketch.n_components))
    for i in range(0, y.shape[0], step):
        adjoint(sketch, y[i : i + step].toarray(), out[i : i + step], accumulate)


def project_to_csr(sketch: Sketch, x: Any, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(data, indices, indptr) of x S' for x (n, d) in CSR, indices sorted."""
    return (iid if sketch.lanes else sparse).project_to_csr(sketch, x, dtype)


def codes(sketch: Sketch, start: int, stop: int) -> np.ndarray:
    """(stop - start, nnz) int32: 2 row + (1 where negative) of each entry of columns start .. stop - 1."""
    return Plan(sketch).table(start, stop)


def columns(sketch: Sketch) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """(signs, rows, indptr, scale): the sketch in CSC, rows ascending, entries scale times +-1."""
    if sketch.lanes:
        return iid.columns(sketch)
    plan = Plan(sketch)
    table = plan.table(0, plan.d).ravel()
    return 1 - 2 * (table & 1), table >> 1, np.arange(0, table.size + 1, plan.s), plan.scale
