"""Launches of `multiply_tall`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.portable import tall_product as kernels
from . import device
from .launcher import kind, run

MIN_ROWS = 1 << 16  # of A; below, host time exceeds what the kernel saves
MIN_COLUMNS = 64  # of A and V; for fewer, cuBLAS is as fast, since the product takes as long as reading A
# For (2^20, 2048) times 128 columns on an H100: 5.4 ms; 8.4 with 2 stages, 12 with 256 rows, 20 with 4 warps.
ROWS, COLUMNS, STEP, STAGES, WARPS = 128, 128, 32, 3, 8


def eligible(a: Tensor, v: Tensor) -> bool:
    """Whether `multiply` can read `a` and is faster than torch's product with v (n, columns)."""
    large = a.shape[0] >= MIN_ROWS and min(v.shape) >= MIN_COLUMNS
    return large and a.dtype == torch.float32 and a.stride(1) == 1 and device.describe(a.device).asynchronous_copies


def multiply(a: Tensor, v: Tensor) -> Tensor:
    """A V in fp32, for A (m, n) in fp32 and V (n, columns) in fp32 or fp64."""
    (m, n), width = a.shape, v.shape[1]
    high, low = _parts(v.T)
    out = a.new_empty((m, width))
    grid = (-(-m // ROWS), -(-width // COLUMNS), 1)
    key = (m, n, width, a.stride(0), kind(a), kind(high), kind(low), kind(out))
    constants = {"ROWS": ROWS, "COLUMNS": COLUMNS, "STEP": STEP, "num_warps": WARPS, "num_stages": STAGES}
    with device.current(a):
        arguments = (a, high, low, out, m, n, width, a.stride(0))
        run(kernels.multiply_tall, grid, a.get_device(), arguments, key, lambda: constants)
    return out


def _parts(v: Tensor) -> tuple[Tensor, Tensor]:
    """Contiguous (high, low), numbers in TF32 as fp32, whose sum is v."""
    high = (v.float().contiguous().view(torch.int32) & kernels.TF32_MASK.value).view(torch.float32)
    low = (v - high).float().contiguous()
    return high, low
