"""Wide reads and writes of global memory by every thread on its own.

For its own loads and stores, Triton chooses which thread has which element, and moves values among threads if others
have them. These functions leave every element where it is, and so are for tensors of which a thread has few.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_four(pointer):
    """Load four adjacent 32-bit words from each `pointer`, a multiple of 16; they must not change during the kernel."""
    return tl.inline_asm_elementwise(
        "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", [pointer],
        (tl.int32, tl.int32, tl.int32, tl.int32), False, 1,
    )  # fmt: skip


@triton.jit
def load_four_where(pointer, keep):
    """Load four adjacent unsigned words from each `pointer`, a multiple of 16, where `keep`; zeros elsewhere."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $5, 0; mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; "
        "@p ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4]; }",
        "=&r,=&r,=&r,=&r,l,r", [pointer, keep.to(tl.int32)], (tl.uint32, tl.uint32, tl.uint32, tl.uint32), False, 1,
    )  # fmt: skip


@triton.jit
def load_two(pointer):
    """Load two adjacent 32-bit words from each `pointer`, a multiple of 8; they must not change during the kernel."""
    return tl.inline_asm_elementwise(
        "ld.global.nc.v2.b32 {$0, $1}, [$2];", "=r,=r,l", [pointer], (tl.int32, tl.int32), False, 1
    )


@triton.jit
def load_two_long(pointer):
    """Load two adjacent 64-bit words from each `pointer`, a multiple of 16; they must not change during the kernel."""
    return tl.inline_asm_elementwise(
        "ld.global.nc.v2.b64 {$0, $1}, [$2];", "=l,=l,l", [pointer], (tl.int64, tl.int64), False, 1
    )


@triton.jit
def load_word_or_less(pointer, BYTES: tl.constexpr):
    """Load 2 (zero-extended) or 4 bytes from each `pointer` as a word; they must not change during the kernel."""
    if BYTES == 2:
        half = tl.inline_asm_elementwise("ld.global.nc.b16 $0, [$1];", "=h,l", [pointer], tl.int16, False, 1)
        word = half.to(tl.int32) & 0xFFFF
    else:
        word = tl.inline_asm_elementwise("ld.global.nc.b32 $0, [$1];", "=r,l", [pointer], tl.int32, False, 1)
    return word


@triton.jit
def load_long(pointer):
    """Load a 64-bit word from each `pointer`; it must not change during the kernel."""
    return tl.inline_asm_elementwise("ld.global.nc.b64 $0, [$1];", "=l,l", [pointer], tl.int64, False, 1)


@triton.jit
def store_four(pointer, words, keep):
    """Store a tuple of four 32-bit words to each `pointer`, a multiple of 16, where `keep`."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p st.global.v4.b32 [$1], {$3, $4, $5, $6}; mov.u32 $0, 0; }",
        "=r,l,r,r,r,r,r", [pointer, keep.to(tl.int32), words[0], words[1], words[2], words[3]], tl.int32, False, 1,
    )  # fmt: skip


@triton.jit
def store_two(pointer, words, keep):
    """Store a tuple of two words of 32 or 64 bits to each `pointer`, a multiple of their size, where `keep`."""
    if words[0].dtype.primitive_bitwidth == 64:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p st.global.v2.b64 [$1], {$3, $4}; mov.u32 $0, 0; }",
            "=r,l,r,l,l", [pointer, keep.to(tl.int32), words[0], words[1]], tl.int32, False, 1,
        )  # fmt: skip
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p st.global.v2.b32 [$1], {$3, $4}; mov.u32 $0, 0; }",
            "=r,l,r,r,r", [pointer, keep.to(tl.int32), words[0], words[1]], tl.int32, False, 1,
        )  # fmt: skip
