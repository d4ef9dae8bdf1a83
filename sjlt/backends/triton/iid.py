"""Sketches of the iid law on the Triton backend. The interface is that of `triton`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...kernels.config import iid as iid_launch
from ...kernels.portable.iid import multiply_iid
from . import exact as backend
from .launcher import kind, run

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec


def project(spec: SketchSpec, x: Tensor, out: Tensor, accumulate: bool) -> None:
    """out (n, k) = x (n, d) S', or += where `accumulate`."""
    product = _product(x, out.shape[1])
    plain = not accumulate and x.dtype == out.dtype and x.data_ptr() % 16 == 0
    if plain and product.hopper and iid_launch.suits_hopper(product, spec.feature_offset):
        from . import hopper as triton_hopper

        with backend._on(x):
            triton_hopper.project_iid(spec, x, out, product.multiprocessors)
    else:
        _multiply(product, spec, x, out, accumulate, forward=True)


def adjoint(spec: SketchSpec, y: Tensor, out: Tensor, accumulate: bool) -> None:
    """out (n, d) = y (n, k) S, or += where `accumulate`."""
    _multiply(_product(y, out.shape[1]), spec, y, out, accumulate, forward=False)


def _multiply(
    product: iid_launch.Product, spec: SketchSpec, x: Tensor, out: Tensor, accumulate: bool, forward: bool
) -> None:
    if out.numel() == 0 or x.shape[1] == 0:
        if not accumulate:
            out.zero_()
        return
    with backend._on(x):
        chosen = iid_launch.choose(product)
        scales = backend._scales(chosen.mode, x)
        final = chosen.splits == 1
        sums = out if final else backend._partial(chosen.splits, x, out)
        _launch(chosen, spec, x, sums, scales, forward, accumulate)
        if not final:
            backend._reduce(4 * spec.n_components * spec.lanes.density, sums, out, accumulate)


def _product(x: Tensor, outer: int) -> iid_launch.Product:
    (n, inner), dtype = x.shape, x.dtype
    resources = backend._resources(x.device)
    return iid_launch.Product(n, inner, outer, x.stride(), backend.DTYPES[dtype], backend._precision(dtype), *resources)


def _launch(
    chosen: iid_launch.Multiply,
    spec: SketchSpec,
    x: Tensor,
    out: Tensor,
    scales: Tensor,
    forward: bool,
    accumulate: bool,
) -> None:
    """The launch on x into out or, where there are splits, into their sums."""
    lanes, (n, inner), outer = spec.lanes, x.shape, out.shape[-1]
    final = chosen.splits == 1
    sizes = (n, inner, outer, *x.stride(), *backend._strides(out))

    def constants() -> dict[str, Any]:
        return {
            "FORWARD": forward, "BITS": lanes.bits, "V": chosen.vectors, "OUTER": chosen.outer, "INNER": chosen.inner,
            "SPAN": chosen.span, "MODE": chosen.mode, "EVEN": chosen.even, "ALIGN": chosen.align,
            "FINAL": final, "ACCUMULATE": accumulate and final,
            "NVIDIA": backend.NVIDIA, "INTERPRETED": backend.INTERPRETED,
            "num_warps": chosen.num_warps, "num_stages": chosen.num_stages,
        }  # fmt: skip

    grid = (-(-n // chosen.vectors) * -(-outer // chosen.outer), chosen.splits, 1)
    half_scale = lanes.scale(spec.n_components) / 2
    numbers = (spec.seed, spec.feature_offset, lanes.signs, lanes.complement, chosen.inner_per_split, half_scale)
    key = (chosen, lanes.bits, sizes, forward, accumulate, kind(x), kind(out), kind(scales))
    run(multiply_iid, grid, x.get_device(), (x, out, scales, *sizes, *numbers), key, constants)
