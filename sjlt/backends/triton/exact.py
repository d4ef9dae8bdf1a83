"""The exact law on Triton, for torch tensors on one CUDA device, or on the CPU in Triton's interpreter.

As in the CPU backend, data is 2-D with any strides and one vector per row, and results are written to `out`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import triton.language as tl
from torch import Tensor

from ...kernels.config.codes import Codes
from ...kernels.config.dense_matrix import DenseMatrix
from ...kernels.config.exact import FewVectors, Launch, RowGather, TensorCore, choose
from ...kernels.config.hopper import Hopper
from ...kernels.config.lane_sums import LaneSums
from ...kernels.config.one_tile import OneTile
from ...kernels.config.product import VECTOR_BYTES, KernelGeometry, Product, kernel_geometry
from ...kernels.config.scattered_sums import ScatteredSums
from ...kernels.config.staged_adjoint import StagedAdjoint
from ...kernels.config.staged_gather import StagedGather
from ...kernels.config.warp_tiles import WarpTiles
from ...kernels.portable.few_vectors import adjoint_few_vectors, project_few_vectors
from ...kernels.portable.row_gather import adjoint_row_gather, project_row_gather
from ...kernels.portable.tensor_core import adjoint_tensor_core, project_tensor_core
from . import device, one_tile, prepared, sparse
from .launcher import Kind, kind
from .launcher import Launch as KernelLaunch
from .partial_sums import sums_of
from .vector_scales import vector_scales

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec
    from .prepared import Call

project_sparse, gather_sparse = sparse.project_exact, sparse.gather_exact


def project(spec: SketchSpec, x: Tensor, out: Tensor, accumulate: bool, axis: int = 1) -> None:
    """Write x (n, d) Sᵀ to `out` (n, k), or add it if `accumulate`. Both are transposed if `axis` is 0."""
    prepared.multiply(_prepare_project, spec, x, out, accumulate, axis)


def adjoint(spec: SketchSpec, y: Tensor, out: Tensor, accumulate: bool, axis: int = 1) -> None:
    """Write y (n, k) S to `out` (n, d), or add it if `accumulate`. Both are transposed if `axis` is 0."""
    prepared.multiply(_prepare_adjoint, spec, y, out, accumulate, axis)


def _prepare_project(spec: SketchSpec, x: Tensor, out: Tensor, accumulate: bool) -> Call:
    if x.numel() == 0:
        return prepared.nothing if accumulate else prepared.zero
    plan = make_plan(describe(spec, x, out, accumulate, adjoint=False))
    return prepare_plan(plan, spec, x, out, accumulate)


def _prepare_adjoint(spec: SketchSpec, y: Tensor, out: Tensor, accumulate: bool) -> Call:
    if out.numel() == 0:
        return prepared.nothing
    return prepare_adjoint_plan(make_plan(describe(spec, out, y, accumulate, adjoint=True)), spec, y, out, accumulate)


# ------------------------------------------------------------------------------------- plans


@dataclass(frozen=True, eq=False)  # compared and hashed by identity, as part of the keys of launches
class Plan:
    """A launch and the constants of its kernel, shared by all products of one shape and kind.

    Attributes
    ----------
    chosen : Launch
    geometry : KernelGeometry
    constants : dict
        Of a portable kernel that generates entries, except those that depend on the target; empty for others.
    """

    chosen: Launch
    geometry: KernelGeometry
    constants: dict[str, Any]


def describe(spec: SketchSpec, x: Tensor, y: Tensor, accumulate: bool, adjoint: bool, stacks: int = 1) -> Product:
    """The description of Y = X Sᵀ or, if `adjoint`, X = Y S.

    With stacks, `spec` and `y` are those of one stack.
    """
    n, d = x.shape
    data = y if adjoint else x
    data_aligned = data.data_ptr() % VECTOR_BYTES == 0
    aligned = data_aligned and (x if adjoint else y).data_ptr() % VECTOR_BYTES == 0
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
        stacks,
        data_aligned,
        device.may_multiply(),
    )


@lru_cache(maxsize=4096)
def make_plan(product: Product, rule: Callable[[Product], Launch] | None = None) -> Plan:
    """The plan for a product with n > 0 and d > 0, by `choose` or another rule. The product is hashed only here."""
    # The only property of the offset that Triton compiles for is whether it fits in 32 bits.
    return _shared_plan((rule or choose)(product), product._replace(offset=int(product.offset >= 1 << 31)))


@lru_cache(maxsize=4096)
def _shared_plan(chosen: Launch, product: Product) -> Plan:
    geometry = kernel_geometry(product.k, product.nnz)
    constants = {}
    if isinstance(chosen, FewVectors | RowGather | TensorCore):
        constants = _constants(chosen, geometry, product)
    return Plan(chosen, geometry, constants)


def _constants(
    chosen: FewVectors | RowGather | TensorCore, geometry: KernelGeometry, product: Product
) -> dict[str, Any]:
    """The constants and compiler options of a portable kernel, by name, except those that depend on the target."""
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
            "VECTOR_ALIGN": chosen.vector_align,
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


# ------------------------------------------------------------------------------------- preparation


def prepare_plan(plan: Plan, spec: SketchSpec, x: Tensor, out: Tensor, accumulate: bool) -> Call:
    """The `Call` (spec, x, out) that writes X Sᵀ, or adds it if `accumulate`, by `plan`."""
    chosen, splits = plan.chosen, plan.chosen.splits
    if isinstance(chosen, DenseMatrix):
        from . import dense_matrix

        return dense_matrix.prepare(chosen, spec, x, out, adjoint=False)
    if isinstance(chosen, Codes):
        from . import codes

        return codes.prepare(chosen, spec, x, out, accumulate)
    if isinstance(chosen, ScatteredSums):
        from . import scattered_sums

        return scattered_sums.prepare(chosen, spec, x, out, accumulate)
    if isinstance(chosen, LaneSums):
        from . import lane_sums

        return lane_sums.prepare(chosen, spec, x, out, accumulate)
    if isinstance(chosen, WarpTiles):
        from . import warp_tiles

        return warp_tiles.prepare(chosen, spec, x, out, accumulate)
    if isinstance(chosen, StagedGather):
        from . import staged_gather

        return staged_gather.prepare(chosen, spec, x, out, accumulate)
    if splits == 1:
        return _project(plan, spec, x, (0, *out.stride()), kind(out), accumulate)
    sums = sums_of(splits, x, out)
    write = _project(plan, spec, x, sums.strides, (sums.dtype, 0), False)
    return prepared.split_sum(write, splits, sums, plan.geometry.scale, out, accumulate)


def _project(
    plan: Plan, spec: SketchSpec, x: Tensor, strides: tuple[int, ...], kind_of_target: Kind, accumulate: bool
) -> Call:
    """The `Call` (spec, x, target) of one kernel, whose target is the result or partial sums.

    `strides` are those of the target along splits, vectors and components.
    """
    chosen, (n, d) = plan.chosen, x.shape
    if isinstance(chosen, Hopper):
        from . import hopper

        return hopper.prepare_project(chosen, spec, x, kind_of_target[0], strides)
    assert not isinstance(
        chosen, DenseMatrix | Codes | LaneSums | WarpTiles | StagedGather | StagedAdjoint | ScatteredSums
    )
    if isinstance(chosen, OneTile):
        return one_tile.prepare_project(chosen, plan.geometry, spec, x, strides, kind_of_target, accumulate)
    grid = (plan.geometry.fused * plan.geometry.n_tiles * -(-n // chosen.block_vectors), chosen.splits, 1)
    sizes = (n, d, *x.stride(), *strides)
    kinds = (kind(x), kind_of_target)
    if isinstance(chosen, FewVectors):
        run = _launch(project_few_vectors, grid, plan, spec, x, sizes, (chosen.batches_per_split,), kinds, accumulate)
        return prepared.seeded(run)
    last = (chosen.groups_per_split,)
    if isinstance(chosen, RowGather):
        run = _launch(project_row_gather, grid, plan, spec, x, sizes, last, kinds, accumulate)
        return prepared.seeded(run)
    scales = vector_scales(chosen.mode, x)
    run = _launch(project_tensor_core, grid, plan, spec, x, sizes, last, kinds, accumulate)
    return lambda spec, x, target: run((x, target, scales(x)), spec.seed)


def prepare_adjoint_plan(plan: Plan, spec: SketchSpec, y: Tensor, out: Tensor, accumulate: bool) -> Call:
    """The `Call` (spec, y, out) that writes Y S, or adds it if `accumulate`, by `plan`."""
    chosen, geometry, (n, d) = plan.chosen, plan.geometry, out.shape
    if isinstance(chosen, DenseMatrix):
        from . import dense_matrix

        return dense_matrix.prepare(chosen, spec, y, out, adjoint=True)
    if isinstance(chosen, Hopper):
        from . import hopper

        return hopper.prepare_adjoint(chosen, spec, y, out)
    if isinstance(chosen, StagedAdjoint):
        from . import staged_adjoint

        return staged_adjoint.prepare(chosen, spec, y, out, accumulate)
    assert not isinstance(chosen, Codes | LaneSums | WarpTiles | StagedGather | ScatteredSums), (
        "these kernels do not compute adjoints"
    )
    if isinstance(chosen, OneTile):
        return one_tile.prepare_adjoint(chosen, geometry, spec, y, out, accumulate)
    blocks = -(-n // chosen.block_vectors)
    sizes = (n, d, *y.stride(), *out.stride())
    last: tuple[int, ...] = ()
    if isinstance(chosen, FewVectors):
        first, end = spec.feature_offset, spec.feature_offset + d
        chunks = ((end - 1) >> geometry.log_chunk) - (first >> geometry.log_chunk) + 1
        grid = (-(-chunks // (chosen.layout.chunks_outer * chosen.layout.chunks_inner)) * blocks, 1, 1)
        kernel = adjoint_few_vectors
    else:
        grid, last = (geometry.n_tiles * blocks, chosen.splits, 1), (chosen.groups_per_split,)
        kernel = adjoint_row_gather if isinstance(chosen, RowGather) else adjoint_tensor_core
    run = _launch(kernel, grid, plan, spec, y, sizes, last, (kind(y), kind(out)), accumulate)
    return prepared.seeded(run)


def _launch(
    kernel: Any,
    grid: tuple[int, int, int],
    plan: Plan,
    spec: SketchSpec,
    data: Tensor,
    sizes: tuple[int, ...],
    last: tuple[int, ...],
    kinds: Hashable,
    accumulate: bool,
) -> KernelLaunch:
    """A launch of a portable kernel, with arguments (tensors, *sizes, seed, feature offset, *last)."""
    after, key = (spec.feature_offset, *last), (plan, accumulate, kinds)

    def constants() -> dict[str, Any]:
        return {**plan.constants, "ACCUMULATE": accumulate}

    return KernelLaunch(kernel, grid, data.get_device(), sizes, after, key, constants)
