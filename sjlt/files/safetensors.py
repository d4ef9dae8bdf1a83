"""Read tensors from ``.safetensors`` files: a JSON header followed by the data of all tensors."""

from __future__ import annotations

import json
import math
import os
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from .errors import UserError, one_line
from .raw import RawMatrix

MAX_HEADER = 100 << 20
DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip


class SafeTensor(RawMatrix):
    """A 2-D tensor of a ``.safetensors`` file."""

    name: str

    def description(self) -> dict[str, Any]:
        return {**super().description(), "column": self.name}


def open_safetensors(path: Path, file: FileIO, name: str | None) -> SafeTensor:
    """Open the tensor `name`, or the only one with 2 dimensions."""
    try:
        tensors, start = _header(file)
        matrices = sorted(key for key, tensor in tensors.items() if len(tensor["shape"]) == 2)
        chosen = choose(path, "tensor", name, sorted(tensors), matrices)
        tensor = tensors[chosen]
        shape, (begin, end) = tuple(tensor["shape"]), tensor["data_offsets"]
        if tensor["dtype"] not in DTYPES:
            raise UserError(f"{path}: tensor {chosen!r} holds {tensor['dtype']}: needs one of {', '.join(DTYPES)}")
        dtype = np.dtype(DTYPES[tensor["dtype"]])
        if any(type(n) is not int or n < 0 for n in (*shape, begin, end)):
            raise ValueError(f"shape {shape} at {begin}:{end}")
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{end - begin} bytes for {shape} of {dtype}")
    except (KeyError, TypeError, ValueError, RecursionError) as e:
        raise UserError(f"{path}: not a readable .safetensors file: {one_line(e)}") from None
    matrix = SafeTensor(path, file, shape, dtype, "C", start + begin)
    matrix.name = chosen
    return matrix


def _header(file: FileIO) -> tuple[dict[str, Any], int]:
    """Parse the header; return its entries by tensor name, and the byte at which the data begins."""
    size = int.from_bytes(file.read(8), "little")
    if not 2 <= size <= min(MAX_HEADER, os.fstat(file.fileno()).st_size - 8):
        raise ValueError(f"a header of {size} bytes")
    content = json.loads(file.read(size))
    if not isinstance(content, dict):
        raise TypeError("the header is not an object")
    return {key: tensor for key, tensor in content.items() if key != "__metadata__"}, 8 + size


def choose(path: Path, kind: str, name: str | None, names: list[str], matrices: list[str]) -> str:
    """Return `name` if it is given and exists in the file, otherwise the name of the only matrix.

    Parameters
    ----------
    path : Path
    kind : str
        What the format calls an array, for messages.
    name : str or None
    names, matrices : list of str
        Names of all arrays, and of those with 2 dimensions.
    """
    if name is not None:
        if name not in names:
            raise UserError(f"{path}: has no {kind} {name!r}; it has {_listed(names)}")
        return name
    if len(matrices) == 1:
        return matrices[0]
    if not matrices:
        raise UserError(f"{path}: has no {kind} with 2 dimensions; it has {_listed(names)}")
    raise UserError(f"{path}: has several {kind}s with 2 dimensions; name one with --column: {_listed(matrices)}")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "") or "nothing"
