"""Calls of the compiled function in which a launch of Triton ends, without the Python code before it.

For every launch, that code checks whether the kernel needs scratch memory. For every tensor descriptor, it also encodes
the descriptor for the device and copies all arguments, which takes longer than the launch itself. Here, encoded
descriptors are kept: allocators return the same few addresses again and again.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
from triton.runtime import driver

if TYPE_CHECKING:
    from .descriptors import Blocks

MAX_ENCODED = 16  # addresses per tensor of a launch, half a kilobyte each
_MODULE = "triton.backends.nvidia.driver"
_VERSION = triton.__version__[:4]


class Direct(NamedTuple):
    """The function that launches one compiled kernel, and its fixed arguments.

    Attributes
    ----------
    launch : callable
        ``launch(*grid, stream, *fixed, *arguments)``.
    fixed : tuple
        The function on the device, and options.
    together : bool
        Whether `launch` expects all arguments as one tuple.
    stream : callable
        Returns the current stream of the device with a given index.
    metadata : tuple
        For each descriptor among the arguments, how the kernel reads it.
    """

    launch: Any
    fixed: tuple[Any, ...]
    together: bool
    stream: Any
    metadata: tuple[Any, ...]


def direct(compiled: Any) -> Direct | None:
    """The direct launch of a compiled kernel; None if it is unknown for this kernel or version of Triton."""
    if _VERSION not in ("3.6.", "3.7."):
        return None
    run = compiled.run
    if type(run).__module__ != _MODULE or run.global_scratch_size or run.profile_scratch_size:
        return None
    launch, metadata = run.launch, ()
    fixed: tuple[Any, ...] = compiled.function, run.launch_cooperative_grid, run.launch_pdl
    if inspect.isfunction(launch):  # the wrapper that encodes descriptors
        wrapper = inspect.getclosurevars(launch).nonlocals
        launch, metadata = wrapper["launcher"], tuple(wrapper["tensordesc_meta"])
    scratch, hooks = (None, None), (None, None, None)
    together = _VERSION == "3.7."
    if together:
        fixed += compiled.packed_metadata, *hooks, *scratch, run.arg_annotations, run.kernel_signature
    else:
        fixed += *scratch, compiled.packed_metadata, *hooks
    return Direct(launch, fixed, together, driver.active.get_current_stream, metadata)


class Encoded:
    """The arguments of a kernel that stand for the descriptors of one tensor, by its address.

    Parameters
    ----------
    blocks : Blocks
        The descriptors.
    metadata : sequence
        `Direct.metadata` of each of them.
    """

    __slots__ = ("_blocks", "_metadata", "kept")

    def __init__(self, blocks: Blocks, metadata: Sequence[Any]) -> None:
        self._blocks, self._metadata = blocks, metadata
        self.kept: dict[int, tuple[Any, ...]] = {}

    def encode(self, address: int) -> tuple[Any, ...]:
        """The arguments for the tensor at an address, as Triton itself computes them. They are kept in `kept`."""
        make_arguments = importlib.import_module(_MODULE).make_tensordesc_arg
        pairs = zip(self._blocks.at(address), self._metadata, strict=True)
        arguments = tuple(argument for each in pairs for argument in make_arguments(*each))
        if len(self.kept) >= MAX_ENCODED:
            self.kept.clear()
        self.kept[address] = arguments
        return arguments
