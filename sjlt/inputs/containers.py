"""What data comes in: arrays, sparse matrices and tensors told apart, checked, refused where they have no meaning."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np


def is_sparse(x: Any) -> bool:
    """Whether x is of scipy.sparse, which whoever holds such a matrix has imported."""
    sparse = sys.modules.get("scipy.sparse")
    return sparse is not None and bool(sparse.issparse(x))


def is_tensor(x: Any) -> bool:
    """Whether x is a torch tensor; torch, too, is imported then."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, getattr(torch, "Tensor", ()))


def container(x: Any) -> Any:
    """`x` itself where it is sparse, else as an ndarray; refused where it has no meaning here."""
    if is_sparse(x):
        return x
    if hasattr(x, "matvec"):
        raise TypeError(f"{type(x).__name__} is an operator: compose it by scipy.sparse.linalg.aslinearoperator")
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError("masked arrays are refused: the mask would be lost; fill it first (x.filled(0))")
    x = np.asarray(x)
    result_dtype(x.dtype)
    return x


def result_dtype(dtype: np.dtype) -> np.dtype:
    """fp16, fp32 and fp64 stay; integers and bool become fp64, as NumPy's own float operations do; no others."""
    if dtype.kind in "iub":
        return np.dtype(np.float64)
    if dtype.kind == "f" and dtype.itemsize <= 8:
        return dtype.newbyteorder("=")
    raise TypeError(f"dtype {dtype} is refused: a sketch takes float16, float32, float64, integers and bool")


# ------------------------------------------------------------------------------------- shapes


def _shown(x: Any) -> str:
    kind = "a sparse matrix" if is_sparse(x) else "a tensor" if is_tensor(x) else "an array"
    return f"{kind} of shape {tuple(x.shape)}"


def check_width(name: str, x: Any, width: int, meaning: str) -> None:
    """Data vectors lie along the last axis of x, and have `width` numbers."""
    if x.ndim == 0 or x.shape[-1] != width:
        raise ValueError(f"{name} needs a last axis of {meaning} = {width}, got {_shown(x)}")


def check_height(name: str, a: Any, shape: tuple[int, int]) -> None:
    """The operator of that shape can be multiplied by `a`, a vector or a matrix."""
    if a.ndim not in (1, 2) or a.shape[0] != shape[1]:
        raise ValueError(
            f"{name} @ A needs A of shape ({shape[1]},) or ({shape[1]}, n) for the operator's shape {shape}, "
            f"got {_shown(a)}"
        )


def elements_meet(shape: Sequence[int], strides: Sequence[int], size: int = 1) -> bool:
    """Whether elements may share memory: some axis does not step over all that the axes of smaller steps reach.

    size : an element's, in the unit of the strides.
    """
    if 0 in shape:
        return False
    reach = size - 1
    for step, n in sorted((abs(step), n) for step, n in zip(strides, shape, strict=True)):
        if n > 1 and step <= reach:
            return True
        reach += step * (n - 1)
    return False


def overlap(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays have memory in common; also where that takes too long to tell."""
    try:
        return np.shares_memory(a, b, max_work=10_000)  # type: ignore[arg-type]  # any int is taken
    except np.exceptions.TooHardError:
        return True


# ------------------------------------------------------------------------------------- sparse matrices


def checked_sparse(x: Any) -> Any:
    """`x`, in CSR or CSC, with indices that are safe to follow and numbers that kernels can read."""
    if x.format not in ("csr", "csc"):
        raise TypeError(f"sparse input must be CSR or CSC, got {x.format.upper()}: convert it with .tocsr()")
    if x.ndim != 2:
        raise ValueError(f"sparse input must have 2 dimensions, got {_shown(x)}")
    if result_dtype(x.dtype) == np.float16:
        raise TypeError("sparse float16 is refused, as scipy.sparse does: convert it with .astype(np.float32)")
    _check_indices(x)
    native = x.data.dtype.newbyteorder("=")
    index = np.result_type(x.indices, x.indptr)
    arrays = (x.data, native), (x.indices, index), (x.indptr, index)
    if any(a.dtype != dtype or not a.flags.c_contiguous or not a.flags.aligned for a, dtype in arrays):
        x = type(x)(tuple(np.ascontiguousarray(a, dtype) for a, dtype in arrays), shape=x.shape)
    return x


def _check_indices(x: Any) -> None:
    # scipy's own check_format may rewrite the caller's arrays.
    rows, columns = x.shape if x.format == "csr" else x.shape[::-1]
    indptr, step = x.indptr, 1 << 20
    parts = (indptr[i : i + step + 1] for i in range(0, rows, step))
    if indptr.shape != (rows + 1,) or indptr[0] != 0 or any((part[1:] < part[:-1]).any() for part in parts):
        raise ValueError(f"malformed {x.format.upper()}: indptr must be {rows + 1} numbers that ascend from 0")
    stored = int(x.indptr[-1])
    if stored > min(x.indices.size, x.data.size):
        raise ValueError(
            f"malformed {x.format.upper()}: indptr ends at {stored}, but there are {x.indices.size} indices and "
            f"{x.data.size} numbers"
        )
    used = x.indices[:stored]
    if stored and not (used.min() >= 0 and used.max() < columns):
        raise ValueError(
            f"malformed {x.format.upper()}: indices from {used.min()} to {used.max()}, allowed are 0 to {columns - 1}"
        )
