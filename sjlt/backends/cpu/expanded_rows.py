"""Projections to more components than there are entries, one vector at a time.

Most components are zero. The sums of the others are gathered, 16 at a time (`listed_vectors`), and expanded to all
components as they are stored; the other paths would go through empty lists and transpose tiles of mostly zeros. There
is a single block of features, so results are bitwise equal to those of the other paths (`dense_kernels`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

from .jit import COMPUTE, DATA_2D, INT64S, OUT_2D, RANGE, Array, compiled, kernel
from .listed_vectors import HAS_FAST_GATHERS, LANES, group_lists, sum_group
from .one_vector import load_features
from .plan import REUSED_WORK, Call, ExactPlan, run_rows, useful_threads
from .rows import store_scaled
from .simd import line_pointer

intrinsic: Any = extending.intrinsic  # Any: in kernels, intrinsics are called without a typing context

COMPONENT_BYTES = 8  # fewest bytes of sums of all components per entry
ENTRY_WORK = 6  # an entry takes as long for each vector as this many additions in tiles
MASKS = Array(types.uint16, 1)


def eligible(plan: ExactPlan, x: np.ndarray, out: np.ndarray, compute: np.dtype) -> bool:
    """Whether to compute all of `out`, native and not accumulated to, here.

    With at most one entry for two components in fp32 (one in fp64), products take 0.4 to 0.9 of the time of other
    paths: 0.45 for (128, 384) to 2048 with two nonzeros. With twice as many entries, they may take 1.3 times as long
    (Sapphire Rapids).
    """
    if plan.n_blocks > 1 or COMPONENT_BYTES * plan.d * plan.s > compute.itemsize * plan.k:
        return False
    if not (plan.keeps_codes and HAS_FAST_GATHERS):
        return False
    return out.strides[1] == out.itemsize and abs(x.strides[1]) <= abs(x.strides[0])


def project_by_expansion(plan: ExactPlan, x: np.ndarray, out: np.ndarray, compute: np.dtype) -> Call:
    """The call for out (n, k) = x (n, d) S', for a product that is `eligible`."""
    project = compiled(expand_rows, data=x.dtype, compute=compute, out=out.dtype)
    lists = plan.keep("lists of entries", lambda: _packed_lists(plan), plan.keeps_codes)
    (n, d), scale = x.shape, plan.scale
    work = plan.work(n, d, plan.k, compute.itemsize, generates=False)
    row_work = ENTRY_WORK * d * plan.s + REUSED_WORK * plan.k

    def call(x: np.ndarray, out: np.ndarray) -> None:
        def task(begin: int, end: int) -> None:
            project(x, *lists, (begin, end), np.empty(d, compute), out, scale)

        run_rows(task, n, 1, useful_threads(work), row_work)

    return call


def _packed_lists(plan: ExactPlan) -> tuple[np.ndarray, ...]:
    """(firsts, words, masks, places): `group_lists` of the components that have entries, and where these are.

    Bit l of masks[v] tells whether component v LANES + l has entries; the first of them is number places[v].
    """
    starts, entries = plan.lists
    has_entries = np.zeros(-(-plan.k // LANES) * LANES, bool)
    has_entries[: plan.k] = np.diff(starts) > 0
    masks = np.packbits(has_entries, bitorder="little").view("<u2").astype(np.uint16)
    counts = has_entries.reshape(-1, LANES).sum(1)
    kept = np.append(starts[:-1][has_entries[: plan.k]], starts[-1])
    return *group_lists(kept, entries, 1), masks, counts.cumsum() - counts


@intrinsic
def _store_expanded(typing_context, sums, masks, places, out, i, scale):
    """out[i] = scale * the sums, rounded once from fp64, where bits of the masks are set; elsewhere 0."""

    def codegen(context, builder, signature, arguments):
        sums, masks, places, out, i, scale = arguments
        sums_type, masks_type, places_type, out_type, _, _ = signature.args
        element = context.get_data_type(sums_type.dtype)
        sums, masks, places = (
            context.make_array(kind)(context, builder, array).data
            for kind, array in ((sums_type, sums), (masks_type, masks), (places_type, places))
        )
        out = context.make_array(out_type)(context, builder, out)
        target, k = line_pointer(builder, out, i, 0), builder.extract_value(out.shape, 1)
        vector, lanes = ir.VectorType(element, LANES), ir.VectorType(ir.IntType(1), LANES)
        signature = ir.FunctionType(vector, [element.as_pointer(), lanes, vector])
        name = f"llvm.masked.expandload.v{LANES}{element.intrinsic_name}"
        expand = cgutils.get_or_insert_function(builder.module, signature, name)

        def store(v, remaining):
            mask = builder.bitcast(builder.load(builder.gep(masks, [v])), lanes)
            place = builder.load(builder.gep(places, [v]))
            values = builder.call(expand, [builder.gep(sums, [place]), mask, ir.Constant(vector, None)])
            first = builder.gep(target, [builder.mul(v, v.type(LANES))])
            store_scaled(builder, values, scale, first, out_type.dtype, remaining)

        whole = builder.udiv(k, k.type(LANES))
        with cgutils.for_range(builder, whole) as loop:
            store(loop.index, None)
        remaining = builder.sub(k, builder.mul(whole, k.type(LANES)))
        with builder.if_then(builder.icmp_signed(">", remaining, k.type(0))):
            store(whole, remaining)
        return context.get_dummy_value()

    return types.void(sums, masks, places, out, types.int64, types.float64), codegen


@kernel(
    x=DATA_2D, firsts=INT64S, words=Array(types.int32, 2), masks=MASKS, places=INT64S, rows=RANGE,
    features=Array(COMPUTE, 1), out=OUT_2D, scale=types.float64,
)  # fmt: skip
def expand_rows(x, firsts, words, masks, places, rows, features, out, scale):
    """Compute a range of rows of out, contiguous along its second axis. features : a buffer for those of one vector."""
    sums = np.empty((firsts.size - 1) * LANES, features.dtype)
    for i in range(rows[0], rows[1]):
        load_features(x[i : i + 1], 0, x.shape[1], features, 0)
        for g in range(firsts.size - 1):
            sum_group(words, firsts[g], firsts[g + 1], features, sums, g * LANES)
        _store_expanded(sums, masks, places, out, i, scale)
