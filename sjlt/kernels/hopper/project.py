"""X Sᵀ on Hopper for many data vectors, and S A for a row-major A: loads, entries, products and stores overlap.

A program multiplies as the kernels of `portable.tensor_core` do, by one-hot tiles of the sketch, fp32 data as pairs of
fp16 numbers. Of its 12 warps, 4 (the producer) make entries and have the data loaded; two groups of 4 (the consumers)
multiply, each for half of the vectors. A program works through the products of (tile of the sketch, split of the
columns, 2 * WARPGROUP_VECTORS vectors) in turn, and runs over the chunks of the tile. X Sᵀ takes 1.0 to 1.2 times the
memory floor, where `project_tensor_core` takes 1.2 to 1.6 (H200, fp32; nnz 8 takes the most).

fp32 data is scaled as it comes, so that time does not depend on its values. (Deriving the scale from one chunk, and
projecting again on overflow, takes 1.01 for numbers of similar size, but 1.3 if 95 % are zeros and 2.6 with outliers.)

Where consecutive numbers in memory belong to consecutive vectors (VECTORS_CONTIGUOUS), as in S A, blocks of the
transposed data are loaded, and transposed on the way: in 16 bits by the tensor cores; in fp32 by threads that read
single numbers, without bank conflicts, since rows of a block are swizzled. This takes 1.1 times the floor, and 1.2 with
nnz 8, for A (262144, 512), where `project_row_gather`, which reads the data from the L1 cache for every entry, takes
1.3 and 2.2.
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

from ..config import hopper as config
from .common import (
    GROUPS_PER_STEP,
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

STEP_COLUMNS = gl.constexpr(config.STEP_COLUMNS)


@gluon.jit
def _product_parts(product, splits, blocks, blocks_per_split, N_TILES: gl.constexpr):
    """(tile, split, block of vectors, first block of columns, end of the blocks of columns) of a product."""
    rest = product // N_TILES
    split = rest % splits
    m, block_of_vectors = product % N_TILES, rest // splits
    return m, split, block_of_vectors, split * blocks_per_split, gl.minimum(blocks, (split + 1) * blocks_per_split)


@gluon.jit
def _vectors_first(shared, which, VECTORS_CONTIGUOUS: gl.constexpr):
    """One of several blocks in shared memory, with the vectors along the first axis."""
    block = shared.index(which)
    if VECTORS_CONTIGUOUS:
        block = block.permute((1, 0))
    return block


@gluon.jit
def _produce(
    x, xs, tiles, full, empty, products, splits, blocks, blocks_per_split, seed, offset,
    GEOMETRY: gl.constexpr, VECTORS_CONTIGUOUS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Fill the slots with data and entries, one step each."""
    COLUMNS: gl.constexpr = 2 * tiles.shape[2]
    BLOCKS_PER_STEP: gl.constexpr = STEP_COLUMNS // COLUMNS
    LANES: gl.constexpr = lanes_per_block(GEOMETRY.log_chunk)
    BLOCKS_PER_WORDS: gl.constexpr = GROUPS_PER_STEP // LANES
    slot, phase = 0, 1  # a barrier that has not completed a phase counts as past phase 1: all slots are empty
    product = gl.program_id(0)
    while product < products:
        m, _, place, begin, end = _product_parts(product, splits, blocks, blocks_per_split, GEOMETRY.n_tiles)
        first = place * (2 * WARPGROUP_VECTORS)
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
    SCALE: gl.constexpr, VECTORS_CONTIGUOUS: gl.constexpr, SLOTS: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """(half the vectors of the next slots times their entries, times SCALE; slot and phase after them).

    For fp32 data, tensor cores sum the columns of a single step only, as they round down: by 1e-6 in 32 chunks. The
    scales follow the largest magnitudes so far; when they change, the sums so far are rescaled.
    """
    COLUMNS: gl.constexpr = 2 * tiles.shape[2]
    BLOCKS_PER_STEP: gl.constexpr = STEP_COLUMNS // COLUMNS
    SPLIT_FP32: gl.constexpr = xs.dtype == gl.float32
    DTYPE: gl.constexpr = gl.float16 if SPLIT_FP32 else xs.dtype
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    factor: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    tile_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, COLUMNS], DTYPE)
    largest = gl.zeros([WARPGROUP_VECTORS], gl.uint32, layout=gl.SliceLayout(1, factor))
    scale = scale_of(largest, 14)
    acc = gl.zeros((WARPGROUP_VECTORS, TILE), gl.float32, layout=sums)
    for _ in range(steps):
        mbarrier.wait(full.index(slot), phase)
        if SPLIT_FP32:
            parts: gl.tuple = ()
            for u in gl.static_range(BLOCKS_PER_STEP):
                data = _vectors_first(xs, (slot * BLOCKS_PER_STEP + u) * 2 + WHICH, VECTORS_CONTIGUOUS)
                parts += (data.load(factor),)
            magnitudes = gl.abs(parts[0])
            for u in gl.static_range(1, BLOCKS_PER_STEP):
                magnitudes = gl.maximum(magnitudes, gl.abs(parts[u]))
            largest = gl.maximum(largest, largest_of(magnitudes))
            before = inverse(scale)
            scale = scale_of(largest, 14)
        z = gl.zeros((WARPGROUP_VECTORS, TILE), gl.float32, layout=sums) if SPLIT_FP32 else acc
        for u in gl.static_range(BLOCKS_PER_STEP):
            tile = tiles.index(slot * BLOCKS_PER_STEP + u)
            tile = tile._reinterpret(DTYPE, [TILE, COLUMNS], tile_shared).permute((1, 0))
            if SPLIT_FP32:
                high, low = pair_of(parts[u], scale)
                z = warpgroup_mma(high, tile, z, use_acc=u > 0, is_async=True)
                z = warpgroup_mma(low, tile, z, is_async=True)
            else:
                data = _vectors_first(xs, (slot * BLOCKS_PER_STEP + u) * 2 + WHICH, VECTORS_CONTIGUOUS)
                z = warpgroup_mma(data, tile, z, is_async=True)
        z = warpgroup_mma_wait(0, deps=(z,))
        barrier()
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, SLOTS)
        acc = acc * gl.convert_layout(scale * before, gl.SliceLayout(1, sums))[:, None] + z if SPLIT_FP32 else z
    if SPLIT_FP32:
        acc *= gl.convert_layout(inverse(scale) * SCALE, gl.SliceLayout(1, sums))[:, None]
    else:
        acc *= SCALE
    return acc, slot, phase


@gluon.jit
def _consume(
    xs, tiles, full, empty, out, outs, products, splits, blocks, blocks_per_split, GEOMETRY: gl.constexpr,
    VECTORS_CONTIGUOUS: gl.constexpr, SINGLE_SPLIT: gl.constexpr, SLOTS: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Multiply half the vectors of each slot by its entries, and store their sums."""
    N_TILES: gl.constexpr = GEOMETRY.n_tiles
    BLOCKS_PER_STEP: gl.constexpr = STEP_COLUMNS // (2 * tiles.shape[2])
    SCALE: gl.constexpr = GEOMETRY.scale if SINGLE_SPLIT else 1.0
    slot, phase = 0, 0
    product = gl.program_id(0)
    while product < products:
        m, split, place, begin, end = _product_parts(product, splits, blocks, blocks_per_split, N_TILES)
        steps = gl.cdiv(end - begin, BLOCKS_PER_STEP)
        acc, slot, phase = _sum_of_steps(
            xs, tiles, full, empty, steps, slot, phase, SCALE, VECTORS_CONTIGUOUS, SLOTS, WHICH
        )
        tma.store_wait(0)
        barrier()
        _vectors_first(outs, WHICH, VECTORS_CONTIGUOUS).store(acc.to(out.dtype))
        fence_async_shared()
        barrier()
        v, r = (place * 2 + WHICH) * WARPGROUP_VECTORS, (split * N_TILES + m) * TILE
        if VECTORS_CONTIGUOUS:
            tma.async_copy_shared_to_global(out, [r, v], outs.index(WHICH))
        else:
            tma.async_copy_shared_to_global(out, [v, r], outs.index(WHICH))
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
    """out[v, r] = sum_j x[v, j] S[r, j]. Any number of programs.

    x, out : tensor descriptors of blocks [WARPGROUP_VECTORS, columns of a block] and [WARPGROUP_VECTORS, TILE], x of a
    16-bit or 32-bit dtype; with VECTORS_CONTIGUOUS, of the transposed tensors and blocks.  blocks : the number of
    blocks of a tile that the columns lie in; `splits` parts of `blocks_per_split`. Several parts are whole steps and
    chunks.  SINGLE_SPLIT : splits is 1; else out, in fp32, receives k unscaled sums for each split.
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
        mbarrier.init(full.index(s), count=2)  # the load, with its bytes, and the entries
        mbarrier.init(empty.index(s), count=2)  # either half of the vectors
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
        [216, 72],  # registers of a consumer's thread, which holds two sums, and of a producer's
    )  # fmt: skip
