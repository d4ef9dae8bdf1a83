"""Eligibility and launches of `project_codes_hopper`: pure functions of a `Product`.

It covers what `project_hopper` does not: any k, nnz and strides, accumulated results, and results of another dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...laws import exact as law
from .arithmetic import MAX_CHUNKS
from .hopper import MAX_STEPS, PROGRAM_VECTORS, STEP_COLUMNS, count_splits, utilization
from .product import (
    SCRATCH_BYTES,
    VECTOR_BYTES,
    Product,
    alignment,
    count_groups,
    is_power_of_two,
    vectors_contiguous,
)

TMA, COPY, LOAD = range(3)  # how data is loaded
INTEGERS = ["n", "d", "k", "products", "splits", "n_tiles", "capacity", "scale"]
INTEGERS += ["stride_v", "stride_f", "stride_os", "stride_ov", "stride_or"]

MIN_BYTES = 1 << 20  # of X; for fewer, two launches cost more host time than the kernel saves
FAST = 8  # MIN_BYTES is multiplied by this if the portable kernels are fast
MIN_VECTORS = 48  # for fewer, blocks of PROGRAM_VECTORS vectors are mostly empty
MIN_BYTES_PER_CODE = 8  # data bytes per byte of codes; for fewer, encoding dominates
MIN_COLUMNS, MIN_COLUMN_BYTES_PER_CODE = 32, 6  # the two limits above for S A, whose vectors are columns
# Shorter sums are not split, because adding splits takes a launch: X (4096, 768) -> 256 in bf16 takes 14 us, but 18 in
# three splits. X (473, 1536) -> 384 in fp32 takes 17 us with 2 steps per split and 19 with 4 (H200).
MIN_SPLIT_STEPS, MIN_STEPS = 8, 2  # of a sum that is split; per split
# Long sums are also split if the last of several rounds of programs would leave many multiprocessors idle. On an H100,
# X (3651, 39325) -> 576 in fp16 takes 347 us with 4 splits and 481 without; (18000, 4096) -> 100 in fp32, 154 and 181.
# For a single round there is nothing to gain: 92 programs load data about as fast as 132.
MIN_UTILIZATION = 0.7
MAX_BALANCED_SPLITS, MIN_BALANCED_STEPS = 8, 8  # the most splits; the fewest steps per split
LAUNCH_STEPS = 3  # number of steps that take the time of a launch
MAX_BALANCED_TIME = 0.95  # relative to the estimated time without further splits
ROW_BYTES = 128  # per row of a TMA box; for fewer, copies by threads are faster


@dataclass(frozen=True)
class KernelChoice:
    """The constants of `project_codes_hopper`.

    Attributes
    ----------
    loader : {TMA, COPY, LOAD}
    vector : int
        Elements that a thread copies at a time if the loader is COPY, else 1.
    producer_warps : {4, 8}
        Warps that load data and write entries. With 8, loads of single elements take 0.7 to 0.97 times as long, but
        others up to 1.2 times, because fewer registers are left for the consumers (H200).
    log_block, log_panel : int
        A block of codes has 2^log_block columns, a panel of data 2^log_panel.
    one_tile : bool
        Whether the sketch has one tile, so that its chunks are adjacent.
    vectors_contiguous, out_vectors_contiguous : bool
        Whether consecutive elements of the data and of the result belong to consecutive vectors.
    tma_store : bool
        Whether the TMA stores the result.
    rows : {64, 128}
        Rows per tile, rounded up.
    slots : int
        Steps of data and entries that shared memory holds.
    """

    loader: int
    vector: int
    producer_warps: int
    log_block: int
    log_panel: int
    one_tile: bool
    vectors_contiguous: bool
    out_vectors_contiguous: bool
    tma_store: bool
    rows: int
    slots: int


@dataclass(frozen=True)
class HopperCodes:
    """A launch of `encode_chunks` and `project_codes_hopper`.

    Attributes
    ----------
    kernel : KernelChoice
    splits, groups_per_split : int
        Number of parts that the sums are split into, and of groups of chunks in each part.
    capacity : int
        Number of blocks that a list of codes has room for.
    products : int
        Number of triples of a tile, a split and a block of vectors.
    """

    kernel: KernelChoice
    splits: int
    groups_per_split: int
    capacity: int
    products: int


def launch(product: Product) -> HopperCodes:
    """The launch for an eligible product."""
    geometry = product.geometry
    splits, groups_per_split = _split(product)
    kernel = _kernel(product, splits)
    return HopperCodes(
        kernel,
        splits,
        groups_per_split,
        groups_per_split << (geometry.log_chunk - kernel.log_block),
        _count_products(product) * splits,
    )


def eligible(product: Product) -> bool:
    """Whether the kernel can run a product that is large enough for a gain. The caller checks `Device.hopper`."""
    if product.adjoint or product.dtype == "float64" or product.precision == "medium":
        return False
    geometry, stride = product.geometry, product.x_strides[0]
    least = MIN_BYTES * (FAST if _others_are_fast(product) else 1)
    return (
        geometry.log_chunk > 0
        and product.n * product.d * product.item_bytes >= least
        and _gains(product)
        and product.n < 1 << 31
        and product.d < 1 << 30
        and PROGRAM_VECTORS * stride < 1 << 31
        and _code_bytes(product) <= SCRATCH_BYTES
    )


def _gains(product: Product) -> bool:
    """Whether there are enough vectors to outweigh the cost of the codes and of the padding of a block.

    The portable kernels are slow if vectors are contiguous (S A), except in fp32 with nnz 1 and, in a power-of-two
    geometry, with nnz <= 4. In memory floors on an H200, with nnz 4: (100, 681349) -> 61 in bf16 takes 32 with the
    portable kernels and 3.5 with this one, (64, 2000000) -> 256 in fp32 1.3 and 2.4. (37, 3372990) -> 1344 in fp32, not
    a power-of-two geometry, takes 17 with the portable kernels; (100, 1719527) -> 960 takes 2.1 with this one, and
    fewer vectors, whose block is padded, about as long.
    """
    contiguous = vectors_contiguous(product)
    if contiguous and _is_narrow(product) and (product.nnz == 1 or is_power_of_two(product.k, product.nnz)):
        return False
    least, per_code = (MIN_VECTORS, MIN_BYTES_PER_CODE) if not contiguous else (MIN_COLUMNS, MIN_COLUMN_BYTES_PER_CODE)
    code_bytes = law.TILE_ROWS * product.stacks  # for the columns of one chunk
    return product.n >= least and product.n * product.item_bytes << product.geometry.log_chunk >= per_code * code_bytes


def _is_narrow(product: Product) -> bool:
    """Whether a row of A in fp32 has at most half as many vectors as a block, and is read few times (nnz <= 4)."""
    return product.dtype == "float32" and product.nnz <= 4 and product.n <= PROGRAM_VECTORS // 2


def _others_are_fast(product: Product) -> bool:
    """Whether the portable kernels are faster for small products.

    They are for narrow contiguous vectors and for power-of-two geometries, except where rows begin off multiples of 16
    bytes or vectors are contiguous and have 16 bits. Otherwise, codes take 0.5 to 1.05 times as long even for 1 MB of
    data. In microseconds on an H200: (1024, 1024) -> 512 in fp32 takes 14, and 17 from codes; (473, 1536) -> 384 in
    fp32, 30 and 17; (906, 4096) -> 192 in bf16 with an odd row stride, 55 and 31; S A (864, 935) -> 1024 in bf16, 20
    and 12.5.
    """
    if vectors_contiguous(product):
        return _is_narrow(product) or (product.dtype == "float32" and is_power_of_two(product.k, product.nnz))
    widest = VECTOR_BYTES // product.item_bytes
    aligned = alignment(product, product.d, product.x_strides, widest) == widest
    return aligned and is_power_of_two(product.k, product.nnz)


def _kernel(product: Product, splits: int) -> KernelChoice:
    geometry, item, contiguous = product.geometry, product.item_bytes, vectors_contiguous(product)
    one_tile, fp32 = geometry.n_tiles == 1, item == 4
    log_block = min(geometry.log_chunk, 5 if fp32 or one_tile else 6)
    log_panel = (5 if fp32 else 6) if one_tile else log_block
    if _tma_loads(product) and (contiguous or item << log_panel >= ROW_BYTES):
        loader, vector = TMA, 1
    else:
        log_panel = 5 if fp32 else 6
        vector = _copy_width(product, log_block)
        loader = COPY if vector * item >= 4 else LOAD
        vector = vector if loader == COPY else 1
    out_contiguous = product.n > 1 and product.y_strides[0] < product.y_strides[1]
    return KernelChoice(
        loader,
        vector,
        8 if vector == 1 and loader != TMA else 4,
        log_block,
        log_panel,
        one_tile,
        contiguous,
        out_contiguous,
        _tma_stores(product, splits, out_contiguous),
        rows=law.TILE_ROWS if -(-product.k // geometry.n_tiles) > 64 else 64,
        slots=3 if fp32 else 4,
    )


def _tma_loads(product: Product) -> bool:
    """Whether rows and, within them, all panels begin at multiples of 16 bytes, as the TMA requires."""
    contiguous = vectors_contiguous(product)
    far, near = product.x_strides if not contiguous else product.x_strides[::-1]
    width = product.n if contiguous else product.d
    widest = VECTOR_BYTES // product.item_bytes
    geometry = product.geometry
    least = 8 if contiguous else widest  # columns of a panel, whose rows of 128 bytes are swizzled in groups of 8
    return (
        product.data_aligned
        and near == 1
        and far >= width
        and far % widest == 0
        and far * product.item_bytes < 1 << 40
        and (contiguous or product.offset % widest == 0)
        and (geometry.n_tiles == 1 or 1 << geometry.log_chunk >= least)
    )


def _copy_width(product: Product, log_block: int) -> int:
    """The number of adjacent elements that a thread may copy at once: of one block, and all inside the data or none."""
    contiguous = vectors_contiguous(product)
    far, near = product.x_strides if not contiguous else product.x_strides[::-1]
    if near != 1 or not product.data_aligned:
        return 1
    widest = VECTOR_BYTES // product.item_bytes
    if contiguous:
        return math.gcd(widest, far, product.n)
    return math.gcd(widest, far, product.d, product.offset, 1 << log_block)


def _tma_stores(product: Product, splits: int, contiguous: bool) -> bool:
    """Whether all tiles have the same number of rows, and their sums are stored at multiples of 16 bytes."""
    n_tiles = product.geometry.n_tiles
    if product.k % n_tiles or (splits == 1 and not product.plain):
        return False
    item = product.item_bytes if splits == 1 else 4
    far, near = product.y_strides[::-1] if contiguous else product.y_strides
    if splits > 1:  # partial sums have no gaps
        far, near = (product.n if contiguous else product.k * product.stacks), 1
    rows = 0 if contiguous else product.k // n_tiles
    return near == 1 and far > 0 and far * item % VECTOR_BYTES == 0 and rows * item % VECTOR_BYTES == 0


def _split(product: Product) -> tuple[int, int]:
    """(splits, groups per split), in whole steps: enough for accuracy, and for hardly any multiprocessor to be idle."""
    geometry, groups = product.geometry, count_groups(product)
    unit = max(1, STEP_COLUMNS >> geometry.log_chunk)
    steps = (groups << geometry.log_chunk + geometry.log_group) // (STEP_COLUMNS * geometry.n_tiles) + 1
    fewest = -(-steps // (MAX_STEPS if product.dtype == "float32" else MAX_CHUNKS))
    products, multiprocessors = _count_products(product), product.device.multiprocessors
    fitting = (SCRATCH_BYTES - _code_bytes(product)) // (4 * product.n * product.k * product.stacks)
    most = min(2 * multiprocessors // products, steps // MIN_STEPS if steps >= MIN_SPLIT_STEPS else 1, fitting)
    splits = count_splits(products, multiprocessors, fewest, most)
    if products > multiprocessors and utilization(products * splits, multiprocessors) < MIN_UTILIZATION:
        splits = _balanced(product, steps, splits, min(MAX_BALANCED_SPLITS, steps // MIN_BALANCED_STEPS, fitting))
    per_split = -(-groups // (splits * unit)) * unit
    return -(-groups // per_split), per_split


def _balanced(product: Product, steps: int, splits: int, most: int) -> int:
    """The number of splits, from `splits` to `most`, with the least estimated time.

    The estimate adds the times of whole rounds of programs, of writing and reading partial sums, and of a second
    launch, relative to the time of reading the data and writing the result.
    """
    products, multiprocessors = _count_products(product), product.device.multiprocessors
    vector_bytes = product.item_bytes * (product.d + product.stacks * product.k)
    traffic = 8 * product.stacks * product.k / vector_bytes
    launch_time = LAUNCH_STEPS * multiprocessors / (products * steps)

    def estimate(splits: int) -> float:
        rounds = 1 / utilization(products * splits, multiprocessors)
        return rounds if splits == 1 else rounds + splits * traffic + launch_time

    best = min(range(splits, max(splits, most) + 1), key=estimate)
    return best if estimate(best) < MAX_BALANCED_TIME * estimate(splits) else splits


def _code_bytes(product: Product) -> int:
    """An upper bound on the bytes of all codes and of the list of columns at which their blocks begin."""
    geometry = product.geometry
    chunks = product.stacks * geometry.n_tiles * count_groups(product)
    return chunks * (1 << max(0, geometry.log_chunk - 5)) * (law.TILE_ROWS + 4)


def _count_products(product: Product) -> int:
    """The number of pairs of a tile of any stack and a block of vectors."""
    return product.stacks * product.geometry.n_tiles * -(-product.n // PROGRAM_VECTORS)
