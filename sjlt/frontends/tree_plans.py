"""Plans of `project_tree`: which part of the sketch multiplies which memory of each leaf.

A tree has hundreds of leaves that are small for a GPU, so host time dominates. Everything that depends only on the
sketch and on the layout of the tree is computed once and kept.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import reduce
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..torch_ops import compat, sharding, sparse
from ..torch_ops.checks import check_tensor

if TYPE_CHECKING:
    from ..laws.spec import SketchSpec

MAX_KEPT = 32  # plans; a plan with its key takes about 0.3 MB for 200 leaves

THE_SKETCH = "the sketch"  # as errors name it

_kept: dict[Hashable, Plan] = {}


class Piece(NamedTuple):
    """Consecutive features of a leaf as a view of its memory, and their columns of the sketch.

    Attributes
    ----------
    columns : SketchSpec
    shape, strides, offset
        The view; the offset is relative to the leaf's own. It has the shape `vectors` unless there is a gap.
    vectors : tuple
        The shape of the matrix or, without a batch, vector to project.
    gap : Gap or None
        Zeros between the elements of the view.
    """

    columns: SketchSpec
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    vectors: tuple[int, ...]
    gap: sharding.Gap | None

    def of(self, memory: Tensor) -> Tensor:
        """The data vectors in a leaf with this memory."""
        view = memory.as_strided(self.shape, self.strides, memory.storage_offset() + self.offset)
        return view if self.gap is None else self.gap.filled(view).view(self.vectors)


class Leaf(NamedTuple):
    """The projection of one leaf.

    Attributes
    ----------
    columns : SketchSpec
    runs : tuple of tuples of pieces, or None
        The sketches of the pieces of a run are added before those of the runs. None if the leaf itself must be
        projected: it is sparse, or torch must see the call.
    mesh : int or None
        Index in the plan's `meshes`.
    """

    columns: SketchSpec
    runs: tuple[tuple[Piece, ...], ...] | None
    mesh: int | None

    def with_seed(self, seed: int) -> Leaf:
        runs = self.runs
        if runs is not None:
            runs = tuple(
                tuple(piece._replace(columns=piece.columns._replace(seed=seed)) for piece in run) for run in runs
            )
        return Leaf(self.columns._replace(seed=seed), runs, self.mesh)


class Plan(NamedTuple):
    """The projection of a tree.

    Attributes
    ----------
    spec : SketchSpec
    leaves : tuple of Leaf
    dtype : torch.dtype
        To which the tensors' dtypes promote.
    device : torch.device
    shape : tuple
        The shape of the result.
    meshes : tuple
        The meshes of DTensors.
    claims : sharding.Claims or None
        What ranks compare before they project DTensors.
    """

    spec: SketchSpec
    leaves: tuple[Leaf, ...]
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    meshes: tuple[Any, ...]
    claims: sharding.Claims | None

    def with_seed(self, seed: int) -> Plan:
        """The plan for a sketch that differs in its seed, which is all that changes."""
        spec, claims = self.spec._replace(seed=seed), self.claims
        if claims is not None:
            claims = claims.replaced(THE_SKETCH, spec)
        return self._replace(spec=spec, leaves=tuple(leaf.with_seed(seed) for leaf in self.leaves), claims=claims)


def make_plan(spec: SketchSpec, leaves: list[Any], batched: bool) -> tuple[Plan, list[Any]]:
    """Validate the leaves; return the plan and the memory of each leaf, which for a DTensor is its local tensor."""
    memory = sharding.held_by_rank(leaves) if any(map(sharding.is_sharded, leaves)) else leaves
    key = _key(leaves, memory, batched)
    if key is None:
        return _new_plan(spec, leaves, batched, of_memory=False), memory
    plan = _kept.get((spec, *key))
    if plan is None:
        without_seed = spec._replace(seed=0)
        plan = _kept.get((without_seed, *key))
        if plan is None:
            plan = _keep((without_seed, *key), _new_plan(without_seed, leaves, batched, of_memory=True))
        if spec != without_seed:
            plan = _keep((spec, *key), plan.with_seed(spec.seed))
    return plan, memory


def _keep(key: Hashable, plan: Plan) -> Plan:
    if len(_kept) >= MAX_KEPT:
        _kept.clear()
    _kept[key] = plan
    return plan


def _key(leaves: list[Any], memory: list[Any], batched: bool) -> tuple[Hashable, ...] | None:
    """Everything that a plan depends on, apart from the sketch; None if torch must see the leaves themselves."""
    if not compat.is_eager():
        return None
    key: list[Hashable] = [batched]
    grad_enabled, mesh = torch.is_grad_enabled(), None
    for leaf, held in zip(leaves, memory, strict=True):
        if not (isinstance(held, Tensor) and compat.is_ordinary(held) and held.layout is torch.strided):
            return None
        if held.is_nested or (grad_enabled and leaf.requires_grad):
            return None
        key += held.shape, held.stride(), held.dtype, held.device
        if held is not leaf:
            if leaf.device_mesh is not mesh:
                mesh = leaf.device_mesh
                key += mesh, sharding.coordinate(mesh)
            key += leaf.shape, leaf.placements
    return tuple(key)


def _new_plan(spec: SketchSpec, leaves: list[Any], batched: bool, of_memory: bool) -> Plan:
    """A plan that projects views of the leaves' memory or, unless `of_memory`, of that of DTensors only."""
    check_tree(spec, leaves, batched)
    sharded = [leaf for leaf in leaves if sharding.is_sharded(leaf)]
    meshes = list(dict.fromkeys(leaf.device_mesh for leaf in sharded))
    planned, start = [], 0
    for leaf in leaves:
        columns = spec.columns(start, start + prod(leaf.shape[batched:]))
        start += columns.n_features
        mesh = meshes.index(leaf.device_mesh) if sharding.is_sharded(leaf) else None
        runs = None
        if mesh is not None:
            runs = tuple(_pieces(*run, batched) for run in sharding.runs(columns, leaf, batched))
        elif of_memory:
            view = torch.empty_strided(leaf.shape, leaf.stride(), device="meta")
            runs = (_pieces(columns, view, None, batched),)
        planned.append(Leaf(columns, runs, mesh))
    claims = None
    if sharded:
        claims = sharding.claims(sharded, claimed(spec, leaves, batched))
    dtype = reduce(torch.promote_types, (leaf.dtype for leaf in leaves))
    shape = (*leaves[0].shape[:batched], spec.n_components)
    return Plan(spec, tuple(planned), dtype, leaves[0].device, shape, tuple(meshes), claims)


def claimed(spec: SketchSpec, leaves: list[Any], batched: bool) -> dict[str, Any]:
    """The values that must be equal on all ranks, besides the layouts of DTensors."""
    described = [(leaf.shape, leaf.dtype) for leaf in leaves]
    return {THE_SKETCH: spec, "batched": batched, "the tree": described}


def _pieces(columns: SketchSpec, view: Tensor, gap: sharding.Gap | None, batched: bool) -> tuple[Piece, ...]:
    """The pieces of a view of a leaf's memory, which is a meta tensor here."""
    if gap is not None:
        vectors = (*view.shape[:batched], columns.n_features)
        return (Piece(columns, tuple(view.shape), view.stride(), int(view.storage_offset()), vectors, gap),)
    pieces, start = [], 0
    for part in flat(view, int(batched)):
        stop, shape = start + part.shape[-1], tuple(part.shape)
        place = shape, part.stride(), int(part.storage_offset())
        pieces.append(Piece(columns.columns(start, stop), *place, shape, None))
        start = stop
    return tuple(pieces)


def flat(leaf: Tensor, batch_ndim: int) -> Iterator[Tensor]:
    """The elements of the leaf in logical order along the last axis of as few views as its strides allow."""
    shape, strides = leaf.shape[batch_ndim:], leaf.stride()[batch_ndim:]
    axes = [axis for axis, n in enumerate(shape) if n != 1]
    evenly = all(strides[a] == shape[b] * strides[b] for a, b in pairwise(axes))
    if evenly or leaf.numel() == 0:
        yield leaf.reshape(*leaf.shape[:batch_ndim], prod(shape))
    else:
        for part in leaf.unbind(batch_ndim + axes[0]):
            yield from flat(part, batch_ndim)


def check_tree(spec: SketchSpec, leaves: list[Any], batched: bool) -> None:
    """Raise an error unless a sketch can project these tensors."""
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
