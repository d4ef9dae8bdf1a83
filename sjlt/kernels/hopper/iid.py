"""X S' of the iid law on Hopper, for many vectors of 16-bit numbers: entries are made while tensor cores multiply.

Triton waits for a product of tensor cores before it goes on, where a factor comes from registers. This kernel is in
Gluon, Triton's lower level, which leaves that to the program. Half of a program's warps make entries, into a ring of
slots in shared memory, and have the data loaded there (by the tensor memory accelerator). The other half only multiply.
Barriers in memory tell when a slot is full, and when it is empty again. Results are those of `iid.multiply_iid` where
that one does not split its sums, to the bit, in 0.72 to 0.78 of its time (H200, bf16; 0.79 to 0.82 where the same warps
did both in turns).

The programs take the products of V vectors and OUTER components in turns, and run over their INNER features a step.
Entries are stored two to a word, in the layout that tensor cores read as 16-bit numbers.
"""

# (No annotations from __future__: Gluon would not see those of the kernel's arguments.)
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
from ..philox import _philox
from ..portable import iid
from ..portable.law import _select_word
from .common import barrier, next_slot

_halves = gluon.jit(iid._halves.fn)
_words = philox.define(
    iid_law.FUNCTIONS,
    gluon.jit,
    gl.constexpr,
    gl.static_range,
    philox=gluon.jit(_philox.fn),
    select_word=gluon.jit(_select_word.fn),
)
_entry_words, _marks = _words.entry_words, _words.marks


@gluon.jit
def _entries(j, call, k0, k1, signs, complement, BITS: gl.constexpr):
    """Twice the unscaled entries, 16 bits each and two to a word, of columns j [J, 1] and calls [1, C]: [J, C 64/BITS].

    Of 32 rows, the pair (8 q + 2 m, + 1) is word 4 m + q. So what a thread has of the tensor cores' sums, the words q
    of all m, belongs to 8 neighbouring components (`_in_order`).
    """
    w0, w1, w2, w3 = _entry_words(j, call, k0, k1)
    w0, w1 = _marks(w0, signs, complement), _marks(w1, signs, complement)
    w2, w3 = _marks(w2, signs, complement), _marks(w3, signs, complement)
    w = _halves(w0, w1, w2, w3, BITS)
    J: gl.constexpr = w0.shape[0]
    W: gl.constexpr = w0.shape[1] * (64 // BITS)
    return gl.reshape(gl.permute(gl.reshape(w, [J, W // 16, 4, 4]), (0, 1, 3, 2)), [J, W])


@gluon.constexpr_function
def _columns_first(layout):
    """The layout with a thread's numbers of a row before its rows: for wide stores."""
    bases = sorted(layout.reg_bases, key=lambda basis: (basis[0] != 0, *basis))
    return gl.DistributedLinearLayout(bases, layout.lane_bases, layout.warp_bases, layout.block_bases, layout.shape)


@gluon.jit
def _in_order(acc):
    """The sums [V, OUTER] with the components in order: registers by other names."""
    V: gl.constexpr = acc.shape[0]
    OUTER: gl.constexpr = acc.shape[1]
    acc = gl.permute(gl.reshape(acc, [V, OUTER // 32, 4, 4, 2]), (0, 1, 3, 2, 4))
    acc = gl.reshape(acc, [V, OUTER])
    layout: gl.constexpr = _columns_first(acc.type.layout)
    return gl.convert_layout(acc, layout)


@gluon.jit
def _make(
    x, xs, words, full, empty, products, blocks, steps, seed, feature_offset, signs, complement,
    BITS: gl.constexpr, V: gl.constexpr, OUTER: gl.constexpr, INNER: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Fill the slots, step by step: with data and entries."""
    CALLS: gl.constexpr = OUTER * BITS // 128
    # A warp's threads are features, and a thread has neighbouring calls: what its stores hit are different banks.
    WARPS_J: gl.constexpr = INNER // 32
    WARPS_C: gl.constexpr = WARPS // WARPS_J
    calls_layout: gl.constexpr = gl.BlockedLayout([1, CALLS // WARPS_C], [32, 1], [WARPS_J, WARPS_C], [1, 0])
    k0, k1 = (seed & 0xFFFFFFFF).to(gl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(gl.uint32)
    signs, complement = signs.to(gl.uint32), complement.to(gl.uint32)
    column, high = (feature_offset & 0xFFFFFFFF).to(gl.uint32), (feature_offset >> 32) << 32
    column += gl.arange(0, INNER, layout=gl.SliceLayout(1, calls_layout))[:, None].to(gl.uint32)
    calls = gl.arange(0, CALLS, layout=gl.SliceLayout(0, calls_layout))[None, :]
    slot, phase = 0, 1  # of a barrier that has not turned yet, phase 1 is over: all slots are empty
    product = gl.program_id(0)
    while product < products:
        first, block = product // blocks * V, product % blocks
        for t in range(steps):
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(full.index(slot), V * INNER * 2)
            tma.async_copy_global_to_shared(x, [first, t * INNER], full.index(slot), xs.index(slot))
            j = (column + (t * INNER).to(gl.uint32)).to(gl.int64) | high
            words.index(slot).store(_entries(j, block * CALLS + calls, k0, k1, signs, complement, BITS))
            fence_async_shared()
            barrier()
            mbarrier.arrive(full.index(slot), count=1)
            slot, phase = next_slot(slot, phase, STAGES)
        product += gl.num_programs(0)


@gluon.jit
def _multiply(
    xs, words, full, empty, out, n, outer, stride_ov, stride_oo, products, blocks, steps, half_scale,
    V: gl.constexpr, OUTER: gl.constexpr, INNER: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Multiply what is in the slots, step by step, and store each product."""
    DTYPE: gl.constexpr = xs.dtype
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, OUTER, 16])
    tile_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([INNER, OUTER], DTYPE)
    slot, phase, last_slot = 0, 0, 0
    product = gl.program_id(0)
    while product < products:
        first, block = product // blocks * V, product % blocks
        acc = gl.zeros((V, OUTER), gl.float32, layout=sums_layout)
        for t in range(steps):
            mbarrier.wait(full.index(slot), phase)
            tile = words.index(slot)._reinterpret(DTYPE, [INNER, OUTER], tile_shared)
            token = warpgroup_mma(xs.index(slot), tile, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(token,))
            barrier()  # step t - 1 is done in all warps
            mbarrier.arrive(empty.index(last_slot), count=1, pred=t > 0)
            last_slot = slot
            slot, phase = next_slot(slot, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        barrier()
        mbarrier.arrive(empty.index(last_slot), count=1)
        result = _in_order((acc * half_scale).to(DTYPE))
        layout: gl.constexpr = result.type.layout
        v = first + gl.arange(0, V, layout=gl.SliceLayout(1, layout))
        o = block * OUTER + gl.arange(0, OUTER, layout=gl.SliceLayout(0, layout))
        places = out + (v.to(gl.int64) * stride_ov)[:, None] + (o.to(gl.int64) * stride_oo)[None, :]
        gl.store(places, result, mask=(v < n)[:, None] & (o < outer)[None, :])
        product += gl.num_programs(0)


@gluon.jit(do_not_specialize=["n", "inner", "seed", "feature_offset", "signs", "complement"])
def multiply_iid_hopper(
    x,
    out,
    n,
    inner,
    outer,
    stride_ov,
    stride_oo,
    seed: gl.int64,
    feature_offset: gl.int64,
    signs: gl.int64,
    complement: gl.int64,
    half_scale: gl.float32,
    DTYPE: gl.constexpr,
    BITS: gl.constexpr,
    V: gl.constexpr,
    OUTER: gl.constexpr,
    INNER: gl.constexpr,
    STAGES: gl.constexpr,
    MAKERS: gl.constexpr,
    MAKER_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """out[v, o] = half_scale sum_i x[v, i] times twice the entry of (o, i). Any number of programs.

    x : a tensor descriptor of blocks [V, INNER].  `signs`, `complement` : of `iid_law.Lanes`.  INNER divides `inner`.
    The columns' law indices have their high 32 bits in common.  MAKERS : warps that make entries, beside `num_warps`
    that multiply.
    """
    blocks = gl.cdiv(outer, OUTER)
    products = blocks * gl.cdiv(n, V)  # product p : block of components p mod blocks, block of vectors p div blocks
    steps = inner // INNER
    x_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([V, INNER], DTYPE)
    words_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([INNER, OUTER // 2], gl.uint32)
    xs = gl.allocate_shared_memory(DTYPE, [STAGES, V, INNER], x_shared)
    words = gl.allocate_shared_memory(gl.uint32, [STAGES, INNER, OUTER // 2], words_shared)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=2)  # the load, with its bytes, and the entries
        mbarrier.init(empty.index(s), count=1)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (_multiply, (xs, words, full, empty, out, n, outer, stride_ov, stride_oo, products, blocks, steps,
                         half_scale, V, OUTER, INNER, STAGES, num_warps)),
            (_make, (x, xs, words, full, empty, products, blocks, steps, seed, feature_offset, signs, complement,
                     BITS, V, OUTER, INNER, STAGES, MAKERS)),
        ],
        [MAKERS],
        [MAKER_REGISTERS],
    )  # fmt: skip
