"""Eligibility and launches of `project_staged`: pure functions of a `Product`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from ...laws import exact as law
from .product import SCRATCH_BYTES, VECTOR_BYTES, Product, count_groups, is_power_of_two, next_power_of_two

MIN_BYTES = 8 << 20  # of X; for fewer, the launch that encodes costs more than the kernel saves
MIN_ROW_BYTES, MAX_ROW_BYTES = 32, 512  # per column of the data in shared memory
ALL_SUMS = 1 << 15  # 32-bit registers for the sums of all programs of a multiprocessor
SUMS = (ALL_SUMS, ALL_SUMS // 2)  # of these, for the sums of a program
WARP_SUMS = 4096  # of these, for the sums of a warp
MAX_TERMS = {"float32": 512, "float64": 4096}  # per split
WORD_BYTES = SCRATCH_BYTES // 2  # for the words that one pass encodes
TRITON_BYTES = 16 << 10, 32 << 10  # shared memory that Triton reserves at most, with contiguous vectors and without
BANK_CONFLICTS = {32: 2.1, 64: 1.5}  # average number of accesses to shared memory that a column of so many bytes takes
# Bytes per cycle that a multiprocessor of an H200 receives from memory, from the L2 cache and from shared memory.
MEMORY_RATE, CACHE_RATE, SHARED_RATE = 18, 26, 128
STEP_CYCLES = 300  # latency of a step of a program


@dataclass(frozen=True)
class KernelChoice:
    """The constants of `project_staged`.

    Attributes
    ----------
    rows, vectors : int
        Shape of the sums of a program; powers of two.
    columns : int
        Columns per group of chunks.
    stages : int
        Groups that shared memory holds.
    copy_bytes : {4, 8, 16}
        Bytes that a thread copies at a time.
    vectors_contiguous : bool
        Whether consecutive elements of the data belong to consecutive vectors; otherwise rows of X are contiguous.
    warps : int
    shared_bytes : int
        Shared memory of a program.
    """

    rows: int
    vectors: int
    columns: int
    stages: int
    copy_bytes: int
    vectors_contiguous: bool
    warps: int
    shared_bytes: int


@dataclass(frozen=True)
class StagedGather:
    """A launch of `encode_groups` and `project_staged`.

    Attributes
    ----------
    kernel : KernelChoice
    parts : int
        Number of programs that divide the rows of all tiles among them.
    splits, groups_per_split : int
        Number of parts that the sums are split into, and of groups of chunks in each part.
    splits_per_pass : int
        Number of splits whose words are in memory at a time.
    """

    kernel: KernelChoice
    parts: int
    splits: int
    groups_per_split: int
    splits_per_pass: int


def eligible(product: Product) -> bool:
    """Whether the kernel can run a product and is faster than others."""
    item = product.item_bytes
    return (
        product.device.asynchronous_copies
        and not product.adjoint
        and _gains(product)
        and product.n * item >= 2 * MIN_ROW_BYTES
        and product.n * product.d * item >= MIN_BYTES
        and product.n < 1 << 30
        and product.d < 1 << 30
        and min(product.x_strides) == 1
        and max(product.x_strides) * item < 1 << 31
        and _launch(product) is not None
    )


def _gains(product: Product) -> bool:
    """Whether other kernels read the data several times: in fp32 with stacks, and in fp64.

    In memory floors on an H200, with 4 stacks in fp32: S A takes 1.2 against 4.1 with other kernels, (300000, 300) ->
    1200 takes 4.7 against 10, and X Sᵀ takes 1.5 against 3.9. Tensor cores are faster for X Sᵀ if many rows of a tile
    have no entry in a group, or rows of X are not aligned: (200003, 777) -> 700 with 2 stacks takes 6.0 here and 3.8
    there. With one stack in fp64, (300000, 512) -> 300 takes 2.6 against 16.6, and with nnz 2 1.1 against 1.3.
    """
    if product.dtype == "float64":
        return product.nnz * product.stacks > 1
    contiguous = product.x_strides[0] == 1
    dense_and_aligned = is_power_of_two(product.k, product.nnz) and _copy_bytes(product) == VECTOR_BYTES
    return product.dtype == "float32" and product.stacks > 1 and (contiguous or dense_and_aligned)


def launch(product: Product) -> StagedGather:
    """The launch for an eligible product."""
    chosen = _launch(product)
    assert chosen is not None
    return chosen


@lru_cache(maxsize=4096)
def _launch(product: Product) -> StagedGather | None:
    """The fastest launch according to `_cycles`, or None if none fits in memory."""
    choices = [
        (kernel, parts)
        for sums in SUMS
        for row_bytes in (1 << i for i in range(MIN_ROW_BYTES.bit_length() - 1, MAX_ROW_BYTES.bit_length()))
        if (kernel := _kernel(product, sums, row_bytes)) is not None
        and (parts := -(-_all_rows(product) // kernel.rows)) * kernel.rows < 2 * next_power_of_two(_all_rows(product))
    ]
    for kernel, parts in sorted(choices, key=lambda choice: _cycles(product, *choice)):
        if (split := _split(product, kernel, parts)) is not None:
            return StagedGather(kernel, parts, *split)
    return None


def _all_rows(product: Product) -> int:
    """The number of rows of the tiles of all stacks, where each tile counts as TILE_ROWS rows."""
    return law.TILE_ROWS * product.geometry.n_tiles * product.stacks


def _kernel(product: Product, sums: int, row_bytes: int) -> KernelChoice | None:
    """The kernel with at most `sums` registers for the sums of a program and `row_bytes` per column, or None."""
    item, words = product.item_bytes, product.item_bytes // 4
    vectors, contiguous = row_bytes // item, product.x_strides[0] == 1
    rows = min(next_power_of_two(_all_rows(product)), sums // words // vectors)
    columns = 1 << product.geometry.log_group + product.geometry.log_chunk
    if rows < law.TILE_ROWS or rows * vectors * words < SUMS[-1] or (not contiguous and columns < 32):
        return None
    held = rows * vectors * words
    available = product.device.shared_memory * held // ALL_SUMS - TRITON_BYTES[not contiguous]
    stage = (columns + 1) * row_bytes + 4 * rows
    stages = 3 if contiguous and 3 * stage <= available else 2
    if stages * stage > available:
        return None
    warps = 16 if contiguous and held == ALL_SUMS else held // WARP_SUMS
    return KernelChoice(
        rows, vectors, columns, stages, _copy_bytes(product), contiguous, warps, stages * stage + VECTOR_BYTES
    )


def _copy_bytes(product: Product) -> int:
    """The bytes that one access may cover: adjacent elements, all inside the data or none."""
    item, far = product.item_bytes, max(product.x_strides) if product.n > 1 else 0
    if not product.data_aligned:
        return item
    if product.x_strides[0] == 1:
        return math.gcd(VECTOR_BYTES, far * item)
    return math.gcd(VECTOR_BYTES, far * item, product.d * item, product.offset * item)


def _cycles(product: Product, kernel: KernelChoice, parts: int) -> float:
    """An estimate of the cycles of a multiprocessor per byte of data."""
    row_bytes = kernel.vectors * product.item_bytes
    step = kernel.columns * row_bytes
    read = kernel.rows * row_bytes * (BANK_CONFLICTS.get(row_bytes, 1.0) + 0.25)
    written = step * (1 if kernel.vectors_contiguous else 2)
    fetched = max(step / CACHE_RATE, step / (MEMORY_RATE * parts))
    latency = STEP_CYCLES / _programs_per_multiprocessor(product, kernel)
    return parts * max(fetched, (read + written) / SHARED_RATE + latency) / step


def _programs_per_multiprocessor(product: Product, kernel: KernelChoice) -> int:
    return ALL_SUMS // (kernel.rows * kernel.vectors * product.item_bytes // 4)


def _split(product: Product, kernel: KernelChoice, parts: int) -> tuple[int, int, int] | None:
    """(splits, groups per split, splits per pass), or None if partial sums or words do not fit in memory."""
    groups, item = count_groups(product), product.item_bytes
    programs = parts * -(-product.n // kernel.vectors)
    memory = max(SCRATCH_BYTES, product.n * product.d * item // 20) - WORD_BYTES
    fitting = memory // (item * product.n * product.k * product.stacks)
    wanted = _programs_per_multiprocessor(product, kernel) * product.device.multiprocessors // programs
    splits = max(-(-groups // MAX_TERMS[product.dtype]), min(wanted, fitting, groups // 4), 1)
    # The kernel can only overwrite a result that has the dtype and memory order of its data; any other result requires
    # partial sums.
    is_direct = splits == 1 and product.plain and (not kernel.vectors_contiguous or product.y_strides[0] == 1)
    if splits > fitting and not is_direct:
        return None
    per_split = -(-groups // splits)
    per_pass = WORD_BYTES // (4 * parts * kernel.rows * per_split)
    return (-(-groups // per_split), per_split, per_pass) if per_pass else None
