"""X Sᵀ and S A on Hopper for any k, nnz and strides, from the codes of `chunk_codes`.

As in `project_hopper`, 4 warps of a program fill slots in shared memory with data and entries, 4 and 4 multiply, each
for half of the vectors, and fp32 is multiplied as pairs of fp16 numbers. Here entries come from codes, so the numbers
of components, nonzeros and tiles are ordinary arguments; a step of STEP_COLUMNS columns joins blocks of several chunks;
and rows of data that the tensor memory accelerator (TMA) cannot load arrive by other loads:

- TMA: rows begin at multiples of 16 bytes, and a panel, what one copy loads, is wide enough. Copies of boxes with rows
  of 64 bytes or less take 1.15 times as long as the next kind in fp32, and 1.4 times in 16 bits (H200).
- COPY: asynchronous copies of VECTOR numbers, 4 to 16 bytes, by each thread.
- LOAD: through registers, for 16-bit numbers at odd places, which asynchronous copies do not support.

Results are stored by the TMA where tiles have equally many rows, at multiples of 16 bytes; else by threads, neighbours
in memory by neighbouring threads.
"""

# (No `from __future__ import annotations`: Gluon would not see the annotations of kernel arguments.)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..config import hopper, hopper_codes
from ..portable import chunk_codes
from .boxes import box_pointers, load_boxes, panel_columns
from .common import TILE, barrier, inverse, lane_value, largest_of, next_slot, pair_of, scale_of

HALF = gl.constexpr(hopper.WARPGROUP_VECTORS)
STEP = gl.constexpr(hopper.STEP_COLUMNS)
TMA, COPY, LOAD = (gl.constexpr(i) for i in (hopper_codes.TMA, hopper_codes.COPY, hopper_codes.LOAD))
NO_ENTRY, NO_COLUMN = gl.constexpr(chunk_codes.NO_ENTRY.value), gl.constexpr(chunk_codes.NO_COLUMN.value)
_tile_start = gluon.jit(chunk_codes.tile_start.fn)
LIST = gl.constexpr(32)  # columns of blocks that a warp holds at a time


@gluon.constexpr_function
def swizzle_bytes(width, bits):
    """The swizzle of a tile of which `width` numbers of `bits` bits lie side by side."""
    return min(128, width * bits // 8)


@gluon.constexpr_function
def codes_layout(rows, log_block):
    """The layout of entries [rows, blocks of a step, words of a block]: 128 threads, one row or half a row each."""
    warps, blocks = rows // 32, 64 >> log_block
    return gl.BlockedLayout(
        [1, blocks * warps // 4, (1 << log_block) // 2], [32, 1, 1], [warps, 4 // warps, 1], [2, 1, 0]
    )


@gluon.jit
def _work(product, splits, n_tiles):
    """(tile, split, block of vectors) of a product."""
    rest = product // n_tiles
    return product % n_tiles, rest % splits, rest // splits


@gluon.jit
def _expand(code, CHOSEN: gl.constexpr, DTYPE: gl.constexpr):
    """The entries, 16-bit numbers two to a word, that codes [rows, blocks of a step] stand for: [rows, STEP // 2]."""
    WARPS: gl.constexpr = CHOSEN.rows // 32
    flat: gl.constexpr = gl.BlockedLayout([1, STEP // 2 * WARPS // 4], [32, 1], [WARPS, 4 // WARPS], [1, 0])
    words: gl.constexpr = codes_layout(CHOSEN.rows, CHOSEN.log_block)
    ONE: gl.constexpr = 0x3F80 if gl.bfloat16 == DTYPE else 0x3C00
    word = gl.arange(0, (1 << CHOSEN.log_block) // 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, words))).to(gl.uint32)
    code = code.to(gl.uint32)
    i = code & 127
    pair = ((code >> 7) << 15 | ONE) << ((i & 1) << 4)
    entries = gl.where((i >> 1)[:, :, None] == word[None, None, :], pair[:, :, None], 0)
    return gl.convert_layout(gl.reshape(entries, [CHOSEN.rows, STEP // 2]), flat)


@gluon.jit
def _fill(
    x, xs, tiles, full, empty, codes, columns, counts, products, splits, n_tiles, capacity, n, d, stride_v, stride_f,
    CHOSEN: gl.constexpr,
):  # fmt: skip
    """Fill the slots, one step each, with data and entries."""
    DTYPE: gl.constexpr = xs.dtype
    PANELS: gl.constexpr = STEP >> CHOSEN.log_panel
    BOX0: gl.constexpr = xs.shape[1]
    BOX1: gl.constexpr = xs.shape[2]
    SIDES: gl.constexpr = HALF // BOX1 if CHOSEN.vectors_contiguous else 1
    BOXES: gl.constexpr = 2 * SIDES * PANELS  # of a slot: by half of the vectors, by part of a half, by panel
    LANES: gl.constexpr = min(32, BOX1 // CHOSEN.vector)
    boxes: gl.constexpr = gl.BlockedLayout([1, CHOSEN.vector], [32 // LANES, LANES], [4, 1], [1, 0])
    box_row = gl.arange(0, BOX0, layout=gl.SliceLayout(1, boxes))[:, None]
    box_column = gl.arange(0, BOX1, layout=gl.SliceLayout(0, boxes))[None, :]
    box_f = box_row if CHOSEN.vectors_contiguous else box_column
    box_v = box_column if CHOSEN.vectors_contiguous else box_row
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    U: gl.constexpr = STEP >> CHOSEN.log_block
    words: gl.constexpr = codes_layout(CHOSEN.rows, CHOSEN.log_block)
    r = gl.arange(0, CHOSEN.rows, layout=gl.SliceLayout(1, gl.SliceLayout(2, words)))[:, None]
    u = gl.arange(0, U, layout=gl.SliceLayout(0, gl.SliceLayout(2, words)))[None, :]
    # Whether a step's numbers are loaded while those of the step before are stored (H200, 16 bits, odd strides: 3.4
    # times the memory floor for 4.3 with one tile, as long as before with 16; 3.2 for 2.9 if vectors are contiguous).
    AHEAD: gl.constexpr = CHOSEN.loader == LOAD and not CHOSEN.vectors_contiguous
    slot, phase = 0, 1  # a barrier that has not been used counts as past phase 1: all slots are empty
    product = gl.program_id(0)
    while product < products:
        m, split, place = _work(product, splits, n_tiles)
        first = place * (2 * HALF)
        count = gl.load(counts + split * n_tiles + m)
        listed = (split * n_tiles + m).to(gl.int64) * capacity
        listed_columns = columns + listed
        code_pointers = codes + listed * TILE + (u * TILE + r)
        start = gl.load(listed_columns)
        code = gl.load(code_pointers, mask=u + r * 0 < count, other=NO_ENTRY)
        base = x
        rows: gl.tuple = (box_v, box_v)
        if CHOSEN.loader != TMA:
            ahead = panel_columns(listed_columns, 0, count, start, box_f, CHOSEN, PANELS)
            if not CHOSEN.vectors_contiguous:  # rows beyond the last are the last, whose sums are not stored
                base = x + first.to(gl.int64) * stride_v
                last = n - 1 - first
                low, high = gl.minimum(box_v, last), gl.minimum(box_v + HALF, last)
                rows = ((low * stride_v).to(gl.int32), (high * stride_v).to(gl.int32))
        if AHEAD:
            parts = load_boxes(
                x, base, rows, ahead, first + box_v, n, d, count > 0, stride_v, stride_f, CHOSEN, SIDES, PANELS
            )
            ahead = panel_columns(listed_columns, U, count, start, box_f, CHOSEN, PANELS)
        for done in range(0, count, U):
            code_pointers += U * TILE
            next_code = gl.load(code_pointers, mask=done + U + u + r * 0 < count, other=NO_ENTRY)
            if AHEAD:
                here = parts
                parts = load_boxes(
                    x, base, rows, ahead, first + box_v, n, d, done + U < count, stride_v, stride_f, CHOSEN, SIDES,
                    PANELS,
                )  # fmt: skip
                ahead = panel_columns(listed_columns, done + 2 * U, count, start, box_f, CHOSEN, PANELS)
                mbarrier.wait(empty.index(slot), phase)
                for box in gl.static_range(BOXES):
                    xs.index(slot * BOXES + box).store(here[box])
            elif CHOSEN.loader != TMA:
                now = ahead
                ahead = panel_columns(listed_columns, done + U, count, start, box_f, CHOSEN, PANELS)
                if CHOSEN.loader == LOAD:  # all before any is waited for
                    parts = load_boxes(
                        x, base, rows, now, first + box_v, n, d, True, stride_v, stride_f, CHOSEN, SIDES, PANELS
                    )
                mbarrier.wait(empty.index(slot), phase)
                for box in gl.static_range(BOXES):
                    if CHOSEN.loader == LOAD:
                        xs.index(slot * BOXES + box).store(parts[box])
                    else:
                        v = first + box // PANELS * (HALF // SIDES) + box_v
                        pointers, known = box_pointers(
                            x, base, rows[box // (PANELS * SIDES)], now[box % PANELS], v, n, d, stride_v, stride_f,
                            CHOSEN,
                        )  # fmt: skip
                        async_copy.async_copy_global_to_shared(xs.index(slot * BOXES + box), pointers, mask=known)
                if CHOSEN.loader == COPY:
                    async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            else:
                column = gl.full([4 * LIST], 0, gl.int32, layout=lanes)
                if not CHOSEN.one_tile:
                    i = done // LIST * LIST + gl.arange(0, 4 * LIST, layout=lanes) % LIST
                    column = gl.load(listed_columns + i, mask=i < count, other=NO_COLUMN)
                mbarrier.wait(empty.index(slot), phase)
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
            tiles.index(slot).store(_expand(code, CHOSEN, DTYPE))
            fence_async_shared()
            barrier()
            mbarrier.arrive(full.index(slot), count=1)
            slot, phase = next_slot(slot, phase, CHOSEN.slots)
            code = next_code
        product += gl.num_programs(0)


@gluon.jit
def _sum(xs, tiles, full, empty, count, slot, phase, CHOSEN: gl.constexpr, WHICH: gl.constexpr):
    """(the sums of half the vectors over the next `count` blocks, slot and phase after them); see `project`."""
    PAIR: gl.constexpr = xs.dtype == gl.float32
    DTYPE: gl.constexpr = gl.float16 if PAIR else xs.dtype
    R: gl.constexpr = CHOSEN.rows
    WIDTH: gl.constexpr = 128 if CHOSEN.vectors_contiguous else 1 << CHOSEN.log_panel
    SWIZZLE: gl.constexpr = swizzle_bytes(WIDTH, xs.dtype.primitive_bitwidth)
    x_shared: gl.constexpr = gl.NVMMASharedLayout(SWIZZLE, xs.dtype.primitive_bitwidth, 2)
    BOXES: gl.constexpr = STEP * HALF // (xs.shape[1] * xs.shape[2])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 16])
    factor: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    tile_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([R, STEP], DTYPE)
    largest = gl.zeros([HALF], gl.uint32, layout=gl.SliceLayout(1, factor))
    scale = scale_of(largest, 14)
    acc = gl.zeros((HALF, R), gl.float32, layout=sums)
    for _ in range(0, count, STEP >> CHOSEN.log_block):
        mbarrier.wait(full.index(slot), phase)
        tile = tiles.index(slot)._reinterpret(DTYPE, [R, STEP], tile_shared).permute((1, 0))
        data = xs.index((slot * 2 + WHICH) * BOXES)  # boxes of a half lie as one tile of that swizzle does
        if CHOSEN.vectors_contiguous:
            data = data._reinterpret(xs.dtype, [STEP, HALF], x_shared).permute((1, 0))
        else:
            data = data._reinterpret(xs.dtype, [HALF, STEP], x_shared)
        if PAIR:
            part = data.load(factor)
            largest = gl.maximum(largest, largest_of(part))
            before = inverse(scale)
            scale = scale_of(largest, 14)
            high, low = pair_of(part, scale)
            z = gl.zeros((HALF, R), gl.float32, layout=sums)
            z = warpgroup_mma(high, tile, z, use_acc=False, is_async=True)
            z = warpgroup_mma(low, tile, z, is_async=True)
        else:
            if CHOSEN.loader == COPY:
                fence_async_shared()  # what threads have copied, tensor cores read
            z = warpgroup_mma(data, tile, acc, is_async=True)
        z = warpgroup_mma_wait(0, deps=(z,))
        barrier()
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, CHOSEN.slots)
        acc = acc * gl.convert_layout(scale * before, gl.SliceLayout(1, sums))[:, None] + z if PAIR else z
    if PAIR:
        acc *= gl.convert_layout(inverse(scale), gl.SliceLayout(1, sums))[:, None]
    return acc, slot, phase


@gluon.jit
def _store(
    acc, out, outs, m, split, v, n, k, n_tiles, stride_os, stride_ov, stride_or,
    CHOSEN: gl.constexpr, ACCUMULATE: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Store the sums [HALF, rows of the tile] of the vectors from v on."""
    R: gl.constexpr = CHOSEN.rows
    if CHOSEN.tma_store:
        part = outs.index(WHICH)
        tma.store_wait(0)
        barrier()
        if CHOSEN.out_vectors_contiguous:
            part.permute((1, 0)).store(acc.to(out.dtype))
        else:
            part.store(acc.to(out.dtype))
        fence_async_shared()
        barrier()
        if CHOSEN.out_vectors_contiguous:
            part = part._reinterpret(out.dtype, [1, R, HALF], out.layout)
            tma.async_copy_shared_to_global(out, [split * n_tiles + m, 0, v], part)
        else:
            part = part._reinterpret(out.dtype, [HALF, 1, R], out.layout)
            tma.async_copy_shared_to_global(out, [v, split * n_tiles + m, 0], part)
    else:
        by_rows: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
        by_columns: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [2, 2], [0, 1])
        side_by_side: gl.constexpr = by_columns if CHOSEN.out_vectors_contiguous else by_rows
        first_row = _tile_start(m, k, n_tiles).to(gl.int32)
        rows = _tile_start(m + 1, k, n_tiles).to(gl.int32) - first_row
        v = v.to(gl.int64) + gl.arange(0, HALF, layout=gl.SliceLayout(1, side_by_side))
        r = gl.arange(0, R, layout=gl.SliceLayout(0, side_by_side))
        r_stored = (first_row + r).to(gl.int64)
        pointers = out + split * stride_os + (v * stride_ov)[:, None] + (r_stored * stride_or)[None, :]
        keep = (v < n)[:, None] & (r < rows)[None, :]
        if ACCUMULATE:
            acc = gl.convert_layout(acc, side_by_side)
            acc += gl.load(pointers, mask=keep, other=0.0).to(gl.float32)
            gl.store(pointers, acc.to(out.dtype.element_ty), mask=keep)
        else:
            gl.store(pointers, gl.convert_layout(acc.to(out.dtype.element_ty), side_by_side), mask=keep)


@gluon.jit
def _multiply(
    xs, tiles, full, empty, out, outs, counts, n, k, products, splits, n_tiles, stride_os, stride_ov, stride_or, scale,
    CHOSEN: gl.constexpr, ACCUMULATE: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Multiply half of the vectors of each slot by its entries, and store the sums."""
    slot, phase = 0, 0
    product = gl.program_id(0)
    while product < products:
        m, split, place = _work(product, splits, n_tiles)
        count = gl.load(counts + split * n_tiles + m)
        acc, slot, phase = _sum(xs, tiles, full, empty, count, slot, phase, CHOSEN, WHICH)
        v = (place * 2 + WHICH) * HALF
        _store(
            acc * scale, out, outs, m, split, v, n, k, n_tiles, stride_os, stride_ov, stride_or,
            CHOSEN, ACCUMULATE, WHICH,
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
    DTYPE: gl.constexpr,
    CHOSEN: gl.constexpr,
    ACCUMULATE: gl.constexpr,
):
    """out[split, v, r] = scale * the sum over a split's columns j of x[v, j] S[r, j]. Any number of programs.

    x : a tensor descriptor of CHOSEN's boxes where its loader is TMA, else a pointer.  out : a descriptor of boxes
    [HALF, 1, rows] of a tensor (n, splits * n_tiles, rows of a tile) where CHOSEN.tma_store, with the vectors' axis
    last where they are contiguous; else a pointer.  codes, columns, counts, capacity : as `encode_chunks` writes them,
    with blocks of 2^log_block columns.  products : n_tiles * splits * blocks of vectors.  DTYPE : of x.
    """
    BITS: gl.constexpr = DTYPE.primitive_bitwidth
    R: gl.constexpr = CHOSEN.rows
    SLOTS: gl.constexpr = CHOSEN.slots
    BOX0: gl.constexpr = 1 << CHOSEN.log_panel if CHOSEN.vectors_contiguous else HALF
    BOX1: gl.constexpr = 1024 // BITS if CHOSEN.vectors_contiguous else 1 << CHOSEN.log_panel
    BOXES: gl.constexpr = STEP * HALF // (BOX0 * BOX1)
    words_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([R, STEP // 2], gl.uint32)
    box_shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_bytes(BOX1, BITS), BITS, 2)
    xs = gl.allocate_shared_memory(DTYPE, [SLOTS * 2 * BOXES, BOX0, BOX1], box_shared)
    tiles = gl.allocate_shared_memory(gl.uint32, [SLOTS, R, STEP // 2], words_shared)
    outs = tiles  # where none are needed
    if CHOSEN.tma_store:
        out_shared: gl.constexpr = gl.NVMMASharedLayout(128, out.dtype.primitive_bitwidth, 2)
        out_box: gl.constexpr = [2, R, HALF] if CHOSEN.out_vectors_contiguous else [2, HALF, R]
        outs = gl.allocate_shared_memory(out.dtype, out_box, out_shared)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    FILLED: gl.constexpr = 2 if CHOSEN.loader == TMA else 129 if CHOSEN.loader == COPY else 1  # arrivals: data, entries
    for s in gl.static_range(SLOTS):
        mbarrier.init(full.index(s), count=FILLED)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (_multiply, (xs, tiles, full, empty, out, outs, counts, n, k, products, splits, n_tiles,
                         stride_os, stride_ov, stride_or, scale, CHOSEN, ACCUMULATE, 0)),
            (_multiply, (xs, tiles, full, empty, out, outs, counts, n, k, products, splits, n_tiles,
                         stride_os, stride_ov, stride_or, scale, CHOSEN, ACCUMULATE, 1)),
            (_fill, (x, xs, tiles, full, empty, codes, columns, counts, products, splits, n_tiles, capacity, n, d,
                     stride_v, stride_f, CHOSEN)),
        ],
        [4, 4],
        [136, 232] if BITS == 16 else [200, 104] if CHOSEN.loader == COPY else [216, 72],
    )  # fmt: skip
