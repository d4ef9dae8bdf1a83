"""DTensors: what a rank holds of a sharded tensor, and sums over the ranks of its mesh.

No rank gathers data. Partial sketches, which are as small as the result, are gathered and added in the order of ranks,
so that every rank and every run has the same bits.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..inputs.containers import check_width
from ..laws.spec import SketchSpec
from . import projection as ops
from .checks import check_tensor

GATHERED_BYTES = 16 << 20  # of partial sums gathered at a time


def is_sharded(x: Any) -> bool:
    """Whether x is a DTensor. A caller that holds one has imported torch.distributed.tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def check_sharded(x: Any, batched: bool) -> None:
    """x is a DTensor whose parts can be projected where they are."""
    check_tensor(x, "a sketch")
    if torch.is_grad_enabled() and x.requires_grad:
        raise RuntimeError(
            "the projection of DTensors does not support automatic differentiation: detach them, or call under "
            "torch.no_grad()"
        )
    for placement in x.placements:
        if placement.is_partial() and placement.reduce_op != "sum":
            raise ValueError(f"a DTensor that is partial must be so by sums, got {placement}: redistribute it")
        if batched and placement.is_shard(0):
            raise ValueError("batched=True needs the leading dimension on every rank, got a DTensor sharded along it")


def check_agreement(tensors: Iterable[Any], description: Any) -> None:
    """ValueError on every rank of the meshes unless all ranks make the same call.

    Ranks with another sketch (such as another seed), other shapes or other placements would add what has no meaning.
    """
    call = repr((description, [(tuple(t.shape), t.placements) for t in tensors]))
    checksum = int.from_bytes(hashlib.sha256(call.encode()).digest()[:8], "little", signed=True)
    for mesh in dict.fromkeys(t.device_mesh for t in tensors):
        for dim in range(mesh.ndim):
            device = next(t.device for t in tensors if t.device_mesh == mesh)
            sums = _gathered(mesh, dim, torch.tensor([checksum], device=device))
            if len({int(number) for number in sums.flatten().tolist()}) > 1:
                raise ValueError(
                    f"ranks disagree along dimension {dim} of {mesh}: every rank must pass the same sketch "
                    "(n_features, n_components, nnz, seed), tensors of the same shapes and placements, and the same "
                    "options"
                )


# ------------------------------------------------------------------------------------- parts


def _box(x: Any) -> tuple[list[int], list[int]]:
    """(offsets, lengths) of what this rank holds of x.

    torch splits an axis into chunks of equal length, the last ones shorter or empty.
    """
    offsets, lengths = [0] * x.ndim, list(x.shape)

    def split(axis: int, mesh_dim: int) -> None:
        chunk = -(-lengths[axis] // x.device_mesh.size(mesh_dim))
        start = min(x.device_mesh.get_local_rank(mesh_dim) * chunk, lengths[axis])
        offsets[axis] += start
        lengths[axis] = min(chunk, lengths[axis] - start)

    shards = [(mesh_dim, p) for mesh_dim, p in enumerate(x.placements) if p.is_shard() or hasattr(p, "split_factor")]
    # FSDP over tensor parallelism: of two shards along one axis, the strided one is inside the other.
    for mesh_dim, placement in sorted(shards, key=lambda shard: hasattr(shard[1], "split_factor")):
        split(placement.dim, mesh_dim)
    if tuple(lengths) != tuple(x.to_local().shape):
        raise ValueError(
            f"this rank holds {tuple(x.to_local().shape)} of a DTensor of shape {tuple(x.shape)} with placements "
            f"{x.placements}, where {tuple(lengths)} was expected: redistribute it"
        )
    return offsets, lengths


def runs(columns: SketchSpec, x: Any, batched: bool) -> Iterator[tuple[SketchSpec, Tensor]]:
    """This rank's share of the projection of x: (its columns of the sketch, numbers), few and contiguous.

    Of a replicated tensor, each rank takes its share.
    """
    local = x.to_local()
    for start, part in _parts(x, local, batched):
        begin, end = _share(x, part, batched)
        numbers = part.narrow(int(batched), begin, end - begin) if end > begin else None
        if numbers is not None and numbers.numel():
            first = start + begin * prod(part.shape[batched + 1 :])
            yield columns.columns(first, first + prod(numbers.shape[batched:])), numbers


def _parts(x: Any, local: Tensor, batched: bool) -> Iterator[tuple[int, Tensor]]:
    """(the feature at which it begins, a view of `local`) for each part whose features are consecutive."""
    skip = int(batched)
    offsets, lengths = _box(x)
    offsets, lengths, shape = offsets[skip:], lengths[skip:], list(x.shape[skip:])
    if not shape:
        yield 0, local.unsqueeze(-1)
        return
    cut = max((axis for axis, n in enumerate(shape) if lengths[axis] != n), default=0)
    steps = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    for place in product(*(range(n) for n in lengths[:cut])):
        where = [*(o + i for o, i in zip(offsets, place, strict=False)), offsets[cut]]
        start = sum(i * step for i, step in zip(where, steps, strict=False))
        yield start, local[(slice(None),) * skip + place]


def _share(x: Any, part: Tensor, batched: bool) -> tuple[int, int]:
    """The range along the first axis of a part that this rank takes, where others hold the same numbers."""
    begin, end = 0, part.shape[int(batched)]
    for mesh_dim, placement in enumerate(x.placements):
        if placement.is_replicate():
            parts, rank = x.device_mesh.size(mesh_dim), x.device_mesh.get_local_rank(mesh_dim)
            begin, end = begin + (end - begin) * rank // parts, begin + (end - begin) * (rank + 1) // parts
    return begin, end


def adjoint(columns: SketchSpec, y: Tensor, like: Any, batched: bool) -> Any:
    """y S as a DTensor like `like`, each rank making what it holds. Partial placements become replicas."""
    from torch.distributed.tensor import DTensor, Replicate

    local = like.to_local()
    result = local.new_empty(local.shape)
    for start, part in _parts(like, result, batched):
        numbers = columns.columns(start, start + prod(part.shape[batched:]))
        part.copy_(ops.call(ops.project_adjoint, y, numbers, -1, like.dtype).view(part.shape))
    placements = [Replicate() if p.is_partial() else p for p in like.placements]
    return DTensor.from_local(
        result, like.device_mesh, placements, run_check=False, shape=like.shape, stride=_contiguous(like.shape)
    )


def _contiguous(shape: Any) -> tuple[int, ...]:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


# ------------------------------------------------------------------------------------- sums


def _gathered(mesh: Any, dim: int, x: Tensor) -> Tensor:
    """The x of all ranks along a dimension of a mesh, stacked in the order of ranks."""
    parts = [torch.empty_like(x) for _ in range(mesh.size(dim))]
    torch.distributed.all_gather(parts, x, group=mesh.get_group(dim))
    return torch.stack(parts)


def sum_over(mesh: Any, dims: Iterable[int], x: Tensor) -> Tensor:
    """The sum of the x of all ranks along these dimensions of a mesh, with the same bits on every rank."""
    x = x.contiguous()
    for dim in dims:
        flat = x.view(-1)
        step = max(1, GATHERED_BYTES // (flat.itemsize * mesh.size(dim)))
        sums = torch.empty_like(flat)
        for i in range(0, len(flat), step):
            parts = _gathered(mesh, dim, flat[i : i + step])
            total = parts[0]
            for part in parts[1:]:  # in the order of ranks, which torch's own sum does not promise
                total = total + part
            sums[i : i + step] = total
        x = sums.view(x.shape)
    return x


# ------------------------------------------------------------------------------------- matrices


def project(spec: SketchSpec, x: Any, out: Any, accumulate: bool) -> Any:
    """x S' along the last axis of a DTensor: sharded as x along the other axes, replicated where x was cut along it."""
    from torch.distributed.tensor import DTensor, Replicate

    if out is not None or accumulate:
        raise TypeError("out= and accumulate= are not supported for DTensors")
    check_sharded(x, False)
    check_width("project", x, spec.n_features, "n_features")
    check_agreement([x], (spec, x.dtype))
    last = x.ndim - 1
    offsets, lengths = _box(x)
    columns = spec.columns(offsets[last], offsets[last] + lengths[last])
    cut = [dim for dim, p in enumerate(x.placements) if getattr(p, "dim", None) == last]
    summing = torch.promote_types(x.dtype, torch.float32) if cut else None
    result = ops.call(ops.project, x.to_local(), columns, -1, summing)
    if cut:
        result = sum_over(x.device_mesh, cut, result).to(x.dtype)
    placements = [Replicate() if dim in cut else p for dim, p in enumerate(x.placements)]
    shape = torch.Size((*x.shape[:-1], spec.n_components))
    return DTensor.from_local(
        result, x.device_mesh, placements, run_check=False, shape=shape, stride=_contiguous(shape)
    )
