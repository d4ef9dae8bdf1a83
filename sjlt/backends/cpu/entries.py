"""The entries of a sketch under the exact law as codes: 2 row + (1 where negative), int32 (rows are below 2^23)."""

from __future__ import annotations

import numpy as np
from numba import types

from ...laws import exact as law
from ...laws.philox import define
from .jit import CODES, LAW, kernel, leaf

CODES_STEP = 1024  # columns whose codes are generated at a time where no table is shared

_words = define(law.FUNCTIONS, leaf, np.uint64)
part_start, select_word, sign_bit = _words.part_start, _words.select_word, _words.sign_bit
chunk_tile, chunk_keys, chunk_signs = _words.chunk_tile, _words.chunk_keys, _words.chunk_signs
row_in_sub_block = _words.row_in_sub_block

ONE, TWO, THREE = (np.uint64(v) for v in (1, 2, 3))


@leaf
def generate_codes(first_column, codes, geometry):
    """codes[j, t] = the code of column first_column + j in sub-block t, stack by stack.

    geometry : `exact_law.Geometry` in uint64.
    """
    for stack in range(geometry[7]):
        _generate_stack(first_column, codes, stack, geometry)


@leaf
def _generate_stack(first_column, codes, stack, geometry):
    """The codes of one stack. Philox runs once per chunk."""
    k, s, n_tiles, log_group, p, k0, k1, _ = geometry
    end = first_column + np.uint64(codes.shape[0])
    if end == first_column:
        return
    for c in range(first_column >> p, ((end - ONE) >> p) + ONE):
        m = chunk_tile(c, n_tiles, log_group, k0, k1, stack)
        first_row = part_start(m, k, n_tiles)
        tile_rows = part_start(m + ONE, k, n_tiles) - first_row
        tile_row = stack * k + first_row
        g0, g1, g2, g3 = chunk_signs(c, k0, k1, stack)
        begin, stop = max(first_column, c << p), min(end, (c + ONE) << p)
        for quad in range((s + THREE) >> TWO):
            w0, w1, w2, w3 = chunk_keys(c, quad, k0, k1, stack)
            for t in range(quad << TWO, min(s, (quad + ONE) << TWO)):
                w = select_word(t & THREE, w0, w1, w2, w3)
                block_row = part_start(t, tile_rows, s)
                b = part_start(t + ONE, tile_rows, s) - block_row
                for j in range(begin, stop):
                    i = j - (c << p)
                    row = tile_row + block_row + row_in_sub_block(i, w, b, p)
                    code = (row << ONE) | sign_bit(i, t, p, g0, g1, g2, g3)
                    codes[np.int64(j - first_column), np.int64(stack * s + t)] = np.int32(code)


@kernel(first_column=types.uint64, codes=CODES, geometry=LAW)
def fill_table(first_column, codes, geometry):
    """The codes of all columns of a table from `first_column` on."""
    generate_codes(first_column, codes, geometry)
