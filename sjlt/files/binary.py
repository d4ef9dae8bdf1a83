"""Vector files of the approximate-search benchmarks: ``.fbin`` and its relatives.

Two 32-bit numbers, the number of vectors and their length, then the numbers; all little-endian.
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
    """The vectors in a file whose suffix names their dtype."""
    header, dtype = file.read(8), np.dtype(DTYPES[path.suffix.lower()])
    if len(header) < 8:
        raise UserError(f"{path}: truncated: a {path.suffix} file begins with 8 bytes, the file has {len(header)}")
    rows, width = struct.unpack("<II", header)
    size, expected = os.fstat(file.fileno()).st_size, 8 + rows * width * dtype.itemsize
    if size > expected:
        raise UserError(
            f"{path}: not a {path.suffix} file: {rows} x {width} of {dtype} end at {expected} of {size} bytes"
        )
    return RawMatrix(path, file, (rows, width), dtype, "C", 8)
