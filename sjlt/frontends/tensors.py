"""Project and its adjoint on torch tensors: check, then call the operator, which knows the rest of torch.

The caller has made sure that its argument is a tensor. A call on a small one is mostly the host's time: few and cheap
questions, and only such as a compiler can ask of a tensor that has no memory yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..inputs.containers import check_height, check_width
from ..torch_ops import projection as ops
from ..torch_ops.views import DTYPES, check_layout

if TYPE_CHECKING:
    from ..laws.spec import SketchSpec

ACCUMULATING = (torch.float32, torch.float64)


def project(spec: SketchSpec, x: Tensor, out: Any, accumulate: bool) -> Tensor:
    """x S' along the last axis of x."""
    check(x)
    check_width("project", x, spec.n_features, "n_features")
    if out is None and not accumulate:
        return ops.call(ops.project, x, spec, -1, None)
    check_out("project", out, x, spec.n_components, accumulate)
    ops.project_into(x, out, *spec, accumulate)
    return out  # type: ignore[no-any-return]


def project_adjoint(spec: SketchSpec, y: Tensor, out: Any, accumulate: bool) -> Tensor:
    """y S along the last axis of y."""
    check(y)
    check_width("project_adjoint", y, spec.n_components, "n_components")
    if out is None and not accumulate:
        return ops.call(ops.project_adjoint, y, spec, -1, None)
    check_out("project_adjoint", out, y, spec.n_features, accumulate)
    ops.project_adjoint_into(y, out, *spec, accumulate)
    return out  # type: ignore[no-any-return]


def multiply(spec: SketchSpec, a: Tensor) -> Tensor:
    """S A for a vector or matrix A."""
    check(a)
    check_height("S", a, (spec.n_components, spec.n_features))
    return ops.call(ops.project, a, spec, 0, None)


def multiply_transposed(spec: SketchSpec, b: Tensor) -> Tensor:
    """S' B for a vector or matrix B."""
    check(b)
    check_height("S.T", b, (spec.n_features, spec.n_components))
    return ops.call(ops.project_adjoint, b, spec, 0, None)


# ------------------------------------------------------------------------------------- checks


def check(x: Tensor) -> None:
    """There is a backend for x's dtype, layout and device."""
    if x.dtype not in DTYPES:
        raise TypeError(
            f"dtype {x.dtype} is refused: a sketch takes {_listed(DTYPES)} tensors; convert it, as by x.float()"
        )
    check_layout(x)
    if not (x.is_cuda or x.is_cpu or x.is_meta):
        raise TypeError(f"tensors on the device {x.device} are refused: a sketch takes CPU and CUDA tensors")


def check_out(name: str, out: Any, x: Tensor, width: int, accumulate: bool) -> None:
    """`out` can take the result for x (..., d) of shape (..., width). (Its memory is looked at when there is one.)"""
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
        raise TypeError(f"out must have dtype {_listed(allowed)}{with_}, got {out.dtype}")
    if out.device != x.device:
        raise ValueError(f"out must lie on {x.device}, as the data does, got one on {out.device}")


def _listed(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
