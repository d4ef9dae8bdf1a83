"""Launches of `encode_offsets` and `adjoint_staged`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...kernels.config.product import VECTOR_BYTES
from ...kernels.config.staged_adjoint import StagedAdjoint
from ...kernels.nvidia.shared_memory import LIBRARIES
from ...kernels.nvidia.staged_adjoint import adjoint_staged
from ...kernels.portable.column_words import encode_offsets
from ...laws import exact as law
from . import device
from .launcher import Launch, kind

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec
    from .prepared import Call

ENCODE_BLOCK = 128  # columns per program that encodes


def prepare(chosen: StagedAdjoint, spec: SketchSpec, y: Tensor, out: Tensor, accumulate: bool) -> Call:
    """The `Call` (spec, y, out) that writes Y S to `out`, or adds it if `accumulate`; with all stacks."""
    kernel, (n, d), terms = chosen.kernel, out.shape, spec.nnz
    encode = _encoding(chosen, spec, y)
    grid = (chosen.splits * -(-n * y.element_size() // kernel.row_bytes), 1, 1)
    sizes = (n, d, spec.n_components, *y.stride(), *out.stride())
    after = (terms, chosen.columns_per_split, chosen.splits, chosen.spacing, terms**-0.5)
    constants = _constants(chosen, accumulate) | device.dependent_launch(y.device)
    key = (kernel, chosen.shared_bytes, accumulate, sizes, kind(y), kind(out))
    run = Launch(adjoint_staged, grid, y.get_device(), sizes, after, key, lambda: constants)
    size = terms * chosen.columns + 2 * kernel.step

    def call(spec: SketchSpec, y: Tensor, out: Tensor) -> None:
        words = y.new_empty(size, dtype=torch.int32)
        encode((words,), spec.seed)
        run((y, out, words))

    return call


def _encoding(chosen: StagedAdjoint, spec: SketchSpec, y: Tensor) -> Launch:
    """The launch of `encode_offsets`, of (words,) and the seed."""
    part, kernel = spec.one_stack(), chosen.kernel
    g = law.geometry(part.n_components, part.nnz, 0)
    quads = kernel.row_bytes // VECTOR_BYTES
    sketch = (part.n_components, part.nnz, g.n_tiles, g.log_group, g.log_chunk, spec.feature_offset)
    mask = 0 if kernel.copy_bytes else quads - 1  # rows that are copied whole have no bank conflicts
    log_adjacent = kernel.adjacent.bit_length() - 1
    layout = (kernel.row_bytes, log_adjacent, chosen.spacing, (8 // quads).bit_length() - 1, mask)
    grid = (-(-chosen.columns // ENCODE_BLOCK), spec.stacks * -(-part.nnz // 4), 1)
    programmatic = device.describe(y.device).programmatic_launch
    options = {"BLOCK": ENCODE_BLOCK, "PROGRAMMATIC_LAUNCH": programmatic, "num_warps": 4}
    return Launch(
        encode_offsets,
        grid,
        y.get_device(),
        (),
        (*sketch, chosen.columns, kernel.step, spec.nnz, *layout),
        (),
        lambda: options,
    )


def _constants(chosen: StagedAdjoint, accumulate: bool) -> dict[str, Any]:
    """The constants and compiler options of `adjoint_staged`, by name."""
    kernel = chosen.kernel
    return {
        "ROW_BYTES": kernel.row_bytes,
        "COLUMNS": kernel.columns,
        "COPY_BYTES": kernel.copy_bytes,
        "READS_VECTORS": kernel.reads_vectors,
        "LOG_ADJACENT": kernel.adjacent.bit_length() - 1,
        "WIDTH": kernel.width,
        "SLICES": kernel.slices,
        "VECTORS_CONTIGUOUS": kernel.vectors_contiguous,
        "STAGED_BYTES": kernel.staged_bytes,
        "ACCUMULATE": accumulate,
        "THREADS": 32 * kernel.warps,
        "SHARED_BYTES": chosen.shared_bytes,
        "num_warps": kernel.warps,
        "maxnreg": kernel.registers,
        "extern_libs": LIBRARIES,
    }
