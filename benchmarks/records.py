"""The records in benchmarks/results, and their values as cells of Markdown tables."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
ABSENT = "No record yet.\n"


@cache
def results(name: str) -> dict[str, Any]:
    """The recorded results benchmarks/results/NAME.json."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def markdown(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table; all columns but the first are right-aligned."""
    lines = [list(columns)]
    lines.append(["---", *["---:"] * (len(lines[0]) - 1)])
    lines += [["" if cell is None else str(cell) for cell in row] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def digits(value: float, n: int = 3) -> str:
    """`value` with n significant digits, without an exponent for values of moderate size."""
    text = f"{value:.{n}g}"
    return f"{value:.0f}" if "e" in text else text


def ms(seconds: float) -> str:
    """Seconds as milliseconds."""
    return digits(seconds * 1e3)


def environment(name: str) -> str:
    """One line: the machine and the versions of a record."""
    try:
        about = results(name)["environment"]
    except FileNotFoundError:
        return ABSENT
    named = (f"{key}: {value if isinstance(value, str) else digits(value)}" for key, value in about.items())
    return "; ".join(named) + "\n"
