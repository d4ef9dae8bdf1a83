"""Read ranges of rows from zarr stores, which are folders: 2-D arrays, and the CSR matrices of AnnData."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .errors import UserError, one_line
from .safetensors import choose
from .source import Source
from .stored import CSR_PARTS, Stored, StoredCsr, StoredMatrix, is_csr, refuse_csc

_MARKS = ("zarr.json", ".zarray", ".zgroup")  # of format 3 and format 2


def is_zarr(path: Path) -> bool:
    """Whether `path` is the folder of a zarr array or group."""
    return any((path / mark).is_file() for mark in _MARKS)


def open_zarr(path: Path, name: str | None) -> Source:
    """Open the array or CSR group `name`. By default, the root if it is an array, AnnData's "X", or the only matrix."""
    try:
        import zarr
    except ImportError:
        raise UserError(f"{path}: zarr stores need zarr: pip install 'sjlt-triton[zarr]'") from None
    try:
        root = zarr.open(path, mode="r")
        if isinstance(root, zarr.Array):
            if name is not None:
                raise UserError(f"{path}: is a single array: it has no array {name!r}")
            return _ZarrMatrix(path, "", root)
        found: dict[str, Any] = dict(root.members(max_depth=None))
        groups = {key for key, item in found.items() if isinstance(item, zarr.Group) and is_csr(item)}
        inside = {f"{key}/{part}" for key in groups for part in CSR_PARTS}
        arrays = {key: item for key, item in found.items() if isinstance(item, zarr.Array) and key not in inside}
        matrices = sorted(groups | {key for key, item in arrays.items() if len(item.shape) == 2})
        if name is None and root.attrs.get("encoding-type") == "anndata" and "X" in found:
            name = "X"
        refuse_csc(path, name, found)
        chosen = choose(path, "array", name, sorted(groups | set(arrays)), matrices)
        return (_ZarrCsr if chosen in groups else _ZarrMatrix)(path, chosen, found[chosen])
    except UserError:
        raise
    except Exception as e:  # zarr and its codecs raise many types for damaged stores
        raise UserError(f"{path}: not a readable zarr store: {one_line(e)}") from None


class _Zarr(Stored):
    failures = (Exception,)  # every codec raises its own types

    def description(self) -> dict[str, Any]:
        """As for a file, with the total size and the latest modification time of the array's files."""
        files = _files(self.path / self.name)
        newest = max(status.st_mtime_ns for status in files)
        return {**super().description(), "size": sum(status.st_size for status in files), "mtime_ns": newest}


class _ZarrMatrix(_Zarr, StoredMatrix):
    """A 2-D array."""


class _ZarrCsr(_Zarr, StoredCsr):
    """A CSR matrix."""


def stored_size(path: Path) -> int:
    """The size in bytes of a file, or of all files of a store."""
    return sum(status.st_size for status in _files(path)) if path.is_dir() else path.stat().st_size


def _files(folder: Path) -> list[os.stat_result]:
    """The status of every file below a folder."""
    return [os.stat(os.path.join(parent, name)) for parent, _, names in os.walk(folder) for name in names]
