"""Y S on Hopper for many data vectors in fp32: entries, products and stores overlap.

As in `project_hopper`, 4 warps of a program (the producer) generate entries, and two groups of 4 (the consumers)
multiply, each for WARPGROUP_VECTORS vectors and one tile. A program processes one product after another, a block of
vectors and one or two tiles, for which it runs over the chunks of the tiles. Results are stored by the tensor memory
accelerator; stores by threads are limited by the path between registers and caches (87 % busy, H200).

Writes to memory limit this kernel. Chunks of 32 features in rows 3 KB apart are written at 3.1 TB/s, where a fill
reaches 4.7. If the sketch has two tiles, a program therefore computes both for the same vectors, because their chunks
are neighbours in memory: 1.21 times the memory floor instead of 1.29. (With four tiles: 1.40 instead of 1.37.)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .common import (
    GROUPS_PER_STEP,
    MAX_COLUMNS,
    TILE,
    WARPGROUP_VECTORS,
    barrier,
    columns,
    entries,
    entry_words,
    inverse,
    lane_value,
    largest_of,
    next_slot,
    pair_of,
    scale_of,
)

OUT_BUFFERS = gl.constexpr(2)  # per consumer: blocks of the result that are being stored


@gluon.jit
def _share(product, N_TILES: gl.constexpr, TILES: gl.constexpr, CONSUMER: gl.constexpr):
    """(tile, first vector) of a consumer's share of a product: one of two tiles or, if TILES is 1, half the vectors."""
    PARTS: gl.constexpr = N_TILES // TILES
    m, first = product % PARTS * TILES, product // PARTS * (2 // TILES)
    if TILES == 2:
        m += CONSUMER
    else:
        first += CONSUMER
    return m, first * WARPGROUP_VECTORS


@gluon.jit
def _produce(
    y, ys, tiles, full, empty, y_full, y_empty, products, blocks, seed, offset,
    GEOMETRY: gl.constexpr, SLOTS: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """The producer: load each product's data, and fill slots with entries, one block per slot."""
    LOG_CHUNK: gl.constexpr = GEOMETRY.log_chunk
    slot, phase, y_phase = 0, 1, 1  # waiting for phase 1 of a new barrier returns at once: all is empty
    product = gl.program_id(0)
    while product < products:
        m0, first0 = _share(product, GEOMETRY.n_tiles, TILES, 0)
        m1, first1 = _share(product, GEOMETRY.n_tiles, TILES, 1)
        mbarrier.wait(y_empty, y_phase)
        y_phase ^= 1
        mbarrier.expect(y_full, 2 * y.block_type.nbytes)
        tma.async_copy_global_to_shared(y, [first0, m0 * TILE], y_full, ys.index(0))
        tma.async_copy_global_to_shared(y, [first1, m1 * TILE], y_full, ys.index(1))
        for start in range(0, blocks, GROUPS_PER_STEP):
            keys0, signs0 = entry_words(m0, start, seed, offset, GEOMETRY)
            keys1, signs1 = entry_words(m1, start, seed, offset, GEOMETRY)
            for block in range(gl.minimum(blocks - start, GROUPS_PER_STEP)):
                mbarrier.wait(empty.index(slot), phase)
                tiles.index(slot * TILES).store(entries(keys0, signs0, block, LOG_CHUNK, gl.float16))
                if TILES == 2:
                    tiles.index(slot * TILES + 1).store(entries(keys1, signs1, block, LOG_CHUNK, gl.float16))
                fence_async_shared()
                barrier()
                mbarrier.arrive(full.index(slot), count=1)
                slot, phase = next_slot(slot, phase, SLOTS)
        product += gl.num_programs(0)


@gluon.jit
def _consume(
    ys, tiles, full, empty, y_full, y_empty, out, outs, products, blocks, seed, offset,
    GEOMETRY: gl.constexpr, SLOTS: gl.constexpr, TILES: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Consumer 0 or 1: multiply its share of each product by the entries of each slot, and store the results."""
    SCALE: gl.constexpr = GEOMETRY.scale
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAX_COLUMNS, 16])
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, sums_layout, 2)
    tile_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, MAX_COLUMNS], gl.float16)
    slot, phase, y_phase, buffer = 0, 0, 0, 0
    product = gl.program_id(0)
    while product < products:
        m, first = _share(product, GEOMETRY.n_tiles, TILES, CONSUMER)
        mbarrier.wait(y_full, y_phase)
        y_phase ^= 1
        z = ys.index(CONSUMER).load(operand_layout)
        scale = scale_of(largest_of(z), 14)
        high, low = pair_of(z, scale)
        barrier()
        mbarrier.arrive(y_empty, count=1)
        result_scale = gl.convert_layout(inverse(scale), gl.SliceLayout(1, sums_layout)) * SCALE
        for start in range(0, blocks, GROUPS_PER_STEP):
            column = columns(m, start, seed, offset, GEOMETRY)
            for block in range(gl.minimum(blocks - start, GROUPS_PER_STEP)):
                mbarrier.wait(full.index(slot), phase)
                tile = tiles.index(slot * TILES + CONSUMER * (TILES - 1))
                tile = tile._reinterpret(gl.float16, [TILE, MAX_COLUMNS], tile_shared)
                acc = gl.zeros((WARPGROUP_VECTORS, MAX_COLUMNS), gl.float32, layout=sums_layout)
                acc = warpgroup_mma(high, tile, acc, use_acc=False, is_async=True)
                acc = warpgroup_mma(low, tile, acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                tma.store_wait(OUT_BUFFERS - 1)
                barrier()
                mbarrier.arrive(empty.index(slot), count=1)
                slot, phase = next_slot(slot, phase, SLOTS)
                part = outs.index(CONSUMER * OUT_BUFFERS + buffer)
                part.store(acc * result_scale[:, None])
                fence_async_shared()
                barrier()
                tma.async_copy_shared_to_global(out, [first, lane_value(column, block)], part)
                buffer = gl.where(buffer == OUT_BUFFERS - 1, 0, buffer + 1)
        product += gl.num_programs(0)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n", "blocks", "seed", "feature_offset"])
def adjoint_hopper(
    y,
    out,
    n,
    blocks,
    seed: gl.int64,
    feature_offset: gl.int64,
    GEOMETRY: gl.constexpr,
    SLOTS: gl.constexpr,
    TILES: gl.constexpr,
):
    """out[v, j] = sum_r y[v, r] S[r, j]. Grid: any number of programs.

    y, out : fp32 tensor descriptors of blocks [WARPGROUP_VECTORS, TILE] and [WARPGROUP_VECTORS, MAX_COLUMNS].  blocks :
    the number of blocks of a tile that contain the columns; column 0 is the first of a group.  TILES : tiles per
    product, 1 or 2, for 2 * WARPGROUP_VECTORS / TILES vectors.

    nnz must be 1, 2 or 4, and the byte length of rows of out a multiple of 16.
    """
    products = GEOMETRY.n_tiles // TILES * gl.cdiv(n, 2 // TILES * WARPGROUP_VECTORS)
    words_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, MAX_COLUMNS // 2], gl.uint32)
    ys = gl.allocate_shared_memory(gl.float32, [2, WARPGROUP_VECTORS, TILE], y.layout)
    tiles = gl.allocate_shared_memory(gl.uint32, [SLOTS * TILES, TILE, MAX_COLUMNS // 2], words_shared)
    outs = gl.allocate_shared_memory(gl.float32, [2 * OUT_BUFFERS, WARPGROUP_VECTORS, MAX_COLUMNS], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    y_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    y_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(SLOTS):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)  # one arrival per consumer
    mbarrier.init(y_full, count=1)
    mbarrier.init(y_empty, count=2)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (_consume, (ys, tiles, full, empty, y_full, y_empty, out, outs, products, blocks, seed, feature_offset,
                        GEOMETRY, SLOTS, TILES, 0)),
            (_consume, (ys, tiles, full, empty, y_full, y_empty, out, outs, products, blocks, seed, feature_offset,
                        GEOMETRY, SLOTS, TILES, 1)),
            (_produce, (y, ys, tiles, full, empty, y_full, y_empty, products, blocks, seed, feature_offset,
                        GEOMETRY, SLOTS, TILES)),
        ],
        [4, 4],
        [168, 168],
    )  # fmt: skip
