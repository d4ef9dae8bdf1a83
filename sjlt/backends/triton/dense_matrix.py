"""Products in 16 bits by torch's matrix multiplication, with a dense matrix of the entries that a kernel writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...kernels.config.arithmetic import ONE_BF16, ONE_FP16
from ...kernels.config.dense_matrix import COLUMNS, DenseMatrix
from ...kernels.portable.dense_matrix import write_dense_matrix
from ...laws import exact as law
from .launcher import Launch

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec
    from .prepared import Call

ONES = {torch.float16: ONE_FP16, torch.bfloat16: ONE_BF16}
# Attributes of torch.backends.cuda.matmul with which sums are rounded to 16 bits before they are complete.
ROUNDED_SUMS = {
    torch.float16: ("allow_fp16_reduced_precision_reduction", "allow_fp16_accumulation"),
    torch.bfloat16: ("allow_bf16_reduced_precision_reduction",),
}
_lock = Lock()


def prepare(chosen: DenseMatrix, spec: SketchSpec, data: Tensor, out: Tensor, adjoint: bool) -> Call:
    """The `Call` (spec, data, out) that writes X Sᵀ or, if `adjoint`, Y S."""
    d, k, scale = (out if adjoint else data).shape[1], spec.n_components, spec.nnz**-0.5
    write = _prepare_matrix(chosen, spec, data, d)
    shape, views = (k, chosen.row_stride), [(each.shape, each.stride()) for each in (data, out)]

    def call(spec: SketchSpec, data: Tensor, out: Tensor) -> None:
        bits = data.new_empty(shape, dtype=torch.uint16)
        write((bits,), spec.seed)
        matrix = bits.view(data.dtype)[:, :d]
        # The caller's tensors may be transposed.
        data, out = (t.as_strided(*view) for t, view in zip((data, out), views, strict=True))
        with _complete_sums(data.dtype):
            torch.addmm(out, data, matrix if adjoint else matrix.t(), beta=0, alpha=scale, out=out)

    return call


def _prepare_matrix(chosen: DenseMatrix, spec: SketchSpec, data: Tensor, d: int) -> Launch:
    """The launch of (matrix,) and the seed that writes the entries of d columns."""
    g = law.geometry(spec.n_components, spec.nnz, 0)
    sizes = spec.feature_offset, d, chosen.row_stride, spec.n_components, spec.nnz
    after = (*sizes, g.n_tiles, g.log_group, g.log_chunk, ONES[data.dtype])
    options = {"COLUMNS": COLUMNS, "SUB_BLOCKS": chosen.sub_blocks, "num_warps": 4}
    grid = (-(-d // COLUMNS), g.n_tiles, 1)
    return Launch(write_dense_matrix, grid, data.get_device(), (), after, (chosen.sub_blocks,), lambda: options)


@contextmanager
def _complete_sums(dtype: torch.dtype) -> Iterator[None]:
    """Context in which torch adds products of 16-bit numbers in fp32 and rounds only their sum.

    These settings belong to the process: other threads' products may be as accurate meanwhile.
    """
    matmul: Any = torch.backends.cuda.matmul
    with _lock:
        allowed = [name for name in ROUNDED_SUMS[dtype] if getattr(matmul, name, False)]
        try:
            for name in allowed:
                setattr(matmul, name, False)
            yield
        finally:
            for name in allowed:
                setattr(matmul, name, True)
