"""Sketches of the iid law on the Triton backend. The interface is that of `triton`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..checks import signed
from ..kernels import iid_launch
from ..kernels.iid import multiply_iid
from ..kernels.launch import FP16_PAIR, SAMPLE
from ..kernels.tiles import scale_vectors
from . import triton as backend

if TYPE_CHECKING:
    from ..sketch import Sketch


def project(sketch: Sketch, x: Tensor, out: Tensor, accumulate: bool) -> None:
    """out (n, k) = x (n, d) S', or += where `accumulate`."""
    _multiply(sketch, x, out, accumulate, forward=True)


def adjoint(sketch: Sketch, y: Tensor, out: Tensor, accumulate: bool) -> None:
    """out (n, d) = y (n, k) S, or += where `accumulate`."""
    _multiply(sketch, y, out, accumulate, forward=False)


def _multiply(sketch: Sketch, x: Tensor, out: Tensor, accumulate: bool, forward: bool) -> None:
    (n, inner), outer = x.shape, out.shape[1]
    if out.numel() == 0 or inner == 0:
        if not accumulate:
            out.zero_()
        return
    with backend._on(x):
        dtype, precision = backend.DTYPES[x.dtype], backend._precision(x.dtype)
        product = iid_launch.Product(n, inner, outer, x.stride(), dtype, precision, *backend._resources(x.device))
        chosen = iid_launch.choose(product)
        scales = x
        if chosen.mode == FP16_PAIR:
            scales = x.new_empty(n)
            first = inner // 2 // SAMPLE * SAMPLE
            scale_vectors[(-(-n // 256),)](x, scales, n, first, *x.stride(), V=256, SAMPLE=SAMPLE)
        if chosen.splits == 1:
            _launch(chosen, sketch, x, out, scales, (0, *out.stride()), forward, True, accumulate)
        else:
            partial = backend._partial(chosen.splits, x, out)
            _launch(chosen, sketch, x, partial, scales, partial.stride(), forward, False, False)
            assert sketch.lanes
            backend._reduce(4 * sketch.n_components * sketch.lanes.density, partial, out, accumulate)


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
        x, out, scales, n, inner, outer, *x.stride(), *strides, signed(sketch.seed), sketch.feature_offset,
        sketch.lanes.signs, sketch.lanes.complement, chosen.inner_per_split,
        sketch.lanes.scale(sketch.n_components) / 2,
        FORWARD=forward, BITS=sketch.lanes.bits, V=chosen.vectors, OUTER=chosen.outer, INNER=chosen.inner,
        SPAN=chosen.span, MODE=chosen.mode, EVEN=chosen.even, ALIGN=chosen.align,
        FINAL=final, ACCUMULATE=accumulate, NVIDIA=backend.NVIDIA, INTERPRETED=backend.INTERPRETED,
        num_warps=chosen.num_warps, num_stages=chosen.num_stages,
    )  # fmt: skip
