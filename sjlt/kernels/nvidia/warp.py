"""Instructions by which the lanes of a warp work together, and others that Triton does not offer."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def hide(word):
    """`word`, unknown to the compiler, which therefore computes what depends on it where it is used."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [word], word.dtype, False, 1)


@triton.jit
def ballot(keep):
    """A word, in all lanes, whose bit i says whether `keep` is true in lane i."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }", "=r,r", [keep.to(tl.int32)],
        tl.int32, False, 1,
    )  # fmt: skip


@triton.jit
def count_bits(word):
    """The number of ones of each word."""
    return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [word], tl.int32, True, 1)


@triton.jit
def permute_bytes(low, high, selector):
    """Four of the eight bytes of two words: each hexadecimal digit of `selector`, the last one first, names a byte."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, (low * 0).to(tl.int32) + selector], tl.uint32, True, 1
    )


@triton.jit
def multiply_add_high(a, b, c):
    """The higher word of the product of words a and b, plus c."""
    return tl.inline_asm_elementwise(
        "mad.hi.u32 $0, $1, $2, $3;", "=r,r,r,r", [a, (a * 0).to(tl.uint32) + b, c], tl.uint32, True, 1
    )


@triton.jit
def multiply_add(a, b0, b1, z, BF16: tl.constexpr):
    """z + a b, for matrices a (16, 16), b (16, 8) and z (16, 8), as `mma.sync` distributes them over the lanes."""
    operands = [a[0], a[1], a[2], a[3], b0, b1, z[0], z[1], z[2], z[3]]
    types: tl.constexpr = (tl.float32, tl.float32, tl.float32, tl.float32)
    if BF16:
        z = tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, "
            "{$10, $11, $12, $13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", operands, types, True, 1,
        )  # fmt: skip
    else:
        z = tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, "
            "{$10, $11, $12, $13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", operands, types, True, 1,
        )  # fmt: skip
    return z
