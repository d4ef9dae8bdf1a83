"""The entries of a sketch by column, as offsets into a copy of a block of vectors of Y, for adjoints X = Y S.

A word holds the byte offset of the entry's component in the copy, and in bit 31 the sign (1 is negative). The copy has
one row per component. If 2^log_adjacent adjacent components are read together, they lie `spacing` rows apart, so that
those of neighbouring threads are adjacent rows. Offsets include a quad of the row, its part of 16 bytes: quads are
permuted by the exclusive or with it, which avoids bank conflicts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .chunk_codes import tile_rows, tile_start
from .law import chunk_keys, chunk_signs, chunk_tile, part_start, row_in_sub_block, seed_words, sign_bit
from .program import start_dependents

INTEGERS = ["seed", "k", "nnz", "n_tiles", "log_group", "log_chunk", "first", "columns", "step", "terms"]
INTEGERS += ["row_bytes", "log_adjacent", "spacing", "log_rows_per_quad", "quad_mask"]


@triton.jit
def row_of_component(component, log_adjacent, spacing):
    """The row of a component in the copy."""
    return (component & ((1 << log_adjacent) - 1)) * spacing + (component >> log_adjacent)


@triton.jit
def first_quad(component, log_adjacent, log_rows_per_quad, quad_mask):
    """The place of quad 0 in the row of a component; quad q is at the exclusive or of q and it."""
    return (component >> (log_adjacent + log_rows_per_quad)) & quad_mask


@triton.jit(do_not_specialize=INTEGERS)
def encode_offsets(
    words_of_columns, seed: tl.int64, k: tl.int32, nnz: tl.int32, n_tiles: tl.int32, log_group: tl.int32,
    log_chunk: tl.int32, first: tl.int64, columns: tl.int32, step: tl.int32, terms: tl.int32, row_bytes: tl.int32,
    log_adjacent: tl.int32, spacing: tl.int32, log_rows_per_quad: tl.int32, quad_mask: tl.int32, BLOCK: tl.constexpr,
    PROGRAMMATIC_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Write words (columns / step, stacks * nnz, step) int32, the first of which is for column `first` of the law.

    A program of `adjoint_staged` reads the words of `step` columns, term by term. `columns` is a multiple of `step`.

    Grid: (blocks of BLOCK columns, stacks * blocks of 4 sub-blocks).  k, nnz, n_tiles : of one stack.
    """
    start_dependents(PROGRAMMATIC_LAUNCH)
    k0, k1 = seed_words(seed)
    quads = (nnz + 3) // 4
    stack, quad = (tl.program_id(1) // quads).to(tl.uint32), (tl.program_id(1) % quads).to(tl.uint32)
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = first + j.to(tl.int64)
    c, i = column >> log_chunk, (column & ((1 << log_chunk) - 1)).to(tl.uint32)
    p, s = log_chunk.to(tl.uint32), nnz.to(tl.uint32)
    m = chunk_tile(c, n_tiles, log_group, k0, k1, stack).to(tl.uint32)
    start, rows = tile_start(m, k, n_tiles), tile_rows(m, k, n_tiles)
    keys = chunk_keys(c, quad + i * 0, k0, k1, stack)
    g0, g1, g2, g3 = chunk_signs(c, k0, k1, stack)
    for u in tl.static_range(4):
        t = quad * 4 + u
        begin = part_start(t, rows, s)
        b = part_start(t + 1, rows, s) - begin
        row = start + begin + row_in_sub_block(i, keys[u], b, p)
        component = (stack * k.to(tl.uint32) + row).to(tl.int32)
        offset = row_of_component(component, log_adjacent, spacing) * row_bytes
        offset += first_quad(component, log_adjacent, log_rows_per_quad, quad_mask) * 16
        word = offset | (sign_bit(i, t, p, g0, g1, g2, g3) << 31).to(tl.int32)
        to = words_of_columns + ((j // step * terms + (stack * s + t).to(tl.int32)) * step + j % step)
        tl.store(to, word, mask=(j < columns) & (t < s))
