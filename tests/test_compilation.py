"""Machine code that processes keep for each other: one name, one function, whichever process compiled it."""

import importlib
import pkgutil

from numba.core.dispatcher import Dispatcher

import sjlt.backends.cpu


def compiled_functions():
    """Every Numba function of the CPU backend, with those that it calls, and those that these call."""
    modules = [m.name for m in pkgutil.walk_packages(sjlt.backends.cpu.__path__, "sjlt.backends.cpu.")]
    found, todo = {}, [value for name in modules for value in vars(importlib.import_module(name)).values()]
    while todo:
        value = todo.pop()
        if isinstance(value, Dispatcher) and id(value) not in found:
            found[id(value)] = value
            function = value.py_func
            todo += [function.__globals__[n] for n in function.__code__.co_names if n in function.__globals__]
            todo += [cell.cell_contents for cell in function.__closure__ or ()]
    return list(found.values())


def test_functions_of_one_name_are_one_function():
    """A symbol in Numba's cache is a function's qualified name and a number that counts a process's compilations.

    Two processes may give the same number to different functions. Where these also share their name, as closures
    of one factory do, a third process that loads both takes one for the other: wrong results or a damaged heap.
    """
    by_name = {}
    for function in compiled_functions():
        pure = function.py_func
        cells = tuple(id(cell.cell_contents) for cell in pure.__closure__ or ())
        by_name.setdefault((pure.__module__, pure.__qualname__), set()).add((pure.__code__, cells))
    assert len(by_name) > 20
    assert [name for name, functions in by_name.items() if len(functions) > 1] == []
