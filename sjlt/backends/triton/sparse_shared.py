"""Launches of `project_sparse_shared`, which reads codes of all columns or of a span of nonzeros at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl
from torch import Tensor

from ...kernels.config.product import SCRATCH_BYTES, kernel_geometry, next_power_of_two
from ...kernels.nvidia.shared_memory import LIBRARIES
from ...kernels.nvidia.sparse_sums import project_sparse_shared
from ...kernels.portable.sparse import encode_columns
from . import device, partial_sums
from .launcher import OPTIONS, kind, run

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec

LANES = 32
ENCODE_BLOCK = 128  # columns or nonzeros per program that encodes
CODES_BYTES = SCRATCH_BYTES // 2
MAX_ROW_BYTES = 64 << 10  # for the sums of a row; three programs then share a multiprocessor
# For the sums of a program, unless a single row needs more; with so few, enough warps hide the latency of loads.
# (200000, 2^20) -> 512 with 100 nonzeros per row takes 2.7 memory floors, 3.8 with 8 KiB and 3.9 with 16 KiB (H200).
PROGRAM_BYTES = 4 << 10
MIN_BATCH = 16  # nonzeros of a row that are loaded at a time


def fits(spec: SketchSpec, values: Tensor) -> bool:
    """Whether the device can run the kernel, and its shared memory holds the sums of a row."""
    row_bytes = spec.n_components * _sum_dtype(values).itemsize
    return (
        device.describe(values.device).asynchronous_copies
        and row_bytes <= MAX_ROW_BYTES
        and spec.nnz <= LANES
        and spec.n_features < 1 << 31
    )


def is_in_one_pass(spec: SketchSpec, values: Tensor) -> bool:
    """Whether the codes of all columns or of all nonzeros fit in memory at a time."""
    return min(spec.n_features, len(values)) <= _span(spec)


def project(
    spec: SketchSpec, values: Tensor, indptr: Tensor, columns: Tensor, target: Tensor, splits: int, scale: float,
    accumulate: bool,
) -> None:  # fmt: skip
    """Write scale * X Sᵀ to `target` (n, k), or its partial sums (splits, n, k); add them if `accumulate`."""
    nonzeros, span = len(values), _span(spec)
    has_table = spec.n_features <= min(span, nonzeros)
    step = nonzeros if has_table else min(span, nonzeros)
    codes = torch.empty((spec.n_features if has_table else step, spec.nnz), dtype=torch.int32, device=values.device)
    part = spec.one_stack()
    geometry = kernel_geometry(part.n_components, part.nnz, 0, spec.stacks)
    for first in range(0, nonzeros, step):
        count = min(step, nonzeros - first)
        encoded, n_encoded = (None, spec.n_features) if has_table else (columns[first:], count)
        encode_columns[(-(-n_encoded // ENCODE_BLOCK),)](
            encoded, codes, n_encoded, spec.feature_offset, spec.seed, GEOMETRY=geometry, STACKS=spec.stacks,
            BLOCK=ENCODE_BLOCK, num_warps=4, **OPTIONS,
        )  # fmt: skip
        tensors = values, indptr, columns, codes, target
        _add(spec, tensors, splits, (first, first + count), scale, accumulate or first > 0, has_table)


def _add(
    spec: SketchSpec, tensors: tuple[Tensor, ...], splits: int, span: tuple[int, int], scale: float, accumulate: bool,
    has_table: bool,
) -> None:  # fmt: skip
    """Add the terms of nonzeros span[0] to span[1] - 1; tensors are (values, indptr, columns, codes, target)."""
    values, target = tensors[0], tensors[-1]
    n, k = target.shape[-2:]
    block, sum_dtype = next_power_of_two(spec.nnz), _sum_dtype(values)
    item, rows = sum_dtype.itemsize, LANES // block
    while rows > 1 and rows * k * item > PROGRAM_BYTES:
        rows //= 2
    strides = partial_sums.strides(target)
    constants = {
        "SCALE": scale,
        "SUM_DTYPE": tl.float64 if item == 8 else tl.float32,
        "NNZ": spec.nnz,
        "NNZ_BLOCK": block,
        "SHARE": LANES // rows,
        "BATCH": max(MIN_BATCH, LANES // rows),
        "TABLE": has_table,
        "ACCUMULATE": accumulate,
        "SHARED_BYTES": _rounded_up(rows * k * item),
    }
    key = (*constants.values(), strides[-1], tuple(map(kind, tensors)))
    arguments = (*tensors, n, splits, *span, k, *strides)
    options: dict[str, Any] = {**constants, "num_warps": 1, "extern_libs": LIBRARIES}
    run(project_sparse_shared, (-(-n * splits // rows), 1, 1), values.get_device(), arguments, key, lambda: options)


def _rounded_up(size: int) -> int:
    """`size` rounded up to one of few sizes of shared memory, because each is compiled."""
    return max(1024, next_power_of_two(size)) if size <= PROGRAM_BYTES else -(-size // 4096) * 4096


def _span(spec: SketchSpec) -> int:
    """The number of columns or nonzeros whose codes fit in CODES_BYTES."""
    return max(1, CODES_BYTES // (4 * spec.nnz))


def _sum_dtype(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)
