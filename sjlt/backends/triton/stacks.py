"""Stacked sketches of the exact law on Triton, by the portable kernels.

Products of many vectors take one launch, in which the tiles of all stacks run side by side, so that all but one of them
find the data in the L2 cache. Few vectors and adjoints are made stack by stack.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ...kernels.config.exact import FewVectors
from ...kernels.config.product import SCRATCH_BYTES, Product, kernel_geometry
from . import device, exact, partial_sums, sparse

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec

project_sparse, gather_sparse = sparse.project_exact, sparse.gather_exact


def project(spec: SketchSpec, x: Tensor, out: Tensor, accumulate: bool) -> None:
    """out (n, k) = x (n, d) Sᵀ, added to `out` if `accumulate`."""
    n, d = x.shape
    if n == 0 or d == 0:
        if not accumulate:
            out.zero_()
        return
    part = spec.one_stack()
    with device.current(x):
        first = out[:, spec.stack_rows(0)]
        plan = _plan(exact.describe(part, x, first, accumulate, adjoint=False), None, spec.stacks)
        if not isinstance(plan.chosen, FewVectors):
            _write(plan, part, x, out, accumulate)
            return
        for stack in range(spec.stacks):
            rows = out[:, spec.stack_rows(stack)]
            plan = _plan(exact.describe(part, x, rows, accumulate, adjoint=False), stack, spec.stacks)
            _write(plan, part, x, rows, accumulate)


def _write(plan: exact.Plan, spec: SketchSpec, x: Tensor, out: Tensor, accumulate: bool) -> None:
    chosen = cast(Any, plan.chosen)

    def launch(target: Tensor, accumulate: bool) -> None:
        exact._project(plan, chosen, spec, x, target, accumulate)

    partial_sums.write(chosen.splits, x, out, accumulate, plan.geometry.scale, launch)


def adjoint(spec: SketchSpec, y: Tensor, out: Tensor, accumulate: bool) -> None:
    """out (n, d) = y (n, k) S, added to `out` if `accumulate`."""
    n, d = out.shape
    if out.numel() == 0:
        return
    if out.dtype in (torch.float16, torch.bfloat16):  # the sum over stacks is rounded once
        span = max(1, SCRATCH_BYTES // (4 * n))
        for j in range(0, d, span):
            part = out[:, j : j + span]
            wide = torch.empty_like(part, dtype=torch.float32)
            adjoint(spec.columns(j, j + part.shape[1]), y, wide, False)
            part.copy_(wide)
        return
    one = spec.one_stack()
    with device.current(y):
        for stack in range(spec.stacks):
            data, add = y[:, spec.stack_rows(stack)], accumulate or stack > 0
            plan = _plan(exact.describe(one, out, data, add, adjoint=True), stack, spec.stacks)
            exact._adjoint(plan, cast(Any, plan.chosen), one, data, out, add)


@lru_cache(maxsize=4096)
def _plan(product: Product, stack: int | None, stacks: int) -> exact.Plan:
    """The plan for one stack's product, or with None for all of them, by a portable kernel: Hopper's know no stacks."""
    plan = exact.make_plan(product._replace(device=product.device._replace(hopper=False)))
    geometry = kernel_geometry(product.k, product.nnz, stack, stacks)
    return replace(plan, geometry=geometry, constants={**plan.constants, "GEOMETRY": geometry})
