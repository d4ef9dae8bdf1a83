"""Eligibility and launches of `project_lane_sums`: pure functions of a `Product`."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

from . import scattered_rules, scattered_sums, warp_tiles
from .product import SCRATCH_BYTES, Product, vectors_contiguous
from .scattered_layouts import SHARED_ALIGN, TRITON_BYTES

MIN_BYTES = 1 << 20  # of X, below which the launch itself takes most of the time
MAX_VECTORS, MAX_FP32_VECTORS = 32, 2  # the latter if sums fit in the registers of `few_vectors`
MARGIN, TILES_MARGIN = 1.12, 1.35  # for more than 4 vectors, and in comparisons with `warp_tiles`
LANES, SUM_BYTES, ALIGN = 32, 4, 16
MAX_LOG_CHUNK = 4  # slots of 4 bits, in fields of 8
VECTORS, MAX_HELD = (1, 2, 4), 32  # of a program; elements of its chunk that a lane holds
WARPS, MAX_WARPS = (8, 4, 2, 1), (12, 24, 32)  # of a program; per multiprocessor
MAX_STEPS = 1024  # terms of a sum in one split
WIDTH, MIN_STAGED_BYTES = 16, 16  # bytes of the widest access; between the elements that adjacent lanes would read
ALL_REGISTERS, REGISTERS, HELD_REGISTERS = 1 << 16, 24, 3  # of a multiprocessor; of a thread, and per held element
# Instructions of a warp for a step: for each call of Philox and what depends on it, for each column's entry, and for
# each element that lanes exchange. Cycles until a warp's next step, to clear and add a row of sums of a warp and
# vector, and, of all multiprocessors, for each partial sum.
CALL_INSTRUCTIONS, ENTRY_INSTRUCTIONS, STAGE_INSTRUCTIONS = 107, 10.2, 1.9
STEP_LATENCY, ROW_CYCLES, PARTIAL_CYCLES = 490, 1.84, 25
START_CYCLES = 2500  # by which launches take longer than those of other kernels
BYTES_PER_CYCLE = 17.8  # of data, per multiprocessor


@dataclass(frozen=True)
class LaneConstants:
    """The constants of `project_lane_sums`.

    Attributes
    ----------
    log_chunk : int
    vectors : {1, 2, 4}
        Vectors per program.
    warps : int
        Warps per program.
    row_run : int
        Columns that one access reads; 0 if rows of X are not contiguous.
    column_run : int
        Vectors that one access reads; more than 1 only if vectors are contiguous.
    staged : bool
        Whether adjacent lanes read adjacent columns, and exchange them.
    shared_bytes : int
        Shared memory of a program.
    """

    log_chunk: int
    vectors: int
    warps: int
    row_run: int
    column_run: int
    staged: bool
    shared_bytes: int


@dataclass(frozen=True)
class LaneSums:
    """A launch of `project_lane_sums`.

    Attributes
    ----------
    kernel : LaneConstants
    steps : int
        Steps in which the programs of a block of vectors process all columns, a chunk per lane.
    splits, steps_per_split : int
        Number of parts that the sums are split into, and of steps in each part.
    resident : int
        Programs that a multiprocessor runs at a time.
    """

    kernel: LaneConstants
    steps: int
    splits: int
    steps_per_split: int
    resident: int


def eligible(product: Product) -> bool:
    """Whether the kernel can run a product and is, by its estimated time, the fastest for few long vectors."""
    if product.x_bytes < MIN_BYTES or product.n > MAX_VECTORS or not can_run(product):
        return False
    if product.n > MAX_FP32_VECTORS and product.item_bytes == 4 and scattered_rules.is_in_registers(product):
        return False
    chosen = launch(product)
    if vectors_contiguous(product) and chosen.kernel.vectors < product.n:
        return False
    least = cycles(product, chosen) + START_CYCLES
    if scattered_sums.can_run(product):
        margin = 1.0 if product.n <= VECTORS[-1] else MARGIN
        if scattered_sums.cycles(product) < margin * least:
            return False
    return not (warp_tiles.eligible(product) and warp_tiles.cycles(product) < TILES_MARGIN * least)


def can_run(product: Product) -> bool:
    """Whether the kernel can run a product."""
    geometry = product.geometry
    return (
        product.device.asynchronous_copies
        and not product.adjoint
        and product.stacks == 1
        and product.item_bytes <= SUM_BYTES
        and geometry.n_tiles == 1
        and 1 <= geometry.log_chunk <= MAX_LOG_CHUNK
        and product.d < 1 << 30
        and product.n < 1 << 18
        and _fastest(product) is not None
    )


def launch(product: Product) -> LaneSums:
    """The launch for a product that the kernel can run."""
    chosen = _fastest(product)
    assert chosen is not None
    return chosen


@lru_cache(maxsize=4096)
def _fastest(product: Product) -> LaneSums | None:
    """The launch with the least estimated time; None if partial sums do not fit in memory."""
    most = min(2 * product.n - 1, MAX_HELD >> product.geometry.log_chunk)
    held = [vectors for vectors in VECTORS if vectors <= most]
    if vectors_contiguous(product):
        held = held[-1:]  # a program that reads parts of columns wastes the rest of their sectors
    launches = [_launch(product, vectors, warps) for vectors, warps in itertools.product(held, MAX_WARPS)]
    fitting = [each for each in launches if _partial_sums(product, each) * SUM_BYTES <= _max_partial_bytes(product)]
    return min(fitting, key=lambda each: cycles(product, each), default=None)


def _partial_sums(product: Product, chosen: LaneSums) -> int:
    return chosen.splits * product.n * product.k


def _max_partial_bytes(product: Product) -> int:
    return max(SCRATCH_BYTES, product.x_bytes // 16)


def _launch(product: Product, vectors: int, max_warps: int) -> LaneSums:
    """The launch with programs of so many vectors, and at most so many warps per multiprocessor."""
    log_chunk = product.geometry.log_chunk
    row_run, column_run = _runs(product, vectors)
    between = product.item_bytes << log_chunk  # bytes
    staged = row_run == 0 or (row_run == 1 and between >= MIN_STAGED_BYTES)
    warp_bytes = LANES * SUM_BYTES * vectors * (product.k + (staged << log_chunk))
    registers = REGISTERS + HELD_REGISTERS * (vectors << log_chunk)
    max_warps = min(max_warps, ALL_REGISTERS // (LANES * registers))

    def resident(warps: int) -> int:
        return min(
            max_warps // warps, product.device.shared_memory // (warps * warp_bytes + SHARED_ALIGN + TRITON_BYTES)
        )

    most = max(warps * resident(warps) for warps in WARPS)
    warps = next(warps for warps in WARPS if warps * resident(warps) * 10 >= most * 9)
    chunks = ((product.offset + product.d - 1) >> log_chunk) - (product.offset >> log_chunk) + 1
    steps = -(-chunks // (LANES * warps))
    programs = max(1, resident(warps) * product.device.multiprocessors // -(-product.n // vectors))
    per_split = min(MAX_STEPS, -(-steps // programs))
    shared = -(-warps * warp_bytes // SHARED_ALIGN) * SHARED_ALIGN + ALIGN
    kernel = LaneConstants(log_chunk, vectors, warps, row_run, column_run, staged, shared)
    return LaneSums(kernel, steps, -(-steps // per_split), per_split, max(1, resident(warps)))


def _runs(product: Product, vectors: int) -> tuple[int, int]:
    """(`LaneConstants.row_run`, `LaneConstants.column_run`)."""
    if vectors_contiguous(product):
        if product.x_strides[0] > 1 or not product.data_aligned:
            return 0, 1
        return 0, math.gcd(vectors, product.n, product.x_strides[1])
    if product.x_strides[1] > 1:
        return 0, 1
    if not product.data_aligned:
        return 1, 1
    far = product.x_strides[0] if product.n > 1 else 0
    return math.gcd(WIDTH // product.item_bytes, 1 << product.geometry.log_chunk, product.offset, product.d, far), 1


def cycles(product: Product, chosen: LaneSums) -> float:
    """The estimated time in cycles, apart from launches; within 6 % (root mean square) of 255 times on an H200."""
    kernel, multiprocessors = chosen.kernel, product.device.multiprocessors
    entries, held = product.nnz << kernel.log_chunk, kernel.vectors << kernel.log_chunk
    programs = chosen.splits * -(-product.n // kernel.vectors)
    longest = -(-programs // multiprocessors)  # programs of a multiprocessor
    warps = kernel.warps * min(chosen.resident, longest)
    instructions = CALL_INSTRUCTIONS * (1 + -(-product.nnz // 4)) + ENTRY_INSTRUCTIONS * entries
    lines = 2 * entries * kernel.vectors  # of 128 bytes, in shared memory and in the first-level cache
    if kernel.staged:
        instructions += STAGE_INSTRUCTIONS * held
        lines += 3 * held
    else:
        lines += held * max(1, product.item_bytes << kernel.log_chunk >> 2) // kernel.row_run
    step = ((instructions / 4) ** 4 + lines**4 + (STEP_LATENCY / warps) ** 4) ** 0.25
    total = (programs / multiprocessors + longest) / 2 * kernel.warps * chosen.steps_per_split * step
    total += longest * ROW_CYCLES * product.k * kernel.vectors * kernel.warps
    total += PARTIAL_CYCLES * _partial_sums(product, chosen) / multiprocessors
    return (total**4 + (product.x_bytes / (BYTES_PER_CYCLE * multiprocessors)) ** 4) ** 0.25
