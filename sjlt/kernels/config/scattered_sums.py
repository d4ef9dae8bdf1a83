"""Eligibility and launches of `project_scattered`: pure functions of a `Product`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from .product import SCRATCH_BYTES, Product, is_power_of_two, next_power_of_two, vectors_contiguous

MIN_BYTES = 4 << 20  # of X; for fewer, the launch itself takes most of the time
MAX_VECTORS = 32
MAX_MANY_VECTORS, MAX_MANY_ROWS = 128, 64  # vectors, and rows per tile, for `eligible_many`
MAX_NNZ = 16  # over all stacks; the table grows with it
WARPS, LANES, ENTRY_BYTES = 4, 32, 16
SUMS_BYTES = 32 << 10  # for the sums of a program, if possible
MAX_SUMS_BYTES = 96 << 10
MAX_PROGRAMS = 8  # per multiprocessor
TRITON_BYTES = 1 << 10  # shared memory that Triton and the device reserve
MAX_TERMS = 1024  # per sum of one part
MAX_LOADED = 8  # elements that a lane loads at a time
MAX_PROGRAM_VECTORS = 8
SECTOR_BYTES = 32  # of memory; a program reads whole sectors of contiguous vectors if it can
WORD_BYTES = 8  # the widest access


@dataclass(frozen=True)
class ScatterConstants:
    """The constants of `project_scattered`.

    Attributes
    ----------
    vectors : int
        Vectors per program.
    team : int
        Warps that share sums and divide the sub-blocks among them.
    shared_sums : bool
        Whether all warps share sums, and work on one group of chunks between two barriers.
    replicas : int
        Copies of the sums of a team, if a group of chunks has fewer than LANES columns.
    parts : int
        Copies of the sums of a program.
    rows : int
        Rows of the sketch, rounded up.
    chunks : int
        Chunks per batch.
    log_parts : int
        A chunk has 2^log_parts table entries per sub-block, one for every 32 columns.
    loaded : int
        Blocks of 32 columns that a warp loads at a time.
    together : int
        Blocks among them whose sums a warp loads together; they lie in one group of chunks.
    width : int
        Contiguous vectors that one access reads; 0 if rows of X are contiguous.
    shared_bytes : int
        Shared memory of a program.
    """

    vectors: int
    team: int
    shared_sums: bool
    replicas: int
    parts: int
    rows: int
    chunks: int
    log_parts: int
    loaded: int
    together: int
    width: int
    shared_bytes: int


@dataclass(frozen=True)
class ScatteredSums:
    """A launch of `project_scattered`.

    Attributes
    ----------
    kernel : ScatterConstants
    splits, batches_per_split : int
        Number of parts that the sums are split into, and of batches of chunks in each part.
    terms : int
        Maximal number of terms in one component of a split, over all parts of the program.
    """

    kernel: ScatterConstants
    splits: int
    batches_per_split: int
    terms: int


def eligible(product: Product) -> bool:
    """Whether the kernel can run a product of few vectors, and is faster than others."""
    return product.n <= MAX_VECTORS and _gains(product)


def eligible_many(product: Product) -> bool:
    """Whether the kernel can run a product of more contiguous vectors, and is faster than the portable kernels.

    It is if tiles have few rows: `row_gather` and `tensor_core` always take the time of 128 rows. The caller has found
    that `hopper_codes` is not eligible.
    """
    tile_rows = product.k // product.geometry.n_tiles
    in_range = MAX_VECTORS < product.n <= MAX_MANY_VECTORS and tile_rows <= MAX_MANY_ROWS
    return in_range and not _are_rows(product) and _gains(product)


def _gains(product: Product) -> bool:
    """Whether the kernel can run a product and is faster than others, the number of vectors aside."""
    return (
        product.device.asynchronous_copies
        and not product.adjoint
        and product.n * product.d * product.item_bytes >= MIN_BYTES
        and product.d < 1 << 30
        and product.nnz * product.stacks <= MAX_NNZ
        and not is_in_registers(product)
        and (_are_rows(product) or _are_columns(product))
        and _launch(product) is not None
    )


def is_in_registers(product: Product) -> bool:
    """Whether `few_vectors`, which gathers and keeps sums in registers, is faster (see its rules in `exact`)."""
    return is_power_of_two(product.k, product.nnz) and product.stacks == 1 and product.dtype != "float64"


def _are_rows(product: Product) -> bool:
    """Whether the elements of a vector are contiguous in memory."""
    return product.x_strides[1] == 1 and (product.n == 1 or product.x_strides[0] > 1)


def _are_columns(product: Product) -> bool:
    """Whether the elements of a feature are contiguous in memory, and `few_vectors` does not gather them without masks.

    With nnz 1, (32, 1.5e6) -> 64 in fp32 takes 1.6 times the memory floor with `few_vectors` and 3.5 here (H200).
    """
    single = product.nnz * product.stacks == 1 and product.n > MAX_VECTORS // 2
    return vectors_contiguous(product) and product.x_strides[0] == 1 and not single


def launch(product: Product) -> ScatteredSums:
    """The launch for an eligible product."""
    chosen = _launch(product)
    assert chosen is not None
    return chosen


@lru_cache(maxsize=4096)
def _launch(product: Product) -> ScatteredSums | None:
    """The launch, or None if sums do not fit in shared memory or partial sums in SCRATCH_BYTES or 1/16 of the data."""
    kernel = _constants(product)
    if kernel is None:
        return None
    multiprocessors, blocks = product.device.multiprocessors, -(-product.n // kernel.vectors)
    batches = _batches(product, kernel.chunks)
    while kernel.chunks > LANES and batches * blocks < multiprocessors * 2:
        smaller = _with_chunks(product, kernel, kernel.chunks // 2)
        if smaller.chunks == kernel.chunks:
            break
        kernel, batches = smaller, _batches(product, smaller.chunks)
    resident = min(MAX_PROGRAMS, product.device.shared_memory // (kernel.shared_bytes + TRITON_BYTES))
    # Each group of chunks contributes at most one term to a component, which is added to one of the program's parts.
    terms = -(-kernel.chunks // kernel.parts) >> product.geometry.log_group
    longest = max(1, MAX_TERMS // max(1, terms))
    per_split = min(-(-batches // max(1, resident * multiprocessors // blocks)), longest)
    splits = -(-batches // per_split)
    memory = 4 * splits * product.n * product.k * product.stacks
    if memory > max(SCRATCH_BYTES, product.n * product.d * product.item_bytes // 16):
        return None
    return ScatteredSums(kernel, splits, per_split, per_split * max(1, kernel.chunks >> product.geometry.log_group))


def _batches(product: Product, chunks: int) -> int:
    """The number of batches of `chunks` chunks that contain the columns."""
    log_batch = product.geometry.log_chunk + chunks.bit_length() - 1
    return ((product.offset + product.d - 1) >> log_batch) - (product.offset >> log_batch) + 1


def _constants(product: Product) -> ScatterConstants | None:
    """The constants of the kernel, or None if shared memory does not hold the sums of one vector."""
    log_chunk, log_group = product.geometry.log_chunk, product.geometry.log_group
    group, nnz, item = 1 << log_chunk + log_group, product.nnz * product.stacks, max(4, product.item_bytes)
    rows = _rounded_up(product.k * product.stacks)
    width, max_vectors = 0, MAX_PROGRAM_VECTORS
    if not _are_rows(product):
        word = WORD_BYTES // product.item_bytes
        width = math.gcd(word, product.n, product.x_strides[1]) if product.data_aligned else 1
        max_vectors = max(max_vectors, SECTOR_BYTES // product.item_bytes)
    vectors = min(max_vectors, next_power_of_two(product.n))
    replicas = max(1, LANES // group)
    while vectors > 1 and replicas * rows * item * vectors > SUMS_BYTES:
        vectors //= 2
    sums_bytes, team, shared_sums = replicas * rows * item * vectors, 1, False
    if sums_bytes > MAX_SUMS_BYTES:
        return None
    if WARPS * sums_bytes > SUMS_BYTES:
        shared_sums = group >= WARPS * LANES
        if not shared_sums:
            while team < WARPS and nnz % (2 * team) == 0 and WARPS // team * sums_bytes > SUMS_BYTES:
                team *= 2
            while vectors > 1 and WARPS // team * sums_bytes > MAX_SUMS_BYTES:
                vectors, sums_bytes = vectors // 2, sums_bytes // 2
    parts = replicas if shared_sums else WARPS // team * replicas
    loaded, rounds = max(1, MAX_LOADED // vectors), nnz // team
    together = max(1, min(loaded, group // (LANES * (WARPS if shared_sums else 1)), 4 // min(4, rounds)))
    width = min(width, vectors)
    kernel = ScatterConstants(vectors, team, shared_sums, replicas, parts, rows, 0, 0, loaded, together, width, 0)
    return _with_chunks(product, kernel, WARPS * LANES)


def _with_chunks(product: Product, kernel: ScatterConstants, chunks: int) -> ScatterConstants:
    """The constants of a kernel with batches of at least `chunks` chunks."""
    log_chunk, nnz, item = product.geometry.log_chunk, product.nnz * product.stacks, max(4, product.item_bytes)
    log_parts, step = max(0, log_chunk - 5), WARPS // kernel.team * LANES
    while chunks << log_chunk < step * kernel.together:
        chunks *= 2
    loaded = max(kernel.together, min(kernel.loaded, (chunks << log_chunk) // step))
    skew = LANES // kernel.replicas if kernel.replicas > 1 else 0
    table = (chunks << log_parts) * nnz * ENTRY_BYTES
    shared = table + kernel.parts * (kernel.vectors * kernel.rows + skew) * item
    shared = -(-shared // 2048) * 2048 + ENTRY_BYTES
    return replace(kernel, chunks=chunks, log_parts=log_parts, loaded=loaded, shared_bytes=shared)


def _rounded_up(rows: int) -> int:
    """`rows` rounded up to 32 or more with three significant bits, so that few kernels are compiled."""
    step = max(LANES, next_power_of_two(rows) // 8)
    return -(-rows // step) * step
