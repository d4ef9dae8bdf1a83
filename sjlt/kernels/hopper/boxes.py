"""Loads of `project_codes_hopper` without the tensor memory accelerator, for data of any strides.

The STEP_COLUMNS columns of a step are divided into panels of 2^log_panel columns, each of one or more whole blocks of
codes. A box consists of a panel's columns for half the program's vectors or, where vectors are contiguous, for one of
the SIDES equal parts of a half.
"""

# (No `from __future__ import annotations`: Gluon would not see the annotations of kernel arguments.)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..portable import chunk_codes
from .common import WARPGROUP_VECTORS as HALF
from .common import lane_value

NO_COLUMN = gl.constexpr(chunk_codes.NO_COLUMN.value)


@gluon.jit
def panel_columns(columns, done, count, start, box_f, CHOSEN: gl.constexpr, PANELS: gl.constexpr):
    """The columns of each panel of the step that begins with block `done`; NO_COLUMN or more past the last block.

    box_f : the columns of a box, counted from its first.
    """
    result: gl.tuple = ()
    for q in gl.static_range(PANELS):
        step_f = (q << CHOSEN.log_panel) + box_f
        if CHOSEN.one_tile:
            result += (start + (done << CHOSEN.log_block) + step_f,)
        else:
            i = done + (step_f >> CHOSEN.log_block)
            column = gl.load(columns + i, mask=i < count, other=NO_COLUMN)
            result += (column + (step_f & ((1 << CHOSEN.log_block) - 1)),)
    return result


@gluon.jit
def box_pointers(x, base, rows, j, v, n, d, stride_v, stride_f, CHOSEN: gl.constexpr):
    """(pointers, mask) of columns j of a box: of vectors v if vectors are contiguous, else of base + `rows`.

    rows : the offset of each row of the data from `base`.
    """
    VECTOR: gl.constexpr = CHOSEN.vector
    BYTES: gl.constexpr = VECTOR * x.dtype.element_ty.primitive_bitwidth // 8
    mask = (j >= 0) & (j < d)
    along = j.to(gl.int64) * stride_f
    if CHOSEN.vectors_contiguous:
        mask = mask & (v < n)
        pointers = (x + v.to(gl.int64) * stride_v) + along
    else:
        pointers = (base + along) + rows
    if VECTOR > 1:
        pointers = gl.max_contiguous(gl.multiple_of(pointers, [1, BYTES]), [1, VECTOR])
        mask = gl.max_constancy(mask, [1, VECTOR])
    return pointers, mask


@gluon.jit
def load_boxes(
    x, base, rows, columns, v, n, d, stride_v, stride_f,
    CHOSEN: gl.constexpr, SIDES: gl.constexpr, PANELS: gl.constexpr,
):  # fmt: skip
    """A step's data in registers, box by box.

    columns : from `panel_columns`, one tensor per panel.  rows : one tensor per half of the vectors.
    """
    result: gl.tuple = ()
    for box in gl.static_range(2 * SIDES * PANELS):
        pointers, mask = box_pointers(
            x, base, rows[box // (PANELS * SIDES)], columns[box % PANELS], v + box // PANELS * (HALF // SIDES), n, d,
            stride_v, stride_f, CHOSEN,
        )  # fmt: skip
        result += (gl.load(pointers, mask=mask, other=0.0),)
    return result


@gluon.jit
def store_boxes(xs, slot, boxes, BOXES: gl.constexpr):
    """Store a step's data, from `load_boxes`, to a slot."""
    for box in gl.static_range(BOXES):
        xs.index(slot * BOXES + box).store(boxes[box])


@gluon.jit
def copy_boxes(
    xs, full, slot, x, base, rows, columns, first, box_v, n, d, stride_v, stride_f,
    CHOSEN: gl.constexpr, SIDES: gl.constexpr, PANELS: gl.constexpr,
):  # fmt: skip
    """Start asynchronous copies of a step's data to a slot; `full` receives an arrival from each thread.

    first : the first vector.  box_v : the vectors of a box, counted from its first.  Others are as in `load_boxes`.
    """
    BOXES: gl.constexpr = 2 * SIDES * PANELS
    for box in gl.static_range(BOXES):
        v = first + box // PANELS * (HALF // SIDES) + box_v
        pointers, mask = box_pointers(
            x, base, rows[box // (PANELS * SIDES)], columns[box % PANELS], v, n, d, stride_v, stride_f, CHOSEN
        )
        async_copy.async_copy_global_to_shared(xs.index(slot * BOXES + box), pointers, mask=mask)
    async_copy.mbarrier_arrive(full.index(slot), increment_count=False)


@gluon.jit
def load_boxes_by_tma(
    xs, full, slot, x, column, first, start, done,
    CHOSEN: gl.constexpr, SIDES: gl.constexpr, PANELS: gl.constexpr, LIST: gl.constexpr,
):  # fmt: skip
    """Start the TMA's loads of a step's data to a slot; `full` receives one arrival, with the bytes.

    column : the first columns of LIST blocks, by lane, used if the sketch has several tiles.  start : the first column
    of all, otherwise.  done : blocks of earlier steps.
    """
    BOXES: gl.constexpr = 2 * SIDES * PANELS
    mbarrier.expect(full.index(slot), BOXES * x.block_type.nbytes)
    for q in gl.static_range(PANELS):
        if CHOSEN.one_tile:
            j = start + (done << CHOSEN.log_block) + (q << CHOSEN.log_panel)
        else:
            j = lane_value(column, done % LIST + q)
        for side in gl.static_range(2 * SIDES):
            v, box = first + side * (HALF // SIDES), xs.index(slot * BOXES + side * PANELS + q)
            if CHOSEN.vectors_contiguous:
                tma.async_copy_global_to_shared(x, [j, v], full.index(slot), box)
            else:
                tma.async_copy_global_to_shared(x, [v, j], full.index(slot), box)
