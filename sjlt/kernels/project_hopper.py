"""X S' on Hopper for many data vectors: loads, entries, products and stores overlap.

A program multiplies as the kernels of `tiles` do: by one-hot tiles of the sketch, fp32 as pairs of fp16 numbers. Of its
12 warps 4 make the entries and have the data loaded, 4 and 4 multiply, each for half of the vectors. It takes the
products of a tile of the sketch and HOPPER_VECTORS vectors in turns, and runs over the chunks of the tile. So it takes
1.0 to 1.1 times the memory floor, where the kernel of `tiles` takes 1.13 to 1.24 (H200).

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
    CHUNK,
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
)

CHUNKS = gl.constexpr(2)  # of a step: `_multiply` scales two together


@gluon.jit
def _load_and_make(
    x, xs, tiles, full, empty, products, steps, seed, offset,
    N_TILES: gl.constexpr, LOG_GROUP: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Fill the slots, CHUNKS chunks a step: with data and entries."""
    slot, phase = 0, 1  # of a barrier that has not turned yet, phase 1 is over: all slots are empty
    product = gl.program_id(0)
    while product < products:
        m, first = product % N_TILES, product // N_TILES * (2 * VECTORS)
        column = columns(m, seed, offset, N_TILES, LOG_GROUP)
        keys, signs = entry_words(m, seed, offset, N_TILES, LOG_GROUP)
        for step in range(steps):
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(full.index(slot), 2 * CHUNKS * x.block_type.nbytes)
            for u in gl.static_range(CHUNKS):
                j = at(column, step * CHUNKS + u)
                for half in gl.static_range(2):
                    part = xs.index((slot * CHUNKS + u) * 2 + half)
                    tma.async_copy_global_to_shared(x, [first + half * VECTORS, j], full.index(slot), part)
            for u in gl.static_range(CHUNKS):
                tiles.index(slot * CHUNKS + u).store(entries(keys, signs, step * CHUNKS + u, x.dtype))
            fence_async_shared()
            barrier()
            mbarrier.arrive(full.index(slot), count=1)
            slot, phase = next_slot(slot, phase, SLOTS)
        product += gl.num_programs(0)


@gluon.jit
def _multiply(
    xs, tiles, full, empty, out, outs, products, steps,
    N_TILES: gl.constexpr, SLOTS: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Multiply half the vectors of each slot, and store their sums.

    The scales of data in fp32 follow the largest magnitudes so far; when they change, the sums so far change with them.
    """
    PAIR: gl.constexpr = xs.dtype == gl.float32
    DTYPE: gl.constexpr = gl.float16 if PAIR else xs.dtype
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    factor: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    tile_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, CHUNK], DTYPE)
    slot, phase = 0, 0
    product = gl.program_id(0)
    while product < products:
        acc = gl.zeros((VECTORS, TILE), gl.float32, layout=sums)
        if PAIR:
            largest = gl.zeros([VECTORS], gl.uint32, layout=gl.SliceLayout(1, factor))
            scale = scale_of(largest, 14)
        for _ in range(steps):
            mbarrier.wait(full.index(slot), phase)
            if PAIR:
                x0 = xs.index((slot * CHUNKS) * 2 + WHICH).load(factor)
                x1 = xs.index((slot * CHUNKS + 1) * 2 + WHICH).load(factor)
                largest = gl.maximum(largest, largest_of(gl.maximum(gl.abs(x0), gl.abs(x1))))
                before = inverse(scale)
                scale = scale_of(largest, 14)
                acc *= gl.convert_layout(scale * before, gl.SliceLayout(1, sums))[:, None]
            for u in gl.static_range(CHUNKS):
                tile = tiles.index(slot * CHUNKS + u)._reinterpret(DTYPE, [TILE, CHUNK], tile_shared).permute((1, 0))
                if PAIR:
                    high, low = pair_of(x1 if u else x0, scale)
                    acc = warpgroup_mma(high, tile, acc, is_async=True)
                    acc = warpgroup_mma(low, tile, acc, is_async=True)
                else:
                    acc = warpgroup_mma(xs.index((slot * CHUNKS + u) * 2 + WHICH), tile, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            barrier()
            mbarrier.arrive(empty.index(slot), count=1)
            slot, phase = next_slot(slot, phase, SLOTS)
        m, block = product % N_TILES, product // N_TILES * 2 + WHICH
        if PAIR:
            acc *= gl.convert_layout(inverse(scale) * 0.5, gl.SliceLayout(1, sums))[:, None]  # nnz^-1/2
        else:
            acc *= 0.5
        tma.store_wait(0)
        barrier()
        outs.index(WHICH).store(acc.to(out.dtype))
        fence_async_shared()
        barrier()
        tma.async_copy_shared_to_global(out, [block * VECTORS, m * TILE], outs.index(WHICH))
        product += gl.num_programs(0)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n", "groups", "seed", "feature_offset"])
def project_hopper(
    x,
    out,
    n,
    groups,
    seed: gl.int64,
    feature_offset: gl.int64,
    N_TILES: gl.constexpr,
    LOG_GROUP: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """out[v, r] = sum_j x[v, j] S[r, j]. Any number of programs.

    x, out : tensor descriptors of blocks [VECTORS, CHUNK] and [VECTORS, TILE], of one dtype of 16 or 32 bits.  groups :
    of chunks, that the columns lie in.
    """
    products = N_TILES * gl.cdiv(n, 2 * VECTORS)  # product p : tile p mod N_TILES, block of vectors p div N_TILES
    steps = gl.cdiv(groups, CHUNKS)
    words_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, CHUNK // 2], gl.uint32)
    xs = gl.allocate_shared_memory(x.dtype, [SLOTS * CHUNKS * 2, VECTORS, CHUNK], x.layout)
    tiles = gl.allocate_shared_memory(gl.uint32, [SLOTS * CHUNKS, TILE, CHUNK // 2], words_shared)
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
            (_multiply, (xs, tiles, full, empty, out, outs, products, steps, N_TILES, SLOTS, 0)),
            (_multiply, (xs, tiles, full, empty, out, outs, products, steps, N_TILES, SLOTS, 1)),
            (_load_and_make, (x, xs, tiles, full, empty, products, steps, seed, feature_offset, N_TILES, LOG_GROUP,
                              SLOTS)),
        ],
        [4, 4],
        [168, 168],
    )  # fmt: skip
