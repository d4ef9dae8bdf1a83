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
from ..portable.program import known_multiple, store_result
from .shared_memory import (
    commit_copies,
    copy_async,
    load_four,
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
def _load_components(y, c, v, n, k, stride_yv, stride_yr, ALIGN: tl.constexpr):
    """Components c [.., C] of vectors v: [.., C, vectors]; in 16 bits, of v and v + 1 in one word."""
    if ALIGN > 1:
        c = tl.max_contiguous(tl.multiple_of(c, (1, ALIGN)), (1, ALIGN))
    pointers = y + (v.to(tl.int64) * stride_yv)[None, None, :] + (c.to(tl.int64) * stride_yr)[:, :, None]
    inside = (c < k)[:, :, None] & (v < n)[None, None, :]
    if y.dtype.element_ty.primitive_bitwidth == 16:
        low = tl.load(pointers, mask=inside, other=0.0).to(tl.uint16, bitcast=True).to(tl.uint32)
        inside = (c < k)[:, :, None] & (v + 1 < n)[None, None, :]
        high = tl.load(pointers + stride_yv, mask=inside, other=0.0).to(tl.uint16, bitcast=True).to(tl.uint32)
        loaded = (low | (high << 16)).to(tl.int32, bitcast=True)
    else:
        loaded = tl.load(pointers, mask=inside, other=0.0)
    return loaded


@triton.jit
def _slots(c, k, spacing, VECTORS: tl.constexpr, ROW_BYTES: tl.constexpr, LOG_ADJACENT: tl.constexpr):
    """The offsets in shared memory of what `_load_components` loads for components c and all vectors.

    Components that do not exist are stored in an additional row after the last one.
    """
    QUADS: tl.constexpr = ROW_BYTES // 16
    BYTES: tl.constexpr = ROW_BYTES // VECTORS
    row = tl.where(c < k, row_of_component(c, LOG_ADJACENT, spacing), spacing << LOG_ADJACENT)
    swizzle = first_quad(c, LOG_ADJACENT, _log_rows_per_quad(QUADS), QUADS - 1)
    byte = tl.arange(0, VECTORS) * BYTES
    quad = (byte // 16)[None, None, :] ^ swizzle[:, :, None]
    return row[:, :, None] * ROW_BYTES + quad * 16 + (byte % 16)[None, None, :]


@triton.constexpr_function
def _log_rows_per_quad(quads):
    """log2 of the number of rows in 128 bytes."""
    return (8 // quads).bit_length() - 1


@triton.jit
def _store_components(address, loaded):
    if loaded.dtype == tl.int32:
        store_word(address, loaded)
    else:
        store_number(address, loaded)


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
def _side_by_side(tensors):
    """2, 4 or 8 tensors [G, Q] as one, along a new last axis."""
    N: tl.constexpr = len(tensors)
    if N == 2:
        joined = tl.join(tensors[0], tensors[1])
    elif N == 4:
        joined = tl.join(tl.join(tensors[0], tensors[2]), tl.join(tensors[1], tensors[3]))
    else:
        even = tl.join(tl.join(tensors[0], tensors[4]), tl.join(tensors[2], tensors[6]))
        odd = tl.join(tl.join(tensors[1], tensors[5]), tl.join(tensors[3], tensors[7]))
        joined = tl.join(even, odd)
    return tl.reshape(joined, tensors[0].shape[0], tensors[0].shape[1], N)


@triton.jit
def _selected(sums, first: tl.constexpr, step: tl.constexpr, COUNT: tl.constexpr):
    """COUNT of the sums, from `first` on, as one tensor [G, Q, COUNT]."""
    numbers = ()
    for i in tl.static_range(COUNT):
        numbers += (sums[first + i * step],)  # type: ignore[assignment]
    return _side_by_side(numbers)


@triton.jit
def _store_quads(
    x, sums, first, column, n, d, stride_xv, stride_xf, scale, COLUMNS: tl.constexpr, ELEMENTS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Store contiguous vectors column by column.

    first [Q] : the first vectors of quads.  column [G] : the first columns of groups.
    """
    v = first[:, None] + tl.arange(0, ELEMENTS)[None, :]
    v = tl.max_contiguous(tl.multiple_of(v, (1, ELEMENTS)), (1, ELEMENTS))
    exists = tl.max_constancy(v < n, (1, ELEMENTS))
    for c in tl.static_range(COLUMNS):
        j = column + c
        pointers = x + (j.to(tl.int64) * stride_xf)[:, None, None] + (v.to(tl.int64) * stride_xv)[None, :, :]
        values = _selected(sums, c * ELEMENTS, 1, ELEMENTS) * scale
        store_result(values, pointers, (j < d)[:, None, None] & exists[None, :, :], ACCUMULATE)


@triton.jit
def _store_adjacent(
    x, sums, first, column, n, d, stride_xv, stride_xf, scale, COLUMNS: tl.constexpr, ELEMENTS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Store contiguous rows vector by vector: adjacent columns of a thread are one aligned access of up to 16 bytes.

    Arguments are as for `_store_quads`.
    """
    WIDE: tl.constexpr = min(COLUMNS, ELEMENTS)
    for c in tl.static_range(0, COLUMNS, WIDE):
        j = column[:, None] + c + tl.arange(0, WIDE)[None, :]
        j = tl.max_contiguous(tl.multiple_of(j, (1, WIDE)), (1, WIDE))
        exists = tl.max_constancy(j < d, (1, WIDE))
        for i in tl.static_range(ELEMENTS):
            v = first + i
            pointers = x + (v.to(tl.int64) * stride_xv)[None, :, None] + (j.to(tl.int64) * stride_xf)[:, None, :]
            values = _selected(sums, c * ELEMENTS + i, ELEMENTS, WIDE) * scale
            store_result(values, pointers, exists[:, None, :] & (v < n)[None, :, None], ACCUMULATE)


@triton.jit
def _stage(at, sums, first, step, PER: tl.constexpr):
    """Store PER of the sums, from `first` on, side by side at the addresses `at`."""
    if PER == 2:
        store_vector(at, (sums[first], sums[first + step]))
    else:
        store_vector(at, (sums[first], sums[first + step], sums[first + 2 * step], sums[first + 3 * step]))


@triton.jit
def _store_staged(
    x, sums, begin, group, quad, v0, j0, n, d, stride_xv, stride_xf, scale, VECTORS: tl.constexpr, STEP: tl.constexpr,
    COLUMNS: tl.constexpr, ELEMENTS: tl.constexpr, VECTORS_CONTIGUOUS: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Store runs that no wide access fits: threads exchange their sums, so that a warp stores 32 adjacent elements.

    begin : the address of shared memory for the sums: one row per column if VECTORS_CONTIGUOUS, else per vector.
    group, quad : of each thread, [G, Q].
    """
    ITEM: tl.constexpr = sums[0].dtype.primitive_bitwidth // 8
    PER: tl.constexpr = 16 // ITEM
    SPREAD: tl.constexpr = 8 * ELEMENTS // VECTORS  # of quads, whose rows would otherwise be in the same banks
    tl.debug_barrier()  # all threads have read the sums of the previous step
    if VECTORS_CONTIGUOUS:
        for c in tl.static_range(COLUMNS):
            for i in tl.static_range(0, ELEMENTS, PER):
                at = begin + ((group * COLUMNS + c) * VECTORS + quad * ELEMENTS + i) * ITEM
                _stage(at, sums, c * ELEMENTS + i, 1, PER)
        tl.debug_barrier()
        v, j = tl.arange(0, VECTORS)[None, :], tl.arange(0, STEP)[:, None]
        at = begin + (j * VECTORS + v) * ITEM
    else:
        for i in tl.static_range(ELEMENTS):
            for c in tl.static_range(0, COLUMNS, PER):
                slot = (group * (COLUMNS // PER) + c // PER) ^ (quad * SPREAD)
                at = begin + (quad * ELEMENTS + i) * (STEP * ITEM) + slot * 16
                _stage(at, sums, c * ELEMENTS + i, ELEMENTS, PER)
        tl.debug_barrier()
        v, j = tl.arange(0, VECTORS)[:, None], tl.arange(0, STEP)[None, :]
        at = begin + v * (STEP * ITEM) + ((j // PER) ^ (v // ELEMENTS * SPREAD)) * 16 + j % PER * ITEM
    values = load_number(at, sums[0].dtype) * scale
    v, j = v0 + v, j0 + j
    pointers = x + v.to(tl.int64) * stride_xv + j.to(tl.int64) * stride_xf
    store_result(values, pointers, (v < n) & (j < d), ACCUMULATE)


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
    scale,
    ROW_BYTES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLICES: tl.constexpr,
    COPY_BYTES: tl.constexpr,
    READ_ALIGN: tl.constexpr,
    VECTORS_CONTIGUOUS: tl.constexpr,
    STAGED_BYTES: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    THREADS: tl.constexpr,
    SHARED_BYTES: tl.constexpr,
):
    """x[v, j] = scale * sum over the entries of column j of sign * y[v, row], or add it with ACCUMULATE.

    Grid: (parts * blocks of vectors,).

    words : from `encode_offsets`, and two steps of padding.  k : of all stacks.  terms : entries of a column.
    ROW_BYTES : of the vectors of a program.  COLUMNS : adjacent columns of a thread.  SLICES : parts of a step that
    copies Y.  COPY_BYTES : bytes of contiguous vectors that one copy covers; 0 if Y is copied through registers,
    READ_ALIGN adjacent components at a time.  VECTORS_CONTIGUOUS : of X; otherwise its rows are contiguous.
    STAGED_BYTES : of shared memory in which threads exchange their sums; 0 if each can store its own.
    """
    DTYPE: tl.constexpr = y.dtype.element_ty
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    ELEMENTS: tl.constexpr = 16 // ITEM
    VECTORS: tl.constexpr = ROW_BYTES // ITEM
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
        PACK: tl.constexpr = 4 // ITEM if ITEM < 4 else 1
        WIDTH: tl.constexpr = 128 // ITEM
        LOG_ADJACENT: tl.constexpr = READ_ALIGN.bit_length() - 1
        stride_v, k = known_multiple(stride_yv, READ_ALIGN), known_multiple(k, READ_ALIGN)
        c = tl.arange(0, SLICES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        v = v0 + tl.arange(0, VECTORS // PACK) * PACK
        ahead = _load_components(y, c, v, n, k, stride_v, stride_yr, READ_ALIGN)
        for c0 in range(0, k, SLICES * WIDTH):
            loaded = ahead
            ahead = _load_components(y, c0 + SLICES * WIDTH + c, v, n, k, stride_v, stride_yr, READ_ALIGN)
            slots = _slots(c0 + c, k, spacing, VECTORS // PACK, ROW_BYTES, LOG_ADJACENT)
            _store_components(begin + slots, loaded)

    first = part * columns_per_part
    end = tl.minimum(first + columns_per_part, d)
    group = tl.arange(0, GROUPS) * COLUMNS
    place = group[:, None] + tl.zeros((1, QUADS), tl.int32)
    quad = tl.zeros((GROUPS, 1), tl.int32) + tl.arange(0, QUADS)[None, :] * 16
    # Words are loaded two terms ahead, also beyond the last one.
    pointers = words + first.to(tl.int64) * terms + place
    current = _load_column_words(pointers, COLUMNS)
    pointers += STEP
    following = _load_column_words(pointers, COLUMNS)
    wait_for_copies(k, 0)
    tl.debug_barrier()  # all threads have copied their part
    SUM_DTYPE: tl.constexpr = tl.float64 if ITEM == 8 else tl.float32
    for j0 in range(first, end, STEP):
        sums = ()
        for _ in tl.static_range(COLUMNS * ELEMENTS):
            sums += (tl.zeros((GROUPS, QUADS), SUM_DTYPE),)  # type: ignore[assignment]
        for _ in range(terms):
            pointers += STEP
            after = _load_column_words(pointers, COLUMNS)
            sums = _add_terms(sums, current, begin, quad, DTYPE, COLUMNS)
            current, following = following, after
        first_vectors = v0 + tl.arange(0, QUADS) * ELEMENTS
        if STAGED_BYTES > 0:
            _store_staged(
                x, sums, begin - STAGED_BYTES, place // COLUMNS, quad // 16, v0, j0, n, d, stride_xv, stride_xf, scale,
                VECTORS, STEP, COLUMNS, ELEMENTS, VECTORS_CONTIGUOUS, ACCUMULATE,
            )  # fmt: skip
        elif VECTORS_CONTIGUOUS:
            known = known_multiple(stride_xf, ELEMENTS)
            _store_quads(
                x, sums, first_vectors, j0 + group, n, d, stride_xv, known, scale, COLUMNS, ELEMENTS, ACCUMULATE
            )
        else:
            known = known_multiple(stride_xv, min(COLUMNS, ELEMENTS))
            _store_adjacent(
                x, sums, first_vectors, j0 + group, n, d, known, stride_xf, scale, COLUMNS, ELEMENTS, ACCUMULATE
            )
