"""First and last steps of the portable kernels: which tile and vectors a program owns, and how it stores results."""

from __future__ import annotations

import triton
import triton.language as tl

from .law import part_start


@triton.jit
def start_dependents(PROGRAMMATIC_LAUNCH: tl.constexpr):
    """With PROGRAMMATIC_LAUNCH (NVIDIA), let the next kernel, which waits for its data, start while this one runs."""
    if PROGRAMMATIC_LAUNCH:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PROGRAMMATIC_LAUNCH: tl.constexpr):
    """With PROGRAMMATIC_LAUNCH, wait until the previous kernel has ended and its stores are visible."""
    if PROGRAMMATIC_LAUNCH:
        tl.extra.cuda.gdc_wait()


@triton.jit
def tile_and_vectors(N_TILES: tl.constexpr, BLOCK_VECTORS: tl.constexpr):
    """(tile, vectors [BLOCK_VECTORS]) of this program; grid axis 0 has N_TILES * blocks of vectors."""
    m = tl.program_id(0) % N_TILES
    return m, (tl.program_id(0) // N_TILES).to(tl.int64) * BLOCK_VECTORS + tl.arange(0, BLOCK_VECTORS)


@triton.jit
def stack_tile_and_vectors(GEOMETRY: tl.constexpr, BLOCK_VECTORS: tl.constexpr):
    """(stack, tile, vectors) of this program; the tiles of all fused stacks run side by side, on the same vectors."""
    m, v = tile_and_vectors(GEOMETRY.n_tiles * GEOMETRY.fused, BLOCK_VECTORS)
    stack = m // GEOMETRY.n_tiles
    if GEOMETRY.fused > 1:
        m = m % GEOMETRY.n_tiles
    return stack.to(tl.uint32), m.to(tl.uint32), v


@triton.jit
def rows_of_tile(m, GEOMETRY: tl.constexpr):
    """(first, end) of the rows of the stack that tile m owns."""
    m = m.to(tl.int64)
    return part_start(m, GEOMETRY.k, GEOMETRY.n_tiles), part_start(m + 1, GEOMETRY.k, GEOMETRY.n_tiles)


@triton.jit
def known_multiple(n, ALIGN: tl.constexpr):
    """n, a multiple of ALIGN, in a form that tells the compiler so."""
    return n if ALIGN == 1 else n // ALIGN * ALIGN


@triton.jit
def scalar(value, DTYPE: tl.constexpr):
    """An argument of type fp64 as a scalar of DTYPE. Triton's interpreter would convert it to fp32 first."""
    return tl.full((), value, tl.float64).to(DTYPE)


@triton.jit
def store_result(values, pointers, keep, ACCUMULATE: tl.constexpr):
    """Store `values` where `keep`, or with ACCUMULATE add them to what is stored; rounded once."""
    if ACCUMULATE:
        values += tl.load(pointers, mask=keep)
    tl.store(pointers, values.to(pointers.dtype.element_ty), mask=keep)


@triton.jit
def store_sums(sums, pointers, keep, scale, SINGLE_SPLIT: tl.constexpr, ACCUMULATE: tl.constexpr):
    """Store the sums of a split where `keep`: unscaled or, with SINGLE_SPLIT, as the scaled result."""
    if SINGLE_SPLIT:
        sums *= scale
    store_result(sums, pointers, keep, ACCUMULATE and SINGLE_SPLIT)
