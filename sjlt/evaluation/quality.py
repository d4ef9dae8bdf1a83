"""What sketches do to the distances, inner products and neighbours of given data: `quality`.

It samples rows and projects them by every sketch with every seed, in float64, so that what shows is the random law
and not rounding.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from ..files.io import Source
from ..inputs.checks import integer
from ..inputs.containers import as_container, checked_sparse, is_sparse, is_tensor
from ..laws import exact as law
from ..sketch import Sketch
from .measures import (
    QUANTILES,
    Theory,
    bins,
    distances_from,
    distinct_pairs,
    gaussian,
    recall,
    squared_distances,
    squared_norms,
)

# ------------------------------------------------------------------------------------- results


@dataclass(frozen=True)
class SketchQuality:
    """What one law did to the sample, over all seeds. Ratios are of squared distances, after / before."""

    name: str
    sketch: str  # the repr of the first one
    n_components: int
    ratio_quantiles: tuple[float, ...]  # at QUANTILES, of all pairs and seeds together
    ratio_mean: float
    ratio_std: float
    ratio_std_error: float  # its standard error over the seeds: pairs through one matrix share its luck
    outside: float  # the share of ratios outside [1 - eps, 1 + eps]
    outside_error: float  # its standard error over the seeds
    inner_std: float  # root mean square of (<Sx, Sy> - <x, y>) / (|x| |y|)
    inner_max: float  # its largest magnitude
    norm_std: float  # of |Sx|^2 / |x|^2 over seeds, root mean square over rows
    recall: float  # the share of nearest neighbours that stay nearest neighbours, mean over seeds
    recall_range: tuple[float, float]  # of the worst seed and the best
    seconds: float = field(compare=False)  # to make the matrix and project the sample, median over seeds
    histogram: tuple[int, ...] = field(repr=False)  # of the ratios, in the bins that `bins` gives


@dataclass(frozen=True)
class Report:
    """The result of `quality`: what was sampled, what theory expects, and what each sketch did."""

    version: ClassVar[int] = 1

    shape: tuple[int, int]  # of X
    rows: int  # sampled, with `seed`
    pairs: int  # of them, distinct; pairs at distance 0 are not counted
    duplicates: int  # the sampled pairs at distance 0
    zero_rows: int  # sampled besides and left out: rows of norm 0
    queries: int  # the sampled rows whose nearest neighbours among the sampled rows were searched
    neighbours: int
    seeds: int  # each sketch with its own seed and the ones that follow
    seed: int
    eps: float
    jl_n_components: int  # enough for all pairs of X to be within 1 +- eps (johnson_lindenstrauss_min_dim)
    theory: tuple[Theory, ...]  # one for each n_components, ascending
    sketches: tuple[SketchQuality, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON takes it; quantiles by their names."""
        content = dataclasses.asdict(self)
        for entry in (*content["theory"], *content["sketches"]):
            entry["ratio_quantiles"] = dict(zip(map(str, QUANTILES), entry["ratio_quantiles"], strict=True))
            entry.pop("histogram", None)
        return {"version": self.version, **content}


# ------------------------------------------------------------------------------------- the sample


def _rows_of(X: Any, chosen: np.ndarray) -> Any:
    """Those rows of X alone, in float64 and in memory, as an array or a CSR matrix."""
    if isinstance(X, Source):
        import scipy.sparse

        rows = [next(X.batches(int(i), 1)) for i in chosen] or [np.empty((0, X.shape[1]))]
        X = scipy.sparse.vstack(rows, format="csr") if is_sparse(rows[0]) else np.concatenate(rows)
    elif is_tensor(X):
        import torch

        picked = X.detach()[torch.from_numpy(chosen).to(X.device)].cpu()
        X = (picked.float() if picked.dtype == torch.bfloat16 else picked).numpy()
    else:
        X = X[chosen]
    X = as_container(X).astype(np.float64)
    if is_sparse(X):
        X.sum_duplicates()
    return X


def _refuse_non_finite(X: Any, chosen: np.ndarray) -> None:
    finite = np.isfinite(X.data if is_sparse(X) else X)
    if finite.all():
        return
    if is_sparse(X):
        place = int(np.argmin(finite))
        row, column = int(np.searchsorted(X.indptr, place, side="right")) - 1, int(X.indices[place])
    else:
        row, column = map(int, np.unravel_index(np.argmin(finite), X.shape))
    raise ValueError(f"X[{chosen[row]}, {column}] is {X[row, column]}: distances need finite numbers")


def _scaled(X: Any) -> Any:
    """X by a power of two, exactly, that keeps squares of its numbers from over- and underflowing."""
    numbers = X.data if is_sparse(X) else X
    exponent = int(np.frexp(np.abs(numbers).max(initial=0))[1])
    return X * 2.0 ** -max(-1000, min(exponent, 1000))


class _Sample:
    """The sampled rows with everything that is known of them before they are projected."""

    def __init__(self, X: Any, rows: int, pairs: int, queries: int, neighbours: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        chosen = np.sort(rng.choice(X.shape[0], min(rows, X.shape[0]), replace=False))
        sampled = _rows_of(X, chosen)
        _refuse_non_finite(sampled, chosen)
        sampled = _scaled(sampled)
        nonzero = squared_norms(sampled) > 0
        self.X = sampled[nonzero]
        self.norms = squared_norms(self.X)
        self.zero_rows, rows = len(chosen) - len(self.norms), len(self.norms)
        if rows < neighbours + 2:
            raise ValueError(
                f"{neighbours} nearest neighbours need at least {neighbours + 2} rows that are not 0: X has "
                f"{X.shape[0]} rows, {len(chosen)} of them sampled, {rows} of these not 0"
            )

        first, second = distinct_pairs(rows, min(pairs, rows * (rows - 1) // 2), rng)
        distances = squared_distances(self.X, first, second)
        apart = distances > 0
        self.duplicates = int(len(apart) - apart.sum())
        if not apart.any():
            raise ValueError(f"all {len(apart)} sampled pairs of rows are duplicates: no distances to compare")
        self.first, self.second, self.distances = first[apart], second[apart], distances[apart]
        self.cosines = self._inner(self.norms, self.distances)

        self.queries, self.neighbours = rng.choice(rows, min(queries, rows), replace=False), neighbours
        self.around = distances_from(self.X, self.queries)
        self._slack = 1e-12 * np.max(self.around, axis=1, where=np.isfinite(self.around), initial=0)

    def _inner(self, norms: np.ndarray, distances: np.ndarray) -> np.ndarray:
        """Inner products of the pairs, over their norms before."""
        inner: np.ndarray = (norms[self.first] + norms[self.second] - distances) / 2
        inner /= np.sqrt(self.norms[self.first] * self.norms[self.second])
        return inner

    def seen(self, Y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
        """Through one projection: ratios of distances, errors of inner products, ratios of norms, and recall."""
        distances, norms = squared_distances(Y, self.first, self.second), squared_norms(Y)
        errors = self._inner(norms, distances) - self.cosines
        kept = recall(self.around, distances_from(Y, self.queries), self.neighbours, self._slack)
        return distances / self.distances, errors, norms / self.norms, kept


# ------------------------------------------------------------------------------------- the sketches


def standard_sketches(n_features: int, n_components: int) -> list[tuple[str, Any]]:
    """The laws that there are, by name: exact nnz of 1, 2, 4 and 8, independent entries, and scikit-learn's own."""
    from sklearn.random_projection import SparseRandomProjection

    k = Sketch(n_features, n_components).n_components  # checked
    exact = [nnz for nnz in (1, 2, 4, 8) if nnz <= law.max_nnz(k)]
    densities: dict[str, Any] = {"iid auto": "auto", "iid 1/3": 1 / 3, "Rademacher": 1}
    return [
        *((f"nnz {nnz}", Sketch(n_features, k, nnz=nnz)) for nnz in exact),
        *((name, Sketch(n_features, k, density=density)) for name, density in densities.items()),
        ("scikit-learn", SparseRandomProjection(k, dense_output=True)),
    ]


def _named(sketch: Any, n_features: int) -> tuple[str, Any]:
    """A name and what it belongs to, checked."""
    name, item = sketch if isinstance(sketch, tuple) and len(sketch) == 2 else (None, sketch)
    if isinstance(item, Sketch):
        if item.n_features != n_features:
            raise ValueError(f"{item!r} takes {item.n_features} features, X has {n_features}")
    elif not hasattr(item, "fit_transform") or "random_state" not in item.get_params():
        raise TypeError(
            "sketches are sjlt.Sketch objects or scikit-learn's transformers with a random_state, alone or as "
            f"(name, sketch), got {sketch!r}"
        )
    return (_name(item) if name is None else str(name)), item


def _name(item: Any) -> str:
    if not isinstance(item, Sketch):
        return type(item).__name__
    return f"nnz {item.nnz}" if item.nnz else f"density {item.density:.3g}"


def _projected(item: Any, X: Any, number: int) -> np.ndarray:
    """X by the item with the seed that comes `number` after its own."""
    if isinstance(item, Sketch):
        reseeded = Sketch.from_dict({**item.to_dict(), "seed": (item.seed + number) % 2**64})
        return np.asarray(reseeded.project(X))
    from sklearn.base import clone

    own = item.get_params()["random_state"]
    transformer = clone(item).set_params(random_state=(own if isinstance(own, int | np.integer) else 0) + number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of more components than features
        Y = transformer.fit_transform(X)
    return np.asarray(Y.toarray() if is_sparse(Y) else Y)


def _measured(name: str, item: Any, sample: _Sample, seeds: int, eps: float) -> SketchQuality:
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]  # scikit-learn requires it

    blas = ThreadpoolController().select(user_api="blas")
    _projected(item, sample.X[:1], 0)  # compiles what has to be compiled
    seconds, seen = [], []
    for number in range(seeds):
        start = time.perf_counter()
        Y = _projected(item, sample.X, number)
        seconds.append(time.perf_counter() - start)
        with blas.limit(limits=1):  # matrices are small, and its idle threads would take CPUs from the projections
            seen.append(sample.seen(Y))
    k = Y.shape[1]
    ratios, errors, norms, recalls = (np.array(values) for values in zip(*seen, strict=True))
    edges = bins(k)
    mean, std = float(ratios.mean()), float(ratios.std())
    squares, beyond = np.square(ratios - mean).mean(axis=1), np.mean(np.abs(ratios - 1) > eps, axis=1)  # of each seed
    return SketchQuality(
        name=name,
        sketch=" ".join(repr(item).split()),
        n_components=k,
        ratio_quantiles=tuple(np.quantile(ratios, QUANTILES).tolist()),
        ratio_mean=mean,
        ratio_std=std,
        ratio_std_error=_standard_error(squares) / (2 * std) if std else 0.0,
        outside=float(beyond.mean()),
        outside_error=_standard_error(beyond),
        inner_std=float(np.sqrt(np.mean(errors**2))),
        inner_max=float(np.abs(errors).max()),
        norm_std=float(np.sqrt(norms.var(axis=0, ddof=1).mean())),
        recall=float(recalls.mean()),
        recall_range=(float(recalls.min()), float(recalls.max())),
        seconds=float(np.median(seconds)),
        histogram=tuple(np.histogram(np.clip(ratios, edges[0], edges[-1]), edges)[0].tolist()),
    )


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values)))


# ------------------------------------------------------------------------------------- quality


def quality(
    X: Any,
    sketches: Iterable[Any],
    *,
    eps: float = 0.2,
    rows: int = 1000,
    pairs: int = 10_000,
    queries: int = 200,
    neighbours: int = 10,
    seeds: int = 100,
    seed: int = 0,
    progress: Callable[[str], None] = lambda line: None,
) -> Report:
    """Compare what sketches do to the distances, inner products and neighbours of the rows of X.

    Rows are sampled, pairs of them and queries among them, and projected in float64 by every sketch with `seeds`
    seeds, on the CPU. Beside it stands what a dense Gaussian matrix would do to any data, and the number of components
    that the Johnson-Lindenstrauss lemma asks for.

    Parameters
    ----------
    X : {ndarray, CSR matrix or array, tensor} of shape (n, n_features)
        Only the sampled rows are read, copied and checked, so a memory map (``np.load(path, mmap_mode="r")``) may be
        larger than memory.
    sketches : list of {Sketch, transformer, (name, Sketch), (name, transformer)}
        With their seeds, and the ones that follow; a transformer is scikit-learn's, and has a random_state (None
        begins at 0). By default they are named after their nnz, density or class.
        `sjlt.evaluation.quality.standard_sketches(n_features, n_components)` is a list of the laws that there are.
    eps : float, 0 < eps < 1
        Squared distances count as kept within [1 - eps, 1 + eps].
    rows, pairs : int
        How many rows are sampled, and how many different pairs of them; all, where there are fewer.
    queries, neighbours : int
        How many of the sampled rows have so many nearest neighbours searched, among the sampled rows.
    seeds : int >= 2
    seed : int >= 0
        Of the sampling.
    progress : callable
        Called with a line that says what is being done.

    Returns
    -------
    Report
        Equal arguments give equal reports (their `seconds` are not compared). `Report.to_dict()` is JSON.

    Raises
    ------
    TypeError, ValueError
        For arguments of a wrong type or out of range, fewer rows than neighbours + 2, a NaN or infinity in a
        sampled row (with its place), and a sample of duplicates alone.

    References
    ----------
    Dasgupta, Gupta, "An elementary proof of a theorem of Johnson and Lindenstrauss", RSA 22(1), 2003 (the bound).
    Venkatasubramanian, Wang, "The Johnson-Lindenstrauss transform: an empirical study", ALENEX 2011 (the measures).

    Examples
    --------
    >>> import numpy as np, sjlt
    >>> X = np.random.default_rng(0).normal(size=(500, 300))
    >>> report = sjlt.quality(X, [sjlt.Sketch(300, 64), sjlt.Sketch(300, 64, nnz=1)], seeds=2)
    >>> [round(sketch.ratio_mean, 1) for sketch in report.sketches]
    [1.0, 1.0]
    """
    from sklearn.random_projection import johnson_lindenstrauss_min_dim

    if is_sparse(X):
        X = checked_sparse(X)
    elif not (isinstance(X, Source) or is_tensor(X)):
        X = as_container(X)
    _check(X, eps, rows=rows, pairs=pairs, queries=queries, neighbours=neighbours, seeds=seeds, seed=seed)
    named = [_named(sketch, X.shape[1]) for sketch in sketches]
    if not named:
        raise ValueError("no sketches to compare: got an empty list")
    progress(f"sampling {min(rows, X.shape[0])} of {X.shape[0]} rows")
    sample = _Sample(X, rows, pairs, queries, neighbours, seed)
    measured = []
    for number, (name, item) in enumerate(named, 1):
        progress(f"{name} ({number} of {len(named)})")
        measured.append(_measured(name, item, sample, seeds, eps))
    mean_square_cosine = float(np.mean(sample.cosines**2))
    return Report(
        shape=(int(X.shape[0]), int(X.shape[1])),
        rows=sample.X.shape[0],
        pairs=len(sample.first),
        duplicates=sample.duplicates,
        zero_rows=sample.zero_rows,
        queries=len(sample.queries),
        neighbours=neighbours,
        seeds=seeds,
        seed=seed,
        eps=eps,
        jl_n_components=int(johnson_lindenstrauss_min_dim(X.shape[0], eps=eps)),
        theory=tuple(
            gaussian(k, eps, X.shape[0], mean_square_cosine) for k in sorted({m.n_components for m in measured})
        ),
        sketches=tuple(measured),
    )


_LEAST = {"rows": 2, "pairs": 1, "queries": 1, "neighbours": 1, "seeds": 2, "seed": 0}


def _check(X: Any, eps: float, **counts: int) -> None:
    if len(X.shape) != 2:
        raise ValueError(f"X must have 2 dimensions, one data vector a row, got shape {tuple(X.shape)}")
    if is_sparse(X) and X.format != "csr":
        raise TypeError(f"sparse X must be CSR, whose rows can be picked, got {X.format.upper()}: use .tocsr()")
    if is_tensor(X) and str(X.layout) != "torch.strided":
        raise TypeError(f"a tensor must be dense, got one of layout {X.layout}")
    if not 0 < eps < 1:
        raise ValueError(f"eps must be between 0 and 1, got {eps}")
    for name, count in counts.items():
        integer(name, count, _LEAST[name], 2**63 - 1)
