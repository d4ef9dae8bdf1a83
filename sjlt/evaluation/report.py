"""A `Report` of `quality` for people: a table for the terminal, JSON, and a figure for a paper."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .measures import QUANTILES, Theory, bins
from .quality import Report, SketchQuality

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

PLOT_SUFFIXES = (".png", ".pdf", ".svg")

# ------------------------------------------------------------------------------------- table


def tables(report: Report) -> Group:
    """One table for each number of components, a row for each sketch, and what was sampled. 80 columns wide."""
    from rich.console import Group
    from rich.text import Text

    return Group(*(_table(report, theory) for theory in report.theory), Text("\n".join(explanation(report))))


def explanation(report: Report) -> list[str]:
    """What was sampled, what is shown and what theory asks for, in sentences."""
    n, d = report.shape
    zero = f", {report.zero_rows:,} of norm 0 left out" if report.zero_rows else ""
    duplicates = f", {report.duplicates:,} of duplicates left out" if report.duplicates else ""
    error = max(sketch.ratio_std_error / max(sketch.ratio_std, 1e-9) for sketch in report.sketches)
    chances = (f"{theory.any_outside:.2g} at {theory.n_components:,}" for theory in report.theory)
    return [
        f"Sampled with seed {report.seed} from {n:,} rows of {d:,} features: {report.rows:,} rows{zero}, "
        f"{report.pairs:,} pairs of these{duplicates}, {report.queries:,} queries. {report.seeds} seeds, in float64.",
        "Ratio: of squared distances, after / before; quantiles, std, and the share outside. Inner: root mean square "
        "and largest error of inner products over both norms. Norms: std over seeds. Kept: recall of the "
        f"{report.neighbours} nearest sampled rows. ms: to make the matrix and project the sample.",
        f"Matrices differ by luck, too: the ratios' std has a standard error over seeds of up to {100 * error:.2g} %.",
        "Gaussian: the theory of a dense Gaussian matrix, on any data. With it the chance that any pair of all "
        f"{n:,} rows is outside is at most {', '.join(chances)} (union bound); johnson_lindenstrauss_min_dim asks for "
        f"{report.jl_n_components:,} components.",
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
    grid.add_row("Gaussian", *quantiles, std, _percent(theory.outside), inner, "", std, style="italic")
    for sketch in report.sketches:
        if sketch.n_components == theory.n_components:
            grid.add_row(Text(sketch.name, overflow="fold"), *_cells(sketch))
    return grid


_SHOWN_QUANTILES = (0.001, 0.5, 0.999)
_HEADERS: tuple[tuple[str, Literal["left", "right"]], ...] = (
    ("", "left"),
    *((f"{'ratio' * (q == 0.001)}\n{100 * q:g} %", "right") for q in _SHOWN_QUANTILES),
    ("\nstd", "right"),
    ("outside\n1±{eps:g},%", "right"),
    ("inner\nrms", "right"),
    ("\nmax", "right"),
    ("norms\nstd", "right"),
    ("kept\n@{neighbours},%", "right"),
    ("\nms", "right"),
)


def _cells(sketch: SketchQuality) -> list[str]:
    return [
        *(f"{sketch.ratio_quantiles[QUANTILES.index(q)]:.2f}" for q in _SHOWN_QUANTILES),
        f"{sketch.ratio_std:.3f}",
        _percent(sketch.outside),
        f"{sketch.inner_std:.3f}",
        f"{sketch.inner_max:.2f}",
        f"{sketch.norm_std:.3f}",
        f"{100 * sketch.recall:.1f}",
        f"{1e3 * sketch.seconds:.1f}" if sketch.seconds < 1 else f"{1e3 * sketch.seconds:.0f}",
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.2f}" if share >= 5e-5 or share == 0 else "<0.01"


# ------------------------------------------------------------------------------------- files


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to, which becomes `path` when the block has ended well."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(content: Mapping[str, Any], path: Path) -> None:
    """Write what `Report.to_dict` gives; `path` stands there whole or not at all."""
    with _replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------- figure

# Blues for exact sparsity, warm colours for independent entries, dots for scikit-learn's, which lie upon a line of
# ours: they differ in lightness and dashes, too. Other names take the colours of Okabe and Ito, "Color universal
# design", 2008.
_STYLES: dict[str, dict[str, Any]] = {
    "nnz 1": {"color": "#9ecae1"},
    "nnz 2": {"color": "#4a9bd0"},
    "nnz 4": {"color": "#0b5fa5"},
    "nnz 8": {"color": "#08306b"},
    "iid auto": {"color": "#e6842a", "linestyle": "--"},
    "iid 1/3": {"color": "#b2182b", "linestyle": "--"},
    "Rademacher": {"color": "#7a4a2b", "linestyle": "--"},
    "scikit-learn": {"color": "black", "linestyle": ":"},
}
_OTHER_COLOURS = ("#d55e00", "#009e73", "#cc79a7", "#e69f00", "#0072b2", "#56b4e9", "#f0e442", "#000000")
# Text stays text in PDF and SVG.
_TEXT: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 9,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
}  # text stays text
_FLOOR = 1e-5  # the smallest share that tails show


def plot(report: Report, path: Path, title: str = "") -> None:
    """Save the distributions of squared-distance ratios and their tails, a column for each number of components.

    PNG, PDF or SVG by the name's suffix; `path` stands there whole or not at all.
    """

    def draw(panels: np.ndarray, styles: Mapping[str, dict[str, Any]]) -> None:
        for column, theory in enumerate(report.theory):
            _density(panels[0, column], report, theory, styles)
            _tail(panels[1, column], report, theory, styles)
            panels[0, column].set(title=_components(report, theory), xlabel="squared distance, after / before")
            panels[1, column].set_xlabel("t")
        panels[0, 0].set_ylabel("density")
        panels[1, 0].set_ylabel("share of pairs off by more than t")

    _figure(path, title or sampled(report), {"": report}, 2, draw)


def plot_datasets(reports: Mapping[str, Report], path: Path, title: str = "") -> None:
    """Save the tails for several data sets, a row for each one, as `plot` does."""

    def draw(panels: np.ndarray, styles: Mapping[str, dict[str, Any]]) -> None:
        for row, (name, report) in enumerate(reports.items()):
            for column, theory in enumerate(report.theory):
                _tail(panels[row, column], report, theory, styles)
                panels[row, column].set_title(_components(report, theory))
            panels[row, 0].set_ylabel(f"{name}\nshare off by more than t")
        for panel in panels[-1]:
            panel.set_xlabel("t")

    _figure(path, title, reports, len(reports), draw)


def _figure(
    path: Path, title: str, reports: Mapping[str, Report], rows: int, draw: Callable[[np.ndarray, Any], None]
) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    columns = max(len(report.theory) for report in reports.values())
    names = dict.fromkeys(sketch.name for report in reports.values() for sketch in report.sketches)
    others = [name for name in names if name not in _STYLES]
    styles = _STYLES | {
        name: {"color": _OTHER_COLOURS[i % 8], "linestyle": ("-", "--", ":")[i // 8 % 3]}
        for i, name in enumerate(others)
    }
    with matplotlib.rc_context(_TEXT):
        figure = Figure(figsize=(max(4.8, 0.6 + 2.5 * columns), 0.9 + 1.9 * rows), dpi=200, layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False)
        draw(panels, styles)
        for panel in panels.flat:
            panel.spines[["top", "right"]].set_visible(False)
        figure.suptitle(title, fontsize=8.5, x=0.01, ha="left")
        handles, labels = panels[0, 0].get_legend_handles_labels()
        widest = 0.4 + 0.055 * max(map(len, labels))  # inches, of a line and its name
        wanted = min(5, len(labels), max(1, int(figure.get_figwidth() / widest)))
        figure.legend(handles, labels, loc="outside lower center", ncols=wanted, frameon=False)
        with _replacing(path) as temporary:
            figure.savefig(temporary, format=path.suffix[1:].lower())


def _components(report: Report, theory: Theory) -> str:
    return f"{report.shape[1]:,} to {theory.n_components:,}"


def sampled(report: Report) -> str:
    return f"{report.pairs:,} pairs of {report.rows:,} rows, {report.seeds} seeds"


def _drawn(report: Report, theory: Theory) -> list[tuple[str, np.ndarray]]:
    """Each sketch's name, and the share of its ratios in each of the bins."""
    chosen = [sketch for sketch in report.sketches if sketch.n_components == theory.n_components]
    return [(sketch.name, np.array(sketch.histogram) / sum(sketch.histogram)) for sketch in chosen]


def _density(panel: Any, report: Report, theory: Theory, styles: Mapping[str, dict[str, Any]]) -> None:
    from scipy.stats import chi2

    k, edges = theory.n_components, bins(theory.n_components)
    x = np.linspace(*_range(theory, 4.5), 400)
    panel.axvspan(1 - report.eps, 1 + report.eps, color="0.95", linewidth=0, label=f"1 ± {report.eps:g}")
    panel.fill_between(x, k * chi2.pdf(k * x, k), color="0.86", linewidth=0, label="Gaussian (theory)")
    for name, shares in _drawn(report, theory):
        middles = (edges[1:-2] + edges[2:-1]) / 2  # the outermost bins hold all that lies beyond
        panel.plot(middles, shares[1:-1] / np.diff(edges)[1:-1], linewidth=1.1, label=name, **styles[name])
    panel.set(xlim=(x[0], x[-1]), ylim=(0, None), yticks=[])


def _tail(panel: Any, report: Report, theory: Theory, styles: Mapping[str, dict[str, Any]]) -> None:
    from scipy.stats import chi2

    k, edges = theory.n_components, bins(theory.n_components)
    t = edges[len(edges) // 2 :] - 1
    panel.axvspan(0, report.eps, color="0.95", linewidth=0, label=f"1 ± {report.eps:g}")
    with np.errstate(divide="ignore"):
        panel.fill_between(
            t, np.maximum(chi2.cdf(k * (1 - t), k) + chi2.sf(k * (1 + t), k), _FLOOR / 10),
            _FLOOR / 10, color="0.86", linewidth=0, label="Gaussian (theory)",
        )  # fmt: skip
    most = 5 * theory.ratio_std
    for name, shares in _drawn(report, theory):
        beyond = _beyond(shares)
        panel.plot(t[:-1], np.where(beyond > 0, beyond, np.nan), linewidth=1.1, label=name, **styles[name])
        most = max(most, t[:-1][beyond > _FLOOR][-1])
    panel.set(xlim=(0, most), yscale="log", ylim=(_FLOOR, 1))


def _beyond(shares: np.ndarray) -> np.ndarray:
    """The share of ratios farther from 1 than each inner edge, from 1 outwards."""
    below, above = shares[: len(shares) // 2][::-1], shares[len(shares) // 2 :]
    beyond: np.ndarray = np.cumsum((below + above)[::-1])[::-1]
    return beyond


def _range(theory: Theory, deviations: float) -> tuple[float, float]:
    return 1 - deviations * theory.ratio_std, 1 + deviations * theory.ratio_std
