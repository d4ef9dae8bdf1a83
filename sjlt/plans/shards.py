"""The files of a source: found, put in natural order, opened, and compared with each other."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..files.errors import UserError, one_line
from ..files.opening import open_source
from ..files.source import Source
from ..files.zarr import is_zarr

MANIFEST, PLAN = "_sjlt.json", "_sjlt.plan.json"


def natural_key(name: str) -> list[tuple[int, int | str]]:
    """A sorting key under which ``2.npy`` comes before ``10.npy``."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"([0-9]+)", name) if part]


def find(source: Path) -> list[Path]:
    """The files of a file, folder or glob, in natural order.

    In a folder, names that begin with "." or "_" are skipped, as engines use them for their own records; of a folder
    that a plan has written, exactly the committed parts are taken.

    Raises
    ------
    UserError
        If there are none, for a subfolder, and for the result of a plan that is not committed.
    """
    if is_zarr(source):
        found = [source]
    elif source.is_dir():
        if (source / MANIFEST).exists() or (source / PLAN).exists():
            return committed_parts(source)
        found = [path for path in source.iterdir() if path.name[0] not in "._"]
        for path in found:
            if path.is_dir() and not is_zarr(path):
                raise UserError(f"{path}: a folder in a folder: name the files by a glob, such as '{source}/*/*.npy'")
    elif source.exists() or not glob.has_magic(str(source)):
        found = [source]
    else:
        named = map(Path, glob.glob(str(source), recursive=True))
        found = [path for path in named if not path.is_dir() or is_zarr(path)]
    if not found:
        raise UserError(f"{source}: no files")
    return sorted(found, key=lambda path: natural_key(str(path)))


def committed_parts(folder: str | Path) -> list[Path]:
    """The files of a folder that a plan has written, in the order of their rows.

    Raises
    ------
    UserError
        If the folder is not committed, or a part is missing or has another size than the manifest says.
    """
    folder = Path(folder)
    if not (folder / MANIFEST).exists():
        raise UserError(f"{folder}: not committed: {MANIFEST} is missing, so parts may be missing, too")
    paths = []
    for part in read_json(folder / MANIFEST)["parts"]:
        path = folder / part["name"]
        size = path.stat().st_size if path.exists() else None
        if size != part["size"]:
            found = "it is missing" if size is None else f"it has {size}"
            raise UserError(f"{path}: has {part['size']} bytes by {MANIFEST}, but {found}")
        paths.append(path)
    return paths


def read_json(path: Path) -> dict[str, Any]:
    """A plan or manifest."""
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content["parts"], list) or not isinstance(content["inputs"], list):
            raise TypeError("parts and inputs must be lists")
    except (ValueError, KeyError, TypeError) as e:
        raise UserError(f"{path}: not a plan of sjlt: {one_line(e)}") from None
    return dict(content)


def describe(paths: list[Path], column: str | None, note: Callable[[str], None]) -> tuple[Shard, list[dict[str, Any]]]:
    """Return the properties that the files share, and the name, size, time of change and rows of each.

    Raises
    ------
    UserError
        If two files differ in format, length of vectors, dtype or columns; the message names both.
    """
    top = common_folder(paths)
    inputs, first, first_path = [], None, paths[0]
    for path in paths:
        with open_source(path, note, column) as opened:
            shard, described = Shard.of(opened), opened.description()
        if first is None or (not first.n_features and not first.differs_from(shard)):
            first, first_path = shard, path
        elif difference := first.differs_from(shard):
            raise UserError(f"{path}: {difference} as in {first_path}")
        inputs.append(
            {
                "name": os.path.relpath(path.absolute(), top),
                "size": described["size"],
                "mtime_ns": described["mtime_ns"],
                "rows": described["shape"][0],
            }
        )
    assert first is not None
    return first, inputs


def common_folder(paths: list[Path]) -> Path:
    """The deepest folder that holds all files."""
    return Path(os.path.commonpath([path.absolute().parent for path in paths]))


class Shard:
    """The properties that all files of a source must share."""

    def __init__(self, kind: str, n_features: int, dtype: Any, columns: list[str], column: str | None) -> None:
        self.kind, self.n_features, self.dtype, self.columns, self.column = kind, n_features, dtype, columns, column
        self.row_bytes = self.carried_bytes = 0

    @classmethod
    def of(cls, source: Source) -> Shard:
        """The properties of an opened file."""
        from ..files.parquet_vectors import ParquetVectors

        if isinstance(source, ParquetVectors):
            columns = [f"{field.name}: {field.type}" for field in source.schema]
            shard = cls("parquet", source.shape[1], source.dtype, columns, source.column)
            shard.carried_bytes = source.carried_bytes
        else:
            shard = cls("npy", source.shape[1], source.dtype, [], None)
        shard.row_bytes = source.row_bytes
        return shard

    def differs_from(self, other: Shard) -> str | None:
        """The first difference, said of the other file; None where there is none.

        A parquet file without rows may not know the length of its vectors.
        """
        if self.kind != other.kind:
            return f"{other.kind} rows, not {self.kind}"
        if self.columns != other.columns:
            return f"columns ({', '.join(other.columns)}), not ({', '.join(self.columns)})"
        if self.n_features != other.n_features and self.n_features and other.n_features:
            return f"vectors of {other.n_features} numbers, not {self.n_features}"
        if self.dtype != other.dtype:
            return f"numbers of {other.dtype}, not {self.dtype}"
        if self.column != other.column:
            return f"vectors in column {other.column!r}, not {self.column!r}"
        return None
