"""Launches of the Hopper kernels. Import this module only where `device.GLUON` is true."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...kernels.config.hopper import WARPGROUP_VECTORS, Hopper
from ...kernels.config.hopper_codes import TMA, HopperCodes
from ...kernels.config.iid import IidHopper
from ...kernels.config.product import kernel_geometry
from ...kernels.hopper.adjoint import adjoint_hopper
from ...kernels.hopper.iid import multiply_iid_hopper
from ...kernels.hopper.project import project_hopper
from ...kernels.hopper.project_codes import project_codes_hopper
from ...kernels.portable.chunk_codes import encode_chunks
from ...laws import exact as law
from . import device
from .device import DTYPE_NAMES
from .launcher import kind, run

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec


CHUNKS = 8  # chunks that a program encodes


def project_exact(chosen: Hopper, spec: SketchSpec, x: Tensor, out: Tensor) -> None:
    """out = X Sᵀ or, for `out` of shape (splits, n, k), its partial sums, under the exact law."""
    n, splits = len(x), chosen.splits
    block, out_block = (WARPGROUP_VECTORS, chosen.columns), (WARPGROUP_VECTORS, law.TILE_ROWS)
    if chosen.vectors_contiguous:
        x, block, out_block = x.t(), block[::-1], out_block[::-1]
        out = out.mT.view(-1, n)
    elif splits > 1:
        out = out.transpose(0, 1).view(n, -1)
    tensors = (_descriptor(x, *block), _descriptor(out, *out_block))
    sizes = (n, splits, chosen.blocks, chosen.blocks_per_split)
    constants = {"VECTORS_CONTIGUOUS": chosen.vectors_contiguous, "SINGLE_SPLIT": splits == 1}
    _run_exact(project_hopper, chosen, spec, x, tensors, sizes, constants)


def adjoint_exact(chosen: Hopper, spec: SketchSpec, y: Tensor, out: Tensor) -> None:
    """out = Y S under the exact law."""
    tensors = (
        _descriptor(y, WARPGROUP_VECTORS, law.TILE_ROWS),
        _descriptor(out, WARPGROUP_VECTORS, chosen.columns),
    )
    _run_exact(adjoint_hopper, chosen, spec, y, tensors, (len(y), chosen.blocks), {"TILES": chosen.tiles})


def project_codes(chosen: HopperCodes, spec: SketchSpec, x: Tensor, out: Tensor, accumulate: bool) -> None:
    """out = X Sᵀ, added to `out` if `accumulate`, or for `out` of shape (splits, n, k) its partial sums, for any k."""
    kernel, (n, d), k, nnz = chosen.kernel, x.shape, spec.n_components, spec.nnz
    codes = _encode(chosen, spec, x)
    target = out if out.ndim == 3 else out[None]
    strides = (*x.stride(), *target.stride())
    n_tiles = law.count_tiles(k)
    blocks = (x, target)
    if kernel.loader == TMA:
        columns = 1 << kernel.log_panel
        if kernel.vectors_contiguous:
            blocks = (_descriptor(x.t(), columns, law.TILE_ROWS // x.element_size()), target)
        else:
            blocks = (_descriptor(x, WARPGROUP_VECTORS, columns), target)
    if kernel.tma_store:
        _, v_stride, r_stride = target.stride()
        rows, lists = k // n_tiles, chosen.splits * n_tiles
        if kernel.out_vectors_contiguous:
            view = target.as_strided((lists, rows, n), (rows * r_stride, r_stride, 1))
            blocks = (blocks[0], _store_descriptor(view, 1, kernel.rows, WARPGROUP_VECTORS))
        else:
            view = target.as_strided((n, lists, rows), (v_stride, rows, 1))
            blocks = (blocks[0], _store_descriptor(view, WARPGROUP_VECTORS, 1, kernel.rows))

    def constants() -> dict[str, Any]:
        dtype = getattr(gl, DTYPE_NAMES[x.dtype])
        return {"DTYPE": dtype, "CHOSEN": kernel, "ACCUMULATE": accumulate, "num_warps": 4}

    scale = nnz**-0.5 if chosen.splits == 1 else 1.0
    sizes = (n, d, k, chosen.products, chosen.splits, n_tiles, chosen.capacity)
    key = (kernel, accumulate, kind(x), kind(out))
    programs = min(chosen.products, device.describe(x.device).multiprocessors)
    arguments = (*blocks, *codes, *sizes, *strides, scale)
    run(project_codes_hopper, (programs, 1, 1), x.get_device(), arguments, key, constants)


def _encode(chosen: HopperCodes, spec: SketchSpec, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The codes of the sketch's columns, their columns and their counts."""
    k, nnz, offset, d = spec.n_components, spec.nnz, spec.feature_offset, x.shape[1]
    g = law.geometry(k, nnz, 0)
    log_width = g.log_group + g.log_chunk
    first_group = offset >> log_width
    groups = ((offset + d - 1) >> log_width) + 1 - first_group
    lists = chosen.splits * g.n_tiles
    codes = x.new_empty((lists * chosen.capacity, law.TILE_ROWS), dtype=torch.uint8)
    columns = x.new_empty(lists * chosen.capacity, dtype=torch.int32)
    counts = x.new_empty(lists, dtype=torch.int32)
    numbers = (spec.seed, offset, d, k, nnz, g.n_tiles, g.log_group, g.log_chunk, chosen.kernel.log_block)
    arguments = (codes, columns, counts, *numbers, first_group, groups, chosen.groups_per_split, chosen.capacity)
    grid = (-(-chosen.groups_per_split // CHUNKS), g.n_tiles, chosen.splits)
    run(encode_chunks, grid, x.get_device(), arguments, (), lambda: {"CHUNKS": CHUNKS, "num_warps": 4})
    return codes, columns, counts


def _run_exact(
    kernel: Any,
    chosen: Hopper,
    spec: SketchSpec,
    data: Tensor,
    descriptors: tuple[Any, Any],
    sizes: tuple[int, ...],
    constants: dict[str, Any],
) -> None:
    def by_name() -> dict[str, Any]:
        geometry = kernel_geometry(spec.n_components, spec.nnz)
        return {**constants, "GEOMETRY": geometry, "SLOTS": chosen.slots, "num_warps": 4}

    arguments = (*descriptors, *sizes, spec.seed, spec.feature_offset)
    key = (data.dtype, chosen.columns, chosen.slots, spec.n_components, spec.nnz, *constants.values())
    run(kernel, (chosen.programs, 1, 1), data.get_device(), arguments, key, by_name)


def project_iid(chosen: IidHopper, spec: SketchSpec, x: Tensor, out: Tensor) -> None:
    """out = X Sᵀ under the iid law, with one program per multiprocessor."""
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
    numbers = (spec.seed, spec.feature_offset, lanes.signs, lanes.complement, lanes.scale(k) / 2)
    x_blocks = _descriptor(x, chosen.block_vectors, chosen.block_reduce)
    key = (lanes.bits, k, out.stride(), kind(x), kind(out))
    arguments = (x_blocks, out, n, d, k, *out.stride(), *numbers)
    programs = min(blocks, device.describe(x.device).multiprocessors)
    run(multiply_iid_hopper, (programs, 1, 1), x.get_device(), arguments, key, constants)


def _descriptor(x: Tensor, *block: int) -> Any:
    """The tensor as the memory accelerator addresses it, in blocks."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), _layout(x.dtype, block))


def _store_descriptor(out: Tensor, *block: int) -> Any:
    """A tensor of three axes as the memory accelerator stores to it, in blocks of two."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * out.element_size(), rank=3)
    return TensorDescriptor(out, list(out.shape), list(out.stride()), list(block), layout)


@lru_cache
def _layout(dtype: torch.dtype, block: tuple[int, ...]) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, DTYPE_NAMES[dtype]))
