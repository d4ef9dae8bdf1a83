"""Kernels for few data vectors and for fp64: entries act as addresses, and sums run on the ordinary cores.

`few_vectors_layout` describes how numbers lie over threads.
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
    """Whole chunks: one segment of those at places `place` of their groups: [V, chunks_outer, 1, 1, chunks_inner, B].

    begin : the first column of the batch in x.  live : [V], whether a vector exists.
    """
    x, stride_xf, d = data
    LOG_GROUP: tl.constexpr = GEOMETRY.log_group
    LOG_CHUNK: tl.constexpr = GEOMETRY.log_chunk
    QI: tl.constexpr = LAYOUT.chunks_outer
    QW: tl.constexpr = LAYOUT.chunks_inner
    L: tl.constexpr = LAYOUT.rows_inner
    WIDTH: tl.constexpr = place.numel << (LOG_GROUP + LOG_CHUNK)  # columns of a batch
    lane = along_axis(tl.arange(0, L), 4).to(tl.uint32)
    chunk_column = ((tl.arange(0, place.numel) << LOG_GROUP) + place.to(tl.int32)) << LOG_CHUNK
    column = broadcast_chunks(chunk_column.to(tl.uint32), segment, 1, LAYOUT) + lane
    address = addresses(column.to(OFFSET_DTYPE), stride_xf, x + begin * stride_xf, VECTORS_CONTIGUOUS)
    if UNMASKED and (begin >= 0) & (begin <= d - WIDTH):
        z = tl.load(address)
    else:
        known = column >= tl.maximum(-begin, 0).to(tl.uint32)
        known &= column < tl.maximum(tl.minimum(d - begin, WIDTH), 0).to(tl.uint32)
        known &= lane < (1 << LOG_CHUNK)
        z = tl.load(address, mask=and_vectors(known, live, VECTORS_CONTIGUOUS), other=0)
    if VECTORS_CONTIGUOUS:
        z = tl.permute(z, 1, 0)
    return tl.reshape(z, live.numel, QI, 1, 1, QW, L)


@triton.jit
def _load_rows(
    data, live, begin, chunk_column, i, there, segment, GEOMETRY: tl.constexpr, LAYOUT: tl.constexpr,
    WIDTH: tl.constexpr, UNMASKED: tl.constexpr, VECTORS_CONTIGUOUS: tl.constexpr, OFFSET_DTYPE: tl.constexpr,
):  # fmt: skip
    """Each row's own element of one segment's chunks, at place i; flattened as by `addresses`.

    chunk_column : the chunks' first columns in the batch.  there : whether a row has an entry; used only if the
    geometry is not a power of two.
    """
    x, stride_xf, d = data
    column = broadcast_chunks(chunk_column, segment, 1, LAYOUT) + i
    if VECTORS_CONTIGUOUS:
        address = addresses(column.to(OFFSET_DTYPE), stride_xf, x + begin * stride_xf, True)
    else:  # 64-bit arithmetic once per chunk; a row adds its place
        first_column = broadcast_chunks((begin + chunk_column) * stride_xf, segment, 1, LAYOUT)
        address = addresses(tl.broadcast_to(first_column, i.shape), 1, x, False)
        place_offset = expand(i.to(OFFSET_DTYPE) * stride_xf, False)
        place_offset = tl.broadcast_to(
            place_offset, live.numel, LAYOUT.chunks_outer, LAYOUT.sub_blocks, LAYOUT.rows_outer, LAYOUT.chunks_inner,
            LAYOUT.rows_inner,
        )  # fmt: skip
        address += tl.reshape(place_offset, address.shape)
    if UNMASKED and (begin >= 0) & (begin <= d - WIDTH):
        flat = tl.load(address)
    else:
        known = column >= tl.maximum(-begin, 0).to(tl.uint32)
        known &= column < tl.minimum(d - begin, WIDTH).to(tl.uint32)
        if not GEOMETRY.power_of_two:
            known &= there
        flat = tl.load(address, mask=and_vectors(known, live, VECTORS_CONTIGUOUS), other=0)
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
    """out[split, v, r] = sum over a split's columns j of x[v, j] S[r, j]; grid (n_tiles * blocks of vectors, splits).

    x : (n, d).  out : (splits, n, k) sums of SUM_DTYPE or, with SINGLE_SPLIT, the result (n, k), scaled, added to `out`
    if ACCUMULATE, and rounded once.

    A split has `batches_per_split` batches of groups of chunks. A batch has SEGMENTS segments of chunks_outer *
    chunks_inner groups: Philox runs once per batch, and each segment is one step of loads and sums. Sums run over
    chunks_outer chunks, then over BATCHES_PER_SUM batches, then over all.

    LOAD_CHUNKS : whole chunks are loaded, coalesced and a step ahead, and permuted within warps (this needs rows_outer
    = 1, and chunks_inner * rows_inner covering all threads); else each row loads its own element.  UNMASKED :
    BLOCK_VECTORS divides n.  ALIGN : a power of two that divides stride_xf, with VECTORS_CONTIGUOUS.  OFFSET_DTYPE :
    holds the offsets of x within a batch.
    """
    T: tl.constexpr = LAYOUT.sub_blocks
    H: tl.constexpr = LAYOUT.rows_outer
    L: tl.constexpr = LAYOUT.rows_inner
    QI: tl.constexpr = LAYOUT.chunks_outer
    QW: tl.constexpr = LAYOUT.chunks_inner
    V: tl.constexpr = BLOCK_VECTORS
    N_TILES: tl.constexpr = GEOMETRY.n_tiles
    LOG_GROUP: tl.constexpr = GEOMETRY.log_group
    LOG_CHUNK: tl.constexpr = GEOMETRY.log_chunk
    NNZ: tl.constexpr = GEOMETRY.nnz
    POWER_OF_TWO: tl.constexpr = GEOMETRY.power_of_two
    Q: tl.constexpr = SEGMENTS * QI * QW
    # Describes tensors; VECTORS_CONTIGUOUS describes memory.
    VECTORS_LAST: tl.constexpr = VECTORS_CONTIGUOUS and not LOAD_CHUNKS
    CHUNK_AXIS: tl.constexpr = 0 if VECTORS_LAST else 1
    LOG_WIDTH: tl.constexpr = LOG_GROUP + LOG_CHUNK
    WIDTH: tl.constexpr = Q << LOG_WIDTH  # columns of a batch
    NO_MASKS: tl.constexpr = POWER_OF_TWO and UNMASKED  # where all columns of a batch exist
    start_dependents(PROGRAMMATIC_LAUNCH)
    k0, k1 = seed_words(seed)
    feature_offset, d = feature_offset.to(tl.int64), d.to(tl.int64)
    m, v = tile_and_vectors(N_TILES, V)
    x += v * stride_xv
    live = v < n
    if VECTORS_CONTIGUOUS:
        stride_xf = known_multiple(stride_xf, ALIGN)
    data = (x, stride_xf, d)

    tile_row, tile_end = rows_of_tile(m, GEOMETRY)
    tile_rows = (tile_end - tile_row).to(tl.int32)
    t = tl.arange(0, T)
    first = part_start(t, tile_rows, NNZ)  # where the tile's sub-blocks begin
    rows = part_start(t + 1, tile_rows, NNZ) - first
    r = row_indices(LAYOUT)
    if not POWER_OF_TWO:
        b = along_axis(rows, 1).to(tl.uint32)
        reciprocal = reciprocal_of(b)
        in_block = (r < b) & (along_axis(t, 1) < NNZ)

    q = tl.arange(0, Q)
    first_group = feature_offset >> LOG_WIDTH
    start = tl.program_id(1).to(tl.int64) * batches_per_split
    stop = tl.minimum(tl.cdiv(feature_offset + d - (first_group << LOG_WIDTH), WIDTH), start + batches_per_split)
    total = tl.zeros((T, H, QW, L, V), SUM_DTYPE) if VECTORS_LAST else tl.zeros((V, T, H, QW, L), SUM_DTYPE)
    if LOAD_CHUNKS:
        begin = ((first_group + start * Q) << LOG_WIDTH) - feature_offset
        place, found = tile_place(
            m.to(tl.uint32), first_group + start * Q + q, N_TILES, LOG_GROUP, k0, k1, GEOMETRY.stack
        )
        line = _load_chunks(data, live, begin, place, 0, GEOMETRY, LAYOUT, NO_MASKS, VECTORS_CONTIGUOUS, OFFSET_DTYPE)
    for first_batch in range(start, stop, BATCHES_PER_SUM):
        acc = tl.zeros_like(total)
        for batch in range(first_batch, tl.minimum(first_batch + BATCHES_PER_SUM, stop)):
            group = first_group + batch * Q
            begin = (group << LOG_WIDTH) - feature_offset  # the batch's first column in x; columns count from there
            if not LOAD_CHUNKS:
                place, found = tile_place(m.to(tl.uint32), group + q, N_TILES, LOG_GROUP, k0, k1, GEOMETRY.stack)
            c = ((group + q) << LOG_GROUP) + place.to(tl.int64)
            chunk_column = (((q << LOG_GROUP) + place.to(tl.int32)) << LOG_CHUNK).to(tl.uint32)
            here = found.to(tl.int32)
            this_place = place
            if LOAD_CHUNKS:
                place, found = tile_place(m.to(tl.uint32), group + Q + q, N_TILES, LOG_GROUP, k0, k1, GEOMETRY.stack)
            # A loop, to spare the instruction cache; unrolled where a load is in flight, which then needs no copies.
            for segment in tl.range(0, SEGMENTS, loop_unroll_factor=SEGMENTS if LOAD_CHUNKS else 1):
                if LOAD_CHUNKS:  # the next segment's chunks are in flight while this one's are summed
                    z = line
                    last = segment + 1 == SEGMENTS
                    next_begin = begin + tl.where(last, WIDTH, 0)
                    next_data = (x, stride_xf, tl.where(last & (batch + 1 == stop), 0, d))
                    line = _load_chunks(
                        next_data, live, next_begin, tl.where(last, place, this_place), (segment + 1) % SEGMENTS,
                        GEOMETRY, LAYOUT, NO_MASKS, VECTORS_CONTIGUOUS, OFFSET_DTYPE,
                    )  # fmt: skip
                keys, theta = broadcast_keys(c, tile_rows, segment, GEOMETRY, LAYOUT, k0, k1)
                i, there = r, r
                if not POWER_OF_TWO:
                    i = unscale_by(r, b, theta, reciprocal, LOG_CHUNK)
                    there = in_block & (scale_index(i, b, theta, LOG_CHUNK) == r)
                    there &= broadcast_chunks(here, segment, 1, LAYOUT) != 0
                i = permute(i, keys, LOG_CHUNK)
                if LOAD_CHUNKS:
                    z = tl.broadcast_to(z, V, QI, T, H, QW, L)
                    z = tl.gather(z, tl.broadcast_to(expand(i.to(tl.int32), False), V, QI, T, H, QW, L), 5)
                    if not POWER_OF_TWO:
                        z = tl.where(expand(there, False), z, 0)
                else:
                    flat = _load_rows(
                        data, live, begin, chunk_column, i, there, segment, GEOMETRY, LAYOUT, WIDTH, NO_MASKS,
                        VECTORS_CONTIGUOUS, OFFSET_DTYPE,
                    )  # fmt: skip
                    z = tl.reshape(flat, QI, T, H, QW, L, V) if VECTORS_LAST else tl.reshape(flat, V, QI, T, H, QW, L)
                sign = entry_sign(c, i, segment, GEOMETRY, LAYOUT, SUM_DTYPE, True, k0, k1)
                acc += tl.sum(z.to(SUM_DTYPE) * expand(sign, VECTORS_LAST), CHUNK_AXIS)
        total += acc

    if VECTORS_LAST:
        y = tl.reshape(tl.sum(total, 2), T, H * L, V)
    else:
        y = tl.permute(tl.reshape(tl.sum(total, 3), V, T, H * L), 1, 2, 0)
    r = tl.arange(0, H * L)[None, :, None]
    row = tile_row + first[:, None, None] + r
    keep = (r < rows[:, None, None]) & (t < NNZ)[:, None, None] & (v < n)[None, None, :]
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

    y : (n, k).  out : (n, d); every element is written once.  OFFSET_DTYPE : holds the offsets of one vector of y.
    ALIGN : with VECTORS_CONTIGUOUS, divides stride_yr and stride_of.  Other arguments are as in `project_few_vectors`.
    """
    T: tl.constexpr = LAYOUT.sub_blocks
    H: tl.constexpr = LAYOUT.rows_outer
    L: tl.constexpr = LAYOUT.rows_inner
    QI: tl.constexpr = LAYOUT.chunks_outer
    QW: tl.constexpr = LAYOUT.chunks_inner
    V: tl.constexpr = BLOCK_VECTORS
    N_TILES: tl.constexpr = GEOMETRY.n_tiles
    LOG_GROUP: tl.constexpr = GEOMETRY.log_group
    LOG_CHUNK: tl.constexpr = GEOMETRY.log_chunk
    NNZ: tl.constexpr = GEOMETRY.nnz
    Q: tl.constexpr = QI * QW
    SUB_BLOCK_AXIS: tl.constexpr = 1 if VECTORS_CONTIGUOUS else 2
    k0, k1 = seed_words(seed)
    feature_offset, d = feature_offset.to(tl.int64), d.to(tl.int64)
    chunks = ((feature_offset + d - 1) >> LOG_CHUNK) - (feature_offset >> LOG_CHUNK) + 1
    blocks = tl.cdiv(chunks, Q)
    v = tl.program_id(0) // blocks * V + tl.arange(0, V)
    live = v < n
    if VECTORS_CONTIGUOUS:
        stride_yr, stride_of = known_multiple(stride_yr, ALIGN), known_multiple(stride_of, ALIGN)

    q = tl.arange(0, Q)
    first_chunk = (feature_offset >> LOG_CHUNK) + tl.program_id(0) % blocks * Q
    begin = (first_chunk << LOG_CHUNK) - feature_offset  # the first column in out
    c = first_chunk + q
    m = chunk_tile(c, N_TILES, LOG_GROUP, k0, k1, GEOMETRY.stack).to(tl.int64)
    tile_row = part_start(m, GEOMETRY.k, N_TILES)
    w = key_words(c, T, QI, QW, GEOMETRY.stack, k0, k1)
    i = row_indices(LAYOUT)
    slot = permute(i, broadcast_chunks(forward_keys(w, LOG_CHUNK), 0, T, LAYOUT), LOG_CHUNK)
    row = broadcast_chunks(tile_row.to(tl.uint32), 0, 1, LAYOUT)
    if GEOMETRY.power_of_two:
        row += (along_axis(tl.arange(0, T), 1) << LOG_CHUNK).to(tl.uint32)
        row = row + slot
    else:
        tile_rows = (part_start(m + 1, GEOMETRY.k, N_TILES) - tile_row).to(tl.int32)
        q_e, t_e = chunk_and_sub_block(T, QI, QW)
        tile_rows = tl.gather(tile_rows, q_e, 0)
        first = part_start(t_e, tile_rows, NNZ)
        b = (part_start(t_e + 1, tile_rows, NNZ) - first).to(tl.uint32)
        theta = row_theta(w, b)
        row += broadcast_chunks(first.to(tl.uint32), 0, T, LAYOUT)
        b, theta = broadcast_chunks(b, 0, T, LAYOUT), broadcast_chunks(theta, 0, T, LAYOUT)
        row += scale_index(slot, b, theta, LOG_CHUNK)
    address = addresses(row.to(OFFSET_DTYPE), stride_yr, y + v * stride_yv, VECTORS_CONTIGUOUS)
    if T == NNZ and UNMASKED:
        z = tl.load(address)
    else:
        known = tl.broadcast_to(along_axis(tl.arange(0, T), 1) < NNZ, QI, T, H, QW, L)
        z = tl.load(address, mask=and_vectors(known, live, VECTORS_CONTIGUOUS), other=0)
    z = tl.reshape(z, QI, T, H, QW, L, V) if VECTORS_CONTIGUOUS else tl.reshape(z, V, QI, T, H, QW, L)
    places = tl.broadcast_to(i, QI, T, H, QW, L)
    sign = entry_sign(c, places, 0, GEOMETRY, LAYOUT, SUM_DTYPE, False, k0, k1)
    z = tl.sum(z.to(SUM_DTYPE) * expand(sign, VECTORS_CONTIGUOUS), SUB_BLOCK_AXIS) * GEOMETRY.scale

    i = tl.arange(0, H)[None, :, None, None] * L + tl.arange(0, L)[None, None, None, :]
    j = begin + ((tl.reshape(q, QI, 1, QW, 1) << LOG_CHUNK) + i)
    known = and_vectors((j >= 0) & (j < d), live, VECTORS_CONTIGUOUS)
    out = addresses(j, stride_of, out + v * stride_ov, VECTORS_CONTIGUOUS)
    store_result(tl.reshape(z, out.shape), out, known, ACCUMULATE)
