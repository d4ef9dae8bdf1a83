"""Adjoints of a sketch with few terms: each row of the result is looked up in SIMD registers.

A sub-block of at most 128 components fits in registers, in which one or a few instructions look up 16 components at any
positions, for 16 columns of a chunk. Rows of the data and of the result are then processed as they are, without the
tiles of `dense`, whose transposition takes most of the time where there are few terms. Terms are added in the same
order, so results are bitwise equal to those of the other paths.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

from ... import threads
from ...laws import exact as law
from .bits import DECODE, decoded, has_feature
from .jit import CODES, DATA_2D, INT64S, OUT_2D, RANGE, TILE, Array, compiled, kernel, leaf
from .one_vector import LOG_ROWS, ROWS, define_look_up
from .plan import STEP_WORK, STORE_WORK, TABLE_CODES, Borrowed, Call, ExactPlan, aligned, row_ranges, useful_threads
from .scaling import scaled
from .simd import first_lanes, line_pointer, load_few_rows, load_part, store_masked

intrinsic: Any = extending.intrinsic  # Any: in kernels, intrinsics are called without a typing context

_HAS_LOOK_UPS = has_feature("avx512f")
SIGN = 31  # the bit of a word that is set where an entry is negative; the lower ones are the row in the sub-block
MAX_TERMS, MIN_ROWS = 8, 32  # of a sum; of the result: tiles are faster for more terms, and for fewer rows
MAX_COMPONENTS = 1 << 14  # for which the buffer of each thread takes 2 MiB
ROWS_AT_ONCE = ROWS  # a square is loaded at a time
COLUMNS = 2 * ROWS  # columns that are computed together: look-ups in the same registers
FILLED_PARTS = 8  # parts whose words are listed in one task
PART_WORDS = 1 << 12  # words of the columns that are computed at a time, of one row after another: half the L1 cache


def eligible(plan: ExactPlan, y: np.ndarray, out: np.ndarray, compute: np.dtype) -> bool:
    """Whether to compute all of `out` here: rows contiguous in memory, and few terms, in fp32.

    If there are several tiles, ROWS adjacent columns must belong to one of them. Words must be kept between calls, or
    there must be enough rows. Results in fp64 are not supported.
    """
    if plan.k > MAX_COMPONENTS or plan.s > MAX_TERMS or compute != np.float32 or not _HAS_LOOK_UPS:
        return False
    if _has_several_tiles(plan) and (plan.log_chunk < LOG_ROWS or plan.offset % ROWS):
        return False
    is_listed_once = plan.keeps_words and plan.d <= _span(plan)
    return (is_listed_once or y.shape[0] >= MIN_ROWS) and out.strides[1] == out.itemsize and out.itemsize <= 4


def _has_several_tiles(plan: ExactPlan) -> bool:
    return plan.k > plan.stacks * law.TILE_ROWS


def _define_look_up_row(log_rows: int, several_tiles: bool) -> Any:
    @intrinsic
    def look_up_row(typing_context, words, places, components, out, i, begin, count, scale):
        """out[i, begin + j] = scale * the sum of the entries words[:, j] times components, for j < count.

        words, places : a part of those from `fill_words`.  components : flat, 2^log_rows for each sub-block.
        """

        def codegen(context, builder, signature, arguments):
            words, places, components, out, i, begin, count, scale = arguments
            words = context.make_array(signature.args[0])(context, builder, words)
            places = context.make_array(signature.args[1])(context, builder, places).data
            components = context.make_array(signature.args[2])(context, builder, components).data
            out_type, out = signature.args[3].dtype, context.make_array(signature.args[3])(context, builder, out)
            row = builder.gep(line_pointer(builder, out, i, 0), [begin])
            with cgutils.for_range_slice(builder, i.type(0), count, i.type(COLUMNS), i.type) as (j, _):
                totals = _sum_terms(builder, words, places, j, components, log_rows, several_tiles)
                _store(builder, scaled(builder, totals, scale, out_type), row, j, count)
            return context.get_dummy_value()

        integer = types.int64
        return types.void(words, places, components, out, integer, integer, integer, types.float64), codegen

    return look_up_row


def _sum_terms(
    builder: Any, words: Any, places: Any, j: Any, components: Any, log_rows: int, several_tiles: bool
) -> list[Any]:
    """The sums of columns j to j + COLUMNS - 1, in vectors."""
    integers, floats = ir.VectorType(ir.IntType(32), ROWS), ir.VectorType(ir.FloatType(), ROWS)
    terms, columns = (builder.extract_value(words.shape, axis) for axis in range(2))
    totals = [cgutils.alloca_once_value(builder, ir.Constant(floats, None)) for _ in range(0, COLUMNS, ROWS)]
    for total in totals:
        builder.store(ir.Constant(floats, None), total)
    with cgutils.for_range(builder, terms) as loop:
        for n, total in enumerate(totals):
            at = builder.add(builder.add(builder.mul(loop.index, columns), j), j.type(n * ROWS))
            if n == 0 or several_tiles:  # otherwise, all columns are looked up in the same registers
                place = builder.load(builder.gep(places, [builder.lshr(at, at.type(LOG_ROWS))]))
                look_up = define_look_up(builder, builder.gep(components, [place]), floats, log_rows)
            word = builder.load(builder.bitcast(builder.gep(words.data, [at]), integers.as_pointer()), align=4)
            values = builder.bitcast(look_up(word), integers)
            values = builder.xor(values, builder.and_(word, ir.Constant(integers, [1 << SIGN] * ROWS)))
            builder.store(builder.fadd(builder.load(total), builder.bitcast(values, floats)), total)
    return [builder.load(total) for total in totals]


def _store(builder: Any, results: list[Any], row: Any, j: Any, count: Any) -> None:
    """Store vectors of results from row[j] on, except at `count` and beyond."""
    align = 4 if isinstance(results[0].type.element, ir.FloatType) else 2
    for n, result in enumerate(results):
        first = builder.add(j, j.type(n * ROWS))
        target = builder.bitcast(builder.gep(row, [first]), result.type.as_pointer())
        left = builder.sub(count, first)
        with builder.if_else(builder.icmp_signed(">=", left, left.type(ROWS))) as (whole, part):
            with whole:
                builder.store(result, target, align=align)
            with part:
                store_masked(builder, result, target, first_lanes(builder, left, ROWS), align)


@intrinsic
def _load_vector(typing_context, y, i, j, components, row, at):
    """components[row, at + l] = y[i, j + l], or 0 beyond the row, l < ROWS. y is contiguous along its second axis."""

    def codegen(context, builder, signature, arguments):
        y, i, j, components, row, at = arguments
        y_type, components_type = signature.args[0], signature.args[3]
        y = context.make_array(y_type)(context, builder, y)
        components = context.make_array(components_type)(context, builder, components)
        source = builder.gep(line_pointer(builder, y, i, 0), [j])
        source = builder.bitcast(source, ir.VectorType(y.data.type.pointee, ROWS).as_pointer())
        remaining = builder.sub(builder.extract_value(y.shape, 1), j)
        vector = load_part(builder, source, remaining, y_type.dtype.bitwidth // 8)
        if y_type.dtype in DECODE:
            vector = DECODE[y_type.dtype](builder, vector)
        target = builder.add(builder.mul(row, builder.extract_value(components.shape, 1)), at)
        target = builder.bitcast(builder.gep(components.data, [target]), vector.type.as_pointer())
        builder.store(vector, target, align=4)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(y, integer, integer, components, integer, integer), codegen


@leaf
def _load_row(y, i, starts, log_rows, components, row):
    """Copy the components y[i] to a row of `components`, 2^log_rows elements for each sub-block.

    starts : the first components of the sub-blocks, and the number of all.
    """
    for t in range(starts.size - 1):
        if y.strides[1] == y.itemsize:  # elements after a sub-block are never looked up
            for start in range(0, 1 << log_rows, ROWS):
                _load_vector(y, i, starts[t] + start, components, row, (t << log_rows) + start)
        else:
            shift = (t << log_rows) - starts[t]
            for r in range(starts[t], starts[t + 1]):
                components[row, np.uint64(r + shift)] = decoded(y[i, r], components)


@leaf
def _load_rows(y, i0, n, starts, log_rows, components):
    """`_load_row` for rows i0 to i0 + n - 1: by squares if y is column-major."""
    if y.strides[0] != y.itemsize or n < ROWS:
        for i in range(n):
            _load_row(y, i0 + i, starts, log_rows, components, i)
        return
    for t in range(starts.size - 1):
        for start in range(0, 1 << log_rows, ROWS):
            r = starts[t] + start
            if r < y.shape[1]:
                load_few_rows(y.T, r, i0, y.shape[1] - r, 0, components, 0, (t << log_rows) + start)


@kernel(
    codes=CODES, starts=INT64S, log_rows=types.int64, words=Array(types.int32, 3), places=Array(types.int64, 3)
)  # fmt: skip
def fill_words(codes, starts, log_rows, words, places):
    """words[c, t, j] = the row of code t of column j of part c, in its sub-block, with its sign in bit SIGN.

    codes : of the columns of these parts, (columns, terms).  starts : as in `_load_row`.
    places : [c, t, j div ROWS] is the index of the sub-block of ROWS adjacent columns, times 2^log_rows.
    """
    for part in range(words.shape[0]):
        begin = part * words.shape[2]
        for t in range(codes.shape[1]):
            for j in range(min(words.shape[2], codes.shape[0] - begin)):
                code = codes[begin + j, t]
                row = code >> 1
                if j % ROWS == 0:
                    sub_block = np.searchsorted(starts, row, side="right") - 1
                    places[part, t, j // ROWS] = sub_block << log_rows
                words[part, t, j] = (row - starts[sub_block]) | (code << SIGN)


def _define_look_up_rows(several_tiles: bool) -> Any:
    row_16, row_32, row_64, row_128 = (_define_look_up_row(log_rows, several_tiles) for log_rows in (4, 5, 6, 7))

    def look_up_rows(y, words, places, starts, rows, log_rows, components, out, scale):
        for i0 in range(rows[0], rows[1], components.shape[0]):
            n = min(components.shape[0], rows[1] - i0)
            _load_rows(y, i0, n, starts, log_rows, components)
            for part in range(words.shape[0]):
                begin = part * words.shape[2]
                count = min(words.shape[2], out.shape[1] - begin)
                for i in range(n):
                    row = words[part], places[part], components[i], out, i0 + i, begin, count, scale
                    if log_rows == 4:
                        row_16(*row)
                    elif log_rows == 5:
                        row_32(*row)
                    elif log_rows == 6:
                        row_64(*row)
                    else:
                        row_128(*row)

    look_up_rows.__qualname__ = f"look_up_rows_{several_tiles}"  # Numba links cached machine code by this name
    return leaf(look_up_rows)


_look_up_rows, _look_up_rows_of_tiles = map(_define_look_up_rows, (False, True))
_ARGUMENTS = {
    "y": DATA_2D, "words": Array(types.int32, 3), "places": Array(types.int64, 3), "starts": INT64S, "rows": RANGE,
    "log_rows": types.int64, "components": TILE, "out": OUT_2D, "scale": types.float64,
}  # fmt: skip


@kernel(**_ARGUMENTS)
def look_up_rows(y, words, places, starts, rows, log_rows, components, out, scale):
    """Compute a range of rows of out, for sketches of one tile.

    words, places : from `fill_words`.  starts : as in `_load_row`.
    components : a buffer for some rows, with 2^log_rows components of each sub-block.
    """
    _look_up_rows(y, words, places, starts, rows, log_rows, components, out, scale)


@kernel(**_ARGUMENTS)
def look_up_rows_of_tiles(y, words, places, starts, rows, log_rows, components, out, scale):
    """The same for sketches of any number of tiles."""
    _look_up_rows_of_tiles(y, words, places, starts, rows, log_rows, components, out, scale)


class _Layout(NamedTuple):
    """Where components lie in the buffer of `look_up_rows`.

    Attributes
    ----------
    starts : the first components of all sub-blocks, of one tile after the other, and the number of components
    log_rows : each sub-block has room for 2^log_rows components
    """

    starts: np.ndarray
    log_rows: int

    @property
    def width(self) -> int:
        """Elements of a row of the buffer."""
        return len(self.starts) - 1 << self.log_rows


@lru_cache(maxsize=64)
def _layout(n_components: int, nnz: int, stacks: int) -> _Layout:
    k, s = n_components // stacks, nnz // stacks
    n_tiles = law.count_tiles(k)
    tiles = pairwise(law.part_start(m, k, n_tiles) for m in range(n_tiles + 1))
    of_stack = [begin + law.part_start(t, end - begin, s) for begin, end in tiles for t in range(s)]
    starts = np.array([stack * k + start for stack in range(stacks) for start in of_stack] + [n_components])
    log_rows = max(LOG_ROWS, int(np.diff(starts).max() - 1).bit_length())
    return _Layout(starts, log_rows)


def adjoint_by_look_up(plan: ExactPlan, y: np.ndarray, out: np.ndarray, work: int) -> Call:
    """The call for out (n, d) = y (n, k) S, for a product that is `eligible`.  work : from `ExactPlan.work`."""
    layout = _layout(plan.k, plan.s, plan.stacks)
    rows_kernel = look_up_rows_of_tiles if _has_several_tiles(plan) else look_up_rows
    look_up, scale = compiled(rows_kernel, data=y.dtype, compute=np.float32, out=out.dtype), plan.scale

    def look_up_all(y: np.ndarray, words: np.ndarray, places: np.ndarray, columns: np.ndarray) -> None:
        def task(begin: int, end: int) -> None:
            with Borrowed(ROWS_AT_ONCE * layout.width, np.dtype(np.float32)) as memory:
                rows, components = (begin, end), memory.reshape(ROWS_AT_ONCE, -1)
                look_up(y, words, places, layout.starts, rows, layout.log_rows, components, columns, scale)

        workers, row_work = useful_threads(work), (places.shape[1] + STORE_WORK) * columns.shape[1] + layout.width
        threads.run(task, row_ranges(len(y), ROWS_AT_ONCE, workers, row_work), workers)

    span = _span(plan)
    if plan.d <= span:
        words, places = plan.keep("words of columns", lambda: _words(plan, 0, plan.d), plan.keeps_words)
        return lambda y, out: look_up_all(y, words, places, out)

    def look_up_spans(y: np.ndarray, out: np.ndarray) -> None:
        for j in range(0, plan.d, span):
            columns = out[:, j : j + span]
            look_up_all(y, *_words(plan, j, j + columns.shape[1]), columns)  # frees the words before the next ones

    return look_up_spans


def _span(plan: ExactPlan) -> int:
    """The number of columns whose words are listed at a time, a multiple of COLUMNS."""
    most = min(TABLE_CODES // plan.s, STEP_WORK // (ROWS_AT_ONCE * (plan.s + STORE_WORK)))
    return most // COLUMNS * COLUMNS


def _words(plan: ExactPlan, j0: int, j1: int) -> tuple[np.ndarray, np.ndarray]:
    """The words and places of columns j0 .. j1 - 1; see `fill_words`."""
    groups = -(-(j1 - j0) // COLUMNS)
    per_part = min(groups, max(1, PART_WORDS // (plan.s * COLUMNS)))
    width = per_part * COLUMNS
    words = aligned((-(-groups // per_part), plan.s, width), np.dtype(np.int32))
    places = np.zeros((*words.shape[:2], width // ROWS), np.int64)
    fill, (starts, log_rows) = compiled(fill_words), _layout(plan.k, plan.s, plan.stacks)

    def use(j: int, codes: np.ndarray) -> None:
        parts = slice((j - j0) // width, (j - j0) // width + FILLED_PARTS)
        fill(codes, starts, log_rows, words[parts], places[parts])

    plan.use_codes(j0, j1, FILLED_PARTS * width, use)
    return words, places
