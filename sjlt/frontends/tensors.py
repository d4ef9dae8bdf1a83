"""The projection and its adjoint of torch tensors: validate the arguments, then call the operator.

The data must be a tensor. For small tensors, host time dominates, so checks are few and cheap: the functions that raise
errors are called only if one is due. In compiled code, each name that a call looks up costs a guard; `x.__class__` and
properties of dtypes cost none, unlike `type(x)` and tuples of dtypes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..inputs.containers import check_height, check_width
from ..torch_ops import sharding
from ..torch_ops.checks import check_out, check_tensor, is_supported
from ..torch_ops.projection import call, call_into, project, project_adjoint

if TYPE_CHECKING:
    from ..laws.spec import SketchSpec


def project_tensor(spec: SketchSpec, x: Tensor, out: Any, accumulate: bool) -> Tensor:
    """x S' along the last axis of x."""
    if x.__class__ is not Tensor and sharding.is_sharded(x):
        return sharding.project(spec, x, out, accumulate)  # type: ignore[no-any-return]
    if not is_supported(x):
        if _sparse().is_sparse(x):
            return _project_sparse(spec, x, out, accumulate)
        check_tensor(x, "a sketch")
    if x.ndim == 0 or x.shape[-1] != spec.n_features:
        check_width("project", x, spec.n_features, "n_features", spec.n_components)
    if out is None and not accumulate:
        return call(project, x, spec, -1, None)
    check_out("project", out, x, spec.n_components, accumulate)
    call_into(project, x, out, spec, accumulate)
    return out  # type: ignore[no-any-return]


def project_adjoint_tensor(spec: SketchSpec, y: Tensor, out: Any, accumulate: bool) -> Tensor:
    """y S along the last axis of y."""
    if y.__class__ is not Tensor:
        sharding.refuse_sharded(y, "Y @ S", "S.adjoint_tree(y, like=...)")
    if not is_supported(y):
        check_tensor(y, "a sketch")
    if y.ndim == 0 or y.shape[-1] != spec.n_components:
        check_width("project_adjoint", y, spec.n_components, "n_components", spec.n_features)
    if out is None and not accumulate:
        return call(project_adjoint, y, spec, -1, None)
    check_out("project_adjoint", out, y, spec.n_features, accumulate)
    call_into(project_adjoint, y, out, spec, accumulate)
    return out  # type: ignore[no-any-return]


def multiply_tensor(spec: SketchSpec, a: Tensor) -> Tensor:
    """S A for a vector or matrix A."""
    if a.__class__ is not Tensor:
        sharding.refuse_sharded(a, "S @ A", "S.project(A.T)")
    if not is_supported(a):
        if _sparse().is_sparse(a):
            return _multiply_sparse(spec, a)
        check_tensor(a, "a sketch")
    if a.ndim not in (1, 2) or a.shape[0] != spec.n_features:
        check_height("S", a, (spec.n_components, spec.n_features))
    return call(project, a, spec, 0, None)


def multiply_transposed_tensor(spec: SketchSpec, b: Tensor) -> Tensor:
    """S' B for a vector or matrix B."""
    if b.__class__ is not Tensor:
        sharding.refuse_sharded(b, "S.T @ B", "S.adjoint_tree(y, like=...)")
    if not is_supported(b):
        check_tensor(b, "a sketch")
    if b.ndim not in (1, 2) or b.shape[0] != spec.n_components:
        check_height("S.T", b, (spec.n_features, spec.n_components))
    return call(project_adjoint, b, spec, 0, None)


# ------------------------------------------------------------------------------------- sparse tensors


def _project_sparse(spec: SketchSpec, x: Tensor, out: Any, accumulate: bool) -> Tensor:
    """x S' for a sparse matrix x."""
    sparse = _sparse()
    sparse.check_sparse(x)
    check_width("project", x, spec.n_features, "n_features", spec.n_components)
    if out is None and not accumulate:
        return sparse.project(spec, sparse.matrix(x))  # type: ignore[no-any-return]
    check_out("project", out, x, spec.n_components, accumulate)
    sparse.project_into(spec, sparse.matrix(x), out, accumulate)
    return out  # type: ignore[no-any-return]


def _multiply_sparse(spec: SketchSpec, a: Tensor) -> Tensor:
    """S A for a sparse matrix A."""
    sparse = _sparse()
    sparse.check_sparse(a)
    check_height("S", a, (spec.n_components, spec.n_features))
    return sparse.project(spec, sparse.transposed(sparse.matrix(a), a.shape[1])).t()  # type: ignore[no-any-return]


def _sparse() -> Any:
    from ..torch_ops import sparse

    return sparse
