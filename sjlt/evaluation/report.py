"""The results of `sjlt.quality` as tables for the terminal and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from ..files.atomic import write_whole
from .measures import QUANTILES, Theory

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from .results import Report, SearchReport, SketchQuality


def text(content: Any, width: int = 60) -> str:
    """Render a table as plain text."""
    from io import StringIO

    from rich.console import Console

    file = StringIO()
    Console(file=file, width=width, color_system=None).print(content)
    return file.getvalue().rstrip()


def tables(report: Report | SearchReport) -> Group:
    """The tables of either kind of report."""
    return law_tables(cast("Report", report)) if hasattr(report, "theory") else search_table(report)


def search_table(report: SearchReport) -> Group:
    """A table with one row per method, and the advice. 60 characters wide."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    n, d = report.shape
    grid = Table(
        title=f"Share of the {report.neighbours} nearest rows found by search, %",
        title_justify="left", title_style="bold", header_style="bold", box=None, padding=(0, 2, 0, 0), pad_edge=False,
    )  # fmt: skip
    grid.add_column("")
    for header in ("\nbytes", "cosine", f"\nin {report.shortlist}", "inner\nproduct", f"\nin {report.shortlist}"):
        grid.add_column(header, justify="right")
    for method in report.methods:
        shares = (method.cosine, method.cosine_shortlist, method.inner, method.inner_shortlist)
        grid.add_row(
            Text(method.name, overflow="fold"), f"{method.bytes:,}", *(f"{100 * share:.1f}" for share in shares)
        )
    explanation = (
        f"Exact search for {report.queries:,} sampled rows (seed {report.seed}) among all {n:,} rows of {d:,} features "
        f"and {report.original_bytes:,} bytes. 'in {report.shortlist}': found among the first {report.shortlist} "
        "results, from which re-ranking can recover them. PCA is computed from a sample, without centring."
    )
    return Group(grid, Text(f"\n{explanation}\n"), Text(report.advice, style="bold"))


def law_tables(report: Report) -> Group:
    """One table per number of components, with one row per sketch, and an explanation. 60 characters wide."""
    from rich.console import Group
    from rich.text import Text

    return Group(*(_table(report, theory) for theory in report.theory), Text("\n".join(explanation(report))))


def explanation(report: Report) -> list[str]:
    """Sentences that explain the sample, the columns and the theory."""
    n, d = report.shape
    zero = f", {report.zero_rows:,} of norm 0 left out" if report.zero_rows else ""
    duplicates = f", {report.duplicates:,} of duplicates left out" if report.duplicates else ""
    error = max(sketch.ratio_std_error / max(sketch.ratio_std, 1e-9) for sketch in report.sketches)
    chances = (f"{theory.any_outside:.2g} at {theory.n_components:,}" for theory in report.theory)
    return [
        f"Sampled with seed {report.seed} from {n:,} rows of {d:,} features: {report.rows:,} rows{zero}, "
        f"{report.pairs:,} pairs of these{duplicates}, {report.queries:,} queries. {report.seeds} seeds, in float64.",
        "Ratio: squared distance after / before; its quantiles, std, and share outside 1 ± eps. Inner: root mean "
        "square error of inner products, relative to both norms. Norms: std of squared norms over seeds. Kept: recall "
        f"of the {report.neighbours} nearest sampled rows. ms: time to generate the matrix and project the sample.",
        f"Matrices differ by chance: the std of ratios has a standard error over seeds of up to {100 * error:.2g} %.",
        "Gaussian: theory of a dense Gaussian matrix, for any data. With such a matrix, the probability that any pair "
        f"of all {n:,} rows is outside is at most {', '.join(chances)} (union bound); johnson_lindenstrauss_min_dim "
        f"requires {report.jl_n_components:,} components.",
    ]


def _table(report: Report, theory: Theory) -> Table:
    from rich.table import Table
    from rich.text import Text

    grid = Table(
        title=f"{report.shape[1]:,} to {theory.n_components:,} components",
        title_justify="left", title_style="bold", header_style="bold", box=None, padding=(0, 1, 0, 0), pad_edge=False,
    )  # fmt: skip
    for header, justify in _HEADERS:
        grid.add_column(Text(header.format(eps=report.eps, neighbours=report.neighbours)), justify=justify)
    shown = [theory.ratio_quantiles[QUANTILES.index(q)] for q in _SHOWN_QUANTILES]
    inner, std = f"{theory.inner_std:.3f}", f"{theory.ratio_std:.3f}"
    quantiles = [f"{value:.2f}" for value in shown]
    grid.add_row("Gaussian", *quantiles, std, _percent(theory.outside), inner, std, style="italic")
    for sketch in report.sketches:
        if sketch.n_components == theory.n_components:
            grid.add_row(Text(sketch.name, overflow="fold"), *_cells(sketch))
    return grid


_SHOWN_QUANTILES = (0.001, 0.999)
_HEADERS: tuple[tuple[str, Literal["left", "right"]], ...] = (
    ("", "left"),
    *((f"{'ratio' * (q == 0.001)}\n{100 * q:g}%", "right") for q in _SHOWN_QUANTILES),
    ("\nstd", "right"),
    ("% out\n1±{eps:g}", "right"),
    ("inner\nrms", "right"),
    ("norms\nstd", "right"),
    ("kept\n@{neighbours} %", "right"),
    ("\nms", "right"),
)


def _cells(sketch: SketchQuality) -> list[str]:
    return [
        *(f"{sketch.ratio_quantiles[QUANTILES.index(q)]:.2f}" for q in _SHOWN_QUANTILES),
        f"{sketch.ratio_std:.3f}",
        _percent(sketch.outside),
        f"{sketch.inner_std:.3f}",
        f"{sketch.norm_std:.3f}",
        f"{100 * sketch.recall:.1f}",
        f"{1e3 * sketch.seconds:.1f}" if sketch.seconds < 1 else f"{1e3 * sketch.seconds:.0f}",
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.2f}" if share >= 5e-5 or share == 0 else "<0.01"


def write_json(content: Mapping[str, Any], path: Path, replace: bool = True) -> None:
    """Write the result of `Report.to_dict` to `path`, completely or not at all."""
    write_whole(path, (json.dumps(content, indent=2) + "\n").encode(), replace=replace)
