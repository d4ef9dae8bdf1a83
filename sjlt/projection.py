"""Project and its adjoint on any container: check, view as 2-D, call the backend, restore the shape."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .sketch import Sketch


def project(
    sketch: Sketch, x: Any, *, out: np.ndarray | None = None, accumulate: bool = False, dense_output: bool = True
) -> Any:
    """x S' along the last axis of x; see `Sketch.project`."""
    x = _container(x)
    _check_width("project", x, sketch.n_features, "n_features")
    if _is_sparse(x):
        x = _checked_sparse(x)
        if not dense_output:
            return _project_to_sparse(sketch, x, out, accumulate)
        shape = (x.shape[0], sketch.n_components)
        out = _result("project", out, shape, _result_dtype(x.dtype), accumulate)
        _cpu().project_sparse(sketch, x, out, accumulate)
        return out
    return _dense("project", _cpu().project, sketch, x, sketch.n_components, out, accumulate)


def project_adjoint(sketch: Sketch, y: Any, *, out: np.ndarray | None = None, accumulate: bool = False) -> Any:
    """y S along the last axis of y; see `Sketch.project_adjoint`."""
    y = _container(y)
    _check_width("project_adjoint", y, sketch.n_components, "n_components")
    if _is_sparse(y):
        y = _checked_sparse(y)
        shape = (y.shape[0], sketch.n_features)
        out = _result("project_adjoint", out, shape, _result_dtype(y.dtype), accumulate)
        _cpu().adjoint_sparse(sketch, y, out, accumulate)
        return out
    return _dense("project_adjoint", _cpu().adjoint, sketch, y, sketch.n_features, out, accumulate)


def multiply(name: str, function: Callable[..., Any], shape: tuple[int, int], a: Any) -> Any:
    """The operator of `shape` times a matrix or vector from the left, by `function`, which works on rows."""
    a = _container(a)
    if a.ndim not in (1, 2) or a.shape[0] != shape[1]:
        raise ValueError(
            f"{name} @ A needs A of shape ({shape[1]},) or ({shape[1]}, n) for the operator's shape {shape}, "
            f"got {_shown(a)}"
        )
    if a.ndim == 1:
        return function(a)
    out = np.empty((shape[0], a.shape[1]), _result_dtype(a.dtype))
    function(a.T, out=out.T)
    return out


def _cpu() -> Any:
    from .backends import cpu  # compiles, or loads, machine code: not before it is needed

    return cpu


# ------------------------------------------------------------------------------------- checks


def _is_sparse(x: Any) -> bool:
    # Whoever holds a sparse matrix has imported scipy.sparse.
    sparse = sys.modules.get("scipy.sparse")
    return sparse is not None and bool(sparse.issparse(x))


def _container(x: Any) -> Any:
    """`x` itself where it is sparse, else as an ndarray; refused where it has no meaning here."""
    if _is_sparse(x):
        return x
    if type(x).__module__.partition(".")[0] == "torch":
        raise TypeError("torch tensors are not supported yet: pass x.numpy(), which shares a CPU tensor's memory")
    if hasattr(x, "matvec"):
        raise TypeError(f"{type(x).__name__} is an operator: compose it by scipy.sparse.linalg.aslinearoperator")
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError("masked arrays are refused: the mask would be lost; fill it first (x.filled(0))")
    x = np.asarray(x)
    _result_dtype(x.dtype)
    return x


def _result_dtype(dtype: np.dtype) -> np.dtype:
    """fp16, fp32 and fp64 stay; integers and bool become fp64, as NumPy's own float operations do; no others."""
    if dtype.kind in "iub":
        return np.dtype(np.float64)
    if dtype.kind == "f" and dtype.itemsize <= 8:
        return dtype.newbyteorder("=")
    raise TypeError(f"dtype {dtype} is refused: a sketch takes float16, float32, float64, integers and bool")


def _shown(x: Any) -> str:
    return f"{'a sparse matrix' if _is_sparse(x) else 'an array'} of shape {tuple(x.shape)}"


def _check_width(name: str, x: Any, width: int, meaning: str) -> None:
    if x.ndim == 0 or x.shape[-1] != width:
        raise ValueError(f"{name} needs a last axis of {meaning} = {width}, got {_shown(x)}")


def _checked_sparse(x: Any) -> Any:
    """`x`, in CSR or CSC, with indices that are safe to follow and numbers that kernels can read."""
    if x.format not in ("csr", "csc"):
        raise TypeError(f"sparse input must be CSR or CSC, got {x.format.upper()}: convert it with .tocsr()")
    if x.ndim != 2:
        raise ValueError(f"sparse input must have 2 dimensions, got {_shown(x)}")
    if _result_dtype(x.dtype) == np.float16:
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


def _result(
    name: str, out: Any, shape: tuple[int, ...], dtype: np.dtype, accumulate: bool, x: np.ndarray | None = None
) -> np.ndarray:
    """`out` when it can take a result of this shape and dtype, or a new array where it is None."""
    if out is None:
        if accumulate:
            raise ValueError(f"{name} with accumulate=True needs out=, the array of shape {shape} to add to")
        return np.empty(shape, dtype)
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a numpy array, got {type(out).__name__}")
    if out.shape != shape:
        raise ValueError(f"out must have shape {shape}, got {out.shape}")
    allowed = ("float32", "float64") if accumulate else ("float16", "float32", "float64")
    if out.dtype.name not in allowed or not out.dtype.isnative:
        with_ = " with accumulate=True" if accumulate else ""
        raise TypeError(f"out must have dtype {', '.join(allowed)}{with_}, got {out.dtype}")
    if not out.flags.writeable:
        raise ValueError("out is read-only")
    if out.size and any(stride == 0 and size > 1 for stride, size in zip(out.strides, out.shape, strict=True)):
        raise ValueError(f"out has elements that share memory (strides {out.strides}): it cannot hold a result")
    if x is not None and _overlap(x, out):
        raise ValueError("out shares memory with the input")
    return out


def _overlap(x: np.ndarray, out: np.ndarray) -> bool:
    try:
        return np.shares_memory(x, out, max_work=10_000)  # type: ignore[arg-type]  # any int is taken
    except np.exceptions.TooHardError:
        return True


# ------------------------------------------------------------------------------------- shapes


def _dense(
    name: str,
    function: Callable[..., None],
    sketch: Sketch,
    x: np.ndarray,
    width: int,
    out: np.ndarray | None,
    accumulate: bool,
) -> np.ndarray:
    """`function` on the rows along the last axis of x."""
    out = _result(name, out, (*x.shape[:-1], width), _result_dtype(x.dtype), accumulate, x)
    for rows, result in _matrices(x, out):
        function(sketch, rows, result, accumulate)
    return out


def _matrices(x: np.ndarray, out: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """x (..., d) and out (..., k) as pairs of 2-D views, as few as their strides allow, never copies."""
    if x.ndim <= 2:
        yield np.atleast_2d(x), np.atleast_2d(out)
        return
    try:
        n = int(np.prod(x.shape[:-1]))
        yield (
            x.reshape(n, x.shape[-1], copy=False),
            out.reshape(n, out.shape[-1], copy=False),
        )
    except ValueError:  # no strides describe it: take the shortest leading axis apart
        axis = int(np.argmin(x.shape[:-1]))
        for rows, result in zip(np.moveaxis(x, axis, 0), np.moveaxis(out, axis, 0), strict=True):
            yield from _matrices(rows, result)


def _project_to_sparse(sketch: Sketch, x: Any, out: Any, accumulate: bool) -> Any:
    import scipy.sparse

    if out is not None or accumulate:
        raise ValueError("out and accumulate need dense_output=True")
    parts = _cpu().project_to_csr(sketch, x.tocsr(), _result_dtype(x.dtype))
    make = scipy.sparse.csr_array if isinstance(x, scipy.sparse.sparray) else scipy.sparse.csr_matrix
    return make(parts, shape=(x.shape[0], sketch.n_components))
