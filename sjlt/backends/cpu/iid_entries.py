"""Generate the entries of the iid law, WIDTH calls of Philox at a time, as floats or as codes of the nonzeros.

The *marks* of a column (`iid_law.marks`) are laid out in memory like its lanes, 8 or 16 bits per row, in ascending
order of rows. A *rule* is a tuple of six uint64: the bits of a lane, `Lanes.signs`, `Lanes.complement`, the two words
of the seed, and the length of a block or a segment of the sums, which only the kernels use.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...laws import iid as iid_law
from .bits import WIDTH, WordVector, interleave, store_vector
from .jit import leaf

ROW_BATCH = WIDTH * 16  # rows that WIDTH calls determine with 8-bit lanes, or 2 WIDTH calls with 16-bit lanes
RULE = (types.uint64,) * 6

assert sys.byteorder == "little", "lanes must be laid out in memory as in words"


def rounded_up(rows):
    """The number of rows rounded up to whole vectors of calls."""
    return (rows + ROW_BATCH - 1) // ROW_BATCH * ROW_BATCH


round_up = leaf(rounded_up)  # for kernels


def _marks(builder, scalars):
    """A vector of the marks of one column for WIDTH calls; the words of a call are adjacent."""
    j, call, k0, k1, signs, complement = scalars
    calls = WordVector.count_from(builder, call)
    j, k0, k1, signs, complement = (WordVector.splat(builder, scalar) for scalar in (j, k0, k1, signs, complement))
    words = iid_law.entry_words(j, calls, k0, k1)
    return interleave(builder, [iid_law.marks(w, signs, complement) for w in words])


@intrinsic
def _store_marks(typing_context, words, at, j, call, k0, k1, signs, complement):
    """words[at:at + 4 WIDTH] = the marks of column j for WIDTH calls from `call` on."""

    def codegen(context, builder, signature, arguments):
        words, at, *scalars = arguments
        return store_vector(context, builder, signature.args[0], words, at, _marks(builder, scalars))

    return types.void(words, types.int64, *(types.uint64,) * 6), codegen


def _define_store_floats(bits: int) -> Any:
    @intrinsic
    def store_floats(typing_context, entries, at, j, call, k0, k1, signs, complement):
        """entries[at:at + WIDTH * 128 // bits] = +-2 or +-0: these marks as the top bits of floats."""

        def codegen(context, builder, signature, arguments):
            entries, at, *scalars = arguments
            width, rows = signature.args[0].dtype.bitwidth, WIDTH * 128 // bits
            marks = builder.bitcast(_marks(builder, scalars), ir.VectorType(ir.IntType(bits), rows))
            wide = builder.zext(marks, ir.VectorType(ir.IntType(width), rows))
            wide = builder.shl(wide, ir.Constant(wide.type, [width - bits] * rows))
            element = context.get_data_type(signature.args[0].dtype)
            floats = builder.bitcast(wide, ir.VectorType(element, rows))
            return store_vector(context, builder, signature.args[0], entries, at, floats)

        return types.void(entries, types.int64, *(types.uint64,) * 6), codegen

    return store_floats


_store_floats_8, _store_floats_16 = _define_store_floats(8), _define_store_floats(16)


@leaf
def per_call(rule):
    """The number of rows that a call determines."""
    return np.int64(128) // np.int64(rule[0])


@leaf
def generate_floats(column, columns, row, rows, rule, entries):
    """entries[c * rows + i] = twice the unscaled entry of column `column` + c and row `row` + i: +-2 or +-0."""
    _, signs, complement, k0, k1, _ = rule
    first = row // per_call(rule)
    for c in range(columns):
        j = column + np.uint64(c)
        for call in range(0, rows // per_call(rule), WIDTH):
            at, c0 = c * rows + call * per_call(rule), np.uint64(first + call)
            if rule[0] == 8:
                _store_floats_8(entries, at, j, c0, k0, k1, signs, complement)
            else:
                _store_floats_16(entries, at, j, c0, k0, k1, signs, complement)


@leaf
def generate_nonzeros(column, row, rows, rule, words, codes, at):
    """Store the codes of a column's nonzeros in rows row .. row + rows - 1 in ``codes[at:end]``; return end.

    A code is 2 (r - row) + (1 where negative); codes ascend.  words : a buffer for the marks of the rows, rounded up.
    """
    bits, signs, complement, k0, k1, _ = rule
    lanes, first = np.int64(32) // np.int64(bits), row // per_call(rule)
    for call in range(0, round_up(rows) // per_call(rule), WIDTH):
        _store_marks(words, 4 * call, column, np.uint64(first + call), k0, k1, signs, complement)  # type: ignore[call-arg]
    for w in range((rows + lanes - 1) // lanes):
        word = words[w]
        if word & np.uint32(signs >> np.uint64(1)):
            for lane in range(lanes):
                mark = word >> np.uint32(bits * np.uint64(lane + 1) - np.uint64(2))
                r = w * lanes + lane
                if mark & np.uint32(1) and r < rows:
                    codes[at] = 2 * r + np.int64((mark >> np.uint32(1)) & np.uint32(1))
                    at += 1
    return at
