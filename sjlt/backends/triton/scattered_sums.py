"""Launches of `project_scattered`, and of the reduction of its partial sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl
from torch import Tensor

from ...kernels.config.product import kernel_geometry
from ...kernels.config.scattered_sums import ScatteredSums
from ...kernels.nvidia.scattered_sums import project_scattered
from ...kernels.nvidia.shared_memory import LIBRARIES
from ...laws import exact as law
from . import device
from .launcher import Launch, kind
from .partial_sums import sums_of
from .prepared import SplitSum, seeded, split_sum

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec


def prepare(chosen: ScatteredSums, spec: SketchSpec, x: Tensor, out: Tensor, accumulate: bool) -> SplitSum:
    """The `Call` that writes X Sᵀ to `out`, or adds it if `accumulate`."""
    part, kernel, layout, (n, d) = spec.one_stack(), chosen.kernel, chosen.kernel.layout, x.shape
    g = law.geometry(part.n_components, part.nnz, 0)
    batch = kernel.chunks << g.log_chunk
    batches = (spec.feature_offset + d - 1) // batch - spec.feature_offset // batch + 1
    sums = sums_of(chosen.splits, x, out)
    stride = x.stride(1 if kernel.width else 0)
    before = (
        n, d, stride, spec.feature_offset, part.n_components, g.n_tiles, g.log_group, g.log_chunk, batches,
        chosen.batches_per_split, *sums.strides,
    )  # fmt: skip
    constants: dict[str, Any] = {
        "DTYPE": tl.float64 if sums.dtype == torch.float64 else tl.float32,
        "NNZ": part.nnz,
        "STACKS": spec.stacks,
        "VECTORS": layout.vectors,
        "UNIT": layout.unit,
        "COLUMN_LANES": layout.column_lanes,
        "WARPS": layout.warps,
        "TEAM": layout.team,
        "SHARED_SUMS": layout.shared,
        "GROUPS": kernel.groups,
        "REPLICAS": layout.replicas,
        "ROTATIONS": kernel.rotations,
        "SPREAD": kernel.spread.lanes,
        "STRIDE": kernel.spread.stride,
        "BY_SLOT": layout.by_slot,
        "ROWS": kernel.rows,
        "CHUNKS": kernel.chunks,
        "LOG_PARTS": kernel.log_parts,
        "LOADED": kernel.loaded,
        "TOGETHER": kernel.together,
        "ROUNDS_TOGETHER": kernel.rounds_together,
        "PREFETCHED": kernel.prefetched,
        "WIDTH": kernel.width,
        "PROGRAMMATIC_LAUNCH": device.describe(x.device).programmatic_launch,
        "SHARED_BYTES": kernel.shared_bytes,
        "num_warps": layout.warps,
        "extern_libs": LIBRARIES,
    }
    grid = (-(-n // layout.vectors), chosen.splits, 1)
    key = (kernel, part.nnz, spec.stacks, kind(x), sums.dtype, before)
    project = Launch(project_scattered, grid, x.get_device(), before, (), key, lambda: constants)
    scale = kernel_geometry(part.n_components, part.nnz, 0, spec.stacks).scale
    return split_sum(seeded(project), chosen.splits, sums, scale, out, accumulate)
