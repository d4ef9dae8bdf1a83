"""Validation of tensors. It uses only properties that a compiler knows of a tensor without memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..inputs.containers import check_shape
from . import compat

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # supported by the backends
STRIDED = torch.strided  # torch.compile guards on each name that a call looks up in a module
ACCUMULATING = (torch.float32, torch.float64)


def listed(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def is_supported(x: Tensor) -> bool:
    """Whether a backend supports x's dtype, layout and device."""
    dtype = x.dtype
    return (  # these properties of a dtype hold for DTYPES only
        dtype.is_floating_point
        and dtype.itemsize > 1
        and x.layout is STRIDED
        and (x.is_cuda or x.is_cpu)
        and not x.is_nested
    )


def check_tensor(x: Tensor, operation: str) -> None:
    """Raise TypeError unless a backend supports x's dtype, layout and device. `operation` is the message's subject."""
    if is_supported(x):
        return
    check_dtype(x, operation)
    check_layout(x)
    check_device(x, operation)


def check_dtype(x: Tensor, operation: str) -> None:
    if x.dtype not in DTYPES:
        raise TypeError(
            f"dtype {x.dtype} is not supported: {operation} accepts {listed(DTYPES)} tensors; convert it, for example "
            "with x.float()"
        )


def check_device(x: Tensor, operation: str) -> None:
    """Raise TypeError unless x is on a supported device."""
    if not (x.is_cuda or x.is_cpu or x.is_meta):
        raise TypeError(f"tensors on the device {x.device} are not supported: {operation} accepts CPU and CUDA tensors")


def check_layout(x: Tensor) -> None:
    """Raise TypeError unless x is a dense, strided tensor."""
    if x.layout is not torch.strided:
        raise TypeError(f"layout {x.layout} is not supported: pass a dense tensor, such as x.to_dense()")
    if x.is_nested:
        raise TypeError("nested tensors are not supported: pass x.to_padded_tensor(0), or the tensors one by one")


def check_like(name: str, given: Any, x: Tensor) -> None:
    """Raise an error unless `given` is a tensor with the shape and device of x."""
    if not isinstance(given, Tensor):
        raise TypeError(f"{name} must be a torch tensor, like x, got {type(given).__name__}")
    check_shape(name, given, x)
    if given.device != x.device:
        raise ValueError(f"{name} must be on {x.device}, like x, got {given.device}")


def check_bool(keep: Tensor) -> None:
    if keep.dtype != torch.bool:
        raise TypeError(f"keep must have dtype torch.bool, got {keep.dtype}")


def refuse_derivatives(x: Tensor, out: Tensor) -> None:
    """Raise RuntimeError if writing into `out` would lose a derivative."""
    differentiated = "the data" if compat.is_differentiated(x) else "out" if compat.is_differentiated(out) else None
    if differentiated:
        raise RuntimeError(
            f"out= does not support automatic differentiation, but {differentiated} requires grad: omit out=, detach, "
            "or call under torch.no_grad()"
        )


def check_out(name: str, out: Any, x: Tensor, width: int, accumulate: bool) -> None:
    """Raise an error unless `out` can hold a result of shape (..., width) for x (..., d), its memory aside."""
    shape = (*x.shape[:-1], width)
    if out is None:
        raise ValueError(f"{name} with accumulate=True needs out=, the tensor of shape {shape} to add to")
    if not isinstance(out, Tensor):
        raise TypeError(f"out must be a torch tensor on {x.device}, like the data, got {type(out).__name__}")
    check_layout(out)
    if out.shape != shape:
        raise ValueError(f"out must have shape {shape}, got {tuple(out.shape)}")
    allowed = ACCUMULATING if accumulate else DTYPES
    if out.dtype not in allowed:
        with_ = " with accumulate=True" if accumulate else ""
        raise TypeError(f"out must have dtype {listed(allowed)}{with_}, got {out.dtype}")
    if out.device != x.device:
        raise ValueError(f"out must be on {x.device}, like the data, got {out.device}")
