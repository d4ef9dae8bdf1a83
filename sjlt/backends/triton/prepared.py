"""Products of the same shapes, kinds and alignments, prepared once: a repeated call looks them up by one key.

A law *prepares* a product: it chooses the kernels, computes grids, sizes and strides, and returns a `Call`, which only
allocates what it needs in between and launches. Calls serve all seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import device
from .launcher import Launch, remember
from .partial_sums import Sums

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec

    # call(spec, data, out) writes a product to `out`. The seed of `spec` may differ from that of the preparation.
    Call = Callable[[SketchSpec, Tensor, Tensor], None]
    Prepare = Callable[[SketchSpec, Tensor, Tensor, bool], Call]

_prepared: dict[Hashable, Any] = {}


def multiply(prepare: Prepare, spec: SketchSpec, data: Tensor, out: Tensor, accumulate: bool) -> None:
    """Write a product of 2-D data to `out`, or add it if `accumulate`.

    Parameters
    ----------
    prepare : callable
        ``prepare(spec, data, out, accumulate)`` returns the call. It may depend on the shapes, strides, dtypes and
        devices of the tensors, and on their addresses modulo 16.
    """
    index = data.get_device()  # -1 in Triton's interpreter
    key = (
        prepare, spec[:-2], spec.feature_offset, accumulate, index, data.shape, data.stride(), out.stride(),
        data.dtype, out.dtype, data.data_ptr() % 16, out.data_ptr() % 16, device.precision(data.dtype),
    )  # fmt: skip
    call = _prepared.get(key)
    if call is None:
        call = remember(_prepared, key, prepare(spec, data, out, accumulate))
    if device.is_current(index):
        call(spec, data, out)
    else:
        with torch.cuda.device(index):
            call(spec, data, out)


def zero(_: SketchSpec, __: Tensor, out: Tensor) -> None:
    """The product with data that has no features."""
    out.zero_()


def nothing(*_: Any) -> None:
    """The product that has no elements, or adds nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class SplitSum:
    """A product of which a kernel writes partial sums.

    Attributes
    ----------
    write : call(spec, data, memory) that writes the unscaled partial sums to memory as `sums` describes it
    sums : the memory of the partial sums
    reduce : launch(memory, out) that adds, scales and rounds them
    """

    write: Call
    sums: Sums
    reduce: Launch

    def __call__(self, spec: SketchSpec, data: Tensor, out: Tensor) -> None:
        memory = data.new_empty(self.sums.shape, dtype=self.sums.dtype)
        self.write(spec, data, memory)
        self.reduce((memory, out))
