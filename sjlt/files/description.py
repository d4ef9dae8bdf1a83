"""Write, read and validate descriptions of projected files (``OUT.json``)."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np

from ..sketch import Sketch
from .errors import UserError, one_line

MAX_BYTES = 64 << 20  # largest description that is read


def to_json(content: dict[str, Any]) -> bytes:
    """Encode a description as the bytes of its file."""
    return (json.dumps(content, indent=2) + "\n").encode()


def read_description(path: Path) -> dict[str, Any]:
    """Read the description of a complete or partial result, and check types and ranges.

    Raises
    ------
    UserError
        If it is not a regular file, not JSON, or not a description; the message names the file and the key.
    OSError
        If it cannot be read.
    """
    return checked(str(path), from_json(str(path), _bytes(path)))


def from_json(place: str, content: bytes) -> Any:
    """Parse JSON; raise UserError if it is invalid. `place` names its origin in the message."""
    try:
        return json.loads(content)
    except RecursionError:
        raise UserError(f"{place}: not readable JSON: nested too deeply") from None
    except ValueError as e:
        raise UserError(f"{place}: not JSON: {one_line(e)}") from None


def checked(place: str, content: Any, *, with_column: bool = False) -> dict[str, Any]:
    """Return `content` if it is a valid description; raise UserError otherwise.

    Parameters
    ----------
    place : str
        Where `content` comes from, for the message.
    content
        Parsed JSON.
    with_column : bool, default False
        Whether the result must name a column, as in a parquet file.
    """
    try:
        _check(content)
        if with_column:
            check_keys("result", content["result"], column=str)
    except (TypeError, ValueError, OverflowError) as e:
        raise UserError(f"{place}: not a description of a projected file: {one_line(e)}") from None
    description: dict[str, Any] = content
    return description


def _bytes(path: Path) -> bytes:
    """Read a file, without blocking if it is a FIFO."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path}: not a regular file")
        if status.st_size > MAX_BYTES:
            raise UserError(
                f"{path}: too large for a description: {status.st_size} bytes, at most {MAX_BYTES} are read"
            )
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from None
    finally:
        os.close(descriptor)


def _check(content: Any) -> None:
    check_keys("the description", content, sjlt=str, sketch=dict, source=dict, result=dict, batch_rows=int, device=str)
    source, result = content["source"], content["result"]
    check_keys("source", source, name=str, shape=list, dtype=str, order=str)
    check_keys("result", result, shape=list, dtype=str)
    for name, part in (("source", source), ("result", result)):
        if len(part["shape"]) != 2:
            raise ValueError(f"{name}.shape must have 2 numbers, got {part['shape']!r}")
        for number in part["shape"]:
            _integer(f"{name}.shape", number, 0, 2**63 - 1)
        if len(part["dtype"]) > 100:
            raise ValueError(f"{name}.dtype is {len(part['dtype'])} characters long")
        _dtype(f"{name}.dtype", part["dtype"])
    for key, least in (("size", 0), ("mtime_ns", -(2**63))):  # files may be older than 1970
        if key in source:
            _integer(f"source.{key}", source[key], least, 2**63 - 1)
    _integer("batch_rows", content["batch_rows"], 1, 2**63 - 1)
    sketch = Sketch.from_dict(content["sketch"])
    rows = source["shape"][0]
    if result["shape"] != [rows, sketch.n_components] or source["shape"][1] != sketch.n_features:
        raise ValueError(f"a sketch of shape {sketch.shape} does not map {source['shape']} to {result['shape']}")
    if "rows_done" in content:
        _integer("rows_done", content["rows_done"], 0, rows)
        _segments(content.get("segments"), content["rows_done"])


def _dtype(name: str, value: str) -> None:
    try:
        np.dtype(value)
    except (SyntaxError, TypeError, ValueError):  # NumPy parses some dtype strings as Python
        raise ValueError(f"{name} is {value!r:.100}, not the name of a dtype") from None


def _segments(segments: Any, rows_done: int) -> None:
    if not isinstance(segments, list):
        raise TypeError(f"segments must be a list, got {segments!r:.100}")
    for segment in segments:
        if not isinstance(segment, list) or len(segment) != 2:
            raise ValueError(f"a segment must be [rows, checksum], got {segment!r:.100}")
        _integer("a segment's rows", segment[0], 1, rows_done)
        _integer("a segment's checksum", segment[1], 0, 2**32 - 1)
    if sum(rows for rows, _ in segments) != rows_done:
        raise ValueError(f"segments hold {sum(rows for rows, _ in segments)} rows, rows_done is {rows_done}")


def check_keys(part: str, content: Any, /, **types: type) -> None:
    """Raise TypeError or ValueError unless `content` is a dict with these keys, of these types.

    `part` names `content` in the message.
    """
    if not isinstance(content, dict):
        raise TypeError(f"{part} must be an object, got {content!r:.100}")
    for key, kind in types.items():
        if key not in content:
            raise ValueError(f"{part} has no {key!r}")
        if type(content[key]) is not kind:
            raise TypeError(f"{part}'s {key!r} must be of type {kind.__name__}, got {content[key]!r:.100}")


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} is {value!r:.100}, must be an integer from {low} to {high}")


def differences(was: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """Describe every difference between two descriptions, with both values."""
    found = []
    for key in {**now, **was}:
        a, b = was.get(key), now.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key} is {b}, was {a}")
    return found
