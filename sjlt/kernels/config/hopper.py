"""Eligibility and launches of the Hopper kernels of the exact law: pure functions of a `Product`."""

from __future__ import annotations

from dataclasses import dataclass

from ...laws import exact as law
from .arithmetic import MAX_CHUNKS
from .product import (
    GROUPS_PER_STEP,
    VECTOR_BYTES,
    Product,
    count_groups,
    is_power_of_two,
    vectors_contiguous,
)

PROGRAM_VECTORS = 128  # vectors per program
WARPGROUP_VECTORS = PROGRAM_VECTORS // 2  # vectors that 4 of its warps multiply, and of a block of data
MAX_COLUMNS = 32  # columns of a block of data and entries
STEP_COLUMNS = 64  # columns that `project_hopper` multiplies and scales together
MAX_NNZ = 8
# Steps (or chunks, if they are longer) in one fp32 sum. Measured errors are up to 5e-7 of the norm, or 1.5e-6 if one
# element dominates the vector (H200).
MAX_STEPS = 128
MIN_ELEMENTS = 1 << 24  # of X; for fewer, host time dominates
# With at least this many vectors and this utilization of the multiprocessors (by bytes per element), X Sᵀ takes 0.7
# to 0.9 times as long as with the portable kernels in fp32, and 0.7 to 1.05 times in 16 bits (H200).
MIN_VECTORS = 512
MIN_UTILIZATION = {4: 0.75, 2: 0.9}
MIN_PRODUCTS = 4  # per multiprocessor, for Y S; then few multiprocessors are idle during the last products
ENOUGH_UTILIZATION = 0.95  # more is not worth further splits


@dataclass(frozen=True)
class Hopper:
    """A launch of `project_hopper` or `adjoint_hopper`.

    Attributes
    ----------
    programs : int
    columns : int
        Columns per block.
    blocks : int
        Number of blocks, for each tile, that contain the columns.
    slots, tiles, vectors_contiguous
        Constants of the kernels. Only `adjoint_hopper` uses `tiles`, and only `project_hopper` the attributes after it.
    splits, blocks_per_split : int
        Number of parts that the sums are split into, and of blocks in each part.
    """

    programs: int
    columns: int
    blocks: int
    slots: int
    tiles: int
    vectors_contiguous: bool
    splits: int
    blocks_per_split: int


def launch(product: Product) -> Hopper:
    """The launch for an eligible product."""
    geometry, groups = product.geometry, count_groups(product)
    chunk = 1 << geometry.log_chunk
    columns = min(chunk, MAX_COLUMNS)
    blocks_per_chunk = chunk // columns
    splits, per_split = (1, groups) if product.adjoint else _split(product)
    return Hopper(
        programs=min(_count_products(product) * splits, product.device.multiprocessors),
        columns=columns,
        blocks=groups * blocks_per_chunk,
        slots=3 if product.dtype == "float32" and not product.adjoint else 4,
        tiles=2 if geometry.n_tiles == 2 else 1,
        vectors_contiguous=vectors_contiguous(product),
        splits=splits,
        blocks_per_split=per_split * blocks_per_chunk,
    )


def eligible(product: Product) -> bool:
    """Whether the kernels can run a product, by its layout and geometry, and it is large enough for a gain.

    The caller checks `Product.plain` and `Device.hopper`.
    """
    if product.dtype == "float64":
        return False
    contiguous = vectors_contiguous(product)
    if product.precision == "medium" and product.nnz < MAX_NNZ and not contiguous:
        return False  # the portable kernels multiply once, in bf16, which is faster and less exact
    geometry, item = product.geometry, product.item_bytes
    chunk = 1 << geometry.log_chunk
    rows = (product.x_strides, product.d), (product.y_strides, product.k)
    if contiguous:
        rows = (product.x_strides[::-1], product.n), (product.y_strides[::-1], product.n)
    return (
        _gains(product)
        and product.nnz <= MAX_NNZ
        and is_power_of_two(product.k, product.nnz)
        and product.offset % (chunk << geometry.log_group) == 0
        and min(chunk, MAX_COLUMNS) <= product.d < 1 << 30
        and all(_is_loadable(strides, width, item) for strides, width in rows)
        and product.n < 1 << 31
        and product.n * product.d >= MIN_ELEMENTS
    )


def _gains(product: Product) -> bool:
    """Whether these kernels are faster, judging by the kind of product."""
    contiguous = vectors_contiguous(product)
    if product.adjoint:
        return not contiguous and _adjoint_gains(product)
    if contiguous:
        return _contiguous_gains(product)
    if product.n < MIN_VECTORS:
        return False
    programs = _count_products(product) * _split(product)[0]
    return utilization(programs, product.device.multiprocessors) >= MIN_UTILIZATION[product.item_bytes]


def _adjoint_gains(product: Product) -> bool:
    """Whether Y S is large, and stores blocks of MAX_COLUMNS columns in whole 16-byte units; other stores are slow."""
    item = product.item_bytes
    whole_stores = item == 4 and product.nnz < MAX_NNZ and product.d * item % VECTOR_BYTES == 0
    return whole_stores and _count_products(product) >= MIN_PRODUCTS * product.device.multiprocessors


def _contiguous_gains(product: Product) -> bool:
    """Whether S A with a row-major A is faster than with the portable kernels.

    For whole blocks of 64 vectors in fp32, the portable kernels take 1.0, 1.2, 1.3 and 2.2 times the memory floor with
    nnz 1, 2, 4 and 8; otherwise they take four times as long. These kernels take 1.1, or 1.2 with nnz 8, but round n up
    to whole blocks of PROGRAM_VECTORS vectors (H200).
    """
    n, item = product.n, product.item_bytes
    if n < PROGRAM_VECTORS or n * item % VECTOR_BYTES:  # partial sums have rows of n elements, which the TMA stores
        return False
    wasted = -n % PROGRAM_VECTORS
    partial_blocks = n % WARPGROUP_VECTORS != 0
    return item == 2 or product.nnz == MAX_NNZ or (product.nnz > 1 and (partial_blocks or 8 * wasted <= n))


def _is_loadable(strides: tuple[int, ...], width: int, item: int) -> bool:
    """Whether the tensor memory accelerator (TMA) can load rows of `width` elements of `item` bytes."""
    step = strides[0] * item
    return strides[1] == 1 and strides[0] >= width and step % VECTOR_BYTES == 0 and step < 1 << 40


def _split(product: Product) -> tuple[int, int]:
    """(splits, groups per split), in whole steps: enough for accuracy, and for hardly any multiprocessor to be idle.

    The partial sums take at most 128 KiB per multiprocessor, or 4 % of the data if accuracy requires more splits.
    """
    groups, unit = count_groups(product), max(1, STEP_COLUMNS >> product.geometry.log_chunk)
    fewest = -(-groups // (MAX_STEPS * unit if product.dtype == "float32" else MAX_CHUNKS))
    products, multiprocessors = _count_products(product), product.device.multiprocessors
    most = min(2 * multiprocessors // products, groups // GROUPS_PER_STEP)
    splits = count_splits(products, multiprocessors, fewest, most)
    per_split = -(-groups // (splits * unit)) * unit
    return -(-groups // per_split), per_split


def count_splits(products: int, multiprocessors: int, fewest: int, most: int) -> int:
    """The number of splits, from `fewest` to `most`, with the best utilization, or the first with enough of it."""
    candidates = range(fewest, max(fewest, most) + 1)
    return max(candidates, key=lambda splits: min(utilization(products * splits, multiprocessors), ENOUGH_UTILIZATION))


def utilization(programs: int, multiprocessors: int) -> float:
    """The fraction of the multiprocessors' time during which they have programs to run."""
    return programs / (-(-programs // multiprocessors) * multiprocessors)


def _count_products(product: Product) -> int:
    """The number of pairs of a tile of the sketch and a block of PROGRAM_VECTORS vectors."""
    return law.count_tiles(product.k) * -(-product.n // PROGRAM_VECTORS)
