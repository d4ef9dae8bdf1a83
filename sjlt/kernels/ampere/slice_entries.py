"""The entries of a slice of `project_codes_ampere`: written to shared memory from its codes, and loaded from there.

Memory has one line of SLICE 16-bit entries for each row, zeros but for the few that codes name, which one thread per
code writes and, before the next slice, replaces by zeros. A lane loads all its entries of a row at once, since columns
are permuted in a line. (When every warp expanded the codes of its rows in registers instead, decoding and comparing
them took half of the kernel's instructions.)
"""

# (No `from __future__ import annotations`: Gluon would not see the annotations of kernel arguments.)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..config import ampere_kernel, arithmetic
from ..nvidia import shared_memory

SLICE, LOG_SLICE = gl.constexpr(ampere_kernel.SLICE_COLUMNS), gl.constexpr(ampere_kernel.LOG_SLICE)
WARPS = gl.constexpr(ampere_kernel.WARPS)
LINE = gl.constexpr(ampere_kernel.ENTRY_LINE_BYTES)
_store_half = gluon.jit(shared_memory.store_half.fn)
_store_half_where = gluon.jit(shared_memory.store_half_where.fn)
_store_words = gluon.jit(shared_memory.store_words.fn)


@gluon.constexpr_function
def blocks_of(CHOSEN):
    """The number of blocks of codes that a slice needs."""
    return max(1, SLICE.value >> CHOSEN.log_block)


@gluon.jit
def clear_entries(lines, CHOSEN: gl.constexpr):
    """Fill the lines of two slices with zeros."""
    BYTES: gl.constexpr = 2 * CHOSEN.rows * LINE
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    unit = gl.arange(0, BYTES // 16, layout=layout)
    zero = (unit * 0).to(gl.uint32)
    _store_words(lines + unit * 16, zero, zero, zero, zero)


@gluon.jit
def _place(column):
    """The byte of a column of a slice in a line: 16 bytes for each lane of four, which multiplies these columns."""
    return ((column << 3) & 0x30) | ((column >> 1) & 0xC) | ((column << 1) & 2)


@gluon.jit
def _codes_and_rows(CHOSEN: gl.constexpr):
    """(block within the slice, row) of the codes of a slice that each thread has."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    e = gl.arange(0, blocks_of(CHOSEN) * CHOSEN.rows, layout=layout)
    return e // CHOSEN.rows, e % CHOSEN.rows


@gluon.jit
def first_addresses(lines, CHOSEN: gl.constexpr):
    """The addresses of entries of `lines`, for the first call of `write_entries`."""
    block, row = _codes_and_rows(CHOSEN)
    return lines + row * LINE + _place(block << CHOSEN.log_block)


@gluon.jit
def load_codes(codes):
    """The codes of a slice, from shared memory, as 32-bit integers."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return codes.load(layout).to(gl.int32)


@gluon.jit
def write_entries(lines, before, code, number, DTYPE: gl.constexpr, CHOSEN: gl.constexpr):
    """Write the entries of slice `number` of a product to `lines`, and return their addresses.

    before : the addresses that an earlier slice has written there.  code : from `load_codes`.

    Threads that have codes of the same row write entries of different blocks, and replace only these by zeros.
    """
    ONE: gl.constexpr = arithmetic.ONE_BF16 if gl.bfloat16 == DTYPE else arithmetic.ONE_FP16
    _store_half(before, before * 0)
    block, row = _codes_and_rows(CHOSEN)
    column = code & ((1 << CHOSEN.log_block) - 1)
    exists = (code & 127) < (1 << CHOSEN.log_block)  # a code that names no column is larger
    if (1 << CHOSEN.log_block) > SLICE:
        exists = exists & ((column >> LOG_SLICE) == number % 2)
        column = column & (SLICE - 1)
    else:
        column += block << CHOSEN.log_block
    addresses = lines + row * LINE + _place(column)
    _store_half_where(addresses, (code & 128) << 8 | ONE, exists)
    return addresses


@gluon.jit
def load_entries(lines, layout: gl.constexpr, DTYPE: gl.constexpr, ROWS: gl.constexpr):
    """The entries [SLICE, ROWS] of `lines` in `layout`, the second operand of `mma_v2`."""
    column = gl.arange(0, SLICE, layout=gl.SliceLayout(1, layout))[:, None]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))[None, :]
    # The eight entries of a lane in each row are adjacent registers.
    bits = gl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r,r,r,r,r,r,r,r",
        [lines + row * LINE + _place(column)], gl.int16, False, 8,
    )  # fmt: skip
    return bits.to(DTYPE, bitcast=True)
