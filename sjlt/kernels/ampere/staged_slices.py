"""Slices of 16-bit data whose lines begin at any element, for `project_codes_ampere`.

As in `hopper.staged_lines`, threads copy the aligned units of 16 bytes that contain a line's elements to a ring of
slots. Before a slice is multiplied, threads load its elements, two at a time, from wherever they lie, and store them as
aligned lines, from which warps load their operands.
"""

# (No `from __future__ import annotations`: Gluon would not see the annotations of kernel arguments.)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..config import ampere_kernel
from ..hopper.staged_lines import (
    copy_units,
    element_addresses,
    lines_of,
    panel_begin,
    panel_units,
    panels_of,
    unit_indices,
)

SLICE = gl.constexpr(ampere_kernel.SLICE_COLUMNS)
WARPS = gl.constexpr(ampere_kernel.WARPS)
ITEM = gl.constexpr(2)  # bytes of an element


@gluon.jit
def unit_columns(columns, number, capacity, f, CHOSEN: gl.constexpr):
    """The columns f of a slice; arbitrary numbers past the last block."""
    position = number * SLICE + f
    i = position >> CHOSEN.log_block
    column = gl.load(columns + i, mask=i < capacity, other=0)
    return column + (position & ((1 << CHOSEN.log_block) - 1))


@gluon.jit
def slice_units(CHOSEN: gl.constexpr):
    """The units that a thread copies: (lines, panels, units), the same for last units, and which of these it copies.

    Every panel has a last unit, which only displaced lines need. If there are fewer than threads, some copy none.
    """
    UNITS: gl.constexpr = panels_of(CHOSEN) * panel_units(ITEM, CHOSEN)
    LAST: gl.constexpr = lines_of(CHOSEN) * panels_of(CHOSEN)
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32 // UNITS, UNITS], [WARPS, 1], [1, 0])
    last_layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    i = gl.arange(0, max(LAST, 32 * WARPS), layout=last_layout)
    last = (i // panels_of(CHOSEN) % lines_of(CHOSEN), i % panels_of(CHOSEN), i * 0 + panel_units(ITEM, CHOSEN))
    return unit_indices(layout, UNITS, False, ITEM, CHOSEN), last, i < LAST


@gluon.jit
def first_columns(columns, number, capacity, units, CHOSEN: gl.constexpr):
    """The columns of the first elements of the units' panels in a slice, for both kinds of units."""
    some, last, _ = units
    j = unit_columns(columns, number, capacity, panel_begin(some[0], some[1], CHOSEN), CHOSEN)
    return j, unit_columns(columns, number, capacity, panel_begin(last[0], last[1], CHOSEN), CHOSEN)


@gluon.jit
def copy_slice_lines(
    raw, slot, address, first, units, j, number, count, n, d, stride_v, stride_f, CHOSEN: gl.constexpr
):
    """Start to copy the lines of slice `number` of `count` blocks to a slot of the memory at `raw`.

    first : the first vector.  units : from `slice_units`.  j : from `first_columns`.
    """
    raw += slot * (lines_of(CHOSEN) * CHOSEN.line_bytes)
    some, last, keep = units
    end = (count << CHOSEN.log_block) - number * SLICE
    column = gl.where(panel_begin(some[0], some[1], CHOSEN) < end, j[0], -1)
    copy_units(raw, address, first, some[0], some[1], some[2], column, n, d, stride_v, stride_f, ITEM, CHOSEN)
    column = gl.where(panel_begin(last[0], last[1], CHOSEN) < end, j[1], -1)
    copy_units(raw, address, first, last[0], last[1], last[2], column, n, d, stride_v, stride_f, ITEM, CHOSEN, keep)


@gluon.jit
def pair_addresses(raw, address, stride, HEIGHT: gl.constexpr, WIDTH: gl.constexpr, CHOSEN: gl.constexpr):
    """The addresses in slot 0 of the elements [HEIGHT, WIDTH] of a slice, of which a thread loads pairs."""
    LANES: gl.constexpr = min(32, WIDTH // 2)
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    line = gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, layout))[:, None]
    within = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))[None, :]
    if CHOSEN.vectors_contiguous:
        addresses = element_addresses(raw, address, stride, within, line, ITEM, CHOSEN)
    else:
        addresses = element_addresses(raw, address, stride, line, within, ITEM, CHOSEN)
    return addresses


@gluon.jit
def load_pairs(addresses, slot, DTYPE: gl.constexpr, CHOSEN: gl.constexpr):
    """The elements of a slot, two per register. addresses : from `pair_addresses`."""
    addresses += slot * (lines_of(CHOSEN) * CHOSEN.line_bytes)
    bits = gl.inline_asm_elementwise(
        "{ .reg .b32 at, low, high, by; and.b32 at, $1, -4; and.b32 by, $1, 2; shl.b32 by, by, 3;"
        " ld.shared.b32 low, [at]; ld.shared.b32 high, [at+4]; shf.r.wrap.b32 $0, low, high, by; }", "=r,r,r",
        [addresses], gl.int16, False, 2,
    )  # fmt: skip
    return bits.to(DTYPE, bitcast=True)
