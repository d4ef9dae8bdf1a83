"""The power-of-two scales with which fp32 vectors become pairs of fp16 numbers."""

from __future__ import annotations

from torch import Tensor

from ...kernels.config import arithmetic
from ...kernels.portable.fp32_split import scale_vectors
from .launcher import kind, run

BLOCK_VECTORS = 256
_CONSTANTS = {
    "BLOCK_VECTORS": BLOCK_VECTORS,
    "SAMPLE_FEATURES": arithmetic.SAMPLE_FEATURES,
    "LINE_FEATURES": arithmetic.LINE_FEATURES,
}


def vector_scales(mode: int, x: Tensor) -> Tensor:
    """The scales of the vectors of x, fp32 (n,), if `mode` is FP16_PAIR; else any tensor, which kernels do not read."""
    if mode != arithmetic.FP16_PAIR:
        return x
    n, d = x.shape
    scales = x.new_empty(n)
    sizes = (n, d, *x.stride())
    grid, key = (-(-n // BLOCK_VECTORS), 1, 1), (sizes, kind(x), kind(scales))
    run(scale_vectors, grid, x.get_device(), (x, scales, *sizes), key, lambda: _CONSTANTS)
    return scales
