"""Eligibility and launches of `project_staged`: pure functions of a `Product`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from ...laws import exact as law
from .product import SCRATCH_BYTES, VECTOR_BYTES, Product, count_groups, is_power_of_two, next_power_of_two

MIN_BYTES = 8 << 20  # of X, below which the launch that encodes outweighs what the kernel gains
MIN_ROW_BYTES, MAX_ROW_BYTES = 32, 512  # of a column of the data in shared memory
SUMS = (1 << 15, 1 << 14)  # 32-bit registers that a program keeps sums in: all of a multiprocessor's programs have 2^15
WARP_SUMS = 4096  # the most per warp
MAX_TERMS = {"float32": 512, "float64": 4096}  # of a sum without partial sums
WORD_BYTES = SCRATCH_BYTES // 2  # of the words that one pass encodes
TRITON_BYTES = 16 << 10, 32 << 10  # of shared memory that Triton takes at most, with contiguous vectors and others
BANK_CONFLICTS = {32: 2.1, 64: 1.5}  # accesses to shared memory that one of columns of so few bytes takes, on average
MEMORY_RATE, CACHE_RATE, SHARED_RATE = 18, 26, 128  # bytes that a multiprocessor of an H200 receives in a cycle
STEP_CYCLES = 300  # of a program's step, for latencies


@dataclass(frozen=True)
class KernelChoice:
    """The constants of `project_staged` that it is compiled for.

    Attributes
    ----------
    rows, vectors : int
        Of a program's sums, powers of two.
    columns : int
        Of a group of chunks.
    stages : int
        Groups in shared memory.
    copy_bytes : int
        That a thread copies at a time: 4, 8 or 16.
    vectors_contiguous : bool
        Whether consecutive numbers of the data belong to consecutive vectors; else they are one vector's.
    warps : int
    shared_bytes : int
        Of shared memory.
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
        Programs that share out the rows of all tiles.
    splits, groups_per_split : int
        Parts that the sums are split into, each of so many groups of chunks.
    splits_per_pass : int
        Splits whose words are in memory at a time.
    """

    kernel: KernelChoice
    parts: int
    splits: int
    groups_per_split: int
    splits_per_pass: int


def eligible(product: Product) -> bool:
    """Whether the kernel can run a product and gains by it."""
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
    """Whether other kernels read the data several times: for stacks in fp32, and in fp64 (H200, floors, others first).

    S A with 4 stacks 4.1 and 1.2, (300000, 300) -> 1200 10 and 4.7; X Sᵀ 3.9 and 1.5. Tensor cores are faster for rows
    of X where many of a tile's rows have no entry in a group, or rows begin at any place: (200003, 777) -> 700 with 2
    stacks 3.8 and 6.0. One stack in fp64: (300000, 512) -> 300 16.6 and 2.6, with nnz 2 1.3 and 1.1.
    """
    if product.dtype == "float64":
        return product.nnz * product.stacks > 1
    contiguous = product.x_strides[0] == 1
    whole = is_power_of_two(product.k, product.nnz) and _copy_bytes(product) == VECTOR_BYTES
    return product.dtype == "float32" and product.stacks > 1 and (contiguous or whole)


def launch(product: Product) -> StagedGather:
    """The launch for an eligible product."""
    chosen = _launch(product)
    assert chosen is not None
    return chosen


@lru_cache(maxsize=4096)
def _launch(product: Product) -> StagedGather | None:
    """The fastest launch by `_cycles`, or None where none fits."""
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
    """The rows of the tiles of all stacks, each of which counts as whole."""
    return law.TILE_ROWS * product.geometry.n_tiles * product.stacks


def _kernel(product: Product, sums: int, row_bytes: int) -> KernelChoice | None:
    item, words = product.item_bytes, product.item_bytes // 4
    vectors, contiguous = row_bytes // item, product.x_strides[0] == 1
    rows = min(next_power_of_two(_all_rows(product)), sums // words // vectors)
    columns = 1 << product.geometry.log_group + product.geometry.log_chunk
    if rows < law.TILE_ROWS or rows * vectors * words < SUMS[-1] or (not contiguous and columns < 32):
        return None
    held = rows * vectors * words
    available = (product.device.shared_memory * held >> 15) - TRITON_BYTES[not contiguous]
    stage = (columns + 1) * row_bytes + 4 * rows
    stages = 3 if contiguous and 3 * stage <= available else 2
    if stages * stage > available:
        return None
    warps = 16 if contiguous and held == SUMS[0] else held // WARP_SUMS
    return KernelChoice(
        rows, vectors, columns, stages, _copy_bytes(product), contiguous, warps, stages * stage + VECTOR_BYTES
    )


def _copy_bytes(product: Product) -> int:
    """The bytes that one access may cover: neighbours in memory, all inside the data or all outside."""
    item, far = product.item_bytes, max(product.x_strides) if product.n > 1 else 0
    if not product.data_aligned:
        return item
    if product.x_strides[0] == 1:
        return math.gcd(VECTOR_BYTES, far * item)
    return math.gcd(VECTOR_BYTES, far * item, product.d * item, product.offset * item)


def _cycles(product: Product, kernel: KernelChoice, parts: int) -> float:
    """Cycles of a multiprocessor per byte of data, roughly."""
    row_bytes = kernel.vectors * product.item_bytes
    step = kernel.columns * row_bytes
    read = kernel.rows * row_bytes * (BANK_CONFLICTS.get(row_bytes, 1.0) + 0.25)
    written = step * (1 if kernel.vectors_contiguous else 2)
    programs = (1 << 15) // (kernel.rows * kernel.vectors * product.item_bytes // 4)
    fetched = max(step / CACHE_RATE, step / (MEMORY_RATE * parts))
    return parts * max(fetched, (read + written) / SHARED_RATE + STEP_CYCLES / programs) / step


def _split(product: Product, kernel: KernelChoice, parts: int) -> tuple[int, int, int] | None:
    """(splits, groups in each, splits in a pass), or None where partial sums do not fit."""
    groups, item = count_groups(product), product.item_bytes
    programs = parts * -(-product.n // kernel.vectors)
    per_multiprocessor = (1 << 15) // (kernel.rows * kernel.vectors * item // 4)
    memory = max(SCRATCH_BYTES, product.n * product.d * item // 20) - WORD_BYTES
    fitting = memory // (item * product.n * product.k * product.stacks)
    wanted = per_multiprocessor * product.device.multiprocessors // programs
    splits = max(-(-groups // MAX_TERMS[product.dtype]), min(wanted, fitting, groups // 4), 1)
    # The kernel overwrites a result of its own dtype, in the memory order of its data; others are partial sums first.
    is_direct = splits == 1 and product.plain and (not kernel.vectors_contiguous or product.y_strides[0] == 1)
    if splits > fitting and not is_direct:
        return None
    per_split = -(-groups // splits)
    per_pass = WORD_BYTES // (4 * parts * kernel.rows * per_split)
    return (-(-groups // per_split), per_split, per_pass) if per_pass else None
