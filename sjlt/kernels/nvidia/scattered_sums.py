"""X Sᵀ of few long vectors under the exact law: each column adds its numbers to sums in shared memory.

A warp reads 32 columns of one group of chunks at a time, a column per lane. The chunks of a group meet different tiles,
and a chunk's columns meet different rows of a sub-block, so that all additions of a step go to different sums. Warps
have sums of their own, or share them where shared memory would hold too few: a team divides the sub-blocks among its
warps, or all warps keep to one group of chunks between two barriers. At the end sums are added in a fixed order, so
that results repeat to the bit.

A program derives the words of a batch of chunks first, a chunk per thread, and keeps them in a table in shared memory,
with 16 bytes for every sub-block and 32 columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..portable.chunk_codes import tile_start
from ..portable.law import (
    beta,
    chunk_keys,
    chunk_signs,
    group_words,
    part_start,
    row_theta,
    scale_index,
    seed_words,
    select_word,
    tile_theta,
)
from .shared_memory import load_number, load_words, shared_begin, store_number, store_words

THREADS = tl.constexpr(128)
LANES = tl.constexpr(32)
ENTRY_BYTES = tl.constexpr(16)
INTEGERS = ["n", "d", "stride_x", "offset", "k", "n_tiles", "log_group", "log_chunk", "batches"]
INTEGERS += ["batches_per_program", "stride_ts", "stride_tv", "stride_tk", "seed"]


@triton.jit
def _table_entry(w, first_row, b, p):
    """Three words from which a place of a chunk finds its row, for key words w and sub-blocks of b rows.

    Numbers mod 2^p are kept in the top p bits of a word, as in `portable.law.permute`. The second word's other bits
    are a fraction of 2^(32 - p) that lies between theta / b and (theta + 1) / b, and end in the factor: the high word
    of the product of slot and fraction with b is then (slot * b + theta) >> p, the row.
    """
    mask = (tl.full((), 1, tl.uint32) << p) - 1
    top = 31 - p
    first = (((w >> 8) & mask) << top << 1) | (((w | 1) & mask) << (24 - p)) | 1
    theta = row_theta(w, b)
    width = (1 << top).to(tl.float32) * 2.0  # 2^(32 - p)
    fraction = ((theta.to(tl.float32) + 0.5) / b.to(tl.float32) * width).to(tl.uint32)
    second = (((w >> 24) & mask) << top << 1) | ((fraction | mask) ^ mask) | (((w >> 16) | 1) & mask)
    return first, second, (first_row << 8) | b


@triton.jit
def _tile(c, n_tiles, pm, k0, k1, stack):
    """The law's `chunk_tile` in 32-bit words."""
    place = c.to(tl.uint32) & ((tl.full((), 1, tl.uint32) << pm) - 1)
    w0, w1, w2, w3 = group_words(c >> pm.to(tl.int64), k0, k1, stack)
    return scale_index(beta(place, w0, w1, w2, w3, pm), n_tiles, tile_theta(w1, n_tiles), pm)


@triton.jit
def _write_table(
    table, first_chunk, thread, k, n_tiles, pm, p, k0, k1, NNZ: tl.constexpr, STACKS: tl.constexpr,
    CHUNKS: tl.constexpr, LOG_PARTS: tl.constexpr,
):  # fmt: skip
    """Write the table of CHUNKS chunks: for each sub-block of all stacks, and each chunk or 32 columns of one."""
    SIZE: tl.constexpr = (CHUNKS << LOG_PARTS) * ENTRY_BYTES  # of a sub-block's part
    q = thread % CHUNKS
    c = first_chunk + q
    to = table + (q << LOG_PARTS) * ENTRY_BYTES
    for stack in tl.static_range(STACKS):
        m = c.to(tl.uint32) * 0
        if n_tiles > 1:
            m = _tile(c, n_tiles.to(tl.uint32), pm, k0, k1, stack)
        tile_row = tile_start(m, k, n_tiles)
        rows = tile_start(m + 1, k, n_tiles) - tile_row
        s0, s1, s2, s3 = chunk_signs(c, k0, k1, stack)
        for t in tl.static_range(NNZ):
            if t % 4 == 0:
                w0, w1, w2, w3 = chunk_keys(c, (c * 0).to(tl.uint32) + t // 4, k0, k1, stack)
            w = w0 if t % 4 == 0 else (w1 if t % 4 == 1 else (w2 if t % 4 == 2 else w3))
            begin = part_start(t, rows, NNZ)
            b = part_start(t + 1, rows, NNZ) - begin
            first, second, row = _table_entry(w, stack * k.to(tl.uint32) + tile_row + begin, b, p)
            for h in tl.static_range(1 << LOG_PARTS):
                e = (tl.full((), t, tl.uint32) << p) + h * LANES
                sign = select_word((e >> 5) & 3, s0, s1, s2, s3) >> (e & 31)
                store_words(to + ((stack * NNZ + t) * SIZE + h * ENTRY_BYTES), first, second, row, sign)


@triton.jit
def _block_offset(i: tl.constexpr, TOGETHER: tl.constexpr, SETS: tl.constexpr):
    """The columns from a lane's first to that in its block i: windows have TOGETHER blocks of each set of warps."""
    return (i // TOGETHER * SETS * TOGETHER + i % TOGETHER) * LANES


@triton.jit
def _load_run(pointer, inside, WIDTH: tl.constexpr):
    """A tuple of the WIDTH numbers that follow each other at each pointer, read as one word; zeros if not `inside`."""
    DTYPE: tl.constexpr = pointer.dtype.element_ty
    BITS: tl.constexpr = DTYPE.primitive_bitwidth
    run = ()
    if WIDTH == 1:
        run += (tl.load(pointer, mask=inside, other=0),)  # type: ignore[assignment]
    else:
        WORD: tl.constexpr = tl.uint64 if BITS * WIDTH == 64 else tl.uint32
        PART: tl.constexpr = tl.uint32 if BITS == 32 else tl.uint16
        word = tl.load(pointer.to(tl.pointer_type(WORD), bitcast=True), mask=inside, other=0)
        for i in tl.static_range(WIDTH):
            run += ((word >> (i * BITS)).to(PART).to(DTYPE, bitcast=True),)  # type: ignore[assignment]
    return run


@triton.jit
def _load_blocks(
    x, column, v, n, d, stride_x, LOADED: tl.constexpr, TOGETHER: tl.constexpr, SETS: tl.constexpr,
    VECTORS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The numbers of LOADED blocks of 32 columns, for VECTORS vectors from v on; zeros beyond the data."""
    loaded = ()
    for i in tl.static_range(LOADED):
        at = column + _block_offset(i, TOGETHER, SETS)
        inside = at.to(tl.uint32) < d.to(tl.uint32)
        if WIDTH == 0:
            for j in tl.static_range(VECTORS):
                row = x + (v + j).to(tl.int64) * stride_x
                loaded += (tl.load(row + at, mask=inside & (v + j < n), other=0),)  # type: ignore[assignment]
        else:
            for j in tl.static_range(0, VECTORS, WIDTH):
                pointer = x + at.to(tl.int64) * stride_x + (v + j)
                loaded += _load_run(pointer, inside & (v + j < n), WIDTH)
    return loaded


@triton.jit
def _row_and_sign(entry, place, p):
    """(row, word whose highest bit is the sign) of columns at `place` of their chunks, from their table entry."""
    first, second, row, sign = load_words(entry)
    mask = ((tl.full((), 0xFFFFFFFF, tl.uint32) >> p) ^ 0xFFFFFFFF) | 1
    z = ((place << 8) | 1) * first
    z = (z ^ (z >> tl.maximum((p + 1) >> 1, 1))) & mask
    z = tl.umulhi(z * second, row & 255) + (row >> 8)
    return z.to(tl.int32), sign << (31 - (place & 31))


@triton.jit
def _with_sign(z, word):
    """z, negative where the highest bit of `word` is 1."""
    if z.dtype == tl.float64:
        z = tl.where(word.to(tl.int32, bitcast=True) < 0, -z, z)
    else:
        z = (z.to(tl.uint32, bitcast=True) ^ (word & 0x80000000)).to(tl.float32, bitcast=True)
    return z


@triton.jit
def _add_blocks(
    loaded, entries, place, sums, p, DTYPE: tl.constexpr, FIRST: tl.constexpr, BLOCKS: tl.constexpr,
    VECTORS: tl.constexpr, ROUND: tl.constexpr, ROUNDS: tl.constexpr, ROUND_BYTES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add blocks FIRST .. FIRST + BLOCKS - 1 of `loaded` to the sums of sub-blocks ROUND .. ROUND + ROUNDS - 1.

    All of these sums are different ones: they are loaded together, so that latencies overlap.
    """
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    address = ()
    sign = ()
    for i in tl.static_range(FIRST, FIRST + BLOCKS):
        for t in tl.static_range(ROUND, ROUND + ROUNDS):
            row, word = _row_and_sign(entries[i] + t * ROUND_BYTES, place[i], p)
            address += (sums + row * ITEM,)  # type: ignore[assignment]
            sign += (word,)  # type: ignore[assignment]
    before = ()
    for i in tl.static_range(BLOCKS * ROUNDS):
        for j in tl.static_range(VECTORS):
            before += (load_number(address[i] + j * (ROWS * ITEM), DTYPE),)  # type: ignore[assignment]
    for i in tl.static_range(BLOCKS * ROUNDS):
        for j in tl.static_range(VECTORS):
            z = loaded[(FIRST + i // ROUNDS) * VECTORS + j].to(DTYPE)
            store_number(address[i] + j * (ROWS * ITEM), before[i * VECTORS + j] + _with_sign(z, sign[i]))


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
    TEAM: tl.constexpr,
    SHARED_SUMS: tl.constexpr,
    REPLICAS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    LOG_PARTS: tl.constexpr,
    LOADED: tl.constexpr,
    TOGETHER: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARED_BYTES: tl.constexpr,
):
    """target[split, v, r] = sum over a split's columns j of x[v, j] S[r, j], S with entries +-1.

    Grid (blocks of VECTORS vectors, splits); 4 warps.

    x : (n, d), contiguous along d or, if WIDTH > 0, along n; stride_x is that of the other dimension.
    target : (splits, n, k * STACKS), DTYPE.  k, n_tiles, NNZ : of one stack.
    batches : of CHUNKS chunks, of which the columns offset .. offset + d - 1 take so many.

    TEAM : warps that share sums and divide the sub-blocks among them.  SHARED_SUMS : all warps share sums, and work on
    columns of one group between two barriers.  REPLICAS : of the sums, where a group of chunks has 32 / REPLICAS
    columns.  ROWS : at least k * STACKS, a multiple of 32.  LOG_PARTS : a chunk has 32 << LOG_PARTS columns, or 32 or
    fewer.  LOADED : blocks of 32 columns that a warp loads at a time.  TOGETHER : those of them, in one group, whose
    sums it loads together.  WIDTH : vectors whose numbers one access reads, a divisor of n; 0 if d is contiguous.
    """
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    ALL: tl.constexpr = NNZ * STACKS
    SETS: tl.constexpr = 4 // TEAM
    TABLE_BYTES: tl.constexpr = (CHUNKS << LOG_PARTS) * ENTRY_BYTES  # of a sub-block
    ROUND_BYTES: tl.constexpr = TABLE_BYTES * TEAM
    # Replicas are apart by their number of columns, so that neighbours' sums are in different banks.
    REPLICA: tl.constexpr = VECTORS * ROWS + (LANES // REPLICAS if REPLICAS > 1 else 0)
    PARTS: tl.constexpr = (1 if SHARED_SUMS else SETS) * REPLICAS
    SUMS: tl.constexpr = PARTS * REPLICA
    WINDOW: tl.constexpr = LANES * TOGETHER
    ROUNDS: tl.constexpr = ALL // TEAM
    STEP_ROUNDS: tl.constexpr = min(ROUNDS, 4 if VECTORS <= 8 else 2)
    k0, k1 = seed_words(seed)
    pm, p = log_group.to(tl.uint32), log_chunk.to(tl.uint32)
    thread = tl.arange(0, THREADS)
    lane, member, team = thread % LANES, thread // LANES % TEAM, thread // LANES // TEAM
    v = tl.program_id(0) * VECTORS
    table = shared_begin(SHARED_BYTES) & -16
    sums = table + ALL * TABLE_BYTES
    for first in range(0, SUMS, THREADS):
        store_number(sums + tl.minimum(first + thread, SUMS - 1) * ITEM, tl.zeros((THREADS,), DTYPE))
    replica = (lane >> (log_group + log_chunk)) % REPLICAS
    own_sums = sums + ((0 if SHARED_SUMS else team) * REPLICAS + replica) * (REPLICA * ITEM)
    own_table = table + member * TABLE_BYTES

    start = tl.program_id(1) * batches_per_program
    stop = tl.minimum(start + batches_per_program, batches)
    steps = (CHUNKS << log_chunk) // (LANES * LOADED * SETS)
    log_part = tl.minimum(log_chunk, 5)
    batch0 = (offset >> log_chunk.to(tl.int64)) // CHUNKS
    column0 = (((batch0 + start) * CHUNKS) << log_chunk.to(tl.int64)) - offset
    column = column0.to(tl.int32) + team * WINDOW + lane
    ahead = _load_blocks(x, column, v, n, d, stride_x, LOADED, TOGETHER, SETS, VECTORS, WIDTH)
    for batch in range(start, stop):
        tl.debug_barrier()  # the table before is not needed any more
        _write_table(
            table, (batch0 + batch) * CHUNKS, thread, k, n_tiles, pm, p, k0, k1, NNZ, STACKS, CHUNKS, LOG_PARTS
        )
        tl.debug_barrier()
        in_batch = team * WINDOW + lane
        for _ in range(steps):
            loaded = ahead
            column += LANES * LOADED * SETS
            ahead = _load_blocks(x, column, v, n, d, stride_x, LOADED, TOGETHER, SETS, VECTORS, WIDTH)
            entries = ()
            place = ()
            for i in tl.static_range(LOADED):
                at = in_batch + _block_offset(i, TOGETHER, SETS)
                entries += (own_table + (at >> log_part) * ENTRY_BYTES,)  # type: ignore[assignment]
                place += ((at & ((1 << log_chunk) - 1)).to(tl.uint32),)  # type: ignore[assignment]
            for i in tl.static_range(0, LOADED, TOGETHER):
                for t in tl.static_range(0, ROUNDS, STEP_ROUNDS):
                    _add_blocks(
                        loaded, entries, place, own_sums, p, DTYPE, i, TOGETHER, VECTORS, t,
                        min(STEP_ROUNDS, ROUNDS - t), ROUND_BYTES, ROWS,
                    )  # fmt: skip
                if SHARED_SUMS:
                    tl.debug_barrier()  # the next window may lie in another group
            in_batch += LANES * LOADED * SETS
    tl.debug_barrier()

    target += tl.program_id(1).to(tl.int64) * stride_ts
    for r0 in range(0, k * STACKS, THREADS):
        r = r0 + thread
        for j in tl.static_range(VECTORS):
            total = tl.zeros((THREADS,), DTYPE)
            for part in range(PARTS):
                of_part = part * REPLICA + j * ROWS + tl.minimum(r, ROWS - 1)
                total += load_number(sums + of_part * ITEM, DTYPE)
            to = target + (v + j).to(tl.int64) * stride_tv + r.to(tl.int64) * stride_tk
            tl.store(to, total, mask=(r < k * STACKS) & (v + j < n))
