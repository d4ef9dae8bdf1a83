"""Descriptors for Hopper's tensor memory accelerator (TMA). Import this module only if `device.GLUON` is true."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .device import DTYPE_NAMES


class Address(NamedTuple):
    """The attributes that Triton reads of the tensor of a descriptor. A tensor of the caller would be kept alive."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


class Blocks:
    """Descriptors of tensors that differ only in their addresses.

    Triton checks every descriptor that is constructed, which takes as long as a launch. This class does so once. The
    sum of two objects describes several views of one tensor, which are consecutive arguments of a kernel.

    Parameters
    ----------
    dtype, shape, strides
        Of the tensors.
    block : tuple of int
        Shape of the blocks that the TMA moves.
    offset : int, default 0
        Bytes from the address of a tensor to the first element, which is at a multiple of 16 bytes.
    """

    __slots__ = ("_described",)

    def __init__(
        self,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        block: tuple[int, ...],
        offset: int = 0,
    ) -> None:
        base = Address(dtype, 0)
        descriptor = TensorDescriptor(base, list(shape), list(strides), list(block), _layout(dtype, block))
        self._described: tuple[tuple[int, dict[str, Any]], ...] = ((offset, vars(descriptor)),)

    def __add__(self, other: Blocks) -> Blocks:
        both = object.__new__(Blocks)
        both._described = self._described + other._described
        return both

    def __len__(self) -> int:
        return len(self._described)

    def at(self, address: int) -> tuple[TensorDescriptor, ...]:
        """The descriptors of the tensor at an address."""
        return tuple(_at(address + offset, attributes) for offset, attributes in self._described)


def _at(address: int, attributes: dict[str, Any]) -> TensorDescriptor:
    """The descriptor with the given attributes, except for the address."""
    descriptor = object.__new__(TensorDescriptor)
    vars(descriptor).update(attributes, base=attributes["base"]._replace(address=address))
    return descriptor


@lru_cache
def _layout(dtype: torch.dtype, block: tuple[int, ...]) -> Any:
    """The layout of a block in shared memory. One of the axes of a 3-D block has length 1."""
    if len(block) == 3:
        return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * dtype.itemsize, rank=3)
    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, DTYPE_NAMES[dtype]))
