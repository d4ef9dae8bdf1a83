"""Products of a sketch with data: `Sketch.project`, its adjoint, and both for trees of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from .frontends import adjoint_tree, multiply, project, project_adjoint, project_tree
from .inputs.checks import flag
from .operators import Operator

if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike, NDArray
    from scipy.sparse import csr_array, csr_matrix, sparray, spmatrix

    from .laws.spec import SketchSpec
    from .operators import Float


class SketchProducts(Operator):
    """The products of the sketch that `spec` describes."""

    spec: SketchSpec

    def _multiply(self, a: Any) -> Any:
        """S @ A for A of shape (n_features,) or (n_features, n): dense, in A's dtype (fp64 for arrays of integers)."""
        return multiply(self.spec, a)

    def _multiply_from_left(self, y: Any) -> Any:
        """Y @ S: `project_adjoint`."""
        return project_adjoint(self.spec, y, None, False)

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
            Data vectors along the last axis, with any strides (no copy is made). Tensors may be on the CPU or on CUDA.
            fp16, bf16 (torch only), fp32 and fp64 keep their dtype; fp16 and bf16 are summed in fp32. Integers and bool
            are converted to fp64 in arrays and rejected in tensors, as in torch.matmul. Sparse input must have two
            dimensions: SciPy's CSR and CSC, or torch's CSR, CSC and COO, which are differentiable in their values (COO
            is coalesced first, and CSC on CUDA is converted to CSR: these are copies). A dask array, with dense, CSR or
            CSC blocks, gives a lazy dask array; chunks along the features give partial sums.
        out : {ndarray, tensor on x's device} of shape (..., n_components), fp16, bf16, fp32 or fp64, optional
            Where to write the result. It must not share memory with x.
        accumulate : bool, default False
            Add the result to `out` (fp32 or fp64), so that features can be processed in slices:
            ``S[:, a:b].project(x[:, a:b], out=y, accumulate=True)``.
        dense_output : bool, default True
            If False, sparse x gives a CSR matrix (or a CSR array, if x is a sparse array) with sorted indices. CSC
            input is copied to CSR first.

        Returns
        -------
        {ndarray, tensor, CSR matrix} of shape (..., n_components)
            `out` if given, else new memory on x's device. The leading axes of a new tensor have the same memory order
            as those of x.

        Raises
        ------
        TypeError
            If the dtype (such as complex, object, longdouble), device or container is not supported.
        ValueError
            If a shape is wrong.
        RuntimeError
            If `out` is given and a tensor requires a gradient, as in torch's own functions.

        Notes
        -----
        On the CPU, component r of the result is within c u sum_j |S_rj x_j| of its exact value if no element exceeds
        1/64 of the largest finite number in magnitude, nor, for fp64, sqrt(nnz) sum_j |S_rj x_j| that number: sums are
        scaled last. u is the unit roundoff of the sums (2^-24, or 2^-53 for fp64), and c = 68 for dense data (derived
        in `sjlt.backends.cpu.dense_kernels`); a 16-bit result has one more rounding. On ordinary data the largest error
        measured, on GPUs as well, is below 1e-6 ||x|| for fp32 and 1e-14 ||x|| for fp64. CPU results are bitwise
        independent of the number of threads and of which rows are projected together. A non-finite element affects
        exactly the nnz components of its feature. (With independent entries it may affect all components of its data
        vector, on every device.)

        CUDA tensors are projected on their device, in the current stream, with the same entries. On one device, with
        the same settings of torch, results for data of the same shape and layout are bitwise reproducible. fp32 is as
        accurate as on the CPU unless `torch.set_float32_matmul_precision` permits faster, less accurate products. A
        non-finite element affects the nnz components of its feature and may affect others among the 128 around each,
        but no other data vector.

        In torch, this is an operator (``torch.ops.sjlt.project``). It supports gradients of every order, the transforms
        of `torch.func`, `torch.compile` (with dynamic shapes, a change of seed, slice or number of rows does not
        recompile), `torch.export`, CUDA graphs and autocast, like a matrix product. No tensor is saved for the backward
        pass.

        Examples
        --------
        >>> import numpy as np, sjlt
        >>> S, X = sjlt.Sketch(1000, 64, seed=1), np.ones((3, 1000))
        >>> Y = np.zeros((3, 64))
        >>> for a in range(0, 1000, 250):
        ...     _ = S[:, a : a + 250].project(X[:, a : a + 250], out=Y, accumulate=True)
        >>> bool(np.allclose(Y, S.project(X)))
        True
        """
        accumulate, dense_output = flag("accumulate", accumulate), flag("dense_output", dense_output)
        return project(self.spec, x, out, accumulate, dense_output)

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
        y : {ndarray, tensor, CSR or CSC matrix or array, dask array} of shape (..., n_components)
        out : {ndarray, tensor on y's device} of shape (..., n_features), fp16, bf16, fp32 or fp64, optional
        accumulate : bool, default False
            As in `project`; so are the supported dtypes, devices and strides, and the errors.

        Returns
        -------
        {ndarray, tensor} of shape (..., n_features), always dense.

        Notes
        -----
        As for `project`, with sums of nnz terms: on the CPU, c = nnz + 3 if no element exceeds 1/nnz of the largest
        finite number. A non-finite element affects the features with a nonzero in its component; on a GPU it may affect
        other features of the same data vector.

        Examples
        --------
        >>> import numpy as np, sjlt
        >>> S, x, y = sjlt.Sketch(1000, 64, seed=1), np.ones(1000), np.ones(64)
        >>> bool(np.isclose(y @ S.project(x), S.project_adjoint(y) @ x))
        True
        """
        return project_adjoint(self.spec, y, out, flag("accumulate", accumulate))

    def project_tree(self, tensors: Any, *, out: torch.Tensor | None = None, batched: bool = False) -> torch.Tensor:
        """Project several tensors, such as a model's gradients, as if flattened and concatenated.

        Nothing is concatenated, staged or copied: each tensor is read in place and multiplied by its own columns of
        the sketch.

        Parameters
        ----------
        tensors : dict or list of torch tensors, possibly nested, on one device
            Tensors with n_features elements in total, in the order of ``torch.cat([t.reshape(-1) for t in tensors])``:
            the values of a dict in insertion order (as in `named_parameters`), each tensor in its logical order
            whatever its strides. The first tensor is multiplied by the columns ``S[:, :t.numel()]``, the next by the
            following ones. (A tensor whose elements are not evenly spaced in that order, such as a transposed one, is
            read in several pieces.) DTensors (FSDP2, tensor parallelism; sharded evenly or not, replicated, or partial
            sums) are accepted: each rank projects the part that it holds, and partial results are added in rank order,
            so that the results of all ranks are bitwise equal. Every rank of the mesh must make the call. Sparse
            tensors are accepted as in `project`.
        out : tensor of shape (n_components,) or (batch, n_components), optional
            Where to write the result.
        batched : bool, default False
            Whether every tensor has a leading dimension of the same length, as per-example gradients do.

        Returns
        -------
        tensor of shape (n_components,), or (batch, n_components) if batched
            Its dtype is the one to which the tensors' dtypes promote. Sums are computed in fp32 or fp64.

        Raises
        ------
        TypeError, ValueError
            As in `project`, and if the tensors do not have n_features elements in total or are on several devices.
        RuntimeError
            If `out` is given and a tensor requires a gradient.

        Examples
        --------
        >>> import torch, sjlt
        >>> layer, S = torch.nn.Linear(30, 10), sjlt.Sketch(310, 64, seed=1)
        >>> S.project_tree(dict(layer.named_parameters())).shape
        torch.Size([64])
        """
        return project_tree(self.spec, tensors, out, flag("batched", batched))  # type: ignore[no-any-return]

    def adjoint_tree(self, y: torch.Tensor, like: Any, *, batched: bool = False) -> Any:
        """Apply the adjoint to the projection of several tensors: the transpose of `project_tree`.

        Parameters
        ----------
        y : tensor of shape (n_components,), or (batch, n_components) if batched
            On the device of the tensors in `like`; equal on all ranks.
        like : dict or list of torch tensors, possibly nested
            As `tensors` in `project_tree`. Only shapes, dtypes, devices and placements are used.
        batched : bool, default False
            As in `project_tree`.

        Returns
        -------
        tree of dicts, lists and tuples
            ``y @ S``, split into tensors with the shapes and dtypes of those in `like`. For a DTensor, each rank
            computes the part that it holds; partial placements become replicated. Every rank of the mesh must make the
            call: the ranks compare their arguments.

        Raises
        ------
        TypeError, ValueError
            As in `project_tree`.
        RuntimeError
            If `like` contains a DTensor and y requires a gradient.

        Examples
        --------
        >>> import torch, sjlt
        >>> gradients = {"weight": torch.ones(4, 5), "bias": torch.ones(4)}
        >>> S = sjlt.Sketch(24, 8, nnz=2)
        >>> update = S.adjoint_tree(S.project_tree(gradients), like=gradients)
        >>> update["weight"].shape
        torch.Size([4, 5])
        """
        return adjoint_tree(self.spec, y, like, flag("batched", batched))
