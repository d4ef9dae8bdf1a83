"""Dropout without a stored mask: each element is read, kept or dropped by the law (`sjlt.laws.dropout`), and written.

Two kernels share their body. `dropout_flat` processes memory in the order of the law's indices. `dropout_tiles`
processes four axes of any strides: tiles of rows and columns, either of which may be contiguous in memory, and two
outer axes. The law's index increases by 1 along columns. Philox runs once for each group of LANES = 128 / BITS elements
in consecutive columns, in a tensor of groups that joins expand to elements. The thread that computes a group therefore
holds its lanes in registers; where the order in memory requires it, the compiler exchanges the decisions, one byte
each, between threads.

MODE, here and in the backend, selects the operation:

- DROP: out = x * scale where kept, else 0.
- ADD: out = other + the value of DROP, with the product and the sum rounded separately.
- STORED: like DROP, but an element is kept where `other`, bytes, is not 0.
- MASK: out = 1 where kept, else 0, bytes; x is not read.

`seed` and `step` are integers or, with SEEDS and STEPS, read from memory. Arguments that change between calls of one
shape are not specialized, so one compiled kernel serves all calls (a second one serves offsets that begin within a call
of Philox).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..philox import dropout_words, flat_groups, lanes_at_top
from .law import pair
from .program import known_multiple, scalar

DROP, ADD, STORED, MASK = (tl.constexpr(mode) for mode in range(4))


@triton.jit
def _words_of_calls(seed, index, step, CALLS: tl.constexpr):
    """The words of CALLS calls of Philox from each index on, [..., G] -> [..., G CALLS]; threads hold whole groups."""
    w0, w1, w2, w3 = dropout_words(seed, index, step)
    if CALLS == 2:
        v0, v1, v2, v3 = dropout_words(seed, index + 1, step)
        w0, w1 = flat_groups(tl.join(w0, v0), w0, 2), flat_groups(tl.join(w1, v1), w1, 2)
        w2, w3 = flat_groups(tl.join(w2, v2), w2, 2), flat_groups(tl.join(w3, v3), w3, 2)
    return w0, w1, w2, w3


@triton.jit
def _straddling_words(seed, e, step, BITS: tl.constexpr, LOG_LANES: tl.constexpr):
    """The lanes of 128 / BITS elements from e on, in four words: 128 bits of two calls' 256, from bit `shift` on."""
    w0, w1, w2, w3 = dropout_words(seed, e >> LOG_LANES, step)
    w4, w5, w6, w7 = dropout_words(seed, (e >> LOG_LANES) + 1, step)
    shift = (e & ((1 << LOG_LANES) - 1)).to(tl.uint32) * BITS
    far = (shift & 64) != 0
    w0, w1, w2 = tl.where(far, w2, w0), tl.where(far, w3, w1), tl.where(far, w4, w2)
    w3, w4, w5 = tl.where(far, w5, w3), tl.where(far, w6, w4), tl.where(far, w7, w5)
    odd = (shift & 32) != 0
    w0, w1, w2 = tl.where(odd, w1, w0), tl.where(odd, w2, w1), tl.where(odd, w3, w2)
    w3, w4 = tl.where(odd, w4, w3), tl.where(odd, w5, w4)
    if BITS < 32:
        shift = (shift & 31).to(tl.uint64)
        w0, w1 = (pair(w0, w1) >> shift).to(tl.uint32), (pair(w1, w2) >> shift).to(tl.uint32)
        w2, w3 = (pair(w2, w3) >> shift).to(tl.uint32), (pair(w3, w4) >> shift).to(tl.uint32)
    return w0, w1, w2, w3


@triton.jit
def _keep(seed, e, step, threshold, BITS: tl.constexpr, CALLS: tl.constexpr):
    """Whether each element is kept, for groups of elements that begin at indices e [..., G]: [..., G * group].

    CALLS : calls of Philox per group, which then has LANES * CALLS elements, or 0 for groups of LANES elements that may
    begin anywhere.
    """
    LOG_LANES: tl.constexpr = 2 if BITS == 32 else (3 if BITS == 16 else 4)
    if CALLS == 0:
        w0, w1, w2, w3 = _straddling_words(seed, e, step, BITS, LOG_LANES)
    else:
        w0, w1, w2, w3 = _words_of_calls(seed, e >> LOG_LANES, step, CALLS)
    return lanes_at_top(w0, w1, w2, w3, BITS) >= (tl.cast(threshold, tl.uint32) << (32 - BITS))


@triton.jit
def _load(pointers, live, MASKED: tl.constexpr):
    return tl.load(pointers, mask=live, other=0) if MASKED else tl.load(pointers)


@triton.jit
def _write(
    x, other, out, live, seed, e, step, threshold, scale,
    MODE: tl.constexpr, BITS: tl.constexpr, CALLS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Process the elements at the pointers x, other and out; if MASKED, only where `live`.

    e : the index of the first element of each group.
    """
    COMPUTE: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    if MODE == MASK:
        value = _keep(seed, e, step, threshold, BITS, CALLS)
    else:
        value = _load(x, live, MASKED).to(COMPUTE)
        if MODE == STORED:
            keep = _load(other, live, MASKED) != 0
        else:
            if MODE == ADD:
                addend = _load(other, live, MASKED).to(COMPUTE)
            keep = _keep(seed, e, step, threshold, BITS, CALLS)
        value = tl.where(keep, value * scalar(scale, COMPUTE), 0.0)
        if MODE == ADD:
            value += addend
    value = value.to(out.dtype.element_ty)
    if MASKED:
        tl.store(out, value, mask=live)
    else:
        tl.store(out, value)


_CHANGING = ["seed", "step", "threshold", "scale", "offset"]


@triton.jit(do_not_specialize=[*_CHANGING, "n"])
def dropout_flat(
    x, other, out, seeds, steps, seed: tl.int64, step: tl.int64, threshold: tl.int64, scale: tl.float64,
    offset: tl.int64, n: tl.int64, MODE: tl.constexpr, BITS: tl.constexpr, CALLS: tl.constexpr, STEPS: tl.constexpr,
    SEEDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Process n elements, contiguous in every tensor, with indices from `offset` on; grid (blocks of BLOCK,)."""
    GROUP: tl.constexpr = 128 // BITS * (CALLS if CALLS else 1)
    if STEPS:
        step = tl.load(steps).to(tl.int64)
    if SEEDS:
        seed = tl.load(seeds)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    e = offset + start + tl.arange(0, BLOCK // GROUP) * GROUP
    x, other, out = x + start + i, other + start + i, out + start + i
    live = i < n - start
    if start + BLOCK <= n:  # unmasked: masked accesses are element by element unless 16 divides n
        _write(x, other, out, live, seed, e, step, threshold, scale, MODE, BITS, CALLS, False)
    else:
        _write(x, other, out, live, seed, e, step, threshold, scale, MODE, BITS, CALLS, True)


@triton.jit
def _place(
    rows, columns, outer, ROWS_CONTIGUOUS: tl.constexpr, SHAPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """This program's indices: of its tile along rows and along columns, and along the axes outer and far.

    Tiles along the axis contiguous in memory vary fastest.  SHAPE : 0 if there is one tile along the contiguous axis
    and no outer axes, 1 if there are no outer axes, 2 otherwise; 0 and 1 save divisions.
    """
    tile = tl.program_id(0)
    outer_index, far = (tile * 0).to(tl.int64), (tile * 0).to(tl.int64)
    if SHAPE == 0:
        row, column = (tile * 0, tile) if ROWS_CONTIGUOUS else (tile, tile * 0)
    else:
        row_tiles, column_tiles = (rows - 1) // ROWS + 1, (columns - 1) // COLUMNS + 1  # tl.cdiv may overflow
        if SHAPE == 2:
            rest = tile // (row_tiles * column_tiles)
            tile = tile % (row_tiles * column_tiles)
            outer_index, far = (rest % outer).to(tl.int64), (rest // outer).to(tl.int64)
        if ROWS_CONTIGUOUS:
            row, column = tile % row_tiles, tile // row_tiles
        else:
            row, column = tile // column_tiles, tile % column_tiles
    return row, column, outer_index, far


@triton.jit(do_not_specialize=[*_CHANGING, "e_row", "e_outer", "e_far"])
def dropout_tiles(
    x, other, out, seeds, steps, seed: tl.int64, step: tl.int64, threshold: tl.int64, scale: tl.float64,
    offset: tl.int64, rows, columns, outer, e_row: tl.int64, e_outer: tl.int64, e_far: tl.int64,
    s_row, s_outer, s_far, x_row, x_column, x_outer, x_far, other_row, other_column, other_outer, other_far,
    out_row, out_column, out_outer, out_far,
    MODE: tl.constexpr, BITS: tl.constexpr, CALLS: tl.constexpr, STEPS: tl.constexpr, SEEDS: tl.constexpr,
    ROWS_CONTIGUOUS: tl.constexpr, SHAPE: tl.constexpr, UNMASKED: tl.constexpr, ALIGN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Process elements (far, outer, row, column), with strides in x, other and out, in the law's index (e_) and in
    seeds (s_).

    A program processes a tile of ROWS x COLUMNS.  ROWS_CONTIGUOUS : consecutive rows, not columns, are neighbours in
    memory.  UNMASKED : all tiles are full.  ALIGN : a power of two that divides the length of the contiguous axis and
    all strides except those along it.
    """
    GROUP: tl.constexpr = 128 // BITS * (CALLS if CALLS else 1)
    if STEPS:
        step = tl.load(steps).to(tl.int64)
    x_outer, x_far = known_multiple(x_outer, ALIGN), known_multiple(x_far, ALIGN)
    other_outer, other_far = known_multiple(other_outer, ALIGN), known_multiple(other_far, ALIGN)
    out_outer, out_far = known_multiple(out_outer, ALIGN), known_multiple(out_far, ALIGN)
    if ROWS_CONTIGUOUS:
        x_column, other_column = known_multiple(x_column, ALIGN), known_multiple(other_column, ALIGN)
        out_column, rows = known_multiple(out_column, ALIGN), known_multiple(rows, ALIGN)
    else:
        x_row, other_row = known_multiple(x_row, ALIGN), known_multiple(other_row, ALIGN)
        out_row, columns = known_multiple(out_row, ALIGN), known_multiple(columns, ALIGN)
    row, column, outer_index, far = _place(rows, columns, outer, ROWS_CONTIGUOUS, SHAPE, ROWS, COLUMNS)
    row = row.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = column.to(tl.int64) * COLUMNS
    column = start + tl.arange(0, COLUMNS)
    live = (row < rows)[:, None] & (column < columns)[None, :]
    if SEEDS:
        seed = tl.load(seeds + far * s_far + outer_index * s_outer + row * s_row, mask=row < rows, other=0)[:, None]
    e = (offset + far * e_far + outer_index * e_outer + start + row * e_row)[:, None]
    e += (tl.arange(0, COLUMNS // GROUP) * GROUP)[None, :]
    x += far * x_far + outer_index * x_outer
    other += far * other_far + outer_index * other_outer
    out += far * out_far + outer_index * out_outer
    x = x + (row * x_row)[:, None] + (column * x_column)[None, :]
    other = other + (row * other_row)[:, None] + (column * other_column)[None, :]
    out = out + (row * out_row)[:, None] + (column * out_column)[None, :]
    _write(x, other, out, live, seed, e, step, threshold, scale, MODE, BITS, CALLS, not UNMASKED)
