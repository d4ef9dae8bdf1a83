"""Boxes of data that `project_codes_hopper` loads without the tensor memory accelerator: parts of a step, any layout.

A step has STEP_COLUMNS columns in panels, of which some blocks of codes lie side by side; a box is a panel's columns of
half the vectors or, where vectors are contiguous, of a part of a half.
"""

# (No `from __future__ import annotations`: Gluon would not see the annotations of kernel arguments.)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..config import hopper
from ..portable import chunk_codes

HALF = gl.constexpr(hopper.WARPGROUP_VECTORS)
NO_COLUMN = gl.constexpr(chunk_codes.NO_COLUMN.value)


@gluon.jit
def panel_columns(columns, done, count, start, box_f, CHOSEN: gl.constexpr, PANELS: gl.constexpr):
    """The columns of each panel of the step whose blocks begin with `done`; NO_COLUMN or more where there is none."""
    result: gl.tuple = ()
    for q in gl.static_range(PANELS):
        place = (q << CHOSEN.log_panel) + box_f
        if CHOSEN.one_tile:
            result += (start + (done << CHOSEN.log_block) + place,)
        else:
            i = done + (place >> CHOSEN.log_block)
            column = gl.load(columns + i, mask=i < count, other=NO_COLUMN)
            result += (column + (place & ((1 << CHOSEN.log_block) - 1)),)
    return result


@gluon.jit
def box_pointers(x, base, rows, j, v, n, d, stride_v, stride_f, CHOSEN: gl.constexpr):
    """(pointers, mask) of a box of data: columns j of vectors v if those are contiguous, else of rows from base on."""
    VECTOR: gl.constexpr = CHOSEN.vector
    BYTES: gl.constexpr = VECTOR * x.dtype.element_ty.primitive_bitwidth // 8
    known = (j >= 0) & (j < d)
    along = j.to(gl.int64) * stride_f
    if CHOSEN.vectors_contiguous:
        known = known & (v < n)
        pointers = (x + v.to(gl.int64) * stride_v) + along
    else:
        pointers = (base + along) + rows
    if VECTOR > 1:
        pointers = gl.max_contiguous(gl.multiple_of(pointers, [1, BYTES]), [1, VECTOR])
        known = gl.max_constancy(known, [1, VECTOR])
    return pointers, known


@gluon.jit
def load_boxes(
    x, base, rows, columns, v, n, d, more, stride_v, stride_f,
    CHOSEN: gl.constexpr, SIDES: gl.constexpr, PANELS: gl.constexpr,
):  # fmt: skip
    """A step's data at these columns of its panels, in registers; nothing is loaded unless `more`."""
    result: gl.tuple = ()
    for box in gl.static_range(2 * SIDES * PANELS):
        pointers, known = box_pointers(
            x, base, rows[box // (PANELS * SIDES)], columns[box % PANELS], v + box // PANELS * (HALF // SIDES), n, d,
            stride_v, stride_f, CHOSEN,
        )  # fmt: skip
        result += (gl.load(pointers, mask=known & more, other=0.0),)
    return result
