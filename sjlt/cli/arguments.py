"""Parsers of the command line's numbers, whose errors say what was given."""

from __future__ import annotations

from typing import Any

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


INTEGER: dict[str, Any] = {"parser": _integer, "metavar": "INTEGER"}  # typer's own does not say what it was given
INTEGER_OR_AUTO: dict[str, Any] = {"parser": _integer_or_auto, "metavar": "INTEGER|auto"}
NUMBER: dict[str, Any] = {"parser": _number, "metavar": "NUMBER"}
