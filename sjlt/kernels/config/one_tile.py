"""Eligibility and launches of the kernels of `portable.one_tile`: pure functions of a `Product`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...laws import exact as law
from .arithmetic import BF16, BF16_TRIPLE, FP16_PAIR, MAX_CHUNKS, NATIVE, choose_mode
from .gathers import MAX_SINGLE_BYTES
from .product import (
    GROUPS_PER_STEP,
    SCRATCH_BYTES,
    VECTOR_BYTES,
    Product,
    alignment,
    count_groups,
    is_power_of_two,
    next_power_of_two,
    vector_alignment,
    vectors_contiguous,
)

STEP = 64  # columns multiplied at a time
BLOCK_VECTORS = 64  # of a program, but twice as many for `_doubles_vectors`
MIN_ELEMENTS = 1 << 18  # of X; for fewer, a second launch takes longer than generating entries repeatedly
MIN_VECTORS = 65  # for fewer, the entries are larger than the data
MAX_ENTRY_BYTES = SCRATCH_BYTES // 4 * 3  # the rest of SCRATCH_BYTES is for partial sums
MIN_ROWS = 32  # of a block of entries
PROGRAMS = 2  # per multiprocessor. With 3, X Sᵀ with generated entries takes 1.06 times as long (30 products, H100).
ADJOINT_PROGRAMS = 6  # for adjoints: mostly 0.6 to 1.0 of the time with 2 (44 products, H200)
MIN_SPLIT_COLUMNS = 4 * STEP

# For small products, whose programs generate the entries
SUB_BLOCKS = 8  # the largest nnz; one compiled kernel serves all
SMALL_STAGES = 3  # compiler option
MIN_SMALL_VECTORS, MIN_SMALL_FEATURES = 16, STEP
MAX_SMALL = ((32, 1 << 22), (64, 1 << 21), (128, 1 << 20))  # pairs (largest k, most elements of X)
MAX_SMALL_FEW = 1 << 21  # elements of X if it has at most half a block of vectors
# As MAX_SMALL, for elements of the result of an adjoint; for at least MIN_VECTORS vectors, and for fewer.
MAX_SMALL_ADJOINT = ((32, 1 << 22), (64, 1 << 20))
MAX_SMALL_ADJOINT_FEW = ((32, 1 << 24), (64, 1 << 21))
# Elements of A with more than half a block of vectors; and, except on Hopper, where codes are faster, of X with at most
# two, k <= MIN_ROWS / 2, and nnz > 4: X (94, 347795) -> 16 with nnz 5 in bf16 takes 144 us here and 62 us from codes.
MAX_SMALL_BLOCK, MAX_SMALL_FEW_COMPONENTS = 1 << 25, 1 << 26
MIN_ADJOINT_NNZ = 3  # for fewer, `adjoint_staged` adds the terms of MIN_VECTORS vectors faster
# Vectors, for `is_narrow`: contiguous with many and with few entries per column, and rows.
MIN_NARROW, MIN_NARROW_FEW_ENTRIES, MIN_NARROW_ROWS = 24, 49, 40
MANY_NARROW_BYTES = 64 << 20  # of A: from here on, k <= MIN_ROWS / 2 is required of few entries per column
MAX_STEPS = 32  # steps that are added to one sum
# n d k, beyond which partial sums of MAX_STEPS steps exceed their share of SCRATCH_BYTES
MAX_NARROW_SUMS = (SCRATCH_BYTES - MAX_ENTRY_BYTES) // 4 * MAX_STEPS * STEP
MAX_SHORT_COLUMNS = 4 * STEP  # up to which sums are not split, because adding the splits takes a launch


@dataclass(frozen=True)
class OneTile:
    """A launch of `project_one_tile` or `adjoint_one_tile` and, if sub_blocks is 0, of `write_entries` before it.

    Attributes
    ----------
    block_vectors, rows, mode, chunked_sum, align, vector_align
        Constants of the kernels.
    sub_blocks : int
        0 if `write_entries` stores the entries; otherwise a constant of `project_one_tile`, which generates them.
    splits, chunks_per_split : int
        Number of parts that the columns are split into, and of chunks in each part.
    num_warps, num_stages : int
        Compiler options.
    """

    block_vectors: int
    rows: int
    mode: int
    chunked_sum: bool
    align: int
    vector_align: int
    sub_blocks: int
    splits: int
    chunks_per_split: int
    num_warps: int
    num_stages: int


def eligible(product: Product) -> bool:
    """Whether the kernels can run a product and, judging by its size and geometry, are faster than others.

    Others are faster for S A with nnz 1 if there is little data and, in fp32 with k > 64, with nnz 1 or 2: (256, 38536)
    -> 69 with nnz 2 takes 3.6 memory floors here and 2.8 with `few_vectors` (H100). In microseconds on an H200, with
    the fastest other portable kernel and here, with nnz 1: (90592, 4096) -> 53 in bf16 215 and 216, (35180, 5545) -> 40
    in fp32 325 and 279, (1024, 69310) -> 16 93 and 88.
    """
    wide = product.k > law.TILE_ROWS // 2 and product.dtype == "float32"
    few_reads = (product.nnz == 1 and product.x_bytes < MAX_SINGLE_BYTES) or (product.nnz <= 2 and wide)
    return (
        product.geometry.n_tiles == 1
        and not (few_reads and not product.adjoint and vectors_contiguous(product))
        and product.dtype != "float64"
        and not is_power_of_two(product.k, product.nnz)
        and product.n >= MIN_VECTORS
        and product.n * product.d >= MIN_ELEMENTS
        and product.d < 1 << 30
        and _entry_bytes(product) <= MAX_ENTRY_BYTES
    )


def is_small(product: Product) -> bool:
    """Whether the kernels should generate the entries, which saves the launch of `write_entries`.

    In microseconds on an H100, with other kernels and with generated entries: (226, 3072) -> 16 in fp32 15 and 13;
    (99, 3839) -> 16 in fp16, contiguous vectors, 23 and 10; (186, 218) -> 32 in fp16 37 and 14; (15167, 64) -> 66 in
    bf16 13 and 11; (22, 82616) -> 32 in fp16 37 and 17. For more data, other kernels are faster: (2484, 1024) -> 64 in
    fp32 19 and 22; (547, 4093) -> 32 in fp16 18 and 22. Adjoints, on an H200, with `adjoint_staged`, with stored and
    with generated entries: (326, 4096) -> 32 with nnz 8 10.0, 13.9, and 8.0; (1312, 384) -> 48 with nnz 4, contiguous
    vectors, 8.6, 13.2, and 7.6; but with nnz 2 (7049, 768) -> 64 12.0, 12.9 by `adjoint_tensor_core`, and 16.7; with
    nnz 4 (9843, 768) -> 18 16, 13, and 22.
    """
    if not _generates(product):
        return False
    fewest = MIN_ADJOINT_NNZ if product.adjoint and product.n >= MIN_VECTORS else 1
    return is_narrow(product) or (product.nnz >= fewest and product.n * product.d <= _max_small(product))


def is_narrow(product: Product) -> bool:
    """Whether at most one block of vectors is projected to so few components that generated entries are fastest.

    In microseconds on an H200, with generated entries and with the fastest other kernel: A (3344532, 64) -> 16 with nnz
    4 in bf16 253 and 477, A (866680, 32) -> 42 with nnz 8 115 and 140, X (64, 1144001) -> 16 with nnz 8 180 and 273;
    but A (954262, 64) -> 32 with nnz 4 in bf16 92 and 74, A (3251787, 35) -> 32 427 and 315, X (64, 1654192) -> 32 in
    fp16 212 and 154.
    """
    n, k, nnz = product.n, product.k, product.nnz
    fits = n * product.d * k <= MAX_NARROW_SUMS
    if product.adjoint or not _generates(product) or not fits or n > BLOCK_VECTORS or k > BLOCK_VECTORS:
        return False
    if vectors_contiguous(product):
        few = k <= (MIN_ROWS if product.x_bytes < MANY_NARROW_BYTES else MIN_ROWS // 2)
        return (nnz > 4 and n >= MIN_NARROW) or (nnz > 1 and few and n >= MIN_NARROW_FEW_ENTRIES)
    return nnz > 4 and n >= MIN_NARROW_ROWS


def _generates(product: Product) -> bool:
    """Whether the kernels can generate the entries of a product, and it has enough vectors and features."""
    return (
        product.geometry.n_tiles == 1
        and product.stacks == 1
        and product.dtype != "float64"
        and not is_power_of_two(product.k, product.nnz)
        and product.nnz <= SUB_BLOCKS
        and product.n >= MIN_SMALL_VECTORS
        and product.d >= MIN_SMALL_FEATURES
    )


def _max_small(product: Product) -> int:
    """The largest number of elements of X for which generating entries is faster."""
    if product.adjoint:
        return _limit(product, MAX_SMALL_ADJOINT if product.n >= MIN_VECTORS else MAX_SMALL_ADJOINT_FEW)
    most = _limit(product, MAX_SMALL)
    if most == 0:
        return 0
    if product.n <= BLOCK_VECTORS // 2:
        most = min(most, MAX_SMALL_FEW)
    elif product.n <= BLOCK_VECTORS:  # codes take the time of 128 vectors: (64, 228558) -> 16 in fp32 66 us, here 39 us
        few_components = vectors_contiguous(product) and product.k <= BLOCK_VECTORS
        most = MAX_SMALL_BLOCK if few_components else 4 * most
    elif product.n <= 2 * BLOCK_VECTORS and product.nnz > 4 and product.k <= MIN_ROWS // 2:
        most = most if product.device.hopper else MAX_SMALL_FEW_COMPONENTS
    width = alignment(product, product.d, product.x_strides, 2)
    if product.item_bytes == 2 and product.x_strides[1] == 1 and width == 1:
        most //= 2  # asynchronous copies, of at least 4 bytes, are not possible
    return most


def _limit(product: Product, limits: tuple[tuple[int, int], ...]) -> int:
    """The elements in the first of `limits`, pairs as in MAX_SMALL, whose k is not exceeded; 0 if all are."""
    return next((elements for k, elements in limits if product.k <= k), 0)


def launch(product: Product) -> OneTile:
    """The launch for an eligible or a small product."""
    adjoint, chunks, mode = product.adjoint, count_groups(product), choose_mode(product)
    chunk, rows, small = 1 << product.geometry.log_chunk, _rows(product), is_small(product)
    if small and not adjoint and mode == FP16_PAIR:
        mode = BF16_TRIPLE  # does not need a launch of `scale_vectors`
    max_chunks = {NATIVE: MAX_CHUNKS, BF16: GROUPS_PER_STEP}.get(mode, 0)
    align = alignment(product, product.d, product.x_strides, math.gcd(chunk, product.offset))
    most_vectors = BLOCK_VECTORS * (2 if mode == NATIVE and product.n > BLOCK_VECTORS and not small else 1)
    block_vectors = most_vectors if _doubles_vectors(product, rows, align) else BLOCK_VECTORS
    splits, per_split = _split(product, most_vectors, chunks, small)  # twice as many smaller programs run at a time
    step_bytes = STEP * (0 if adjoint else block_vectors * product.item_bytes) + STEP * rows * 2
    return OneTile(
        block_vectors=block_vectors,
        rows=rows,
        mode=mode,
        chunked_sum=not adjoint and per_split > max_chunks,
        align=align,
        vector_align=vector_alignment(product),
        sub_blocks=SUB_BLOCKS if small else 0,
        splits=splits,
        chunks_per_split=per_split,
        num_warps=8 if block_vectors * rows > 8192 and (adjoint or vectors_contiguous(product)) else 4,
        num_stages=SMALL_STAGES if small else max(2, min(4, product.device.shared_memory // PROGRAMS // step_bytes)),
    )


def _doubles_vectors(product: Product, rows: int, align: int) -> bool:
    """Whether programs of twice BLOCK_VECTORS vectors are faster in 16 bits with stored entries.

    They read the entries half as often, but fewer of them share a multiprocessor. In microseconds on an H200, with 64
    and with 128 vectors: X (103939, 512) -> 80 76 and 75 (97 with 8 instead of 4 warps; for contiguous vectors, 4 would
    have too few registers), (508533, 3072) -> 74 1240 and 955; but (45886, 768) -> 64 41 and 49, (584469, 1000) -> 27
    359 and 517, (17155, 1000) -> 50, whose elements are copied one by one, 40 and 73; adjoints Y (26780, 64) -> 512 21
    and 19, but with odd rows of the result (144554, 64) -> 2353 462 and 754.
    """
    if product.adjoint:
        return align * product.item_bytes == VECTOR_BYTES or product.x_strides[1] != 1
    return rows > BLOCK_VECTORS or vectors_contiguous(product)


def _rows(product: Product) -> int:
    """Rows of a block of entries."""
    return max(MIN_ROWS, next_power_of_two(product.k))


def _entry_bytes(product: Product) -> int:
    """Bytes of the stored entries."""
    return (count_groups(product) << product.geometry.log_chunk) * _rows(product) * 2


def _split(product: Product, block_vectors: int, chunks: int, small: bool) -> tuple[int, int]:
    """(splits, chunks per split, in whole steps), so that every multiprocessor has enough programs.

    An adjoint does not sum over columns: its splits are parts of the result.
    """
    unit = max(1, (STEP if small else MIN_SPLIT_COLUMNS) >> product.geometry.log_chunk)
    programs = product.device.multiprocessors * (ADJOINT_PROGRAMS if product.adjoint and not small else PROGRAMS)
    most = -(-chunks // unit) if small else chunks // unit
    splits = max(1, min(programs // -(-product.n // block_vectors), most))
    if not product.adjoint:
        if small:
            splits = max(splits, -(-(chunks << product.geometry.log_chunk) // (MAX_STEPS * STEP)))
        if small and product.d <= MAX_SHORT_COLUMNS:
            splits = 1
        splits = max(1, min(splits, (SCRATCH_BYTES - MAX_ENTRY_BYTES) // (4 * product.n * product.k)))
    step_chunks = max(1, STEP >> product.geometry.log_chunk)
    per_split = -(-chunks // splits)
    per_split = -(-per_split // step_chunks) * step_chunks
    return -(-chunks // per_split), per_split
