"""The projection of several torch tensors, such as a model's gradients, as if concatenated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..torch_ops import projection as ops
from ..torch_ops import sharding, sparse
from ..torch_ops.checks import check_out, check_tensor
from ..torch_ops.views import check_memory
from .tree_plans import check_tree, claimed, flat, make_plan

if TYPE_CHECKING:
    from ..laws.spec import SketchSpec
    from .tree_plans import Piece, Plan


def project_tree(spec: SketchSpec, tree: Any, out: Any, batched: bool) -> Tensor:
    """Project the tensors of `tree` leaf by leaf, as if flattened and concatenated."""
    leaves = list(leaves_of(tree))
    with sharding.refusal([leaf for leaf in leaves if sharding.is_sharded(leaf)]):
        plan, memory = _prepared(spec, leaves, out, batched)
    if plan.claims is not None:
        sharding.agree(plan.claims)
    summing = torch.promote_types(plan.dtype, torch.float32)
    total: Any = 0
    # For each mesh, the sum over the shards that this rank holds, even if it holds no elements.
    partial = [torch.zeros(plan.shape, dtype=summing, device=plan.device) for _ in plan.meshes]
    for leaf, tensor in zip(plan.leaves, memory, strict=True):
        if leaf.runs is None:
            total = total + _project_leaf(leaf.columns, tensor, batched, summing)
            continue
        check_memory("the data", tensor)
        for run in leaf.runs:
            sketched = _project_run(run, tensor, summing)
            if leaf.mesh is None:
                total = total + sketched
            else:
                partial[leaf.mesh] += sketched
    for mesh, part in zip(plan.meshes, partial, strict=True):
        total = total + sharding.sum_over(mesh, range(mesh.ndim), part)
    return total.to(plan.dtype) if out is None else out.copy_(total)  # type: ignore[no-any-return]


def adjoint_tree(spec: SketchSpec, y: Any, like: Any, batched: bool) -> Any:
    """y S, split into tensors with the shapes, dtypes and placements of those in the tree `like`."""
    leaves = list(leaves_of(like))
    sharded = [leaf for leaf in leaves if sharding.is_sharded(leaf)]
    with sharding.refusal(sharded):
        _check_adjoint(spec, y, leaves, batched, bool(sharded))
        mine = sharding.claims(sharded, claimed(spec, leaves, batched)) if sharded else None
    if mine is not None:
        sharding.agree(mine)
    starts = iter([0, *accumulate(prod(leaf.shape[batched:]) for leaf in leaves)])

    def adjoint(leaf: Tensor) -> Tensor:
        start = next(starts)
        columns = spec.columns(start, start + prod(leaf.shape[batched:]))
        if sharding.is_sharded(leaf):
            return sharding.adjoint(columns, y, leaf, batched)  # type: ignore[no-any-return]
        return ops.call(ops.project_adjoint, y, columns, -1, leaf.dtype).view(leaf.shape)

    return _mapped(adjoint, like)


def _check_adjoint(spec: SketchSpec, y: Any, leaves: list[Any], batched: bool, is_sharded: bool) -> None:
    with torch.no_grad():  # of the leaves, only the layout matters
        check_tree(spec, leaves, batched)
    if not isinstance(y, Tensor) or sharding.is_sharded(y):
        raise TypeError(f"adjoint_tree needs a torch tensor that is not sharded, got {type(y).__name__}")
    check_tensor(y, "a sketch")
    shape = (*leaves[0].shape[:batched], spec.n_components)
    if y.shape != shape:
        raise ValueError(f"adjoint_tree needs y of shape {shape} for this tree, got {tuple(y.shape)}")
    if y.device != leaves[0].device:
        raise ValueError(f"y must be on {leaves[0].device}, like the tree, got {y.device}")
    if is_sharded and torch.is_grad_enabled() and y.requires_grad:  # its gradient would be that of one rank's shards
        raise RuntimeError(
            "adjoint_tree with DTensors does not support automatic differentiation: detach y, or call under "
            "torch.no_grad()"
        )


def _mapped(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """A tree of dicts, lists and tuples with the results of `function`, which is called in the order of `leaves_of`."""
    if isinstance(tree, Mapping):
        return {key: _mapped(function, branch) for key, branch in tree.items()}
    if isinstance(tree, (list, tuple)):
        branches = [_mapped(function, branch) for branch in tree]
        return branches if isinstance(tree, list) else tuple(branches)
    return function(tree)


def _project_run(run: tuple[Piece, ...], memory: Tensor, summing: torch.dtype) -> Tensor:
    """The projection of consecutive features of a leaf with this memory."""
    total: Any = None
    for piece in run:
        sketched = ops.call(ops.project, piece.of(memory), piece.columns, -1, summing)
        total = sketched if total is None else total + sketched
    return total  # type: ignore[no-any-return]


def _project_leaf(columns: SketchSpec, leaf: Tensor, batched: bool, summing: torch.dtype) -> Any:
    """The projection of a leaf that is sparse, or for which torch must see the call."""
    if sparse.is_sparse(leaf):
        rows = sparse.flattened(leaf, batched)
        sketched = sparse.project(columns, rows._replace(values=rows.values.to(summing)))
        return sketched if batched else sketched[0]
    total: Any = 0
    start = 0
    for vectors in flat(leaf, int(batched)):
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


def _prepared(spec: SketchSpec, leaves: list[Any], out: Any, batched: bool) -> tuple[Plan, list[Any]]:
    """Validate the arguments; return the plan and the memory of each leaf."""
    plan, memory = make_plan(spec, leaves, batched)
    if out is not None:
        like = torch.empty((*plan.shape[:-1], 0), dtype=plan.dtype, device=plan.device)
        check_out("project_tree", out, like, spec.n_components, False)
        if torch.is_grad_enabled() and any(t.requires_grad for t in (*leaves, out)):
            raise RuntimeError(
                "out= does not support automatic differentiation, but one of the tensors requires grad: omit out=, "
                "detach, or call under torch.no_grad()"
            )
    return plan, memory
