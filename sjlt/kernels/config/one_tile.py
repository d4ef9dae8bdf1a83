"""Eligibility and launches of the kernels of `portable.one_tile`: pure functions of a `Product`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .arithmetic import BF16, CHUNKS_PER_SUM, MAX_CHUNKS, NATIVE, choose_mode
from .product import (
    GROUPS_PER_STEP,
    SCRATCH_BYTES,
    Product,
    alignment,
    count_groups,
    is_power_of_two,
    next_power_of_two,
)

STEP = 64  # columns multiplied at a time
MIN_ELEMENTS = 1 << 18  # of X; for fewer, a second launch takes longer than generating entries repeatedly
MIN_VECTORS = 64  # for fewer, storing the entries takes longer than generating each of them once or twice
MAX_ENTRY_BYTES = SCRATCH_BYTES // 4 * 3  # the rest of SCRATCH_BYTES is for partial sums
MIN_ROWS = 32  # of a block of entries
PROGRAMS = 2  # per multiprocessor
MIN_SPLIT_COLUMNS = 4 * STEP


@dataclass(frozen=True)
class OneTile:
    """A launch of `write_entries` and of `project_one_tile` or `adjoint_one_tile`.

    Attributes
    ----------
    block_vectors, rows, mode, chunked_sum, align
        Constants of the kernels.
    splits, chunks_per_split : int
        Number of parts that the columns are split into, and of chunks in each part.
    chunks_per_sum : int
        If chunked_sum, the number of chunks in one sum on tensor cores.
    num_warps, num_stages : int
        Compiler options.
    """

    block_vectors: int
    rows: int
    mode: int
    chunked_sum: bool
    align: int
    splits: int
    chunks_per_split: int
    chunks_per_sum: int
    num_warps: int
    num_stages: int


def eligible(product: Product) -> bool:
    """Whether the kernels can run a product and, judging by its size and geometry, are faster than others."""
    return (
        product.geometry.n_tiles == 1
        and product.dtype != "float64"
        and not is_power_of_two(product.k, product.nnz)
        and product.n >= MIN_VECTORS
        and product.n * product.d >= MIN_ELEMENTS
        and product.d < 1 << 30
        and _entry_bytes(product) <= MAX_ENTRY_BYTES
    )


def launch(product: Product) -> OneTile:
    """The launch for an eligible product."""
    adjoint, chunks, mode = product.adjoint, count_groups(product), choose_mode(product)
    chunk, rows = 1 << product.geometry.log_chunk, _rows(product)
    max_chunks = {NATIVE: MAX_CHUNKS, BF16: GROUPS_PER_STEP}.get(mode, CHUNKS_PER_SUM)
    block_vectors = 128 if mode == NATIVE and product.n > 64 else 64
    splits, per_split = _split(product, block_vectors, chunks)
    step_bytes = STEP * (0 if adjoint else block_vectors * product.item_bytes) + STEP * rows * 2
    return OneTile(
        block_vectors=block_vectors,
        rows=rows,
        mode=mode,
        chunked_sum=not adjoint and per_split > max_chunks,
        align=alignment(product, product.d, product.x_strides, math.gcd(chunk, product.offset)),
        splits=splits,
        chunks_per_split=per_split,
        chunks_per_sum=max(max_chunks, -(-STEP // chunk)),
        num_warps=8 if block_vectors * rows > 8192 else 4,
        num_stages=max(2, min(4, product.device.shared_memory // PROGRAMS // step_bytes)),
    )


def _rows(product: Product) -> int:
    """Rows of a block of entries."""
    return max(MIN_ROWS, next_power_of_two(product.k))


def _entry_bytes(product: Product) -> int:
    """Bytes of the stored entries."""
    return (count_groups(product) << product.geometry.log_chunk) * _rows(product) * 2


def _split(product: Product, block_vectors: int, chunks: int) -> tuple[int, int]:
    """(splits, chunks per split, in whole steps), so that every multiprocessor has enough programs.

    An adjoint does not sum over columns: its splits are parts of the result.
    """
    unit = max(1, MIN_SPLIT_COLUMNS >> product.geometry.log_chunk)
    blocks = -(-product.n // block_vectors)
    splits = max(1, min(PROGRAMS * product.device.multiprocessors // blocks, chunks // unit))
    if not product.adjoint:
        splits = max(1, min(splits, (SCRATCH_BYTES - MAX_ENTRY_BYTES) // (4 * product.n * product.k)))
    step_chunks = max(1, STEP >> product.geometry.log_chunk)
    per_split = -(-chunks // splits)
    per_split = -(-per_split // step_chunks) * step_chunks
    return -(-chunks // per_split), per_split
