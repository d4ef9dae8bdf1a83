"""2-D views of tensors for the backends, and the allocation of results."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import product
from math import inf, prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..inputs.containers import arrays_overlap

HUGE_PAGES_BYTES = 1 << 25  # from this size on, glibc maps new memory for each result


def new_result(x: Tensor, width: int, axis: int, dtype: torch.dtype | None) -> Tensor:
    """A tensor like x of length `width` along `axis`, which is the last axis, or the first of at most two.

    Its leading axes have the same memory order as those of x, as in torch's own functions, so that the rows of a
    transposed batch remain one matrix. Axes of stride 0 are outermost.
    """
    if x.ndim == 2:  # the common case: slices of a torch.Size take 0.3 us each
        rows, columns = x.shape
        return _new(x, (rows, width) if axis else (width, columns), dtype)
    if axis == 0:
        return _new(x, (width, *x.shape[1:]), dtype)
    shape = (*x.shape[:-1], width)
    if x.ndim <= 2 or x.is_contiguous():
        return _new(x, shape, dtype)
    strides, axes = x.stride(), range(x.ndim - 1)
    order = sorted(axes, key=lambda a: -(strides[a] or inf))
    if order == list(axes):
        return _new(x, shape, dtype)
    memory = _new(x, [shape[a] for a in (*order, -1)], dtype)
    return memory.permute([order.index(a) for a in axes] + [-1])


def _new(x: Tensor, shape: Sequence[int], dtype: torch.dtype | None) -> Tensor:
    if dtype is not None and dtype != x.dtype:
        return x.new_empty(shape, dtype=dtype)
    if len(shape) == 2 and type(shape[1]) is int:  # with strides and without a dtype, twice as fast as new_empty
        return x.new_empty_strided(shape, (max(shape[1], 1), 1))
    return x.new_empty(shape)


def arrays(x: Tensor, out: Tensor, axis: int) -> Iterable[tuple[Any, Any]]:
    """`matrices` of CPU tensors, as arrays: views of arrays are faster than views of tensors."""
    if x.ndim > 2:
        return [(array(a), array(b)) for a, b in matrices(x, out, axis)]
    rows, result = array(x), array(out)
    if x.ndim == 1:
        return ((rows[None], result[None]),)
    return ((rows, result),) if axis else ((rows.T, result.T),)


def matrices(x: Tensor, out: Tensor, axis: int) -> Iterable[tuple[Tensor, Tensor]]:
    """Split x and out into pairs of matrices with the vectors along `axis` as rows: as few as possible, no copies."""
    if x.ndim == 2:
        return ((x, out),) if axis else ((x.t(), out.t()),)
    if x.ndim == 1:
        return ((x.unsqueeze(0), out.unsqueeze(0)),)
    if x.is_contiguous() and out.is_contiguous():
        n = prod(x.shape[:-1])
        return ((x.view(n, x.shape[-1]), out.view(n, out.shape[-1])),)
    return _strided_matrices(x, out)


def _strided_matrices(x: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    axes = _merged(x.shape[:-1], x.stride()[:-1], out.stride()[:-1])
    longest = max(axes)
    axes.remove(longest)
    n, *steps = longest
    for index in product(*(range(a[0]) for a in axes)):
        yield tuple(  # type: ignore[misc]
            t.as_strided(
                (n, t.shape[-1]),
                (steps[which], t.stride(-1)),
                t.storage_offset() + sum(i * a[1 + which] for i, a in zip(index, axes, strict=True)),
            )
            for which, t in enumerate((x, out))
        )


def _merged(shape: Sequence[int], x_strides: Sequence[int], out_strides: Sequence[int]) -> list[tuple[int, int, int]]:
    """The axes as (length, x's stride, out's stride), merged where the strides of both tensors allow it; at least one.

    The order of rows does not matter, so axes are sorted by out's strides.
    """
    merged = [(1, 0, 0)]
    for n, i, j in sorted(zip(shape, x_strides, out_strides, strict=True), key=lambda axis: axis[2]):
        length, x_step, out_step = merged[-1]
        if length == 1:
            merged[-1] = (n, i, j)
        elif i == length * x_step and j == length * out_step:
            merged[-1] = (n * length, x_step, out_step)
        elif n != 1:
            merged.append((n, i, j))
    return merged


# ------------------------------------------------------------------------------------- memory


def array(x: Tensor) -> Any:
    """A CPU tensor as an array on the same memory. NumPy has no bf16, so the CPU backend defines a dtype for it."""
    if x.requires_grad:
        x = x.detach()
    if x.dtype != torch.bfloat16:
        return x.numpy()
    return x.view(torch.int16).numpy().view(_bfloat16())


@cache
def _bfloat16() -> Any:
    """The dtype, without loading Numba before it is needed. (Without the cache, an import statement takes 1 us.)"""
    from ..backends.cpu.bits import BFLOAT16

    return BFLOAT16


def use_huge_pages(out: Tensor) -> None:
    """Ask Linux for huge pages for a CPU tensor that was just allocated, as NumPy does for its arrays.

    First writing to pages of 4 KiB takes most of the time: 16 ms of the 22 ms for an adjoint of 65 MB on Zen 4, 3.5 ms
    with huge pages.
    """
    if (madvise := _madvise()) is not None:
        start = -(-out.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        madvise(start, out.data_ptr() + _extent(out) - start, mmap.MADV_HUGEPAGE)  # advice: an error changes nothing


@cache
def _madvise() -> Any:
    """The C library's function, or None where it or the advice does not exist."""
    if sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return madvise


def check_memory(name: str, x: Tensor) -> None:
    """Raise RuntimeError if the tensor's memory was released, like that of sharded parameters between uses."""
    if not x.data_ptr() and x.numel():
        raise RuntimeError(f"{name} has {x.numel()} elements, but no memory is allocated for them")


def share_memory(x: Tensor, out: Tensor) -> bool:
    """Whether two tensors share memory."""
    if not (x.numel() and out.numel()):
        return False
    x_start, out_start = x.data_ptr(), out.data_ptr()
    if x_start + _extent(x) <= out_start or out_start + _extent(out) <= x_start:
        return False
    return arrays_overlap(np.asarray(_Addresses(x)), np.asarray(_Addresses(out)))


class _Addresses:
    """A tensor's memory as a NumPy array whose addresses can be compared, but not read: it may be device memory."""

    def __init__(self, x: Tensor) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (x.data_ptr(), True),
            "typestr": f"|V{x.itemsize}",
            "shape": tuple(x.shape),
            "strides": tuple(step * x.itemsize for step in x.stride()),
        }


def _extent(x: Tensor) -> int:
    """Bytes from the start of a non-empty tensor's first element to the end of its last."""
    return x.itemsize * (1 + sum(step * (n - 1) for step, n in zip(x.stride(), x.shape, strict=True)))
