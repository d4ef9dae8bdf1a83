"""The innermost operations on tiles, as LLVM vector instructions.

Left to itself, the compiler checks at run time whether two tiles overlap before every few additions, and moves tiles
number by number: on Zen 5 a projection then takes more than twice as long.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .bits import DECODE, ENCODE, doubles_to_odd_floats, shuffle_mask

HELD_ROWS = 8 if get_host_cpu_features().get("avx512f", False) else 2  # rows of 32 fp32 that registers hold
SQUARE_BYTES = 64  # a side of the squares that tiles are moved by: 16 fp32, 8 fp64


def _splat(builder: Any, value: Any, width: int) -> Any:
    undefined = ir.Constant(ir.VectorType(value.type, width), ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, undefined, shuffle_mask([0] * width))


def _sign_vector(builder: Any, code: Any, number: Any, width: int) -> Any:
    """A vector of 1.0 for an even code, of -1.0 for an odd one."""
    bits, one = (32, 0x3F800000) if isinstance(number, ir.FloatType) else (64, 0x3FF0000000000000)
    integer = ir.IntType(bits)
    code = builder.zext(code, integer) if bits > 32 else code
    word = builder.or_(builder.shl(code, ir.Constant(integer, bits - 1)), ir.Constant(integer, one))
    return _splat(builder, builder.bitcast(word, number), width)


def _multiply_add(builder: Any, vector: Any, number_bits: int) -> Any:
    """LLVM's a * b + c for vectors. Where products are exact, fused and separate instructions give the same bits."""
    name = f"llvm.fmuladd.v{vector.count}f{number_bits}"
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), name)


def define_apply_codes(vectors: int, adjoint: bool) -> Any:
    @intrinsic
    def apply_codes(typing_context, codes, begin, end, features, i, components, base):
        """components[base + row] += sign * features[i] for each of codes[begin:end], the entries of a column.

        With `adjoint`, features[i] += sign * components[base + row]. codes has one axis; both tiles have `vectors`
        columns of one dtype.
        """

        def codegen(context, builder, signature, arguments):
            codes, begin, end, features, i, components, base = arguments
            codes_type, _, _, features_type, _, components_type, _ = signature.args
            number, align = context.get_data_type(features_type.dtype), features_type.dtype.bitwidth // 8
            vector = ir.VectorType(number, vectors)
            fma = _multiply_add(builder, vector, 8 * align)

            def row(array_type, array, index):
                data = context.make_array(array_type)(context, builder, array).data
                data = builder.gep(data, [builder.mul(index, ir.Constant(index.type, vectors))])
                return builder.bitcast(data, vector.as_pointer())

            data, feature = (
                context.make_array(codes_type)(context, builder, codes).data,
                row(features_type, features, i),
            )
            held = cgutils.alloca_once_value(builder, builder.load(feature, align=align))  # in registers
            with cgutils.for_range(builder, end, start=begin) as loop:
                code = builder.load(builder.gep(data, [loop.index]))
                place = builder.zext(builder.lshr(code, ir.Constant(code.type, 1)), base.type)
                component = row(components_type, components, builder.add(base, place))
                sign = _sign_vector(builder, code, number, vectors)
                mine, other = builder.load(held), builder.load(component, align=align)
                if adjoint:
                    builder.store(builder.call(fma, (sign, other, mine)), held)
                else:
                    builder.store(builder.call(fma, (sign, mine, other)), component, align=align)
            if adjoint:
                builder.store(builder.load(held), feature, align=align)
            return context.get_dummy_value()

        integer = types.int64
        return types.void(codes, integer, integer, features, integer, components, integer), codegen

    return apply_codes


def define_multiply_rows(vectors: int, width: int) -> Any:
    @intrinsic
    def multiply_rows(typing_context, entries, at, step, next_, count, tile, sums, base):
        """sums[base + w, :] += sum over i < count of entries[at + w step + i next_] tile[i, :], for w < `width`.

        entries has one axis. The sums stay in registers, and run in the order of i.
        """

        def codegen(context, builder, signature, arguments):
            _, at, step, next_, count, _, _, base = arguments
            number = context.get_data_type(signature.args[0].dtype)
            vector, align = ir.VectorType(number, vectors), signature.args[0].dtype.bitwidth // 8
            fma = _multiply_add(builder, vector, 8 * align)
            values, tile, sums = (
                context.make_array(signature.args[n])(context, builder, arguments[n]).data for n in (0, 5, 6)
            )

            def row(data, i):
                data = builder.gep(data, [builder.mul(i, ir.Constant(i.type, vectors))])
                return builder.bitcast(data, vector.as_pointer())

            rows = [row(sums, builder.add(base, ir.Constant(base.type, w))) for w in range(width)]
            held = [cgutils.alloca_once_value(builder, builder.load(pointer, align=align)) for pointer in rows]
            with cgutils.for_range(builder, count) as loop:
                x = builder.load(row(tile, loop.index), align=align)
                place = builder.add(at, builder.mul(loop.index, next_))
                for total in held:
                    entry = _splat(builder, builder.load(builder.gep(values, [place])), vectors)
                    builder.store(builder.call(fma, (entry, x, builder.load(total))), total)
                    place = builder.add(place, step)
            for pointer, total in zip(rows, held, strict=True):
                builder.store(builder.load(total), pointer, align=align)
            return context.get_dummy_value()

        integer = types.int64
        return types.void(entries, integer, integer, integer, integer, tile, sums, integer), codegen

    return multiply_rows


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
            rows[q] = builder.shuffle_vector(upper, lower, shuffle_mask(left))
            rows[q + step] = builder.shuffle_vector(upper, lower, shuffle_mask(right))
        step //= 2
    return rows


def _square(context: Any, builder: Any, array_type: Any, array: Any, i: Any, j: Any, axis: int, side: int) -> list[Any]:
    """Pointers to `side` vectors of `side` numbers in an array of any strides: from (i, j) on, one a step of `axis`."""
    array = context.make_array(array_type)(context, builder, array)
    vector = ir.PointerType(ir.VectorType(context.get_data_type(array_type.dtype), side))
    data = builder.bitcast(array.data, ir.PointerType(ir.IntType(8)))
    pointers = []
    for step in range(side):
        at = [builder.add(index, ir.Constant(index.type, step if axis == n else 0)) for n, index in enumerate((i, j))]
        strides = (builder.extract_value(array.strides, n) for n in range(2))
        offset = builder.add(*(builder.mul(index, stride) for index, stride in zip(at, strides, strict=True)))
        pointers.append(builder.bitcast(builder.gep(data, [offset]), vector))
    return pointers


def loads_by_squares(x: Any, tile: Any) -> bool:
    """Whether the dtypes of an array x and a tile allow to load squares."""
    return x.dtype is tile.dtype or (x.dtype in DECODE and tile.dtype is types.float32)


def _define_load_square(transposed: bool) -> Any:
    @intrinsic
    def load_square(typing_context, x, i, j, tile, row, vector):
        """tile[row + q, vector + p] = x[i + p, j + q] for p, q < side, x contiguous along j (transposed) or i."""
        side = SQUARE_BYTES * 8 // tile.dtype.bitwidth

        def codegen(context, builder, signature, arguments):
            x, i, j, tile, row, first = arguments
            x_type, _, _, tile_type, _, _ = signature.args
            sources = _square(context, builder, x_type, x, i, j, 0 if transposed else 1, side)
            vectors = [builder.load(pointer, align=x_type.dtype.bitwidth // 8) for pointer in sources]
            if tile_type.dtype is not x_type.dtype:
                vectors = [DECODE[x_type.dtype](builder, vector) for vector in vectors]
            if transposed:
                vectors = _transpose(builder, vectors)
            targets = _square(context, builder, tile_type, tile, row, first, 0, side)
            for vector, pointer in zip(vectors, targets, strict=True):
                builder.store(vector, pointer, align=tile_type.dtype.bitwidth // 8)
            return context.get_dummy_value()

        return types.void(x, types.int64, types.int64, tile, types.int64, types.int64), codegen

    return load_square


def _define_store_square(transposed: bool) -> Any:
    @intrinsic
    def store_square(typing_context, tile, row, vector, out, i, j, scale):
        """out[i + p, j + q] = scale * tile[row + q, vector + p] for p, q < side, by way of fp64, as `store_tile`."""
        side = SQUARE_BYTES * 8 // tile.dtype.bitwidth

        def codegen(context, builder, signature, arguments):
            tile, row, first, out, i, j, scale = arguments
            tile_type, _, _, out_type, _, _, _ = signature.args
            scales = _splat(builder, scale, side)
            vectors = []
            for pointer in _square(context, builder, tile_type, tile, row, first, 0, side):
                vector = builder.load(pointer, align=tile_type.dtype.bitwidth // 8)
                if tile_type.dtype is types.float32:
                    vector = builder.fpext(vector, scales.type)
                vector = builder.fmul(scales, vector)
                if out_type.dtype is types.float32:
                    vector = builder.fptrunc(vector, ir.VectorType(ir.FloatType(), side))
                elif out_type.dtype in ENCODE:
                    vector = ENCODE[out_type.dtype](builder, doubles_to_odd_floats(builder, vector))
                vectors.append(vector)
            if transposed:
                vectors = _transpose(builder, vectors)
            targets = _square(context, builder, out_type, out, i, j, 0 if transposed else 1, side)
            for vector, pointer in zip(vectors, targets, strict=True):
                builder.store(vector, pointer, align=out_type.dtype.bitwidth // 8)
            return context.get_dummy_value()

        return types.void(tile, types.int64, types.int64, out, types.int64, types.int64, types.float64), codegen

    return store_square


load_rows, load_columns = _define_load_square(True), _define_load_square(False)
store_rows, store_columns = _define_store_square(True), _define_store_square(False)
