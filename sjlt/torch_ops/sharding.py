"""DTensors: the part of a sharded tensor that a rank holds, and sums over the ranks of its mesh.

No rank gathers data. Partial sketches, which are as small as the result, are gathered and added in the order of ranks,
so that every rank and every run has the same bits.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..inputs.containers import check_width
from ..laws.spec import SketchSpec
from . import projection as ops
from .checks import check_tensor

GATHERED_BYTES = 8 << 20  # of partial sums gathered at a time
LONG_RUN = 1 << 16  # consecutive features that are worth a call of their own
FILLED = 1 << 21  # numbers, zeros included, of a part whose gap is filled
MAX_PARTS = 8  # of a call that ranks compare


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


@contextmanager
def agreement(tensors: list[Any], call: dict[str, Any]) -> Iterator[None]:
    """A context for the checks of a call on `tensors`, DTensors, after which all ranks go on or all raise.

    A rank that raises inside tells the others, which would wait for it in a sum. Then the ranks exchange checksums of
    `call`, what must be equal, by name: with another sketch, such as another seed, they would add what has no meaning.
    """
    try:
        yield
    except Exception:
        _exchange(tensors, {})
        raise
    meshes = list(dict.fromkeys(t.device_mesh for t in tensors))
    parts = {
        **call,
        "shapes": [tuple(t.shape) for t in tensors],
        "placements": [t.placements for t in tensors],
        "meshes": [(m.mesh.tolist(), m.mesh_dim_names, m.device_type) for m in meshes],
    }
    differing = _exchange(tensors, parts)
    if differing is None:
        raise ValueError("another rank refused its arguments: its own error says why")
    if differing:
        raise ValueError(
            f"ranks disagree in {', '.join(differing)}: every rank must pass the same sketch (n_features, "
            "n_components, nnz, seed), tensors of the same shapes, placements and meshes, and the same options"
        )


def _exchange(tensors: list[Any], parts: dict[str, Any]) -> list[str] | None:
    """The names of the parts that differ between ranks; None if a rank passes no parts because it raised an error.

    Where a mesh holds all ranks, they meet in the group of all, so that meshes of other shapes are noticed, too. Ranks
    of smaller meshes meet in the groups of each mesh.
    """
    checksums = [len(parts) > 0, *(_checksum(part) for part in parts.values())]
    checksums += [0] * (1 + MAX_PARTS - len(checksums))
    mine = torch.tensor(checksums, dtype=torch.int64, device=tensors[0].device)
    meshes = dict.fromkeys(t.device_mesh for t in tensors)
    groups: list[Any] = [torch.distributed.group.WORLD]
    if all(mesh.size() < torch.distributed.get_world_size() for mesh in meshes):
        groups = [mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim)]
    found: set[str] = set()
    refused = False
    for group in groups:
        gathered = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(gathered, mine, group=group)
        table = torch.stack(gathered).tolist()
        refused = refused or not all(row[0] for row in table)
        found |= {name for i, name in enumerate(parts, 1) if len({row[i] for row in table}) > 1}
    return None if refused else sorted(found)


def _checksum(part: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(part).encode()).digest()[:8], "little", signed=True)


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
    """This rank's share of the projection of x: (its columns of the sketch, numbers), few and with features in order.

    The ranks share a replicated tensor among them.
    """
    skip = int(batched)
    for start, part, gap in _parts(x, x.to_local(), batched):
        begin, end = _share(x, part, batched)
        if end > begin and part.numel():
            numbers = part.narrow(skip, begin, end - begin)
            if gap is not None:
                full = numbers.new_zeros(gap.full_shape(numbers))
                gap.inside(full, numbers).copy_(numbers)
                numbers = full
            first = start + begin * prod(numbers.shape[skip + 1 :])
            yield columns.columns(first, first + prod(numbers.shape[skip:])), numbers


class _Gap(NamedTuple):
    """The stretch of an axis, from `offset` on, that a rank holds where the whole axis has `length` places."""

    axis: int
    offset: int
    length: int

    def full_shape(self, part: Tensor) -> tuple[int, ...]:
        return (*part.shape[: self.axis], self.length, *part.shape[self.axis + 1 :])

    def inside(self, full: Tensor, part: Tensor) -> Tensor:
        """The place of `part` in a tensor of the full shape."""
        return full.narrow(self.axis, self.offset, part.shape[self.axis])


def _parts(x: Any, local: Tensor, batched: bool) -> Iterator[tuple[int, Tensor, _Gap | None]]:
    """(the feature at which it begins, a view of `local`, its gap) for each part of what a rank holds.

    The features of a part without a gap are consecutive. With one, they are consecutive once the gap is filled: where
    an inner axis is cut, as by tensor parallelism, thousands of short runs cost more than a few parts with zeros.
    """
    skip = int(batched)
    offsets, lengths = _box(x)
    offsets, lengths, shape = offsets[skip:], lengths[skip:], list(x.shape[skip:])
    if not shape:
        yield 0, local.unsqueeze(-1), None
        return
    cut = max((axis for axis, n in enumerate(shape) if lengths[axis] != n), default=0)
    steps = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    together = 0
    if cut and prod(lengths[cut:]) < LONG_RUN:
        together = max(1, FILLED // (prod(local.shape[:skip]) * prod(shape[cut:]) or 1))
    outer = cut - 1 if together else cut
    every: tuple[Any, ...] = (slice(None),) * skip
    for place in product(*(range(n) for n in lengths[:outer])):
        start = sum((o + i) * step for o, i, step in zip(offsets, place, steps, strict=False))
        start += offsets[outer] * steps[outer]
        if not together:
            yield start, local[every + place], None
            continue
        for i in range(0, lengths[outer], together):
            rows = slice(i, i + together)
            yield start + i * steps[outer], local[(*every, *place, rows)], _Gap(skip + 1, offsets[cut], shape[cut])


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
    for start, part, gap in _parts(like, result, batched):
        if part.numel():
            shape = tuple(part.shape) if gap is None else gap.full_shape(part)
            numbers = columns.columns(start, start + prod(shape[int(batched) :]))
            full = ops.call(ops.project_adjoint, y, numbers, -1, like.dtype).view(shape)
            part.copy_(full if gap is None else gap.inside(full, part))
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
    with agreement([x], {"the sketch": spec, "the dtype": x.dtype}):
        check_sharded(x, False)
        check_width("project", x, spec.n_features, "n_features", spec.n_components)
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
