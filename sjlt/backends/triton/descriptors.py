"""Descriptors for Hopper's tensor memory accelerator (TMA). Import this module only if `device.GLUON` is true."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .device import DTYPE_NAMES


class Blocks:
    """A factory of descriptors of tensors that differ only in their addresses, which are multiples of 16 bytes.

    Triton checks every descriptor that is constructed, which takes as long as a launch. This class does so once.

    Parameters
    ----------
    dtype, shape, strides
        Of the tensors.
    block : tuple of int
        Shape of the blocks that the TMA moves.
    """

    __slots__ = ("_attributes",)

    def __init__(
        self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]
    ) -> None:
        empty = torch.empty(0, dtype=dtype)  # a tensor of the caller would be kept alive
        descriptor = TensorDescriptor(empty, list(shape), list(strides), list(block), _layout(dtype, block))
        self._attributes = vars(descriptor)

    def at(self, base: Tensor) -> TensorDescriptor:
        """The descriptor of the tensor at the address of `base`, which has the given dtype."""
        descriptor = object.__new__(TensorDescriptor)
        attributes = descriptor.__dict__
        attributes.update(self._attributes)
        attributes["base"] = base
        return descriptor


@lru_cache
def _layout(dtype: torch.dtype, block: tuple[int, ...]) -> Any:
    """The layout of a block in shared memory. One of the axes of a 3-D block has length 1."""
    if len(block) == 3:
        return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * dtype.itemsize, rank=3)
    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, DTYPE_NAMES[dtype]))
