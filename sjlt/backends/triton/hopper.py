"""Launches of the Hopper kernels that generate entries. Import this module only if `device.GLUON` is true."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from ...kernels.config.hopper import WARPGROUP_VECTORS, Hopper
from ...kernels.config.iid import IidHopper
from ...kernels.config.product import kernel_geometry
from ...kernels.hopper.adjoint import adjoint_hopper
from ...kernels.hopper.iid import multiply_iid_hopper
from ...kernels.hopper.project import project_hopper
from ...laws import exact as law
from . import device
from .descriptors import Blocks
from .device import DTYPE_NAMES
from .launcher import Launch, kind, run
from .prepared import seeded

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec
    from .prepared import Call


def prepare_project(chosen: Hopper, spec: SketchSpec, x: Tensor, dtype: torch.dtype, strides: tuple[int, ...]) -> Call:
    """The `Call` (spec, x, target) that writes X Sᵀ or its partial sums under the exact law.

    The target has the given `dtype`, and `strides` along splits, vectors and components. In memory, its splits and
    components form one axis without gaps.
    """
    (n, _), splits, k = x.shape, chosen.splits, spec.n_components
    _, stride_v, stride_r = strides
    block, out_block = (WARPGROUP_VECTORS, chosen.columns), (WARPGROUP_VECTORS, law.TILE_ROWS)
    if chosen.vectors_contiguous:
        x_blocks = Blocks(x.dtype, x.shape[::-1], x.stride()[::-1], block[::-1])
        out_blocks = Blocks(dtype, (splits * k, n), (stride_r, 1), out_block[::-1])
    else:
        x_blocks = Blocks(x.dtype, x.shape, x.stride(), block)
        out_blocks = Blocks(dtype, (n, splits * k), (stride_v, 1), out_block)
    sizes = (n, splits, chosen.blocks, chosen.blocks_per_split)
    constants = {"VECTORS_CONTIGUOUS": chosen.vectors_contiguous, "SINGLE_SPLIT": splits == 1}
    return _prepare_exact(project_hopper, chosen, spec, x, (x_blocks, out_blocks), sizes, constants)


def prepare_adjoint(chosen: Hopper, spec: SketchSpec, y: Tensor, out: Tensor) -> Call:
    """The `Call` (spec, y, out) that writes out = Y S under the exact law."""
    blocks = (
        Blocks(y.dtype, y.shape, y.stride(), (WARPGROUP_VECTORS, law.TILE_ROWS)),
        Blocks(out.dtype, out.shape, out.stride(), (WARPGROUP_VECTORS, chosen.columns)),
    )
    return _prepare_exact(adjoint_hopper, chosen, spec, y, blocks, (len(y), chosen.blocks), {"TILES": chosen.tiles})


def _prepare_exact(
    kernel: Any,
    chosen: Hopper,
    spec: SketchSpec,
    data: Tensor,
    blocks: tuple[Blocks, Blocks],
    sizes: tuple[int, ...],
    constants: dict[str, Any],
) -> Call:
    """The `Call` (spec, data, target) of a kernel under the exact law, with `blocks` of data and target."""
    geometry = kernel_geometry(spec.n_components, spec.nnz)

    def by_name() -> dict[str, Any]:
        return {**constants, "GEOMETRY": geometry, "SLOTS": chosen.slots, "num_warps": 4}

    key = (data.dtype, chosen.columns, chosen.slots, spec.n_components, spec.nnz, *constants.values())
    grid, after = (chosen.programs, 1, 1), (spec.feature_offset,)
    launch = Launch(kernel, grid, data.get_device(), sizes, after, key, by_name, blocks)
    return seeded(launch)


def project_iid(chosen: IidHopper, spec: SketchSpec, x: Tensor, out: Tensor) -> None:
    """Write out = X Sᵀ under the iid law, with at most one program per multiprocessor."""
    lanes, (n, d), k = spec.lanes, x.shape, out.shape[1]

    def constants() -> dict[str, Any]:
        return {
            "DTYPE": getattr(gl, DTYPE_NAMES[x.dtype]),
            "BITS": lanes.bits,
            "BLOCK_VECTORS": chosen.block_vectors,
            "BLOCK_OUT": chosen.block_out,
            "BLOCK_REDUCE": chosen.block_reduce,
            "STAGES": chosen.stages,
            "PRODUCER_WARPS": chosen.producer_warps,
            "PRODUCER_REGISTERS": chosen.producer_registers,
            "num_warps": chosen.consumer_warps,
        }

    blocks = -(-n // chosen.block_vectors) * -(-k // chosen.block_out)
    law_arguments = (spec.seed, spec.feature_offset, lanes.signs, lanes.complement, lanes.scale(k) / 2)
    x_blocks = Blocks(x.dtype, x.shape, x.stride(), (chosen.block_vectors, chosen.block_reduce)).at(x.data_ptr())
    key = (lanes.bits, k, out.stride(), kind(x), kind(out))
    arguments = (*x_blocks, out, n, d, k, *out.stride(), *law_arguments)
    programs = min(blocks, device.describe(x.device).multiprocessors)
    run(multiply_iid_hopper, (programs, 1, 1), x.get_device(), arguments, key, constants)
