"""Launches of `project_warp_tiles`, and of the reduction of its partial sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...kernels.config.product import kernel_geometry
from ...kernels.config.warp_tiles import SLOTS, WarpTiles
from ...kernels.nvidia.shared_memory import LIBRARIES
from ...kernels.nvidia.warp_tiles import project_warp_tiles
from ...laws import exact as law
from . import device
from .launcher import Launch, kind
from .partial_sums import sums_of
from .prepared import SplitSum, seeded, split_sum

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec


def prepare(chosen: WarpTiles, spec: SketchSpec, x: Tensor, out: Tensor, accumulate: bool) -> SplitSum:
    """The `Call` that writes X Sᵀ to `out`, or adds it if `accumulate`."""
    kernel, (n, d), k = chosen.kernel, x.shape, spec.n_components
    g = law.geometry(k, spec.nnz, 0)
    log_width = g.log_group + g.log_chunk
    groups = ((spec.feature_offset + d - 1) >> log_width) - (spec.feature_offset >> log_width) + 1
    sums = sums_of(chosen.splits, x, out)
    before = (
        n, d, x.stride(1 if kernel.vectors_contiguous else 0), spec.feature_offset, k, g.n_tiles, g.log_group,
        g.log_chunk, groups, chosen.groups_per_split, *sums.strides,
    )  # fmt: skip
    constants: dict[str, Any] = {
        "NNZ": spec.nnz,
        "ROW_BLOCKS": kernel.row_blocks,
        "VECTOR_BLOCKS": kernel.vector_blocks,
        "LOG_PARTS": kernel.log_parts,
        "RUN": kernel.run,
        "UNITS": kernel.units,
        "ALIGN": kernel.align,
        "SLOTS": SLOTS,
        "VECTORS_CONTIGUOUS": kernel.vectors_contiguous,
        "PROGRAMMATIC_LAUNCH": device.describe(x.device).programmatic_launch,
        "SHARED_BYTES": kernel.shared_bytes,
        "num_warps": 1,
        "maxnreg": kernel.registers,
        "extern_libs": LIBRARIES,
    }
    grid = (g.n_tiles, -(-n // (8 * kernel.vector_blocks)), chosen.splits)
    key = (kernel, spec.nnz, kind(x), before)
    project = Launch(project_warp_tiles, grid, x.get_device(), before, (), key, lambda: constants)
    scale = kernel_geometry(k, spec.nnz).scale
    return split_sum(seeded(project), chosen.splits, sums, scale, out, accumulate)
