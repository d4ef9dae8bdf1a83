"""Figures of `sjlt.quality`, suitable for print."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..files.atomic import whole_file
from .measures import Theory, bins

if TYPE_CHECKING:
    from .results import Report, SearchReport

PLOT_SUFFIXES = (".png", ".pdf", ".svg")

# Blues for exact sparsity, green for stacks, warm colours for independent entries, and dots for scikit-learn, whose
# curve coincides with one of ours. They also differ in lightness and dashes. Other names use the colours of Okabe and
# Ito, "Color universal design", 2008.
_STYLES: dict[str, dict[str, Any]] = {
    "nnz 1": {"color": "#9ecae1"},
    "nnz 2": {"color": "#4a9bd0"},
    "nnz 4": {"color": "#0b5fa5"},
    "nnz 8": {"color": "#08306b"},
    "4 stacks": {"color": "#2ca25f"},
    "iid auto": {"color": "#e6842a", "linestyle": "--"},
    "iid 1/3": {"color": "#b2182b", "linestyle": "--"},
    "Rademacher": {"color": "#7a4a2b", "linestyle": "--"},
    "scikit-learn": {"color": "black", "linestyle": ":"},
}
_OTHER_COLOURS = ("#d55e00", "#009e73", "#cc79a7", "#e69f00", "#0072b2", "#56b4e9", "#f0e442", "#000000")
_TEXT: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 9,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
}  # text stays text in PDF and SVG
_FLOOR = 1e-5  # the smallest share that is plotted


def plot(report: Report | SearchReport, path: Path, title: str = "", replace: bool = True) -> None:
    """Save the figure of either kind of report.

    Parameters
    ----------
    report : Report or SearchReport
    path : Path
        The suffix determines the format: PNG, PDF or SVG. The file is written completely or not at all.
    title : str
        By default, the size of the sample.
    replace : bool, default True
        Replace an existing file; if False, raise FileExistsError.

    Raises
    ------
    ValueError
        For other suffixes.
    """
    drawn = plot_laws if hasattr(report, "theory") else plot_search
    drawn(cast(Any, report), path, title, replace)


def plot_laws(report: Report, path: Path, title: str = "", replace: bool = True) -> None:
    """Save the distributions of squared-distance ratios and their tails, one column per number of components."""

    def draw(panels: np.ndarray, styles: Mapping[str, dict[str, Any]]) -> None:
        for column, theory in enumerate(report.theory):
            _density(panels[0, column], report, theory, styles)
            _tail(panels[1, column], report, theory, styles)
            panels[0, column].set(title=_components(report, theory), xlabel="squared distance, after / before")
            panels[1, column].set_xlabel("t")
        panels[0, 0].set_ylabel("density")
        panels[1, 0].set_ylabel("share of pairs off by more than t")

    _figure(path, title or report.sampled, {"": report}, 2, draw, replace)


def plot_datasets(reports: Mapping[str, Report], path: Path, title: str = "") -> None:
    """Save the tails for several data sets, in the style of `plot_laws`, with one row per data set."""

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
    path: Path,
    title: str,
    reports: Mapping[str, Report],
    rows: int,
    draw: Callable[[np.ndarray, Any], None],
    replace: bool = True,
) -> None:
    check_suffix(path)
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
        widest = 0.4 + 0.055 * max(map(len, labels))  # inches, for a line and its label
        wanted = min(5, len(labels), max(1, int(figure.get_figwidth() / widest)))
        figure.legend(handles, labels, loc="outside lower center", ncols=wanted, frameon=False)
        with whole_file(path, replace=replace) as file:
            figure.savefig(file, format=path.suffix[1:].lower())


def check_suffix(path: Path) -> None:
    """Raise ValueError unless the suffix is one of PLOT_SUFFIXES."""
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise ValueError(f"{path}: a plot's name must end in {' or '.join(PLOT_SUFFIXES)}")


def _components(report: Report, theory: Theory) -> str:
    return f"{report.shape[1]:,} to {theory.n_components:,}"


def _drawn(report: Report, theory: Theory) -> list[tuple[str, np.ndarray]]:
    """Each sketch's name, and the share of its ratios in each bin."""
    chosen = [sketch for sketch in report.sketches if sketch.n_components == theory.n_components]
    return [(sketch.name, np.array(sketch.histogram) / sum(sketch.histogram)) for sketch in chosen]


def _density(panel: Any, report: Report, theory: Theory, styles: Mapping[str, dict[str, Any]]) -> None:
    from scipy.stats import chi2

    k, edges = theory.n_components, bins(theory.n_components)
    x = np.linspace(*_range(theory, 4.5), 400)
    panel.axvspan(1 - report.eps, 1 + report.eps, color="0.95", linewidth=0, label=f"1 ± {report.eps:g}")
    panel.fill_between(x, k * chi2.pdf(k * x, k), color="0.86", linewidth=0, label="Gaussian (theory)")
    for name, shares in _drawn(report, theory):
        middles = (edges[1:-2] + edges[2:-1]) / 2  # skips the outermost bins, which also count all ratios beyond them
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
    """The share of ratios farther from 1 than each bin edge, from the centre outwards."""
    below, above = shares[: len(shares) // 2][::-1], shares[len(shares) // 2 :]
    beyond: np.ndarray = np.cumsum((below + above)[::-1])[::-1]
    return beyond


def _range(theory: Theory, deviations: float) -> tuple[float, float]:
    return 1 - deviations * theory.ratio_std, 1 + deviations * theory.ratio_std


def plot_search(report: SearchReport, path: Path, title: str = "", replace: bool = True) -> None:
    """Save a plot of recall by cosine similarity against bytes per vector, for the nearest rows and the shortlist."""
    check_suffix(path)
    import matplotlib
    from matplotlib.figure import Figure

    families = dict.fromkeys(method.family for method in report.methods)
    with matplotlib.rc_context(_TEXT):
        figure = Figure(figsize=(6.4, 3.4), dpi=200, layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        shown = ("cosine", f"{report.neighbours} nearest"), ("cosine_shortlist", f"within the first {report.shortlist}")
        for panel, (attribute, name) in zip(panels, shown, strict=True):
            for i, family in enumerate(families):
                members = sorted((m for m in report.methods if m.family == family), key=lambda m: m.bytes)
                x, y = [m.bytes for m in members], [100 * getattr(m, attribute) for m in members]
                style = {"linestyle": "-" if family.startswith("sketch") else "--", "marker": "osD^v<>p"[i % 8]}
                panel.plot(x, y, label=family, color=_OTHER_COLOURS[i % 8], markersize=4, linewidth=1.1, **style)
            panel.set(xscale="log", ylim=(0, 102), xlabel="bytes per vector", title=name)
            panel.spines[["top", "right"]].set_visible(False)
        panels[0].set_ylabel(f"{report.neighbours} nearest rows found, %")
        figure.suptitle(title or report.sampled, x=0.01, ha="left")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
        with whole_file(path, replace=replace) as file:
            figure.savefig(file, format=path.suffix[1:].lower())
