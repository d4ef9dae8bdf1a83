"""The entries of a small sketch as a dense matrix of 16-bit numbers, which torch multiplies by the data.

Matrix products of torch (cuBLAS) are faster than kernels that exploit the zeros if S has few rows and many entries per
column. S itself takes hardly any time or memory then.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...laws import exact as law
from .chunk_codes import tile_start
from .column_entries import generate_entries, sub_blocks_of
from .law import chunk_tile, seed_words

TILE = tl.constexpr(law.TILE_ROWS)
INTEGERS = ["seed", "first_column", "d", "row_stride", "k", "nnz", "n_tiles", "log_group", "log_chunk", "one"]


@triton.jit(do_not_specialize=INTEGERS)
def write_dense_matrix(
    matrix, seed: tl.int64, first_column: tl.int64, d: tl.int32, row_stride: tl.int32, k: tl.int32, nnz: tl.int32,
    n_tiles: tl.int32, log_group: tl.int32, log_chunk: tl.int32, one: tl.int32, COLUMNS: tl.constexpr,
    SUB_BLOCKS: tl.constexpr,
):  # fmt: skip
    """matrix[r, j] = S[r, first_column + j], unscaled; grid (blocks of COLUMNS columns, tiles).

    matrix : (k, row_stride), of the bits (uint16) of a 16-bit floating-point type; `one` is those of 1. Columns from d
    on are not written.  SUB_BLOCKS : a power of two, at least 4 and at least nnz.
    """
    k0, k1 = seed_words(seed)
    m = tl.program_id(1)
    begin = tile_start(m, k, n_tiles).to(tl.int32)
    rows = tile_start(m + 1, k, n_tiles).to(tl.int32) - begin
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    column = first_column + j
    tile = chunk_tile(column >> log_chunk.to(tl.int64), n_tiles, log_group, k0, k1).to(tl.int32)
    entries = generate_entries(
        column, sub_blocks_of(rows, nnz, TILE, SUB_BLOCKS), log_chunk, k0, k1, one, TILE, SUB_BLOCKS
    )
    r = tl.arange(0, TILE)
    address = matrix + ((begin + r).to(tl.int64) * row_stride)[None, :] + j[:, None]
    tl.store(address, tl.where((tile == m)[:, None], entries, 0), mask=(j < d)[:, None] & (r < rows)[None, :])
