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
    if not _is_inside(x.device_mesh):
        raise ValueError(f"this rank is outside {x.device_mesh}, the mesh of a DTensor: call on the mesh's ranks only")
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


def refuse_sharded(x: Any, product: str, instead: str) -> None:
    """Raise TypeError if x is a DTensor, for which `product` is not implemented."""
    if is_sharded(x):
        raise TypeError(f"{product} does not support DTensors: use {instead}")


def held_by_rank(tensors: list[Any]) -> list[Any]:
    """The same list with the local tensors of DTensors, without their derivatives."""
    with torch.no_grad():  # otherwise, to_local takes 6 us
        return [_waited(x.to_local()) if is_sharded(x) else x for x in tensors]


def _waited(held: Any) -> Any:
    """A local tensor, once it has been communicated."""
    return held if type(held) is Tensor or not hasattr(held, "wait") else held.wait()


def coordinate(mesh: Any) -> tuple[int, ...]:
    """The position of this rank in a mesh; empty if it is outside."""
    return tuple(mesh.get_coordinate() or ())


def _is_inside(mesh: Any) -> bool:
    return mesh.get_coordinate() is not None


# ------------------------------------------------------------------------------------- agreement


class Claims(NamedTuple):
    """Everything about a call on DTensors that must be equal on all ranks: sums of different sketches are meaningless.

    Attributes
    ----------
    names : tuple of str
        What each checksum is of.
    message : Tensor
        What a rank sends: 1, or 0 if it rejects its arguments, and MAX_CHECKSUMS checksums.
    meshes : tuple
    """

    names: tuple[str, ...]
    message: Tensor
    meshes: tuple[Any, ...]

    def replaced(self, name: str, value: Any) -> Claims:
        """The claims with another value of this name."""
        message = self.message.clone()
        message[1 + self.names.index(name)] = _checksum(value)
        return self._replace(message=message)


def claims(tensors: list[Any], call: dict[str, Any]) -> Claims:
    """The claims of a call on these DTensors: their layouts, and the values in `call`."""
    meshes = tuple(dict.fromkeys(t.device_mesh for t in tensors))
    described = {
        **call,
        "shapes": [tuple(t.shape) for t in tensors],
        "placements": [t.placements for t in tensors],
        "meshes": [(m.mesh.tolist(), m.mesh_dim_names, m.device_type) for m in meshes],
    }
    checksums = [1, *map(_checksum, described.values())]
    return Claims(tuple(described), _message(tensors, checksums), meshes)


@contextmanager
def refusal(tensors: list[Any]) -> Iterator[None]:
    """A context in which to validate a call on DTensors, if there are any. Every rank must call `agree` afterwards.

    If a rank raises an error inside, it tells the others, which would otherwise wait for it in a sum.
    """
    try:
        yield
    except Exception:
        if tensors:
            _differing(Claims((), _message(tensors, []), tuple(dict.fromkeys(t.device_mesh for t in tensors))))
        raise


def agree(mine: Claims) -> None:
    """Return if all ranks claim the same; otherwise raise ValueError on all of them."""
    differing = _differing(mine)
    if differing is None:
        raise ValueError("another rank rejected its arguments: see its error")
    if differing:
        raise ValueError(
            f"ranks disagree in {', '.join(differing)}: every rank must pass the same sketch (n_features, "
            "n_components, nnz, seed), tensors of the same shapes, placements and meshes, and the same options"
        )


def _differing(mine: Claims) -> list[str] | None:
    """The names of the claims that differ between ranks; None if a rank rejects its arguments.

    If a mesh contains all ranks, they communicate in the default group, so that differing meshes are detected, too.
    Otherwise they communicate in the groups of each mesh that contains them.
    """
    groups: list[Any] = [torch.distributed.group.WORLD]
    if all(mesh.size() < torch.distributed.get_world_size() for mesh in mine.meshes):
        groups = [mesh.get_group(dim) for mesh in filter(_is_inside, mine.meshes) for dim in range(mesh.ndim)]
    differing: set[str] = set()
    rejected = False
    for group in groups:
        table = _gathered(group, mine.message).tolist()
        rejected = rejected or not all(row[0] for row in table)
        differing |= {name for i, name in enumerate(mine.names, 1) if len({row[i] for row in table}) > 1}
    return None if rejected else sorted(differing)


def _message(tensors: list[Any], numbers: list[int]) -> Tensor:
    padded = numbers + [0] * (1 + MAX_CHECKSUMS - len(numbers))
    return torch.tensor(padded, dtype=torch.int64, device=tensors[0].device)


def _checksum(value: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "little", signed=True)


def _gathered(group: Any, x: Tensor) -> Tensor:
    """The contiguous tensors x of all ranks of a group, stacked in rank order."""
    size = torch.distributed.get_world_size(group)
    gathered = x.new_empty((size * x.shape[0], *x.shape[1:]))
    torch.distributed.all_gather_into_tensor(gathered, x, group=group)
    return gathered.view(size, *x.shape)


# ------------------------------------------------------------------------------------- parts


def _box(x: Any, held: Any) -> tuple[list[int], list[int]]:
    """(offsets, lengths) of the part of x that this rank holds, a tensor of shape `held`.

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
    if tuple(lengths) != tuple(held):
        raise ValueError(
            f"this rank holds {tuple(held)} of a DTensor of shape {tuple(x.shape)} with placements "
            f"{x.placements}, where {tuple(lengths)} was expected: redistribute it"
        )
    return offsets, lengths


def runs(columns: SketchSpec, x: Any, batched: bool) -> Iterator[tuple[SketchSpec, Tensor, Gap | None]]:
    """This rank's share of x as few (columns of the sketch, view of x's local tensor, gap or None).

    Each has consecutive features or, with a gap, is filled with zeros between them. The views are meta tensors, which
    show shape, strides and offset. Ranks that hold replicas divide the work among themselves.
    """
    skip = int(batched)
    (held,) = held_by_rank([x])
    held = torch.empty_strided(held.shape, held.stride(), device="meta")
    for start, part, gap in _parts(x, held, batched):
        begin, end = _share(x, part, batched)
        if end > begin and part.numel():
            view = part.narrow(skip, begin, end - begin)
            shape = tuple(view.shape) if gap is None else gap.full_shape(view)
            first = start + begin * prod(shape[skip + 1 :])
            yield columns.columns(first, first + prod(shape[skip:])), view, gap


class Gap(NamedTuple):
    """A rank holds only a range of an axis, from `offset` on; the full axis has length `length`."""

    axis: int
    offset: int
    length: int

    def full_shape(self, part: Tensor) -> tuple[int, ...]:
        return (*part.shape[: self.axis], self.length, *part.shape[self.axis + 1 :])

    def inside(self, full: Tensor, part: Tensor) -> Tensor:
        """The view of a tensor of the full shape that corresponds to `part`."""
        return full.narrow(self.axis, self.offset, part.shape[self.axis])

    def filled(self, part: Tensor) -> Tensor:
        """A tensor of the full shape with the elements of `part` and zeros."""
        full = part.new_zeros(self.full_shape(part))
        self.inside(full, part).copy_(part)
        return full


def _parts(x: Any, held: Tensor, batched: bool) -> Iterator[tuple[int, Tensor, Gap | None]]:
    """Split what a rank holds of x into parts: (first feature, view of `held`, gap or None).

    The features of a part are consecutive, or with a gap, become so once it is filled with zeros. Gaps occur where an
    inner axis is sharded, as in tensor parallelism: a few parts with zeros are faster than thousands of short runs.
    """
    skip = int(batched)
    offsets, lengths = _box(x, held.shape)
    offsets, lengths, shape = offsets[skip:], lengths[skip:], list(x.shape[skip:])
    if not shape:
        yield 0, held.unsqueeze(-1), None
        return
    cut = max((axis for axis, n in enumerate(shape) if lengths[axis] != n), default=0)
    steps = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    rows_per_part = 0
    if cut and prod(lengths[cut:]) < LONG_RUN:
        rows_per_part = max(1, FILLED // (prod(held.shape[:skip]) * prod(shape[cut:]) or 1))
    outer = cut - 1 if rows_per_part else cut
    every: tuple[Any, ...] = (slice(None),) * skip
    for index in product(*(range(n) for n in lengths[:outer])):
        start = sum((o + i) * step for o, i, step in zip(offsets, index, steps, strict=False))
        start += offsets[outer] * steps[outer]
        if not rows_per_part:
            yield start, held[every + index], None
            continue
        for i in range(0, lengths[outer], rows_per_part):
            rows = slice(i, i + rows_per_part)
            yield start + i * steps[outer], held[(*every, *index, rows)], Gap(skip + 1, offsets[cut], shape[cut])


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

    (held,) = held_by_rank([like])
    result, y = held.new_empty(held.shape), y.detach()
    for start, part, gap in _parts(like, result, batched):
        if not part.numel():
            continue
        shape = tuple(part.shape) if gap is None else gap.full_shape(part)
        part_columns = columns.columns(start, start + prod(shape[int(batched) :]))
        if gap is None and part.is_contiguous():  # without a second copy of the shard
            ops.call_into(ops.project_adjoint, y, part.view(*y.shape[:-1], -1), part_columns, False)
            continue
        full = ops.call(ops.project_adjoint, y, part_columns, -1, like.dtype).view(shape)
        part.copy_(full if gap is None else gap.inside(full, part))
    placements = [Replicate() if p.is_partial() else p for p in like.placements]
    return DTensor.from_local(
        result, like.device_mesh, placements, run_check=False, shape=like.shape, stride=_contiguous(like.shape)
    )


def _contiguous(shape: Any) -> tuple[int, ...]:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


# ------------------------------------------------------------------------------------- sums


def sum_over(mesh: Any, dims: Iterable[int], x: Tensor) -> Tensor:
    """The sum of the tensors x of all ranks along these dimensions of a mesh, bitwise equal on all ranks."""
    x = x.contiguous()
    for dim in dims if x.numel() else ():
        group, flat, sums = mesh.get_group(dim), x.view(-1), torch.empty_like(x)
        step = max(1, GATHERED_BYTES // (x.itemsize * mesh.size(dim)))
        for part, total in zip(flat.split(step), sums.view(-1).split(step), strict=True):
            first, *others = _gathered(group, part)
            total.copy_(first)
            for other in others:  # in rank order, which torch.sum does not guarantee
                total += other
        x = sums
    return x


# ------------------------------------------------------------------------------------- matrices


def project(spec: SketchSpec, x: Any, out: Any, accumulate: bool) -> Any:
    """x S' along the last axis of a DTensor.

    The result is sharded like x along the other axes, and replicated over mesh dimensions that shard the last axis.
    """
    from torch.distributed.tensor import DTensor, Replicate

    if out is not None or accumulate:
        raise TypeError("out= and accumulate= are not supported for DTensors")
    with refusal([x]):
        check_sharded(x, False)
        check_width("project", x, spec.n_features, "n_features", spec.n_components)
        (held,) = held_by_rank([x])
        offsets, lengths = _box(x, held.shape)
        mine = claims([x], {"the sketch": spec, "the dtype": x.dtype})
    agree(mine)
    last = x.ndim - 1
    columns = spec.columns(offsets[last], offsets[last] + lengths[last])
    summed_dims = [dim for dim, p in enumerate(x.placements) if getattr(p, "dim", None) == last]
    summing = torch.promote_types(x.dtype, torch.float32) if summed_dims else None
    result = ops.call(ops.project, held, columns, -1, summing)
    if summed_dims:
        result = sum_over(x.device_mesh, summed_dims, result).to(x.dtype)
    placements = [Replicate() if dim in summed_dims else p for dim, p in enumerate(x.placements)]
    shape = torch.Size((*x.shape[:-1], spec.n_components))
    return DTensor.from_local(
        result, x.device_mesh, placements, run_check=False, shape=shape, stride=_contiguous(shape)
    )
