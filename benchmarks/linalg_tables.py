"""Tables of the record of `benchmarks.linalg`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .records import ABSENT, digits, markdown, results

Cells = tuple[object, ...]


def _table(part: str, columns: tuple[str, ...], cells: Callable[[dict[str, Any], dict[str, Any]], Cells]) -> str:
    """One row per method of every problem in a part of the record; cells(row, sjlt's row) come after its name."""
    try:
        problems = results("linalg_cpu")[part]
    except FileNotFoundError:
        return ABSENT
    rows = [
        ("" if i else title, name, *cells(row, next(iter(methods.values()))))
        for title, methods in problems.items()
        for i, (name, row) in enumerate(methods.items())
    ]
    return markdown(("A", "method", *columns), rows)


def least_squares() -> str:
    """Every solver on every problem."""

    def cells(row: dict[str, Any], ours: dict[str, Any]) -> Cells:
        if "failed" in row:
            return "failed", "", ""
        return digits(row["seconds"]), digits(row["seconds"] / ours["seconds"]), f"{row['backward error']:.0e}"

    return _table("least squares", ("s", "× sjlt", "backward error"), cells)


def low_rank() -> str:
    """Times and errors for every number of iterations."""
    return _table(
        "low rank",
        ("s", "error / best"),
        lambda row, ours: (digits(row["seconds"]), f"{row['error over best']:.3f}"),
    )


def file() -> str:
    """A matrix in a file."""
    return _table(
        "file",
        ("s", "peak MiB", "reads"),
        lambda row, ours: (digits(row["seconds"]), f"{row['peak_mib']:.0f}", row["reads"]),
    )
