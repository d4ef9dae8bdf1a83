"""Launches, without Triton's search for the compiled kernel where what it would find is known.

Triton looks at all arguments of every launch for what it compiles a kernel for, which is about half of the host's time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

MOST_COMPILED = 4096  # compiled kernels remembered

_compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}


def kind(t: Tensor) -> Hashable:
    """What Triton compiles for, of a tensor: its dtype, and the alignment of its memory."""
    return t.dtype, t.data_ptr() % 16


def run(
    kernel: Any,
    grid: tuple[int, int, int],
    device: int,
    arguments: tuple[Any, ...],
    key: Hashable,
    constants: Callable[[], dict[str, Any]],
) -> None:
    """``kernel[grid](*arguments, **constants())`` on `device`, the current one.

    constants : the kernel's constants and options, by name.  key : what decides them, and, of the arguments, all that
    Triton compiles for: the kinds of tensors, the sizes of descriptors' blocks, integers that are specialised (by being
    1 or divisible by 16) and, where a kernel does not say it, whether an integer has 32 bits or 64.
    """
    known_by = (kernel.__name__, device, key)
    known = _compiled.get(known_by)
    if known is not None:
        compiled, values = known
        compiled[grid](*arguments, *values)
        return
    by_name = constants()
    compiled = kernel[grid](*arguments, **by_name)
    if compiled is not None:  # the interpreter has nothing to remember
        if len(_compiled) >= MOST_COMPILED:
            _compiled.clear()
        _compiled[known_by] = compiled, tuple(by_name[name] for name in kernel.arg_names[len(arguments) :])
