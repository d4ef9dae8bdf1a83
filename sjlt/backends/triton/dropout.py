"""Dropout on Triton, for torch tensors on one CUDA device, or on the CPU in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

import torch
from torch import Tensor

from ...inputs.dropout_axes import INDEX, LENGTH, OPERANDS, SEEDS, Axis, Grid, grid, offsets
from ...kernels.config.dropout import FLAT_WARPS, calls_per_group, choose_tiles, flat_block
from ...kernels.portable.dropout import ADD, DROP, MASK, STORED, dropout_flat, dropout_tiles
from ...laws.dropout import Rule
from . import device
from .launcher import Launch, kind, remember, run

_flat: dict[Hashable, Launch] = {}


def drop(rule: Rule, x: Tensor, out: Tensor) -> None:
    """Write the dropout of x to `out`, which may be x."""
    _apply(DROP.value, rule, out, x, x)


def drop_add(rule: Rule, x: Tensor, residual: Tensor, out: Tensor) -> None:
    """Write residual + dropout of x to `out`."""
    _apply(ADD.value, rule, out, x, residual)


def drop_stored(scale: float, x: Tensor, keep: Tensor, out: Tensor) -> None:
    """Write x * scale to `out` where `keep` (bool) is true, and 0 elsewhere."""
    _apply(STORED.value, Rule(16, 1, scale), out, x, keep.view(torch.uint8))


def mask(rule: Rule, out: Tensor) -> None:
    """Write whether each element is kept to `out` (bool)."""
    _apply(MASK.value, rule, out.view(torch.uint8), None, None)


def _apply(mode: int, rule: Rule, out: Tensor, x: Tensor | None, other: Tensor | None) -> None:
    if out.numel() == 0:
        return
    index = out.get_device()
    if device.is_current(index):
        _apply_here(mode, rule, out, x, other)
    else:
        with torch.cuda.device(index):
            _apply_here(mode, rule, out, x, other)


def _apply_here(mode: int, rule: Rule, out: Tensor, x: Tensor | None, other: Tensor | None) -> None:
    x = out if x is None else x
    other = x if other is None else other
    if _is_flat(rule, x, other, out):
        _launch_flat(mode, rule, x, other, out)
        return
    row_stride, seeds = rule.row_stride, rule.seeds
    if row_stride is None:
        row_stride = out.shape[-1] if out.ndim else 1
    seed_steps = () if seeds is None else seeds.stride()
    axes = grid(tuple(out.shape), row_stride, seed_steps, x.stride(), other.stride(), out.stride())
    if axes.flat and (seeds is None or seeds.ndim == 0):
        _launch_flat(mode, rule, x, other, out)
    else:
        _launch_tiles(mode, rule, axes, x, other, out)


def _is_flat(rule: Rule, x: Tensor, other: Tensor, out: Tensor) -> bool:
    """Whether all elements are contiguous in the order of the law's indices: a quick test for the most common case."""
    return (
        rule.row_stride is None
        and (rule.seeds is None or rule.seeds.ndim == 0)
        and out.is_contiguous()
        and (x is out or x.is_contiguous())
        and (other is x or other.is_contiguous())
    )


# ------------------------------------------------------------------------------------- launches


def _launch_flat(mode: int, rule: Rule, x: Tensor, other: Tensor, out: Tensor) -> None:
    bits, threshold, scale, seed, step, offset, _, seeds, steps = rule
    kinds = (
        kind(x), kind(out), other is x or kind(other), seeds is None or kind(seeds), steps is None or kind(steps),
    )  # fmt: skip
    key = (mode, bits, offset % (128 // bits) == 0, out.numel(), out.get_device(), kinds)
    launch = _flat.get(key)
    if launch is None:
        launch = remember(_flat, key, _prepare_flat(mode, rule, out, kinds))
    tensors = (x, other, out, out if seeds is None else seeds, out if steps is None else steps)
    launch(tensors, seed, step, threshold, scale, offset)


def _prepare_flat(mode: int, rule: Rule, out: Tensor, kinds: Hashable) -> Launch:
    """A launch for tensors with the size of `out` and these kinds, for any seed, step and probability."""
    calls, n = calls_per_group(rule.bits, out.itemsize, (rule.offset,)), out.numel()
    block = flat_block(rule.bits, calls, out.itemsize)
    constants = (mode, rule.bits, calls, rule.steps is not None, rule.seeds is not None, block)
    names = dropout_flat.arg_names[-len(constants) :]
    by_name = dict(zip(names, constants, strict=True), num_warps=FLAT_WARPS, enable_fp_fusion=False)
    # Triton specializes on the kinds of tensors, not on the number of elements.
    compiled_for = (constants, kinds)
    return Launch(dropout_flat, (-(-n // block), 1, 1), out.get_device(), (), (n,), compiled_for, lambda: by_name)


def _launch_tiles(mode: int, rule: Rule, axes: Grid, x: Tensor, other: Tensor, out: Tensor) -> None:
    """Launch on a grid of axes: once, or if it has more than two other axes, once for each index of the rest."""
    lanes, steps, seeds = 128 // rule.bits, rule.steps, rule.seeds
    chosen = choose_tiles(axes, lanes)
    no_axis: Axis = (1, *(0,) * (len(axes.columns) - 1))
    outer, far = (*axes.others, no_axis, no_axis)[:2]
    by_axis = (axes.rows, outer, far)
    for index_offset, *memory_offsets in offsets(axes.others[2:]) if len(axes.others) > 2 else [(0,) * 5]:
        offset = rule.offset + index_offset
        seed_view, x_view, other_view, out_view = (
            t if not start or t is None else t.as_strided((1,), (1,), t.storage_offset() + start)
            for t, start in zip((seeds, x, other, out), memory_offsets, strict=True)
        )
        calls = calls_per_group(rule.bits, out.itemsize, (offset, *(axis[INDEX] for axis in by_axis)))
        strides = (
            axis[operand] for operand in range(OPERANDS, OPERANDS + 3) for axis in (axes.rows, axes.columns, outer, far)
        )
        sizes = (
            *(axis[LENGTH] for axis in (axes.rows, axes.columns, outer)),
            *(axis[INDEX] for axis in by_axis),
            *(axis[SEEDS] for axis in by_axis),
            *strides,
        )
        constants = (
            mode, rule.bits, calls, steps is not None, seeds is not None,
            chosen.rows_contiguous, chosen.shape, chosen.unmasked, chosen.align, chosen.rows, chosen.columns,
        )  # fmt: skip
        tensors = (
            x_view, other_view, out_view,
            out if seed_view is None else seed_view, out if steps is None else steps,
        )  # fmt: skip
        key = (
            sizes, constants, kind(x_view), kind(out_view), other is x or kind(other_view),
            seed_view is None or kind(seed_view), steps is None or kind(steps),
        )  # fmt: skip
        names = dropout_tiles.arg_names[-len(constants) :]
        by_name = dict(zip(names, constants, strict=True), num_warps=chosen.warps, enable_fp_fusion=False)
        arguments = (*tensors, rule.seed, rule.step, rule.threshold, rule.scale, offset, *sizes)
        grid_ = (chosen.tiles * outer[LENGTH] * far[LENGTH], 1, 1)
        run(dropout_tiles, grid_, out.get_device(), arguments, key, partial(dict, by_name))
