"""The results of `sjlt.quality` as plain dataclasses."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from .measures import QUANTILES, Theory


@dataclass(frozen=True)
class SketchQuality:
    """The effect of one law on the sample, over all seeds. Ratios are of squared distances, after / before."""

    name: str
    sketch: str  # the repr of the first one
    n_components: int
    ratio_quantiles: tuple[float, ...]  # at QUANTILES, of all pairs and seeds together
    ratio_mean: float
    ratio_std: float
    ratio_std_error: float  # its standard error over the seeds, as pairs projected by one matrix are correlated
    outside: float  # the share of ratios outside [1 - eps, 1 + eps]
    outside_error: float  # its standard error over the seeds
    inner_std: float  # root mean square of (<Sx, Sy> - <x, y>) / (|x| |y|)
    inner_max: float  # its largest magnitude
    norm_std: float  # of |Sx|^2 / |x|^2 over seeds, root mean square over rows
    recall: float  # the share of nearest neighbours that stay nearest neighbours, mean over seeds
    recall_range: tuple[float, float]  # worst and best seed
    seconds: float = field(compare=False)  # to make the matrix and project the sample, median over seeds
    histogram: tuple[int, ...] = field(repr=False)  # of the ratios, in the bins that `bins` gives


@dataclass(frozen=True)
class Report:
    """The result of `quality`: the sample, the theory, and the measures of each sketch."""

    version: ClassVar[int] = 1

    shape: tuple[int, int]  # of X
    rows: int  # sampled, with `seed`
    pairs: int  # of them, distinct; pairs at distance 0 are not counted
    duplicates: int  # the sampled pairs at distance 0
    zero_rows: int  # also sampled and left out: rows of norm 0
    queries: int  # the sampled rows whose nearest neighbours among the sampled rows were searched
    neighbours: int
    seeds: int  # per sketch: its own and the ones that follow
    seed: int
    eps: float
    jl_n_components: int  # enough for all pairs of X to be within 1 +- eps (johnson_lindenstrauss_min_dim)
    theory: tuple[Theory, ...]  # one for each n_components, ascending
    sketches: tuple[SketchQuality, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain objects, ready for JSON, with quantiles as objects."""
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
        """Save the figure of ``sjlt quality --laws --plot`` as PNG, PDF or SVG, chosen by the suffix of `path`.

        An existing file is replaced. ValueError for other suffixes.
        """
        from .figures import plot

        plot(self, Path(path), title)


@dataclass(frozen=True)
class SearchQuality:
    """The share of the nearest rows that one way of storing vectors finds. All shares are means over the queries."""

    name: str
    family: str  # methods of one family differ in size only
    n_components: int
    bytes: int  # per vector
    inner: float  # share of the rows with the largest inner products that are found among as many rows
    inner_shortlist: float  # that are found among the shortlist, and so kept by re-ranking
    cosine: float  # the same for cosine similarity
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
    queries: int  # sampled rows, with `seed`; a query does not find itself
    neighbours: int
    shortlist: int
    seed: int
    original_bytes: int  # per vector
    methods: tuple[SearchQuality, ...]
    advice: str

    def to_dict(self) -> dict[str, Any]:
        """The report as plain objects, ready for JSON."""
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
        """Save a figure of recall against bytes per vector as PNG, PDF or SVG, chosen by the suffix of `path`.

        An existing file is replaced. ValueError for other suffixes.
        """
        from .figures import plot

        plot(self, Path(path), title)
