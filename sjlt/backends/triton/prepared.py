"""Products prepared once for all calls with the same shapes and kinds of tensors, which look them up by one key.

A law *prepares* a product: it chooses the kernels, computes grids, sizes and strides, and returns a `Call`, which only
allocates intermediate memory and launches. A `Call` serves all seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import device
from .launcher import Launch, compiled_together, remember
from .partial_sums import Sums, reduction

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec

    # call(spec, data, out) writes a product to `out`. The seed of `spec` may differ from the one at preparation. The
    # tensors may be other views than at preparation that begin at the same elements, such as transposes.
    Call = Callable[[SketchSpec, Tensor, Tensor], None]
    Prepare = Callable[[SketchSpec, Tensor, Tensor, bool], Call]

_prepared: dict[Hashable, Any] = {}


def multiply(prepare: Prepare, spec: SketchSpec, data: Tensor, out: Tensor, accumulate: bool, axis: int = 1) -> None:
    """Write a product of 2-D data to `out`, or add it to `out` if `accumulate`.

    The vectors lie along `axis` of the data and of `out`: they are columns if it is 0. (Transposing both tensors for
    every call would take longer than everything here.)

    Parameters
    ----------
    prepare : callable
        ``prepare(spec, data, out, accumulate)`` returns a `Call`. It may depend on the shapes, strides, dtypes and
        devices of the tensors, and on their addresses modulo 16.
    """
    index = data.get_device()  # -1 in Triton's interpreter
    key = (
        prepare, spec[:-2], spec.feature_offset, accumulate, axis, index, data.shape, data.stride(), out.stride(),
        data.dtype, out.dtype, data.data_ptr() % 16, out.data_ptr() % 16, device.precision(data.dtype),
        device.may_multiply(),
    )  # fmt: skip
    call = _prepared.get(key)
    if call is None:
        by_rows = (data, out) if axis else (data.t(), out.t())
        call = remember(_prepared, key, prepare(spec, *by_rows, accumulate))
        if not device.INTERPRETED:  # first find and compile its kernels; launches do nothing here
            with device.current(data), compiled_together():
                call(spec, data, out)
    if device.is_current(index):
        call(spec, data, out)
    else:
        with torch.cuda.device(index):
            call(spec, data, out)


def seeded(launch: Launch) -> Call:
    """The `Call` (spec, data, target) of a launch of (data, target) and the seed."""
    return lambda spec, data, target: launch((data, target), spec.seed)


def zero(_: SketchSpec, __: Tensor, out: Tensor) -> None:
    """The `Call` for data without features."""
    out.zero_()


def nothing(*_: Any) -> None:
    """The `Call` for a result without elements, or to which nothing is added."""


@dataclass(frozen=True, slots=True, eq=False)
class SplitSum:
    """A `Call` that writes partial sums and reduces them.

    Attributes
    ----------
    write : Call
        ``write(spec, data, memory)`` writes the unscaled partial sums.
    sums : Sums
        The layout of `memory`.
    reduce : Launch
        ``reduce((memory, out))`` adds, scales and rounds the partial sums.
    """

    write: Call
    sums: Sums
    reduce: Launch

    def __call__(self, spec: SketchSpec, data: Tensor, out: Tensor) -> None:
        memory = data.new_empty(self.sums.shape, dtype=self.sums.dtype)
        self.write(spec, data, memory)
        self.reduce((memory, out))


def split_sum(write: Call, splits: int, sums: Sums, scale: float, out: Tensor, accumulate: bool) -> SplitSum:
    """The `Call` that writes so many partial sums by `write`, and `scale` times their sum to `out`, or adds it."""
    reduce = reduction(scale, (splits, *out.shape), sums.strides, sums.dtype, out, accumulate)
    return SplitSum(write, sums, reduce)
