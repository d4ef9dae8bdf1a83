"""Recognise and validate data: arrays, sparse matrices and tensors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np


def is_sparse(x: Any) -> bool:
    """Whether x is a SciPy sparse matrix or array. Does not import scipy.sparse: if x is one, the caller has."""
    if type(x) is np.ndarray:  # the most frequent case, for which issparse takes longer
        return False
    sparse = sys.modules.get("scipy.sparse")
    return sparse is not None and bool(sparse.issparse(x))


def is_tensor(x: Any) -> bool:
    """Whether x is a torch tensor. Does not import torch: if x is one, the caller has."""
    kind = x.__class__  # torch.compile guards on type(x), but not on this, nor on the names
    if kind.__name__ == "Tensor" and kind.__module__ == "torch":
        return True
    if kind is np.ndarray:
        return False
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, getattr(torch, "Tensor", ()))


def is_dask(x: Any) -> bool:
    """Whether x is a dask array. Does not import dask.array: if x is one, the caller has."""
    dask = sys.modules.get("dask.array")
    return dask is not None and isinstance(x, getattr(dask, "Array", ()))


def as_container(x: Any) -> Any:
    """`x` itself if it is sparse, else as an ndarray of real numbers; TypeError if that is impossible."""
    if is_sparse(x):
        return x
    array = x if type(x) is np.ndarray else _as_array(x)
    if array.dtype.kind not in "iubf":
        _refuse_contents(x, array)
        if array.dtype == object and hasattr(x, "columns") and hasattr(x, "items"):
            # pandas' nullable numbers; missing ones become NaN
            array = np.stack([np.asarray(column) for _, column in x.items()], axis=1)
    result_dtype(array.dtype)
    return array


def _as_array(x: Any) -> np.ndarray:
    refuse_foreign(x)
    if hasattr(x, "matvec"):
        raise TypeError(f"{type(x).__name__} is an operator: compose it with scipy.sparse.linalg.aslinearoperator")
    return np.asarray(x)


def refuse_foreign(x: Any) -> None:
    """Raise TypeError for containers whose conversion to an array would silently lose something."""
    if type(x).__module__ == "torch.fx.proxy":
        refuse_symbolic()
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError("masked arrays are not supported: the mask would be lost; fill it first (x.filled(0))")
    package, kind = type(x).__module__.partition(".")[0], type(x).__name__
    if package in _INSTEAD and not (package == "polars" and kind == "DataFrame"):
        instead = _LAZY.get((package, kind), _INSTEAD[package])
        raise TypeError(f"{package}'s {kind} is not supported: {instead}")


_LAZY = {
    ("dask", "Array"): "compute it first (x.compute())",
    ("polars", "LazyFrame"): "collect it first (x.collect())",
}
_INSTEAD = {
    "xarray": "the names of its dimensions would be lost; call xarray.apply_ufunc(S.project, x, input_core_dims="
    '[["feature"]], output_core_dims=[["component"]]), or pass x.data',
    "pyarrow": "call sjlt.arrow.Projector on its table, or pass a NumPy array",
    "polars": "call sjlt.arrow.Projector on its frame's to_arrow(), or pass a NumPy array, as from x.to_numpy()",
    "dask": "pass a dask array, as from x.to_dask_array(lengths=True)",
}


def refuse_symbolic() -> NoReturn:
    raise TypeError(
        "torch.fx.symbolic_trace cannot follow a sketch or seeded dropout, whose calls depend on the dtype, device and "
        "shape of tensors: use torch.export.export, torch.compile or torch.fx.experimental.proxy_tensor.make_fx"
    )


def _refuse_contents(x: Any, array: np.ndarray) -> None:
    """Raise TypeError for data other than real numbers. For a data frame, the message names the column."""
    if array.ndim == 0 and array.dtype.kind in "OSU":
        raise TypeError(f"expected an array, sparse matrix or tensor, got {x!r} of type {type(x).__name__}")
    columns = getattr(x, "columns", None)
    if columns is None or isinstance(x, np.ndarray):
        return
    # (pandas allows several columns of one name.)
    for name, column in x.items() if hasattr(x, "items") else ((name, x[name]) for name in columns):
        dtype = getattr(column, "dtype", None)
        if np.asarray(column).dtype.kind not in "iubf":
            raise TypeError(f"column {name!r} has dtype {dtype}: a sketch accepts real numbers; select or convert it")


@lru_cache(maxsize=64)
def result_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of results: fp16, fp32 and fp64 for themselves, fp64 for integers and bool, else TypeError."""
    if dtype.kind in "iub":
        return np.dtype(np.float64)
    if dtype.kind == "f" and dtype.itemsize <= 8:
        return dtype.newbyteorder("=")
    raise TypeError(f"dtype {dtype} is not supported: a sketch accepts float16, float32, float64, integers and bool")


# ------------------------------------------------------------------------------------- shapes


def _description(x: Any) -> str:
    kind = "a sparse matrix" if is_sparse(x) else "a tensor" if is_tensor(x) else "an array"
    return f"{kind} of shape {tuple(x.shape)}"


def check_shape(name: str, given: Any, x: Any) -> None:
    """Raise ValueError unless `given` has the shape of x."""
    if given.shape != x.shape:
        raise ValueError(f"{name} must have the shape of x, {tuple(x.shape)}, got {tuple(given.shape)}")


def check_width(name: str, x: Any, width: int, meaning: str, other: int) -> None:
    """Raise ValueError unless the last axis of x has length `width`.

    If it has length `other`, that of the transpose's argument, the message suggests the transpose.
    """
    if x.ndim == 0 or x.shape[-1] != width:
        fits = x.ndim > 0 and x.shape[-1] == other
        hint = (": use X @ S.T or S.project(X)" if meaning == "n_components" else ": use Y @ S") if fits else ""
        raise ValueError(f"{name} needs a last axis of {meaning} = {width}, got {_description(x)}{hint}")


def check_height(name: str, a: Any, shape: tuple[int, int]) -> None:
    """Raise ValueError unless an operator of this shape can be applied to the vector or matrix `a` from the left."""
    if a.ndim not in (1, 2) or a.shape[0] != shape[1]:
        in_rows = a.ndim == 2 and a.shape[1] == shape[1]
        hint = f": for vectors in rows, use X @ {'S.T' if name == 'S' else 'S'}" if in_rows else ""
        raise ValueError(
            f"{name} @ A needs A of shape ({shape[1]},) or ({shape[1]}, n) for the operator's shape {shape}, "
            f"got {_description(a)}{hint}"
        )


# ------------------------------------------------------------------------------------- memory


def elements_overlap(shape: Sequence[int], strides: Sequence[int], size: int = 1) -> bool:
    """Whether elements may share memory: some stride is at most the extent of all axes with smaller strides.

    `size` is the size of an element, in the unit of the strides.
    """
    if 0 in shape:
        return False
    span = size - 1
    for step, n in sorted((abs(step), n) for step, n in zip(strides, shape, strict=True)):
        if n > 1 and step <= span:
            return True
        span += step * (n - 1)
    return False


def arrays_overlap(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays share memory; also True if the exact answer would take too long."""
    try:
        return np.shares_memory(a, b, max_work=10_000)  # type: ignore[arg-type]  # any int is accepted
    except np.exceptions.TooHardError:
        return True


# ------------------------------------------------------------------------------------- sparse matrices


def checked_sparse(x: Any) -> Any:
    """`x`, a CSR or CSC matrix, with validated indices, its arrays copied only if the kernels cannot read them."""
    if x.format not in ("csr", "csc"):
        raise TypeError(f"sparse input must be CSR or CSC, got {x.format.upper()}: convert it with .tocsr()")
    if x.ndim != 2:
        raise ValueError(f"sparse input must have 2 dimensions, got {_description(x)}")
    if result_dtype(x.dtype) == np.float16:
        raise TypeError("sparse float16 is refused, as in scipy.sparse: convert it with .astype(np.float32)")
    _check_indices(x)
    native = x.data.dtype.newbyteorder("=")
    index = np.result_type(x.indices, x.indptr)
    arrays = (x.data, native), (x.indices, index), (x.indptr, index)
    if any(a.dtype != dtype or not a.flags.c_contiguous or not a.flags.aligned for a, dtype in arrays):
        x = type(x)(tuple(_contiguous(a, dtype) for a, dtype in arrays), shape=x.shape)
    return x


def _contiguous(a: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`a`, or a contiguous and aligned copy of this dtype, made in steps so that it can be interrupted."""
    if a.dtype == dtype and a.flags.c_contiguous and a.flags.aligned:
        return a
    copy, step = np.empty(a.shape, dtype), 1 << 22
    for i in range(0, len(a), step):
        copy[i : i + step] = a[i : i + step]
    return copy


def _check_indices(x: Any) -> None:
    # SciPy's own check_format may modify the caller's arrays.
    name_of_format = x.format.upper()
    for name in ("indices", "indptr"):
        if getattr(x, name).dtype.kind not in "iu":
            raise TypeError(f"malformed {name_of_format}: {name} must be integers, got {getattr(x, name).dtype}")
    rows, columns = x.shape if x.format == "csr" else x.shape[::-1]
    indptr, step = x.indptr, 1 << 20
    parts = (indptr[i : i + step + 1] for i in range(0, rows, step))
    if indptr.shape != (rows + 1,) or indptr[0] != 0 or any((part[1:] < part[:-1]).any() for part in parts):
        raise ValueError(
            f"malformed {name_of_format}: indptr must have {rows + 1} elements in ascending order, starting with 0"
        )
    stored = int(x.indptr[-1])
    if stored > min(x.indices.size, x.data.size):
        raise ValueError(
            f"malformed {name_of_format}: indptr ends at {stored}, but there are {x.indices.size} indices and "
            f"{x.data.size} values"
        )
    used = [x.indices[i : min(i + step, stored)] for i in range(0, stored, step)]
    low, high = min((int(part.min()) for part in used), default=0), max((int(part.max()) for part in used), default=-1)
    if stored and not (low >= 0 and high < columns):
        raise ValueError(f"malformed {name_of_format}: indices must be from 0 to {columns - 1}, got {low} to {high}")
