"""Seeded dropout as operators of torch: ``dropout``, ``dropout_add``, ``masked_dropout``, ``dropout_mask`` of `sjlt`.

One set for CPU and CUDA, with what torch has to know of them: fakes, derivatives, batching. `sjlt.dropout` has checked
the arguments. Dropout is linear and its own transpose: a derivative is the same call on another tensor, so that nothing
is saved for backward but tensors of seeds and of the step, where there are any.

A call that no part of torch needs to know of (no derivative, no compiler, no mode, no torch.func) goes straight to the
backend: of a small tensor's time, an operator would be a quarter.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._C import _AutoDispatchBelowAutograd
from torch._C._autograd import CreationMeta, _get_creation_meta
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction

from ..backends import import_triton
from ..inputs.dropout import Numbers, check_shape, check_writable, rule_of
from .compat import below, is_differentiated, is_plain, one_level
from .views import DTYPES, array, check_layout, check_memory

_NUMBERS = (
    "float p, Tensor? seeds, SymInt seed, Tensor? steps, SymInt step, SymInt offset, SymInt? row_stride, int bits"
)

_library = torch.library.Library("sjlt", "FRAGMENT")
for _schema in (
    f"dropout(Tensor x, {_NUMBERS}) -> Tensor",
    f"dropout_add(Tensor x, Tensor residual, {_NUMBERS}) -> Tensor",
    "masked_dropout(Tensor x, Tensor keep, float factor) -> Tensor",
    f"dropout_mask(SymInt[] shape, Device device, {_NUMBERS}) -> Tensor",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))

_ops = torch.ops.sjlt
_dropout, _dropout_add, _masked = _ops.dropout.default, _ops.dropout_add.default, _ops.masked_dropout.default


# ------------------------------------------------------------------------------------- calls


def drop(x: Tensor, numbers: Numbers) -> Tensor:
    """Dropout of x."""
    if not is_plain(x):
        return _dropout(x, *numbers)  # type: ignore[no-any-return]
    if x.requires_grad and torch.is_grad_enabled():
        return _Dropout.apply(x, None, False, numbers)  # type: ignore[no-any-return]
    return _compute(x, *numbers)


def drop_in_place(x: Tensor, numbers: Numbers) -> Tensor:
    """Dropout of x, written into x."""
    if not is_plain(x):  # a compiler could not follow the check; copy_ has one of its own
        return x.copy_(_dropout(x, *numbers))
    check_writable(x, x.stride())
    if x.requires_grad and torch.is_grad_enabled():
        if x.is_leaf:  # before it is written
            raise RuntimeError("a leaf tensor that requires grad cannot be dropped in place")
        if _may_be_refused(x):
            return x.copy_(drop(x, numbers))
        return _Dropout.apply(x, None, True, numbers)  # type: ignore[no-any-return]
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)  # so that a backward pass that needs the old values says so
    return _into(x, x, None, *numbers)


def _may_be_refused(x: Tensor) -> bool:
    """Whether x is a view that autograd may not let be written: of _Dropout it would say so when it has been."""
    return x._is_view() and (x._base.is_leaf or _get_creation_meta(x) != CreationMeta.DEFAULT)  # type: ignore[union-attr]


def drop_add(x: Tensor, residual: Tensor, numbers: Numbers) -> Tensor:
    """residual + dropout of x."""
    if not (is_plain(x) and is_plain(residual)):
        return _dropout_add(x, residual, *numbers)  # type: ignore[no-any-return]
    if (x.requires_grad or residual.requires_grad) and torch.is_grad_enabled():
        return _Dropout.apply(x, residual, False, numbers)  # type: ignore[no-any-return]
    return _compute_add(x, residual, *numbers)


def masked(x: Tensor, keep: Tensor, factor: float) -> Tensor:
    """x times factor where keep, else 0."""
    plain = is_plain(x) and is_plain(keep) and not x.requires_grad
    call = _compute_masked if plain else _masked
    return call(x, keep, factor)


def mask(shape: tuple[int, ...], like: Tensor, numbers: Numbers) -> Tensor:
    """Which elements of a tensor of this shape live."""
    return _ops.dropout_mask.default(shape, like.device, *numbers)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------- checks


def check(x: Tensor) -> None:
    """There is a backend for x's dtype, layout and device."""
    if x.dtype not in DTYPES:
        raise TypeError(f"dropout takes float16, bfloat16, float32 and float64 tensors, got {x.dtype}")
    check_layout(x)
    if not (x.is_cuda or x.is_cpu or x.is_meta):
        raise TypeError(f"tensors on the device {x.device} are refused: dropout takes CPU and CUDA tensors")


def check_beside(name: str, given: Any, x: Tensor) -> None:
    """`given` is a tensor of x's shape, on its device."""
    if not isinstance(given, Tensor):
        raise TypeError(f"{name} must be a torch tensor, as x is, got {type(given).__name__}")
    check_shape(name, given, x)
    if given.device != x.device:
        raise ValueError(f"{name} must lie on {x.device}, as x does, got {given.device}")


def check_bool(keep: Tensor) -> None:
    if keep.dtype != torch.bool:
        raise TypeError(f"keep must be of torch.bool, got {keep.dtype}")


def device(name: Any) -> Tensor:
    """A tensor without elements on the device of that name, for which there is a backend."""
    like = torch.empty(0, device=name)
    check(like)
    return like


# ------------------------------------------------------------------------------------- results


def _compute(x: Tensor, *numbers: Any) -> Tensor:
    return _into(torch.empty_like(x), x, None, *numbers)


def _new_sum(x: Tensor, residual: Tensor, *numbers: Any) -> Tensor:
    return torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))


def _compute_add(x: Tensor, residual: Tensor, *numbers: Any) -> Tensor:
    return _into(_new_sum(x, residual), x, residual, *numbers)


def _into(out: Tensor, x: Tensor, residual: Tensor | None, *numbers: Any) -> Tensor:
    """out = dropout of x, and residual more where it is given."""
    check_memory("x", x)
    if residual is not None:
        check_memory("residual", residual)
    rule, t = rule_of(*numbers)
    if rule is None:
        if residual is None:
            return out.copy_(x) if t == 0 else out.zero_()
        return torch.add(residual, x if t == 0 else 0, out=out)  # -0 + 0 is 0
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


def _new_mask(shape: Any, device: torch.device, *numbers: Any) -> Tensor:
    return torch.empty(shape, dtype=torch.bool, device=device)


def _compute_mask(shape: Any, device: torch.device, *numbers: Any) -> Tensor:
    out = _new_mask(shape, device)
    rule, t = rule_of(*numbers)
    if rule is None:
        out.fill_(t == 0)
    elif out.is_cuda:
        _triton().mask(rule, out)
    elif out.device.type == "cpu":
        rule = _on_cpu(rule)
        _cpu().mask(rule, out.numpy())
    return out


def _on_cpu(rule: Any) -> Any:
    """The rule with arrays for tensors."""
    arrays = (None if t is None else t.detach().numpy() for t in (rule.seeds, rule.steps))
    return rule._replace(**dict(zip(("seeds", "steps"), arrays, strict=True)))


@cache
def _cpu() -> Any:
    """The backend. It takes some time to import: not before it is needed."""
    from ..backends.cpu import dropout

    return dropout


@cache
def _triton() -> Any:
    return import_triton("dropout", "dropout")


# ------------------------------------------------------------------------------------- derivatives


def _with(numbers: Numbers, seeds: Tensor | None, steps: Tensor | None) -> Numbers:
    p, _, seed, _, *rest = numbers
    return p, seeds, seed, steps, *rest  # type: ignore[return-value]


class _Dropout(torch.autograd.Function):
    """Dropout, or dropout and residual, in short: without an operator and what torch does for one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, in_place: bool, numbers: Numbers) -> Tensor:
        _, seeds, _, steps, *_ = ctx.numbers = numbers
        if seeds is not None or steps is not None:
            ctx.save_for_backward(seeds, steps)  # so that torch notices if they are changed before backward
            ctx.numbers = _with(numbers, None, None)
        ctx.dtype = x.dtype
        if in_place:
            ctx.mark_dirty(x)
            return _into(x, x, None, *numbers)
        if residual is None:
            return _compute(x, *numbers)
        ctx.residual_dtype = residual.dtype
        return _compute_add(x, residual, *numbers)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        saved = ctx.saved_tensors  # once: under checkpointing, asking is what recomputes
        numbers = _with(ctx.numbers, *saved) if saved else ctx.numbers
        x_gradient = residual_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient = drop(gradient, numbers).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            residual_gradient = gradient.to(ctx.residual_dtype)
        return x_gradient, residual_gradient, None, None


class _Linear(_SingleLevelFunction):
    """One level of differentiation, as torch's own operators have it: what is below it is dispatched anew.

    The operator takes `linear` tensors that it is linear in, then what it is given; tensors of the latter are saved.
    """

    @staticmethod
    def forward(op: Any, linear: int, *arguments: Any) -> Any:
        return below(op, *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.op, linear, *arguments = inputs
        ctx.dtypes = [x.dtype for x in arguments[:linear]]
        given = arguments[linear:]
        tensors = [a for a in given if isinstance(a, Tensor)]
        ctx.given = [None if isinstance(a, Tensor) else a for a in given]
        ctx.places = [i for i, a in enumerate(given) if isinstance(a, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def _given(ctx: Any) -> list[Any]:
        given = list(ctx.given)
        for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            given[place] = tensor
        return given

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        given = _Linear._given(ctx)
        op = _masked if ctx.op is _masked else _dropout
        x_gradient = op(gradient, *given).to(ctx.dtypes[0]) if ctx.needs_input_grad[2] else None
        others = [gradient.to(dtype) for dtype in ctx.dtypes[1:]]
        return None, None, x_gradient, *others, *(None for _ in given)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: Any) -> Any:
        linear = tangents[: len(ctx.dtypes)]
        with _set_fwd_grad_enabled(True):  # torch disables it here, which would cut an outer level's derivative
            return ctx.op(*linear, *_Linear._given(ctx))


def _differentiable(op: Any, linear: int, *arguments: Any) -> Any:
    if any(map(is_differentiated, arguments[:linear])):
        with one_level():
            return _Linear.apply(op, linear, *arguments)  # type: ignore[attr-defined]
    with _AutoDispatchBelowAutograd():
        return op(*arguments)


# ------------------------------------------------------------------------------------- batches


def _batched(info: Any, in_dims: Any, x: Tensor, p: float, seeds: Any, seed: int, steps: Any, *rest: Any) -> Any:
    """A further axis of x or seeds: that of one seed a row, where each row has the seed that it would have alone."""
    x_axis, _, seeds_axis, _, steps_axis, *_ = in_dims
    n_seeds = 0 if seeds is None else seeds.ndim - (seeds_axis is not None)
    one_a_row = n_seeds > 0 and n_seeds == x.ndim - (x_axis is not None) - 1
    if steps_axis is not None or not (n_seeds == 0 or one_a_row):
        return _one_by_one(_dropout, info.batch_size, in_dims, (x, p, seeds, seed, steps, *rest))
    x = x.expand(info.batch_size, *x.shape) if x_axis is None else x.movedim(x_axis, 0)
    if seeds is None:
        seeds = torch.full((), seed, dtype=torch.int64, device=x.device)
    shape = seeds.shape if seeds_axis is None else seeds.movedim(seeds_axis, 0).shape[1:]
    seeds = seeds.expand(info.batch_size, *shape) if seeds_axis is None else seeds.movedim(seeds_axis, 0)
    return _dropout(x, p, seeds, 0, steps, *rest), 0


def _one_by_one(op: Any, n: int, in_dims: Any, arguments: tuple[Any, ...]) -> tuple[Tensor, int]:
    """The results of n calls, side by side."""
    parts = [
        op(*(a if axis is None else a.select(axis, i) for a, axis in zip(arguments, in_dims, strict=True)))
        for i in range(n)
    ]
    return torch.stack(parts), 0


def _batched_add(info: Any, in_dims: Any, x: Tensor, residual: Tensor, *numbers: Any) -> Any:
    return _one_by_one(_dropout_add, info.batch_size, in_dims, (x, residual, *numbers))


def _batched_masked(info: Any, in_dims: Any, x: Tensor, keep: Tensor, factor: float) -> Any:
    x, keep = (
        t.expand(info.batch_size, *t.shape) if axis is None else t.movedim(axis, 0)
        for t, axis in zip((x, keep), in_dims, strict=False)
    )
    return _masked(x, keep, factor), 0


def _register() -> None:
    new: dict[Any, Any] = {_dropout: lambda x, *_: torch.empty_like(x), _dropout_add: _new_sum}
    new |= {_masked: new[_dropout], _ops.dropout_mask.default: _new_mask}
    computed = {_dropout: _compute, _dropout_add: _compute_add, _masked: _compute_masked}
    batched: dict[Any, Any] = {_dropout: _batched, _dropout_add: _batched_add, _masked: _batched_masked}
    for op, fake in new.items():
        torch.library.register_fake(op._schema.name, fake, lib=_library)
    for op, compute in computed.items():
        for key in ("CPU", "CUDA"):
            _library.impl(op, compute, key)
        linear = 2 if op is _dropout_add else 1
        _library.impl(op, partial(_differentiable, op, linear), "Autograd")
        torch.library.register_vmap(op._schema.name, batched[op], lib=_library)
    _library.impl(_ops.dropout_mask.default, _compute_mask, "CompositeExplicitAutograd")


_register()
