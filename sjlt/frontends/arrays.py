"""The projection and its adjoint of NumPy arrays and SciPy sparse matrices.

Validate the arguments, view the data as 2-D, call the CPU backend, restore the shape. The data must not be a torch
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..backends import cpu_backend
from ..inputs.containers import (
    arrays_overlap,
    as_container,
    check_height,
    check_width,
    checked_sparse,
    elements_overlap,
    is_sparse,
    result_dtype,
)

if TYPE_CHECKING:
    from ..laws.spec import SketchSpec

DENSE_BYTES = 4 << 20  # bytes of sparse rows converted to dense at a time, for the adjoint


def project_array(spec: SketchSpec, x: Any, out: Any, accumulate: bool, dense_output: bool) -> Any:
    """x S' along the last axis of x; see `Sketch.project`."""
    x = as_container(x)
    check_width("project", x, spec.n_features, "n_features", spec.n_components)
    backend = cpu_backend(spec)
    if not is_sparse(x):
        return _project_dense("project", backend.project, spec, x, spec.n_components, out, accumulate)
    x = checked_sparse(x)
    if not dense_output:
        return _project_to_sparse(spec, x, out, accumulate)
    out = _result("project", out, (x.shape[0], spec.n_components), result_dtype(x.dtype), accumulate, *_arrays_of(x))
    backend.project_sparse(spec, x, out, accumulate)
    return out


def project_adjoint_array(spec: SketchSpec, y: Any, out: Any, accumulate: bool) -> Any:
    """y S along the last axis of y; see `Sketch.project_adjoint`."""
    y = as_container(y)
    check_width("project_adjoint", y, spec.n_components, "n_components", spec.n_features)
    if not is_sparse(y):
        adjoint = cpu_backend(spec).adjoint
        return _project_dense("project_adjoint", adjoint, spec, y, spec.n_features, out, accumulate)
    y = checked_sparse(y)
    shape = (y.shape[0], spec.n_features)
    out = _result("project_adjoint", out, shape, result_dtype(y.dtype), accumulate, *_arrays_of(y))
    _adjoint_sparse(spec, y, out, accumulate)
    return out


def multiply_array(spec: SketchSpec, a: Any) -> Any:
    """S A for a vector or matrix A."""
    a = as_container(a)
    check_height("S", a, (spec.n_components, spec.n_features))
    backend = cpu_backend(spec)
    if not is_sparse(a):
        return _multiply_dense(backend.project, spec, a, spec.n_components)
    a = checked_sparse(a)
    out = np.empty((spec.n_components, a.shape[1]), result_dtype(a.dtype))
    backend.project_sparse(spec, a.T, out.T, False)
    return out


def multiply_transposed_array(spec: SketchSpec, b: Any) -> Any:
    """S' B for a vector or matrix B."""
    b = as_container(b)
    check_height("S.T", b, (spec.n_features, spec.n_components))
    if not is_sparse(b):
        return _multiply_dense(cpu_backend(spec).adjoint, spec, b, spec.n_features)
    b = checked_sparse(b)
    out = np.empty((spec.n_features, b.shape[1]), result_dtype(b.dtype))
    _adjoint_sparse(spec, b.T, out.T, False)
    return out


# ------------------------------------------------------------------------------------- products


def _multiply_dense(function: Callable[..., None], spec: SketchSpec, a: np.ndarray, height: int) -> np.ndarray:
    """Apply `function`, which works on rows, to the columns of a vector or matrix A."""
    out = np.empty((height, *a.shape[1:]), result_dtype(a.dtype))
    function(spec, np.atleast_2d(a.T), np.atleast_2d(out.T), False)
    return out


def _project_dense(
    name: str,
    function: Callable[..., None],
    spec: SketchSpec,
    x: np.ndarray,
    width: int,
    out: np.ndarray | None,
    accumulate: bool,
) -> np.ndarray:
    """Apply `function` to the rows along the last axis of x."""
    out = _result(name, out, (*x.shape[:-1], width), result_dtype(x.dtype), accumulate, x)
    if x.ndim == 2:
        function(spec, x, out, accumulate)
        return out
    for rows, result in _matrices(x, out):
        function(spec, rows, result, accumulate)
    return out


def _adjoint_sparse(spec: SketchSpec, y: Any, out: np.ndarray, accumulate: bool) -> None:
    """out (n, d) = y (n, k) S, or out += y S, for a CSR or CSC matrix y, converted to dense a few rows at a time."""
    adjoint, step = cpu_backend(spec).adjoint, max(1, DENSE_BYTES // (8 * spec.n_components))
    y = y.tocsr()  # slicing rows of a CSC matrix searches the whole matrix each time
    for i in range(0, y.shape[0], step):
        adjoint(spec, y[i : i + step].toarray(), out[i : i + step], accumulate)


def _result(
    name: str, out: Any, shape: tuple[int, ...], dtype: np.dtype, accumulate: bool, *inputs: np.ndarray
) -> np.ndarray:
    """`out`, if it can hold a result of this shape and shares no memory with `inputs`; a new array if it is None."""
    if out is None:
        if accumulate:
            raise ValueError(f"{name} with accumulate=True needs out=, the array of shape {shape} to add to")
        return np.empty(shape, dtype)
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a numpy array, got {type(out).__name__}")
    if isinstance(out, np.ma.MaskedArray):
        raise TypeError("out is a masked array, whose mask would be ignored: pass out.data")
    if out.shape != shape:
        raise ValueError(f"out must have shape {shape}, got {out.shape}")
    allowed = ("float32", "float64") if accumulate else ("float16", "float32", "float64")
    if out.dtype.name not in allowed or not out.dtype.isnative:
        with_ = " with accumulate=True" if accumulate else ""
        raise TypeError(f"out must have dtype {', '.join(allowed)}{with_}, got {out.dtype}")
    if not out.flags.writeable:
        raise ValueError("out is read-only")
    if elements_overlap(out.shape, out.strides, out.itemsize):
        raise ValueError(f"out has elements that share memory (strides {out.strides}): it cannot hold a result")
    if any(arrays_overlap(x, out) for x in inputs):
        raise ValueError("out shares memory with the input")
    return out


def _arrays_of(x: Any) -> tuple[np.ndarray, ...]:
    """The arrays of a CSR or CSC matrix."""
    return x.data, x.indices, x.indptr


def _matrices(x: np.ndarray, out: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Split x (..., d) and out (..., k) into pairs of 2-D views, as few as their strides allow, without copies."""
    if x.ndim <= 2:
        yield np.atleast_2d(x), np.atleast_2d(out)
        return
    try:
        n = int(np.prod(x.shape[:-1]))
        yield (
            x.reshape(n, x.shape[-1], copy=False),
            out.reshape(n, out.shape[-1], copy=False),
        )
    except ValueError:  # not a view of one matrix: split along the shortest leading axis
        axis = int(np.argmin(x.shape[:-1]))
        for rows, result in zip(np.moveaxis(x, axis, 0), np.moveaxis(out, axis, 0), strict=True):
            yield from _matrices(rows, result)


def _project_to_sparse(spec: SketchSpec, x: Any, out: Any, accumulate: bool) -> Any:
    import scipy.sparse

    if out is not None or accumulate:
        raise ValueError("out and accumulate need dense_output=True")
    parts = cpu_backend(spec).project_to_csr(spec, x.tocsr(), result_dtype(x.dtype))
    make = scipy.sparse.csr_array if isinstance(x, scipy.sparse.sparray) else scipy.sparse.csr_matrix
    return make(parts, shape=(x.shape[0], spec.n_components))
