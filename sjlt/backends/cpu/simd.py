"""The innermost operations on tiles, as LLVM vector instructions.

Left to itself, the compiler checks at run time whether two tiles overlap before every few additions, and moves tiles
number by number: on Zen 5 a projection then takes more than twice as long.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import extending, types
from numba.core import cgutils

from .bits import DECODE, ENCODE, doubles_to_odd_floats, shuffle_mask

intrinsic: Any = extending.intrinsic  # its own types are those of the functions that emit code

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


def _load_part(builder: Any, pointer: Any, count: Any, align: int) -> Any:
    """The first `count` numbers of a vector in memory, zeros after them."""
    vector = pointer.type.pointee
    lanes = ir.Constant(ir.VectorType(count.type, vector.count), list(range(vector.count)))
    mask = builder.icmp_signed("<", lanes, _splat(builder, count, vector.count))
    kind = f"v{vector.count}{vector.element.intrinsic_name}"
    signature = ir.FunctionType(vector, [pointer.type, ir.IntType(32), mask.type, vector])
    load = cgutils.get_or_insert_function(builder.module, signature, f"llvm.masked.load.{kind}.p0{kind}")
    return builder.call(load, [pointer, ir.Constant(ir.IntType(32), align), mask, ir.Constant(vector, None)])


def _prefetch(builder: Any, pointer: Any, ahead: Any, size: int) -> None:
    """Fetch `size` bytes that lie `ahead` bytes after a pointer; any address is allowed."""
    address, word = ir.PointerType(ir.IntType(8)), ir.IntType(32)
    signature = ir.FunctionType(ir.VoidType(), [address, word, word, word])
    prefetch = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0i8")
    start = builder.gep(builder.bitcast(pointer, address), [ahead])
    for line in range(0, size, 64):
        place = builder.gep(start, [ir.Constant(ahead.type, line)])
        builder.call(prefetch, [place, *(ir.Constant(word, value) for value in (0, 3, 1))])  # to read, keep, data


@intrinsic
def scatter_row(typing_context, codes, begin, end, x, j, ahead, components):
    """components[row, v] += sign * x[v, j] for each of codes[begin:end], the entries of a column, and all v.

    codes has one axis. x is contiguous along its first axis, and is decoded where it has 16 bits; its numbers `ahead`
    bytes after these are fetched. The rows of components are whole vectors of SQUARE_BYTES, not shorter than x's
    columns: zeros are added to what is beyond.
    """
    lanes = SQUARE_BYTES * 8 // components.dtype.bitwidth

    def codegen(context, builder, signature, arguments):
        codes, begin, end, x, j, ahead, components = arguments
        codes_type, _, _, x_type, _, _, components_type = signature.args
        source, source_bytes = context.get_data_type(x_type.dtype), x_type.dtype.bitwidth // 8
        number, bits = context.get_data_type(components_type.dtype), components_type.dtype.bitwidth
        codes = context.make_array(codes_type)(context, builder, codes).data
        x = context.make_array(x_type)(context, builder, x)
        components = context.make_array(components_type)(context, builder, components)
        count, width = builder.extract_value(x.shape, 0), builder.extract_value(components.shape, 1)
        feature = builder.bitcast(x.data, ir.PointerType(ir.IntType(8)))
        feature = builder.gep(feature, [builder.mul(j, builder.extract_value(x.strides, 1))])
        feature = builder.bitcast(feature, source.as_pointer())

        def add(v, size, rest=None):
            """For the vectors v .. v + size - 1, or the first `rest` of them."""
            vector = ir.VectorType(number, size)
            pointer = builder.bitcast(builder.gep(feature, [v]), ir.VectorType(source, size).as_pointer())
            if rest is None:
                held = builder.load(pointer, align=source_bytes)
            else:
                held = _load_part(builder, pointer, rest, source_bytes)
            _prefetch(builder, pointer, ahead, size * source_bytes)
            if x_type.dtype is not components_type.dtype:
                held = DECODE[x_type.dtype](builder, held)
            with cgutils.for_range(builder, end, start=begin) as loop:
                code = builder.load(builder.gep(codes, [loop.index]))
                row = builder.zext(builder.lshr(code, ir.Constant(code.type, 1)), width.type)
                target = builder.gep(components.data, [builder.add(builder.mul(row, width), v)])
                target = builder.bitcast(target, vector.as_pointer())
                sign, total = _sign_vector(builder, code, number, size), builder.load(target, align=bits // 8)
                total = builder.call(_multiply_add(builder, vector, bits), (sign, held, total))
                builder.store(total, target, align=bits // 8)

        def times(value, factor):
            return builder.mul(value, ir.Constant(value.type, factor))

        whole = builder.udiv(count, ir.Constant(count.type, lanes))
        fours = builder.udiv(whole, ir.Constant(count.type, 4))
        with cgutils.for_range(builder, fours) as loop:
            add(times(loop.index, 4 * lanes), 4 * lanes)
        with cgutils.for_range(builder, whole, start=times(fours, 4)) as loop:
            add(times(loop.index, lanes), lanes)
        rest = builder.sub(count, times(whole, lanes))
        with builder.if_then(builder.icmp_signed(">", rest, ir.Constant(rest.type, 0))):
            add(times(whole, lanes), lanes, rest)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(codes, integer, integer, x, integer, integer, components), codegen


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
