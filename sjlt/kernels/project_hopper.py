"""X S' on Hopper for many data vectors: loads, entries, products and stores overlap.

A program multiplies as the kernels of `tiles` do: by one-hot tiles of the sketch, fp32 as pairs of fp16 numbers. Of its
12 warps 4 make the entries and have the data loaded, 4 and 4 multiply, each for half of the vectors. It takes the
products of a tile of the sketch and twice VECTORS vectors in turns, and runs over the chunks of the tile. So it takes
1.0 to 1.2 times the memory floor, where the kernel of `tiles` takes 1.13 to 1.6 (H200, fp32; nnz 8 takes the most).

Data in fp32 is scaled as it comes, and takes the same time whatever it is. (To scale it by one chunk, and project again
what overflows, takes 1.01 where all numbers are alike; but 1.3 where 95 % are zeros, and 2.6 where there are outliers.)
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

from .hopper import (
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

STEP = gl.constexpr(64)  # columns that are multiplied, and scaled, together


@gluon.jit
def _load_and_make(
    x, xs, tiles, full, empty, products, blocks, seed, offset,
    N_TILES: gl.constexpr, LOG_GROUP: gl.constexpr, LOG_CHUNK: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Fill the slots, a step each: with data and entries."""
    COLUMNS: gl.constexpr = x.block_type.shape[1]
    BLOCKS: gl.constexpr = STEP // COLUMNS  # of a step
    SUBS: gl.constexpr = subs_of(LOG_CHUNK)
    slot, phase = 0, 1  # of a barrier that has not turned yet, phase 1 is over: all slots are empty
    product = gl.program_id(0)
    while product < products:
        m, first = product % N_TILES, product // N_TILES * (2 * VECTORS)
        for start in range(0, blocks, BATCH // SUBS):
            column = columns(m, start, seed, offset, N_TILES, LOG_GROUP, LOG_CHUNK)
            keys, signs = entry_words(m, start, seed, offset, N_TILES, LOG_GROUP, LOG_CHUNK)
            for block in range(0, gl.minimum(blocks - start, BATCH // SUBS), BLOCKS):
                mbarrier.wait(empty.index(slot), phase)
                mbarrier.expect(full.index(slot), 2 * BLOCKS * x.block_type.nbytes)
                for u in gl.static_range(BLOCKS):
                    j = at(column, (block + u) * SUBS)
                    for half in gl.static_range(2):
                        part = xs.index((slot * BLOCKS + u) * 2 + half)
                        tma.async_copy_global_to_shared(x, [first + half * VECTORS, j], full.index(slot), part)
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
    xs, tiles, full, empty, steps, largest, slot, phase, SCALE: gl.constexpr, SLOTS: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """(half the vectors of the next slots times their entries, times SCALE; and the last three arguments after them).

    The scales of data in fp32 follow the largest magnitudes so far; when they change, the sums so far change with them.
    """
    COLUMNS: gl.constexpr = xs.shape[2]
    BLOCKS: gl.constexpr = STEP // COLUMNS  # of a step
    PAIR: gl.constexpr = xs.dtype == gl.float32
    DTYPE: gl.constexpr = gl.float16 if PAIR else xs.dtype
    factor: gl.constexpr = largest.type.layout.parent
    sums: gl.constexpr = factor.parent
    tile_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, COLUMNS], DTYPE)
    scale = scale_of(largest, 14)
    acc = gl.zeros((VECTORS, TILE), gl.float32, layout=sums)
    for _ in range(steps):
        mbarrier.wait(full.index(slot), phase)
        if PAIR:
            parts: gl.tuple = ()
            for u in gl.static_range(BLOCKS):
                parts += (xs.index((slot * BLOCKS + u) * 2 + WHICH).load(factor),)
            magnitudes = gl.abs(parts[0])
            for u in gl.static_range(1, BLOCKS):
                magnitudes = gl.maximum(magnitudes, gl.abs(parts[u]))
            largest = gl.maximum(largest, largest_of(magnitudes))
            before = inverse(scale)
            scale = scale_of(largest, 14)
            acc *= gl.convert_layout(scale * before, gl.SliceLayout(1, sums))[:, None]
        for u in gl.static_range(BLOCKS):
            tile = tiles.index(slot * BLOCKS + u)._reinterpret(DTYPE, [TILE, COLUMNS], tile_shared).permute((1, 0))
            if PAIR:
                high, low = pair_of(parts[u], scale)
                acc = warpgroup_mma(high, tile, acc, is_async=True)
                acc = warpgroup_mma(low, tile, acc, is_async=True)
            else:
                acc = warpgroup_mma(xs.index((slot * BLOCKS + u) * 2 + WHICH), tile, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        barrier()
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, SLOTS)
    if PAIR:
        acc *= gl.convert_layout(inverse(scale) * SCALE, gl.SliceLayout(1, sums))[:, None]
    else:
        acc *= SCALE
    return acc, largest, slot, phase


@gluon.jit
def _multiply(
    xs, tiles, full, empty, out, outs, products, steps,
    N_TILES: gl.constexpr, LOG_CHUNK: gl.constexpr, FOLD: gl.constexpr, SLOTS: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Multiply half the vectors of each slot by its entries, and store their sums."""
    SCALE: gl.constexpr = (TILE >> LOG_CHUNK) ** -0.5  # nnz^-1/2
    POWER: gl.constexpr = 0.5 ** ((8 - LOG_CHUNK) // 2)  # of two, and SCALE or less: by it sums of sums stay exact
    SPAN: gl.constexpr = (BATCH << LOG_CHUNK) // STEP  # steps of such a sum
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    factor: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    place = outs.index(WHICH)
    slot, phase = 0, 0
    product = gl.program_id(0)
    while product < products:
        m, block = product % N_TILES, product // N_TILES * 2 + WHICH
        largest = gl.zeros([VECTORS], gl.uint32, layout=gl.SliceLayout(1, factor))
        if FOLD:
            acc = gl.zeros((VECTORS, TILE), gl.float32, layout=sums)
            for start in range(0, steps, SPAN):
                part = gl.minimum(steps - start, SPAN)
                z, largest, slot, phase = _sum(xs, tiles, full, empty, part, largest, slot, phase, POWER, SLOTS, WHICH)
                acc += z
            acc *= SCALE / POWER
        else:
            acc, largest, slot, phase = _sum(xs, tiles, full, empty, steps, largest, slot, phase, SCALE, SLOTS, WHICH)
        tma.store_wait(0)
        barrier()
        place.store(acc.to(out.dtype))
        fence_async_shared()
        barrier()
        tma.async_copy_shared_to_global(out, [block * VECTORS, m * TILE], place)
        product += gl.num_programs(0)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n", "blocks", "seed", "feature_offset"])
def project_hopper(
    x,
    out,
    n,
    blocks,
    seed: gl.int64,
    feature_offset: gl.int64,
    N_TILES: gl.constexpr,
    LOG_GROUP: gl.constexpr,
    LOG_CHUNK: gl.constexpr,
    FOLD: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """out[v, r] = sum_j x[v, j] S[r, j]. Any number of programs.

    x, out : tensor descriptors of blocks [VECTORS, columns of a block] and [VECTORS, TILE], of one dtype of 16 or 32
    bits.  blocks : of a tile, that the columns lie in.  FOLD : sum by BATCH chunks, which are added in fp32.
    """
    COLUMNS: gl.constexpr = x.block_type.shape[1]
    BLOCKS: gl.constexpr = STEP // COLUMNS  # of a step
    REGISTERS: gl.constexpr = 216 if FOLD else 168  # of a thread that multiplies
    products = N_TILES * gl.cdiv(n, 2 * VECTORS)  # product p : tile p mod N_TILES, block of vectors p div N_TILES
    steps = gl.cdiv(blocks, BLOCKS)
    words_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, COLUMNS // 2], gl.uint32)
    xs = gl.allocate_shared_memory(x.dtype, [SLOTS * BLOCKS * 2, VECTORS, COLUMNS], x.layout)
    tiles = gl.allocate_shared_memory(gl.uint32, [SLOTS * BLOCKS, TILE, COLUMNS // 2], words_shared)
    outs = gl.allocate_shared_memory(out.dtype, [2, VECTORS, TILE], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(SLOTS):
        mbarrier.init(full.index(s), count=2)  # the load, with its bytes, and the entries
        mbarrier.init(empty.index(s), count=2)  # either half of the vectors
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (_multiply, (xs, tiles, full, empty, out, outs, products, steps, N_TILES, LOG_CHUNK, FOLD, SLOTS, 0)),
            (_multiply, (xs, tiles, full, empty, out, outs, products, steps, N_TILES, LOG_CHUNK, FOLD, SLOTS, 1)),
            (_load_and_make, (x, xs, tiles, full, empty, products, blocks, seed, feature_offset, N_TILES, LOG_GROUP,
                              LOG_CHUNK, SLOTS)),
        ],
        [4, 4],
        [REGISTERS, 3 * 168 - 2 * REGISTERS],
    )  # fmt: skip
