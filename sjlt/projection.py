"""Project and its adjoint on any container: check, view as 2-D, call the backend, restore the shape.

NumPy's and scipy's here, for the CPU; torch tensors in `tensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from .containers import (
    check_height,
    check_width,
    checked_sparse,
    container,
    elements_meet,
    is_sparse,
    is_tensor,
    overlap,
    result_dtype,
)

if TYPE_CHECKING:
    from .sketch import Sketch


def project(sketch: Sketch, x: Any, *, out: Any = None, accumulate: bool = False, dense_output: bool = True) -> Any:
    """x S' along the last axis of x; see `Sketch.project`."""
    if is_tensor(x):
        if not dense_output:
            raise ValueError("dense_output=False needs a sparse matrix of scipy: the projection of a tensor is dense")
        return _tensors().project(sketch, x, out, accumulate)
    x = container(x)
    check_width("project", x, sketch.n_features, "n_features")
    if is_sparse(x):
        x = checked_sparse(x)
        if not dense_output:
            return _project_to_sparse(sketch, x, out, accumulate)
        shape = (x.shape[0], sketch.n_components)
        out = _result("project", out, shape, result_dtype(x.dtype), accumulate)
        _cpu().project_sparse(sketch, x, out, accumulate)
        return out
    return _dense("project", _cpu().project, sketch, x, sketch.n_components, out, accumulate)


def project_adjoint(sketch: Sketch, y: Any, *, out: Any = None, accumulate: bool = False) -> Any:
    """y S along the last axis of y; see `Sketch.project_adjoint`."""
    if is_tensor(y):
        return _tensors().project_adjoint(sketch, y, out, accumulate)
    y = container(y)
    check_width("project_adjoint", y, sketch.n_components, "n_components")
    if is_sparse(y):
        y = checked_sparse(y)
        shape = (y.shape[0], sketch.n_features)
        out = _result("project_adjoint", out, shape, result_dtype(y.dtype), accumulate)
        _cpu().adjoint_sparse(sketch, y, out, accumulate)
        return out
    return _dense("project_adjoint", _cpu().adjoint, sketch, y, sketch.n_features, out, accumulate)


def multiply(sketch: Sketch, a: Any) -> Any:
    """S A for a vector or matrix A."""
    if is_tensor(a):
        return _tensors().multiply(sketch, a)
    return _from_left("S", project, sketch, sketch.shape, a)


def multiply_transposed(sketch: Sketch, b: Any) -> Any:
    """S' B for a vector or matrix B."""
    if is_tensor(b):
        return _tensors().multiply_transposed(sketch, b)
    return _from_left("S.T", project_adjoint, sketch, sketch.shape[::-1], b)


def project_tree(sketch: Sketch, tensors: Any, out: Any, batched: bool) -> Any:
    """Several tensors as if concatenated; see `Sketch.project_tree`."""
    return _tensors().project_tree(sketch, tensors, out, batched)


def _tensors() -> Any:  # without a cache of its own, of which torch.compile warns
    from . import tensors  # imports torch

    return tensors


def _cpu() -> Any:
    from .backends import cpu  # compiles, or loads, machine code: not before it is needed

    return cpu


# ------------------------------------------------------------------------------------- arrays


def _from_left(name: str, function: Callable[..., Any], sketch: Sketch, shape: tuple[int, int], a: Any) -> Any:
    """The operator of `shape` times a matrix or vector, by `function`, which works on rows."""
    a = container(a)
    check_height(name, a, shape)
    if a.ndim == 1:
        return function(sketch, a)
    out = np.empty((shape[0], a.shape[1]), result_dtype(a.dtype))
    function(sketch, a.T, out=out.T)
    return out


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
    out = _result(name, out, (*x.shape[:-1], width), result_dtype(x.dtype), accumulate, x)
    for rows, result in _matrices(x, out):
        function(sketch, rows, result, accumulate)
    return out


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
    if elements_meet(out.shape, out.strides, out.itemsize):
        raise ValueError(f"out has elements that share memory (strides {out.strides}): it cannot hold a result")
    if x is not None and overlap(x, out):
        raise ValueError("out shares memory with the input")
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
    parts = _cpu().project_to_csr(sketch, x.tocsr(), result_dtype(x.dtype))
    make = scipy.sparse.csr_array if isinstance(x, scipy.sparse.sparray) else scipy.sparse.csr_matrix
    return make(parts, shape=(x.shape[0], sketch.n_components))
