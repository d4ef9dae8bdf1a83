"""Parsers of numbers on the command line; their errors show the given text."""

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


def _number_or_auto(value: str) -> float | str:
    return value if value == "auto" else _number(value)


INTEGER: dict[str, Any] = {"parser": _integer, "metavar": "INTEGER"}  # typer's own parser does not show it
INTEGER_OR_AUTO: dict[str, Any] = {"parser": _integer_or_auto, "metavar": "INTEGER|auto"}
NUMBER: dict[str, Any] = {"parser": _number, "metavar": "NUMBER"}
NUMBER_OR_AUTO: dict[str, Any] = {"parser": _number_or_auto, "metavar": "NUMBER|auto"}
