"""Loads of few long vectors: a warp reads blocks of columns, and a lane one column or, with others, part of one."""

from __future__ import annotations

import triton
import triton.language as tl

from .global_memory import load_four_where
from .shared_memory import prefetch

LANES = tl.constexpr(32)


@triton.jit
def spread_out(q, KEPT: tl.constexpr, SPREAD: tl.constexpr, STRIDE: tl.constexpr):
    """Permute q = 0, 1, ... such that KEPT * (0 .. SPREAD - 1) become STRIDE * (0 .. SPREAD - 1).

    All three are powers of two: a field of bits moves, and the other bits keep their order.
    """
    others = q % KEPT + q // (KEPT * SPREAD) * KEPT
    return others % STRIDE + q // KEPT % SPREAD * STRIDE + others // STRIDE * (STRIDE * SPREAD)


@triton.jit
def block_offsets(
    LOADED: tl.constexpr, COLUMNS: tl.constexpr, TOGETHER: tl.constexpr, SETS: tl.constexpr, KEPT: tl.constexpr,
    SPREAD: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """The distances from a lane's first column to its columns in LOADED blocks of COLUMNS columns, as a tuple.

    The sets of warps process windows of TOGETHER blocks in turn. `spread_out` permutes the columns of a step.
    """
    offsets = ()
    for i in tl.static_range(LOADED):
        block = i // TOGETHER * SETS * TOGETHER + i % TOGETHER
        offsets += (spread_out(block * COLUMNS, KEPT, SPREAD, STRIDE),)  # type: ignore[assignment]
    return offsets


@triton.jit
def load_run(pointer, inside, WIDTH: tl.constexpr):
    """WIDTH consecutive elements from each pointer, read at once, as a tuple; zeros where not `inside`."""
    DTYPE: tl.constexpr = pointer.dtype.element_ty
    BITS: tl.constexpr = DTYPE.primitive_bitwidth
    WORD: tl.constexpr = tl.uint64 if BITS * WIDTH == 64 else tl.uint32
    WORD_BITS: tl.constexpr = 64 if BITS * WIDTH == 64 else 32
    PART: tl.constexpr = tl.uint32 if BITS == 32 else tl.uint16
    run = ()
    if WIDTH == 1:
        run += (tl.load(pointer, mask=inside, other=0),)  # type: ignore[assignment]
    else:
        words = ()
        if BITS * WIDTH == 128:
            words += load_four_where(pointer, inside)
        else:
            words += (tl.load(pointer.to(tl.pointer_type(WORD), bitcast=True), mask=inside, other=0),)  # type: ignore[assignment]
        for i in tl.static_range(WIDTH):
            part = (words[i * BITS // WORD_BITS] >> (i * BITS % WORD_BITS)).to(PART)
            run += (part.to(DTYPE, bitcast=True),)  # type: ignore[assignment]
    return run


@triton.jit
def load_blocks(x, column, offsets, v, n, d, stride_x, VECTORS: tl.constexpr, WIDTH: tl.constexpr):
    """Columns column + offsets[0], ... of VECTORS vectors, from vector v on, as a tuple; zeros after the last column.

    Each tensor has one vector's elements of one block; vectors vary fastest. `column` and, if WIDTH > 0, `v` may differ
    between lanes. Existing vectors are read again in place of those that do not exist, as masks of their own would take
    more instructions.
    """
    loaded = ()
    for i in tl.static_range(len(offsets)):
        j = column + offsets[i]
        inside = j.to(tl.uint32) < d.to(tl.uint32)
        if WIDTH == 0:
            for u in tl.static_range(VECTORS):
                row = x + tl.minimum(v + u, n - 1).to(tl.int64) * stride_x
                loaded += (tl.load(row + j, mask=inside, other=0),)  # type: ignore[assignment]
        else:
            for u in tl.static_range(0, VECTORS, WIDTH):
                pointer = x + j.to(tl.int64) * stride_x + tl.minimum(v + u, n - WIDTH)
                loaded += load_run(pointer, inside, WIDTH)
    return loaded


@triton.jit
def prefetch_step(
    x, first, stop, thread, v, n, stride_x, THREADS: tl.constexpr, COLUMNS: tl.constexpr, VECTORS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Prefetch COLUMNS columns of VECTORS vectors, from `first` to at most `stop` - 1 and from vector v on."""
    SECTOR: tl.constexpr = 256 // x.dtype.element_ty.primitive_bitwidth
    if WIDTH == 0:
        THREADS_EACH: tl.constexpr = THREADS // VECTORS
        for i in tl.static_range(0, COLUMNS, SECTOR * THREADS_EACH):
            j = i + thread // VECTORS * SECTOR
            u = v + thread % VECTORS
            keep = (j < COLUMNS) & (first + j < stop) & (u < n)
            prefetch(x + u.to(tl.int64) * stride_x + (first + j), keep & (first + j >= 0))
    else:
        STEP: tl.constexpr = max(1, SECTOR // VECTORS)
        for i in tl.static_range(0, COLUMNS, STEP * THREADS):
            j = i + thread * STEP
            keep = (j < COLUMNS) & (first + j < stop)
            prefetch(x + (first + j).to(tl.int64) * stride_x + v, keep & (first + j >= 0))
