"""The sum of partial results in a fixed order: results are the same to the bit on every run.

Where OVERLAP, by Nvidia's programmatic dependent launch, its programs start while the last of those before still run,
and wait for what they write: of S A with A (16384, 1024), k = 1024, that is 4 % of the time (H200).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["splits"])
def reduce_partials(
    partial,
    out,
    splits,
    rows,
    columns,
    stride_ps,
    stride_pr,
    stride_pc,
    stride_or,
    stride_oc,
    NNZ: tl.constexpr,
    DTYPE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out = 1/sqrt(NNZ) * sum of partial over its first axis (+ out); grid (blocks of ROWS, blocks of COLUMNS).

    partial (splits, rows, columns) is in DTYPE, out (rows, columns) is rounded once. Columns are the axis along which
    memory is contiguous. Sums run over SPLITS parts, whose loads are under way together, then over these sums.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    partial += r[:, None] * stride_pr + c[None, :] * stride_pc
    total = tl.zeros((ROWS, COLUMNS), DTYPE)
    for first in range(0, splits, SPLITS):
        part = tl.zeros((ROWS, COLUMNS), DTYPE)
        for s in tl.static_range(SPLITS):
            part += tl.load(partial, mask=inside & (first + s < splits), other=0)
            partial += stride_ps
        total += part
    total *= NNZ**-0.5
    out += r[:, None] * stride_or + c[None, :] * stride_oc
    if ACCUMULATE:
        total += tl.load(out, mask=inside)
    tl.store(out, total.to(out.dtype.element_ty), mask=inside)
