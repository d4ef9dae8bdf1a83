"""The projection of torch's sparse tensors: ``torch.ops.sjlt.project_sparse`` and ``adjoint_at``.

X (n, n_features) is passed as the arrays of CSR, or of CSC if ``by_columns``. Results are dense. Both operators are
linear, and each is the transpose of the other: the derivative of X S' with respect to the values of X is the adjoint of
the gradient, G S, evaluated only at the positions of these values.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..backends import cpu_backend, triton_backend
from ..inputs.containers import checked_sparse
from ..laws.spec import SketchSpec
from . import compat
from .checks import check_device, check_dtype, refuse_derivatives
from .schema import SKETCH

_PATTERN = "Tensor indptr, Tensor indices, bool by_columns, SymInt n"
GATHERED = 1 << 20  # terms of the adjoint's sums in memory at a time
CODES = 1 << 22  # approximate number of the sketch's entries generated at a time

_library = torch.library.Library("sjlt", "FRAGMENT")
for _schema in (
    f"project_sparse(Tensor values, {_PATTERN}, {SKETCH}) -> Tensor",
    f"adjoint_at(Tensor gradient, {_PATTERN}, {SKETCH}) -> Tensor",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
project_sparse, adjoint_at = torch.ops.sjlt.project_sparse.default, torch.ops.sjlt.adjoint_at.default
_TRANSPOSE = {project_sparse: adjoint_at, adjoint_at: project_sparse}
_VMAP = "torch.vmap of sparse tensors is not supported: loop over them, or pass x.to_dense()"


class SparseMatrix(NamedTuple):
    """A sparse matrix of shape (n, n_features) as the arrays of CSR, or of CSC if `by_columns`."""

    values: Tensor
    indptr: Tensor
    indices: Tensor
    by_columns: bool
    n: int


# ------------------------------------------------------------------------------------- matrices


def is_sparse(x: Tensor) -> bool:
    """Whether x has one of torch's sparse layouts."""
    return x.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_coo)


def check_sparse(x: Tensor, ndim: int | None = 2) -> None:
    """Raise an error unless the sparse tensor x can be projected."""
    if compat.is_batched(x):
        raise RuntimeError(_VMAP)
    check_dtype(x, "a sketch")
    check_device(x, "a sketch")
    if x.dense_dim():
        raise ValueError(
            f"hybrid sparse tensors are not supported, got one with dense_dim() == {x.dense_dim()}: pass x.to_dense()"
        )
    if ndim is not None and x.ndim != ndim:
        raise ValueError(f"a sparse tensor must have {ndim} dimensions, got shape {tuple(x.shape)}")


class _Values(torch.autograd.Function):
    """The values of a CSR or CSC tensor.

    torch's own ``x.values()`` has no second derivatives: the gradient with respect to x does not depend on anything.
    """

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.values()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        (x,) = inputs
        ctx.save_for_backward(*_indices(x))
        ctx.shape, ctx.layout = x.shape, x.layout

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Compressed.apply(gradient, *ctx.saved_tensors, ctx.shape, ctx.layout)


class _Compressed(torch.autograd.Function):
    """A CSR or CSC tensor with the given values: the derivative of `_Values`."""

    @staticmethod
    def forward(values: Tensor, indptr: Tensor, indices: Tensor, shape: torch.Size, layout: torch.layout) -> Tensor:
        return torch.sparse_compressed_tensor(indptr, indices, values, shape, layout=layout, check_invariants=False)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, indptr, indices, _, ctx.layout = inputs
        ctx.save_for_backward(indptr, indices)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        indptr, indices = ctx.saved_tensors
        if gradient.layout is ctx.layout and all(map(torch.equal, _indices(gradient), (indptr, indices))):
            values = _Values.apply(gradient)
        else:
            compressed = _expanded(indptr, len(indices))
            at = (compressed, indices) if ctx.layout is torch.sparse_csr else (indices, compressed)
            values = (gradient if gradient.layout is torch.strided else gradient.to_dense())[at]
        return values, None, None, None, None


def _indices(x: Tensor) -> tuple[Tensor, Tensor]:
    """The pointers and indices of a CSR or CSC tensor."""
    if x.layout is torch.sparse_csr:
        return x.crow_indices(), x.col_indices()
    return x.ccol_indices(), x.row_indices()


def matrix(x: Tensor) -> SparseMatrix:
    """A 2-D sparse tensor as a `SparseMatrix` whose values are differentiable."""
    if x.layout is not torch.sparse_coo:
        values = _Values.apply(x) if x.requires_grad else x.values()
        return SparseMatrix(values, *_indices(x), x.layout is torch.sparse_csc, x.shape[0])
    x = x.coalesce()
    rows, columns = x.indices()
    return SparseMatrix(x.values(), _pointers(rows, x.shape[0]), columns, False, x.shape[0])


def _pointers(rows: Tensor, n: int) -> Tensor:
    """The row pointers of n rows, given the row of each nonzero in ascending order (checked on the CPU)."""
    if rows.device.type == "cpu" and len(rows) and (rows[0] < 0 or rows[-1] >= n or (rows.diff() < 0).any()):
        raise ValueError(f"malformed COO: row indices must ascend from 0 to {n - 1} in a tensor that is coalesced")
    return torch.searchsorted(rows.contiguous(), torch.arange(n + 1, device=rows.device))


def _expanded(indptr: Tensor, count: int) -> Tensor:
    """The row (for CSC, the column) of each of `count` nonzeros."""
    rows = torch.arange(len(indptr) - 1, device=indptr.device)
    return torch.repeat_interleave(rows, indptr.diff(), output_size=count)  # output_size avoids a synchronisation


def transposed(x: SparseMatrix, n: int) -> SparseMatrix:
    """The transpose of a matrix with n columns, with the same arrays."""
    return x._replace(by_columns=not x.by_columns, n=n)


def flattened(x: Tensor, batched: bool) -> SparseMatrix:
    """A sparse tensor flattened in logical order to one row, or if `batched` to one row per leading index."""
    if batched and x.ndim == 2:
        return matrix(x)
    if x.layout is not torch.sparse_coo:
        values, indptr, indices, by_columns, _ = matrix(x)
        compressed = _expanded(indptr, len(indices))
        coordinates = torch.stack((indices, compressed) if by_columns else (compressed, indices))
    else:
        x = x.coalesce()
        values, coordinates = x.values(), x.indices()
    linear = torch.zeros_like(coordinates[0])
    for axis in range(int(batched), x.ndim):
        linear = linear * x.shape[axis] + coordinates[axis]
    if batched:
        return SparseMatrix(values, _pointers(coordinates[0], x.shape[0]), linear, False, x.shape[0])
    return SparseMatrix(values, torch.tensor([0, len(linear)], device=linear.device), linear, False, 1)


# ------------------------------------------------------------------------------------- results


def project(spec: SketchSpec, x: SparseMatrix) -> Tensor:
    """x S', dense, in the dtype of the values."""
    return project_sparse(*x, *spec)  # type: ignore[no-any-return]


def project_into(spec: SketchSpec, x: SparseMatrix, out: Tensor, accumulate: bool) -> None:
    """out = x S', or out += x S', without derivatives."""
    refuse_derivatives(x.values, out)
    result = project(spec, x._replace(values=x.values.to(torch.promote_types(x.values.dtype, torch.float32))))
    if accumulate:
        out.add_(result)
    else:
        out.copy_(result)


def _fake_project(values: Tensor, *arguments: Any) -> Tensor:
    n, _, n_components, *_ = arguments[3:]
    return values.new_empty((n, n_components))


def _fake_adjoint(gradient: Tensor, indptr: Tensor, indices: Tensor, *_: Any) -> Tensor:
    return gradient.new_empty(indices.shape)


def _compute_project(
    values: Tensor, indptr: Tensor, indices: Tensor, by_columns: bool, n: int, *description: Any
) -> Tensor:
    spec = SketchSpec(*description)
    compute = torch.promote_types(values.dtype, torch.float32)
    # Allocated by NumPy, which uses huge pages: saves a fifth of the time.
    out = np.empty((n, spec.n_components), str(compute).removeprefix("torch."))
    x = _scipy_matrix(values.to(compute), indptr, indices, by_columns, (n, spec.n_features))
    cpu_backend(spec).project_sparse(spec, x, out, False)
    return torch.from_numpy(out).to(values.dtype)


def _compute_project_cuda(
    values: Tensor, indptr: Tensor, indices: Tensor, by_columns: bool, n: int, *description: Any
) -> Tensor:
    spec = SketchSpec(*description)
    if by_columns:  # convert to CSR, with the nonzeros of a row in the order of columns
        rows, order = torch.sort(indices, stable=True)
        values, indices, indptr = values[order], _expanded(indptr, len(indices))[order], _pointers(rows, n)
    out = values.new_empty((n, spec.n_components))
    arrays = values.contiguous(), indptr.contiguous(), indices.contiguous()
    triton_backend(spec).project_sparse(spec, *arrays, out, False)
    return out


def _scipy_matrix(values: Tensor, indptr: Tensor, indices: Tensor, by_columns: bool, shape: tuple[int, int]) -> Any:
    """The matrix as a SciPy array on the same memory, with validated indices."""
    import scipy.sparse

    x = scipy.sparse.csc_array(shape) if by_columns else scipy.sparse.csr_array(shape)
    x.data, x.indptr, x.indices = (t.detach().numpy() for t in (values, indptr, indices))  # no copies
    return checked_sparse(x)


def _compute_adjoint(
    gradient: Tensor, indptr: Tensor, indices: Tensor, by_columns: bool, n: int, *description: Any
) -> Tensor:
    """(gradient S) at the positions of the nonzeros, in fp64, processed in the order of S's columns."""
    spec = SketchSpec(*description)
    x = _scipy_matrix(torch.zeros(len(indices)), indptr, indices, by_columns, (n, spec.n_features))
    compressed = np.repeat(np.arange(len(x.indptr) - 1), np.diff(x.indptr))
    rows, columns = (x.indices, compressed) if by_columns else (compressed, x.indices)
    by_column = np.argsort(columns, kind="stable")
    dense = gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32)).contiguous().numpy()
    result = np.zeros(len(columns))
    start, ordered = 0, columns[by_column]
    step = max(1, int(CODES / spec.entries_per_column))
    while start < len(ordered):
        first = int(ordered[start])
        last = min(first + step, spec.n_features)
        stop = int(np.searchsorted(ordered, last))
        last = int(ordered[stop - 1]) + 1
        part = by_column[start:stop]
        entries = cpu_backend(spec).columns(spec.columns(first, last))
        result[part] = _gather(dense, rows[part], columns[part] - first, *entries)
        start = stop
    return torch.from_numpy(result).to(gradient.dtype)


def _compute_adjoint_cuda(
    gradient: Tensor, indptr: Tensor, indices: Tensor, by_columns: bool, n: int, *description: Any
) -> Tensor:
    spec = SketchSpec(*description)
    expanded = _expanded(indptr, len(indices))
    rows, columns = (indices, expanded) if by_columns else (expanded, indices)
    out = gradient.new_empty(indices.shape)
    triton_backend(spec).gather_sparse(spec, gradient, rows.contiguous(), columns.contiguous(), out)
    return out


def _gather(
    dense: np.ndarray, rows: np.ndarray, columns: np.ndarray, codes: Any, starts: Any, scale: float
) -> np.ndarray:
    """For each (row, column), the product of dense[row] and that column of the sketch, in pieces of bounded memory."""
    lengths = np.diff(starts)[columns]
    ends = np.cumsum(lengths)
    sums = np.zeros(len(columns))
    begin = 0
    while begin < len(columns):
        done = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, done + GATHERED, "right")))
        part = lengths[begin:end]
        which = np.repeat(np.arange(begin, end), part)
        entry = np.arange(len(which)) - np.repeat(np.cumsum(part) - part, part) + starts[columns[which]]
        terms = dense[rows[which], codes[entry] >> 1].astype(np.float64)
        np.add.at(sums, which, np.where(codes[entry] & 1, -terms, terms))
        begin = end
    return scale * sums


# ------------------------------------------------------------------------------------- derivatives, batches


class _SparseFunction(compat.SingleLevelFunction):
    """The derivatives of both operators with respect to their first argument."""

    @staticmethod
    def forward(op: Any, x: Tensor, *arguments: Any) -> Any:
        return compat.call_below_autograd(op, x, *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.op, x, indptr, indices, *ctx.arguments = inputs
        ctx.dtype = x.dtype
        ctx.save_for_backward(indptr, indices)
        ctx.save_for_forward(indptr, indices)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x_gradient = _TRANSPOSE[ctx.op](gradient, *ctx.saved_tensors, *ctx.arguments).to(ctx.dtype)
        return None, x_gradient, None, None, *(None,) * len(ctx.arguments)

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor, *__: None) -> Any:
        with compat.forward_derivatives_enabled(True):
            return ctx.op(tangent, *ctx.saved_tensors, *ctx.arguments)


def _differentiable(op: Any, x: Tensor, *arguments: Any) -> Any:
    if compat.is_differentiated(x):
        with compat.single_level():
            return _SparseFunction.apply(op, x, *arguments)  # type: ignore[attr-defined]
    with compat.below_autograd():
        return op(x, *arguments)


def _batched(*_: Any) -> Any:
    raise RuntimeError(_VMAP)


def _register() -> None:
    rules: dict[Any, tuple[Any, Any, Any]] = {
        project_sparse: (_fake_project, _compute_project, _compute_project_cuda),
        adjoint_at: (_fake_adjoint, _compute_adjoint, _compute_adjoint_cuda),
    }
    for op, (fake, compute, compute_cuda) in rules.items():
        torch.library.register_fake(op.name(), fake, lib=_library)
        torch.library.register_vmap(op.name(), _batched, lib=_library)
        _library.impl(op, compute, "CPU")
        _library.impl(op, compute_cuda, "CUDA")
        _library.impl(op, partial(_differentiable, op), "Autograd")


_register()
