"""Kernels for few data vectors and for fp64: entries act as addresses, sums run on the ordinary cores.

`axes` says how their numbers lie over threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .few_vectors_layout import (
    addresses,
    and_vectors,
    axis,
    entry_sign,
    expand,
    hand_out,
    hand_out_keys,
    inner,
    key_words,
    sub_blocks,
)
from .law import chunk_tile, forward_keys, part_start, permute, row_theta, scale_index, seed_words, tile_place


@triton.jit
def _load_lines(
    x,
    stride_xf,
    live,
    begin,
    d,
    place,
    part,
    WIDTH: tl.constexpr,
    QI: tl.constexpr,
    QW: tl.constexpr,
    L: tl.constexpr,
    LOG_GROUP: tl.constexpr,
    LOG_CHUNK: tl.constexpr,
    PLAIN: tl.constexpr,
    VECTORS_LAST: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Whole chunks: part `part` of those at places `place`, [Q], of their groups: [V, QI, 1, 1, QW, L]."""
    lane = axis(tl.arange(0, L), 4).to(tl.uint32)
    chunk_column = ((tl.arange(0, place.numel) << LOG_GROUP) + place.to(tl.int32)) << LOG_CHUNK
    column = hand_out(chunk_column.to(tl.uint32), part, 1, QI, QW) + lane
    address = addresses(column.to(OFFSET), stride_xf, x + begin * stride_xf, VECTORS_LAST)
    if PLAIN and (begin >= 0) & (begin <= d - WIDTH):
        z = tl.load(address)
    else:
        known = column >= tl.maximum(-begin, 0).to(tl.uint32)
        known &= column < tl.maximum(tl.minimum(d - begin, WIDTH), 0).to(tl.uint32)
        known &= lane < (1 << LOG_CHUNK)
        z = tl.load(address, mask=and_vectors(known, live, VECTORS_LAST), other=0)
    if VECTORS_LAST:
        z = tl.permute(z, 1, 0)
    return tl.reshape(z, live.numel, QI, 1, 1, QW, L)


@triton.jit(do_not_specialize=["n", "d", "seed", "feature_offset", "batches"])
def project_gather(
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
    batches,
    K: tl.constexpr,
    NNZ: tl.constexpr,
    N_TILES: tl.constexpr,
    LOG_GROUP: tl.constexpr,
    LOG_CHUNK: tl.constexpr,
    WHOLE: tl.constexpr,
    T: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    PARTS: tl.constexpr,
    QI: tl.constexpr,
    QW: tl.constexpr,
    V: tl.constexpr,
    FOLD: tl.constexpr,
    EVEN: tl.constexpr,
    ALIGN: tl.constexpr,
    LINES: tl.constexpr,
    VECTORS_LAST: tl.constexpr,
    OFFSET: tl.constexpr,
    DTYPE: tl.constexpr,
    FINAL: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out[split, v, r] = sum over a split's columns j of x[v, j] S[r, j]; grid (N_TILES * blocks of V vectors, splits).

    Split i takes `batches` batches of Q groups of chunks from batch i * batches on. A partial sum (FINAL = False) is
    stored as it is, in DTYPE; else it is scaled, added to `out` where ACCUMULATE, and rounded to out's dtype.
    OFFSET is the integer type that holds the offsets of x within a batch. Sums run over QI chunks, then over FOLD
    batches, then over all: short sums of short sums, for accuracy.

    PARTS > 1 computes Philox for so many times QI * QW chunks at once. LINES loads whole chunks, coalesced and a step
    ahead, and permutes them inside warps (H = 1; QW * L covers all threads); else each row loads its own element.
    WHOLE: every group has a chunk for each tile and every row of a tile a column in each chunk. EVEN: V divides n.
    ALIGN: a power of two that divides stride_xf, where vectors are last. OVERLAP: see `reduce`.
    """
    Q: tl.constexpr = PARTS * QI * QW
    LAST: tl.constexpr = VECTORS_LAST and not LINES  # of the tensors; VECTORS_LAST tells of memory
    CHUNK_AXIS: tl.constexpr = 0 if LAST else 1
    LOG_WIDTH: tl.constexpr = LOG_GROUP + LOG_CHUNK
    WIDTH: tl.constexpr = Q << LOG_WIDTH  # columns of a batch
    PLAIN: tl.constexpr = WHOLE and EVEN  # no masks where all columns exist
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    k0, k1 = seed_words(seed)
    feature_offset, d = feature_offset.to(tl.int64), d.to(tl.int64)
    m = tl.program_id(0) % N_TILES
    v = (tl.program_id(0) // N_TILES).to(tl.int64) * V + tl.arange(0, V)
    x += v * stride_xv
    live = v < n
    if VECTORS_LAST:
        stride_xf = stride_xf // ALIGN * ALIGN  # for the compiler to see

    tile_row = part_start(m.to(tl.int64), K, N_TILES)
    tile_rows = (part_start(m.to(tl.int64) + 1, K, N_TILES) - tile_row).to(tl.int32)
    t = tl.arange(0, T)
    first = part_start(t, tile_rows, NNZ)  # where the tile's sub-blocks begin
    rows = part_start(t + 1, tile_rows, NNZ) - first
    r = inner(H, L)
    if not WHOLE:
        b = axis(rows, 1).to(tl.uint32)
        # z // b = z * reciprocal >> 22 for z < b (b + 1): for what `unscale_index` divides
        reciprocal = ((1 << 22) + b - 1) // b
        in_block = (r < b) & (axis(t, 1) < NNZ)

    q = tl.arange(0, Q)
    first_group = feature_offset >> LOG_WIDTH
    start = tl.program_id(1).to(tl.int64) * batches
    stop = tl.minimum(tl.cdiv(feature_offset + d - (first_group << LOG_WIDTH), WIDTH), start + batches)
    total = tl.zeros((T, H, QW, L, V), DTYPE) if LAST else tl.zeros((V, T, H, QW, L), DTYPE)
    if LINES:
        begin = ((first_group + start * Q) << LOG_WIDTH) - feature_offset
        place, found = tile_place(m.to(tl.uint32), first_group + start * Q + q, N_TILES, LOG_GROUP, k0, k1)
        line = _load_lines(
            x, stride_xf, live, begin, d, place, 0, WIDTH, QI, QW, L, LOG_GROUP, LOG_CHUNK, PLAIN, VECTORS_LAST, OFFSET
        )
    for fold in range(start, stop, FOLD):
        acc = tl.zeros_like(total)
        for batch in range(fold, tl.minimum(fold + FOLD, stop)):
            group = first_group + batch * Q
            begin = (group << LOG_WIDTH) - feature_offset  # the batch's first column in x; below: columns from there
            if not LINES:
                place, found = tile_place(m.to(tl.uint32), group + q, N_TILES, LOG_GROUP, k0, k1)
            c = ((group + q) << LOG_GROUP) + place.to(tl.int64)
            chunk_column = (((q << LOG_GROUP) + place.to(tl.int32)) << LOG_CHUNK).to(tl.uint32)
            here = found.to(tl.int32)
            this_place = place
            if LINES:
                place, found = tile_place(m.to(tl.uint32), group + Q + q, N_TILES, LOG_GROUP, k0, k1)
            # A loop for the cache of instructions; where a line is under way, steps in a row need no copies of it.
            for part in tl.range(0, PARTS, loop_unroll_factor=PARTS if LINES else 1):
                if LINES:  # the next part's lines are under way while this one's are summed
                    z = line
                    last = part + 1 == PARTS
                    first_column = begin + tl.where(last, WIDTH, 0)
                    limit = tl.where(last & (batch + 1 == stop), 0, d)
                    places = tl.where(last, place, this_place)
                    line = _load_lines(
                        x, stride_xf, live, first_column, limit, places,
                        (part + 1) % PARTS, WIDTH, QI, QW, L, LOG_GROUP, LOG_CHUNK, PLAIN, VECTORS_LAST, OFFSET
                    )  # fmt: skip
                keys, theta = hand_out_keys(c, tile_rows, part, NNZ, LOG_CHUNK, T, Q, QI, QW, k0, k1)
                i = r
                if not WHOLE:
                    i = ((r << LOG_CHUNK) + (b - 1 - theta)) * reciprocal >> 22  # as `unscale_index`
                    there = in_block & (scale_index(i, b, theta, LOG_CHUNK) == r)
                    there &= hand_out(here, part, 1, QI, QW) != 0
                i = permute(i, keys, LOG_CHUNK)
                if LINES:
                    z = tl.broadcast_to(z, V, QI, T, H, QW, L)
                    z = tl.gather(z, tl.broadcast_to(expand(i.to(tl.int32), False), V, QI, T, H, QW, L), 5)
                    if not WHOLE:
                        z = tl.where(expand(there, False), z, 0)
                else:
                    column = hand_out(chunk_column, part, 1, QI, QW) + i
                    if VECTORS_LAST:
                        address = addresses(column.to(OFFSET), stride_xf, x + begin * stride_xf, True)
                    else:  # 64 bits once a chunk; a row adds its place
                        first_column = hand_out((begin + chunk_column) * stride_xf, part, 1, QI, QW)
                        address = addresses(tl.broadcast_to(first_column, i.shape), 1, x, False)
                        place_offset = expand(i.to(OFFSET) * stride_xf, False)
                        address += tl.reshape(tl.broadcast_to(place_offset, V, QI, T, H, QW, L), address.shape)
                    if PLAIN and (begin >= 0) & (begin <= d - WIDTH):
                        flat = tl.load(address)
                    else:
                        known = column >= tl.maximum(-begin, 0).to(tl.uint32)
                        known &= column < tl.minimum(d - begin, WIDTH).to(tl.uint32)
                        if not WHOLE:
                            known &= there
                        flat = tl.load(address, mask=and_vectors(known, live, VECTORS_LAST), other=0)
                    z = tl.reshape(flat, QI, T, H, QW, L, V) if LAST else tl.reshape(flat, V, QI, T, H, QW, L)
                sign = entry_sign(c, i, part, T, QI, QW, LOG_CHUNK, DTYPE, True, k0, k1)
                acc += tl.sum(z.to(DTYPE) * expand(sign, LAST), CHUNK_AXIS)
        total += acc

    if LAST:
        y = tl.reshape(tl.sum(total, 2), T, H * L, V)
    else:
        y = tl.permute(tl.reshape(tl.sum(total, 3), V, T, H * L), 1, 2, 0)
    r = tl.arange(0, H * L)[None, :, None]
    row = tile_row + first[:, None, None] + r
    keep = (r < rows[:, None, None]) & (t < NNZ)[:, None, None] & (v < n)[None, None, :]
    out += tl.program_id(1).to(tl.int64) * stride_os + v[None, None, :] * stride_ov + row * stride_or
    if FINAL:
        y *= NNZ**-0.5
        if ACCUMULATE:
            y += tl.load(out, mask=keep)
    tl.store(out, y.to(out.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["n", "d", "seed", "feature_offset"])
def adjoint_gather(
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
    K: tl.constexpr,
    NNZ: tl.constexpr,
    N_TILES: tl.constexpr,
    LOG_GROUP: tl.constexpr,
    LOG_CHUNK: tl.constexpr,
    WHOLE: tl.constexpr,
    T: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    QI: tl.constexpr,
    QW: tl.constexpr,
    V: tl.constexpr,
    EVEN: tl.constexpr,
    ALIGN: tl.constexpr,
    VECTORS_LAST: tl.constexpr,
    OFFSET: tl.constexpr,
    DTYPE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """out[v, j] = sum over rows r of y[v, r] S[r, j]; grid (blocks of Q chunks * blocks of V vectors,).

    OFFSET is the integer type that holds the offsets of one vector of y. Every element of out is written once.
    """
    Q: tl.constexpr = QI * QW
    SUB_BLOCK_AXIS: tl.constexpr = 1 if VECTORS_LAST else 2
    k0, k1 = seed_words(seed)
    feature_offset, d = feature_offset.to(tl.int64), d.to(tl.int64)
    chunks = ((feature_offset + d - 1) >> LOG_CHUNK) - (feature_offset >> LOG_CHUNK) + 1
    blocks = tl.cdiv(chunks, Q)
    v = tl.program_id(0) // blocks * V + tl.arange(0, V)
    live = v < n
    if VECTORS_LAST:  # for the compiler to see
        stride_yr = stride_yr // ALIGN * ALIGN
        stride_of = stride_of // ALIGN * ALIGN

    q = tl.arange(0, Q)
    first_chunk = (feature_offset >> LOG_CHUNK) + tl.program_id(0) % blocks * Q
    begin = (first_chunk << LOG_CHUNK) - feature_offset  # the first column in out
    c = first_chunk + q
    tile_row = part_start(chunk_tile(c, N_TILES, LOG_GROUP, k0, k1).to(tl.int64), K, N_TILES)
    w = key_words(c, T, QI, QW, k0, k1)
    i = inner(H, L)
    slot = permute(i, hand_out(forward_keys(w, LOG_CHUNK), 0, T, QI, QW), LOG_CHUNK)
    row = hand_out(tile_row.to(tl.uint32), 0, 1, QI, QW)
    if WHOLE:
        row += (axis(tl.arange(0, T), 1) << LOG_CHUNK).to(tl.uint32)
        row = row + slot
    else:
        m = chunk_tile(c, N_TILES, LOG_GROUP, k0, k1).to(tl.int64)
        tile_rows = (part_start(m + 1, K, N_TILES) - tile_row).to(tl.int32)
        q_e, t_e = sub_blocks(T, QI, QW)
        tile_rows = tl.gather(tile_rows, q_e, 0)
        first = part_start(t_e, tile_rows, NNZ)
        b = (part_start(t_e + 1, tile_rows, NNZ) - first).to(tl.uint32)
        theta = row_theta(w, b)
        row += hand_out(first.to(tl.uint32), 0, T, QI, QW)
        row += scale_index(slot, hand_out(b, 0, T, QI, QW), hand_out(theta, 0, T, QI, QW), LOG_CHUNK)
    address = addresses(row.to(OFFSET), stride_yr, y + v * stride_yv, VECTORS_LAST)
    if T == NNZ and EVEN:
        z = tl.load(address)
    else:
        known = tl.broadcast_to(axis(tl.arange(0, T), 1) < NNZ, QI, T, H, QW, L)
        z = tl.load(address, mask=and_vectors(known, live, VECTORS_LAST), other=0)
    z = tl.reshape(z, QI, T, H, QW, L, V) if VECTORS_LAST else tl.reshape(z, V, QI, T, H, QW, L)
    sign = entry_sign(c, tl.broadcast_to(i, QI, T, H, QW, L), 0, T, QI, QW, LOG_CHUNK, DTYPE, False, k0, k1)
    z = tl.sum(z.to(DTYPE) * expand(sign, VECTORS_LAST), SUB_BLOCK_AXIS) * NNZ**-0.5

    i = tl.arange(0, H)[None, :, None, None] * L + tl.arange(0, L)[None, None, None, :]
    j = begin + ((tl.reshape(q, QI, 1, QW, 1) << LOG_CHUNK) + i)
    known = and_vectors((j >= 0) & (j < d), live, VECTORS_LAST)
    out = addresses(j, stride_of, out + v * stride_ov, VECTORS_LAST)
    z = tl.reshape(z, out.shape)
    if ACCUMULATE:
        z += tl.load(out, mask=known)
    tl.store(out, z.to(out.dtype.element_ty), mask=known)
