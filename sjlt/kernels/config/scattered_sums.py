"""Launches of `project_scattered`, for products that `scattered_rules` chooses: pure functions of a `Product`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from .product import SCRATCH_BYTES, Product, next_power_of_two

WARPS, LANES, ENTRY_BYTES = 4, 32, 16
BANKS = 32  # of shared memory, of 4 bytes
UNIT_BYTES = 16  # the widest access to sums
MAX_SUMS_BYTES = 108 << 10  # for the sums of a program
MAX_PROGRAMS = 8  # per multiprocessor
# Estimated, with so few programs per multiprocessor. X (16, 1544097) -> 832 in fp16 took 2.5 times the estimate with 2.
SLOWER = {1: 3.0, 2: 1.8, 3: 1.2}
TRITON_BYTES = 1 << 10  # shared memory that Triton and the device reserve
MAX_TERMS = 1024  # per sum of one part
MAX_LOADED = 8  # elements that a lane loads at a time, of at most MAX_PROGRAM_VECTORS vectors
MAX_PROGRAM_VECTORS = 16
MAX_VECTOR_BYTES = 64  # of the sums of all vectors of a program in one row
PREFETCHED_BYTES = 8 << 10  # of data that a program fetches ahead into the L2 cache
MAX_PREFETCHED = 8  # steps
WORD_BYTES = 8  # the widest access to contiguous vectors


@dataclass(frozen=True)
class ScatterConstants:
    """The constants of `project_scattered`.

    Attributes
    ----------
    vectors : int
        Vectors per program.
    unit : int
        Vectors whose sums a lane reads or writes at once.
    team : int
        Warps that share sums and divide the sub-blocks among them.
    shared_sums : bool
        Whether all warps share sums, and work on one group of chunks between two barriers.
    groups : int
        Groups of chunks that 32 columns belong to.
    replicas : int
        Copies of the sums of a team, a multiple of `groups`; more of them avoid bank conflicts.
    rotations : int
        Orders in which lanes access the units of vectors, which avoid bank conflicts, too.
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
    prefetched : int
        Steps by which the L2 cache is ahead of the loads.
    width : int
        Contiguous vectors that one access reads; 0 if rows of X are contiguous.
    shared_bytes : int
        Shared memory of a program.
    """

    vectors: int
    unit: int
    team: int
    shared_sums: bool
    groups: int
    replicas: int
    rotations: int
    parts: int
    rows: int
    chunks: int
    log_parts: int
    loaded: int
    together: int
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
        Maximal number of terms in one component of a split, over all parts of the program.
    """

    kernel: ScatterConstants
    splits: int
    batches_per_split: int
    terms: int


def launch(product: Product) -> ScatteredSums:
    """The launch for an eligible product."""
    chosen = _launch(product)
    assert chosen is not None
    return chosen


def can_run(product: Product) -> bool:
    """Whether shared memory holds the sums of a vector, and partial sums fit in their memory."""
    return _launch(product) is not None


def are_rows(product: Product) -> bool:
    """Whether the elements of a vector are contiguous in memory."""
    return product.x_strides[1] == 1 and (product.n == 1 or product.x_strides[0] > 1)


@lru_cache(maxsize=4096)
def _launch(product: Product) -> ScatteredSums | None:
    """The launch, or None if sums do not fit in shared memory or partial sums in SCRATCH_BYTES or 1/16 of the data."""
    kernel = _constants(product)
    if kernel is None or _resident(product, kernel) == 0:
        return None
    multiprocessors, blocks = product.device.multiprocessors, -(-product.n // kernel.vectors)
    batches = _batches(product, kernel.chunks)
    while kernel.chunks > LANES and batches * blocks < multiprocessors * 2:
        smaller = _with_chunks(product, kernel, kernel.chunks // 2)
        if smaller.chunks == kernel.chunks:
            break
        kernel, batches = smaller, _batches(product, smaller.chunks)
    resident = _resident(product, kernel)
    # Each group of chunks contributes at most one term to a component, which is added to one of the program's parts.
    terms = -(-kernel.chunks * kernel.replicas // (kernel.parts * kernel.groups)) >> product.geometry.log_group
    longest = max(1, MAX_TERMS // max(1, terms))
    per_split = min(-(-batches // max(1, resident * multiprocessors // blocks)), longest)
    splits = -(-batches // per_split)
    memory = 4 * splits * product.n * product.k * product.stacks
    if memory > max(SCRATCH_BYTES, product.x_bytes // 16):
        return None
    return ScatteredSums(kernel, splits, per_split, per_split * max(1, kernel.chunks >> product.geometry.log_group))


def _batches(product: Product, chunks: int) -> int:
    """The number of batches of `chunks` chunks that contain the columns."""
    log_batch = product.geometry.log_chunk + chunks.bit_length() - 1
    return ((product.offset + product.d - 1) >> log_batch) - (product.offset >> log_batch) + 1


def _constants(product: Product) -> ScatterConstants | None:
    """The constants of the kernel, or None if shared memory does not hold the sums of one vector."""
    best = _best_sums(product)
    if best is None:
        return None
    vectors, unit, team, shared_sums, replicas = best[1]
    group, nnz = 1 << product.geometry.log_chunk + product.geometry.log_group, product.nnz * product.stacks
    loaded, rounds = max(1, MAX_LOADED // vectors), nnz // team
    together = max(1, min(loaded, group // (LANES * (WARPS if shared_sums else 1)), 4 // min(4, rounds)))
    parts, groups = replicas if shared_sums else WARPS // team * replicas, max(1, LANES // group)
    rows, width = _rounded_up(product.k * product.stacks), min(_width(product), vectors)
    _, rotations = bank_conflicts(product, vectors, unit, replicas)
    kernel = ScatterConstants(
        vectors, unit, team, shared_sums, groups, replicas, rotations, parts, rows, 0, 0, loaded, together, 0, width, 0
    )  # fmt: skip
    kernel, smaller = (_with_chunks(product, kernel, chunks) for chunks in (WARPS * LANES, WARPS * LANES // 2))
    return smaller if _resident(product, kernel) == 1 < _resident(product, smaller) else kernel


def _resident(product: Product, kernel: ScatterConstants) -> int:
    """The number of programs that a multiprocessor can run at a time."""
    return min(MAX_PROGRAMS, product.device.shared_memory // (kernel.shared_bytes + TRITON_BYTES))


def _width(product: Product) -> int:
    """The number of contiguous vectors that one access reads; 0 if rows are contiguous."""
    if are_rows(product):
        return 0
    return math.gcd(WORD_BYTES // product.item_bytes, product.n, product.x_strides[1]) if product.data_aligned else 1


def _sums(product: Product) -> Iterator[tuple[int, int, int, bool, int]]:
    """All (vectors, unit, team, shared_sums, replicas) whose sums fit in shared memory."""
    group, nnz = 1 << product.geometry.log_chunk + product.geometry.log_group, product.nnz * product.stacks
    item, groups, rows = max(4, product.item_bytes), max(1, LANES // group), _rounded_up(product.k * product.stacks)
    ways = [(team, False) for team in (1, 2, 4) if nnz % team == 0] + [(1, True)] * (group >= WARPS * LANES)
    vectors = min(MAX_PROGRAM_VECTORS, MAX_VECTOR_BYTES // item, next_power_of_two(product.n))
    available = product.device.shared_memory - TRITON_BYTES - _table_bytes(product, WARPS * LANES)
    while vectors:
        for unit in {1, min(vectors, UNIT_BYTES // item)}:
            replicas = groups
            while replicas <= max(groups, 4 * BANKS // (unit * item)):
                for team, shared_sums in ways:
                    copies = 1 if shared_sums else WARPS // team
                    if copies * replicas * rows * vectors * item <= min(MAX_SUMS_BYTES, available):
                        yield vectors, unit, team, shared_sums, replicas
                replicas *= 2
        vectors //= 2


def _best_sums(product: Product) -> tuple[float, tuple[int, int, int, bool, int]] | None:
    """(The least cost, the sums that have it), or None if shared memory does not hold the sums of one vector."""
    costs = ((_cost(product, *sums), sums) for sums in _sums(product))
    return min(costs, key=lambda cost_and_sums: cost_and_sums[0], default=None)


def _cost(product: Product, vectors: int, unit: int, team: int, shared_sums: bool, replicas: int) -> float:
    """The estimated time per vector, column and sub-block, in cycles of a multiprocessor for 32 of them.

    Shared memory and the load path take one cycle per line of 128 bytes, the schedulers one per four instructions.
    """
    nnz, item, rows = product.nnz * product.stacks, max(4, product.item_bytes), product.k * product.stacks
    conflicts, rotations = bank_conflicts(product, vectors, unit, replicas)
    loaded_lines = 1.0 if _width(product) == 0 else product.item_bytes / 4
    lines = 2 * conflicts * item / 4 + 4 / vectors + loaded_lines * team / nnz
    instructions = 3 + 3 / unit + 14 / vectors + (4 + rotations.bit_length()) * team / nnz
    copies = 1 if shared_sums else WARPS // team
    used = copies * replicas * rows * vectors * item + _table_bytes(product, WARPS * LANES)
    programs = max(1, product.device.shared_memory // (used + TRITON_BYTES))
    blocks = -(-product.n // vectors) * vectors / product.n
    busiest, other = max(lines, instructions / 4), min(lines, instructions / 4)
    return (busiest + other / 4) * blocks * SLOWER.get(programs, 1.0) * (1.1 if shared_sums else 1.0)


def cycles(product: Product) -> float:
    """The estimated time per column of an eligible product, in cycles of a multiprocessor."""
    best = _best_sums(product)
    assert best is not None
    return best[0] * product.n * product.nnz * product.stacks / LANES


def bank_conflicts(product: Product, vectors: int, unit: int, replicas: int) -> tuple[float, int]:
    """(Cycles per access of as many lanes as the banks can serve in one, `ScatterConstants.rotations`).

    These are averages over all columns of sketches of various shapes.
    """
    item, p = max(4, product.item_bytes), product.geometry.log_chunk
    line = 4 * BANKS // (unit * item)  # lanes that use all banks
    rotations = max(1, min(vectors // unit, line // replicas))
    if replicas * rotations >= line:
        return 1.0, rotations
    if line < BANKS:
        return 2.3 if rotations == 1 and p >= 4 else 1.95, rotations
    # The columns of a chunk meet different rows, in different banks if a sub-block has at most 32 rows.
    all_rows = p == 5 and product.k == product.geometry.n_tiles * 32 * product.nnz
    return 1.0 if all_rows else (2.0 if p >= 4 else 2.5), 1


def _with_chunks(product: Product, kernel: ScatterConstants, chunks: int) -> ScatterConstants:
    """The constants of a kernel with batches of at least `chunks` chunks."""
    log_chunk, item = product.geometry.log_chunk, max(4, product.item_bytes)
    log_parts, step = max(0, log_chunk - 5), WARPS // kernel.team * LANES
    while chunks << log_chunk < step * kernel.together:
        chunks *= 2
    loaded = max(kernel.together, min(kernel.loaded, (chunks << log_chunk) // step))
    shared = _table_bytes(product, chunks) + kernel.parts * kernel.vectors * kernel.rows * item
    shared = -(-shared // 2048) * 2048 + ENTRY_BYTES
    step_bytes = step * loaded * kernel.vectors * product.item_bytes
    ahead = min(MAX_PREFETCHED, PREFETCHED_BYTES // step_bytes)
    return replace(kernel, chunks=chunks, log_parts=log_parts, loaded=loaded, prefetched=ahead, shared_bytes=shared)


def _table_bytes(product: Product, chunks: int) -> int:
    return (chunks << max(0, product.geometry.log_chunk - 5)) * product.nnz * product.stacks * ENTRY_BYTES


def _rounded_up(rows: int) -> int:
    """`rows` rounded up to 32 or more with four significant bits, so that few kernels are compiled."""
    step = max(LANES, next_power_of_two(rows) // 16)
    return -(-rows // step) * step
