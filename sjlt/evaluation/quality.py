"""`sjlt.quality`: what sketches do to the distances, inner products and neighbours of given data.

Rows are sampled and projected by every sketch with every seed, in float64, so that the results show the random law and
not rounding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ..files.source import Source
from ..inputs.checks import integer
from ..inputs.containers import as_container, checked_sparse, is_sparse, is_tensor
from .measures import QUANTILES, bins, gaussian
from .results import Report, SketchQuality
from .sample import Sample
from .sketches import named, projected


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
    """Measure what sketches do to the distances, inner products and neighbours of the rows of X.

    A sample of rows is projected in float64 by every sketch with `seeds` seeds, on the CPU. The report compares this
    with the theory of a dense Gaussian matrix and with the number of components that the Johnson-Lindenstrauss lemma
    requires.

    Parameters
    ----------
    X : {ndarray, CSR matrix or array, tensor} of shape (n, n_features)
        Only the sampled rows are read, copied and checked, so a memory map (``np.load(path, mmap_mode="r")``) may be
        larger than memory.
    sketches : list of {Sketch, transformer, (name, Sketch), (name, transformer)}
        Each is used with its seed and the ones that follow. Transformers are scikit-learn's and have a random_state
        (None begins at 0). By default they are named after their nnz, density or class.
        `sjlt.evaluation.sketches.standard_sketches(n_features, n_components)` lists all laws.
    eps : float, 0 < eps < 1
        Squared distances count as kept within [1 - eps, 1 + eps].
    rows, pairs : int
        Sampled rows, and distinct pairs of these; all, if there are fewer.
    queries, neighbours : int
        Sampled rows whose nearest neighbours among the sampled rows are searched, and how many of these.
    seeds : int >= 2
    seed : int >= 0
        For sampling.
    progress : callable
        Called with a line that describes the current step.

    Returns
    -------
    Report
        Equal arguments give equal reports (their `seconds` are not compared). `Report.to_dict()` is JSON.

    Raises
    ------
    TypeError, ValueError
        For arguments of a wrong type or out of range, fewer rows than neighbours + 2, a NaN or infinity in a
        sampled row (with its position), and a sample of duplicates only.

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
    chosen = [named(sketch, X.shape[1]) for sketch in sketches]
    if not chosen:
        raise ValueError("no sketches to compare: got an empty list")
    progress(f"sampling {min(rows, X.shape[0])} of {X.shape[0]} rows")
    sample = Sample(X, rows, pairs, queries, neighbours, seed)
    measured = []
    for number, (name, item) in enumerate(chosen, 1):
        progress(f"{name} ({number} of {len(chosen)})")
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


_MINIMA = {"rows": 2, "pairs": 1, "queries": 1, "neighbours": 1, "seeds": 2, "seed": 0}


def _check(X: Any, eps: float, **counts: int) -> None:
    if len(X.shape) != 2:
        raise ValueError(f"X must have 2 dimensions, one data vector per row, got shape {tuple(X.shape)}")
    if is_sparse(X) and X.format != "csr":
        raise TypeError(f"sparse X must be CSR, whose rows can be picked, got {X.format.upper()}: use .tocsr()")
    if is_tensor(X) and str(X.layout) != "torch.strided":
        raise TypeError(f"a tensor must be dense, got one of layout {X.layout}")
    if not 0 < eps < 1:
        raise ValueError(f"eps must be between 0 and 1, got {eps}")
    for name, count in counts.items():
        integer(name, count, _MINIMA[name], 2**63 - 1)


def _measured(name: str, item: Any, sample: Sample, seeds: int, eps: float) -> SketchQuality:
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]  # scikit-learn requires it

    blas = ThreadpoolController().select(user_api="blas")
    projected(item, sample.X[:1], 0)  # compiles
    seconds, compared = [], []
    for number in range(seeds):
        start = time.perf_counter()
        Y = projected(item, sample.X, number)
        seconds.append(time.perf_counter() - start)
        with blas.limit(limits=1):  # products are small, and idle BLAS threads would take CPUs from the projections
            compared.append(sample.compare(Y))
    k = Y.shape[1]
    ratios, errors, norms, recalls = (np.array(values) for values in zip(*compared, strict=True))
    edges = bins(k)
    mean, std = float(ratios.mean()), float(ratios.std())
    squares, beyond = np.square(ratios - mean).mean(axis=1), np.mean(np.abs(ratios - 1) > eps, axis=1)  # per seed
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
