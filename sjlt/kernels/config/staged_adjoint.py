"""Eligibility and launches of `adjoint_staged`: pure functions of a `Product`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from ...laws import exact as law
from . import one_tile
from .product import (
    SCRATCH_BYTES,
    SECTOR_BYTES,
    VECTOR_BYTES,
    Product,
    alignment,
    is_power_of_two,
    next_power_of_two,
    vectors_contiguous,
)

MIN_VECTORS = 16
MAX_TERMS = 16  # of a column; then instructions and shared memory take several times as long as memory
ROW_BYTES = (128, 64, 32, 16)  # per component of a block of vectors in shared memory
BANK_BYTES = 128  # that shared memory delivers in a cycle
COLUMNS = 4  # adjacent columns of a thread
COPIED_BYTES = 64  # of Y per thread and step
# Reads by neighbouring threads of so many bytes each; those of 8 threads are stored without bank conflicts.
WIDTHS = {16: 8, 8: 8, 4: 16, 2: 32}
MAX_GATHERED = 4  # terms of a column that `adjoint_row_gather` gathers
MAX_SMALL_TERMS = 8  # of small products with more than a quarter of a tile's components, for `_favors_sums`
MAX_SMALL = 1 << 22  # elements of the result, for `_favors_sums`
MANY_ELEMENTS = 3 << 23  # from here on, tensor cores are faster than two terms in 16 bits
MIN_PARTIAL, MIN_PARTIAL_COLUMNS = 1 << 23, 512  # elements and columns of the result, for `_favors_sums`
MAX_LOG_SPLITS = 11
WARPS = 8, 16  # of a program
MIN_WARPS = 16  # per multiprocessor; fewer do not hide the latency of loading words
SHARED_UNIT = 128
MAX_PROGRAMS = 8  # per multiprocessor
ALL_REGISTERS = 1 << 16  # of a multiprocessor
REGISTERS, STAGED_REGISTERS = 80, 128  # of a thread; with fewer, some values would be in memory
PROGRAM_BYTES = 1024  # of shared memory that the device reserves for each program

# Bytes per cycle that a multiprocessor of an H200 receives from memory and from the L2 cache.
MEMORY_RATE, CACHE_RATE = 18, 26
# The time of storing rows of the result, relative to that at MEMORY_RATE, by the adjacent bytes that a warp stores at a
# time: more bytes if programs have fewer vectors. From 256 on, SHORTEST.
STORE_TIMES, SHORTEST = {32: 1.85, 64: 1.35, 128: 1.1}, 0.9
BANK_CONFLICTS = {128: 1.0, 64: 1.5, 32: 2.1, 16: 2.7}  # average accesses per row of so many bytes
ISSUE_RATE = 128  # instructions of threads per cycle
LATENCY = 3500  # cycles from the start of a program to its first stores
ENCODE_CYCLES = 2200  # of the launch that encodes, during which programs copy their blocks of Y
ENCODE_INSTRUCTIONS = 500  # for up to 4 terms of a column
# Memory, shared memory and instructions overlap except for this share of the shorter ones. A program that has a
# multiprocessor for itself takes longer by the second number. (H200, 171 adjoints: estimates of more than 25
# microseconds are 15 % off on average, and the choice of ROW_BYTES costs 2 %.)
NOT_OVERLAPPED, ALONE = 0.15, 0.2
# (Memory floors, additional cycles) of other kernels in general, in power-of-two geometries and, there, in 16 bits with
# nnz <= 4, and in fp64.
OTHERS, OTHERS_POWER_OF_TWO, OTHERS_16_BITS, OTHERS_FP64 = (3.5, 16_000), (1.6, 8000), (2.2, 16_000), (1.6, 8000)
SMALL_ROWS = {0: 0, 4: 16, 8: 32, 16: 32}  # by bytes of a copy: rows up to so many bytes are copied in small pieces
SINGLE_CYCLES = 3  # in which the vectors of a component are read one by one, in addition
SECTOR_CYCLES = 1  # in which a piece of a sector or less is copied, in addition


@dataclass(frozen=True)
class KernelChoice:
    """The constants of `adjoint_staged`.

    Attributes
    ----------
    row_bytes : {16, 32, 64, 128}
        Bytes of the vectors of a program.
    columns : int
        Adjacent columns of a thread.
    copy_bytes : {0, 4, 8, 16}
        Bytes of contiguous vectors that a thread copies at a time; 0 if Y is copied through registers.
    adjacent : int
        Components that a thread copies at a time, and that therefore do not lie in adjacent rows; 1 unless copy_bytes
        is 0.
    width : int
        Reads of adjacent components of one vector by neighbouring threads.
    slices : int
        Parts of a step that copies Y, of `width` reads for each vector; of one component if copy_bytes is not 0.
    reads_vectors : bool
        Whether vectors of Y are contiguous, though not so aligned that they could be copied directly.
    vectors_contiguous : bool
        Whether the vectors of the result are contiguous; otherwise its rows are.
    staged_bytes : int
        Shared memory in which the threads of a program exchange their sums; 0 if the result is so aligned that each
        can store its own.
    warps : int
    registers : int
        Limit per thread.
    """

    row_bytes: int
    columns: int
    copy_bytes: int
    adjacent: int
    width: int
    slices: int
    reads_vectors: bool
    vectors_contiguous: bool
    staged_bytes: int
    warps: int
    registers: int

    @property
    def step(self) -> int:
        """Columns of a program's step."""
        return 32 * self.warps // (self.row_bytes // VECTOR_BYTES) * self.columns


@dataclass(frozen=True)
class StagedAdjoint:
    """A launch of `encode_offsets` and `adjoint_staged`.

    Attributes
    ----------
    kernel : KernelChoice
    shared_bytes : int
        Shared memory of a program for its block of Y.
    spacing : int
        Rows of that block between adjacent components that a thread copies together.
    splits : int
        Number of parts that the columns are split into.
    columns_per_split : int
    """

    kernel: KernelChoice
    shared_bytes: int
    spacing: int
    splits: int
    columns_per_split: int

    @property
    def columns(self) -> int:
        """The number of columns, in whole steps."""
        return self.splits * self.columns_per_split


def eligible(product: Product) -> bool:
    """Whether the kernel can run a product and, judging by estimates, is faster than others."""
    return (
        product.device.asynchronous_copies
        and product.adjoint
        and product.n >= MIN_VECTORS
        and _terms(product) <= MAX_TERMS
        and max(product.n, product.d) < 1 << 30
        and min(product.x_strides) == min(product.y_strides) == 1
        and (product.stacks > 1 or not one_tile.eligible(product) or _favors_sums(product))
        and (chosen := _launch(product)) is not None
        and 4 * words(product, chosen) <= SCRATCH_BYTES
        and _gains(product)
    )


def launch(product: Product) -> StagedAdjoint:
    """The launch for an eligible product."""
    chosen = _launch(product)
    assert chosen is not None
    return chosen


def words(product: Product, launch: StagedAdjoint) -> int:
    """The number of words of a launch, with the padding that `adjoint_staged` reads."""
    return _terms(product) * launch.columns + 2 * launch.kernel.step


def _gains(product: Product) -> bool:
    """Whether the estimate is less than what other kernels take.

    `adjoint_row_gather` reads rows of Y from the L1 cache, and was not compared. Vectors read one by one, or in half
    sectors, take longer than the estimate for many components: Y (20001, 768) -> 2048 in bf16, contiguous vectors, 89
    microseconds and 58 by tensor cores, (60000, 1024) -> 4096 with nnz 2 in fp16 292 and 193 (H200).
    """
    if vectors_contiguous(product) and is_power_of_two(product.k, product.nnz) and product.nnz <= MAX_GATHERED:
        return False
    chosen, terms, device = launch(product), _terms(product), product.device
    encode = product.d * terms / 4 * ENCODE_INSTRUCTIONS / (ISSUE_RATE * device.multiprocessors) + ENCODE_CYCLES
    size = product.n * (product.d + product.k * product.stacks) * product.item_bytes
    floor = size / (MEMORY_RATE * device.multiprocessors)
    floors, cycles = _time_of_others(product)
    others = product.stacks * (floors * floor + cycles)
    own = encode + _cycles(product, chosen.kernel, chosen.splits)
    if chosen.kernel.reads_vectors and not chosen.kernel.copy_bytes:
        own += SINGLE_CYCLES * _components_read(product, chosen.kernel, 1)
    elif chosen.kernel.reads_vectors and chosen.kernel.row_bytes < SECTOR_BYTES:
        own += SECTOR_CYCLES * _components_read(product, chosen.kernel, 1)
    return own <= others


def _cycles_to_choose(product: Product, kernel: KernelChoice, splits: int) -> float:
    """The estimate that decides among kernels.

    In addition to `_cycles`, it counts pieces of a sector or less that are copied: with wider rows, Y (25003, 512) ->
    2963 with nnz 1 in fp32, contiguous vectors, takes 232 instead of 337 microseconds, (1906, 512) -> 2048 with nnz 4
    18 instead of 22 (H200).
    """
    small = kernel.row_bytes <= SMALL_ROWS[kernel.copy_bytes]
    return _cycles(product, kernel, splits) + small * SECTOR_CYCLES * _components_read(product, kernel, splits)


def _components_read(product: Product, kernel: KernelChoice, splits: int) -> int:
    """Components of its blocks of vectors that a multiprocessor reads."""
    programs = splits * -(-product.n * product.item_bytes // kernel.row_bytes)
    return product.k * product.stacks * -(-programs // product.device.multiprocessors)


def _time_of_others(product: Product) -> tuple[float, int]:
    """(Memory floors, additional cycles) of other kernels.

    Measured on an H200, with staged sums and with others: Y (40712, 1536) -> 2770 with nnz 8 in fp32 2.3 and 4.4; Y
    (17069, 128) -> 3072 in bf16 2.4 and 3.2; Y (200000, 512) -> 1536 with nnz 8 in fp32 2.0 and 1.5; but Y (583665,
    128) -> 121 with nnz 8, whose rows cannot be stored 8 bytes at a time, 1.7 and 3.7; Y (812300, 512) -> 1536 with
    nnz 8 in fp16 2.4 and 2.0.
    """
    if product.dtype == "float64":
        return OTHERS_FP64
    stride = product.x_strides[1 if product.x_strides[0] == 1 else 0]
    if not is_power_of_two(product.k, product.nnz) or stride % 2:
        return OTHERS
    return OTHERS_16_BITS if product.item_bytes == 2 and product.nnz <= MAX_GATHERED else OTHERS_POWER_OF_TWO


def _favors_sums(product: Product) -> bool:
    """Whether the few terms of a column are added faster than `one_tile` multiplies all rows of the sketch.

    It multiplies 128 rows for k > 64: Y (123035, 92) -> 768 with nnz 2 in fp32 takes 1.55 memory floors here and 2.2
    there, (12955, 90) -> 3072 in fp16 2.75 and 2.85, but (196243, 124) -> 384 with nnz 8 2.2 and 2.05; for k = 63 and
    nnz 1 1.56 and 2.1, for k = 64 and nnz 2 (7034, 768) 3.1 and 3.4 (H200).

    In 16 bits, rows that begin within a sector of the cache are stored in runs of 64 columns there, in longer ones
    here: Y (450485, 20) -> 1000 with nnz 1 takes 266 microseconds here and 519 there, (230300, 64) -> 1000 with nnz 2
    169 and 288, (125968, 64) -> 1000 with nnz 4 117 and 162, (17322, 32) -> 6045 134 and 169, but with few columns
    (526439, 32) -> 273 249 and 206, or with nnz 8 (127205, 64) -> 1000 195 and 163 (H200).

    With k <= 64 in 16 bits, two terms take 0.79 to 0.95 of the time there for large results (10 products), but 1.0 to
    1.2 for smaller ones (4), and one term 0.87 to 1.09 (7), in microseconds: Y (31908, 32) -> 1024 37 here and 29
    there, (135632, 47) -> 1536 169 and 143, (15390, 32) -> 1024 20 and 21.

    Small products take less time here, because entries are not stored, in microseconds, contiguous vectors: Y (1574,
    64) -> 1024 with nnz 2 8.8 and 14.3, (2360, 64) -> 1024 with nnz 3 11.7 and 14.8, (1099, 64) -> 1000 with nnz 8 10.6
    and 12.6, but (1739, 32) -> 1536 with nnz 8 13.9 and 12.2.
    """
    if product.n * product.d <= MAX_SMALL:
        return product.nnz <= (MAX_GATHERED if product.k <= law.TILE_ROWS // 4 else MAX_SMALL_TERMS)
    elements = product.n * product.d
    whole_sectors = product.x_strides[0] == 1 or product.x_strides[0] * product.item_bytes % SECTOR_BYTES == 0
    if product.item_bytes == 2 and not whole_sectors:
        most = MAX_GATHERED if elements >= MIN_PARTIAL else 2
        return product.nnz <= most and product.d >= MIN_PARTIAL_COLUMNS
    few = 1 if product.item_bytes == 2 and elements >= MANY_ELEMENTS else 2
    return product.nnz <= (MAX_GATHERED if product.k > law.TILE_ROWS // 2 else few)


def _terms(product: Product) -> int:
    """Entries of a column."""
    return product.nnz * product.stacks


@lru_cache(maxsize=4096)
def _launch(product: Product) -> StagedAdjoint | None:
    """The fastest launch according to `_cycles`, or None if none fits in shared memory."""
    choices = [
        (kernel, splits)
        for row_bytes in ROW_BYTES
        if (kernel := _kernel_for(product, row_bytes)) is not None
        for splits in (1 << i for i in range(MAX_LOG_SPLITS + 1))
        if splits == 1 or splits <= -(-product.d // kernel.step)
    ]
    if not choices:
        return None
    return launch_of(product, *min(choices, key=lambda choice: _cycles_to_choose(product, *choice)))


def launch_of(product: Product, kernel: KernelChoice, splits: int) -> StagedAdjoint:
    """The launch with a given kernel and (at most) a given number of splits."""
    per_split = -(-product.d // (splits * kernel.step)) * kernel.step
    return StagedAdjoint(
        kernel=kernel,
        shared_bytes=_shared_bytes(product, kernel),
        spacing=_spacing(product, kernel),
        splits=-(-product.d // per_split),
        columns_per_split=per_split,
    )


def _kernel_for(product: Product, row_bytes: int) -> KernelChoice | None:
    """The kernel whose blocks of Y have rows of `row_bytes`, or None if its shared memory is too large."""
    few, many = (make_kernel(product, row_bytes, warps) for warps in WARPS)
    programs = programs_per_multiprocessor(product, few)
    if programs * few.warps < MIN_WARPS and programs_per_multiprocessor(product, many):
        return many
    return few if programs else None


def make_kernel(product: Product, row_bytes: int, warps: int, columns: int = COLUMNS) -> KernelChoice:
    """The kernel with the given numbers, whether or not it fits in shared memory."""
    copy_bytes, adjacent = _copy_bytes(product), 1
    if product.data_aligned and not copy_bytes:
        adjacent = alignment(product, product.k * product.stacks, product.y_strides, VECTOR_BYTES)
    width = WIDTHS[adjacent * product.item_bytes]
    exchanges = not _stores_alone(product, columns)
    sum_bytes = 8 if product.dtype == "float64" else 4
    sums = 32 * warps * columns * VECTOR_BYTES // product.item_bytes
    return KernelChoice(
        row_bytes=row_bytes,
        columns=columns,
        copy_bytes=copy_bytes,
        adjacent=adjacent,
        width=width,
        slices=_slices(product, row_bytes, warps, copy_bytes or adjacent * product.item_bytes * width),
        reads_vectors=product.y_strides[0] == 1,
        vectors_contiguous=product.x_strides[0] == 1,
        staged_bytes=sums * sum_bytes if exchanges else 0,
        warps=warps,
        registers=STAGED_REGISTERS if exchanges else REGISTERS,
    )


def _stores_alone(product: Product, columns: int) -> bool:
    """Whether what a thread stores is aligned: adjacent columns of a vector, or adjacent vectors of a column."""
    strides, width, adjacent = product.x_strides, product.d, min(columns, VECTOR_BYTES // product.item_bytes)
    if product.x_strides[0] == 1:
        strides, width, adjacent = strides[::-1], product.n, VECTOR_BYTES // product.item_bytes
    return product.plain and alignment(product._replace(n=2), width, strides, VECTOR_BYTES) % adjacent == 0


def _slices(product: Product, row_bytes: int, warps: int, run_bytes: int) -> int:
    """Components, or slices of all vectors and `run_bytes` of components, that a program copies in a step."""
    copied, components = 32 * warps * COPIED_BYTES, product.k * product.stacks
    if _copy_bytes(product):
        return copied // VECTOR_BYTES * run_bytes // row_bytes
    slices = -(-components * product.item_bytes // run_bytes)
    return max(1, min(next_power_of_two(slices), copied * product.item_bytes // (run_bytes * row_bytes)))


def _copy_bytes(product: Product) -> int:
    """The bytes of contiguous vectors of Y that one copy may cover; 0 if it must go through registers."""
    item = product.item_bytes
    if product.y_strides[0] != 1:
        return 0
    copied = math.gcd(VECTOR_BYTES, product.y_strides[1] * item) if product.data_aligned else item
    return copied if copied >= 4 else 0


def _spacing(product: Product, kernel: KernelChoice) -> int:
    return -(-product.k * product.stacks // kernel.adjacent)


def _fitting_programs(product: Product, kernel: KernelChoice) -> int:
    """The number of programs that fit in the shared memory of a multiprocessor."""
    rows = _spacing(product, kernel) * kernel.adjacent + 1  # the last one for components that do not exist
    size = kernel.staged_bytes + rows * kernel.row_bytes + VECTOR_BYTES + PROGRAM_BYTES
    size = -(-size // SHARED_UNIT) * SHARED_UNIT
    return min((product.device.shared_memory + PROGRAM_BYTES) // size, MAX_PROGRAMS)


def _shared_bytes(product: Product, kernel: KernelChoice) -> int:
    """Shared memory of a program: one of few sizes, because a kernel is compiled for each."""
    each = (product.device.shared_memory + PROGRAM_BYTES) // _fitting_programs(product, kernel)
    return each // SHARED_UNIT * SHARED_UNIT - PROGRAM_BYTES


def programs_per_multiprocessor(product: Product, kernel: KernelChoice) -> int:
    """The number of programs that run at the same time on a multiprocessor; 0 if a program is too large."""
    return min(_fitting_programs(product, kernel), ALL_REGISTERS // (32 * kernel.warps * kernel.registers))


def _cycles(product: Product, kernel: KernelChoice, splits: int) -> float:
    """An estimate of the cycles of `adjoint_staged`."""
    item, row, terms, sms = product.item_bytes, kernel.row_bytes, _terms(product), product.device.multiprocessors
    quads, elements = row // VECTOR_BYTES, VECTOR_BYTES // item
    steps = -(-product.d // (splits * kernel.step))
    columns = steps * kernel.step
    programs = splits * -(-product.n * item // row)
    filled = product.k * product.stacks * row
    resident = programs_per_multiprocessor(product, kernel)
    fetched = filled / (MEMORY_RATE if splits == 1 else CACHE_RATE) + 4 * terms * columns / CACHE_RATE
    run = item * (32 // quads) * kernel.columns
    store_time = 1.0 if kernel.vectors_contiguous else STORE_TIMES.get(run, SHORTEST)
    memory = fetched + min(columns, product.d) * row / MEMORY_RATE * store_time
    shared = (columns * terms * row * (BANK_CONFLICTS[row] + 0.25) + 2 * filled) / BANK_BYTES
    per_term = 5 + elements * (2 if item == 2 else 1)
    issue = (columns * quads * (terms * per_term + 3 * elements) + filled / 2) / ISSUE_RATE
    on_one = -(-programs // sms)
    waves = -(-on_one // resident)
    latency = LATENCY * (1 + (waves - 1) / resident)
    longest = max(memory, shared, issue)
    busy = longest + NOT_OVERLAPPED * (memory + shared + issue - longest)
    return on_one * busy * (1 + ALONE / min(resident, on_one)) + latency
