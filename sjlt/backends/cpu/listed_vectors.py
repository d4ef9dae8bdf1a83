"""Projections of single vectors by lists of entries: 16 components at a time where gathers are fast, else four.

A component's terms are gathered from the vector and summed in a register, in the order of `dense_kernels`, so results
are bitwise equal to those of the other paths. Lists of 16 components are as long as the longest of them, and gaps are
skipped by a mask: a loop over lists of different lengths would mispredict the end of each. That takes 0.3 of the time
of lists four at a time and 0.4 of that of SciPy's CSR, for (1, 19620) to 576 with eight nonzeros (Sapphire Rapids).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_name
from numba import extending, types
from numba.core import cgutils

from ... import threads
from .bits import has_feature, store_element
from .dense_kernels import add_compensation, add_to_totals, two_sum
from .jit import COMPUTE, DATA_2D, INT32S, INT64S, OUT_2D, RANGE, TILE, Array, compiled, kernel, leaf
from .one_vector import ROWS, gather, load_features
from .plan import Borrowed, Call, ExactPlan, aligned, useful_threads
from .rows import LISTS
from .simd import signed

intrinsic: Any = extending.intrinsic  # Any: in kernels, intrinsics are called without a typing context

# AMD's Zen 4 executes a gather as many operations, and takes about as long as for loads one by one.
HAS_FAST_GATHERS = has_feature("avx512f") and not get_host_cpu_name().startswith("znver")
LANES = ROWS  # components in a group: a vector of 16 fp32
# Additions per entry: two threads gain from 2^19 entries on (Sapphire Rapids).
LISTED_WORK = 4 if HAS_FAST_GATHERS else 12
FEATURES = Array(COMPUTE, 1, readonly=True)


def project_vectors(plan: ExactPlan, x: np.ndarray, out: np.ndarray, accumulate: bool, compute: np.dtype) -> Call:
    """The call for out (n, k) = x (n, d) S', or out +=, one vector at a time."""
    (n, d), k, n_blocks, scale = x.shape, plan.k, plan.n_blocks, plan.scale
    if HAS_FAST_GATHERS:
        lists = plan.keep("lists of groups", lambda: group_lists(*plan.lists, n_blocks), plan.keeps_lists)
        project = compiled(sum_gathered, compute=compute, out=out.dtype)
    else:
        lists, project = plan.lists, compiled(sum_listed, compute=compute, out=out.dtype)
    work = LISTED_WORK * n * d * plan.s

    def project_in_place(x: np.ndarray, out: np.ndarray) -> None:
        def task(begin: int, end: int) -> None:
            for i in range(n):
                project(x[i], *lists, n_blocks, (begin, end), out, i, scale, accumulate)

        workers = useful_threads(work)
        if workers == 1:
            task(0, k)
        else:
            threads.run(task, _shares(k, workers), workers)

    if x.dtype == compute and x.strides[1] == x.itemsize:
        return project_in_place
    load = compiled(load_vectors, data=x.dtype, compute=compute)

    def load_and_project(x: np.ndarray, out: np.ndarray) -> None:
        workers = useful_threads(work)
        with Borrowed(n * d, compute) as memory:
            features = memory.reshape(n, d)
            threads.run(lambda begin, end: load(x, begin, end, features), _shares(d, workers), workers)
            project_in_place(features, out)

    return load_and_project


def _shares(n: int, workers: int) -> list[tuple[int, int]]:
    """Divide n components, in whole groups, or features."""
    step = -(-n // (workers * LANES)) * LANES
    return [(begin, min(begin + step, n)) for begin in range(0, n, step)]


@kernel(x=DATA_2D, begin=types.int64, end=types.int64, features=TILE)
def load_vectors(x, begin, end, features):
    """features[:, begin:end] = x[:, begin:end]"""
    for i in range(x.shape[0]):
        load_features(x[i : i + 1], begin, end, features[i], 0)


# ------------------------------------------------------------------------------------- by groups of components


def group_lists(starts: np.ndarray, entries: np.ndarray, n_blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """(firsts, words): the entries of groups of LANES components, from `ExactPlan.lists`.

    Those of group g in block b are words[firsts[i]:firsts[i + 1]] with i = b n_groups + g, a column per component; gaps
    at the end of a column are -1.
    """
    k = (starts.size - 1) // n_blocks
    groups = -(-k // LANES)
    lengths = np.zeros((groups * LANES, n_blocks), np.int64)
    lengths[:k] = np.diff(starts).reshape(k, n_blocks)
    longest = lengths.reshape(groups, LANES, -1).max(1).T  # of each block and group
    firsts = np.concatenate([[0], longest.cumsum()])
    words = aligned((int(firsts[-1]), LANES), np.dtype(np.int32))
    compiled(fill_groups)(starts, entries, n_blocks, firsts, words)
    return firsts, words


@kernel(starts=INT64S, entries=INT32S, n_blocks=types.int64, firsts=INT64S, words=Array(types.int32, 2))
def fill_groups(starts, entries, n_blocks, firsts, words):
    """Fill the words of `group_lists`."""
    n_groups = (firsts.size - 1) // n_blocks
    words[:] = -1
    for i in range(starts.size - 1):
        r, b = i // n_blocks, i % n_blocks
        first = firsts[b * n_groups + r // LANES]
        for e in range(starts[i], starts[i + 1]):
            words[first + e - starts[i], r % LANES] = entries[e]


@intrinsic
def sum_group(typing_context, words, begin, end, features, sums, first):
    """sums[first + l] = the sum of the terms in words[begin:end, l], for l < LANES."""

    def codegen(context, builder, signature, arguments):
        words, begin, end, features, sums, first = arguments
        words_type, _, _, features_type, sums_type, _ = signature.args
        words = context.make_array(words_type)(context, builder, words).data
        features = context.make_array(features_type)(context, builder, features).data
        sums = context.make_array(sums_type)(context, builder, sums).data
        element, bits = context.get_data_type(features_type.dtype), features_type.dtype.bitwidth
        floats, integers = (ir.VectorType(kind, LANES) for kind in (element, ir.IntType(bits)))
        words_vector = ir.VectorType(ir.IntType(32), LANES)
        total = cgutils.alloca_once(builder, floats)
        builder.store(ir.Constant(floats, None), total)
        with cgutils.for_range(builder, end, start=begin) as loop:
            at = builder.gep(words, [builder.mul(loop.index, begin.type(LANES))])
            word = builder.load(builder.bitcast(at, words_vector.as_pointer()), align=4)
            is_entry = builder.icmp_signed(">=", word, ir.Constant(words_vector, None))
            columns = builder.lshr(word, ir.Constant(words_vector, [1] * LANES))
            terms = builder.bitcast(gather(builder, features, columns, floats, is_entry), integers)
            signs = word if bits == 32 else builder.zext(word, integers)
            signs = builder.shl(signs, ir.Constant(integers, [bits - 1] * LANES))  # of a gap: minus zero, which adds 0
            terms = builder.bitcast(builder.xor(terms, signs), floats)
            builder.store(builder.fadd(builder.load(total), terms), total)
        target = builder.bitcast(builder.gep(sums, [first]), floats.as_pointer())
        builder.store(builder.load(total), target, align=bits // 8)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(words, integer, integer, features, sums, integer), codegen


@kernel(
    features=FEATURES, firsts=INT64S, words=Array(types.int32, 2), n_blocks=types.int64, components=RANGE, out=OUT_2D,
    i=types.int64, scale=types.float64, accumulate=types.boolean,
)  # fmt: skip
def sum_gathered(features, firsts, words, n_blocks, components, out, i, scale, accumulate):
    """Compute a range of components of row i of out, whose vector has these features; it begins at a group."""
    n_groups, compensated = (firsts.size - 1) // n_blocks, features.itemsize == 8
    first, end = components[0] // LANES, (components[1] + LANES - 1) // LANES
    sums = np.empty((end - first) * LANES, features.dtype)
    totals, compensation = np.zeros(sums.size), np.zeros(sums.size if compensated else 0)
    for b in range(n_blocks):
        for g in range(first, end):
            at = b * n_groups + g
            sum_group(words, firsts[at], firsts[at + 1], features, sums, (g - first) * LANES)
        add_to_totals(sums, totals, compensation, compensated)
    if compensated:
        add_compensation(totals, compensation)
    for r in range(components[0], components[1]):
        store_element(scale * totals[r - components[0]], out, i, r, accumulate)


# ------------------------------------------------------------------------------------- by component


@leaf
def _span(starts, r, n_blocks, b):
    """Begin and end of the list of component r in block b, or of the last component if there is no component r."""
    i = min(r, (starts.size - 1) // n_blocks - 1) * n_blocks + b
    return np.uint64(starts[i]), np.uint64(starts[i + 1])


@leaf
def _term(features, entry):
    entry = np.uint32(entry)
    return signed(features[entry >> 1], entry)


@leaf
def _add_list(total, entries, begin, end, features):
    for e in range(begin, end):
        total += _term(features, entries[e])
    return total


@leaf
def _sum_lists(entries, starts, first, n_blocks, block, features):
    """The sums of components `first` to `first` + 3 in a block, in turns, which hides the latency of additions."""
    (a, a_end), (b, b_end) = _span(starts, first, n_blocks, block), _span(starts, first + 1, n_blocks, block)
    (c, c_end), (d, d_end) = _span(starts, first + 2, n_blocks, block), _span(starts, first + 3, n_blocks, block)
    common = min(a_end - a, b_end - b, c_end - c, d_end - d)
    p = q = r = s = features.dtype.type(0)
    for e in range(common):
        p += _term(features, entries[a + e])
        q += _term(features, entries[b + e])
        r += _term(features, entries[c + e])
        s += _term(features, entries[d + e])
    p = _add_list(p, entries, a + common, a_end, features)
    q = _add_list(q, entries, b + common, b_end, features)
    r = _add_list(r, entries, c + common, c_end, features)
    s = _add_list(s, entries, d + common, d_end, features)
    return p, q, r, s


@kernel(
    features=FEATURES, starts=INT64S, entries=INT32S, n_blocks=types.int64, components=RANGE, out=OUT_2D,
    i=types.int64, scale=types.float64, accumulate=types.boolean,
)  # fmt: skip
def sum_listed(features, starts, entries, n_blocks, components, out, i, scale, accumulate):
    """Compute a range of components of row i of out, whose vector has these features."""
    compensated = features.itemsize == 8
    totals = np.empty((2, LISTS))
    for first in range(components[0], components[1], LISTS):
        totals[:] = 0
        for b in range(n_blocks):
            sums = _sum_lists(entries, starts, first, n_blocks, b, features)
            for c in range(LISTS):
                if compensated:
                    totals[0, c], error = two_sum(totals[0, c], np.float64(sums[c]))
                    totals[1, c] += error
                else:
                    totals[0, c] += np.float64(sums[c])
        for c in range(min(LISTS, components[1] - first)):
            total = totals[0, c]
            if compensated and np.isfinite(total + totals[1, c]):
                total += totals[1, c]
            store_element(scale * total, out, i, first + c, accumulate)
