"""Launches of the kernels for sketches of one tile, which multiply by stored or by generated entries."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl
from torch import Tensor

from ...kernels.config.arithmetic import FP16_PAIR, NATIVE, ONE_BF16, ONE_FP16
from ...kernels.config.chunk_codes import encoding
from ...kernels.config.one_tile import OneTile
from ...kernels.config.product import KernelGeometry
from ...kernels.portable.one_tile import adjoint_one_tile, project_one_tile, write_entries
from . import device
from .launcher import Launch, kind
from .vector_scales import vector_scales

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec
    from .prepared import Call

ONES = {torch.float16: ONE_FP16, torch.bfloat16: ONE_BF16}
STORED = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def prepare_project(
    chosen: OneTile,
    geometry: KernelGeometry,
    spec: SketchSpec,
    x: Tensor,
    strides: tuple[int, ...],
    kind_of_target: Hashable,
    accumulate: bool,
) -> Call:
    """The `Call` (spec, x, target) that writes X Sᵀ or its partial sums.

    `strides` are those of the target along splits, vectors and components.
    """
    scales = vector_scales(chosen.mode, x)
    options = {
        "CHUNKED_SUM": chosen.chunked_sum,
        "SINGLE_SPLIT": chosen.splits == 1,
        "ACCUMULATE": accumulate,
    }
    sizes, kinds = (*x.shape, *x.stride(), *strides), (kind(x), kind_of_target)
    numbers = _numbers(chosen, geometry, spec, x.shape[1])
    run = _launch(project_one_tile, chosen, x, sizes, numbers, kinds, options)
    if chosen.sub_blocks:  # entries and scales are not read
        return lambda spec, x, target: run((x, x, target, x), spec.seed)
    write = _prepare_entries(chosen, geometry, spec, x, x.shape[1])
    return lambda spec, x, target: run((x, write(spec, x), target, scales(x)), spec.seed)


def prepare_adjoint(
    chosen: OneTile, geometry: KernelGeometry, spec: SketchSpec, y: Tensor, out: Tensor, accumulate: bool
) -> Call:
    """The `Call` (spec, y, out) that writes Y S, or adds it if `accumulate`."""
    numbers = _numbers(chosen, geometry, spec, out.shape[1])
    sizes, kinds = (*out.shape, *y.stride(), *out.stride()), (kind(y), kind(out))
    run = _launch(adjoint_one_tile, chosen, y, sizes, numbers, kinds, {"ACCUMULATE": accumulate})
    if chosen.sub_blocks:  # entries are not read
        return lambda spec, y, out: run((y, y, out), spec.seed)
    write = _prepare_entries(chosen, geometry, spec, y, out.shape[1])
    return lambda spec, y, out: run((y, write(spec, y), out), spec.seed)


def _launch(
    kernel: Any,
    chosen: OneTile,
    data: Tensor,
    sizes: tuple[int, ...],
    numbers: tuple[float, ...],
    kinds: Hashable,
    options: dict[str, Any],
) -> Launch:
    """A launch of `kernel`. `options` are the constants that only this kernel has."""
    grid = (-(-len(data) // chosen.block_vectors), chosen.splits, 1)
    # Not in the function below, which outlives this call and must not keep the data alive.
    stored, interpreted = STORED[_stored(chosen, data)], device.describe(data.device).interpreted
    dependent = device.dependent_launch(data.device)

    def constants() -> dict[str, Any]:
        return {
            "ROWS": chosen.rows,
            "BLOCK_VECTORS": chosen.block_vectors,
            "ALIGN": chosen.align,
            "VECTOR_ALIGN": chosen.vector_align,
            "SUB_BLOCKS": chosen.sub_blocks,
            "MODE": chosen.mode,
            "STORED": stored,
            "INTERPRETED": interpreted,
            **options,
            **dependent,
            "num_warps": chosen.num_warps,
            "num_stages": chosen.num_stages,
        }

    key = (chosen, sizes, kinds, *options.values())
    return Launch(kernel, grid, data.get_device(), sizes, numbers, key, constants)


def _stored(chosen: OneTile, data: Tensor) -> torch.dtype:
    """The dtype of the stored entries."""
    if chosen.mode == NATIVE:
        return data.dtype
    return torch.float16 if chosen.mode == FP16_PAIR else torch.bfloat16


def _chunks(geometry: KernelGeometry, spec: SketchSpec, d: int) -> tuple[int, int]:
    """The first chunk of the sketch's d columns, and the number of chunks that contain them."""
    log_chunk, offset = geometry.log_chunk, spec.feature_offset
    first = offset >> log_chunk
    return first, ((offset + d - 1) >> log_chunk) + 1 - first


def _numbers(chosen: OneTile, geometry: KernelGeometry, spec: SketchSpec, d: int) -> tuple[float, ...]:
    """The arguments of the kernels after the seed, from k on.

    first_column is not positive, because the entries begin with a whole chunk.
    """
    log_chunk = geometry.log_chunk
    first, chunks = _chunks(geometry, spec, d)
    per_split = chosen.chunks_per_split << log_chunk
    columns = chunks << log_chunk, per_split, (first << log_chunk) - spec.feature_offset
    return geometry.k, *columns, geometry.scale, geometry.nnz, log_chunk, spec.feature_offset


def _prepare_entries(
    chosen: OneTile, geometry: KernelGeometry, spec: SketchSpec, data: Tensor, d: int
) -> Callable[[SketchSpec, Tensor], Tensor]:
    """A function that returns the entries of d columns."""
    log_chunk = geometry.log_chunk
    first, chunks = _chunks(geometry, spec, d)
    sub_blocks, per_program = encoding(chunks, geometry.nnz)
    after = (first, chunks, per_program, geometry.k, geometry.nnz, log_chunk, ONES[_stored(chosen, data)])
    programmatic = device.describe(data.device).programmatic_launch
    options = {
        "ROWS": chosen.rows,
        "SUB_BLOCKS": sub_blocks,
        "PROGRAMMATIC_LAUNCH": programmatic,
        "num_warps": 4,
    }
    grid, key = (-(-chunks // per_program), 1, 1), (chosen.rows, sub_blocks)
    run = Launch(write_entries, grid, data.get_device(), (), after, key, lambda: options)
    shape = (chunks << log_chunk, chosen.rows)

    def write(spec: SketchSpec, data: Tensor) -> Tensor:
        entries = data.new_empty(shape, dtype=torch.uint16)
        run((entries,), spec.seed)
        return entries

    return write
