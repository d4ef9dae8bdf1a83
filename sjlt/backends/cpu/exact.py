"""The exact law on the CPU: the interface that `sjlt.backends` calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .dense import adjoint_exact, project_exact
from .plan import exact_plan
from .sparse import project_exact_sparse, project_exact_to_csr

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec

project, adjoint = project_exact, adjoint_exact
project_sparse, project_to_csr = project_exact_sparse, project_exact_to_csr


def codes(spec: SketchSpec, start: int, stop: int) -> np.ndarray:
    """The entries of columns start .. stop - 1 as codes: 2 row + (1 where negative), (stop - start, nnz) int32."""
    return exact_plan(spec).table(start, stop)


def columns(spec: SketchSpec) -> tuple[np.ndarray, np.ndarray, float]:
    """(codes, starts, scale) of all columns; a code is 2 row + (1 where negative), and rows ascend within a column.

    The codes of column j are codes[starts[j]:starts[j + 1]]; its entries are +-scale.
    """
    plan = exact_plan(spec)
    table = plan.table(0, plan.d).ravel()
    return table, np.arange(0, table.size + 1, plan.s), plan.scale
