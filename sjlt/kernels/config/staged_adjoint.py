"""Eligibility and launches of `adjoint_staged`: pure functions of a `Product`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from . import one_tile
from .product import SCRATCH_BYTES, VECTOR_BYTES, Product, alignment, next_power_of_two

MIN_VECTORS = 16
MAX_TERMS = 16  # of a column; then instructions and shared memory take several times as long as memory
ROW_BYTES = (128, 64, 32, 16)  # per component of a block of vectors in shared memory
BANK_BYTES = 128  # that shared memory delivers in a cycle
COLUMNS = 4  # adjacent columns of a thread
COPIED_BYTES = 64  # of Y per thread and step
MIN_WARPS = 16  # per multiprocessor; fewer do not hide the latency of loading words
SIZE_UNIT = 4096  # of the shared memory of a program, for each of whose sizes a kernel is compiled
PITCH_UNIT = 128  # words of a term are padded to a multiple of this number of columns

# Bytes per cycle that a multiprocessor of an H200 receives from memory and from the L2 cache.
MEMORY_RATE, CACHE_RATE = 18, 26
BANK_CONFLICTS = {128: 1.0, 64: 1.5, 32: 2.1, 16: 2.7}  # average accesses per row of so many bytes
ISSUE_RATE = 128  # instructions of threads per cycle
LATENCY = 2500  # cycles from the start of a program to its first stores
ENCODE_CYCLES = 4000  # of the launch that encodes
ENCODE_INSTRUCTIONS = 500  # for up to 4 terms of a column
# Other kernels take about so many memory floors, and so many cycles more.
OTHER_FLOORS, OTHER_CYCLES = 2.2, 8000


@dataclass(frozen=True)
class KernelChoice:
    """The constants of `adjoint_staged`.

    Attributes
    ----------
    row_bytes : {16, 32, 64, 128}
        Bytes of the vectors of a program.
    columns : int
        Adjacent columns of a thread.
    slices : int
        Parts of a step that copies Y.
    copy_bytes : {0, 4, 8, 16}
        Bytes of contiguous vectors that a thread copies at a time; 0 if Y is copied through registers.
    read_align : int
        If copy_bytes is 0, adjacent components of Y that one access may cover.
    vectors_contiguous : bool
        Whether the vectors of the result are contiguous; otherwise its rows are.
    staged_bytes : int
        Shared memory in which the threads of a program exchange their sums; 0 if the result is so aligned that each
        can store its own.
    warps : int
    """

    row_bytes: int
    columns: int
    slices: int
    copy_bytes: int
    read_align: int
    vectors_contiguous: bool
    staged_bytes: int
    warps: int

    @property
    def adjacent(self) -> int:
        """Components that a thread copies at a time, and that therefore do not lie in adjacent rows."""
        return 1 if self.copy_bytes else self.read_align

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
    pitch : int
        Columns of the words, including padding.
    splits : int
        Number of parts that the columns are split into.
    columns_per_split : int
    """

    kernel: KernelChoice
    shared_bytes: int
    spacing: int
    pitch: int
    splits: int
    columns_per_split: int


def eligible(product: Product) -> bool:
    """Whether the kernel can run a product and, judging by estimates, is faster than others."""
    return (
        product.device.asynchronous_copies
        and product.adjoint
        and product.n >= MIN_VECTORS
        and _terms(product) <= MAX_TERMS
        and max(product.n, product.d) < 1 << 30
        and 4 * _terms(product) * _pitch(product) <= SCRATCH_BYTES
        and min(product.x_strides) == min(product.y_strides) == 1
        and not one_tile.eligible(product)
        and _launch(product) is not None
        and _gains(product)
    )


def launch(product: Product) -> StagedAdjoint:
    """The launch for an eligible product."""
    chosen = _launch(product)
    assert chosen is not None
    return chosen


def _gains(product: Product) -> bool:
    chosen = launch(product)
    terms = _terms(product)
    encode = ENCODE_CYCLES + product.d * terms / 4 * ENCODE_INSTRUCTIONS / (
        ISSUE_RATE * product.device.multiprocessors
    )
    size = product.n * (product.d + product.k * product.stacks) * product.item_bytes
    floor = size / (MEMORY_RATE * product.device.multiprocessors)
    return encode + _cycles(product, chosen.kernel, chosen.splits) <= OTHER_FLOORS * floor + OTHER_CYCLES


def _terms(product: Product) -> int:
    """Entries of a column."""
    return product.nnz * product.stacks


def _pitch(product: Product) -> int:
    return -(-product.d // PITCH_UNIT) * PITCH_UNIT


@lru_cache(maxsize=4096)
def _launch(product: Product) -> StagedAdjoint | None:
    """The fastest launch according to `_cycles`, or None if none fits in shared memory."""
    kernels = [kernel for row_bytes in ROW_BYTES if (kernel := _kernel(product, row_bytes)) is not None]
    if not kernels:
        return None
    choices = [
        (kernel, splits)
        for kernel in kernels
        for splits in (1 << i for i in range(12))
        if splits == 1 or splits <= -(-product.d // kernel.step)
    ]
    kernel, splits = min(choices, key=lambda choice: _cycles(product, *choice))
    per_split = -(-product.d // (splits * kernel.step)) * kernel.step
    spacing, size = _copied_rows(product, kernel)
    return StagedAdjoint(kernel, size, spacing, _pitch(product), -(-product.d // per_split), per_split)


def _kernel(product: Product, row_bytes: int) -> KernelChoice | None:
    """The kernel whose blocks of Y have rows of `row_bytes`, or None if its shared memory is too large."""
    item, copy_bytes = product.item_bytes, _copy_bytes(product)
    read_align = alignment(product, product.k * product.stacks, product.y_strides, VECTOR_BYTES)
    for warps in (8, 16):
        kernel = KernelChoice(
            row_bytes=row_bytes,
            columns=COLUMNS,
            slices=_slices(product, row_bytes, warps, copy_bytes),
            copy_bytes=copy_bytes,
            read_align=read_align if product.data_aligned and not copy_bytes else 1,
            vectors_contiguous=product.x_strides[0] == 1,
            staged_bytes=0 if _stores_alone(product) else 32 * warps * COLUMNS * VECTOR_BYTES * (2 if product.item_bytes == 2 else 1),
            warps=warps,
        )
        programs = _programs_per_multiprocessor(product, kernel)
        if programs * warps >= MIN_WARPS:
            break
    return kernel if programs else None


def _stores_alone(product: Product) -> bool:
    """Whether what a thread stores is aligned: adjacent columns of a vector, or adjacent vectors of a column."""
    strides, width, adjacent = product.x_strides, product.d, COLUMNS
    if product.x_strides[0] == 1:
        strides, width, adjacent = strides[::-1], product.n, VECTOR_BYTES // product.item_bytes
    return product.plain and alignment(product._replace(n=2), width, strides, adjacent) == adjacent


def _slices(product: Product, row_bytes: int, warps: int, copy_bytes: int) -> int:
    """Components, or slices of BANK_BYTES of components of a vector, that a program copies in a step."""
    copied = 32 * warps * COPIED_BYTES
    if copy_bytes:
        return 32 * warps * COPIED_BYTES // VECTOR_BYTES * copy_bytes // row_bytes
    slices = -(-product.k * product.stacks * product.item_bytes // BANK_BYTES)
    return min(next_power_of_two(slices), copied // BANK_BYTES * product.item_bytes // row_bytes)


def _copy_bytes(product: Product) -> int:
    """The bytes of contiguous vectors of Y that one copy may cover; 0 if it must go through registers."""
    item = product.item_bytes
    if product.y_strides[0] != 1:
        return 0
    copied = math.gcd(VECTOR_BYTES, product.y_strides[1] * item) if product.data_aligned else item
    return copied if copied >= 4 else 0


def _copied_rows(product: Product, kernel: KernelChoice) -> tuple[int, int]:
    """(spacing, bytes of shared memory) of the copy of a block of Y, with an additional row."""
    spacing = -(-product.k * product.stacks // kernel.adjacent)
    size = kernel.staged_bytes + (spacing * kernel.adjacent + 1) * kernel.row_bytes + VECTOR_BYTES
    return spacing, -(-size // SIZE_UNIT) * SIZE_UNIT


def _programs_per_multiprocessor(product: Product, kernel: KernelChoice) -> int:
    size = _copied_rows(product, kernel)[1]
    whole = product.device.shared_memory
    return min(whole // (size + 1024), 2048 // (32 * kernel.warps), 4)


def _cycles(product: Product, kernel: KernelChoice, splits: int) -> float:
    """An estimate of the cycles of `adjoint_staged`."""
    item, row, terms, sms = product.item_bytes, kernel.row_bytes, _terms(product), product.device.multiprocessors
    quads, elements = row // VECTOR_BYTES, VECTOR_BYTES // item
    steps = -(-product.d // (splits * kernel.step))
    columns = steps * kernel.step
    programs = splits * -(-product.n * item // row)
    filled = product.k * product.stacks * row
    resident = _programs_per_multiprocessor(product, kernel)
    fetched = filled / (MEMORY_RATE if splits == 1 else CACHE_RATE) + 4 * terms * columns / CACHE_RATE
    memory = fetched + min(columns, product.d) * row / MEMORY_RATE
    shared = (columns * terms * row * (BANK_CONFLICTS[row] + 0.25) + 2 * filled) / BANK_BYTES
    per_term = 5 + elements * (2 if item == 2 else 1)
    issue = (columns * quads * (terms * per_term + 3 * elements) + filled / 2) / ISSUE_RATE
    on_one = -(-programs // sms)
    waves = -(-on_one // resident)
    latency = LATENCY * (1 + (waves - 1) / resident)
    return on_one * max(memory, shared, issue) + latency
