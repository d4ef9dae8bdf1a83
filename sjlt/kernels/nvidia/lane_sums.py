"""X Sᵀ of few long vectors to at most 128 components under the exact law: every lane has sums of its own.

A lane processes whole chunks. It derives a chunk's words, and from these the rows of up to four columns at a time, in
fields of words: a number mod 2^p, p <= 4, has 8 bits, a row 16. It then adds the columns to its sums in shared memory.
All sums of a row are adjacent, those of lane after lane, so lanes that are served at a time use different banks. At the
end, the sums of all lanes are added in a fixed order, so results are bitwise reproducible.

`scattered_sums` shares words among lanes, through a table in shared memory. That is faster for longer chunks; here it
would take longer than deriving them, and 32 lanes would not find as many columns that meet different rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..portable.law import chunk_keys, chunk_signs, part_start, row_theta, seed_words
from ..portable.program import start_dependents
from .scattered_loads import LANES, load_run
from .shared_memory import (
    load_number,
    load_numbers,
    load_vector,
    shared_begin,
    store_number,
    store_numbers,
    store_words,
    synchronize_warp,
)
from .warp import multiply_add_high

FIELDS = tl.constexpr(4)  # columns whose rows are computed together
INTEGERS = ["n", "d", "stride_v", "stride_j", "offset", "k", "steps", "steps_per_split", "stride_ts", "stride_tv"]
INTEGERS += ["stride_tk", "seed"]


@triton.jit
def _keys_of_rows(w, first_row, b, LOG_CHUNK: tl.constexpr, LOG_ROW_BYTES: tl.constexpr):
    """For the key words w of a sub-block of b rows: the factors and terms of the law's `beta`, and where rows begin."""
    MASK: tl.constexpr = (1 << LOG_CHUNK) - 1
    a1, b1 = (w & MASK) | 1, ((w >> 8) & MASK) * 0x01010101
    a2, b2 = ((w >> 16) & MASK) | 1, ((w >> 24) & MASK) * 0x01010101
    start = (row_theta(w, b) + (first_row << LOG_CHUNK)) * (0x00010001 << (LOG_ROW_BYTES - LOG_CHUNK))
    return a1, b1, a2, b2, start


@triton.jit
def _offsets_of_rows(
    keys, b, sums, FIRST: tl.constexpr, COUNT: tl.constexpr, LOG_CHUNK: tl.constexpr, LOG_ROW_BYTES: tl.constexpr
):
    """The addresses of the sums of columns FIRST to FIRST + COUNT - 1 of a chunk, COUNT <= FIELDS, as a tuple.

    sums : the address of the lane's sums in row 0.
    """
    a1, b1, a2, b2, start = keys
    MASK: tl.constexpr = (1 << LOG_CHUNK) - 1
    HALF: tl.constexpr = (LOG_CHUNK + 1) // 2
    SCALE: tl.constexpr = LOG_ROW_BYTES - LOG_CHUNK
    ROWS: tl.constexpr = 0x10000 - (1 << LOG_ROW_BYTES)  # the bits of a row in its field, above those of the fraction
    slots = (0x03020100 + FIRST * 0x01010101) * a1 + b1
    slots = slots & (MASK * 0x01010101)
    slots = slots ^ ((slots >> HALF) & ((MASK >> HALF) * 0x01010101))
    slots = slots * a2 + b2
    even = (slots & (MASK * 0x00010001)) * (b << SCALE) + start
    odd = ((slots >> 8) & (MASK * 0x00010001)) * (b << SCALE) + start
    addresses = ()
    for i in tl.static_range(COUNT):
        rows = even if i % 2 == 0 else odd
        address = (rows & ROWS) + sums if i < 2 else multiply_add_high(rows & (ROWS << 16), 0x10000, sums)
        addresses += (address.to(tl.int32),)  # type: ignore[assignment]
    return addresses


@triton.jit
def _sign(word, e: tl.constexpr, one):
    """-1 where bit e of `word` is 1, otherwise 1; `one` has the bits of 1 in fp32."""
    return (((word << (31 - e)) & 0x80000000) | one).to(tl.float32, bitcast=True)


@triton.jit
def _load_chunks(
    x, step, before, thread, v, n, d, stride_v, stride_j, CHUNK: tl.constexpr, VECTORS: tl.constexpr,
    THREADS: tl.constexpr, ROW_RUN: tl.constexpr, COLUMN_RUN: tl.constexpr, STAGED: tl.constexpr,
):  # fmt: skip
    """Columns of VECTORS vectors, from vector v on, as a tuple in which columns vary fastest.

    They are the CHUNK columns of each thread's chunk, or with STAGED columns of its warp's chunks, such that adjacent
    lanes read adjacent columns. Zeros for columns that do not exist. Existing vectors are read again in place of those
    that do not.
    """
    by_column = ()
    loaded = ()
    j = (step * THREADS + (thread // LANES * LANES if STAGED else thread)) * CHUNK - before
    if STAGED:
        j += thread % LANES
    NEXT: tl.constexpr = LANES if STAGED else 1
    if COLUMN_RUN > 1:
        for i in tl.static_range(CHUNK):
            inside = (j + i * NEXT).to(tl.uint32) < d.to(tl.uint32)
            for u in tl.static_range(0, VECTORS, COLUMN_RUN):
                first = tl.minimum(v + u, n - COLUMN_RUN)
                by_column += load_run(x + (j + i * NEXT).to(tl.int64) * stride_j + first, inside, COLUMN_RUN)
        for u in tl.static_range(VECTORS):
            for i in tl.static_range(CHUNK):
                loaded += (by_column[i * VECTORS + u],)  # type: ignore[assignment]
    else:
        for u in tl.static_range(VECTORS):
            row = x + tl.minimum(v + u, n - 1).to(tl.int64) * stride_v
            first = row + (j if ROW_RUN > 0 else j.to(tl.int64) * stride_j)
            for i in tl.static_range(0, CHUNK, max(1, ROW_RUN)):
                inside = (j + i * NEXT).to(tl.uint32) < d.to(tl.uint32)
                loaded += load_run(first + i * NEXT * (1 if ROW_RUN > 0 else stride_j), inside, max(1, ROW_RUN))
    return loaded


@triton.jit
def _exchange_columns(loaded, stage, lane, LOG_CHUNK: tl.constexpr, VECTORS: tl.constexpr):
    """From the columns that STAGED lanes load, those of each lane's own chunk, through the warp's memory at `stage`.

    Column i of chunk q lies at element q * CHUNK + (i ^ q * CHUNK / 32), so that lanes use different banks, both when
    they write adjacent columns and when they read the same column of their chunks.
    """
    CHUNK: tl.constexpr = 1 << LOG_CHUNK
    synchronize_warp(lane)  # all lanes have read the previous columns
    for u in tl.static_range(VECTORS):
        for i in tl.static_range(CHUNK):
            q = (i * LANES + lane) >> LOG_CHUNK
            place = (q << LOG_CHUNK) + ((lane & (CHUNK - 1)) ^ ((q << LOG_CHUNK) // LANES))
            store_number(stage + (u * CHUNK * LANES + place) * 4, loaded[u * CHUNK + i].to(tl.float32))
    synchronize_warp(lane)
    columns = ()
    for u in tl.static_range(VECTORS):
        for i in tl.static_range(CHUNK):
            place = (lane << LOG_CHUNK) + (i ^ ((lane << LOG_CHUNK) // LANES))
            columns += (load_number(stage + (u * CHUNK * LANES + place) * 4, tl.float32),)  # type: ignore[assignment]
    return columns


@triton.jit
def _add_columns(
    loaded, addresses, word, one, FIRST: tl.constexpr, CHUNK: tl.constexpr, ENTRY: tl.constexpr, VECTORS: tl.constexpr
):
    """Add columns FIRST, FIRST + 1, ... of a chunk to the sums at `addresses`; the signs begin at bit ENTRY of `word`.

    All of these sums are different, so they are loaded together and latencies overlap.
    """
    before = ()
    for i in tl.static_range(len(addresses)):
        before += load_numbers(addresses[i], tl.float32, VECTORS)
    for i in tl.static_range(len(addresses)):
        sign = _sign(word, ENTRY + i, one)
        after = ()
        for u in tl.static_range(VECTORS):
            z = loaded[u * CHUNK + FIRST + i].to(tl.float32)
            after += (tl.fma(z, sign, before[i * VECTORS + u]),)  # type: ignore[assignment]
        store_numbers(addresses[i], after)


@triton.jit
def _numbers_at(address, VECTORS: tl.constexpr):
    """The sums of VECTORS vectors at each address, as a tuple."""
    numbers = ()
    if VECTORS == 4:
        numbers += load_vector(address, tl.float32)
    else:
        for u in tl.static_range(VECTORS):
            numbers += (load_number(address + u * 4, tl.float32),)  # type: ignore[assignment]
    return numbers


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
    VECTORS: tl.constexpr,
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
    32 * WARPS chunks that contain the columns offset to offset + d - 1.  VECTORS : 1, 2 or 4.  ROW_RUN : number of
    columns that one access reads, a divisor of d, offset and the chunk; 0 if stride_j is not 1.  COLUMN_RUN : number of
    vectors that one access reads, a divisor of n and VECTORS; more than 1 only if stride_v is 1 and ROW_RUN is 0.
    STAGED : adjacent lanes read adjacent columns, and exchange them; ROW_RUN is at most 1.
    """
    CHUNK: tl.constexpr = 1 << LOG_CHUNK
    THREADS: tl.constexpr = WARPS * LANES
    LANE_BYTES: tl.constexpr = 4 * VECTORS
    LOG_ROW_BYTES: tl.constexpr = 7 + (VECTORS // 2)  # of 32 lanes
    GROUP: tl.constexpr = min(FIELDS, CHUNK)
    start_dependents(PROGRAMMATIC_LAUNCH)
    k0, k1 = seed_words(seed)
    thread = tl.arange(0, THREADS)
    v = tl.program_id(0) * VECTORS
    begin = shared_begin(SHARED_BYTES) & -16
    warp_bytes = k << LOG_ROW_BYTES
    zero = (thread * 0).to(tl.uint32)
    for first in range(0, warp_bytes * WARPS, THREADS * 16):
        store_words(begin + tl.minimum(first + thread * 16, warp_bytes * WARPS - 16), zero, zero, zero, zero)
    tl.debug_barrier()
    stage = begin + warp_bytes * WARPS + thread // LANES * (CHUNK * LANES * 4 * VECTORS)
    own = (begin + thread // LANES * warp_bytes + thread % LANES * LANE_BYTES).to(tl.uint32)
    one = tl.where(n > 0, 0x3F800000, 0).to(tl.uint32)  # with two constants, a sign would take another instruction

    start = tl.program_id(1) * steps_per_split
    stop = tl.minimum(start + steps_per_split, steps)
    chunk0 = offset.to(tl.int64) >> LOG_CHUNK
    before = (offset & (CHUNK - 1)).to(tl.int32)  # columns of the first chunk that precede the data
    ahead = _load_chunks(
        x, start, before, thread, v, n, d, stride_v, stride_j, CHUNK, VECTORS, THREADS, ROW_RUN, COLUMN_RUN, STAGED
    )
    for step in range(start, stop):
        loaded = ahead
        if STAGED:
            loaded = _exchange_columns(ahead, stage, thread % LANES, LOG_CHUNK, VECTORS)
        left = tl.where(step + 1 < stop, d, 0)  # nothing is left to load in the last step
        ahead = _load_chunks(
            x, step + 1, before, thread, v, n, left, stride_v, stride_j, CHUNK, VECTORS, THREADS, ROW_RUN, COLUMN_RUN,
            STAGED,
        )  # fmt: skip
        c = chunk0 + (step * THREADS + thread)
        signs = chunk_signs(c, k0, k1)
        for t in tl.static_range(NNZ):
            if t % 4 == 0:
                words = chunk_keys(c, (c * 0).to(tl.uint32) + t // 4, k0, k1)
            first_row = part_start(t, k, NNZ).to(tl.uint32)
            b = part_start(t + 1, k, NNZ).to(tl.uint32) - first_row
            keys = _keys_of_rows(words[t % 4], first_row, b, LOG_CHUNK, LOG_ROW_BYTES)
            for i in tl.static_range(0, CHUNK, GROUP):
                addresses = _offsets_of_rows(keys, b, own, i, GROUP, LOG_CHUNK, LOG_ROW_BYTES)
                word = signs[(t * CHUNK + i) // 32]
                _add_columns(loaded, addresses, word, one, i, CHUNK, (t * CHUNK + i) % 32, VECTORS)
    tl.debug_barrier()

    target += tl.program_id(1).to(tl.int64) * stride_ts
    warp = tl.arange(0, WARPS)
    for first in range(0, k, WARPS):
        r = tl.minimum(first + thread // LANES, k - 1)
        address = begin + (r << LOG_ROW_BYTES) + thread % LANES * LANE_BYTES
        totals = _numbers_at(address, VECTORS)
        for i in tl.static_range(1, WARPS):
            numbers = _numbers_at(address + i * warp_bytes, VECTORS)
            after = ()
            for u in tl.static_range(VECTORS):
                after += (totals[u] + numbers[u],)  # type: ignore[assignment]
            totals = after
        for u in tl.static_range(VECTORS):
            total = tl.sum(tl.reshape(totals[u], (WARPS, LANES)), axis=1)
            pointers = target + (v + u).to(tl.int64) * stride_tv + (first + warp).to(tl.int64) * stride_tk
            tl.store(pointers, total, mask=(first + warp < k) & (v + u < n))
