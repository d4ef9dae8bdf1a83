"""`sjlt.quality`: what projecting does to given data."""

from __future__ import annotations

import numbers
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, overload

from ..files.opening import open_source
from ..files.source import Source
from ..inputs.checks import integer
from ..inputs.containers import as_container, checked_sparse, is_dask, is_sparse, is_tensor
from ..sketch import Sketch
from .laws import law_report
from .results import Report, SearchReport
from .search import search_report
from .sketches import named, standard_sketches

N_COMPONENTS = (64, 256)  # by default

Progress = Callable[[str], None]


class _Options(TypedDict, total=False):
    n_components: Iterable[int] | None
    eps: float
    rows: int
    pairs: int
    queries: int
    neighbours: int
    seeds: int
    seed: int
    progress: Progress


@overload
def quality(
    X: Any, sketches: Sketch | None = None, *, laws: Literal[False] | None = None, **options: Unpack[_Options]
) -> SearchReport: ...
@overload
def quality(
    X: Any, sketches: Iterable[Any], *, laws: Literal[True] | None = None, **options: Unpack[_Options]
) -> Report: ...
@overload
def quality(X: Any, sketches: Any = None, *, laws: Literal[True], **options: Unpack[_Options]) -> Report: ...
@overload
def quality(X: Any, sketches: Any = None, *, laws: Literal[False], **options: Unpack[_Options]) -> SearchReport: ...
def quality(
    X: Any,
    sketches: Any = None,
    *,
    laws: bool | None = None,
    n_components: Iterable[int] | None = None,
    eps: float = 0.2,
    rows: int = 1000,
    pairs: int = 10_000,
    queries: int = 200,
    neighbours: int = 10,
    seeds: int = 100,
    seed: int = 0,
    progress: Progress = lambda line: None,
) -> Report | SearchReport:
    """Measure whether search among the rows of X survives projection, or compare random laws.

    By default, sampled rows are the queries of an exact search among all other rows, by inner product and by cosine
    similarity, before and after projection. The report shows how many of the nearest rows are still found, also for
    other ways to save memory: principal components, the first numbers of each vector, and int8 and float16, which are
    applied to projected vectors as well. It ends with a sentence of advice, which may be not to project.

    With `laws`, sampled rows are projected in float64 by every sketch with `seeds` seeds, and distances, inner products
    and norms are compared with the theory of a dense Gaussian matrix.

    Parameters
    ----------
    X : {ndarray, CSR matrix or array, tensor, path, Source} of shape (n, n_features)
        It is read once in blocks (only the sampled rows, with `laws`), so a memory map or a file may be larger than
        memory. Files are those that ``sjlt project`` reads.
    sketches : Sketch, or list of {Sketch, transformer, (name, Sketch), (name, transformer)}, optional
        By default the default sketches of each of `n_components`; with `laws`, all laws. Transformers are
        scikit-learn's, need `laws` and have a random_state (None begins at 0). With `laws` each is used with its seed
        and the ones that follow.
    laws : bool, optional
        Whether to compare laws instead of searching; by default True if a list of sketches is given.
    n_components : iterable of int, optional
        For the default sketches; by default 64 and 256.
    eps : float, 0 < eps < 1
        With `laws`: squared distances count as kept within [1 - eps, 1 + eps].
    rows, pairs : int
        With `laws`: sampled rows, and distinct pairs of these; all, if there are fewer.
    queries, neighbours : int
        Number of sampled rows that are queries, and number of nearest rows to find for each, at most n - 2 (with
        `laws`, among the sampled rows).
    seeds : int >= 2
        With `laws`: matrices per sketch.
    seed : int >= 0
        Seed of the sampling.
    progress : callable
        Called with a line that describes the current step.

    Returns
    -------
    SearchReport, or Report with `laws`
        ``print`` shows it as a table, ``plot(path)`` saves a figure, ``to_dict()`` is JSON. Equal arguments give equal
        reports (measured `seconds` are not compared).

    Raises
    ------
    TypeError, ValueError
        For arguments of a wrong type or out of range, fewer rows than neighbours + 2, a NaN or infinity in a row that
        is used (with its position), and, with `laws`, a sample of duplicates only.
    UserError, OSError
        If a file cannot be read.

    References
    ----------
    Dasgupta, Gupta, "An elementary proof of a theorem of Johnson and Lindenstrauss", RSA 22(1), 2003 (the bound).
    Venkatasubramanian, Wang, "The Johnson-Lindenstrauss transform: an empirical study", ALENEX 2011 (the measures).

    Examples
    --------
    >>> import numpy as np, sjlt
    >>> X = np.random.default_rng(0).normal(size=(500, 300))
    >>> report = sjlt.quality(X, sjlt.Sketch(300, 64))
    >>> [method.name for method in report.methods[:3]]
    ['originals, float16', 'originals, int8', 'sketch, 64']
    >>> report = sjlt.quality(X, [sjlt.Sketch(300, 64), sjlt.Sketch(300, 64, nnz=1)], seeds=2)
    >>> [round(sketch.ratio_mean, 1) for sketch in report.sketches]
    [1.0, 1.0]
    """
    with _opened(X, progress) as data:
        _check(data, eps, rows=rows, pairs=pairs, queries=queries, neighbours=neighbours, seeds=seeds, seed=seed)
        if laws is None:
            laws = sketches is not None and not isinstance(sketches, Sketch)
        given = _given(sketches, n_components, int(data.shape[1]), laws)
        if laws:
            return law_report(
                data, given, eps=eps, rows=rows, pairs=pairs, queries=queries, neighbours=neighbours, seeds=seeds,
                seed=seed, progress=progress,
            )  # fmt: skip
        if any(not isinstance(item, Sketch) for _, item in given):
            raise TypeError("transformers are compared with laws=True; search is measured for sjlt.Sketch objects")
        searched = [(name if name.startswith("sketch") else f"sketch {name}", item) for name, item in given]
        if sketches is None or len(searched) == 1:
            searched = [("sketch", item) for _, item in searched]
        return search_report(data, searched, queries, neighbours, seed, progress)


@contextmanager
def _opened(X: Any, progress: Progress) -> Iterator[Any]:
    """The data in a form that is read by rows; a file is closed at the end."""
    if isinstance(X, str | os.PathLike):
        with open_source(Path(X), progress) as file:
            yield file
    elif is_sparse(X):
        yield checked_sparse(X)
    elif is_dask(X):
        raise TypeError(
            "X is a dask array, whose rows cannot be sampled at once: pass X.compute(), or the path of a zarr store "
            "that X.to_zarr has written"
        )
    else:
        yield X if isinstance(X, Source) or is_tensor(X) else as_container(X)


def _given(sketches: Any, n_components: Iterable[int] | None, n_features: int, laws: bool) -> list[tuple[str, Any]]:
    """The sketches to compare, with names."""
    if sketches is not None:
        if n_components is not None:
            raise ValueError("n_components is for the default sketches: give either it or sketches")
        if not isinstance(sketches, Sketch | Iterable):
            hint = f": for {sketches} components pass n_components=[{sketches}]" if isinstance(sketches, int) else ""
            raise TypeError(f"sketches must be a sjlt.Sketch or a list, got {sketches!r}{hint}")
        sketches = [sketches] if isinstance(sketches, Sketch) else list(sketches)
        if not sketches:
            raise ValueError("no sketches to compare: got an empty list")
        return [named(sketch, n_features) for sketch in sketches]
    if not isinstance(n_components, Iterable | None):
        raise TypeError(f"n_components must be a list of integers, such as [{n_components!r}], got {n_components!r}")
    widths = list(dict.fromkeys(N_COMPONENTS if n_components is None else n_components))
    if n_components is None and not laws:
        widths = [k for k in widths if k < n_features] or [max(1, n_features // 4)]
    if laws:
        return [sketch for k in widths for sketch in standard_sketches(n_features, k)]
    return [("sketch", Sketch(n_features, k)) for k in widths]


_MINIMA = {"rows": 2, "pairs": 1, "queries": 1, "neighbours": 1, "seeds": 2, "seed": 0}


def _check(X: Any, eps: float, **counts: int) -> None:
    if len(X.shape) != 2:
        raise ValueError(f"X must have 2 dimensions, one data vector per row, got shape {tuple(X.shape)}")
    if is_sparse(X) and X.format != "csr":
        raise TypeError(f"sparse X must be CSR, whose rows can be picked, got {X.format.upper()}: use .tocsr()")
    if is_tensor(X) and str(X.layout) != "torch.strided":
        raise TypeError(f"a tensor must be dense, got one of layout {X.layout}")
    if not isinstance(eps, numbers.Real):
        raise TypeError(f"eps must be a number, got {eps!r} of type {type(eps).__name__}")
    if not 0 < eps < 1:
        raise ValueError(f"eps must be between 0 and 1, got {eps}")
    for name, count in counts.items():
        integer(name, count, _MINIMA[name], 2**63 - 1)
