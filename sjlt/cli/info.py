"""The command ``sjlt info``."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from .terminal import show


def info(
    path: Annotated[
        Path, typer.Argument(metavar="OUT", help="A projected file, its .json description, or a folder of parts.")
    ],
) -> None:
    """Show how a projected file or folder was made.

    Prints the sketch, the source, the device and the version of sjlt. OUT may be unfinished.
    """
    from rich.table import Table
    from rich.text import Text

    from ..files.errors import printable

    table = Table(show_header=False, box=None)
    for name, value in _lines_of(path):
        table.add_row(Text(name, style="bold"), Text(printable(value), overflow="fold"))
    show(table)


def _lines_of(path: Path) -> list[tuple[str, str]]:
    from ..files.description import read_description
    from ..files.errors import UserError
    from ..files.parquet_vectors import is_parquet, read_metadata

    if path.is_dir():
        return _folder_lines(path)
    if is_parquet(path):
        content = read_metadata(path)
        if content is None or "result" not in content:
            raise UserError(f"{path}: not a parquet file written by sjlt project, or only a part of a folder")
        column = content["result"]["column"]
        return [("column", column), *_lines(content)]
    return _lines(read_description(_description_of(path)))


def _folder_lines(path: Path) -> list[tuple[str, str]]:
    from ..plans import folder, load, records

    plan = load(path)
    record, absent = plan.record, folder.missing(path, plan.record)
    rows = sum(each["rows"] for each in record["inputs"])
    kind = record["result"]["dtype"] + (", one scale per vector" if "scale" in record["result"] else "")
    kind += ", unit length" if record["result"]["normalize"] else ""
    lines = [("result", f"{rows:,} x {plan.sketch.n_components:,} {kind}")]
    if not plan.committed:
        lines.append(("unfinished", f"{len(plan) - len(absent):,} of {len(plan):,} parts, not committed"))
    elif damaged := records.damage(path, record["parts"]):
        lines.append(("damaged", damaged))
    return [
        *lines,
        ("parts", f"{len(plan):,} {record['result']['kind']} files"),
        ("sketch", repr(plan.sketch)),
        ("law", f"version {record['sketch']['law']}"),
        ("source", record["source"]),
        ("", f"{len(record['inputs']):,} files, {record['inputs'][0]['name']} to {record['inputs'][-1]['name']}"),
        ("batch", f"{record['batch_rows']:,} rows"),
        ("device", record["device"]),
        ("made by", f"sjlt {record['sjlt']}"),
    ]


def _description_of(path: Path) -> Path:
    """The JSON file that describes `path`: that of the complete result if it exists, else of the partial one."""
    if path.suffix == ".json":
        return path
    complete, partial = (path.with_name(path.name + suffix) for suffix in (".json", ".partial.json"))
    return partial if partial.exists() and not complete.exists() else complete


def _lines(content: dict[str, Any]) -> list[tuple[str, str]]:
    from rich.filesize import decimal

    from ..sketch import Sketch

    source, result = content["source"], content["result"]
    kind = result["dtype"] + (", one scale per vector" if "scale" in result else "")
    lines = [("result", f"{_shape(result)} {kind}{', unit length' if result.get('normalized') else ''}")]
    if "rows_done" in content:
        lines.append(("unfinished", f"{content['rows_done']:,} of {result['shape'][0]:,} rows"))
    size = f", {decimal(source['size'])}" if "size" in source else ""
    lines += [
        ("sketch", repr(Sketch.from_dict(content["sketch"]))),
        ("law", f"version {content['sketch']['law']}"),
        ("source", source["name"]),
        ("", f"{_shape(source)} {source['dtype']}, {source['order']} order{size}"),
    ]
    if "mtime_ns" in source:
        modified = datetime.fromtimestamp(source["mtime_ns"] / 1e9, UTC).isoformat(" ", "seconds")
        lines.append(("", f"modified {modified}"))
    return [
        *lines,
        ("batch", f"{content['batch_rows']:,} rows"),
        ("device", content["device"]),
        ("made by", f"sjlt {content['sjlt']}"),
    ]


def _shape(array: dict[str, Any]) -> str:
    return f"{array['shape'][0]:,} x {array['shape'][1]:,}"
