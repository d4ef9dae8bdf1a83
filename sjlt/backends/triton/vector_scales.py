"""Power-of-two scales of fp32 vectors that are multiplied as pairs of fp16 values."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ...kernels.config import arithmetic
from ...kernels.portable.fp32_split import scale_vectors
from .launcher import Launch, kind

BLOCK_VECTORS = 256
_CONSTANTS = {
    "BLOCK_VECTORS": BLOCK_VECTORS,
    "SAMPLE_FEATURES": arithmetic.SAMPLE_FEATURES,
    "LINE_FEATURES": arithmetic.LINE_FEATURES,
}


def vector_scales(mode: int, x: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that returns the scales, fp32 of shape (n,), of data with the shape, strides and kind of `x`.

    In modes other than FP16_PAIR it returns its argument, because kernels then do not read their tensor of scales.
    """
    if mode != arithmetic.FP16_PAIR:
        return lambda x: x
    n, d = x.shape
    sizes, key = (n, d, *x.stride()), (n, d, x.stride(), kind(x))
    launch = Launch(scale_vectors, (-(-n // BLOCK_VECTORS), 1, 1), x.get_device(), sizes, (), key, lambda: _CONSTANTS)

    def compute(x: Tensor) -> Tensor:
        scales = x.new_empty(n)
        launch((x, scales))
        return scales

    return compute
