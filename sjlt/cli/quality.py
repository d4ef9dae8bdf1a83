"""The command ``sjlt quality``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import INTEGER, NUMBER
from .terminal import note, say, show, status

if TYPE_CHECKING:
    from ..evaluation.results import Report


def quality(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A 2-D array (.npy), or CSR matrix (.npz).")],
    n_components: Annotated[
        list[int] | None,
        typer.Option(
            "-k", "--n-components", help="May be repeated; default: 64 and 256.", show_default=False,
            **INTEGER,
        ),
    ] = None,
    eps: Annotated[float, typer.Option(help="Squared distances within 1 ± eps count as kept.", **NUMBER)] = 0.2,
    rows: Annotated[int, typer.Option(help="Rows to sample.", **INTEGER)] = 1000,
    pairs: Annotated[int, typer.Option(help="Sampled pairs of these rows.", **INTEGER)] = 10_000,
    queries: Annotated[int, typer.Option(help="Sampled rows whose neighbours are searched.", **INTEGER)] = 200,
    neighbours: Annotated[int, typer.Option(help="Nearest neighbours per query.", **INTEGER)] = 10,
    seeds: Annotated[int, typer.Option(help="Matrices of each kind, with seeds 0, 1, ...", **INTEGER)] = 100,
    seed: Annotated[int, typer.Option(help="For sampling.", **INTEGER)] = 0,
    json: Annotated[Path | None, typer.Option(help="Where to save the numbers.", show_default=False)] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Where to save a figure: .png, .pdf or .svg.", show_default=False)
    ] = None,
) -> None:  # fmt: skip
    """Show what sketches do to the distances between the rows of IN.

    Samples rows of IN and compares, for each k: exactly 1, 2, 4 and 8 nonzeros per column, independent entries of
    density 1/sqrt(features), 1/3 and 1 (Rademacher), scikit-learn's SparseRandomProjection, and the theory of a dense
    Gaussian matrix. Shown are the distribution of squared distances, after / before; errors of inner products; norms
    over the seeds; nearest neighbours kept; time.

    Only the sampled rows of an .npy file are read; a CSR matrix is loaded whole. Equal arguments give equal numbers,
    except for times.
    """
    from ..evaluation import figures
    from ..evaluation import report as tables

    _refuse_names(source, json, plot)
    counts = {"rows": rows, "pairs": pairs, "queries": queries, "neighbours": neighbours, "seeds": seeds, "seed": seed}
    with status() as doing:
        report = _compared(source, n_components or [64, 256], eps, counts, doing)
    show(tables.tables(report))
    if json is not None:
        tables.write_json({"source": source.name, **report.to_dict()}, json)
        say(f"JSON: {json}")
    if plot is not None:
        figures.plot(report, plot, f"{source.name}: {figures.sampled(report)}")
        say(f"Plot: {plot}")


def _refuse_names(source: Path, json: Path | None, plot: Path | None) -> None:
    from ..evaluation.figures import PLOT_SUFFIXES
    from ..files.errors import UserError

    for path in (json, plot):
        if path is None:
            continue
        if not path.parent.is_dir():
            raise UserError(f"{path.parent}: no such directory")
        if path.exists() and not path.is_file():
            raise UserError(f"{path}: exists and is not a regular file")
        if path.exists() and source.exists() and path.samefile(source):
            raise UserError(f"{path}: is the source {source}")
    if plot is not None and plot.suffix.lower() not in PLOT_SUFFIXES:
        raise UserError(f"{plot}: a plot's name ends in {' or '.join(PLOT_SUFFIXES)}")
    if json is not None and json == plot:
        raise UserError(f"{json}: cannot be both the JSON and the plot")


def _compared(
    source: Path, n_components: list[int], eps: float, counts: dict[str, int], doing: Callable[[str], None]
) -> Report:
    from ..evaluation.quality import quality
    from ..evaluation.sketches import standard_sketches
    from ..files.errors import UserError, one_line
    from ..files.opening import open_source

    with open_source(source, note) as file:
        try:
            sketches = [sketch for k in dict.fromkeys(n_components) for sketch in standard_sketches(file.shape[1], k)]
            return quality(file, sketches, eps=eps, progress=doing, **counts)
        except (TypeError, ValueError) as e:
            raise UserError(f"{source}: {one_line(e)}") from None
