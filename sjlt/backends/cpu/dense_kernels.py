"""Kernels on dense data: 2-D arrays of any strides, one data vector a row, X (n, n_features) or Y (n, n_components).

Sums in the data's precision run over one block of features at a time; the blocks, whose bounds follow from the
sketch alone, are added in their order in fp64. So the error does not grow with n_features, and the result does not
depend on which rows or blocks are worked on together.

The functions without a decorator are kernels: `compiled` makes machine code of them.
"""

from __future__ import annotations

import numpy as np

from .entries import FILL, fill
from .jit import leaf
from .tiles import gather, load_tile, scatter, store_tile

TILE_FEATURES = 64  # rows of a tile of features: with 32 lanes of fp32, 8 KiB of the L1 cache


@leaf
def _accumulate(x, i0, i1, codes, j0, j1, k, tile, sums):
    """Add columns j0..j1 of rows i0..i1 of x to `sums`, a tile of k components for every `lanes` rows."""
    lanes = tile.shape[1]
    for j in range(j0, j1, TILE_FEATURES):
        nj = min(TILE_FEATURES, j1 - j)
        for v in range((i1 - i0 + lanes - 1) // lanes):
            i = i0 + v * lanes
            load_tile(x, i, min(lanes, i1 - i), j, nj, tile, 0)
            scatter(codes, j, nj, tile, sums, v * k)


@leaf
def _fold(sums, totals, base, i0, i1, k, first, last, out, scale, accumulate):
    """Add a block's sums of rows i0..i1 to the totals (from row `base` on), and store them after the last block."""
    lanes = sums.shape[1]
    for v in range((i1 - i0 + lanes - 1) // lanes):
        i = i0 + v * lanes
        n = min(lanes, i1 - i)
        if first and last:
            store_tile(sums, v * k, out, i, n, 0, k, scale, accumulate)
            continue
        for r in range(v * k, (v + 1) * k):
            for lane in range(lanes):
                before = 0.0 if first else totals[base + r, lane]
                totals[base + r, lane] = before + sums[r, lane]
        if last:
            store_tile(totals, base + v * k, out, i, n, 0, k, scale, accumulate)


def project_rows(x, codes, bounds, i0, i1, k, first, last, tile, sums, totals, out, scale, accumulate):
    """Rows i0..i1 of x through the blocks ``bounds[b]:bounds[b+1]`` of features; i0 is a multiple of the lanes.

    first, last : whether these are the first, the last features, or `totals` comes from, goes to another call.
    sums : a stack of tiles; as many rows are taken together as it holds.
    totals : the tiles of all rows of x, fp64; empty where there is only one block.
    """
    lanes = tile.shape[1]
    together = sums.shape[0] // k * lanes
    for i in range(i0, i1, together):
        end = min(i + together, i1)
        for b in range(bounds.size - 1):
            sums[:] = 0
            _accumulate(x, i, end, codes, bounds[b], bounds[b + 1], k, tile, sums)
            begins, ends = first and b == 0, last and b == bounds.size - 2
            _fold(sums, totals, i // lanes * k, i, end, k, begins, ends, out, scale, accumulate)


def project_blocks(x, bounds, first_column, geometry, k, codes, tile, sums):
    """The sums of each block ``bounds[b]:bounds[b+1]`` of features over the few rows of x: one tile a block.

    first_column : the law's index of x's column 0. codes : room for FILL columns.
    """
    sums[:] = 0
    for b in range(bounds.size - 1):
        for j in range(bounds[b], bounds[b + 1], FILL):
            nj = min(FILL, bounds[b + 1] - j)
            fill(first_column + np.uint64(j), codes[:nj], geometry)
            _accumulate(x[:, j : j + nj], 0, x.shape[0], codes, 0, nj, k, tile, sums[b * k : (b + 1) * k])


def fold_blocks(sums, totals, n, k, first, last, out, scale, accumulate):
    """Add the sums of `project_blocks` to the totals; calls come in the order of the blocks."""
    n_blocks = sums.shape[0] // k
    for b in range(n_blocks):
        begins, ends = first and b == 0, last and b == n_blocks - 1
        _fold(sums[b * k : (b + 1) * k], totals, 0, 0, n, k, begins, ends, out, scale, accumulate)


@leaf
def _spread(codes, nj, components, k, tile, out, i0, i1, j0, scale, accumulate):
    """out[i0:i1, j0:j0 + nj] from a stack of tiles of components; codes[0] is column j0's."""
    lanes = tile.shape[1]
    for j in range(0, nj, TILE_FEATURES):
        count = min(TILE_FEATURES, nj - j)
        for v in range((i1 - i0 + lanes - 1) // lanes):
            i = i0 + v * lanes
            tile[:] = 0
            gather(codes, j, count, tile, components, v * k)
            store_tile(tile, 0, out, i, min(lanes, i1 - i), j0 + j, count, scale, accumulate)


@leaf
def _load_components(y, i0, i1, k, components):
    lanes = components.shape[1]
    for v in range((i1 - i0 + lanes - 1) // lanes):
        i = i0 + v * lanes
        load_tile(y, i, min(lanes, i1 - i), 0, k, components, v * k)


def adjoint_rows(y, codes, i0, i1, k, tile, components, out, scale, accumulate):
    """Rows i0..i1 of out from those of y. components : a stack of tiles, as in `project_rows`."""
    together = components.shape[0] // k * tile.shape[1]
    for i in range(i0, i1, together):
        end = min(i + together, i1)
        _load_components(y, i, end, k, components)
        _spread(codes, codes.shape[0], components, k, tile, out, i, end, 0, scale, accumulate)


def adjoint_run(y, first_column, geometry, k, codes, tile, components, out, scale, accumulate):
    """A run of features, all of out's columns, for the few rows of y; codes are made on the way."""
    _load_components(y, 0, y.shape[0], k, components)
    for j in range(0, out.shape[1], FILL):
        nj = min(FILL, out.shape[1] - j)
        fill(first_column + np.uint64(j), codes[:nj], geometry)
        _spread(codes, nj, components, k, tile, out, 0, y.shape[0], j, scale, accumulate)
