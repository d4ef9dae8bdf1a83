"""Launches of kernels that read codes, of the encoding before them, and of the reduction of partial sums after them.

Import this module only if `device.GLUON` is true.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from ...kernels.ampere.project_codes import project_codes_ampere
from ...kernels.config.ampere_kernel import AmpereKernel
from ...kernels.config.chunk_codes import MIN_ENCODERS, encoding, shared_bytes
from ...kernels.config.codes import Codes
from ...kernels.config.hopper import WARPGROUP_VECTORS
from ...kernels.config.hopper_loaders import ROW_BYTES, TMA, KernelChoice, slot_bytes
from ...kernels.config.product import kernel_geometry
from ...kernels.hopper.project_codes import project_codes_hopper
from ...kernels.nvidia.encode_chunks import encode_chunks
from ...kernels.nvidia.shared_memory import LIBRARIES
from ...laws import exact as law
from . import device
from .descriptors import Blocks
from .device import DTYPE_NAMES
from .launcher import Kind, Launch, kind
from .partial_sums import Sums, reduction, sums_of

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec

ALIGN = 512  # bytes, as for tensors of torch's allocator; the codes of 128 rows are then one cache line


def prepare(chosen: Codes, spec: SketchSpec, x: Tensor, out: Tensor, accumulate: bool) -> ProjectCodes:
    """The `Call` that writes X Sᵀ to `out`, or adds it if `accumulate`, for any k and strides."""
    splits, scale = chosen.splits, kernel_geometry(spec.n_components, spec.nnz).scale
    n_tiles, parts = _count_tiles(spec), list(_parts(chosen, spec, x.shape[1]))
    target, elements = Target(out.dtype, kind(out), (0, *out.stride())), 0
    reductions: Sequence[Reduction | None] = [None]
    if splits > 1:
        reductions, sums = _reductions(parts, scale, x, out, accumulate)
        scale, accumulate, target = 1.0, False, Target(sums.dtype, (sums.dtype, 0), sums.strides)
        elements = math.prod(sums.shape)
    elif chosen.sharers > 1:
        reductions, elements = _reduction_of_shares(chosen, n_tiles, scale, x, out, accumulate)
    passes = []
    for part, reduce in zip(parts, reductions, strict=True):
        project = _project(chosen, part, spec, x, target, scale, accumulate)
        passes.append(Pass(part.begin * x.stride(1), _encode(chosen, part, spec, x), project, reduce))
    return ProjectCodes(_memory(chosen, n_tiles, elements), chosen.prefetch, splits > 1, tuple(passes))


class Part(NamedTuple):
    """The columns of a pass.

    Attributes
    ----------
    begin, end : int
        Columns of the data.
    first_group, groups : int
        Groups of chunks of the sketch.
    splits : int
    """

    begin: int
    end: int
    first_group: int
    groups: int
    splits: int


def _parts(chosen: Codes, spec: SketchSpec, d: int) -> Iterator[Part]:
    """The parts of the d columns that codes are written for in turn. The first may have fewer splits than others."""
    part, offset = spec.one_stack(), spec.feature_offset
    g = law.geometry(part.n_components, part.nnz, 0)
    log_width = g.log_group + g.log_chunk
    first, end = offset >> log_width, ((offset + d - 1) >> log_width) + 1
    split, per_pass = 0, chosen.splits_per_pass
    while split < chosen.splits:
        splits = (chosen.splits - split - 1) % per_pass + 1
        begin = first + split * chosen.groups_per_split
        groups = min(splits * chosen.groups_per_split, end - begin)
        columns = (max(0, (begin << log_width) - offset), min(d, ((begin + groups) << log_width) - offset))
        yield Part(*columns, begin, groups, splits)
        split += splits


class Reduction(NamedTuple):
    """The reduction of the partial sums of a pass.

    Attributes
    ----------
    launch : Launch
        Of (partial sums, target).
    final : bool
        Whether the target belongs to the result of the product, not to the memory of partial sums, where the sums of
        this pass and of those before it are kept.
    begin : int
        Where the target begins in the result or in that memory, in elements.
    """

    launch: Launch
    final: bool
    begin: int


def _reductions(
    parts: list[Part], scale: float, x: Tensor, out: Tensor, accumulate: bool
) -> tuple[list[Reduction], Sums]:
    """(reductions of each pass, layout of partial sums). Those of earlier passes lie after them."""
    splits, several = parts[-1].splits, len(parts) > 1
    sums = sums_of(splits + several, x, out)
    total = splits * sums.strides[0]
    found: list[Reduction] = []
    if several:
        # (The tensor is not used: only its dtype, strides and alignment matter.)
        target = x.new_empty(math.prod(sums.shape), dtype=sums.dtype).as_strided(out.shape, sums.strides[1:], total)
        for i, part in enumerate(parts[:-1]):
            shape = part.splits, *out.shape
            found.append(Reduction(reduction(1.0, shape, sums.strides, sums.dtype, target, i > 0), False, total))
    shape = splits + several, *out.shape
    found.append(Reduction(reduction(scale, shape, sums.strides, sums.dtype, out, accumulate), True, 0))
    return found, sums


def _reduction_of_shares(
    chosen: Codes, n_tiles: int, scale: float, x: Tensor, out: Tensor, accumulate: bool
) -> tuple[list[Reduction], int]:
    """(the reduction, number of partial sums) of the last vectors, whose products are shared."""
    first = chosen.unshared // n_tiles * chosen.kernel.program_vectors
    rest = out[first:]
    sums = sums_of(chosen.sharers, x, rest)
    launch = reduction(scale, (chosen.sharers, *rest.shape), sums.strides, sums.dtype, rest, accumulate)
    return [Reduction(launch, True, first * out.stride(0))], math.prod(sums.shape)


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


def _memory(chosen: Codes, n_tiles: int, sums: int) -> Memory:
    """The layout of `sums` elements of partial sums and of the codes of a pass; a counter follows the counts."""
    lists = min(chosen.splits, chosen.splits_per_pass) * n_tiles
    blocks, ends, end = lists * chosen.capacity, [], 0
    for size in (4 * sums, chosen.kernel.rows * blocks, 4 * blocks, 4 * (lists + 1)):
        end += -(-size // ALIGN) * ALIGN
        ends.append(end)
    return Memory(end // 4, *ends[:-1])


class Pass(NamedTuple):
    """The launches for some of the columns.

    Attributes
    ----------
    data : int
        Where the first of these columns begins in the data, in elements.
    encode : Launch
        Of (codes, columns, counts) and the seed.
    project : Launch
        Of (x, target, codes, columns, counts) and, on Hopper, the address of the data, or 0 if its elements are not
        adjacent, and the address of partial sums.
    reduce : Reduction or None
        None if there are no partial sums.
    """

    data: int
    encode: Launch
    project: Launch
    reduce: Reduction | None


@dataclass(frozen=True, slots=True, eq=False)
class ProjectCodes:
    """The `Call` (spec, x, out) of a product.

    Attributes
    ----------
    memory : Memory
        The layout of the memory that a call allocates.
    prefetch : bool or None
        Whether the data is prefetched; None if the kernel does not need its address.
    split : bool
        Whether the kernel writes partial sums of splits. Otherwise it writes the result, and partial sums only of
        shared products.
    passes : tuple of Pass
        In order. They use the same memory.
    """

    memory: Memory
    prefetch: bool | None
    split: bool
    passes: tuple[Pass, ...]

    def __call__(self, spec: SketchSpec, x: Tensor, out: Tensor) -> None:
        size, codes, columns, counts = self.memory
        memory = x.new_empty(size, dtype=torch.float32)
        start, first, result = memory.data_ptr(), x.data_ptr(), out.data_ptr()
        addresses = start + codes, start + columns, start + counts
        sums, target = (memory, start) if self.split else (out, result)
        for data, encode, project, reduce in self.passes:
            address = first + data * x.element_size()
            numbers = () if self.prefetch is None else (address if self.prefetch else 0, start)
            if not encode.start(addresses, spec.seed):
                encode.search(self.memory.views(memory), spec.seed)
            if not project.start((address, target, *addresses), *numbers):
                project.search((_at(x, data), sums, *self.memory.views(memory)), *numbers)
            if reduce is not None:
                launch, final, begin = reduce
                to, address = (out, result) if final else (memory, start)
                if not launch.start((start, address + begin * to.element_size())):
                    launch.search((memory, _at(to, begin)))


def _at(t: Tensor, begin: int) -> Tensor:
    """A tensor that begins at an element of another, for launches, to which only addresses matter.

    (The other may be the transpose of the tensor that was prepared for.)
    """
    return t.as_strided((1,), (1,), t.storage_offset() + begin)


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


def _encode(chosen: Codes, part: Part, spec: SketchSpec, x: Tensor) -> Launch:
    """The launch of (codes, columns, counts) and the seed that encodes some columns of the sketch."""
    sketch = spec.one_stack()
    k, nnz = sketch.n_components, sketch.nnz
    g = law.geometry(k, nnz, 0)
    n_tiles, width = _count_tiles(spec), part.end - part.begin
    sub_blocks, per_program = encoding(part.groups * n_tiles, nnz, MIN_ENCODERS)
    numbers = (spec.feature_offset + part.begin, width, k, nnz, g.n_tiles, g.log_group, g.log_chunk)
    lists = (part.first_group, part.groups, chosen.groups_per_split, per_program, chosen.capacity)
    kernel = chosen.kernel
    after = (*numbers, kernel.log_block, *lists, kernel.rows.bit_length() - 1, kernel.log_run)
    windows = kernel.windows
    grid = (-(-chosen.groups_per_split // per_program), n_tiles << windows, part.splits)
    options: dict[str, Any] = {
        "SUB_BLOCKS": sub_blocks,
        "WINDOWS": windows,
        "PROGRAMMATIC_LAUNCH": _is_programmatic(x),
        "SHARED_BYTES": shared_bytes(sub_blocks),
        "num_warps": 4,
        "extern_libs": LIBRARIES,
    }
    return Launch(encode_chunks, grid, x.get_device(), (), after, (sub_blocks, windows), lambda: options)


def _count_tiles(spec: SketchSpec) -> int:
    """The number of tiles of all stacks."""
    return spec.stacks * law.count_tiles(spec.one_stack().n_components)


def _project(
    chosen: Codes, part: Part, spec: SketchSpec, x: Tensor, target: Target, scale: float, accumulate: bool
) -> Launch:
    """The launch of the kernel for some columns."""
    kernel, n, d, k, n_tiles = chosen.kernel, len(x), part.end - part.begin, spec.n_components, _count_tiles(spec)
    programmatic, dtype, tasks = _is_programmatic(x), DTYPE_NAMES[x.dtype], chosen.tasks * part.splits
    programs, shared = min(tasks, chosen.resident * device.describe(x.device).multiprocessors), chosen.sharers > 1
    after = (part.splits, n_tiles, chosen.capacity, *x.stride(), *target.strides, scale)
    key = (kernel, accumulate, shared, kind(x), target.kind)

    def constants() -> dict[str, Any]:
        memory = {"SHARED_BYTES": kernel.slots * slot_bytes(kernel) + kernel.other_bytes, "extern_libs": LIBRARIES}
        options = {"num_warps": 4, "launch_pdl": programmatic}
        common = {"CHOSEN": kernel, "ACCUMULATE": accumulate, **memory, **options}
        if isinstance(kernel, AmpereKernel):
            return {**common, "PROGRAMMATIC_LAUNCH": programmatic, "maxnreg": kernel.registers}
        return {**common, "DTYPE": getattr(gl, dtype), "SHARES_PRODUCTS": shared}

    if isinstance(kernel, AmpereKernel):
        grid, before = (programs if kernel.several else tasks, 1, 1), (n, d, k, tasks, *after)
        return Launch(project_codes_ampere, grid, x.get_device(), before, (), key, constants)
    x_blocks = _x_blocks(kernel, x, d) if kernel.loader == TMA else None
    blocks = _target_blocks(kernel, target, n, k, part.splits, n_tiles) if kernel.tma_store else None
    before = (n, d, k, tasks, chosen.unshared * part.splits, chosen.sharers, *after, chosen.columns_per_split)
    grid, both = (programs, 1, 1), (x_blocks, blocks)
    return Launch(project_codes_hopper, grid, x.get_device(), before, (), key, constants, both)


def _is_programmatic(x: Tensor) -> bool:
    """Whether the kernel that reads codes may start before they are written."""
    return device.describe(x.device).programmatic_launch


def _x_blocks(kernel: KernelChoice, x: Tensor, d: int) -> Blocks:
    """The descriptors of d columns of the data, in blocks with the columns of a panel."""
    columns, n = 1 << kernel.log_panel, len(x)
    if kernel.vectors_contiguous:
        return Blocks(x.dtype, (d, n), x.stride()[::-1], (columns, ROW_BYTES // x.element_size()))
    return Blocks(x.dtype, (n, d), x.stride(), (WARPGROUP_VECTORS, columns))


def _target_blocks(kernel: KernelChoice, target: Target, n: int, k: int, splits: int, n_tiles: int) -> Blocks:
    """The descriptors of the target: of the rows of each pair of a split and a tile or, with windows, of all k rows."""
    _, stride_v, stride_r = target.strides
    lists, rows = splits * n_tiles, k // n_tiles
    if kernel.windows:
        return Blocks(target.dtype, (n, 1, k), (stride_v, stride_v, 1), (kernel.part_vectors, 1, kernel.part_rows))
    if kernel.out_vectors_contiguous:
        block = (1, kernel.part_rows, kernel.part_vectors)
        return Blocks(target.dtype, (lists, rows, n), (rows * stride_r, stride_r, 1), block)
    return Blocks(target.dtype, (n, lists, rows), (stride_v, rows, 1), (kernel.part_vectors, 1, kernel.part_rows))
