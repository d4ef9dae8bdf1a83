"""The data of `warp_tiles`: copies of a step's columns to shared memory, and the operand that a lane reads there.

Columns are copied in units of 16 aligned bytes, which may also contain neighbouring elements. If elements of a vector
are contiguous, a slot holds the units of each vector, run by run: the columns of a run are adjacent in the data. If
vectors are contiguous, it holds the units of each column. The bytes that precede the first element of a run or column
in its units are its *shift*.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .shared_memory import copy_async, load_half, load_word, load_words, store_words
from .warp import permute_bytes

LANES = tl.constexpr(32)
STEP = tl.constexpr(64)  # columns
OWN = tl.constexpr(16)  # of these, the columns that a lane multiplies
UNIT = tl.constexpr(16)  # bytes
ITEM = tl.constexpr(2)  # bytes of an element


@triton.jit
def column_at(starts, position, log_chunk):
    """The column at a position of the batch, from the list of the first columns of its chunks."""
    return load_word(starts + (position >> log_chunk) * 4) + (position & ((1 << log_chunk) - 1))


@triton.jit
def place_in_row(c, VECTORS_CONTIGUOUS: tl.constexpr):
    """The byte of column c of a step in a row of entries: 16 for each lane of four, in the order of its columns."""
    return (c & 3) * OWN + (c >> 2) if VECTORS_CONTIGUOUS else c  # contiguous vectors: adjacent lanes, adjacent columns


@triton.jit
def _unit_of_row(v, unit, UNITS: tl.constexpr):
    """The address in a slot of a unit of vector v, out of UNITS; lanes that read a unit each use different banks."""
    if UNITS % 8 == 0:
        unit ^= v & 7
    return (v * UNITS + unit) * UNIT


@triton.jit
def _store_unit(address, pointer, first, stop):
    """Store elements `first` to `first` + 7 after `pointer`, a unit, with zeros in place of those not in [0, stop)."""
    words = ()
    for i in tl.static_range(0, 8, 2):
        word = (first * 0).to(tl.uint32)
        for e in tl.static_range(2):
            at = first + (i + e)
            element = tl.load(pointer + at, mask=(at >= 0) & (at < stop), other=0)
            word |= element.to(tl.uint16, bitcast=True).to(tl.uint32) << (16 * e)
        words += (word,)  # type: ignore[assignment]
    store_words(address, *words)


@triton.jit
def _copy_rows(
    x, slot, starts, position, lane, v0, n, stride_x, log_chunk, BLOCKS: tl.constexpr, RUN: tl.constexpr,
    UNITS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Start to copy a step's columns of vectors whose elements are contiguous; see `copy_step`."""
    LANES_PER_ROW: tl.constexpr = triton.next_power_of_2(UNITS)
    ROWS: tl.constexpr = min(BLOCKS * 8, LANES // LANES_PER_ROW)  # at a time
    u = tl.minimum(lane % LANES_PER_ROW, UNITS - 1)[None, None, :]
    i, run = tl.arange(0, BLOCKS * 8 // ROWS)[:, None, None], tl.arange(0, STEP // RUN)[None, :, None]
    v = (lane // LANES_PER_ROW % ROWS)[None, None, :] + i * ROWS
    row = x + tl.minimum(v0 + v, n - 1).to(tl.int64) * stride_x
    j = column_at(starts, run * RUN + position, log_chunk)
    source = (row + j).to(tl.int64, bitcast=True) + u.to(tl.int64) * UNIT
    if ALIGN < UNIT:
        source = source & -UNIT
    copy_async(slot + _unit_of_row(v, u + run * UNITS, STEP // RUN * UNITS), source, (v + run) * 0 + UNIT, 16)


@triton.jit
def _copy_rows_at_edge(
    x, slot, starts, position, lane, v0, n, d, stride_x, log_chunk, BLOCKS: tl.constexpr, RUN: tl.constexpr,
    UNITS: tl.constexpr,
):  # fmt: skip
    """Copy the columns that exist; see `copy_step`."""
    ALL_UNITS: tl.constexpr = STEP // RUN * UNITS  # of a vector
    for i in range(0, BLOCKS * 8 * ALL_UNITS, LANES):
        v, unit = tl.minimum((lane + i) // ALL_UNITS, BLOCKS * 8 - 1), (lane + i) % ALL_UNITS
        row = x + tl.minimum(v0 + v, n - 1).to(tl.int64) * stride_x
        j = column_at(starts, unit // UNITS * RUN + position, log_chunk)
        shift = ((row + j).to(tl.int64, bitcast=True) & (UNIT - 1)).to(tl.int32) // ITEM
        first = j + unit % UNITS * (UNIT // ITEM) - shift
        _store_unit(slot + _unit_of_row(v, unit, ALL_UNITS), row, first, d)


@triton.jit
def _copy_columns(x, slot, starts, position, lane, v0, stride_x, log_chunk, UNITS: tl.constexpr):
    """Start to copy a step's columns of contiguous vectors; see `copy_step`."""
    LANES_EACH: tl.constexpr = triton.next_power_of_2(UNITS)
    u = tl.minimum(lane % LANES_EACH, UNITS - 1)[None, :]
    i = tl.arange(0, STEP * LANES_EACH // LANES)[:, None]
    c = (lane // LANES_EACH)[None, :] + i * (LANES // LANES_EACH)
    column = x + (column_at(starts, c + position, log_chunk).to(tl.int64) * stride_x + v0)
    source = column.to(tl.int64, bitcast=True) + u.to(tl.int64) * UNIT
    copy_async(slot + (c * UNITS + u) * UNIT, source & -UNIT, c * 0 + UNIT, 16)


@triton.jit
def _copy_columns_at_edge(x, slot, starts, position, lane, v0, n, d, stride_x, log_chunk, UNITS: tl.constexpr):
    """Copy the columns that exist; see `copy_step`."""
    for i in range(0, STEP * UNITS, LANES):
        c, u = (lane + i) // UNITS, (lane + i) % UNITS
        j = column_at(starts, c + position, log_chunk)
        column = x + (j.to(tl.int64) * stride_x + v0)
        first = u * (UNIT // ITEM) - (column.to(tl.int64, bitcast=True) & (UNIT - 1)).to(tl.int32) // ITEM
        stop = tl.where((j >= 0) & (j < d), n - v0, 0)
        _store_unit(slot + (lane + i) * UNIT, column, first, stop)


@triton.jit
def copy_step(
    x, slot, starts, position, lane, v0, n, d, stride_x, log_chunk, edge, BLOCKS: tl.constexpr, RUN: tl.constexpr,
    UNITS: tl.constexpr, ALIGN: tl.constexpr, VECTORS_CONTIGUOUS: tl.constexpr,
):  # fmt: skip
    """Start to copy a step's columns, from a position of the batch on, of 8 BLOCKS vectors to a slot.

    edge : whether some of these columns do not exist, or units may extend past the end of the data. Elements are then
    copied one by one, at once, and those that do not exist are zeros. Otherwise units may contain neighbours.
    """
    if VECTORS_CONTIGUOUS:
        if edge:
            _copy_columns_at_edge(x, slot, starts, position, lane, v0, n, d, stride_x, log_chunk, UNITS)
        else:
            _copy_columns(x, slot, starts, position, lane, v0, stride_x, log_chunk, UNITS)
    else:
        if edge:
            _copy_rows_at_edge(x, slot, starts, position, lane, v0, n, d, stride_x, log_chunk, BLOCKS, RUN, UNITS)
        else:
            _copy_rows(x, slot, starts, position, lane, v0, n, stride_x, log_chunk, BLOCKS, RUN, UNITS, ALIGN)


@triton.jit
def shifted(words, shift, COUNT: tl.constexpr, ALIGN: tl.constexpr):
    """COUNT of the words, without the first `shift` bytes, a multiple of ALIGN, modulo UNIT."""
    for bit in tl.static_range(3, 0, -1):
        if 1 << bit >= ALIGN:
            moved = (shift >> bit) & 1 != 0
            after = ()
            if bit > 1:
                for i in tl.static_range(COUNT + (ALIGN == 2) + (bit == 3 and ALIGN <= 4)):
                    after += (tl.where(moved, words[i + (1 << bit) // 4], words[i]),)  # type: ignore[assignment]
            else:
                selector = tl.where(moved, 0x5432, 0x3210)
                for i in tl.static_range(COUNT):
                    after += (permute_bytes(words[i], words[i + 1], selector),)  # type: ignore[assignment]
            words = after
    return words


@triton.jit
def _own_of_row(
    slot, starts, position, row_bits, v, quarter, log_chunk, RUN: tl.constexpr, UNITS: tl.constexpr, ALIGN: tl.constexpr
):
    """A lane's columns of vectors v, two per word; row_bits : the lowest bits of the address of column 0."""
    RUNS: tl.constexpr = STEP // RUN
    PIECE: tl.constexpr = min(RUN, OWN)  # adjacent columns
    LOADS: tl.constexpr = PIECE * ITEM // UNIT + (ALIGN < UNIT)
    result = ()
    for piece in tl.static_range(OWN // PIECE):
        c = quarter * OWN + piece * PIECE
        unit = c // RUN * UNITS + c % RUN * ITEM // UNIT
        words = ()
        for i in tl.static_range(LOADS):
            words += load_words(slot + _unit_of_row(v, unit + i, RUNS * UNITS))
        if ALIGN < UNIT:
            shift = row_bits + column_at(starts, c + position, log_chunk) * ITEM
            words = shifted(words, shift, PIECE * ITEM // 4, ALIGN)
        result += words
    return result


@triton.jit
def _own_of_columns(
    slot, starts, position, first_bits, stride_x, v, quarter, log_chunk, UNITS: tl.constexpr, ALIGN: tl.constexpr
):
    """A lane's columns of vectors v, two per word; first_bits : the lowest bits of the address of column 0."""
    halves = ()
    for i in tl.static_range(OWN):
        c = quarter + 4 * i
        address = slot + c * (UNITS * UNIT) + v * ITEM
        if ALIGN < UNIT:
            j = column_at(starts, c + position, log_chunk)
            address += (first_bits + j * (stride_x.to(tl.int32) * ITEM)) & (UNIT - 1)
        halves += (load_half(address),)  # type: ignore[assignment]
    result = ()
    for i in tl.static_range(OWN // 2):
        result += (permute_bytes(halves[2 * i], halves[2 * i + 1], 0x5410),)  # type: ignore[assignment]
    return result


@triton.jit
def load_operand(
    x, slot, starts, position, lane, v0, n, stride_x, log_chunk, BLOCKS: tl.constexpr, RUN: tl.constexpr,
    UNITS: tl.constexpr, ALIGN: tl.constexpr, VECTORS_CONTIGUOUS: tl.constexpr,
):  # fmt: skip
    """The columns of a step that a lane multiplies, from a slot: 8 words with two columns each, [BLOCKS, lanes].

    Arguments are as in `copy_step`.
    """
    quarter = (lane % 4)[None, :]
    v = (lane // 4)[None, :] + tl.arange(0, BLOCKS)[:, None] * 8
    if VECTORS_CONTIGUOUS:
        bits = (x + v0).to(tl.int64, bitcast=True).to(tl.int32)
        operand = _own_of_columns(slot, starts, position, bits, stride_x, v, quarter, log_chunk, UNITS, ALIGN)
    else:
        bits = (x + tl.minimum(v0 + v, n - 1).to(tl.int64) * stride_x).to(tl.int64, bitcast=True).to(tl.int32)
        operand = _own_of_row(slot, starts, position, bits, v, quarter, log_chunk, RUN, UNITS, ALIGN)
    return operand
