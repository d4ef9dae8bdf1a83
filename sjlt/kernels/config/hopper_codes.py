"""Eligibility and launches of `project_codes_hopper`: pure functions of a `Product`.

It covers what `project_hopper` does not: any k, nnz and strides, accumulated results, and results of another dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ...laws import exact as law
from .arithmetic import MAX_CHUNKS
from .hopper import MAX_STEPS, PROGRAM_VECTORS, STEP_COLUMNS
from .hopper_loaders import KernelChoice, kernel_choice, reaches
from .product import (
    SCRATCH_BYTES,
    VECTOR_BYTES,
    Product,
    alignment,
    count_groups,
    is_power_of_two,
    is_small_and_narrow,
    loaded_bytes,
    suits_half_blocks,
    vector_alignment,
    vectors_contiguous,
)

INTEGERS = ["n", "d", "k", "products", "splits", "n_tiles", "capacity", "scale"]
INTEGERS += ["stride_v", "stride_f", "stride_os", "stride_ov", "stride_or", "columns_per_split", "address"]

MIN_BYTES = 1 << 20  # of X; for fewer, two launches cost more host time than the kernel saves
FAST, FAST_16_BITS, MAX_FAST_VECTORS = 8, 16, 1024  # see `_least_factor`
MIN_VECTORS, MIN_COLUMNS = 48, 32  # for fewer rows of X, or columns of A, blocks of vectors are mostly empty
MIN_BYTES_PER_CODE = 6  # data bytes per byte of codes; for fewer, writing and reading codes dominates
MIN_BYTES_PER_MANY = 3  # the same for nnz > 4 and many columns: the time of other kernels is proportional to nnz
# Estimated times in microseconds, and bytes per microsecond; see `_time`. For 53 products on an H100, 1 to 290 MB of
# data, the fewest splits with almost the least estimate take on average 1.004 times as long as the best ones, at most
# 1.08 times.
STEP_TIME, START_STEPS, REDUCE_TIME = 1.0, 2, 1.5
CACHE_RATE = 4e6
ALMOST = 1.03  # estimates that differ by less are considered equal
MAX_SPLITS = 256
MIN_LONG_COLUMNS, MAX_LONG_ROWS = 1 << 20, 512  # see `_gains` and `_favors_half_blocks`
ALIGNED = 8  # columns, at multiples of which passes begin, so that the data of all is aligned alike
PASS_SPLITS = 4  # splits per pass are a multiple of this, so that the sums of earlier passes are aligned, too
PASS_TIME = 8.0  # of the launches of a pass, in microseconds
MORE_PASSES = 8  # numbers of passes considered, from the fewest possible on


@dataclass(frozen=True)
class HopperCodes:
    """A launch of `encode_chunks` and `project_codes_hopper`.

    Attributes
    ----------
    kernel : KernelChoice
    splits, groups_per_split : int
        Number of parts that the sums are split into, and of groups of chunks in each part.
    splits_per_pass : int
        If less than `splits`, the codes of this many splits are written and used at a time, of fewer at first, and
        their partial sums are added to those of earlier passes.
    capacity : int
        Number of blocks that a list of codes has room for.
    products : int
        Number of pairs of a tile and a block of vectors, for each split.
    columns_per_split : int
    prefetch : bool
        Whether programs copy the data that they read first to the L2 cache while the codes are written.
    """

    kernel: KernelChoice
    splits: int
    groups_per_split: int
    splits_per_pass: int
    capacity: int
    products: int
    columns_per_split: int
    prefetch: bool

    @property
    def passes(self) -> int:
        """The number of passes."""
        return -(-self.splits // self.splits_per_pass)


def launch(product: Product) -> HopperCodes:
    """The launch for an eligible product."""
    geometry = product.geometry
    found = _split(product)
    assert found is not None
    splits, groups_per_split, splits_per_pass, _ = found
    kernel = kernel_choice(product, splits)
    return HopperCodes(
        kernel,
        splits,
        groups_per_split,
        splits_per_pass,
        groups_per_split << (geometry.log_chunk - kernel.log_block),
        _count_products(product),
        groups_per_split << geometry.log_group << geometry.log_chunk,
        prefetch=product.x_strides[0 if vectors_contiguous(product) else 1] == 1,
    )


def eligible(product: Product) -> bool:
    """Whether the kernel can run a product that is large enough for a gain. The caller checks `Device.hopper`."""
    if product.adjoint or product.dtype == "float64" or product.precision == "medium":
        return False
    geometry = product.geometry
    least = MIN_BYTES * _least_factor(product)
    return (
        geometry.log_chunk > 0
        and product.x_bytes >= least
        and _gains(product)
        and product.n <= (1 << 31) - PROGRAM_VECTORS
        and product.d < 1 << 30
        and reaches(product)
        and _split(product) is not None
    )


def _gains(product: Product) -> bool:
    """Whether there are enough vectors to outweigh the cost of the codes and of the padding of a block.

    The portable kernels are faster for S A of few columns in fp32 with nnz <= 2 or, in a power-of-two geometry, with
    nnz <= 4: (64, 2000000) -> 256 with nnz 4 takes 1.3 memory floors with `row_gather` and 2.4 from codes (H200),
    (64, 316715) -> 768 with nnz 2 2.2 with `few_vectors` and 2.7 from codes (H100). With only 3 bytes of data per byte
    of codes, X (50, 6000000) -> 40 with nnz 8 in fp16 takes 7.4 from codes, 10.4 with `scattered_sums` and 14.4 with
    `tensor_core`; with 6, X (100, 7000000) -> 18 with nnz 3 takes 2.3, 2.9 and 10.1, and A of this shape 2.6, 4.0 and
    11.3 (H200).
    """
    contiguous = vectors_contiguous(product)
    if is_small_and_narrow(product) or _favors_half_blocks(product):
        return False
    if contiguous and _is_narrow(product) and (product.nnz <= 2 or is_power_of_two(product.k, product.nnz)):
        return False
    # With nnz 1, A (2762733, 32) -> 32 in fp16 takes 183 us from codes and 88 us by `few_vectors`.
    least = MIN_COLUMNS if contiguous and product.nnz > 1 else MIN_VECTORS
    many = product.nnz > 4 and product.d >= MIN_LONG_COLUMNS
    per_code = MIN_BYTES_PER_MANY if many else MIN_BYTES_PER_CODE
    code_bytes = law.TILE_ROWS * product.stacks  # for the columns of one chunk
    return product.n >= least and product.n * product.item_bytes << product.geometry.log_chunk >= per_code * code_bytes


def _favors_half_blocks(product: Product) -> bool:
    """Whether half of a block of PROGRAM_VECTORS vectors is empty, and `tensor_core`, with half as many, is faster.

    From codes and with tensor cores alone, in microseconds on an H200: A (484744, 64) -> 154 with nnz 4 in fp32 100 and
    89; A (312500, 64) -> 4096 with nnz 3 in bf16 44 and 37; X (64, 468744) -> 256 with nnz 3 in fp16 66 and 48; X (64,
    1000000) -> 1000 with nnz 4 in bf16 130 and 122. With nnz 8 only for S A in power-of-two geometries: A (252565, 64)
    -> 128 in bf16 44 and 31 (H100), but A (4342324, 64) -> 640 485 and 701. Not for sums of many columns in 16 bits, X
    (64, 2000000) -> 300 with nnz 4 in fp16 246 and 285, but A (1982281, 64) -> 487 with nnz 3 in fp32 306 and 262; for
    S A with nnz 1; or unless `suits_half_blocks`.
    """
    contiguous = vectors_contiguous(product)
    most = 8 if contiguous and is_power_of_two(product.k, product.nnz) else 4
    if product.n > PROGRAM_VECTORS // 2 or product.nnz > most:
        return False
    many_columns = product.n > MIN_VECTORS and product.d >= MIN_LONG_COLUMNS and product.k <= MAX_LONG_ROWS
    if many_columns and product.item_bytes == 2:
        return False
    if not contiguous:
        return product.item_bytes == 2 and loaded_bytes(product) > 4
    return product.nnz > 1 and suits_half_blocks(product)


def _is_narrow(product: Product) -> bool:
    """Whether a row of A in fp32 has at most half as many vectors as a block, and is read few times (nnz <= 4)."""
    return product.dtype == "float32" and product.nnz <= 4 and product.n <= PROGRAM_VECTORS // 2


def _least_factor(product: Product) -> int:
    """The factor on MIN_BYTES: more than 1 where the portable kernels are faster for small products.

    They are for narrow contiguous vectors, and in power-of-two geometries for rows that begin at multiples of 16 bytes
    and for few contiguous vectors in 16 bits that are loaded by fours at least. Otherwise, codes take 0.5 to 1.05 times
    as long even for 1 MB of data. In microseconds on an H200, with other kernels and from codes: X (1024, 1024) -> 512
    in fp32 14 and 17, X (473, 1536) -> 384 in fp32 30 and 17, X (906, 4096) -> 192 in bf16 with an odd row stride 55
    and 31, A (864, 935) -> 1024 in bf16 20 and 12.5; for contiguous vectors in 16 bits on an H100, with nnz 4, A (1384,
    512) -> 2048 8.1 and 10.7, A (18275, 256) -> 1024 16 and 18, A (18459, 1000) -> 256 34 and 33, A (1000, 5084) ->
    4096 43 and 27, and with nnz 8 A (17576, 377) -> 4096 28 and 20.
    """
    power_of_two = is_power_of_two(product.k, product.nnz)
    if vectors_contiguous(product):
        few = product.n <= MAX_FAST_VECTORS and product.item_bytes == 2
        if few and power_of_two and vector_alignment(product) >= 4:
            return FAST_16_BITS
        return FAST if _is_narrow(product) else 1
    widest = VECTOR_BYTES // product.item_bytes
    aligned = alignment(product, product.d, product.x_strides, widest) == widest
    return FAST if aligned and power_of_two else 1


class Split(NamedTuple):
    """The split of the sums, as in `HopperCodes`, and its estimated time in microseconds."""

    splits: int
    groups_per_split: int
    splits_per_pass: int
    time: float


@lru_cache(maxsize=4096)
def _split(product: Product) -> Split | None:
    """The split of the sums, in one pass if it fits, otherwise in the number of passes with the least estimated time.

    None if codes and partial sums exceed SCRATCH_BYTES for every number of passes considered, or if one pass does not
    suffice and the offset is not a multiple of ALIGNED.
    """
    code_bytes = _code_bytes(product)
    in_one_pass = _split_passes(product, 1) if code_bytes <= SCRATCH_BYTES else None
    if in_one_pass is not None:
        return in_one_pass
    if product.offset % ALIGNED:
        return None
    least = code_bytes // SCRATCH_BYTES + 1
    splits = [_split_passes(product, passes) for passes in range(max(2, least), least + MORE_PASSES)]
    return min((split for split in splits if split), key=lambda split: split.time, default=None)


def _split_passes(product: Product, passes: int) -> Split | None:
    """The split of the sums for a number of passes, or None if codes and partial sums exceed SCRATCH_BYTES.

    The number of splits is at least what accuracy requires, and otherwise the smallest whose estimated time is almost
    the least. Each split but the last has whole steps of groups; with one tile, no step reaches into the next split.
    """
    geometry, groups = product.geometry, count_groups(product)
    unit = max(1, STEP_COLUMNS >> geometry.log_chunk)
    steps = (groups << geometry.log_chunk + geometry.log_group) // (STEP_COLUMNS * geometry.n_tiles * passes) + 1
    step_splits, totals = (1, 0) if passes == 1 else (PASS_SPLITS, 1)
    fewest = -(-steps // (MAX_STEPS if product.dtype == "float32" else MAX_CHUNKS))
    fewest = -(-fewest // step_splits) * step_splits
    memory = SCRATCH_BYTES - _code_bytes(product) // passes
    most = max(fewest, min(steps, memory // _sum_bytes(product) - totals, MAX_SPLITS))
    times = {splits: _time(product, steps, splits) for splits in range(fewest, most + 1, step_splits)}
    longest = ALMOST * min(times.values())
    per_pass = next(splits for splits, time in times.items() if time <= longest)
    per_split = -(-groups // (passes * per_pass * unit)) * unit
    splits = -(-groups // per_split)
    sums = min(splits, per_pass) + totals if splits > 1 else 0
    code_bytes = min(splits, per_pass) * per_split * (_code_bytes(product) // groups)
    if code_bytes + sums * _sum_bytes(product) > SCRATCH_BYTES:
        return None
    return Split(splits, per_split, per_pass, passes * (times[per_pass] + PASS_TIME))


def _sum_bytes(product: Product) -> int:
    """The bytes of the partial sums of a split."""
    return 4 * product.n * product.k * product.stacks


def _time(product: Product, steps: int, splits: int) -> float:
    """The estimated time of a product whose sums of `steps` steps are split, without what does not depend on `splits`.

    Programs run in rounds of one per multiprocessor. The steps of a program follow each other at intervals of
    STEP_TIME or, if many programs run, as fast as the L2 cache delivers their data. Splits cost a launch, and the
    time of writing and reading partial sums.
    """
    multiprocessors = product.device.multiprocessors
    rounds, rest = divmod(_count_products(product) * splits, multiprocessors)
    step_bytes = PROGRAM_VECTORS * STEP_COLUMNS * product.item_bytes

    def round_time(programs: int) -> float:
        step_time = max(STEP_TIME, programs * step_bytes / CACHE_RATE)
        return (-(-steps // splits) + START_STEPS) * step_time

    time = rounds * round_time(multiprocessors) + (round_time(rest) if rest else 0)
    if splits == 1:
        return time
    return time + REDUCE_TIME + 8 * splits * product.n * product.k * product.stacks / CACHE_RATE


def _code_bytes(product: Product) -> int:
    """An upper bound on the bytes of all codes and of the list of columns at which their blocks begin."""
    geometry = product.geometry
    chunks = product.stacks * geometry.n_tiles * count_groups(product)
    return chunks * (1 << max(0, geometry.log_chunk - 5)) * (law.TILE_ROWS + 4)


def _count_products(product: Product) -> int:
    """The number of pairs of a tile of any stack and a block of vectors."""
    return product.stacks * product.geometry.n_tiles * -(-product.n // PROGRAM_VECTORS)
