"""Tiles: several data vectors side by side, so that SIMD instructions work across vectors.

``tile[i, v]`` is feature (or component) i of vector v. Applying an entry of the sketch then adds one row of a tile to
another, whatever the memory layout of the data, which only `load_tile` and `store_tile` deal with.
"""

from __future__ import annotations

from typing import Any

from .bits import decoded, store_element
from .jit import leaf, overload
from .simd import (
    SQUARE_BYTES,
    define_apply_codes,
    load_column,
    load_columns,
    load_few_rows,
    load_half_rows,
    load_rows,
    loads_by_squares,
    store_columns,
    store_few_rows,
    store_rows,
)

TILE_VECTORS = (32, 8, 1)  # possible widths of a tile; 32 fp32 fill two AVX-512 registers


# ------------------------------------------------------------------------------------- applying entries


def _define_entries(vectors: int) -> tuple[Any, Any]:
    scatter_codes, gather_codes = (define_apply_codes(vectors, adjoint) for adjoint in (False, True))

    def scatter(codes, j0, nj, features, components, base):
        s = codes.shape[1]
        for j in range(nj):
            scatter_codes(codes, (j0 + j) * s, (j0 + j + 1) * s, features, j, components, base)

    def gather(codes, j0, nj, features, components, base):
        s = codes.shape[1]
        for j in range(nj):
            gather_codes(codes, (j0 + j) * s, (j0 + j + 1) * s, features, j, components, base)

    # Numba links cached machine code by qualified name: closures of the same name would be mistaken for each other.
    scatter.__qualname__, gather.__qualname__ = f"scatter_{vectors}", f"gather_{vectors}"
    return leaf(scatter), leaf(gather)


(_scatter_32, _gather_32), (_scatter_8, _gather_8), (_scatter_1, _gather_1) = map(_define_entries, TILE_VECTORS)


@leaf
def scatter(codes, j0, nj, features, components, base):
    """components[base + row] += sign * features[j] for each entry of columns j0 + j, j < nj."""
    if features.shape[1] == 32:
        _scatter_32(codes, j0, nj, features, components, base)
    elif features.shape[1] == 8:
        _scatter_8(codes, j0, nj, features, components, base)
    else:
        _scatter_1(codes, j0, nj, features, components, base)


@leaf
def gather(codes, j0, nj, features, components, base):
    """features[j] += sign * components[base + row] for each entry of columns j0 + j, j < nj."""
    if features.shape[1] == 32:
        _gather_32(codes, j0, nj, features, components, base)
    elif features.shape[1] == 8:
        _gather_8(codes, j0, nj, features, components, base)
    else:
        _gather_1(codes, j0, nj, features, components, base)


# ------------------------------------------------------------------------------------- loading and storing


@leaf
def _next_tile(x, i, n, j0, nj):
    """Bytes from the tile x[i:i + n, j0:j0 + nj] to the one that is probably next, 0 if there is none.

    Prefetching it saves 15 to 25 % of the time for data larger than the caches: a tile's stretch of a row is too short
    for the hardware prefetcher. (Addresses beyond the data would cost TLB misses.)
    """
    if j0 + nj < x.shape[1]:
        return nj * x.strides[1]
    return n * x.strides[0] - j0 * x.strides[1] if i + 2 * n <= x.shape[0] else 0


@leaf
def _count_edges(n, nj, side):
    """The number of squares that cover the part of n vectors and nj features beyond the whole squares."""
    return (n // side if nj % side else 0) + ((nj + side - 1) // side if n % side else 0)


@leaf
def _edge(index, n, nj, side):
    """The first vector and feature of one of these squares, which overlap the whole ones."""
    whole = n // side if nj % side else 0
    if index < whole:
        return index * side, nj - side
    return max(0, n - side), min((index - whole) * side, nj - side)


def _load_squares(x, i, n, j0, nj, tile, base):
    """`load_tile` by squares or halves of them, if possible; returns whether it was.

    The last square of a row or column overlaps the one before it. Where there are fewer vectors than in a square, the
    others become copies of the last one.
    """
    raise NotImplementedError


@overload(_load_squares)
def _overload_load_squares(x, i, n, j0, nj, tile, base):
    if not loads_by_squares(x, tile):
        return lambda x, i, n, j0, nj, tile, base: False
    side, item = SQUARE_BYTES * 8 // tile.dtype.bitwidth, x.dtype.bitwidth // 8

    @leaf
    def load_few(x, i, n, j0, nj, tile, base):
        """The same for less than a square of vectors that are in memory as columns, or in a tile of half squares."""
        is_half = tile.shape[1] == side // 2
        if is_half and x.strides[1] == item and nj >= side:
            ahead = _next_tile(x, i, n, j0, nj)
            for start in range(0, nj, side):
                j = min(start, nj - side)
                load_half_rows(x, i, j0 + j, n, ahead, tile, base + j)
            return True
        if x.strides[0] != item or n >= side or not (is_half or side <= tile.shape[1]):
            return False
        for j in range(nj):
            load_column(x, i, j0 + j, n, tile, base + j, min(side, tile.shape[1]))
        return True

    def load(x, i, n, j0, nj, tile, base):
        if load_few(x, i, n, j0, nj, tile, base):
            return True
        rows, columns = x.strides[1] == item and side <= tile.shape[1], x.strides[0] == item and n >= side
        if nj < side or not (rows or columns):
            return False
        vectors, features, ahead = n // side * side, nj // side * side, _next_tile(x, i, n, j0, nj)
        if rows:
            for v in range(0, vectors, side):
                for j in range(0, features, side):
                    load_rows(x, i + v, j0 + j, side, ahead, tile, base + j, v)
            for edge in range(_count_edges(n, nj, side)):
                v, j = _edge(edge, n, nj, side)
                load_few_rows(x, i + v, j0 + j, n - v, ahead, tile, base + j, v)
        else:
            for j in range(0, features, side):
                for v in range(0, vectors, side):
                    load_columns(x, i + v, j0 + j, side, ahead, tile, base + j, v)
            for edge in range(_count_edges(n, nj, side)):
                v, j = _edge(edge, n, nj, side)
                load_columns(x, i + v, j0 + j, side, ahead, tile, base + j, v)
        return True

    return load


@leaf
def load_tile(x, i, n, j0, nj, tile, base):
    """tile[base + j, v] = x[i + v, j0 + j] for v < n, j < nj.

    Returns whether elements beyond v were written, too, up to a whole SIMD vector or half of one: with zeros or copies.
    """
    if _load_squares(x, i, n, j0, nj, tile, base):
        return n * tile.itemsize < SQUARE_BYTES
    if abs(x.strides[0]) < abs(x.strides[1]):
        for j in range(nj):
            for v in range(n):
                tile[base + j, v] = decoded(x[i + v, j0 + j], tile)
    else:
        for v in range(n):
            for j in range(nj):
                tile[base + j, v] = decoded(x[i + v, j0 + j], tile)
    return False


@leaf
def _store_squares(tile, base, out, i, n, j0, nj, scale):
    """`store_tile` by squares as in `_load_squares`, if possible; returns whether it was."""
    side = SQUARE_BYTES // tile.itemsize
    rows = out.strides[1] == out.itemsize and side <= tile.shape[1]
    columns = out.strides[0] == out.itemsize and n >= side
    if nj < side or not (rows or columns):
        return False
    ahead = (
        _next_tile(out, i, n, j0, nj) if nj == out.shape[1] else 0
    )  # prefetching gains nothing for tiles of features
    vectors, features = n // side * side, nj // side * side
    if rows:
        for v in range(0, vectors, side):
            for j in range(0, features, side):
                store_rows(tile, base + j, v, out, i + v, j0 + j, side, ahead, scale)
        for edge in range(_count_edges(n, nj, side)):
            v, j = _edge(edge, n, nj, side)
            store_few_rows(tile, base + j, v, out, i + v, j0 + j, n - v, ahead, scale)
    else:
        for j in range(0, features, side):
            for v in range(0, vectors, side):
                store_columns(tile, base + j, v, out, i + v, j0 + j, side, ahead, scale)
        for edge in range(_count_edges(n, nj, side)):
            v, j = _edge(edge, n, nj, side)
            store_columns(tile, base + j, v, out, i + v, j0 + j, side, ahead, scale)
    return True


@leaf
def store_tile(tile, base, out, i, n, j0, nj, scale, accumulate):
    """out[i + v, j0 + j] (+)= scale * tile[base + j, v] for v < n, j < nj, rounded once from fp64."""
    if not accumulate and _store_squares(tile, base, out, i, n, j0, nj, scale):
        return
    if abs(out.strides[0]) < abs(out.strides[1]):
        for j in range(nj):
            for v in range(n):
                value = scale * tile[base + j, v]
                store_element(value, out, i + v, j0 + j, accumulate)
    else:
        for v in range(n):
            for j in range(nj):
                value = scale * tile[base + j, v]
                store_element(value, out, i + v, j0 + j, accumulate)
