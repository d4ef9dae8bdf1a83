"""Loads of `project_codes_hopper` for 16-bit data whose lines begin at any element.

A line is what is contiguous in memory: the features of a vector or, if vectors are contiguous, the vectors of a
feature. Where lines begin off multiples of 16 bytes, neither the tensor memory accelerator nor copies of 16 bytes per
thread can put their elements where tensor cores expect them, and loads of single elements take up to 2.5 times as long.
Here, threads copy the 16-byte units that contain a line's elements to shared memory as they are. Each element then lies
up to 14 bytes after its place in an aligned line. This displacement depends only on the line's index within the step,
because steps begin at multiples of 8 vectors and 8 features. Consumers add it to the addresses from which they load
their first operand into registers.

Lines lie in shared memory that Triton does not know of (`kernels.nvidia.shared_memory`), slot after slot.
"""

# (No `from __future__ import annotations`: Gluon would not see the annotations of kernel arguments.)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ..config import hopper, hopper_loaders, product
from ..nvidia import shared_memory
from ..portable import chunk_codes

_copy_async = gluon.jit(shared_memory.copy_async.fn)
HALF = gl.constexpr(hopper.WARPGROUP_VECTORS)
STEP = gl.constexpr(hopper.STEP_COLUMNS)
NO_COLUMN = gl.constexpr(chunk_codes.NO_COLUMN.value)
ITEM, UNIT = gl.constexpr(2), gl.constexpr(product.VECTOR_BYTES)  # bytes of an element and of a unit
UNIT_ELEMENTS = gl.constexpr(hopper_loaders.UNIT_ELEMENTS)


@gluon.constexpr_function
def lines_of(CHOSEN):
    """The number of lines of a slot."""
    return STEP.value if CHOSEN.vectors_contiguous else 2 * HALF.value


@gluon.constexpr_function
def panels_of(CHOSEN):
    """The number of panels of a line."""
    return 1 if CHOSEN.vectors_contiguous else STEP.value >> CHOSEN.log_panel


@gluon.constexpr_function
def panel_units(CHOSEN):
    """The number of units that the elements of a panel take in an aligned line."""
    return (2 * HALF.value if CHOSEN.vectors_contiguous else 1 << CHOSEN.log_panel) // UNIT_ELEMENTS.value


@gluon.jit
def unit_indices(layout: gl.constexpr, COUNT: gl.constexpr, LAST: gl.constexpr, CHOSEN: gl.constexpr):
    """(lines, panels, units within a panel) of the units that the threads of `layout` copy, COUNT per line.

    If LAST, these are the units after each panel's aligned units, which only displaced lines need; else the latter.
    """
    line = gl.arange(0, lines_of(CHOSEN), layout=gl.SliceLayout(1, layout))[:, None]
    unit = gl.arange(0, COUNT, layout=gl.SliceLayout(0, layout))[None, :]
    PER_PANEL: gl.constexpr = panel_units(CHOSEN)
    panel, within = unit // PER_PANEL, unit % PER_PANEL
    if LAST:
        panel, within = unit, unit * 0 + PER_PANEL
    return line, panel, within


@gluon.jit
def line_columns(columns, done, count, start, line, panel, CHOSEN: gl.constexpr):
    """The column of each panel's first element (of each line if vectors are contiguous); see `boxes.panel_columns`."""
    step_f = line if CHOSEN.vectors_contiguous else panel << CHOSEN.log_panel
    if CHOSEN.one_tile:
        return start + (done << CHOSEN.log_block) + step_f
    i = done + (step_f >> CHOSEN.log_block)
    column = gl.load(columns + i, mask=i < count, other=NO_COLUMN)
    return column + (step_f & ((1 << CHOSEN.log_block) - 1))


@gluon.jit
def _copy_units(raw, address, first, line, panel, within, j, n, d, stride_v, stride_f, CHOSEN: gl.constexpr):
    """Start to copy a unit for each element of `line`, `panel` and `within`.

    Elements beyond the end of a line, and lines that do not exist, are filled with zeros.
    """
    LINE: gl.constexpr = CHOSEN.line_bytes
    PANEL: gl.constexpr = UNIT * (panel_units(CHOSEN) + 1)
    if CHOSEN.vectors_contiguous:
        begin = address + j.to(gl.int64) * (ITEM * stride_f)
        end = begin + ITEM * n.to(gl.int64)
        begin += ITEM * first.to(gl.int64)
        exists = (j >= 0) & (j < d)
    else:
        v = first + line
        begin = address + v.to(gl.int64) * (ITEM * stride_v)
        end = begin + ITEM * d.to(gl.int64)
        begin += ITEM * j.to(gl.int64)
        exists = (v < n) & (j >= 0) & (j < d)
    source = (begin & -UNIT) + UNIT * within
    size = gl.where(exists, gl.minimum(gl.maximum(end - source, 0), UNIT), 0).to(gl.int32)
    source = gl.where(size > 0, source, address & -UNIT)
    target = raw + line * LINE + panel * PANEL + within * UNIT
    # (In machine code, the size of a partial unit is given by an address within the unit. For memory that does not come
    # from torch's caching allocator, compute-sanitizer takes this, in the data's last unit, for a read past its end.)
    _copy_async(target, source, size, UNIT)


@gluon.jit
def copy_lines(
    raw, full, slot, address, first, units, last_units, j, last_j, n, d, stride_v, stride_f,
    CHOSEN: gl.constexpr,
):  # fmt: skip
    """Start to copy a step's lines to a slot of the memory at `raw`; `full` receives an arrival from each thread.

    units, last_units : from `unit_indices`.  j, last_j : from `line_columns`.  first : the first vector.
    """
    raw += slot * (lines_of(CHOSEN) * CHOSEN.line_bytes)
    line, panel, within = units
    _copy_units(raw, address, first, line, panel, within, j, n, d, stride_v, stride_f, CHOSEN)
    line, panel, within = last_units
    _copy_units(raw, address, first, line, panel, within, last_j, n, d, stride_v, stride_f, CHOSEN)
    async_copy.mbarrier_arrive(full.index(slot), increment_count=False)


@gluon.jit
def element_addresses(raw, address, stride, layout: gl.constexpr, CHOSEN: gl.constexpr, CONSUMER: gl.constexpr):
    """The addresses in slot 0 of the elements [HALF, STEP] of a consumer's vectors.

    stride : between lines, in elements.
    """
    LINE: gl.constexpr = CHOSEN.line_bytes
    PANEL: gl.constexpr = UNIT * (panel_units(CHOSEN) + 1)
    v = CONSUMER * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))[:, None]
    f = gl.arange(0, STEP, layout=gl.SliceLayout(0, layout))[None, :]
    begin, step = (address & (UNIT - 1)).to(gl.int32), (ITEM * stride & (UNIT - 1)).to(gl.int32)
    if CHOSEN.vectors_contiguous:
        return raw + (f * LINE + ((begin + f * step) & (UNIT - 1))) + ITEM * v
    within = (f >> CHOSEN.log_panel) * PANEL + ITEM * (f & ((1 << CHOSEN.log_panel) - 1))
    return raw + (v * LINE + ((begin + v * step) & (UNIT - 1))) + within


@gluon.jit
def load_lines(addresses, slot, DTYPE: gl.constexpr, CHOSEN: gl.constexpr):
    """The elements of a slot, two per register. addresses : from `element_addresses`."""
    addresses += slot * (lines_of(CHOSEN) * CHOSEN.line_bytes)
    bits = gl.inline_asm_elementwise(
        "{ .reg .b16 a, b; ld.shared.b16 a, [$1]; ld.shared.b16 b, [$2]; mov.b32 $0, {a, b}; }", "=r,r,r", [addresses],
        gl.int16, False, 2,
    )  # fmt: skip
    return bits.to(DTYPE, bitcast=True)
