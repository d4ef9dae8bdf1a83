"""The command ``sjlt quality``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import INTEGER, NUMBER, Column
from .outputs import check_output
from .terminal import note, say, show, status

if TYPE_CHECKING:
    from ..evaluation.results import Report, SearchReport


def quality(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A file of vectors, as for sjlt project.")],
    n_components: Annotated[
        list[int] | None,
        typer.Option(
            "-k", "--n-components", help="Components; may be repeated. Default: 64 and 256.", show_default=False,
            **INTEGER,
        ),
    ] = None,
    column: Column = None,
    queries: Annotated[int, typer.Option(help="Number of sampled rows that are queries.", **INTEGER)] = 200,
    neighbours: Annotated[int, typer.Option(help="Number of nearest rows to find per query.", **INTEGER)] = 10,
    laws: Annotated[bool, typer.Option("--laws", help="Compare random laws by sampled distances instead.")] = False,
    eps: Annotated[
        float, typer.Option(help="With --laws: squared distances within 1 ± eps count as kept.", **NUMBER)
    ] = 0.2,
    rows: Annotated[int, typer.Option(help="With --laws: number of rows to sample.", **INTEGER)] = 1000,
    pairs: Annotated[int, typer.Option(help="With --laws: number of sampled pairs of these rows.", **INTEGER)] = 10_000,
    seeds: Annotated[int, typer.Option(help="With --laws: matrices per law, with seeds 0, 1, ...", **INTEGER)] = 100,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.", **INTEGER)] = 0,
    json: Annotated[
        Path | None, typer.Option(help="Where to save the numbers: .json.", show_default=False)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Where to save a figure: .png, .pdf or .svg.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace these files.")] = False,
) -> None:  # fmt: skip
    """Show whether search among the rows of IN survives projection.

    Sampled rows are the queries of an exact search among all rows of IN, by cosine similarity and by inner product. For
    each k the table shows how many of the nearest rows are still found after projection, also in float16 and int8, and
    how many are found among the first 100 (or --neighbours, if more), where re-ranking would find them. It shows the
    same for principal components (PCA), for the first k numbers of each vector, and for the originals in float16 and
    int8. A sentence of advice follows. IN is searched in one pass, after up to two passes that sample it.

    With --laws, sampled rows of IN are projected, for each k, with exactly 1, 2, 4 and 8 nonzeros per column, with 4
    stacked sketches of one nonzero each, with independent entries of density 1/sqrt(features), 1/3 and 1 (Rademacher),
    and by scikit-learn's SparseRandomProjection. The table shows the distribution of squared distances (after /
    before), errors of inner products, the variation of norms over the seeds, the nearest neighbours kept, and times,
    beside the theory of a dense Gaussian matrix. Only the sampled rows of an .npy file are read.

    A CSR matrix of scipy.sparse.save_npz is loaded whole. Equal arguments give equal numbers, except for times.
    """
    from ..evaluation import figures
    from ..evaluation import report as tables
    from ..files.errors import printable

    if json is not None:
        check_output(json, [source], (".json",), force, "JSON file")
    if plot is not None:
        check_output(plot, [source], figures.PLOT_SUFFIXES, force, "plot")
    counts = {"rows": rows, "pairs": pairs, "queries": queries, "neighbours": neighbours, "seeds": seeds, "seed": seed}
    with status() as doing:
        report = _report(source, column, laws=laws, n_components=n_components, eps=eps, progress=doing, **counts)
    show(tables.tables(report))
    if json is not None:
        tables.write_json({"source": source.name, **report.to_dict()}, json, replace=force)
        say(f"JSON: {json}")
    if plot is not None:
        figures.plot(report, plot, f"{printable(source.name)}: {report.sampled}", replace=force)
        say(f"Plot: {plot}")


def _report(source: Path, column: str | None, **options: Any) -> Report | SearchReport:
    from ..evaluation.quality import quality
    from ..files.errors import UserError, one_line
    from ..files.opening import open_source

    with open_source(source, note, column) as file:
        try:
            report: Report | SearchReport = quality(file, **options)
        except (TypeError, ValueError) as e:
            raise UserError(f"{source}: {one_line(e)}") from None
    return report
