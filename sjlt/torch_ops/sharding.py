"""DTensors: the part of a sharded tensor that a rank holds, and sums over the ranks of its mesh.

No rank gathers data. Partial sketches, which are as small as the result, are gathered and added in rank order, so that
results are bitwise equal on all ranks and in all runs.
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

GATHERED_BYTES = 8 << 20  # bytes of partial sums gathered at a time
LONG_RUN = 1 << 16  # consecutive features from which a call of their own is worthwhile
FILLED = 1 << 21  # maximum number of elements, zeros included, of a part whose gap is filled
MAX_CHECKSUMS = 8  # checksums of a call that ranks compare


def is_sharded(x: Any) -> bool:
    """Whether x is a DTensor. Does not import torch.distributed.tensor: if x is one, the caller has."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def check_sharded(x: Any, batched: bool) -> None:
    """Raise an error unless the shards of the DTensor x can be projected in place."""
    check_tensor(x, "a sketch")
    if torch.is_grad_enabled() and x.requires_grad:
        raise RuntimeError(
            "the projection of DTensors does not support automatic differentiation: detach them, or call under "
            "torch.no_grad()"
        )
    for placement in x.placements:
        if placement.is_partial() and placement.reduce_op != "sum":
            raise ValueError(f"a partial DTensor must have reduce_op 'sum', got {placement}: redistribute it")
        if batched and placement.is_shard(0):
            raise ValueError("batched=True does not support DTensors that are sharded along the leading dimension")


@contextmanager
def agreement(tensors: list[Any], call: dict[str, Any]) -> Iterator[None]:
    """A context in which to validate a call on DTensors; at its end, either all ranks continue or all raise an error.

    If a rank raises an error inside, it tells the others, which would otherwise wait for it in a sum. At the end, ranks
    compare checksums of `call`, a dict of everything that must be equal: sums of different sketches are meaningless.
    """
    try:
        yield
    except Exception:
        _compare(tensors, {})
        raise
    meshes = list(dict.fromkeys(t.device_mesh for t in tensors))
    described = {
        **call,
        "shapes": [tuple(t.shape) for t in tensors],
        "placements": [t.placements for t in tensors],
        "meshes": [(m.mesh.tolist(), m.mesh_dim_names, m.device_type) for m in meshes],
    }
    differing = _compare(tensors, described)
    if differing is None:
        raise ValueError("another rank rejected its arguments: see its error")
    if differing:
        raise ValueError(
            f"ranks disagree in {', '.join(differing)}: every rank must pass the same sketch (n_features, "
            "n_components, nnz, seed), tensors of the same shapes, placements and meshes, and the same options"
        )


def _compare(tensors: list[Any], call: dict[str, Any]) -> list[str] | None:
    """The keys of `call` whose values differ between ranks; None if a rank raised an error and passes an empty dict.

    If a mesh contains all ranks, they communicate in the default group, so that differing meshes are detected, too.
    Otherwise they communicate in the groups of each mesh.
    """
    checksums = [len(call) > 0, *(_checksum(value) for value in call.values())]
    checksums += [0] * (1 + MAX_CHECKSUMS - len(checksums))
    mine = torch.tensor(checksums, dtype=torch.int64, device=tensors[0].device)
    meshes = dict.fromkeys(t.device_mesh for t in tensors)
    groups: list[Any] = [torch.distributed.group.WORLD]
    if all(mesh.size() < torch.distributed.get_world_size() for mesh in meshes):
        groups = [mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim)]
    differing: set[str] = set()
    rejected = False
    for group in groups:
        gathered = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(gathered, mine, group=group)
        table = torch.stack(gathered).tolist()
        rejected = rejected or not all(row[0] for row in table)
        differing |= {name for i, name in enumerate(call, 1) if len({row[i] for row in table}) > 1}
    return None if rejected else sorted(differing)


def _checksum(value: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "little", signed=True)


# ------------------------------------------------------------------------------------- parts


def _box(x: Any) -> tuple[list[int], list[int]]:
    """(offsets, lengths) of the part of x that this rank holds.

    torch splits an axis into chunks of equal length, except that the last ones may be shorter or empty.
    """
    offsets, lengths = [0] * x.ndim, list(x.shape)

    def split(axis: int, mesh_dim: int) -> None:
        chunk = -(-lengths[axis] // x.device_mesh.size(mesh_dim))
        start = min(x.device_mesh.get_local_rank(mesh_dim) * chunk, lengths[axis])
        offsets[axis] += start
        lengths[axis] = min(chunk, lengths[axis] - start)

    shards = [(mesh_dim, p) for mesh_dim, p in enumerate(x.placements) if p.is_shard() or hasattr(p, "split_factor")]
    # FSDP combined with tensor parallelism: of two shards along one axis, the strided one splits the other's chunks.
    for mesh_dim, placement in sorted(shards, key=lambda shard: hasattr(shard[1], "split_factor")):
        split(placement.dim, mesh_dim)
    if tuple(lengths) != tuple(x.to_local().shape):
        raise ValueError(
            f"this rank holds {tuple(x.to_local().shape)} of a DTensor of shape {tuple(x.shape)} with placements "
            f"{x.placements}, where {tuple(lengths)} was expected: redistribute it"
        )
    return offsets, lengths


def runs(columns: SketchSpec, x: Any, batched: bool) -> Iterator[tuple[SketchSpec, Tensor]]:
    """This rank's share of x as few (columns of the sketch, tensor) pairs, each with consecutive features.

    Ranks that hold replicas divide the work among themselves.
    """
    skip = int(batched)
    for start, part, gap in _parts(x, x.to_local(), batched):
        begin, end = _share(x, part, batched)
        if end > begin and part.numel():
            run = part.narrow(skip, begin, end - begin)
            if gap is not None:
                full = run.new_zeros(gap.full_shape(run))
                gap.inside(full, run).copy_(run)
                run = full
            first = start + begin * prod(run.shape[skip + 1 :])
            yield columns.columns(first, first + prod(run.shape[skip:])), run


class _Gap(NamedTuple):
    """A rank holds only a range of an axis, from `offset` on; the full axis has length `length`."""

    axis: int
    offset: int
    length: int

    def full_shape(self, part: Tensor) -> tuple[int, ...]:
        return (*part.shape[: self.axis], self.length, *part.shape[self.axis + 1 :])

    def inside(self, full: Tensor, part: Tensor) -> Tensor:
        """The view of a tensor of the full shape that corresponds to `part`."""
        return full.narrow(self.axis, self.offset, part.shape[self.axis])


def _parts(x: Any, local: Tensor, batched: bool) -> Iterator[tuple[int, Tensor, _Gap | None]]:
    """Split what a rank holds of x into parts: (first feature, view of `local`, gap or None).

    The features of a part are consecutive, or with a gap, become so once it is filled with zeros. Gaps occur where an
    inner axis is sharded, as in tensor parallelism: a few parts with zeros are faster than thousands of short runs.
    """
    skip = int(batched)
    offsets, lengths = _box(x)
    offsets, lengths, shape = offsets[skip:], lengths[skip:], list(x.shape[skip:])
    if not shape:
        yield 0, local.unsqueeze(-1), None
        return
    cut = max((axis for axis, n in enumerate(shape) if lengths[axis] != n), default=0)
    steps = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    rows_per_part = 0
    if cut and prod(lengths[cut:]) < LONG_RUN:
        rows_per_part = max(1, FILLED // (prod(local.shape[:skip]) * prod(shape[cut:]) or 1))
    outer = cut - 1 if rows_per_part else cut
    every: tuple[Any, ...] = (slice(None),) * skip
    for index in product(*(range(n) for n in lengths[:outer])):
        start = sum((o + i) * step for o, i, step in zip(offsets, index, steps, strict=False))
        start += offsets[outer] * steps[outer]
        if not rows_per_part:
            yield start, local[every + index], None
            continue
        for i in range(0, lengths[outer], rows_per_part):
            rows = slice(i, i + rows_per_part)
            yield start + i * steps[outer], local[(*every, *index, rows)], _Gap(skip + 1, offsets[cut], shape[cut])


def _share(x: Any, part: Tensor, batched: bool) -> tuple[int, int]:
    """The range along the first axis of a part that this rank projects; other ranks with replicas project the rest."""
    begin, end = 0, part.shape[int(batched)]
    for mesh_dim, placement in enumerate(x.placements):
        if placement.is_replicate():
            parts, rank = x.device_mesh.size(mesh_dim), x.device_mesh.get_local_rank(mesh_dim)
            begin, end = begin + (end - begin) * rank // parts, begin + (end - begin) * (rank + 1) // parts
    return begin, end


def adjoint(columns: SketchSpec, y: Tensor, like: Any, batched: bool) -> Any:
    """y S as a DTensor like `like`. Each rank computes the part that it holds; partial placements become replicated."""
    from torch.distributed.tensor import DTensor, Replicate

    local = like.to_local()
    result = local.new_empty(local.shape)
    for start, part, gap in _parts(like, result, batched):
        if part.numel():
            shape = tuple(part.shape) if gap is None else gap.full_shape(part)
            part_columns = columns.columns(start, start + prod(shape[int(batched) :]))
            full = ops.call(ops.project_adjoint, y, part_columns, -1, like.dtype).view(shape)
            part.copy_(full if gap is None else gap.inside(full, part))
    placements = [Replicate() if p.is_partial() else p for p in like.placements]
    return DTensor.from_local(
        result, like.device_mesh, placements, run_check=False, shape=like.shape, stride=_contiguous(like.shape)
    )


def _contiguous(shape: Any) -> tuple[int, ...]:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


# ------------------------------------------------------------------------------------- sums


def _gathered(mesh: Any, dim: int, x: Tensor) -> Tensor:
    """The tensors x of all ranks along a dimension of a mesh, stacked in rank order."""
    parts = [torch.empty_like(x) for _ in range(mesh.size(dim))]
    torch.distributed.all_gather(parts, x, group=mesh.get_group(dim))
    return torch.stack(parts)


def sum_over(mesh: Any, dims: Iterable[int], x: Tensor) -> Tensor:
    """The sum of the tensors x of all ranks along these dimensions of a mesh, bitwise equal on all ranks."""
    x = x.contiguous()
    for dim in dims:
        flat = x.view(-1)
        step = max(1, GATHERED_BYTES // (flat.itemsize * mesh.size(dim)))
        sums = torch.empty_like(flat)
        for i in range(0, len(flat), step):
            parts = _gathered(mesh, dim, flat[i : i + step])
            total = parts[0]
            for part in parts[1:]:  # in rank order, which torch.sum does not guarantee
                total = total + part
            sums[i : i + step] = total
        x = sums.view(x.shape)
    return x


# ------------------------------------------------------------------------------------- matrices


def project(spec: SketchSpec, x: Any, out: Any, accumulate: bool) -> Any:
    """x S' along the last axis of a DTensor.

    The result is sharded like x along the other axes, and replicated over mesh dimensions that shard the last axis.
    """
    from torch.distributed.tensor import DTensor, Replicate

    if out is not None or accumulate:
        raise TypeError("out= and accumulate= are not supported for DTensors")
    with agreement([x], {"the sketch": spec, "the dtype": x.dtype}):
        check_sharded(x, False)
        check_width("project", x, spec.n_features, "n_features", spec.n_components)
    last = x.ndim - 1
    offsets, lengths = _box(x)
    columns = spec.columns(offsets[last], offsets[last] + lengths[last])
    summed_dims = [dim for dim, p in enumerate(x.placements) if getattr(p, "dim", None) == last]
    summing = torch.promote_types(x.dtype, torch.float32) if summed_dims else None
    result = ops.call(ops.project, x.to_local(), columns, -1, summing)
    if summed_dims:
        result = sum_over(x.device_mesh, summed_dims, result).to(x.dtype)
    placements = [Replicate() if dim in summed_dims else p for dim, p in enumerate(x.placements)]
    shape = torch.Size((*x.shape[:-1], spec.n_components))
    return DTensor.from_local(
        result, x.device_mesh, placements, run_check=False, shape=shape, stride=_contiguous(shape)
    )
