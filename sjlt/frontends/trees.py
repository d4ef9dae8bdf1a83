"""The projection of several torch tensors, such as a model's gradients, as if concatenated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..torch_ops import projection as ops
from ..torch_ops import sparse
from ..torch_ops.checks import check_out, check_tensor

if TYPE_CHECKING:
    from ..laws.spec import SketchSpec


def project_tree(spec: SketchSpec, tree: Any, out: Any, batched: bool) -> Tensor:
    """The tensors of `tree`, as if flattened and concatenated, projected leaf by leaf."""
    leaves = list(_leaves(tree))
    _check_tree(spec, leaves, batched)
    dtype = reduce(torch.promote_types, (leaf.dtype for leaf in leaves))
    like = torch.empty((*leaves[0].shape[:batched], 0), dtype=dtype, device=leaves[0].device)
    if out is not None:
        check_out("project_tree", out, like, spec.n_components, False)
        if torch.is_grad_enabled() and any(t.requires_grad for t in (*leaves, out)):
            raise RuntimeError(
                "out= does not support automatic differentiation, but one of the tensors requires grad: omit out=, "
                "detach, or call under torch.no_grad()"
            )
    total: Any = 0
    start = 0
    summing = torch.promote_types(dtype, torch.float32)
    for leaf in leaves:
        if sparse.is_sparse(leaf):
            part = spec.columns(start, start + prod(leaf.shape[batched:]))
            rows = sparse.flattened(leaf, batched)
            sketched = sparse.project(part, rows._replace(values=rows.values.to(summing)))
            total = total + (sketched if batched else sketched[0])
            start += part.n_features
            continue
        for vectors in _flat(leaf, int(batched)):
            part = spec.columns(start, start + vectors.shape[-1])
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


def _check_tree(spec: SketchSpec, leaves: list[Any], batched: bool) -> None:
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise TypeError(f"project_tree needs a dict or list of torch tensors, got a {type(leaf).__name__} in it")
        if sparse.is_sparse(leaf):
            sparse.check_sparse(leaf, None)
        else:
            check_tensor(leaf, "a sketch")
    if not leaves:
        raise ValueError("project_tree needs at least one tensor")
    devices = sorted({str(leaf.device) for leaf in leaves})
    if len(devices) > 1:
        raise ValueError(f"the tensors must lie on one device, got {', '.join(devices)}")
    batches = {tuple(leaf.shape[:batched]) for leaf in leaves}
    if len(batches) > 1 or (batched and () in batches):
        raise ValueError(f"batched=True needs the same leading dimension everywhere, got {sorted(batches)}")
    n_features = sum(prod(leaf.shape[batched:]) for leaf in leaves)
    if n_features != spec.n_features:
        each = " per element of the batch" if batched else ""
        raise ValueError(f"the tensors must have n_features = {spec.n_features} numbers{each}, got {n_features}")


def _flat(leaf: Tensor, batch_ndim: int) -> Iterator[Tensor]:
    """The leaf's numbers in logical order along a last axis: as few views as its strides allow."""
    shape, strides = leaf.shape[batch_ndim:], leaf.stride()[batch_ndim:]
    axes = [axis for axis, n in enumerate(shape) if n != 1]
    evenly = all(strides[a] == shape[b] * strides[b] for a, b in pairwise(axes))
    if evenly or leaf.numel() == 0:
        yield leaf.reshape(*leaf.shape[:batch_ndim], prod(shape))
    else:
        for part in leaf.unbind(batch_ndim + axes[0]):
            yield from _flat(part, batch_ndim)
