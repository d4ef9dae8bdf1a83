"""Launches of `project_staged`, in passes over splits that encode words first, and of the reduction of split sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl
from torch import Tensor

from ...kernels.config.chunk_codes import CHUNKS, encoding
from ...kernels.config.product import kernel_geometry
from ...kernels.config.staged_gather import KernelChoice, StagedGather
from ...kernels.nvidia.shared_memory import LIBRARIES
from ...kernels.nvidia.staged_gather import project_staged
from ...kernels.portable.group_words import encode_groups
from ...laws import exact as law
from .launcher import Kind, Launch, kind
from .partial_sums import reduction, sums_of

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec


@dataclass(frozen=True, slots=True, eq=False)
class ProjectStaged:
    """The `Call` (spec, x, out) of a product.

    Attributes
    ----------
    words : int
        The largest number of words that a pass encodes.
    sums : tuple of int or None
        Shape of the partial sums; None if the target is `out`.
    sum_dtype : torch.dtype
        Dtype of the partial sums.
    passes : tuple of pairs of Launch
        For each pass, the launches of (words,) and the seed, and of (x, target, words).
    reduce : Launch or None
        Of (partial sums, out); None if the target is `out`.
    """

    words: int
    sums: tuple[int, ...] | None
    sum_dtype: torch.dtype
    passes: tuple[tuple[Launch, Launch], ...]
    reduce: Launch | None

    def __call__(self, spec: SketchSpec, x: Tensor, out: Tensor) -> None:
        words = x.new_empty(self.words, dtype=torch.int32)
        target = out if self.sums is None else x.new_empty(self.sums, dtype=self.sum_dtype)
        for encode, project in self.passes:
            encode((words,), spec.seed)
            project((x, target, words))
        if self.reduce is not None:
            self.reduce((target, out))


def prepare(chosen: StagedGather, spec: SketchSpec, x: Tensor, out: Tensor, accumulate: bool) -> ProjectStaged:
    """The `Call` that writes X Sᵀ to `out`, or adds it if `accumulate`."""
    scale = kernel_geometry(spec.n_components, spec.nnz).scale
    contiguous = chosen.kernel.vectors_contiguous
    sums = sums_of(chosen.splits, x, out, contiguous)
    # To store in another order, the kernel would need shared memory, which is full.
    in_order = not contiguous or out.stride(0) == 1
    if chosen.splits == 1 and not accumulate and out.dtype == sums.dtype and in_order:
        passes, words = _passes(chosen, spec, x, kind(out), (0, *out.stride()), scale)
        return ProjectStaged(words, None, sums.dtype, passes, None)
    passes, words = _passes(chosen, spec, x, (sums.dtype, 0), sums.strides, 1.0)
    reduce = reduction(scale, (chosen.splits, *out.shape), sums.strides, sums.dtype, out, accumulate)
    return ProjectStaged(words, sums.shape, sums.dtype, passes, reduce)


def _passes(
    chosen: StagedGather, spec: SketchSpec, x: Tensor, target: Kind, strides: tuple[int, ...], scale: float
) -> tuple[tuple[tuple[Launch, Launch], ...], int]:
    """The launches of each pass, for targets of kind `target`, and the number of words of the longest pass."""
    part, (n, d), kernel, device = spec.one_stack(), x.shape, chosen.kernel, x.get_device()
    g = law.geometry(part.n_components, part.nnz, 0)
    lists, rows = spec.stacks * g.n_tiles, chosen.parts * kernel.rows
    first_group = spec.feature_offset >> g.log_group + g.log_chunk
    first_column = first_group * kernel.columns - spec.feature_offset
    all_groups = -(-(d - first_column) // kernel.columns)
    groups_per_pass = chosen.splits_per_pass * chosen.groups_per_split
    row_bytes, sub_blocks = kernel.vectors * x.element_size(), encoding(1, part.nnz).sub_blocks
    sketch = (part.n_components, part.nnz, g.n_tiles, g.log_group, g.log_chunk)
    sizes = (n, d, part.n_components, g.n_tiles, lists, rows, *x.stride(), *strides)
    options, constants = {"SUB_BLOCKS": sub_blocks, "num_warps": 4}, _constants(kernel, x.dtype)
    passes = []
    for split in range(0, chosen.splits, chosen.splits_per_pass):
        start = split * chosen.groups_per_split
        groups = min(groups_per_pass, all_groups - start)
        grid = (-(-groups // CHUNKS), rows // law.TILE_ROWS, 1)
        encoded = (*sketch, first_group + start, groups, lists, row_bytes)
        encode = Launch(encode_groups, grid, device, (), encoded, sub_blocks, lambda: options)
        grid = (chosen.parts * -(-n // kernel.vectors), min(chosen.splits_per_pass, chosen.splits - split), 1)
        after = (first_column + start * kernel.columns, groups, chosen.groups_per_split, split, chosen.parts, scale)
        key = (kernel, kind(x), target, sizes)
        passes.append((encode, Launch(project_staged, grid, device, sizes, after, key, lambda: constants)))
    return tuple(passes), rows * min(groups_per_pass, all_groups)


def _constants(kernel: KernelChoice, dtype: torch.dtype) -> dict[str, Any]:
    """The constants and compiler options of `project_staged`, by name."""
    return {
        "DTYPE": tl.float64 if dtype == torch.float64 else tl.float32,
        "ROWS": kernel.rows,
        "VECTORS": kernel.vectors,
        "COLUMNS": kernel.columns,
        "STAGES": kernel.stages,
        "COPY_BYTES": kernel.copy_bytes,
        "VECTORS_CONTIGUOUS": kernel.vectors_contiguous,
        "SHARED_BYTES": kernel.shared_bytes,
        "num_warps": kernel.warps,
        "extern_libs": LIBRARIES,
    }
