"""The iid law on Triton, with the interface of `exact`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...kernels.config.iid import Iid, IidHopper, choose
from ...kernels.config.product import VECTOR_BYTES, Product
from ...kernels.portable.iid import multiply_iid
from . import device, prepared, sparse
from .launcher import Launch, kind
from .partial_sums import sums_of
from .vector_scales import vector_scales

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec
    from .prepared import Call

project_sparse, gather_sparse = sparse.project_iid, sparse.gather_iid


def project(spec: SketchSpec, x: Tensor, out: Tensor, accumulate: bool, axis: int = 1) -> None:
    """Write x (n, d) Sᵀ to `out` (n, k), or add it if `accumulate`. Both are transposed if `axis` is 0."""
    x, out = (x, out) if axis else (x.t(), out.t())
    prepared.multiply(_prepare_project, spec, x, out, accumulate)


def adjoint(spec: SketchSpec, y: Tensor, out: Tensor, accumulate: bool, axis: int = 1) -> None:
    """Write y (n, k) S to `out` (n, d), or add it if `accumulate`. Both are transposed if `axis` is 0."""
    y, out = (y, out) if axis else (y.t(), out.t())
    prepared.multiply(_prepare_adjoint, spec, y, out, accumulate)


def _prepare_project(spec: SketchSpec, x: Tensor, out: Tensor, accumulate: bool) -> Call:
    return _prepare(spec, x, out, accumulate, adjoint=False)


def _prepare_adjoint(spec: SketchSpec, y: Tensor, out: Tensor, accumulate: bool) -> Call:
    return _prepare(spec, y, out, accumulate, adjoint=True)


def _prepare(spec: SketchSpec, data: Tensor, out: Tensor, accumulate: bool, adjoint: bool) -> Call:
    if out.numel() == 0 or data.shape[1] == 0:
        return prepared.nothing if accumulate else prepared.zero
    plan = make_plan(describe(spec, data, out, accumulate, adjoint))
    chosen = plan.chosen
    if isinstance(chosen, IidHopper):
        from . import hopper

        return lambda spec, x, out: hopper.project_iid(chosen, spec, x, out)
    if chosen.splits == 1:
        return _multiply_iid(plan, spec, data, out.shape[1], (0, *out.stride()), kind(out), accumulate)
    sums = sums_of(chosen.splits, data, out)
    half_scale = spec.lanes.scale(spec.n_components) / 2
    write = _multiply_iid(plan, spec, data, out.shape[1], sums.strides, (sums.dtype, 0), False)
    return prepared.split_sum(write, chosen.splits, sums, half_scale, out, accumulate)


@dataclass(frozen=True, eq=False)  # compared and hashed by identity, as part of the keys of launches
class Plan:
    """A launch and the constants of its kernel, shared by all products of one shape and kind."""

    chosen: Iid | IidHopper
    constants: dict[str, Any]


def describe(spec: SketchSpec, data: Tensor, out: Tensor, accumulate: bool, adjoint: bool) -> Product:
    """The description of a product of `data`. It is plain for any alignment of `out`, as the Hopper kernel allows."""
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
    """The plan for a product whose n, d and k are positive. The product is hashed only here."""
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


def _multiply_iid(
    plan: Plan,
    spec: SketchSpec,
    data: Tensor,
    out_dim: int,
    strides: tuple[int, ...],
    kind_of_target: Hashable,
    accumulate: bool,
) -> Call:
    """The `Call` (spec, data, target) of the portable kernel, whose target is the result or partial sums.

    `strides` are those of the target along splits, vectors and components.
    """
    chosen = plan.chosen
    assert isinstance(chosen, Iid)
    lanes, (n, reduce_dim) = spec.lanes, data.shape
    scales = vector_scales(chosen.mode, data)
    grid = (-(-n // chosen.block_vectors) * -(-out_dim // chosen.block_out), chosen.splits, 1)
    sizes = (n, reduce_dim, out_dim, *data.stride(), *strides)
    half_scale = lanes.scale(spec.n_components) / 2
    after = (spec.feature_offset, lanes.signs, lanes.complement, chosen.terms_per_split, half_scale)
    key = (plan, lanes.bits, accumulate, kind(data), kind_of_target)

    def constants() -> dict[str, Any]:
        return {**plan.constants, "BITS": lanes.bits, "ACCUMULATE": accumulate}

    run = Launch(multiply_iid, grid, data.get_device(), sizes, after, key, constants)
    return lambda spec, data, target: run((data, target, scales(data)), spec.seed)
