"""Partial sums of kernels that split their sums: their layout in memory, and their reduction in a fixed order."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ...kernels.config.product import reduce_lanes
from ...kernels.portable.reduce import reduce_partial_sums
from . import device
from .launcher import Launch, kind

FEW_ELEMENTS, MANY_ELEMENTS = 128, 1024  # of the result, per program
MIN_PROGRAMS = 256  # with MANY_ELEMENTS each; for fewer, a program has FEW_ELEMENTS
ALIGN = 16  # elements; Triton itself examines integer arguments for divisibility by 16
NARROW, WIDE = 32, 128  # columns per program


class Sums(NamedTuple):
    """The layout of partial sums in contiguous memory.

    Attributes
    ----------
    shape : tuple of three ints
        (n, splits, k) or (splits, k, n).
    dtype : torch.dtype
        fp64 for fp64 data, else fp32.
    strides : tuple of three ints
        Strides along splits, vectors and components.
    """

    shape: tuple[int, int, int]
    dtype: torch.dtype
    strides: tuple[int, int, int]


def sums_of(splits: int, data: Tensor, out: Tensor, vectors_last: bool = False) -> Sums:
    """The layout of the partial sums of a product `out` (n, k) of `data`, in the memory order of `out`.

    Vectors are the last axis in memory if `vectors_last`. They are always the first or the last axis, because Hopper's
    tensor memory accelerator then discards stores beyond the last vector.
    """
    dtype = torch.float64 if data.dtype == torch.float64 else torch.float32
    n, k = out.shape
    if vectors_last or out.stride(0) < out.stride(1):
        return Sums((splits, k, n), dtype, (k * n, 1, n))
    return Sums((n, splits, k), dtype, (k, splits * k, 1))


def strides(out: Tensor) -> tuple[int, ...]:
    """The strides of a target, (splits, n, k) or (n, k), along splits, vectors and components."""
    return (0, *out.stride())[-3:]


def reduce(scale: float, partial: Tensor, out: Tensor, accumulate: bool) -> None:
    """Write ``scale * partial.sum(0)`` to `out`, or add it to `out` if `accumulate`."""
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
    """A launch of (partial, out) that writes ``scale * partial.sum(0)`` to `out`, or adds it if `accumulate`.

    `partial` has the given `shape` (splits, n, k), `strides` and `dtype`. It must begin at a multiple of 16 bytes
    and be contiguous along n or k.
    """
    splits, rows, columns = shape
    stride_ps, stride_pr, stride_pc = strides
    stride_or, stride_oc = out.stride()
    if stride_pr < stride_pc:
        rows, columns, stride_pr, stride_or, stride_oc = columns, rows, stride_pc, stride_oc, stride_or
    lanes = reduce_lanes(splits, rows * columns)
    block_rows, block_columns = _block(rows, columns) if lanes == 1 else (1, NARROW)
    grid = (-(-rows // block_rows), -(-columns // block_columns), 1)
    vectors = lanes == 1 and stride_oc == 1 and block_rows * block_columns == MANY_ELEMENTS  # several per thread
    aligned = vectors and math.gcd(columns, stride_ps, stride_pr, stride_or) % ALIGN == 0
    dependent = device.dependent_launch(out.device)

    def constants() -> dict[str, Any]:
        return {
            "SUM_DTYPE": tl.float64 if dtype == torch.float64 else tl.float32,
            "ACCUMULATE": accumulate,
            "ALIGN": ALIGN if aligned else 1,
            "ROWS": block_rows,
            "COLUMNS": block_columns,
            "LANES": lanes,
            **dependent,
        }

    sizes = (splits, rows, columns, stride_ps, stride_pr, stride_or, stride_oc)
    key = (accumulate, sizes, dtype, kind(out))
    return Launch(reduce_partial_sums, grid, out.get_device(), sizes, (scale,), key, constants)


def _block(rows: int, columns: int) -> tuple[int, int]:
    """(rows, columns) of a program. There are few such shapes, because each is compiled."""
    elements = MANY_ELEMENTS if rows * columns >= MIN_PROGRAMS * MANY_ELEMENTS else FEW_ELEMENTS
    if columns <= NARROW:
        return elements // NARROW, NARROW
    if columns >= elements or rows < elements // WIDE:
        return 1, elements
    return elements // WIDE, WIDE
