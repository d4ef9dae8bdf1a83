"""Seeded dropout as torch operators: ``dropout``, ``dropout_add``, ``masked_dropout``, ``dropout_mask`` of `sjlt`.

The same operators work on CPU and CUDA, with fakes, derivatives and batching. Their arguments must be validated.
Dropout is linear and its own transpose, so its derivative is the same call on another tensor, and only tensors of seeds
and steps are saved for backward.

A call that nothing in torch needs to see (no derivative, compiler, mode or transform) goes directly to the backend: on
a small tensor, passing through an operator is a quarter of the time.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ..backends import import_triton
from ..inputs.dropout import DropoutArguments, check_writable, rule_of
from . import checks as checks
from . import compat
from .compat import is_plain
from .views import array, check_memory, share_memory

_ARGUMENTS = (
    "int threshold, Tensor? seeds, SymInt seed, Tensor? steps, SymInt step, SymInt offset, SymInt? row_stride, int bits"
)

_library = torch.library.Library("sjlt", "FRAGMENT")
for _schema in (
    f"dropout(Tensor x, {_ARGUMENTS}) -> Tensor",
    f"dropout_add(Tensor x, Tensor residual, {_ARGUMENTS}) -> Tensor",
    "masked_dropout(Tensor x, Tensor keep, float factor) -> Tensor",
    f"dropout_mask(SymInt[] shape, Device device, {_ARGUMENTS}) -> Tensor",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))

_ops = torch.ops.sjlt
_dropout, _dropout_add, _masked = _ops.dropout.default, _ops.dropout_add.default, _ops.masked_dropout.default


# ------------------------------------------------------------------------------------- calls


def drop(x: Tensor, arguments: DropoutArguments) -> Tensor:
    """Dropout of x."""
    if not is_plain(x):
        return _dropout(x, *arguments)  # type: ignore[no-any-return]
    if x.requires_grad and torch.is_grad_enabled():
        return _apply(x, None, False, arguments)  # type: ignore[no-any-return]
    return _into(torch.empty_like(x), x, None, arguments)


def drop_in_place(x: Tensor, arguments: DropoutArguments) -> Tensor:
    """Dropout of x, written into x."""
    if not is_plain(x):  # compilers cannot trace check_writable; copy_ has a check of its own
        return x.copy_(_dropout(x, *arguments))
    check_writable(x, x.stride())
    if any(t is not None and share_memory(x, t) for t in (arguments.seeds, arguments.steps)):
        raise ValueError("seed or step shares memory with x, which inplace=True overwrites: pass a copy of it")
    if x.requires_grad and torch.is_grad_enabled():
        if x.is_leaf:  # autograd would raise only after x is overwritten
            raise RuntimeError("a leaf tensor that requires grad cannot be dropped in place")
        if compat.may_refuse_writing(x):
            return x.copy_(drop(x, arguments))
        return _apply(x, None, True, arguments)  # type: ignore[no-any-return]
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)  # so a backward pass that needs the old values raises an error
    return _into(x, x, None, arguments)


def drop_add(x: Tensor, residual: Tensor, arguments: DropoutArguments) -> Tensor:
    """residual + dropout of x."""
    if not (is_plain(x) and is_plain(residual)):
        return _dropout_add(x, residual, *arguments)  # type: ignore[no-any-return]
    if _recorded(x, residual):
        return _apply(x, residual, False, arguments)  # type: ignore[no-any-return]
    return _into(_new_sum(x, residual), x, residual, arguments)


def masked(x: Tensor, keep: Tensor, factor: float) -> Tensor:
    """x * factor where keep is True, else 0."""
    plain = is_plain(x) and is_plain(keep) and not x.requires_grad
    call = _compute_masked if plain else _masked
    return call(x, keep, factor)


def tensor_on(device: Any) -> Tensor:
    """An empty tensor on a device, which must be supported."""
    like = torch.empty(0, device=device)
    checks.check_tensor(like, "dropout")
    return like


def mask(shape: tuple[int, ...], like: Tensor, arguments: DropoutArguments) -> Tensor:
    """The mask for a tensor of this shape: True where an element is kept."""
    return _ops.dropout_mask.default(shape, like.device, *arguments)  # type: ignore[no-any-return]


def _recorded(*tensors: Tensor) -> bool:
    """Whether autograd records a call on these tensors."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


# ------------------------------------------------------------------------------------- results


def _compute(x: Tensor, *arguments: Any) -> Tensor:
    return _into(torch.empty_like(x), x, None, DropoutArguments(*arguments))


def _new_sum(x: Tensor, residual: Tensor, *arguments: Any) -> Tensor:
    return torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))


def _compute_add(x: Tensor, residual: Tensor, *arguments: Any) -> Tensor:
    return _into(_new_sum(x, residual), x, residual, DropoutArguments(*arguments))


def _into(out: Tensor, x: Tensor, residual: Tensor | None, arguments: DropoutArguments) -> Tensor:
    """out = dropout of x, plus `residual` if given."""
    check_memory("x", x)
    if residual is not None:
        check_memory("residual", residual)
    rule, t = rule_of(arguments)
    if rule is None:
        if residual is None:
            return out.copy_(x) if t == 0 else out.zero_()
        return torch.add(residual, x if t == 0 else 0, out=out)  # not a copy of the residual: -0 + 0 is 0
    if x.is_cuda:
        backend = _triton()
        if residual is None:
            backend.drop(rule, x, out)
        else:
            backend.drop_add(rule, x, residual, out)
        return out
    rule = _on_cpu(rule)
    if residual is None:
        _cpu().drop(rule, array(x), array(out))
    else:
        _cpu().drop_add(rule, array(x.to(out.dtype)), array(residual.to(out.dtype)), array(out))
    return out


def _compute_masked(x: Tensor, keep: Tensor, factor: float) -> Tensor:
    check_memory("x", x)
    check_memory("keep", keep)
    out = torch.empty_like(x)
    if factor == 0:
        out.zero_()
    elif x.is_cuda:
        _triton().drop_stored(factor, x, keep, out)
    else:
        _cpu().drop_stored(factor, array(x), keep.numpy(), array(out))
    return out


def _new_mask(shape: Any, device: torch.device, *arguments: Any) -> Tensor:
    return torch.empty(shape, dtype=torch.bool, device=device)


def _compute_mask(shape: Any, device: torch.device, *arguments: Any) -> Tensor:
    out = _new_mask(shape, device)
    rule, t = rule_of(DropoutArguments(*arguments))
    if rule is None:
        out.fill_(t == 0)
    elif out.is_cuda:
        _triton().mask(rule, out)
    elif out.device.type == "cpu":
        rule = _on_cpu(rule)
        _cpu().mask(rule, out.numpy())
    return out


def _on_cpu(rule: Any) -> Any:
    """The rule, with tensors as arrays."""
    arrays = (None if t is None else t.detach().numpy() for t in (rule.seeds, rule.steps))
    return rule._replace(**dict(zip(("seeds", "steps"), arrays, strict=True)))


@cache
def _cpu() -> Any:
    from ..backends.cpu import dropout

    return dropout


@cache
def _triton() -> Any:
    return import_triton("dropout", "dropout")


_COMPUTED = {_dropout: _compute, _dropout_add: _compute_add, _masked: _compute_masked}


# ------------------------------------------------------------------------------------- derivatives


class _Dropout(torch.autograd.Function):
    """Dropout with an optional residual for plain calls, without the overhead of an operator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, in_place: bool, arguments: DropoutArguments) -> Tensor:
        ctx.arguments = arguments
        seeds, steps = arguments.seeds, arguments.steps
        if seeds is not None or steps is not None:
            ctx.save_for_backward(seeds, steps)  # lets torch detect in-place changes before backward
            ctx.arguments = arguments._replace(seeds=None, steps=None)
        ctx.dtype = x.dtype
        if in_place:
            ctx.mark_dirty(x)
            return _into(x, x, None, arguments)
        if residual is None:
            return _into(torch.empty_like(x), x, None, arguments)
        ctx.residual_dtype = residual.dtype
        return _into(_new_sum(x, residual), x, residual, arguments)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        saved = ctx.saved_tensors  # read once: with checkpointing, each read recomputes them
        arguments = ctx.arguments._replace(seeds=saved[0], steps=saved[1]) if saved else ctx.arguments
        x_gradient = residual_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient = drop(gradient, arguments).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            residual_gradient = gradient.to(ctx.residual_dtype)
        return x_gradient, residual_gradient, None, None


_apply = compat.plain_apply(_Dropout)


class _DropoutFunction(compat.SingleLevelFunction):
    """The derivatives of an operator that is linear in its first `linear` arguments.

    Any tensors among the other arguments are saved for backward.
    """

    @staticmethod
    def forward(op: Any, linear: int, *arguments: Any) -> Any:
        return compat.call_below_autograd(op, *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.op, linear, *arguments = inputs
        ctx.dtypes = [x.dtype for x in arguments[:linear]]
        constants = arguments[linear:]
        tensors = [a for a in constants if isinstance(a, Tensor)]
        ctx.constants = [None if isinstance(a, Tensor) else a for a in constants]
        ctx.positions = [i for i, a in enumerate(constants) if isinstance(a, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def _constants(ctx: Any) -> list[Any]:
        """The arguments after the linear ones."""
        constants = list(ctx.constants)
        for position, tensor in zip(ctx.positions, ctx.saved_tensors, strict=True):
            constants[position] = tensor
        return constants

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        constants = _DropoutFunction._constants(ctx)
        op = _masked if ctx.op is _masked else _dropout
        x_gradient = op(gradient, *constants).to(ctx.dtypes[0]) if ctx.needs_input_grad[2] else None
        others = [gradient.to(dtype) for dtype in ctx.dtypes[1:]]
        return None, None, x_gradient, *others, *(None for _ in constants)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: Any) -> Any:
        linear = tangents[: len(ctx.dtypes)]
        # torch disables forward derivatives here, which would lose the derivative of an outer level.
        with compat.forward_derivatives_enabled(True):
            return ctx.op(*linear, *_DropoutFunction._constants(ctx))


def _differentiable(op: Any, linear: int, *arguments: Any) -> Any:
    if all(map(compat.is_plain, arguments[:linear])) and not _recorded(*arguments[:linear]):  # as in compiled code
        return _COMPUTED[op](*arguments)
    if any(map(compat.is_differentiated, arguments[:linear])):
        with compat.single_level():
            return _DropoutFunction.apply(op, linear, *arguments)  # type: ignore[attr-defined]
    with compat.below_autograd():
        return op(*arguments)


# ------------------------------------------------------------------------------------- batches


def _batched(info: Any, in_dims: Any, x: Tensor, threshold: int, seeds: Any, seed: int, steps: Any, *rest: Any) -> Any:
    """Dropout over an additional axis of x or seeds: one call with an array of seeds, if these allow it."""
    x_axis, _, seeds_axis, _, steps_axis, *_ = in_dims
    seeds_ndim = 0 if seeds is None else seeds.ndim - (seeds_axis is not None)
    one_per_row = seeds_ndim > 0 and seeds_ndim == x.ndim - (x_axis is not None) - 1
    if steps_axis is not None or not (seeds_ndim == 0 or one_per_row):
        return _one_by_one(_dropout, info.batch_size, in_dims, (x, threshold, seeds, seed, steps, *rest))
    x = x.expand(info.batch_size, *x.shape) if x_axis is None else x.movedim(x_axis, 0)
    if seeds is None:
        seeds = torch.full((), seed, dtype=torch.int64, device=x.device)
    shape = seeds.shape if seeds_axis is None else seeds.movedim(seeds_axis, 0).shape[1:]
    seeds = seeds.expand(info.batch_size, *shape) if seeds_axis is None else seeds.movedim(seeds_axis, 0)
    return _dropout(x, threshold, seeds, 0, steps, *rest), 0


def _one_by_one(op: Any, n: int, in_dims: Any, arguments: tuple[Any, ...]) -> tuple[Tensor, int]:
    """The results of n separate calls, stacked."""
    parts = [
        op(*(a if axis is None else a.select(axis, i) for a, axis in zip(arguments, in_dims, strict=True)))
        for i in range(n)
    ]
    return torch.stack(parts), 0


def _batched_add(info: Any, in_dims: Any, x: Tensor, residual: Tensor, *arguments: Any) -> Any:
    return _one_by_one(_dropout_add, info.batch_size, in_dims, (x, residual, *arguments))


def _batched_masked(info: Any, in_dims: Any, x: Tensor, keep: Tensor, factor: float) -> Any:
    x, keep = (
        t.expand(info.batch_size, *t.shape) if axis is None else t.movedim(axis, 0)
        for t, axis in zip((x, keep), in_dims, strict=False)
    )
    return _masked(x, keep, factor), 0


def _register() -> None:
    new: dict[Any, Any] = {_dropout: lambda x, *_: torch.empty_like(x), _dropout_add: _new_sum}
    new |= {_masked: new[_dropout], _ops.dropout_mask.default: _new_mask}
    batched: dict[Any, Any] = {_dropout: _batched, _dropout_add: _batched_add, _masked: _batched_masked}
    for op, fake in new.items():
        torch.library.register_fake(op.name(), fake, lib=_library)
    for op, compute in _COMPUTED.items():
        for key in ("CPU", "CUDA"):
            _library.impl(op, compute, key)
        linear = 2 if op is _dropout_add else 1
        _library.impl(op, partial(_differentiable, op, linear), "Autograd")
        torch.library.register_vmap(op.name(), batched[op], lib=_library)
    _library.impl(_ops.dropout_mask.default, _compute_mask, "CompositeExplicitAutograd")


_register()
