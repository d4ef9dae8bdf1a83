"""The projection of several torch tensors, such as a model's gradients, as if concatenated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from itertools import accumulate, pairwise
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..torch_ops import projection as ops
from ..torch_ops import sharding, sparse
from ..torch_ops.checks import check_out, check_tensor

if TYPE_CHECKING:
    from ..laws.spec import SketchSpec


def project_tree(spec: SketchSpec, tree: Any, out: Any, batched: bool) -> Tensor:
    """Project the tensors of `tree` leaf by leaf, as if flattened and concatenated."""
    leaves = list(leaves_of(tree))
    sharded = [leaf for leaf in leaves if sharding.is_sharded(leaf)]
    if sharded:
        tree_shapes = [(getattr(leaf, "shape", None), getattr(leaf, "dtype", None)) for leaf in leaves]
        with sharding.agreement(sharded, {"the sketch": spec, "batched": batched, "the tree": tree_shapes}):
            dtype, like = _prepared(spec, leaves, out, batched)
    else:
        dtype, like = _prepared(spec, leaves, out, batched)
    summing = torch.promote_types(dtype, torch.float32)
    total: Any = 0
    partial: dict[Any, Any] = {}  # for each mesh, the sum over the shards that this rank holds
    start = 0
    for leaf in leaves:
        columns = spec.columns(start, start + prod(leaf.shape[batched:]))
        start += columns.n_features
        if sharding.is_sharded(leaf):
            if leaf.device_mesh not in partial:  # even if this rank holds no elements
                shape = (*like.shape[:-1], spec.n_components)
                partial[leaf.device_mesh] = torch.zeros(shape, dtype=summing, device=like.device)
            for run_columns, run in sharding.runs(columns, leaf, batched):
                partial[leaf.device_mesh] += _project_leaf(run_columns, run, batched, summing)
        else:
            total = total + _project_leaf(columns, leaf, batched, summing)
    for mesh, part in partial.items():
        total = total + sharding.sum_over(mesh, range(mesh.ndim), part)
    return total.to(dtype) if out is None else out.copy_(total)  # type: ignore[no-any-return]


def adjoint_tree(spec: SketchSpec, y: Any, like: Any, batched: bool) -> Any:
    """y S, split into tensors with the shapes, dtypes and placements of those in the tree `like`."""
    leaves = list(leaves_of(like))
    _check_tree(spec, leaves, batched)
    if not isinstance(y, Tensor) or sharding.is_sharded(y):
        raise TypeError(f"adjoint_tree needs a torch tensor that is not sharded, got {type(y).__name__}")
    check_tensor(y, "a sketch")
    shape = (*leaves[0].shape[:batched], spec.n_components)
    if y.shape != shape:
        raise ValueError(f"adjoint_tree needs y of shape {shape} for this tree, got {tuple(y.shape)}")
    if y.device != leaves[0].device:
        raise ValueError(f"y must be on {leaves[0].device}, like the tree, got {y.device}")
    starts = iter([0, *accumulate(prod(leaf.shape[batched:]) for leaf in leaves)])

    def adjoint(leaf: Tensor) -> Tensor:
        start = next(starts)
        columns = spec.columns(start, start + prod(leaf.shape[batched:]))
        if sharding.is_sharded(leaf):
            return sharding.adjoint(columns, y, leaf, batched)  # type: ignore[no-any-return]
        return ops.call(ops.project_adjoint, y, columns, -1, leaf.dtype).view(leaf.shape)

    return _mapped(adjoint, like)


def _mapped(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """A tree of dicts, lists and tuples with the results of `function`, which is called in the order of `leaves_of`."""
    if isinstance(tree, Mapping):
        return {key: _mapped(function, branch) for key, branch in tree.items()}
    if isinstance(tree, (list, tuple)):
        branches = [_mapped(function, branch) for branch in tree]
        return branches if isinstance(tree, list) else tuple(branches)
    return function(tree)


def _project_leaf(columns: SketchSpec, leaf: Tensor, batched: bool, summing: torch.dtype) -> Any:
    """The projection of a leaf by its columns of the sketch."""
    if sparse.is_sparse(leaf):
        rows = sparse.flattened(leaf, batched)
        sketched = sparse.project(columns, rows._replace(values=rows.values.to(summing)))
        return sketched if batched else sketched[0]
    total: Any = 0
    start = 0
    for vectors in _flat(leaf, int(batched)):
        part = columns.columns(start, start + vectors.shape[-1])
        total = total + ops.call(ops.project, vectors, part, -1, summing)
        start += vectors.shape[-1]
    return total


def leaves_of(tree: Any) -> Iterator[Any]:
    """The leaves of nested mappings, lists and tuples, in order."""
    if isinstance(tree, Mapping):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        yield tree
        return
    for branch in tree:
        yield from leaves_of(branch)


def _prepared(spec: SketchSpec, leaves: list[Any], out: Any, batched: bool) -> tuple[torch.dtype, Tensor]:
    """Validate the arguments; return the dtype of the result and an empty tensor of its device and leading shape."""
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
    return dtype, like


def _check_tree(spec: SketchSpec, leaves: list[Any], batched: bool) -> None:
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise TypeError(f"a tree must be a dict or list of torch tensors, got one containing {type(leaf).__name__}")
        if sharding.is_sharded(leaf):
            sharding.check_sharded(leaf, batched)
        elif sparse.is_sparse(leaf):
            sparse.check_sparse(leaf, None)
        else:
            check_tensor(leaf, "a sketch")
    if not leaves:
        raise ValueError("project_tree needs at least one tensor")
    devices = sorted({str(leaf.device) for leaf in leaves})
    if len(devices) > 1:
        raise ValueError(f"the tensors must be on one device, got {', '.join(devices)}")
    batches = {tuple(leaf.shape[:batched]) for leaf in leaves}
    if len(batches) > 1 or (batched and () in batches):
        raise ValueError(f"batched=True needs the same leading dimension everywhere, got {sorted(batches)}")
    n_features = sum(prod(leaf.shape[batched:]) for leaf in leaves)
    if n_features != spec.n_features:
        each = " per element of the batch" if batched else ""
        raise ValueError(f"the tensors must have n_features = {spec.n_features} elements{each}, got {n_features}")


def _flat(leaf: Tensor, batch_ndim: int) -> Iterator[Tensor]:
    """The elements of the leaf in logical order along the last axis of as few views as its strides allow."""
    shape, strides = leaf.shape[batch_ndim:], leaf.stride()[batch_ndim:]
    axes = [axis for axis, n in enumerate(shape) if n != 1]
    evenly = all(strides[a] == shape[b] * strides[b] for a, b in pairwise(axes))
    if evenly or leaf.numel() == 0:
        yield leaf.reshape(*leaf.shape[:batch_ndim], prod(shape))
    else:
        for part in leaf.unbind(batch_ndim + axes[0]):
            yield from _flat(part, batch_ndim)
