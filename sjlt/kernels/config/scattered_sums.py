"""Launches of `project_scattered`, for products that `scattered_rules` chooses: pure functions of a `Product`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from .product import Product, max_partial_bytes, next_power_of_two
from .scattered_layouts import (
    LANES,
    LINE_BYTES,
    TRITON_BYTES,
    Layout,
    Spread,
    are_rows,
    bank_conflicts,
    group_columns,
    layouts,
    loaded_lines,
    log_parts,
    max_chunks,
    may_be_by_slot,
    round_up,
    sum_bytes,
)

MAX_TERMS = 1024  # of a component in one split, on average per copy of the sums
MAX_LOADED = 8  # elements that a lane loads at a time, unless its vectors of one column are more
MANY_ROUNDS, FEW_ROUNDS = 4, 2  # whose sums are loaded together; the latter for more than MAX_LOADED vectors per lane
PREFETCHED_BYTES = 2 << 10  # of data that a program fetches ahead into the L2 cache for each warp
MAX_PREFETCHED = 8  # steps
REGISTERS, MIN_REGISTERS, MAX_REGISTERS = 1 << 16, 40, 128  # of a multiprocessor; estimated limits of a thread
MAX_WARPS = 32  # per multiprocessor
MANY_ROWS, ROW_BITS = 128, 3  # more rows are rounded up to so many significant bits for the choice of a layout
# Instructions per 32 additions: (per addition, per access to sums, per column, per load). Latencies in cycles: of sums,
# of data, and between two instructions of a warp.
INSTRUCTIONS, SUM_LATENCY, DATA_LATENCY, ISSUE_LATENCY = (0.6, 4.4, 14.8, 10.3), 36, 380, 1.64
# With sums by slot: more instructions per column, a factor of the time, and the most lines, relative to sums by row.
SLOT_INSTRUCTIONS, SLOT_FACTOR, MAX_SLOT_LINES = 2, 1.07, 0.75
# Instructions of a thread for a chunk of the table and for each of its entries; cycles to begin a table, to begin and
# end a program, and to clear and add 128 bytes of its sums.
TABLE_INSTRUCTIONS, ENTRY_INSTRUCTIONS, TABLE_LATENCY, PROGRAM_LATENCY, LINE_CYCLES = 343, 45, 233, 1740, 4.5
BYTES_PER_CYCLE, SUM_BYTES_PER_CYCLE = 12.2, 5.4  # of data that is read, and of partial sums, written and read


@dataclass(frozen=True)
class ScatterConstants:
    """The constants of `project_scattered`.

    Attributes
    ----------
    layout : Layout
        Of the sums.
    groups : int
        Groups of chunks that a block of columns belongs to.
    rotations : int
        Orders in which lanes access the units of vectors, which avoid bank conflicts, too.
    spread : Spread
        How far apart the columns of these lanes are, which avoids them, too.
    rows : int
        Sums of a vector in one copy, rounded up.
    chunks : int
        Chunks per batch.
    log_parts : int
        A chunk has 2^log_parts table entries per sub-block, one for every 32 columns.
    loaded : int
        Blocks of columns that a warp loads at a time.
    together : int
        Blocks among them whose sums a warp loads together; they lie in one group of chunks.
    rounds_together : int
        Sub-blocks of a warp, out of those that it processes in turn, whose sums it loads together.
    prefetched : int
        Steps by which the L2 cache is ahead of the loads.
    width : int
        Contiguous vectors that one access reads; 0 if rows of X are contiguous.
    shared_bytes : int
        Shared memory of a program.
    """

    layout: Layout
    groups: int
    rotations: int
    spread: Spread
    rows: int
    chunks: int
    log_parts: int
    loaded: int
    together: int
    rounds_together: int
    prefetched: int
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
        Upper bound on the number of terms of a component in one split, over all copies of its sums.
    """

    kernel: ScatterConstants
    splits: int
    batches_per_split: int
    terms: int


def launch(product: Product) -> ScatteredSums:
    """The launch for an eligible product."""
    chosen = _choose(product)
    assert chosen is not None
    return chosen


def can_run(product: Product) -> bool:
    """Whether shared memory holds the sums of a vector, and partial sums fit in their memory."""
    return _choose(product) is not None


def cycles(product: Product) -> float:
    """The estimated time of an eligible product in cycles, apart from its launches."""
    return _time(product, launch(product))


def column_cycles(product: Product) -> float:
    """The estimated time per column of an eligible product, in cycles of a multiprocessor."""
    return cycles(product) * product.device.multiprocessors / product.d


@lru_cache(maxsize=4096)
def _choose(product: Product) -> ScatteredSums | None:
    """The launch with the layout that is the fastest for the first columns, or for these if that does not fit.

    The search takes up to 15 milliseconds, too long for every block of a stream of features, or for batches of
    different sizes. Many rows therefore have the layout of a rounded number of rows. By the estimate, they then take
    1.005 times as long, on average (150 random products, at most 1.1 times).
    """
    n = round_up(product.n, ROW_BITS) if product.n > MANY_ROWS and are_rows(product) else product.n
    first = _fastest(product._replace(n=n, offset=0, y_strides=(product.k, 1), plain=True))
    chosen = _launch(product, first.kernel.layout) if first is not None else None
    return chosen if chosen is not None else _fastest(product)


@lru_cache(maxsize=4096)
def _fastest(product: Product) -> ScatteredSums | None:
    """The launch with the least estimated time; None if none fits in memory.

    Sums are by slot only if that avoids bank conflicts. In microseconds on an H200, by row and by slot: X (4, 22176690)
    -> 834 with nnz 8 418 and 345, X (2, 121216896) -> 130 with nnz 3 576 and 522, X (32, 6466453) -> 1728 with nnz 3
    479 and 308, X (8, 10884600) -> 3543 with nnz 3 212 and 176; but, where replicas by row avoid conflicts, too, X (8,
    65208809) -> 517 with nnz 3 893 and 988.
    """
    by_row = _search(product, layouts(product), math.inf)
    if by_row is None or not may_be_by_slot(product):
        return by_row
    by_slot = _search(product, layouts(product, by_slot=True), _time(product, by_row))
    if by_slot is None:
        return by_row
    lines = [_work(product, launch.kernel.layout)[0] for launch in (by_slot, by_row)]
    return by_slot if lines[0] < MAX_SLOT_LINES * lines[1] else by_row


def _search(product: Product, layouts: Iterable[Layout], least: float) -> ScatteredSums | None:
    """The first launch, of those with one of `layouts`, with the least estimated time below `least`, if there is one.

    Layouts are tried in the order of `_least_time`, until that exceeds the least time found.
    """
    bounds = sorted((_least_time(product, layout), i, layout) for i, layout in enumerate(layouts))
    best, fastest = (least, -1), None
    for bound, i, layout in bounds:
        if bound > best[0]:
            break
        launch = _launch(product, layout)
        if launch is not None and (found := (_time(product, launch), i)) < best:
            best, fastest = found, launch
    return fastest


def _launch(product: Product, layout: Layout) -> ScatteredSums | None:
    """The launch with a layout.

    None if a program does not fit in shared memory, or partial sums in SCRATCH_BYTES or 1/16 of the data.
    """
    kernel = _constants(product, layout)
    multiprocessors, blocks = product.device.multiprocessors, -(-product.n // layout.vectors)
    batches = _batches(product, kernel.chunks)
    while kernel.chunks > LANES:
        smaller = _with_chunks(product, kernel, kernel.chunks // 2)
        more = _batches(product, smaller.chunks)
        if smaller.chunks == kernel.chunks or (more > batches and batches * blocks >= multiprocessors * 2):
            break
        kernel, batches = smaller, more
    if not layout.fits(product, kernel.chunks):
        return None
    resident = min(MAX_WARPS // layout.warps, _programs_in_memory(product, kernel))
    # Each group of chunks contributes at most one term to a component, which is added to one of the program's copies.
    terms = -(-kernel.chunks * layout.replicas // (layout.copies * kernel.groups)) >> product.geometry.log_group
    longest = max(1, MAX_TERMS // max(1, terms))
    per_split = min(-(-batches // max(1, resident * multiprocessors // blocks)), longest)
    splits = -(-batches // per_split)
    if splits * product.n * product.k * product.stacks * sum_bytes(product) > max_partial_bytes(product):
        return None
    return ScatteredSums(kernel, splits, per_split, per_split * max(1, kernel.chunks >> product.geometry.log_group))


def _batches(product: Product, chunks: int) -> int:
    """The number of batches of `chunks` chunks that contain the columns."""
    log_batch = product.geometry.log_chunk + chunks.bit_length() - 1
    return ((product.offset + product.d - 1) >> log_batch) - (product.offset >> log_batch) + 1


def _constants(product: Product, layout: Layout) -> ScatterConstants:
    """The constants of the kernel for large batches of chunks."""
    rounds = product.nnz * product.stacks // layout.team
    loaded = max(1, MAX_LOADED // layout.lane_vectors)
    window = layout.columns * (layout.sets if layout.shared else 1)
    together = max(1, min(loaded, group_columns(product) // window, MANY_ROUNDS // min(MANY_ROUNDS, rounds)))
    rounds_together = min(rounds, MANY_ROUNDS if layout.lane_vectors <= MAX_LOADED else FEW_ROUNDS)
    _, rotations, spread = bank_conflicts(product, layout)
    kernel = ScatterConstants(
        layout, layout.groups(product), rotations, spread, layout.rows(product), 0,
        log_parts(product), loaded, together, rounds_together, 0, layout.width(product), 0,
    )  # fmt: skip
    return _with_chunks(product, kernel, max_chunks(product, layout.warps))


def _with_chunks(product: Product, kernel: ScatterConstants, chunks: int) -> ScatterConstants:
    """The constants of a kernel with batches of at least `chunks` chunks."""
    layout, log_chunk = kernel.layout, product.geometry.log_chunk
    step = layout.sets * layout.columns
    while chunks << log_chunk < step * kernel.together:
        chunks *= 2
    loaded = max(kernel.together, min(kernel.loaded, (chunks << log_chunk) // step))
    step_bytes = step * loaded * layout.vectors * product.item_bytes
    ahead = min(MAX_PREFETCHED, PREFETCHED_BYTES * layout.warps // step_bytes)
    shared = layout.shared_bytes(product, chunks)
    return replace(kernel, chunks=chunks, loaded=loaded, prefetched=ahead, shared_bytes=shared)


def _time(product: Product, chosen: ScatteredSums) -> float:
    """The estimated time of a product in cycles of a multiprocessor, apart from its launches.

    It is within 13 % (root mean square) of 843 times on an H200, of 212 random products of 3 to 200 MB in one to 14
    layouts, without spread columns and sums by slot.
    """
    kernel, layout, nnz = chosen.kernel, chosen.kernel.layout, product.nnz * product.stacks
    multiprocessors, blocks = product.device.multiprocessors, -(-product.n // layout.vectors)
    programs = -(-chosen.splits * blocks // multiprocessors)  # of a multiprocessor
    resident = min(_resident(product, kernel), programs)
    columns = min(product.d, chosen.batches_per_split * kernel.chunks << product.geometry.log_chunk)
    additions = programs * columns * layout.vectors * nnz / LANES
    shares = layout.warps * LANES // kernel.chunks  # of the sub-blocks of a chunk, for as many threads
    entries = product.stacks * (next_power_of_two(-(-product.nnz // shares)) if shares > 1 else product.nnz)
    instructions = layout.warps / 4 * (TABLE_INSTRUCTIONS + ENTRY_INSTRUCTIONS * entries)
    tables = programs * chosen.batches_per_split * (instructions + TABLE_LATENCY / resident)
    lines = programs * layout.copies * layout.vectors * kernel.rows * sum_bytes(product) / LINE_BYTES
    setup = lines * LINE_CYCLES + programs * PROGRAM_LATENCY / resident
    partial = chosen.splits * product.n * product.k * product.stacks * sum_bytes(product)
    total = additions * _addition(product, kernel, resident * layout.warps) + tables + setup
    total += partial / (SUM_BYTES_PER_CYCLE * multiprocessors)
    time = (total**4 + (product.x_bytes / (BYTES_PER_CYCLE * multiprocessors)) ** 4) ** 0.25
    return time * (SLOT_FACTOR if layout.by_slot else 1)


def _addition(product: Product, kernel: ScatterConstants, warps: int) -> float:
    """The estimated cycles for 32 additions, with so many warps per multiprocessor."""
    layout, rounds = kernel.layout, product.nnz * product.stacks // kernel.layout.team
    lines, instructions = _work(product, layout)
    latency = SUM_LATENCY / (kernel.rounds_together * kernel.together) + DATA_LATENCY / (kernel.loaded * rounds)
    latency = (latency / layout.lane_vectors + ISSUE_LATENCY * instructions) / warps
    return (lines**4 + (instructions / 4) ** 4 + latency**4) ** 0.25


def _work(product: Product, layout: Layout) -> tuple[float, float]:
    """(lines of 128 bytes, instructions) for 32 additions.

    Shared memory and the load path take a cycle per line, the schedulers one per four instructions.
    """
    rounds = product.nnz * product.stacks // layout.team
    conflicts, rotations, _ = bank_conflicts(product, layout)
    lines = 2 * conflicts * sum_bytes(product) / 4 + loaded_lines(product, layout) / rounds
    add, access, column, load = INSTRUCTIONS
    column += SLOT_INSTRUCTIONS * layout.by_slot
    instructions = add + access / layout.unit + column / layout.lane_vectors + (load + rotations.bit_length()) / rounds
    return lines, instructions


def _least_time(product: Product, layout: Layout) -> float:
    """A lower bound on `_time` with a layout: of the additions, without latencies."""
    lines, instructions = _work(product, layout)
    vectors = -(-product.n // layout.vectors) * layout.vectors
    additions = vectors * product.d * product.nnz * product.stacks / (LANES * product.device.multiprocessors)
    return 0.999 * additions * (lines**4 + (instructions / 4) ** 4) ** 0.25  # less than any rounding of `_time`


def _resident(product: Product, kernel: ScatterConstants) -> int:
    """The estimated number of programs that a multiprocessor runs at a time."""
    layout, nnz = kernel.layout, product.nnz * product.stacks
    sums = kernel.rounds_together * kernel.together * layout.lane_vectors
    registers = 18 + 2.6 * layout.lane_vectors * kernel.loaded + 0.8 * sums + 3.6 * nnz
    registers = min(max(MIN_REGISTERS, registers), MAX_REGISTERS)
    by_registers = int(REGISTERS // (LANES * layout.warps * registers))
    return max(1, min(by_registers, _programs_in_memory(product, kernel), 2 * MAX_WARPS // layout.warps))


def _programs_in_memory(product: Product, kernel: ScatterConstants) -> int:
    """The number of programs that fit in the shared memory of a multiprocessor."""
    return product.device.shared_memory // (kernel.shared_bytes + TRITON_BYTES)
