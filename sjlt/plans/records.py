"""Read and validate the JSON records of a target folder, its plan and its manifest; detect damaged parts."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Any

import numpy as np

from ..files.description import check_keys
from ..files.errors import UserError, one_line
from ..sketch import Sketch

MANIFEST, PLAN = "_sjlt.json", "_sjlt.plan.json"
_MAX = 2**63 - 1
_SHOWN = 5  # damaged parts listed in a message


def read_record(path: Path) -> dict[str, Any]:
    """Read a plan or manifest, and check types and ranges.

    Raises
    ------
    UserError
        If it is not a regular file, not JSON, or not a record; the message names the file and the key.
    OSError
        If it cannot be read.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: not a regular file")
    try:
        content = json.loads(path.read_bytes())
        _check(content, sizes=path.name == MANIFEST)
    except RecursionError:
        raise UserError(f"{path}: not a plan of sjlt: nested too deeply") from None
    except (ValueError, TypeError, OverflowError, SyntaxError) as e:  # NumPy parses some dtype strings as Python
        raise UserError(f"{path}: not a plan of sjlt: {one_line(e)}") from None
    return dict(content)


def _check(content: Any, sizes: bool) -> None:
    check_keys(
        "the record", content, plan=str, sjlt=str, source=str, sketch=dict, result=dict, batch_rows=int, device=str,
        inputs=list, parts=list,
    )  # fmt: skip
    if not re.fullmatch(r"[0-9a-f]{64}", content["plan"]):
        raise ValueError(f"plan is {content['plan']!r:.100}, must be 64 hexadecimal digits")
    _integer("batch_rows", content["batch_rows"], 1)
    Sketch.from_dict(content["sketch"])
    _check_result(content["result"])
    inputs, parts = content["inputs"], content["parts"]
    for key in ("inputs", "parts"):
        if not content[key]:
            raise ValueError(f"{key} is empty")
    for each in inputs:
        check_keys("an input", each, name=str, size=int, mtime_ns=int, rows=int)
        _integer("an input's size", each["size"], 0)
        _integer("an input's mtime_ns", each["mtime_ns"], -_MAX)
        _integer("an input's rows", each["rows"], 0)
    pattern = re.compile(rf"part-[0-9]+\.{content['result']['kind']}")
    for part in parts:
        check_keys("a part", part, name=str, input=int, start=int, stop=int, **({"size": int} if sizes else {}))
        if not pattern.fullmatch(part["name"]):
            raise ValueError(f"a part is named {part['name']!r:.100}, must be part-NUMBER.{content['result']['kind']}")
        _integer("a part's input", part["input"], 0, len(inputs) - 1)
        _integer("a part's stop", part["stop"], 0, inputs[part["input"]]["rows"])
        _integer("a part's start", part["start"], 0, part["stop"])
        if sizes:
            _integer("a part's size", part["size"], 0)
    if len({part["name"] for part in parts}) != len(parts):
        raise ValueError("two parts have the same name")


def _check_result(result: dict[str, Any]) -> None:
    check_keys("result", result, kind=str, source_dtype=str, dtype=str, normalize=bool, row_bytes=int)
    if result["kind"] not in ("npy", "parquet"):
        raise ValueError(f"result's kind is {result['kind']!r:.100}, must be 'npy' or 'parquet'")
    for key in ("source_dtype", "dtype"):
        if len(result[key]) > 100:
            raise ValueError(f"result's {key} is {len(result[key])} characters long")
        np.dtype(result[key])
    for key in ("column", "output_column", "given_dtype"):
        if key not in result or not isinstance(result[key], (str, type(None))):
            raise TypeError(f"result's {key!r} must be a string or null, got {result.get(key)!r:.100}")
    _integer("result's row_bytes", result["row_bytes"], 0)


def _integer(name: str, value: int, low: int, high: int = _MAX) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {value!r:.100}, must be from {low} to {high}")


def committed_parts(folder: str | Path) -> list[Path]:
    """The part files of a folder written by a plan, in row order.

    Parameters
    ----------
    folder : path

    Returns
    -------
    list of Path

    Raises
    ------
    UserError
        If the folder is not committed, or parts are missing or differ in size from the manifest.
    """
    folder = Path(folder)
    if not (folder / MANIFEST).exists():
        raise UserError(f"{folder}: not committed: {MANIFEST} is missing, so parts may be missing too")
    parts = read_record(folder / MANIFEST)["parts"]
    check_parts(folder, parts)
    return [folder / part["name"] for part in parts]


def check_parts(folder: Path, parts: list[dict[str, Any]]) -> None:
    """Raise UserError if any of these parts of the manifest are missing or have a different size."""
    if damaged := damage(folder, parts):
        raise UserError(f"{folder}: {damaged}; restore them, or remove the folder and project again")


def damage(folder: Path, parts: list[dict[str, Any]]) -> str:
    """Describe which of these parts of the manifest are missing or have a different size; empty if none are."""
    damaged = []
    for part in parts:
        try:
            status = (folder / part["name"]).stat()
        except FileNotFoundError:
            status = None
        listed = f"({MANIFEST} lists it with {part['size']} bytes)"
        if status is None or not stat.S_ISREG(status.st_mode):
            damaged.append(f"{part['name']} is missing {listed}")
        elif status.st_size != part["size"]:
            damaged.append(f"{part['name']} has {status.st_size} bytes {listed}")
    if not damaged:
        return ""
    shown = ", ".join(damaged[:_SHOWN]) + (", ..." if len(damaged) > _SHOWN else "")
    return f"{len(damaged)} of {len(parts)} parts are damaged: {shown}"
