"""Tiles: several data vectors side by side, one a lane, so that SIMD works across vectors.

``tile[i, l]`` is feature (or component) i of vector l. Adding an entry of the sketch is then one addition over the
lanes, whatever the memory layout of the data, which only `load_tile` and `store_tile` see.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from .jit import leaf
from .simd import SQUARE_BYTES, define_add_lanes, load_columns, load_rows, moves_by_squares, store_columns, store_rows

LANES = (32, 8, 1)  # a tile has one of these; 32 fp32 are two AVX-512 registers


# ------------------------------------------------------------------------------------- entries into tiles


@leaf
def sign_of(code):
    return 1 - 2 * (code & 1)


def _define_entries(lanes: int) -> tuple[Any, Any]:
    add_lanes = define_add_lanes(lanes)

    def scatter(codes, j0, nj, features, components, base):
        for j in range(nj):
            for t in range(codes.shape[1]):
                code = codes[j0 + j, t]
                add_lanes(components, base + (code >> 1), features, j, components.dtype.type(sign_of(code)))

    def gather(codes, j0, nj, features, components, base):
        for j in range(nj):
            for t in range(codes.shape[1]):
                code = codes[j0 + j, t]
                add_lanes(features, j, components, base + (code >> 1), components.dtype.type(sign_of(code)))

    # Numba links machine code from its cache by these names: closures that share one would be taken for each other.
    scatter.__qualname__, gather.__qualname__ = f"scatter_{lanes}", f"gather_{lanes}"
    return leaf(scatter), leaf(gather)


(_scatter_32, _gather_32), (_scatter_8, _gather_8), (_scatter_1, _gather_1) = map(_define_entries, LANES)


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


# ------------------------------------------------------------------------------------- tiles of numbers


def _convert(value, tile):
    """`value` in the tile's dtype.

    Numba's CPU target has no 16-bit floats: into an fp32 tile, uint16 is the bits of fp16, and int16 those of bf16.
    (An array of integers is computed in fp64.)
    """
    raise NotImplementedError


@overload(_convert)
def _overload_convert(value, tile):
    dtype = tile.dtype
    if value is types.uint16 and dtype is types.float32:

        def half(value, tile):
            magnitude = (np.uint32(value) & np.uint32(0x7FFF)) << np.uint32(13)
            number = np.uint32(magnitude).view(np.float32) * np.float32(2.0**112)
            is_finite = magnitude < np.uint32(0x7C00 << 13)
            bits = np.float32(number).view(np.uint32) if is_finite else magnitude | np.uint32(0x7F800000)
            sign = (np.uint32(value) & np.uint32(0x8000)) << np.uint32(16)
            return np.uint32(bits | sign).view(np.float32)

        return half
    if value is types.int16 and dtype is types.float32:
        return lambda value, tile: np.uint32(np.uint32(np.uint16(value)) << np.uint32(16)).view(np.float32)
    return lambda value, tile: dtype(value)


def _load_squares(x, i, n, j0, nj, tile, base):
    """`load_tile` for the whole squares; returns how many lanes and features these cover."""
    raise NotImplementedError


@overload(_load_squares)
def _overload_load_squares(x, i, n, j0, nj, tile, base):
    if not moves_by_squares(x, tile):
        return lambda x, i, n, j0, nj, tile, base: (0, 0)
    side, item = SQUARE_BYTES * 8 // tile.dtype.bitwidth, x.dtype.bitwidth // 8

    def load(x, i, n, j0, nj, tile, base):
        rows, columns = x.strides[1] == item, x.strides[0] == item
        if not (rows or columns):
            return 0, 0
        lanes, features = n // side * side, nj // side * side
        for j in range(0, features, side):
            for lane in range(0, lanes, side):
                if rows:
                    load_rows(x, i + lane, j0 + j, tile, base + j, lane)
                else:
                    load_columns(x, i + lane, j0 + j, tile, base + j, lane)
        return lanes, features

    return load


@leaf
def load_tile(x, i, n, j0, nj, tile, base):
    """tile[base + j, l] = x[i + l, j0 + j] for l < n, j < nj."""
    lanes, features = _load_squares(x, i, n, j0, nj, tile, base)
    if abs(x.strides[0]) < abs(x.strides[1]):
        for j in range(nj):
            for lane in range(lanes if j < features else 0, n):
                tile[base + j, lane] = _convert(x[i + lane, j0 + j], tile)
    else:
        for lane in range(n):
            for j in range(features if lane < lanes else 0, nj):
                tile[base + j, lane] = _convert(x[i + lane, j0 + j], tile)


@leaf
def _store_squares(tile, base, out, i, n, j0, nj, scale):
    """`store_tile` for the whole squares; returns how many lanes and features these cover."""
    side = SQUARE_BYTES // tile.itemsize
    rows, columns = out.strides[1] == out.itemsize, out.strides[0] == out.itemsize
    if not (rows or columns):
        return 0, 0
    lanes, features = n // side * side, nj // side * side
    for j in range(0, features, side):
        for lane in range(0, lanes, side):
            if rows:
                store_rows(tile, base + j, lane, out, i + lane, j0 + j, scale)
            else:
                store_columns(tile, base + j, lane, out, i + lane, j0 + j, scale)
    return lanes, features


@leaf
def store_tile(tile, base, out, i, n, j0, nj, scale, accumulate):
    """out[i + l, j0 + j] = (that, where accumulating, +) scale * tile[base + j, l], rounded once from fp64."""
    lanes, features = 0, 0
    if not accumulate:
        lanes, features = _store_squares(tile, base, out, i, n, j0, nj, scale)
    if abs(out.strides[0]) < abs(out.strides[1]):
        for j in range(nj):
            for lane in range(lanes if j < features else 0, n):
                value = scale * tile[base + j, lane]
                out[i + lane, j0 + j] = out[i + lane, j0 + j] + value if accumulate else value
    else:
        for lane in range(n):
            for j in range(features if lane < lanes else 0, nj):
                value = scale * tile[base + j, lane]
                out[i + lane, j0 + j] = out[i + lane, j0 + j] + value if accumulate else value
