"""Checks of the data passed to `sjlt.linalg`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..inputs.containers import is_dask, refuse_foreign

if TYPE_CHECKING:
    from .matrix import Matrix


def as_array(name: str, a: Any) -> np.ndarray:
    """Return `a` as an array; raise TypeError if converting it would silently lose information or load data."""
    if isinstance(a, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array: the mask would be lost; fill it first ({name}.filled(0))")
    if is_dask(a):
        raise TypeError(f"{name} is a dask array: load it with {name}.compute(), or pass a file")
    refuse_foreign(a)
    return np.asarray(a)


def check_matrix(name: str, shape: tuple[int, ...], dtype: Any) -> None:
    """Raise TypeError for an unsupported dtype, ValueError for a shape that is not 2-D or is empty."""
    if str(dtype) not in ("float32", "float64"):
        hint = "" if "complex" in str(dtype) else f": convert it, as with {name}.astype('float64')"
        raise TypeError(f"{name} must be float32 or float64 in native byte order; dtype {dtype} is refused{hint}")
    if len(shape) != 2:
        raise ValueError(f"{name} must have 2 dimensions, got shape {tuple(shape)}")
    if 0 in shape:
        raise ValueError(f"{name} must not be empty, got shape {tuple(shape)}")


def check_finite(matrix: Matrix, sketched: Any) -> None:
    """Raise ValueError, naming an element, if A is not finite, as its sketch shows."""
    xp = matrix.xp
    # A sum is finite only if all terms are, and takes a fifth of the time of looking at each of a tensor's elements.
    with np.errstate(all="ignore"):
        total = sketched.sum()
    if bool(xp.isfinite(total)) or bool(xp.isfinite(sketched).all()):
        return
    for start, block in matrix.blocks(matrix.shape[1]):
        block = block if not hasattr(block, "tocoo") else block.toarray()
        bad = ~xp.isfinite(block)
        if bool(bad.any()):
            i, j = (int(axis[0]) for axis in (bad.nonzero() if xp is np else bad.nonzero(as_tuple=True)))
            raise ValueError(f"A[{start + i}, {j}] is {float(block[i, j])}: A must be finite")
    raise ValueError(f"the sketch of A overflows: A has values too close to the largest {matrix.dtype}")
