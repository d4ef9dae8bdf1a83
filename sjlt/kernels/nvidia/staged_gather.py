"""Projections under the exact law in fp32 and fp64 that read the data once, whatever the number of stacks.

A program owns a block of vectors and the rows of several tiles, up to those of all stacks, and keeps their sums in
registers. It copies one group of chunks after the other to shared memory, up to two groups ahead, where each row reads
the one column of the group in which it has an entry. On tensor cores, the entries of T stacks would take T times as
long.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...laws import exact as law
from ..portable.chunk_codes import tile_start
from ..portable.program import scalar
from .shared_memory import (
    commit_copies,
    copy_async,
    load_vector,
    load_word,
    shared_begin,
    store_number,
    wait_for_copies,
)

TILE = tl.constexpr(law.TILE_ROWS)
INTEGERS = ["k", "n_tiles", "lists", "first_column", "groups", "groups_per_split", "first_split", "parts", "scale"]


@triton.jit
def _load_group(x, column, v, n, d, stride_xv):
    """Columns [.., 32] of vectors v, as [.., 32, vectors]: rows of X are read 32 consecutive elements at a time."""
    inside = ((column >= 0) & (column < d))[:, :, None] & (v < n)[None, None, :]
    return tl.load(x + (v.to(tl.int64) * stride_xv)[None, None, :] + column[:, :, None], mask=inside, other=0.0)


@triton.jit
def _copy_group(to, x, column, v, n, d, stride_xf, count, ROW_BYTES: tl.constexpr, COPY_BYTES: tl.constexpr):
    """Start to copy a group's columns [COLUMNS] of a block of vectors to shared memory, at address `to`.

    v : every PER-th vector of the block; one copy covers PER vectors.  count : the number of groups left; if it is not
    positive, zeros are copied.
    """
    ITEM: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    PER: tl.constexpr = COPY_BYTES // ITEM
    inside = (column >= 0) & (column < d) & (count > 0)
    column = tl.minimum(tl.maximum(column, 0), d - 1)
    left = tl.minimum(tl.maximum(n - v, 0), PER) * ITEM
    v = tl.minimum(v, (n - 1) // PER * PER)  # an aligned address even where nothing is copied
    source = x + (column.to(tl.int64) * stride_xf)[:, None] + v[None, :]
    slot = tl.arange(0, column.shape[0])[:, None] * ROW_BYTES + tl.arange(0, v.shape[0])[None, :] * COPY_BYTES
    copy_async(to + slot, source, tl.where(inside, 1, 0)[:, None] * left[None, :], COPY_BYTES)


@triton.jit
def _copy_words(to, words, step, rows, ROWS: tl.constexpr):
    """Start to copy the words of a program's rows for a step to shared memory, at address `to`."""
    quads = tl.arange(0, ROWS // 4) * 4
    copy_async(to + quads * 4, words + step.to(tl.int64) * rows + quads, quads * 0 + 16, 16)


@triton.jit
def word_signs(words, DTYPE: tl.constexpr):
    """The signs in bit 31 of the words: 1, or -1 where the bit is set."""
    if DTYPE.primitive_bitwidth == 64:
        signs = (((words & -2147483648).to(tl.int64) << 32) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    else:
        signs = ((words & -2147483648) | 0x3F800000).to(tl.float32, bitcast=True)
    return signs


@triton.jit
def _zeros(ROWS: tl.constexpr, QUADS: tl.constexpr, DTYPE: tl.constexpr):
    """Zero sums for what `load_vector` returns: a tuple of 2 or 4 tensors [ROWS, QUADS]."""
    zeros = tl.zeros((ROWS, QUADS), DTYPE)
    return (zeros, zeros) if DTYPE.primitive_bitwidth == 64 else (zeros, zeros, zeros, zeros)


@triton.jit
def _add(sums, vectors, signs):
    """sums + vectors * signs, for the tuples of `_zeros` and `load_vector`."""
    if signs.dtype == tl.float64:
        sums = (sums[0] + vectors[0] * signs, sums[1] + vectors[1] * signs)
    else:
        sums = (
            sums[0] + vectors[0] * signs,
            sums[1] + vectors[1] * signs,
            sums[2] + vectors[2] * signs,
            sums[3] + vectors[3] * signs,
        )
    return sums


@triton.jit
def _side_by_side(sums):
    """The tuple of sums in one tensor: [ROWS, QUADS, 2], or [ROWS, QUADS, 2, 2] in fp32."""
    if sums[0].dtype == tl.float64:
        joined = tl.join(sums[0], sums[1])
    else:
        joined = tl.join(tl.join(sums[0], sums[2]), tl.join(sums[1], sums[3]))
    return joined


@triton.jit
def _rows_of_result(r, k, n_tiles, lists):
    """The row of the result for row r of all tiles, counting 128 rows for each tile; -1 if there is none."""
    tile = tl.minimum(r // TILE, lists - 1)
    stack, m = tile // n_tiles, tile % n_tiles
    row = tile_start(m, k, n_tiles).to(tl.int32) + r % TILE
    inside = (r // TILE < lists) & (row < tile_start(m + 1, k, n_tiles).to(tl.int32))
    return tl.where(inside, stack * k + row, -1)


@triton.jit(do_not_specialize=INTEGERS)
def project_staged(
    x,
    target,
    words,
    n,
    d,
    k,
    n_tiles,
    lists,
    rows,
    stride_xv,
    stride_xf,
    stride_os,
    stride_ov,
    stride_or,
    first_column,
    groups,
    groups_per_split,
    first_split,
    parts,
    scale: tl.float64,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    VECTORS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    COPY_BYTES: tl.constexpr,
    VECTORS_CONTIGUOUS: tl.constexpr,
    SHARED_BYTES: tl.constexpr,
):
    """target[split, v, r] = scale * sum over the split's columns j of x[v, j] S[r, j].

    Grid: (parts * blocks of VECTORS vectors, splits from first_split on).

    words : from `encode_groups`, for `groups` groups of COLUMNS columns each; the first group begins at column
    first_column of the data.  k, n_tiles : of one stack.  lists : tiles of all stacks.  rows : 128 for each tile of all
    stacks and padding, in `parts` parts of ROWS.  COPY_BYTES : bytes that one access to the data
    covers, 4, 8 or 16.
    """
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    VECTOR: tl.constexpr = 16 // ITEM
    QUADS: tl.constexpr = VECTORS // VECTOR
    ROW_BYTES: tl.constexpr = VECTORS * ITEM
    DATA_BYTES: tl.constexpr = (COLUMNS + 1) * ROW_BYTES  # including a column of zeros, for rows without an entry
    STAGE: tl.constexpr = DATA_BYTES + 4 * ROWS
    PER: tl.constexpr = COPY_BYTES // ITEM
    part, v0 = tl.program_id(0) % parts, tl.program_id(0) // parts * VECTORS
    first_group = tl.program_id(1) * groups_per_split
    steps = tl.minimum(groups - first_group, groups_per_split)
    column0 = first_column + first_group * COLUMNS
    if not VECTORS_CONTIGUOUS:
        column0 = column0 // PER * PER  # a no-op that tells the compiler that PER elements can be read at once
    words += first_group.to(tl.int64) * rows + part * ROWS
    begin = shared_begin(SHARED_BYTES) & -16
    for s in tl.static_range(STAGES):
        zeros = begin + s * STAGE + COLUMNS * ROW_BYTES + tl.arange(0, VECTORS) * ITEM
        store_number(zeros, tl.zeros((VECTORS,), DTYPE))
    if VECTORS_CONTIGUOUS:
        column = column0 + tl.arange(0, COLUMNS)
        v = v0 + tl.arange(0, VECTORS // PER) * PER
        for s in tl.static_range(STAGES - 1):
            to = begin + s * STAGE  # the address of the stage
            _copy_group(to, x, column + s * COLUMNS, v, n, d, stride_xf, steps - s, ROW_BYTES, COPY_BYTES)
            _copy_words(to + DATA_BYTES, words, tl.minimum(s, steps - 1), rows, ROWS)
            commit_copies(steps)
    else:
        column = column0 + tl.arange(0, COLUMNS // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
        v, w, c = v0 + tl.arange(0, VECTORS), tl.arange(0, VECTORS), column - column0
        swizzled = (w // VECTOR)[None, None, :] ^ ((c >> 2) & (QUADS - 1))[:, :, None]  # avoids bank conflicts
        slot = c[:, :, None] * ROW_BYTES + swizzled * 16 + (w % VECTOR)[None, None, :] * ITEM
        store_number(begin + slot, _load_group(x, column, v, n, d, stride_xv))
        _copy_words(begin + DATA_BYTES, words, steps * 0, rows, ROWS)
        commit_copies(steps)
        ahead = _load_group(x, column + COLUMNS, v, n, d, stride_xv)

    word_at = begin + DATA_BYTES + tl.arange(0, ROWS)[:, None] * 4 + tl.zeros((1, QUADS), tl.int32)
    quad = tl.arange(0, QUADS)[None, :] * 16
    sums = _zeros(ROWS, QUADS, DTYPE)
    for i in range(steps):
        wait_for_copies(i, STAGES - 2)
        tl.debug_barrier()  # all threads have copied this group and read the previous one
        step = i + STAGES - 1
        to = begin + step % STAGES * STAGE
        if VECTORS_CONTIGUOUS:
            _copy_group(to, x, column + step * COLUMNS, v, n, d, stride_xf, steps - step, ROW_BYTES, COPY_BYTES)
        else:
            store_number(to + slot, ahead)
            ahead = _load_group(x, column + (step + 1) * COLUMNS, v, n, d, stride_xv)
        _copy_words(to + DATA_BYTES, words, tl.minimum(step, steps - 1), rows, ROWS)
        commit_copies(i)
        stage = i % STAGES * STAGE
        word = load_word(word_at + stage)
        offset = word & 0x7FFFFFFF
        if VECTORS_CONTIGUOUS:
            address = begin + stage + offset + quad
        else:
            address = begin + stage + offset + (quad ^ ((offset // ROW_BYTES >> 2) & (QUADS - 1)) * 16)
        sums = _add(sums, load_vector(address, DTYPE), word_signs(word, DTYPE))
    wait_for_copies(steps, 0)

    total = tl.reshape(_side_by_side(sums), ROWS, VECTORS) * scalar(scale, DTYPE)
    v = v0 + tl.arange(0, VECTORS)
    row = _rows_of_result(part * ROWS + tl.arange(0, ROWS), k, n_tiles, lists)
    target += (first_split + tl.program_id(1)).to(tl.int64) * stride_os
    pointers = target + (row.to(tl.int64) * stride_or)[:, None] + (v.to(tl.int64) * stride_ov)[None, :]
    tl.store(pointers, total, mask=(row >= 0)[:, None] & (v < n)[None, :])
