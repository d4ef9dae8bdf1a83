"""`SparseRandomProjection`, the scikit-learn transformer."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, cast

import numpy as np
import scipy.linalg
import scipy.sparse
import sklearn
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin, _fit_context
from sklearn.exceptions import DataDimensionalityWarning
from sklearn.random_projection import johnson_lindenstrauss_min_dim
from sklearn.utils import check_array, check_random_state
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils._set_output import _get_output_config
from sklearn.utils.validation import check_is_fitted, validate_data

from .frontends import dask_arrays
from .inputs.containers import is_dask, is_sparse, is_tensor
from .sketch import Sketch

_ACCEPTED: dict[str, Any] = {"accept_sparse": ["csr", "csc"], "dtype": [np.float64, np.float32]}


class SparseRandomProjection(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Reduce dimensionality by a sparse random projection that is never stored.

    A drop-in replacement for `sklearn.random_projection.SparseRandomProjection`: only the import changes. A fitted
    transformer holds a `Sketch` of about a hundred bytes, whatever the number of features.

    Parameters
    ----------
    n_components : int or "auto", default "auto"
        Length of a projected vector. "auto" is the bound of the Johnson-Lindenstrauss lemma for the number of
        samples and `eps`, which assumes nothing about the data and is often far larger than needed.
    nnz : int or "auto", default "auto"
        Nonzeros per column of `components_`, 1 to floor(k / ceil(k/128)) for k = n_components. "auto": 4 if allowed.
    stacks : int, default 1
        Independent sketches, stacked vertically; divides n_components and `nnz`. 4 keeps one-hot features apart.
    density : None, float in (0, 1] or "auto", default None
        None: every column has exactly `nnz` nonzeros. Otherwise entries are independent, with scikit-learn's
        distribution and this probability of a nonzero ("auto": 1/sqrt(n_features)), and `nnz` must not be given. The
        probability is rounded to a multiple of 2^-7, or of 2^-15 below 1/16.
    eps : float, default 0.1
        Largest relative error of a squared distance that n_components="auto" permits, in (0, 1).
    dense_output : bool, default False
        Whether sparse input gives dense output, which is smaller and faster if few components of the result are zero.
    compute_inverse_components : bool, default False
        Compute `inverse_components_`, a dense array, in `fit`. Without it, `inverse_transform` needs less memory but
        one eigendecomposition of an n_components-square matrix per call.
    random_state : int, RandomState, Generator or None, default None
        An int, 0 to 2^32 - 1, is the seed of the sketch. From a generator, `fit` draws 64 bits; None is NumPy's global
        generator.

    Attributes
    ----------
    sketch_ : Sketch
        The projection, which defines the attributes below and accepts more containers than this class.
    n_components_ : int
        The number of components, with "auto" resolved.
    components_ : CSR matrix of shape (n_components, n_features)
        The projection as a matrix, built on each access, in the dtype of the training data (float32 for a tensor of 16
        bits). A CSR array if scikit-learn is configured for sparse arrays.
    density_ : float
        The fraction of nonzeros in `components_`: nnz / n_components, or the rounded `density`.
    inverse_components_ : {ndarray, tensor} of shape (n_features, n_components)
        The pseudo-inverse of `components_`, in the same dtype; a tensor on the device of X if `fit` was given a tensor.
        Only if compute_inverse_components=True.
    n_features_in_ : int
        Number of features seen in `fit`.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of these features, if all are strings.

    See Also
    --------
    Sketch : The same projection as a linear operator.
    sklearn.random_projection.SparseRandomProjection : Independent entries, stored.

    Notes
    -----
    Differences from scikit-learn's transformer:

    - The projection is not stored but regenerated from its seed as it is applied.
    - Each feature contributes to exactly `nnz` components rather than a random number of them, so norms of sparse
      vectors are preserved, too: the variance of ||Sx||^2 for unit x is at most about 2/n_components. Independent
      entries with density="auto", scikit-learn's default, fill 1/sqrt(n_features) of a column on average: for 16384
      features, 256 components and a vector with two nonzeros, the standard deviation of ||Sx||^2 is 0.50, compared
      with 0.07 for nnz=4. `density` is therefore None by default. (For dense vectors both give sqrt(2/n_components).)
    - The same `random_state` gives different entries.
    - The result of `transform` has the dtype of its input, float32 or float64, regardless of `fit`.
    - `get_feature_names_out` and pandas output also work with n_components="auto".
    - Torch tensors on the CPU and on CUDA devices are accepted and give tensors on their device, with or without
      scikit-learn's array API dispatch. float16, bfloat16, float32 and float64 keep their dtype; others are rejected.
      A transformer fitted on an array can project tensors and vice versa, with the same sketch.

    Tensors are validated like arrays: shape, NaN and infinity. On a GPU, looking for NaN and infinity reads the data
    once more and synchronises; ``sklearn.config_context(assume_finite=True)`` disables it.

    `fit` uses only the shape and dtype of X, and the number of rows only for n_components="auto". If X is never in
    memory as a whole, fit on an empty sparse matrix with the same number of features::

        SparseRandomProjection(256).fit(scipy.sparse.csr_matrix((1, n_features), dtype=np.float32))

    References
    ----------
    Achlioptas, "Database-friendly random projections", PODS 2001; with binary coins, JCSS 66(4), 2003.
    Li, Hastie, Church, "Very sparse random projections", KDD 2006.
    Kane, Nelson, "Sparser Johnson-Lindenstrauss transforms", JACM 61(1), 2014 (exactly nnz per column).

    Examples
    --------
    >>> import numpy as np
    >>> from sjlt import SparseRandomProjection
    >>> X = np.random.default_rng(0).normal(size=(25, 3000))
    >>> transformer = SparseRandomProjection(random_state=0)
    >>> transformer.fit_transform(X).shape
    (25, 2759)
    >>> transformer.sketch_
    Sketch(n_features=3000, n_components=2759, nnz=4, seed=0)
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "n_components": [Interval(Integral, 1, None, closed="left"), StrOptions({"auto"})],
        "nnz": [Interval(Integral, 1, None, closed="left"), StrOptions({"auto"})],
        "stacks": [Interval(Integral, 1, None, closed="left")],
        "density": [Interval(Real, 0.0, 1.0, closed="right"), StrOptions({"auto"}), None],
        "eps": [Interval(Real, 0, None, closed="neither")],
        "dense_output": ["boolean"],
        "compute_inverse_components": ["boolean"],
        "random_state": ["random_state", np.random.Generator],
    }

    def __init__(
        self,
        n_components: int | Literal["auto"] = "auto",
        *,
        nnz: int | Literal["auto"] = "auto",
        stacks: int = 1,
        density: float | Literal["auto"] | None = None,
        eps: float = 0.1,
        dense_output: bool = False,
        compute_inverse_components: bool = False,
        random_state: int | np.random.RandomState | np.random.Generator | None = None,
    ) -> None:
        self.n_components = n_components
        self.nnz = nnz
        self.stacks = stacks
        self.density = density
        self.eps = eps
        self.dense_output = dense_output
        self.compute_inverse_components = compute_inverse_components
        self.random_state = random_state

    @_fit_context(prefer_skip_nested_validation=True)  # type: ignore[untyped-decorator]
    def fit(self, X: Any, y: object = None) -> SparseRandomProjection:
        """Choose the projection for data of the shape of X.

        Parameters
        ----------
        X : {array-like, sparse matrix, tensor, dask array} of shape (n_samples, n_features)
            Only its shape and dtype are used, and with compute_inverse_components=True its device.
        y : ignored

        Returns
        -------
        The transformer itself.

        Raises
        ------
        ValueError
            If parameters or data are invalid, n_components="auto" needs more components than there are features, both
            `nnz` and `density` are given, or `density` is below 2^-16.
        TypeError
            If X is a tensor of an unsupported dtype.
        """
        X = self._validated(X, reset=True)
        n_samples, n_features = X.shape
        if self.n_components == "auto":
            n_components = self._safe_n_components(n_samples, n_features)
        else:
            n_components = self.n_components
            if n_components > n_features:
                warnings.warn(
                    f"n_features={n_features} is less than n_components={n_components}: the projection will not "
                    "reduce the dimension",
                    DataDimensionalityWarning,
                    stacklevel=3,  # past scikit-learn's wrapper of fit
                )
        entries: dict[str, Any] = {"nnz": self.nnz, "stacks": self.stacks, "density": self.density}
        self.sketch_ = Sketch(n_features, n_components, seed=_seed(self.random_state), **entries)
        self._fit_dtype = _numpy_dtype(X)
        if self.compute_inverse_components:
            gram_inverse = self._gram_inverse().astype(self._fit_dtype)
            self.inverse_components_ = self.sketch_.project_adjoint(_like(X, gram_inverse)).T
        return self

    def _validated(self, X: Any, *, reset: bool) -> Any:
        """X in the form that is projected. With `reset`, record its features; otherwise check it against them."""
        if is_dask(X):
            dask_arrays.check_matrix(X)
            validate_data(self, X, reset=reset, skip_check_array=True)
            return X.astype(dask_arrays.accepted_dtype(X))
        if not is_tensor(X):
            return validate_data(self, X, reset=reset, **_ACCEPTED)
        _check_tensor(X)
        validate_data(self, X, reset=reset, skip_check_array=True)  # the number of features
        _check_finite(X)
        return X

    def _safe_n_components(self, n_samples: int, n_features: int) -> int:
        if n_samples != n_samples:  # NaN: a dask array of unknown size
            raise ValueError("n_components='auto' needs the number of rows: call X.compute_chunk_sizes() first")
        n_components = int(johnson_lindenstrauss_min_dim(n_samples, eps=self.eps))
        if not 0 < n_components <= n_features:
            problem = (
                f"which is larger than the original space with n_features={n_features}"
                if n_components > 0
                else "which is not positive"
            )
            raise ValueError(
                f"eps={self.eps} and n_samples={n_samples} lead to a target dimension of {n_components}, {problem}"
            )
        return n_components

    def transform(self, X: Any) -> Any:
        """Project data.

        Parameters
        ----------
        X : {array-like, sparse matrix, tensor, dask array} of shape (n_samples, n_features)
            float32 and float64 keep their dtype, as do float16 and bfloat16 in tensors. Other dtypes are converted to
            float64 in arrays and rejected in tensors.

        Returns
        -------
        {ndarray, sparse matrix, tensor, dask array} of shape (n_samples, n_components)
            A tensor is dense, on the device of X; a dask array is lazy. Sparse if X is a sparse matrix or array and
            dense_output=False: CSC if X is CSC, else CSR.

        Raises
        ------
        ValueError
            If X has another number of features than in `fit`, NaN or infinity, or is a tensor or dask array while
            `set_output` selects data frames.
        TypeError
            If X is a tensor of an unsupported dtype.
        """
        check_is_fitted(self)
        X = self._validated(X, reset=False)
        if is_tensor(X) or is_dask(X):
            frames = _get_output_config("transform", self)["dense"]
            if frames != "default":
                kind, convert = ("tensors", "X.numpy(force=True)") if is_tensor(X) else ("dask arrays", "X.compute()")
                raise ValueError(
                    f"set_output(transform={frames!r}) does not apply to {kind}: pass an array, as from {convert}, or "
                    "use set_output(transform='default')"
                )
        if is_tensor(X):
            return self.sketch_.project(X)
        if is_dask(X):
            dense_output = self.dense_output or not is_sparse(X._meta)
            finite = not sklearn.get_config()["assume_finite"]
            return dask_arrays.project_dask(self.sketch_.spec, X, dense_output=dense_output, finite=finite)
        projected = self.sketch_.project(X, dense_output=self.dense_output)
        return _configured(projected.asformat(X.format)) if scipy.sparse.issparse(projected) else projected

    def inverse_transform(self, X: Any) -> Any:
        """Map projected data back to the vectors of least norm whose projections are nearest to X.

        Parameters
        ----------
        X : {array-like, sparse matrix, tensor, dask array} of shape (n_samples, n_components)

        Returns
        -------
        {ndarray, tensor, dask array} of shape (n_samples, n_features)
            Always dense; a tensor on the device of X if X is a tensor, and lazy if X is a dask array. Dtypes are as in
            `transform`.
        """
        check_is_fitted(self)
        if is_tensor(X):
            _check_tensor(X)
            _check_finite(X)
        elif is_dask(X):
            X = dask_arrays.dense_matrix(X)
        else:
            X = check_array(X, input_name="X", **_ACCEPTED)
        if X.shape[1] != self.n_components_:
            raise ValueError(f"X has {X.shape[1]} components, inverse_transform expects {self.n_components_}")
        if self.compute_inverse_components:
            return _times(X, self.inverse_components_.T)
        return self.sketch_.project_adjoint(_times(X, self._gram_inverse()))

    def _gram_inverse(self) -> np.ndarray:
        """(S S')^+ in fp64, from which S^+ = S' (S S')^+ without decomposing a matrix as wide as the data."""
        S = self.sketch_.to_scipy("csr")
        return cast(np.ndarray, scipy.linalg.pinvh((S @ S.T).toarray(), check_finite=False))

    @property
    def n_components_(self) -> int:
        return self.sketch_.n_components

    @property
    def density_(self) -> float:
        S = self.sketch_
        return S.spec.nnz / S.n_components if S.density is None else S.density

    @property
    def components_(self) -> Any:
        return _configured(scipy.sparse.csr_matrix(self.sketch_.to_scipy("csr", self._fit_dtype)))

    @property
    def _n_features_out(self) -> int:
        """The number of output names, read by ClassNamePrefixFeaturesOutMixin."""
        return self.sketch_.n_components

    def __dir__(self) -> Iterable[str]:
        # Notebooks and debuggers read every name in dir(), and BaseEstimator's dir() reads every property. Neither
        # should build components_.
        return [name for name in object.__dir__(self) if name != "components_" and hasattr(self, name)]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        tags.input_tags.sparse = True
        return tags


def _seed(random_state: Any) -> int:
    if isinstance(random_state, Integral):
        return int(random_state)
    generator = random_state if isinstance(random_state, np.random.Generator) else check_random_state(random_state)
    return int.from_bytes(generator.bytes(8), "little")


# ------------------------------------------------------------------------------------- tensors


def _check_tensor(X: Any) -> None:
    """Check shape and dtype, as check_array does for arrays."""
    from .torch_ops.checks import DTYPES, listed

    if X.ndim != 2:
        raise ValueError(f"expected a 2-D tensor, (n_samples, n_features), got one of shape {tuple(X.shape)}")
    if 0 in X.shape:
        raise ValueError(f"at least 1 sample and 1 feature are required, got a tensor of shape {tuple(X.shape)}")
    if X.dtype not in DTYPES:
        raise TypeError(f"a tensor must have dtype {listed(DTYPES)}, got {X.dtype}")


def _check_finite(X: Any) -> None:
    """Raise ValueError for NaN and infinity, unless scikit-learn is configured to assume finite data."""
    import torch

    if sklearn.get_config()["assume_finite"]:
        return
    # A sum needs no memory and is non-finite if any element is. Finite elements may overflow it: then check each.
    X = X.detach().values() if X.layout in (torch.sparse_csr, torch.sparse_csc) else X.detach()
    if not torch.isfinite(X.sum(dtype=torch.float32 if X.itemsize < 4 else None)):
        for name, found in (("NaN", X.isnan().any()), ("infinity", X.isinf().any())):
            if found:
                raise ValueError(f"Input X contains {name}.")


def _numpy_dtype(X: Any) -> np.dtype:
    """The dtype of an array, or the nearest dtype that SciPy's matrices support for a tensor."""
    return np.dtype(f"float{max(32, 8 * X.itemsize)}") if is_tensor(X) else cast(np.dtype, X.dtype)


def _like(X: Any, matrix: Any) -> Any:
    """`matrix` as a tensor on the device of X if X is a tensor, else as an array."""
    if is_tensor(X):
        import torch

        return torch.as_tensor(matrix, device=X.device)
    return matrix.numpy(force=True) if is_tensor(matrix) else matrix


def _times(X: Any, matrix: Any) -> Any:
    """X @ matrix in the dtype and on the device of X, computed in the wider of the two dtypes."""
    matrix = _like(X, matrix)
    if is_tensor(X):
        import torch

        wide = torch.promote_types(X.dtype, matrix.dtype)
        return (X.to(wide) @ matrix.to(wide)).to(X.dtype)
    return (X @ matrix).astype(X.dtype, copy=False)


# ------------------------------------------------------------------------------------- sparse matrices


def _configured(matrix: Any) -> Any:
    """`matrix` as a sparse matrix or array, as scikit-learn is configured (since 1.9), or else as it is."""
    kind = {"spmatrix": "_matrix", "sparray": "_array"}.get(sklearn.get_config().get("sparse_interface", ""))
    return getattr(scipy.sparse, matrix.format + kind)(matrix) if kind else matrix
