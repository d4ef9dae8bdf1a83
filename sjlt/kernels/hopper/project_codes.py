"""X Sᵀ and S A on Hopper for any k, nnz and strides, from the codes of `chunk_codes`.

As in `project_hopper`, 4 warps of a program (the producer) fill slots in shared memory with data and entries, and two
groups of 4 (the consumers) multiply, each for half of the vectors; fp32 data is multiplied as pairs of fp16 numbers.
Here entries come from codes, so k, nnz and the number of tiles are ordinary arguments; a step of STEP_COLUMNS columns
combines blocks of several chunks; and data that the tensor memory accelerator (TMA) cannot load is loaded in other ways
(`boxes`). CHOSEN.loader is

- TMA if rows begin at multiples of 16 bytes and boxes are wide enough. Boxes with rows of 64 bytes or less take 1.15
  times as long as COPY in fp32, and 1.4 times in 16 bits (H200).
- COPY for asynchronous copies of CHOSEN.vector elements, 4 to 16 bytes, per thread.
- LOAD for loads through registers: 16-bit elements at odd offsets, which asynchronous copies do not support.

While the codes are being written, programs copy the data that they read first to the L2 cache.

Results are stored by the TMA if all tiles have the same number of rows and begin at multiples of 16 bytes; otherwise by
threads, with neighbouring threads storing neighbours in memory.
"""

# (No `from __future__ import annotations`: Gluon would not see the annotations of kernel arguments.)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..config import hopper, hopper_codes
from ..portable import chunk_codes
from .boxes import copy_boxes, load_boxes, load_boxes_by_tma, panel_columns, store_boxes
from .common import TILE, barrier, inverse, largest_of, next_slot, pair_of, scale_of, wait_for_previous_kernel
from .expand import codes_layout, expand

HALF = gl.constexpr(hopper.WARPGROUP_VECTORS)
STEP = gl.constexpr(hopper.STEP_COLUMNS)
TMA, COPY, LOAD = (gl.constexpr(i) for i in (hopper_codes.TMA, hopper_codes.COPY, hopper_codes.LOAD))
NO_ENTRY, NO_COLUMN = gl.constexpr(chunk_codes.NO_ENTRY.value), gl.constexpr(chunk_codes.NO_COLUMN.value)
_tile_start = gluon.jit(chunk_codes.tile_start.fn)
LIST = gl.constexpr(32)  # blocks whose columns a warp holds at a time, one per lane
SEGMENT = gl.constexpr(512)  # bytes that a thread prefetches at a time


@gluon.constexpr_function
def swizzle_bytes(width, bits):
    """The swizzle of a tile whose rows have `width` elements of `bits` bits."""
    return min(128, width * bits // 8)


@gluon.constexpr_function
def registers(bits, loader, producer_warps):
    """Registers per thread of the second consumer and of the producer."""
    if producer_warps == 8:
        return [120, 136] if bits == 16 else [184, 72]
    return [136, 232] if bits == 16 else [200, 104] if loader == COPY else [216, 72]


@gluon.jit
def _work(product, splits, n_tiles):
    """(tile, split, block of vectors) of a product."""
    rest = product // n_tiles
    return product % n_tiles, rest % splits, rest // splits


@gluon.jit
def _prefetch(
    address, n, d, splits, n_tiles, columns_per_split, stride_v, stride_f,
    DTYPE: gl.constexpr, VECTORS_CONTIGUOUS: gl.constexpr,
):  # fmt: skip
    """Start to copy what the program reads first of the data at `address` to the L2 cache, up to 64 KiB.

    Each tile reads some of the first columns. Of the vectors of the program's first product, tile m prefetches the m-th
    SEGMENT of bytes or, if vectors are contiguous, the m-th 128 columns. Prefetches begin and end at multiples of 16
    bytes, and no memory page ends between these.
    """
    ITEM: gl.constexpr = DTYPE.primitive_bitwidth // 8
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    thread = gl.arange(0, 128, layout=layout)
    m, split, vector_block = _work(gl.program_id(0), splits, n_tiles)
    v, j = (vector_block * (2 * HALF)).to(gl.int64), split.to(gl.int64) * columns_per_split
    if VECTORS_CONTIGUOUS:
        row, rows, stride = j + m * 128 + thread, d, stride_f * ITEM
        first, width, size = v * ITEM, n.to(gl.int64) * ITEM, 2 * HALF * ITEM
    else:
        row, rows, stride = v + thread, n, stride_v * ITEM
        first, width, size = j * ITEM + m * SEGMENT, d.to(gl.int64) * ITEM, SEGMENT
    size = gl.where(row < rows, gl.minimum(width - first, size).to(gl.int32), 0)
    begin = address + row * stride + first
    below = (begin & 15).to(gl.int32)
    size = gl.where(size > 0, (below + size + 15) // 16 * 16, 0)
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r", [begin - below, size], gl.int32, False, 1,
    )  # fmt: skip


@gluon.jit
def _produce(
    x, xs, tiles, full, empty, codes, columns, counts, products, splits, n_tiles, capacity, n, d, stride_v, stride_f,
    CHOSEN: gl.constexpr,
):  # fmt: skip
    """The producer: fill slots with data and entries, one step per slot."""
    DTYPE: gl.constexpr = xs.dtype
    PANELS: gl.constexpr = STEP >> CHOSEN.log_panel
    BOX0: gl.constexpr = xs.shape[1]
    BOX1: gl.constexpr = xs.shape[2]
    SIDES: gl.constexpr = HALF // BOX1 if CHOSEN.vectors_contiguous else 1
    BOXES: gl.constexpr = 2 * SIDES * PANELS  # of a slot, indexed by half of the vectors, part of a half, panel
    WARPS: gl.constexpr = CHOSEN.producer_warps
    LANES: gl.constexpr = min(32, BOX1 // CHOSEN.vector)
    box_layout: gl.constexpr = gl.BlockedLayout([1, CHOSEN.vector], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    box_row = gl.arange(0, BOX0, layout=gl.SliceLayout(1, box_layout))[:, None]
    box_column = gl.arange(0, BOX1, layout=gl.SliceLayout(0, box_layout))[None, :]
    box_f = box_row if CHOSEN.vectors_contiguous else box_column
    box_v = box_column if CHOSEN.vectors_contiguous else box_row
    list_layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    STEP_BLOCKS: gl.constexpr = STEP >> CHOSEN.log_block
    words: gl.constexpr = codes_layout(CHOSEN.rows, CHOSEN.log_block, WARPS)
    r = gl.arange(0, CHOSEN.rows, layout=gl.SliceLayout(1, gl.SliceLayout(2, words)))[:, None]
    u = gl.arange(0, STEP_BLOCKS, layout=gl.SliceLayout(0, gl.SliceLayout(2, words)))[None, :]
    # Loads of the next step are started before this step's data is stored (H200, 16 bits, odd strides: 3.4 times the
    # memory floor instead of 4.3 with one tile, no difference with 16; 3.2 instead of 2.9 if vectors are contiguous).
    AHEAD: gl.constexpr = CHOSEN.loader == LOAD and not CHOSEN.vectors_contiguous
    wait_for_previous_kernel()
    slot, phase = 0, 1  # waiting for phase 1 of a new barrier returns at once: all slots are empty
    product = gl.program_id(0)
    while product < products:
        m, split, vector_block = _work(product, splits, n_tiles)
        first = vector_block * (2 * HALF)
        count = gl.load(counts + split * n_tiles + m)
        list_begin = (split * n_tiles + m).to(gl.int64) * capacity
        list_columns = columns + list_begin
        code_pointers = codes + list_begin * TILE + (u * TILE + r)
        start = gl.load(list_columns)
        code = gl.load(code_pointers, mask=u + r * 0 < count, other=NO_ENTRY)
        base = x
        rows: gl.tuple = (box_v, box_v)
        if CHOSEN.loader != TMA:
            next_columns = panel_columns(list_columns, 0, count, start, box_f, CHOSEN, PANELS)
            if not CHOSEN.vectors_contiguous:  # rows past the last are replaced by the last; their sums are not stored
                base = x + first.to(gl.int64) * stride_v
                last = n - 1 - first
                low, high = gl.minimum(box_v, last), gl.minimum(box_v + HALF, last)
                rows = ((low * stride_v).to(gl.int32), (high * stride_v).to(gl.int32))
        if AHEAD:
            boxes = load_boxes(
                x, base, rows, next_columns, first + box_v, n, d, count > 0, stride_v, stride_f, CHOSEN, SIDES, PANELS
            )
            next_columns = panel_columns(list_columns, STEP_BLOCKS, count, start, box_f, CHOSEN, PANELS)
        for done in range(0, count, STEP_BLOCKS):
            code_pointers += STEP_BLOCKS * TILE
            next_code = gl.load(code_pointers, mask=done + STEP_BLOCKS + u + r * 0 < count, other=NO_ENTRY)
            if AHEAD:
                step_boxes = boxes
                boxes = load_boxes(
                    x, base, rows, next_columns, first + box_v, n, d, done + STEP_BLOCKS < count, stride_v, stride_f,
                    CHOSEN, SIDES, PANELS,
                )  # fmt: skip
                next_columns = panel_columns(list_columns, done + 2 * STEP_BLOCKS, count, start, box_f, CHOSEN, PANELS)
                mbarrier.wait(empty.index(slot), phase)
                store_boxes(xs, slot, step_boxes, BOXES)
            elif CHOSEN.loader != TMA:
                step_columns = next_columns
                next_columns = panel_columns(list_columns, done + STEP_BLOCKS, count, start, box_f, CHOSEN, PANELS)
                if CHOSEN.loader == LOAD:  # all loads are started before any is waited for
                    boxes = load_boxes(
                        x, base, rows, step_columns, first + box_v, n, d, True, stride_v, stride_f, CHOSEN, SIDES,
                        PANELS,
                    )  # fmt: skip
                mbarrier.wait(empty.index(slot), phase)
                if CHOSEN.loader == LOAD:
                    store_boxes(xs, slot, boxes, BOXES)
                else:
                    copy_boxes(
                        xs, full, slot, x, base, rows, step_columns, first, box_v, n, d, stride_v, stride_f,
                        CHOSEN, SIDES, PANELS,
                    )  # fmt: skip
            else:
                column = gl.full([WARPS * LIST], 0, gl.int32, layout=list_layout)
                if not CHOSEN.one_tile:
                    i = done // LIST * LIST + gl.arange(0, WARPS * LIST, layout=list_layout) % LIST
                    column = gl.load(list_columns + i, mask=i < count, other=NO_COLUMN)
                mbarrier.wait(empty.index(slot), phase)
                load_boxes_by_tma(xs, full, slot, x, column, first, start, done, CHOSEN, SIDES, PANELS, LIST)
            tiles.index(slot).store(expand(code, CHOSEN, DTYPE))
            fence_async_shared()
            barrier()
            mbarrier.arrive(full.index(slot), count=1)
            slot, phase = next_slot(slot, phase, CHOSEN.slots)
            code = next_code
        product += gl.num_programs(0)


@gluon.jit
def _sum_of_blocks(xs, tiles, full, empty, count, slot, phase, CHOSEN: gl.constexpr, CONSUMER: gl.constexpr):
    """(the sums of a consumer's vectors over the next `count` blocks, next slot, its phase); see `project`."""
    SPLIT_FP32: gl.constexpr = xs.dtype == gl.float32
    DTYPE: gl.constexpr = gl.float16 if SPLIT_FP32 else xs.dtype
    ROWS: gl.constexpr = CHOSEN.rows
    WIDTH: gl.constexpr = 128 if CHOSEN.vectors_contiguous else 1 << CHOSEN.log_panel
    SWIZZLE: gl.constexpr = swizzle_bytes(WIDTH, xs.dtype.primitive_bitwidth)
    x_shared: gl.constexpr = gl.NVMMASharedLayout(SWIZZLE, xs.dtype.primitive_bitwidth, 2)
    BOXES: gl.constexpr = STEP * HALF // (xs.shape[1] * xs.shape[2])
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, sums_layout, 2)
    tile_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, STEP], DTYPE)
    largest = gl.zeros([HALF], gl.uint32, layout=gl.SliceLayout(1, operand_layout))
    scale = scale_of(largest, 14)
    acc = gl.zeros((HALF, ROWS), gl.float32, layout=sums_layout)
    for _ in range(0, count, STEP >> CHOSEN.log_block):
        mbarrier.wait(full.index(slot), phase)
        tile = tiles.index(slot)._reinterpret(DTYPE, [ROWS, STEP], tile_shared).permute((1, 0))
        data = xs.index((slot * 2 + CONSUMER) * BOXES)  # the boxes of a half have the layout of one swizzled tile
        if CHOSEN.vectors_contiguous:
            data = data._reinterpret(xs.dtype, [STEP, HALF], x_shared).permute((1, 0))
        else:
            data = data._reinterpret(xs.dtype, [HALF, STEP], x_shared)
        if SPLIT_FP32:
            part = data.load(operand_layout)
            largest = gl.maximum(largest, largest_of(part))
            before = inverse(scale)
            scale = scale_of(largest, 14)
            high, low = pair_of(part, scale)
            z = gl.zeros((HALF, ROWS), gl.float32, layout=sums_layout)
            z = warpgroup_mma(high, tile, z, use_acc=False, is_async=True)
            z = warpgroup_mma(low, tile, z, is_async=True)
        else:
            if CHOSEN.loader == COPY:
                fence_async_shared()  # tensor cores read what threads have copied
            z = warpgroup_mma(data, tile, acc, is_async=True)
        z = warpgroup_mma_wait(0, deps=(z,))
        barrier()
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, CHOSEN.slots)
        acc = acc * gl.convert_layout(scale * before, gl.SliceLayout(1, sums_layout))[:, None] + z if SPLIT_FP32 else z
    if SPLIT_FP32:
        acc *= gl.convert_layout(inverse(scale), gl.SliceLayout(1, sums_layout))[:, None]
    return acc, slot, phase


@gluon.jit
def _store(
    acc, out, outs, m, split, v, n, k, n_tiles, stride_os, stride_ov, stride_or,
    CHOSEN: gl.constexpr, ACCUMULATE: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Store the sums [HALF, rows of the tile] of the vectors from v on."""
    ROWS: gl.constexpr = CHOSEN.rows
    if CHOSEN.tma_store:
        part = outs.index(CONSUMER)
        tma.store_wait(0)
        barrier()
        if CHOSEN.out_vectors_contiguous:
            part.permute((1, 0)).store(acc.to(out.dtype))
        else:
            part.store(acc.to(out.dtype))
        fence_async_shared()
        barrier()
        if CHOSEN.out_vectors_contiguous:
            part = part._reinterpret(out.dtype, [1, ROWS, HALF], out.layout)
            tma.async_copy_shared_to_global(out, [split * n_tiles + m, 0, v], part)
        else:
            part = part._reinterpret(out.dtype, [HALF, 1, ROWS], out.layout)
            tma.async_copy_shared_to_global(out, [v, split * n_tiles + m, 0], part)
    else:
        by_rows: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
        by_columns: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [2, 2], [0, 1])
        layout: gl.constexpr = by_columns if CHOSEN.out_vectors_contiguous else by_rows
        first_row = _tile_start(m, k, n_tiles)
        rows = (_tile_start(m + 1, k, n_tiles) - first_row).to(gl.int32)
        i = gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
        r = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
        # The compiler folds these comparisons, strides and offsets as far as they are constants; stores are then a
        # third of the instructions of a thread that also computed them (300 instead of 830).
        keep = (i < n - v)[:, None] & ((r < rows) | (r < ROWS - 64))[None, :]
        base = out + split * stride_os + v.to(gl.int64) * stride_ov + first_row.to(gl.int64) * stride_or
        along_v = i if CHOSEN.adjacent and CHOSEN.out_vectors_contiguous else i.to(gl.int64) * stride_ov
        along_r = r if CHOSEN.adjacent and not CHOSEN.out_vectors_contiguous else r.to(gl.int64) * stride_or
        if CHOSEN.out_vectors_contiguous:
            pointers = (base + along_r)[None, :] + along_v[:, None]
        else:
            pointers = (base + along_v)[:, None] + along_r[None, :]
        if ACCUMULATE:
            acc = gl.convert_layout(acc, layout)
            acc += gl.load(pointers, mask=keep, other=0.0).to(gl.float32)
            gl.store(pointers, acc.to(out.dtype.element_ty), mask=keep)
        else:
            gl.store(pointers, gl.convert_layout(acc.to(out.dtype.element_ty), layout), mask=keep)


@gluon.jit
def _consume(
    xs, tiles, full, empty, out, outs, counts, n, k, products, splits, n_tiles, stride_os, stride_ov, stride_or, scale,
    CHOSEN: gl.constexpr, ACCUMULATE: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Consumer 0 or 1: multiply its half of each slot's vectors by the slot's entries, and store the sums."""
    wait_for_previous_kernel()
    slot, phase = 0, 0
    product = gl.program_id(0)
    while product < products:
        m, split, vector_block = _work(product, splits, n_tiles)
        count = gl.load(counts + split * n_tiles + m)
        acc, slot, phase = _sum_of_blocks(xs, tiles, full, empty, count, slot, phase, CHOSEN, CONSUMER)
        v = (vector_block * 2 + CONSUMER) * HALF
        _store(
            acc * scale, out, outs, m, split, v, n, k, n_tiles, stride_os, stride_ov, stride_or,
            CHOSEN, ACCUMULATE, CONSUMER,
        )  # fmt: skip
        product += gl.num_programs(0)
    if CHOSEN.tma_store:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=hopper_codes.INTEGERS)
def project_codes_hopper(
    x,
    out,
    codes,
    columns,
    counts,
    n: gl.int32,
    d: gl.int32,
    k: gl.int32,
    products: gl.int32,
    splits: gl.int32,
    n_tiles: gl.int32,
    capacity: gl.int32,
    stride_v: gl.int64,
    stride_f: gl.int64,
    stride_os: gl.int64,
    stride_ov: gl.int64,
    stride_or: gl.int64,
    scale: gl.float32,
    columns_per_split: gl.int32,
    address: gl.int64,
    DTYPE: gl.constexpr,
    CHOSEN: gl.constexpr,
    ACCUMULATE: gl.constexpr,
):
    """out[split, v, r] = scale * sum over the split's columns j of x[v, j] S[r, j]. Grid: any number of programs.

    x : a tensor descriptor of boxes if CHOSEN.loader is TMA, else a pointer.  out : if CHOSEN.tma_store, a descriptor
    of boxes [HALF, 1, rows] of a tensor (n, splits * n_tiles, rows of a tile), whose vectors' axis is last if they are
    contiguous; else a pointer.  codes, columns, counts, capacity : as `encode_chunks` writes them, with blocks of
    2^log_block columns.  products : n_tiles * splits * blocks of vectors.  columns_per_split : of whole groups of
    chunks.  address : of the data, to prefetch it, or 0.  DTYPE : of x.
    """
    if address != 0:
        _prefetch(
            address, n, d, splits, n_tiles, columns_per_split, stride_v, stride_f, DTYPE, CHOSEN.vectors_contiguous
        )
    BITS: gl.constexpr = DTYPE.primitive_bitwidth
    ROWS: gl.constexpr = CHOSEN.rows
    SLOTS: gl.constexpr = CHOSEN.slots
    BOX0: gl.constexpr = 1 << CHOSEN.log_panel if CHOSEN.vectors_contiguous else HALF
    BOX1: gl.constexpr = 1024 // BITS if CHOSEN.vectors_contiguous else 1 << CHOSEN.log_panel
    BOXES: gl.constexpr = STEP * HALF // (BOX0 * BOX1)
    words_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, STEP // 2], gl.uint32)
    box_shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_bytes(BOX1, BITS), BITS, 2)
    xs = gl.allocate_shared_memory(DTYPE, [SLOTS * 2 * BOXES, BOX0, BOX1], box_shared)
    tiles = gl.allocate_shared_memory(gl.uint32, [SLOTS, ROWS, STEP // 2], words_shared)
    outs = tiles  # not used unless CHOSEN.tma_store
    if CHOSEN.tma_store:
        out_shared: gl.constexpr = gl.NVMMASharedLayout(128, out.dtype.primitive_bitwidth, 2)
        out_box: gl.constexpr = [2, ROWS, HALF] if CHOSEN.out_vectors_contiguous else [2, HALF, ROWS]
        outs = gl.allocate_shared_memory(out.dtype, out_box, out_shared)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    # Arrivals that fill a slot: one of the entries, and those of the data.
    FILLED: gl.constexpr = 2 if CHOSEN.loader == TMA else 1 + 32 * CHOSEN.producer_warps if CHOSEN.loader == COPY else 1
    for s in gl.static_range(SLOTS):
        mbarrier.init(full.index(s), count=FILLED)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (_consume, (xs, tiles, full, empty, out, outs, counts, n, k, products, splits, n_tiles,
                         stride_os, stride_ov, stride_or, scale, CHOSEN, ACCUMULATE, 0)),
            (_consume, (xs, tiles, full, empty, out, outs, counts, n, k, products, splits, n_tiles,
                         stride_os, stride_ov, stride_or, scale, CHOSEN, ACCUMULATE, 1)),
            (_produce, (x, xs, tiles, full, empty, codes, columns, counts, products, splits, n_tiles, capacity, n, d,
                     stride_v, stride_f, CHOSEN)),
        ],
        [4, CHOSEN.producer_warps],
        registers(BITS, CHOSEN.loader, CHOSEN.producer_warps),
    )  # fmt: skip
