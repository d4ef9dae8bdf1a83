"""Number parsers whose errors quote the given text, and options that several commands share."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def _integer(value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise typer.BadParameter(f"{value!r} is not an integer") from None


def _integer_or_auto(value: str) -> int | str:
    if value == "auto":
        return value
    try:
        return int(value)
    except ValueError:
        raise typer.BadParameter(f"{value!r} is neither an integer nor 'auto'") from None


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise typer.BadParameter(f"{value!r} is not a number") from None


def _number_or_auto(value: str) -> float | str:
    return value if value == "auto" else _number(value)


INTEGER: dict[str, Any] = {"parser": _integer, "metavar": "INTEGER"}  # errors of typer's parser do not quote the text
INTEGER_OR_AUTO: dict[str, Any] = {"parser": _integer_or_auto, "metavar": "INTEGER|auto"}
NUMBER: dict[str, Any] = {"parser": _number, "metavar": "NUMBER"}
NUMBER_OR_AUTO: dict[str, Any] = {"parser": _number_or_auto, "metavar": "NUMBER|auto"}

Column = Annotated[
    str | None,
    typer.Option(
        help="Name of the column, tensor, dataset or array of IN, if several hold vectors.", show_default=False
    ),
]
MatrixColumn = Annotated[
    str | None,
    typer.Option(help="Name of the column, tensor, dataset or array to use as A, if its file holds several matrices.",
                 show_default=False),
]  # fmt: skip
SketchSeed = Annotated[int, typer.Option(help="Seed of the sketch, from -2^63 to 2^64 - 1.", **INTEGER)]
Threads = Annotated[
    int | None,
    typer.Option(help="Number of CPU threads. Default: all CPUs available to the process.", show_default=False,
                 **INTEGER),
]  # fmt: skip


def set_threads(threads: int | None) -> None:
    """Set the number of threads given by `--threads`, if any."""
    from .. import set_num_threads
    from ..files.errors import UserError

    if threads is None:
        return
    try:
        set_num_threads(threads)
    except (ValueError, OverflowError) as e:
        raise UserError(str(e)) from None
