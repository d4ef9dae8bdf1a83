"""Launches that skip Triton's search for a compiled kernel where its outcome is known.

Triton examines all arguments of every launch to find what to compile for, which is about half of the host's time. A
`Launch` keeps all that does not change between calls, the compiled kernel included.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import triton
from torch import Tensor, dtype
from triton import knobs
from triton.compiler.compiler import make_backend
from triton.runtime import driver

SHARED_BYTES = "SHARED_BYTES"  # the constant of kernels that address shared memory themselves: so much of it
SHARED_ALIGN = 128
MAX_KEPT = 4096  # compiled kernels, or what was prepared for calls, in one dictionary
# Triton by default generates a check for every integer operation, with wider numbers, and drops all of them unless it
# debugs. The law's words wrap on purpose. Without the checks the machine code is the same, and the first stage of the
# compiler takes half the time.
OPTIONS = {"sanitize_overflow": False}

# Versions of Triton whose `CompiledKernel.run` takes the arguments that `_start` passes, and whose `metadata` tells how
# much shared memory a launch has; neither is a documented interface.
DIRECT = triton.__version__.startswith(("3.6.", "3.7."))

Value = TypeVar("Value")
Kind = tuple[dtype, int]  # of a tensor: its dtype, and its address modulo 16
Found = tuple[Any, tuple[Any, ...]]  # a compiled kernel, and the values of its constants in the order of its arguments
_compiled: dict[Hashable, Found] = {}
_address = Tensor.data_ptr


def kind(t: Tensor) -> Kind:
    """The properties of a tensor that Triton compiles for: its dtype, and the alignment of its memory."""
    return t.dtype, t.data_ptr() % 16


def remember(kept: dict[Hashable, Value], key: Hashable, value: Value) -> Value:
    """Keep a value under a key of a dictionary, which is emptied when it is full, and return the value."""
    if len(kept) >= MAX_KEPT:
        kept.clear()
    kept[key] = value
    return value


class Launch:
    """``kernel[grid](*tensors, *before, *numbers, *after, **constants(), **OPTIONS)``, called with tensors and numbers.

    Calls that are made with tensors of the same kinds skip all that need not be repeated. Numbers that change between
    calls must be arguments that the kernel is not specialised for.

    Parameters
    ----------
    device : int
        The index of the tensors' device, which is the current one in calls.
    key, constants
        As for `run`.
    """

    __slots__ = ("_found", "after", "before", "constants", "device", "grid", "kernel", "key")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        device: int,
        before: tuple[Any, ...],
        after: tuple[Any, ...],
        key: Hashable,
        constants: Callable[[], dict[str, Any]],
    ) -> None:
        self.kernel, self.grid, self.device = kernel, grid, device
        self.before, self.after, self.key, self.constants = before, after, key, constants
        self._found: Found | None = None

    def __call__(self, tensors: tuple[Tensor, ...], *numbers: float) -> None:
        if not self.start(map(_address, tensors), *numbers):
            self.search(tensors, *numbers)

    def start(self, addresses: Iterable[Any], *numbers: float) -> bool:
        """Launch with addresses in place of tensors, and with descriptors, if the compiled kernel is known.

        Returns False, and does nothing, before the first `search`. Triton looks up who owns a tensor's memory, but
        takes a number as it is. A caller that knows where parts of a tensor lie need not make tensors of them.
        """
        found = self._found
        if found is None:
            return False
        compiled, rest = found
        _start(compiled, self.grid, self.device, (*addresses, *self.before, *numbers, *rest))
        return True

    def search(self, tensors: tuple[Any, ...], *numbers: float) -> None:
        """Launch with tensors and descriptors, from which Triton learns what to compile for."""
        arguments = (*tensors, *self.before, *numbers, *self.after)
        found = run(self.kernel, self.grid, self.device, arguments, self.key, self.constants)
        if found is not None:
            compiled, values = found
            self._found = compiled, (*self.after, *values)


def run(
    kernel: Any,
    grid: tuple[int, int, int],
    device: int,
    arguments: tuple[Any, ...],
    key: Hashable,
    constants: Callable[[], dict[str, Any]],
) -> Found | None:
    """Launch ``kernel[grid](*arguments, **constants(), **OPTIONS)`` on `device`, which is the current one.

    A kernel with the constant SHARED_BYTES gets so much shared memory beyond Triton's own (see `kernels.nvidia`).

    Parameters
    ----------
    constants : callable
        Returns the kernel's constants and the compiler's options, by name.
    key : hashable
        Determines the constants and everything that Triton compiles for: the kinds of tensors, the block shapes of
        descriptors, whether an integer that is specialised is 1 or divisible by 16, and whether an integer without a
        declared type has 32 or 64 bits. It is hashed once per launch, so its parts should have cheap hashes.

    Returns
    -------
    (compiled kernel, values of its constants), or None in Triton's interpreter, which has no compiled kernels
    """
    known_by = (kernel.__name__, device, key)
    found = _compiled.get(known_by)
    if found is not None:
        compiled, values = found
        _start(compiled, grid, device, (*arguments, *values))
        return found
    by_name = {**constants(), **OPTIONS}
    names = kernel.arg_names[len(arguments) :]
    if SHARED_BYTES in names and not knobs.runtime.interpret:
        compiled = _with_shared_memory(kernel.warmup(*arguments, grid=grid, **by_name), by_name[SHARED_BYTES])
        compiled[grid](*arguments, *(by_name[name] for name in names))
    else:
        compiled = kernel[grid](*arguments, **by_name)
    if compiled is None:
        return None
    values = tuple(by_name[name] for name in names)
    return remember(_compiled, known_by, (compiled, values))


def _with_shared_memory(compiled: Any, size: int) -> Any:
    """A kernel that was compiled and has not run, with `size` bytes of shared memory beyond those that Triton takes."""
    # Triton keeps its kernels, and returns this one to later searches and to other threads.
    of_triton = vars(compiled).setdefault("shared_memory_of_triton", compiled.metadata.shared)
    shared = -(-of_triton // SHARED_ALIGN) * SHARED_ALIGN + size
    compiled.metadata = compiled.metadata._replace(shared=shared)
    compiled.packed_metadata = make_backend(compiled.metadata.target).pack_metadata(compiled.metadata)
    return compiled


def _start(compiled: Any, grid: tuple[int, int, int], device: int, arguments: tuple[Any, ...]) -> None:
    """``compiled[grid](*arguments)``, without what Triton prepares for hooks (of profilers) where there are none."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    if not DIRECT or getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
        compiled[grid](*arguments)
        return
    stream = driver.active.get_current_stream(device)
    compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)
