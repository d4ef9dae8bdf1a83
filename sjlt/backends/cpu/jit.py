"""Compilation of the CPU's functions by Numba."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core.compiler_lock import global_compiler_lock

from ...laws import dropout as dropout_law
from ...laws import exact as law
from ...laws import iid as iid_law
from ...laws import philox

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


if hasattr(os, "register_at_fork"):  # a child must not inherit the lock of a thread that was compiling
    os.register_at_fork(
        before=global_compiler_lock.acquire,
        after_in_parent=global_compiler_lock.release,
        after_in_child=global_compiler_lock.release,
    )


def leaf(function: Callable[..., Any]) -> Any:
    """A function that kernels call: compiled into each of them."""
    return numba.njit(function, **OPTIONS)


def inlined(function: Callable[..., Any]) -> Any:
    """A leaf called once a nonzero: put into its callers before typing, or its arrays' reference counts cost more."""
    return numba.njit(function, inline="always", **OPTIONS)


def _argument_type(name: str, data: Any, compute: Any, out: Any, index: Any, out_index: Any) -> types.Type:
    """The type of a kernel's argument: one name has one type in every kernel."""

    def array(dtype: Any, ndim: int, layout: Any = "C", readonly: bool = False) -> Any:
        return types.Array(dtype, ndim, layout, readonly=readonly)

    if name in ("x", "y"):
        return array(data, 2, "A", readonly=True)
    if name == "out":
        return array(out, 2, "A")
    if name in ("tile", "sums", "components"):
        return array(compute, 2)
    if name == "totals":
        return array(types.float64, 2)
    if name in ("row_sums", "row_totals"):
        return array(types.float64, 1)
    if name == "entries":
        return array(compute, 1)
    if name == "words":
        return array(types.uint32, 1)
    if name in ("places", "found"):
        return array(types.int32, 1)
    if name in ("codes", "table", "one"):
        return array(types.int32, 2)
    if name in ("indptr", "indices", "row_of"):
        return array(index, 1, readonly=True)
    if name == "data":
        return array(data, 1, readonly=True)
    if name in ("bounds", "counts"):
        return array(types.int64, 1)
    if name == "hit":
        return array(types.uint64, 1)
    if name in ("out_indptr", "out_indices"):
        return array(out_index, 1)
    if name == "out_data":
        return array(out, 1)
    if name == "geometry":
        return types.UniTuple(types.uint64, len(law.Geometry._fields))
    if name == "rule":
        return types.UniTuple(types.uint64, 5)
    if name in ("first", "last", "is_sorted", "accumulate", "forward", "dense"):
        return types.boolean
    if name in ("scale", "first_column"):
        return types.float64 if name == "scale" else types.uint64
    if name in ("i0", "i1", "o0", "o1", "k", "n", "block"):
        return types.int64
    raise TypeError(f"no kernel has had an argument {name} before: say here what it is")


@functools.cache
def _digest() -> str:
    """Of all sources that kernels are made from. Numba's cache by itself looks at a kernel's own file only."""
    here = Path(__file__).parent
    laws = (philox, law, dropout_law, iid_law)
    sources = [*(Path(inspect.getfile(module)) for module in laws), *here.glob("*.py")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources))).hexdigest()[:8]


@functools.cache
def compiled(
    kernel: Callable[..., None],
    data: Any = "f4",
    compute: Any = "f4",
    out: Any = "f4",
    index: Any = "i4",
    out_index: Any = "i4",
) -> Callable[..., None]:
    """`kernel` as machine code for these dtypes, from the cache on disk where an earlier process made it."""
    dtypes = [numba.from_dtype(np.dtype(d)) for d in (data, compute, out, index, out_index)]
    return with_types(kernel, *(_argument_type(name, *dtypes) for name in inspect.signature(kernel).parameters))


def with_types(kernel: Callable[..., None], *argument_types: types.Type) -> Callable[..., None]:
    """`kernel` as machine code for arguments of these types, likewise."""
    signature = types.void(*argument_types)
    assert isinstance(kernel, FunctionType)
    named = FunctionType(kernel.__code__, kernel.__globals__, kernel.__name__)
    named.__module__, named.__qualname__ = kernel.__module__, f"{kernel.__name__}_{_digest()}"
    try:
        return numba.njit(signature, cache=True, **OPTIONS)(named)
    except (RuntimeError, OSError):  # neither the package's folder nor the user's cache can be written, or no space
        return numba.njit(signature, **OPTIONS)(named)
