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

from .. import law
from ..kernels import launch
from ..kernels.gather import adjoint_gather, project_gather
from ..kernels.reduce import reduce_partials
from ..kernels.rows import project_rows
from ..kernels.tiles import adjoint_tiles, project_tiles, scale_vectors

if TYPE_CHECKING:
    from ..sketch import Sketch

Launch = launch.Tiles | launch.Rows | launch.Gather

DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}
INTERPRETED = bool(triton.knobs.runtime.interpret)


def project(sketch: Sketch, x: Tensor, out: Tensor, accumulate: bool) -> None:
    """out (n, k) = x (n, d) S', or += where `accumulate`."""
    n, d = x.shape
    if n == 0 or d == 0:
        if not accumulate:
            out.zero_()
        return
    with _on(x.device):
        chosen = launch.choose(_product(sketch, x, x))
        if chosen.splits == 1:
            _project(chosen, sketch, x, out, (0, *out.stride()), True, accumulate)
        else:
            partial = _partial(chosen, x, out)
            _project(chosen, sketch, x, partial, partial.stride(), False, False)
            _reduce(sketch.nnz, partial, out, accumulate)


def adjoint(sketch: Sketch, y: Tensor, out: Tensor, accumulate: bool) -> None:
    """out (n, d) = y (n, k) S, or += where `accumulate`."""
    n, d = out.shape
    if n == 0 or d == 0:
        return
    with _on(y.device):
        chosen = launch.choose(_product(sketch, y, out), adjoint=True)
        constants = _constants(chosen, sketch.n_components, sketch.nnz, True)
        operands = (y, out, n, d, *y.stride(), *out.stride(), _signed(sketch.seed), sketch.feature_offset)
        programs = -(-n // chosen.vectors)
        if isinstance(chosen, launch.Gather):
            log_chunk = constants["LOG_CHUNK"]
            offset = sketch.feature_offset
            chunks = ((offset + d - 1) >> log_chunk) - (offset >> log_chunk) + 1
            grid = (-(-chunks // (chosen.qi * chosen.qw)) * programs,)
            adjoint_gather[grid](*operands, ACCUMULATE=accumulate, **constants)
        else:
            grid = (constants["N_TILES"] * programs, chosen.splits)
            adjoint_tiles[grid](*operands, chosen.groups_per_split, ACCUMULATE=accumulate, **constants)


def _project(
    chosen: Launch, sketch: Sketch, x: Tensor, out: Tensor, strides: tuple[int, ...], final: bool, accumulate: bool
) -> None:
    """The launch on x into out, or into partial sums."""
    n, d = x.shape
    constants = _constants(chosen, sketch.n_components, sketch.nnz, False)
    grid = (constants["N_TILES"] * -(-n // chosen.vectors), chosen.splits)
    law_and_strides = (n, d, *x.stride(), *strides, _signed(sketch.seed), sketch.feature_offset)
    if isinstance(chosen, launch.Gather):
        project_gather[grid](
            x, out, *law_and_strides, chosen.batches, FINAL=final, ACCUMULATE=accumulate, **constants
        )
    elif isinstance(chosen, launch.Rows):
        project_rows[grid](
            x, out, *law_and_strides, chosen.groups_per_split, FINAL=final, ACCUMULATE=accumulate, **constants
        )
    else:
        scales = x
        if chosen.mode == launch.FP16_PAIR:
            scales = x.new_empty(n)
            first = d // 2 // launch.SAMPLE * launch.SAMPLE
            scale_vectors[(-(-n // 256),)](x, scales, n, first, *x.stride(), V=256, SAMPLE=launch.SAMPLE)
        project_tiles[grid](
            x, out, scales, *law_and_strides, chosen.groups_per_split, FINAL=final, ACCUMULATE=accumulate, **constants
        )


def _partial(chosen: Launch, x: Tensor, out: Tensor) -> Tensor:
    """Room for the partial sums (splits, n, k), in the memory order of out."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    n, k = out.shape
    if out.stride(0) < out.stride(1):
        return x.new_empty((chosen.splits, k, n), dtype=dtype).transpose(1, 2)
    return x.new_empty((chosen.splits, n, k), dtype=dtype)


def _reduce(nnz: int, partial: Tensor, out: Tensor, accumulate: bool) -> None:
    if partial.stride(1) < partial.stride(2):
        partial, out = partial.transpose(1, 2), out.t()
    splits, rows, columns = partial.shape
    block = min(triton.next_power_of_2(columns), 256)
    reduce_partials[(rows, -(-columns // block))](
        partial, out, splits, rows, columns, *partial.stride(), *out.stride(), NNZ=nnz, ACCUMULATE=accumulate,
        DTYPE=tl.float64 if partial.dtype == torch.float64 else tl.float32,
        SPLITS=min(triton.next_power_of_2(splits), 16), ROWS=1, COLUMNS=block,
    )  # fmt: skip


# ------------------------------------------------------------------------------------- launches


def _product(sketch: Sketch, data: Tensor, wide: Tensor) -> launch.Product:
    """The product of data with the sketch whose wide side, x or the adjoint's out, is `wide`."""
    n, d = wide.shape
    return launch.Product(
        n,
        d,
        sketch.n_components,
        sketch.nnz,
        sketch.feature_offset,
        wide.stride(),
        DTYPES[data.dtype],
        torch.get_float32_matmul_precision(),
        _multiprocessors(data.device),
    )


@lru_cache(maxsize=4096)
def _constants(chosen: Launch, k: int, nnz: int, adjoint: bool) -> dict[str, Any]:
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
        constants |= {"OFFSET": tl.int64 if chosen.long else tl.uint32, "DTYPE": tl.float64 if chosen.wide else tl.float32}
        if not adjoint:
            constants |= {"PARTS": chosen.parts, "LINES": chosen.lines, "FOLD": 64}
    else:
        constants |= {"KEYS": chosen.keys, "SIGNS": chosen.signs}
        if not adjoint:
            constants |= {"FOLD": chosen.fold}
        if isinstance(chosen, launch.Tiles):
            constants |= {"U": chosen.chunks, "MODE": chosen.mode, "INTERPRETED": INTERPRETED}
            constants |= {"num_stages": chosen.num_stages}
    if chosen.registers and torch.version.hip is None:
        constants["maxnreg"] = chosen.registers
    return constants


def _signed(seed: int) -> int:
    return seed - (1 << 64) if seed >> 63 else seed


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Launches go to the tensors' device, whichever is current."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
