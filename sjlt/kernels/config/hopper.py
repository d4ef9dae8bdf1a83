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

PROGRAM_VECTORS = 128  # vectors of a program
WARPGROUP_VECTORS = PROGRAM_VECTORS // 2  # vectors that 4 of its warps multiply, and of a block of data
MAX_COLUMNS = 32  # columns of a block of data and entries, at most
STEP_COLUMNS = 64  # columns that `project_hopper` multiplies and scales together
MAX_NNZ = 8
# Steps (or chunks, if longer) that one fp32 sum covers. Measured errors are up to 5e-7 of the norm, or 1.5e-6 where one
# number outweighs all others (H200).
MAX_STEPS = 128
MIN_ELEMENTS = 1 << 24  # elements of X below which host time dominates
# X Sᵀ takes 0.7 to 0.9 of the portable kernels' time in fp32, and 0.7 to 1.05 in 16 bits (H200), from this many vectors
# and this utilization of the multiprocessors (by bytes per number) on.
MIN_VECTORS = 512
MIN_UTILIZATION = {4: 0.75, 2: 0.9}
MIN_PRODUCTS = 4  # per multiprocessor, for Y S: few multiprocessors then wait for the last products


@dataclass(frozen=True)
class Hopper:
    """A launch of `project_hopper` or `adjoint_hopper`.

    Attributes
    ----------
    programs : int
    columns : int
        Columns of a block.
    blocks : int
        Blocks of a tile that the columns lie in.
    slots, tiles, vectors_contiguous
        Constants of the kernels; `tiles` is used by `adjoint_hopper` alone, the next ones by `project_hopper` alone.
    splits, blocks_per_split : int
        Parts that the sums are split into, each of so many blocks.
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
    """Whether the kernels can run a product (layout, geometry) and it is large enough to gain by it.

    `Product.plain` and `Device.hopper` are not examined here.
    """
    if product.dtype == "float64":
        return False
    contiguous = vectors_contiguous(product)
    if product.precision == "medium" and product.nnz < MAX_NNZ and not contiguous:
        return False  # a single bf16 product is faster still, and less exact
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
    """Whether these kernels are the faster ones, as far as the kind of product decides it."""
    contiguous = vectors_contiguous(product)
    if product.adjoint:
        return not contiguous and _adjoint_gains(product)
    if contiguous:
        return _contiguous_gains(product)
    if product.n < MIN_VECTORS:
        return False
    return _utilization(product, _split(product)[0]) >= MIN_UTILIZATION[product.item_bytes]


def _adjoint_gains(product: Product) -> bool:
    """Whether Y S is large, and stores whole 16-byte units in blocks of MAX_COLUMNS columns; other stores are slow."""
    item = product.item_bytes
    whole_stores = item == 4 and product.nnz < MAX_NNZ and product.d * item % VECTOR_BYTES == 0
    return whole_stores and _count_products(product) >= MIN_PRODUCTS * product.device.multiprocessors


def _contiguous_gains(product: Product) -> bool:
    """Whether S A with a row-major A is faster than with the portable kernels.

    In fp32 those take 1.0, 1.2, 1.3 and 2.2 times the memory floor for nnz 1, 2, 4 and 8 (H200) for whole blocks of 64
    vectors, and four times as long otherwise. These take 1.1, or 1.2 for nnz 8, and the time of whole blocks of
    PROGRAM_VECTORS vectors.
    """
    n, item = product.n, product.item_bytes
    if n < PROGRAM_VECTORS or n * item % VECTOR_BYTES:  # partial sums have rows of n numbers, which must be loadable
        return False
    wasted = -n % PROGRAM_VECTORS
    partial_blocks = n % WARPGROUP_VECTORS != 0
    return item == 2 or product.nnz == MAX_NNZ or (product.nnz > 1 and (partial_blocks or 8 * wasted <= n))


def _is_loadable(strides: tuple[int, ...], width: int, item: int) -> bool:
    """Whether the tensor memory accelerator loads rows of `width` numbers of `item` bytes."""
    step = strides[0] * item
    return strides[1] == 1 and strides[0] >= width and step % VECTOR_BYTES == 0 and step < 1 << 40


def _split(product: Product) -> tuple[int, int]:
    """(splits, groups in each, whole steps): enough for accuracy, and for hardly any multiprocessor to be idle.

    The partial sums take at most 128 KiB per multiprocessor, or 4 % of the data where accuracy needs more splits.
    """
    groups, unit = count_groups(product), max(1, STEP_COLUMNS >> product.geometry.log_chunk)
    fewest = -(-groups // (MAX_STEPS * unit if product.dtype == "float32" else MAX_CHUNKS))
    most = 2 * product.device.multiprocessors // _count_products(product)
    most = max(fewest, min(most, groups // GROUPS_PER_STEP))
    shares = {splits: _utilization(product, splits) for splits in range(fewest, most + 1)}
    splits = next((splits for splits, share in shares.items() if share >= 0.95), max(shares, key=shares.__getitem__))
    per_split = -(-groups // (splits * unit)) * unit
    return -(-groups // per_split), per_split


def _utilization(product: Product, splits: int) -> float:
    """The share of the multiprocessors' time in which they have programs to run."""
    programs, multiprocessors = _count_products(product) * splits, product.device.multiprocessors
    return programs / (-(-programs // multiprocessors) * multiprocessors)


def _count_products(product: Product) -> int:
    """The number of pairs of a tile of the sketch and a block of PROGRAM_VECTORS vectors."""
    return law.count_tiles(product.k) * -(-product.n // PROGRAM_VECTORS)
