"""The results of `sjlt.quality` as plain dataclasses."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from .measures import QUANTILES, Theory


@dataclass(frozen=True)
class SketchQuality:
    """The effect of one law on the sample, over all seeds. A ratio is a squared distance after / before projection."""

    name: str
    sketch: str  # repr of the sketch with the first seed
    n_components: int
    ratio_quantiles: tuple[float, ...]  # at QUANTILES, over all pairs and seeds
    ratio_mean: float
    ratio_std: float
    ratio_std_error: float  # standard error of ratio_std, over seeds because ratios of one matrix are correlated
    outside: float  # share of ratios outside [1 - eps, 1 + eps]
    outside_error: float  # standard error of outside, over seeds
    inner_std: float  # root mean square of (<Sx, Sy> - <x, y>) / (|x| |y|)
    inner_max: float  # largest magnitude of the same
    norm_std: float  # std of |Sx|^2 / |x|^2 over seeds, root mean square over rows
    recall: float  # share of nearest neighbours that stay nearest neighbours, mean over seeds
    recall_range: tuple[float, float]  # worst and best seed
    seconds: float = field(compare=False)  # to generate the matrix and project the sample, median over seeds
    histogram: tuple[int, ...] = field(repr=False)  # counts of ratios in the bins of `measures.bins`


@dataclass(frozen=True)
class Report:
    """The result of `quality` with `laws`: the sample, the theory, and the measures of each sketch."""

    version: ClassVar[int] = 1

    shape: tuple[int, int]  # of X
    rows: int  # number of sampled rows, without zero_rows
    pairs: int  # number of distinct sampled pairs of rows, without duplicates
    duplicates: int  # number of sampled pairs at distance 0, which are left out
    zero_rows: int  # number of sampled rows of norm 0, which are left out
    queries: int  # number of sampled rows whose nearest neighbours among the sampled rows were searched
    neighbours: int
    seeds: int  # number of seeds per sketch: its own and the ones that follow
    seed: int  # of the sampling
    eps: float
    jl_n_components: int  # enough for all pairs of X to be within 1 +- eps (johnson_lindenstrauss_min_dim)
    theory: tuple[Theory, ...]  # one per n_components, ascending
    sketches: tuple[SketchQuality, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-serializable objects; quantiles become dicts."""
        content = dataclasses.asdict(self)
        for entry in (*content["theory"], *content["sketches"]):
            entry["ratio_quantiles"] = dict(zip(map(str, QUANTILES), entry["ratio_quantiles"], strict=True))
            entry.pop("histogram", None)
        return {"version": self.version, **content}

    @property
    def sampled(self) -> str:
        """A title for figures."""
        return f"{self.pairs:,} pairs of {self.rows:,} rows, {self.seeds} seeds"

    def __str__(self) -> str:
        """The tables that ``sjlt quality --laws`` shows."""
        from .report import law_tables, text

        return text(law_tables(self))

    def plot(self, path: str | Path, title: str = "") -> None:
        """Save the figure of ``sjlt quality --laws --plot`` as PNG, PDF or SVG, according to the suffix of `path`.

        An existing file is replaced. Other suffixes raise ValueError.
        """
        from .figures import plot

        plot(self, Path(path), title)


@dataclass(frozen=True)
class SearchQuality:
    """How many of the nearest rows one way of storing vectors finds. All shares are means over the queries."""

    name: str
    family: str  # methods of one family differ only in size
    n_components: int
    bytes: int  # per vector
    inner: float  # share of the `neighbours` rows with the largest inner products found among the first `neighbours`
    inner_shortlist: float  # share of the same rows found among the first `shortlist`, which re-ranking can recover
    cosine: float  # as inner, by cosine similarity
    cosine_shortlist: float

    @property
    def is_sketch(self) -> bool:
        """Whether the vectors are projected by a `Sketch`."""
        return self.family.startswith("sketch")


@dataclass(frozen=True)
class SearchReport:
    """The result of `quality`: recall of exact search over all rows, for every method and two similarities."""

    version: ClassVar[int] = 1

    shape: tuple[int, int]  # of X
    queries: int  # number of rows sampled as queries, without rows of zeros; a query does not find itself
    neighbours: int
    shortlist: int  # length of the list of results that re-ranking would consider
    seed: int  # of the sampling
    original_bytes: int  # per vector
    methods: tuple[SearchQuality, ...]
    advice: str

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-serializable objects."""
        return {"version": self.version, **dataclasses.asdict(self)}

    @property
    def sampled(self) -> str:
        """A title for figures."""
        return f"{self.queries:,} queries among {self.shape[0]:,} rows of {self.shape[1]:,} features"

    def __str__(self) -> str:
        """The table that ``sjlt quality`` shows."""
        from .report import search_table, text

        return text(search_table(self))

    def plot(self, path: str | Path, title: str = "") -> None:
        """Save a figure of recall against bytes per vector as PNG, PDF or SVG, according to the suffix of `path`.

        An existing file is replaced. Other suffixes raise ValueError.
        """
        from .figures import plot

        plot(self, Path(path), title)
