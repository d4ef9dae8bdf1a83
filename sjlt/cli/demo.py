"""The command ``sjlt demo``."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from .options import INTEGER
from .outputs import check_output
from .terminal import say, show, status


def demo(
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Where to save the plot: .png, .pdf or .svg. Default: sjlt-demo.png, which is overwritten.",
            show_default=False,
        ),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIRECTORY", help="Keep the vectors and results in this directory.", show_default=False),
    ] = None,
    stride: Annotated[int, typer.Option(help="Pixels between patches; 2 gives 128,956 vectors.", **INTEGER)] = 2,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the files given by --plot and --keep.")] = False,
) -> None:
    """Compare sjlt with scikit-learn on image patches.

    Cuts the two photographs that ship with scikit-learn into overlapping 16 x 16 RGB patches (768 values each),
    projects them from file to file to 256 dimensions with sjlt and with scikit-learn's SparseRandomProjection, and
    compares time, memory, distances and nearest neighbours. sjlt uses a GPU if there is one; the table names it. The
    demo needs about half a minute and 700 MB of temporary space.
    """
    import tempfile

    from ..evaluation import demo as comparison
    from ..evaluation.figures import PLOT_SUFFIXES
    from ..files.errors import UserError

    if not 1 <= stride <= comparison.MAX_STRIDE:
        raise UserError(f"stride must be from 1 to {comparison.MAX_STRIDE}, got {stride}")
    replace = force or plot is None
    plot = plot or Path("sjlt-demo.png")
    check_output(plot, [], PLOT_SUFFIXES, replace, "plot")
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        for name in comparison.FILES:
            check_output(keep / name, [], (".npy", ".json"), force)
    with contextlib.ExitStack() as stack:
        if keep is None:
            keep = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sjlt-demo-")))
        with status() as doing:
            report = comparison.compare(keep, stride, doing)
    show(comparison.table(report))
    comparison.plot(report, plot, replace=replace)
    say(f"Plot: {plot}")
