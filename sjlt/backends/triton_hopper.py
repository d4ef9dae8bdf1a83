"""Launches of the kernels for Hopper, which are in Gluon, on tensors as `hopper_launch` and `iid_launch` ask."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from .. import law
from ..kernels import hopper_launch, iid_launch
from . import triton as backend
from .triton_launches import kind, run

if TYPE_CHECKING:
    from ..sketch import Sketch

# Gluon is experimental, and its names move. 3.6 was tested on a GPU, 3.7 only compiled.
GLUON_VERSIONS = ("3.6.", "3.7.")
GLUON = backend.NVIDIA and triton.__version__.startswith(GLUON_VERSIONS)
if GLUON:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from ..kernels.adjoint_hopper import adjoint_hopper
    from ..kernels.iid_hopper import multiply_iid_hopper
    from ..kernels.project_hopper import project_hopper


def project(chosen: hopper_launch.Hopper, sketch: Sketch, x: Tensor, out: Tensor) -> None:
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
    _launch(project_hopper, chosen, sketch, x, tensors, sizes, **flags)


def adjoint(chosen: hopper_launch.Hopper, sketch: Sketch, y: Tensor, out: Tensor) -> None:
    """out = y S."""
    tensors = (_described(y, hopper_launch.HALF, law.TILE_ROWS), _described(out, hopper_launch.HALF, chosen.width))
    _launch(adjoint_hopper, chosen, sketch, y, tensors, (len(y), chosen.blocks), TILES=chosen.tiles)


def _launch(
    kernel: Any,
    chosen: hopper_launch.Hopper,
    sketch: Sketch,
    data: Tensor,
    tensors: tuple[Any, Any],
    sizes: tuple[int, ...],
    **constants: int,
) -> None:
    """The launch on tensors as the memory accelerator takes them: in blocks of half of a program's vectors."""
    k, nnz = sketch.n_components, sketch.nnz

    def by_name() -> dict[str, Any]:
        g = law.geometry(k, nnz, 0)
        geometry = {"N_TILES": g.n_tiles, "LOG_GROUP": g.log_group, "LOG_CHUNK": g.log_chunk}
        return {**geometry, **constants, "SLOTS": chosen.slots, "num_warps": 4}

    arguments = (*tensors, *sizes, *sketch.numbers[-2:])
    key = (data.dtype, chosen.width, chosen.slots, k, nnz, *constants.values())
    run(kernel, (chosen.programs, 1, 1), data.get_device(), arguments, key, by_name)


def project_iid(sketch: Sketch, x: Tensor, out: Tensor, multiprocessors: int) -> None:
    """out = x S' of the iid law; a program for each multiprocessor."""
    lanes, (n, d), k = sketch.lanes, x.shape, out.shape[1]
    assert lanes
    tile = iid_launch.HOPPER

    def constants() -> dict[str, Any]:
        return {
            "DTYPE": getattr(gl, backend.DTYPES[x.dtype]), "BITS": lanes.bits,
            "V": tile.vectors, "OUTER": tile.outer, "INNER": tile.inner, "STAGES": tile.stages,
            "MAKERS": tile.makers, "MAKER_REGISTERS": tile.maker_registers, "num_warps": tile.warps,
        }  # fmt: skip

    products = -(-n // tile.vectors) * -(-k // tile.outer)
    numbers = (*sketch.numbers[-2:], lanes.signs, lanes.complement, lanes.scale(k) / 2)
    arguments = (_described(x, tile.vectors, tile.inner), out, n, d, k, *out.stride(), *numbers)
    key = (lanes.bits, k, out.stride(), kind(x), kind(out))
    run(multiply_iid_hopper, (min(products, multiprocessors), 1, 1), x.get_device(), arguments, key, constants)


def _described(x: Tensor, *block: int) -> Any:
    """The tensor as the memory accelerator takes it, in blocks."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), _layout(x.dtype, block))


@lru_cache
def _layout(dtype: torch.dtype, block: tuple[int, ...]) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, backend.DTYPES[dtype]))
