"""Products in 16 bits by torch's matrix multiplication, with a dense matrix of the entries that a kernel writes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...kernels.config.dense_matrix import COLUMNS, DenseMatrix
from ...kernels.portable.dense_matrix import write_dense_matrix
from ...laws import exact as law
from .launcher import Launch, only_compiles
from .one_tile import ONES

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec
    from .prepared import Call

# Settings of torch with which sums are rounded to 16 bits before they are complete. They are cleared while a product is
# launched. They belong to the process: meanwhile, products of other threads are as accurate, their compiled functions
# may be compiled once more, and a setting that they clear may be lost.
ROUNDED_SUMS = {
    torch.float16: ("allow_fp16_reduced_precision_reduction", "allow_fp16_accumulation"),
    torch.bfloat16: ("allow_bf16_reduced_precision_reduction",),
}
_matmul: Any = torch.backends.cuda.matmul
_lock = RLock()
_NO_CONTEXT = nullcontext()


def prepare(chosen: DenseMatrix, spec: SketchSpec, data: Tensor, out: Tensor, adjoint: bool) -> Call:
    """The `Call` (spec, data, out) that writes X Sᵀ or, if `adjoint`, Y S."""
    d, k, scale = (out if adjoint else data).shape[1], spec.n_components, spec.nnz**-0.5
    write, strides = _prepare_matrix(chosen, spec, data, d), data.stride()
    # S or Sᵀ: the second factor of the product. Rows of S are longer in memory than d.
    shape, steps = ((k, d), (chosen.row_stride, 1)) if adjoint else ((d, k), (1, chosen.row_stride))
    names, multiply = ROUNDED_SUMS[data.dtype], torch.addmm

    def call(spec: SketchSpec, data: Tensor, out: Tensor) -> None:
        matrix = data.new_empty_strided(shape, steps)
        if not write.start((matrix.data_ptr(),), spec.seed):
            write.search((matrix.view(torch.uint16),), spec.seed)
            if only_compiles():
                return
        if data.stride() != strides:  # the caller's tensors are transposed
            data, out = data.t(), out.t()
        with _lock:
            allowed = [name for name in names if getattr(_matmul, name, False)]
            try:
                for name in allowed:
                    setattr(_matmul, name, False)
                with _writing_to(out):
                    multiply(out, data, matrix, beta=0, alpha=scale, out=out)
            finally:
                for name in allowed:
                    setattr(_matmul, name, True)

    return call


def _writing_to(out: Tensor) -> AbstractContextManager[Any]:
    """A context in which torch writes to `out`: inference tensors cannot be written to outside of inference mode."""
    return torch.inference_mode() if out.is_inference() else _NO_CONTEXT


def _prepare_matrix(chosen: DenseMatrix, spec: SketchSpec, data: Tensor, d: int) -> Launch:
    """The launch of (matrix,) and the seed that writes the entries of d columns."""
    g = law.geometry(spec.n_components, spec.nnz, 0)
    sizes = spec.feature_offset, d, chosen.row_stride, spec.n_components, spec.nnz
    after = (*sizes, g.n_tiles, g.log_group, g.log_chunk, ONES[data.dtype])
    options = {"COLUMNS": COLUMNS, "SUB_BLOCKS": chosen.sub_blocks, "num_warps": 4}
    grid = (-(-d // COLUMNS), g.n_tiles, 1)
    return Launch(write_dense_matrix, grid, data.get_device(), (), after, (chosen.sub_blocks,), lambda: options)
