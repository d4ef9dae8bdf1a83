"""Stacked sketches under the exact law on Triton.

One launch computes the projection of many vectors. The tiles of all stacks run side by side, so that all but one of
them find the data in the L2 cache. Few vectors (except by `scattered_sums`) and adjoints (except by `staged_adjoint`)
are computed stack by stack.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...kernels.config import hopper_codes, scattered_rules, scattered_sums, staged_adjoint, staged_gather
from ...kernels.config.exact import FewVectors, RowGather, choose_on_the_fly
from ...kernels.config.product import SCRATCH_BYTES, Product, kernel_geometry
from . import exact, prepared, sparse

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec
    from .prepared import Call

project_sparse, gather_sparse = sparse.project_exact, sparse.gather_exact


def project(spec: SketchSpec, x: Tensor, out: Tensor, accumulate: bool, axis: int = 1) -> None:
    """Write x (n, d) Sᵀ to `out` (n, k), or add it if `accumulate`. Both are transposed if `axis` is 0."""
    prepared.multiply(_prepare_project, spec, x, out, accumulate, axis)


def adjoint(spec: SketchSpec, y: Tensor, out: Tensor, accumulate: bool, axis: int = 1) -> None:
    """Write y (n, k) S to `out` (n, d), or add it if `accumulate`. Both are transposed if `axis` is 0."""
    if out.numel() == 0:
        return
    y, out = (y, out) if axis else (y.t(), out.t())
    if staged_adjoint.eligible(_describe_adjoint(spec, y, out, accumulate)):
        prepared.multiply(_prepare_staged_adjoint, spec, y, out, accumulate)
        return
    if out.dtype in (torch.float16, torch.bfloat16):  # sum over stacks in fp32, so that it is rounded once
        n, d = out.shape
        step = max(1, SCRATCH_BYTES // (4 * d))
        span = min(d, SCRATCH_BYTES // 4)  # less than d only if a single vector is too large
        for i in range(0, n, step):
            for j in range(0, d, max(1, span)):
                part = out[i : i + step, j : j + span]
                wide = torch.empty_like(part, dtype=torch.float32)
                adjoint(spec.columns(j, j + part.shape[1]), y[i : i + step], wide, False)
                part.copy_(wide)
        return
    prepared.multiply(_prepare_adjoint, spec, y, out, accumulate)


def _prepare_project(spec: SketchSpec, x: Tensor, out: Tensor, accumulate: bool) -> Call:
    if x.numel() == 0:
        return prepared.nothing if accumulate else prepared.zero
    part = spec.one_stack()
    first = out[:, spec.stack_rows(0)]
    product = exact.describe(part, x, first, accumulate, adjoint=False, stacks=spec.stacks)
    if scattered_rules.eligible(product):
        from .scattered_sums import prepare as prepare_scattered

        return prepare_scattered(scattered_sums.launch(product), spec, x, out, accumulate)
    if staged_gather.eligible(product):
        from .staged_gather import prepare as prepare_staged

        return prepare_staged(staged_gather.launch(product), spec, x, out, accumulate)
    if product.device.hopper and hopper_codes.eligible(product) and not gathers(product):
        from .codes import prepare

        return prepare(hopper_codes.launch(product), spec, x, out, accumulate)
    plan = _plan(product, None, spec.stacks)
    if not isinstance(plan.chosen, FewVectors):
        return exact.prepare_plan(plan, part, x, out, accumulate)
    calls = []
    for stack in range(spec.stacks):
        rows = spec.stack_rows(stack)
        plan = _plan(exact.describe(part, x, out[:, rows], accumulate, adjoint=False), stack, spec.stacks)
        start = rows.start * out.stride(1)
        calls.append((start, exact.prepare_plan(plan, part, x, out[:, rows], accumulate)))

    def call(spec: SketchSpec, x: Tensor, out: Tensor) -> None:
        for start, project_stack in calls:
            project_stack(spec, x, _from(out, start))

    return call


def _describe_adjoint(spec: SketchSpec, y: Tensor, out: Tensor, accumulate: bool) -> Product:
    part, first = spec.one_stack(), y[:, spec.stack_rows(0)]
    return exact.describe(part, out, first, accumulate, adjoint=True, stacks=spec.stacks)


def _prepare_staged_adjoint(spec: SketchSpec, y: Tensor, out: Tensor, accumulate: bool) -> Call:
    """The call that adds the entries of all stacks."""
    from .staged_adjoint import prepare

    product = _describe_adjoint(spec, y, out, accumulate)
    return prepare(staged_adjoint.launch(product), spec, y, out, accumulate)


def _prepare_adjoint(spec: SketchSpec, y: Tensor, out: Tensor, accumulate: bool) -> Call:
    part, calls = spec.one_stack(), []
    for stack in range(spec.stacks):
        rows, add = spec.stack_rows(stack), accumulate or stack > 0
        plan = _plan(exact.describe(part, out, y[:, rows], add, adjoint=True), stack, spec.stacks)
        start = rows.start * y.stride(1)
        calls.append((start, exact.prepare_adjoint_plan(plan, part, y[:, rows], out, add)))

    def call(spec: SketchSpec, y: Tensor, out: Tensor) -> None:
        for start, adjoint_stack in calls:
            adjoint_stack(spec, _from(y, start), out)

    return call


def _from(x: Tensor, start: int) -> Tensor:
    """A view of x that begins at another element of its memory, for a `Call`, which does not read its shape."""
    return x.as_strided((1,), (1,), x.storage_offset() + start)


def gathers(product: Product) -> bool:
    """Whether the portable kernels gather, in fp32, and are therefore faster than `hopper_codes` on tensor cores.

    They gather for S A. With nnz 4, in memory floors on an H200: A (262144, 512) -> 1024 takes 4.1 with 4 stacks and
    1.8 with 2, against 4.8 and 2.9 from codes. X (262144, 4096) -> 512, for which the portable kernel uses tensor
    cores, takes 5.7 and 2.7, against 4.0 and 1.9 from codes.
    """
    return product.dtype == "float32" and isinstance(choose_on_the_fly(product), RowGather | FewVectors)


def _plan(product: Product, stack: int | None, stacks: int) -> exact.Plan:
    """The plan for the product of one stack, or of all if `stack` is None, by kernels that generate entries.

    Kernels that read stored entries do not support stacks.
    """
    return _with_geometry(exact.make_plan(product, choose_on_the_fly), product.k, product.nnz, stack, stacks)


@lru_cache(maxsize=4096)
def _with_geometry(plan: exact.Plan, k: int, nnz: int, stack: int | None, stacks: int) -> exact.Plan:
    geometry = kernel_geometry(k, nnz, stack, stacks)
    return replace(plan, geometry=geometry, constants={**plan.constants, "GEOMETRY": geometry})
