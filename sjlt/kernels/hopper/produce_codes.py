"""The producers of `project_codes_hopper`: a loader fills slots in shared memory with data, expanders with entries.

They are separate so that loads do not wait until entries are written, nor entries until loads are started.
"""

# (No `from __future__ import annotations`: Gluon would not see the annotations of kernel arguments.)
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..config import hopper_loaders
from ..portable import chunk_codes
from .boxes import copy_boxes, load_boxes, load_boxes_by_tma, panel_columns, store_boxes
from .common import STEP_COLUMNS as STEP
from .common import TILE, barrier, next_slot, wait_for_previous_kernel
from .common import WARPGROUP_VECTORS as HALF
from .entries_first import copy_codes
from .expand import codes_of, expand, first_codes, held_codes, load_codes
from .rounds import MAX_POLLS, begin_round, parts_of
from .shared_products import blocks_of_share, share_of
from .staged_lines import copy_lines, line_columns, panel_units, panels_of, unit_indices

TMA, COPY, LOAD, STAGE = (
    gl.constexpr(loader)
    for loader in (hopper_loaders.TMA, hopper_loaders.COPY, hopper_loaders.LOAD, hopper_loaders.STAGE)
)
NO_COLUMN = gl.constexpr(chunk_codes.NO_COLUMN.value)
WARPS = gl.constexpr(hopper_loaders.PRODUCER_WARPS)  # of each producer
MAX_HELD = gl.constexpr(8)  # registers for the codes of a step that may be loaded two steps ahead
LIST = gl.constexpr(32)  # blocks whose columns a warp holds at a time, one per lane


@gluon.jit
def load_data(arguments, DTYPE: gl.constexpr, CHOSEN: gl.constexpr, SHARES_PRODUCTS: gl.constexpr):
    """The loader: fill slots with data and, if the entries are the first operand, with codes; one step per slot.

    xs, raw : the slots' memory for data: boxes or, if CHOSEN.loader is STAGE, the address of the lines.
    """
    (x, address, xs, raw, tiles, full, empty, codes, columns, counts, tasks, unshared, sharers, splits, n_tiles,
     capacity, n, d, stride_v, stride_f) = arguments  # fmt: skip
    ITEM: gl.constexpr = DTYPE.primitive_bitwidth // 8
    PANELS: gl.constexpr = STEP >> CHOSEN.log_panel
    BOX0: gl.constexpr = xs.shape[1]
    BOX1: gl.constexpr = xs.shape[2]
    SIDES: gl.constexpr = HALF // BOX1 if CHOSEN.vectors_contiguous else 1
    BOXES: gl.constexpr = 2 * SIDES * PANELS  # of a slot, indexed by half of the vectors, part of a half, panel
    LANES: gl.constexpr = min(32, BOX1 // CHOSEN.vector)
    box_layout: gl.constexpr = gl.BlockedLayout([1, CHOSEN.vector], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    box_row = gl.arange(0, BOX0, layout=gl.SliceLayout(1, box_layout))[:, None]
    box_column = gl.arange(0, BOX1, layout=gl.SliceLayout(0, box_layout))[None, :]
    box_f = box_row if CHOSEN.vectors_contiguous else box_column
    box_v = box_column if CHOSEN.vectors_contiguous else box_row
    LAST_UNITS: gl.constexpr = panels_of(CHOSEN)
    UNITS: gl.constexpr = LAST_UNITS * panel_units(ITEM, CHOSEN)
    unit_layout: gl.constexpr = gl.BlockedLayout([1, 1], [32 // UNITS, UNITS], [WARPS, 1], [1, 0])
    last_layout: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LAST_UNITS, LAST_UNITS], [WARPS, 1], [1, 0])
    list_layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    BLOCKS: gl.constexpr = STEP >> CHOSEN.log_block
    units = unit_indices(unit_layout, UNITS, False, ITEM, CHOSEN)
    last_units = unit_indices(last_layout, LAST_UNITS, True, ITEM, CHOSEN)
    wait_for_previous_kernel()
    slot, phase = 0, 1  # waiting for phase 1 of a new barrier returns at once: all slots are empty
    polls = gl.program_id(0) * 0 + MAX_POLLS
    task = gl.program_id(0)
    while task < tasks:
        if CHOSEN.in_step:
            polls = begin_round(counts + splits * n_tiles, task, tasks, polls)
        product, share, shares = share_of(task, unshared, sharers, SHARES_PRODUCTS)
        m, split, vector_block = parts_of(product, splits, n_tiles)
        first = vector_block * (2 * HALF)
        count = gl.load(counts + split * n_tiles + m)
        list_begin = (split * n_tiles + m).to(gl.int64) * capacity
        list_columns = columns + list_begin
        start = gl.load(list_columns)
        begin, end = blocks_of_share(count, share, shares, CHOSEN, SHARES_PRODUCTS)
        base = x
        rows: gl.tuple = (box_v, box_v)
        if CHOSEN.loader == STAGE:
            next_j = line_columns(list_columns, begin, count, start, units[0], units[1], CHOSEN)
            next_last_j = line_columns(list_columns, begin, count, start, last_units[0], last_units[1], CHOSEN)
        elif CHOSEN.loader != TMA:
            next_columns = panel_columns(list_columns, begin, count, start, box_f, CHOSEN, PANELS)
            if not CHOSEN.vectors_contiguous:  # rows past the last are replaced by the last; their sums are not stored
                base = x + first.to(gl.int64) * stride_v
                last = n - 1 - first
                low, high = gl.minimum(box_v, last), gl.minimum(box_v + HALF, last)
                rows = ((low * stride_v).to(gl.int32), (high * stride_v).to(gl.int32))
        # Addresses computed before the loop would exceed the registers, and L1 has little room for spilled ones.
        for done in tl.range(begin, end, BLOCKS, disable_licm=CHOSEN.loader == STAGE):
            if CHOSEN.loader == TMA:
                column = gl.full([WARPS * LIST], 0, gl.int32, layout=list_layout)
                if not CHOSEN.one_tile:
                    i = done // LIST * LIST + gl.arange(0, WARPS * LIST, layout=list_layout) % LIST
                    column = gl.load(list_columns + i, mask=i < count, other=NO_COLUMN)
                mbarrier.wait(empty.index(slot), phase)
                if CHOSEN.entries_first:
                    copy_codes(tiles, full, slot, codes + list_begin * TILE, done, count, CHOSEN)
                load_boxes_by_tma(xs, full, slot, x, column, first, start, done, CHOSEN, SIDES, PANELS, LIST)
            elif CHOSEN.loader == STAGE:
                j, last_j = next_j, next_last_j
                next_j = line_columns(list_columns, done + BLOCKS, count, start, units[0], units[1], CHOSEN)
                next_last_j = line_columns(
                    list_columns, done + BLOCKS, count, start, last_units[0], last_units[1], CHOSEN
                )
                mbarrier.wait(empty.index(slot), phase)
                copy_lines(
                    raw, full, slot, address, first, units, last_units, j, last_j, n, d, stride_v, stride_f,
                    ITEM, CHOSEN,
                )  # fmt: skip
            else:
                step_columns = next_columns
                next_columns = panel_columns(list_columns, done + BLOCKS, count, start, box_f, CHOSEN, PANELS)
                if CHOSEN.loader == LOAD:  # all loads are started before any is waited for
                    boxes = load_boxes(
                        x, base, rows, step_columns, first + box_v, n, d, stride_v, stride_f, CHOSEN, SIDES, PANELS
                    )
                mbarrier.wait(empty.index(slot), phase)
                if CHOSEN.loader == LOAD:
                    store_boxes(xs, slot, boxes, BOXES)
                    fence_async_shared()
                    barrier()
                    mbarrier.arrive(full.index(slot), count=1)
                else:
                    copy_boxes(
                        xs, full, slot, x, base, rows, step_columns, first, box_v, n, d, stride_v, stride_f,
                        CHOSEN, SIDES, PANELS,
                    )  # fmt: skip
            slot, phase = next_slot(slot, phase, CHOSEN.slots)
        task += gl.num_programs(0)


@gluon.jit
def _fill_slot(tiles, full, empty, slot, phase, code, CHOSEN: gl.constexpr, DTYPE: gl.constexpr):
    """Write the entries of a step to a slot: (the expander's next slot, its phase)."""
    EXPANDERS: gl.constexpr = CHOSEN.expanders
    mbarrier.wait(empty.index(slot), phase)
    tiles.index(slot).store(expand(codes_of(code, CHOSEN), CHOSEN, DTYPE))
    fence_async_shared()
    barrier()
    mbarrier.arrive(full.index(slot), count=1)
    for _turn in gl.static_range(EXPANDERS):
        slot, phase = next_slot(slot, phase, CHOSEN.slots)
    return slot, phase


@gluon.jit
def write_entries(
    arguments, DTYPE: gl.constexpr, CHOSEN: gl.constexpr, SHARES_PRODUCTS: gl.constexpr, EXPANDER: gl.constexpr
):
    """An expander: fill slots with entries, one step per slot. Two expanders fill slots alternately.

    The codes of long lists come from the L2 cache, which takes longer than a step in 16 bits. If few registers hold
    those of a step, they are loaded two steps ahead, to registers whose previous codes have been expanded. (Loads to
    registers that a loop copies at its end are waited for there.)
    """
    tiles, full, empty, codes, counts, tasks, unshared, sharers, splits, n_tiles, capacity = arguments
    BLOCKS: gl.constexpr = STEP >> CHOSEN.log_block
    EXPANDERS: gl.constexpr = CHOSEN.expanders
    STRIDE: gl.constexpr = BLOCKS * EXPANDERS
    AHEAD: gl.constexpr = 2 if held_codes(CHOSEN) <= MAX_HELD else 1
    wait_for_previous_kernel()
    slot, phase = EXPANDER, 1
    before = EXPANDER * BLOCKS  # blocks of the task before this expander's first
    task = gl.program_id(0)
    while task < tasks:
        product, share, shares = share_of(task, unshared, sharers, SHARES_PRODUCTS)
        m, split, _ = parts_of(product, splits, n_tiles)
        count = gl.load(counts + split * n_tiles + m)
        task_begin, end = blocks_of_share(count, share, shares, CHOSEN, SHARES_PRODUCTS)
        begin = task_begin + before
        list_begin = (split * n_tiles + m).to(gl.int64) * capacity
        first = first_codes(codes + list_begin * CHOSEN.rows, CHOSEN)
        code = load_codes(first, begin, count, CHOSEN)
        if AHEAD == 2:
            second_code = load_codes(first, begin + STRIDE, count, CHOSEN)
        for done in range(begin, end, AHEAD * STRIDE):
            if AHEAD == 1:
                next_code = load_codes(first, done + STRIDE, count, CHOSEN)
            slot, phase = _fill_slot(tiles, full, empty, slot, phase, code, CHOSEN, DTYPE)
            if AHEAD == 1:
                code = next_code
            else:
                code = load_codes(first, done + 2 * STRIDE, count, CHOSEN)
                if done + STRIDE < end:
                    slot, phase = _fill_slot(tiles, full, empty, slot, phase, second_code, CHOSEN, DTYPE)
                    second_code = load_codes(first, done + 3 * STRIDE, count, CHOSEN)
        if EXPANDERS == 2:  # an odd number of steps exchanges the expanders' roles
            steps = (end - task_begin + BLOCKS - 1) // BLOCKS
            before = (before // BLOCKS + steps) % 2 * BLOCKS
        task += gl.num_programs(0)
