"""`Sketch`: a sparse Johnson-Lindenstrauss transform that is never stored, and its transpose."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .inputs.checks import integer, nnz_or_lanes, seed_number, signed, stack_count
from .inputs.description import sketch_arguments
from .laws import exact as exact_law
from .laws.spec import SketchSpec
from .operators import Transposed
from .products import SketchProducts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import DTypeLike, NDArray

    from .operators import Data

MAX_FEATURES = 2**63 - 1
STEP_ENTRIES = 1 << 22  # entries unpacked between two checks for interrupts


def _parts(n: int, step: int) -> Iterator[slice]:
    """Slices of length `step` or less that cover range(n)."""
    return (slice(i, min(i + step, n)) for i in range(0, n, step))


def _can_be_sparse(dtype: np.dtype) -> bool:
    """Whether SciPy's sparse arrays support a floating dtype."""
    return dtype.itemsize >= 4 and dtype.isnative


def _index(value: Any) -> int:
    if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__"):
        raise TypeError(f"a sketch is sliced by integers, got {value!r}")
    return operator.index(value)


def _bounds(part: slice, n: int) -> tuple[int, int]:
    """(start, stop) of ``part.indices(n)`` for a slice of step 1, in operations that torch.compile can trace."""
    if part.step is not None and operator.index(part.step) != 1:
        raise ValueError(f"a sketch can be sliced with step 1 only, got step {part.step}")
    start, stop = part.start if part.start is not None else 0, part.stop if part.stop is not None else n
    if not (type(start) is type(stop) is int):  # torch.compile would turn the results of operator.index into constants
        start, stop = _index(start), _index(stop)
    return (max(start + n, 0) if start < 0 else min(start, n)), (max(stop + n, 0) if stop < 0 else min(stop, n))


@dataclass(frozen=True, repr=False)
class Sketch(SketchProducts):
    """A sparse Johnson-Lindenstrauss transform S of shape (n_components, n_features), regenerated from its seed.

    Each column has exactly `nnz` nonzeros +-1/sqrt(nnz) in distinct rows, placed by Philox4x32-10, so E||Sx||^2 =
    ||x||^2 and Var||Sx||^2 <= 2/n_components for unit x (slightly more if n_components does not divide evenly).
    If `density` is given instead of `nnz`, entries are independent. The object takes about a hundred bytes; equal
    arguments give equal entries on every machine. Both laws are specified, with test vectors, in
    `sjlt/laws/README.md`, and implemented in `sjlt.laws.exact` and `sjlt.laws.iid`.

    Parameters
    ----------
    n_features : int, 0 to 2^63 - 1
        Number of columns of S: the length of a data vector.
    n_components : int, 1 to 8,388,480
        Number of rows of S: the length of a projected vector.
    nnz : int or "auto", default "auto"
        Nonzeros per column (s in the literature), from 1 to floor(k / ceil(k/128)) for k = n_components; with stacks,
        to `stacks` times this for k = n_components / stacks. "auto" is 4, or that upper bound if it is smaller. nnz=1
        is the CountSketch.
    stacks : int, default 1
        Number of independent sketches of which S is the vertical concatenation, each with n_components / stacks rows
        and nnz / stacks nonzeros per column. Must divide n_components and nnz. Use 4 to preserve a whole subspace
        (least squares, low rank) or single features (one-hot, rare terms): with 1, which is fastest, isolated blocks of
        neighbouring features may become dependent. With stacks > 1, nnz="auto" is the smallest multiple of `stacks`
        that is at least 4, if allowed. stacks=nnz is the SparseStack of the literature.
    density : float in (0, 1] or "auto", optional
        Draw independent entries, an alternative to nnz: +-sqrt(1/(k density)) with probability density/2 each and
        otherwise 0, the distribution of scikit-learn's random projections. "auto" is 1/sqrt(n_features); 1 gives no
        zeros. The density is rounded to a multiple of 2^-7, or of 2^-15 below 1/16; below 2^-16 it is rejected, and so
        are stacks.
    seed : int, -2^63 to 2^64 - 1, default 0
        Reduced mod 2^64.
    feature_offset : int, default 0
        Index of column 0 in the random law. A slice ``S[:, a:b]`` has feature_offset a. At most 2^63 - 1 - n_features.

    Attributes
    ----------
    shape : (n_components, n_features)
    nnz : int, or None if entries are independent
    density : float, the probability of a nonzero after rounding, or None if every column has nnz nonzeros
    is_iid : bool, whether entries are independent
    T : the transpose

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong type or is out of range, or if both nnz and density are given.

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
    nnz: int | None = field(default="auto", kw_only=True)  # type: ignore[assignment]  # resolved by __post_init__
    stacks: int = field(default=1, kw_only=True)
    density: float | None = field(default=None, kw_only=True)
    seed: int = field(default=0, kw_only=True)
    feature_offset: int = field(default=0, kw_only=True)
    spec: SketchSpec = field(init=False, repr=False, compare=False)  # the form that operators and backends read

    if TYPE_CHECKING:

        def __init__(
            self,
            n_features: int,
            n_components: int,
            *,
            nnz: int | Literal["auto"] | None = "auto",
            stacks: int = 1,
            density: float | Literal["auto"] | None = None,
            seed: int = 0,
            feature_offset: int = 0,
        ) -> None: ...

    def __post_init__(self) -> None:
        n_features = integer("n_features", self.n_features, 0, MAX_FEATURES)
        k = integer("n_components", self.n_components, 1, exact_law.MAX_N_COMPONENTS)
        stacks = stack_count(self.stacks, k)
        nnz, lanes = nnz_or_lanes(self.nnz, self.density, n_features, k, stacks)
        seed = seed_number(self.seed) % 2**64
        offset = integer("feature_offset", self.feature_offset, 0, MAX_FEATURES)
        if offset + n_features > MAX_FEATURES:
            raise ValueError(f"feature_offset + n_features must be at most 2^63 - 1, got {offset} + {n_features}")
        checked = {"n_features": n_features, "n_components": k, "nnz": nnz, "seed": seed, "feature_offset": offset}
        checked["stacks"], checked["density"] = stacks, lanes.density if lanes else None
        checked["spec"] = SketchSpec(n_features, k, nnz or 0, stacks, *(lanes or (0, 0)), signed(seed), offset)
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
        entries += f", stacks={self.stacks}" if self.stacks > 1 else ""
        whole = f"Sketch(n_features={end}, n_components={self.n_components}, {entries}, seed={self.seed})"
        return f"{whole}[:, {self.feature_offset}:{end}]" if self.feature_offset else whole

    def to_dict(self) -> dict[str, Any]:
        """Describe the sketch in a JSON-serialisable dict, from which `from_dict` makes an equal sketch.

        The keys are "law" (its version), "n_features", "n_components", "seed", "feature_offset", and "nnz" (and
        "stacks", if greater than 1). For independent entries, instead of "nnz", they are "bits" and "threshold", which
        define the law, and the resulting "density".
        """
        entries = {**self.spec.lanes._asdict(), "density": self.density} if self.is_iid else {"nnz": self.nnz}
        if self.stacks > 1:
            entries["stacks"] = self.stacks
        shape = {"law": exact_law.VERSION, "n_features": self.n_features, "n_components": self.n_components}
        return {**shape, **entries, "seed": self.seed, "feature_offset": self.feature_offset}

    @classmethod
    def from_dict(cls, description: Mapping[str, Any]) -> Sketch:
        """Make the sketch that a dict from `to_dict` describes. "density" and "stacks" (default 1) may be missing.

        Raises
        ------
        TypeError
            If the description is not a mapping or a value is not an integer.
        ValueError
            If the law has another version, keys are missing or unknown, or values contradict each other.
        """
        return cls(**sketch_arguments(description))

    def __reduce__(self) -> Any:
        return type(self).from_dict, (self.to_dict(),)

    # --------------------------------------------------------------------------------- slices

    def __getitem__(self, key: Any) -> Sketch:
        """``S[:, a:b]``: the sketch of features a to b - 1, as columns 0 to b - a - 1."""
        if not (isinstance(key, tuple) and len(key) == 2 and all(isinstance(part, slice) for part in key)) or (
            key[0] != slice(None)
        ):
            raise TypeError(f"a sketch is sliced by columns only, as S[:, a:b]; got S[{key!r}]")
        start, stop = _bounds(key[1], self.n_features)
        return self._part(max(0, stop - start), self.feature_offset + start)

    def _part(self, n_features: int, feature_offset: int) -> Sketch:
        """A slice, without the checks of the constructor.

        torch.compile would turn them into guards, and recompile for each slice and seed.
        """
        part = object.__new__(type(self))
        for name in ("n_components", "nnz", "stacks", "density", "seed"):
            object.__setattr__(part, name, getattr(self, name))
        object.__setattr__(part, "n_features", n_features)
        object.__setattr__(part, "feature_offset", feature_offset)
        object.__setattr__(part, "spec", self.spec._replace(n_features=n_features, feature_offset=feature_offset))
        return part

    @property
    def T(self) -> Transposed:
        """The transpose, an operator of shape (n_features, n_components)."""
        return Transposed(self)

    # --------------------------------------------------------------------------------- entries

    def entries(self, start: int = 0, stop: int | None = None) -> tuple[NDArray[np.int64], NDArray[np.int8]]:
        """Return the nonzeros of columns `start` to `stop` - 1 (default: all), before scaling by 1/sqrt(nnz).

        Returns
        -------
        rows : ndarray of shape (nnz, stop - start), int64
        signs : ndarray of shape (nnz, stop - start), int8, +1 or -1

        Raises
        ------
        TypeError, ValueError
            If `start` or `stop` is not an integer from 0 to n_features, with start <= stop, or if entries are
            independent: columns then differ in their number of nonzeros.

        Examples
        --------
        >>> import sjlt
        >>> rows, signs = sjlt.Sketch(1000, 64, nnz=2, seed=1).entries(10, 13)
        >>> rows.shape, signs.shape
        ((2, 3), (2, 3))
        """
        from .backends.cpu import exact

        if self.is_iid:
            raise ValueError(
                f"the columns of {self!r} differ in their number of nonzeros: S[:, a:b].to_scipy() returns them"
            )
        stop = self.n_features if stop is None else integer("stop", stop, 0, self.n_features)
        start = integer("start", start, 0, stop)
        codes = exact.codes(self.spec, start, stop).T
        rows, signs = np.empty(codes.shape, np.int64), np.empty(codes.shape, np.int8)
        for part in _parts(stop - start, STEP_ENTRIES // self.spec.nnz):
            rows[:, part] = codes[:, part] >> 1
            signs[:, part] = 1 - 2 * (codes[:, part] & 1)
        return rows, signs

    def to_scipy(self, format: Literal["csc", "csr", "coo"] = "csc", dtype: DTypeLike = np.float64) -> Any:
        """Return the sketch as a `scipy.sparse` array of shape (n_components, n_features), with sorted indices.

        Raises
        ------
        TypeError
            If SciPy's sparse arrays do not support the dtype, or it is not floating.
        """
        import scipy.sparse

        from .backends import cpu_backend

        if np.dtype(dtype).kind != "f":
            raise TypeError(f"the entries are fractions: dtype must be floating, got {np.dtype(dtype)}")
        if not _can_be_sparse(np.dtype(dtype)):
            raise TypeError(f"SciPy's sparse arrays do not support dtype {np.dtype(dtype)}: use float32 or float64")
        codes, indptr, scale = cpu_backend(self.spec).columns(self.spec)  # rows ascend in each column
        index = np.int32 if max(codes.size, *self.shape) <= np.iinfo(np.int32).max else np.int64
        entries, rows = np.empty(codes.size, dtype), np.empty(codes.size, index)
        for part in _parts(codes.size, STEP_ENTRIES):
            entries[part] = np.where(codes[part] & 1, -scale, scale)
            rows[part] = codes[part] >> 1
        matrix = scipy.sparse.csc_array((entries, rows, indptr.astype(index)), shape=self.shape)
        return matrix.asformat(format)

    def toarray(self, dtype: DTypeLike = np.float64) -> NDArray[Any]:
        """Return the sketch as a dense array of shape (n_components, n_features), with a floating dtype.

        Examples
        --------
        >>> import sjlt
        >>> sjlt.Sketch(4, 2, nnz=1, seed=1).toarray().shape
        (2, 4)
        """
        via = np.float64 if np.dtype(dtype).kind == "f" and not _can_be_sparse(np.dtype(dtype)) else dtype
        return np.asarray(self.to_scipy(dtype=via).toarray().astype(dtype, copy=False))


def project(
    x: Data,
    n_components: int,
    *,
    nnz: int | Literal["auto"] = "auto",
    stacks: int = 1,
    seed: int = 0,
    out: Data | None = None,
) -> Data:
    """Project the last axis of `x` to `n_components`: ``Sketch(x.shape[-1], n_components, ...).project(x)``.

    For the parameters, the result of shape (..., n_components) and the errors see `Sketch` and `Sketch.project`: an
    array gives an array, a tensor a tensor on its device, of the same dtype (fp64 for integer arrays), and sparse data
    a dense array. Data without axes raises a ValueError.

    Examples
    --------
    >>> import numpy as np, sjlt
    >>> sjlt.project(np.ones((3, 1000), np.float32), 64, seed=1).shape
    (3, 64)
    """
    shape = x.shape if hasattr(x, "shape") else np.shape(x)
    if not shape:
        raise ValueError(f"project needs data of at least one axis, got {x!r} of type {type(x).__name__}")
    return Sketch(shape[-1], n_components, nnz=nnz, stacks=stacks, seed=seed).project(x, out=out)
