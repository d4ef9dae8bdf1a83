"""Find the files of a source, sort them in natural order, open them, and check that they agree."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..files.errors import UserError
from ..files.opening import open_source
from ..files.source import Source
from ..files.zarr import is_zarr
from .records import MANIFEST, PLAN, committed_parts


def natural_key(name: str) -> list[tuple[int, int | str]]:
    """A sort key that puts ``2.npy`` before ``10.npy``."""
    return [(1, part) if i % 2 == 0 else (0, int(part)) for i, part in enumerate(re.split(r"([0-9]+)", name)) if part]


def find(source: Path) -> list[Path]:
    """The files of a source (a file, folder or glob), in natural order.

    In a folder, names that begin with "." or "_" are skipped, because engines use them for their own records. In a
    folder written by a plan, exactly the committed parts are used. Descriptions (``X.json`` next to ``X``) are skipped.

    Raises
    ------
    UserError
        If there are no files, or for a subfolder, an unfinished result, or a plan that is not committed.
    """
    if is_zarr(source):
        found = [source]
    elif source.is_dir():
        if (source / MANIFEST).exists() or (source / PLAN).exists():
            return committed_parts(source)
        found = [path for path in source.iterdir() if path.name[0] not in "._"]
        for path in found:
            if path.is_dir() and not is_zarr(path):
                raise UserError(f"{path}: is a subfolder: name the files with a glob, such as '{source}/*/*.npy'")
    elif source.exists() or not glob.has_magic(str(source)):
        found = [source]
    else:
        named = map(Path, glob.glob(str(source), recursive=True))
        found = [path for path in named if not path.is_dir() or is_zarr(path)]
    held = set(found)
    found = [path for path in found if path.suffix != ".json" or path.with_suffix("") not in held]
    if not found:
        raise UserError(f"{source}: no files")
    for path in found:
        if path.suffix == ".partial" and path != source:
            raise UserError(f"{path}: an unfinished result: complete it with --resume, or remove it")
    return sorted(found, key=lambda path: (natural_key(str(path)), str(path)))  # 01.npy and 1.npy have equal keys


def check_apart(source: Path, target: Path) -> None:
    """Raise UserError if the files of the target would be found as files of the source by a later run."""
    resolved, folder = target.resolve(), source.resolve()
    if source.is_dir():
        below = resolved.relative_to(folder).parts if resolved.is_relative_to(folder) else ()
        if below and (is_zarr(source) or below[0][0] not in "._"):
            raise UserError(f"{target}: is inside the source folder {source}: put the result elsewhere")
    elif glob.has_magic(str(source)) and not source.exists():
        wild = next(i for i, part in enumerate(source.parts) if glob.has_magic(part))
        pattern = (*Path(*source.parts[:wild]).resolve().parts, *source.parts[wild:])
        for name in ("part-00000.npy", "part-00000.parquet", MANIFEST):
            if _matches((target / name).parts, source.parts) or _matches((resolved / name).parts, pattern):
                raise UserError(f"{target}: its files would match the source {source}: put the result elsewhere")


def check_outside(paths: list[Path], target: Path) -> None:
    """Raise UserError if the target is the folder of an input file, or inside an input that is itself a folder."""
    resolved = target.resolve()
    for path in paths:
        if path.parent.resolve() == resolved:
            raise UserError(f"{target}: is the folder of the source")
        if path.is_dir() and resolved.is_relative_to(path.resolve()):
            raise UserError(f"{target}: is inside the source {path}: put the result elsewhere")


def _matches(names: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Whether `glob.glob` would find this path with this pattern; both are split into components."""
    if not pattern:
        return not names
    hidden = bool(names) and names[0][0] == "." and pattern[0][0] != "."
    if pattern[0] == "**":
        return _matches(names, pattern[1:]) or (bool(names) and not hidden and _matches(names[1:], pattern))
    return bool(names) and not hidden and fnmatch.fnmatchcase(names[0], pattern[0]) and _matches(names[1:], pattern[1:])


def describe(paths: list[Path], column: str | None, note: Callable[[str], None]) -> tuple[Shard, list[dict[str, Any]]]:
    """Return the properties that the files share, and the name, size, modification time and rows of each file.

    Raises
    ------
    UserError
        If two files differ in format, vector length, dtype or columns; the message names both.
    """
    top = common_folder(paths)
    inputs, first, first_path = [], None, paths[0]
    for path in paths:
        with open_source(path, note if path is paths[0] else _silent, column) as opened:
            described = opened.description()
            shard = Shard(opened, described.get("column"), measure=first is None or not first.n_features)
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


def _silent(line: str) -> None:
    """Discard a note: the note on the first file applies to the others too."""


def common_folder(paths: list[Path]) -> Path:
    """The deepest folder that contains all files."""
    return Path(os.path.commonpath([path.absolute().parent for path in paths]))


class Shard:
    """The properties of one file that all files of a source must share, or that determine device and batch size.

    Attributes
    ----------
    kind : {"npy", "parquet"}
        Format of the parts.
    n_features : int
    dtype : dtype
    columns : list of str
        All columns of a parquet file; empty for other formats.
    column : str or None
        The column, tensor, dataset or array that holds the vectors; None if a file is a single matrix.
    row_bytes, stored_bytes, chunk_rows : int
        As in `Source` and `ParquetVectors`. Sources may read the file for row_bytes, which is 0 unless `measure`.
    """

    def __init__(self, source: Source, column: str | None, measure: bool) -> None:
        from ..files.parquet_vectors import ParquetVectors

        self.path, self.n_features, self.dtype = source.path, source.shape[1], source.dtype
        self.row_bytes = source.row_bytes if measure else 0
        self.chunk_rows, self.stored_bytes = source.chunk_rows, 0
        self.column, self.kind, self.columns = column, "npy", list[str]()
        self._obstacle = source.gpu_obstacle()
        if isinstance(source, ParquetVectors):
            self.kind, self.columns = "parquet", [f"{field.name}: {field.type}" for field in source.schema]
            self.stored_bytes = source.stored_bytes

    def gpu_obstacle(self) -> str | None:
        """As in `Source`."""
        return self._obstacle

    def differs_from(self, other: Shard) -> str | None:
        """Describe the first difference, with `other` as the subject; None if there is none.

        An n_features of 0 matches any: the vector length of a parquet file without rows may be unknown.
        """
        if self.kind != other.kind:
            return f"{other.kind} rows, not {self.kind}"
        if self.columns != other.columns:
            return f"columns ({', '.join(other.columns)}), not ({', '.join(self.columns)})"
        known = self.kind == "npy" or (self.n_features and other.n_features)
        if self.n_features != other.n_features and known:
            return f"vectors of length {other.n_features}, not {self.n_features}"
        if self.dtype != other.dtype:
            return f"dtype {other.dtype}, not {self.dtype}"
        if self.column != other.column:
            return f"vectors in column {other.column!r}, not {self.column!r}"
        return None
