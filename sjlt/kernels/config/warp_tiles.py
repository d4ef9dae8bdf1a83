"""Eligibility and launches of `project_warp_tiles`: pure functions of a `Product`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from . import scattered_sums
from .arithmetic import MAX_CHUNKS
from .product import (
    Product,
    count_groups,
    has_power_of_two_tiles,
    is_power_of_two,
    max_partial_bytes,
    vectors_contiguous,
)
from .scattered_layouts import TRITON_BYTES

MIN_VECTORS, MAX_VECTORS, MIN_NNZ, MAX_NNZ, FEW_NNZ = 8, 64, 3, 8, 4
MIN_BYTES, MAX_FEW_VECTORS, MAX_HALF_VECTORS = 16 << 20, 32, 47  # of X; vectors, see `_least_bytes`
LEAST_BYTES, LEAST_BYTES_OF_TILES, MIN_SHARE = 128 << 20, 40 << 20, 0.55
# For `_eligible_blocks`: most vectors; rows of narrow and of wide tiles; and by how much the estimate is too short.
MAX_BLOCKED_VECTORS, NARROW_ROWS, WIDE_ROWS, NARROW_FACTOR, FACTOR = 512, 64, 96, 1.5, 1.1
ALIGNED_BYTES = 4
# Cycles of a multiprocessor for a step: for each block of 16 rows and 8 vectors, for each entry of a column, for each
# sub-block of a batch, and if runs do not begin at multiples of 16 bytes or vectors are contiguous.
BLOCK_CYCLES, ENTRY_CYCLES, BATCH_CYCLES, SHIFT_CYCLES, COLUMN_CYCLES = 10.5, 1.85, 77, 116, 50
START_CYCLES = 37_900  # to begin and end

LANES, STEP_COLUMNS, UNIT_BYTES, SLOTS = 32, 64, 16, 3
MIN_RUN = 8  # columns that are adjacent in the data, 16 bytes
MAX_BLOCKS, MAX_VECTOR_BLOCKS = 16, 8  # blocks of 16 rows and 8 vectors in the sums of a warp; blocks of vectors
# Registers of a thread, by the number of such blocks. A multiprocessor has enough for 28, 20, 16 and 12 warps.
REGISTERS = {2: 72, 4: 96, 8: 128, 16: 168}
ALL_REGISTERS, MAX_WARPS = 1 << 14, 8  # of each of the four schedulers of a multiprocessor
SCHEDULERS = 4
PARTIAL_SHARE = 4  # partial sums take at most this part of the data's bytes, unless they fit in MIN_PARTIAL_BYTES
MIN_PARTIAL_BYTES = 2 << 20


@dataclass(frozen=True)
class WarpConstants:
    """The constants of `project_warp_tiles`.

    Attributes
    ----------
    row_blocks, vector_blocks : int
        Blocks of 16 rows and of 8 vectors whose sums a warp holds.
    log_parts : int
        A chunk has 2^log_parts table entries per sub-block, one for every 32 columns.
    run : int
        Columns of a step that are adjacent in the data.
    units : int
        Units of 16 bytes that contain a run or, if vectors are contiguous, the vectors of a column.
    align : {2, 4, 8, 16}
        Runs or columns begin at multiples of so many bytes.
    vectors_contiguous : bool
        Whether consecutive elements of the data belong to consecutive vectors; otherwise rows of X are contiguous.
    registers : int
        Limit per thread.
    shared_bytes : int
        Shared memory of a program.
    """

    row_blocks: int
    vector_blocks: int
    log_parts: int
    run: int
    units: int
    align: int
    vectors_contiguous: bool
    registers: int
    shared_bytes: int


@dataclass(frozen=True)
class WarpTiles:
    """A launch of `project_warp_tiles`.

    Attributes
    ----------
    kernel : WarpConstants
    splits, groups_per_split : int
        Number of parts that the sums are split into, and of groups of chunks in each part.
    """

    kernel: WarpConstants
    splits: int
    groups_per_split: int


def eligible(product: Product) -> bool:
    """Whether the kernel can run a product and is, by its estimated time, faster than `scattered_sums`.

    In microseconds on an H200, with the fastest other kernel and here: X (16, 6966866) -> 2048 with nnz 8 in bf16 560
    and 214, X (24, 12342368) -> 512 with nnz 8 1538 and 674, X (13, 1709877) -> 1234 with nnz 4 82 and 58, A (10754278,
    16) -> 22 with nnz 4 271 and 174, X (64, 1321895) -> 2048 with nnz 4 158 and 126. But A (2715541, 64) -> 4096 with
    nnz 4 takes 148 with tensor_core and 228 here, X (100, 6579977) -> 640 with nnz 3 737 from codes and 992, X (8,
    64600909) -> 1984 with nnz 2 705 with scattered_sums and 870, and A (3533592, 64) -> 512 with nnz 3 209 from codes
    and 245, whereas A (1653535, 64) -> 49, in one tile, with nnz 4 takes 115 and 99.
    """
    if product.n < MIN_VECTORS or not MIN_NNZ <= product.nnz <= MAX_NNZ:
        return False
    if product.n > MAX_VECTORS:
        return _eligible_blocks(product)
    if product.x_bytes < _least_bytes(product) or not can_run(product):
        return False
    suits_codes = product.n > MAX_FEW_VECTORS and vectors_contiguous(product) and product.geometry.n_tiles > 1
    suits_tensor_core = is_power_of_two(product.k, product.nnz) and launch(product).kernel.align >= ALIGNED_BYTES
    if suits_codes or (product.nnz <= FEW_NNZ and suits_tensor_core):
        return False
    return scattered_sums.can_run(product) and cycles(product) < scattered_sums.cycles(product)


def _least_bytes(product: Product) -> int:
    """The bytes of X from which on the kernel may be the fastest.

    Codes have blocks of 64 or 128 vectors. From codes and here, in microseconds on an H200, X (48, 1186515) -> 1700
    with nnz 4 takes 182 and 112, (64, 557305) -> 1044 with odd rows 90 and 74, (48, 685408) -> 2519 with nnz 8 106 and
    77; but (64, 177028) -> 1857 with nnz 8 47 and 58, (48, 357779) -> 1702 75 and 78. A warp needs longer if its tile
    meets few groups of chunks: (64, 422489) -> 3750 with nnz 8 96 and 111. For fewer vectors, only portable kernels use
    codes, and only for more data: (40, 344169) -> 690 with nnz 8 takes 72 here, and 153 with tensor cores.
    """
    if product.n <= MAX_FEW_VECTORS:
        return MIN_BYTES
    if has_power_of_two_tiles(product) or _share_of_groups(product) < MIN_SHARE:
        return LEAST_BYTES
    return MIN_BYTES if product.n <= MAX_HALF_VECTORS else LEAST_BYTES_OF_TILES


def _share_of_groups(product: Product) -> float:
    """The share of the groups of chunks that meet a tile, on average."""
    return (1 << product.geometry.log_group) / product.geometry.n_tiles


def _eligible_blocks(product: Product) -> bool:
    """Whether the kernel is the fastest for several blocks of vectors and one tile, without Hopper's kernels.

    In microseconds on an H200, with the fastest other portable kernel and here: X (100, 6302279) -> 22 with nnz 8 2538
    and 845, A (6494764, 65) -> 48 2575 and 713, A (378935, 105) -> 78 153 and 107, A (1341903, 100) -> 26 with nnz 4
    289 and 181. But A (1285427, 100) -> 125 with nnz 8 takes 277 from codes and 307 here, X (100, 118421) -> 29 with
    nnz 4 38 with scattered_sums and 54, A (319395, 74) -> 122 with nnz 3 47 and 96.
    """
    in_range = product.n <= MAX_BLOCKED_VECTORS and product.x_bytes >= MIN_BYTES and product.geometry.n_tiles == 1
    if product.device.hopper or not in_range or is_power_of_two(product.k, product.nnz) or not can_run(product):
        return False
    if vectors_contiguous(product) and product.k > WIDE_ROWS and launch(product).kernel.align > ALIGNED_BYTES:
        return False
    factor = NARROW_FACTOR if product.k <= NARROW_ROWS else FACTOR
    return scattered_sums.can_run(product) and factor * cycles(product) < scattered_sums.cycles(product)


def cycles(product: Product) -> float:
    """The estimated time in cycles, apart from launches; within 10 % (root mean square) of 50 times on an H200."""
    kernel = launch(product).kernel
    batch_columns = LANES * _share_of_groups(product) * (1 << product.geometry.log_chunk)
    step = BLOCK_CYCLES * kernel.row_blocks * kernel.vector_blocks
    step += product.nnz * (ENTRY_CYCLES + BATCH_CYCLES * STEP_COLUMNS / batch_columns)
    step += SHIFT_CYCLES * (kernel.align < UNIT_BYTES) + COLUMN_CYCLES * kernel.vectors_contiguous
    steps = product.d / STEP_COLUMNS * -(-product.n // (8 * kernel.vector_blocks))
    return START_CYCLES + steps * step / product.device.multiprocessors


def can_run(product: Product) -> bool:
    """Whether the kernel can run a product."""
    geometry, contiguous = product.geometry, vectors_contiguous(product)
    return (
        product.device.asynchronous_copies
        and not product.adjoint
        and product.stacks == 1
        and product.item_bytes == 2
        and geometry.log_chunk > 0
        and (geometry.n_tiles == 1 or 1 << geometry.log_chunk >= MIN_RUN)
        and product.d < 1 << 30
        and product.n < 1 << 18
        and product.x_strides[0 if contiguous else 1] == 1
        and _launch(product) is not None
    )


def launch(product: Product) -> WarpTiles:
    """The launch for a product that the kernel can run."""
    chosen = _launch(product)
    assert chosen is not None
    return chosen


@lru_cache(maxsize=4096)
def _launch(product: Product) -> WarpTiles | None:
    """The launch for a product; None if partial sums do not fit in memory."""
    kernel, geometry = _constants(product), product.geometry
    blocks = geometry.n_tiles * -(-product.n // (8 * kernel.vector_blocks))
    resident = SCHEDULERS * min(MAX_WARPS, ALL_REGISTERS // (LANES * kernel.registers))
    resident = min(resident, product.device.shared_memory // (kernel.shared_bytes + TRITON_BYTES))
    groups, sums = count_groups(product), 4 * product.n * product.k
    most = max(MIN_PARTIAL_BYTES, product.x_bytes // PARTIAL_SHARE) // sums
    wanted = max(1, resident * product.device.multiprocessors // blocks)
    splits = max(1, min(wanted, most, groups))
    if groups > MAX_CHUNKS * splits:  # a whole number of times as many programs as run at a time
        splits = -(-groups // (MAX_CHUNKS * wanted)) * wanted
    per_split = -(-groups // splits)
    if geometry.n_tiles == 1:  # then lanes without a group are those past the end
        per_split = -(-per_split // LANES) * LANES
    splits = -(-groups // per_split)
    if splits * sums > max_partial_bytes(product):
        return None
    return WarpTiles(kernel, splits, per_split)


def _constants(product: Product) -> WarpConstants:
    geometry, contiguous = product.geometry, vectors_contiguous(product)
    chunk, item = 1 << geometry.log_chunk, product.item_bytes
    row_blocks = next(blocks for blocks in (1, 2, 4, 8) if 16 * blocks * geometry.n_tiles >= product.k)
    vector_blocks = 1
    most = min(MAX_VECTOR_BLOCKS, MAX_BLOCKS // row_blocks)
    while vector_blocks < most and 8 * vector_blocks < product.n:
        vector_blocks *= 2
    run = STEP_COLUMNS if geometry.n_tiles == 1 else min(chunk, STEP_COLUMNS)
    far = product.x_strides[1 if contiguous else 0] * item if product.n > 1 or contiguous else 0
    align = math.gcd(UNIT_BYTES, far, 0 if contiguous else product.offset * item) if product.data_aligned else item
    units = (8 * vector_blocks if contiguous else run) * item // UNIT_BYTES + (align < UNIT_BYTES)
    log_parts = max(0, geometry.log_chunk - 5)
    slot = UNIT_BYTES * units * (STEP_COLUMNS if contiguous else 8 * vector_blocks * (STEP_COLUMNS // run))
    table = product.nnz * (LANES << log_parts) * UNIT_BYTES
    shared = (16 * row_blocks + 1) * STEP_COLUMNS + table + SLOTS * slot + 4 * LANES + UNIT_BYTES
    registers = next(REGISTERS[blocks] for blocks in REGISTERS if row_blocks * vector_blocks <= blocks)
    return WarpConstants(row_blocks, vector_blocks, log_parts, run, units, align, contiguous, registers, shared)
