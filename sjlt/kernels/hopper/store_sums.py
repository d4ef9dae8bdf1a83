"""Stores of the sums of a tile, by the TMA or by threads, and of shares of these sums."""

# (No `from __future__ import annotations`: Gluon would not see the annotations of kernel arguments.)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ..portable import chunk_codes, program
from .common import TILE, barrier
from .common import WARPGROUP_VECTORS as HALF

_tile_start = gluon.jit(chunk_codes.tile_start.fn)
_multiple = gluon.jit(program.known_multiple.fn)


@gluon.constexpr_function
def _store_layout(width, CHOSEN):
    """The layout of sums [vectors, rows] for stores by threads of `width` adjacent elements."""
    lanes = min(32, (CHOSEN.part_vectors if CHOSEN.out_vectors_contiguous else CHOSEN.part_rows) // width)
    if CHOSEN.out_vectors_contiguous:
        return gl.BlockedLayout([width, 1], [lanes, 32 // lanes], [2, 2], [0, 1])
    return gl.BlockedLayout([1, width], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.constexpr_function
def first_row_of_part(CHOSEN, CONSUMER):
    """The first row of a consumer's part of a tile, within the tile."""
    return CONSUMER * CHOSEN.part_rows if CHOSEN.rows > CHOSEN.part_rows else 0


@gluon.jit
def rows_of_part(m, k, n_tiles, CHOSEN: gl.constexpr, CONSUMER: gl.constexpr):
    """(first row, number of rows) of a consumer's part of tile or window m."""
    FIRST_ROW: gl.constexpr = first_row_of_part(CHOSEN, CONSUMER)
    if CHOSEN.windows:
        first_row = m * TILE + FIRST_ROW
        return first_row, gl.minimum(k - first_row, TILE)
    first_row = _tile_start(m, k, n_tiles).to(gl.int32) + FIRST_ROW
    return first_row, _tile_start(m + 1, k, n_tiles).to(gl.int32) - first_row


@gluon.jit
def first_vector(vector_block, CHOSEN: gl.constexpr, CONSUMER: gl.constexpr):
    """The first vector of a consumer's part of a product."""
    return vector_block * (2 * HALF) + (CONSUMER * HALF if CHOSEN.part_vectors == HALF else 0)


@gluon.jit
def _store_by_threads(
    acc, out, m, split, v, n, k, n_tiles, stride_os, stride_ov, stride_or, WIDTH: gl.constexpr, ADJACENT: gl.constexpr,
    ACCUMULATE: gl.constexpr, CHOSEN: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Store sums as `store_sums` does, WIDTH elements at a time.  ADJACENT : as in CHOSEN."""
    ROWS: gl.constexpr = CHOSEN.part_rows
    VECTORS: gl.constexpr = CHOSEN.part_vectors
    FIRST_ROW: gl.constexpr = first_row_of_part(CHOSEN, CONSUMER)
    layout: gl.constexpr = _store_layout(WIDTH, CHOSEN)
    first_row, rows = rows_of_part(m, k, n_tiles, CHOSEN, CONSUMER)
    # In forms that tell the compiler that WIDTH elements can be stored at once.
    if CHOSEN.out_vectors_contiguous:
        n, stride_or, stride_os = _multiple(n, WIDTH), _multiple(stride_or, WIDTH), _multiple(stride_os, WIDTH)
    else:
        first_row, rows = _multiple(first_row, WIDTH), _multiple(rows, WIDTH)
        stride_ov, stride_os = _multiple(stride_ov, WIDTH), _multiple(stride_os, WIDTH)
    i = gl.arange(0, VECTORS, layout=gl.SliceLayout(1, layout))
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    # The compiler folds what it can of these masks and addresses, and cannot compute them before the loop over
    # products, which would take more registers than there are.
    FULL: gl.constexpr = 0 if CHOSEN.windows else CHOSEN.rows - 64 - FIRST_ROW  # rows that every tile has
    keep = (i < n - v)[:, None] & ((r < rows) | (r < FULL))[None, :]
    out += split * stride_os
    if not ADJACENT:
        along_v, along_r = (v.to(gl.int64) + i) * stride_ov, (first_row + r) * stride_or
        pointers = (out + along_v)[:, None] + along_r[None, :]
    elif CHOSEN.out_vectors_contiguous:
        pointers = (out + v + (first_row + r) * stride_or)[None, :] + i[:, None]
    else:
        pointers = (out + first_row + (v.to(gl.int64) + i) * stride_ov)[:, None] + r[None, :]
    if ACCUMULATE:
        acc = gl.convert_layout(acc, layout)
        acc += gl.load(pointers, mask=keep, other=0.0).to(gl.float32)
        gl.store(pointers, acc.to(out.dtype.element_ty), mask=keep)
    else:
        gl.store(pointers, gl.convert_layout(acc.to(out.dtype.element_ty), layout), mask=keep)


@gluon.jit
def store_sums(
    acc, out, outs, m, split, v, n, k, n_tiles, stride_os, stride_ov, stride_or,
    CHOSEN: gl.constexpr, ACCUMULATE: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Store the sums [vectors, rows] of the vectors from v on and of a consumer's part of the tile's rows."""
    if CHOSEN.tma_store:
        ROWS: gl.constexpr = CHOSEN.part_rows
        VECTORS: gl.constexpr = CHOSEN.part_vectors
        FIRST_ROW: gl.constexpr = first_row_of_part(CHOSEN, CONSUMER)
        part = outs.index(CONSUMER)
        tma.store_wait(0)
        barrier()
        if CHOSEN.out_vectors_contiguous:
            part.permute((1, 0)).store(acc.to(out.dtype))
        else:
            part.store(acc.to(out.dtype))
        fence_async_shared()
        barrier()
        # (pair of a split and a tile, row of the tile), or a row of the result
        at = (0, m * TILE + FIRST_ROW) if CHOSEN.windows else (split * n_tiles + m, FIRST_ROW)
        if CHOSEN.out_vectors_contiguous:
            part = part._reinterpret(out.dtype, [1, ROWS, VECTORS], out.layout)
            tma.async_copy_shared_to_global(out, [at[0], at[1], v], part)
        else:
            part = part._reinterpret(out.dtype, [VECTORS, 1, ROWS], out.layout)
            tma.async_copy_shared_to_global(out, [v, at[0], at[1]], part)
    else:
        _store_by_threads(
            acc, out, m, split, v, n, k, n_tiles, stride_os, stride_ov, stride_or, CHOSEN.store_width, CHOSEN.adjacent,
            ACCUMULATE, CHOSEN, CONSUMER,
        )  # fmt: skip


@gluon.jit
def store_share(acc, sums, outs, m, share, shares, v, n, k, n_tiles, CHOSEN: gl.constexpr, CONSUMER: gl.constexpr):
    """Store the fp32 sums [vectors, rows] of a share as partial sums of n vectors, from vector v on.

    sums : with the layout of `backends.triton.partial_sums.sums_of`.  outs : as for `store_sums`. If it holds fp32,
    threads exchange the sums there, because too little other shared memory is left.
    """
    if CHOSEN.tma_store and outs.dtype == gl.float32:
        part = outs.index(CONSUMER)
        if CHOSEN.out_vectors_contiguous:
            part = part.permute((1, 0))
        tma.store_wait(0)
        barrier()
        part.store(acc)
        barrier()
        acc = part.load(_store_layout(1, CHOSEN))
    shares, one, k64, n64 = shares.to(gl.int64), gl.to_tensor(1).to(gl.int64), k.to(gl.int64), n.to(gl.int64)
    strides = (k64 * n64, one, n64) if CHOSEN.out_vectors_contiguous else (k64, shares * k64, one)
    _store_by_threads(
        acc, sums, m, share, v, n, k, n_tiles, strides[0], strides[1], strides[2], 1, True, False, CHOSEN, CONSUMER
    )
