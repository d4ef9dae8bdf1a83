"""Adjoints X = Y S under the exact law that read Y once: components are looked up in shared memory.

A program owns a block of vectors and a part of the columns. It copies the block, all components of it, to shared
memory, one row per component with the vectors side by side. Every column then adds its few rows, with their signs, in
registers. A thread owns 16 bytes of vectors (a quad) and a few adjacent columns; the threads of a quarter of a warp
have different quads, so that rows of 128 bytes are read without bank conflicts. Words from `encode_offsets` say where
the rows are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..portable.column_words import first_quad, row_of_component
from ..portable.program import scalar, store_result, wait_for_previous
from .global_memory import (
    load_four,
    load_long,
    load_two,
    load_two_long,
    load_word_or_less,
    store_four,
    store_two,
)
from .shared_memory import (
    commit_copies,
    copy_async,
    load_number,
    load_vector,
    load_words,
    shared_begin,
    store_number,
    store_vector,
    store_word,
    wait_for_copies,
)
from .staged_gather import word_signs

INTEGERS = ["n", "d", "k", "terms", "columns_per_part", "parts", "spacing", "scale"]


@triton.jit
def _copy_components(
    to, y, c, v, n, k, stride_yr, ROW_BYTES: tl.constexpr, COPY_BYTES: tl.constexpr
):  # fmt: skip
    """Start to copy components c of a block of contiguous vectors; v : every vector at which a copy begins."""
    ITEM: tl.constexpr = y.dtype.element_ty.primitive_bitwidth // 8
    PER: tl.constexpr = COPY_BYTES // ITEM
    c = tl.minimum(c, k - 1)  # the last component may be copied several times
    left = tl.minimum(tl.maximum(n - v, 0), PER) * ITEM
    v = tl.minimum(v, (n - 1) // PER * PER)  # an aligned address even where nothing is copied
    source = y + (c.to(tl.int64) * stride_yr)[:, None] + v[None, :]
    slot = c[:, None] * ROW_BYTES + tl.arange(0, v.shape[0])[None, :] * COPY_BYTES
    copy_async(to + slot, source, c[:, None] * 0 + left[None, :], COPY_BYTES)


@triton.jit
def _load_adjacent(pointers, COUNT: tl.constexpr):
    """COUNT adjacent elements from each pointer on, as a tuple of words; words of 16-bit data have two elements."""
    BITS: tl.constexpr = pointers.dtype.element_ty.primitive_bitwidth
    if COUNT * BITS == 128:
        words = load_two_long(pointers) if BITS == 64 else load_four(pointers)
    elif BITS == 64:
        words = (load_long(pointers),)
    elif COUNT * BITS == 64:
        words = load_two(pointers)
    else:
        words = (load_word_or_less(pointers, COUNT * BITS // 8),)
    return words


@triton.jit
def _interleaved(low, high, COUNT: tl.constexpr):
    """COUNT words of an element of `low` and one of `high`, for words of one or two elements from `_load_adjacent`."""
    words = ()
    for i in tl.static_range(COUNT):
        if i % 2 == 0:
            words += ((low[i // 2] & 0xFFFF) | (high[i // 2] << 16),)  # type: ignore[assignment]
        else:
            words += (((low[i // 2] >> 16) & 0xFFFF) | (high[i // 2] & -65536),)  # type: ignore[assignment]
    return words


@triton.jit
def _load_components(y, c, v, n, k, stride_yv, stride_yr, ADJACENT: tl.constexpr):
    """Components c to c + ADJACENT - 1 of vectors v, as a tuple; in 16 bits, of v and v + 1 in one word.

    In place of components and vectors that do not exist, others are loaded.
    """
    components = y + tl.minimum(c, k - ADJACENT).to(tl.int64) * stride_yr
    loaded = _load_adjacent(components + tl.minimum(v, n - 1).to(tl.int64) * stride_yv, ADJACENT)
    if y.dtype.element_ty.primitive_bitwidth == 16:
        high = _load_adjacent(components + tl.minimum(v + 1, n - 1).to(tl.int64) * stride_yv, ADJACENT)
        loaded = _interleaved(loaded, high, ADJACENT)
    return loaded


@triton.jit
def _store_components(
    begin, loaded, c, v, k, spacing, ROW_BYTES: tl.constexpr, ITEM: tl.constexpr, LOG_ADJACENT: tl.constexpr
):  # fmt: skip
    """Store what `_load_components` returned to the rows of shared memory from address `begin` on.

    v : numbered from the first vector of the block.  Components that do not exist are stored in an additional row after
    the last one.
    """
    QUADS: tl.constexpr = ROW_BYTES // 16
    LOG_ROWS_PER_QUAD: tl.constexpr = 3 if QUADS == 1 else 2 if QUADS == 2 else 1 if QUADS == 4 else 0
    quad = (v * ITEM // 16) ^ first_quad(c, LOG_ADJACENT, LOG_ROWS_PER_QUAD, QUADS - 1)
    in_row = quad * 16 + v * ITEM % 16
    for i in tl.static_range(1 << LOG_ADJACENT):
        row = tl.where(c < k, row_of_component(c + i, LOG_ADJACENT, spacing), spacing << LOG_ADJACENT)
        if ITEM == 8:
            store_number(begin + row * ROW_BYTES + in_row, loaded[i].to(tl.float64, bitcast=True))
        else:
            store_word(begin + row * ROW_BYTES + in_row, loaded[i])


@triton.jit
def _halves(word, DTYPE: tl.constexpr):
    """The two 16-bit numbers of a word in fp32."""
    if DTYPE.is_bf16():
        low = (word << 16).to(tl.float32, bitcast=True)
        high = (word & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        low = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _load_quad(address, DTYPE: tl.constexpr):
    """The numbers of a quad, in fp32 or fp64, as a tuple."""
    if DTYPE.primitive_bitwidth == 16:
        w0, w1, w2, w3 = load_words(address)
        numbers = _halves(w0, DTYPE) + _halves(w1, DTYPE) + _halves(w2, DTYPE) + _halves(w3, DTYPE)
    else:
        numbers = load_vector(address, DTYPE)
    return numbers


@triton.jit
def _add_terms(sums, words, begin, quad, DTYPE: tl.constexpr, COLUMNS: tl.constexpr):
    """sums + one term of each column; sums : a tuple, for each column, of the numbers of a quad."""
    SUM_DTYPE: tl.constexpr = sums[0].dtype
    ELEMENTS: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    added = ()
    for column in tl.static_range(COLUMNS):
        word = words[column]
        numbers = _load_quad(begin + ((word & 0x7FFFFFFF) ^ quad), DTYPE)
        sign = word_signs(word, SUM_DTYPE)
        for i in tl.static_range(ELEMENTS):
            added += (sums[column * ELEMENTS + i] + numbers[i] * sign,)  # type: ignore[assignment]
    return added


@triton.jit
def _load_column_words(pointers, COLUMNS: tl.constexpr):
    """The words of one term of COLUMNS adjacent columns, from each pointer on, as a tuple."""
    words = load_four(pointers)
    if COLUMNS == 8:
        words += load_four(pointers + 4)
    return words


@triton.jit
def _store_run(pointers, sums, first: tl.constexpr, step: tl.constexpr, COUNT: tl.constexpr, scale, keep):
    """Store COUNT of the sums, times scale, as adjacent elements from each pointer on: one access of 8 or 16 bytes.

    The first of them is number `first`; then, every number after `step`.
    """
    DTYPE: tl.constexpr = pointers.dtype.element_ty
    words = ()
    if DTYPE.primitive_bitwidth == 16:
        for i in tl.static_range(0, COUNT, 2):
            low = (sums[first + i * step] * scale).to(DTYPE).to(tl.uint16, bitcast=True).to(tl.uint32)
            high = (sums[first + (i + 1) * step] * scale).to(DTYPE).to(tl.uint16, bitcast=True).to(tl.uint32)
            words += ((low | (high << 16)).to(tl.int32, bitcast=True),)  # type: ignore[assignment]
    else:
        WORD: tl.constexpr = tl.int64 if DTYPE.primitive_bitwidth == 64 else tl.int32
        for i in tl.static_range(COUNT):
            words += ((sums[first + i * step] * scale).to(WORD, bitcast=True),)  # type: ignore[assignment]
    if COUNT * DTYPE.primitive_bitwidth == 128 and DTYPE.primitive_bitwidth < 64:
        store_four(pointers, words, keep)
    else:
        store_two(pointers, words, keep)


@triton.jit
def _store_aligned(
    x, sums, v, j, n, d, stride_xv, stride_xf, scale, COLUMNS: tl.constexpr, ELEMENTS: tl.constexpr,
    VECTORS_CONTIGUOUS: tl.constexpr,
):  # fmt: skip
    """Store the sums of every thread, for a quad from vector v on and COLUMNS columns from j on, in wide accesses."""
    if VECTORS_CONTIGUOUS:
        for c in tl.static_range(COLUMNS):
            pointers = x + (j + c).to(tl.int64) * stride_xf + v
            _store_run(pointers, sums, c * ELEMENTS, 1, ELEMENTS, scale, (j + c < d) & (v < n))
    else:
        RUN: tl.constexpr = min(COLUMNS, ELEMENTS)
        for i in tl.static_range(ELEMENTS):
            row = x + (v + i).to(tl.int64) * stride_xv
            for c in tl.static_range(0, COLUMNS, RUN):
                keep = (j + c < d) & (v + i < n)
                _store_run(row + (j + c), sums, c * ELEMENTS + i, ELEMENTS, RUN, scale, keep)


@triton.jit
def _stage(at, sums, first, step, PER: tl.constexpr):
    """Store PER of the sums, from `first` on, side by side at the addresses `at`."""
    if PER == 2:
        store_vector(at, (sums[first], sums[first + step]))
    else:
        store_vector(at, (sums[first], sums[first + step], sums[first + 2 * step], sums[first + 3 * step]))


@triton.jit
def _stage_all(
    sums, begin, group, quad, VECTORS: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr, ELEMENTS: tl.constexpr,
    VECTORS_CONTIGUOUS: tl.constexpr,
):  # fmt: skip
    """Store all sums to shared memory at address `begin`: one row per column if VECTORS_CONTIGUOUS, else per vector.

    group, quad : of each thread, [G, Q].
    """
    ITEM: tl.constexpr = sums[0].dtype.primitive_bitwidth // 8
    PER: tl.constexpr = 16 // ITEM
    SPREAD: tl.constexpr = 8 * ELEMENTS // VECTORS  # of quads, whose rows would otherwise be in the same banks
    if VECTORS_CONTIGUOUS:
        for c in tl.static_range(COLUMNS):
            for i in tl.static_range(0, ELEMENTS, PER):
                at = begin + ((group * COLUMNS + c) * VECTORS + quad * ELEMENTS + i) * ITEM
                _stage(at, sums, c * ELEMENTS + i, 1, PER)
    else:
        for i in tl.static_range(ELEMENTS):
            for c in tl.static_range(0, COLUMNS, PER):
                slot = (group * (COLUMNS // PER) + c // PER) ^ (quad * SPREAD)
                at = begin + (quad * ELEMENTS + i) * (STEP * ITEM) + slot * 16
                _stage(at, sums, c * ELEMENTS + i, ELEMENTS, PER)


@triton.jit
def _store_staged(
    x, begin, v0, j0, n, d, stride_xv, stride_xf, scale, DTYPE: tl.constexpr, VECTORS: tl.constexpr,
    STEP: tl.constexpr, PIECES: tl.constexpr, ELEMENTS: tl.constexpr, VECTORS_CONTIGUOUS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Store the sums of `_stage_all`, in PIECES parts, so that a warp stores 32 adjacent elements."""
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    PER: tl.constexpr = 16 // ITEM
    SPREAD: tl.constexpr = 8 * ELEMENTS // VECTORS
    for piece in range(PIECES):
        if VECTORS_CONTIGUOUS:
            v = tl.arange(0, VECTORS)[None, :]
            j = piece * (STEP // PIECES) + tl.arange(0, STEP // PIECES)[:, None]
            at = begin + (j * VECTORS + v) * ITEM
        else:
            v = piece * (VECTORS // PIECES) + tl.arange(0, VECTORS // PIECES)[:, None]
            j = tl.arange(0, STEP)[None, :]
            at = begin + v * (STEP * ITEM) + ((j // PER) ^ (v // ELEMENTS * SPREAD)) * 16 + j % PER * ITEM
        values = load_number(at, DTYPE) * scale
        pointers = x + (v0 + v).to(tl.int64) * stride_xv + (j0 + j).to(tl.int64) * stride_xf
        store_result(values, pointers, (v0 + v < n) & (j0 + j < d), ACCUMULATE)


@triton.jit(do_not_specialize=INTEGERS)
def adjoint_staged(
    y,
    x,
    words,
    n,
    d,
    k,
    stride_yv,
    stride_yr,
    stride_xv,
    stride_xf,
    terms,
    columns_per_part,
    parts,
    spacing,
    scale: tl.float64,
    ROW_BYTES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLICES: tl.constexpr,
    COPY_BYTES: tl.constexpr,
    READS_VECTORS: tl.constexpr,
    LOG_ADJACENT: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTORS_CONTIGUOUS: tl.constexpr,
    STAGED_BYTES: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    THREADS: tl.constexpr,
    PROGRAMMATIC_LAUNCH: tl.constexpr,
    SHARED_BYTES: tl.constexpr,
):
    """x[v, j] = scale * sum over the entries of column j of sign * y[v, row], or add it with ACCUMULATE.

    Grid: (parts * blocks of vectors,).

    words : from `encode_offsets`, and two steps of padding.  k : of all stacks.  terms : entries of a column.
    ROW_BYTES : of the vectors of a program.  COLUMNS : adjacent columns of a thread.  COPY_BYTES : bytes of
    contiguous vectors that one copy covers, for SLICES components in a step; 0 if Y is copied through registers, in
    SLICES times WIDTH reads of 2^LOG_ADJACENT adjacent components.  READS_VECTORS : whether neighbouring threads then
    read neighbouring vectors, not components.  VECTORS_CONTIGUOUS : of X; otherwise its rows are contiguous.
    STAGED_BYTES : of shared memory in which threads exchange their sums; 0 if each can store its own.
    """
    DTYPE: tl.constexpr = y.dtype.element_ty
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    ELEMENTS: tl.constexpr = 16 // ITEM
    VECTORS: tl.constexpr = ROW_BYTES // ITEM
    WORDS: tl.constexpr = ROW_BYTES // max(ITEM, 4)
    QUADS: tl.constexpr = ROW_BYTES // 16
    GROUPS: tl.constexpr = THREADS // QUADS
    STEP: tl.constexpr = GROUPS * COLUMNS
    part, v0 = tl.program_id(0) % parts, tl.program_id(0) // parts * VECTORS
    begin = (shared_begin(SHARED_BYTES) & -16) + STAGED_BYTES
    if COPY_BYTES > 0:
        c, v = tl.arange(0, SLICES), v0 + tl.arange(0, ROW_BYTES // COPY_BYTES) * (COPY_BYTES // ITEM)
        for c0 in range(0, k, SLICES):
            _copy_components(begin, y, c0 + c, v, n, k, stride_yr, ROW_BYTES, COPY_BYTES)
        commit_copies(k)
    else:
        # Neighbouring threads read adjacent elements.
        ADJACENT: tl.constexpr = 1 << LOG_ADJACENT
        if READS_VECTORS:
            c, w = tl.arange(0, WIDTH)[None, :, None], tl.arange(0, WORDS)[None, None, :]
        else:
            c, w = tl.arange(0, WIDTH)[None, None, :], tl.arange(0, WORDS)[None, :, None]
        c = (tl.arange(0, SLICES)[:, None, None] * WIDTH + c) * ADJACENT + w * 0
        w = w * (VECTORS // WORDS) + c * 0
        ahead = _load_components(y, c, v0 + w, n, k, stride_yv, stride_yr, ADJACENT)
        for c0 in range(0, k, SLICES * WIDTH * ADJACENT):
            loaded = ahead
            c_ahead = c0 + SLICES * WIDTH * ADJACENT + c
            ahead = _load_components(y, c_ahead, v0 + w, n, k, stride_yv, stride_yr, ADJACENT)
            _store_components(begin, loaded, c0 + c, w, k, spacing, ROW_BYTES, ITEM, LOG_ADJACENT)

    first = part * columns_per_part
    end = tl.minimum(first + columns_per_part, d)
    group = tl.arange(0, GROUPS) * COLUMNS
    place = group[:, None] + tl.zeros((1, QUADS), tl.int32)
    quad = tl.zeros((GROUPS, 1), tl.int32) + tl.arange(0, QUADS)[None, :] * 16
    wait_for_previous(PROGRAMMATIC_LAUNCH)  # which writes the words; the data was there before it started
    # Words are loaded two terms ahead, also beyond the last one.
    pointers = words + first.to(tl.int64) * terms + place
    current = _load_column_words(pointers, COLUMNS)
    pointers += STEP
    following = _load_column_words(pointers, COLUMNS)
    wait_for_copies(k, 0)
    tl.debug_barrier()  # all threads have copied their part
    SUM_DTYPE: tl.constexpr = tl.float64 if ITEM == 8 else tl.float32
    scale = scalar(scale, SUM_DTYPE)
    for j0 in range(first, end, STEP):
        sums = ()
        for _ in tl.static_range(COLUMNS * ELEMENTS):
            sums += (tl.zeros((GROUPS, QUADS), SUM_DTYPE),)  # type: ignore[assignment]
        for _ in range(terms):
            pointers += STEP
            after = _load_column_words(pointers, COLUMNS)
            sums = _add_terms(sums, current, begin, quad, DTYPE, COLUMNS)
            current, following = following, after
        if STAGED_BYTES > 0:
            # Threads exchange their sums. A thread then stores 8 numbers at a time, for want of registers.
            staged = begin - STAGED_BYTES
            tl.debug_barrier()  # all threads have stored the results of the previous step
            _stage_all(sums, staged, place // COLUMNS, quad // 16, VECTORS, STEP, COLUMNS, ELEMENTS, VECTORS_CONTIGUOUS)
            tl.debug_barrier()
            _store_staged(
                x, staged, v0, j0, n, d, stride_xv, stride_xf, scale, SUM_DTYPE, VECTORS, STEP,
                COLUMNS * ELEMENTS // 8, ELEMENTS, VECTORS_CONTIGUOUS, ACCUMULATE,
            )  # fmt: skip
        else:
            _store_aligned(
                x, sums, v0 + quad // ITEM, j0 + place, n, d, stride_xv, stride_xf, scale, COLUMNS, ELEMENTS,
                VECTORS_CONTIGUOUS,
            )  # fmt: skip
