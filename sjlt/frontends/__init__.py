"""The projection and its adjoint on any container: arrays and sparse matrices go to `arrays`, tensors to `tensors`.

`tensors` imports torch, so it is loaded only once a caller holds a tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..inputs.containers import is_tensor

if TYPE_CHECKING:
    from ..laws.spec import SketchSpec


def project(spec: SketchSpec, x: Any, *, out: Any = None, accumulate: bool = False, dense_output: bool = True) -> Any:
    """x S' along the last axis of x; see `Sketch.project`."""
    if not is_tensor(x):
        return _arrays().project(spec, x, out, accumulate, dense_output)
    if not dense_output:
        raise ValueError("dense_output=False needs a SciPy sparse matrix: the projection of a tensor is dense")
    return _tensors().project(spec, x, out, accumulate)


def project_adjoint(spec: SketchSpec, y: Any, *, out: Any = None, accumulate: bool = False) -> Any:
    """y S along the last axis of y; see `Sketch.project_adjoint`."""
    frontend = _tensors() if is_tensor(y) else _arrays()
    return frontend.project_adjoint(spec, y, out, accumulate)


def multiply(spec: SketchSpec, a: Any) -> Any:
    """S A for a vector or matrix A."""
    frontend = _tensors() if is_tensor(a) else _arrays()
    return frontend.multiply(spec, a)


def multiply_transposed(spec: SketchSpec, b: Any) -> Any:
    """S' B for a vector or matrix B."""
    frontend = _tensors() if is_tensor(b) else _arrays()
    return frontend.multiply_transposed(spec, b)


def project_tree(spec: SketchSpec, tensors: Any, out: Any, batched: bool) -> Any:
    """The numbers of several tensors as if concatenated; see `Sketch.project_tree`."""
    from . import trees

    return trees.project_tree(spec, tensors, out, batched)


# Without functools.cache, which torch.compile warns about.
def _arrays() -> Any:
    from . import arrays

    return arrays


def _tensors() -> Any:
    from . import tensors

    return tensors
