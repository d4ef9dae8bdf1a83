"""Launches that skip Triton's search for a compiled kernel once its result is known.

At every launch, Triton examines all arguments to find the compiled kernel, which takes about half of the host time. A
`Launch` stores everything that does not change between calls, including the compiled kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from itertools import islice, repeat, zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

import triton
from torch import Tensor, dtype
from triton import knobs
from triton.compiler.compiler import make_backend
from triton.runtime import driver

from .direct import Direct, Encoded, direct

if TYPE_CHECKING:
    from .descriptors import Blocks

SHARED_BYTES = "SHARED_BYTES"  # constant of kernels that address shared memory themselves: the size of that memory
SHARED_ALIGN = 128
MAX_KEPT = 4096  # entries per dictionary of compiled kernels or prepared calls
# By default, Triton generates an overflow check in wider integers for every integer operation, and removes all checks
# again unless it runs in debug mode. The words of the laws overflow on purpose. Without the checks, the machine code is
# the same and the first stage of the compiler takes half the time.
OPTIONS = {"sanitize_overflow": False}

# Versions of Triton in which `CompiledKernel.run` accepts the arguments that `_start` passes, and in which `metadata`
# determines the shared memory of a launch. Neither interface is documented.
DIRECT = triton.__version__.startswith(("3.6.", "3.7."))

Value = TypeVar("Value")
Kind = tuple[dtype, int]  # the dtype of a tensor, and its address modulo 16
Found = tuple[Any, tuple[Any, ...]]  # a compiled kernel, and the values of its constants in argument order
_compiled: dict[Hashable, Found] = {}
# Within `compiled_together`, what compiles the kernels of the launches so far, by their keys in `_compiled`.
_to_compile: ContextVar[dict[Hashable, Callable[[], Any]] | None] = ContextVar("to_compile", default=None)
_address = Tensor.data_ptr


def kind(t: Tensor) -> Kind:
    """The properties of a tensor that Triton specializes on: its dtype and the alignment of its memory."""
    return t.dtype, t.data_ptr() % 16


def remember(kept: dict[Hashable, Value], key: Hashable, value: Value) -> Value:
    """Store a value in a dictionary, which is cleared first if it is full, and return the value."""
    if len(kept) >= MAX_KEPT:
        kept.clear()
    kept[key] = value
    return value


class Launch:
    """A launch ``kernel[grid](*tensors, *before, *numbers, *after, **constants(), **OPTIONS)``.

    It is called with a tuple of tensors and with numbers; only these may change between calls. Tensors must have the
    same kinds in all calls, and numbers must be arguments that Triton does not specialize on.

    Parameters
    ----------
    kernel, grid
        A Triton or Gluon kernel, and its grid.
    device : int
        Index of the tensors' device, which must be the current device during calls.
    before, after : tuple
        Arguments before and after the numbers.
    key, constants
        As for `run`.
    blocks : tuple of Blocks or None
        For the first tensors, the descriptors that the kernel receives, or None if it receives a pointer.
    """

    __slots__ = ("_found", "after", "before", "blocks", "constants", "device", "grid", "kernel", "key")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        device: int,
        before: tuple[Any, ...],
        after: tuple[Any, ...],
        key: Hashable,
        constants: Callable[[], dict[str, Any]],
        blocks: tuple[Blocks | None, ...] = (),
    ) -> None:
        self.kernel, self.grid, self.device = kernel, grid, device
        self.before, self.after, self.key, self.constants = before, after, key, constants
        self.blocks = blocks if any(blocks) else ()
        self._found: tuple[Any, tuple[Any, ...], Direct | None, tuple[Encoded | None, ...]] | None = None

    def __call__(self, tensors: tuple[Tensor, ...], *numbers: float) -> None:
        if not self.start(tuple(map(_address, tensors)), *numbers):
            self.search(tensors, *numbers)

    def start(self, addresses: tuple[int, ...], *numbers: float) -> bool:
        """Launch with addresses in place of tensors, if the compiled kernel is known.

        Before the first `search`, this does nothing and returns False. Addresses are faster than tensors, whose memory
        Triton looks up, and parts of a tensor can be passed without creating views.
        """
        found = self._found
        if found is None:
            return False
        compiled, rest, how, encoded = found
        tensors: Any = addresses
        if how is None or _hooked():
            tensors = self._described(addresses, addresses)
            _start(compiled, self.grid, self.device, (*tensors, *self.before, *numbers, *rest))
            return True
        launch, fixed, together, stream, _ = how
        if encoded:
            tensors = []
            for each, address in zip(encoded, addresses, strict=True):
                if each is None:
                    tensors.append(address)
                else:
                    tensors += each.kept.get(address) or each.encode(address)
        if together:
            launch(*self.grid, stream(self.device), *fixed, (*tensors, *self.before, *numbers, *rest))
        else:
            launch(*self.grid, stream(self.device), *fixed, *tensors, *self.before, *numbers, *rest)
        return True

    def search(self, tensors: tuple[Tensor, ...], *numbers: float) -> None:
        """Launch with tensors, for which Triton finds or compiles the kernel."""
        described = self._described(tensors, map(_address, tensors))
        arguments = (*described, *self.before, *numbers, *self.after)
        found = run(self.kernel, self.grid, self.device, arguments, self.key, self.constants)
        if found is not None:
            compiled, values = found
            how = direct(compiled) if DIRECT else None
            encoded = self._encoded(how, len(tensors)) if how is not None and self.blocks else ()
            self._found = compiled, (*self.after, *values), how, encoded

    def _described(self, tensors: tuple[Any, ...], addresses: Iterable[int]) -> Iterable[Any]:
        """The tensors, or their descriptors if the kernel receives these."""
        for blocks, tensor, address in zip_longest(self.blocks, tensors, addresses):
            if blocks is None:
                yield tensor
            else:
                yield from blocks.at(address)

    def _encoded(self, how: Direct, tensors: int) -> tuple[Encoded | None, ...]:
        """The encoded descriptors of each tensor, or None if the kernel receives a pointer."""
        metadata, blocks = iter(how.metadata), (*self.blocks, *repeat(None, tensors - len(self.blocks)))
        return tuple(None if each is None else Encoded(each, tuple(islice(metadata, len(each)))) for each in blocks)


def run(
    kernel: Any,
    grid: tuple[int, int, int],
    device: int,
    arguments: tuple[Any, ...],
    key: Hashable,
    constants: Callable[[], dict[str, Any]],
) -> Found | None:
    """Launch ``kernel[grid](*arguments, **constants(), **OPTIONS)`` on `device`, which must be the current device.

    A kernel with the constant SHARED_BYTES receives that much shared memory in addition to Triton's own (see
    `kernels.nvidia`).

    Parameters
    ----------
    key : hashable
        Determines the constants and everything that Triton specializes on: the kinds of tensors, the block shapes of
        descriptors, whether an integer is 1 or divisible by 16 (unless it is declared `do_not_specialize`), and
        whether an integer without a declared type has 32 or 64 bits. It is hashed once per launch, so its parts should
        have cheap hashes.
    constants : callable
        Returns the constants of the kernel and the compiler options, by name.

    Returns
    -------
    tuple or None
        The compiled kernel and the values of its constants; None in Triton's interpreter, which does not compile, and
        within `compiled_together`.
    """
    compiled_key = (kernel.__name__, device, key)
    found = _compiled.get(compiled_key)
    to_compile = _to_compile.get()
    if to_compile is not None:
        if found is None:
            to_compile[compiled_key] = partial(kernel.warmup, *arguments, grid=grid, **constants(), **OPTIONS)
        return None
    if found is not None:
        compiled, values = found
        _start(compiled, grid, device, (*arguments, *values))
        return found
    by_name = {**constants(), **OPTIONS}
    names = kernel.arg_names[len(arguments) :]
    if by_name.get(SHARED_BYTES) and not knobs.runtime.interpret:
        compiled = _with_shared_memory(kernel.warmup(*arguments, grid=grid, **by_name), by_name[SHARED_BYTES])
        compiled[grid](*arguments, *(by_name[name] for name in names))
    else:
        compiled = kernel[grid](*arguments, **by_name)
    if compiled is None:
        return None
    values = tuple(by_name[name] for name in names)
    return remember(_compiled, compiled_key, (compiled, values))


class _Builders(ThreadPoolExecutor):
    """Threads that compile a kernel and what Triton compiles at its first launch: a C function that launches it."""

    def submit(self, compile_kernel: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        def build() -> Any:
            compiled = compile_kernel(*args, **options)
            if DIRECT:
                driver.active.launcher_cls(compiled.src, compiled.metadata)  # stored on disk, where the launch finds it
            return compiled

        return super().submit(build)


@contextmanager
def compiled_together() -> Iterator[None]:
    """Within, new launches do not run. On exit, all their kernels are compiled, side by side if there are several.

    Triton's compiler spends most of its time outside of Python, and in other processes.
    """
    to_compile: dict[Hashable, Callable[[], Any]] = {}
    token = _to_compile.set(to_compile)
    try:
        yield
    finally:
        _to_compile.reset(token)
    if len(to_compile) > 1:  # a single kernel is compiled by its launch
        copy_context().run(_compile, to_compile.values())  # in a copy, because errors leave Triton's mode set


def only_compiles() -> bool:
    """Whether launches do nothing here, because their kernels are compiled first (`compiled_together`)."""
    return _to_compile.get() is not None


def _compile(kernels: Iterable[Callable[[], Any]]) -> None:
    with _Builders() as threads, ExitStack() as stack:
        try:
            stack.enter_context(triton.AsyncCompileMode(threads))
        except RuntimeError:  # the caller is within this mode already
            return
        for compile_kernel in kernels:
            compile_kernel()


def _with_shared_memory(compiled: Any, size: int) -> Any:
    """Give a compiled kernel that has not run yet `size` bytes of shared memory in addition to Triton's own."""
    # Triton caches the kernel and returns it again, to later searches and other threads: keep the original size.
    own = vars(compiled).setdefault("shared_memory_of_triton", compiled.metadata.shared)
    shared = -(-own // SHARED_ALIGN) * SHARED_ALIGN + size
    compiled.metadata = compiled.metadata._replace(shared=shared)
    compiled.packed_metadata = make_backend(compiled.metadata.target).pack_metadata(compiled.metadata)
    return compiled


def _hooked() -> bool:
    """Whether a hook, as of a profiler, wants to see launches."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _start(compiled: Any, grid: tuple[int, int, int], device: int, arguments: tuple[Any, ...]) -> None:
    """``compiled[grid](*arguments)``, without the preparations for hooks if there are none."""
    if not DIRECT or _hooked():
        compiled[grid](*arguments)
        return
    stream = driver.active.get_current_stream(device)
    compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)
