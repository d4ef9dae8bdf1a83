"""Sparse data on Triton: products of X (n, n_features), given as the three arrays of CSR.

`kernels.portable.sparse` describes the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl
from torch import Tensor

from ...kernels.config.product import SCRATCH_BYTES, kernel_geometry, next_power_of_two
from ...kernels.portable import sparse as kernels
from . import device, partial_sums
from .launcher import OPTIONS

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec

TERMS = 64  # per step of a program of one warp, so that on AMD, too, each thread has one
BLOCK = 128  # nonzeros per program that encodes or gathers
CODES_BYTES = SUMS_BYTES = SCRATCH_BYTES // 2  # for codes, and for partial sums
CALLS = 16  # a program of the iid law computes the components of so many calls of Philox
MIN_PAIRS = 1 << 15  # pairs of a row and a part that occupy a large GPU
MAX_PART, MIN_PART = 4096, 32  # average nonzeros per part: at most, for accuracy; at least, to be worth a partial sum


def project_exact(
    spec: SketchSpec, values: Tensor, indptr: Tensor, columns: Tensor, out: Tensor, accumulate: bool
) -> None:
    """Write X Sᵀ under the exact law to `out` (n, k), or add it if `accumulate`."""
    if device.describe(values.device).asynchronous_copies:
        from . import sparse_shared

        if sparse_shared.fits(spec, values):
            launch = partial(sparse_shared.project, spec, values, indptr, columns)
            _write(values, out, accumulate, spec.nnz**-0.5, launch, sparse_shared.is_in_one_pass(spec, values))
            return
    _write(values, out, accumulate, spec.nnz**-0.5, partial(_project_in_memory, spec, values, indptr, columns))


def _project_in_memory(
    spec: SketchSpec, values: Tensor, indptr: Tensor, columns: Tensor, target: Tensor, splits: int, scale: float,
    accumulate: bool,
) -> None:  # fmt: skip
    """Write scale * X Sᵀ, or its partial sums, to `target` by kernels that add to sums in device memory."""
    part = spec.one_stack()
    geometry = kernel_geometry(part.n_components, part.nnz, 0, spec.stacks)
    span = max(1, CODES_BYTES // (4 * spec.nnz))  # nonzeros encoded at a time
    block = next_power_of_two(spec.nnz)
    rows = max(1, TERMS // block)
    codes = torch.empty((min(span, len(values)), spec.nnz), dtype=torch.int32, device=values.device)
    if not accumulate:
        target.zero_()
    for first in range(0, len(values), span):
        count = min(span, len(values) - first)
        kernels.encode_columns[(-(-count // BLOCK),)](
            columns[first:], codes, count, spec.feature_offset, spec.seed, GEOMETRY=geometry, STACKS=spec.stacks,
            BLOCK=BLOCK, num_warps=4, **OPTIONS,
        )  # fmt: skip
        kernels.project_sparse[(-(-target.shape[-2] * splits // rows),)](
            values, indptr, codes, target, target.shape[-2], splits, first, first + count,
            *partial_sums.strides(target), SCALE=scale, SUM_DTYPE=_sum_dtype(target), NNZ=spec.nnz, NNZ_BLOCK=block,
            ROWS=rows, num_warps=1, **OPTIONS,
        )  # fmt: skip


def project_iid(
    spec: SketchSpec, values: Tensor, indptr: Tensor, columns: Tensor, out: Tensor, accumulate: bool
) -> None:
    """Write X Sᵀ under the iid law to `out` (n, k), or add it if `accumulate`."""
    lanes, k = spec.lanes, spec.n_components

    def launch(target: Tensor, splits: int, scale: float, accumulate: bool) -> None:
        if not accumulate:
            target.zero_()
        grid = (len(out) * splits, -(-k // (CALLS * lanes.per_call)))
        kernels.project_sparse_iid[grid](
            values, indptr, columns, target, splits, k, *partial_sums.strides(target), spec.feature_offset, spec.seed,
            lanes.threshold, SCALE=scale, SUM_DTYPE=_sum_dtype(target), BITS=lanes.bits, CALLS=CALLS, num_warps=4,
            **OPTIONS,
        )  # fmt: skip

    _write(values, out, accumulate, lanes.scale(k), launch)


def gather_exact(spec: SketchSpec, gradient: Tensor, rows: Tensor, columns: Tensor, out: Tensor) -> None:
    """Write (gradient S)[rows[e], columns[e]] under the exact law to out[e]."""
    part = spec.one_stack()
    geometry = kernel_geometry(part.n_components, part.nnz, 0, spec.stacks)
    if len(out):
        with device.current(out):
            kernels.gather_sparse[(-(-len(out) // BLOCK),)](
                gradient, rows, columns, out, len(out), *gradient.stride(), spec.feature_offset, spec.seed,
                SCALE=spec.nnz**-0.5, SUM_DTYPE=_sum_dtype(gradient), GEOMETRY=geometry, STACKS=spec.stacks,
                BLOCK=BLOCK, num_warps=4, **OPTIONS,
            )  # fmt: skip


def gather_iid(spec: SketchSpec, gradient: Tensor, rows: Tensor, columns: Tensor, out: Tensor) -> None:
    """Write (gradient S)[rows[e], columns[e]] under the iid law to out[e]."""
    lanes, k = spec.lanes, spec.n_components
    if len(out):
        with device.current(out):
            kernels.gather_sparse_iid[(len(out),)](
                gradient, rows, columns, out, k, *gradient.stride(), spec.feature_offset, spec.seed, lanes.threshold,
                SCALE=lanes.scale(k), SUM_DTYPE=_sum_dtype(gradient), BITS=lanes.bits, CALLS=CALLS, num_warps=4,
                **OPTIONS,
            )  # fmt: skip


def count_splits(rows: int, nonzeros: int, k: int, itemsize: int) -> int:
    """The number of parts that the nonzeros of each row are split into.

    It depends on the sizes only, so that results are reproducible.
    """
    average = nonzeros // max(1, rows)
    wanted = max(-(-MIN_PAIRS // max(1, rows)), -(-average // MAX_PART))
    fitting = SUMS_BYTES // max(1, rows * k * itemsize)
    return max(1, min(wanted, fitting, average // MIN_PART))


def _write(
    values: Tensor, out: Tensor, accumulate: bool, scale: float, launch: Callable[..., None], rounds_once: bool = False
) -> None:
    """Write a product to `out`, directly or by way of partial sums.

    Parameters
    ----------
    launch : callable
        ``launch(target, splits, scale, accumulate)`` writes the product times `scale`, or its partial sums.
    rounds_once : bool
        Whether `launch` writes every element only once, so that a target of 16 bits is rounded once.
    """
    if not len(values) or not out.numel():
        if not accumulate:
            out.zero_()
        return
    sum_dtype = torch.promote_types(values.dtype, torch.float32)
    splits = count_splits(len(out), len(values), out.shape[1], sum_dtype.itemsize)
    with device.current(out):
        if splits == 1 and (rounds_once or out.dtype == sum_dtype):
            launch(out, 1, scale, accumulate)
            return
        sums = torch.empty((splits, *out.shape), dtype=sum_dtype, device=out.device)
        launch(sums, splits, 1.0, False)
        partial_sums.reduce(scale, sums, out, accumulate)


def _sum_dtype(x: Tensor) -> Any:
    return tl.float64 if x.dtype == torch.float64 else tl.float32
