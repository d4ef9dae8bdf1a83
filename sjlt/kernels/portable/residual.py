"""The gradient of a least-squares problem with one right-hand side, in a single read of A.

Two matrix-vector products read A twice.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["m", "steps", "stride_b"])
def residual_gradient(
    a,
    x,
    b,
    gradients,
    squares,
    m,
    n,
    stride_a,
    stride_b,
    steps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Parts of A'(b - A x) and ||b - A x||^2, in fp64, from every grid-th block of ROWS rows; grid (programs,).

    a : (m, n), contiguous rows.  x : (n,), contiguous.  b : (m,).  gradients : (programs, n).  squares : (programs,).
    steps : blocks per program, rounded up.  COLUMNS : power of two, at least n.
    STAGES : blocks that are loaded ahead, plus one.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    c = tl.arange(0, COLUMNS)
    x_row = tl.load(x + c, mask=c < n, other=0)[None, :]
    gradient = tl.zeros((ROWS, COLUMNS), tl.float64)
    total = tl.zeros((ROWS,), tl.float64)
    for step in tl.range(0, steps, num_stages=STAGES):
        r = (step * programs + program).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (r < m)[:, None] & (c < n)[None, :]
        block = tl.load(a + r[:, None] * stride_a + c[None, :], mask=inside, other=0).to(tl.float64)
        residual = tl.load(b + r * stride_b, mask=r < m, other=0) - tl.sum(block * x_row, 1)
        gradient += block * residual[:, None]
        total += residual * residual
    tl.store(gradients + program.to(tl.int64) * n + c, tl.sum(gradient, 0), mask=c < n)
    tl.store(squares + program, tl.sum(total, 0))
