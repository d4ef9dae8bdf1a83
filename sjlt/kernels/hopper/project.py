"""X S' on Hopper for many data vectors, and S A for a row-major A: loads, entries, products and stores overlap.

A program multiplies as the kernels of `tiles` do: by one-hot tiles of the sketch, fp32 as pairs of fp16 numbers. Of its
12 warps 4 make the entries and have the data loaded, 4 and 4 multiply, each for half of the vectors. It takes the
products of a tile of the sketch, a split of the columns and twice VECTORS vectors in turns, and runs over the chunks of
the tile. So X S' takes 1.0 to 1.2 times the memory floor, where the kernel of `tiles` takes 1.2 to 1.6 (H200, fp32;
nnz 8 takes the most).

Data in fp32 is scaled as it comes, and takes the same time whatever it is. (To scale it by one chunk, and project again
what overflows, takes 1.01 where all numbers are alike; but 1.3 where 95 % are zeros, and 2.6 where there are outliers.)

Where neighbours in memory belong to neighbouring vectors, as in S A, blocks of the transposed data are loaded (TURNED),
and turned on the way: tensor cores do that for 16 bits; in fp32 threads read single numbers, without bank conflicts, as
rows of a block are swizzled. That takes 1.1, and 1.2 with nnz 8, times the floor for A (262144, 512), where the kernels
of `rows`, which read data from the L1 cache for every entry, take 1.3 and 2.2.
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

from ..config import hopper as hopper_launch
from .common import (
    BATCH,
    TILE,
    VECTORS,
    at,
    barrier,
    columns,
    entries,
    entry_words,
    inverse,
    largest_of,
    next_slot,
    pair_of,
    scale_of,
    subs_of,
)

STEP = gl.constexpr(hopper_launch.STEP)


@gluon.jit
def _work(product, splits, blocks, each, N_TILES: gl.constexpr):
    """(tile, split, block of vectors, first block of columns, the one behind the last)."""
    rest = product // N_TILES
    split = rest % splits
    return product % N_TILES, split, rest // splits, split * each, gl.minimum(blocks, (split + 1) * each)


@gluon.jit
def _by_vectors(shared, which, TURNED: gl.constexpr):
    """One of several blocks in shared memory, with the vectors along the first axis."""
    block = shared.index(which)
    if TURNED:
        block = block.permute((1, 0))
    return block


@gluon.jit
def _load_and_make(
    x, xs, tiles, full, empty, products, splits, blocks, each, seed, offset,
    N_TILES: gl.constexpr, LOG_GROUP: gl.constexpr, LOG_CHUNK: gl.constexpr, TURNED: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Fill the slots, a step each: with data and entries."""
    COLUMNS: gl.constexpr = 2 * tiles.shape[2]
    BLOCKS: gl.constexpr = STEP // COLUMNS  # of a step
    SUBS: gl.constexpr = subs_of(LOG_CHUNK)
    slot, phase = 0, 1  # of a barrier that has not turned yet, phase 1 is over: all slots are empty
    product = gl.program_id(0)
    while product < products:
        m, _, place, begin, end = _work(product, splits, blocks, each, N_TILES)
        first = place * (2 * VECTORS)
        for start in range(begin, end, BATCH // SUBS):
            column = columns(m, start, seed, offset, N_TILES, LOG_GROUP, LOG_CHUNK)
            keys, signs = entry_words(m, start, seed, offset, N_TILES, LOG_GROUP, LOG_CHUNK)
            for block in range(0, gl.minimum(end - start, BATCH // SUBS), BLOCKS):
                mbarrier.wait(empty.index(slot), phase)
                mbarrier.expect(full.index(slot), 2 * BLOCKS * x.block_type.nbytes)
                for u in gl.static_range(BLOCKS):
                    j = at(column, (block + u) * SUBS)
                    for half in gl.static_range(2):
                        part, v = xs.index((slot * BLOCKS + u) * 2 + half), first + half * VECTORS
                        if TURNED:
                            tma.async_copy_global_to_shared(x, [j, v], full.index(slot), part)
                        else:
                            tma.async_copy_global_to_shared(x, [v, j], full.index(slot), part)
                for u in gl.static_range(BLOCKS):
                    tile = entries(keys, signs, block + u, LOG_CHUNK, x.dtype)
                    tiles.index(slot * BLOCKS + u).store(tile)
                fence_async_shared()
                barrier()
                mbarrier.arrive(full.index(slot), count=1)
                slot, phase = next_slot(slot, phase, SLOTS)
        product += gl.num_programs(0)


@gluon.jit
def _sum(
    xs, tiles, full, empty, steps, slot, phase,
    SCALE: gl.constexpr, TURNED: gl.constexpr, SLOTS: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """(half the vectors of the next slots times their entries, times SCALE; slot and phase after them).

    Of data in fp32, tensor cores sum the columns of a step only, as they round down: by 1e-6 in 32 chunks. The scales
    follow the largest magnitudes so far; when they change, the sums so far change with them.
    """
    COLUMNS: gl.constexpr = 2 * tiles.shape[2]
    BLOCKS: gl.constexpr = STEP // COLUMNS  # of a step
    PAIR: gl.constexpr = xs.dtype == gl.float32
    DTYPE: gl.constexpr = gl.float16 if PAIR else xs.dtype
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    factor: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    tile_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, COLUMNS], DTYPE)
    largest = gl.zeros([VECTORS], gl.uint32, layout=gl.SliceLayout(1, factor))
    scale = scale_of(largest, 14)
    acc = gl.zeros((VECTORS, TILE), gl.float32, layout=sums)
    for _ in range(steps):
        mbarrier.wait(full.index(slot), phase)
        if PAIR:
            parts: gl.tuple = ()
            for u in gl.static_range(BLOCKS):
                parts += (_by_vectors(xs, (slot * BLOCKS + u) * 2 + WHICH, TURNED).load(factor),)
            magnitudes = gl.abs(parts[0])
            for u in gl.static_range(1, BLOCKS):
                magnitudes = gl.maximum(magnitudes, gl.abs(parts[u]))
            largest = gl.maximum(largest, largest_of(magnitudes))
            before = inverse(scale)
            scale = scale_of(largest, 14)
        z = gl.zeros((VECTORS, TILE), gl.float32, layout=sums) if PAIR else acc
        for u in gl.static_range(BLOCKS):
            tile = tiles.index(slot * BLOCKS + u)._reinterpret(DTYPE, [TILE, COLUMNS], tile_shared).permute((1, 0))
            if PAIR:
                high, low = pair_of(parts[u], scale)
                z = warpgroup_mma(high, tile, z, use_acc=u > 0, is_async=True)
                z = warpgroup_mma(low, tile, z, is_async=True)
            else:
                data = _by_vectors(xs, (slot * BLOCKS + u) * 2 + WHICH, TURNED)
                z = warpgroup_mma(data, tile, z, is_async=True)
        z = warpgroup_mma_wait(0, deps=(z,))
        barrier()
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, SLOTS)
        acc = acc * gl.convert_layout(scale * before, gl.SliceLayout(1, sums))[:, None] + z if PAIR else z
    if PAIR:
        acc *= gl.convert_layout(inverse(scale) * SCALE, gl.SliceLayout(1, sums))[:, None]
    else:
        acc *= SCALE
    return acc, slot, phase


@gluon.jit
def _multiply(
    xs, tiles, full, empty, out, outs, products, splits, blocks, each,
    N_TILES: gl.constexpr, LOG_CHUNK: gl.constexpr, TURNED: gl.constexpr, FINAL: gl.constexpr, SLOTS: gl.constexpr,
    WHICH: gl.constexpr,
):  # fmt: skip
    """Multiply half the vectors of each slot by its entries, and store their sums."""
    BLOCKS: gl.constexpr = STEP // (2 * tiles.shape[2])  # of a step
    SCALE: gl.constexpr = (TILE >> LOG_CHUNK) ** -0.5 if FINAL else 1.0  # nnz^-1/2
    slot, phase = 0, 0
    product = gl.program_id(0)
    while product < products:
        m, split, place, begin, end = _work(product, splits, blocks, each, N_TILES)
        steps = gl.cdiv(end - begin, BLOCKS)
        acc, slot, phase = _sum(xs, tiles, full, empty, steps, slot, phase, SCALE, TURNED, SLOTS, WHICH)
        tma.store_wait(0)
        barrier()
        _by_vectors(outs, WHICH, TURNED).store(acc.to(out.dtype))
        fence_async_shared()
        barrier()
        v, r = (place * 2 + WHICH) * VECTORS, (split * N_TILES + m) * TILE
        if TURNED:
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
    N_TILES: gl.constexpr,
    LOG_GROUP: gl.constexpr,
    LOG_CHUNK: gl.constexpr,
    TURNED: gl.constexpr,
    FINAL: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """out[v, r] = sum_j x[v, j] S[r, j]. Any number of programs.

    x, out : tensor descriptors of blocks [VECTORS, columns of a block] and [VECTORS, TILE], x of a dtype of 16 or 32
    bits; where TURNED, of the transposed tensors and blocks.  blocks : of a tile, that the columns lie in; in `splits`
    parts of `blocks_per_split`; those of several are whole steps and chunks.  FINAL : there is one; else out, in fp32,
    has their sums without the scale, for each split k components.
    """
    COLUMNS: gl.constexpr = x.block_type.shape[0] if TURNED else x.block_type.shape[1]
    BLOCKS: gl.constexpr = STEP // COLUMNS  # of a step
    products = N_TILES * splits * gl.cdiv(n, 2 * VECTORS)  # in the order of `_work`
    words_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, COLUMNS // 2], gl.uint32)
    xs = gl.allocate_shared_memory(x.dtype, [SLOTS * BLOCKS * 2] + x.block_type.shape, x.layout)  # noqa: RUF005
    tiles = gl.allocate_shared_memory(gl.uint32, [SLOTS * BLOCKS, TILE, COLUMNS // 2], words_shared)
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
            (_multiply, (xs, tiles, full, empty, out, outs, products, splits, blocks, blocks_per_split, N_TILES,
                         LOG_CHUNK, TURNED, FINAL, SLOTS, 0)),
            (_multiply, (xs, tiles, full, empty, out, outs, products, splits, blocks, blocks_per_split, N_TILES,
                         LOG_CHUNK, TURNED, FINAL, SLOTS, 1)),
            (_load_and_make, (x, xs, tiles, full, empty, products, splits, blocks, blocks_per_split, seed,
                              feature_offset, N_TILES, LOG_GROUP, LOG_CHUNK, TURNED, SLOTS)),
        ],
        [4, 4],
        [216, 72],  # registers of a thread that multiplies (two sums of them), and of one that makes entries
    )  # fmt: skip
