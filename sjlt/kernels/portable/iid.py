"""Kernels of the iid law: tensor cores multiply blocks of data by tiles of entries, made on the way and never stored.

One kernel serves X S' and Y S. A program owns V data vectors and OUTER of the result's columns, and runs over all that
is summed, INNER at a time: outer are components and inner features in X S' (FORWARD), and the other way round in Y S.
A tile of entries is the work of a call of Philox for every 128/BITS of them; a program's V vectors share it.

Entries are the floats +-2 and +-0, as `iid_law.marks` has them; the scale at the end is half the law's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...laws import iid as iid_law
from ...laws import philox
from ..config import iid as launch
from ..philox import _philox, flat_groups, lanes_at_top
from .fp32_split import BF16_TRIPLE, FP16_PAIR, NATIVE, inverse, multiply
from .law import _select_word, seed_words

_words = philox.define(
    iid_law.FUNCTIONS, triton.jit, tl.constexpr, tl.static_range, philox=_philox, select_word=_select_word, tl=tl
)
_entry_words, _marks = _words.entry_words, _words.marks
FP64, WHOLE, FEW = tl.constexpr(launch.FP64), tl.constexpr(launch.WHOLE), tl.constexpr(launch.FEW)


@triton.jit
def _layout(memory, never, J: tl.constexpr, R: tl.constexpr, BITS: tl.constexpr, INTERPRETED: tl.constexpr):
    """The top two bits of a lane for entries [J, R]: as if loaded, a call's lanes to a thread.

    Compilers let loads decide how numbers lie over threads. Without one, they keep no call's entries in one thread: the
    joins of lanes then pass through shared memory, at three times the instructions. Nothing is read.
    """
    LANE: tl.constexpr = tl.uint8 if BITS == 8 else tl.uint16
    if INTERPRETED:
        bits = tl.full((J, R), 3 << (BITS - 2), LANE)
    else:
        pointers = memory.to(tl.pointer_type(LANE)) + (tl.arange(0, J) * 0)[:, None] + tl.arange(0, R)[None, :]
        bits = tl.load(pointers, mask=tl.full((J, R), 0, tl.int32) < never, other=3 << (BITS - 2))
    return bits


@triton.jit
def _pairs(w, SELECT: tl.constexpr):
    """Two bytes of each word at the top of two halves, the rest 0: one instruction, which compilers do not find."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, " + SELECT + ";", "=r,r", [w], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def _halves(w0, w1, w2, w3, BITS: tl.constexpr):
    """The marks of four words [J, C] at the top of numbers of 16 bits, two to a word: [J, C, 2, 2], or one more 2."""
    w = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # word 2 i + j at (i, j)
    if BITS == 8:
        w = tl.join(_pairs(w, "0x1404"), _pairs(w, "0x3424"))
    return w


@triton.jit
def entries(j, call, layout, k0, k1, signs, complement, BITS: tl.constexpr, DTYPE: tl.constexpr, NVIDIA: tl.constexpr):
    """Twice the unscaled entries, +-2 or +-0, of columns j [J] and the rows of calls `call` [C]: [J, C 128/BITS]."""
    w0, w1, w2, w3 = _entry_words(j[:, None], call[None, :], k0, k1)
    w0, w1 = _marks(w0, signs, complement), _marks(w1, signs, complement)
    w2, w3 = _marks(w2, signs, complement), _marks(w3, signs, complement)
    if NVIDIA and DTYPE.primitive_bitwidth == 16:
        w = _halves(w0, w1, w2, w3, BITS)
        w = flat_groups(tl.join(w.to(tl.uint16), (w >> 16).to(tl.uint16)), w0, 128 // BITS)
        e = tl.inline_asm_elementwise(  # nothing, with `layout` at hand
            "mov.b32 $0, $1;", "=r,r,r", [w, layout.to(tl.uint16)], dtype=tl.uint16, is_pure=True, pack=2
        ).to(DTYPE, bitcast=True)
    else:
        top = lanes_at_top(w0, w1, w2, w3, BITS)
        if tl.float64 == DTYPE:  # without `layout`: bytes on the way to a number make compilers fail at dots of fp64
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
    """The sums, as something that is used in every step: see `tiles` on what else Triton would leave under way."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _sums(
    x, v, n, stride_xv, stride_xi, scale, column, row, count, never, k0, k1, signs, complement,
    FORWARD: tl.constexpr, BITS: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr, SPAN: tl.constexpr,
    MODE: tl.constexpr, EVEN: tl.constexpr, NVIDIA: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The sum over `count` inner numbers, from column `column` and row `row` of the sketch on: [V, OUTER]."""
    V: tl.constexpr = v.shape[0]
    L: tl.constexpr = 128 // BITS
    SUM: tl.constexpr = tl.float64 if MODE == FP64 else tl.float32
    HALF: tl.constexpr = tl.float16 if MODE == FP16_PAIR else tl.bfloat16
    DTYPE: tl.constexpr = x.dtype.element_ty if (MODE == NATIVE) | (MODE == FP64) else HALF
    # Entries as the first factor: H200, 8 vectors 1.35 times as fast (1.4 in fp32), many, of 16 bits, 1.02 to 1.05. (In
    # Y S slower.)
    ROWS_FIRST: tl.constexpr = ((MODE == NATIVE) | (V <= FEW)) & (MODE != FP64) & FORWARD
    total = tl.zeros((OUTER, V) if ROWS_FIRST else (V, OUTER), SUM)
    acc = tl.zeros_like(total)
    layout = _layout(x, never, INNER if FORWARD else OUTER, OUTER if FORWARD else INNER, BITS, INTERPRETED)
    x += v[:, None] * stride_xv
    for part in range(0, count, SPAN):
        for start in range(part, tl.minimum(part + SPAN, count), INNER):
            i = start + tl.arange(0, INNER)
            address = x + (i.to(tl.int64) * stride_xi)[None, :]
            keep = (v < n)[:, None] & (i < count)[None, :]
            z = tl.load(address) if EVEN else tl.load(address, mask=keep, other=0.0)
            if FORWARD:
                j = column + start + tl.arange(0, INNER)
                tile = entries(
                    j, row // L + tl.arange(0, OUTER // L), layout, k0, k1, signs, complement, BITS, DTYPE, NVIDIA
                )
            else:
                call = (row + start) // L + tl.arange(0, INNER // L)
                j = column + tl.arange(0, OUTER)
                tile = tl.trans(entries(j, call, layout, k0, k1, signs, complement, BITS, DTYPE, NVIDIA))
            if MODE == FP64:
                if NVIDIA:
                    acc = tl.dot(z, tile, acc, out_dtype=tl.float64)
                else:  # not every compiler has dots of fp64
                    acc += tl.sum(z[:, :, None] * tile[None, :, :], 1)
            else:
                if ROWS_FIRST and NVIDIA:
                    acc = _complete(acc)
                acc = multiply(z, scale, tile, acc, MODE, ROWS_FIRST, INTERPRETED)
        if SPAN < WHOLE:
            total += acc
            acc = tl.zeros_like(total)
    if SPAN < WHOLE:
        acc = total
    return tl.trans(acc) if ROWS_FIRST else acc


@triton.jit(do_not_specialize=["seed", "feature_offset", "signs", "complement", "inner_per_split", "half_scale"])
def multiply_iid(
    x,
    out,
    scales,
    n,
    inner,
    outer,
    stride_xv,
    stride_xi,
    stride_os,
    stride_ov,
    stride_oo,
    seed: tl.int64,
    feature_offset: tl.int64,
    signs: tl.int64,
    complement: tl.int64,
    inner_per_split: tl.int64,
    half_scale: tl.float64,
    FORWARD: tl.constexpr,
    BITS: tl.constexpr,
    V: tl.constexpr,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
    SPAN: tl.constexpr,
    MODE: tl.constexpr,
    EVEN: tl.constexpr,
    ALIGN: tl.constexpr,
    FINAL: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    NVIDIA: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """out[split, v, o] = sum over a split's inner numbers i of x[v, i] times twice the entry of (o, i).

    Grid: (blocks of OUTER * blocks of V vectors, splits). `signs` and `complement` are those of `iid_law.Lanes`. A
    partial sum (FINAL = False) is stored as it is; else it is scaled, added to `out` where ACCUMULATE, and rounded to
    out's dtype. `scales` (n), of `scale_vectors`, is read where MODE is FP16_PAIR. EVEN : INNER divides `inner`.
    ALIGN : divides `inner` and stride_xv, where x's inner numbers are neighbours.
    """
    k0, k1 = seed_words(seed)
    signs, complement = signs.to(tl.uint32), complement.to(tl.uint32)
    blocks = tl.cdiv(outer, OUTER)
    block = (tl.program_id(0) % blocks).to(tl.int64)
    split = tl.program_id(1).to(tl.int64)
    rows_v = (tl.program_id(0) // blocks).to(tl.int64) * V + tl.arange(0, V)
    v = tl.minimum(rows_v, n - 1) if EVEN else rows_v
    o = block * OUTER + tl.arange(0, OUTER)
    if ALIGN > 1:  # for the compiler to see
        stride_xv = stride_xv // ALIGN * ALIGN
        inner = inner // ALIGN * ALIGN
    begin = split * (inner_per_split // INNER * INNER)
    # Inner numbers are counted from the split's first, with 32 bits; the pointer and the law's index have 64.
    count = tl.minimum(inner - begin, inner_per_split // INNER * INNER).to(tl.int32)
    never = tl.minimum(n, 0).to(tl.int32)  # 0
    x += begin * stride_xi
    if FORWARD:
        column, row = feature_offset + begin, (block * OUTER).to(tl.int32)
    else:
        column, row = feature_offset + block * OUTER, begin.to(tl.int32)
    scale = 1.0
    if MODE == FP16_PAIR:
        scale = tl.load(scales + v, mask=v < n, other=1.0)
    acc = _sums(
        x, v, n, stride_xv, stride_xi, scale, column, row, count, never, k0, k1, signs, complement,
        FORWARD, BITS, OUTER, INNER, SPAN, MODE, EVEN, NVIDIA, INTERPRETED,
    )  # fmt: skip
    if MODE == FP16_PAIR:
        acc *= inverse(scale)[:, None]
        overflown = tl.max(tl.max((tl.abs(acc) < float("inf")).to(tl.int32) ^ 1, 1), 0)
        if overflown != 0:  # a number far larger than the sampled ones: see `parts`
            acc = _sums(
                x, v, n, stride_xv, stride_xi, 1.0, column, row, count, never, k0, k1, signs, complement,
                FORWARD, BITS, OUTER, INNER, SPAN, BF16_TRIPLE, EVEN, NVIDIA, INTERPRETED,
            )  # fmt: skip
    keep = (rows_v < n)[:, None] & (o < outer)[None, :]
    out += split * stride_os + rows_v[:, None] * stride_ov + o[None, :] * stride_oo
    if FINAL:
        acc *= tl.full((), half_scale, tl.float64).to(acc.dtype)
        if ACCUMULATE:
            acc += tl.load(out, mask=keep, other=0.0)
    tl.store(out, acc.to(out.dtype.element_ty), mask=keep)
