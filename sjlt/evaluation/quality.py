"""`sjlt.quality`: measure what projection does to a data set."""

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

N_COMPONENTS = (64, 256)  # of the default sketches

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
    """Measure how well nearest-neighbour search survives projection, or compare random laws.

    By default, sampled rows are used as queries of an exact search among all other rows, by inner product and by cosine
    similarity, before and after projection. The report shows the share of the nearest rows that is still found. For
    comparison, it shows the same for other ways to save memory: principal components, truncation to the first features,
    float16 and int8. The latter two are also applied to projected vectors. The report ends with a sentence of advice,
    which may be not to project.

    With ``laws=True``, sampled rows are projected in float64 by every sketch with `seeds` different seeds, and
    distances, inner products and norms are compared with the theory of a dense Gaussian matrix.

    Parameters
    ----------
    X : {ndarray, CSR matrix or array, tensor, path, Source} of shape (n, n_features)
        Read once, in blocks (with `laws`, only the sampled rows are read), so a memory map or a file may be larger than
        memory. Paths may name any file that ``sjlt project`` reads.
    sketches : Sketch, or list of {Sketch, transformer, (name, Sketch), (name, transformer)}, optional
        The sketches to measure. By default, ``Sketch(n_features, k)`` for each k in `n_components`; with `laws`, all
        laws. Transformers are scikit-learn transformers with a random_state; they require `laws`. With `laws`, each is
        used with its own seed (0 if random_state is None) and the seeds that follow.
    laws : bool, optional
        Whether to compare laws instead of searching. By default, True if a list of sketches is given.
    n_components : iterable of int, optional
        Numbers of components of the default sketches. By default 64 and 256.
    eps : float, default 0.2
        With `laws`: squared distances count as kept if their ratio is in [1 - eps, 1 + eps]. Between 0 and 1.
    rows, pairs : int, default 1000 and 10,000
        With `laws`: number of rows to sample, and number of distinct pairs of these rows.
    queries, neighbours : int, default 200 and 10
        Number of rows sampled as queries, of which rows of zeros are left out, and number of nearest rows to find for
        each; `neighbours` is at most n - 2 (with `laws`, the number of sampled rows - 2).
    seeds : int >= 2, default 100
        With `laws`: number of matrices per sketch.
    seed : int >= 0, default 0
        Seed of the sampling.
    progress : callable
        Called with a line that describes the current step.

    Returns
    -------
    SearchReport, or Report with `laws`
        ``print`` shows it as a table, ``plot(path)`` saves a figure, and ``to_dict()`` returns JSON-serializable
        objects. Equal arguments give equal reports; measured `seconds` are not compared.

    Raises
    ------
    TypeError, ValueError
        For invalid arguments, fewer than neighbours + 2 rows, a NaN or infinity in a row that is used (the message
        gives its position), queries that are all zero and, with `laws`, a sample that contains only duplicates.
    sjlt.files.errors.UserError, OSError
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
            raise TypeError("transformers need laws=True; search is measured only for sjlt.Sketch objects")
        searched = [(name if name.startswith("sketch") else f"sketch {name}", item) for name, item in given]
        if sketches is None or len(searched) == 1:
            searched = [("sketch", item) for _, item in searched]
        return search_report(data, searched, queries, neighbours, seed, progress)


@contextmanager
def _opened(X: Any, progress: Progress) -> Iterator[Any]:
    """Yield X in a form whose rows can be read; close it at the end if it is a file."""
    if isinstance(X, str | os.PathLike):
        with open_source(Path(X), progress) as file:
            yield file
    elif is_sparse(X):
        yield checked_sparse(X)
    elif is_dask(X):
        raise TypeError(
            "X is a dask array, whose rows cannot be sampled directly: pass X.compute(), or the path of a zarr store "
            "written by X.to_zarr"
        )
    else:
        yield X if isinstance(X, Source) or is_tensor(X) else as_container(X)


def _given(sketches: Any, n_components: Iterable[int] | None, n_features: int, laws: bool) -> list[tuple[str, Any]]:
    """The sketches to compare, with names."""
    if sketches is not None:
        if n_components is not None:
            raise ValueError("n_components applies to the default sketches only: pass either it or sketches")
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
        raise TypeError(f"sparse X must be CSR, got {X.format.upper()}: use .tocsr()")
    if is_tensor(X) and str(X.layout) != "torch.strided":
        raise TypeError(f"X must be a dense tensor, got layout {X.layout}")
    if not isinstance(eps, numbers.Real):
        raise TypeError(f"eps must be a number, got {eps!r} of type {type(eps).__name__}")
    if not 0 < eps < 1:
        raise ValueError(f"eps must be between 0 and 1, got {eps}")
    for name, count in counts.items():
        integer(name, count, _MINIMA[name], 2**63 - 1)
