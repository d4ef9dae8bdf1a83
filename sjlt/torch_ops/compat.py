"""All private names of torch that the operators use.

torch may rename or remove any of these. If one is missing, a public or slower equivalent is used if there is one.
Otherwise an ImportError that names the torch version is raised, or a RuntimeError if only one feature needs the name.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling


def _find(name: str) -> Any:
    """``torch.<name>``, or None if this version of torch does not have it."""
    try:
        return attrgetter(name)(torch)
    except AttributeError:
        return None


def _missing(name: str, purpose: str) -> str:
    return (
        f"torch {torch.__version__} has no torch.{name}, which sjlt needs for {purpose}; sjlt is tested with torch 2.13"
    )


def _required(name: str, purpose: str) -> Any:
    found = _find(name)
    if found is None:
        raise ImportError(_missing(name, purpose), name="torch")
    return found


# An autograd.Function that handles one level of derivatives, like torch's own operators; lower levels are dispatched
# again.
if TYPE_CHECKING:
    from torch.autograd.function import _SingleLevelFunction

    SingleLevelFunction = _SingleLevelFunction
else:
    SingleLevelFunction = _required("autograd.function._SingleLevelFunction", "derivatives")
below_autograd = _required("_C._AutoDispatchBelowAutograd", "derivatives")
_single_level_in_transforms = _required(
    "_functorch.utils.enable_single_level_autograd_function", "the transforms of torch.func"
)
forward_derivatives_enabled = _required("autograd.forward_ad._set_fwd_grad_enabled", "forward-mode derivatives")

_current_dual_level = _find("autograd.forward_ad._current_level")
_transforms_active = _find("_C._are_functorch_transforms_active")
_unpack_dual = _find("_VF._unpack_dual")

_dispatch_modes = _find("_C._len_torch_dispatch_stack")
_function_modes = _find("_C._len_torch_function_stack")
_is_legacy_batched = _find("_C._functorch.is_legacy_batchedtensor")
_is_batched = _find("_C._functorch.is_batchedtensor")
_tracing_state = _find("_C._get_tracing_state")
_profiler_enabled = _find("_C._autograd._profiler_enabled")
_is_zero_tensor = _find("Tensor._is_zerotensor")
_PLAIN_IS_KNOWN = None not in (
    _current_dual_level,
    _transforms_active,
    _dispatch_modes,
    _function_modes,
    _is_legacy_batched,
    _tracing_state,
    _profiler_enabled,
    _is_zero_tensor,
)

_ORDINARY = (Tensor, torch.nn.Parameter)

_any_autocast = _find("_C._is_any_autocast_enabled")
_exclude_keys, _key_set = _find("_C._ExcludeDispatchKeyGuard"), _find("_C.DispatchKeySet")
_AUTOCAST_KEYS = {device: _find(f"_C.DispatchKey.Autocast{device.upper()}") for device in ("cpu", "cuda")}

_creation_meta, _ordinary_view = _find("_C._autograd._get_creation_meta"), _find("_C._autograd.CreationMeta.DEFAULT")
_is_view, _base = _find("Tensor._is_view"), _find("Tensor._base")

_GRAPH_TASK = "_C._current_graph_task_id"
_graph_task = _find(_GRAPH_TASK)


def is_plain(x: Tensor) -> bool:
    """Whether nothing in torch except backward and autocast needs to see a call on x.

    False when the dispatcher must see the call: compilation, tracing, profiling, modes, transforms, tensor subclasses.
    A Python operator passes the dispatcher twice, which costs as much as a kernel launch. If torch lacks one of the
    private checks, this is always False.
    """
    return is_eager() and is_ordinary(x) and not _dispatch_modes() and not _function_modes() and not _profiler_enabled()


def is_eager() -> bool:
    """Whether calls are neither compiled, traced, transformed nor differentiated in forward mode.

    If torch lacks one of the private checks, this is always False.
    """
    return (
        not is_compiling()
        and _PLAIN_IS_KNOWN
        and forward_ad._current_level < 0
        and not _transforms_active()
        and not _tracing_state()
    )


def is_ordinary(x: Tensor) -> bool:
    """Whether x is a tensor with memory on a CPU or a CUDA device, and no subclass. Requires `is_eager`."""
    return (
        type(x) in _ORDINARY
        and (x.is_cuda or x.is_cpu)
        and not _is_legacy_batched(x)  # is_grads_batched=True
        and not x.is_neg()
        and not _is_zero_tensor(x)  # a zero tangent, which has no memory
    )


def plain_apply(function: type[torch.autograd.Function]) -> Any:
    """``function.apply`` for plain calls, without its preparations for torch.func's transforms (3 µs of Python)."""
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


DIRECT = "direct"  # in compiled code that torch caches on disk: never rename or remove it


def call_directly_in_compiled_code(op: Any) -> bool:
    """Let code compiled by inductor call the function ``op.direct`` instead of the operator `op`.

    The dispatcher costs 8 of 39 µs per compiled call. ``op.direct`` must accept the same arguments. Everything else
    about the call remains as in inductor's fallback for operators without a lowering; only Python wrappers are changed.
    Returns False if inductor is not loaded yet, or if this version of torch does not have the names.
    """
    lowering, ir, virtualized = (
        sys.modules.get(f"torch._inductor.{name}") for name in ("lowering", "ir", "virtualized")
    )
    try:
        lowerings, make_fallback = lowering.lowerings, lowering.make_fallback  # type: ignore[union-attr]
        layout = lowering.tag_to_layout_constraint(torch.Tag.needs_exact_strides)  # type: ignore[union-attr]
        fallback_kernel, virtual = ir.FallbackKernel, virtualized.V  # type: ignore[union-attr]
    except AttributeError:
        return False
    if op not in lowerings:
        make_fallback(op, layout_constraint=layout, warn=False)
    fallback, name = lowerings[op], f"torch.ops.{op}"

    @wraps(fallback)
    def lower(*arguments: Any, **options: Any) -> Any:
        graph = virtual.graph
        operations = getattr(graph, "operations", ())
        before = len(operations)
        result = fallback(*arguments, **options)
        for kernel in operations[before:]:
            is_call = isinstance(kernel, fallback_kernel) and getattr(kernel, "python_kernel_name", None) == name
            if is_call and not (getattr(graph, "cpp_wrapper", True) or getattr(graph, "fx_wrapper", True)):
                kernel.python_kernel_name = f"{name}.{DIRECT}"
        return result

    lowerings[op] = lower
    return True


def single_level() -> AbstractContextManager[Any]:
    """A context in which torch.func's transforms accept a `SingleLevelFunction`."""
    if _transforms_active is None or _transforms_active():
        return _single_level_in_transforms()  # type: ignore[no-any-return]
    return nullcontext()


def is_differentiated(x: Tensor) -> bool:
    """Whether a derivative with respect to x is being computed, in reverse or forward mode."""
    if x.requires_grad and torch.is_grad_enabled():
        return True
    levels_are_known = _current_dual_level is not None and _transforms_active is not None
    if levels_are_known and forward_ad._current_level < 0 and not _transforms_active():
        return False
    if _unpack_dual is None:
        return forward_ad.unpack_dual(x).tangent is not None
    # torch.compile enters dual levels that forward_ad.unpack_dual does not see.
    return _unpack_dual(x, level=0)[1] is not None


def is_batched(x: Tensor) -> bool:
    """Whether torch.vmap is mapping over x. False if torch cannot tell; the operators then raise errors themselves."""
    return _is_batched is not None and bool(_is_batched(x))


def call_below_autograd(op: Any, *arguments: Any) -> Any:
    """Call `op` below autograd. The remaining levels of torch.func are dispatched again, with their derivatives."""
    with torch.enable_grad(), forward_derivatives_enabled(True), below_autograd():
        return op(*arguments)


def is_autocast_enabled() -> bool:
    """Whether autocast is enabled for any device that the operators support."""
    if _any_autocast is None:
        return any(torch.is_autocast_enabled(device) for device in _AUTOCAST_KEYS)
    return _any_autocast()  # type: ignore[no-any-return]


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """A context in which calls skip autocast, for device "cpu" or "cuda"."""
    key = _AUTOCAST_KEYS[device]
    if None in (_exclude_keys, _key_set, key):
        return torch.autocast(device, enabled=False)
    return _exclude_keys(_key_set(key))  # type: ignore[no-any-return]


def may_refuse_writing(x: Tensor) -> bool:
    """Whether x is a view that autograd may not allow to be modified, which it would report only afterwards.

    Always True if torch cannot tell.
    """
    if None in (_creation_meta, _ordinary_view, _is_view, _base):
        return True
    return _is_view(x) and (x._base.is_leaf or _creation_meta(x) != _ordinary_view)  # type: ignore[union-attr]


def is_in_backward() -> bool:
    """Whether the caller runs inside a backward pass, as a recomputed forward does."""
    if _graph_task is None:
        raise RuntimeError(_missing(_GRAPH_TASK, "detecting recomputation in a backward pass; pass step= explicitly"))
    return _graph_task() != -1  # type: ignore[no-any-return]
