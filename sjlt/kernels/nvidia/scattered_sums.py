"""X Sᵀ of few long vectors under the exact law: every column is added to its nnz sums in shared memory.

A warp reads 32 columns of one group of chunks at a time, one per lane. The chunks of a group meet different tiles, and
the columns of a chunk meet different rows of a sub-block, so all additions of a step go to different sums. Each warp
has sums of its own if shared memory suffices. Otherwise a team of warps shares sums and divides the sub-blocks among
its members (TEAM), or all warps share sums and process the same group of chunks between two barriers (SHARED_SUMS). At
the end, sums are added in a fixed order, so results are bitwise reproducible.

A program first derives the words of a batch of chunks, one chunk per thread, and keeps them in a table in shared
memory, in entries of 16 bytes for each sub-block and up to 32 columns.
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
    """Three words from which `_row_and_sign` finds the row of a column, for key words w and sub-blocks of b rows.

    Numbers mod 2^p are kept in the top p bits of a word, as in `portable.law.permute`. The lower 32 - p bits of the
    second word are a fraction, of 2^(32 - p), between theta / b and (theta + 1) / b; its lowest p bits are replaced by
    the multiplier. The high word of the product of b and the word (slot, fraction) is then (slot * b + theta) >> p, the
    row.
    """
    mask = (tl.full((), 1, tl.uint32) << p) - 1
    top = 31 - p
    first = (((w >> 8) & mask) << top << 1) | (((w | 1) & mask) << (24 - p)) | 1
    theta = row_theta(w, b)
    whole = (1 << top).to(tl.float32) * 2.0  # 2^(32 - p)
    fraction = ((theta.to(tl.float32) + 0.5) / b.to(tl.float32) * whole).to(tl.uint32)
    second = (((w >> 24) & mask) << top << 1) | ((fraction | mask) ^ mask) | (((w >> 16) | 1) & mask)
    return first, second, (first_row << 8) | b


@triton.jit
def _tile(c, n_tiles, pm, k0, k1, stack):
    """The law's `chunk_tile` in 32-bit words."""
    place = c.to(tl.uint32) & ((tl.full((), 1, tl.uint32) << pm) - 1)  # of the chunk in its group
    w0, w1, w2, w3 = group_words(c >> pm.to(tl.int64), k0, k1, stack)
    return scale_index(beta(place, w0, w1, w2, w3, pm), n_tiles, tile_theta(w1, n_tiles), pm)


@triton.jit
def _write_table(
    table, first_chunk, thread, k, n_tiles, pm, p, k0, k1, NNZ: tl.constexpr, STACKS: tl.constexpr,
    CHUNKS: tl.constexpr, LOG_PARTS: tl.constexpr,
):  # fmt: skip
    """Write the table of CHUNKS chunks, ordered by sub-block of all stacks, by chunk, and by part of 32 columns."""
    TABLE_BYTES: tl.constexpr = (CHUNKS << LOG_PARTS) * ENTRY_BYTES  # per sub-block
    q = thread % CHUNKS
    c = first_chunk + q
    entry = table + (q << LOG_PARTS) * ENTRY_BYTES
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
                store_words(entry + ((stack * NNZ + t) * TABLE_BYTES + h * ENTRY_BYTES), first, second, row, sign)


@triton.jit
def _block_offset(i: tl.constexpr, TOGETHER: tl.constexpr, SETS: tl.constexpr):
    """The distance from a lane's first column to its column in block i.

    The sets of warps process windows of TOGETHER blocks in turn.
    """
    return (i // TOGETHER * SETS * TOGETHER + i % TOGETHER) * LANES


@triton.jit
def _load_run(pointer, inside, WIDTH: tl.constexpr):
    """WIDTH consecutive elements from each pointer, read as one word, as a tuple; zeros where not `inside`."""
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
    """LOADED blocks of 32 columns of VECTORS vectors, from vector v on, as a tuple; zeros outside the data.

    Each tensor has one vector's elements of one block, a column per lane; vectors vary fastest.
    """
    loaded = ()
    for i in tl.static_range(LOADED):
        j = column + _block_offset(i, TOGETHER, SETS)
        inside = j.to(tl.uint32) < d.to(tl.uint32)
        if WIDTH == 0:
            for u in tl.static_range(VECTORS):
                row = x + (v + u).to(tl.int64) * stride_x
                loaded += (tl.load(row + j, mask=inside & (v + u < n), other=0),)  # type: ignore[assignment]
        else:
            for u in tl.static_range(0, VECTORS, WIDTH):
                pointer = x + j.to(tl.int64) * stride_x + (v + u)
                loaded += _load_run(pointer, inside & (v + u < n), WIDTH)
    return loaded


@triton.jit
def _row_and_sign(entry, i, p):
    """(row, word whose highest bit is the sign) of columns i of their chunks, from the table entries at `entry`."""
    first, second, row, sign = load_words(entry)
    mask = ((tl.full((), 0xFFFFFFFF, tl.uint32) >> p) ^ 0xFFFFFFFF) | 1
    z = ((i << 8) | 1) * first
    z = (z ^ (z >> tl.maximum((p + 1) >> 1, 1))) & mask
    z = tl.umulhi(z * second, row & 255) + (row >> 8)
    return z.to(tl.int32), sign << (31 - (i & 31))


@triton.jit
def _with_sign(z, word):
    """z, negated where the highest bit of `word` is 1."""
    if z.dtype == tl.float64:
        z = tl.where(word.to(tl.int32, bitcast=True) < 0, -z, z)
    else:
        z = (z.to(tl.uint32, bitcast=True) ^ (word & 0x80000000)).to(tl.float32, bitcast=True)
    return z


@triton.jit
def _add_blocks(
    loaded, entries, columns, sums, p, DTYPE: tl.constexpr, FIRST: tl.constexpr, BLOCKS: tl.constexpr,
    VECTORS: tl.constexpr, ROUND: tl.constexpr, ROUNDS: tl.constexpr, ROUND_BYTES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add blocks FIRST .. FIRST + BLOCKS - 1 of `loaded` to the sums of rounds ROUND .. ROUND + ROUNDS - 1.

    entries : for each block, the addresses of its table entries for round 0.  columns : for each block, its columns
    within their chunks.

    All of these sums are different, so they are loaded together and latencies overlap.
    """
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    address = ()
    sign = ()
    for i in tl.static_range(FIRST, FIRST + BLOCKS):
        for t in tl.static_range(ROUND, ROUND + ROUNDS):
            row, word = _row_and_sign(entries[i] + t * ROUND_BYTES, columns[i], p)
            address += (sums + row * ITEM,)  # type: ignore[assignment]
            sign += (word,)  # type: ignore[assignment]
    before = ()
    for i in tl.static_range(BLOCKS * ROUNDS):
        for u in tl.static_range(VECTORS):
            before += (load_number(address[i] + u * (ROWS * ITEM), DTYPE),)  # type: ignore[assignment]
    for i in tl.static_range(BLOCKS * ROUNDS):
        for u in tl.static_range(VECTORS):
            z = loaded[(FIRST + i // ROUNDS) * VECTORS + u].to(DTYPE)
            store_number(address[i] + u * (ROWS * ITEM), before[i * VECTORS + u] + _with_sign(z, sign[i]))


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
    """target[split, v, r] = sum over the split's columns j of x[v, j] S[r, j], where S has entries +-1.

    Grid: (blocks of VECTORS vectors, splits); 4 warps.

    x : (n, d), contiguous along d or, if WIDTH > 0, along n; stride_x is the stride of the other dimension.
    target : (splits, n, k * STACKS), of DTYPE.  k, n_tiles, NNZ : of one stack.
    batches : the number of batches of CHUNKS chunks that contain the columns offset to offset + d - 1.

    TEAM : number of warps that share sums and divide the sub-blocks among them.  SHARED_SUMS : all warps share sums
    and, between two barriers, process columns of one group.  REPLICAS : number of copies of the sums, for lanes of
    different groups; a group of chunks then has 32 / REPLICAS columns.  ROWS : at least k * STACKS, a multiple of 32.
    LOG_PARTS : a chunk has 32 << LOG_PARTS columns; 0 also if it has fewer than 32.  LOADED : blocks of 32 columns that
    a warp loads at a time.  TOGETHER : blocks, all in one group, whose sums it loads together; divides LOADED.
    WIDTH : number of vectors that one access reads, a divisor of n; 0 if x is contiguous along d.
    """
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    SUB_BLOCKS: tl.constexpr = NNZ * STACKS
    SETS: tl.constexpr = 4 // TEAM  # of warps; the warps of a set process the same columns
    TABLE_BYTES: tl.constexpr = (CHUNKS << LOG_PARTS) * ENTRY_BYTES  # per sub-block
    ROUND_BYTES: tl.constexpr = TABLE_BYTES * TEAM
    # Replicas are padded by the number of columns of a group, so that neighbours' sums are in different banks.
    REPLICA: tl.constexpr = VECTORS * ROWS + (LANES // REPLICAS if REPLICAS > 1 else 0)
    PARTS: tl.constexpr = (1 if SHARED_SUMS else SETS) * REPLICAS
    SUMS: tl.constexpr = PARTS * REPLICA
    WINDOW: tl.constexpr = LANES * TOGETHER
    ROUNDS: tl.constexpr = SUB_BLOCKS // TEAM  # in round t, member i of a team processes sub-block t TEAM + i
    STEP_ROUNDS: tl.constexpr = min(ROUNDS, 4 if VECTORS <= 8 else 2)
    k0, k1 = seed_words(seed)
    pm, p = log_group.to(tl.uint32), log_chunk.to(tl.uint32)
    thread = tl.arange(0, THREADS)
    lane, member, team = thread % LANES, thread // LANES % TEAM, thread // LANES // TEAM
    v = tl.program_id(0) * VECTORS
    table = shared_begin(SHARED_BYTES) & -16
    sums = table + SUB_BLOCKS * TABLE_BYTES
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
        tl.debug_barrier()  # all warps are done with the previous table
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
            columns = ()
            for i in tl.static_range(LOADED):
                j = in_batch + _block_offset(i, TOGETHER, SETS)
                entries += (own_table + (j >> log_part) * ENTRY_BYTES,)  # type: ignore[assignment]
                columns += ((j & ((1 << log_chunk) - 1)).to(tl.uint32),)  # type: ignore[assignment]
            for i in tl.static_range(0, LOADED, TOGETHER):
                for t in tl.static_range(0, ROUNDS, STEP_ROUNDS):
                    _add_blocks(
                        loaded, entries, columns, own_sums, p, DTYPE, i, TOGETHER, VECTORS, t,
                        min(STEP_ROUNDS, ROUNDS - t), ROUND_BYTES, ROWS,
                    )  # fmt: skip
                if SHARED_SUMS:
                    tl.debug_barrier()  # the next window may be in another group
            in_batch += LANES * LOADED * SETS
    tl.debug_barrier()

    target += tl.program_id(1).to(tl.int64) * stride_ts
    for r0 in range(0, k * STACKS, THREADS):
        r = r0 + thread
        for u in tl.static_range(VECTORS):
            total = tl.zeros((THREADS,), DTYPE)
            for part in range(PARTS):
                index = part * REPLICA + u * ROWS + tl.minimum(r, ROWS - 1)
                total += load_number(sums + index * ITEM, DTYPE)
            pointers = target + (v + u).to(tl.int64) * stride_tv + r.to(tl.int64) * stride_tk
            tl.store(pointers, total, mask=(r < k * STACKS) & (v + u < n))
