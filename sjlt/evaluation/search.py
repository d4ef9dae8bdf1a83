"""Recall of exact search over all rows, after projecting or compressing them.

The rows are streamed once, in blocks. Each method transforms the queries, which are sampled rows, and every block of
rows; inner products with the queries rank the rows. As in a search index, only rows are quantized; queries stay in
float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..files.encoding import quantized
from ..files.source import Source
from ..inputs.containers import is_sparse, is_tensor
from ..sketch import Sketch
from .advice import advice
from .results import SearchQuality, SearchReport
from .sample import as_array, refuse_non_finite, rows_of

BLOCK_BYTES = 16 << 20  # of rows in float32
# The most rows from which principal components are computed, and their bytes in fp64.
TRAINING_ROWS, TRAINING_BYTES = 20_000, 256 << 20
SHORTLIST = 100  # results that re-ranking would consider; at least the number of neighbours
MAX_EXPONENT = 40  # of a row's largest magnitude: keeps sums of squares and products within the range of float32
MAX_FLOAT16 = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class Method:
    """A way to store vectors.

    Attributes
    ----------
    name : str
    family : str
        Methods of one family differ only in size.
    n_components : int
    bytes : int
        Per vector.
    transform : callable
        Maps a float32 block (rows, n_features) to (rows, n_components).
    rounding : callable
        Rounds a transformed block to the stored precision; returns float32.
    """

    name: str
    family: str
    n_components: int
    bytes: int
    transform: Callable[[Any], Any]
    rounding: Callable[[np.ndarray], np.ndarray]


def search_report(
    X: Any,
    sketches: Sequence[tuple[str, Sketch]],
    queries: int,
    neighbours: int,
    seed: int,
    progress: Callable[[str], None],
) -> SearchReport:
    """Measure how many of the nearest rows each method finds; see `sjlt.quality`."""
    n, d = int(X.shape[0]), int(X.shape[1])
    if n < neighbours + 2:
        raise ValueError(f"{neighbours} nearest neighbours need at least {neighbours + 2} rows, X has {n}")
    rng = np.random.default_rng(seed)
    chosen, query_rows = _queries(X, np.sort(rng.choice(n, min(queries, n), replace=False)))
    exponent = _typical_exponent(query_rows)
    query_rows = _scaled(query_rows, chosen, exponent)
    methods = _methods(X, d, sketches, exponent, rng)
    exact = Method("originals", "originals", d, _itemsize(X) * d, _same, _same)
    shortlist = min(max(SHORTLIST, neighbours), n - 1)
    searches = [_Search(method, query_rows, chosen, shortlist) for method in (exact, *methods)]
    row = 0
    for block in _blocks(X, exponent):
        progress(f"searching {n:,} rows, {100 * row // n} % done")
        transformed, exact_scores = dict[int, Any](), None
        for search in searches:  # that of the originals is the first
            transform = search.method.transform
            if id(transform) not in transformed:
                transformed[id(transform)] = transform(block)
            scores = search.add(transformed[id(transform)], row, exact_scores)
            exact_scores = exact_scores or scores
        row += block.shape[0]
    truth, *others = searches
    found = (*(search.quality(truth, neighbours) for search in others),)
    return SearchReport(
        shape=(n, d), queries=len(chosen), neighbours=neighbours, shortlist=shortlist, seed=seed,
        original_bytes=exact.bytes, methods=found, advice=advice(found, exact.bytes, neighbours),
    )  # fmt: skip


def _queries(X: Any, chosen: np.ndarray) -> tuple[np.ndarray, Any]:
    """(indices, rows) of those of the rows `chosen` that are not zero. Of zeros, all rows are equally near."""
    rows = rows_of(X, chosen)
    nonzero = np.flatnonzero(_largest(rows))  # a NaN is refused later
    if len(nonzero) == 0:
        raise ValueError(f"all {len(chosen)} rows sampled as queries are zero: they have no nearest rows")
    return (chosen, rows) if len(nonzero) == len(chosen) else (chosen[nonzero], rows[nonzero])


# ------------------------------------------------------------------------------------- methods


def _same(y: np.ndarray) -> np.ndarray:
    return y


def _as_float16(y: np.ndarray) -> np.ndarray:
    stored: np.ndarray = np.clip(y, -MAX_FLOAT16, MAX_FLOAT16).astype(np.float16)
    return stored.astype(np.float32)


def _as_int8(y: np.ndarray) -> np.ndarray:
    stored = quantized(y)
    result: np.ndarray = stored["codes"].astype(np.float32)
    result *= stored["scale"][:, None]
    return result


def _methods(
    X: Any, d: int, sketches: Sequence[tuple[str, Sketch]], exponent: int, rng: np.random.Generator
) -> list[Method]:
    """All methods to compare with the originals. For sparse rows, only the sketches."""
    methods: list[Method] = []
    sparse = _is_sparse(X)
    if not sparse:
        methods += [
            Method("originals, float16", "originals, float16", d, 2 * d, _same, _as_float16),
            Method("originals, int8", "originals, int8", d, d + 4, _same, _as_int8),
        ]
        widths = sorted({sketch.n_components for _, sketch in sketches if sketch.n_components < d})
        components = _principal_components(X, max(widths, default=0), exponent, rng)
    for name, sketch in sketches:
        k, project = sketch.n_components, sketch.project
        methods += [
            Method(f"{name}, {k}", name, k, 4 * k, project, _same),
            Method(f"{name}, {k}, float16", f"{name}, float16", k, 2 * k, project, _as_float16),
            Method(f"{name}, {k}, int8", f"{name}, int8", k, k + 4, project, _as_int8),
        ]
    for k in [] if sparse else widths:
        basis, first = _rotation(components[:, :k]), _truncation(k)
        methods += [
            Method(f"PCA, {k}", "PCA", k, 4 * k, basis, _same),
            Method(f"PCA, {k}, int8", "PCA, int8", k, k + 4, basis, _as_int8),
            Method(f"first {k} numbers", "first numbers", k, 4 * k, first, _same),
        ]
    return methods


def _rotation(components: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: x @ components


def _truncation(k: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: np.ascontiguousarray(x[:, :k])


def _principal_components(X: Any, k: int, exponent: int, rng: np.random.Generator) -> np.ndarray:
    """The first k right singular vectors of sampled rows, of shape (n_features, k).

    The rows are not centred, because inner products are to be preserved.
    """
    from sklearn.utils.extmath import randomized_svd

    n, d = X.shape
    rows = min(TRAINING_ROWS, n, max(2 * k, TRAINING_BYTES // (8 * d)))
    chosen = np.sort(rng.choice(n, rows, replace=False))
    if k == 0:
        return np.empty((d, 0), np.float32)
    sample = _scaled(rows_of(X, chosen), chosen, exponent)
    if d <= 2048:
        vectors: np.ndarray = np.linalg.eigh(sample.T @ sample)[1][:, ::-1][:, :k]
        return np.ascontiguousarray(vectors)
    return np.ascontiguousarray(randomized_svd(sample, min(k, *sample.shape), random_state=0)[2].T)


# ------------------------------------------------------------------------------------- search


class _Search:
    """The search with one method: the best rows so far of every query, by inner product and by cosine similarity."""

    def __init__(self, method: Method, query_rows: Any, chosen: np.ndarray, shortlist: int) -> None:
        self.method, self._chosen = method, chosen
        transformed = method.transform(query_rows)
        self._queries = transformed.toarray() if is_sparse(transformed) else np.asarray(transformed)
        norms = np.linalg.norm(self._queries, axis=1)
        self._inverse_norms = 1 / np.where(norms > 0, norms, 1)
        self._best = [_Best(len(chosen), shortlist) for _ in range(2)]

    def add(self, transformed: Any, row: int, exact: tuple[np.ndarray, ...] | None) -> tuple[np.ndarray, ...]:
        """Search a transformed block whose first row has the index `row`, and return the scores of its rows.

        exact : the scores of these rows in the search of the originals; None if this is that search.
        """
        stored: Any = transformed if is_sparse(transformed) else self.method.rounding(transformed)
        scores = np.asarray(stored @ self._queries.T).T
        if is_sparse(stored):
            squares = np.asarray(stored.multiply(stored).sum(axis=1)).ravel()
        else:
            squares = np.einsum("ij,ij->i", stored, stored)
        cosines = scores * self._inverse_norms[:, None]
        cosines *= 1 / np.sqrt(np.where(squares > 0, squares, np.inf))
        own = np.flatnonzero((self._chosen >= row) & (self._chosen < row + len(squares)))
        both = scores, cosines
        for best, values, true in zip(self._best, both, exact or both, strict=True):
            values[own, self._chosen[own] - row] = -np.inf  # a query does not find itself
            best.add(values, true)
        return both

    def quality(self, truth: _Search, neighbours: int) -> SearchQuality:
        """The share of the true nearest rows that this search found; `truth` is the search of the originals."""
        shares = [
            mine.share_of(exact, neighbours, within)
            for mine, exact in zip(self._best, truth._best, strict=True)
            for within in (neighbours, None)
        ]
        method = self.method
        return SearchQuality(method.name, method.family, method.n_components, method.bytes, *shares)


class _Best:
    """The scores of the `count` rows with the highest scores, for each query, and their scores among the originals."""

    def __init__(self, queries: int, count: int) -> None:
        self.scores = np.full((queries, count), -np.inf, np.float32)  # descending
        self.exact = self.scores.copy()

    def add(self, scores: np.ndarray, exact: np.ndarray) -> None:
        """Merge the scores of a block, of shape (queries, rows)."""
        count = self.scores.shape[1]
        better = scores > self.scores[:, -1:]
        for query in np.flatnonzero(better.any(axis=1)):
            new = np.flatnonzero(better[query])
            if len(new) > 2 * count:  # only in the first blocks
                new = np.sort(new[np.argpartition(-scores[query, new], count)[:count]])
            merged = np.concatenate([self.scores[query], scores[query, new]])
            exact_merged = np.concatenate([self.exact[query], exact[query, new]])
            order = np.argsort(-merged, kind="stable")[:count]
            self.scores[query], self.exact[query] = merged[order], exact_merged[order]

    def share_of(self, exact: _Best, neighbours: int, within: int | None) -> float:
        """The share of the exact nearest rows found among the first `within` rows; equal scores are equivalent."""
        last = exact.scores[:, neighbours - 1]
        limit = last - 2e-6 * np.abs(last)
        found = (self.exact[:, :within] >= limit[:, None]).sum(axis=1)
        return float(np.minimum(found, neighbours).mean()) / neighbours


# ------------------------------------------------------------------------------------- rows


def _is_sparse(X: Any) -> bool:
    return is_sparse(X) or (isinstance(X, Source) and X.order == "CSR")


def _itemsize(X: Any) -> int:
    return int(X.element_size() if is_tensor(X) else X.dtype.itemsize)


def _largest(rows: Any) -> np.ndarray:
    """The largest magnitude in each row; NaN if the row contains a NaN."""
    if is_sparse(rows):
        return np.asarray(abs(rows).max(axis=1).toarray()).ravel()
    largest: np.ndarray = np.maximum(rows.max(axis=1, initial=0), -rows.min(axis=1, initial=0))
    return largest


def _typical_exponent(rows: Any) -> int:
    """The median of the binary exponents of the rows' largest magnitudes."""
    largest = _largest(rows)
    exponents = np.frexp(largest[(largest > 0) & np.isfinite(largest)])[1]
    return int(np.median(exponents)) if len(exponents) else 0


def _scaled(rows: Any, chosen: np.ndarray, exponent: int) -> Any:
    """Multiply dense or CSR rows by 2^-exponent and convert them to float32; raise ValueError unless they are finite.

    A row whose largest magnitude is then outside 2^-40 to 2^40 is scaled to that bound, which preserves its cosines and
    its rank relative to rows within the bounds. `chosen` are the indices of the rows, for messages.
    """
    rows = rows.astype(np.result_type(rows.dtype, np.float32), copy=False)  # scaling would round in float16
    largest = _largest(rows)
    if not np.isfinite(largest).all():
        refuse_non_finite(rows, chosen)
    shifts = np.frexp(largest)[1] - exponent
    excess = np.where(largest > 0, shifts - np.clip(shifts, -MAX_EXPONENT, MAX_EXPONENT), 0)
    values = rows.data if is_sparse(rows) else rows
    if excess.any():
        powers = -(exponent + excess)
        values = np.ldexp(values, np.repeat(powers, np.diff(rows.indptr)) if is_sparse(rows) else powers[:, None])
    else:
        half = exponent // 2  # 2^-exponent itself may not be representable
        values = values * 2.0**-half
        values *= 2.0 ** -(exponent - half)
    values = values.astype(np.float32, copy=False)
    return type(rows)((values, rows.indices, rows.indptr), shape=rows.shape) if is_sparse(rows) else values


def _blocks(X: Any, exponent: int) -> Iterator[Any]:
    """Yield all rows in order, in blocks scaled by `_scaled`."""
    row = 0
    for block in _raw_blocks(X):
        yield _scaled(block, np.arange(row, row + block.shape[0]), exponent)
        row += block.shape[0]


def _raw_blocks(X: Any) -> Iterable[Any]:
    rows = max(1, BLOCK_BYTES // (4 * max(1, X.shape[1])))
    if isinstance(X, Source):
        rows = max(rows, 1024) if X.order == "CSR" else rows
        return X.batches(0, -(-rows // X.chunk_rows) * X.chunk_rows)
    parts = (X[i : i + rows] for i in range(0, X.shape[0], rows))
    return map(as_array, parts) if is_tensor(X) else parts
