"""Launches that skip Triton's search for a compiled kernel where its outcome is known.

Triton examines all arguments of every launch to find what to compile for, which is about half of the host's time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

MAX_COMPILED = 4096  # compiled kernels remembered

_compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}


def kind(t: Tensor) -> Hashable:
    """The properties of a tensor that Triton compiles for: its dtype, and the alignment of its memory."""
    return t.dtype, t.data_ptr() % 16


def run(
    kernel: Any,
    grid: tuple[int, int, int],
    device: int,
    arguments: tuple[Any, ...],
    key: Hashable,
    constants: Callable[[], dict[str, Any]],
) -> None:
    """Launch ``kernel[grid](*arguments, **constants())`` on `device`, which is the current one.

    Parameters
    ----------
    constants : callable
        Returns the kernel's constants and the compiler's options, by name.
    key : hashable
        Determines the constants and everything that Triton compiles for: the kinds of tensors, the block shapes of
        descriptors, whether an integer that is specialised is 1 or divisible by 16, and whether an integer without a
        declared type has 32 or 64 bits. It is hashed once per launch, so its parts should have cheap hashes.
    """
    known_by = (kernel.__name__, device, key)
    known = _compiled.get(known_by)
    if known is not None:
        compiled, values = known
        compiled[grid](*arguments, *values)
        return
    by_name = constants()
    compiled = kernel[grid](*arguments, **by_name)
    if compiled is not None:  # Triton's interpreter returns None
        if len(_compiled) >= MAX_COMPILED:
            _compiled.clear()
        _compiled[known_by] = compiled, tuple(by_name[name] for name in kernel.arg_names[len(arguments) :])
