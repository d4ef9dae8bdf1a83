"""Choose the device that projects the rows of a file: the CPU or a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from .errors import UserError
from .source import Source


def use_gpu(device: str, rows: Source, note: Callable[[str], None]) -> bool:
    """Whether to project on a GPU, for `device` "auto", "cpu" or "cuda".

    Without an NVIDIA driver, "auto" returns False without importing torch.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"device must be auto, cpu or cuda, got {device!r}")
    if device == "cpu" or (device == "auto" and not has_driver()):
        return False
    import torch

    available, obstacle = torch.cuda.is_available(), rows.gpu_obstacle()
    if device == "auto":
        if available and obstacle:
            note(f"{rows.path}: {obstacle}; it is projected on the CPU")
        return available and not obstacle
    if obstacle:
        raise UserError(f"{rows.path}: {obstacle}; it cannot be projected on the device cuda")
    check_cuda()
    return True


def check_cuda() -> None:
    """Raise UserError unless torch finds a GPU."""
    import torch

    if not torch.cuda.is_available():
        raise UserError(f"no device cuda: torch {torch.__version__} finds no usable GPU")


def has_driver() -> bool:
    """Whether an NVIDIA driver is installed."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def device_name(gpu: bool) -> str:
    """The device's name in descriptions. It includes the GPU model, because models may round differently."""
    if not gpu:
        return "cpu"
    import torch

    return torch.cuda.get_device_name()
