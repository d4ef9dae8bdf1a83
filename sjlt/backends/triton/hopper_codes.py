"""Launches of `project_codes_hopper`, of the encoding before it and, if sums are split, of the reduction after it.

Import this module only if `device.GLUON` is true.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from ...kernels.config.chunk_codes import encoding
from ...kernels.config.hopper import WARPGROUP_VECTORS
from ...kernels.config.hopper_codes import HopperCodes
from ...kernels.config.hopper_loaders import TMA, KernelChoice, slot_bytes
from ...kernels.config.product import kernel_geometry
from ...kernels.hopper.project_codes import project_codes_hopper
from ...kernels.nvidia.shared_memory import LIBRARIES
from ...kernels.portable.chunk_codes import encode_chunks
from ...laws import exact as law
from . import device
from .descriptors import Blocks
from .device import DTYPE_NAMES
from .launcher import Kind, Launch, kind
from .partial_sums import reduction, sums_of

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec

ALIGN = 512  # bytes, as for tensors of torch's allocator; every row of 128 codes is then one cache line


def prepare(chosen: HopperCodes, spec: SketchSpec, x: Tensor, out: Tensor, accumulate: bool) -> ProjectCodes:
    """The `Call` that writes X Sᵀ to `out`, or adds it if `accumulate`, for any k and strides."""
    splits, scale = chosen.splits, kernel_geometry(spec.n_components, spec.nnz).scale
    n_tiles = _count_tiles(spec)
    reduce, target = None, Target(out.dtype, kind(out), (0, *out.stride()))
    if splits > 1:
        sums = sums_of(splits, x, out)
        reduce = reduction(scale, (splits, *out.shape), sums.strides, sums.dtype, out, accumulate)
        scale, accumulate, target = 1.0, False, Target(sums.dtype, (sums.dtype, 0), sums.strides)
    memory = _memory(chosen, n_tiles, 0 if splits == 1 else splits * out.numel())
    project = _project(chosen, spec, x, target, scale, accumulate)
    return ProjectCodes(memory, chosen.prefetch, _encode(chosen, spec, x), project, reduce)


class Memory(NamedTuple):
    """The layout of the single allocation of a call. (An allocation takes about as long as a launch.)

    Partial sums come first, then codes, columns and counts, each at a multiple of ALIGN bytes.

    Attributes
    ----------
    size : int
        Number of fp32 elements; the partial sums are at the beginning of this fp32 tensor.
    codes, columns, counts : int
        Offsets in bytes.
    """

    size: int
    codes: int
    columns: int
    counts: int

    def views(self, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of codes, columns and counts with their dtypes."""
        data = memory.view(torch.uint8)
        columns, counts = data[self.columns : self.counts], data[self.counts :]
        return data[self.codes : self.columns], columns.view(torch.int32), counts.view(torch.int32)


def _memory(chosen: HopperCodes, n_tiles: int, sums: int) -> Memory:
    """The layout of `sums` partial sums and of all codes."""
    lists = chosen.splits * n_tiles
    blocks, ends, end = lists * chosen.capacity, [], 0
    for size in (4 * sums, law.TILE_ROWS * blocks, 4 * blocks, 4 * lists):
        end += -(-size // ALIGN) * ALIGN
        ends.append(end)
    return Memory(end // 4, *ends[:-1])


@dataclass(frozen=True, slots=True, eq=False)
class ProjectCodes:
    """The `Call` (spec, x, out) of a product.

    Attributes
    ----------
    memory : Memory
        The layout of the memory that a call allocates.
    prefetch : bool
        Whether the data is prefetched.
    encode : Launch
        Of (codes, columns, counts) and the seed.
    project : Launch
        Of (x, target, codes, columns, counts) and the address of the data to prefetch, or 0.
    reduce : Launch or None
        Of (partial sums, out); None if the target is `out`.
    """

    memory: Memory
    prefetch: bool
    encode: Launch
    project: Launch
    reduce: Launch | None

    def __call__(self, spec: SketchSpec, x: Tensor, out: Tensor) -> None:
        size, codes, columns, counts = self.memory
        memory = x.new_empty(size, dtype=torch.float32)
        target = out if self.reduce is None else memory
        start, data = memory.data_ptr(), x.data_ptr()
        addresses = start + codes, start + columns, start + counts
        prefetched = data if self.prefetch else 0
        if not self.encode.start(addresses, spec.seed):
            self.encode.search(self.memory.views(memory), spec.seed)
        if not self.project.start((data, target.data_ptr(), *addresses), prefetched):
            self.project.search((x, target, *self.memory.views(memory)), prefetched)
        if self.reduce is not None:
            self.reduce((memory, out))


class Target(NamedTuple):
    """The tensor that the kernel writes: the result, or partial sums.

    Attributes
    ----------
    dtype : torch.dtype
    kind : Kind
        As returned by `launcher.kind`.
    strides : tuple of three ints
        Strides along splits, vectors and components.
    """

    dtype: torch.dtype
    kind: Kind
    strides: tuple[int, ...]


def _encode(chosen: HopperCodes, spec: SketchSpec, x: Tensor) -> Launch:
    """The launch of (codes, columns, counts) and the seed that encodes the columns of the sketch."""
    part, offset, d = spec.one_stack(), spec.feature_offset, x.shape[1]
    k, nnz = part.n_components, part.nnz
    g = law.geometry(k, nnz, 0)
    log_width = g.log_group + g.log_chunk
    first_group = offset >> log_width
    groups = ((offset + d - 1) >> log_width) + 1 - first_group
    sketch = (offset, d, k, nnz, g.n_tiles, g.log_group, g.log_chunk, chosen.kernel.log_block)
    n_tiles = _count_tiles(spec)
    sub_blocks, per_program = encoding(groups * n_tiles, nnz)
    after = (*sketch, first_group, groups, chosen.groups_per_split, per_program, chosen.capacity)
    grid = (-(-chosen.groups_per_split // per_program), n_tiles, chosen.splits)
    options = {"SUB_BLOCKS": sub_blocks, "PROGRAMMATIC_LAUNCH": True, "num_warps": 4}
    return Launch(encode_chunks, grid, x.get_device(), (), after, sub_blocks, lambda: options)


def _count_tiles(spec: SketchSpec) -> int:
    """The number of tiles of all stacks."""
    return spec.stacks * law.count_tiles(spec.one_stack().n_components)


def _project(
    chosen: HopperCodes, spec: SketchSpec, x: Tensor, target: Target, scale: float, accumulate: bool
) -> Launch:
    """The launch of the kernel."""
    kernel, (n, d), k = chosen.kernel, x.shape, spec.n_components
    n_tiles, dtype = _count_tiles(spec), x.dtype

    def constants() -> dict[str, Any]:
        return {
            "DTYPE": getattr(gl, DTYPE_NAMES[dtype]),
            "CHOSEN": kernel,
            "ACCUMULATE": accumulate,
            "SHARED_BYTES": kernel.slots * slot_bytes(kernel),
            "num_warps": 4,
            "extern_libs": LIBRARIES,
            "launch_pdl": True,
        }

    sizes = (n, d, k, chosen.products, chosen.splits, n_tiles, chosen.capacity)
    before = (*sizes, *x.stride(), *target.strides, scale, chosen.columns_per_split)
    key = (kernel, accumulate, kind(x), target.kind)
    programs = min(chosen.products, device.describe(x.device).multiprocessors)
    x_blocks = _x_blocks(kernel, x) if kernel.loader == TMA else None
    blocks = _target_blocks(kernel, target, n, k // n_tiles, chosen.splits * n_tiles) if kernel.tma_store else None
    grid, both = (programs, 1, 1), (x_blocks, blocks)
    return Launch(project_codes_hopper, grid, x.get_device(), before, (), key, constants, both)


def _x_blocks(kernel: KernelChoice, x: Tensor) -> Blocks:
    """The descriptors of the data, in blocks with the columns of a panel."""
    columns = 1 << kernel.log_panel
    if kernel.vectors_contiguous:
        return Blocks(x.dtype, x.shape[::-1], x.stride()[::-1], (columns, law.TILE_ROWS // x.element_size()))
    return Blocks(x.dtype, x.shape, x.stride(), (WARPGROUP_VECTORS, columns))


def _target_blocks(kernel: KernelChoice, target: Target, n: int, rows: int, lists: int) -> Blocks:
    """The descriptors of the target, in which each of `lists` pairs of a split and a tile has `rows` rows."""
    _, stride_v, stride_r = target.strides
    if kernel.out_vectors_contiguous:
        block = (1, kernel.rows, WARPGROUP_VECTORS)
        return Blocks(target.dtype, (lists, rows, n), (rows * stride_r, stride_r, 1), block)
    return Blocks(target.dtype, (n, lists, rows), (stride_v, rows, 1), (WARPGROUP_VECTORS, 1, kernel.rows))
