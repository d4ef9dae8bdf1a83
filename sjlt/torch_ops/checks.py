"""Checks of tensors. They ask only what a compiler can answer about a tensor that has no memory yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..inputs.containers import check_shape
from . import compat

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # that backends accept
_STRIDED = torch.strided
ACCUMULATING = (torch.float32, torch.float64)


def listed(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_tensor(x: Tensor, operation: str) -> None:
    """There is a backend for the dtype, layout and device of x. `operation` is the subject of the error message."""
    if x.dtype in DTYPES and x.layout is _STRIDED and (x.is_cuda or x.is_cpu) and not x.is_nested:
        return  # the most frequent case, in one function
    check_dtype(x, operation)
    check_layout(x)
    check_place(x, operation)


def check_dtype(x: Tensor, operation: str) -> None:
    if x.dtype not in DTYPES:
        raise TypeError(
            f"dtype {x.dtype} is refused: {operation} accepts {listed(DTYPES)} tensors; convert it, as with x.float()"
        )


def check_place(x: Tensor, operation: str) -> None:
    """x is on a device that has a backend."""
    if not (x.is_cuda or x.is_cpu or x.is_meta):
        raise TypeError(f"tensors on the device {x.device} are refused: {operation} accepts CPU and CUDA tensors")


def check_layout(x: Tensor) -> None:
    """x is dense memory that strides describe."""
    if x.layout is not torch.strided:
        raise TypeError(f"layout {x.layout} is refused: pass a dense tensor, as from x.to_dense()")
    if x.is_nested:
        raise TypeError("nested tensors are refused: pass x.to_padded_tensor(0), or the tensors one by one")


def check_beside(name: str, given: Any, x: Tensor) -> None:
    """`given` is a tensor of x's shape on x's device."""
    if not isinstance(given, Tensor):
        raise TypeError(f"{name} must be a torch tensor, as x is, got {type(given).__name__}")
    check_shape(name, given, x)
    if given.device != x.device:
        raise ValueError(f"{name} must lie on {x.device}, as x does, got {given.device}")


def check_bool(keep: Tensor) -> None:
    if keep.dtype != torch.bool:
        raise TypeError(f"keep must have dtype torch.bool, got {keep.dtype}")


def refuse_derivatives(x: Tensor, out: Tensor) -> None:
    """RuntimeError where writing into `out` would cut a derivative."""
    differentiated = "the data" if compat.is_differentiated(x) else "out" if compat.is_differentiated(out) else None
    if differentiated:
        raise RuntimeError(
            f"out= does not support automatic differentiation, but {differentiated} requires grad: omit out=, detach, "
            "or call under torch.no_grad()"
        )


def check_out(name: str, out: Any, x: Tensor, width: int, accumulate: bool) -> None:
    """`out` can hold the result for x (..., d), of shape (..., width). Its memory is checked once it exists."""
    shape = (*x.shape[:-1], width)
    if out is None:
        raise ValueError(f"{name} with accumulate=True needs out=, the tensor of shape {shape} to add to")
    if not isinstance(out, Tensor):
        raise TypeError(f"out must be a torch tensor on {x.device}, as the data is, got {type(out).__name__}")
    check_layout(out)
    if out.shape != shape:
        raise ValueError(f"out must have shape {shape}, got {tuple(out.shape)}")
    allowed = ACCUMULATING if accumulate else DTYPES
    if out.dtype not in allowed:
        with_ = " with accumulate=True" if accumulate else ""
        raise TypeError(f"out must have dtype {listed(allowed)}{with_}, got {out.dtype}")
    if out.device != x.device:
        raise ValueError(f"out must lie on {x.device}, as the data does, got one on {out.device}")
