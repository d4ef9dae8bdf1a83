"""The innermost operations on tiles as LLVM vector instructions, and helpers shared with `rows`.

Left to itself, the compiler checks at run time whether two tiles overlap before every few additions, and copies tiles
element by element: on Zen 5, a projection then takes more than twice as long.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import extending, types
from numba.core import cgutils

from .bits import DECODE, shuffle_mask, splat
from .scaling import scaled

intrinsic: Any = extending.intrinsic  # Any: in kernels, intrinsics are called without a typing context

REGISTER_ROWS = 8 if get_host_cpu_features().get("avx512f", False) else 2  # rows of 32 fp32 that fit in the registers
LINE_BYTES = 64  # size of a cache line
SQUARE_BYTES = 64  # side of the squares in which tiles are loaded and stored: 16 fp32, 8 fp64


def sign_vector(builder: Any, code: Any, element: Any, width: int) -> Any:
    """A vector filled with 1.0 if `code` is even, -1.0 if odd."""
    bits, one = (32, 0x3F800000) if isinstance(element, ir.FloatType) else (64, 0x3FF0000000000000)
    integer = ir.IntType(bits)
    code = builder.zext(code, integer) if bits > 32 else code
    word = builder.or_(builder.shl(code, ir.Constant(integer, bits - 1)), ir.Constant(integer, one))
    return splat(builder, builder.bitcast(word, element), width)


@intrinsic
def signed(typing_context, value, code):
    """The value, negated if `code` is odd: without a branch, which half of the random signs would mispredict."""

    def codegen(context, builder, signature, arguments):
        value, code = arguments
        bits = signature.args[0].bitwidth
        integer = ir.IntType(bits)
        sign = builder.zext(code, integer) if bits > 32 else code
        sign = builder.shl(sign, ir.Constant(integer, bits - 1))
        return builder.bitcast(builder.xor(builder.bitcast(value, integer), sign), value.type)

    return value(value, types.uint32), codegen


def multiply_add(builder: Any, vector: Any, number_bits: int) -> Any:
    """LLVM's a * b + c for vectors. Products must be exact: fused and separate operations then give the same bits."""
    name = f"llvm.fmuladd.v{vector.count}f{number_bits}"
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), name)


def define_apply_codes(vectors: int, adjoint: bool) -> Any:
    @intrinsic
    def apply_codes(typing_context, codes, begin, end, features, i, components, base):
        """components[base + row] += sign * features[i] for each of codes[begin:end], the entries of a column.

        With `adjoint`, features[i] += sign * components[base + row]. codes is contiguous and indexed as if it were
        flat. Both tiles have `vectors` columns and the same dtype.
        """

        def codegen(context, builder, signature, arguments):
            codes, begin, end, features, i, components, base = arguments
            codes_type, _, _, features_type, _, components_type, _ = signature.args
            element, align = context.get_data_type(features_type.dtype), features_type.dtype.bitwidth // 8
            vector = ir.VectorType(element, vectors)
            fma = multiply_add(builder, vector, 8 * align)

            def row(array_type, array, index):
                data = context.make_array(array_type)(context, builder, array).data
                data = builder.gep(data, [builder.mul(index, ir.Constant(index.type, vectors))])
                return builder.bitcast(data, vector.as_pointer())

            data, feature = (
                context.make_array(codes_type)(context, builder, codes).data,
                row(features_type, features, i),
            )
            value = cgutils.alloca_once_value(builder, builder.load(feature, align=align))  # in registers
            with cgutils.for_range(builder, end, start=begin) as loop:
                code = builder.load(builder.gep(data, [loop.index]))
                position = builder.zext(builder.lshr(code, ir.Constant(code.type, 1)), base.type)
                component = row(components_type, components, builder.add(base, position))
                sign = sign_vector(builder, code, element, vectors)
                x, y = builder.load(value), builder.load(component, align=align)
                if adjoint:
                    builder.store(builder.call(fma, (sign, y, x)), value)
                else:
                    builder.store(builder.call(fma, (sign, x, y)), component, align=align)
            if adjoint:
                builder.store(builder.load(value), feature, align=align)
            return context.get_dummy_value()

        integer = types.int64
        return types.void(codes, integer, integer, features, integer, components, integer), codegen

    return apply_codes


def first_lanes(builder: Any, count: Any, width: int) -> Any:
    """A mask of `width` lanes, of which the first `count` are set."""
    lanes = ir.Constant(ir.VectorType(count.type, width), list(range(width)))
    return builder.icmp_signed("<", lanes, splat(builder, count, width))


def load_part(builder: Any, pointer: Any, count: Any, align: int) -> Any:
    """Load the first `count` elements of a vector; the others are 0."""
    return load_masked(builder, pointer, first_lanes(builder, count, pointer.type.pointee.count), align)


def load_masked(builder: Any, pointer: Any, mask: Any, align: int) -> Any:
    """Load a vector where the mask is set; elsewhere it is 0."""
    vector = pointer.type.pointee
    arguments = [pointer, ir.Constant(ir.IntType(32), align), mask, ir.Constant(vector, None)]
    return _call_masked(builder, "load", vector, vector, arguments)


def store_masked(builder: Any, vector: Any, pointer: Any, mask: Any, align: int) -> None:
    """Store a vector where the mask is set."""
    arguments = [vector, pointer, ir.Constant(ir.IntType(32), align), mask]
    _call_masked(builder, "store", ir.VoidType(), vector.type, arguments)


def _call_masked(builder: Any, name: str, result: Any, vector: Any, arguments: list[Any]) -> Any:
    kind = f"v{vector.count}{vector.element.intrinsic_name}"
    signature = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.masked.{name}.{kind}.p0{kind}")
    return builder.call(function, arguments)


def line_pointer(builder: Any, x: Any, i: Any, axis: int) -> Any:
    """A pointer to the first element of row i of a 2-D array (axis 0) or of its column i (axis 1)."""
    start = builder.bitcast(x.data, ir.PointerType(ir.IntType(8)))
    start = builder.gep(start, [builder.mul(i, builder.extract_value(x.strides, axis))])
    return builder.bitcast(start, x.data.type)


def prefetch(builder: Any, pointer: Any, ahead: Any, size: int, write: int = 0, locality: int = 3) -> None:
    """Prefetch the `size` bytes that begin `ahead` bytes after a pointer; any address is allowed.

    write : 1 if they will be written, else 0.  locality : 3 for all caches, 2 for all but L1.
    """
    address, word = ir.PointerType(ir.IntType(8)), ir.IntType(32)
    signature = ir.FunctionType(ir.VoidType(), [address, word, word, word])
    fetch = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0i8")
    start = builder.gep(builder.bitcast(pointer, address), [ahead])
    for line in range(0, size, LINE_BYTES):
        pointer = builder.gep(start, [ir.Constant(ahead.type, line)])
        builder.call(fetch, [pointer, *(ir.Constant(word, value) for value in (write, locality, 1))])


@intrinsic
def load_elements(typing_context, x, i, j, count, target, at):
    """target[at + v] = x[i, j + v] for v < count, a multiple of SQUARE_BYTES; 16-bit elements are decoded.

    x is contiguous along its second axis. target is flat and has the dtype of sums.
    """
    lanes = SQUARE_BYTES

    def codegen(context, builder, signature, arguments):
        x, i, j, count, target, at = arguments
        x_type, target_type = signature.args[0], signature.args[4]
        x = context.make_array(x_type)(context, builder, x)
        target = context.make_array(target_type)(context, builder, target)
        row, target_row = builder.gep(line_pointer(builder, x, i, 0), [j]), builder.gep(target.data, [at])
        x_vector = ir.VectorType(context.get_data_type(x_type.dtype), lanes)
        target_vector = ir.VectorType(context.get_data_type(target_type.dtype), lanes)
        step = ir.Constant(count.type, lanes)
        with cgutils.for_range_slice(builder, ir.Constant(count.type, 0), count, step, count.type) as (v, _):
            pointer = builder.bitcast(builder.gep(row, [v]), x_vector.as_pointer())
            vector = builder.load(pointer, align=x_type.dtype.bitwidth // 8)
            if x_type.dtype is not target_type.dtype:
                vector = DECODE[x_type.dtype](builder, vector)
            pointer = builder.bitcast(builder.gep(target_row, [v]), target_vector.as_pointer())
            builder.store(vector, pointer, align=target_type.dtype.bitwidth // 8)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(x, integer, integer, integer, target, integer), codegen


def define_multiply_rows(vectors: int, width: int) -> Any:
    @intrinsic
    def multiply_rows(typing_context, entries, at, step, next_, count, tile, sums, base):
        """sums[base + w, :] += sum over i < count of entries[at + w step + i next_] tile[i, :], for w < `width`.

        entries is flat. The sums stay in registers; terms are added in the order of i.
        """

        def codegen(context, builder, signature, arguments):
            _, at, step, next_, count, _, _, base = arguments
            element = context.get_data_type(signature.args[0].dtype)
            vector, align = ir.VectorType(element, vectors), signature.args[0].dtype.bitwidth // 8
            fma = multiply_add(builder, vector, 8 * align)
            values, tile, sums = (
                context.make_array(signature.args[n])(context, builder, arguments[n]).data for n in (0, 5, 6)
            )

            def row(data, i):
                data = builder.gep(data, [builder.mul(i, ir.Constant(i.type, vectors))])
                return builder.bitcast(data, vector.as_pointer())

            rows = [row(sums, builder.add(base, ir.Constant(base.type, w))) for w in range(width)]
            totals = [cgutils.alloca_once_value(builder, builder.load(pointer, align=align)) for pointer in rows]
            with cgutils.for_range(builder, count) as loop:
                x = builder.load(row(tile, loop.index), align=align)
                position = builder.add(at, builder.mul(loop.index, next_))
                for total in totals:
                    entry = splat(builder, builder.load(builder.gep(values, [position])), vectors)
                    builder.store(builder.call(fma, (entry, x, builder.load(total))), total)
                    position = builder.add(position, step)
            for pointer, total in zip(rows, totals, strict=True):
                builder.store(builder.load(total), pointer, align=align)
            return context.get_dummy_value()

        integer = types.int64
        return types.void(entries, integer, integer, integer, integer, tile, sums, integer), codegen

    return multiply_rows


def _transpose(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose a square of vectors, by shuffles that are single instructions on x86: within or of lanes of 128 bits.

    At each step, the elements (or lanes) of pairs of rows are interleaved (or separated into even and odd ones).
    """
    element, width = rows[0].type.element, len(rows)
    lane = 128 // (element.width if isinstance(element, ir.IntType) else 32 if element == ir.FloatType() else 64)
    low = [start + i // 2 + i % 2 * width for start in range(0, width, lane) for i in range(lane)]
    even = [row + start + i for row in (0, width) for start in range(0, width, 2 * lane) for i in range(lane)]
    rows, log_lane = list(rows), lane.bit_length() - 1
    steps = [(1 << i, low, lane // 2) for i in reversed(range(log_lane))]
    steps += [(1 << i, even, lane) for i in range(log_lane, width.bit_length() - 1)]
    for step, first, offset in steps:
        masks = shuffle_mask(first), shuffle_mask([i + offset for i in first])
        for q in range(width):
            if not q & step:
                pair = rows[q], rows[q + step]
                rows[q], rows[q + step] = (builder.shuffle_vector(*pair, mask) for mask in masks)
    return rows


def _square(
    context: Any, builder: Any, array_type: Any, array: Any, i: Any, j: Any, axis: int, shape: tuple[int, int],
    count: Any = None,
) -> list[Any]:  # fmt: skip
    """Pointers to ``shape[0]`` vectors of ``shape[1]`` elements in a strided array: from (i, j) on, along `axis`.

    Given a `count`, the array has only so many; the others are the last one.
    """
    array = context.make_array(array_type)(context, builder, array)
    vector = ir.PointerType(ir.VectorType(context.get_data_type(array_type.dtype), shape[1]))
    data = builder.bitcast(array.data, ir.PointerType(ir.IntType(8)))
    pointers = []
    for p in range(shape[0]):
        step = ir.Constant(i.type, p)
        if count is not None:
            last = builder.sub(count, ir.Constant(i.type, 1))
            step = builder.select(builder.icmp_signed("<", step, count), step, last)
        at = [builder.add(index, step) if axis == n else index for n, index in enumerate((i, j))]
        strides = (builder.extract_value(array.strides, n) for n in range(2))
        offset = builder.add(*(builder.mul(index, stride) for index, stride in zip(at, strides, strict=True)))
        pointers.append(builder.bitcast(builder.gep(data, [offset]), vector))
    return pointers


def loads_by_squares(x: Any, tile: Any) -> bool:
    """Whether the dtypes of an array x and a tile allow squares to be loaded."""
    return x.dtype is tile.dtype or (x.dtype in DECODE and tile.dtype is types.float32)


def _define_load_square(transposed: bool, few: bool = False) -> Any:
    @intrinsic
    def load_square(typing_context, x, i, j, count, ahead, tile, row, vector):
        """tile[row + q, vector + p] = x[i + p, j + q] for p, q < side; x is contiguous along j (`transposed`) or i.

        With `few`, x may have only `count` rows from i on: those for higher p are copies of the last one. The memory
        `ahead` bytes after the elements that are read is prefetched.
        """
        side = SQUARE_BYTES * 8 // tile.dtype.bitwidth

        def codegen(context, builder, signature, arguments):
            x, i, j, count, ahead, tile, row, first = arguments
            x_type, _, _, _, _, tile_type, _, _ = signature.args
            axis = 0 if transposed else 1
            sources = _square(context, builder, x_type, x, i, j, axis, (side, side), count if few else None)
            vectors = [builder.load(pointer, align=x_type.dtype.bitwidth // 8) for pointer in sources]
            if tile_type.dtype is not x_type.dtype:
                vectors = [DECODE[x_type.dtype](builder, vector) for vector in vectors]
            if transposed:
                vectors = _transpose(builder, vectors)
            for pointer in sources:
                prefetch(builder, pointer, ahead, side * x_type.dtype.bitwidth // 8, locality=2)
            targets = _square(context, builder, tile_type, tile, row, first, 0, (side, side))
            for vector, pointer in zip(vectors, targets, strict=True):
                builder.store(vector, pointer, align=tile_type.dtype.bitwidth // 8)
            return context.get_dummy_value()

        integer = types.int64
        return types.void(x, integer, integer, integer, integer, tile, integer, integer), codegen

    return load_square


@intrinsic
def load_half_rows(typing_context, x, i, j, count, ahead, tile, row):
    """`load_few_rows` for a tile as wide as half a square: tile[row + q, p] = x[i + p, j + q], q < side, p < side / 2.

    Such a tile takes half the cache: loading 3072 features of 8 vectors of fp32 takes 0.6 of the time (Zen 4).
    """
    side = SQUARE_BYTES * 8 // tile.dtype.bitwidth

    def codegen(context, builder, signature, arguments):
        x, i, j, count, ahead, tile, row = arguments
        x_type, _, _, _, _, tile_type, _ = signature.args
        sources = _square(context, builder, x_type, x, i, j, 0, (side // 2, side), count)
        vectors = [builder.load(pointer, align=x_type.dtype.bitwidth // 8) for pointer in sources]
        if tile_type.dtype is not x_type.dtype:
            vectors = [DECODE[x_type.dtype](builder, vector) for vector in vectors]
        for pointer in sources:
            prefetch(builder, pointer, ahead, side * x_type.dtype.bitwidth // 8, locality=2)
        halves = []
        for start in (0, side // 2):
            mask = shuffle_mask(list(range(start, start + side // 2)))
            halves += _transpose(builder, [builder.shuffle_vector(vector, vector, mask) for vector in vectors])
        targets = _square(context, builder, tile_type, tile, row, row.type(0), 0, (side, side // 2))
        for vector, pointer in zip(halves, targets, strict=True):
            builder.store(vector, pointer, align=tile_type.dtype.bitwidth // 8)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(x, integer, integer, integer, integer, tile, integer), codegen


@intrinsic
def load_column(typing_context, x, i, j, count, tile, row, width):
    """tile[row, p] = x[i + p, j] for p < `count`, else 0, for p < `width` <= side. x is contiguous along i."""
    side = SQUARE_BYTES * 8 // tile.dtype.bitwidth

    def codegen(context, builder, signature, arguments):
        x, i, j, count, tile, row, width = arguments
        x_type, _, _, _, tile_type, _, _ = signature.args
        (source,) = _square(context, builder, x_type, x, i, j, 1, (1, side))
        vector = load_part(builder, source, count, x_type.dtype.bitwidth // 8)
        if tile_type.dtype is not x_type.dtype:
            vector = DECODE[x_type.dtype](builder, vector)
        (target,) = _square(context, builder, tile_type, tile, row, row.type(0), 0, (1, side))
        store_masked(builder, vector, target, first_lanes(builder, width, side), tile_type.dtype.bitwidth // 8)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(x, integer, integer, integer, tile, integer, integer), codegen


def _define_store_square(transposed: bool, few: bool = False) -> Any:
    @intrinsic
    def store_square(typing_context, tile, row, vector, out, i, j, count, ahead, scale):
        """out[i + p, j + q] = scale * tile[row + q, vector + p] for p, q < side, rounded once from fp64.

        out is contiguous along j (`transposed`) or i. With `few`, only rows p < `count` are stored. If out is
        contiguous along j, the memory `ahead` bytes after the elements that are written is prefetched for writing,
        unless that is 0: prefetching what has just been stored takes as long as storing it.
        """
        side = SQUARE_BYTES * 8 // tile.dtype.bitwidth

        def codegen(context, builder, signature, arguments):
            tile, row, first, out, i, j, count, ahead, scale = arguments
            tile_type, _, _, out_type, _, _, _, _, _ = signature.args
            if transposed and not few:
                with builder.if_then(builder.icmp_signed("!=", ahead, ahead.type(0))):
                    for pointer in _square(context, builder, out_type, out, i, j, 0, (side, side)):
                        prefetch(builder, pointer, ahead, side * out_type.dtype.bitwidth // 8, write=1, locality=2)
            pointers = _square(context, builder, tile_type, tile, row, first, 0, (side, side))
            vectors = [builder.load(pointer, align=tile_type.dtype.bitwidth // 8) for pointer in pointers]
            vectors = scaled(builder, vectors, scale, out_type.dtype)
            if transposed:
                vectors = _transpose(builder, vectors)
            targets = _square(context, builder, out_type, out, i, j, 0 if transposed else 1, (side, side))
            for p, (vector, pointer) in enumerate(zip(vectors, targets, strict=True)):
                is_stored = builder.icmp_signed("<", ir.Constant(count.type, p), count)
                with builder.if_then(is_stored) if few else nullcontext():
                    builder.store(vector, pointer, align=out_type.dtype.bitwidth // 8)
            return context.get_dummy_value()

        integer = types.int64
        arguments = tile, integer, integer, out, integer, integer, integer, integer, types.float64
        return types.void(*arguments), codegen

    return store_square


load_rows, load_columns, load_few_rows = (_define_load_square(*flags) for flags in ((True,), (False,), (True, True)))
store_rows, store_columns, store_few_rows = (
    _define_store_square(*flags) for flags in ((True,), (False,), (True, True))
)
