"""Dropout on the Triton backend: torch tensors on one CUDA device (or on the CPU, where Triton's interpreter runs)."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ...inputs.dropout_axes import INDEX, LENGTH, OPERANDS, SEEDS, Axis, Grid, grid, offsets
from ...kernels.portable.dropout import ADD, DROP, MASK, STORED, dropout_flat, dropout_tiles
from ...laws.dropout import Rule
from .launcher import kind, run

# Tuned on an H200 for 2^28 elements of fp32 and bf16.
FLAT_BYTES = 4096  # of the result, of a program on flat memory
TILE = 2048  # elements of a tile where columns are contiguous in memory
SIDE = 64  # of a tile where rows are, in one of the tensors or all
WARPS, TILE_WARPS = 4, 2  # of a program, and of one on the former tiles
WASTE = 8  # at most one in so many of a tile's columns may lie beyond the last


def drop(rule: Rule, x: Tensor, out: Tensor) -> None:
    """out = dropout of x; they may be one tensor."""
    _apply(DROP.value, rule, out, x, x)


def drop_add(rule: Rule, x: Tensor, residual: Tensor, out: Tensor) -> None:
    """out = residual + dropout of x."""
    _apply(ADD.value, rule, out, x, residual)


def drop_stored(scale: float, x: Tensor, keep: Tensor, out: Tensor) -> None:
    """out = x scale where keep, of bool, else 0."""
    _apply(STORED.value, Rule(16, 1, scale), out, x, keep.view(torch.uint8))


def mask(rule: Rule, out: Tensor) -> None:
    """out, of bool, = which elements of its shape live."""
    _apply(MASK.value, rule, out.view(torch.uint8), None, None)


def _apply(mode: int, rule: Rule, out: Tensor, x: Tensor | None, other: Tensor | None) -> None:
    if out.numel() == 0:
        return
    if out.is_cuda and out.get_device() != torch.cuda.current_device():
        with torch.cuda.device(out.device):
            _apply(mode, rule, out, x, other)
        return
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
    """Whether elements lie side by side in the order of the law's indices: the most frequent case, in short."""
    return (
        rule.row_stride is None
        and (rule.seeds is None or rule.seeds.ndim == 0)
        and out.is_contiguous()
        and (x is out or x.is_contiguous())
        and (other is x or other.is_contiguous())
    )


# ------------------------------------------------------------------------------------- launches


def _launch_flat(mode: int, rule: Rule, x: Tensor, other: Tensor, out: Tensor) -> None:
    bits, _, _, _, _, offset, _, seeds, steps = rule
    calls, n = _calls(bits, out, offset), out.numel()
    block = max(FLAT_BYTES // out.itemsize, 32 * WARPS * 128 // bits)  # a call at least for each thread
    if calls == 0 and out.itemsize == 4:
        block *= 2
    constants = (mode, bits, calls, steps is not None, seeds is not None, block)
    tensors = (x, other, out, seeds, steps)
    _launch(dropout_flat, (-(-n // block), 1, 1), rule, tensors, (offset, n), (), constants, WARPS)


def _calls(bits: int, out: Tensor, *indices: int) -> int:
    """The kernels' CALLS for groups that begin at multiples of the lanes from these indices on."""
    for index in indices:
        if index % (128 // bits):
            return 0
    return 2 if bits == 32 and out.itemsize == 2 else 1  # so that a thread's decisions are for 16 bytes


class Tiles(NamedTuple):
    """How `dropout_tiles` cuts a grid of axes: its constants, and tiles along rows and columns."""

    rows_first: bool
    shape: int
    even: bool
    align: int
    rows: int
    columns: int
    tiles: int
    warps: int


@lru_cache(maxsize=4096)
def choose(axes: Grid, lanes: int) -> Tiles:
    """The tiles for a grid of axes and so many lanes a call of Philox."""
    rows, columns = axes.rows, axes.columns
    rows_first = [row < column for row, column in zip(rows[OPERANDS:], columns[OPERANDS:], strict=True)]
    by_columns = rows[LENGTH] == 1 or not any(rows_first)
    if by_columns:
        tile, width = TILE, _width(columns[LENGTH], 2 * lanes)
    else:
        tile = SIDE * SIDE
        width = tile // min(SIDE, triton.next_power_of_2(rows[LENGTH]))
        width = min(width, max(2 * lanes, triton.next_power_of_2(columns[LENGTH])))
    height = min(tile // width, triton.next_power_of_2(rows[LENGTH]))
    first, slow = (rows, columns) if all(rows_first) else (columns, rows)
    strides = [step for axis in (slow, *axes.others) for step in axis[OPERANDS:]]
    align = math.gcd(16, first[LENGTH], *strides) if len(set(rows_first)) == 1 else 1
    even = rows[LENGTH] % height == 0 and columns[LENGTH] % width == 0
    tiles = -(-rows[LENGTH] // height) * -(-columns[LENGTH] // width)
    shape = 2 if axes.others else 0 if (height if all(rows_first) else width) >= first[LENGTH] else 1
    return Tiles(all(rows_first), shape, even, align, height, width, tiles, TILE_WARPS if by_columns else WARPS)


def _width(columns: int, least: int) -> int:
    """Columns of a tile: the widest that wastes little."""
    width: int = min(TILE, max(least, triton.next_power_of_2(columns)))
    while width > max(least, 32) and (-columns % width) * WASTE > columns:
        width //= 2
    return width


def _launch_tiles(mode: int, rule: Rule, axes: Grid, x: Tensor, other: Tensor, out: Tensor) -> None:
    """The launches on a grid of axes: one, but where more than two are left over."""
    lanes, steps, seeds = 128 // rule.bits, rule.steps, rule.seeds
    chosen = choose(axes, lanes)
    one: Axis = (1, *(0,) * (len(axes.columns) - 1))
    outer, far = (*axes.others, one, one)[:2]
    by_axis = (axes.rows, outer, far)
    for begin in offsets(axes.others[2:]) if len(axes.others) > 2 else [(0,) * 5]:
        offset, *places = (rule.offset + begin[0], *begin[1:])
        seed_view, x_view, other_view, out_view = (
            t if not place or t is None else t.as_strided((1,), (1,), t.storage_offset() + place)
            for t, place in zip((seeds, x, other, out), places, strict=True)
        )
        calls = _calls(rule.bits, out, offset, *(axis[INDEX] for axis in by_axis))
        steps_in_memory = (
            axis[which] for which in range(OPERANDS, OPERANDS + 3) for axis in (axes.rows, axes.columns, outer, far)
        )
        sizes = (
            *(axis[LENGTH] for axis in (axes.rows, axes.columns, outer)),
            *(axis[INDEX] for axis in by_axis),
            *(axis[SEEDS] for axis in by_axis),
            *steps_in_memory,
        )
        constants = (
            mode, rule.bits, calls, steps is not None, seeds is not None,
            chosen.rows_first, chosen.shape, chosen.even, chosen.align, chosen.rows, chosen.columns,
        )  # fmt: skip
        tensors = (x_view, other_view, out_view, seed_view, steps)
        grid_ = (chosen.tiles * outer[LENGTH] * far[LENGTH], 1, 1)
        _launch(dropout_tiles, grid_, rule, tensors, (offset,), sizes, constants, chosen.warps)


def _launch(
    kernel: Any,
    grid_: tuple[int, int, int],
    rule: Rule,
    tensors: tuple[Any, ...],
    changing: tuple[int, ...],
    sizes: tuple[int, ...],
    constants: tuple[Any, ...],
    warps: int,
) -> None:
    """``kernel[grid_](*tensors, *the rule's numbers, *changing, *sizes, *constants)``."""
    x, other, out, seeds, steps = tensors
    arguments = (
        x, other, out, out if seeds is None else seeds, out if steps is None else steps,
        rule.seed, rule.step, rule.threshold, rule.scale, *changing, *sizes,
    )  # fmt: skip
    key = (
        sizes, constants, kind(x), kind(out), other is x or kind(other),
        seeds is None or kind(seeds), steps is None or kind(steps),
    )  # fmt: skip

    def by_name() -> dict[str, Any]:
        names = kernel.arg_names[len(arguments) :]
        return dict(zip(names, constants, strict=True), num_warps=warps, enable_fp_fusion=False)

    run(kernel, grid_, out.get_device(), arguments, key, by_name)
