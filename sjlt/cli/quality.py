"""The command ``sjlt quality``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .arguments import INTEGER, NUMBER

if TYPE_CHECKING:
    from ..evaluation.quality import Report


def quality(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A 2-D array (.npy), or CSR matrix (.npz).")],
    n_components: Annotated[
        list[int] | None,
        typer.Option(
            "-k", "--n-components", help="May be given several times; 64 and 256 by default.", show_default=False,
            **INTEGER,
        ),
    ] = None,
    eps: Annotated[float, typer.Option(help="Squared distances count as kept within 1 ± eps.", **NUMBER)] = 0.2,
    rows: Annotated[int, typer.Option(help="Rows to sample.", **INTEGER)] = 1000,
    pairs: Annotated[int, typer.Option(help="Pairs of these.", **INTEGER)] = 10_000,
    queries: Annotated[int, typer.Option(help="Rows of these whose neighbours are searched.", **INTEGER)] = 200,
    neighbours: Annotated[int, typer.Option(help="Nearest neighbours of each.", **INTEGER)] = 10,
    seeds: Annotated[int, typer.Option(help="Matrices of each kind, with the seeds 0, 1, ...", **INTEGER)] = 100,
    seed: Annotated[int, typer.Option(help="Of the sampling.", **INTEGER)] = 0,
    json: Annotated[Path | None, typer.Option(help="Where to save the numbers.", show_default=False)] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Where to save a figure: .png, .pdf or .svg.", show_default=False)
    ] = None,
) -> None:  # fmt: skip
    """Show what sketches do to the distances between the rows of IN.

    Samples rows of IN and compares, at each k: exact sparsity of 1, 2, 4 and 8 nonzeros a column, independent entries
    of density 1/sqrt(features), 1/3 and 1 (Rademacher), scikit-learn's SparseRandomProjection, and the theory of a
    dense Gaussian matrix. For each: the distribution of squared distances, after over before; errors of inner
    products; norms over the seeds; nearest neighbours kept; time.

    Of an .npy file only the sampled rows are read; a CSR matrix is loaded whole. The same arguments give the same
    numbers, but for the times.
    """
    from rich.console import Console

    from ..evaluation import report as quality_report

    _refuse_names(source, json, plot)
    counts = {"rows": rows, "pairs": pairs, "queries": queries, "neighbours": neighbours, "seeds": seeds, "seed": seed}
    with _status() as say:
        report = _compared(source, n_components or [64, 256], eps, counts, say)
    Console().print(quality_report.tables(report))
    if json is not None:
        quality_report.write_json({"source": source.name, **report.to_dict()}, json)
        typer.echo(f"JSON: {json}")
    if plot is not None:
        quality_report.plot(report, plot, f"{source.name}: {quality_report.sampled(report)}")
        typer.echo(f"Plot: {plot}")


def _refuse_names(source: Path, json: Path | None, plot: Path | None) -> None:
    from ..evaluation.report import PLOT_SUFFIXES
    from ..files.output import UserError

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
    source: Path, n_components: list[int], eps: float, counts: dict[str, int], say: Callable[[str], None]
) -> Report:
    from ..evaluation.quality import quality, standard_sketches
    from ..files.io import open_source
    from ..files.output import UserError, one_line

    with open_source(source, lambda line: typer.echo(line, err=True)) as file:
        try:
            sketches = [sketch for k in dict.fromkeys(n_components) for sketch in standard_sketches(file.shape[1], k)]
            return quality(file, sketches, eps=eps, progress=say, **counts)
        except (TypeError, ValueError) as e:
            raise UserError(f"{source}: {one_line(e)}") from None


@contextlib.contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """A function that shows what is being done on stderr, where that is a terminal."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda line: None
        return
    with console.status("Starting") as status:
        yield lambda line: status.update(escape(f"{line} ..."))
