"""Checks before any work: output name and format, disk space, batch size."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Literal

from ..inputs.checks import integer
from .atomic import is_temporary_of
from .binary import DTYPES
from .errors import UserError, one_line
from .opening import refuse_dash

Format = Literal["npy", "parquet"]

_WRITTEN: dict[str, Format] = {".npy": "npy", ".parquet": "parquet", ".pq": "parquet"}
_NOT_WRITTEN = {*DTYPES, ".safetensors", ".h5", ".hdf5", ".h5ad", ".zarr", ".npz", ".csv", ".tsv", ".txt"}


def output_format(out: Path, advice: str = "name the result .npy") -> Format | None:
    """The format given by the suffix of `out`, ignoring case; None for an unknown suffix.

    Raises
    ------
    UserError
        If the suffix belongs to a format that cannot be written. The message ends with `advice`.
    """
    suffix = out.suffix.lower()
    if suffix in _NOT_WRITTEN:
        raise UserError(f"{out}: cannot write {out.suffix} files; {advice}")
    return _WRITTEN.get(suffix)


def check_names(source: Path, out: Path, wanted: Format, suffixes: tuple[str, ...] = ("",)) -> None:
    """Raise UserError if `out` cannot be written or would overwrite the source. Does not open the source.

    Parameters
    ----------
    source, out : Path
    wanted : {"npy", "parquet"}
        The format of the result.
    suffixes : tuple of str
        Suffixes that are appended to `out` to name the files that are written.
    """
    refuse_dash(out)
    if os.path.lexists(out) and not out.is_file():
        raise UserError(f"{out}: exists and is not a regular file")
    output_format(out, f"name the result .{wanted}")
    if not out.parent.is_dir():
        raise UserError(f"{out.parent}: no such directory")
    if not source.exists():
        return  # opening it raises the error
    for path in (out.with_name(out.name + suffix) for suffix in suffixes):
        if path.exists() and path.samefile(source):
            raise UserError(f"{path}: is the source {source} itself, and cannot be written while it is read")
        if is_temporary_of(path, source.name) and out.parent.samefile(source.parent):
            raise UserError(f"{source}: has the name of a temporary file for {path}: rename it first")
    refuse_link(out)


def refuse_link(out: Path) -> None:
    """Raise UserError if `out` is a symbolic link, which a result would replace instead of the file that it names."""
    if out.is_symlink():
        raise UserError(f"{out}: is a symbolic link to {os.readlink(out)}, which the result would replace")


def check_format(out: Path, wanted: Format) -> None:
    """Raise UserError if the suffix of `out` belongs to another format. Called once the source is readable."""
    if output_format(out) not in (None, wanted):
        kind = "one dense array" if wanted == "npy" else "a parquet file"
        raise UserError(f"{out}: the result is {kind}: its name must end in .{wanted}")


def check_space(out: Path, needed: int) -> None:
    """Raise UserError if the file system of `out`, a file or an existing folder, has fewer than `needed` bytes free."""
    free = shutil.disk_usage(out if out.is_dir() else out.parent).free
    if needed > free:
        raise UserError(f"{out}: needs {needed} bytes, the file system has {free} free")


def check_batch_rows(batch_rows: int | None) -> int | None:
    """Check the number of rows per batch; None means the default and is returned unchanged."""
    try:
        return None if batch_rows is None else integer("batch_rows", batch_rows, 1, 2**62)
    except (TypeError, ValueError) as e:
        raise UserError(one_line(e)) from None
