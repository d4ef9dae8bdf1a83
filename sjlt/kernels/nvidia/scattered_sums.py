"""X Sᵀ of few long vectors under the exact law: every column is added to its nnz sums in shared memory.

A warp processes a block of 32 columns at a time, one per lane. (If vectors are contiguous, up to four adjacent lanes
may divide the vectors of a column among them, COLUMN_LANES, so that a warp reads longer runs of memory from fewer
columns.) The chunks of a group meet different tiles, and the columns of a chunk meet different rows of a sub-block, so
the columns of a group are added to different sums. If a group has fewer columns than a block, lanes add to replicas of
the sums. The warps of a program form teams, which process different columns; the warps of a team divide the sub-blocks
among themselves (TEAM). Each team has sums of its own, or all teams share sums and process the same group of chunks
between two barriers (SHARED_SUMS). At the end, sums are added in a fixed order, so results are bitwise reproducible.

The sums of up to 16 bytes of vectors, a unit, are adjacent, so that one access reads or writes them. Shared memory
serves as many lanes at a time as its banks have units, if these lanes use different banks. They do if each adds to a
different replica of the sums (REPLICAS), adds to its units in a different order (ROTATIONS), or takes a column so far
from the others in its chunk that their rows are in different banks (SPREAD, STRIDE). The last requires that slots are
rows or that sums are ordered by slot (BY_SLOT): otherwise, different slots may meet rows in one bank.

A program first derives the words of a batch of chunks, at most one chunk per thread, and keeps them in a table in
shared memory, in entries of 16 bytes for each sub-block and up to 32 columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..portable.law import (
    beta,
    chunk_keys,
    chunk_signs,
    group_words,
    part_start,
    scale_index,
    seed_words,
    select_word,
    tile_theta,
)
from ..portable.program import start_dependents
from .row_words import first_place, fraction_step, place_of, row_of, words_of_rows
from .scattered_loads import LANES, block_offsets, load_blocks, prefetch_step, spread_out
from .shared_memory import load_numbers, load_words, shared_begin, store_numbers, store_words
from .sums import add_sums, add_where, clear_sums, sign_of, sums_at

ENTRY_BYTES = tl.constexpr(16)
INTEGERS = ["n", "d", "stride_x", "offset", "k", "n_tiles", "log_group", "log_chunk", "batches"]
INTEGERS += ["batches_per_program", "stride_ts", "stride_tv", "stride_tk", "seed"]


@triton.jit
def _tile(c, n_tiles, pm, k0, k1, stack):
    """The law's `chunk_tile` in 32-bit words."""
    place = c.to(tl.uint32) & ((tl.full((), 1, tl.uint32) << pm) - 1)  # of the chunk in its group
    w0, w1, w2, w3 = group_words(c >> pm.to(tl.int64), k0, k1, stack)
    return scale_index(beta(place, w0, w1, w2, w3, pm), n_tiles, tile_theta(w1, n_tiles), pm)


@triton.jit
def _shape_of_tiles(k, n_tiles, p, NNZ: tl.constexpr):
    """Rows of tiles and sub-blocks, and the reciprocals by which `_write_table` multiplies instead of dividing."""
    k, tiles = k.to(tl.uint32), n_tiles.to(tl.uint32)
    rows, more = k // tiles, k % tiles  # of every tile, and tiles that have one more
    least = rows // NNZ  # rows of a sub-block; others have one more
    return rows, more, 0xFFFFFFFF // tiles + 1, least, fraction_step(least, p), fraction_step(least + 1, p)


@triton.jit
def _tile_start(m, rows, more, reciprocal):
    """The law's first row of tile m, for fewer than 2^10 tiles."""
    return m * rows + tl.umulhi(m * more, reciprocal)


@triton.jit
def _write_table(
    table, first_chunk, thread, k, n_tiles, shape, pm, p, k0, k1, NNZ: tl.constexpr, STACKS: tl.constexpr,
    BY_SLOT: tl.constexpr, THREADS: tl.constexpr, CHUNKS: tl.constexpr, LOG_PARTS: tl.constexpr,
):  # fmt: skip
    """Write the table of CHUNKS chunks, ordered by sub-block of all stacks, by chunk, and by part of 32 columns.

    If there are more threads than chunks, several threads divide the sub-blocks of a chunk among them.
    """
    tl.static_assert(CHUNKS <= THREADS)
    SHARES: tl.constexpr = THREADS // CHUNKS
    SHARE: tl.constexpr = NNZ if SHARES == 1 else triton.next_power_of_2(triton.cdiv(NNZ, SHARES))
    TABLE_BYTES: tl.constexpr = (CHUNKS << LOG_PARTS) * ENTRY_BYTES  # per sub-block
    rows_of_all, more, reciprocal, least, step_of_least, step_of_others = shape
    q = thread % CHUNKS
    c = first_chunk + q
    entry = table + (q << LOG_PARTS) * ENTRY_BYTES
    for stack in tl.static_range(STACKS):
        m = c.to(tl.uint32) * 0
        if n_tiles > 1:
            m = _tile(c, n_tiles.to(tl.uint32), pm, k0, k1, stack)
        tile_row = _tile_start(m, rows_of_all, more, reciprocal)
        rows = _tile_start(m + 1, rows_of_all, more, reciprocal) - tile_row
        s0, s1, s2, s3 = chunk_signs(c, k0, k1, stack)
        for i in tl.static_range(SHARE):
            t = tl.full((), i, tl.uint32)
            if SHARES > 1:
                t = tl.minimum(thread // CHUNKS * SHARE + i, NNZ - 1).to(tl.uint32)
            if i % 4 == 0:
                w0, w1, w2, w3 = chunk_keys(c, (c * 0).to(tl.uint32) + (t >> 2), k0, k1, stack)
            w = select_word(t & 3, w0, w1, w2, w3)
            begin = part_start(t, rows, NNZ)
            b = part_start(t + 1, rows, NNZ) - begin
            step = tl.where(b == least, step_of_least, step_of_others)
            first_row = stack * k.to(tl.uint32) + tile_row + begin
            if BY_SLOT:
                first_row = ((stack * n_tiles.to(tl.uint32) + m) * NNZ + t) << (p + 2)
            first, second, row = words_of_rows(w, first_row, b, step, p)
            for h in tl.static_range(1 << LOG_PARTS):
                e = (t << p) + h * LANES
                sign = select_word((e >> 5) & 3, s0, s1, s2, s3) >> (e & 31)
                place = (t.to(tl.int32) + stack * NNZ) * TABLE_BYTES + h * ENTRY_BYTES
                store_words(entry + place, first, second, row, sign)


@triton.jit
def _row_and_sign(entry, i, p, BY_SLOT: tl.constexpr):
    """(row, word whose highest bit is the sign) of columns i of their chunks, from the table entries at `entry`.

    With BY_SLOT, the place of the sum instead of its row.
    """
    first, second, row, sign = load_words(entry)
    row = place_of(i, first, second, row, p) if BY_SLOT else row_of(i, first, second, row, p)
    return row.to(tl.int32), sign << (31 - (i & 31))


@triton.jit
def _exchange_units(
    loaded, rotation, DTYPE: tl.constexpr, ITEMS: tl.constexpr, UNIT: tl.constexpr, ROTATIONS: tl.constexpr
):
    """The ITEMS tensors of `loaded` in DTYPE; unit u of a block is the former unit u ^ rotation, for each lane."""
    numbers = ()
    for i in tl.static_range(ITEMS):
        numbers += (loaded[i].to(DTYPE),)  # type: ignore[assignment]
    for bit in tl.static_range(5):
        if 1 << bit < ROTATIONS:
            exchange = (rotation >> bit) & 1 != 0
            exchanged = ()
            for i in tl.static_range(ITEMS):
                exchanged += (tl.where(exchange, numbers[i ^ (UNIT << bit)], numbers[i]),)  # type: ignore[assignment]
            numbers = exchanged
    return numbers


@triton.jit
def _add_blocks(
    loaded, entries, columns, sums, p, one, DTYPE: tl.constexpr, FIRST: tl.constexpr, BLOCKS: tl.constexpr,
    VECTORS: tl.constexpr, UNIT: tl.constexpr, ROUND: tl.constexpr, ROUNDS: tl.constexpr, ROUND_BYTES: tl.constexpr,
    ROW_BYTES: tl.constexpr, BY_SLOT: tl.constexpr,
):  # fmt: skip
    """Add blocks FIRST .. FIRST + BLOCKS - 1 of `loaded` to the sums of rounds ROUND .. ROUND + ROUNDS - 1.

    entries : for each block, the addresses of its table entries for round 0.  columns : for each block, its columns
    within their chunks.  sums : for each unit of vectors, the addresses of its sums in row 0.

    All of these sums are different, so they are loaded together and latencies overlap.
    """
    UNITS: tl.constexpr = VECTORS // UNIT
    offset = ()
    sign = ()
    for i in tl.static_range(FIRST, FIRST + BLOCKS):
        for t in tl.static_range(ROUND, ROUND + ROUNDS):
            row, word = _row_and_sign(entries[i] + t * ROUND_BYTES, columns[i], p, BY_SLOT)
            offset += (row * ROW_BYTES,)  # type: ignore[assignment]
            sign += (sign_of(word, one, DTYPE),)  # type: ignore[assignment]
    before = ()
    for i in tl.static_range(BLOCKS * ROUNDS):
        for u in tl.static_range(UNITS):
            before += load_numbers(sums[u] + offset[i], DTYPE, UNIT)
    for i in tl.static_range(BLOCKS * ROUNDS):
        for u in tl.static_range(UNITS):
            after = ()
            for e in tl.static_range(u * UNIT, u * UNIT + UNIT):
                z = loaded[(FIRST + i // ROUNDS) * VECTORS + e]
                after += (tl.fma(z, sign[i], before[i * VECTORS + e]),)  # type: ignore[assignment]
            store_numbers(sums[u] + offset[i], after)


@triton.jit
def _total(
    address, first, DTYPE: tl.constexpr, UNIT: tl.constexpr, REPLICAS: tl.constexpr, NEXT_REPLICA: tl.constexpr,
    COPIES: tl.constexpr, COPY_BYTES: tl.constexpr,
):  # fmt: skip
    """The sums of a unit of vectors over all copies and replicas, in a fixed order that begins with replica `first`."""
    totals = ()
    for _ in tl.static_range(UNIT):
        totals += (tl.zeros(address.shape, DTYPE),)  # type: ignore[assignment]
    for part in range(COPIES * REPLICAS):
        place = address + (part // REPLICAS * COPY_BYTES + (part + first) % REPLICAS * NEXT_REPLICA)
        totals = add_sums(totals, sums_at(place, DTYPE, UNIT))
    return totals


@triton.jit(do_not_specialize=INTEGERS)
def project_scattered(
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
    batches,
    batches_per_program,
    stride_ts,
    stride_tv,
    stride_tk,
    seed: tl.int64,
    DTYPE: tl.constexpr,
    NNZ: tl.constexpr,
    STACKS: tl.constexpr,
    VECTORS: tl.constexpr,
    UNIT: tl.constexpr,
    COLUMN_LANES: tl.constexpr,
    WARPS: tl.constexpr,
    TEAM: tl.constexpr,
    SHARED_SUMS: tl.constexpr,
    GROUPS: tl.constexpr,
    REPLICAS: tl.constexpr,
    ROTATIONS: tl.constexpr,
    SPREAD: tl.constexpr,
    STRIDE: tl.constexpr,
    BY_SLOT: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    LOG_PARTS: tl.constexpr,
    LOADED: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROUNDS_TOGETHER: tl.constexpr,
    PREFETCHED: tl.constexpr,
    WIDTH: tl.constexpr,
    PROGRAMMATIC_LAUNCH: tl.constexpr,
    SHARED_BYTES: tl.constexpr,
):
    """target[split, v, r] = sum over the split's columns j of x[v, j] S[r, j], where S has entries +-1.

    Grid: (blocks of VECTORS vectors, splits); WARPS warps.

    x : (n, d), contiguous along d or, if WIDTH > 0, along n; stride_x is the stride of the other dimension.
    target : (splits, n, k * STACKS), of DTYPE.  k, n_tiles, NNZ : of one stack.
    batches : the number of batches of CHUNKS chunks that contain the columns offset to offset + d - 1.

    UNIT : number of vectors whose sums a lane reads or writes at once, at most 16 bytes.  COLUMN_LANES : number of
    lanes that divide the vectors of a column, each with whole units; 1 if WIDTH is 0.  TEAM : number of warps that
    share sums and divide the sub-blocks among them.  SHARED_SUMS : all warps share sums and, between two barriers,
    process columns of one group.  GROUPS : number of groups of chunks that a block of columns belongs to; a divisor of
    REPLICAS.  REPLICAS : number of copies of the sums of a team, or of all teams with SHARED_SUMS; lanes whose columns
    are in different groups add to different ones.  ROTATIONS : number of orders in which lanes access their units of
    vectors. All sums of a row are adjacent if this or COLUMN_LANES is at least 2, otherwise all of a unit.  SPREAD :
    number of lanes, served at a time, that access the same replica in the same order and whose columns are in one
    chunk, STRIDE columns apart; 1 if columns are in order.  BY_SLOT : there is a sum for each slot of a sub-block and
    row mod 4, see `place_of`, instead of one for each row.  ROWS : a multiple of 32, at least the number of these sums
    of a vector, k * STACKS by row.  CHUNKS : at most 32 * WARPS.  LOG_PARTS : a chunk has 32 << LOG_PARTS columns; 0
    also if it has fewer than 32.  LOADED : blocks of columns that a warp loads at a time.  TOGETHER : blocks, all in
    one group, whose sums it loads together; divides LOADED.  ROUNDS_TOGETHER : sub-blocks of a warp whose sums it loads
    together.  PREFETCHED : number of steps by which the L2 cache is ahead of the loads.  WIDTH : number of vectors that
    one access reads, a divisor of n; 0 if x is contiguous along d.

    The banks of shared memory are 128 bytes wide. If REPLICAS * ROTATIONS * COLUMN_LANES * SPREAD units of vectors have
    as many bytes, lanes that are served at a time use different banks.
    """
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    SUB_BLOCKS: tl.constexpr = NNZ * STACKS
    THREADS: tl.constexpr = WARPS * LANES
    COLUMNS: tl.constexpr = LANES // COLUMN_LANES  # of a block
    LANE_VECTORS: tl.constexpr = VECTORS // COLUMN_LANES
    LANE_UNITS: tl.constexpr = LANE_VECTORS // UNIT
    SETS: tl.constexpr = WARPS // TEAM  # of warps; the warps of a set process the same columns
    TABLE_BYTES: tl.constexpr = (CHUNKS << LOG_PARTS) * ENTRY_BYTES  # per sub-block
    ROUND_BYTES: tl.constexpr = TABLE_BYTES * TEAM
    UNITS: tl.constexpr = VECTORS // UNIT
    # Sums of a row are ordered by unit of a lane, by replica, and by lane of a column.
    UNIT_BYTES: tl.constexpr = UNIT * ITEM
    NEXT_REPLICA: tl.constexpr = UNIT_BYTES * COLUMN_LANES  # bytes from replica to replica,
    UNITS_BYTES: tl.constexpr = NEXT_REPLICA * REPLICAS
    ADJACENT: tl.constexpr = ROTATIONS * COLUMN_LANES > 1  # all units of a row
    ROW_BYTES: tl.constexpr = UNITS_BYTES * LANE_UNITS if ADJACENT else UNITS_BYTES  # from row to row, and
    NEXT_UNIT: tl.constexpr = UNITS_BYTES if ADJACENT else UNITS_BYTES * ROWS  # from unit to unit of a lane
    COPY_BYTES: tl.constexpr = UNITS_BYTES * LANE_UNITS * ROWS
    COPIES: tl.constexpr = 1 if SHARED_SUMS else SETS
    WINDOW: tl.constexpr = COLUMNS * TOGETHER
    KEPT: tl.constexpr = REPLICAS * ROTATIONS // GROUPS  # columns of a group among whose lanes there are no conflicts
    STEP: tl.constexpr = COLUMNS * LOADED * SETS  # columns
    ROUNDS: tl.constexpr = SUB_BLOCKS // TEAM  # in round t, member i of a team processes sub-block t TEAM + i
    start_dependents(PROGRAMMATIC_LAUNCH)
    k0, k1 = seed_words(seed)
    pm, p = log_group.to(tl.uint32), log_chunk.to(tl.uint32)
    thread = tl.arange(0, THREADS)
    lane, member, team = thread % LANES, thread // LANES % TEAM, thread // LANES // TEAM
    v = tl.program_id(0) * VECTORS
    table = shared_begin(SHARED_BYTES) & -16
    sums = table + SUB_BLOCKS * TABLE_BYTES
    clear_sums(sums, COPIES * COPY_BYTES, thread, THREADS)
    own, share = lane // COLUMN_LANES, lane % COLUMN_LANES  # the lane's column and its share of the vectors
    rotation = own // REPLICAS % ROTATIONS
    own_sums = ()
    for u in tl.static_range(LANE_UNITS):
        own_sums += (  # type: ignore[assignment]
            sums + (0 if SHARED_SUMS else team) * COPY_BYTES + own % REPLICAS * NEXT_REPLICA + share * UNIT_BYTES
            + (u ^ rotation) * NEXT_UNIT,
        )  # fmt: skip
    own_table = table + member * TABLE_BYTES
    shape = _shape_of_tiles(k, n_tiles, p, NNZ)
    one = tl.where(n > 0, 0x3F800000, 0).to(tl.uint32)  # with two constants, a sign would take another instruction

    start = tl.program_id(1) * batches_per_program
    stop = tl.minimum(start + batches_per_program, batches)
    log_part = tl.minimum(log_chunk, 5)
    batch0 = (offset >> log_chunk.to(tl.int64)) // CHUNKS
    first_column = ((((batch0 + start) * CHUNKS) << log_chunk.to(tl.int64)) - offset).to(tl.int32)
    stop_column = tl.minimum(d, first_column + ((stop - start) * CHUNKS << log_chunk.to(tl.int32)))
    place = team * WINDOW + own % GROUPS * (COLUMNS // GROUPS) + own // GROUPS
    place = spread_out(place, KEPT, SPREAD, STRIDE)
    offsets = block_offsets(LOADED, COLUMNS, TOGETHER, SETS, KEPT, SPREAD, STRIDE)
    windows = (1 << (log_group + log_chunk)) // (WINDOW * SETS)  # of a group; a power of two
    for i in tl.static_range(PREFETCHED):
        prefetch_step(x, first_column + i * STEP, stop_column, thread, v, n, stride_x, THREADS, STEP, VECTORS, WIDTH)
    column = first_column + place
    first_vector = v + share * LANE_VECTORS
    ahead = load_blocks(x, column, offsets, first_vector, n, d, stride_x, LANE_VECTORS, WIDTH)
    for batch in range(start, stop):
        tl.debug_barrier()  # all warps are done with the previous table
        _write_table(
            table, (batch0 + batch) * CHUNKS, thread, k, n_tiles, shape, pm, p, k0, k1, NNZ, STACKS, BY_SLOT,
            THREADS, CHUNKS, LOG_PARTS,
        )  # fmt: skip
        tl.debug_barrier()
        in_batch = place
        # The columns of this batch that exist: those of short vectors may be few.
        left = stop_column - first_column - ((batch - start) * CHUNKS << log_chunk)
        for step in range((tl.minimum(CHUNKS << log_chunk, left) + STEP - 1) // STEP):
            loaded = _exchange_units(ahead, rotation, DTYPE, LANE_VECTORS * LOADED, UNIT, ROTATIONS)
            if PREFETCHED > 0:
                far = column - place + PREFETCHED * STEP
                prefetch_step(x, far, stop_column, thread, v, n, stride_x, THREADS, STEP, VECTORS, WIDTH)
            column += STEP
            ahead = load_blocks(x, column, offsets, first_vector, n, d, stride_x, LANE_VECTORS, WIDTH)
            entries = ()
            columns = ()
            for i in tl.static_range(LOADED):
                j = in_batch + offsets[i]
                entries += (own_table + (j >> log_part) * ENTRY_BYTES,)  # type: ignore[assignment]
                columns += ((j & ((1 << log_chunk) - 1)).to(tl.uint32),)  # type: ignore[assignment]
            for i in tl.static_range(0, LOADED, TOGETHER):
                for t in tl.static_range(0, ROUNDS, ROUNDS_TOGETHER):
                    _add_blocks(
                        loaded, entries, columns, own_sums, p, one, DTYPE, i, TOGETHER, LANE_VECTORS, UNIT, t,
                        min(ROUNDS_TOGETHER, ROUNDS - t), ROUND_BYTES, ROW_BYTES, BY_SLOT,
                    )  # fmt: skip
                window = step * (LOADED // TOGETHER) + i // TOGETHER
                if SHARED_SUMS & (window & (windows - 1) == windows - 1):
                    tl.debug_barrier()  # the next window is in another group
            in_batch += STEP
    tl.debug_barrier()

    target += tl.program_id(1).to(tl.int64) * stride_ts
    for first in range(0, k * STACKS * UNITS, THREADS):
        unit, r = (first + thread) % UNITS, (first + thread) // UNITS
        address = sums + unit % LANE_UNITS * NEXT_UNIT + unit // LANE_UNITS * UNIT_BYTES
        if BY_SLOT:
            place, next_too = first_place(tl.minimum(r, k * STACKS - 1).to(tl.uint32), k, n_tiles, p, NNZ)
            after = _total(
                address + tl.where(next_too, place + 1, place) * ROW_BYTES, r, DTYPE, UNIT, REPLICAS, NEXT_REPLICA,
                COPIES, COPY_BYTES,
            )  # fmt: skip
        else:
            place = tl.minimum(r, ROWS - 1)
        totals = _total(address + place * ROW_BYTES, r, DTYPE, UNIT, REPLICAS, NEXT_REPLICA, COPIES, COPY_BYTES)
        if BY_SLOT:
            totals = add_where(next_too, totals, after)
        for e in tl.static_range(UNIT):
            w = v + unit * UNIT + e
            pointers = target + w.to(tl.int64) * stride_tv + r.to(tl.int64) * stride_tk
            tl.store(pointers, totals[e], mask=(r < k * STACKS) & (w < n))
