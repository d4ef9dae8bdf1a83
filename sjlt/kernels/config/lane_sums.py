"""Eligibility and launches of `project_lane_sums`: pure functions of a `Product`."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

from . import scattered_rules, scattered_sums, warp_tiles
from .product import SECTOR_BYTES, VECTOR_BYTES, Product, max_partial_bytes, vectors_contiguous
from .scattered_layouts import LANES, LINE_BYTES, SHARED_ALIGN, TRITON_BYTES, are_rows
from .scattered_rules import MAX_NNZ, MAX_VECTORS
from .scattered_sums import REGISTERS as ALL_REGISTERS

MAX_ROWS = 64  # vectors whose elements are contiguous; of others, MAX_VECTORS at most
# Factors by which the estimates of other kernels must exceed this one: of `scattered_sums` for more than 4 vectors, or
# where `few_vectors` is used in its place, and of `warp_tiles`.
MARGIN, TILES_MARGIN = 1.1, 1.75
SUM_BYTES, ALIGN = 4, 128
VECTORS, SHARERS = (1, 2, 4), (1, 2, 4)  # vectors of a program, and lanes that share a copy of its sums
MAX_LOG_HELD, MAX_HELD = 4, 32  # of the columns, and elements of all vectors, that a lane processes at a time
MAX_BYTE_LOG = 4  # of chunks whose numbers mod 2^p, and their products, fit in 8 bits
WARPS, MAX_WARPS = (8, 4, 2, 1), (12, 24, 32)  # of a program; per multiprocessor
MAX_STEPS = 1024  # terms of a sum in one split
MAX_SPLITS = 65535  # CUDA's limit on the second dimension of a grid
MIN_STAGED_BYTES = 16  # between the elements that adjacent lanes would read otherwise
REGISTERS = {8: 56, 16: 80, 32: 120}  # limit of a thread that holds at most so many elements

# Instructions of a warp for a step:
CALL_INSTRUCTIONS = 123  # for each call of Philox, and what depends on it
ENTRY_INSTRUCTIONS = 8.3, 11.9  # for each entry of a column, with slots in fields of 8 and of 16 bits
VECTOR_INSTRUCTIONS = 0.25  # for each vector that an entry is multiplied by
STAGE_INSTRUCTIONS = 3.3  # for each element that lanes exchange
# Cycles of a multiprocessor:
ISSUE_LATENCY = 2.9  # from one instruction of a warp to the next
ROW_CYCLES = 3.0  # to clear and add a row of sums of a warp and vector
CONFLICTS = 1.76  # of an access to sums by lanes that share copies, if a row has less than 128 bytes
START_CYCLES = 2500  # by which launches take longer than those of other kernels
PARTIAL_CYCLES = 14.5  # for each partial sum, divided by the number of multiprocessors
BYTES_PER_CYCLE = 17.8  # of data


@dataclass(frozen=True)
class LaneConstants:
    """The constants of `project_lane_sums`.

    Attributes
    ----------
    log_chunk, log_held : int
        Columns of a chunk, and those that a lane processes at a time, as exponents of 2.
    vectors : {1, 2, 4}
        Vectors per program.
    sharers : {1, 2, 4}
        Lanes that share a copy of the sums.
    warps : int
        Warps per program.
    row_run : int
        Columns that one access reads; 0 if rows of X are not contiguous.
    column_run : int
        Vectors that one access reads; more than 1 only if vectors are contiguous.
    staged : bool
        Whether adjacent lanes read adjacent columns, and exchange them.
    registers : int
        Limit per thread.
    shared_bytes : int
        Shared memory of a program.
    """

    log_chunk: int
    log_held: int
    vectors: int
    sharers: int
    warps: int
    row_run: int
    column_run: int
    staged: bool
    registers: int
    shared_bytes: int


@dataclass(frozen=True)
class LaneSums:
    """A launch of `project_lane_sums`.

    Attributes
    ----------
    kernel : LaneConstants
    steps : int
        Steps in which the programs of a block of vectors process all columns, a part of a chunk per lane.
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
    """Whether the kernel can run a product and is, by its estimated time, the fastest for few long vectors.

    In microseconds on an H200, with the fastest other kernel and here: X (1, 163414568) -> 50 with nnz 4 in bf16 846
    and 412, (1, 8678784) -> 16 in fp16 78 and 39, (2, 18337607) -> 38 with nnz 8 in bf16 238 and 131, (4, 99971900) ->
    62 with nnz 4 in fp32 831 and 530; but A (6801016, 4) -> 128 in bf16 57 and 77, X (16, 7306972) -> 8 in fp16 155 and
    192, (12, 3396806) -> 64 with nnz 1 in fp16 42 and 48. It is also eligible for up to 64 rows if scattered_sums is
    the fastest other kernel: X (64, 1962904) -> 16 with nnz 3 in fp32 194 and 148, (33, 2000000) -> 30 with nnz 8 302
    and 220; but not for as many columns: A (500000, 64) -> 32 with nnz 4 takes 69 and 141.
    """
    if product.x_bytes < scattered_rules.MIN_BYTES or product.n > MAX_ROWS or product.nnz > MAX_NNZ:
        return False
    if not can_run(product):
        return False
    if product.n > MAX_VECTORS and not (are_rows(product) and scattered_rules.eligible(product)):
        return False
    least = cycles(product, launch(product)) + START_CYCLES
    margin = 1.0 if product.n <= VECTORS[-1] and not scattered_rules.is_in_registers(product) else MARGIN
    if scattered_sums.can_run(product) and scattered_sums.cycles(product) < margin * least:
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
        and geometry.log_chunk > 0
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
    vectors = [each for each in VECTORS if each < 2 * product.n]
    sharers = [each for each in SHARERS if each <= product.nnz]
    layouts = itertools.product(vectors, sharers, MAX_WARPS)
    launches = [_launch(product, *each) for each in layouts if each[1] <= 2 * each[0]]
    most = max_partial_bytes(product) // SUM_BYTES
    fitting = [each for each in launches if each is not None and _partial_sums(product, each) <= most]
    return min(fitting, key=lambda each: cycles(product, each), default=None)


def _partial_sums(product: Product, chosen: LaneSums) -> int:
    return chosen.splits * product.n * product.k


def _launch(product: Product, vectors: int, sharers: int, max_warps: int) -> LaneSums | None:
    """The launch with programs of so many vectors, and at most so many warps per multiprocessor.

    None if a program does not fit, or if the copies of a row's sum occupy fewer bytes than a chunk has columns: the
    kernel scales rows by shifts.
    """
    log_chunk = product.geometry.log_chunk
    copies = LANES // sharers
    if copies * SUM_BYTES * vectors < 1 << log_chunk:
        return None
    log_held = min(log_chunk, MAX_LOG_HELD, (MAX_HELD // vectors).bit_length() - 1)
    row_run, column_run = _runs(product, vectors, log_held)
    between = product.item_bytes << log_held  # bytes
    staged = row_run == 0 or (row_run == 1 and between >= MIN_STAGED_BYTES)
    warp_bytes = SUM_BYTES * vectors * (product.k * copies + staged * (LANES << log_held))
    registers = next(REGISTERS[most] for most in REGISTERS if vectors << log_held <= most)
    max_warps = min(max_warps, ALL_REGISTERS // (LANES * registers))

    def resident(warps: int) -> int:
        bytes_of_program = warps * warp_bytes + SHARED_ALIGN + ALIGN + TRITON_BYTES
        return min(max_warps // warps, product.device.shared_memory // bytes_of_program)

    most = max(warps * resident(warps) for warps in WARPS)
    if most == 0:
        return None
    warps = next(warps for warps in WARPS if warps * resident(warps) * 10 >= most * 9)
    parts = ((product.offset + product.d - 1) >> log_held) - (product.offset >> log_held) + 1
    steps = -(-parts // (LANES * warps))
    programs = max(1, resident(warps) * product.device.multiprocessors // -(-product.n // vectors))
    per_split = max(min(MAX_STEPS // sharers, -(-steps // programs)), -(-steps // MAX_SPLITS))
    shared = -(-warps * warp_bytes // SHARED_ALIGN) * SHARED_ALIGN + ALIGN
    kernel = LaneConstants(log_chunk, log_held, vectors, sharers, warps, row_run, column_run, staged, registers, shared)
    return LaneSums(kernel, steps, -(-steps // per_split), per_split, resident(warps))


def _runs(product: Product, vectors: int, log_held: int) -> tuple[int, int]:
    """(`LaneConstants.row_run`, `LaneConstants.column_run`)."""
    if vectors_contiguous(product):
        if product.x_strides[0] > 1 or not product.data_aligned:
            return 0, 1
        return 0, math.gcd(vectors, product.n, product.x_strides[1])
    if product.x_strides[1] != 1:
        return 0, 1
    if not product.data_aligned:
        return 1, 1
    far = product.x_strides[0] if product.n > 1 else 0
    return math.gcd(VECTOR_BYTES // product.item_bytes, 1 << log_held, product.offset, product.d, far), 1


def cycles(product: Product, chosen: LaneSums) -> float:
    """The estimated time in cycles, apart from launches; within 9 % (root mean square) of 235 times on an H200."""
    kernel, multiprocessors = chosen.kernel, product.device.multiprocessors
    entries, held = product.nnz << kernel.log_held, kernel.vectors << kernel.log_held
    programs = chosen.splits * -(-product.n // kernel.vectors)
    longest = -(-programs // multiprocessors)  # programs of a multiprocessor
    warps = kernel.warps * min(chosen.resident, longest)
    of_entry = ENTRY_INSTRUCTIONS[kernel.log_chunk > MAX_BYTE_LOG] + VECTOR_INSTRUCTIONS * kernel.vectors
    instructions = CALL_INSTRUCTIONS * (1 + -(-product.nnz // 4)) + of_entry * entries
    row_bytes = SUM_BYTES * kernel.vectors * LANES // kernel.sharers
    conflicts = 1 if row_bytes >= LINE_BYTES else CONFLICTS
    lines = conflicts * 2 * entries * kernel.vectors  # of 128 bytes, in shared memory and in the first-level cache
    if kernel.staged:
        instructions += STAGE_INSTRUCTIONS * held
        lines += 3 * held
    else:
        lines += held * max(1, product.item_bytes << kernel.log_held >> 2) // kernel.row_run
    step = ((instructions / 4) ** 4 + lines**4 + (ISSUE_LATENCY * instructions / warps) ** 4) ** 0.25
    total = (programs / multiprocessors + longest) / 2 * kernel.warps * chosen.steps_per_split * step
    total += longest * ROW_CYCLES * product.k * kernel.vectors * kernel.warps / kernel.sharers
    total += PARTIAL_CYCLES * _partial_sums(product, chosen) / multiprocessors
    read = float(product.x_bytes)
    if vectors_contiguous(product):  # a program that reads parts of columns also reads the rest of their sectors
        read *= max(1, min(product.n, SECTOR_BYTES // product.item_bytes) / kernel.vectors)
    return (total**4 + (read / (BYTES_PER_CYCLE * multiprocessors)) ** 4) ** 0.25
