"""The kernel of the iid law: tensor cores multiply blocks of data by blocks of entries, generated and never stored.

One kernel computes X Sᵀ and Y S. A program owns BLOCK_VECTORS data vectors and BLOCK_OUT elements of each of their
results, and sums over the reduced dimension BLOCK_REDUCE terms at a time. In X Sᵀ the results are components and the
sums run over features; in Y S (ADJOINT) it is the other way round. All vectors of a program share a block of entries,
which costs one call of Philox per 128/BITS entries.

Entries are the floats +-2 and +-0, as `sjlt.laws.iid.marks` returns them, so the final scale is half the law's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...laws import iid as iid_law
from ...laws import philox
from ..config import arithmetic
from ..config import iid as config
from ..philox import flat_groups, lanes_at_top, philox_wide
from .fp32_split import BF16_TRIPLE, FP16_PAIR, NATIVE, has_overflow, inverse, multiply_split
from .law import seed_words, select_word
from .program import known_multiple, scalar, store_sums

_words = philox.define(
    iid_law.FUNCTIONS, triton.jit, tl.constexpr, tl.static_range, philox=philox_wide, select_word=select_word, tl=tl
)
_entry_words, _marks = _words.entry_words, _words.marks
FP64 = tl.constexpr(arithmetic.FP64)
MAX_SPLIT_TERMS, FEW_VECTORS = tl.constexpr(config.MAX_SPLIT_TERMS), tl.constexpr(config.FEW_VECTORS)


@triton.jit
def _lane_mask(memory, never, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, INTERPRETED: tl.constexpr):
    """The constant mask of a lane's top two bits, [COLUMNS, ROWS], in a layout where a thread has a call's lanes.

    It is the result of a masked load that reads nothing, because loads determine the layout that the compiler chooses.
    Without one, the entries of a call do not stay in one thread, and joining lanes through shared memory takes three
    times the instructions.

    never : 0, which the compiler cannot know.
    """
    LANE: tl.constexpr = tl.uint8 if BITS == 8 else tl.uint16
    if INTERPRETED:
        bits = tl.full((COLUMNS, ROWS), 3 << (BITS - 2), LANE)
    else:
        pointers = memory.to(tl.pointer_type(LANE)) + (tl.arange(0, COLUMNS) * 0)[:, None] + tl.arange(0, ROWS)[None, :]
        bits = tl.load(pointers, mask=tl.full((COLUMNS, ROWS), 0, tl.int32) < never, other=3 << (BITS - 2))
    return bits


@triton.jit
def _spread_bytes(w, SELECT: tl.constexpr):
    """Two bytes of each word at the top of its halves, zeros below: one instruction, which the compiler misses."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, " + SELECT + ";", "=r,r", [w], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def marks_of_words(w0, w1, w2, w3, BITS: tl.constexpr):
    """The marks in four words [J, C], at the top of 16-bit halves of words: [J, C, 2, 2], or with 8 bits [..., 2]."""
    w = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # word 2 i + j at (i, j)
    if BITS == 8:
        w = tl.join(_spread_bytes(w, "0x1404"), _spread_bytes(w, "0x3424"))
    return w


@triton.jit
def iid_entries(
    j, call, layout, k0, k1, signs, complement, BITS: tl.constexpr, DTYPE: tl.constexpr, NVIDIA: tl.constexpr
):
    """Twice the unscaled entries, +-2 or +-0, of columns j [J] in the rows of calls `call` [C]: [J, C 128/BITS].

    layout : from `_lane_mask`; entries are combined with it to get its layout.
    """
    w0, w1, w2, w3 = _entry_words(j[:, None], call[None, :], k0, k1)
    w0, w1 = _marks(w0, signs, complement), _marks(w1, signs, complement)
    w2, w3 = _marks(w2, signs, complement), _marks(w3, signs, complement)
    if NVIDIA and DTYPE.primitive_bitwidth == 16:
        w = marks_of_words(w0, w1, w2, w3, BITS)
        w = flat_groups(tl.join(w.to(tl.uint16), (w >> 16).to(tl.uint16)), w0, 128 // BITS)
        e = tl.inline_asm_elementwise(  # a copy that depends on `layout`
            "mov.b32 $0, $1;", "=r,r,r", [w, layout.to(tl.uint16)], dtype=tl.uint16, is_pure=True, pack=2
        ).to(DTYPE, bitcast=True)
    else:
        top = lanes_at_top(w0, w1, w2, w3, BITS)
        if tl.float64 == DTYPE:  # without `layout`: the compiler fails on fp64 dots of values derived from bytes
            top &= 0xC0000000
        else:
            top &= layout.to(tl.uint32) << (32 - BITS)
        if tl.float64 == DTYPE:
            e = (top.to(tl.uint64) << 32).to(tl.float64, bitcast=True)
        elif tl.float32 == DTYPE:
            e = top.to(tl.float32, bitcast=True)
        else:
            e = (top >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
    return e


@triton.jit
def _complete(acc):
    """acc, through a no-op that uses it in every step, for the reason given in `tensor_core._sum_of_chunks`."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _sums(
    data, v, scale, column, row, count, never, entry_arguments, ADJOINT: tl.constexpr, BITS: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_REDUCE: tl.constexpr, TERMS_PER_SUM: tl.constexpr, MODE: tl.constexpr,
    UNMASKED: tl.constexpr, NVIDIA: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The sums over `count` terms, from column `column` and row `row` of the sketch on: [vectors, BLOCK_OUT].

    data : (x, n, stride_xv, stride_xi).  entry_arguments : (k0, k1, signs, complement).
    """
    x, n, stride_xv, stride_xi = data
    k0, k1, signs, complement = entry_arguments
    BLOCK_VECTORS: tl.constexpr = v.shape[0]
    LANES: tl.constexpr = 128 // BITS  # rows of a call
    SUM_DTYPE: tl.constexpr = tl.float64 if MODE == FP64 else tl.float32
    HALF: tl.constexpr = tl.float16 if MODE == FP16_PAIR else tl.bfloat16
    DTYPE: tl.constexpr = x.dtype.element_ty if (MODE == NATIVE) | (MODE == FP64) else HALF
    # With entries as the first operand, X Sᵀ is 1.35 times as fast for 8 vectors (1.4 in fp32), and 1.02 to 1.05 times
    # for many 16-bit vectors (H200); Y S is slower.
    SWAP_OPERANDS: tl.constexpr = ((MODE == NATIVE) | (BLOCK_VECTORS <= FEW_VECTORS)) & (MODE != FP64) & (not ADJOINT)
    total = tl.zeros((BLOCK_OUT, BLOCK_VECTORS) if SWAP_OPERANDS else (BLOCK_VECTORS, BLOCK_OUT), SUM_DTYPE)
    acc = tl.zeros_like(total)
    COLUMNS: tl.constexpr = BLOCK_OUT if ADJOINT else BLOCK_REDUCE
    ROWS: tl.constexpr = BLOCK_REDUCE if ADJOINT else BLOCK_OUT
    layout = _lane_mask(x, never, COLUMNS, ROWS, BITS, INTERPRETED)
    x += v[:, None] * stride_xv
    for first in range(0, count, TERMS_PER_SUM):
        for start in range(first, tl.minimum(first + TERMS_PER_SUM, count), BLOCK_REDUCE):
            i = start + tl.arange(0, BLOCK_REDUCE)
            address = x + (i.to(tl.int64) * stride_xi)[None, :]
            keep = (v < n)[:, None] & (i < count)[None, :]
            z = tl.load(address) if UNMASKED else tl.load(address, mask=keep, other=0.0)
            if ADJOINT:
                call = (row + start) // LANES + tl.arange(0, BLOCK_REDUCE // LANES)
                j = column + tl.arange(0, BLOCK_OUT)
                tile = tl.trans(iid_entries(j, call, layout, k0, k1, signs, complement, BITS, DTYPE, NVIDIA))
            else:
                j = column + start + tl.arange(0, BLOCK_REDUCE)
                call = row // LANES + tl.arange(0, BLOCK_OUT // LANES)
                tile = iid_entries(j, call, layout, k0, k1, signs, complement, BITS, DTYPE, NVIDIA)
            if MODE == FP64:
                if NVIDIA:
                    acc = tl.dot(z, tile, acc, out_dtype=tl.float64)
                else:  # not every compiler has fp64 dots
                    acc += tl.sum(z[:, :, None] * tile[None, :, :], 1)
            else:
                if SWAP_OPERANDS and NVIDIA:
                    acc = _complete(acc)
                acc = multiply_split(z, scale, tile, acc, MODE, SWAP_OPERANDS, INTERPRETED)
        if TERMS_PER_SUM < MAX_SPLIT_TERMS:
            total += acc
            acc = tl.zeros_like(total)
    if TERMS_PER_SUM < MAX_SPLIT_TERMS:
        acc = total
    return tl.trans(acc) if SWAP_OPERANDS else acc


@triton.jit(do_not_specialize=["seed", "feature_offset", "signs", "complement", "terms_per_split", "half_scale"])
def multiply_iid(
    x,
    out,
    scales,
    n,
    reduce_dim,
    out_dim,
    stride_xv,
    stride_xi,
    stride_os,
    stride_ov,
    stride_oo,
    seed: tl.int64,
    feature_offset: tl.int64,
    signs: tl.int64,
    complement: tl.int64,
    terms_per_split: tl.int64,
    half_scale: tl.float64,
    ADJOINT: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_VECTORS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_REDUCE: tl.constexpr,
    TERMS_PER_SUM: tl.constexpr,
    MODE: tl.constexpr,
    UNMASKED: tl.constexpr,
    ALIGN: tl.constexpr,
    SINGLE_SPLIT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    NVIDIA: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """out[split, v, o] = sum over the split's terms i of x[v, i] times twice the unscaled entry of (o, i).

    Grid: (blocks of out_dim * blocks of vectors, splits).

    x : (n, reduce_dim).  out : (splits, n, out_dim) sums or, with SINGLE_SPLIT, the result (n, out_dim): scaled, added
    to `out` if ACCUMULATE, and rounded once.  scales : (n,) fp32 from `scale_vectors`, read if MODE is FP16_PAIR.
    signs, complement : as in `sjlt.laws.iid.Lanes`.  TERMS_PER_SUM : terms that are summed before they are added to a
    total.  UNMASKED : BLOCK_REDUCE divides reduce_dim.  ALIGN : divides reduce_dim and stride_xv, if stride_xi is 1.
    """
    k0, k1 = seed_words(seed)
    entry_arguments = (k0, k1, signs.to(tl.uint32), complement.to(tl.uint32))
    blocks = tl.cdiv(out_dim, BLOCK_OUT)
    block = (tl.program_id(0) % blocks).to(tl.int64)
    split = tl.program_id(1).to(tl.int64)
    rows_v = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_VECTORS + tl.arange(0, BLOCK_VECTORS)
    v = tl.minimum(rows_v, n - 1) if UNMASKED else rows_v
    o = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    stride_xv, reduce_dim = known_multiple(stride_xv, ALIGN), known_multiple(reduce_dim, ALIGN)
    begin = split * (terms_per_split // BLOCK_REDUCE * BLOCK_REDUCE)
    # Terms are counted from the split's first in 32 bits; the pointer and the law's index have 64.
    count = tl.minimum(reduce_dim - begin, terms_per_split // BLOCK_REDUCE * BLOCK_REDUCE).to(tl.int32)
    never = tl.minimum(n, 0).to(tl.int32)  # 0
    x += begin * stride_xi
    if ADJOINT:
        column, row = feature_offset + block * BLOCK_OUT, begin.to(tl.int32)
    else:
        column, row = feature_offset + begin, (block * BLOCK_OUT).to(tl.int32)
    scale = 1.0
    if MODE == FP16_PAIR:
        scale = tl.load(scales + v, mask=v < n, other=1.0)
    data = (x, n, stride_xv, stride_xi)
    acc = _sums(
        data, v, scale, column, row, count, never, entry_arguments,
        ADJOINT, BITS, BLOCK_OUT, BLOCK_REDUCE, TERMS_PER_SUM, MODE, UNMASKED, NVIDIA, INTERPRETED,
    )  # fmt: skip
    if MODE == FP16_PAIR:
        acc *= inverse(scale)[:, None]
        if has_overflow(acc):  # an element far larger than the sampled ones; see `fp32_split`
            acc = _sums(
                data, v, 1.0, column, row, count, never, entry_arguments,
                ADJOINT, BITS, BLOCK_OUT, BLOCK_REDUCE, TERMS_PER_SUM, BF16_TRIPLE, UNMASKED, NVIDIA, INTERPRETED,
            )  # fmt: skip
    keep = (rows_v < n)[:, None] & (o < out_dim)[None, :]
    out += split * stride_os + rows_v[:, None] * stride_ov + o[None, :] * stride_oo
    store_sums(acc, out, keep, scalar(half_scale, acc.dtype), SINGLE_SPLIT, ACCUMULATE)
