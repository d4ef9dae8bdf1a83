"""Vector files of the approximate nearest-neighbour benchmarks: ``.fbin`` and related formats.

Layout: the number of vectors and their length as 32-bit integers, then the values, all little-endian.
"""

from __future__ import annotations

import os
import struct
from io import FileIO
from pathlib import Path

import numpy as np

from .errors import UserError
from .raw import RawMatrix

DTYPES = {".fbin": "<f4", ".f16bin": "<f2", ".i8bin": "i1", ".u8bin": "u1"}  # by suffix


def open_binary(path: Path, file: FileIO) -> RawMatrix:
    """Open a file of vectors whose dtype is given by its suffix."""
    header, dtype = file.read(8), np.dtype(DTYPES[path.suffix.lower()])
    if len(header) < 8:
        raise UserError(f"{path}: truncated: a {path.suffix} file has a header of 8 bytes, this one has {len(header)}")
    rows, width = struct.unpack("<II", header)
    size, expected = os.fstat(file.fileno()).st_size, 8 + rows * width * dtype.itemsize
    if size > expected:
        raise UserError(
            f"{path}: not a {path.suffix} file: {rows} x {width} of {dtype} needs {expected} bytes, the file has {size}"
        )
    return RawMatrix(path, file, (rows, width), dtype, "C", 8)
