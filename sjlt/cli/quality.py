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
    context: typer.Context,
    source: Annotated[Path, typer.Argument(metavar="IN", help="A file of vectors, as for sjlt project.")],
    n_components: Annotated[
        list[int] | None,
        typer.Option(
            "-k", "--n-components", help="Number of components; may be given several times. Default: 64 and 256.",
            show_default=False, **INTEGER,
        ),
    ] = None,
    column: Column = None,
    queries: Annotated[int, typer.Option(help="Number of rows sampled as queries.", **INTEGER)] = 200,
    neighbours: Annotated[int, typer.Option(help="Number of nearest rows to find per query.", **INTEGER)] = 10,
    laws: Annotated[
        bool, typer.Option("--laws", help="Compare random laws on sampled rows instead of searching.")
    ] = False,
    eps: Annotated[
        float,
        typer.Option(help="With --laws: tolerance. A squared distance counts as kept if it changes by a factor within "
                     "1 ± eps.", **NUMBER),
    ] = 0.2,
    rows: Annotated[int, typer.Option(help="With --laws: number of rows to sample.", **INTEGER)] = 1000,
    pairs: Annotated[int, typer.Option(help="With --laws: number of pairs of rows to sample.", **INTEGER)] = 10_000,
    seeds: Annotated[
        int, typer.Option(help="With --laws: number of matrices per law, with seeds 0, 1, ...", **INTEGER)
    ] = 100,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.", **INTEGER)] = 0,
    json: Annotated[
        Path | None, typer.Option(help="Save the results to this .json file.", show_default=False)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Save a figure to this .png, .pdf or .svg file.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the files given by --json and --plot.")] = False,
) -> None:  # fmt: skip
    """Measure how well nearest-neighbour search survives projection.

    Sampled rows are used as queries of an exact search among all rows of IN, by cosine similarity and by inner product.
    For each k, the table shows the share of the nearest rows that is still found after projection, in float32, float16
    and int8, and the share found among the first 100 results (or --neighbours, if more), from which re-ranking can
    recover them. For comparison, it shows the same for principal components (PCA), for the first k features alone, and
    for the original vectors in float16 and int8. A sentence of advice follows. IN is sampled in up to two passes and
    searched in one more.

    With --laws, sampled rows are projected, for each k, with exactly 1, 2, 4 and 8 nonzeros per column, with 4 stacked
    sketches of one nonzero each, with independent entries of density 1/sqrt(features), 1/3 and 1 (Rademacher), and with
    scikit-learn's SparseRandomProjection. The table shows the ratios of squared distances (after / before), the errors
    of inner products, the variation of norms over seeds, the nearest neighbours kept, and times, next to the theory of
    a dense Gaussian matrix. Only the sampled rows of an .npy file are read.

    A CSR matrix from scipy.sparse.save_npz is loaded whole. Equal arguments give equal results, except for times.
    """
    from ..evaluation import figures
    from ..evaluation import report as tables
    from ..files.errors import printable

    if not laws:
        _check_options(context)
    if json is not None:
        check_output(json, [source], (".json",), force, "JSON file")
    if plot is not None:
        check_output(plot, [source], figures.PLOT_SUFFIXES, force, "plot")
    counts = {"rows": rows, "pairs": pairs, "queries": queries, "neighbours": neighbours, "seeds": seeds, "seed": seed}
    with status() as doing:
        report = _report(source, column, laws=laws, n_components=n_components, eps=eps, progress=doing, **counts)
    table = tables.tables(report)
    if json is not None:
        tables.write_json({"source": source.name, **report.to_dict()}, json, replace=force)
    if plot is not None:
        figures.plot(report, plot, f"{printable(source.name)}: {report.sampled}", replace=force)
    show(table)  # last: the reader of standard output may be gone
    for name, path in (("JSON", json), ("Plot", plot)):
        if path is not None:
            say(f"{name}: {path}")


def _check_options(context: typer.Context) -> None:
    """Refuse options that only --laws uses, which would be ignored."""
    from ..files.errors import UserError

    for name in ("eps", "rows", "pairs", "seeds"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UserError(f"--{name} has no effect without --laws")


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
