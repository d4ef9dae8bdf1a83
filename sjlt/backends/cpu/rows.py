"""Operations on one feature or component of all vectors, contiguous in memory, as LLVM vector instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

from .bits import DECODE
from .jit import leaf
from .scaling import scaled
from .simd import (
    SQUARE_BYTES,
    first_lanes,
    line_pointer,
    load_masked,
    load_part,
    multiply_add,
    prefetch,
    sign_vector,
    store_masked,
)

intrinsic: Any = extending.intrinsic  # Any: in kernels, intrinsics are called without a typing context


def for_vectors(builder: Any, count: Any, lanes: int, emit: Callable[[Any, int, Any], None]) -> None:
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


def _component(builder: Any, components: Any, code: Any, v: Any, vector: Any) -> Any:
    """A pointer to elements v and up of the component (row) that a code selects, cast to a pointer to `vector`."""
    stride = builder.extract_value(components.strides, 0)
    row = builder.zext(builder.lshr(code, ir.Constant(code.type, 1)), stride.type)
    start = builder.bitcast(builder.gep(components.data, [v]), ir.PointerType(ir.IntType(8)))
    return builder.bitcast(builder.gep(start, [builder.mul(row, stride)]), vector.as_pointer())


def _add_terms(
    builder: Any, codes: Any, begins: list[Any], length: Any, components: Any, v: Any, vector: Any, totals: list[Any],
    dtype: Any = None, mask: Any = None,
) -> None:  # fmt: skip
    """Add sign * components[row, v:] over codes begins[i] .. begins[i] + length - 1 to total i, all totals in turns.

    dtype : of components, if these are decoded when they are loaded.  mask : of the lanes that are loaded, if not all.
    """
    bits = 32 if isinstance(vector.element, ir.FloatType) else 64
    source, align = ir.VectorType(components.data.type.pointee, vector.count), bits // 8 if dtype is None else 2
    with cgutils.for_range(builder, length) as loop:
        for begin, total in zip(begins, totals, strict=True):
            code = builder.load(builder.gep(codes, [builder.add(begin, loop.index)]))
            pointer = _component(builder, components, code, v, source)
            term = builder.load(pointer, align=align) if mask is None else load_masked(builder, pointer, mask, align)
            term = term if dtype is None else DECODE[dtype](builder, term)
            sign = sign_vector(builder, code, vector.element, vector.count)
            updated = builder.call(multiply_add(builder, vector, bits), (sign, term, builder.load(total)))
            builder.store(updated, total)


def _zero_totals(builder: Any, vector: Any, count: int) -> list[Any]:
    """Pointers to `count` vectors of zeros, which stay in registers."""
    totals = [cgutils.alloca_once(builder, vector) for _ in range(count)]
    for total in totals:
        builder.store(ir.Constant(vector, None), total)
    return totals


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
        feature = line_pointer(builder, x, j, 1)

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

        for_vectors(builder, count, lanes, add)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(codes, integer, integer, x, integer, integer, components), codegen


def store_scaled(builder: Any, values: Any, scale: Any, target: Any, dtype: Any, remaining: Any) -> None:
    """Emit the store of ``scale * values``, rounded once to `dtype`; only of the first `remaining` unless that is None.

    target : pointer to the first element.
    """
    (result,), align = scaled(builder, [values], scale, dtype), dtype.bitwidth // 8
    pointer = builder.bitcast(target, result.type.as_pointer())
    if remaining is None:
        builder.store(result, pointer, align=align)
    else:
        store_masked(builder, result, pointer, first_lanes(builder, remaining, values.type.count), align)


@intrinsic
def gather_row(typing_context, codes, begin, end, components, out, j, scale):
    """out[v, j] = scale * (the sum of sign * components[row, v] over codes[begin:end]), for all v.

    codes is contiguous and indexed as if it were flat. out is contiguous along its first axis; results are rounded to
    its dtype once, from fp64. Terms are added in the order of the codes. Rows of components, contiguous, are as long as
    a column of out and at least a vector of SQUARE_BYTES: if they are no whole number of vectors, the last vector
    overlaps the one before it.
    """
    lanes = SQUARE_BYTES * 8 // components.dtype.bitwidth

    def codegen(context, builder, signature, arguments):
        codes, begin, end, components, out, j, scale = arguments
        codes_type, _, _, components_type, out_type, _, _ = signature.args
        element = context.get_data_type(components_type.dtype)
        codes = context.make_array(codes_type)(context, builder, codes).data
        components = context.make_array(components_type)(context, builder, components)
        out = context.make_array(out_type)(context, builder, out)
        feature, count = line_pointer(builder, out, j, 1), builder.extract_value(out.shape, 0)

        def add(v, size, remaining):
            vector = ir.VectorType(element, size)
            totals = _zero_totals(builder, vector, 1)
            _add_terms(builder, codes, [begin], builder.sub(end, begin), components, v, vector, totals)
            total, target = builder.load(totals[0]), builder.gep(feature, [v])
            store_scaled(builder, total, scale, target, out_type.dtype, remaining)

        def add_last(v, size, remaining):
            if remaining is None:
                add(v, size, None)
                return
            before = builder.sub(count, ir.Constant(count.type, lanes))
            with builder.if_else(builder.icmp_signed(">=", before, ir.Constant(count.type, 0))) as (several, single):
                with several:
                    add(before, size, None)
                with single:
                    add(v, size, remaining)

        for_vectors(builder, count, lanes, add_last)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(codes, integer, integer, components, out, integer, types.float64), codegen


def _define_sum_lists(n_lists: int, n_vectors: float, stores: bool = False, masked: bool = False) -> Any:
    @intrinsic
    def sum_lists(typing_context, entries, starts, at, step, count, features, v, sums, r, scale):
        """sums[r + l, w] = the sum of sign * features[j, w] over list r + l, for l < `n_lists` and v <= w < v + width.

        Of `count` lists, list l is entries[starts[i]:starts[i + 1]] with i = at + l step, each entry 2 j + (1 where
        negative). The width is `n_vectors` vectors of SQUARE_BYTES. If it is half a vector, like that of the features,
        sums are stored twice, because the other half must not hold subnormals. Sums stay in registers; terms are added
        in the order of the entries. 16-bit features are decoded. With `masked`, features end within the vector; there,
        sums are 0.

        With `stores`, sums is a result, contiguous along its first axis: sums[w, r + l] = `scale` times the sum,
        rounded once from fp64, for w < sums.shape[0] only.
        """
        compute = sums.dtype if not stores else types.float32 if features.dtype in DECODE else features.dtype
        size = int(n_vectors * SQUARE_BYTES * 8 // compute.bitwidth)

        def codegen(context, builder, signature, arguments):
            entries, starts, at, step, count, features, v, sums, r, scale = arguments
            entries_type, starts_type, _, _, _, features_type, _, sums_type, _, _ = signature.args
            element, bits = context.get_data_type(compute), compute.bitwidth
            entries = context.make_array(entries_type)(context, builder, entries).data
            starts = context.make_array(starts_type)(context, builder, starts).data
            features = context.make_array(features_type)(context, builder, features)
            sums = context.make_array(sums_type)(context, builder, sums)
            vector = ir.VectorType(element, size)
            remaining = builder.sub(builder.extract_value(features.shape, 1), v)
            how = {
                "dtype": None if features_type.dtype is compute else features_type.dtype,
                "mask": first_lanes(builder, remaining, size) if masked else None,
            }
            last = builder.sub(count, r.type(1))

            def span(i):
                """The row of the sums and the list of number i: beyond the last one, that one again."""
                row = builder.add(r, i)
                row = builder.select(builder.icmp_signed("<", row, last), row, last)
                start = builder.gep(starts, [builder.add(at, builder.mul(step, row))])
                return row, builder.load(start), builder.load(builder.gep(start, [at.type(1)]))

            spans = [span(r.type(i)) for i in range(n_lists)]
            common = builder.sub(spans[0][2], spans[0][1])
            for _, begin, end in spans[1:]:
                length = builder.sub(end, begin)
                common = builder.select(builder.icmp_signed("<", length, common), length, common)
            totals = _zero_totals(builder, vector, n_lists)
            _add_terms(builder, entries, [begin for _, begin, _ in spans], common, features, v, vector, totals, **how)

            def store(total, row):
                if stores:
                    target = builder.gep(line_pointer(builder, sums, row, 1), [v])
                    remaining = None if not masked else builder.sub(builder.extract_value(sums.shape, 0), v)
                    store_scaled(builder, builder.load(total), scale, target, sums_type.dtype, remaining)
                    return
                target = builder.add(builder.mul(row, builder.extract_value(sums.shape, 1)), v)
                target = builder.bitcast(builder.gep(sums.data, [target]), vector.as_pointer())
                for copy in range(2 if n_vectors < 1 else 1):
                    builder.store(builder.load(total), builder.gep(target, [r.type(copy)]), align=bits // 8)

            if n_lists == 1:
                store(totals[0], spans[0][0])
                return context.get_dummy_value()
            kept = cgutils.alloca_once(builder, vector, size=n_lists)
            for i, total in enumerate(totals):
                builder.store(builder.load(total), builder.gep(kept, [r.type(i)]))
            with cgutils.for_range(builder, r.type(n_lists)) as lists:  # the rest: a loop, which compiles faster
                row, begin, end = span(lists.index)
                begin, total = builder.add(begin, common), cgutils.alloca_once(builder, vector)
                builder.store(builder.load(builder.gep(kept, [lists.index])), total)
                _add_terms(builder, entries, [begin], builder.sub(end, begin), features, v, vector, [total], **how)
                store(total, row)
            return context.get_dummy_value()

        integer = types.int64
        arguments = entries, starts, integer, integer, integer, features, integer, sums, integer, types.float64
        return types.void(*arguments), codegen

    return sum_lists


LISTS, VECTORS = 4, 4  # sums in registers at a time, of several lists or of several vectors: hides latencies
_sum_list, _sum_narrow_lists, _sum_half_lists = (
    _define_sum_lists(*counts) for counts in ((1, VECTORS), (LISTS, 1), (LISTS, 0.5))
)


@leaf
def sum_entries(entries, starts, at, step, count, features, n, sums):
    """sums[r, v] = the sum of list r for r < `count` (see `sum_lists`) and v < n, rounded up to whole SIMD vectors.

    Sums in groups of LISTS take 0.8 of the time for 128 entries in a list and one SIMD vector (Zen 4).
    """
    lanes = SQUARE_BYTES // features.itemsize
    if features.shape[1] < lanes:
        for r in range(0, count, LISTS):
            _sum_half_lists(entries, starts, at, step, count, features, 0, sums, r, 1.0)
        return
    whole = n // (VECTORS * lanes) * (VECTORS * lanes)
    for r in range(count):  # outside: features in long rows, which may not be cached, are then read as a whole
        for v in range(0, whole, VECTORS * lanes):
            _sum_list(entries, starts, at, step, count, features, v, sums, r, 1.0)
    for v in range(whole, n, lanes):
        for r in range(0, count, LISTS):
            _sum_narrow_lists(entries, starts, at, step, count, features, v, sums, r, 1.0)


def _define_sum_columns(stores: bool) -> Any:
    one_list = _define_sum_lists(1, VECTORS, stores)
    two_lists, wide_lists, narrow_lists = (
        _define_sum_lists(*counts, stores, masked=True) for counts in ((2, VECTORS), (LISTS, 2), (LISTS, 1))
    )

    def sum_columns(entries, starts, at, step, count, features, n, lanes, sums, scale):
        whole = n // (VECTORS * lanes) * (VECTORS * lanes)
        for r in range(count):
            for v in range(0, whole, VECTORS * lanes):
                one_list(entries, starts, at, step, count, features, v, sums, r, scale)
        v = whole
        if n - v > 3 * lanes:
            for r in range(0, count, 2):
                two_lists(entries, starts, at, step, count, features, v, sums, r, scale)
            return
        if n - v > lanes:
            for r in range(0, count, LISTS):
                wide_lists(entries, starts, at, step, count, features, v, sums, r, scale)
            v += 2 * lanes
        if n > v:
            for r in range(0, count, LISTS):
                narrow_lists(entries, starts, at, step, count, features, v, sums, r, scale)

    sum_columns.__qualname__ = f"sum_columns_{stores}"  # Numba links cached machine code by this name
    return leaf(sum_columns)


_sum_columns, _store_columns = map(_define_sum_columns, (False, True))


@leaf
def sum_columns(entries, starts, at, step, count, features, sums):
    """`sum_entries` for features of any width, which may be 16-bit numbers; sums are 0 beyond that width.

    Rows of sums are whole SIMD vectors. With all vectors in one pass over a list, 20 vectors take half the time of two.
    """
    lanes = SQUARE_BYTES // sums.itemsize
    _sum_columns(entries, starts, at, step, count, features, features.shape[1], lanes, sums, 1.0)


@leaf
def store_sums(entries, starts, features, out, scale):
    """out[v, r] = scale * the sum of list r for all r and v; see `sum_lists`. out is contiguous along its first axis.

    features : at least as wide as out has rows; 16-bit numbers are decoded.
    """
    lanes, (n, k) = SQUARE_BYTES // max(4, features.itemsize), out.shape
    _store_columns(entries, starts, 0, 1, k, features, n, lanes, out, scale)
