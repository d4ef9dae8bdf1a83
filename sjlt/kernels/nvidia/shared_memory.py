"""Reads and writes of shared memory at addresses that each thread computes, which Triton does not offer.

A kernel of this folder has SHARED_BYTES of shared memory after Triton's own; the launcher allocates them
(`backends.triton.launcher`). Addresses are 32-bit integers. Triton does not know of these accesses, so the kernels
must place the barriers between them.
"""

from __future__ import annotations

from pathlib import Path

import triton
import triton.language as tl
from triton.language import core

LIBRARIES = {"sjlt_shared_memory": str(Path(__file__).with_name("shared_memory.ll"))}  # the compiler's `extern_libs`


@core.extern
def shared_begin(size, _semantic=None):
    """The address of the last `size` bytes of the program's shared memory."""
    table = {(core.dtype("int32"),): ("sjlt_shared_begin", core.dtype("int32"))}
    return core.extern_elementwise("sjlt_shared_memory", "", [size], table, is_pure=True, _semantic=_semantic)


@triton.jit
def copy_async(address, source, count, BYTES: tl.constexpr):
    """Start to copy BYTES (4, 8 or 16, aligned) to `address`: `count` bytes from `source`, then zeros."""
    if BYTES == 16:
        tl.inline_asm_elementwise(
            "cp.async.cg.shared.global [$1], [$2], 16, $3; mov.u32 $0, 0;", "=r,r,l,r", [address, source, count],
            tl.int32, False, 1,
        )  # fmt: skip
    elif BYTES == 8:
        tl.inline_asm_elementwise(
            "cp.async.ca.shared.global [$1], [$2], 8, $3; mov.u32 $0, 0;", "=r,r,l,r", [address, source, count],
            tl.int32, False, 1,
        )  # fmt: skip
    else:
        tl.inline_asm_elementwise(
            "cp.async.ca.shared.global [$1], [$2], 4, $3; mov.u32 $0, 0;", "=r,r,l,r", [address, source, count],
            tl.int32, False, 1,
        )  # fmt: skip


@triton.jit
def copy_async_where(address, source, count, keep):
    """As `copy_async` of 16 bytes, where `keep`."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $4, 0; @p cp.async.cg.shared.global [$1], [$2], 16, $3; mov.u32 $0, 0; }",
        "=r,r,l,r,r", [address, source, count, keep.to(tl.int32)], tl.int32, False, 1,
    )  # fmt: skip


@triton.jit
def commit_copies(anything):
    """Close the group of copies started since the last call. `anything` : any integer tensor; not used."""
    tl.inline_asm_elementwise("cp.async.commit_group; mov.u32 $0, $1;", "=r,r", [anything], tl.int32, False, 1)


@triton.jit
def wait_for_copies(anything, PENDING: tl.constexpr):
    """Wait for all groups of this thread's copies but the last PENDING, 0 to 2. `anything` : not used."""
    tl.static_assert(PENDING <= 2)
    if PENDING == 0:
        tl.inline_asm_elementwise("cp.async.wait_group 0; mov.u32 $0, $1;", "=r,r", [anything], tl.int32, False, 1)
    elif PENDING == 1:
        tl.inline_asm_elementwise("cp.async.wait_group 1; mov.u32 $0, $1;", "=r,r", [anything], tl.int32, False, 1)
    else:
        tl.inline_asm_elementwise("cp.async.wait_group 2; mov.u32 $0, $1;", "=r,r", [anything], tl.int32, False, 1)


@triton.jit
def synchronize_warp(anything):
    """Synchronize each warp: its lanes then see what the others have written. `anything` : not used."""
    tl.inline_asm_elementwise("bar.warp.sync 0xffffffff; mov.u32 $0, $1;", "=r,r", [anything], tl.int32, False, 1)


@triton.jit
def load_word(address):
    """Load a 32-bit word from each `address`."""
    return tl.inline_asm_elementwise("ld.shared.b32 $0, [$1];", "=r,r", [address], tl.int32, False, 1)


@triton.jit
def load_half(address):
    """Load 16 bits from each `address` as a word."""
    half = tl.inline_asm_elementwise("ld.shared.b16 $0, [$1];", "=h,r", [address], tl.uint16, False, 1)
    return half.to(tl.uint32)


@triton.jit
def store_word(address, word):
    """Store a 32-bit word to each `address`."""
    tl.inline_asm_elementwise("st.shared.b32 [$1], $2; mov.u32 $0, 0;", "=r,r,r", [address, word], tl.int32, False, 1)


@triton.jit
def store_byte(address, word):
    """Store the lowest byte of a 32-bit word to each `address`."""
    tl.inline_asm_elementwise("st.shared.u8 [$1], $2; mov.u32 $0, 0;", "=r,r,r", [address, word], tl.int32, False, 1)


@triton.jit
def store_byte_where(address, word, keep):
    """Store the lowest byte of a 32-bit word to each `address` where `keep`."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.shared.u8 [$1], $2; mov.u32 $0, 0; }",
        "=r,r,r,r", [address, word, keep.to(tl.int32)], tl.int32, False, 1,
    )  # fmt: skip


@triton.jit
def store_half(address, word):
    """Store the lower 16 bits of a 32-bit word to each `address`."""
    tl.inline_asm_elementwise(
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2; st.shared.b16 [$1], low; mov.u32 $0, 0; }",
        "=r,r,r", [address, word], tl.int32, False, 1,
    )  # fmt: skip


@triton.jit
def store_half_where(address, word, keep):
    """Store the lower 16 bits of a 32-bit word to each `address` where `keep`."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b16 low, high; mov.b32 {low, high}, $2; setp.ne.s32 p, $3, 0; "
        "@p st.shared.b16 [$1], low; mov.u32 $0, 0; }",
        "=r,r,r,r", [address, word, keep.to(tl.int32)], tl.int32, False, 1,
    )  # fmt: skip


@triton.jit
def store_number(address, value):
    """Store an fp32 or fp64 number to each `address`."""
    if value.dtype == tl.float64:
        tl.inline_asm_elementwise(
            "st.shared.f64 [$1], $2; mov.u32 $0, 0;", "=r,r,d", [address, value], tl.int32, False, 1
        )
    else:
        tl.inline_asm_elementwise(
            "st.shared.f32 [$1], $2; mov.u32 $0, 0;", "=r,r,f", [address, value], tl.int32, False, 1
        )


@triton.jit
def load_number(address, DTYPE: tl.constexpr):
    """Load an fp32 or fp64 number from each `address`."""
    if DTYPE.primitive_bitwidth == 64:
        number = tl.inline_asm_elementwise("ld.shared.f64 $0, [$1];", "=d,r", [address], tl.float64, False, 1)
    else:
        number = tl.inline_asm_elementwise("ld.shared.f32 $0, [$1];", "=f,r", [address], tl.float32, False, 1)
    return number


@triton.jit
def add_number(address, value, keep):
    """Add `value` (fp32 or fp64) to the number at `address` where `keep`; all threads must have different addresses."""
    if value.dtype.primitive_bitwidth == 64:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .f64 s; setp.ne.s32 p, $3, 0; @p ld.shared.f64 s, [$1]; @p add.f64 s, s, $2; "
            "@p st.shared.f64 [$1], s; mov.u32 $0, 0; }",
            "=r,r,d,r", [address, value, keep.to(tl.int32)], tl.int32, False, 1,
        )  # fmt: skip
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .f32 s; setp.ne.s32 p, $3, 0; @p ld.shared.f32 s, [$1]; @p add.f32 s, s, $2; "
            "@p st.shared.f32 [$1], s; mov.u32 $0, 0; }",
            "=r,r,f,r", [address, value, keep.to(tl.int32)], tl.int32, False, 1,
        )  # fmt: skip


@triton.jit
def load_vector(address, DTYPE: tl.constexpr):
    """Load four fp32 or two fp64 numbers from each `address`, a multiple of 16, as a tuple."""
    if DTYPE.primitive_bitwidth == 64:
        vector = tl.inline_asm_elementwise(
            "ld.shared.v2.f64 {$0, $1}, [$2];", "=d,=d,r", [address], (tl.float64, tl.float64), False, 1
        )
    else:
        vector = tl.inline_asm_elementwise(
            "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,r", [address],
            (tl.float32, tl.float32, tl.float32, tl.float32), False, 1,
        )  # fmt: skip
    return vector


@triton.jit
def store_vector(address, vector):
    """Store four fp32 or two fp64 numbers, a tuple, to each `address`, a multiple of 16."""
    if vector[0].dtype.primitive_bitwidth == 64:
        tl.inline_asm_elementwise(
            "st.shared.v2.f64 [$1], {$2, $3}; mov.u32 $0, 0;", "=r,r,d,d", [address, vector[0], vector[1]],
            tl.int32, False, 1,
        )  # fmt: skip
    else:
        tl.inline_asm_elementwise(
            "st.shared.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0;", "=r,r,f,f,f,f",
            [address, vector[0], vector[1], vector[2], vector[3]], tl.int32, False, 1,
        )  # fmt: skip


@triton.jit
def load_words(address):
    """Load four 32-bit words from each `address`, a multiple of 16, as a tuple."""
    return tl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", [address],
        (tl.uint32, tl.uint32, tl.uint32, tl.uint32), False, 1,
    )  # fmt: skip


@triton.jit
def store_words(address, w0, w1, w2, w3):
    """Store four 32-bit words to each `address`, a multiple of 16."""
    tl.inline_asm_elementwise(
        "st.shared.v4.b32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0;", "=r,r,r,r,r,r", [address, w0, w1, w2, w3],
        tl.int32, False, 1,
    )  # fmt: skip


@triton.jit
def load_numbers(address, DTYPE: tl.constexpr, COUNT: tl.constexpr):
    """Load COUNT fp32 or fp64 numbers, at most 16 bytes, from each `address`, a multiple of their size, as a tuple."""
    BITS: tl.constexpr = COUNT * DTYPE.primitive_bitwidth
    tl.static_assert(COUNT == 1 or COUNT == 2 or COUNT == 4)
    tl.static_assert(BITS <= 128)
    if COUNT == 1:
        numbers = (load_number(address, DTYPE),)
    elif BITS == 128:
        numbers = load_vector(address, DTYPE)
    else:
        numbers = tl.inline_asm_elementwise(
            "ld.shared.v2.f32 {$0, $1}, [$2];", "=f,=f,r", [address], (tl.float32, tl.float32), False, 1
        )
    return numbers


@triton.jit
def store_numbers(address, numbers):
    """Store the fp32 or fp64 numbers of a tuple to each `address`, as `load_numbers` loads them."""
    COUNT: tl.constexpr = len(numbers)
    if COUNT == 1:
        store_number(address, numbers[0])
    elif COUNT * numbers[0].dtype.primitive_bitwidth == 128:
        store_vector(address, numbers)
    else:
        tl.inline_asm_elementwise(
            "st.shared.v2.f32 [$1], {$2, $3}; mov.u32 $0, 0;", "=r,r,f,f", [address, numbers[0], numbers[1]],
            tl.int32, False, 1,
        )  # fmt: skip


@triton.jit
def prefetch(pointer, keep):
    """Start to read the sector at each `pointer` into the L2 cache, where `keep`."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l,r",
        [pointer, keep.to(tl.int32)], tl.int32, False, 1,
    )  # fmt: skip
