"""Tables of the results of `benchmarks.linalg`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .records import ABSENT, digits, markdown, results

Cells = tuple[object, ...]


def _table(
    record: str, part: str, columns: tuple[str, ...], cells: Callable[[dict[str, Any], dict[str, Any]], Cells]
) -> str:
    """Return a table with one row per problem and method; cells(row, sjlt's row) gives the columns after the names."""
    try:
        problems = results(record)[part]
    except FileNotFoundError:
        return ABSENT
    rows = [
        ("" if i else title, name, *cells(row, next(iter(methods.values()))))
        for title, methods in problems.items()
        for i, (name, row) in enumerate(methods.items())
    ]
    return markdown(("A", "method", *columns), rows)


def least_squares(record: str = "linalg_cpu") -> str:
    """Return the table of every least-squares solver on every problem."""

    def cells(row: dict[str, Any], ours: dict[str, Any]) -> Cells:
        if "failed" in row:
            return "failed", "", ""
        return digits(row["seconds"]), digits(row["seconds"] / ours["seconds"]), f"{row['backward error']:.0e}"

    return _table(record, "least squares", ("s", "× sjlt", "backward error"), cells)


def low_rank(record: str = "linalg_cpu") -> str:
    """Return the table of low-rank times and errors for every number of iterations."""
    return _table(
        record,
        "low rank",
        ("s", "error / best"),
        lambda row, ours: (digits(row["seconds"]), f"{row['error over best']:.3f}"),
    )


def file(record: str = "linalg_cpu") -> str:
    """Return the table for a matrix in a file; without the growth of memory in the call for "linalg_cpu"."""
    memory = {"peak_mib": "peak MiB"}
    if record != "linalg_cpu":
        memory["peak_above_mib"] = "growth in the call, MiB"
    return _table(
        record,
        "file",
        ("s", *memory.values(), "reads"),
        lambda row, ours: (digits(row["seconds"]), *(f"{row[key]:.0f}" for key in memory), row["reads"]),
    )
