"""Adds up partial sums in a fixed order, so that results are bitwise identical on every run.

With PROGRAMMATIC_LAUNCH (NVIDIA's programmatic dependent launch), programs start while the last programs of the
previous kernel still run, and wait for their results. This saves 4 % of the time of S A with A (16384, 1024), k = 1024
(H200).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..config import product
from .program import known_multiple, scalar, store_result, wait_for_previous

UNROLL = tl.constexpr(product.SPLITS_PER_SUM)


@triton.jit(
    do_not_specialize=["splits", "rows", "columns", "stride_ps", "stride_pr", "stride_or"],
    do_not_specialize_on_alignment=["stride_oc"],
)
def reduce_partial_sums(
    partial,
    out,
    splits,
    rows,
    columns,
    stride_ps,
    stride_pr,
    stride_or,
    stride_oc,
    scale: tl.float64,
    SUM_DTYPE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    PROGRAMMATIC_LAUNCH: tl.constexpr,
):
    """out = scale * sum of `partial` over its first axis (+ out); grid (blocks of ROWS, blocks of COLUMNS).

    partial : (splits, rows, columns), of SUM_DTYPE, contiguous along columns.  out : (rows, columns), rounded once.
    ALIGN : divides columns, stride_ps, stride_pr and stride_or.  LANES : number of sums computed side by side, each
    over every LANES-th split, and added last; more than 1 where the results are too few to occupy the device.

    The loads of UNROLL splits are in flight together. These splits are added in order, and the sums of UNROLL splits
    with compensation: the rounding error of each addition (Knuth's TwoSum) is kept and added at the end.
    """
    wait_for_previous(PROGRAMMATIC_LAUNCH)
    columns, stride_ps = known_multiple(columns, ALIGN), known_multiple(stride_ps, ALIGN)
    stride_pr, stride_or = known_multiple(stride_pr, ALIGN), known_multiple(stride_or, ALIGN)
    lane = tl.arange(0, LANES * ROWS) // ROWS
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, LANES * ROWS) % ROWS
    c = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    partial += lane[:, None] * stride_ps + r[:, None] * stride_pr + c[None, :]
    total = tl.zeros((LANES * ROWS, COLUMNS), SUM_DTYPE)
    lost = tl.zeros((LANES * ROWS, COLUMNS), SUM_DTYPE)
    for first in range(0, splits, UNROLL * LANES):
        part = tl.zeros((LANES * ROWS, COLUMNS), SUM_DTYPE)
        for s in tl.static_range(UNROLL):
            part += tl.load(partial, mask=inside & (first + s * LANES + lane < splits)[:, None], other=0)
            partial += LANES * stride_ps
        before = total
        total = before + part
        rest = total - before
        lost += (before - (total - rest)) + (part - rest)
    total += tl.where(lost == lost, lost, 0)  # not NaN, which it is if the total is infinite
    if LANES > 1:
        total = tl.sum(tl.reshape(total, LANES, ROWS, COLUMNS), 0)
        r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (r < rows)[:, None] & (c < columns)[None, :]
    total *= scalar(scale, SUM_DTYPE)
    store_result(total, out + (r[:, None] * stride_or + c[None, :] * stride_oc), inside, ACCUMULATE)
