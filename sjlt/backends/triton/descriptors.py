"""Tensors as Hopper's memory accelerator addresses them. Import this module only where `device.GLUON` is true."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .device import DTYPE_NAMES


class Blocks:
    """The blocks of tensors that differ in nothing but their addresses, which are multiples of 16 bytes.

    Triton checks a descriptor when it is constructed, which takes as long as a launch. These are checked once.
    """

    __slots__ = ("_attributes",)

    def __init__(
        self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]
    ) -> None:
        empty = torch.empty(0, dtype=dtype)  # no tensor of a user, whose memory would then be kept
        descriptor = TensorDescriptor(empty, list(shape), list(strides), list(block), _layout(dtype, block))
        self._attributes = vars(descriptor)

    def at(self, base: Tensor) -> TensorDescriptor:
        """The descriptor of the tensor that begins where `base` does and has its dtype."""
        descriptor = object.__new__(TensorDescriptor)
        attributes = descriptor.__dict__
        attributes.update(self._attributes)
        attributes["base"] = base
        return descriptor


@lru_cache
def _layout(dtype: torch.dtype, block: tuple[int, ...]) -> Any:
    """The layout of a block in shared memory; blocks of three axes have one of length 1."""
    if len(block) == 3:
        return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * dtype.itemsize, rank=3)
    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, DTYPE_NAMES[dtype]))
