"""A V for a tall A in fp32 and few columns, on tensor cores, with the accuracy of fp32.

A number in fp32 is the sum of two in TF32, up to 2^-21 of it, so a product takes three on tensor cores: at 140 Tflop/s
on an H100, half the time of fp32 arithmetic. It is launched on NVIDIA only.
"""

from __future__ import annotations

import triton
import triton.language as tl

TF32_MASK = tl.constexpr(-8192)  # of the bits of an fp32 number that TF32 keeps


@triton.jit
def multiply_tall(
    a, high, low, out, m, n, width, stride_a,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """out = A (high + low)'; grid (blocks of ROWS rows, blocks of COLUMNS columns).

    a : (m, n), contiguous rows.  high, low : (width, n), contiguous; numbers in TF32.  out : (m, width), contiguous.
    STEP : columns of A that are multiplied at a time.
    """
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    j = tl.arange(0, STEP)
    a += r[:, None] * stride_a + j[None, :]
    factor = c[:, None] * n + j[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, n, STEP):
        inside = (first + j < n)[None, :]
        x = tl.load(a + first, mask=inside & (r < m)[:, None], other=0.0)
        x_high = (x.to(tl.int32, bitcast=True) & TF32_MASK).to(tl.float32, bitcast=True)
        v_high = tl.load(high + factor + first, mask=inside & (c < width)[:, None], other=0.0).T
        v_low = tl.load(low + factor + first, mask=inside & (c < width)[:, None], other=0.0).T
        # Tensor cores round sums toward 0, so that errors of long sums would add up.
        z = tl.dot(x - x_high, v_high, input_precision="tf32")
        z = tl.dot(x_high, v_low, z, input_precision="tf32")
        z = tl.dot(x_high, v_high, z, input_precision="tf32")
        total += z
    tl.store(out + r[:, None] * width + c[None, :], total, mask=(r < m)[:, None] & (c < width)[None, :])
