"""X Sᵀ and S A for any k, nnz and strides, from the codes of `chunk_codes`, on compute capability 8 and later.

A program copies slices of SLICE columns of its vectors, and the slices' codes, to a ring of slots in shared memory,
writes the entries that the codes name to shared memory, one slice ahead (`slice_entries`), and multiplies one slice at
a time on tensor cores by `mma.sync`. fp32 data is multiplied as pairs of fp16 numbers, as in `hopper.project_codes`.

Data is copied in asynchronous copies of 4 to 16 bytes. 16-bit data whose lines begin at any element is copied in
aligned units (`staged_slices`) or, in blocks of fewer than 8 columns, through registers.
"""

# (No `from __future__ import annotations`: Gluon would not see the annotations of kernel arguments.)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from ..config import ampere_kernel
from ..hopper.common import barrier, inverse, largest_of, pair_of, scale_of, wait_for_previous_kernel
from ..hopper.rounds import parts_of
from ..hopper.store_sums import store_sums
from ..nvidia.shared_memory import shared_begin
from .slice_entries import blocks_of, clear_entries, first_addresses, load_codes, load_entries, write_entries
from .staged_slices import copy_slice_lines, first_columns, load_pairs, pair_addresses, slice_units, unit_columns

SLICE = gl.constexpr(ampere_kernel.SLICE_COLUMNS)
ENTRY_LINE_BYTES = gl.constexpr(ampere_kernel.ENTRY_LINE_BYTES)
WARPS = gl.constexpr(ampere_kernel.WARPS)
CODE_VECTOR = gl.constexpr(4)  # codes that a thread copies at a time
INTEGERS = ["n", "d", "k", "products", "splits", "n_tiles", "capacity", "scale"]
INTEGERS += ["stride_v", "stride_f", "stride_os", "stride_ov", "stride_or"]


@gluon.constexpr_function
def data_layout(item, CHOSEN):
    """The layout of a slice's data in shared memory: units of 16 bytes are permuted within 128 bytes."""
    width = CHOSEN.vectors if CHOSEN.vectors_contiguous else SLICE.value
    unit = 16 // item
    units = width // unit
    return gl.SwizzledSharedLayout(unit, max(1, 8 // units), min(8, units), [1, 0])


@gluon.jit
def _start(x, product, lists, block_v, stride_v, CHOSEN: gl.constexpr):
    """Pointers and counts from which the slices of a product are copied.

    The result is (vectors, pointers to their column 0, columns, codes, number of blocks, number of slices). A product
    past the last has one slice, without blocks.

    lists : (products, splits, n_tiles, capacity, columns, codes, counts).  block_v : indices within a block of vectors.
    """
    products, splits, n_tiles, capacity, columns, codes, counts = lists
    m, split, block = parts_of(product, splits, n_tiles)
    exists = product < products
    index = gl.where(exists, split * n_tiles + m, 0)
    count = gl.where(exists, gl.load(counts + index), 0)
    begin = index.to(gl.int64) * capacity
    v, codes = block * CHOSEN.vectors + block_v, codes + begin * CHOSEN.rows
    return v, x + v.to(gl.int64) * stride_v, columns + begin, codes, count, slices_of(count, CHOSEN)


@gluon.jit
def slices_of(count, CHOSEN: gl.constexpr):
    """The number of slices of `count` blocks, at least 1."""
    return gl.maximum(((count << CHOSEN.log_block) + SLICE - 1) // SLICE, 1)


@gluon.jit
def _next(x, product, number, current, lists, block_v, stride_v, CHOSEN: gl.constexpr):
    """(product, number of its slice, `_start` of the product) of the slice after slice `number` of a product."""
    v, rows, columns, codes, count, slices = current
    number += 1
    if number >= slices:
        number = 0
        product += gl.num_programs(0)
        v, rows, columns, codes, count, slices = _start(x, product, lists, block_v, stride_v, CHOSEN)
    return product, number, (v, rows, columns, codes, count, slices)


@gluon.jit
def _slice_columns(columns, number, capacity, indices, CHOSEN: gl.constexpr):
    """The columns of a slice that a thread copies; arbitrary past the last block. indices : as in `_copy_next`."""
    if CHOSEN.staged:
        j = first_columns(columns, number, capacity, indices, CHOSEN)
    else:
        j = unit_columns(columns, number, capacity, indices[1], CHOSEN)
    return j


@gluon.jit
def _copy_next(slots, slot, x, ahead, lists, indices, sizes, CHOSEN: gl.constexpr):
    """(the slice after slice `ahead`, the data of slice `ahead` if it passes through registers, otherwise 0).

    The slice is copied to a slot. The copies close a group; data and codes past the last block are zeros.

    slots : of data, the address of those of staged lines, and of codes.  ahead : (product, number of the slice, its
    columns, `_start` of the product).  indices : of the vectors in their block and of the columns in their slice or, if
    lines are staged, from `slice_units`.  sizes : (n, d, stride_v, stride_f).
    """
    product, number, j, current = ahead
    loaded = _copy_slice(slots, slot, x, current, indices, j, number, sizes, CHOSEN)
    if CHOSEN.several:
        block_v = 0 if CHOSEN.staged else indices[0]
        product, number, current = _next(x, product, number, current, lists, block_v, sizes[2], CHOSEN)
    else:
        number += 1
    return (product, number, _slice_columns(current[2], number, lists[3], indices, CHOSEN), current), loaded


@gluon.jit
def _copy_slice(slots, slot, x, current, indices, j, number, sizes, CHOSEN: gl.constexpr):
    """Start to copy columns j of slice `number`, and their codes, to a slot; see `_copy_next`."""
    xs, raw, tiles = slots
    v, rows, _, codes, count, _ = current
    n, d, stride_v, stride_f = sizes
    loaded = 0
    if CHOSEN.staged:
        address = x.to(gl.int64, bitcast=True)
        copy_slice_lines(raw, slot, address, v, indices, j, number, count, n, d, stride_v, stride_f, CHOSEN)
    else:
        VECTOR: gl.constexpr = CHOSEN.vector
        BYTES: gl.constexpr = VECTOR * xs.dtype.primitive_bitwidth // 8
        mask = (number * SLICE + indices[1] < (count << CHOSEN.log_block)) & (j >= 0) & (j < d) & (v < n)
        pointers = rows + j.to(gl.int64) * stride_f
        if VECTOR > 1:
            pointers = gl.max_contiguous(gl.multiple_of(pointers, [1, BYTES]), [1, VECTOR])
            mask = gl.max_constancy(mask, [1, VECTOR])
        if CHOSEN.copies:
            async_copy.async_copy_global_to_shared(xs.index(slot), pointers, mask=mask)
        else:
            loaded = gl.load(pointers, mask=mask, other=0.0)
    layout: gl.constexpr = gl.BlockedLayout([CODE_VECTOR], [32], [WARPS], [0])
    i = (number * SLICE >> CHOSEN.log_block) * CHOSEN.rows
    i += gl.arange(0, blocks_of(CHOSEN) * CHOSEN.rows, layout=layout)
    mask = gl.max_constancy(i < count * CHOSEN.rows, [CODE_VECTOR])
    pointers = gl.max_contiguous(gl.multiple_of(codes + i, [CODE_VECTOR]), [CODE_VECTOR])
    async_copy.async_copy_global_to_shared(tiles.index(slot), pointers, mask=mask)
    async_copy.commit_group()
    return loaded


@gluon.jit
def _joined(sums, PARTS: gl.constexpr):
    """The sums [vectors, rows] of all parts of the rows."""
    gl.static_assert(PARTS <= 2)
    acc = sums[0]
    if PARTS == 2:
        acc = gl.permute(gl.join(sums[0], sums[1]), (0, 2, 1))
        acc = gl.reshape(acc, [acc.shape[0], 2 * acc.shape[2]])
    return acc


@gluon.jit(do_not_specialize=INTEGERS)
def project_codes_ampere(
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
    CHOSEN: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    PROGRAMMATIC_LAUNCH: gl.constexpr,
    SHARED_BYTES: gl.constexpr,
):
    """out[split, v, r] = scale * sum over the split's columns j of x[v, j] S[r, j].

    Grid: any number of programs or, unless CHOSEN.several, one for each of the `products`; 4 warps.

    SHARED_BYTES : of entries and staged lines.  Other arguments are as in `project_codes_hopper`.
    """
    INPUT: gl.constexpr = x.dtype.element_ty
    SPLIT_FP32: gl.constexpr = gl.float32 == INPUT
    DTYPE: gl.constexpr = gl.float16 if SPLIT_FP32 else INPUT
    VECTORS: gl.constexpr = CHOSEN.vectors
    ROWS: gl.constexpr = CHOSEN.rows
    PARTS: gl.constexpr = CHOSEN.parts
    PART_ROWS: gl.constexpr = ROWS // PARTS
    SLOTS: gl.constexpr = CHOSEN.slots
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [CHOSEN.warps, WARPS // CHOSEN.warps], [16, 8])
    data_operand: gl.constexpr = gl.DotOperandLayout(0, sums_layout, 2)
    entries_operand: gl.constexpr = gl.DotOperandLayout(1, sums_layout, 2)
    HEIGHT: gl.constexpr = SLICE if CHOSEN.vectors_contiguous else VECTORS
    WIDTH: gl.constexpr = VECTORS if CHOSEN.vectors_contiguous else SLICE
    x_shared: gl.constexpr = data_layout(INPUT.primitive_bitwidth // 8, CHOSEN)
    xs = gl.allocate_shared_memory(INPUT, [1 if CHOSEN.staged else SLOTS, HEIGHT, WIDTH], x_shared)
    codes_shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles = gl.allocate_shared_memory(gl.uint8, [SLOTS, CHOSEN.rows * blocks_of(CHOSEN)], codes_shared)
    ENTRY_BYTES: gl.constexpr = ROWS * ENTRY_LINE_BYTES  # of a slice
    lines = shared_begin(SHARED_BYTES) & -16  # the entries of two slices, in turns
    clear_entries(lines, CHOSEN)
    LANES: gl.constexpr = min(32, WIDTH // CHOSEN.vector)
    copy_layout: gl.constexpr = gl.BlockedLayout([1, CHOSEN.vector], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    if CHOSEN.staged:
        raw = lines + 2 * ENTRY_BYTES
        line_stride = stride_f if CHOSEN.vectors_contiguous else stride_v
        addresses = pair_addresses(raw, x.to(gl.int64, bitcast=True), line_stride, HEIGHT, WIDTH, CHOSEN)
        indices, block_v = slice_units(CHOSEN), 0
    else:
        raw = 0
        row = gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, copy_layout))[:, None]
        column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, copy_layout))[None, :]
        block_v = column if CHOSEN.vectors_contiguous else row
        indices = (block_v, row if CHOSEN.vectors_contiguous else column)
    if PROGRAMMATIC_LAUNCH:
        wait_for_previous_kernel()

    lists = (products, splits, n_tiles, capacity, columns, codes, counts)
    product = gl.program_id(0)
    slots, sizes = (xs, raw, tiles), (n, d, stride_v, stride_f)
    current = _start(x, product, lists, block_v, stride_v, CHOSEN)
    ahead = (product, 0, _slice_columns(current[2], 0, capacity, indices, CHOSEN), current)  # SLOTS - 1 slices ahead
    held = gl.zeros([HEIGHT, WIDTH], INPUT, layout=copy_layout)  # the last slice that was loaded through registers
    for slot in range(SLOTS - 1):
        ahead, loaded = _copy_next(slots, slot, x, ahead, lists, indices, sizes, CHOSEN)
        if not CHOSEN.copies:
            xs.index(slot).store(loaded)
            held = loaded
    async_copy.wait_group(SLOTS - 2)
    barrier()
    previous, this = first_addresses(lines + ENTRY_BYTES, CHOSEN), 0
    latest = write_entries(lines, first_addresses(lines, CHOSEN), load_codes(tiles.index(0)), 0, DTYPE, CHOSEN)
    slot, held_slot = 0, SLOTS - 2
    while product < products:
        m, split, vector_block = parts_of(product, splits, n_tiles)
        zeros = gl.zeros((VECTORS, PART_ROWS), gl.float32, layout=sums_layout)
        sums: gl.tuple = ()
        for _ in gl.static_range(PARTS):
            sums += (zeros,)
        largest = gl.zeros([VECTORS], gl.uint32, layout=gl.SliceLayout(1, data_operand))
        factor = scale_of(largest, 14)
        slices = slices_of(gl.load(counts + split * n_tiles + m), CHOSEN)
        for number in range(slices):
            async_copy.wait_group(SLOTS - 3)  # this slice and the next
            barrier()
            if not CHOSEN.copies:
                xs.index(held_slot).store(held)
            held_slot = gl.where(slot == 0, SLOTS - 1, slot - 1)  # the slot of the previous slice is free
            ahead, loaded = _copy_next(slots, held_slot, x, ahead, lists, indices, sizes, CHOSEN)
            if not CHOSEN.copies:
                held = loaded
            if CHOSEN.staged:
                xs.index(0).store(load_pairs(addresses, slot, INPUT, CHOSEN))
            next_slot = gl.where(slot == SLOTS - 1, 0, slot + 1)
            code = load_codes(tiles.index(next_slot))
            data = xs.index(0 if CHOSEN.staged else slot)
            if CHOSEN.vectors_contiguous:
                data = data.permute((1, 0))
            part = data.load(data_operand)
            if SPLIT_FP32:
                largest = gl.maximum(largest, largest_of(part))
                before = inverse(factor)
                factor = scale_of(largest, 14)
                high, low = pair_of(part, factor)
                factors = gl.convert_layout(factor * before, gl.SliceLayout(1, sums_layout))[:, None]
            after: gl.tuple = ()
            for p in gl.static_range(PARTS):
                part_lines = lines + this + p * PART_ROWS * ENTRY_LINE_BYTES
                entries = load_entries(part_lines, entries_operand, DTYPE, PART_ROWS)
                if SPLIT_FP32:
                    after += (sums[p] * factors + mma_v2(low, entries, mma_v2(high, entries, zeros)),)
                else:
                    after += (mma_v2(part, entries, sums[p]),)
            sums = after
            # Only now, while tensor cores are busy: entries that were written first would delay them.
            this = ENTRY_BYTES - this
            next_number = gl.where(number == slices - 1, 0, number + 1)
            written = write_entries(lines + this, previous, code, next_number, DTYPE, CHOSEN)
            previous, latest, slot = latest, written, next_slot
        acc = _joined(sums, PARTS)
        if SPLIT_FP32:
            acc *= gl.convert_layout(inverse(factor), gl.SliceLayout(1, acc.type.layout))[:, None]
        store_sums(
            acc * scale, out, out, m, split, vector_block * VECTORS, n, k, n_tiles, stride_os, stride_ov, stride_or,
            CHOSEN, ACCUMULATE, 0,
        )  # fmt: skip
        product += gl.num_programs(0)
    async_copy.wait_group(0)
