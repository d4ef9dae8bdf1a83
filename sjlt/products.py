"""The products of a sketch with data: `Sketch.project`, its adjoint and its trees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from . import frontends
from .operators import Operator

if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike, NDArray
    from scipy.sparse import csr_array, csr_matrix, sparray, spmatrix

    from .laws.spec import SketchSpec
    from .operators import Float


class SketchProducts(Operator):
    """The products of an operator that `spec` describes."""

    spec: SketchSpec

    def _multiply(self, a: Any) -> Any:
        """S @ A for A (n_features,) or (n_features, n): dense, in A's dtype (integers in an array become fp64)."""
        return frontends.multiply(self.spec, a)

    def _multiply_from_left(self, y: Any) -> Any:
        """Y @ S: `project_adjoint`."""
        return frontends.project_adjoint(self.spec, y)

    @overload
    def project(
        self, x: torch.Tensor, *, out: torch.Tensor | None = ..., accumulate: bool = ..., dense_output: bool = ...
    ) -> torch.Tensor: ...
    @overload
    def project(
        self, x: NDArray[Float], *, out: None = ..., accumulate: bool = ..., dense_output: bool = ...
    ) -> NDArray[Float]: ...
    @overload
    def project(
        self, x: Any, *, out: NDArray[Float], accumulate: bool = ..., dense_output: bool = ...
    ) -> NDArray[Float]: ...
    @overload
    def project(self, x: sparray, *, out: None = ..., dense_output: Literal[False]) -> csr_array: ...
    @overload
    def project(  # type: ignore[overload-cannot-match]  # where SciPy has no stubs
        self, x: spmatrix, *, out: None = ..., dense_output: Literal[False]
    ) -> csr_matrix: ...
    @overload
    def project(
        self, x: ArrayLike | sparray | spmatrix, *, out: None = ..., accumulate: bool = ..., dense_output: bool = ...
    ) -> NDArray[Any]: ...
    def project(self, x: Any, *, out: Any = None, accumulate: bool = False, dense_output: bool = True) -> Any:
        """Project data vectors: ``x @ S.T``.

        Parameters
        ----------
        x : {ndarray, tensor, CSR or CSC matrix or array, dask array} of shape (..., n_features)
            Tensors on the CPU or on CUDA. fp16, bf16 (torch only), fp32 and fp64 keep their dtype; fp16 and bf16 are
            summed in fp32. Integers and bool become fp64 in arrays and are refused in tensors, as in torch.matmul.
            Any strides are accepted without a copy. Sparse input has two dimensions: SciPy's, or torch's CSR, CSC or
            COO, whose values are differentiable (COO is coalesced first, and CSC on CUDA becomes CSR: copies). A dask
            array, of dense, CSR or CSC blocks, gives a lazy one: chunks of features become partial sums.
        out : {ndarray, tensor on x's device} of shape (..., n_components), fp16, bf16, fp32 or fp64, optional
            Where to write the result. It must not share memory with x.
        accumulate : bool, default False
            Add the result to `out` (fp32 or fp64), so that features can be processed slice by slice:
            ``S[:, a:b].project(x[:, a:b], out=y, accumulate=True)``.
        dense_output : bool, default True
            If False, sparse x gives a CSR matrix (for a sparse array, an array) with sorted indices. CSC input is
            copied to CSR first.

        Returns
        -------
        {ndarray, tensor, CSR matrix} of shape (..., n_components)
            `out` if given, else new memory on x's device. The leading axes of a new tensor lie in memory in the order
            of x's.

        Raises
        ------
        TypeError
            For unsupported dtypes (complex, object, longdouble), devices and containers.
        ValueError
            For wrong shapes.
        RuntimeError
            For `out` together with tensors that require gradients, as in torch's own functions.

        Notes
        -----
        On the CPU, component r of the result is within c u sum_j |S_rj x_j| of its exact value for every input whose
        numbers are at most 1/64 of the largest finite one; u is the unit roundoff of the sums (2^-24, or 2^-53 for
        fp64) and c = 68 for dense data (`sjlt.backends.cpu.dense_kernels` derives it). On ordinary data the largest
        error measured, on GPUs too, is below 1e-6 ||x|| for fp32 and 1e-14 ||x|| for fp64. On the CPU results do not
        depend, to the bit, on the number of threads or on which rows are projected together, and a non-finite number
        reaches exactly the nnz components of its feature. (With independent entries it may reach all components of its
        data vector, on every device.)

        CUDA tensors are projected on their own device, in the current stream, by the same entries. Results on one
        device with data of one shape and layout are bitwise reproducible. fp32 is as accurate as on the CPU unless
        `torch.set_float32_matmul_precision` permits faster, less accurate products. A non-finite number reaches the
        nnz components of its feature and may reach others among the 128 around them, but no other data vector.

        In torch it is an operator (``torch.ops.sjlt.project``): gradients of every order, `torch.func`'s
        transforms, `torch.compile` (with dynamic shapes, other seeds, slices and numbers of rows do not recompile),
        `torch.export`, CUDA graphs and autocast work as for a matrix product. Nothing is saved for the backward
        pass.
        """
        return frontends.project(self.spec, x, out=out, accumulate=accumulate, dense_output=dense_output)

    @overload
    def project_adjoint(
        self, y: torch.Tensor, *, out: torch.Tensor | None = ..., accumulate: bool = ...
    ) -> torch.Tensor: ...
    @overload
    def project_adjoint(self, y: NDArray[Float], *, out: None = ..., accumulate: bool = ...) -> NDArray[Float]: ...
    @overload
    def project_adjoint(self, y: Any, *, out: NDArray[Float], accumulate: bool = ...) -> NDArray[Float]: ...
    @overload
    def project_adjoint(
        self, y: ArrayLike | sparray | spmatrix, *, out: None = ..., accumulate: bool = ...
    ) -> NDArray[Any]: ...
    def project_adjoint(self, y: Any, *, out: Any = None, accumulate: bool = False) -> Any:
        """Apply the adjoint to projected vectors: ``y @ S``.

        Parameters
        ----------
        y : {ndarray, tensor, CSR or CSC matrix or array} of shape (..., n_components)
        out : {ndarray, tensor on y's device} of shape (..., n_features), fp16, bf16, fp32 or fp64, optional
        accumulate : bool, default False
            As in `project`, as are dtypes, devices, strides and errors.

        Returns
        -------
        {ndarray, tensor} of shape (..., n_features), always dense.

        Notes
        -----
        As for `project`. A non-finite number reaches the features that have an entry in its component; on a GPU it
        may reach others of the same data vector.
        """
        return frontends.project_adjoint(self.spec, y, out=out, accumulate=accumulate)

    def project_tree(self, tensors: Any, *, out: torch.Tensor | None = None, batched: bool = False) -> torch.Tensor:
        """Project the numbers of several tensors, such as a model's gradients, as if concatenated.

        Nothing is concatenated, staged or copied: each tensor is read in place and multiplied by its own columns of
        the sketch.

        Parameters
        ----------
        tensors : dict or list of torch tensors, possibly nested, on one device
            n_features numbers in all, in the order of ``torch.cat([t.reshape(-1) for t in tensors])``: the values of a
            dict in insertion order (as in `named_parameters`), each tensor in its logical order whatever its strides.
            The first tensor corresponds to the columns ``S[:, :t.numel()]``, the next to those that follow. (A tensor
            whose numbers are not evenly spaced in that order, such as a transposed one, is read in several pieces.)
            DTensors (FSDP2, tensor parallelism; sharded evenly or not, replicated, or partial sums) are accepted: each
            rank projects what it holds, and partial sketches are added in the order of ranks, so that all ranks have
            the same bits. Every rank of the mesh must make the call. Sparse tensors are those of `project`.
        out : tensor of shape (n_components,) or (batch, n_components), optional
            Where to write the result.
        batched : bool, default False
            Whether every tensor has a leading dimension of the same length, as per-example gradients do.

        Returns
        -------
        tensor of shape (n_components,), or (batch, n_components) if batched
            Its dtype is the one that the tensors' dtypes promote to. Sums run in fp32 or fp64.

        Raises
        ------
        TypeError, ValueError
            As `project`, and if the tensors do not hold n_features numbers or lie on several devices.
        RuntimeError
            For `out` together with tensors that require gradients.
        """
        return frontends.project_tree(self.spec, tensors, out, batched)  # type: ignore[no-any-return]

    def adjoint_tree(self, y: torch.Tensor, like: Any, *, batched: bool = False) -> Any:
        """Apply the adjoint to a sketch of several tensors: the transpose of `project_tree`.

        Parameters
        ----------
        y : tensor of shape (n_components,), or (batch, n_components) if batched
            On the device of the tree, and the same on every rank.
        like : dict or list of torch tensors, possibly nested
            As `tensors` of `project_tree`. Only shapes, dtypes, devices and placements are used.
        batched : bool, default False
            As in `project_tree`.

        Returns
        -------
        tree of dicts, lists and tuples
            ``y @ S`` cut into tensors like those of `like`, each in its dtype. For a DTensor, each rank computes the
            part that it holds; a partial placement becomes a replicated one.

        Raises
        ------
        TypeError, ValueError
            As `project_tree`.

        Examples
        --------
        >>> import torch, sjlt
        >>> gradients = {"weight": torch.ones(4, 5), "bias": torch.ones(4)}
        >>> S = sjlt.Sketch(24, 8, nnz=2)
        >>> update = S.adjoint_tree(S.project_tree(gradients), like=gradients)
        >>> update["weight"].shape
        torch.Size([4, 5])
        """
        return frontends.adjoint_tree(self.spec, y, like, batched)
