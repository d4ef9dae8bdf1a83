"""Philox4x32-10: the counter-based generator behind every random entry and every dropout mask.

All backends share one source. The word functions in this folder use only ``* + & | ^ >> << //`` on words, where a word
is an unsigned 64-bit integer that holds a 32-bit value. Products of two such values fit in 64 bits, so no operation
needs a cast, and the same source runs on Python integers and NumPy arrays, and compiles with Numba and Triton. `define`
binds it to one of these.

Reference: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType, SimpleNamespace
from typing import Any

LOW = 0xFFFFFFFF  # the low 32 bits of a word
HALF = 32  # a product shifted right by this is its high half
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
unrolled = range  # for loops of fixed length; in Triton's static_range, a variable may change its type


def philox(c0, c1, c2, c3, k0, k1):
    """Four random words for the counter (c0, c1, c2, c3) and the key (k0, k1); all values have 32 bits."""
    for _ in unrolled(10):
        p0 = c0 * MULTIPLIER_0
        p1 = c2 * MULTIPLIER_1
        c0 = (p1 >> HALF) ^ c1 ^ k0
        c1 = p1 & LOW
        c2 = (p0 >> HALF) ^ c3 ^ k1
        c3 = p0 & LOW
        k0 = (k0 + WEYL_0) & LOW
        k1 = (k1 + WEYL_1) & LOW
    return c0, c1, c2, c3


def define(
    functions: Iterable[Callable[..., Any]],
    jit: Callable[[FunctionType], Any],
    word: Callable[[int], Any],
    unrolled: Any = range,
    **native: Any,
) -> SimpleNamespace:
    """Bind word functions to a backend.

    `jit` compiles a copy of each function in a separate scope, in which every integer constant of its module is
    replaced by ``word(constant)`` and every function bound before it by its compiled form.

    Parameters
    ----------
    functions : iterable of functions
        The functions to bind, callees first.
    jit : callable
        The backend's decorator: ``numba.njit``, ``triton.jit``, or the identity for NumPy.
    word : callable
        Converts a Python integer to the backend's 64-bit unsigned constant: ``numpy.uint64``, ``tl.constexpr``.
    unrolled : callable
        The backend's ``range`` for loops of fixed length, such as ``tl.static_range``.
    **native
        Further names for that scope. A function replaces the word function of the same name, as a faster equivalent.

    Returns
    -------
    SimpleNamespace
        The bound functions, by name.
    """
    scope: dict[str, Any] = {"unrolled": unrolled, **native}
    bound: dict[str, Any] = {}
    for function in functions:
        if function.__name__ in native:
            bound[function.__name__] = native[function.__name__]
            continue
        assert isinstance(function, FunctionType)
        constants = {name: word(v) for name, v in function.__globals__.items() if type(v) is int}
        scope.update(constants)
        clone = FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
        clone.__doc__, clone.__module__ = function.__doc__, function.__module__
        scope[function.__name__] = bound[function.__name__] = jit(clone)
    return SimpleNamespace(**bound)
