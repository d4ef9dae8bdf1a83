"""Sketches of the iid law on Triton. The interface is that of `exact`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...kernels.config.iid import Iid, IidHopper, choose
from ...kernels.config.product import VECTOR_BYTES, Product
from ...kernels.portable.iid import multiply_iid
from . import device, partial_sums, sparse
from .launcher import kind, run
from .vector_scales import vector_scales

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec

project_sparse, gather_sparse = sparse.project_iid, sparse.gather_iid


def project(spec: SketchSpec, x: Tensor, out: Tensor, accumulate: bool) -> None:
    """out (n, k) = x (n, d) Sᵀ, added to `out` if `accumulate`."""
    _multiply_iid(spec, x, out, accumulate, adjoint=False)


def adjoint(spec: SketchSpec, y: Tensor, out: Tensor, accumulate: bool) -> None:
    """out (n, d) = y (n, k) S, added to `out` if `accumulate`."""
    _multiply_iid(spec, y, out, accumulate, adjoint=True)


def _multiply_iid(spec: SketchSpec, data: Tensor, out: Tensor, accumulate: bool, adjoint: bool) -> None:
    if out.numel() == 0 or data.shape[1] == 0:
        if not accumulate:
            out.zero_()
        return
    with device.current(data):
        product = describe(spec, data, out, accumulate, adjoint)
        plan = make_plan(product)

        def launch(target: Tensor, accumulate: bool) -> None:
            if isinstance(plan.chosen, IidHopper):
                from . import hopper

                hopper.project_iid(plan.chosen, spec, data, target, product.device.multiprocessors)
            else:
                _run(plan, spec, data, target, accumulate)

        half_scale = spec.lanes.scale(spec.n_components) / 2
        partial_sums.write(plan.chosen.splits, data, out, accumulate, half_scale, launch)


@dataclass(frozen=True, eq=False)  # compared and hashed by identity, as part of launches' keys
class Plan:
    """A launch and the constants that determine its kernel. Products of one shape and kind share one."""

    chosen: Iid | IidHopper
    constants: dict[str, Any]


def describe(spec: SketchSpec, data: Tensor, out: Tensor, accumulate: bool, adjoint: bool) -> Product:
    """The description of a product of `data`. The Hopper kernel stores results of any alignment."""
    x, y = (out, data) if adjoint else (data, out)
    n, d = x.shape
    return Product(
        adjoint,
        n,
        d,
        spec.n_components,
        0,
        spec.feature_offset,
        x.stride(),
        y.stride(),
        device.DTYPE_NAMES[data.dtype],
        device.precision(data.dtype),
        not accumulate and data.dtype == out.dtype and data.data_ptr() % VECTOR_BYTES == 0,
        device.describe(data.device),
    )


@lru_cache(maxsize=4096)
def make_plan(product: Product) -> Plan:
    """The plan for a product whose n, d and k are positive. This is where the product is hashed, once per call."""
    return _shared_plan(choose(product), product._replace(offset=0))


@lru_cache(maxsize=4096)
def _shared_plan(chosen: Iid | IidHopper, product: Product) -> Plan:
    if isinstance(chosen, IidHopper):
        return Plan(chosen, {})
    constants = {
        "ADJOINT": product.adjoint,
        "BLOCK_VECTORS": chosen.block_vectors,
        "BLOCK_OUT": chosen.block_out,
        "BLOCK_REDUCE": chosen.block_reduce,
        "TERMS_PER_SUM": chosen.terms_per_sum,
        "MODE": chosen.mode,
        "UNMASKED": chosen.unmasked,
        "ALIGN": chosen.align,
        "SINGLE_SPLIT": chosen.splits == 1,
        "NVIDIA": product.device.nvidia,
        "INTERPRETED": product.device.interpreted,
        "num_warps": chosen.num_warps,
        "num_stages": chosen.num_stages,
    }
    return Plan(chosen, constants)


def _run(plan: Plan, spec: SketchSpec, data: Tensor, target: Tensor, accumulate: bool) -> None:
    """Launch the portable kernel on `data`, into the result or the partial sums."""
    chosen = plan.chosen
    assert isinstance(chosen, Iid)
    lanes, (n, reduce_dim), out_dim = spec.lanes, data.shape, target.shape[-1]
    scales = vector_scales(chosen.mode, data)
    grid = (-(-n // chosen.block_vectors) * -(-out_dim // chosen.block_out), chosen.splits, 1)
    sizes = (n, reduce_dim, out_dim, *data.stride(), *partial_sums.strides(target))
    half_scale = lanes.scale(spec.n_components) / 2
    numbers = (spec.seed, spec.feature_offset, lanes.signs, lanes.complement, chosen.terms_per_split, half_scale)
    key = (plan, lanes.bits, accumulate, kind(data), kind(target), kind(scales))

    def constants() -> dict[str, Any]:
        return {**plan.constants, "BITS": lanes.bits, "ACCUMULATE": accumulate}

    run(multiply_iid, grid, data.get_device(), (data, target, scales, *sizes, *numbers), key, constants)
