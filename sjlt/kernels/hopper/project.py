"""X Sᵀ on Hopper for many data vectors, and S A for a row-major A: loads, entries, products and stores overlap.

As in `portable.tensor_core`, data is multiplied by one-hot blocks of the sketch, fp32 data as pairs of fp16 numbers. A
program has 12 warps: 4 (the producer) generate entries and start loads, and two groups of 4 (the consumers) multiply,
each for half of the vectors. It processes one work item after another: (tile of the sketch, split of the columns,
2 * WARPGROUP_VECTORS vectors), called a product, for which it runs over the split's chunks of the tile. X Sᵀ takes 1.0
to 1.2 times the memory floor, where `project_tensor_core` takes 1.2 to 1.6 (H200, fp32; nnz 8 takes longest).

The scale of fp32 data is adapted while the data is read, so the time does not depend on its values. (Deriving the scale
from one chunk, and projecting again on overflow, takes 1.01 for values of similar magnitude, but 1.3 if 95 % are zeros
and 2.6 with outliers.)

If vectors are contiguous in memory (VECTORS_CONTIGUOUS), as in S A, blocks of the transposed data are loaded and
transposed when they are read: in 16 bits by the tensor cores; in fp32 by threads that read single elements, without
bank conflicts because the rows of a block are swizzled. For A (262144, 512) this takes 1.1 times the floor, and 1.2
with nnz 8, where `project_row_gather`, which reads the data from the L1 cache for every entry, takes 1.3 and 2.2.
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
    STEP_COLUMNS,
    TILE,
    WARPGROUP_VECTORS,
    barrier,
    columns,
    entries,
    entry_words,
    inverse,
    lane_value,
    lanes_per_block,
    largest_of,
    next_slot,
    pair_of,
    scale_of,
)


@gluon.jit
def _product_parts(product, splits, blocks, blocks_per_split, N_TILES: gl.constexpr):
    """(tile, split, block of vectors, first block of columns, end of the blocks of columns) of a product."""
    rest = product // N_TILES
    split = rest % splits
    m, vector_block = product % N_TILES, rest // splits
    return m, split, vector_block, split * blocks_per_split, gl.minimum(blocks, (split + 1) * blocks_per_split)


@gluon.jit
def _vectors_first(shared, index, VECTORS_CONTIGUOUS: gl.constexpr):
    """Block `index` of several in shared memory, with the vectors along the first axis."""
    block = shared.index(index)
    if VECTORS_CONTIGUOUS:
        block = block.permute((1, 0))
    return block


@gluon.jit
def _produce(
    x, xs, tiles, full, empty, products, splits, blocks, blocks_per_split, seed, offset,
    GEOMETRY: gl.constexpr, VECTORS_CONTIGUOUS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """The producer: fill slots with data and entries, one step per slot."""
    COLUMNS: gl.constexpr = 2 * tiles.shape[2]
    BLOCKS_PER_STEP: gl.constexpr = STEP_COLUMNS // COLUMNS
    LANES: gl.constexpr = lanes_per_block(GEOMETRY.log_chunk)
    BLOCKS_PER_WORDS: gl.constexpr = GROUPS_PER_STEP // LANES
    slot, phase = 0, 1  # waiting for phase 1 of a new barrier returns at once: all slots are empty
    product = gl.program_id(0)
    while product < products:
        m, _, vector_block, begin, end = _product_parts(product, splits, blocks, blocks_per_split, GEOMETRY.n_tiles)
        first = vector_block * (2 * WARPGROUP_VECTORS)
        for start in range(begin, end, BLOCKS_PER_WORDS):
            column = columns(m, start, seed, offset, GEOMETRY)
            keys, signs = entry_words(m, start, seed, offset, GEOMETRY)
            for block in range(0, gl.minimum(end - start, BLOCKS_PER_WORDS), BLOCKS_PER_STEP):
                mbarrier.wait(empty.index(slot), phase)
                mbarrier.expect(full.index(slot), 2 * BLOCKS_PER_STEP * x.block_type.nbytes)
                for u in gl.static_range(BLOCKS_PER_STEP):
                    j = lane_value(column, (block + u) * LANES)
                    for half in gl.static_range(2):
                        part, v = xs.index((slot * BLOCKS_PER_STEP + u) * 2 + half), first + half * WARPGROUP_VECTORS
                        if VECTORS_CONTIGUOUS:
                            tma.async_copy_global_to_shared(x, [j, v], full.index(slot), part)
                        else:
                            tma.async_copy_global_to_shared(x, [v, j], full.index(slot), part)
                for u in gl.static_range(BLOCKS_PER_STEP):
                    tile = entries(keys, signs, block + u, GEOMETRY.log_chunk, x.dtype)
                    tiles.index(slot * BLOCKS_PER_STEP + u).store(tile)
                fence_async_shared()
                barrier()
                mbarrier.arrive(full.index(slot), count=1)
                slot, phase = next_slot(slot, phase, SLOTS)
        product += gl.num_programs(0)


@gluon.jit
def _sum_of_steps(
    xs, tiles, full, empty, steps, slot, phase,
    SCALE: gl.constexpr, VECTORS_CONTIGUOUS: gl.constexpr, SLOTS: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """(SCALE times the sums over the next `steps` slots of a consumer's vectors times entries, next slot, its phase).

    For fp32 data, tensor cores sum only the columns of one step, because they truncate: by 1e-6 in 32 chunks.
    The scales follow the largest magnitudes so far; when they change, the sums so far are rescaled.
    """
    COLUMNS: gl.constexpr = 2 * tiles.shape[2]
    BLOCKS_PER_STEP: gl.constexpr = STEP_COLUMNS // COLUMNS
    SPLIT_FP32: gl.constexpr = xs.dtype == gl.float32
    DTYPE: gl.constexpr = gl.float16 if SPLIT_FP32 else xs.dtype
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, sums_layout, 2)
    tile_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, COLUMNS], DTYPE)
    largest = gl.zeros([WARPGROUP_VECTORS], gl.uint32, layout=gl.SliceLayout(1, operand_layout))
    scale = scale_of(largest, 14)
    acc = gl.zeros((WARPGROUP_VECTORS, TILE), gl.float32, layout=sums_layout)
    for _ in range(steps):
        mbarrier.wait(full.index(slot), phase)
        if SPLIT_FP32:
            parts: gl.tuple = ()
            for u in gl.static_range(BLOCKS_PER_STEP):
                data = _vectors_first(xs, (slot * BLOCKS_PER_STEP + u) * 2 + CONSUMER, VECTORS_CONTIGUOUS)
                parts += (data.load(operand_layout),)
            magnitudes = gl.abs(parts[0])
            for u in gl.static_range(1, BLOCKS_PER_STEP):
                magnitudes = gl.maximum(magnitudes, gl.abs(parts[u]))
            largest = gl.maximum(largest, largest_of(magnitudes))
            before = inverse(scale)
            scale = scale_of(largest, 14)
        z = gl.zeros((WARPGROUP_VECTORS, TILE), gl.float32, layout=sums_layout) if SPLIT_FP32 else acc
        for u in gl.static_range(BLOCKS_PER_STEP):
            tile = tiles.index(slot * BLOCKS_PER_STEP + u)
            tile = tile._reinterpret(DTYPE, [TILE, COLUMNS], tile_shared).permute((1, 0))
            if SPLIT_FP32:
                high, low = pair_of(parts[u], scale)
                z = warpgroup_mma(high, tile, z, use_acc=u > 0, is_async=True)
                z = warpgroup_mma(low, tile, z, is_async=True)
            else:
                data = _vectors_first(xs, (slot * BLOCKS_PER_STEP + u) * 2 + CONSUMER, VECTORS_CONTIGUOUS)
                z = warpgroup_mma(data, tile, z, is_async=True)
        z = warpgroup_mma_wait(0, deps=(z,))
        barrier()
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, SLOTS)
        acc = acc * gl.convert_layout(scale * before, gl.SliceLayout(1, sums_layout))[:, None] + z if SPLIT_FP32 else z
    if SPLIT_FP32:
        acc *= gl.convert_layout(inverse(scale) * SCALE, gl.SliceLayout(1, sums_layout))[:, None]
    else:
        acc *= SCALE
    return acc, slot, phase


@gluon.jit
def _consume(
    xs, tiles, full, empty, out, outs, products, splits, blocks, blocks_per_split, GEOMETRY: gl.constexpr,
    VECTORS_CONTIGUOUS: gl.constexpr, SINGLE_SPLIT: gl.constexpr, SLOTS: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Consumer 0 or 1: multiply its half of each slot's vectors by the slot's entries, and store the sums."""
    N_TILES: gl.constexpr = GEOMETRY.n_tiles
    BLOCKS_PER_STEP: gl.constexpr = STEP_COLUMNS // (2 * tiles.shape[2])
    SCALE: gl.constexpr = GEOMETRY.scale if SINGLE_SPLIT else 1.0
    slot, phase = 0, 0
    product = gl.program_id(0)
    while product < products:
        m, split, vector_block, begin, end = _product_parts(product, splits, blocks, blocks_per_split, N_TILES)
        steps = gl.cdiv(end - begin, BLOCKS_PER_STEP)
        acc, slot, phase = _sum_of_steps(
            xs, tiles, full, empty, steps, slot, phase, SCALE, VECTORS_CONTIGUOUS, SLOTS, CONSUMER
        )
        tma.store_wait(0)
        barrier()
        _vectors_first(outs, CONSUMER, VECTORS_CONTIGUOUS).store(acc.to(out.dtype))
        fence_async_shared()
        barrier()
        v, r = (vector_block * 2 + CONSUMER) * WARPGROUP_VECTORS, (split * N_TILES + m) * TILE
        if VECTORS_CONTIGUOUS:
            tma.async_copy_shared_to_global(out, [r, v], outs.index(CONSUMER))
        else:
            tma.async_copy_shared_to_global(out, [v, r], outs.index(CONSUMER))
        product += gl.num_programs(0)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n", "splits", "blocks", "blocks_per_split", "seed", "feature_offset"])
def project_hopper(
    x,
    out,
    n,
    splits,
    blocks,
    blocks_per_split,
    seed: gl.int64,
    feature_offset: gl.int64,
    GEOMETRY: gl.constexpr,
    VECTORS_CONTIGUOUS: gl.constexpr,
    SINGLE_SPLIT: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """out[v, r] = sum_j x[v, j] S[r, j]. Grid: any number of programs.

    x, out : tensor descriptors of blocks [WARPGROUP_VECTORS, columns of a block] and [WARPGROUP_VECTORS, TILE], x of a
    16-bit or 32-bit dtype; with VECTORS_CONTIGUOUS, of the transposed tensors and blocks.  blocks : the number of
    blocks of a tile that contain the columns, in `splits` splits of `blocks_per_split`. If there are several splits,
    each consists of whole steps and chunks.  SINGLE_SPLIT : splits is 1. Otherwise out, in fp32, receives k unscaled
    sums per split.
    """
    COLUMNS: gl.constexpr = x.block_type.shape[0] if VECTORS_CONTIGUOUS else x.block_type.shape[1]
    BLOCKS_PER_STEP: gl.constexpr = STEP_COLUMNS // COLUMNS
    products = GEOMETRY.n_tiles * splits * gl.cdiv(n, 2 * WARPGROUP_VECTORS)  # in the order of `_product_parts`
    words_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, COLUMNS // 2], gl.uint32)
    xs = gl.allocate_shared_memory(x.dtype, [SLOTS * BLOCKS_PER_STEP * 2] + x.block_type.shape, x.layout)  # noqa: RUF005
    tiles = gl.allocate_shared_memory(gl.uint32, [SLOTS * BLOCKS_PER_STEP, TILE, COLUMNS // 2], words_shared)
    outs = gl.allocate_shared_memory(out.dtype, [2] + out.block_type.shape, out.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(SLOTS):
        mbarrier.init(full.index(s), count=2)  # arrivals: the load, with its bytes, and the entries
        mbarrier.init(empty.index(s), count=2)  # one arrival per consumer
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (_consume, (xs, tiles, full, empty, out, outs, products, splits, blocks, blocks_per_split, GEOMETRY,
                        VECTORS_CONTIGUOUS, SINGLE_SPLIT, SLOTS, 0)),
            (_consume, (xs, tiles, full, empty, out, outs, products, splits, blocks, blocks_per_split, GEOMETRY,
                        VECTORS_CONTIGUOUS, SINGLE_SPLIT, SLOTS, 1)),
            (_produce, (x, xs, tiles, full, empty, products, splits, blocks, blocks_per_split, seed, feature_offset,
                        GEOMETRY, VECTORS_CONTIGUOUS, SLOTS)),
        ],
        [4, 4],
        [216, 72],  # registers per thread of the second consumer, which holds two sums, and of the producer
    )  # fmt: skip
