"""X Sᵀ of few long vectors to at most 128 components under the exact law, with sums for each lane or for a few lanes.

A lane processes whole chunks, or parts of 8 or 16 columns: it derives the chunk's words, and adds its columns to its
copy of the sums (`lane_rows`). At the end, all copies are added in a fixed order, so results are bitwise reproducible.

`scattered_sums` shares words among lanes, through a table in shared memory. For short chunks, that takes longer than
deriving them, and 32 lanes do not find as many columns that meet different rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..portable.law import seed_words
from ..portable.program import start_dependents
from .lane_rows import (
    MAX_BYTE_LOG,
    add_columns,
    addresses_of_rows,
    exchange_columns,
    keys_of_rows,
    sub_blocks,
    words_of_chunk,
)
from .scattered_loads import LANES, load_run
from .shared_memory import shared_begin, synchronize_warp
from .sums import add_sums, clear_sums, sums_at

INTEGERS = ["n", "d", "stride_v", "stride_j", "offset", "k", "steps", "steps_per_split", "stride_ts", "stride_tv"]
INTEGERS += ["stride_tk", "seed"]


@triton.jit
def _load_parts(
    x, step, skipped, thread, v, n, d, stride_v, stride_j, HELD: tl.constexpr, VECTORS: tl.constexpr,
    THREADS: tl.constexpr, ROW_RUN: tl.constexpr, COLUMN_RUN: tl.constexpr, STAGED: tl.constexpr,
):  # fmt: skip
    """Columns of VECTORS vectors, from vector v on, as a tuple in which columns vary fastest.

    They are the HELD columns of each thread's part, or with STAGED columns of its warp's parts, such that adjacent
    lanes read adjacent columns. Zeros for columns that do not exist. Existing vectors are read again in place of those
    that do not.
    """
    by_column = ()
    loaded = ()
    next_column = stride_j.to(tl.int64)
    j = (step * THREADS + (thread // LANES * LANES if STAGED else thread)) * HELD - skipped
    if STAGED:
        j += thread % LANES
    NEXT: tl.constexpr = LANES if STAGED else 1
    if COLUMN_RUN > 1:
        for i in tl.static_range(HELD):
            inside = (j + i * NEXT).to(tl.uint32) < d.to(tl.uint32)
            for u in tl.static_range(0, VECTORS, COLUMN_RUN):
                first = tl.minimum(v + u, n - COLUMN_RUN)
                by_column += load_run(x + (j + i * NEXT).to(tl.int64) * next_column + first, inside, COLUMN_RUN)
        for u in tl.static_range(VECTORS):
            for i in tl.static_range(HELD):
                loaded += (by_column[i * VECTORS + u],)  # type: ignore[assignment]
    else:
        for u in tl.static_range(VECTORS):
            row = x + tl.minimum(v + u, n - 1).to(tl.int64) * stride_v
            first = row + (j if ROW_RUN > 0 else j.to(tl.int64) * next_column)
            for i in tl.static_range(0, HELD, max(1, ROW_RUN)):
                inside = (j + i * NEXT).to(tl.uint32) < d.to(tl.uint32)
                loaded += load_run(first + i * NEXT * (1 if ROW_RUN > 0 else next_column), inside, max(1, ROW_RUN))
    return loaded


@triton.jit(do_not_specialize=INTEGERS)
def project_lane_sums(
    x,
    target,
    n,
    d,
    stride_v,
    stride_j,
    offset,
    k,
    steps,
    steps_per_split,
    stride_ts,
    stride_tv,
    stride_tk,
    seed: tl.int64,
    NNZ: tl.constexpr,
    LOG_CHUNK: tl.constexpr,
    LOG_HELD: tl.constexpr,
    VECTORS: tl.constexpr,
    SHARERS: tl.constexpr,
    WARPS: tl.constexpr,
    ROW_RUN: tl.constexpr,
    COLUMN_RUN: tl.constexpr,
    STAGED: tl.constexpr,
    PROGRAMMATIC_LAUNCH: tl.constexpr,
    SHARED_BYTES: tl.constexpr,
):
    """target[split, v, r] = sum over the split's columns j of x[v, j] S[r, j], where S has entries +-1.

    Grid: (blocks of VECTORS vectors, splits); WARPS warps.

    x : (n, d), with strides stride_v and stride_j.  target : (splits, n, k), fp32.  steps : the number of steps of
    32 * WARPS parts that contain the columns offset to offset + d - 1.  LOG_HELD : a part has 2^LOG_HELD columns of a
    chunk.  VECTORS : 1, 2 or 4.  SHARERS : number of lanes that share a copy of the sums, 1, 2 or 4, at most NNZ.

    ROW_RUN : number of columns that one access reads, a divisor of d, offset and a part; 0 if stride_j is not 1.
    COLUMN_RUN : number of vectors that one access reads, a divisor of n and VECTORS; more than 1 only if stride_v is 1
    and ROW_RUN is 0.  STAGED : adjacent lanes read adjacent columns, and exchange them; ROW_RUN is at most 1.
    """
    HELD: tl.constexpr = 1 << LOG_HELD
    LOG_PARTS: tl.constexpr = LOG_CHUNK - LOG_HELD
    THREADS: tl.constexpr = WARPS * LANES
    COPIES: tl.constexpr = LANES // SHARERS  # of a warp's sums
    LANE_BYTES: tl.constexpr = 4 * VECTORS
    LOG_ROW_BYTES: tl.constexpr = 7 + VECTORS // 2 - SHARERS // 2
    GROUP: tl.constexpr = min(4 if LOG_CHUNK <= MAX_BYTE_LOG else 2, HELD)  # columns whose rows are computed together
    start_dependents(PROGRAMMATIC_LAUNCH)
    k0, k1 = seed_words(seed)
    thread = tl.arange(0, THREADS)
    lane, warp = thread % LANES, thread // LANES
    v = tl.program_id(0) * VECTORS
    stages = (shared_begin(SHARED_BYTES) + 127) & -128
    stage = stages + warp * (HELD * LANES * LANE_BYTES)
    begin = stages + (WARPS * HELD * LANES * LANE_BYTES if STAGED else 0)  # of the sums
    warp_bytes = k << LOG_ROW_BYTES
    clear_sums(begin, warp_bytes * WARPS, thread, THREADS)
    tl.debug_barrier()
    own = (begin + warp * warp_bytes + lane % COPIES * LANE_BYTES).to(tl.uint32)
    firsts, counts = sub_blocks(k, lane // COPIES, NNZ, SHARERS)
    one = tl.where(n > 0, 0x3F800000, 0).to(tl.uint32)  # with two constants, a sign would take another instruction

    start = tl.program_id(1) * steps_per_split
    stop = tl.minimum(start + steps_per_split, steps)
    part0 = offset.to(tl.int64) >> LOG_HELD
    skipped = (offset & (HELD - 1)).to(tl.int32)  # columns of the first part that precede the data
    ahead = _load_parts(
        x, start, skipped, thread, v, n, d, stride_v, stride_j, HELD, VECTORS, THREADS, ROW_RUN, COLUMN_RUN, STAGED
    )
    for step in range(start, stop):
        loaded = ahead
        if STAGED:
            loaded = exchange_columns(ahead, stage, lane, LOG_HELD, VECTORS)
        left = tl.where(step + 1 < stop, d, 0)  # nothing is left to load in the last step
        ahead = _load_parts(
            x, step + 1, skipped, thread, v, n, left, stride_v, stride_j, HELD, VECTORS, THREADS, ROW_RUN, COLUMN_RUN,
            STAGED,
        )  # fmt: skip
        part = part0 + (step * THREADS + thread)
        first = ((part & ((1 << LOG_PARTS) - 1)) << LOG_HELD).to(tl.uint32)  # of the part's columns in its chunk
        keys, signs = words_of_chunk(part >> LOG_PARTS, first, lane // COPIES, k0, k1, NNZ, LOG_CHUNK, SHARERS)
        for t in tl.static_range(NNZ):
            of_rows = keys_of_rows(keys[t], firsts[t], counts[t], LOG_CHUNK, LOG_ROW_BYTES)
            for i in tl.static_range(0, HELD, GROUP):
                addresses = addresses_of_rows(of_rows, counts[t], own, first, i, GROUP, LOG_CHUNK, LOG_ROW_BYTES)
                add_columns(loaded, addresses, signs[t], one, i, HELD, VECTORS)
            if SHARERS > 1:
                synchronize_warp(lane)  # lanes go on to sub-blocks that others have added to
    tl.debug_barrier()

    target += tl.program_id(1).to(tl.int64) * stride_ts
    for r0 in range(0, k, THREADS // COPIES):
        r = r0 + thread // COPIES
        address = begin + (tl.minimum(r, k - 1) << LOG_ROW_BYTES) + thread % COPIES * LANE_BYTES
        totals = sums_at(address, tl.float32, VECTORS)
        for i in tl.static_range(1, WARPS):
            totals = add_sums(totals, sums_at(address + i * warp_bytes, tl.float32, VECTORS))
        row = r0 + tl.arange(0, THREADS // COPIES)
        for u in tl.static_range(VECTORS):
            total = tl.sum(tl.reshape(totals[u], (THREADS // COPIES, COPIES)), axis=1)
            pointers = target + (v + u).to(tl.int64) * stride_tv + row.to(tl.int64) * stride_tk
            tl.store(pointers, total, mask=(row < k) & (v + u < n))
