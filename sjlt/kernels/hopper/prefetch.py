"""Copies of the data that programs of `project_codes_hopper` read first to the L2 cache, while codes are written."""

# (No `from __future__ import annotations`: Gluon would not see the annotations of kernel arguments.)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..config import hopper
from .rounds import parts_of

SEGMENT = gl.constexpr(512)  # bytes that a thread prefetches at a time
VECTORS = gl.constexpr(hopper.PROGRAM_VECTORS)


@gluon.jit
def prefetch(
    product, address, n, d, splits, n_tiles, columns_per_split, stride_v, stride_f,
    DTYPE: gl.constexpr, VECTORS_CONTIGUOUS: gl.constexpr,
):  # fmt: skip
    """Start to copy what the program reads first of the data at `address` to the L2 cache, up to 64 KiB.

    Each tile reads some of the first columns. Of the vectors of `product`, the program's first, tile m prefetches the
    m-th SEGMENT of bytes or, if vectors are contiguous, the m-th 128 columns. Prefetches begin and end at multiples of
    16 bytes, and no memory page ends between these. If the program begins with a share, these are the columns of the
    product's first share.
    """
    ITEM: gl.constexpr = DTYPE.primitive_bitwidth // 8
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    thread = gl.arange(0, 128, layout=layout)
    m, split, vector_block = parts_of(product, splits, n_tiles)
    v, j = (vector_block * VECTORS).to(gl.int64), split.to(gl.int64) * columns_per_split
    if VECTORS_CONTIGUOUS:
        row, rows, stride = j + m * 128 + thread, d, stride_f * ITEM
        first, width, size = v * ITEM, n.to(gl.int64) * ITEM, VECTORS * ITEM
    else:
        row, rows, stride = v + thread, n, stride_v * ITEM
        first, width, size = j * ITEM + m * SEGMENT, d.to(gl.int64) * ITEM, SEGMENT
    size = gl.where(row < rows, gl.minimum(width - first, size).to(gl.int32), 0)
    begin = address + row * stride + first
    below = (begin & 15).to(gl.int32)
    size = gl.where(size > 0, (below + size + 15) // 16 * 16, 0)
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r", [begin - below, size], gl.int32, False, 1,
    )  # fmt: skip
