"""16-bit floating-point numbers on the CPU, as NumPy arrays of their bits."""

from __future__ import annotations

import numpy as np

BFLOAT16 = np.dtype([("bfloat16", np.int16)])  # the bits of bf16, for which NumPy has no dtype


def to_bfloat16(numbers: np.ndarray) -> np.ndarray:
    """fp32 rounded to the nearest bf16, ties to even. Overwrites `numbers`."""
    bits, is_nan = numbers.view(np.uint32), np.isnan(numbers)
    np.add(bits, 0x7FFF + (bits >> 16 & 1), out=bits, where=~is_nan)
    np.bitwise_or(bits, 0x400000, out=bits, where=is_nan)  # a NaN stays one when its low bits go
    return (bits >> 16).astype(np.uint16).view(BFLOAT16)
