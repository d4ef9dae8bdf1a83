"""X Sᵀ of the iid law on Hopper, for many 16-bit vectors: entries are generated while tensor cores multiply.

If an operand of a tensor-core product comes from registers, Triton waits for the product before it continues; Gluon,
its lower-level language, leaves that to the program. Half of a program's warps (the producer) write entries to a ring
of slots in shared memory, and start loads of the data to the same slots by the tensor memory accelerator; the other
half (the consumer) only multiply. Barriers signal when a slot is full and when it is empty. Results are bitwise equal
to those of `portable.iid.multiply_iid` where that kernel does not split its sums, in 0.72 to 0.78 of its time (H200,
bf16; 0.79 to 0.82 if the same warps do both in turns).

A program processes one product after another, BLOCK_VECTORS vectors by BLOCK_OUT components, at BLOCK_REDUCE features
per step. Entries are stored two per 32-bit word, in the layout in which tensor cores read them as 16-bit elements.
"""

# (No `from __future__ import annotations`: Gluon would not see the annotations of kernel arguments.)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...laws import iid as iid_law
from ...laws import philox
from ..philox import philox_wide
from ..portable import iid
from ..portable.law import select_word
from .common import barrier, next_slot, seed_words

_marks_of_words = gluon.jit(iid.marks_of_words.fn)
_words = philox.define(
    iid_law.FUNCTIONS,
    gluon.jit,
    gl.constexpr,
    gl.static_range,
    philox=gluon.jit(philox_wide.fn),
    select_word=gluon.jit(select_word.fn),
)
_entry_words, _marks = _words.entry_words, _words.marks


@gluon.jit
def _entries(j, call, k0, k1, signs, complement, BITS: gl.constexpr):
    """Twice the unscaled 16-bit entries of columns j [J, 1] in the rows of calls [1, C], two per word: [J, C 64/BITS].

    Rows are permuted: of 32 rows, the pair (8 q + 2 m, 8 q + 2 m + 1) is word 4 m + q. A thread's share of the tensor
    cores' sums, words q of all m, then belongs to 8 consecutive components (`_in_order`).
    """
    w0, w1, w2, w3 = _entry_words(j, call, k0, k1)
    w0, w1 = _marks(w0, signs, complement), _marks(w1, signs, complement)
    w2, w3 = _marks(w2, signs, complement), _marks(w3, signs, complement)
    w = _marks_of_words(w0, w1, w2, w3, BITS)
    COLUMNS: gl.constexpr = w0.shape[0]
    WORDS: gl.constexpr = w0.shape[1] * (64 // BITS)
    return gl.reshape(gl.permute(gl.reshape(w, [COLUMNS, WORDS // 16, 4, 4]), (0, 1, 3, 2)), [COLUMNS, WORDS])


@gluon.constexpr_function
def _columns_first(layout):
    """`layout` with a thread's columns before its rows, for wide stores."""
    bases = sorted(layout.reg_bases, key=lambda basis: (basis[0] != 0, *basis))
    return gl.DistributedLinearLayout(bases, layout.lane_bases, layout.warp_bases, layout.block_bases, layout.shape)


@gluon.jit
def _in_order(acc):
    """The sums [vectors, components] with the components in order, which undoes the permutation of `_entries`.

    This only renames registers.
    """
    BLOCK_VECTORS: gl.constexpr = acc.shape[0]
    BLOCK_OUT: gl.constexpr = acc.shape[1]
    acc = gl.permute(gl.reshape(acc, [BLOCK_VECTORS, BLOCK_OUT // 32, 4, 4, 2]), (0, 1, 3, 2, 4))
    acc = gl.reshape(acc, [BLOCK_VECTORS, BLOCK_OUT])
    layout: gl.constexpr = _columns_first(acc.type.layout)
    return gl.convert_layout(acc, layout)


@gluon.jit
def _produce(
    x, xs, words, full, empty, products, blocks, steps, seed, feature_offset, signs, complement,
    BITS: gl.constexpr, BLOCK_VECTORS: gl.constexpr, BLOCK_OUT: gl.constexpr, BLOCK_REDUCE: gl.constexpr,
    STAGES: gl.constexpr, PRODUCER_WARPS: gl.constexpr,
):  # fmt: skip
    """The producer: fill slots with data and entries, one step per slot."""
    CALLS: gl.constexpr = BLOCK_OUT * BITS // 128
    # The threads of a warp have different features and a thread has consecutive calls, so that stores hit different
    # banks.
    FEATURE_WARPS: gl.constexpr = BLOCK_REDUCE // 32
    CALL_WARPS: gl.constexpr = PRODUCER_WARPS // FEATURE_WARPS
    calls_layout: gl.constexpr = gl.BlockedLayout(
        [1, CALLS // CALL_WARPS], [32, 1], [FEATURE_WARPS, CALL_WARPS], [1, 0]
    )
    k0, k1 = seed_words(seed)
    signs, complement = signs.to(gl.uint32), complement.to(gl.uint32)
    column, high = (feature_offset & 0xFFFFFFFF).to(gl.uint32), (feature_offset >> 32) << 32
    column += gl.arange(0, BLOCK_REDUCE, layout=gl.SliceLayout(1, calls_layout))[:, None].to(gl.uint32)
    calls = gl.arange(0, CALLS, layout=gl.SliceLayout(0, calls_layout))[None, :]
    slot, phase = 0, 1  # waiting for phase 1 of a new barrier returns at once: all slots are empty
    product = gl.program_id(0)
    while product < products:
        first, block = product // blocks * BLOCK_VECTORS, product % blocks
        for step in range(steps):
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(full.index(slot), BLOCK_VECTORS * BLOCK_REDUCE * 2)
            tma.async_copy_global_to_shared(x, [first, step * BLOCK_REDUCE], full.index(slot), xs.index(slot))
            j = (column + (step * BLOCK_REDUCE).to(gl.uint32)).to(gl.int64) | high
            words.index(slot).store(_entries(j, block * CALLS + calls, k0, k1, signs, complement, BITS))
            fence_async_shared()
            barrier()
            mbarrier.arrive(full.index(slot), count=1)
            slot, phase = next_slot(slot, phase, STAGES)
        product += gl.num_programs(0)


@gluon.jit
def _consume(
    xs, words, full, empty, out, n, out_dim, stride_ov, stride_oo, products, blocks, steps, half_scale,
    BLOCK_VECTORS: gl.constexpr, BLOCK_OUT: gl.constexpr, BLOCK_REDUCE: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """The consumer: multiply the contents of the slots, step by step, and store each product."""
    DTYPE: gl.constexpr = xs.dtype
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_OUT, 16])
    tile_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_REDUCE, BLOCK_OUT], DTYPE)
    slot, phase, last_slot = 0, 0, 0
    product = gl.program_id(0)
    while product < products:
        first, block = product // blocks * BLOCK_VECTORS, product % blocks
        acc = gl.zeros((BLOCK_VECTORS, BLOCK_OUT), gl.float32, layout=sums_layout)
        for step in range(steps):
            mbarrier.wait(full.index(slot), phase)
            tile = words.index(slot)._reinterpret(DTYPE, [BLOCK_REDUCE, BLOCK_OUT], tile_shared)
            token = warpgroup_mma(xs.index(slot), tile, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(token,))
            barrier()  # all warps have completed the previous step
            mbarrier.arrive(empty.index(last_slot), count=1, pred=step > 0)
            last_slot = slot
            slot, phase = next_slot(slot, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        barrier()
        mbarrier.arrive(empty.index(last_slot), count=1)
        result = _in_order((acc * half_scale).to(DTYPE))
        layout: gl.constexpr = result.type.layout
        v = first + gl.arange(0, BLOCK_VECTORS, layout=gl.SliceLayout(1, layout))
        o = block * BLOCK_OUT + gl.arange(0, BLOCK_OUT, layout=gl.SliceLayout(0, layout))
        pointers = out + (v.to(gl.int64) * stride_ov)[:, None] + (o.to(gl.int64) * stride_oo)[None, :]
        gl.store(pointers, result, mask=(v < n)[:, None] & (o < out_dim)[None, :])
        product += gl.num_programs(0)


@gluon.jit(do_not_specialize=["n", "reduce_dim", "seed", "feature_offset", "signs", "complement"])
def multiply_iid_hopper(
    x,
    out,
    n,
    reduce_dim,
    out_dim,
    stride_ov,
    stride_oo,
    seed: gl.int64,
    feature_offset: gl.int64,
    signs: gl.int64,
    complement: gl.int64,
    half_scale: gl.float32,
    DTYPE: gl.constexpr,
    BITS: gl.constexpr,
    BLOCK_VECTORS: gl.constexpr,
    BLOCK_OUT: gl.constexpr,
    BLOCK_REDUCE: gl.constexpr,
    STAGES: gl.constexpr,
    PRODUCER_WARPS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """out[v, o] = half_scale * sum_i x[v, i] times twice the unscaled entry of (o, i). Grid: any number of programs.

    x : a tensor descriptor of blocks [BLOCK_VECTORS, BLOCK_REDUCE].  signs, complement : as in `sjlt.laws.iid.Lanes`.
    PRODUCER_WARPS : warps that generate entries, in addition to the `num_warps` that multiply.

    BLOCK_REDUCE must divide reduce_dim, and the law's indices of all columns must have the same high 32 bits.
    """
    blocks = gl.cdiv(out_dim, BLOCK_OUT)
    products = blocks * gl.cdiv(n, BLOCK_VECTORS)  # product = block of vectors * blocks + block of components
    steps = reduce_dim // BLOCK_REDUCE
    x_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_VECTORS, BLOCK_REDUCE], DTYPE)
    words_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_REDUCE, BLOCK_OUT // 2], gl.uint32)
    xs = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_VECTORS, BLOCK_REDUCE], x_shared)
    words = gl.allocate_shared_memory(gl.uint32, [STAGES, BLOCK_REDUCE, BLOCK_OUT // 2], words_shared)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=2)  # arrivals: the load, with its bytes, and the entries
        mbarrier.init(empty.index(s), count=1)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (_consume, (xs, words, full, empty, out, n, out_dim, stride_ov, stride_oo, products, blocks, steps,
                        half_scale, BLOCK_VECTORS, BLOCK_OUT, BLOCK_REDUCE, STAGES, num_warps)),
            (_produce, (x, xs, words, full, empty, products, blocks, steps, seed, feature_offset, signs, complement,
                        BITS, BLOCK_VECTORS, BLOCK_OUT, BLOCK_REDUCE, STAGES, PRODUCER_WARPS)),
        ],
        [PRODUCER_WARPS],
        [PRODUCER_REGISTERS],
    )  # fmt: skip
