"""What of torch stands between a call on a tensor and the backend."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import _AutoDispatchBelowAutograd
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.forward_ad import _set_fwd_grad_enabled


def is_plain(x: Tensor) -> bool:
    """Whether nothing of torch but backward and autocast stands between a call on x and its memory.

    A call of an operator that is written in Python passes through torch's dispatcher twice, which takes as long as the
    launch of a kernel. Here are the reasons for which it has to: a compiler, a tracer, a profiler, a mode or a
    transform that watches, a tensor that is not what it seems.
    """
    return (
        not torch.compiler.is_compiling()
        and type(x) in (Tensor, torch.nn.Parameter)
        and (x.is_cuda or x.is_cpu)
        and forward_ad._current_level < 0
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._functorch.is_legacy_batchedtensor(x)  # of is_grads_batched=True
        and not torch._C._get_tracing_state()
        and not torch._C._autograd._profiler_enabled()
        and not x.is_neg()
        and not x._is_zerotensor()  # a tangent of zeros, which has no memory
    )


def one_level() -> AbstractContextManager[Any]:
    """torch.func asks that a function of one level says that it means to be one."""
    if torch._C._are_functorch_transforms_active():
        return enable_single_level_autograd_function()
    return nullcontext()


def is_differentiated(x: Tensor) -> bool:
    """Backward or forward. (torch.compile enters forward levels that forward_ad.unpack_dual does not see.)"""
    if x.requires_grad and torch.is_grad_enabled():
        return True
    if forward_ad._current_level < 0 and not torch._C._are_functorch_transforms_active():
        return False
    return torch._VF._unpack_dual(x, level=0)[1] is not None


def below(op: Any, *arguments: Any) -> Any:
    """`op` below autograd: what is left of torch.func's levels is dispatched anew, and differentiates for itself."""
    with torch.enable_grad(), _set_fwd_grad_enabled(True), _AutoDispatchBelowAutograd():
        return op(*arguments)
