"""Launches of `project_lane_sums`, and of the reduction of its partial sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...kernels.config.lane_sums import LaneSums
from ...kernels.config.product import kernel_geometry
from ...kernels.nvidia.lane_sums import project_lane_sums
from ...kernels.nvidia.shared_memory import LIBRARIES
from . import device
from .launcher import Launch, kind
from .partial_sums import sums_of
from .prepared import SplitSum, seeded, split_sum

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec


def prepare(chosen: LaneSums, spec: SketchSpec, x: Tensor, out: Tensor, accumulate: bool) -> SplitSum:
    """The `Call` that writes X Sᵀ to `out`, or adds it if `accumulate`."""
    kernel, (n, d), k = chosen.kernel, x.shape, spec.n_components
    sums = sums_of(chosen.splits, x, out)
    before = (n, d, *x.stride(), spec.feature_offset, k, chosen.steps, chosen.steps_per_split, *sums.strides)
    constants: dict[str, Any] = {
        "NNZ": spec.nnz,
        "LOG_CHUNK": kernel.log_chunk,
        "LOG_HELD": kernel.log_held,
        "VECTORS": kernel.vectors,
        "SHARERS": kernel.sharers,
        "WARPS": kernel.warps,
        "ROW_RUN": kernel.row_run,
        "COLUMN_RUN": kernel.column_run,
        "STAGED": kernel.staged,
        "PROGRAMMATIC_LAUNCH": device.describe(x.device).programmatic_launch,
        "SHARED_BYTES": kernel.shared_bytes,
        "num_warps": kernel.warps,
        "maxnreg": kernel.registers,
        "extern_libs": LIBRARIES,
    }
    grid = (-(-n // kernel.vectors), chosen.splits, 1)
    key = (kernel, spec.nnz, kind(x), before)
    project = Launch(project_lane_sums, grid, x.get_device(), before, (), key, lambda: constants)
    scale = kernel_geometry(k, spec.nnz).scale
    return split_sum(seeded(project), chosen.splits, sums, scale, out, accumulate)
