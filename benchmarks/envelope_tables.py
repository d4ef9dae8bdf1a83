"""Tables of the results of `benchmarks.envelope`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from .records import ABSENT, digits, markdown, results

LARGE = 64e6  # bytes of data and result
SLOWER = 1.05
HEADINGS = ("shapes", "number", "of floor", "of floor + 4 µs", "of best of torch", "slower")
WORST = 10  # shapes that are listed

Row = dict[str, Any]


def quantile(values: Sequence[float], share: float) -> float:
    known = sorted(value for value in values if not math.isnan(value))
    return known[min(len(known) - 1, int(share * len(known)))] if known else math.nan


def three(values: Sequence[float]) -> str:
    """The median, the 90th percentile and the largest value."""
    return " ".join(f"{quantile(values, share):.2f}" for share in (0.5, 0.9, 1))


def summary(rows: list[Row]) -> list[tuple[str, ...]]:
    """Cells of HEADINGS by kind, size and k: the median, the 90th percentile and the largest of each ratio."""

    def whole(row: Row) -> bool:
        return bool(row["k"] >= 128 and row["k"] & (row["k"] - 1) == 0)

    def large(row: Row) -> bool:
        return bool(row["n"] * (row["d"] + row["k"]) * (4 if row["dtype"] == "float32" else 2) >= LARGE)

    groups: dict[str, Callable[[Row], bool]] = {"all": lambda row: True, "from 64 MB": large}
    groups["below 64 MB"] = lambda row: not large(row)
    for kind in ("embed", "tall", "few", "adjoint", "any"):
        groups[kind] = lambda row, kind=kind: row["kind"] == kind
    groups |= {"k = 128 * 2^a": whole, "other k": lambda row: not whole(row)}
    found = []
    for name, belongs in groups.items():
        if chosen := [row for row in rows if belongs(row)]:
            columns = [[row[key] for row in chosen] for key in ("of floor", "of floor and launch", "of best")]
            cells = [three(column) for column in columns]
            compared = [row for row in chosen if row["rivals"]]
            slower = sum(row["of best"] > SLOWER for row in compared)
            found.append((name, str(len(chosen)), *cells, f"{slower} of {len(compared)}"))
    return found


def worst(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: -row["of floor and launch"])[:WORST]


def describe(row: Row) -> str:
    layout = "transposed" if row["padding"] is None else f"padded by {row['padding']}"
    return f"{row['kind']} ({row['n']}, {row['d']}) -> {row['k']} nnz {row['nnz']} {row['dtype']} {layout}"


def ratios(row: Row) -> str:
    return f"{row['of floor']:.2f} x floor, {row['of floor and launch']:.2f} with launch, {row['of best']:.2f} of torch"


def envelope(record: str = "envelope_h200") -> str:
    """The summary of a record, and its shapes that are farthest from the floor."""
    try:
        found = results(record)
    except FileNotFoundError:
        return ABSENT
    listed = (
        (describe(row), digits(row["of floor"]), digits(row["of floor and launch"])) for row in worst(found["rows"])
    )
    about = ", ".join(f"{key} {found[key]}" for key in ("device", "seed", "sjlt", "torch", "triton"))
    about += f", {found['kernels']} kernels compiled"
    tables = markdown(HEADINGS, summary(found["rows"])), markdown(("farthest from the floor", *HEADINGS[2:4]), listed)
    return f"{about}:\n\n" + "\n".join(tables)


def cpu_named() -> str:
    """The named shapes of `benchmarks.envelope_cpu`."""
    rows = []
    for row in results("envelope_cpu")["named"]:
        stacks = f" stacks {row['stacks']}" if row["stacks"] > 1 else ""
        sizes = (digits(row["seconds"]["sjlt"] * 1e3), row["best"], digits(row["of best"]), digits(row["most"]))
        rows.append((describe(row) + stacks, *sizes))
    return markdown(("shape", "ms", "best rival", "of its time", "target"), rows)


def cpu_random() -> str:
    """Time over the best rival's of the random shapes, by kind; also without rivals in bf16 for more precise data."""
    found = results("envelope_cpu")
    kinds = ("all", *dict.fromkeys(row["kind"] for row in found["rows"]))
    rows = []
    for kind in kinds:
        chosen = [row for row in found["rows"] if kind in ("all", row["kind"])]
        cells = [kind, str(len(chosen))]
        for key in ("of best", "of best as precise"):
            values = [row[key] for row in chosen]
            cells.append(three(values))
            cells.append(str(sum(value > SLOWER for value in values)))
        rows.append(cells)
    about = f"{found['threads']} threads of an {found['processor']}, seed {found['seed']}, sjlt {found['sjlt']}"
    headings = ("of the best rival's time", "slower", "of the best as precise", "slower")
    return f"{about}:\n\n" + markdown(("shapes", "number", *headings), rows)
