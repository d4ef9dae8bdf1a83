"""Launches of the kernels for sketches of one tile, which multiply by stored entries."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl
from torch import Tensor

from ...kernels.config.arithmetic import FP16_PAIR, NATIVE
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

ONES = {torch.float16: 0x3C00, torch.bfloat16: 0x3F80}  # the bits of 1
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
    write, numbers = _prepare_entries(chosen, geometry, spec, x, x.shape[1])
    scales = vector_scales(chosen.mode, x)
    options = {
        "CHUNKED_SUM": chosen.chunked_sum,
        "SINGLE_SPLIT": chosen.splits == 1,
        "ACCUMULATE": accumulate,
    }
    span = chosen.chunks_per_sum << geometry.log_chunk if chosen.chunked_sum else 1 << 30
    sizes, kinds = (*x.shape, *x.stride(), *strides), (kind(x), kind_of_target)
    run = _launch(project_one_tile, chosen, x, sizes, (*numbers, span, geometry.scale), kinds, options)
    return lambda spec, x, target: run((x, write(spec, x), target, scales(x)))


def prepare_adjoint(
    chosen: OneTile, geometry: KernelGeometry, spec: SketchSpec, y: Tensor, out: Tensor, accumulate: bool
) -> Call:
    """The `Call` (spec, y, out) that writes Y S, or adds it if `accumulate`."""
    write, numbers = _prepare_entries(chosen, geometry, spec, y, out.shape[1])
    sizes, kinds = (*out.shape, *y.stride(), *out.stride()), (kind(y), kind(out))
    run = _launch(adjoint_one_tile, chosen, y, sizes, (*numbers, geometry.scale), kinds, {"ACCUMULATE": accumulate})
    return lambda spec, y, out: run((y, write(spec, y), out))


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
    stored, described = STORED[_stored(chosen, data)], device.describe(data.device)

    def constants() -> dict[str, Any]:
        return {
            "ROWS": chosen.rows,
            "BLOCK_VECTORS": chosen.block_vectors,
            "ALIGN": chosen.align,
            "MODE": chosen.mode,
            "STORED": stored,
            "INTERPRETED": described.interpreted,
            **options,
            "PROGRAMMATIC_LAUNCH": described.programmatic_launch,
            **({"launch_pdl": True} if described.programmatic_launch else {}),
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


def _prepare_entries(
    chosen: OneTile, geometry: KernelGeometry, spec: SketchSpec, data: Tensor, d: int
) -> tuple[Callable[[SketchSpec, Tensor], Tensor], tuple[int, int, int, int]]:
    """A function that returns the entries of d columns, and the numbers that kernels need to read them.

    These are k, the number of columns, that of columns per split, and the column of the data at which the entries
    begin. The latter is not positive, because the entries begin with a whole chunk.
    """
    log_chunk, offset = geometry.log_chunk, spec.feature_offset
    first = offset >> log_chunk
    chunks = ((offset + d - 1) >> log_chunk) + 1 - first
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

    return write, (geometry.k, shape[0], chosen.chunks_per_split << log_chunk, (first << log_chunk) - offset)
