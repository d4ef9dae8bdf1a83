"""Kernels for sketches of one tile (up to 128 rows) and many data vectors: plain matrix products on tensor cores.

Every chunk of columns meets the one tile, so `tensor_core` skips no work here, and spends its time generating the
entries again for every block of vectors, above all in geometries that are not powers of two. `write_entries` instead
stores the entries once per call, as 16-bit numbers that stay in the L2 cache: at most 256 bytes per column. The kernels
that multiply by them depend neither on the law nor on its geometry, so one compilation serves all sketches. (With
several tiles the products are too short: 1.3 to 2.2 times the time of the other kernels on an H200.)

For small products, in which a second launch would take longer than generating the entries repeatedly, the kernels that
multiply generate them. They compute the row of each nonzero of a column, whereas other kernels compute the column of
each row's entry; k, nnz and the geometry thus remain run-time arguments.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..config import arithmetic, chunk_codes
from ..config import one_tile as config
from .chunk_rows import entries_of_rows, row_words, sub_blocks_of_rows
from .column_entries import generate_entries, sub_blocks_of
from .fp32_split import (
    BF16_TRIPLE,
    FP16_PAIR,
    NATIVE,
    has_overflow,
    inverse,
    multiply_split,
    multiply_vectors,
    split_vectors,
)
from .law import seed_words
from .program import known_multiple, start_dependents, store_result, store_sums, wait_for_previous

STEP = tl.constexpr(config.STEP)
CHUNKS, MAX_KEYS = tl.constexpr(chunk_codes.CHUNKS), tl.constexpr(chunk_codes.MAX_KEYS)


@triton.jit(do_not_specialize=["seed", "first_chunk", "chunks", "chunks_per_program", "k", "nnz", "log_chunk", "one"])
def write_entries(
    entries, seed: tl.int64, first_chunk: tl.int64, chunks: tl.int32, chunks_per_program: tl.int32, k: tl.int32,
    nnz: tl.int32, log_chunk: tl.int32, one: tl.int32, ROWS: tl.constexpr, SUB_BLOCKS: tl.constexpr,
    PROGRAMMATIC_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Write the unscaled entries of `chunks` chunks, from first_chunk on; grid (blocks of chunks_per_program chunks,).

    entries : uint16 (chunks * 2^log_chunk, ROWS), the bits of 0, 1 and -1 in a 16-bit floating-point type.  one : the
    bits of 1.  ROWS : at least k.  chunks_per_program, SUB_BLOCKS : from `config.chunk_codes.encoding`.
    """
    start_dependents(PROGRAMMATIC_LAUNCH)
    HELD_CHUNKS: tl.constexpr = max(MAX_KEYS // SUB_BLOCKS, CHUNKS)  # whose words a program derives at once
    k0, k1 = seed_words(seed)
    first = tl.program_id(0) * chunks_per_program
    c = first_chunk + first.to(tl.int64) + tl.arange(0, HELD_CHUNKS)
    rows, s, p = k.to(tl.uint32), nnz.to(tl.uint32), log_chunk.to(tl.uint32)
    rows_in_tile = sub_blocks_of_rows(rows, s, ROWS)
    words = row_words(c, rows, s, k0, k1, (first * 0).to(tl.uint32), SUB_BLOCKS)
    r = tl.arange(0, ROWS)
    for batch in range(0, tl.minimum(chunks_per_program, chunks - first), CHUNKS):
        q = batch + tl.arange(0, CHUNKS)
        i, negative, has_entry = entries_of_rows(q, words, rows_in_tile, p, SUB_BLOCKS)
        value = (negative.to(tl.int32) << 15) | one
        i = tl.where(has_entry, i.to(tl.int32), -1)
        keep = (first + q < chunks)[:, None]
        offset = ((first + q).to(tl.int64) << log_chunk.to(tl.int64))[:, None] * ROWS + r[None, :]
        for column in range(1 << log_chunk):
            tl.store(entries + offset + column * ROWS, tl.where(i == column, value, 0).to(tl.uint16), mask=keep)


@triton.jit
def _step_columns(q, stop, first_column, d, ALIGN: tl.constexpr):
    """(columns of the data, whether they exist) for the STEP columns of entries from q on."""
    j = first_column + q + tl.arange(0, STEP)
    if ALIGN > 1:
        j = tl.max_contiguous(tl.multiple_of(j, ALIGN), ALIGN)
    exists = (q + tl.arange(0, STEP) < stop) & (j >= 0) & (j < d)
    if ALIGN > 1:
        exists = tl.max_constancy(exists, ALIGN)
    return j, exists


@triton.jit
def _load_entries(entries, q, stop, ROWS: tl.constexpr, STORED: tl.constexpr):
    """The STEP columns of entries from q on: [STEP, ROWS]."""
    column = q + tl.arange(0, STEP)
    address = entries + (column.to(tl.int64) * ROWS)[:, None] + tl.arange(0, ROWS)[None, :]
    return tl.load(address, mask=(column < stop)[:, None], other=0).to(STORED, bitcast=True)


@triton.jit
def _step_entries(
    entries, law, first_column, q, stop, ROWS: tl.constexpr, SUB_BLOCKS: tl.constexpr, STORED: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """The STEP columns of entries from q on, stored or, with SUB_BLOCKS > 0, generated: [STEP, ROWS] of DTYPE.

    law : (feature offset, sub_blocks, log_chunk, k0, k1), the last four as in `generate_entries`.
    """
    if SUB_BLOCKS > 0:
        feature_offset, sub_blocks, log_chunk, k0, k1 = law
        column = feature_offset + first_column + q + tl.arange(0, STEP)
        one = arithmetic.ONE_BF16 if tl.bfloat16 == DTYPE else arithmetic.ONE_FP16
        bits = generate_entries(column, sub_blocks, log_chunk, k0, k1, one, ROWS, SUB_BLOCKS)
        block = bits.to(DTYPE, bitcast=True)
    else:
        block = _load_entries(entries, q, stop, ROWS, STORED).to(DTYPE)
    return block


@triton.jit
def _law_of_program(seed, feature_offset, k, nnz, log_chunk, ROWS: tl.constexpr, SUB_BLOCKS: tl.constexpr):
    """The argument `law` of `_step_entries`."""
    k0, k1 = seed_words(seed)
    sub_blocks = sub_blocks_of(k, nnz, ROWS, SUB_BLOCKS) if SUB_BLOCKS > 0 else (k, k, k)  # not used
    return feature_offset, sub_blocks, log_chunk, k0, k1


@triton.jit
def _sum_of_columns(
    data, v, factor, entries, law, start, stop, first_column, ROWS: tl.constexpr, SUB_BLOCKS: tl.constexpr,
    ALIGN: tl.constexpr, CHUNKED_SUM: tl.constexpr, MODE: tl.constexpr, STORED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """X times the entries of columns start to stop - 1: [vectors, ROWS] fp32.

    CHUNKED_SUM : tensor cores sum STEP columns at a time; these sums are added in fp32.  law : as in `_step_entries`.
    """
    x, n, d, stride_xv, stride_xf = data
    DTYPE: tl.constexpr = STORED if (MODE == NATIVE) | (MODE == FP16_PAIR) else tl.bfloat16
    sums = tl.zeros((v.shape[0], ROWS), tl.float32)
    for q in range(start, stop, STEP):
        j, exists = _step_columns(q, stop, first_column, d, ALIGN)
        address = x + v[:, None] * stride_xv + (j * stride_xf)[None, :]
        z = tl.load(address, mask=(v < n)[:, None] & exists[None, :], other=0.0)
        block = _step_entries(entries, law, first_column, q, stop, ROWS, SUB_BLOCKS, STORED, DTYPE)
        if CHUNKED_SUM:
            sums += multiply_split(z, factor, block, tl.zeros_like(sums), MODE, False, INTERPRETED)
        else:
            sums = multiply_split(z, factor, block, sums, MODE, False, INTERPRETED)
    return sums


INTEGERS = ["seed", "k", "columns", "columns_per_split", "first_column", "scale", "nnz", "log_chunk", "feature_offset"]


@triton.jit(do_not_specialize=INTEGERS)
def project_one_tile(
    x,
    entries,
    out,
    scales,
    n,
    d,
    stride_xv,
    stride_xf,
    stride_os,
    stride_ov,
    stride_or,
    seed: tl.int64,
    k: tl.int32,
    columns: tl.int32,
    columns_per_split: tl.int32,
    first_column: tl.int64,
    scale: tl.float32,
    nnz: tl.int32,
    log_chunk: tl.int32,
    feature_offset: tl.int64,
    ROWS: tl.constexpr,
    BLOCK_VECTORS: tl.constexpr,
    ALIGN: tl.constexpr,
    VECTOR_ALIGN: tl.constexpr,
    SUB_BLOCKS: tl.constexpr,
    CHUNKED_SUM: tl.constexpr,
    MODE: tl.constexpr,
    STORED: tl.constexpr,
    SINGLE_SPLIT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PROGRAMMATIC_LAUNCH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """out[split, v, r] = sum over the split's columns j of x[v, j] S[r, j]; grid (blocks of vectors, splits).

    entries : (columns, ROWS), from `write_entries`; not read if SUB_BLOCKS > 0.  columns : the number of columns of
    entries.  first_column : the column of the data at which they begin; it may be negative.  SUB_BLOCKS : 0 or, to
    generate the entries, a power of two that is at least 4 and at least nnz.  STORED : dtype of the entries.
    CHUNKED_SUM : tensor cores sum STEP columns at a time; these sums are added in fp32.  Other arguments are as in
    `project_tensor_core`.
    """
    start_dependents(PROGRAMMATIC_LAUNCH)
    v = tl.program_id(0).to(tl.int64) * BLOCK_VECTORS + tl.arange(0, BLOCK_VECTORS)
    stride_xv, d = known_multiple(stride_xv, ALIGN), known_multiple(d, ALIGN)
    stride_xf, n = known_multiple(stride_xf, VECTOR_ALIGN), known_multiple(n, VECTOR_ALIGN)
    start = tl.program_id(1) * columns_per_split
    stop = tl.minimum(start + columns_per_split, columns)
    factor = scale
    law = _law_of_program(seed, feature_offset, k, nnz, log_chunk, ROWS, SUB_BLOCKS)
    wait_for_previous(PROGRAMMATIC_LAUNCH)
    if MODE == FP16_PAIR:
        factor = tl.load(scales + v, mask=v < n, other=1.0)
    data = (x, n, d, stride_xv, stride_xf)
    acc = _sum_of_columns(
        data, v, factor, entries, law, start, stop, first_column, ROWS, SUB_BLOCKS, ALIGN, CHUNKED_SUM, MODE, STORED,
        INTERPRETED,
    )  # fmt: skip
    if MODE == FP16_PAIR:
        acc *= inverse(factor)[:, None]
        if has_overflow(acc):
            acc = _sum_of_columns(
                data, v, 1.0, entries, law, start, stop, first_column, ROWS, SUB_BLOCKS, ALIGN, CHUNKED_SUM,
                BF16_TRIPLE, STORED, INTERPRETED,
            )  # fmt: skip
    r = tl.arange(0, ROWS)
    keep = (v < n)[:, None] & (r < k)[None, :]
    out += tl.program_id(1).to(tl.int64) * stride_os + v[:, None] * stride_ov + r[None, :] * stride_or
    store_sums(acc, out, keep, scale, SINGLE_SPLIT, ACCUMULATE)


@triton.jit(do_not_specialize=INTEGERS)
def adjoint_one_tile(
    y,
    entries,
    out,
    n,
    d,
    stride_yv,
    stride_yr,
    stride_ov,
    stride_of,
    seed: tl.int64,
    k: tl.int32,
    columns: tl.int32,
    columns_per_split: tl.int32,
    first_column: tl.int64,
    scale: tl.float32,
    nnz: tl.int32,
    log_chunk: tl.int32,
    feature_offset: tl.int64,
    ROWS: tl.constexpr,
    BLOCK_VECTORS: tl.constexpr,
    ALIGN: tl.constexpr,
    VECTOR_ALIGN: tl.constexpr,
    SUB_BLOCKS: tl.constexpr,
    MODE: tl.constexpr,
    STORED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PROGRAMMATIC_LAUNCH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """out[v, j] = sum over rows r of y[v, r] S[r, j]; grid (blocks of vectors, splits of the columns).

    A program holds all components of its vectors.  VECTOR_ALIGN : as in `adjoint_tensor_core`. Other arguments are as
    in `project_one_tile`.
    """
    v = tl.program_id(0).to(tl.int64) * BLOCK_VECTORS + tl.arange(0, BLOCK_VECTORS)
    stride_ov, d = known_multiple(stride_ov, ALIGN), known_multiple(d, ALIGN)
    stride_yr, stride_of = known_multiple(stride_yr, VECTOR_ALIGN), known_multiple(stride_of, VECTOR_ALIGN)
    n = known_multiple(n, VECTOR_ALIGN)
    r = tl.arange(0, ROWS)
    keep = (v < n)[:, None] & (r < k)[None, :]
    z = tl.load(y + v[:, None] * stride_yv + r[None, :] * stride_yr, mask=keep, other=0.0)
    high, low, factor = split_vectors(z, MODE)
    start = tl.program_id(1) * columns_per_split
    stop = tl.minimum(start + columns_per_split, columns)
    law = _law_of_program(seed, feature_offset, k, nnz, log_chunk, ROWS, SUB_BLOCKS)
    wait_for_previous(PROGRAMMATIC_LAUNCH)
    for q in range(start, stop, STEP):
        j, exists = _step_columns(q, stop, first_column, d, ALIGN)
        block = _step_entries(entries, law, first_column, q, stop, ROWS, SUB_BLOCKS, STORED, STORED)
        acc = multiply_vectors(high, low, factor, tl.trans(block), MODE, INTERPRETED) * scale
        pointers = out + v[:, None] * stride_ov + (j * stride_of)[None, :]
        store_result(acc, pointers, (v < n)[:, None] & exists[None, :], ACCUMULATE)
