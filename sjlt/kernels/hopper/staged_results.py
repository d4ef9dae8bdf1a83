"""Results of `project_codes_hopper` that other warps than the consumers store, in units of 16 bytes.

These are 16-bit results whose tiles or lines do not all begin and end at multiples of 16 bytes, so that the TMA cannot
store them. A line is what is contiguous in memory: the components of a vector or, if vectors are contiguous, the
vectors of a component. If consumers store such results themselves, element by element, they do so for up to two thirds
of the time. Here, they write their sums to shared memory, line by line, and compute the next product while other warps
load the lines, shift them by their displacement in the result (the address modulo 16 bytes), and store whole units; the
ends of lines, whose units belong to two tiles or vectors, are stored as elements.

Lines lie in shared memory that Triton does not know of (`kernels.nvidia.shared_memory`).
"""

# (No `from __future__ import annotations`: Gluon would not see the annotations of kernel arguments.)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..config import hopper_loaders, product
from ..nvidia import global_memory, shared_memory, warp, warp_loads
from .common import barrier, gluon_functions
from .rounds import parts_of
from .store_sums import first_vector, rows_of_part

_load_words, _load_half = gluon.jit(shared_memory.load_words.fn), gluon.jit(shared_memory.load_half.fn)
_store_four = gluon.jit(global_memory.store_four.fn)
_shifted = gluon_functions(warp.permute_bytes, warp_loads.shifted).shifted
UNIT = gl.constexpr(product.VECTOR_BYTES)  # bytes of a unit
ITEM = gl.constexpr(2)  # bytes of an element
WARPS = gl.constexpr(hopper_loaders.PRODUCER_WARPS)  # that store results


@gluon.jit
def hand_over(acc, dtype: gl.constexpr, results, handed, taken, phase, CHOSEN: gl.constexpr, CONSUMER: gl.constexpr):
    """Write a consumer's sums [vectors, rows] to its lines at `results`, as soon as the previous ones have been taken.

    A thread has pairs of adjacent sums: of one line, or the same elements of two lines.
    """
    LINES: gl.constexpr = CHOSEN.part_lines
    ONE_LINE: gl.constexpr = CHOSEN.out_vectors_contiguous == CHOSEN.entries_first
    v = gl.arange(0, CHOSEN.part_vectors, layout=gl.SliceLayout(1, acc.type.layout))[:, None]
    r = gl.arange(0, CHOSEN.part_rows, layout=gl.SliceLayout(0, acc.type.layout))[None, :]
    line, i = (r, v) if CHOSEN.out_vectors_contiguous else (v, r)
    addresses = results + (CONSUMER * LINES + line) * CHOSEN.result_line_bytes + ITEM * i
    bits = acc.to(dtype).to(gl.int16, bitcast=True)
    mbarrier.wait(taken.index(CONSUMER), phase)
    if ONE_LINE:
        gl.inline_asm_elementwise(
            "st.shared.b32 [$1], $3; mov.u32 $0, 0;", "=r,r,r,r", [addresses, bits], gl.int16, False, 2
        )
    else:
        gl.inline_asm_elementwise(
            "{ .reg .b16 a, b; mov.b32 {a, b}, $3; st.shared.b16 [$1], a; st.shared.b16 [$2], b; mov.u32 $0, 0; }",
            "=r,r,r,r", [addresses, bits], gl.int16, False, 2,
        )  # fmt: skip
    barrier()
    mbarrier.arrive(handed.index(CONSUMER), count=1)


@gluon.jit
def _lines(m, vector_block, n, k, n_tiles, stride_ov, stride_or, CHOSEN: gl.constexpr, CONSUMER: gl.constexpr):
    """(first element in the result, stride, number, length) of the lines of a consumer's part of a product."""
    first_row, rows = rows_of_part(m, k, n_tiles, CHOSEN, CONSUMER)
    v = first_vector(vector_block, CHOSEN, CONSUMER)
    rows = gl.maximum(gl.minimum(rows, CHOSEN.part_rows), 0)
    vectors = gl.maximum(gl.minimum(n - v, CHOSEN.part_vectors), 0)
    if CHOSEN.out_vectors_contiguous:
        return v + first_row * stride_or, stride_or, rows, vectors
    return first_row + v * stride_ov, stride_ov, vectors, rows


@gluon.jit
def _store_lines(out, results, stride, count, length, CHOSEN: gl.constexpr):
    """Store `count` lines of `length` elements; the first begins at `results` and, in the result, at the address `out`.

    In the result, the bytes of a line are numbered from the beginning of its first unit.
    """
    LINES: gl.constexpr = CHOSEN.part_lines
    UNITS: gl.constexpr = CHOSEN.part_run * ITEM // UNIT
    LINE: gl.constexpr = CHOSEN.result_line_bytes
    whole: gl.constexpr = gl.BlockedLayout([1, 1], [32 // UNITS, UNITS], [WARPS, 1], [1, 0])
    AT_A_TIME: gl.constexpr = 32 * WARPS // UNITS
    line = gl.arange(0, AT_A_TIME, layout=gl.SliceLayout(1, whole))[:, None]
    byte = UNIT * gl.arange(0, UNITS, layout=gl.SliceLayout(0, whole))[None, :]
    begin, source = out + line * (ITEM * stride), results + line * LINE
    for i in gl.static_range(LINES // AT_A_TIME):
        displacement = (begin & (UNIT - 1)).to(gl.int32)
        address = source + i * AT_A_TIME * LINE + ((byte - displacement) & -UNIT)
        unit = _shifted(_load_words(address) + _load_words(address + UNIT), -displacement, 4, ITEM)
        keep = (byte >= displacement) & (byte + UNIT - ITEM * length <= displacement)
        _store_four((begin & -UNIT) + byte, unit, keep & (line < count - i * AT_A_TIME))
        begin += AT_A_TIME * ITEM * stride
    # The elements of each line's first and last unit, unless these are whole.
    ends: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WARPS, 1], [1, 0])
    line = gl.arange(0, 2 * WARPS, layout=gl.SliceLayout(1, ends))[:, None]
    place = ITEM * gl.arange(0, 2 * UNIT // ITEM, layout=gl.SliceLayout(0, ends))[None, :]
    begin, source = out + line * (ITEM * stride), results + line * LINE
    for i in gl.static_range(LINES // (2 * WARPS)):
        displacement = (begin & (UNIT - 1)).to(gl.int32)
        end = displacement + ITEM * length
        byte = gl.where(place < UNIT, place, place - UNIT + (end & -UNIT))
        of_first = (byte >= displacement) & (displacement > 0)
        of_last = (displacement == 0) | (end >= UNIT)
        keep = (byte < end) & gl.where(place < UNIT, of_first, of_last) & (line < count - i * 2 * WARPS)
        half = _load_half(source + i * 2 * WARPS * LINE + byte - displacement).to(gl.uint16)
        gl.store(((begin & -UNIT) + byte).to(gl.pointer_type(gl.uint16)), half, mask=keep)
        begin += 2 * WARPS * ITEM * stride


@gluon.jit
def store_results(arguments, CHOSEN: gl.constexpr):
    """Store the lines of all products of this program."""
    results, handed, taken, out, n, k, tasks, splits, n_tiles, stride_ov, stride_or = arguments
    LINES: gl.constexpr = CHOSEN.part_lines
    phase = 0
    task = gl.program_id(0)
    while task < tasks:
        m, _, vector_block = parts_of(task, splits, n_tiles)
        for c in gl.static_range(2):
            first, stride, count, length = _lines(m, vector_block, n, k, n_tiles, stride_ov, stride_or, CHOSEN, c)
            mbarrier.wait(handed.index(c), phase)
            lines = results + c * LINES * CHOSEN.result_line_bytes
            _store_lines(out.to(gl.int64) + ITEM * first, lines, stride, count, length, CHOSEN)
            barrier()
            mbarrier.arrive(taken.index(c), count=1)
        phase ^= 1
        task += gl.num_programs(0)
