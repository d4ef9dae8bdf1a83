"""Sketches of the exact law on Triton: torch tensors on one CUDA device, or on the CPU in Triton's interpreter.

The interface is that of the CPU backend: 2-D data of any strides, one data vector per row; results go to `out`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import triton.language as tl
from torch import Tensor

from ...kernels.config.exact import FewVectors, Launch, RowGather, TensorCore, choose
from ...kernels.config.hopper import Hopper
from ...kernels.config.hopper_codes import HopperCodes
from ...kernels.config.product import VECTOR_BYTES, KernelGeometry, Product, kernel_geometry
from ...kernels.portable.few_vectors import adjoint_few_vectors, project_few_vectors
from ...kernels.portable.row_gather import adjoint_row_gather, project_row_gather
from ...kernels.portable.tensor_core import adjoint_tensor_core, project_tensor_core
from . import device, partial_sums, sparse
from .launcher import kind, run
from .vector_scales import vector_scales

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec

project_sparse, gather_sparse = sparse.project_exact, sparse.gather_exact


def project(spec: SketchSpec, x: Tensor, out: Tensor, accumulate: bool) -> None:
    """out (n, k) = x (n, d) Sᵀ, added to `out` if `accumulate`."""
    n, d = x.shape
    if n == 0 or d == 0:
        if not accumulate:
            out.zero_()
        return
    with device.current(x):
        plan = make_plan(describe(spec, x, out, accumulate, adjoint=False))

        def launch(target: Tensor, accumulate: bool) -> None:
            if isinstance(plan.chosen, Hopper):
                from . import hopper

                hopper.project_exact(plan.chosen, spec, x, target)
            elif isinstance(plan.chosen, HopperCodes):
                from . import hopper

                multiprocessors = device.describe(x.device).multiprocessors
                hopper.project_codes(plan.chosen, spec, x, target, accumulate, multiprocessors)
            else:
                _project(plan, plan.chosen, spec, x, target, accumulate)

        partial_sums.write(plan.chosen.splits, x, out, accumulate, spec.nnz**-0.5, launch)


def adjoint(spec: SketchSpec, y: Tensor, out: Tensor, accumulate: bool) -> None:
    """out (n, d) = y (n, k) S, added to `out` if `accumulate`."""
    if out.numel() == 0:
        return
    with device.current(y):
        plan = make_plan(describe(spec, out, y, accumulate, adjoint=True))
        if isinstance(plan.chosen, Hopper):
            from . import hopper

            hopper.adjoint_exact(plan.chosen, spec, y, out)
        elif not isinstance(plan.chosen, HopperCodes):  # which does not run adjoints
            _adjoint(plan, plan.chosen, spec, y, out, accumulate)


# ------------------------------------------------------------------------------------- plans


@dataclass(frozen=True, eq=False)  # compared and hashed by identity, as part of launches' keys
class Plan:
    """A launch and the constants that determine its kernel. Products of one shape and kind share one."""

    chosen: Launch
    geometry: KernelGeometry
    constants: dict[str, Any]  # of a portable kernel, but for those that depend on the target


def describe(spec: SketchSpec, x: Tensor, y: Tensor, accumulate: bool, adjoint: bool) -> Product:
    """The description of Y = X Sᵀ or, with `adjoint`, X = Y S."""
    n, d = x.shape
    data = y if adjoint else x
    aligned = (x.data_ptr() | y.data_ptr()) % VECTOR_BYTES == 0
    return Product(
        adjoint,
        n,
        d,
        spec.n_components,
        spec.nnz,
        spec.feature_offset,
        x.stride(),
        y.stride(),
        device.DTYPE_NAMES[data.dtype],
        device.precision(data.dtype),
        aligned and x.dtype == y.dtype and not accumulate,
        device.describe(data.device),
    )


@lru_cache(maxsize=4096)
def make_plan(product: Product) -> Plan:
    """The plan for a product with n > 0 and d > 0. This is where the product is hashed, once per call."""
    # Triton compiles for an offset's width, nothing else of it.
    return _shared_plan(choose(product), product._replace(offset=int(product.offset >= 1 << 31)))


@lru_cache(maxsize=4096)
def _shared_plan(chosen: Launch, product: Product) -> Plan:
    geometry = kernel_geometry(product.k, product.nnz)
    constants = {} if isinstance(chosen, Hopper | HopperCodes) else _constants(chosen, geometry, product)
    return Plan(chosen, geometry, constants)


def _constants(
    chosen: FewVectors | RowGather | TensorCore, geometry: KernelGeometry, product: Product
) -> dict[str, Any]:
    """The constants and compiler options of a portable kernel that do not depend on the target, by name."""
    constants: dict[str, Any] = {
        "GEOMETRY": geometry,
        "BLOCK_VECTORS": chosen.block_vectors,
        "UNMASKED": chosen.unmasked,
        "ALIGN": chosen.align,
        "num_warps": 4,
    }
    if chosen.registers and product.device.nvidia:
        constants["maxnreg"] = chosen.registers
    if isinstance(chosen, FewVectors):
        constants |= {
            "LAYOUT": chosen.layout,
            "VECTORS_CONTIGUOUS": chosen.vectors_contiguous,
            "OFFSET_DTYPE": tl.int64 if chosen.offsets_64 else tl.uint32,
            "SUM_DTYPE": tl.float64 if chosen.fp64 else tl.float32,
        }
        if not product.adjoint:
            constants |= {"SEGMENTS": chosen.segments, "LOAD_CHUNKS": chosen.load_chunks}
    elif isinstance(chosen, RowGather):
        if not product.adjoint:
            constants |= {"CHUNKED_SUM": chosen.chunked_sum, "PREFETCH": chosen.prefetch}
    else:
        constants |= {
            "CHUNKS_PER_DOT": chosen.chunks_per_dot,
            "MODE": chosen.mode,
            "INTERPRETED": product.device.interpreted,
            "num_stages": chosen.num_stages,
        }
        if not product.adjoint:
            constants["CHUNKED_SUM"] = chosen.chunked_sum
    if not product.adjoint:
        single = chosen.splits == 1
        constants |= {
            "SINGLE_SPLIT": single,
            "PROGRAMMATIC_LAUNCH": not single and product.device.programmatic_launch,
        }
    return constants


# ------------------------------------------------------------------------------------- launches


def _project(
    plan: Plan,
    chosen: FewVectors | RowGather | TensorCore,
    spec: SketchSpec,
    x: Tensor,
    target: Tensor,
    accumulate: bool,
) -> None:
    """Launch a portable kernel on x, into the result or the partial sums."""
    n, d = x.shape
    grid = (plan.geometry.fused * plan.geometry.n_tiles * -(-n // chosen.block_vectors), chosen.splits, 1)
    sizes = (n, d, *x.stride(), *partial_sums.strides(target))
    if isinstance(chosen, FewVectors):
        last = (chosen.batches_per_split,)
        _run(project_few_vectors, grid, plan, spec, (x, target), sizes, last, accumulate)
    elif isinstance(chosen, RowGather):
        _run(project_row_gather, grid, plan, spec, (x, target), sizes, (chosen.groups_per_split,), accumulate)
    else:
        tensors = (x, target, vector_scales(chosen.mode, x))
        _run(project_tensor_core, grid, plan, spec, tensors, sizes, (chosen.groups_per_split,), accumulate)


def _adjoint(
    plan: Plan,
    chosen: FewVectors | RowGather | TensorCore,
    spec: SketchSpec,
    y: Tensor,
    out: Tensor,
    accumulate: bool,
) -> None:
    """Launch a portable kernel on y."""
    geometry, (n, d) = plan.geometry, out.shape
    blocks = -(-n // chosen.block_vectors)
    sizes = (n, d, *y.stride(), *out.stride())
    if isinstance(chosen, FewVectors):
        first, end = spec.feature_offset, spec.feature_offset + d
        chunks = ((end - 1) >> geometry.log_chunk) - (first >> geometry.log_chunk) + 1
        grid = (-(-chunks // (chosen.layout.chunks_outer * chosen.layout.chunks_inner)) * blocks, 1, 1)
        _run(adjoint_few_vectors, grid, plan, spec, (y, out), sizes, (), accumulate)
        return
    grid = (geometry.n_tiles * blocks, chosen.splits, 1)
    kernel = adjoint_row_gather if isinstance(chosen, RowGather) else adjoint_tensor_core
    _run(kernel, grid, plan, spec, (y, out), sizes, (chosen.groups_per_split,), accumulate)


def _run(
    kernel: Any,
    grid: tuple[int, int, int],
    plan: Plan,
    spec: SketchSpec,
    tensors: tuple[Tensor, ...],
    sizes: tuple[int, ...],
    last: tuple[int, ...],
    accumulate: bool,
) -> None:
    arguments = (*tensors, *sizes, spec.seed, spec.feature_offset, *last)
    key = (plan, accumulate, *map(kind, tensors))
    run(kernel, grid, tensors[0].get_device(), arguments, key, lambda: {**plan.constants, "ACCUMULATE": accumulate})
