"""Small tables from which the largest elements of a very long vector are recovered, by hashes that are never stored."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from torch import Tensor

from .backends.cpu.gather import gather, gather_at
from .inputs.checks import integer, seed_number
from .inputs.containers import as_container, is_tensor, refuse_foreign, result_dtype
from .laws.count_sketch import MAX_ROWS, row_seed
from .laws.exact import MAX_N_COMPONENTS
from .sketch import MAX_FEATURES, Sketch
from .torch_ops import sharding, sparse

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .operators import Data

CPU_BLOCK, CUDA_BLOCK = 1 << 15, 1 << 23  # features estimated at a time: fits the CPU's cache; fills a GPU


@dataclass(frozen=True)
class CountSketch:
    """Compress vectors of length n_features to tables of shape (rows, columns), and estimate elements from these.

    Row t of the table of x is S_t x, for independent sketches S_t with one nonzero per column. Each element of x is
    thus added, with a sign, to one entry of each row, and its estimate is the median of these entries times the signs.
    The error is at most sqrt(8 / columns) times the norm of the rest of x, except with a probability that decreases
    exponentially with `rows`. Tables are linear: those of several workers or steps may be added. Only the seed is
    stored, and no method holds all n_features estimates in memory at once.

    Parameters
    ----------
    n_features : int, 0 to 2^63 - 1
    rows : int, 1 to 2^20
        An odd number is best; 5 is common.
    columns : int, 1 to 8,388,480
    seed : int, -2^63 to 2^64 - 1, default 0

    Attributes
    ----------
    sketches : tuple of Sketch
        S_0, S_1, ..., with nnz=1 and different seeds (see `sjlt/laws/README.md`).

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong type or is out of range.

    References
    ----------
    Charikar, Chen, Farach-Colton, "Finding frequent items in data streams", ICALP 2002. Rothchild et al., "FetchSGD:
    communication-efficient federated learning with sketching", ICML 2020 (gradients).

    Examples
    --------
    >>> import numpy as np, sjlt
    >>> x = np.random.default_rng(0).normal(size=100_000)
    >>> x[[5, 70_000]] = 300, -200
    >>> C = sjlt.CountSketch(x.size, rows=5, columns=1024, seed=1)
    >>> table = C.sketch(x)
    >>> values, indices = C.topk(table, 2)
    >>> indices
    array([    5, 70000])
    >>> bool(np.all(abs(values - [300, -200]) < 30)), table.shape
    (True, (5, 1024))
    """

    n_features: int
    rows: int
    columns: int
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        checked = {
            "n_features": integer("n_features", self.n_features, 0, MAX_FEATURES),
            "rows": integer("rows", self.rows, 1, MAX_ROWS),
            "columns": integer("columns", self.columns, 1, MAX_N_COMPONENTS),
            "seed": seed_number(self.seed) % 2**64,
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def sketches(self) -> tuple[Sketch, ...]:
        return tuple(
            Sketch(self.n_features, self.columns, nnz=1, seed=row_seed(t, self.seed)) for t in range(self.rows)
        )

    @overload
    def sketch(self, data: NDArray[Any], *, offset: int | None = ...) -> NDArray[Any]: ...
    @overload
    def sketch(self, data: Any, *, offset: int | None = ...) -> Tensor: ...
    def sketch(self, data: Any, *, offset: int | None = None) -> Any:
        """Compute the table of a vector, or of a part of it.

        Parameters
        ----------
        data : ndarray, tensor, or dict or list of tensors
            Elements of the vector in logical order, as if flattened and concatenated. Dicts and lists may contain
            whatever `Sketch.project_tree` accepts, including sharded and sparse tensors.
        offset : int, optional
            The index of the first element, if data is a part of the vector: the tables of all parts add up to that
            of the vector. Without it, data must have n_features elements.

        Returns
        -------
        {ndarray, tensor on the data's device} of shape (rows, columns)
            float32, or float64 if the data is float64 or an array of integers.

        Raises
        ------
        TypeError, ValueError
            As in `Sketch.project` for arrays, otherwise as in `Sketch.project_tree`.
        """
        if isinstance(data, np.ndarray):
            vector = _flat(data)
            table = np.empty((self.rows, self.columns), result_dtype(vector.dtype))
            for row, S in zip(table, self._parts(vector.size, offset), strict=True):
                S.project(vector, out=row)
            return table
        leaves = list(_leaves(data))
        parts = self._parts(sum(leaf.numel() for leaf in leaves), offset)
        dtype = reduce(torch.promote_types, (leaf.dtype for leaf in leaves), torch.float32)
        device = leaves[0].device if leaves else None
        tables = torch.empty((self.rows, self.columns), dtype=dtype, device=device)
        with torch.no_grad():
            for row, S in zip(tables, parts, strict=True):
                S.project_tree(leaves, out=row)
        return tables

    def _parts(self, n: int, offset: int | None) -> list[Sketch]:
        """The columns of each sketch for n elements from `offset` on (None: for all n_features elements)."""
        start = 0 if offset is None else integer("offset", offset, 0, self.n_features)
        if start + n > self.n_features or (offset is None and n != self.n_features):
            raise ValueError(
                f"a CountSketch of n_features = {self.n_features} got {n} elements"
                + (": pass offset= with a part of a vector" if offset is None else f" from {start} on")
            )
        return [S[:, start : start + n] for S in self.sketches]

    def query(self, table: Data, indices: Any) -> Data:
        """Estimate the elements at the given indices.

        Parameters
        ----------
        table : {ndarray, tensor} of shape (rows, columns), float32 or float64
        indices : {array_like, tensor on the table's device} of integers, any shape, each from 0 to n_features - 1

        Returns
        -------
        {ndarray, tensor}, like `table`, of the shape of `indices`

        Raises
        ------
        TypeError, ValueError, IndexError
            If a shape or dtype is wrong or an index is out of range.
        """
        rows = self._checked_table(table)
        checked = self._checked_indices(indices)
        if checked.device != rows.device:
            raise ValueError(f"indices must be on {rows.device}, like the table, got {checked.device}")
        flat = checked.reshape(-1)
        estimates = [self._row_at(S, row, flat) for row, S in zip(rows, self.sketches, strict=True)]
        return _like_input(table, median(estimates).reshape(checked.shape))  # type: ignore[no-any-return]

    def topk(self, table: Data, k: int) -> tuple[Data, Data]:
        """Find the k elements with the largest estimates in magnitude.

        Parameters
        ----------
        table : {ndarray, tensor} of shape (rows, columns), float32 or float64
        k : int, 0 to n_features

        Returns
        -------
        values, indices : {ndarray, tensor}, like `table`, of shape (k,)
            In descending order of magnitude; indices are int64. The order of equal magnitudes is arbitrary.
        """
        rows = self._checked_table(table)
        k = integer("k", k, 0, self.n_features)
        block = max(CUDA_BLOCK if rows.is_cuda else CPU_BLOCK, k)
        values, indices = rows.new_empty(0), rows.new_empty(0, dtype=torch.int64)
        if k:
            for start in range(0, self.n_features, block):
                estimates = self._estimates(rows, start, min(start + block, self.n_features))
                values, indices = _largest(values, indices, estimates, start, k)
        return _like_input(table, values), _like_input(table, indices)

    def _estimates(self, table: Tensor, start: int, stop: int) -> Tensor:
        """The estimates of elements `start` to `stop` - 1."""
        parts = zip(table, (S[:, start:stop] for S in self.sketches), strict=True)
        if table.is_cuda:
            return median([S.project_adjoint(row) for row, S in parts])
        return median([torch.from_numpy(gather(S.spec, row.numpy())) for row, S in parts])

    def _row_at(self, S: Sketch, row: Tensor, indices: Tensor) -> Tensor:
        if not row.is_cuda:
            return torch.from_numpy(gather_at(S.spec, row.numpy(), indices.numpy()))
        indptr = torch.tensor([0, len(indices)], device=row.device)
        return sparse.adjoint_at(row.unsqueeze(0), indptr, indices, False, 1, *S.spec)  # type: ignore[no-any-return]

    def _checked_table(self, table: Any) -> Tensor:
        if not isinstance(table, (np.ndarray, Tensor)):
            raise TypeError(f"a table must be an array or a tensor, got {type(table).__name__}")
        refuse_foreign(table)
        sharding.refuse_sharded(table, "a CountSketch's table", "table.full_tensor()")
        if tuple(table.shape) != (self.rows, self.columns):
            raise ValueError(f"a table must have shape {(self.rows, self.columns)}, got {tuple(table.shape)}")
        if _dtype_name(table) not in ("float32", "float64"):
            raise TypeError(f"a table must be float32 or float64, got {_dtype_name(table)}")
        return table.detach().resolve_neg() if isinstance(table, Tensor) else _as_tensor(table)

    def _checked_indices(self, indices: Any) -> Tensor:
        """The indices as an int64 tensor."""
        if not is_tensor(indices):
            refuse_foreign(indices)
            is_array = isinstance(indices, np.ndarray)
            indices = np.asarray(indices)
            if not is_array and indices.size == 0:  # NumPy makes an empty list float64
                indices = indices.astype(np.int64)
        if not _dtype_name(indices).startswith(("int", "uint")):
            raise TypeError(f"indices must be integers, got {_dtype_name(indices)}")
        if is_tensor(indices):
            indices = indices.long()
        if 0 not in indices.shape:
            low, high = int(indices.min()), int(indices.max())
            if low < 0 or high >= self.n_features:
                raise IndexError(f"indices must be from 0 to {self.n_features - 1}, got {low} to {high}")
        return indices if is_tensor(indices) else torch.from_numpy(np.array(indices, np.int64))


# ------------------------------------------------------------------------------------- estimates


def median(rows: list[Tensor]) -> Tensor:
    """The elementwise median of tensors; for an even number, the mean of the middle two. NaN propagates.

    An extreme of more than half of the values cannot be the median and is discarded, so few minima and maxima suffice:
    10 for five rows. These run at memory speed, unlike sorting along an axis.
    """
    kept, pending = rows[: len(rows) // 2 + 2], rows[len(rows) // 2 + 2 :]
    while len(kept) > 2:
        kept = _without_extremes(kept) + pending[:1]
        pending = pending[1:]
    return kept[0] if len(kept) == 1 else (kept[0] + kept[1]) / 2


def _without_extremes(values: list[Tensor]) -> list[Tensor]:
    """All but the smallest and the largest of at least three tensors, elementwise."""
    pairs = list(zip(values[::2], values[1::2], strict=False))
    lows, highs = [torch.minimum(a, b) for a, b in pairs], [torch.maximum(a, b) for a, b in pairs]
    if len(values) % 2:
        lows.append(values[-1])
    lows = _without_first(lows, torch.minimum, torch.maximum)
    if len(values) % 2:  # this one was in no pair, so it may be the largest of all
        highs.append(lows.pop())
    return lows + _without_first(highs, torch.maximum, torch.minimum)


def _without_first(values: list[Tensor], first: Any, second: Any) -> list[Tensor]:
    """All but the extreme: `first` returns the more extreme of two tensors, `second` the other."""
    extreme, kept = values[0], []
    for i, value in enumerate(values[1:], 2):
        kept.append(second(extreme, value))
        if i < len(values):
            extreme = first(extreme, value)
    return kept


def _largest(values: Tensor, indices: Tensor, estimates: Tensor, start: int, k: int) -> tuple[Tensor, Tensor]:
    """Update the k largest values found so far, in descending order of magnitude, with the estimates of a block."""
    magnitudes = estimates.abs()
    if len(values) == k and not estimates.is_cuda:  # usually few candidates; on a GPU nonzero would synchronise
        candidates = (~(magnitudes <= values[-1].abs())).nonzero().squeeze(1)  # includes NaN
    else:
        candidates = magnitudes.topk(min(k, len(estimates)), sorted=False).indices
    if not len(candidates):
        return values, indices
    values = torch.cat([values, estimates[candidates]])
    indices = torch.cat([indices, candidates + start])
    order = values.abs().topk(min(k, len(values))).indices
    return values[order], indices[order]


# ------------------------------------------------------------------------------------- containers


def _leaves(tree: Any) -> Any:
    from .frontends.trees import leaves_of

    for leaf in leaves_of(tree):
        if not is_tensor(leaf):
            raise TypeError(f"sketch needs an array, a tensor, or a dict or list of tensors, got {type(leaf).__name__}")
        yield leaf


def _flat(x: np.ndarray) -> np.ndarray:
    """The elements of an array in logical order, without a copy if its strides allow."""
    vector: np.ndarray = as_container(x).reshape(-1)
    return vector.astype(np.float32) if vector.dtype == np.float16 else vector  # tables are at least float32


def _dtype_name(x: Any) -> str:
    """The name of the dtype, without a package name or byte order."""
    return str(x.dtype).removeprefix("torch.") if is_tensor(x) else x.dtype.name


def _as_tensor(table: np.ndarray) -> Tensor:
    """A table as a tensor, without a copy if possible. (torch requires native byte order and warns if read-only.)"""
    native = np.ascontiguousarray(table, table.dtype.newbyteorder("="))
    return torch.from_numpy(native if native.flags.writeable else native.copy())


def _like_input(table: Any, x: Tensor) -> Any:
    return x.numpy() if isinstance(table, np.ndarray) else x
