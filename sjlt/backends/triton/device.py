"""Properties of the device, settings of torch and the version of Triton, as far as launches depend on them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from ...kernels.config.product import Device
from .launcher import DIRECT

DTYPE_NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}
INTERPRETED = bool(triton.knobs.runtime.interpret)
NVIDIA = not INTERPRETED and torch.version.hip is None
# Gluon is experimental, and its names change between versions. 3.6 was tested on a GPU; for 3.7, kernels only compile.
GLUON_VERSIONS = ("3.6.", "3.7.")
GLUON = NVIDIA and DIRECT and triton.__version__.startswith(GLUON_VERSIONS)

_CURRENT = nullcontext()


@cache
def describe(device: torch.device) -> Device:
    """The properties of a device that the choice of kernels depends on. A CPU stands for Triton's interpreter."""
    if device.type != "cuda":
        return Device(4, 232448, nvidia=NVIDIA, interpreted=INTERPRETED)
    properties: Any = torch.cuda.get_device_properties(device)
    return Device(
        multiprocessors=properties.multi_processor_count,
        shared_memory=properties.shared_memory_per_block_optin,
        hopper=GLUON and properties.major == 9,
        programmatic_launch=NVIDIA and properties.major >= 9,
        nvidia=NVIDIA,
        interpreted=INTERPRETED,
        asynchronous_copies=GLUON and properties.major >= 8,
    )


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """The constant and the compiler option of a kernel that starts while the previous one ends, if the device can."""
    programmatic = describe(device).programmatic_launch
    return {"PROGRAMMATIC_LAUNCH": programmatic, **({"launch_pdl": True} if programmatic else {})}


def precision(dtype: torch.dtype) -> str:
    """The precision set in torch for fp32 products, by its older names; "highest" for other dtypes."""
    if dtype != torch.float32:
        return "highest"
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by torch's newer names, which this function does not know
        matmul: Any = torch.backends.cuda.matmul
        return "high" if matmul.fp32_precision == "tf32" else "highest"


def may_multiply() -> bool:
    """Whether torch can multiply matrices under its settings. Deterministic algorithms may require one of cuBLAS."""
    return not torch.are_deterministic_algorithms_enabled()


@cache
def _only_one() -> bool:
    return torch.cuda.device_count() == 1


def is_current(index: int) -> bool:
    """Whether launches go to the device with this index; -1 is Triton's interpreter.

    torch.cuda must be initialized unless the index is -1.
    """
    return index < 0 or _only_one() or index == torch.cuda.current_device()


def current(x: Tensor) -> AbstractContextManager[Any]:
    """A context manager within which launches go to the device of `x`."""
    return _CURRENT if is_current(x.get_device()) else torch.cuda.device(x.device)
