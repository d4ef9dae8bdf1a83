"""Loads of `project_codes_hopper` for data whose lines begin at any element.

A line is what is contiguous in memory: the features of a vector or, if vectors are contiguous, the vectors of a
feature. Where lines begin off multiples of 16 bytes, neither the tensor memory accelerator nor copies of 16 bytes per
thread can put their elements where tensor cores expect them, and loads of single elements take up to 2.5 times as long.
Here, threads copy the 16-byte units that contain a line's elements to shared memory as they are. Each element then lies
less than 16 bytes after its place in an aligned line. This displacement depends only on the line's index within the
step, because steps begin at multiples of a unit's vectors and features. Consumers add it to the addresses from which
they load their first operand into registers.

Lines lie in shared memory that Triton does not know of (`kernels.nvidia.shared_memory`), slot after slot.
"""

# (No `from __future__ import annotations`: Gluon would not see the annotations of kernel arguments.)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ..config import product
from ..nvidia import shared_memory
from ..portable import chunk_codes

_copy_async = gluon.jit(shared_memory.copy_async.fn)
_copy_async_where = gluon.jit(shared_memory.copy_async_where.fn)
NO_COLUMN = gl.constexpr(chunk_codes.NO_COLUMN.value)
UNIT = gl.constexpr(product.VECTOR_BYTES)  # bytes of a unit
MANY = gl.constexpr(1 << 20)  # more elements than a line of a slot has


@gluon.constexpr_function
def lines_of(CHOSEN):
    """The number of lines of a slot."""
    return CHOSEN.step_columns if CHOSEN.vectors_contiguous else CHOSEN.program_vectors


@gluon.constexpr_function
def panels_of(CHOSEN):
    """The number of panels of a line."""
    return 1 if CHOSEN.vectors_contiguous else CHOSEN.step_columns >> CHOSEN.log_panel


@gluon.constexpr_function
def panel_units(item, CHOSEN):
    """The number of units that a panel's elements of `item` bytes take in an aligned line."""
    return (CHOSEN.program_vectors if CHOSEN.vectors_contiguous else 1 << CHOSEN.log_panel) * item // UNIT.value


@gluon.jit
def unit_indices(
    layout: gl.constexpr, COUNT: gl.constexpr, LAST: gl.constexpr, ITEM: gl.constexpr, CHOSEN: gl.constexpr
):
    """(lines, panels, units within a panel) of the units that the threads of `layout` copy, COUNT per line.

    If LAST, these are the units after each panel's aligned units, which only displaced lines need; else the latter.
    """
    line = gl.arange(0, lines_of(CHOSEN), layout=gl.SliceLayout(1, layout))[:, None]
    unit = gl.arange(0, COUNT, layout=gl.SliceLayout(0, layout))[None, :]
    PER_PANEL: gl.constexpr = panel_units(ITEM, CHOSEN)
    panel, within = unit // PER_PANEL, unit % PER_PANEL
    if LAST:
        panel, within = unit, unit * 0 + PER_PANEL
    return line, panel, within


@gluon.jit
def panel_begin(line, panel, CHOSEN: gl.constexpr):
    """The column of a step at which each panel begins (each line if vectors are contiguous)."""
    return line if CHOSEN.vectors_contiguous else panel << CHOSEN.log_panel


@gluon.jit
def line_columns(columns, done, count, start, line, panel, CHOSEN: gl.constexpr):
    """The column of each panel's first element (of each line if vectors are contiguous); see `boxes.panel_columns`."""
    step_f = panel_begin(line, panel, CHOSEN)
    if CHOSEN.one_tile:
        return start + (done << CHOSEN.log_block) + step_f
    i = done + (step_f >> CHOSEN.log_block)
    column = gl.load(columns + i, mask=i < count, other=NO_COLUMN)
    return column + (step_f & ((1 << CHOSEN.log_block) - 1))


@gluon.jit
def copy_units(
    raw, address, first, line, panel, within, j, n, d, stride_v, stride_f, ITEM: gl.constexpr, CHOSEN: gl.constexpr,
    keep=None,
):  # fmt: skip
    """Start to copy a unit for each element of `line`, `panel` and `within`, or of those where `keep`.

    Elements beyond the end of a line, and lines that do not exist, are filled with zeros.
    """
    LINE: gl.constexpr = CHOSEN.line_bytes
    PANEL: gl.constexpr = UNIT * (panel_units(ITEM, CHOSEN) + 1)
    if CHOSEN.vectors_contiguous:
        begin = address + ITEM * first.to(gl.int64) + j.to(gl.int64) * (ITEM * stride_f)
        left = n - first
        exists = (j >= 0) & (j < d)
    else:
        v = first + line
        begin = address + v.to(gl.int64) * (ITEM * stride_v) + ITEM * j.to(gl.int64)
        left = d - j
        exists = (v < n) & (j >= 0) & (j < d)
    # (Sizes are computed in 32 bits: 64 bits take more registers than there are.)
    displacement = begin.to(gl.int32) & (UNIT - 1)
    left = ITEM * gl.minimum(left, MANY) + displacement - UNIT * within  # bytes from the beginning of the unit
    size = gl.where(exists, gl.minimum(gl.maximum(left, 0), UNIT), 0)
    source = gl.where(size > 0, (begin + UNIT * within) & -UNIT, address & -UNIT)
    target = raw + line * LINE + panel * PANEL + within * UNIT
    # (In machine code, the size of a partial unit is given by an address within the unit. For memory that does not come
    # from torch's caching allocator, compute-sanitizer takes this, in the data's last unit, for a read past its end.)
    if keep is None:
        _copy_async(target, source, size, UNIT)
    else:
        _copy_async_where(target, source, size, keep)


@gluon.jit
def copy_lines(
    raw, full, slot, address, first, units, last_units, j, last_j, n, d, stride_v, stride_f,
    ITEM: gl.constexpr, CHOSEN: gl.constexpr,
):  # fmt: skip
    """Start to copy a step's lines to a slot of the memory at `raw`; `full` receives an arrival from each thread.

    units, last_units : from `unit_indices`.  j, last_j : from `line_columns`.  first : the first vector.
    """
    raw += slot * (lines_of(CHOSEN) * CHOSEN.line_bytes)
    line, panel, within = units
    copy_units(raw, address, first, line, panel, within, j, n, d, stride_v, stride_f, ITEM, CHOSEN)
    line, panel, within = last_units
    copy_units(raw, address, first, line, panel, within, last_j, n, d, stride_v, stride_f, ITEM, CHOSEN)
    async_copy.mbarrier_arrive(full.index(slot), increment_count=False)


@gluon.jit
def element_addresses(raw, address, stride, v, f, ITEM: gl.constexpr, CHOSEN: gl.constexpr):
    """The addresses in slot 0 of the elements of vectors v and columns f of a step.

    stride : between lines, in elements.
    """
    LINE: gl.constexpr = CHOSEN.line_bytes
    PANEL: gl.constexpr = UNIT * (panel_units(ITEM, CHOSEN) + 1)
    begin, step = (address & (UNIT - 1)).to(gl.int32), (ITEM * stride & (UNIT - 1)).to(gl.int32)
    if CHOSEN.vectors_contiguous:
        return raw + (f * LINE + ((begin + f * step) & (UNIT - 1))) + ITEM * v
    within = (f >> CHOSEN.log_panel) * PANEL + ITEM * (f & ((1 << CHOSEN.log_panel) - 1))
    return raw + (v * LINE + ((begin + v * step) & (UNIT - 1))) + within


@gluon.jit
def load_lines(addresses, slot, DTYPE: gl.constexpr, CHOSEN: gl.constexpr):
    """The elements of a slot, in as few registers as possible. addresses : from `element_addresses`."""
    addresses += slot * (lines_of(CHOSEN) * CHOSEN.line_bytes)
    if DTYPE.primitive_bitwidth == 32:
        elements = gl.inline_asm_elementwise("ld.shared.f32 $0, [$1];", "=f,r", [addresses], gl.float32, False, 1)
    else:
        bits = gl.inline_asm_elementwise(
            "{ .reg .b16 a, b; ld.shared.b16 a, [$1]; ld.shared.b16 b, [$2]; mov.b32 $0, {a, b}; }", "=r,r,r",
            [addresses], gl.int16, False, 2,
        )  # fmt: skip
        elements = bits.to(DTYPE, bitcast=True)
    return elements
