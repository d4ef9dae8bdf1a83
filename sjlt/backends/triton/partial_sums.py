"""Results of kernels that split their sums: room for the partial sums, and their sum in a fixed order."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ...kernels.config.product import SPLITS_PER_SUM, next_power_of_two
from ...kernels.portable.reduce import reduce_partial_sums
from . import device
from .launcher import kind, run

MIN_PROGRAMS = 256  # programs that add partial sums, where that leaves each 128 to 1024 elements


def write(
    splits: int, data: Tensor, out: Tensor, accumulate: bool, scale: float, launch: Callable[[Tensor, bool], None]
) -> None:
    """Write a product to `out` (n, k) by ``launch(target, accumulate)``.

    With one split the target is `out`, and the kernel scales and accumulates. With several, the target is a temporary
    (splits, n, k) for unscaled sums, which are then added, scaled and accumulated in `out`.
    """
    if splits == 1:
        launch(out, accumulate)
        return
    sums = _allocate(splits, data, out)
    launch(sums, False)
    reduce(scale, sums, out, accumulate)


def strides(out: Tensor) -> tuple[int, ...]:
    """The strides of a target along splits, vectors and components."""
    return (0, *out.stride())[-3:]


def _allocate(splits: int, data: Tensor, out: Tensor) -> Tensor:
    """Memory for the partial sums (splits, n, k), in the memory order of `out`.

    The axis of vectors is first or last in memory, because there Hopper's memory accelerator clips stores beyond the
    last vector.
    """
    dtype = torch.float64 if data.dtype == torch.float64 else torch.float32
    n, k = out.shape
    if out.stride(0) < out.stride(1):
        return data.new_empty((splits, k, n), dtype=dtype).transpose(1, 2)
    return data.new_empty((n, splits, k), dtype=dtype).transpose(0, 1)


def reduce(scale: float, partial: Tensor, out: Tensor, accumulate: bool) -> None:
    """out = scale * sum of partial over its first axis (+ out)."""
    if partial.stride(1) < partial.stride(2):
        partial, out = partial.transpose(1, 2), out.t()
    grid, block = _blocks(*partial.shape)
    sizes = (*partial.shape, *partial.stride(), *out.stride())

    def constants() -> dict[str, Any]:
        programmatic_launch = device.describe(out.device).programmatic_launch
        return {
            "SCALE": scale,
            "SUM_DTYPE": tl.float64 if partial.dtype == torch.float64 else tl.float32,
            "ACCUMULATE": accumulate,
            "PROGRAMMATIC_LAUNCH": programmatic_launch,
            **block,
            **({"launch_pdl": True} if programmatic_launch else {}),
        }

    key = (scale, accumulate, sizes, kind(partial), kind(out))
    run(reduce_partial_sums, grid, out.get_device(), (partial, out, *sizes), key, constants)


@lru_cache(maxsize=4096)
def _blocks(splits: int, rows: int, columns: int) -> tuple[tuple[int, int, int], dict[str, int]]:
    """The grid of `reduce_partial_sums`, and the constants that say what each of its programs adds."""
    elements = min(max(128, next_power_of_two(max(1, rows * columns // MIN_PROGRAMS))), 1024)
    block_columns = min(next_power_of_two(columns), elements)
    block_rows = min(next_power_of_two(rows), elements // block_columns)
    grid = (-(-rows // block_rows), -(-columns // block_columns), 1)
    unroll = min(next_power_of_two(splits), SPLITS_PER_SUM)
    return grid, {"UNROLL": unroll, "ROWS": block_rows, "COLUMNS": block_columns}
