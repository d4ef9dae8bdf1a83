"""`Sketch`: a sparse Johnson-Lindenstrauss transform that is never stored, and its transpose."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from . import frontends
from .inputs.checks import integer as _integer
from .inputs.checks import nnz_or_lanes, signed
from .laws import exact as exact_law
from .laws import iid as iid_law
from .laws.spec import SketchSpec
from .operators import Operator, Transposed

if TYPE_CHECKING:
    import torch
    from numpy.typing import DTypeLike

MAX_FEATURES = 2**63 - 1


def _bounds(part: slice, n: int) -> tuple[int, int]:
    """``part.indices(n)`` of a slice of step 1, in operations that torch.compile can trace."""
    if part.step is not None and operator.index(part.step) != 1:
        raise ValueError(f"only slices of step 1 exist, got step {part.step}")
    start, stop = part.start if part.start is not None else 0, part.stop if part.stop is not None else n
    if not (type(start) is type(stop) is int):  # to torch.compile, operator.index would fix a number
        start, stop = operator.index(start), operator.index(stop)
    return (max(start + n, 0) if start < 0 else min(start, n)), (max(stop + n, 0) if stop < 0 else min(stop, n))


@dataclass(frozen=True, repr=False)
class Sketch(Operator):
    """A sparse Johnson-Lindenstrauss transform S of shape (n_components, n_features), regenerated from its seed.

    Each column has exactly `nnz` nonzeros +-1/sqrt(nnz) in distinct rows, placed by Philox4x32-10 (see
    `sjlt.laws.exact`), so E||Sx||^2 = ||x||^2 and Var||Sx||^2 <= 2/n_components for unit x (slightly more where
    n_components does not divide evenly, see there). Given a `density` instead, entries are independent
    (`sjlt.laws.iid`). The object is about a hundred bytes; equal arguments give equal entries on every machine.

    Parameters
    ----------
    n_features : int, 0 to 2^63 - 1
        Columns of S: the length of a data vector.
    n_components : int, 1 to 8,388,480
        Rows of S: the length of a projected vector.
    nnz : int or "auto", default "auto"
        Nonzeros per column (s in the literature), from 1 to floor(k / ceil(k/128)) for k = n_components.
        "auto" is 4, or that bound where it is smaller. nnz=1 is the CountSketch.
    density : float in (0, 1] or "auto", optional
        Instead of nnz: entries are independent, +-sqrt(1/(k density)) with probability density/2 each and else 0, the
        distribution of scikit-learn's random projections. "auto" is 1/sqrt(n_features), 1 has no zeros. It is rounded
        to a multiple of 2^-7, below 1/16 of 2^-15, and refused below 2^-16.
    seed : int, -2^63 to 2^64 - 1, default 0
        Taken mod 2^64.
    feature_offset : int, default 0
        The law's index of column 0: where a slice ``S[:, a:b]`` begins. At most 2^63 - 1 - n_features.

    Attributes
    ----------
    shape : (n_components, n_features)
    nnz : int, or None where entries are independent
    density : float, the probability of a nonzero as realised, or None where every column has nnz

    Raises
    ------
    TypeError, ValueError
        For arguments of a wrong type or out of range, and for both nnz and density.

    References
    ----------
    Kane, Nelson, "Sparser Johnson-Lindenstrauss transforms", JACM 61(1), 2014, section 1.1 (block construction).
    Nelson, Nguyen, "OSNAP", FOCS 2013. Charikar, Chen, Farach-Colton, "Finding frequent items in data streams",
    2002 (nnz=1). Achlioptas, "Database-friendly random projections", JCSS 66(4), 2003 (density). Salmon et al.,
    "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox).

    Examples
    --------
    >>> import numpy as np, sjlt
    >>> S = sjlt.Sketch(1000, 128, nnz=4, seed=7)
    >>> X = np.random.default_rng(0).normal(size=(5, 1000))
    >>> (X @ S.T).shape
    (5, 128)
    >>> np.allclose(X @ S.T, X @ S.toarray().T)
    True
    """

    n_features: int
    n_components: int
    nnz: Any = field(default="auto", kw_only=True)
    density: Any = field(default=None, kw_only=True)
    seed: int = field(default=0, kw_only=True)
    feature_offset: int = field(default=0, kw_only=True)
    spec: SketchSpec = field(init=False, repr=False, compare=False)  # what operators and backends take

    def __post_init__(self) -> None:
        n_features = _integer("n_features", self.n_features, 0, MAX_FEATURES)
        k = _integer("n_components", self.n_components, 1, exact_law.MAX_N_COMPONENTS)
        nnz, lanes = nnz_or_lanes(self.nnz, self.density, n_features, k)
        seed = _integer("seed", self.seed, -(2**63), 2**64 - 1) % 2**64
        offset = _integer("feature_offset", self.feature_offset, 0, MAX_FEATURES)
        if offset + n_features > MAX_FEATURES:
            raise ValueError(f"feature_offset + n_features must be at most 2^63 - 1, got {offset} + {n_features}")
        checked = {"n_features": n_features, "n_components": k, "nnz": nnz, "seed": seed, "feature_offset": offset}
        checked["density"] = lanes.density if lanes else None
        checked["spec"] = SketchSpec(n_features, k, nnz or 0, *(lanes or (0, 0)), signed(seed), offset)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    # --------------------------------------------------------------------------------- description

    @property
    def is_iid(self) -> bool:
        """Whether the entries are independent (`density`) rather than exactly `nnz` per column."""
        return self.nnz is None

    @property
    def shape(self) -> tuple[int, int]:  # type: ignore[override]
        return (self.n_components, self.n_features)

    def __repr__(self) -> str:
        end = self.feature_offset + self.n_features
        entries = f"density={self.density}" if self.is_iid else f"nnz={self.nnz}"
        whole = f"Sketch(n_features={end}, n_components={self.n_components}, {entries}, seed={self.seed})"
        return f"{whole}[:, {self.feature_offset}:{end}]" if self.feature_offset else whole

    def to_dict(self) -> dict[str, int]:
        """The sketch as numbers, ready for JSON; `from_dict` makes an equal sketch of them."""
        entries = self.spec.lanes._asdict() if self.is_iid else {"nnz": self.nnz}
        shape = {"law": exact_law.VERSION, "n_features": self.n_features, "n_components": self.n_components}
        return {**shape, **entries, "seed": self.seed, "feature_offset": self.feature_offset}

    @classmethod
    def from_dict(cls, description: dict[str, int]) -> Sketch:
        """The sketch that `to_dict` described.

        Raises ValueError for another version of the law and for missing or unknown keys.
        """
        given = dict(description)
        version = given.pop("law", None)
        if version != exact_law.VERSION:
            raise ValueError(
                f"this version of sjlt knows sketch law {exact_law.VERSION}, the description has {version!r}"
            )
        entries = iid_law.Lanes._fields if "threshold" in given else ("nnz",)
        expected = {"n_features", "n_components", *entries, "seed", "feature_offset"}
        if given.keys() != expected:
            raise ValueError(f"a sketch's description has the keys {sorted(expected)}, got {sorted(map(str, given))}")
        if "threshold" in given:
            lanes = iid_law.checked(given.pop("bits"), given.pop("threshold"))
            return cls(**given, density=lanes.density)
        return cls(**given)

    def __reduce__(self) -> Any:
        return type(self).from_dict, (self.to_dict(),)

    # --------------------------------------------------------------------------------- slices

    def __getitem__(self, key: Any) -> Sketch:
        """``S[:, a:b]``: the sketch of features a..b. It counts its own columns from 0."""
        if not (isinstance(key, tuple) and len(key) == 2 and all(isinstance(part, slice) for part in key)) or (
            key[0] != slice(None)
        ):
            raise TypeError(f"a sketch is sliced by columns only, as S[:, a:b]; got S[{key!r}]")
        start, stop = _bounds(key[1], self.n_features)
        return self._part(max(0, stop - start), self.feature_offset + start)

    def _part(self, n_features: int, feature_offset: int) -> Sketch:
        """Unchecked, as torch.compile would check it for one seed and one slice, and compile anew for the next."""
        part = object.__new__(type(self))
        for name in ("n_components", "nnz", "density", "seed"):
            object.__setattr__(part, name, getattr(self, name))
        object.__setattr__(part, "n_features", n_features)
        object.__setattr__(part, "feature_offset", feature_offset)
        object.__setattr__(part, "spec", self.spec._replace(n_features=n_features, feature_offset=feature_offset))
        return part

    # --------------------------------------------------------------------------------- products

    @property
    def T(self) -> Transposed:
        """The transpose, an operator of shape (n_features, n_components)."""
        return Transposed(self)

    def __matmul__(self, a: Any) -> Any:
        """S @ A for A (n_features,) or (n_features, n): dense, in A's dtype (an array's integers become fp64)."""
        return frontends.multiply(self.spec, a)

    def __rmatmul__(self, y: Any) -> Any:
        """Y @ S: `project_adjoint`."""
        return self.project_adjoint(y)

    def project(
        self,
        x: Any,
        *,
        out: np.ndarray | torch.Tensor | None = None,
        accumulate: bool = False,
        dense_output: bool = True,
    ) -> Any:
        """Project data vectors: ``x @ S.T``.

        Parameters
        ----------
        x : {ndarray, tensor, CSR or CSC matrix or array} of shape (..., n_features)
            Tensors on the CPU or on CUDA. fp16, bf16 (of torch), fp32 and fp64 keep their dtype (sums of fp16 and bf16
            run in fp32). An array's integers and bool become fp64; a tensor's are refused, as by torch.matmul. Strides
            are free: nothing is copied. Sparse input has two dimensions, and is scipy's.
        out : {ndarray, tensor on x's device} of shape (..., n_components), fp16, bf16, fp32 or fp64, optional
            Where to write; it may not share memory with x.
        accumulate : bool, default False
            Add to `out` (fp32 or fp64) instead, so that features can stream through slice by slice:
            ``S[:, a:b].project(x[:, a:b], out=y, accumulate=True)``.
        dense_output : bool, default True
            False with sparse x gives a CSR matrix (array, for a sparse array) with sorted indices. CSC is
            converted to CSR first, a copy of it.

        Returns
        -------
        {ndarray, tensor, CSR matrix} of shape (..., n_components); `out` where given, else on x's device. A new
        tensor's leading axes lie in memory in the order of x's.

        Raises
        ------
        TypeError
            For dtypes (complex, object, longdouble), devices and containers it does not take.
        ValueError
            For wrong shapes.
        RuntimeError
            For `out` together with tensors that require gradients, as torch's own functions say it.

        Notes
        -----
        Error against exact arithmetic: at most 1e-6 ||x|| for fp32 (2e-6 ||x|| where one number outweighs all others),
        1e-14 ||x|| for fp64. On the CPU results do not depend, to the bit, on the number of threads or on which rows
        are projected together, and a non-finite number reaches exactly the nnz components of its feature. (Where
        entries are independent, it may reach all components of its data vector, on every device.)

        CUDA tensors are projected on their own device, in the caller's current stream, by the same entries. Results
        are the same to the bit in every run on one device with data of one shape and layout. fp32 is as accurate as on
        the CPU unless `torch.set_float32_matmul_precision` allows less, and that is faster. A
        non-finite number reaches the nnz components of its feature, and may reach others among the 128 around them,
        but no other data vector.

        To torch it is an operator of its own (``torch.ops.sjlt.project``): gradients of every order, `torch.func`'s
        transforms, `torch.compile` (other seeds, slices and numbers of rows compile nothing anew where shapes are
        dynamic), `torch.export`, CUDA graphs and autocast work as they do for a matrix product. Nothing is saved for
        the backward pass.
        """
        return frontends.project(self.spec, x, out=out, accumulate=accumulate, dense_output=dense_output)

    def project_adjoint(self, y: Any, *, out: np.ndarray | torch.Tensor | None = None, accumulate: bool = False) -> Any:
        """Apply the adjoint to projected vectors: ``y @ S``.

        Parameters
        ----------
        y : {ndarray, tensor, CSR or CSC matrix or array} of shape (..., n_components)
        out : {ndarray, tensor on y's device} of shape (..., n_features), fp16, bf16, fp32 or fp64, optional
        accumulate : bool, default False
            As in `project`, and so are dtypes, devices, strides and refusals.

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
        """Project the numbers of several tensors, such as a model's gradients, as if they were concatenated.

        Nothing is concatenated, staged or copied: each tensor is read where it lies and meets the columns of the
        sketch that belong to it.

        Parameters
        ----------
        tensors : dict or list of torch tensors, nested if you like, on one device
            n_features numbers in all. They are numbered as ``torch.cat([t.reshape(-1) for t in tensors])`` would: a
            dict's values in the order of their insertion (as `named_parameters` has it), each tensor in its logical
            order, whatever its strides; the first tensor owns the columns ``S[:, :t.numel()]``, the next one those
            that follow. (A tensor whose numbers are not evenly spaced in that order, such as a transposed one, is read
            in as many pieces as it takes.)
        out : tensor of shape (n_components,) or (batch, n_components), optional
            Where to write.
        batched : bool, default False
            Whether every tensor has a leading dimension of the same length, as per-example gradients have.

        Returns
        -------
        tensor of shape (n_components,), or (batch, n_components) where batched; of the dtype that the tensors' promote
        to. (Sums run in fp32 at least.)

        Raises
        ------
        TypeError, ValueError
            As `project`; and where the tensors have more or fewer than n_features numbers or lie on several devices.
        RuntimeError
            For `out` together with tensors that require gradients.
        """
        return frontends.project_tree(self.spec, tensors, out, batched)  # type: ignore[no-any-return]

    # --------------------------------------------------------------------------------- entries

    def entries(self, start: int = 0, stop: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The nonzeros of columns `start` to `stop` - 1 (default: all), before scaling by 1/sqrt(nnz).

        ValueError where entries are independent, since columns then differ in their number.

        Returns
        -------
        rows : ndarray of shape (nnz, stop - start), int64
        signs : ndarray of shape (nnz, stop - start), int8, +1 or -1
        """
        from .backends.cpu import exact

        if self.is_iid:
            raise ValueError(f"{self!r} has columns of varying numbers of nonzeros: S[:, a:b].to_scipy() shows them")
        stop = self.n_features if stop is None else _integer("stop", stop, 0, self.n_features)
        start = _integer("start", start, 0, stop)
        codes = exact.codes(self.spec, start, stop).T
        return (codes >> 1).astype(np.int64), (1 - 2 * (codes & 1)).astype(np.int8)

    def to_scipy(self, format: Literal["csc", "csr", "coo"] = "csc", dtype: DTypeLike = np.float64) -> Any:
        """The sketch as a `scipy.sparse` array of shape (n_components, n_features), indices sorted."""
        import scipy.sparse

        from .backends import cpu_backend

        if np.dtype(dtype).kind != "f":
            raise TypeError(f"the entries are fractions: they need a floating dtype, got {np.dtype(dtype)}")
        signs, rows, indptr, scale = cpu_backend(self.spec).columns(self.spec)  # rows ascend in each column
        index = np.int32 if max(rows.size, *self.shape) <= np.iinfo(np.int32).max else np.int64
        parts = ((signs * scale).astype(dtype), rows.astype(index), indptr.astype(index))
        matrix = scipy.sparse.csc_array(parts, shape=self.shape)
        return matrix.asformat(format)

    def toarray(self, dtype: DTypeLike = np.float64) -> np.ndarray:
        """The sketch as a dense array of shape (n_components, n_features)."""
        return np.asarray(self.to_scipy(dtype=dtype).toarray())


def project(
    x: Any,
    n_components: int,
    *,
    nnz: int | Literal["auto"] = "auto",
    seed: int = 0,
    out: np.ndarray | torch.Tensor | None = None,
) -> Any:
    """Project the last axis of `x` to `n_components`: ``Sketch(x.shape[-1], n_components, ...).project(x)``.

    Parameters and returned value are those of `Sketch` and `Sketch.project`: arrays give arrays, and CUDA tensors
    give tensors of their dtype on their device.

    Examples
    --------
    >>> import numpy as np, sjlt
    >>> sjlt.project(np.ones((3, 1000), np.float32), 64, seed=1).shape
    (3, 64)
    """
    if not hasattr(x, "shape"):
        x = np.asarray(x)
    if not x.shape:
        raise ValueError("project needs at least one axis, got a scalar")
    return Sketch(x.shape[-1], n_components, nnz=nnz, seed=seed).project(x, out=out)
