"""Kernels for few data vectors and for fp64: entries serve as addresses, and sums run on the ordinary cores.

`few_vectors_layout` explains the five axes of the tensors, the fields of LAYOUT. `sjlt/kernels/README.md` lists the
one-letter names.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..config import exact as config
from .few_vectors_layout import (
    addresses,
    along_axis,
    and_vectors,
    broadcast_chunks,
    broadcast_keys,
    chunk_and_sub_block,
    entry_sign,
    expand,
    key_words,
    row_indices,
    unflatten,
)
from .law import (
    chunk_tile,
    forward_keys,
    part_start,
    permute,
    reciprocal_of,
    row_theta,
    scale_index,
    seed_words,
    tile_place,
    unscale_by,
)
from .program import known_multiple, rows_of_tile, start_dependents, store_result, store_sums, tile_and_vectors

BATCHES_PER_SUM = tl.constexpr(config.BATCHES_PER_SUM)


@triton.jit
def _load_chunks(
    data, live, begin, place, segment, GEOMETRY: tl.constexpr, LAYOUT: tl.constexpr, UNMASKED: tl.constexpr,
    VECTORS_CONTIGUOUS: tl.constexpr, OFFSET_DTYPE: tl.constexpr,
):  # fmt: skip
    """Load one segment's chunks whole: [vectors, chunks_outer, 1, 1, chunks_inner, rows_inner], zeros past a chunk.

    begin : the batch's first column in x.  place : the position of each chunk of the batch in its group.
    live : [vectors], whether a vector exists.
    """
    x, stride_xf, d = data
    LOG_GROUP: tl.constexpr = GEOMETRY.log_group
    LOG_CHUNK: tl.constexpr = GEOMETRY.log_chunk
    CHUNKS_OUTER: tl.constexpr = LAYOUT.chunks_outer
    CHUNKS_INNER: tl.constexpr = LAYOUT.chunks_inner
    ROWS_INNER: tl.constexpr = LAYOUT.rows_inner
    WIDTH: tl.constexpr = place.numel << (LOG_GROUP + LOG_CHUNK)  # columns of a batch
    i = along_axis(tl.arange(0, ROWS_INNER), 4).to(tl.uint32)
    chunk_column = ((tl.arange(0, place.numel) << LOG_GROUP) + place.to(tl.int32)) << LOG_CHUNK
    column = broadcast_chunks(chunk_column.to(tl.uint32), segment, 1, LAYOUT) + i
    address = addresses(column.to(OFFSET_DTYPE), stride_xf, x + begin * stride_xf, VECTORS_CONTIGUOUS)
    if UNMASKED and (begin >= 0) & (begin <= d - WIDTH):
        z = tl.load(address)
    else:
        mask = column >= tl.maximum(-begin, 0).to(tl.uint32)
        mask &= column < tl.maximum(tl.minimum(d - begin, WIDTH), 0).to(tl.uint32)
        mask &= i < (1 << LOG_CHUNK)
        z = tl.load(address, mask=and_vectors(mask, live, VECTORS_CONTIGUOUS), other=0)
    if VECTORS_CONTIGUOUS:
        z = tl.permute(z, 1, 0)
    return tl.reshape(z, live.numel, CHUNKS_OUTER, 1, 1, CHUNKS_INNER, ROWS_INNER)


@triton.jit
def _load_rows(
    data, live, begin, chunk_column, i, has_entry, segment, GEOMETRY: tl.constexpr, LAYOUT: tl.constexpr,
    WIDTH: tl.constexpr, UNMASKED: tl.constexpr, VECTORS_CONTIGUOUS: tl.constexpr, OFFSET_DTYPE: tl.constexpr,
):  # fmt: skip
    """Load, for each row, its one element of each of a segment's chunks: column i. Flattened as `addresses` does.

    chunk_column : each chunk's first column, counted from the batch's.  has_entry : whether a row has an entry in the
    chunk; ignored in power-of-two geometries, where every row has one.
    """
    x, stride_xf, d = data
    column = broadcast_chunks(chunk_column, segment, 1, LAYOUT) + i
    if VECTORS_CONTIGUOUS:
        address = addresses(column.to(OFFSET_DTYPE), stride_xf, x + begin * stride_xf, True)
    else:  # 64-bit arithmetic once per chunk; a row only adds the offset of its column
        first_column = broadcast_chunks((begin + chunk_column) * stride_xf, segment, 1, LAYOUT)
        address = addresses(tl.broadcast_to(first_column, i.shape), 1, x, False)
        column_offset = expand(i.to(OFFSET_DTYPE) * stride_xf, False)
        column_offset = tl.broadcast_to(
            column_offset, live.numel, LAYOUT.chunks_outer, LAYOUT.sub_blocks, LAYOUT.rows_outer, LAYOUT.chunks_inner,
            LAYOUT.rows_inner,
        )  # fmt: skip
        address += tl.reshape(column_offset, address.shape)
    if UNMASKED and (begin >= 0) & (begin <= d - WIDTH):
        flat = tl.load(address)
    else:
        mask = column >= tl.maximum(-begin, 0).to(tl.uint32)
        mask &= column < tl.minimum(d - begin, WIDTH).to(tl.uint32)
        if not GEOMETRY.power_of_two:
            mask &= has_entry
        flat = tl.load(address, mask=and_vectors(mask, live, VECTORS_CONTIGUOUS), other=0)
    return flat


@triton.jit(do_not_specialize=["n", "d", "seed", "feature_offset", "batches_per_split"])
def project_few_vectors(
    x,
    out,
    n,
    d,
    stride_xv,
    stride_xf,
    stride_os,
    stride_ov,
    stride_or,
    seed: tl.int64,
    feature_offset,
    batches_per_split,
    GEOMETRY: tl.constexpr,
    LAYOUT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK_VECTORS: tl.constexpr,
    UNMASKED: tl.constexpr,
    ALIGN: tl.constexpr,
    LOAD_CHUNKS: tl.constexpr,
    VECTORS_CONTIGUOUS: tl.constexpr,
    OFFSET_DTYPE: tl.constexpr,
    SUM_DTYPE: tl.constexpr,
    SINGLE_SPLIT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PROGRAMMATIC_LAUNCH: tl.constexpr,
):
    """out[split, v, r] = sum over the split's columns j of x[v, j] S[r, j].

    Grid: (n_tiles * blocks of vectors, splits).

    x : (n, d).  out : (splits, n, k) sums of SUM_DTYPE or, with SINGLE_SPLIT, the result (n, k): scaled, added to `out`
    if ACCUMULATE, and rounded once.

    A split consists of `batches_per_split` batches, a batch of SEGMENTS segments, and a segment of chunks_outer *
    chunks_inner groups, each with at most one chunk for the program's tile. Philox runs once per batch; a segment is
    one step of loads and sums. Sums run over the chunks_outer chunks of a segment, then over BATCHES_PER_SUM batches,
    then over all, which keeps them short.

    LOAD_CHUNKS : chunks are loaded whole, coalesced and one segment ahead, and permuted within warps; requires
    rows_outer = 1, and chunks_inner * rows_inner covering all threads. Otherwise each row loads its own element.
    UNMASKED : BLOCK_VECTORS divides n.  ALIGN : a power of two that divides n and stride_xf, with VECTORS_CONTIGUOUS.
    OFFSET_DTYPE : integer type that holds the offsets of x within a batch.
    """
    SUB_BLOCKS: tl.constexpr = LAYOUT.sub_blocks
    ROWS_OUTER: tl.constexpr = LAYOUT.rows_outer
    ROWS_INNER: tl.constexpr = LAYOUT.rows_inner
    CHUNKS_OUTER: tl.constexpr = LAYOUT.chunks_outer
    CHUNKS_INNER: tl.constexpr = LAYOUT.chunks_inner
    N_TILES: tl.constexpr = GEOMETRY.n_tiles
    LOG_GROUP: tl.constexpr = GEOMETRY.log_group
    LOG_CHUNK: tl.constexpr = GEOMETRY.log_chunk
    NNZ: tl.constexpr = GEOMETRY.nnz
    POWER_OF_TWO: tl.constexpr = GEOMETRY.power_of_two
    CHUNKS: tl.constexpr = SEGMENTS * CHUNKS_OUTER * CHUNKS_INNER  # of a batch
    # Whether the vectors are the last axis of tensors; VECTORS_CONTIGUOUS describes memory.
    VECTORS_LAST: tl.constexpr = VECTORS_CONTIGUOUS and not LOAD_CHUNKS
    CHUNK_AXIS: tl.constexpr = 0 if VECTORS_LAST else 1
    LOG_WIDTH: tl.constexpr = LOG_GROUP + LOG_CHUNK
    WIDTH: tl.constexpr = CHUNKS << LOG_WIDTH  # columns of a batch
    NO_MASKS: tl.constexpr = POWER_OF_TWO and UNMASKED  # in batches whose columns all exist
    start_dependents(PROGRAMMATIC_LAUNCH)
    k0, k1 = seed_words(seed)
    feature_offset, d = feature_offset.to(tl.int64), d.to(tl.int64)
    m, v = tile_and_vectors(N_TILES, BLOCK_VECTORS)
    x += v * stride_xv
    if VECTORS_CONTIGUOUS:
        stride_xf, n = known_multiple(stride_xf, ALIGN), known_multiple(n, ALIGN)
    live = v < n
    data = (x, stride_xf, d)

    tile_begin, tile_end = rows_of_tile(m, GEOMETRY)
    tile_rows = (tile_end - tile_begin).to(tl.int32)
    t = tl.arange(0, SUB_BLOCKS)
    sub_block_begin = part_start(t, tile_rows, NNZ)  # counted from the tile's first row
    sub_block_rows = part_start(t + 1, tile_rows, NNZ) - sub_block_begin
    r = row_indices(LAYOUT)
    if not POWER_OF_TWO:
        b = along_axis(sub_block_rows, 1).to(tl.uint32)
        reciprocal = reciprocal_of(b)
        in_sub_block = (r < b) & (along_axis(t, 1) < NNZ)

    q = tl.arange(0, CHUNKS)
    first_group = feature_offset >> LOG_WIDTH
    start = tl.program_id(1).to(tl.int64) * batches_per_split
    stop = tl.minimum(tl.cdiv(feature_offset + d - (first_group << LOG_WIDTH), WIDTH), start + batches_per_split)
    if VECTORS_LAST:
        total = tl.zeros((SUB_BLOCKS, ROWS_OUTER, CHUNKS_INNER, ROWS_INNER, BLOCK_VECTORS), SUM_DTYPE)
    else:
        total = tl.zeros((BLOCK_VECTORS, SUB_BLOCKS, ROWS_OUTER, CHUNKS_INNER, ROWS_INNER), SUM_DTYPE)
    if LOAD_CHUNKS:
        begin = ((first_group + start * CHUNKS) << LOG_WIDTH) - feature_offset
        place, found = tile_place(
            m.to(tl.uint32), first_group + start * CHUNKS + q, N_TILES, LOG_GROUP, k0, k1, GEOMETRY.stack
        )
        loaded = _load_chunks(data, live, begin, place, 0, GEOMETRY, LAYOUT, NO_MASKS, VECTORS_CONTIGUOUS, OFFSET_DTYPE)
    for first_batch in range(start, stop, BATCHES_PER_SUM):
        acc = tl.zeros_like(total)
        for batch in range(first_batch, tl.minimum(first_batch + BATCHES_PER_SUM, stop)):
            group = first_group + batch * CHUNKS
            begin = (group << LOG_WIDTH) - feature_offset  # the batch's first column in x
            if not LOAD_CHUNKS:
                place, found = tile_place(m.to(tl.uint32), group + q, N_TILES, LOG_GROUP, k0, k1, GEOMETRY.stack)
            c = ((group + q) << LOG_GROUP) + place.to(tl.int64)
            chunk_column = (((q << LOG_GROUP) + place.to(tl.int32)) << LOG_CHUNK).to(tl.uint32)
            has_chunk = found.to(tl.int32)
            this_place = place
            if LOAD_CHUNKS:
                place, found = tile_place(
                    m.to(tl.uint32), group + CHUNKS + q, N_TILES, LOG_GROUP, k0, k1, GEOMETRY.stack
                )
            # Not unrolled, to spare the instruction cache, unless loads are in flight: unrolling then saves copies.
            for segment in tl.range(0, SEGMENTS, loop_unroll_factor=SEGMENTS if LOAD_CHUNKS else 1):
                if LOAD_CHUNKS:  # the next segment's chunks are in flight while this one's are summed
                    z = loaded
                    last = segment + 1 == SEGMENTS
                    next_begin = begin + tl.where(last, WIDTH, 0)
                    next_data = (x, stride_xf, tl.where(last & (batch + 1 == stop), 0, d))
                    loaded = _load_chunks(
                        next_data, live, next_begin, tl.where(last, place, this_place), (segment + 1) % SEGMENTS,
                        GEOMETRY, LAYOUT, NO_MASKS, VECTORS_CONTIGUOUS, OFFSET_DTYPE,
                    )  # fmt: skip
                keys, theta = broadcast_keys(c, tile_rows, segment, GEOMETRY, LAYOUT, k0, k1)
                i, has_entry = r, r  # has_entry is not used in power-of-two geometries
                if not POWER_OF_TWO:
                    i = unscale_by(r, b, theta, reciprocal, LOG_CHUNK)
                    has_entry = in_sub_block & (scale_index(i, b, theta, LOG_CHUNK) == r)
                    has_entry &= broadcast_chunks(has_chunk, segment, 1, LAYOUT) != 0
                i = permute(i, keys, LOG_CHUNK)
                if LOAD_CHUNKS:
                    z = tl.broadcast_to(
                        z, BLOCK_VECTORS, CHUNKS_OUTER, SUB_BLOCKS, ROWS_OUTER, CHUNKS_INNER, ROWS_INNER
                    )
                    z = tl.gather(z, tl.broadcast_to(expand(i.to(tl.int32), False), z.shape), 5)
                    if not POWER_OF_TWO:
                        z = tl.where(expand(has_entry, False), z, 0)
                else:
                    flat = _load_rows(
                        data, live, begin, chunk_column, i, has_entry, segment, GEOMETRY, LAYOUT, WIDTH, NO_MASKS,
                        VECTORS_CONTIGUOUS, OFFSET_DTYPE,
                    )  # fmt: skip
                    z = unflatten(flat, BLOCK_VECTORS, LAYOUT, VECTORS_LAST)
                sign = entry_sign(c, i, segment, GEOMETRY, LAYOUT, SUM_DTYPE, True, k0, k1)
                acc += tl.sum(z.to(SUM_DTYPE) * expand(sign, VECTORS_LAST), CHUNK_AXIS)
        total += acc

    if VECTORS_LAST:
        y = tl.reshape(tl.sum(total, 2), SUB_BLOCKS, ROWS_OUTER * ROWS_INNER, BLOCK_VECTORS)
    else:
        y = tl.reshape(tl.sum(total, 3), BLOCK_VECTORS, SUB_BLOCKS, ROWS_OUTER * ROWS_INNER)
        y = tl.permute(y, 1, 2, 0)
    r = tl.arange(0, ROWS_OUTER * ROWS_INNER)[None, :, None]
    row = tile_begin + sub_block_begin[:, None, None] + r
    keep = (r < sub_block_rows[:, None, None]) & (t < NNZ)[:, None, None] & (v < n)[None, None, :]
    out += tl.program_id(1).to(tl.int64) * stride_os + v[None, None, :] * stride_ov + row * stride_or
    store_sums(y, out, keep, GEOMETRY.scale, SINGLE_SPLIT, ACCUMULATE)


@triton.jit(do_not_specialize=["n", "d", "seed", "feature_offset"])
def adjoint_few_vectors(
    y,
    out,
    n,
    d,
    stride_yv,
    stride_yr,
    stride_ov,
    stride_of,
    seed: tl.int64,
    feature_offset,
    GEOMETRY: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK_VECTORS: tl.constexpr,
    UNMASKED: tl.constexpr,
    ALIGN: tl.constexpr,
    VECTORS_CONTIGUOUS: tl.constexpr,
    OFFSET_DTYPE: tl.constexpr,
    SUM_DTYPE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """out[v, j] = sum over rows r of y[v, r] S[r, j]; grid (blocks of chunks * blocks of vectors,).

    y : (n, k).  out : (n, d); every element is written once.  ALIGN : with VECTORS_CONTIGUOUS, divides n, stride_yr
    and stride_of.  OFFSET_DTYPE : integer type that holds the offsets within one vector of y.  Other arguments are as
    in `project_few_vectors`.

    The axes rows_outer and rows_inner run over the columns of a chunk here, not over the rows of a sub-block.
    """
    SUB_BLOCKS: tl.constexpr = LAYOUT.sub_blocks
    ROWS_OUTER: tl.constexpr = LAYOUT.rows_outer
    ROWS_INNER: tl.constexpr = LAYOUT.rows_inner
    CHUNKS_OUTER: tl.constexpr = LAYOUT.chunks_outer
    CHUNKS_INNER: tl.constexpr = LAYOUT.chunks_inner
    N_TILES: tl.constexpr = GEOMETRY.n_tiles
    LOG_GROUP: tl.constexpr = GEOMETRY.log_group
    LOG_CHUNK: tl.constexpr = GEOMETRY.log_chunk
    NNZ: tl.constexpr = GEOMETRY.nnz
    CHUNKS: tl.constexpr = CHUNKS_OUTER * CHUNKS_INNER
    SUB_BLOCK_AXIS: tl.constexpr = 1 if VECTORS_CONTIGUOUS else 2
    k0, k1 = seed_words(seed)
    feature_offset, d = feature_offset.to(tl.int64), d.to(tl.int64)
    chunks = ((feature_offset + d - 1) >> LOG_CHUNK) - (feature_offset >> LOG_CHUNK) + 1
    blocks = tl.cdiv(chunks, CHUNKS)
    v = tl.program_id(0) // blocks * BLOCK_VECTORS + tl.arange(0, BLOCK_VECTORS)
    if VECTORS_CONTIGUOUS:
        stride_yr, stride_of = known_multiple(stride_yr, ALIGN), known_multiple(stride_of, ALIGN)
        n = known_multiple(n, ALIGN)
    live = v < n

    q = tl.arange(0, CHUNKS)
    first_chunk = (feature_offset >> LOG_CHUNK) + tl.program_id(0) % blocks * CHUNKS
    begin = (first_chunk << LOG_CHUNK) - feature_offset  # the block's first column in out
    c = first_chunk + q
    m = chunk_tile(c, N_TILES, LOG_GROUP, k0, k1, GEOMETRY.stack).to(tl.int64)
    tile_begin = part_start(m, GEOMETRY.k, N_TILES)
    w = key_words(c, SUB_BLOCKS, CHUNKS_OUTER, CHUNKS_INNER, GEOMETRY.stack, k0, k1)
    i = row_indices(LAYOUT)
    slot = permute(i, broadcast_chunks(forward_keys(w, LOG_CHUNK), 0, SUB_BLOCKS, LAYOUT), LOG_CHUNK)
    row = broadcast_chunks(tile_begin.to(tl.uint32), 0, 1, LAYOUT)
    if GEOMETRY.power_of_two:
        row += (along_axis(tl.arange(0, SUB_BLOCKS), 1) << LOG_CHUNK).to(tl.uint32)
        row = row + slot
    else:
        tile_rows = (part_start(m + 1, GEOMETRY.k, N_TILES) - tile_begin).to(tl.int32)
        chunk, t = chunk_and_sub_block(SUB_BLOCKS, CHUNKS_OUTER, CHUNKS_INNER)
        tile_rows = tl.gather(tile_rows, chunk, 0)
        sub_block_begin = part_start(t, tile_rows, NNZ)
        b = (part_start(t + 1, tile_rows, NNZ) - sub_block_begin).to(tl.uint32)
        theta = row_theta(w, b)
        row += broadcast_chunks(sub_block_begin.to(tl.uint32), 0, SUB_BLOCKS, LAYOUT)
        b, theta = broadcast_chunks(b, 0, SUB_BLOCKS, LAYOUT), broadcast_chunks(theta, 0, SUB_BLOCKS, LAYOUT)
        row += scale_index(slot, b, theta, LOG_CHUNK)
    address = addresses(row.to(OFFSET_DTYPE), stride_yr, y + v * stride_yv, VECTORS_CONTIGUOUS)
    if SUB_BLOCKS == NNZ and UNMASKED:
        z = tl.load(address)
    else:
        mask = tl.broadcast_to(along_axis(tl.arange(0, SUB_BLOCKS), 1) < NNZ, row.shape)
        z = tl.load(address, mask=and_vectors(mask, live, VECTORS_CONTIGUOUS), other=0)
    z = unflatten(z, BLOCK_VECTORS, LAYOUT, VECTORS_CONTIGUOUS)
    sign = entry_sign(c, tl.broadcast_to(i, row.shape), 0, GEOMETRY, LAYOUT, SUM_DTYPE, False, k0, k1)
    z = tl.sum(z.to(SUM_DTYPE) * expand(sign, VECTORS_CONTIGUOUS), SUB_BLOCK_AXIS) * GEOMETRY.scale

    i = tl.arange(0, ROWS_OUTER)[None, :, None, None] * ROWS_INNER + tl.arange(0, ROWS_INNER)[None, None, None, :]
    j = begin + ((tl.reshape(q, CHUNKS_OUTER, 1, CHUNKS_INNER, 1) << LOG_CHUNK) + i)
    mask = and_vectors((j >= 0) & (j < d), live, VECTORS_CONTIGUOUS)
    out = addresses(j, stride_of, out + v * stride_ov, VECTORS_CONTIGUOUS)
    store_result(tl.reshape(z, out.shape), out, mask, ACCUMULATE)
