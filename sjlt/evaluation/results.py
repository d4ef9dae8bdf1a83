"""The results of `sjlt.quality` as plain dataclasses."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
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
