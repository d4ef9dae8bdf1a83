"""The rows of the columns of a chunk, as one lane derives them, and the addition of these columns to sums.

The rows of several columns are computed at a time, in fields of words: a number mod 2^p has 8 bits if p <= 4, otherwise
16, and a row 16. A copy of the sums belongs to one lane, or to SHARERS lanes, which add to different sub-blocks, that
is to different rows, at the same time. All sums of a row are adjacent, copy after copy, so that lanes use different
banks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..config import lane_sums as config
from ..portable.law import chunk_keys, chunk_signs, part_start, row_theta, select_word
from .scattered_loads import LANES
from .shared_memory import (
    load_number,
    load_numbers,
    store_number,
    store_numbers,
    synchronize_warp,
)
from .sums import sign_of
from .warp import multiply_add_high

MAX_BYTE_LOG = tl.constexpr(config.MAX_BYTE_LOG)


@triton.jit
def keys_of_rows(w, first_row, b, LOG_CHUNK: tl.constexpr, LOG_ROW_BYTES: tl.constexpr):
    """For the key words w of a sub-block of b rows: the factors and terms of the law's `beta`, and where rows begin."""
    MASK: tl.constexpr = (1 << LOG_CHUNK) - 1
    EACH: tl.constexpr = 0x01010101 if LOG_CHUNK <= MAX_BYTE_LOG else 0x00010001
    a1, b1 = (w & MASK) | 1, ((w >> 8) & MASK) * EACH
    a2, b2 = ((w >> 16) & MASK) | 1, ((w >> 24) & MASK) * EACH
    start = (row_theta(w, b) + (first_row << LOG_CHUNK)) * (0x00010001 << (LOG_ROW_BYTES - LOG_CHUNK))
    return a1, b1, a2, b2, start


@triton.jit
def rotate(values, sharer, SHARERS: tl.constexpr):
    """The tuple `values`, rotated to begin with element `sharer`, which differs between lanes: 0 to SHARERS - 1."""
    COUNT: tl.constexpr = len(values)
    for bit in tl.static_range(2):
        if 1 << bit < SHARERS:
            moved = ()
            for t in tl.static_range(COUNT):
                moved += (tl.where((sharer >> bit) & 1 != 0, values[(t + (1 << bit)) % COUNT], values[t]),)  # type: ignore[assignment]
            values = moved
    return values


@triton.jit
def sub_blocks(rows, sharer, NNZ: tl.constexpr, SHARERS: tl.constexpr):
    """(first rows, numbers of rows) of the sub-blocks of a tile, each a tuple that begins with sub-block `sharer`."""
    firsts = ()
    counts = ()
    for t in tl.static_range(NNZ):
        first = part_start(rows * 0 + t, rows, NNZ).to(tl.uint32)
        firsts += (first,)  # type: ignore[assignment]
        counts += (part_start(rows * 0 + (t + 1), rows, NNZ).to(tl.uint32) - first,)  # type: ignore[assignment]
    return rotate(firsts, sharer, SHARERS), rotate(counts, sharer, SHARERS)


@triton.jit
def words_of_chunk(c, first, sharer, k0, k1, NNZ: tl.constexpr, LOG_CHUNK: tl.constexpr, SHARERS: tl.constexpr):
    """(key words, signs) of chunk c for each sub-block, each a tuple that begins with sub-block `sharer`.

    The lowest bits of a word are the signs of the columns of a lane, from column `first` of the chunk on.
    """
    bits = chunk_signs(c, k0, k1)
    keys = ()
    signs = ()
    for t in tl.static_range(NNZ):
        if t % 4 == 0:
            words = chunk_keys(c, (c * 0).to(tl.uint32) + t // 4, k0, k1)
        keys += (words[t % 4],)  # type: ignore[assignment]
        e = first + (t << LOG_CHUNK)
        signs += (select_word((e >> 5) & 3, bits[0], bits[1], bits[2], bits[3]) >> (e & 31),)  # type: ignore[assignment]
    return rotate(keys, sharer, SHARERS), rotate(signs, sharer, SHARERS)


@triton.jit
def addresses_of_rows(
    keys, b, sums, first, FIRST: tl.constexpr, COUNT: tl.constexpr, LOG_CHUNK: tl.constexpr, LOG_ROW_BYTES: tl.constexpr
):
    """The addresses of the sums of COUNT adjacent columns of a chunk, from column first + FIRST on, as a tuple.

    sums : the address of the lane's sums in row 0.  COUNT : at most 4, or 2 if LOG_CHUNK > 4.
    """
    a1, b1, a2, b2, start = keys
    BYTES: tl.constexpr = LOG_CHUNK <= MAX_BYTE_LOG
    EACH: tl.constexpr = 0x01010101 if BYTES else 0x00010001
    MASK: tl.constexpr = (1 << LOG_CHUNK) - 1
    HALF: tl.constexpr = (LOG_CHUNK + 1) // 2
    SCALE: tl.constexpr = LOG_ROW_BYTES - LOG_CHUNK
    ROWS: tl.constexpr = 0x10000 - (1 << LOG_ROW_BYTES)  # the bits of a row in its field, above those of the fraction
    slots = (first * EACH + (0x03020100 if BYTES else 0x00010000) + FIRST * EACH) * a1 + b1
    slots = slots & (MASK * EACH)
    slots = slots ^ ((slots >> HALF) & ((MASK >> HALF) * EACH))
    slots = slots * a2 + b2
    even = (slots & (MASK * 0x00010001)) * (b << SCALE) + start
    if BYTES:
        odd = ((slots >> 8) & (MASK * 0x00010001)) * (b << SCALE) + start
    LOWER: tl.constexpr = 2 if BYTES else 1  # columns whose rows are in lower halves of words
    addresses = ()
    for i in tl.static_range(COUNT):
        rows = odd if BYTES and i % 2 == 1 else even
        address = (rows & ROWS) + sums if i < LOWER else multiply_add_high(rows & (ROWS << 16), 0x10000, sums)
        addresses += (address.to(tl.int32),)  # type: ignore[assignment]
    return addresses


@triton.jit
def add_columns(loaded, addresses, signs, one, FIRST: tl.constexpr, HELD: tl.constexpr, VECTORS: tl.constexpr):
    """Add columns FIRST, FIRST + 1, ... of HELD to the sums at `addresses`. Bit i of `signs` belongs to column i.

    All of these sums are different, so they are loaded together and latencies overlap.
    """
    before = ()
    for i in tl.static_range(len(addresses)):
        before += load_numbers(addresses[i], tl.float32, VECTORS)
    for i in tl.static_range(len(addresses)):
        sign = sign_of(signs << (31 - (FIRST + i)), one, tl.float32)
        after = ()
        for u in tl.static_range(VECTORS):
            z = loaded[u * HELD + FIRST + i].to(tl.float32)
            after += (tl.fma(z, sign, before[i * VECTORS + u]),)  # type: ignore[assignment]
        store_numbers(addresses[i], after)


@triton.jit
def exchange_columns(loaded, stage, lane, LOG_HELD: tl.constexpr, VECTORS: tl.constexpr):
    """The 2^LOG_HELD columns of each lane, from columns of the warp that adjacent lanes have loaded.

    Column i of lane q is the element 2^LOG_HELD q + i of the warp, and lane l has loaded elements l, l + 32, ... It
    goes to 2^LOG_HELD q + (i ^ 2^LOG_HELD q / 32) at `stage`, so that lanes use different banks, both when they write
    adjacent columns and when each reads one of its own. `loaded` is a tuple in which columns vary fastest.

    stage : the address of the warp's memory for this, a multiple of 128.
    """
    HELD: tl.constexpr = 1 << LOG_HELD
    LINE: tl.constexpr = LANES * 4
    synchronize_warp(lane)  # all lanes have read the previous columns
    written = stage + lane * 4
    for u in tl.static_range(VECTORS):
        for i in tl.static_range(HELD):
            store_number((written ^ (i * 4)) + (u * HELD + i) * LINE, loaded[u * HELD + i].to(tl.float32))
    synchronize_warp(lane)
    own = stage + (lane << (LOG_HELD + 2)) + (((lane << LOG_HELD) // LANES) << 2)
    columns = ()
    for u in tl.static_range(VECTORS):
        for i in tl.static_range(HELD):
            columns += (load_number((own ^ (i * 4)) + u * HELD * LINE, tl.float32),)  # type: ignore[assignment]
    return columns
