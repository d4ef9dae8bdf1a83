"""X Sᵀ and S A of few long vectors in 16 bits, on tensor cores: a warp owns a tile of S and a block of vectors.

A program is one warp, so no lane waits for other warps. It processes the chunks that meet its tile, 64 columns at a
time (a step). It keeps the entries of these columns in shared memory as a matrix with one byte per row and column,
zeros but for the nnz entries of each column. Lanes find the rows of columns, as in `scattered_sums`, so that it takes
few instructions to write a step's entries and, afterwards, zeros in their place. The bytes are the high bytes of
16-bit numbers, the first operand of `mma.sync`. The columns themselves are copied to shared memory a few steps ahead
(`warp_loads`), where lanes load them as the second operand.

A batch is the chunks of 32 groups, one group per lane: each lane finds the chunk of its group that meets the tile, if
there is one, and derives the chunk's words.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..portable.law import chunk_keys, chunk_signs, part_start, seed_words, select_word, tile_place
from ..portable.program import start_dependents
from .row_words import fraction_step, row_of, words_of_rows
from .shared_memory import (
    commit_copies,
    load_words,
    shared_begin,
    store_byte,
    store_word,
    store_words,
    synchronize_warp,
    wait_for_copies,
)
from .warp import ballot, count_bits, hide, multiply_add, permute_bytes
from .warp_loads import LANES, OWN, STEP, UNIT, copy_step, load_operand, place_in_row

TOGETHER = tl.constexpr(4)  # sub-blocks whose words a lane loads together
SIDE_BY_SIDE = tl.constexpr(2)  # blocks of rows that are multiplied side by side, so that latencies overlap
INTEGERS = ["n", "d", "stride_x", "offset", "k", "n_tiles", "log_group", "log_chunk", "groups", "groups_per_split"]
INTEGERS += ["stride_ts", "stride_tv", "stride_tk", "seed"]


@triton.jit
def _list_chunks(starts, m, g, inside, d, offset, n_tiles, log_group, log_chunk, k0, k1):
    """List the first columns of the chunks of groups g, one per lane, that meet tile m.

    The others are replaced by the first of these; or, if there is one tile, remain adjacent to them, so that all chunks
    of a run have one shift. The result is (chunk and position in the list of each lane, number of chunks that meet the
    tile, whether one is at the data's edge).
    """
    place = (g * 0).to(tl.uint32)
    if n_tiles > 1:
        place, found = tile_place(m.to(tl.uint32), g, n_tiles.to(tl.uint32), log_group.to(tl.uint32), k0, k1)
        inside = inside & found
    c = (g << log_group.to(tl.int64)) + place.to(tl.int64)
    start = (c << log_chunk.to(tl.int64)) - offset
    chunk = 1 << log_chunk
    inside = inside & (start < d) & (start + chunk > 0)
    edge = inside & ((start < 0) | (start > d - chunk - 2 * STEP))
    lane = tl.arange(0, LANES)
    chosen = ballot(inside)
    before = count_bits(chosen & ((1 << lane) - 1))
    count = tl.max(count_bits(chosen), 0)
    position = tl.where(inside, before, count + lane - before)
    start = start.to(tl.int32)
    first = tl.min(tl.where(inside, start, 0x7FFFFFFF), 0)
    store_word(starts + position * 4, tl.where(inside | (n_tiles == 1), start, first))
    return c, position, count, tl.max(edge.to(tl.int32), 0) > 0


@triton.jit
def _write_words(
    table, place, count, c, rows, p, k0, k1, NNZ: tl.constexpr, LOG_PARTS: tl.constexpr, UNUSED_ROW: tl.constexpr
):
    """Write the words of chunks c, one per lane, to their places in the table, which is ordered by sub-block.

    A chunk has 2^LOG_PARTS entries per sub-block, one for every 32 columns. All entries of chunks that do not meet the
    tile, whose places are `count` or more, lie in UNUSED_ROW.
    """
    PARTS: tl.constexpr = 1 << LOG_PARTS
    least = rows // NNZ  # rows of a sub-block; others have one more
    step_of_least, step_of_others = fraction_step(least, p), fraction_step(least + 1, p)
    signs = chunk_signs(c, k0, k1)
    for t in tl.static_range(NNZ):
        if t % 4 == 0:
            keys = chunk_keys(c, (c * 0).to(tl.uint32) + t // 4, k0, k1)
        begin = part_start(rows * 0 + t, rows, NNZ)
        b = part_start(rows * 0 + (t + 1), rows, NNZ) - begin
        fraction = tl.where(b == least, step_of_least, step_of_others)
        first, second, row = words_of_rows(keys[t % 4], begin, b, fraction, p)
        row = tl.where(place < count, row, UNUSED_ROW << 8 | 1)  # the first of a sub-block of one row
        for h in tl.static_range(PARTS):
            e = (rows * 0 + t << p) + h * LANES
            sign = select_word((e >> 5) & 3, signs[0], signs[1], signs[2], signs[3]) >> (e & 31)
            store_words(table + (place * PARTS + (t * LANES * PARTS + h)) * UNIT, first, second, row + first * 0, sign)


@triton.jit
def _write_entries(
    entries, table, position, c, log_chunk, NNZ: tl.constexpr, LOG_PARTS: tl.constexpr, ONE: tl.constexpr,
    VECTORS_CONTIGUOUS: tl.constexpr,
):  # fmt: skip
    """Write the entries of columns c [.., lanes] of a step, and return their addresses."""
    TABLE_BYTES: tl.constexpr = (LANES << LOG_PARTS) * UNIT
    i = ((c + position) & ((1 << log_chunk) - 1)).to(tl.uint32)
    place = place_in_row(c, VECTORS_CONTIGUOUS)
    words_of_column = table + ((c + position) >> tl.minimum(log_chunk, 5)) * UNIT
    written = ()
    for t in tl.static_range(0, NNZ, TOGETHER):
        words = ()
        for u in tl.static_range(t, min(t + TOGETHER, NNZ)):
            words += (load_words(words_of_column + u * TABLE_BYTES),)  # type: ignore[assignment]
        bytes_ = ()
        for u in tl.static_range(len(words)):
            row = row_of(i, words[u][0], words[u][1], words[u][2], log_chunk.to(tl.uint32)).to(tl.int32)
            written += (entries + row * STEP + (((row << 3) & 0x30) ^ place),)  # type: ignore[assignment]
            bytes_ += ((words[u][3] >> (i & 31)) * 128 + ONE,)  # type: ignore[assignment]
        for u in tl.static_range(len(words)):
            store_byte(written[t + u], bytes_[u])
    return written


@triton.jit
def _multiply(own, operand, sums, BLOCKS: tl.constexpr, BF16: tl.constexpr):
    """The sums of BLOCKS blocks of 16 rows, as a tuple, after adding a step's products.

    own : the address of the lane's entries in the first of these rows; see `_own_entries`.
    """
    places = own[None, :] + tl.arange(0, BLOCKS)[:, None] * (16 * STEP)
    upper, lower = load_words(places), load_words(places + 8 * STEP)
    for q in tl.static_range(OWN // 4):
        zero = upper[q] * 0
        entries = (
            permute_bytes(upper[q], zero, 0x1404)[:, None, :], permute_bytes(lower[q], zero, 0x1404)[:, None, :],
            permute_bytes(upper[q], zero, 0x3424)[:, None, :], permute_bytes(lower[q], zero, 0x3424)[:, None, :],
        )  # fmt: skip
        sums = multiply_add(entries, operand[2 * q][None, :, :], operand[2 * q + 1][None, :, :], sums, BF16)
    return sums


@triton.jit
def _own_entries(entries, lane):
    """The address of a lane's entries in its first row, lane div 4. Its other rows are multiples of 8 rows away.

    The 16-byte units of a row are permuted such that lanes that load one each use different banks.
    """
    return entries + lane // 4 * STEP + (lane // 8 ^ lane % 4) * UNIT


@triton.jit(do_not_specialize=INTEGERS)
def project_warp_tiles(
    x,
    target,
    n,
    d,
    stride_x,
    offset,
    k,
    n_tiles,
    log_group,
    log_chunk,
    groups,
    groups_per_split,
    stride_ts,
    stride_tv,
    stride_tk,
    seed: tl.int64,
    NNZ: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    VECTOR_BLOCKS: tl.constexpr,
    LOG_PARTS: tl.constexpr,
    RUN: tl.constexpr,
    UNITS: tl.constexpr,
    ALIGN: tl.constexpr,
    SLOTS: tl.constexpr,
    VECTORS_CONTIGUOUS: tl.constexpr,
    PROGRAMMATIC_LAUNCH: tl.constexpr,
    SHARED_BYTES: tl.constexpr,
):
    """target[split, v, r] = sum over the split's columns j of x[v, j] S[r, j], where S has entries +-1.

    Grid: (tiles, blocks of 8 VECTOR_BLOCKS vectors, splits); one warp.

    x : (n, d), fp16 or bf16, contiguous along d or, if VECTORS_CONTIGUOUS, along n; stride_x is the stride of the other
    dimension.  target : (splits, n, k), fp32.  groups : number of groups of chunks that contain the columns offset to
    offset + d - 1; groups_per_split : a multiple of 32 if there is one tile.

    ROW_BLOCKS : blocks of 16 rows that hold a tile.  LOG_PARTS : a chunk has 32 << LOG_PARTS columns; 0 also if it has
    fewer than 32.  RUN : columns of a step, at least 8, that are adjacent in x: all of them if there is one tile,
    otherwise those of a chunk.  UNITS : units of 16 bytes that contain a run or, if VECTORS_CONTIGUOUS, the vectors of
    a column.  ALIGN : runs or columns begin at multiples of so many bytes.  SLOTS : steps that shared memory holds, 2
    to 4.
    """
    BF16: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    ONE: tl.constexpr = 0x3F if BF16 else 0x3C  # the high byte of 1 in fp16, but of 1/2 in bf16
    SIDE: tl.constexpr = min(SIDE_BY_SIDE, ROW_BLOCKS)
    ENTRY_BYTES: tl.constexpr = 16 * ROW_BLOCKS * STEP
    UNUSED_ROW: tl.constexpr = 16 * ROW_BLOCKS
    TABLE_BYTES: tl.constexpr = NNZ * (LANES << LOG_PARTS) * UNIT
    SLOT_BYTES: tl.constexpr = UNIT * UNITS * (STEP if VECTORS_CONTIGUOUS else 8 * VECTOR_BLOCKS * (STEP // RUN))
    start_dependents(PROGRAMMATIC_LAUNCH)
    seed0, seed1 = seed_words(seed)
    thread = tl.arange(0, LANES)
    entries = shared_begin(SHARED_BYTES) & -UNIT
    table = entries + (ENTRY_BYTES + STEP)  # after the unused row
    slots = table + TABLE_BYTES
    starts = slots + SLOTS * SLOT_BYTES
    places = entries + thread[None, :] * UNIT + tl.arange(0, ENTRY_BYTES // (LANES * UNIT))[:, None] * (LANES * UNIT)
    zero = (places * 0).to(tl.uint32)
    store_words(places, zero, zero, zero, zero)
    m, split = tl.program_id(0), tl.program_id(2)
    v0 = tl.program_id(1) * (8 * VECTOR_BLOCKS)
    tile_row = part_start(m.to(tl.int64), k, n_tiles).to(tl.int32)
    rows = part_start(m.to(tl.int64) + 1, k, n_tiles).to(tl.int32) - tile_row
    zeros = tl.zeros([SIDE, VECTOR_BLOCKS, LANES], tl.float32)
    sums = ()
    for _ in tl.static_range(ROW_BLOCKS // SIDE):
        sums += ((zeros, zeros, zeros, zeros),)  # type: ignore[assignment]
    first_group = (offset >> (log_group + log_chunk).to(tl.int64)) + split.to(tl.int64) * groups_per_split
    left = tl.minimum(groups - split * groups_per_split, groups_per_split)
    for batch in range(0, left, 32):
        # Hidden, since the compiler would otherwise keep the keys of all rounds of Philox, and addresses, in registers.
        k0, k1, lane = hide(seed0), hide(seed1), hide(thread)
        synchronize_warp(lane)  # all lanes are done with the previous batch
        c, position, count, edge = _list_chunks(
            starts, m, first_group + batch + lane.to(tl.int64), lane + batch < left, d, offset, n_tiles, log_group,
            log_chunk, k0, k1,
        )  # fmt: skip
        synchronize_warp(lane)
        columns = count << log_chunk
        steps = (columns + STEP - 1) // STEP
        for ahead in range(SLOTS - 1):
            if ahead < steps:
                copy_step(
                    x, slots + ahead * SLOT_BYTES, starts, ahead * STEP, lane, v0, n, d, stride_x, log_chunk,
                    edge, VECTOR_BLOCKS, RUN, UNITS, ALIGN, VECTORS_CONTIGUOUS,
                )  # fmt: skip
            commit_copies(lane)
        _write_words(
            table, position, count, c, rows.to(tl.uint32), log_chunk.to(tl.uint32), k0, k1, NNZ, LOG_PARTS, UNUSED_ROW
        )
        slot = 0
        for step in range(steps):
            lane = hide(thread)
            synchronize_warp(lane)  # entries are zeros, and words are written
            columns_of_step = lane[None, :] + tl.arange(0, STEP // LANES)[:, None] * LANES
            written = _write_entries(
                entries, table, step * STEP, columns_of_step, log_chunk, NNZ, LOG_PARTS, ONE, VECTORS_CONTIGUOUS
            )
            wait_for_copies(lane, SLOTS - 2)
            synchronize_warp(lane)
            free = tl.where(slot == 0, SLOTS - 1, slot - 1)  # all lanes have read the slot of the previous step
            ahead = step + (SLOTS - 1)
            if ahead < steps:
                copy_step(
                    x, slots + free * SLOT_BYTES, starts, ahead * STEP, lane, v0, n, d, stride_x, log_chunk,
                    edge, VECTOR_BLOCKS, RUN, UNITS, ALIGN, VECTORS_CONTIGUOUS,
                )  # fmt: skip
            commit_copies(lane)
            operand = load_operand(
                x, slots + slot * SLOT_BYTES, starts, step * STEP, lane, v0, n, stride_x, log_chunk, VECTOR_BLOCKS, RUN,
                UNITS, ALIGN, VECTORS_CONTIGUOUS,
            )  # fmt: skip
            own, after = _own_entries(entries, lane), ()
            for i in tl.static_range(ROW_BLOCKS // SIDE):
                after += (_multiply(own + i * (16 * SIDE * STEP), operand, sums[i], SIDE, BF16),)  # type: ignore[assignment]
            sums = after
            synchronize_warp(lane)
            for i in tl.static_range(NNZ):
                store_byte(written[i], written[i] * 0)
            slot = tl.where(slot == SLOTS - 1, 0, slot + 1)
        wait_for_copies(thread, 0)

    target += split.to(tl.int64) * stride_ts
    block, vector_block = tl.arange(0, SIDE)[:, None, None], tl.arange(0, VECTOR_BLOCKS)[None, :, None]
    for i in tl.static_range(ROW_BLOCKS // SIDE):
        for e in tl.static_range(4):
            row = (thread // 4)[None, None, :] + (block * 16 + (i * SIDE * 16 + e // 2 * 8))
            v = (thread % 4 * 2)[None, None, :] + (vector_block * 8 + (v0 + e % 2))
            pointers = target + v.to(tl.int64) * stride_tv + (tile_row + row).to(tl.int64) * stride_tk
            tl.store(pointers, sums[i][e] * 2 if BF16 else sums[i][e], mask=(row < rows) & (v < n))
