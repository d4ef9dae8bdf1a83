"""Project and its adjoint on torch tensors: check, view as 2-D, call the backend, restore the shape.

The caller has made sure that its argument is a tensor. A call on a small one is mostly this file's time: a tensor
of two dimensions passes through few and cheap questions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from math import inf, prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from .containers import check_height, check_width, overlap

if TYPE_CHECKING:
    from .sketch import Sketch

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ACCUMULATING = (torch.float32, torch.float64)


def project(sketch: Sketch, x: Tensor, out: Any, accumulate: bool) -> Tensor:
    """x S' along the last axis of x."""
    x = _checked(x)
    check_width("project", x, sketch.n_features, "n_features")
    return _along_rows("project", _triton().project, sketch, x, sketch.n_components, out, accumulate)


def project_adjoint(sketch: Sketch, y: Tensor, out: Any, accumulate: bool) -> Tensor:
    """y S along the last axis of y."""
    y = _checked(y)
    check_width("project_adjoint", y, sketch.n_components, "n_components")
    return _along_rows("project_adjoint", _triton().adjoint, sketch, y, sketch.n_features, out, accumulate)


def multiply(sketch: Sketch, a: Tensor) -> Tensor:
    """S A for a vector or matrix A."""
    a = _checked(a)
    check_height("S", a, sketch.shape)
    return _from_left(_triton().project, sketch, a, sketch.n_components)


def multiply_transposed(sketch: Sketch, b: Tensor) -> Tensor:
    """S' B for a vector or matrix B."""
    b = _checked(b)
    check_height("S.T", b, sketch.shape[::-1])
    return _from_left(_triton().adjoint, sketch, b, sketch.n_features)


@cache
def _triton() -> Any:
    """The backend, which takes some time to import: not before it is needed."""
    try:
        from .backends import triton
    except ImportError as error:
        if error.name != "triton":
            raise
        raise ImportError(
            "a sketch of CUDA tensors runs on Triton, which is not installed: pip install triton "
            "(triton-windows on Windows)",
            name="triton",
        ) from error
    return triton


def _along_rows(
    name: str, function: Callable[..., None], sketch: Sketch, x: Tensor, width: int, out: Any, accumulate: bool
) -> Tensor:
    """`function` on the rows along the last axis of x."""
    if out is not None:
        result = _checked_out(out, x, width, accumulate)
    elif accumulate:
        raise ValueError(f"{name} with accumulate=True needs out=, the tensor of shape {_shape(x, width)} to add to")
    else:
        out = result = _new(x, width)
    if x.ndim == 2:
        function(sketch, x, result, accumulate)
    else:
        for x_rows, rows in _matrices(x, result):
            function(sketch, x_rows, rows, accumulate)
    return out  # type: ignore[no-any-return]


def _from_left(function: Callable[..., None], sketch: Sketch, a: Tensor, height: int) -> Tensor:
    """`function` on the columns of a, or on the vector a."""
    if a.ndim == 1:
        out = a.new_empty(height)
        function(sketch, a.unsqueeze(0), out.unsqueeze(0), False)
    else:
        out = a.new_empty(height, a.shape[1])
        function(sketch, a.t(), out.t(), False)
    return out


# ------------------------------------------------------------------------------------- checks


def _checked(x: Tensor) -> Tensor:
    """`x`, when kernels can read its memory and no derivative would be lost."""
    if type(x) is not Tensor:
        x = _plain(x)
    if x.dtype not in DTYPES:
        raise TypeError(
            f"dtype {x.dtype} is refused: a sketch takes {_listed(DTYPES)} tensors; convert it, as by x.float()"
        )
    _check_layout(x)
    if not x.is_cuda:
        refuse_device(x)
    if _differentiated(x):
        raise NotImplementedError("gradients are not supported yet: use x.detach(), or project under torch.no_grad()")
    # A view that says "negated" of memory that is not (torch.imag of a conjugate): the one case of a copy.
    return x.resolve_neg() if x.is_neg() else x


def _plain(x: Tensor) -> Tensor:
    """A Parameter or another subclass as the tensor that it is."""
    if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # its own memory is not the data
        raise TypeError(f"{type(x).__name__} is refused: a sketch takes tensors that hold their data themselves")
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


def _differentiated(x: Tensor) -> bool:
    """Whether a derivative, backward or forward, would pass through x."""
    return (x.requires_grad and torch.is_grad_enabled()) or unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]


def _check_layout(x: Tensor) -> None:
    if x.layout is not torch.strided:
        raise TypeError(f"layout {x.layout} is refused: pass a dense tensor, as from x.to_dense()")
    if x.is_nested:
        raise TypeError("nested tensors are refused: pass x.to_padded_tensor(0), or the tensors one by one")


def refuse_device(x: Tensor) -> None:
    """There is no backend for where x lies."""
    if x.device.type == "cpu":
        raise TypeError("CPU tensors are not supported yet: pass x.numpy(), which shares a CPU tensor's memory")
    raise TypeError(f"tensors on the device {x.device} are refused: a sketch takes CUDA tensors")


def _checked_out(given: Any, x: Tensor, width: int, accumulate: bool) -> Tensor:
    """The `out` that was given as a plain tensor, when it can take the result for x (..., d) of shape (..., width)."""
    if not isinstance(given, Tensor):
        raise TypeError(f"out must be a torch tensor on {x.device}, as the data is, got {type(given).__name__}")
    out: Tensor = given if type(given) is Tensor else _plain(given)
    _check_layout(out)
    shape = _shape(x, width)
    if out.shape != shape:
        raise ValueError(f"out must have shape {shape}, got {tuple(out.shape)}")
    allowed = ACCUMULATING if accumulate else DTYPES
    if out.dtype not in allowed:
        with_ = " with accumulate=True" if accumulate else ""
        raise TypeError(f"out must have dtype {_listed(allowed)}{with_}, got {out.dtype}")
    if out.device != x.device:
        raise ValueError(f"out must lie on {x.device}, as the data does, got one on {out.device}")
    if _differentiated(out):
        raise NotImplementedError("gradients are not supported yet: out may not require them")
    if out.is_neg():
        raise ValueError("out is a negated view of its memory (out.is_neg()): it cannot be written")
    if _repeats(out):
        raise ValueError(f"out has elements that share memory (strides {out.stride()}): it cannot hold a result")
    if _share_memory(x, out):
        raise ValueError("out shares memory with the input")
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)  # so that a backward pass that needs the old values says so
    return out


def _listed(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


# ------------------------------------------------------------------------------------- memory


def _repeats(out: Tensor) -> bool:
    """Whether elements may share memory: some axis does not step over all that the axes of smaller steps reach."""
    if out.is_contiguous():
        return False
    reach = 0
    for step, n in sorted(zip(out.stride(), out.shape, strict=True)):
        if n > 1 and step <= reach:
            return out.numel() > 0
        reach += step * (n - 1)
    return False


class _Addresses:
    """A tensor's memory as NumPy sees it, for questions about addresses: to be read it may be on the wrong device."""

    def __init__(self, x: Tensor) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (x.data_ptr(), True),
            "typestr": f"|V{x.itemsize}",
            "shape": tuple(x.shape),
            "strides": tuple(step * x.itemsize for step in x.stride()),
        }


def _share_memory(x: Tensor, out: Tensor) -> bool:
    if not (x.numel() and out.numel()):
        return False
    x_start, out_start = x.data_ptr(), out.data_ptr()
    if x_start + _reach(x) <= out_start or out_start + _reach(out) <= x_start:
        return False
    return overlap(np.asarray(_Addresses(x)), np.asarray(_Addresses(out)))


def _reach(x: Tensor) -> int:
    """Bytes from the first element of a tensor that has one to the end of the last."""
    return x.itemsize * (1 + sum(step * (n - 1) for step, n in zip(x.stride(), x.shape, strict=True)))


# ------------------------------------------------------------------------------------- shapes


def _shape(x: Tensor, width: int) -> tuple[int, ...]:
    return (*x.shape[:-1], width)


def _new(x: Tensor, width: int) -> Tensor:
    """A tensor for the result; its leading axes lie in memory in the order of x's, as torch's own functions do it.

    So the rows of a transposed batch remain one matrix. Where x repeats itself (stride 0) the axis comes first.
    """
    if x.ndim == 2:
        return x.new_empty(x.shape[0], width)
    if x.is_contiguous():
        return x.new_empty(_shape(x, width))
    shape, strides, axes = _shape(x, width), x.stride(), range(x.ndim - 1)
    order = sorted(axes, key=lambda axis: -(strides[axis] or inf))
    if order == list(axes):
        return x.new_empty(shape)
    return x.new_empty([shape[axis] for axis in (*order, -1)]).permute([order.index(axis) for axis in axes] + [-1])


def _matrices(x: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """x (..., d) and out (..., k) as pairs of 2-D views, few as their strides allow, never copies."""
    if x.ndim == 1:
        yield x.unsqueeze(0), out.unsqueeze(0)
        return
    if x.is_contiguous() and out.is_contiguous():
        n = prod(x.shape[:-1])
        yield x.view(n, x.shape[-1]), out.view(n, out.shape[-1])
        return
    axes = _merged(x.shape[:-1], x.stride()[:-1], out.stride()[:-1])
    longest = max(axes)
    axes.remove(longest)
    n, *steps = longest
    for index in product(*(range(axis[0]) for axis in axes)):
        yield tuple(  # type: ignore[misc]
            t.as_strided(
                (n, t.shape[-1]),
                (steps[which], t.stride(-1)),
                t.storage_offset() + sum(i * axis[1 + which] for i, axis in zip(index, axes, strict=True)),
            )
            for which, t in enumerate((x, out))
        )


def _merged(shape: Sequence[int], x_strides: Sequence[int], out_strides: Sequence[int]) -> list[tuple[int, int, int]]:
    """Axes as (length, x's stride, out's stride), at least one, merged where both tensors' strides allow it.

    Rows may come in any order: so may the axes, and out's is taken.
    """
    merged = [(1, 0, 0)]
    for n, i, j in sorted(zip(shape, x_strides, out_strides, strict=True), key=lambda axis: axis[2]):
        length, x_step, out_step = merged[-1]
        if length == 1:
            merged[-1] = (n, i, j)
        elif i == length * x_step and j == length * out_step:
            merged[-1] = (n * length, x_step, out_step)
        elif n != 1:
            merged.append((n, i, j))
    return merged
