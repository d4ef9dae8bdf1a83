"""Launches of the kernels for Hopper, which are in Gluon, on tensors as `hopper_launch` and `iid_launch` ask."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from ...kernels.config import hopper as hopper_launch
from ...kernels.config import iid as iid_launch
from ...laws import exact as law
from . import exact as backend
from .launcher import kind, run

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec

# Gluon is experimental, and its names move. 3.6 was tested on a GPU, 3.7 only compiled.
GLUON_VERSIONS = ("3.6.", "3.7.")
GLUON = backend.NVIDIA and triton.__version__.startswith(GLUON_VERSIONS)
if GLUON:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from ...kernels.hopper.adjoint import adjoint_hopper
    from ...kernels.hopper.iid import multiply_iid_hopper
    from ...kernels.hopper.project import project_hopper


def project(chosen: hopper_launch.Hopper, spec: SketchSpec, x: Tensor, out: Tensor) -> None:
    """out = x S'; or, where out is (splits, n, k), the sums of the splits."""
    n, splits = len(x), chosen.splits
    blocks, out_blocks = (hopper_launch.HALF, chosen.width), (hopper_launch.HALF, law.TILE_ROWS)
    if chosen.turned:
        x, blocks, out_blocks = x.t(), blocks[::-1], out_blocks[::-1]
        out = out.mT.view(-1, n)
    elif splits > 1:
        out = out.transpose(0, 1).view(n, -1)
    tensors = (_described(x, *blocks), _described(out, *out_blocks))
    sizes = (n, splits, chosen.blocks, chosen.blocks_per_split)
    flags = {"TURNED": chosen.turned, "FINAL": splits == 1}
    _launch(project_hopper, chosen, spec, x, tensors, sizes, **flags)


def adjoint(chosen: hopper_launch.Hopper, spec: SketchSpec, y: Tensor, out: Tensor) -> None:
    """out = y S."""
    tensors = (_described(y, hopper_launch.HALF, law.TILE_ROWS), _described(out, hopper_launch.HALF, chosen.width))
    _launch(adjoint_hopper, chosen, spec, y, tensors, (len(y), chosen.blocks), TILES=chosen.tiles)


def _launch(
    kernel: Any,
    chosen: hopper_launch.Hopper,
    spec: SketchSpec,
    data: Tensor,
    tensors: tuple[Any, Any],
    sizes: tuple[int, ...],
    **constants: int,
) -> None:
    """The launch on tensors as the memory accelerator takes them: in blocks of half of a program's vectors."""
    k, nnz = spec.n_components, spec.nnz

    def by_name() -> dict[str, Any]:
        g = law.geometry(k, nnz, 0)
        geometry = {"N_TILES": g.n_tiles, "LOG_GROUP": g.log_group, "LOG_CHUNK": g.log_chunk}
        return {**geometry, **constants, "SLOTS": chosen.slots, "num_warps": 4}

    arguments = (*tensors, *sizes, spec.seed, spec.feature_offset)
    key = (data.dtype, chosen.width, chosen.slots, k, nnz, *constants.values())
    run(kernel, (chosen.programs, 1, 1), data.get_device(), arguments, key, by_name)


def project_iid(spec: SketchSpec, x: Tensor, out: Tensor, multiprocessors: int) -> None:
    """out = x S' of the iid law; a program for each multiprocessor."""
    lanes, (n, d), k = spec.lanes, x.shape, out.shape[1]
    tile = iid_launch.HOPPER

    def constants() -> dict[str, Any]:
        return {
            "DTYPE": getattr(gl, backend.DTYPES[x.dtype]), "BITS": lanes.bits,
            "V": tile.vectors, "OUTER": tile.outer, "INNER": tile.inner, "STAGES": tile.stages,
            "MAKERS": tile.makers, "MAKER_REGISTERS": tile.maker_registers, "num_warps": tile.warps,
        }  # fmt: skip

    products = -(-n // tile.vectors) * -(-k // tile.outer)
    numbers = (spec.seed, spec.feature_offset, lanes.signs, lanes.complement, lanes.scale(k) / 2)
    arguments = (_described(x, tile.vectors, tile.inner), out, n, d, k, *out.stride(), *numbers)
    key = (lanes.bits, k, out.stride(), kind(x), kind(out))
    run(multiply_iid_hopper, (min(products, multiprocessors), 1, 1), x.get_device(), arguments, key, constants)


def _described(x: Tensor, *block: int) -> Any:
    """The tensor as the memory accelerator takes it, in blocks."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), _layout(x.dtype, block))


@lru_cache
def _layout(dtype: torch.dtype, block: tuple[int, ...]) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, backend.DTYPES[dtype]))
