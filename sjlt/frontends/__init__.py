"""The projection and its adjoint of any container.

`arrays` handles NumPy and SciPy, `tensors` and `trees` torch, `dask_arrays` dask. The modules for torch import it, so
they are loaded only if the data is a tensor.

torch.compile guards on every name and default argument that a call looks up, and compares modules that have two names.
So callers import these functions, not this module, and pass all arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..inputs.containers import is_dask, is_tensor
from ..inputs.containers import refuse_symbolic as refuse_symbolic
from . import arrays, tensor_functions

if TYPE_CHECKING:
    from ..laws.spec import SketchSpec


def project(spec: SketchSpec, x: Any, out: Any, accumulate: bool, dense_output: bool) -> Any:
    """x S' along the last axis of x; see `Sketch.project`."""
    if not is_tensor(x):
        if is_dask(x):
            return _dask_arrays().project_dask(spec, x, out, accumulate, dense_output)
        return arrays.project_array(spec, x, out, accumulate, dense_output)
    if not dense_output:
        raise ValueError("dense_output=False needs a SciPy sparse matrix: the projection of a tensor is dense")
    return tensor_functions.project_tensor(spec, x, out, accumulate)


def project_adjoint(spec: SketchSpec, y: Any, out: Any, accumulate: bool) -> Any:
    """y S along the last axis of y; see `Sketch.project_adjoint`."""
    if is_tensor(y):
        return tensor_functions.project_adjoint_tensor(spec, y, out, accumulate)
    if is_dask(y):
        return _dask_arrays().project_adjoint_dask(spec, y, out, accumulate)
    return arrays.project_adjoint_array(spec, y, out, accumulate)


def multiply(spec: SketchSpec, a: Any) -> Any:
    """S A for a vector or matrix A."""
    if is_tensor(a):
        return tensor_functions.multiply_tensor(spec, a)
    return _dask_arrays().multiply_dask(spec, a) if is_dask(a) else arrays.multiply_array(spec, a)


def multiply_transposed(spec: SketchSpec, b: Any) -> Any:
    """S' B for a vector or matrix B."""
    if is_tensor(b):
        return tensor_functions.multiply_transposed_tensor(spec, b)
    if is_dask(b):
        return _dask_arrays().multiply_transposed_dask(spec, b)
    return arrays.multiply_transposed_array(spec, b)


def project_tree(spec: SketchSpec, tensors: Any, out: Any, batched: bool) -> Any:
    """The projection of several tensors as if concatenated; see `Sketch.project_tree`."""
    from . import trees

    return trees.project_tree(spec, tensors, out, batched)


def adjoint_tree(spec: SketchSpec, y: Any, like: Any, batched: bool) -> Any:
    """The adjoint as a tree of tensors; see `Sketch.adjoint_tree`."""
    from . import trees

    return trees.adjoint_tree(spec, y, like, batched)


# Not functools.cache, which torch.compile warns about.
def _dask_arrays() -> Any:
    from . import dask_arrays

    return dask_arrays
