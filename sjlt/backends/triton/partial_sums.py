"""Results of kernels that split their sums: room for the partial sums, and their sum in a fixed order."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ...kernels.config.product import SPLITS_PER_SUM, next_power_of_two
from ...kernels.portable.reduce import reduce_partial_sums
from . import device
from .launcher import Launch, kind

MIN_PROGRAMS = 256  # programs that add partial sums, where that leaves each 128 to 1024 elements


class Sums(NamedTuple):
    """The memory of partial sums, contiguous.

    Attributes
    ----------
    shape : of the memory, (n, splits, k) or (splits, k, n)
    dtype : fp64 for fp64 data, else fp32
    strides : of its view (splits, n, k)
    """

    shape: tuple[int, int, int]
    dtype: torch.dtype
    strides: tuple[int, int, int]

    def view(self, memory: Tensor) -> Tensor:
        """The memory as (splits, n, k)."""
        return memory.transpose(1, 2) if self.strides[1] == 1 else memory.transpose(0, 1)


def sums_of(splits: int, data: Tensor, out: Tensor) -> Sums:
    """Memory for the partial sums of a product `out` (n, k) of `data`, in the memory order of `out`.

    The axis of vectors is first or last in memory, because there Hopper's memory accelerator clips stores beyond the
    last vector.
    """
    dtype = torch.float64 if data.dtype == torch.float64 else torch.float32
    n, k = out.shape
    if out.stride(0) < out.stride(1):
        return Sums((splits, k, n), dtype, (k * n, 1, n))
    return Sums((n, splits, k), dtype, (k, splits * k, 1))


def strides(out: Tensor) -> tuple[int, ...]:
    """The strides of a target along splits, vectors and components."""
    return (0, *out.stride())[-3:]


def reduce(scale: float, partial: Tensor, out: Tensor, accumulate: bool) -> None:
    """out = scale * sum of partial over its first axis (+ out)."""
    launch = reduction(scale, tuple(partial.shape), partial.stride(), partial.dtype, out, accumulate)
    launch((partial, out))


def reduction(
    scale: float,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    out: Tensor,
    accumulate: bool,
) -> Launch:
    """The launch(partial, out) of ``out = scale * sum of partial over its first axis (+ out)``.

    `shape`, `strides` and `dtype` are those of `partial`, which begins at a multiple of 16 bytes.
    """
    out_strides = out.stride()
    if strides[1] < strides[2]:
        shape, strides = (shape[0], shape[2], shape[1]), (strides[0], strides[2], strides[1])
        out_strides = out_strides[::-1]
    grid, block = _blocks(*shape)
    programmatic_launch = device.describe(out.device).programmatic_launch

    def constants() -> dict[str, Any]:
        return {
            "SCALE": scale,
            "SUM_DTYPE": tl.float64 if dtype == torch.float64 else tl.float32,
            "ACCUMULATE": accumulate,
            "PROGRAMMATIC_LAUNCH": programmatic_launch,
            **block,
            **({"launch_pdl": True} if programmatic_launch else {}),
        }

    sizes = (*shape, *strides, *out_strides)
    key = (scale, accumulate, sizes, dtype, kind(out))
    return Launch(reduce_partial_sums, grid, out.get_device(), sizes, (), key, constants)


@lru_cache(maxsize=4096)
def _blocks(splits: int, rows: int, columns: int) -> tuple[tuple[int, int, int], dict[str, int]]:
    """The grid of `reduce_partial_sums`, and the constants that say what each of its programs adds."""
    elements = min(max(128, next_power_of_two(max(1, rows * columns // MIN_PROGRAMS))), 1024)
    block_columns = min(next_power_of_two(columns), elements)
    block_rows = min(next_power_of_two(rows), elements // block_columns)
    grid = (-(-rows // block_rows), -(-columns // block_columns), 1)
    unroll = min(next_power_of_two(splits), SPLITS_PER_SUM)
    return grid, {"UNROLL": unroll, "ROWS": block_rows, "COLUMNS": block_columns}
