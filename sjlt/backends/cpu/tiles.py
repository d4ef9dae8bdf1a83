"""Tiles on the CPU: several data vectors side by side, one a lane, so that SIMD works across vectors.

``tile[i, l]`` is feature (or component) i of vector l. Adding an entry of the sketch is then one addition over the
lanes, whatever the memory layout of the data, which only `load_tile` and `store_tile` see.

The innermost operations are written as LLVM vector instructions. Left to itself, the compiler checks at run time
whether two tiles overlap before every few additions, and moves tiles number by number: on Zen 5 a projection then
takes more than twice as long.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from .jit import leaf

LANES = (32, 8, 1)  # a tile has one of these; 32 fp32 are two AVX-512 registers
SQUARE_BYTES = 64  # a side of the squares that tiles are moved by: 16 fp32, 8 fp64


# ------------------------------------------------------------------------------------- entries into tiles


@leaf
def sign_of(code):
    return 1 - 2 * (code & 1)


def _splat(builder: Any, value: Any, width: int) -> Any:
    undefined = ir.Constant(ir.VectorType(value.type, width), ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(ir.IntType(32), width), [0] * width))


def _define_add_lanes(lanes: int) -> Any:
    @intrinsic
    def add_lanes(typing_context, target, i, source, j, sign):
        """target[i, :] += sign * source[j, :]; both tiles have `lanes` lanes of one dtype."""

        def codegen(context, builder, signature, arguments):
            target, i, source, j, sign = arguments
            align = signature.args[0].dtype.bitwidth // 8

            def pointer(array_type, array, row):
                data = context.make_array(array_type)(context, builder, array).data
                data = builder.gep(data, [builder.mul(row, ir.Constant(row.type, lanes))])
                return builder.bitcast(data, ir.PointerType(ir.VectorType(sign.type, lanes)))

            into, from_ = pointer(signature.args[0], target, i), pointer(signature.args[2], source, j)
            addend = builder.fmul(_splat(builder, sign, lanes), builder.load(from_, align=align))
            builder.store(builder.fadd(builder.load(into, align=align), addend), into, align=align)
            return context.get_dummy_value()

        return types.void(target, types.int64, source, types.int64, target.dtype), codegen

    return add_lanes


def _define_entries(lanes: int) -> tuple[Any, Any]:
    add_lanes = _define_add_lanes(lanes)

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


# ------------------------------------------------------------------------------------- squares of numbers


def _transpose(builder: Any, rows: list[Any]) -> list[Any]:
    """The columns of a square of vectors: at each step, pairs of rows trade their off-diagonal blocks."""
    width = len(rows)
    rows, step = list(rows), width // 2
    while step:
        for q in range(width):
            if q & step:
                continue
            upper, lower = rows[q], rows[q + step]
            left = [e if not e & step else width + e - step for e in range(width)]
            right = [e + step if not e & step else width + e for e in range(width)]
            for row, mask in ((q, left), (q + step, right)):
                mask = ir.Constant(ir.VectorType(ir.IntType(32), width), mask)
                rows[row] = builder.shuffle_vector(upper, lower, mask)
        step //= 2
    return rows


def _halves_to_floats(builder: Any, halves: Any) -> Any:
    """Vectors of the bits of fp16 as fp32, exactly: shifted into place, their exponents' bias moved by 2^112."""
    width = halves.type.count
    words, floats = ir.VectorType(ir.IntType(32), width), ir.VectorType(ir.FloatType(), width)

    def splat(value: int) -> Any:
        return ir.Constant(words, [value] * width)

    bits = builder.zext(halves, words)
    magnitude = builder.shl(builder.and_(bits, splat(0x7FFF)), splat(13))
    number = builder.fmul(builder.bitcast(magnitude, floats), ir.Constant(floats, [2.0**112] * width))
    is_finite = builder.icmp_unsigned("<", magnitude, splat(0x7C00 << 13))
    special = builder.or_(magnitude, splat(0x7F800000))
    magnitude = builder.select(is_finite, builder.bitcast(number, words), special)
    sign = builder.shl(builder.and_(bits, splat(0x8000)), splat(16))
    return builder.bitcast(builder.or_(magnitude, sign), floats)


def _at(context: Any, builder: Any, array_type: Any, array: Any, i: Any, j: Any) -> Any:
    """The address of element (i, j) of an array of any strides."""
    array = context.make_array(array_type)(context, builder, array)
    strides = (builder.extract_value(array.strides, axis) for axis in (0, 1))
    offset = builder.add(*(builder.mul(index, stride) for index, stride in zip((i, j), strides, strict=True)))
    return builder.gep(builder.bitcast(array.data, ir.PointerType(ir.IntType(8))), [offset])


def _square_moves(x: Any, tile: Any) -> bool:
    """Whether squares can be moved between an array x and a tile: a matter of their dtypes."""
    return x.dtype is tile.dtype or (x.dtype is types.uint16 and tile.dtype is types.float32)


def _define_load_square(transposed: bool) -> Any:
    @intrinsic
    def load_square(typing_context, x, i, j, tile, row, lane):
        """tile[row + q, lane + p] = x[i + p, j + q] for p, q < side, x contiguous along j (transposed) or i."""
        side = SQUARE_BYTES * 8 // tile.dtype.bitwidth

        def codegen(context, builder, signature, arguments):
            x, i, j, tile, row, lane = arguments
            x_type, tile_type = signature.args[0], signature.args[3]
            source = ir.VectorType(context.get_data_type(x_type.dtype), side)
            vectors = []
            for q in range(side):
                step = ir.Constant(i.type, q)
                at = (builder.add(i, step), j) if transposed else (i, builder.add(j, step))
                pointer = builder.bitcast(_at(context, builder, x_type, x, *at), ir.PointerType(source))
                vector = builder.load(pointer, align=x_type.dtype.bitwidth // 8)
                vectors.append(_halves_to_floats(builder, vector) if x_type.dtype is types.uint16 else vector)
            if transposed:
                vectors = _transpose(builder, vectors)
            for q, vector in enumerate(vectors):
                at = builder.add(row, ir.Constant(row.type, q)), lane
                pointer = _at(context, builder, tile_type, tile, *at)
                builder.store(
                    vector, builder.bitcast(pointer, ir.PointerType(vector.type)), align=tile_type.dtype.bitwidth // 8
                )
            return context.get_dummy_value()

        return types.void(x, types.int64, types.int64, tile, types.int64, types.int64), codegen

    return load_square


def _define_store_square(transposed: bool) -> Any:
    @intrinsic
    def store_square(typing_context, tile, row, lane, out, i, j, scale):
        """out[i + p, j + q] = scale * tile[row + q, lane + p] for p, q < side, by way of fp64, as `store_tile`."""
        side = SQUARE_BYTES * 8 // tile.dtype.bitwidth

        def codegen(context, builder, signature, arguments):
            tile, row, lane, out, i, j, scale = arguments
            tile_type, out_type = signature.args[0], signature.args[3]
            source = ir.VectorType(context.get_data_type(tile_type.dtype), side)
            wide = ir.VectorType(ir.DoubleType(), side)
            target = ir.VectorType(context.get_data_type(out_type.dtype), side)
            vectors = []
            for q in range(side):
                pointer = _at(context, builder, tile_type, tile, builder.add(row, ir.Constant(row.type, q)), lane)
                pointer = builder.bitcast(pointer, ir.PointerType(source))
                vector = builder.load(pointer, align=tile_type.dtype.bitwidth // 8)
                vector = builder.fpext(vector, wide) if source != wide else vector
                vector = builder.fmul(_splat(builder, scale, side), vector)
                vectors.append(builder.fptrunc(vector, target) if target != wide else vector)
            if transposed:
                vectors = _transpose(builder, vectors)
            for q, vector in enumerate(vectors):
                step = ir.Constant(i.type, q)
                at = (builder.add(i, step), j) if transposed else (i, builder.add(j, step))
                pointer = builder.bitcast(_at(context, builder, out_type, out, *at), ir.PointerType(target))
                builder.store(vector, pointer, align=out_type.dtype.bitwidth // 8)
            return context.get_dummy_value()

        return types.void(tile, types.int64, types.int64, out, types.int64, types.int64, types.float64), codegen

    return store_square


_load_rows, _load_columns = _define_load_square(True), _define_load_square(False)
_store_rows, _store_columns = _define_store_square(True), _define_store_square(False)


# ------------------------------------------------------------------------------------- tiles of numbers


def _convert(value, tile):
    """`value` in the tile's dtype. Numba's CPU target has no fp16: uint16 into an fp32 tile is the bits of one."""
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
    return lambda value, tile: dtype(value)


def _load_squares(x, i, n, j0, nj, tile, base):
    """`load_tile` for the whole squares; returns how many lanes and features these cover."""
    raise NotImplementedError


@overload(_load_squares)
def _overload_load_squares(x, i, n, j0, nj, tile, base):
    if not _square_moves(x, tile):
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
                    _load_rows(x, i + lane, j0 + j, tile, base + j, lane)
                else:
                    _load_columns(x, i + lane, j0 + j, tile, base + j, lane)
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
                _store_rows(tile, base + j, lane, out, i + lane, j0 + j, scale)
            else:
                _store_columns(tile, base + j, lane, out, i + lane, j0 + j, scale)
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
