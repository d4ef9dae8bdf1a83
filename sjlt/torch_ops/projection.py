"""The projection and its adjoint as torch operators: ``torch.ops.sjlt.project`` and ``project_adjoint``.

The same operators work on CPU and CUDA, with result shapes (fakes), derivatives, batching and autocast. Their arguments
must be validated (`sjlt.frontends.tensors`).

Both are linear, and each is the transpose of the other, so derivatives need only the description of the sketch and no
tensor is saved for backward. ``project_into`` and ``project_adjoint_into`` write into a given tensor and have no
derivatives.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..backends import cpu_backend, triton_backend
from ..inputs.containers import elements_overlap
from ..laws.spec import SketchSpec
from . import checks, compat, views
from .compat import is_plain
from .schema import SKETCH

_library = torch.library.Library("sjlt", "FRAGMENT")
# Inputs may have any strides, but those of the result depend on them, so compilers must not change them.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
for _name in ("project", "project_adjoint"):
    _library.define(f"{_name}(Tensor x, {SKETCH}, int axis, ScalarType? dtype) -> Tensor", tags=_TAGS)
    _library.define(f"{_name}_into(Tensor x, Tensor(a!) out, {SKETCH}, bool accumulate) -> ()", tags=_TAGS)

project, project_adjoint = torch.ops.sjlt.project.default, torch.ops.sjlt.project_adjoint.default
project_into, project_adjoint_into = torch.ops.sjlt.project_into.default, torch.ops.sjlt.project_adjoint_into.default
_TRANSPOSE = {project: project_adjoint, project_adjoint: project}
_called_directly: set[Any] = set()  # by code that inductor compiles, once it is loaded
_INTO = {project: project_into, project_adjoint: project_adjoint_into}


def call(op: Any, x: Tensor, spec: SketchSpec, axis: int, dtype: torch.dtype | None) -> Tensor:
    """Call `op`, bypassing torch's dispatcher if nothing in torch needs to see the call."""
    if is_dynamo_compiling() or not is_plain(x) or compat.is_autocast_enabled():
        return op(x, *spec, axis, dtype)  # type: ignore[no-any-return]
    return _plain_call(op, x, spec, axis, dtype)


def _plain_call(op: Any, x: Tensor, spec: SketchSpec, axis: int, dtype: torch.dtype | None) -> Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        return _apply(op, x, spec, axis, dtype)  # type: ignore[no-any-return]
    return _product(op, x, spec, axis, dtype)


def call_into(op: Any, x: Tensor, out: Tensor, spec: SketchSpec, accumulate: bool) -> None:
    """Call `op`, `project` or `project_adjoint`, to write into `out`, bypassing the dispatcher likewise."""
    if is_plain(x) and is_plain(out) and not (x.requires_grad or out.requires_grad):
        _compute_into(op, x, out, spec, accumulate)
        if not out.is_inference():
            torch.autograd.graph.increment_version(out)
        return
    _INTO[op](x, out, *spec, accumulate)


# ------------------------------------------------------------------------------------- results


def _fake(op: Any, x: Tensor, n_features: int, n_components: int, *others: Any) -> Tensor:
    if op not in _called_directly and compat.call_directly_in_compiled_code(op):
        _called_directly.add(op)
    return views.new_result(x, n_components if op is project else n_features, *others[-2:])


def _direct(op: Any, x: Tensor, *arguments: Any) -> Tensor:
    """`op` as called in compiled code, bypassing the dispatcher if nothing in torch needs to see the call."""
    if is_plain(x):
        return _plain_call(op, x, SketchSpec._make(arguments[:-2]), *arguments[-2:])
    return op(x, *arguments)  # type: ignore[no-any-return]


def _compute(op: Any, x: Tensor, *arguments: Any) -> Tensor:
    return _product(op, x, SketchSpec._make(arguments[:-2]), *arguments[-2:])


def _product(op: Any, x: Tensor, spec: SketchSpec, axis: int, dtype: torch.dtype | None) -> Tensor:
    views.check_memory("the data", x)
    out = views.new_result(x, spec.n_components if op is project else spec.n_features, axis, dtype)
    if out.is_cpu and out.nbytes >= views.HUGE_PAGES_BYTES:
        views.use_huge_pages(out)
    _run(op, x, out, spec, False, axis)
    return out


def _compute_into(op: Any, x: Tensor, out: Tensor, spec: SketchSpec, accumulate: bool) -> None:
    views.check_memory("the data", x)
    views.check_memory("out", out)
    if not out.is_contiguous() and elements_overlap(out.shape, out.stride()):
        raise ValueError(f"out has elements that share memory (strides {out.stride()}): it cannot hold a result")
    if views.share_memory(x, out):
        raise ValueError("out shares memory with the input")
    _run(op, x, out, spec, accumulate, -1)


def _registered_into(op: Any, x: Tensor, out: Tensor, *arguments: Any) -> None:
    *description, accumulate = arguments
    _compute_into(op, x, out, SketchSpec(*description), accumulate)


def _run(op: Any, x: Tensor, out: Tensor, spec: SketchSpec, accumulate: bool, axis: int) -> None:
    if not x.is_cuda:
        backend = cpu_backend(spec)
        function = backend.project if op is project else backend.adjoint
        for rows, result in views.arrays(x, out, axis):
            function(spec, rows, result, accumulate)
        return
    backend = triton_backend(spec)
    function = backend.project if op is project else backend.adjoint
    if axis == 0 and x.ndim == 2:
        _multiply_columns(function, spec, x, out, accumulate)
        return
    for matrix, result in views.matrices(x, out, axis):
        function(spec, matrix, result, accumulate)


def _multiply_columns(function: Any, spec: SketchSpec, x: Tensor, out: Tensor, accumulate: bool) -> None:
    """A product of the columns of a CUDA tensor, without views of it and of the result."""
    function(spec, x, out, accumulate, 0)


# ------------------------------------------------------------------------------------- derivatives


class _Projection(torch.autograd.Function):
    """A plain call with its derivative, without the overhead of an operator."""

    @staticmethod
    def forward(ctx: Any, op: Any, x: Tensor, spec: SketchSpec, axis: int, dtype: torch.dtype | None) -> Tensor:
        ctx.op, ctx.spec, ctx.axis, ctx.dtype = op, spec, axis, x.dtype
        return _product(op, x, spec, axis, dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, call(_TRANSPOSE[ctx.op], gradient, ctx.spec, ctx.axis, ctx.dtype), None, None, None


_apply = compat.plain_apply(_Projection)


class _ProjectionFunction(compat.SingleLevelFunction):
    """The derivatives of both operators, for calls that torch's dispatcher must see."""

    @staticmethod
    def forward(op: Any, x: Tensor, *arguments: Any) -> Any:
        return compat.call_below_autograd(op, x, *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.op, x, *arguments = inputs
        *ctx.description, ctx.axis, ctx.result_dtype = arguments
        ctx.dtype = x.dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x_gradient = _TRANSPOSE[ctx.op](gradient, *ctx.description, ctx.axis, ctx.dtype)
        return None, x_gradient, *(None,) * (len(ctx.description) + 2)

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor, *__: None) -> Any:
        # torch disables forward derivatives here, which would lose the derivative of an outer level.
        with compat.forward_derivatives_enabled(True):
            return ctx.op(tangent, *ctx.description, ctx.axis, ctx.result_dtype)


def _differentiable(op: Any, x: Tensor, *arguments: Any) -> Any:
    if is_plain(x):  # as in compiled code
        return _plain_call(op, x, SketchSpec._make(arguments[:-2]), *arguments[-2:])
    if compat.is_differentiated(x):
        with compat.single_level():
            return _ProjectionFunction.apply(op, x, *arguments)  # type: ignore[attr-defined]
    with compat.below_autograd():
        return op(x, *arguments)


def _not_differentiable(op: Any, x: Tensor, out: Tensor, *arguments: Any) -> None:
    checks.refuse_derivatives(x, out)
    with compat.below_autograd():
        op(x, out, *arguments)
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)  # so a backward pass that needs the old values raises an error


def _negated(op: Any, x: Tensor, out: Tensor, *arguments: Any) -> None:
    """Handle lazily negated views. (torch's own fallback clones, and requires operators to return `out`.)"""
    plain = out.resolve_neg()
    op(x.resolve_neg(), plain, *arguments)
    if plain is not out:
        out.copy_(plain)


# ------------------------------------------------------------------------------------- batches, autocast


def _batched(op: Any, info: Any, in_dims: tuple[Any, ...], x: Tensor, *arguments: Any) -> tuple[Tensor, int]:
    """`op` over an additional axis of x, in one call."""
    *description, axis, dtype = arguments
    if axis == 0 and x.ndim == 2:  # vectors become a matrix's columns
        return op(x.movedim(in_dims[0], 1), *description, 0, dtype), 1
    x = x.movedim(in_dims[0], 0)
    if axis == 0:
        return op(x.transpose(1, 2), *description, -1, dtype).transpose(1, 2), 0
    return op(x, *description, -1, dtype), 0


def _autocast(op: Any, device: str, x: Tensor, *arguments: Any) -> Tensor:
    """Cast inputs other than fp64 to the autocast dtype, as torch.matmul does.

    An explicit result dtype, as for sums over several tensors, disables the cast.
    """
    if x.dtype != torch.float64 and arguments[-1] is None:
        x = x.to(torch.get_autocast_dtype(device))
    with compat.without_autocast(device):
        return op(x, *arguments)  # type: ignore[no-any-return]


def _register() -> None:
    for op in (project, project_adjoint):
        name = op.name()
        torch.library.register_fake(name, partial(_fake, op), lib=_library)
        torch.library.register_vmap(name, partial(_batched, op), lib=_library)
        for key in ("CPU", "CUDA"):
            _library.impl(op, partial(_compute, op), key)
        _library.impl(op, partial(_differentiable, op), "Autograd")
        setattr(op, compat.DIRECT, partial(_direct, op))
        _library.impl(op, partial(_autocast, op, "cpu"), "AutocastCPU")
        _library.impl(op, partial(_autocast, op, "cuda"), "AutocastCUDA")
    for op, into in _INTO.items():
        torch.library.register_fake(into.name(), lambda *_: None, lib=_library)
        for key in ("CPU", "CUDA"):
            _library.impl(into, partial(_registered_into, op), key)
        _library.impl(into, partial(_not_differentiable, into), "Autograd")
        _library.impl(into, partial(_negated, into), "Negative")


_register()
