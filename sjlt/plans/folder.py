"""The target folder of a plan: the plan's record and lock, the parts, and the manifest that commits them.

``_sjlt.plan.json``, the record, is created once, before the first part, and never replaces the record of another plan.
The name of a part follows from its index. ``_sjlt.json``, the manifest, is written when all parts are on disk, and the
record is then removed. Readers trust a folder only if it has a manifest.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..files.atomic import write_whole
from ..files.attempts import PREFIX, lock, sweep, sync_folder, unlock_and_close
from ..files.description import differences, to_json
from ..files.errors import UserError
from ..files.names import check_space
from ..files.npy import read_npy_header
from ..files.parquet_vectors import MAGIC as PARQUET_MAGIC
from .records import MANIFEST, PLAN, check_parts, read_record


def is_committed(target: Path, record: dict[str, Any]) -> bool:
    """Whether the folder already holds the complete result of this plan.

    Raises
    ------
    UserError
        If the folder belongs to another plan, the source has changed, or the folder holds something else.
    """
    if not os.path.lexists(target):
        if not target.absolute().parent.is_dir():
            raise UserError(f"{target.parent}: no such directory")
        return False
    if not target.is_dir():
        raise UserError(f"{target}: exists and is not a folder")
    names = sorted(entry.name for entry in os.scandir(target))
    for name in (MANIFEST, PLAN):
        if name in names:
            try:
                _check_same(target / name, record)
            except FileNotFoundError:  # committed just now
                return is_committed(target, record)
            return name == MANIFEST
    if held := [name for name in names if not name.startswith(PREFIX)]:
        raise UserError(f"{target}: not empty, and without a plan: holds {held[0]!r} and {len(held) - 1} more")
    return False


def _check_same(path: Path, record: dict[str, Any]) -> None:
    """Raise UserError, with the differences, unless the file `path` records the same plan."""
    held = read_record(path)
    if held.get("plan") == record["plan"]:
        return
    same_matrix = held["result"]["column"] == record["result"]["column"]  # arrays of a zarr store differ in size
    for was, now in zip(held["inputs"], record["inputs"], strict=False):
        if same_matrix and (different := differences(was, now)):
            raise UserError(f"{path}: the source has changed: {now['name']}: {'; '.join(different)}")
    ignored = {"plan", "parts", "inputs", "source"}
    different = differences(
        {key: value for key, value in held.items() if key not in ignored},
        {key: value for key, value in record.items() if key not in ignored},
    )
    for key in ("inputs", "parts"):
        if len(held[key]) != len(record[key]):
            different.append(f"{len(record[key])} {key}, was {len(held[key])}")
    raise UserError(f"{path}: belongs to a different plan: {'; '.join(different) or 'its parts differ'}")


def check_committed(target: Path, record: dict[str, Any], index: int | None = None) -> None:
    """Raise UserError if a committed folder belongs to another plan or has damaged parts.

    If `index` is given, only that part is checked.
    """
    _check_same(target / MANIFEST, record)
    parts = read_record(target / MANIFEST)["parts"]
    check_parts(target, parts if index is None else parts[index : index + 1])


def create(target: Path, needed: int) -> None:
    """Create the folder, but only if its file system has `needed` bytes free."""
    target.mkdir(exist_ok=True)
    try:
        check_space(target, needed)
    except (UserError, OSError):
        with contextlib.suppress(OSError):  # another process has written to it
            target.rmdir()
        raise


def begin(target: Path, record: dict[str, Any]) -> None:
    """Create the folder and claim it for this plan. If several processes try at once, one of them succeeds."""
    target.mkdir(exist_ok=True)
    path = target / PLAN
    if not path.exists():
        with contextlib.suppress(FileExistsError):
            write_whole(path, to_json(record), replace=False)
    with contextlib.suppress(FileNotFoundError):  # committed just now
        _check_same(path, record)


@contextlib.contextmanager
def driving(target: Path) -> Iterator[None]:
    """Lock the plan in `target`, so that no other process runs or commits it during the block.

    Hidden files of dead attempts are removed on entry, and on exit by an exception.
    """
    path = target / PLAN
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        yield  # another process has committed it, which the block must detect
        return
    try:
        if lock(descriptor) is False:
            raise UserError(f"{target}: another process is running this plan")
        sweep(target)
        yield
    except BaseException:
        sweep(target)
        raise
    finally:
        unlock_and_close(descriptor)


def missing(target: Path, record: dict[str, Any]) -> list[int]:
    """The indices of parts that do not exist yet."""
    present = {entry.name for entry in os.scandir(target)} if target.is_dir() else set()
    return [i for i, part in enumerate(record["parts"]) if part["name"] not in present]


def _size_of_whole(part: Path) -> int:
    """The size of a part in bytes. Raise UserError if it is truncated."""
    size, whole = part.stat().st_size, False
    with open(part, "rb", buffering=0) as file:
        if part.suffix == ".npy":
            with contextlib.suppress(UserError):
                shape, _, dtype = read_npy_header(part, file)
                whole = size == file.tell() + math.prod(shape) * dtype.itemsize
        else:  # ends as it begins
            file.seek(-min(size, len(PARQUET_MAGIC)), os.SEEK_END)
            whole = file.read() == PARQUET_MAGIC
    if not whole:
        raise UserError(f"{part}: is damaged, with {size} bytes: remove it to have it projected again")
    return size


def commit(target: Path, record: dict[str, Any]) -> None:
    """Write the manifest unless it exists; remove hidden files of dead attempts and the plan's record.

    Raises
    ------
    UserError
        If parts are missing or truncated, or the folder is committed already and parts are damaged.
    """
    if (target / MANIFEST).exists():
        check_committed(target, record)
    else:
        if absent := missing(target, record):
            shown = ", ".join(map(str, absent[:5])) + (", ..." if len(absent) > 5 else "")
            raise UserError(f"{target}: {len(absent)} of {len(record['parts'])} parts are missing: {shown}")
        parts = [{**part, "size": _size_of_whole(target / part["name"])} for part in record["parts"]]
        sync_folder(target)
        write_whole(target / MANIFEST, to_json({**record, "parts": parts}), replace=True)
    sweep(target)
    if (target / PLAN).exists():  # on a read-only file system, even removing an absent file would fail
        (target / PLAN).unlink(missing_ok=True)
