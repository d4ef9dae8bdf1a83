"""Launches of `encode_chunks` and of a kernel that multiplies by its codes: pure functions of a `Product`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from .ampere_kernel import AmpereKernel
from .arithmetic import MAX_CHUNKS
from .hopper import MAX_STEPS, STEP_COLUMNS
from .hopper_loaders import KernelChoice
from .product import SCRATCH_BYTES, Product, count_groups

# Estimated times in microseconds, and bytes per microsecond; see `_time`. For 53 products by Hopper's kernel on an
# H100, 1 to 290 MB of data, the fewest splits with almost the least estimate take on average 1.004 times as long as the
# best ones, at most 1.08 times.
STEP_TIME, START_STEPS, REDUCE_TIME = 1.0, 2, 1.5
CACHE_RATE = 4e6
ALMOST = 1.03  # estimates that differ by less are considered equal
MAX_SPLITS = 256  # for each program that a multiprocessor runs at a time
PASS_SPLITS = 4  # splits per pass are a multiple of this, so that the sums of earlier passes are aligned, too
PASS_TIME = 8.0  # of the launches of a pass, in microseconds
MORE_PASSES = 8  # numbers of passes considered, from the fewest possible on
SHARE_TIME, MIN_SHARED_STEPS = 5.5, 2  # microseconds for adding the sums of shares; fewest steps of a share
ALIGNED = 8  # columns, at multiples of which passes begin, so that the data of all is aligned alike


@dataclass(frozen=True)
class Codes:
    """A launch of `encode_chunks`, and of `project_codes_hopper` or `project_codes_ampere`.

    Attributes
    ----------
    kernel : KernelChoice or AmpereKernel
    splits, groups_per_split : int
        Number of parts that the sums are split into, and of groups of chunks in each part.
    splits_per_pass : int
        If less than `splits`, the codes of this many splits are written and used at a time, of fewer at first, and
        their partial sums are added to those of earlier passes.
    capacity : int
        Number of blocks that a list of codes has room for.
    products : int
        Number of pairs of a tile and a block of vectors, for each split.
    unshared, sharers : int
        Number of products, for each split, that one program computes, and number of programs that share each of the
        others.
    columns_per_split : int
    resident : int
        Programs that a multiprocessor runs at a time.
    prefetch : bool or None
        Whether programs copy the data that they read first to the L2 cache while the codes are written; None if the
        kernel cannot.
    """

    kernel: KernelChoice | AmpereKernel
    splits: int
    groups_per_split: int
    splits_per_pass: int
    capacity: int
    products: int
    unshared: int
    sharers: int
    columns_per_split: int
    resident: int
    prefetch: bool | None

    @property
    def passes(self) -> int:
        """The number of passes."""
        return -(-self.splits // self.splits_per_pass)

    @property
    def tasks(self) -> int:
        """The number of unshared products and of shares, for each split."""
        return self.unshared + (self.products - self.unshared) * self.sharers


class Programs(NamedTuple):
    """The programs of a kernel.

    Attributes
    ----------
    vectors : int
        Vectors of a block, which a program multiplies at a time.
    resident : int
        Programs that a multiprocessor runs at a time.
    rows : int
        Rows of a block of codes.
    share : bool
        Whether programs can share products.
    """

    vectors: int
    resident: int
    rows: int
    share: bool = False


KernelOf = Callable[[Product, int, int, bool], KernelChoice | AmpereKernel]


def launch_of(product: Product, programs: Programs, kernel_of: KernelOf, prefetch: bool | None) -> Codes:
    """The launch for a product that can be split.

    ``kernel_of(product, splits, columns_per_split, shares_products)`` returns the kernel's constants.
    """
    geometry = product.geometry
    found = split_of(product, programs)
    assert found is not None
    splits, groups_per_split, splits_per_pass, _ = found
    columns_per_split = groups_per_split << geometry.log_group << geometry.log_chunk
    sharing = _sharing(product, programs) if splits == 1 else None
    kernel = kernel_of(product, splits, columns_per_split, sharing is not None)
    products = _count_products(product, programs)
    return Codes(
        kernel,
        splits,
        groups_per_split,
        splits_per_pass,
        groups_per_split << (geometry.log_chunk - kernel.log_block + kernel.windows),
        products,
        sharing.unshared if sharing else products,
        sharing.sharers if sharing else 1,
        columns_per_split,
        programs.resident,
        prefetch,
    )


class Split(NamedTuple):
    """The split of the sums, as in `Codes`, and its estimated time in microseconds."""

    splits: int
    groups_per_split: int
    splits_per_pass: int
    time: float


@lru_cache(maxsize=4096)
def split_of(product: Product, programs: Programs) -> Split | None:
    """The split of the sums, in one pass if it fits, otherwise in the number of passes with the least estimated time.

    None if codes and partial sums exceed SCRATCH_BYTES for every number of passes considered, or if one pass does not
    suffice and the offset is not a multiple of ALIGNED.
    """
    code_bytes = _code_bytes(product, programs)
    in_one_pass = _split_passes(product, programs, 1) if code_bytes <= SCRATCH_BYTES else None
    if in_one_pass is not None:
        return in_one_pass
    if product.offset % ALIGNED:
        return None
    least = code_bytes // SCRATCH_BYTES + 1
    splits = [_split_passes(product, programs, passes) for passes in range(max(2, least), least + MORE_PASSES)]
    return min((split for split in splits if split), key=lambda split: split.time, default=None)


def _split_passes(product: Product, programs: Programs, passes: int) -> Split | None:
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
    memory = SCRATCH_BYTES - _code_bytes(product, programs) // passes
    most = max(fewest, min(steps, memory // _sum_bytes(product) - totals, MAX_SPLITS * programs.resident))
    times = {splits: _time(product, programs, steps, splits) for splits in range(fewest, most + 1, step_splits)}
    longest = ALMOST * min(times.values())
    per_pass = next(splits for splits, time in times.items() if time <= longest)
    per_split = -(-groups // (passes * per_pass * unit)) * unit
    splits = -(-groups // per_split)
    sums = min(splits, per_pass) + totals if splits > 1 else 0
    code_bytes = min(splits, per_pass) * per_split * (_code_bytes(product, programs) // groups)
    if code_bytes + sums * _sum_bytes(product) > SCRATCH_BYTES:
        return None
    return Split(splits, per_split, per_pass, passes * (times[per_pass] + PASS_TIME))


def _sum_bytes(product: Product) -> int:
    """The bytes of the partial sums of a split."""
    return 4 * product.n * product.k * product.stacks


def _time(product: Product, programs: Programs, steps: int, splits: int) -> float:
    """The estimated time of a product whose sums of `steps` steps are split, without what does not depend on `splits`.

    Programs run in rounds of as many as the device runs at a time. The steps of a program follow each other at
    intervals of STEP_TIME or, if many programs run, as fast as the L2 cache delivers their data. Splits cost a launch,
    and the time of writing and reading partial sums. Without splits, programs may share the last products.
    """
    at_a_time = _at_a_time(product, programs)
    rounds, rest = divmod(_count_products(product, programs) * splits, at_a_time)
    step_bytes = programs.vectors * STEP_COLUMNS * product.item_bytes

    def round_time(running: int) -> float:
        step_time = max(STEP_TIME, running * step_bytes / CACHE_RATE)
        return (-(-steps // splits) + START_STEPS) * step_time

    time = rounds * round_time(at_a_time) + (round_time(rest) if rest else 0)
    if splits == 1:
        sharing = _sharing(product, programs)
        return time - (sharing.saved_steps * STEP_TIME - sharing.time if sharing else 0)
    return time + REDUCE_TIME + 8 * splits * product.n * product.k * product.stacks / CACHE_RATE


class Sharing(NamedTuple):
    """The sharing of products among programs, as in `Codes`.

    Attributes
    ----------
    unshared, sharers : int
    saved_steps : int
        Steps of a program that are saved.
    time : float
        Estimated time of the kernel that adds the sums of shares, in microseconds.
    """

    unshared: int
    sharers: int
    saved_steps: int
    time: float


def _sharing(product: Product, programs: Programs) -> Sharing | None:
    """The sharing of products without splits; None if the kernel cannot share them or nothing is gained.

    If programs would be idle in the last round, they share the products of the last vectors, for all tiles.
    kernels/MEASUREMENTS.md has measured times.
    """
    products, at_a_time = _count_products(product, programs), _at_a_time(product, programs)
    tiles = product.stacks * product.geometry.n_tiles
    unshared = products // at_a_time * at_a_time // tiles * tiles
    if not programs.share or unshared in (0, products):
        return None
    shared, rounds = products - unshared, -(-products // at_a_time)
    steps = -(-product.d // (STEP_COLUMNS * product.geometry.n_tiles))
    sharers = min((rounds * at_a_time - unshared) // shared, steps // MIN_SHARED_STEPS)
    sum_bytes = 4 * sharers * shared // tiles * programs.vectors * product.k * product.stacks
    if sharers < 2 or _code_bytes(product, programs) + sum_bytes > SCRATCH_BYTES:
        return None
    saved, time = steps - -(-steps // sharers), SHARE_TIME + 2 * sum_bytes / CACHE_RATE
    # (Steps of a single program take less than STEP_TIME in 16 bits.)
    return Sharing(unshared, sharers, saved, time) if saved * STEP_TIME * product.item_bytes / 4 > time else None


def _at_a_time(product: Product, programs: Programs) -> int:
    """The number of programs that the device runs at a time."""
    return product.device.multiprocessors * programs.resident


def _code_bytes(product: Product, programs: Programs) -> int:
    """An upper bound on the bytes of all codes and of the list of columns at which their blocks begin."""
    geometry = product.geometry
    chunks = product.stacks * geometry.n_tiles * count_groups(product)
    return chunks * (1 << max(0, geometry.log_chunk - 5)) * (programs.rows + 4)


def _count_products(product: Product, programs: Programs) -> int:
    """The number of pairs of a tile of any stack and a block of vectors."""
    return product.stacks * product.geometry.n_tiles * -(-product.n // programs.vectors)
