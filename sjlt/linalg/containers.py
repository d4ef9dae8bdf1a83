"""Conversion of a user's container to a `Matrix`, and of results to the kind of the input."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from ..files.source import Source
from ..inputs.containers import checked_sparse, is_sparse, is_tensor
from .checks import as_array, check_matrix
from .cuda_matrix import CudaMatrix, StreamedMatrix
from .matrix import DenseMatrix, FileMatrix, Matrix, Progress, SparseMatrix


def as_matrix(a: Any, name: str = "A", progress: Progress | None = None, device: Any = None) -> Matrix:
    """Return `a`, an array, sparse matrix, tensor, `Source` or path of an .npy file, as a `Matrix`.

    With `device`, a CUDA device, the blocks of a file are copied to it. Raises TypeError or ValueError if `a` is not a
    non-empty float32 or float64 matrix. Whether the values are finite is checked in the first pass.
    """
    if progress is not None and not callable(progress):
        raise TypeError(f"callback must be callable, got {progress!r}")
    if isinstance(a, (str, os.PathLike, Source)):
        file = FileMatrix(a if isinstance(a, Source) else Path(a), progress)
        try:
            check_matrix(name, file.shape, file.dtype)
        except BaseException:
            file.close()
            raise
        return file if device is None else StreamedMatrix(file, device, progress)
    if is_tensor(a):
        check_matrix(name, tuple(a.shape), str(a.dtype).removeprefix("torch."))
        if a.is_cuda:
            return CudaMatrix(a, progress)
        if not a.is_cpu or str(a.layout) != "torch.strided":
            raise TypeError(f"{name} must be a dense CPU or CUDA tensor, got {a.layout} on {a.device}")
        return DenseMatrix(a.detach().resolve_neg().numpy(), progress)
    if is_sparse(a):
        check_matrix(name, a.shape, a.dtype)
        if a.format not in ("csr", "csc"):
            raise TypeError(f"{name} must be CSR or CSC, got {a.format.upper()}: convert it with .tocsr()")
        return SparseMatrix(checked_sparse(a), progress)
    a = as_array(name, a)
    check_matrix(name, a.shape, a.dtype)
    return DenseMatrix(a, progress)


def like_input(A: Any, value: Any) -> Any:
    """Return `value`, an array of results, as a tensor if A is one."""
    if value is None or not is_tensor(A) or is_tensor(value):
        return value
    import torch

    return torch.from_numpy(np.ascontiguousarray(value))
