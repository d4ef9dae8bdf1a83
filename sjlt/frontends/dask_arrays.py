"""Lazy projection and adjoint of dask arrays: one task per block, and partial sums over chunks of features.

Shapes, dtypes and chunks of results are known before anything is computed. Blocks are NumPy arrays or SciPy sparse
matrices. A task holds one block and its result in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..inputs.containers import check_height, check_width, is_sparse, result_dtype
from . import arrays

if TYPE_CHECKING:
    from ..laws.spec import SketchSpec


def project_dask(
    spec: SketchSpec,
    x: Any,
    out: Any = None,
    accumulate: bool = False,
    dense_output: bool = True,
    finite: bool = False,
) -> Any:
    """x S' along the last axis of x; see `Sketch.project`.

    If `finite`, a block that contains NaN or infinity raises ValueError when it is computed.
    """
    _refuse_out(out, accumulate)
    check_width("project", x, spec.n_features, "n_features", spec.n_components)
    if not dense_output and not is_sparse(x._meta):
        raise ValueError("dense_output=False requires blocks that are SciPy sparse matrices")
    dtype, summing = _dtypes(x)
    chunks = (*x.chunks[:-1], (spec.n_components,))
    meta = None if dense_output else _csr_meta(x, summing)
    parts = []
    for start, stop, block in _along(x, x.ndim - 1):
        function = partial(_project_block, spec.columns(start, stop), summing, dense_output, finite)
        parts.append(_mapped(function, block, chunks, summing, meta))
    return _total(parts, dtype)


def check_matrix(x: Any) -> None:
    """Check the number of dimensions and the dtype of a dask array, without computing anything."""
    if x.ndim != 2:
        raise ValueError(f"expected a 2-D dask array, (n_samples, n_features), got one of shape {x.shape}")
    if x.dtype.kind not in "iubf":
        raise ValueError(f"expected a dask array of numbers, got dtype {x.dtype}")


def accepted_dtype(x: Any) -> np.dtype:
    """The dtype to which scikit-learn would convert x: float64, unless it is float32."""
    return np.dtype(np.float32 if x.dtype == np.float32 else np.float64)


def dense_matrix(x: Any) -> Any:
    """A 2-D dask array with dense float32 or float64 blocks. NaN and infinity raise ValueError when it is computed."""
    check_matrix(x)
    dtype = accepted_dtype(x)
    return x.map_blocks(_dense_block, dtype, dtype=dtype, meta=np.empty((0, 0), dtype))


def project_adjoint_dask(spec: SketchSpec, y: Any, out: Any, accumulate: bool) -> Any:
    """y S along the last axis of y; see `Sketch.project_adjoint`."""
    import dask.array

    _refuse_out(out, accumulate)
    check_width("project_adjoint", y, spec.n_components, "n_components", spec.n_features)
    dtype, _ = _dtypes(y)
    y = y.rechunk({y.ndim - 1: -1})
    parts = []
    for start, stop in _feature_chunks(spec, (*y.chunks[:-1],), dtype):
        function = partial(_adjoint_block, spec.columns(start, stop))
        parts.append(_mapped(function, y, (*y.chunks[:-1], (stop - start,)), dtype))
    return dask.array.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]


def multiply_dask(spec: SketchSpec, a: Any) -> Any:
    """S A for a vector or matrix A."""
    check_height("S", a, (spec.n_components, spec.n_features))
    dtype, summing = _dtypes(a)
    chunks = ((spec.n_components,), *a.chunks[1:])
    parts = []
    for start, stop, block in _along(a, 0):
        function = partial(_multiply_block, spec.columns(start, stop), summing)
        parts.append(_mapped(function, block, chunks, summing))
    return _total(parts, dtype)


def multiply_transposed_dask(spec: SketchSpec, b: Any) -> Any:
    """S' B for a vector or matrix B."""
    import dask.array

    check_height("S.T", b, (spec.n_features, spec.n_components))
    dtype, _ = _dtypes(b)
    b = b.rechunk({0: -1})
    parts = []
    for start, stop in _feature_chunks(spec, (*b.chunks[1:],), dtype):
        function = partial(_multiply_transposed_block, spec.columns(start, stop))
        parts.append(_mapped(function, b, ((stop - start,), *b.chunks[1:]), dtype))
    return dask.array.concatenate(parts, axis=0) if len(parts) > 1 else parts[0]


# ------------------------------------------------------------------------------------- tasks


def _project_block(spec: SketchSpec, summing: np.dtype, dense_output: bool, finite: bool, block: Any) -> Any:
    if finite:
        _check_finite(block.data if is_sparse(block) else block)
    if not dense_output:
        return arrays.project_array(spec, block, None, False, False).astype(summing, copy=False)
    out = np.empty((*block.shape[:-1], spec.n_components), summing)
    return arrays.project_array(spec, block, out, False, True)


def _dense_block(block: Any, dtype: np.dtype) -> np.ndarray:
    _check_finite(block.data if is_sparse(block) else block)
    dense: np.ndarray = (block.toarray() if is_sparse(block) else np.asarray(block)).astype(dtype, copy=False)
    return dense


def _check_finite(values: np.ndarray) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(np.sum(values, dtype=np.float64)):  # needs no memory for a mask
            return
    if np.isnan(values).any():
        raise ValueError("Input X contains NaN.")
    if np.isinf(values).any():
        raise ValueError("Input X contains infinity.")


def _adjoint_block(spec: SketchSpec, block: Any) -> Any:
    return arrays.project_adjoint_array(spec, block, None, False)


def _multiply_block(spec: SketchSpec, summing: np.dtype, block: Any) -> Any:
    return arrays.multiply_array(spec, block).astype(summing, copy=False)


def _multiply_transposed_block(spec: SketchSpec, block: Any) -> Any:
    return arrays.multiply_transposed_array(spec, block)


# ------------------------------------------------------------------------------------- graphs


def _refuse_out(out: Any, accumulate: bool) -> None:
    if out is not None or accumulate:
        raise ValueError("results of dask arrays are lazy: out= and accumulate= require arrays in memory")


def _dtypes(x: Any) -> tuple[np.dtype, np.dtype]:
    """(the dtype of the result, the dtype of partial sums over chunks of features)."""
    dtype = result_dtype(x.dtype)
    return dtype, np.promote_types(dtype, np.float32)


def _along(x: Any, axis: int) -> list[tuple[int, int, Any]]:
    """(start, stop, blocks) for each chunk along an axis."""
    sizes = x.chunks[axis]
    if any(math.isnan(size) for size in sizes):
        raise ValueError(f"axis {axis} has chunks of unknown sizes: call compute_chunk_sizes() first")
    stops = np.cumsum(sizes).tolist()
    index = [slice(None)] * x.ndim
    chunks = []
    for i, (size, stop) in enumerate(zip(sizes, stops, strict=True)):
        index[axis] = slice(i, i + 1)
        chunks.append((stop - size, stop, x.blocks[tuple(index)] if len(sizes) > 1 else x))
    return chunks


def _feature_chunks(spec: SketchSpec, others: tuple[Any, ...], dtype: np.dtype) -> list[tuple[int, int]]:
    """(start, stop) of chunks of S's columns such that the blocks of an adjoint have about dask's chunk size."""
    from dask.array.core import normalize_chunks

    sizes = tuple(1 if any(math.isnan(n) for n in chunks) else max(1, max(chunks, default=1)) for chunks in others)
    shape = (*sizes, spec.n_features)
    chunks = normalize_chunks((*sizes, "auto"), shape, dtype=dtype)[-1] if spec.n_features else (0,)
    stops = np.cumsum(chunks).tolist()
    return [(stop - size, stop) for size, stop in zip(chunks, stops, strict=True)]


def _mapped(function: Callable[..., Any], x: Any, chunks: Any, dtype: np.dtype, meta: Any = None) -> Any:
    """The array of the results of `function` for each block of x."""
    if meta is None:
        meta = np.empty((0,) * x.ndim, dtype)
    return x.map_blocks(function, chunks=chunks, dtype=dtype, meta=meta)


def _csr_meta(x: Any, dtype: np.dtype) -> Any:
    """An empty CSR matrix, or a CSR array if the blocks of x are sparse arrays."""
    import scipy.sparse

    kind = scipy.sparse.csr_array if isinstance(x._meta, scipy.sparse.sparray) else scipy.sparse.csr_matrix
    return kind((0, 0), dtype=dtype)


def _total(parts: list[Any], dtype: np.dtype) -> Any:
    """The pairwise sum of `parts`, cast to `dtype`."""
    while len(parts) > 1:
        pairs = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[2 * len(pairs) :]
    return parts[0] if parts[0].dtype == dtype else parts[0].astype(dtype)
