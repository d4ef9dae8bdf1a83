"""Projections to few components: the features of each vector are permuted in SIMD registers.

A component gets at most one term from a chunk of features (`laws.exact`), which fits in registers: one or a few
instructions then select the terms of 16 components, and no term is stored. Data and results are processed row by row,
without the tiles of the other paths, whose transposition takes most of the time where there are few components. Terms
are added in the same order, so results are bitwise equal to those of the other paths (`dense`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

from ...laws import exact as law
from .bits import DECODE, has_feature
from .jit import CODES, DATA_2D, INT64S, OUT_2D, RANGE, Array, compiled, kernel
from .one_vector import permute
from .plan import STORE_WORK, Call, ExactPlan, aligned, run_rows, useful_threads
from .rows import for_vectors, store_scaled
from .simd import line_pointer, load_part, multiply_add, prefetch

intrinsic: Any = extending.intrinsic  # Any: in kernels, intrinsics are called without a typing context

_HAS_PERMUTATIONS = has_feature("avx512f")
LANES, LOG_LANES = 16, 4  # fp32 in a register; features and components are processed in vectors of as many
ONE_BITS = 0x3F800000  # of 1.0
PRESENT, SIGN = 31, 30  # bits of a word: set where there is an entry, and where it is negative
ROWS_AT_ONCE = 8  # data vectors for which a word is loaded once
MAX_LOG_STEP, MAX_VECTORS = 6, 4  # of what fits in the registers; chunks of 128 features would be slower for bf16
FILLED_COLUMNS = 1 << 13  # columns whose words are listed in one task
MIN_ROWS = 128  # for which words are listed although they are not kept
MAX_WORDS, FEW_ROWS = 8, 32  # per feature; fewer rows may have twice as many words
WORD_WORK = 7  # a word takes as long for each data vector as this many additions in tiles
WORDS = Array(types.int32, 5)


def _define_sum_steps(log_step: int, vectors: int, rows: int) -> Any:
    @intrinsic
    def sum_steps(typing_context, words, span, x, i, count, ahead, sums, base):
        """A part of sums[base + r] = the sums of the terms of x[i + r] in some steps, for r < `rows`.

        A step has 2^log_step features. x is contiguous along its second axis; 16-bit elements are decoded. It may have
        only `count` rows from i on: the others are copies of the last one. The memory `ahead` bytes after the elements
        that are read is prefetched.

        words : from `fill_words`.  span : which group of `vectors` vectors of components; begin and end of the steps.
        """

        def codegen(context, builder, signature, arguments):
            words, span, x, i, count, ahead, sums, base = arguments
            words_type, _, x_type, _, _, _, sums_type, _ = signature.args
            group, begin, end = cgutils.unpack_tuple(builder, span)
            words = context.make_array(words_type)(context, builder, words)
            x, sums = (
                context.make_array(x_type)(context, builder, x),
                context.make_array(sums_type)(context, builder, sums),
            )
            floats, integers = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)
            fma = multiply_add(builder, floats, 32)
            source, source_bytes = context.get_data_type(x_type.dtype), x_type.dtype.bitwidth // 8
            steps, terms = (builder.extract_value(words.shape, axis) for axis in (1, 2))
            last = builder.sub(count, count.type(1))
            pointers, totals = [], []
            for r in range(rows):
                row = builder.select(builder.icmp_signed("<", count.type(r), count), count.type(r), last)
                pointers.append(line_pointer(builder, x, builder.add(i, row), 0))
                totals.append([cgutils.alloca_once(builder, floats) for _ in range(vectors)])
                for total in totals[-1]:
                    builder.store(ir.Constant(floats, None), total)

            def features(pointer, column, remaining):
                """The features of a step of one row, in registers; only `remaining` of them are read."""
                registers = []
                for start in range(0, 1 << log_step, LANES):
                    at = builder.gep(pointer, [builder.add(column, column.type(start))])
                    at = builder.bitcast(at, ir.VectorType(source, LANES).as_pointer())
                    if remaining is None:
                        vector = builder.load(at, align=source_bytes)
                        prefetch(builder, at, ahead, LANES * source_bytes)
                    else:
                        vector = load_part(builder, at, builder.sub(remaining, column.type(start)), source_bytes)
                    registers.append(DECODE[x_type.dtype](builder, vector) if x_type.dtype in DECODE else vector)
                return registers

            def add(step, remaining):
                column = builder.shl(step, step.type(log_step))
                tables = [features(pointer, column, remaining) for pointer in pointers]
                first = builder.mul(builder.add(builder.mul(group, steps), step), terms)
                with cgutils.for_range(builder, terms) as loop:
                    at = builder.mul(builder.add(first, loop.index), step.type(vectors * LANES))
                    at = builder.bitcast(builder.gep(words.data, [at]), integers.as_pointer())
                    for v in range(vectors):
                        word = builder.load(builder.gep(at, [step.type(v)]), align=4)
                        sign = builder.shl(word, ir.Constant(integers, [31 - SIGN] * LANES))
                        sign = builder.and_(sign, ir.Constant(integers, [1 << 31] * LANES))
                        sign = builder.bitcast(builder.or_(sign, ir.Constant(integers, [ONE_BITS] * LANES)), floats)
                        present = builder.icmp_signed("<", word, ir.Constant(integers, [0] * LANES))
                        for table, row in zip(tables, totals, strict=True):
                            value, total = builder.bitcast(permute(builder, table, word), floats), builder.load(row[v])
                            # One masked instruction, rounded as an addition. That is because PRESENT is the sign bit.
                            added = builder.call(fma, [sign, value, total])
                            builder.store(builder.select(present, added, total), row[v])

            d = builder.extract_value(x.shape, 1)
            whole = builder.lshr(d, d.type(log_step))
            is_partial = builder.icmp_signed("<", whole, end)
            with cgutils.for_range(builder, builder.select(is_partial, whole, end), start=begin) as loop:
                add(loop.index, None)
            with builder.if_then(is_partial):
                add(whole, builder.sub(d, builder.shl(whole, d.type(log_step))))
            width, column = builder.extract_value(sums.shape, 1), builder.mul(group, group.type(vectors * LANES))
            for r, row in enumerate(totals):
                at = builder.add(builder.mul(builder.add(base, base.type(r)), width), column)
                target = builder.bitcast(builder.gep(sums.data, [at]), floats.as_pointer())
                for v, total in enumerate(row):
                    builder.store(builder.load(total), builder.gep(target, [at.type(v)]), align=4)
            return context.get_dummy_value()

        integer = types.int64
        span = types.UniTuple(integer, 3)
        return types.void(words, span, x, integer, integer, integer, sums, integer), codegen

    return sum_steps


# As many rows as there are registers for their features and sums; and half of them, which is faster for few rows.
_sum_16_1, _sum_16_2, _sum_16_2_few, _sum_16_4, _sum_32_2, _sum_32_4, _sum_64_4 = (
    _define_sum_steps(*sizes) for sizes in ((4, 1, 8), (4, 2, 8), (4, 2, 4), (4, 4, 4), (5, 2, 4), (5, 4, 4), (6, 4, 2))
)


@intrinsic
def _store_row(typing_context, sums, r, out, i, scale):
    """out[i] = scale * sums[r, :out.shape[1]], rounded once from fp64. out is contiguous along its second axis."""

    def codegen(context, builder, signature, arguments):
        sums, r, out, i, scale = arguments
        sums_type, _, out_type, _, _ = signature.args
        sums = context.make_array(sums_type)(context, builder, sums)
        out = context.make_array(out_type)(context, builder, out)
        row = builder.gep(sums.data, [builder.mul(r, builder.extract_value(sums.shape, 1))])
        target = line_pointer(builder, out, i, 0)
        element = context.get_data_type(sums_type.dtype)
        sums_align = sums_type.dtype.bitwidth // 8

        def store(v, size, remaining):
            vector = ir.VectorType(element, size)
            values = builder.load(builder.bitcast(builder.gep(row, [v]), vector.as_pointer()), align=sums_align)
            store_scaled(builder, values, scale, builder.gep(target, [v]), out_type.dtype, remaining)

        for_vectors(builder, builder.extract_value(out.shape, 1), LANES, store)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(sums, integer, out, integer, types.float64), codegen


@kernel(codes=CODES, first=types.int64, log_chunk=types.int64, log_step=types.int64, words=WORDS)
def fill_words(codes, first, log_chunk, log_step, words):
    """words[..., step, term, ...] = the feature that is a term of each component, counted from the first of the step.

    A step has one term for each of its chunks. Components are in the order of words[:, step, term]. Bits SIGN and
    PRESENT tell whether the entry is negative, and whether there is one.

    codes : of the columns of some steps, of which `first` is the first.
    words : zeros, of shape (groups, steps, terms, vectors, LANES).
    """
    _, steps, terms, vectors, _ = words.shape
    flat = words.reshape(words.size)
    shift = LOG_LANES + (vectors > 1) + (vectors > 2)  # log2 of the components in a group
    for j in range(codes.shape[0]):
        step, column = first + (j >> log_step), j & ((1 << log_step) - 1)
        term = step * terms + (column >> log_chunk)
        for t in range(codes.shape[1]):
            code = np.uint32(codes[j, t])
            row = np.int64(code >> 1)
            at = (((row >> shift) * steps * terms + term) << shift) + (row & ((1 << shift) - 1))
            flat[np.uint64(at)] = column | (1 << PRESENT) | ((code & 1) << SIGN)


@kernel(
    x=DATA_2D, words=WORDS, bounds=INT64S, rows=RANGE, log_step=types.int64, out=OUT_2D, scale=types.float64
)  # fmt: skip
def project_permuted(x, words, bounds, rows, log_step, out, scale):
    """Compute a range of rows of out. bounds : those of the blocks, in steps."""
    groups, _, _, vectors, _ = words.shape
    n_blocks = bounds.size - 1
    sums = np.empty((ROWS_AT_ONCE, groups * vectors * LANES), np.float32)
    totals = np.empty((ROWS_AT_ONCE if n_blocks > 1 else 0, sums.shape[1]))
    for i in range(rows[0], rows[1], ROWS_AT_ONCE):
        n = min(ROWS_AT_ONCE, rows[1] - i)
        for b in range(n_blocks):
            for g in range(groups):
                # Addresses beyond the data would cost TLB misses.
                ahead = n * x.strides[0] if g == 0 and i + 2 * ROWS_AT_ONCE <= x.shape[0] else 0
                span = g, bounds[b], bounds[b + 1]
                if log_step == 4 and vectors == 1:
                    _sum_16_1(words, span, x, i, n, ahead, sums, 0)
                    continue
                if log_step == 4 and vectors == 2:
                    if n > ROWS_AT_ONCE // 2:
                        _sum_16_2(words, span, x, i, n, ahead, sums, 0)
                    else:
                        _sum_16_2_few(words, span, x, i, n, ahead, sums, 0)
                    continue
                if log_step == 6:
                    for r in range(0, n, 2):
                        _sum_64_4(words, span, x, i + r, n - r, ahead, sums, r)
                    continue
                for r in range(0, n, 4):
                    if log_step == 4:
                        _sum_16_4(words, span, x, i + r, n - r, ahead, sums, r)
                    elif vectors == 2:
                        _sum_32_2(words, span, x, i + r, n - r, ahead, sums, r)
                    else:
                        _sum_32_4(words, span, x, i + r, n - r, ahead, sums, r)
            for r in range(n if n_blocks > 1 else 0):
                for c in range(sums.shape[1]):
                    totals[r, c] = sums[r, c] + (totals[r, c] if b > 0 else 0.0)
        for r in range(n):
            if n_blocks > 1:
                _store_row(totals, r, out, i + r, scale)
            else:
                _store_row(sums, r, out, i + r, scale)


class _Layout(NamedTuple):
    """How the terms of a sketch are arranged.

    Attributes
    ----------
    log_step : log2 of the features in a step: those in a register, or a chunk if that has more
    groups, vectors : vectors of components are summed in groups of `vectors`, so that features are loaded less often
    words : per feature; more than nnz if not every component has a term from every chunk
    """

    log_step: int
    groups: int
    vectors: int
    words: int


@lru_cache(maxsize=64)
def _layout(k: int, log_chunk: int) -> _Layout:
    vectors = -(-k // LANES)
    per_group = min(MAX_VECTORS, 1 << (vectors - 1).bit_length())
    groups = -(-vectors // per_group)
    return _Layout(max(LOG_LANES, log_chunk), groups, per_group, groups * per_group * LANES >> log_chunk)


def _words(plan: ExactPlan) -> tuple[np.ndarray, np.ndarray, int]:
    """The words of all features; the bounds of blocks in steps; log_step."""
    log_step, groups, vectors, _ = _layout(plan.k, plan.log_chunk)
    shape = groups, -(-plan.d >> log_step), 1 << (log_step - plan.log_chunk), vectors, LANES
    words, fill = aligned(shape, np.dtype(np.int32)), compiled(fill_words)

    def use(j: int, codes: np.ndarray) -> None:
        fill(codes, j >> log_step, plan.log_chunk, log_step, words)

    plan.use_codes(0, plan.d, FILLED_COLUMNS, use)
    return words, -(-plan.bounds(0, plan.n_blocks) >> log_step), log_step


def eligible(plan: ExactPlan, x: np.ndarray, out: np.ndarray, compute: np.dtype) -> bool:
    """Whether to compute all of `out` here: rows contiguous in memory, sums in fp32, few components, and few words.

    Words must be kept between calls, or there must be enough rows to make up for listing them. With more than nnz + 1
    and at most MAX_WORDS words per feature, products of random sizes take on average 0.56 to 0.93 of the time of other
    paths, except (up to 1.06) many 16-bit vectors with nnz 3 and 4; with twice as many words, 0.55 to 0.9 for few
    vectors, but 1.07 to 1.5 for many (Sapphire Rapids).
    """
    n = x.shape[0]
    is_listed = plan.keeps_words or (plan.can_keep_words and n >= MIN_ROWS)
    if plan.k > law.TILE_ROWS or compute != np.float32 or not (is_listed and _HAS_PERMUTATIONS):
        return False
    layout, most = _layout(plan.k, plan.log_chunk), MAX_WORDS if n >= FEW_ROWS else 2 * MAX_WORDS
    if layout.words > max(plan.s + 1, most) or layout.log_step > MAX_LOG_STEP or plan.offset % (1 << layout.log_step):
        return False
    return x.strides[1] == x.itemsize and out.strides[1] == out.itemsize


def project_by_permutation(plan: ExactPlan, x: np.ndarray, out: np.ndarray) -> Call:
    """The call for out (n, k) = x (n, d) S', for a product that is `eligible`."""
    n, (words, bounds, log_step) = x.shape[0], plan.keep("words", lambda: _words(plan), plan.keeps_words)
    project, scale = compiled(project_permuted, data=x.dtype, out=out.dtype), plan.scale
    work = WORD_WORK * words.size // LANES + plan.d // 2 + STORE_WORK * plan.k  # per row

    def call(x: np.ndarray, out: np.ndarray) -> None:
        def task(begin: int, end: int) -> None:
            project(x, words, bounds, (begin, end), log_step, out, scale)

        run_rows(task, n, ROWS_AT_ONCE, useful_threads(n * work), work)

    return call
