"""Sketches of the iid law on the Triton backend. The interface is that of `triton`."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from ..kernels import iid_launch
from ..kernels.iid import multiply_iid
from . import triton as backend

if TYPE_CHECKING:
    from ..sketch import Sketch

# Gluon is experimental, and its names move: the kernel for Hopper is for versions that it was tested with. (3.6 on a
# GPU; 3.7 makes the same instructions of its loops.)
GLUON_VERSIONS = ("3.6.", "3.7.")
GLUON = not backend.INTERPRETED and triton.__version__.startswith(GLUON_VERSIONS)
if GLUON:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from ..kernels.iid_hopper import multiply_iid_hopper


def project(sketch: Sketch, x: Tensor, out: Tensor, accumulate: bool) -> None:
    """out (n, k) = x (n, d) S', or += where `accumulate`."""
    product = _product(x, out.shape[1])
    plain = not accumulate and x.dtype == out.dtype and x.data_ptr() % 16 == 0
    if plain and _is_hopper(x.device) and iid_launch.suits_hopper(product, sketch.feature_offset):
        with backend._on(x):
            _project_on_hopper(sketch, x, out, product.multiprocessors)
    else:
        _multiply(product, sketch, x, out, accumulate, forward=True)


def adjoint(sketch: Sketch, y: Tensor, out: Tensor, accumulate: bool) -> None:
    """out (n, d) = y (n, k) S, or += where `accumulate`."""
    _multiply(_product(y, out.shape[1]), sketch, y, out, accumulate, forward=False)


def _multiply(
    product: iid_launch.Product, sketch: Sketch, x: Tensor, out: Tensor, accumulate: bool, forward: bool
) -> None:
    if out.numel() == 0 or x.shape[1] == 0:
        if not accumulate:
            out.zero_()
        return
    with backend._on(x):
        chosen = iid_launch.choose(product)
        scales = backend._scales(chosen.mode, x)
        if chosen.splits == 1:
            _launch(chosen, sketch, x, out, scales, (0, *out.stride()), forward, True, accumulate)
        else:
            partial = backend._partial(chosen.splits, x, out)
            _launch(chosen, sketch, x, partial, scales, partial.stride(), forward, False, False)
            assert sketch.lanes
            backend._reduce(4 * sketch.n_components * sketch.lanes.density, partial, out, accumulate)


def _product(x: Tensor, outer: int) -> iid_launch.Product:
    (n, inner), dtype = x.shape, x.dtype
    resources = backend._resources(x.device)
    return iid_launch.Product(n, inner, outer, x.stride(), backend.DTYPES[dtype], backend._precision(dtype), *resources)


def _launch(
    chosen: iid_launch.Multiply,
    sketch: Sketch,
    x: Tensor,
    out: Tensor,
    scales: Tensor,
    strides: tuple[int, ...],
    forward: bool,
    final: bool,
    accumulate: bool,
) -> None:
    """The launch on x into out, or into partial sums."""
    assert sketch.lanes
    (n, inner), outer = x.shape, out.shape[-1]
    blocks = -(-n // chosen.vectors) * -(-outer // chosen.outer)
    multiply_iid[(blocks, chosen.splits)](
        x, out, scales, n, inner, outer, *x.stride(), *strides, *sketch.numbers[-2:],
        sketch.lanes.signs, sketch.lanes.complement, chosen.inner_per_split,
        sketch.lanes.scale(sketch.n_components) / 2,
        FORWARD=forward, BITS=sketch.lanes.bits, V=chosen.vectors, OUTER=chosen.outer, INNER=chosen.inner,
        SPAN=chosen.span, MODE=chosen.mode, EVEN=chosen.even, ALIGN=chosen.align,
        FINAL=final, ACCUMULATE=accumulate, NVIDIA=backend.NVIDIA, INTERPRETED=backend.INTERPRETED,
        num_warps=chosen.num_warps, num_stages=chosen.num_stages,
    )  # fmt: skip


# ------------------------------------------------------------------------------------- Hopper


@cache
def _is_hopper(device: torch.device) -> bool:
    """Whether the device has the instructions of `iid_hopper`, and there is a compiler for it."""
    return GLUON and backend.NVIDIA and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _project_on_hopper(sketch: Sketch, x: Tensor, out: Tensor, multiprocessors: int) -> None:
    """x S' into out; a program for each multiprocessor."""
    assert sketch.lanes
    (n, d), k = x.shape, out.shape[1]
    tile = iid_launch.HOPPER
    dtype: Any = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    block = [tile.vectors, tile.inner]
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    products = -(-n // tile.vectors) * -(-k // tile.outer)
    multiply_iid_hopper[(min(products, multiprocessors),)](
        TensorDescriptor(x, [n, d], list(x.stride()), block, layout), out, n, d, k, *out.stride(),
        *sketch.numbers[-2:], sketch.lanes.signs, sketch.lanes.complement,
        sketch.lanes.scale(k) / 2, DTYPE=dtype, BITS=sketch.lanes.bits, V=tile.vectors, OUTER=tile.outer,
        INNER=tile.inner, STAGES=tile.stages, MAKERS=tile.makers, MAKER_REGISTERS=tile.maker_registers,
        num_warps=tile.warps,
    )  # fmt: skip
