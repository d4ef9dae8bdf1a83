"""Compile the CPU kernels with Numba."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.ma  # Numba imports it in the first call; a process forked meanwhile would wait for that import forever
from numba import extending, types
from numba.core.caching import FunctionCache
from numba.core.compiler_lock import global_compiler_lock
from numba.core.errors import NumbaError
from numba.core.runtime.nrt import rtsys

from ... import threads
from ...laws import exact as exact_law
from ...laws import philox
from .leaf_compiler import LeafCompiler

# The last version of Numba that `_Cache` and `LeafCompiler` are known to work with: later ones work without them.
KNOWN_VERSION = (0, 68)
# Numba would also compile each function for callers in C, and each leaf for callers in Python, of which there are none.
# That takes a sixth of the time. A leaf without code for Python aborts the process if Python calls it.
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
LEAF_OPTIONS = OPTIONS | {"no_cpython_wrapper": True}
if numba.version_info.short <= KNOWN_VERSION:
    LEAF_OPTIONS["pipeline_class"] = LeafCompiler
_overload: Any = extending.overload  # Any: its type knows only some of the options


threads.fork_locks.append(global_compiler_lock)


def leaf(function: Callable[..., Any]) -> Any:
    """Declare a function that kernels call, but Python does not. It is compiled into each of them."""
    return numba.njit(function, **LEAF_OPTIONS)


def overload(function: Callable[..., Any]) -> Any:
    """Declare, by a function of argument types that returns one, the leaves that `function` stands for in kernels."""
    return _overload(function, jit_options=LEAF_OPTIONS)


def inlined(function: Callable[..., Any]) -> Any:
    """Declare a leaf that runs once per nonzero. Inlined before typing, it does no reference counting on its arrays."""
    return numba.njit(function, inline="always", **OPTIONS)


# ------------------------------------------------------------------------------------- argument types

# Dtypes known only at the call: those of the data, the sums, the result, and the indices of sparse data and results.
DATA, COMPUTE, OUT, INDEX, OUT_INDEX = "data", "compute", "out", "index", "out_index"


class Array(NamedTuple):
    """The type of an array argument. dtype : a Numba type, or the name of a dtype known only at the call."""

    dtype: Any
    ndim: int
    layout: Any = "C"
    readonly: bool = False

    def resolve(self, dtypes: dict[str, Any]) -> types.Type:
        dtype: Any = dtypes[self.dtype] if isinstance(self.dtype, str) else self.dtype
        return types.Array(dtype, self.ndim, self.layout, readonly=self.readonly)


DATA_2D = Array(DATA, 2, "A", readonly=True)  # any strides
OUT_2D = Array(OUT, 2, "A")
TILE = Array(COMPUTE, 2)
TOTALS = Array(types.float64, 3)
CODES = Array(types.int32, 2)
FLOAT64S = Array(types.float64, 1)
INT32S = Array(types.int32, 1)
INT64S = Array(types.int64, 1)
INDICES = Array(INDEX, 1, readonly=True)  # the index arrays of a sparse matrix
VALUES = Array(DATA, 1, readonly=True)
RANGE = (types.int64, types.int64)  # begin, end
FLAGS = (types.boolean, types.boolean)
LAW = (types.uint64,) * len(exact_law.Geometry._fields)  # `exact_law.Geometry`


class Kernel(NamedTuple):
    """A function that is compiled on its own, with the types of its arguments by name."""

    function: Any
    argument_types: dict[str, Any]
    result: types.Type


def kernel(result: types.Type = types.void, /, **argument_types: Any) -> Callable[[Callable[..., Any]], Kernel]:
    """Declare a kernel by the type of each argument: a Numba type, an `Array`, or a tuple of these for a tuple."""

    def declare(function: Callable[..., Any]) -> Kernel:
        assert isinstance(function, FunctionType)
        if (names := list(inspect.signature(function).parameters)) != list(argument_types):
            raise TypeError(
                f"{function.__name__} has the arguments {names}, but types are given for {list(argument_types)}"
            )
        return Kernel(function, argument_types, result)

    return declare


def _resolve(declared: Any, dtypes: dict[str, Any]) -> types.Type:
    if isinstance(declared, Array):
        return declared.resolve(dtypes)
    if isinstance(declared, tuple):
        return types.BaseTuple.from_types([_resolve(member, dtypes) for member in declared])
    return declared


# ------------------------------------------------------------------------------------- machine code

_compiled: dict[Any, Callable[..., Any]] = {}


def compiled(kernel: Kernel, **dtypes: Any) -> Callable[..., Any]:
    """Compile a kernel for the given dtypes, or load its machine code if an earlier process cached it on disk.

    Parameters
    ----------
    kernel : Kernel
    dtypes : dtype-like
        One for each name (`data`, `compute`, `out`, `index`, `out_index`) that the kernel's argument types use.

    Returns
    -------
    callable
    """
    key = id(kernel.function), *dtypes.values()
    if (code := _compiled.get(key)) is None:
        numba_types = {name: numba.from_dtype(np.dtype(dtype)) for name, dtype in dtypes.items()}
        arguments = [_resolve(declared, numba_types) for declared in kernel.argument_types.values()]
        code = _compiled[key] = _compile(kernel.function, kernel.result(*arguments))
    return code


@functools.cache
def _digest() -> str:
    """A hash of all source files that kernels are compiled from. (Numba's cache only checks the kernel's own file.)"""
    laws = Path(inspect.getfile(philox)).parent
    sources = [*laws.glob("*.py"), *Path(__file__).parent.glob("*.py")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources))).hexdigest()[:8]


class _Cache(FunctionCache):
    """Numba's cache on disk, without the imports that only compiling needs.

    Before it loads any machine code, Numba imports everything that code might call, including SciPy's linear algebra.
    That takes 0.3 s of CPU time, as much as everything else up to the first product.
    """

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        if numba.version_info.short > KNOWN_VERSION:
            return super().load_overload(signature, target_context)
        rtsys.initialize(target_context)  # machine code calls it: without it, the process aborts
        with self._guard_against_spurious_io_errors():
            return self._load_overload(signature, target_context)


def _compile(function: FunctionType, signature: Any) -> Callable[..., Any]:
    named = FunctionType(function.__code__, function.__globals__, function.__name__)
    named.__module__, named.__qualname__ = function.__module__, f"{function.__name__}_{_digest()}"
    dispatcher = numba.njit(**OPTIONS)(named)
    try:
        dispatcher._cache = _Cache(named)
    except (RuntimeError, OSError):  # neither the package's folder nor the user's cache folder is writable
        return numba.njit(signature, **OPTIONS)(named)
    try:
        dispatcher.compile(signature)
    except NumbaError:
        raise
    except Exception:  # a damaged entry: unpickling it may raise any exception
        _drop_entries(Path(dispatcher.stats.cache_path), named.__qualname__)
        try:
            dispatcher.compile(signature)
        except Exception:  # the cache is not writable: no space, no permission
            return numba.njit(signature, **OPTIONS)(named)
    dispatcher.disable_compile()
    return dispatcher


def _drop_entries(folder: Path, name: str) -> None:
    """Delete a function's files from Numba's cache: the index (.nbi) and the machine code (.nbc)."""
    for path in folder.glob(f"*{name}-*.nb[ic]"):
        path.unlink(missing_ok=True)
