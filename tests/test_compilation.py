"""Numba's cache is shared between processes: each symbol names one function, whichever process compiled it."""

import importlib
import os
import pkgutil
import subprocess
import sys
from types import FunctionType

import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

import sjlt
import sjlt.backends.cpu
from sjlt.backends.cpu.jit import Kernel


def compiled_functions():
    """Every kernel of the CPU backend and, recursively, the functions that it calls."""
    modules = [m.name for m in pkgutil.walk_packages(sjlt.backends.cpu.__path__, "sjlt.backends.cpu.")]
    values = [value for name in modules for value in vars(importlib.import_module(name)).values()]
    found, todo = {}, [value.function for value in values if isinstance(value, Kernel)]
    while todo:
        value = todo.pop()
        function = value.py_func if isinstance(value, Dispatcher) else value
        if isinstance(function, FunctionType) and id(function) not in found:
            found[id(function)] = function
            todo += [function.__globals__[n] for n in function.__code__.co_names if n in function.__globals__]
            todo += [cell.cell_contents for cell in function.__closure__ or ()]
    return list(found.values())


def test_qualified_names_are_unique():
    """A symbol in Numba's cache is a function's qualified name plus a per-process compilation counter.

    Two processes may assign the same counter to different functions. If these also share their name, as closures of
    one
    factory do, a third process that loads both confuses them: wrong results or a corrupted heap.
    """
    by_name = {}
    for pure in compiled_functions():
        cells = tuple(id(cell.cell_contents) for cell in pure.__closure__ or ())
        by_name.setdefault((pure.__module__, pure.__qualname__), set()).add((pure.__code__, cells))
    assert len(by_name) > 90
    assert [name for name, functions in by_name.items() if len(functions) > 1] == []


LOADS = """
import sys, numpy as np, sjlt
y = sjlt.project(np.ones((3, 50), np.float32), 16)
assert "numba.np.linalg" not in sys.modules and "scipy.linalg" not in sys.modules, "imported for compiling"
"""
COMPILES = """
import numba
assert numba.njit(lambda a: np.linalg.solve(a, a).sum())(np.eye(3)) == 3
assert np.array_equal(sjlt.Sketch(50, 16, density=0.5).project(np.zeros((3, 50))), np.zeros((3, 16)))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("then", ["", COMPILES])
def test_loading_from_the_cache_skips_the_compiler(tmp_path, then):
    """Later compilations in the process, including the user's own, still work.

    The test has its own cache: in a shared one, another process that compiles the same function for other dtypes
    may
    overwrite the index.
    """
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}

    def run(code):
        command = [sys.executable, "-c", f"{code}\nprint(y.tobytes().hex())"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    product, check = LOADS.strip().rsplit("\n", 1)
    compiled, loaded = run(product), run(f"{product}\n{check}{then}")
    expected = sjlt.project(np.ones((3, 50), np.float32), 16).tobytes().hex()
    assert (compiled.stdout.strip(), compiled.stderr) == (expected, "")
    assert (loaded.stdout.strip(), loaded.stderr) == (expected, "")
