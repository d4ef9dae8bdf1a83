"""Read and write the headers of NumPy's ``.npy`` format."""

from __future__ import annotations

from io import BytesIO, FileIO
from pathlib import Path

import numpy as np

from .errors import UserError, one_line
from .raw import RawMatrix

MAGIC: bytes = np.lib.format.MAGIC_PREFIX


def open_npy(path: Path, file: FileIO) -> RawMatrix:
    """Open the 2-D array in an ``.npy`` file."""
    shape, fortran, dtype = read_npy_header(path, file)
    return RawMatrix(path, file, shape, dtype, "F" if fortran else "C", file.tell())


def read_npy_header(path: Path, file: FileIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    """(shape, whether the order is Fortran's, dtype) of an ``.npy`` file, which is then read up to its data."""
    read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        version = np.lib.format.read_magic(file)
        if version not in read_header:
            raise ValueError(f"format version {version}, which only structured dtypes need")
        return read_header[version](file)
    except Exception as e:  # NumPy's parser raises many types on malformed bytes
        raise UserError(f"{path}: not a readable .npy file: {one_line(e)}") from None


def npy_header(shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    """The ``.npy`` header of a C-ordered array."""
    stream = BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, described)
    return stream.getvalue()
