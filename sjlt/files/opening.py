"""`open_source`: choose the reader of a file."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from .binary import DTYPES, open_binary
from .csr import CsrMatrix
from .errors import UserError
from .hdf5 import MAGIC as HDF5_MAGIC
from .hdf5 import open_hdf5
from .npy import MAGIC, open_npy
from .parquet_vectors import MAGIC as PARQUET_MAGIC
from .parquet_vectors import ParquetVectors
from .safetensors import open_safetensors
from .source import Source
from .zarr import is_zarr, open_zarr


def open_source(path: Path, note: Callable[[str], None], column: str | None = None) -> Source:
    """Open the matrix in a file. The first bytes determine the format, or else the suffix.

    Parameters
    ----------
    path : Path
    note : callable
        Called with messages for the user.
    column : str, optional
        Name of the column of a parquet file, tensor of a safetensors file, dataset of an HDF5 file, or array of a zarr
        store; required if several are matrices.

    Raises
    ------
    UserError, OSError
        If the file does not exist, is not a regular file, or has an unknown format.
    """
    refuse_dash(path)
    if is_zarr(path):
        return open_zarr(path, column)
    file = _open_regular(path)
    try:
        magic = file.read(len(MAGIC))
        file.seek(0)
        if not magic:
            raise UserError(f"{path}: is empty")
        if magic.startswith(PARQUET_MAGIC):
            file.close()
            return ParquetVectors(path, column)
        if magic == HDF5_MAGIC:
            file.close()
            return open_hdf5(path, column)
        suffix = path.suffix.lower()
        if suffix == ".safetensors":
            return open_safetensors(path, file, column)
        if column is not None:
            raise UserError(f"{path}: not a parquet file: it has no column {column!r}")
        if suffix in DTYPES:
            return open_binary(path, file)
        if magic == MAGIC:
            return open_npy(path, file)
        if magic.startswith(b"PK"):
            return CsrMatrix(path, file, note)
        if suffix in (".csv", ".tsv", ".txt"):
            raise UserError(f"{path}: cannot read text: convert it once with numpy.save(OUT, numpy.loadtxt(IN, ...))")
        raise UserError(f"{path}: neither .npy nor .npz, nor another supported format: it begins with {magic!r}")
    except BaseException as e:
        file.close()
        if isinstance(e, OSError) and e.filename is None:
            raise OSError(e.errno, e.strerror, str(path)) from None
        raise


def refuse_dash(path: Path) -> None:
    """Raise UserError for "-", which means standard input or output to other programs."""
    if str(path) == "-":
        raise UserError(
            "standard input and output are not supported: name a file, or give the absolute path of one called -"
        )


def _open_regular(path: Path) -> FileIO:
    """Open a regular file, without blocking if it is a FIFO."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as e:
        if e.errno == errno.ENXIO:  # a socket, or a device without a driver
            raise UserError(f"{path}: not a regular file") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"{path}: not a regular file")
    return FileIO(descriptor, "rb")
