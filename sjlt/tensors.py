"""Project and its adjoint on torch tensors: check, then call the operator, which knows the rest of torch.

The caller has made sure that its argument is a tensor. A call on a small one is mostly the host's time: few and cheap
questions, and only such as a compiler can ask of a tensor that has no memory yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .containers import check_height, check_width
from .torch_ops import projection as ops
from .torch_ops.views import DTYPES, check_layout

if TYPE_CHECKING:
    from .sketch import Sketch

ACCUMULATING = (torch.float32, torch.float64)


def project(sketch: Sketch, x: Tensor, out: Any, accumulate: bool) -> Tensor:
    """x S' along the last axis of x."""
    _check(x)
    check_width("project", x, sketch.n_features, "n_features")
    if out is None and not accumulate:
        return ops.call(ops.project, x, sketch, -1, None)
    _check_out("project", out, x, sketch.n_components, accumulate)
    ops.project_into(x, out, *sketch.numbers, accumulate)
    return out  # type: ignore[no-any-return]


def project_adjoint(sketch: Sketch, y: Tensor, out: Any, accumulate: bool) -> Tensor:
    """y S along the last axis of y."""
    _check(y)
    check_width("project_adjoint", y, sketch.n_components, "n_components")
    if out is None and not accumulate:
        return ops.call(ops.project_adjoint, y, sketch, -1, None)
    _check_out("project_adjoint", out, y, sketch.n_features, accumulate)
    ops.project_adjoint_into(y, out, *sketch.numbers, accumulate)
    return out  # type: ignore[no-any-return]


def multiply(sketch: Sketch, a: Tensor) -> Tensor:
    """S A for a vector or matrix A."""
    _check(a)
    check_height("S", a, sketch.shape)
    return ops.call(ops.project, a, sketch, 0, None)


def multiply_transposed(sketch: Sketch, b: Tensor) -> Tensor:
    """S' B for a vector or matrix B."""
    _check(b)
    check_height("S.T", b, sketch.shape[::-1])
    return ops.call(ops.project_adjoint, b, sketch, 0, None)


# ------------------------------------------------------------------------------------- trees


def project_tree(sketch: Sketch, tree: Any, out: Any, batched: bool) -> Tensor:
    """The tensors of `tree`, as if flattened and concatenated, projected leaf by leaf."""
    leaves = list(_leaves(tree))
    _check_tree(sketch, leaves, batched)
    dtype = reduce(torch.promote_types, (leaf.dtype for leaf in leaves))
    like = leaves[0].new_empty((*leaves[0].shape[:batched], 0), dtype=dtype)
    if out is not None:
        _check_out("project_tree", out, like, sketch.n_components, False)
        if torch.is_grad_enabled() and any(t.requires_grad for t in (*leaves, out)):
            raise RuntimeError(
                "out= does not support automatic differentiation, but one of the tensors requires grad: leave out= "
                "away, detach, or call under torch.no_grad()"
            )
    total: Any = 0
    start = 0
    summing = torch.promote_types(dtype, torch.float32)
    for leaf in leaves:
        for vectors in _flat(leaf, int(batched)):
            part = sketch[:, start : start + vectors.shape[-1]]
            total = total + ops.call(ops.project, vectors, part, -1, summing)
            start += vectors.shape[-1]
    return total.to(dtype) if out is None else out.copy_(total)  # type: ignore[no-any-return]


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, Mapping):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        yield tree
        return
    for branch in tree:
        yield from _leaves(branch)


def _check_tree(sketch: Sketch, leaves: list[Any], batched: bool) -> None:
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise TypeError(f"project_tree takes a dict or list of torch tensors, one of them is {type(leaf).__name__}")
        _check(leaf)
    if not leaves:
        raise ValueError("project_tree needs at least one tensor: without any there is no device to work on")
    devices = sorted({str(leaf.device) for leaf in leaves})
    if len(devices) > 1:
        raise ValueError(f"the tensors must lie on one device, got {', '.join(devices)}")
    batches = {tuple(leaf.shape[:batched]) for leaf in leaves}
    if len(batches) > 1 or (batched and () in batches):
        raise ValueError(f"batched=True needs the same leading dimension everywhere, got {sorted(batches)}")
    n_features = sum(prod(leaf.shape[batched:]) for leaf in leaves)
    if n_features != sketch.n_features:
        each = " for each of the batch" if batched else ""
        raise ValueError(f"the tensors must have n_features = {sketch.n_features} numbers{each}, got {n_features}")


def _flat(leaf: Tensor, batch_ndim: int) -> Iterator[Tensor]:
    """The leaf's numbers in their logical order along a last axis: views, as few as its strides allow."""
    shape, strides = leaf.shape[batch_ndim:], leaf.stride()[batch_ndim:]
    axes = [axis for axis, n in enumerate(shape) if n != 1]
    evenly = all(strides[a] == shape[b] * strides[b] for a, b in pairwise(axes))
    if evenly or leaf.numel() == 0:
        yield leaf.reshape(*leaf.shape[:batch_ndim], prod(shape))
    else:
        for part in leaf.unbind(batch_ndim + axes[0]):
            yield from _flat(part, batch_ndim)


# ------------------------------------------------------------------------------------- checks


def _check(x: Tensor) -> None:
    """There is a backend for x's dtype, layout and device."""
    if x.dtype not in DTYPES:
        raise TypeError(
            f"dtype {x.dtype} is refused: a sketch takes {_listed(DTYPES)} tensors; convert it, as by x.float()"
        )
    check_layout(x)
    if not (x.is_cuda or x.is_cpu or x.is_meta):
        raise TypeError(f"tensors on the device {x.device} are refused: a sketch takes CPU and CUDA tensors")


def _check_out(name: str, out: Any, x: Tensor, width: int, accumulate: bool) -> None:
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
