"""Launches of the kernels for Hopper, which are in Gluon, on tensors as `hopper_launch` and `iid_launch` ask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
from torch import Tensor

from .. import law
from ..kernels import hopper_launch, iid_launch
from . import triton as backend

if TYPE_CHECKING:
    from ..sketch import Sketch

# Gluon is experimental, and its names move. 3.6 was tested on a GPU, 3.7 only compiled.
GLUON_VERSIONS = ("3.6.", "3.7.")
GLUON = backend.NVIDIA and triton.__version__.startswith(GLUON_VERSIONS)
if GLUON:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from ..kernels.adjoint_hopper import adjoint_hopper
    from ..kernels.hopper import TILE, VECTORS
    from ..kernels.iid_hopper import multiply_iid_hopper
    from ..kernels.project_hopper import project_hopper


def project(chosen: hopper_launch.Hopper, sketch: Sketch, x: Tensor, out: Tensor) -> None:
    """out = x S'."""
    project_hopper[(chosen.programs,)](
        _blocks(x, chosen.width), _blocks(out, TILE.value), len(x), chosen.blocks, *sketch.numbers[-2:],
        **_constants(sketch), FOLD=chosen.fold, SLOTS=chosen.slots, num_warps=4,
    )  # fmt: skip


def adjoint(chosen: hopper_launch.Hopper, sketch: Sketch, y: Tensor, out: Tensor) -> None:
    """out = y S."""
    adjoint_hopper[(chosen.programs,)](
        _blocks(y, TILE.value), _blocks(out, chosen.width), len(y), chosen.blocks, *sketch.numbers[-2:],
        **_constants(sketch), SLOTS=chosen.slots, TILES=chosen.tiles, num_warps=4,
    )  # fmt: skip


def _constants(sketch: Sketch) -> dict[str, int]:
    geometry = law.geometry(sketch.n_components, sketch.nnz, 0)
    return {"N_TILES": geometry.n_tiles, "LOG_GROUP": geometry.log_group, "LOG_CHUNK": geometry.log_chunk}


def _blocks(x: Tensor, width: int) -> Any:
    """The tensor as the memory accelerator takes it: in blocks of half of a program's vectors."""
    return _described(x, [VECTORS.value, width])


def _described(x: Tensor, block: list[int]) -> Any:
    layout = gl.NVMMASharedLayout.get_default_for(block, getattr(gl, backend.DTYPES[x.dtype]))
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


def project_iid(sketch: Sketch, x: Tensor, out: Tensor, multiprocessors: int) -> None:
    """out = x S' of the iid law; a program for each multiprocessor."""
    assert sketch.lanes
    (n, d), k = x.shape, out.shape[1]
    tile = iid_launch.HOPPER
    products = -(-n // tile.vectors) * -(-k // tile.outer)
    multiply_iid_hopper[(min(products, multiprocessors),)](
        _described(x, [tile.vectors, tile.inner]), out, n, d, k, *out.stride(),
        *sketch.numbers[-2:], sketch.lanes.signs, sketch.lanes.complement,
        sketch.lanes.scale(k) / 2, DTYPE=getattr(gl, backend.DTYPES[x.dtype]), BITS=sketch.lanes.bits,
        V=tile.vectors, OUTER=tile.outer, INNER=tile.inner, STAGES=tile.stages, MAKERS=tile.makers,
        MAKER_REGISTERS=tile.maker_registers, num_warps=tile.warps,
    )  # fmt: skip
