"""Sums in shared memory, to which lanes add signed columns: how they begin, and how copies of them are added."""

from __future__ import annotations

import triton
import triton.language as tl

from .shared_memory import load_number, load_vector, store_words


@triton.jit
def clear_sums(begin, size, thread, THREADS: tl.constexpr):
    """Write zeros to `size` bytes, a multiple of 16."""
    zero = (thread * 0).to(tl.uint32)
    for first in range(0, size, THREADS * 16):
        store_words(begin + tl.minimum(first + thread * 16, size - 16), zero, zero, zero, zero)


@triton.jit
def sign_of(word, one, DTYPE: tl.constexpr):
    """-1 where the highest bit of `word` is 1, otherwise 1; `one` has the bits of 1 in fp32."""
    if DTYPE.primitive_bitwidth == 64:
        sign = 1.0 - 2.0 * (word >> 31).to(tl.float64)
    else:
        sign = ((word & 0x80000000) | one).to(tl.float32, bitcast=True)
    return sign


@triton.jit
def sums_at(address, DTYPE: tl.constexpr, COUNT: tl.constexpr):
    """The COUNT adjacent sums of DTYPE at each address, at most 16 bytes, as a tuple. Addresses may be equal."""
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    numbers = ()
    if COUNT * ITEM == 16:
        numbers += load_vector(address, DTYPE)
    else:
        for e in tl.static_range(COUNT):
            numbers += (load_number(address + e * ITEM, DTYPE),)  # type: ignore[assignment]
    return numbers


@triton.jit
def add_where(keep, totals, numbers):
    """The tensors of the first tuple, plus those of the second where `keep`."""
    after = ()
    for e in tl.static_range(len(totals)):
        after += (tl.where(keep, totals[e] + numbers[e], totals[e]),)  # type: ignore[assignment]
    return after


@triton.jit
def add_sums(totals, numbers):
    """The sums of the tensors of two tuples."""
    after = ()
    for e in tl.static_range(len(totals)):
        after += (totals[e] + numbers[e],)  # type: ignore[assignment]
    return after
