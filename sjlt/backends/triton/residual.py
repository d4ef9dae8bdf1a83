"""Launches of `residual_gradient`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.portable import residual as kernels
from . import device
from .launcher import kind, run

MAX_COLUMNS = 4096
MIN_ELEMENTS = 1 << 20  # of A; below, host time exceeds that of two reads
# Four programs with 128 KiB of loads in flight fit on a multiprocessor of compute capability 8.0 or 9.0.
ELEMENTS, WARPS, STAGES = 2048, 4, 3  # A's elements per block of rows
PROGRAMS = 4  # per multiprocessor


def eligible(a: Tensor, x: Tensor) -> bool:
    """Whether `residual_gradient` can read this matrix, and is faster than two products with x (n, columns)."""
    rows_contiguous = a.stride(1) == 1 and a.shape[1] <= MAX_COLUMNS
    return a.is_cuda and a.dtype == torch.float64 and x.shape[1] == 1 and rows_contiguous and a.numel() >= MIN_ELEMENTS


def residual_gradient(a: Tensor, x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """A'(b - A x) of shape (n, 1) and ||b - A x||^2 of shape (1,), for x (n, 1) and b (m, 1), all in fp64."""
    m, n = a.shape
    columns = 1 << (n - 1).bit_length()
    rows = max(1, ELEMENTS // columns)
    programs = min(-(-m // rows), PROGRAMS * device.describe(a.device).multiprocessors)
    gradients, squares = a.new_empty((programs, n)), a.new_empty(programs)
    x = x[:, 0].contiguous()
    sizes = (m, n, a.stride(0), b.stride(0), -(-m // (programs * rows)))
    key = (n, a.stride(0), kind(a), kind(x), kind(b))
    constants = {"ROWS": rows, "COLUMNS": columns, "STAGES": STAGES, "num_warps": WARPS}
    with device.current(a):
        arguments = (a, x, b, gradients, squares, *sizes)
        run(kernels.residual_gradient, (programs, 1, 1), a.get_device(), arguments, key, lambda: constants)
    return gradients.sum(0)[:, None], squares.sum(0, keepdim=True)
