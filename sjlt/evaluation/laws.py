"""Measure, law by law, how sketches change the distances, inner products and neighbours of sampled rows.

Rows are projected by every sketch with every seed, in float64, so that the results reflect the random law rather than
rounding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .measures import QUANTILES, bins, gaussian
from .results import Report, SketchQuality
from .sample import Sample
from .sketches import projected


def law_report(
    X: Any,
    chosen: Sequence[tuple[str, Any]],
    *,
    eps: float,
    rows: int,
    pairs: int,
    queries: int,
    neighbours: int,
    seeds: int,
    seed: int,
    progress: Callable[[str], None],
) -> Report:
    """Compare named sketches and transformers; see `sjlt.quality`."""
    from sklearn.random_projection import johnson_lindenstrauss_min_dim

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
    squares, outside = np.square(ratios - mean).mean(axis=1), np.mean(np.abs(ratios - 1) > eps, axis=1)  # per seed
    return SketchQuality(
        name=name,
        sketch=" ".join(repr(item).split()),
        n_components=k,
        ratio_quantiles=tuple(np.quantile(ratios, QUANTILES).tolist()),
        ratio_mean=mean,
        ratio_std=std,
        ratio_std_error=_standard_error(squares) / (2 * std) if std else 0.0,
        outside=float(outside.mean()),
        outside_error=_standard_error(outside),
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
