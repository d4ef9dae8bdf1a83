"""X Sᵀ and S A on Hopper for any k, nnz and strides, from the codes of `chunk_codes`.

As in `project_hopper`, some warps of a program (producers) fill slots in shared memory with data and entries, and two
groups of 4 warps (consumers) multiply, each for half of the vectors; fp32 data is multiplied as pairs of fp16 numbers,
and the consumers take turns, so that one multiplies while the other converts data. One producer loads data; none, one
or two others write entries (`produce_codes`).
Here entries come from codes, so k, nnz and the number of tiles are ordinary arguments; a step of STEP_COLUMNS columns
combines blocks of several chunks; and data that the tensor memory accelerator (TMA) cannot load is loaded in other ways
(`boxes`, `staged_lines`). CHOSEN.loader is

- TMA if lines begin at multiples of 16 bytes and boxes are wide enough (`hopper_loaders._gains_by_tma`);
- COPY for asynchronous copies of CHOSEN.vector elements, 4 to 16 bytes, per thread;
- STAGE for data whose lines begin anywhere: threads copy aligned units of 16 bytes;
- LOAD for 16-bit data that none of these can load, as single elements through registers: elements are not adjacent in
  memory, or lines begin at odd elements and the first block begins before the data or, with several tiles, blocks have
  less than 16 bytes.

For contiguous 16-bit vectors and several tiles, slots have codes instead of entries (`entries_first`).

While the codes are being written, programs copy the data that they read first to the L2 cache.

Results are stored by the TMA if all tiles have the same number of rows, or codes are listed by windows, and their rows
begin and end at multiples of 16 bytes; otherwise, in 16 bits, by other warps than the consumers (`staged_results`), or
by consumers, with neighbouring threads storing neighbours in memory.
"""

# (No `from __future__ import annotations`: Gluon would not see the annotations of kernel arguments.)
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..config import hopper_loaders
from ..nvidia.shared_memory import shared_begin
from .common import STEP_COLUMNS as STEP
from .common import (
    TILE,
    barrier,
    high_of,
    inverse,
    largest_of,
    low_of,
    next_slot,
    scale_of,
    wait_for_previous_kernel,
)
from .common import WARPGROUP_VECTORS as HALF
from .entries_first import sum_by_rows
from .prefetch import prefetch
from .produce_codes import COPY, STAGE, TMA, WARPS, load_data, write_entries
from .rounds import parts_of
from .shared_products import blocks_of_share, share_of
from .staged_lines import element_addresses, load_lines
from .staged_results import hand_over, store_results
from .store_sums import first_vector, store_share, store_sums

INTEGERS = ["n", "d", "k", "tasks", "unshared", "sharers", "splits", "n_tiles", "capacity", "scale"]
INTEGERS += ["stride_v", "stride_f", "stride_os", "stride_ov", "stride_or", "columns_per_split", "address", "sums"]


_slot_bytes = gluon.constexpr_function(hopper_loaders.slot_bytes)


@gluon.constexpr_function
def swizzle_bytes(width, bits):
    """The swizzle of a tile whose rows have `width` elements of `bits` bits (of an unused one, at least 32 bytes)."""
    return min(128, max(32, width * bits // 8))


@gluon.constexpr_function
def registers(bits, CHOSEN):
    """Registers per thread of the second consumer, the loader, each expander, and the storing warps.

    The first consumer gets the rest.
    """
    storing = CHOSEN.result_line_bytes > 0
    if CHOSEN.entries_first:
        return [168, 104, 72] if storing else [168, 104]
    if CHOSEN.expanders == 2:
        return [112, 64, 96, 96]
    if bits == 16:
        return [112, 104, 72, 80] if storing else [168, 104, 72]
    return [200, 40, 72] if CHOSEN.loader == TMA else [184, 96, 48]


@gluon.constexpr_function
def arrivals(CHOSEN):
    """The number of arrivals that fill a slot: one of the entries, or those of the codes, and those of the data."""
    threads = 32 * WARPS.value
    if CHOSEN.entries_first:
        return 1 + threads
    return 1 + (threads if CHOSEN.loader == COPY or CHOSEN.loader == STAGE else 1)


@gluon.jit
def _multiply_pairs(part, scale, tile, z, turns, turn, CONSUMER: gl.constexpr):
    """The product of part * scale, fp32, and a tile of entries. Waits for the consumer's turn, and passes the turn on.

    Low parts are computed while tensor cores multiply the high ones; the turn is passed on before tensor cores have
    finished. Products in fp32 take 0.90 to 1.04 of the time without turns, 0.97 on average (18 products, H200).
    z : zeros.
    """
    high = high_of(part, scale)
    mbarrier.wait(turns.index(CONSUMER), turn)
    z = warpgroup_mma(high, tile, z, use_acc=False, is_async=True)
    low = low_of(part, scale, high)
    z = warpgroup_mma(low, tile, z, is_async=True)
    barrier()  # all warps have seen this turn before the other consumer can start the one after the next
    mbarrier.arrive(turns.index(1 - CONSUMER), count=1)
    z, high, low = warpgroup_mma_wait(0, deps=(z, high, low))  # until then, tensor cores read all three
    return z


@gluon.jit
def _sum_of_blocks(
    xs, raw, address, line_stride, tiles, full, empty, turns, turn, count, slot, phase,
    INPUT: gl.constexpr, CHOSEN: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """(the sums of a consumer's vectors over the next `count` blocks, next slot, its phase, phase of the next turn).

    As in `project._sum_of_steps`.
    """
    SPLIT_FP32: gl.constexpr = gl.float32 == INPUT
    DTYPE: gl.constexpr = gl.float16 if SPLIT_FP32 else INPUT
    ROWS: gl.constexpr = CHOSEN.rows
    WIDTH: gl.constexpr = 128 if CHOSEN.vectors_contiguous else 1 << CHOSEN.log_panel
    SWIZZLE: gl.constexpr = swizzle_bytes(WIDTH, INPUT.primitive_bitwidth)
    x_shared: gl.constexpr = gl.NVMMASharedLayout(SWIZZLE, INPUT.primitive_bitwidth, 2)
    BOXES: gl.constexpr = STEP * HALF // (xs.shape[1] * xs.shape[2])
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, sums_layout, 2)
    tile_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, STEP], DTYPE)
    largest = gl.zeros([HALF], gl.uint32, layout=gl.SliceLayout(1, operand_layout))
    scale = scale_of(largest, 14)
    acc = gl.zeros((HALF, ROWS), gl.float32, layout=sums_layout)
    ITEM: gl.constexpr = INPUT.primitive_bitwidth // 8
    # Addresses computed before the loop would exceed the registers.
    for _ in tl.range(0, count, STEP >> CHOSEN.log_block, disable_licm=CHOSEN.loader == STAGE):
        mbarrier.wait(full.index(slot), phase)
        tile = tiles.index(slot)._reinterpret(DTYPE, [ROWS, STEP], tile_shared).permute((1, 0))
        if CHOSEN.loader == STAGE:
            v = CONSUMER * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, operand_layout))[:, None]
            f = gl.arange(0, STEP, layout=gl.SliceLayout(0, operand_layout))[None, :]
            addresses = element_addresses(raw, address, line_stride, v, f, ITEM, CHOSEN)
            data = load_lines(addresses, slot, INPUT, CHOSEN)
        else:
            data = xs.index((slot * 2 + CONSUMER) * BOXES)  # the boxes of a half have the layout of one swizzled tile
            if CHOSEN.vectors_contiguous:
                data = data._reinterpret(INPUT, [STEP, HALF], x_shared).permute((1, 0))
            else:
                data = data._reinterpret(INPUT, [HALF, STEP], x_shared)
        if SPLIT_FP32:
            part = data if CHOSEN.loader == STAGE else data.load(operand_layout)
            largest = gl.maximum(largest, largest_of(part))
            before = inverse(scale)
            scale = scale_of(largest, 14)
            z = gl.zeros((HALF, ROWS), gl.float32, layout=sums_layout)
            z = _multiply_pairs(part, scale, tile, z, turns, turn, CONSUMER)
            turn ^= 1
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
    return acc, slot, phase, turn


@gluon.jit
def _consume(
    arguments, DTYPE: gl.constexpr, CHOSEN: gl.constexpr, ACCUMULATE: gl.constexpr, SHARES_PRODUCTS: gl.constexpr,
    CONSUMER: gl.constexpr,
):  # fmt: skip
    """Consumer 0 or 1: multiply its half of each slot's vectors, or entries, by the other operand; store the sums."""
    (xs, raw, address, line_stride, tiles, full, empty, turns, out, outs, counts, n, k, tasks, unshared, sharers,
     splits, n_tiles, sums, stride_os, stride_ov, stride_or, scale, results, handed, taken) = arguments  # fmt: skip
    wait_for_previous_kernel()
    slot, phase = 0, 0
    taken_phase = 1
    turn = 1 - CONSUMER  # waiting for phase 1 of a new barrier returns at once: the first turn is consumer 0's
    task = gl.program_id(0)
    while task < tasks:
        product, share, shares = share_of(task, unshared, sharers, SHARES_PRODUCTS)
        m, split, vector_block = parts_of(product, splits, n_tiles)
        begin, end = blocks_of_share(gl.load(counts + split * n_tiles + m), share, shares, CHOSEN, SHARES_PRODUCTS)
        count = end - begin
        v = first_vector(vector_block, CHOSEN, CONSUMER)
        if CHOSEN.entries_first:
            acc, slot, phase = sum_by_rows(xs, tiles, full, empty, count, slot, phase, DTYPE, CHOSEN, CONSUMER)
        else:
            acc, slot, phase, turn = _sum_of_blocks(
                xs, raw, address, line_stride, tiles, full, empty, turns, turn, count, slot, phase,
                DTYPE, CHOSEN, CONSUMER,
            )  # fmt: skip
        if CHOSEN.result_line_bytes:
            hand_over(acc * scale, out.dtype.element_ty, results, handed, taken, taken_phase, CHOSEN, CONSUMER)
            taken_phase ^= 1
        elif SHARES_PRODUCTS and task >= unshared:
            first_v = unshared // n_tiles * (2 * HALF)
            store_share(
                acc, sums.to(gl.pointer_type(gl.float32)), outs, m, share, shares, v - first_v, n - first_v, k, n_tiles,
                CHOSEN, CONSUMER,
            )  # fmt: skip
        else:
            store_sums(
                acc * scale, out, outs, m, split, v, n, k, n_tiles, stride_os, stride_ov, stride_or,
                CHOSEN, ACCUMULATE, CONSUMER,
            )  # fmt: skip
        task += gl.num_programs(0)
    if CHOSEN.tma_store:
        tma.store_wait(0)


@gluon.jit
def _work(
    written, stored, DTYPE: gl.constexpr, CHOSEN: gl.constexpr, SHARES_PRODUCTS: gl.constexpr, WORKER: gl.constexpr
):
    """An expander or, after all expanders, the warps that store results."""
    if CHOSEN.expanders > WORKER:
        write_entries(written, DTYPE, CHOSEN, SHARES_PRODUCTS, WORKER)
    else:
        store_results(stored, CHOSEN)


@gluon.jit(do_not_specialize=INTEGERS)
def project_codes_hopper(
    x,
    out,
    codes,
    columns,
    counts,
    n: gl.int32,
    d: gl.int32,
    k: gl.int32,
    tasks: gl.int32,
    unshared: gl.int32,
    sharers: gl.int32,
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
    sums: gl.int64,
    DTYPE: gl.constexpr,
    CHOSEN: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    SHARES_PRODUCTS: gl.constexpr,
    SHARED_BYTES: gl.constexpr,
):
    """out[split, v, r] = scale * sum over the split's columns j of x[v, j] S[r, j]. Grid: any number of programs.

    x : a tensor descriptor of boxes if CHOSEN.loader is TMA, else a pointer.  out : if CHOSEN.tma_store, a descriptor
    of boxes [HALF, 1, rows] of a tensor (n, splits * n_tiles, rows of a tile), whose vectors' axis is last if they are
    contiguous; else a pointer.  codes, columns, counts, capacity : as `encode_chunks` writes them, with blocks of
    2^log_block columns.  tasks : the number of products that one program computes and of shares of the others. There
    are n_tiles * splits * blocks of vectors products. If SHARES_PRODUCTS, splits is 1, and products from `unshared` on,
    a multiple of n_tiles, have `sharers` shares each, whose unscaled fp32 sums are written to the address `sums`
    instead of `out`.  columns_per_split : of whole groups of chunks.  address : of the data, for prefetching and for
    staged lines; 0 if its elements are not adjacent in memory.  DTYPE : of x.  SHARED_BYTES : of the staged lines of
    all slots and of the result.
    """
    if address != 0:
        product, _, _ = share_of(gl.program_id(0), unshared, sharers, SHARES_PRODUCTS)
        prefetch(
            product,
            address,
            n,
            d,
            splits,
            n_tiles,
            columns_per_split,
            stride_v,
            stride_f,
            DTYPE,
            CHOSEN.vectors_contiguous,
        )
    BITS: gl.constexpr = DTYPE.primitive_bitwidth
    ROWS: gl.constexpr = CHOSEN.rows
    SLOTS: gl.constexpr = CHOSEN.slots
    BOX0: gl.constexpr = 1 << CHOSEN.log_panel if CHOSEN.vectors_contiguous else HALF
    BOX1: gl.constexpr = 1024 // BITS if CHOSEN.vectors_contiguous else 1 << CHOSEN.log_panel
    BOXES: gl.constexpr = STEP * HALF // (BOX0 * BOX1)
    words_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, STEP // 2], gl.uint32)
    box_shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_bytes(BOX1, BITS), BITS, 2)
    if CHOSEN.entries_first:  # tiles of codes
        codes_shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        tiles = gl.allocate_shared_memory(gl.uint8, [SLOTS, TILE * (STEP >> CHOSEN.log_block)], codes_shared)
    else:
        tiles = gl.allocate_shared_memory(gl.uint32, [SLOTS, ROWS, STEP // 2], words_shared)
    xs, raw = tiles, 0  # placeholders, if there are no boxes or no staged lines
    if SHARED_BYTES:
        raw = shared_begin(SHARED_BYTES) & -16
    if CHOSEN.loader != STAGE:
        xs = gl.allocate_shared_memory(DTYPE, [SLOTS * 2 * BOXES, BOX0, BOX1], box_shared)
    line_stride = stride_f if CHOSEN.vectors_contiguous else stride_v
    outs = tiles  # not used unless CHOSEN.tma_store
    if CHOSEN.tma_store:
        out_shared: gl.constexpr = gl.NVMMASharedLayout(128, out.dtype.primitive_bitwidth, 2)
        out_box: gl.constexpr = (
            [2, CHOSEN.part_rows, CHOSEN.part_vectors]
            if CHOSEN.out_vectors_contiguous
            else [2, CHOSEN.part_vectors, CHOSEN.part_rows]
        )
        outs = gl.allocate_shared_memory(out.dtype, out_box, out_shared)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    handed, taken = turns, turns  # not used unless CHOSEN.result_line_bytes
    if CHOSEN.result_line_bytes:
        handed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for c in gl.static_range(2):
            mbarrier.init(handed.index(c), count=1)
            mbarrier.init(taken.index(c), count=1)
    for c in gl.static_range(2):
        mbarrier.init(turns.index(c), count=1)
    for s in gl.static_range(SLOTS):
        mbarrier.init(full.index(s), count=arrivals(CHOSEN))
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    barrier()
    results = raw + SLOTS * _slot_bytes(CHOSEN)
    consumed = (xs, raw, address, line_stride, tiles, full, empty, turns, out, outs, counts, n, k, tasks,
                unshared, sharers, splits, n_tiles, sums, stride_os, stride_ov, stride_or, scale, results, handed,
                taken)  # fmt: skip
    loaded = (x, address, xs, raw, tiles, full, empty, codes, columns, counts, tasks, unshared, sharers, splits,
              n_tiles, capacity, n, d, stride_v, stride_f)  # fmt: skip
    written = tiles, full, empty, codes, counts, tasks, unshared, sharers, splits, n_tiles, capacity
    stored = results, handed, taken, out, n, k, tasks, splits, n_tiles, stride_ov, stride_or
    WORKERS: gl.constexpr = CHOSEN.expanders + (CHOSEN.result_line_bytes > 0)
    if WORKERS == 0:
        gl.warp_specialize(
            [
                (_consume, (consumed, DTYPE, CHOSEN, ACCUMULATE, SHARES_PRODUCTS, 0)),
                (_consume, (consumed, DTYPE, CHOSEN, ACCUMULATE, SHARES_PRODUCTS, 1)),
                (load_data, (loaded, DTYPE, CHOSEN, SHARES_PRODUCTS)),
            ],
            [4, WARPS],
            registers(BITS, CHOSEN),
        )
    elif WORKERS == 1:
        gl.warp_specialize(
            [
                (_consume, (consumed, DTYPE, CHOSEN, ACCUMULATE, SHARES_PRODUCTS, 0)),
                (_consume, (consumed, DTYPE, CHOSEN, ACCUMULATE, SHARES_PRODUCTS, 1)),
                (load_data, (loaded, DTYPE, CHOSEN, SHARES_PRODUCTS)),
                (_work, (written, stored, DTYPE, CHOSEN, SHARES_PRODUCTS, 0)),
            ],
            [4, WARPS, WARPS],
            registers(BITS, CHOSEN),
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (consumed, DTYPE, CHOSEN, ACCUMULATE, SHARES_PRODUCTS, 0)),
                (_consume, (consumed, DTYPE, CHOSEN, ACCUMULATE, SHARES_PRODUCTS, 1)),
                (load_data, (loaded, DTYPE, CHOSEN, SHARES_PRODUCTS)),
                (_work, (written, stored, DTYPE, CHOSEN, SHARES_PRODUCTS, 0)),
                (_work, (written, stored, DTYPE, CHOSEN, SHARES_PRODUCTS, 1)),
            ],
            [4, WARPS, WARPS, WARPS],
            registers(BITS, CHOSEN),
        )
