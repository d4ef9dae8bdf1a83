"""The Triton backend: torch tensors on one CUDA device (or on the CPU, where Triton's interpreter runs).

The interface is the CPU backend's: 2-D data of any strides, one data vector a row, results written to `out`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.config import exact as launch
from ...kernels.config import hopper as hopper_launch
from ...kernels.portable.few_vectors import adjoint_gather, project_gather
from ...kernels.portable.fp32_split import scale_vectors
from ...kernels.portable.reduce import reduce_partials
from ...kernels.portable.row_gather import adjoint_rows, project_rows
from ...kernels.portable.tensor_core import adjoint_tiles, project_tiles
from ...laws import exact as law
from .launcher import kind, run

if TYPE_CHECKING:
    from ...laws.spec import SketchSpec

Split = launch.Tiles | launch.Rows | launch.Gather
Launch = Split | hopper_launch.Hopper

DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}
INTERPRETED = bool(triton.knobs.runtime.interpret)
NVIDIA = not INTERPRETED and torch.version.hip is None
REDUCERS = 256  # programs that sum partial results, at least, where each has 128 to 1024 elements

_HERE = nullcontext()


def project(spec: SketchSpec, x: Tensor, out: Tensor, accumulate: bool) -> None:
    """out (n, k) = x (n, d) S', or += where `accumulate`."""
    n, d = x.shape
    if n == 0 or d == 0:
        if not accumulate:
            out.zero_()
        return
    with _on(x):
        chosen = _chosen(_product(spec, x, x, out), x, out, accumulate, adjoint=False)
        final = chosen.splits == 1
        sums = out if final else _partial(chosen.splits, x, out)
        if isinstance(chosen, hopper_launch.Hopper):
            from . import hopper as triton_hopper

            triton_hopper.project(chosen, spec, x, sums)
        else:
            _project(chosen, spec, x, sums, accumulate)
        if not final:
            _reduce(spec.nnz, sums, out, accumulate)


def adjoint(spec: SketchSpec, y: Tensor, out: Tensor, accumulate: bool) -> None:
    """out (n, d) = y (n, k) S, or += where `accumulate`."""
    n, d = out.shape
    if n == 0 or d == 0:
        return
    with _on(y):
        chosen = _chosen(_product(spec, y, out, y), y, out, accumulate, adjoint=True)
        if isinstance(chosen, hopper_launch.Hopper):
            from . import hopper as triton_hopper

            triton_hopper.adjoint(chosen, spec, y, out)
            return
        blocks = -(-n // chosen.vectors)
        strides = (*y.stride(), *out.stride())
        if isinstance(chosen, launch.Gather):
            log_chunk = law.geometry(spec.n_components, spec.nnz, 0).log_chunk
            offset = spec.feature_offset
            chunks = ((offset + d - 1) >> log_chunk) - (offset >> log_chunk) + 1
            grid = (-(-chunks // (chosen.qi * chosen.qw)) * blocks, 1, 1)
            _launch(adjoint_gather, grid, spec, chosen, (y, out), (n, d, *strides), (), ACCUMULATE=accumulate)
        else:
            grid = (law.count_tiles(spec.n_components) * blocks, chosen.splits, 1)
            kernel = adjoint_rows if isinstance(chosen, launch.Rows) else adjoint_tiles
            last = (chosen.groups_per_split,)
            _launch(kernel, grid, spec, chosen, (y, out), (n, d, *strides), last, ACCUMULATE=accumulate)


def _chosen(product: launch.Product, data: Tensor, out: Tensor, accumulate: bool, adjoint: bool) -> Launch:
    """The launch, by what shapes do not tell, too."""
    if product.hopper and data.dtype == out.dtype and not accumulate:
        chosen = hopper_launch.choose(product, adjoint)
        if chosen and (data.data_ptr() | out.data_ptr()) % launch.VECTOR_BYTES == 0:
            return chosen
    return launch.choose(product, adjoint)


def _project(chosen: Split, spec: SketchSpec, x: Tensor, out: Tensor, accumulate: bool) -> None:
    """The launch on x into out or, where there are splits, into their sums (splits, n, k)."""
    (n, d), final = x.shape, chosen.splits == 1
    grid = (law.count_tiles(spec.n_components) * -(-n // chosen.vectors), chosen.splits, 1)
    sizes = (n, d, *x.stride(), *_strides(out))
    flags = {"FINAL": final, "ACCUMULATE": accumulate and final, "OVERLAP": not final and _overlaps(x.device)}
    if isinstance(chosen, launch.Gather):
        _launch(project_gather, grid, spec, chosen, (x, out), sizes, (chosen.batches,), **flags)
    elif isinstance(chosen, launch.Rows):
        _launch(project_rows, grid, spec, chosen, (x, out), sizes, (chosen.groups_per_split,), **flags)
    else:
        tensors = (x, out, _scales(chosen.mode, x))
        _launch(project_tiles, grid, spec, chosen, tensors, sizes, (chosen.groups_per_split,), **flags)


def _scales(mode: int, x: Tensor) -> Tensor:
    """What kernels scale the vectors by, fp32 (n); where they do not, any tensor."""
    if mode != launch.FP16_PAIR:
        return x
    n, d = x.shape
    scales = x.new_empty(n)
    sizes, constants = (n, d, *x.stride()), {"V": 256, "SAMPLE": launch.SAMPLE, "LINE": launch.LINE}
    arguments, key = (x, scales, *sizes), (sizes, kind(x), kind(scales))
    run(scale_vectors, (-(-n // 256), 1, 1), x.get_device(), arguments, key, lambda: constants)
    return scales


def _partial(splits: int, x: Tensor, out: Tensor) -> Tensor:
    """Room for the partial sums (splits, n, k), in the memory order of out.

    (The vectors' axis is first in memory or last: there Hopper's memory accelerator clips what is beyond the last one.)
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    n, k = out.shape
    if out.stride(0) < out.stride(1):
        return x.new_empty((splits, k, n), dtype=dtype).transpose(1, 2)
    return x.new_empty((n, splits, k), dtype=dtype).transpose(0, 1)


def _strides(out: Tensor) -> tuple[int, ...]:
    """Along splits, vectors and components: of sums, or of a result, which is that of one split."""
    return (0, *out.stride())[-3:]


def _reduce(nnz: float, partial: Tensor, out: Tensor, accumulate: bool) -> None:
    if partial.stride(1) < partial.stride(2):
        partial, out = partial.transpose(1, 2), out.t()
    grid, block = _blocks_of_sums(*partial.shape)
    sizes = (*partial.shape, *partial.stride(), *out.stride())

    def constants() -> dict[str, Any]:
        overlap = _overlaps(out.device)
        dtype = tl.float64 if partial.dtype == torch.float64 else tl.float32
        flags = {"NNZ": nnz, "DTYPE": dtype, "ACCUMULATE": accumulate, "OVERLAP": overlap}
        return {**flags, **block, **({"launch_pdl": True} if overlap else {})}

    key = (nnz, accumulate, sizes, kind(partial), kind(out))
    run(reduce_partials, grid, out.get_device(), (partial, out, *sizes), key, constants)


@lru_cache(maxsize=4096)
def _blocks_of_sums(splits: int, rows: int, columns: int) -> tuple[tuple[int, int, int], dict[str, int]]:
    """The grid, and what a program of it takes."""
    each = min(max(128, triton.next_power_of_2(rows * columns // REDUCERS)), 1024)
    columns_each = min(triton.next_power_of_2(columns), each)
    rows_each = min(triton.next_power_of_2(rows), each // columns_each)
    grid = (-(-rows // rows_each), -(-columns // columns_each), 1)
    return grid, {"SPLITS": min(triton.next_power_of_2(splits), 8), "ROWS": rows_each, "COLUMNS": columns_each}


# ------------------------------------------------------------------------------------- launches


def _product(spec: SketchSpec, data: Tensor, wide: Tensor, narrow: Tensor) -> launch.Product:
    """The product of data with the sketch between the wide side, x or the adjoint's out, and the narrow one."""
    n, d = wide.shape
    return launch.Product(
        n,
        d,
        spec.n_components,
        spec.nnz,
        spec.feature_offset,
        wide.stride(),
        narrow.stride(),
        DTYPES[data.dtype],
        _precision(data.dtype),
        *_resources(data.device),
    )


def _launch(
    kernel: Any,
    grid: tuple[int, int, int],
    spec: SketchSpec,
    chosen: Split,
    tensors: tuple[Tensor, ...],
    sizes: tuple[int, ...],
    last: tuple[int, ...],
    **flags: bool,
) -> None:
    """``kernel[grid](*tensors, *sizes, seed, feature offset, *last, **flags and constants)``."""
    k, nnz = spec.n_components, spec.nnz

    def constants() -> dict[str, Any]:
        return flags | _constants(chosen, k, nnz, adjoint="FINAL" not in flags)

    arguments = (*tensors, *sizes, spec.seed, spec.feature_offset, *last)
    key = (chosen, k, nnz, sizes, spec.feature_offset < 1 << 31, *flags.values(), *map(kind, tensors))
    run(kernel, grid, tensors[0].get_device(), arguments, key, constants)


@lru_cache(maxsize=4096)
def _constants(chosen: Split, k: int, nnz: int, adjoint: bool) -> dict[str, Any]:
    """The kernel's constants and options, by name."""
    g = law.geometry(k, nnz, 0)
    constants: dict[str, Any] = {
        "K": k,
        "NNZ": nnz,
        "N_TILES": g.n_tiles,
        "LOG_GROUP": g.log_group,
        "LOG_CHUNK": g.log_chunk,
        "WHOLE": chosen.whole,
        "V": chosen.vectors,
        "EVEN": chosen.even,
        "ALIGN": chosen.align,
        "num_warps": 4,
    }
    if isinstance(chosen, launch.Gather):
        constants |= {"T": chosen.t, "H": chosen.h, "L": chosen.lane, "QI": chosen.qi, "QW": chosen.qw}
        constants |= {"VECTORS_LAST": chosen.vectors_last}
        constants |= {
            "OFFSET": tl.int64 if chosen.long else tl.uint32,
            "DTYPE": tl.float64 if chosen.wide else tl.float32,
        }
        if not adjoint:
            constants |= {"PARTS": chosen.parts, "LINES": chosen.lines, "FOLD": 64}
    else:
        constants |= {"KEYS": chosen.keys, "SIGNS": chosen.signs}
        if not adjoint:
            constants |= {"FOLD": chosen.fold}
        if isinstance(chosen, launch.Rows) and not adjoint:
            constants |= {"PREFETCH": NVIDIA and chosen.prefetch}
        if isinstance(chosen, launch.Tiles):
            constants |= {"U": chosen.chunks, "MODE": chosen.mode, "INTERPRETED": INTERPRETED}
            constants |= {"num_stages": chosen.num_stages}
    if chosen.registers and NVIDIA:
        constants["maxnreg"] = chosen.registers
    return constants


def _precision(dtype: torch.dtype) -> str:
    """What torch's user asks of products in fp32, by torch's older names. No other dtype asks."""
    if dtype != torch.float32:
        return "highest"
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # set by torch's newer names, for which the older question has no answer
        matmul: Any = torch.backends.cuda.matmul
        return "high" if matmul.fp32_precision == "tf32" else "highest"


@cache
def _resources(device: torch.device) -> tuple[int, int, bool]:
    """The device's multiprocessors, the bytes of shared memory that a program may take, and whether it runs Gluon's
    kernels."""
    if device.type != "cuda":
        return 4, 232448, False
    from . import hopper as triton_hopper

    properties: Any = torch.cuda.get_device_properties(device)
    hopper = triton_hopper.GLUON and properties.major == 9
    return properties.multi_processor_count, properties.shared_memory_per_block_optin, hopper


@cache
def _overlaps(device: torch.device) -> bool:
    """Whether there is programmatic dependent launch: a launch may begin while the one before still runs."""
    return NVIDIA and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def _on(x: Tensor) -> AbstractContextManager[Any]:
    """Launches go to the tensor's device, whichever is current."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(x.device)
