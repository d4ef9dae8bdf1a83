"""Operations on one feature or component of all vectors, contiguous in memory, as LLVM vector instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

from .bits import DECODE
from .simd import SQUARE_BYTES, first_lanes, load_part, multiply_add, prefetch, scaled, sign_vector, store_masked

intrinsic: Any = extending.intrinsic  # Any: in kernels, intrinsics are called without a typing context


def _for_vectors(builder: Any, count: Any, lanes: int, emit: Callable[[Any, int, Any], None]) -> None:
    """Emit loops over `count` elements; ``emit(v, size, remaining)`` emits the code for elements v .. v + size - 1.

    size : 4 `lanes` while possible, then `lanes`.
    remaining : None, except for a last, partial vector: the number of its elements.
    """

    def times(value: Any, factor: int) -> Any:
        return builder.mul(value, ir.Constant(value.type, factor))

    whole = builder.udiv(count, ir.Constant(count.type, lanes))
    fours = builder.udiv(whole, ir.Constant(count.type, 4))
    with cgutils.for_range(builder, fours) as loop:
        emit(times(loop.index, 4 * lanes), 4 * lanes, None)
    with cgutils.for_range(builder, whole, start=times(fours, 4)) as loop:
        emit(times(loop.index, lanes), lanes, None)
    remaining = builder.sub(count, times(whole, lanes))
    with builder.if_then(builder.icmp_signed(">", remaining, ir.Constant(remaining.type, 0))):
        emit(times(whole, lanes), lanes, remaining)


def _feature(builder: Any, x: Any, j: Any) -> Any:
    """A pointer to column j of an array."""
    start = builder.bitcast(x.data, ir.PointerType(ir.IntType(8)))
    start = builder.gep(start, [builder.mul(j, builder.extract_value(x.strides, 1))])
    return builder.bitcast(start, x.data.type)


def _component(builder: Any, components: Any, code: Any, v: Any, vector: Any) -> Any:
    """A pointer to elements v and up of the component (row) that a code selects, cast to a pointer to `vector`."""
    width = builder.extract_value(components.shape, 1)
    row = builder.zext(builder.lshr(code, ir.Constant(code.type, 1)), width.type)
    start = builder.gep(components.data, [builder.add(builder.mul(row, width), v)])
    return builder.bitcast(start, vector.as_pointer())


def _sum_terms(builder: Any, codes: Any, span: tuple[Any, Any], components: Any, v: Any, vector: Any) -> Any:
    """The sum of sign * components[row, v:] over the codes of a span, as one vector that stays in registers."""
    bits = 32 if isinstance(vector.element, ir.FloatType) else 64
    total = cgutils.alloca_once(builder, vector)
    builder.store(ir.Constant(vector, None), total)
    with cgutils.for_range(builder, span[1], start=span[0]) as loop:
        code = builder.load(builder.gep(codes, [loop.index]))
        term = builder.load(_component(builder, components, code, v, vector), align=bits // 8)
        sign = sign_vector(builder, code, vector.element, vector.count)
        updated = builder.call(multiply_add(builder, vector, bits), (sign, term, builder.load(total)))
        builder.store(updated, total)
    return builder.load(total)


@intrinsic
def scatter_row(typing_context, codes, begin, end, x, j, ahead, components):
    """components[row, v] += sign * x[v, j] for each of codes[begin:end], the entries of a column, and all v.

    codes is contiguous and indexed as if it were flat. x is contiguous along its first axis; 16-bit elements are
    decoded. The memory `ahead` bytes after the elements that are read is prefetched. A row of components consists of
    whole vectors of SQUARE_BYTES and is at least as long as a column of x; zeros are added to the padding.
    """
    lanes = SQUARE_BYTES * 8 // components.dtype.bitwidth

    def codegen(context, builder, signature, arguments):
        codes, begin, end, x, j, ahead, components = arguments
        codes_type, _, _, x_type, _, _, components_type = signature.args
        source, source_bytes = context.get_data_type(x_type.dtype), x_type.dtype.bitwidth // 8
        element, bits = context.get_data_type(components_type.dtype), components_type.dtype.bitwidth
        codes = context.make_array(codes_type)(context, builder, codes).data
        x = context.make_array(x_type)(context, builder, x)
        components = context.make_array(components_type)(context, builder, components)
        count = builder.extract_value(x.shape, 0)
        feature = _feature(builder, x, j)

        def add(v, size, remaining):
            vector = ir.VectorType(element, size)
            pointer = builder.bitcast(builder.gep(feature, [v]), ir.VectorType(source, size).as_pointer())
            if remaining is None:
                values = builder.load(pointer, align=source_bytes)
            else:
                values = load_part(builder, pointer, remaining, source_bytes)
            prefetch(builder, pointer, ahead, size * source_bytes)
            if x_type.dtype is not components_type.dtype:
                values = DECODE[x_type.dtype](builder, values)
            with cgutils.for_range(builder, end, start=begin) as loop:
                code = builder.load(builder.gep(codes, [loop.index]))
                target = _component(builder, components, code, v, vector)
                sign, total = sign_vector(builder, code, element, size), builder.load(target, align=bits // 8)
                total = builder.call(multiply_add(builder, vector, bits), (sign, values, total))
                builder.store(total, target, align=bits // 8)

        _for_vectors(builder, count, lanes, add)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(codes, integer, integer, x, integer, integer, components), codegen


@intrinsic
def gather_row(typing_context, codes, begin, end, components, out, j, scale):
    """out[v, j] = scale * (the sum of sign * components[row, v] over codes[begin:end]), for all v.

    codes is contiguous and indexed as if it were flat. out is contiguous along its first axis; results are rounded to
    its dtype once, from fp64. Rows of components are as in `scatter_row`. Terms are added in the order of the codes.
    """
    lanes = SQUARE_BYTES * 8 // components.dtype.bitwidth

    def codegen(context, builder, signature, arguments):
        codes, begin, end, components, out, j, scale = arguments
        codes_type, _, _, components_type, out_type, _, _ = signature.args
        element = context.get_data_type(components_type.dtype)
        codes = context.make_array(codes_type)(context, builder, codes).data
        components = context.make_array(components_type)(context, builder, components)
        out = context.make_array(out_type)(context, builder, out)
        feature, align = _feature(builder, out, j), out_type.dtype.bitwidth // 8

        def add(v, size, remaining):
            vector = ir.VectorType(element, size)
            total = _sum_terms(builder, codes, (begin, end), components, v, vector)
            result = scaled(builder, total, scale, out_type.dtype)
            pointer = builder.bitcast(builder.gep(feature, [v]), result.type.as_pointer())
            if remaining is None:
                builder.store(result, pointer, align=align)
            else:
                store_masked(builder, result, pointer, first_lanes(builder, remaining, size), align)

        _for_vectors(builder, builder.extract_value(out.shape, 0), lanes, add)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(codes, integer, integer, components, out, integer, types.float64), codegen


@intrinsic
def sum_entries(typing_context, entries, begin, end, features, count, sums, r):
    """sums[r, v] = the sum of sign * features[j, v] over entries[begin:end], each 2 j + (1 where negative).

    For v < count, rounded up to whole vectors of SQUARE_BYTES. Both tiles have the same dtype and width, a whole number
    of these vectors. Sums stay in registers; terms are added in the order of the entries.
    """
    lanes = SQUARE_BYTES * 8 // features.dtype.bitwidth

    def codegen(context, builder, signature, arguments):
        entries, begin, end, features, count, sums, r = arguments
        entries_type, _, _, features_type, _, sums_type, _ = signature.args
        element, bits = context.get_data_type(features_type.dtype), features_type.dtype.bitwidth
        entries = context.make_array(entries_type)(context, builder, entries).data
        features = context.make_array(features_type)(context, builder, features)
        sums = context.make_array(sums_type)(context, builder, sums)
        row = builder.gep(sums.data, [builder.mul(r, builder.extract_value(sums.shape, 1))])

        def add(v, size, remaining):
            vector = ir.VectorType(element, size)
            total = _sum_terms(builder, entries, (begin, end), features, v, vector)
            pointer = builder.bitcast(builder.gep(row, [v]), vector.as_pointer())
            builder.store(total, pointer, align=bits // 8)

        _for_vectors(builder, count, lanes, add)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(entries, integer, integer, features, integer, sums, integer), codegen
