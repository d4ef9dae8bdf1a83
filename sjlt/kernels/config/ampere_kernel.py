"""The constants of `project_codes_ampere`: pure functions of a `Product`."""

from __future__ import annotations

from dataclasses import dataclass

from ...laws import exact as law
from .hopper_loaders import copy_width
from .product import Product, vectors_contiguous

SLICE_COLUMNS = 32  # columns that the kernel multiplies at a time
WARPS = 4
COPY_BYTES = 4  # the narrowest asynchronous copy
MIN_SLOTS, MAX_SLOTS = 3, 8
RESERVED_BYTES = 1 << 10  # of shared memory, for each program
# Programs multiply several products if these have at most so many slices, and programs at least so many products.
MAX_SLICES, MIN_PRODUCTS = 16, 3


@dataclass(frozen=True)
class AmpereKernel:
    """The constants of `project_codes_ampere`.

    Attributes
    ----------
    vectors : {32, 64, 128}
        Vectors of a block.
    rows : {32, 64, 128}
        Rows per tile, rounded up.
    warps : {1, 2, 4}
        Number of parts of the vectors that different warps multiply; the other warps multiply other rows.
    log_block : int
        A block of codes has 2^log_block columns.
    slots : int
        Slices of data and codes that shared memory holds.
    vector : int
        Elements that a thread copies or loads at a time.
    copies : bool
        Whether data is copied asynchronously rather than loaded through registers.
    several : bool
        Whether programs multiply several products, one after the other.
    vectors_contiguous, out_vectors_contiguous, adjacent : bool
        As in `KernelChoice`.
    """

    vectors: int
    rows: int
    warps: int
    log_block: int
    slots: int
    vector: int
    copies: bool
    several: bool
    vectors_contiguous: bool
    out_vectors_contiguous: bool
    adjacent: bool

    tma_store = False

    @property
    def part_rows(self) -> int:
        """Rows of a tile that a program sums."""
        return self.rows

    @property
    def part_vectors(self) -> int:
        """Vectors that a program sums."""
        return self.vectors


def block_vectors(product: Product) -> int:
    """The number of vectors of a block; more, in fp32 or of data that passes through registers, would exceed these."""
    most = 128 if product.item_bytes == 2 and _copies(product) else 64
    return next((vectors for vectors in (32, 64) if product.n <= vectors), most)


def _copies(product: Product) -> bool:
    """Whether asynchronous copies can load the data."""
    return _vector(product) * product.item_bytes >= COPY_BYTES


def _vector(product: Product) -> int:
    """Elements that a thread copies or loads at a time, all of one block of codes."""
    return copy_width(product, min(product.geometry.log_chunk, 5))


def resident_programs(product: Product) -> int:
    """The number of programs that a multiprocessor runs at a time, as far as registers allow."""
    return {32: 4, 64: 2 if product.item_bytes == 4 else 3, 128: 2}[block_vectors(product)]


def kernel_of(product: Product, splits: int, columns_per_split: int) -> AmpereKernel:
    """The constants for a product whose sums are split."""
    geometry, contiguous = product.geometry, vectors_contiguous(product)
    vectors, log_block = block_vectors(product), min(geometry.log_chunk, 6)
    rows = max(32, 1 << (-(-product.k // geometry.n_tiles) - 1).bit_length())
    out_contiguous = product.n > 1 and product.y_strides[0] < product.y_strides[1]
    slice_bytes = vectors * SLICE_COLUMNS * product.item_bytes
    slice_bytes += law.TILE_ROWS * max(1, SLICE_COLUMNS >> log_block)
    short = columns_per_split <= MAX_SLICES * SLICE_COLUMNS * geometry.n_tiles
    products = product.stacks * geometry.n_tiles * -(-product.n // vectors) * splits
    available = product.device.shared_memory // resident_programs(product) - RESERVED_BYTES
    return AmpereKernel(
        vectors,
        min(rows, law.TILE_ROWS),
        _warps_along_vectors(vectors, rows, product.item_bytes),
        log_block,
        max(MIN_SLOTS, min(MAX_SLOTS, available // slice_bytes)),
        _vector(product),
        copies=_copies(product),
        several=short and products >= MIN_PRODUCTS * product.device.multiprocessors * resident_programs(product),
        vectors_contiguous=contiguous,
        out_vectors_contiguous=out_contiguous,
        adjacent=splits > 1 or product.y_strides[0 if out_contiguous else 1] == 1,
    )


def _warps_along_vectors(vectors: int, rows: int, item_bytes: int) -> int:
    """`AmpereKernel.warps`: each warp expands the codes of its rows, and loads or splits the data of its vectors."""
    if rows < 64:
        return WARPS if vectors >= 64 else 2
    if item_bytes == 2 and vectors <= 64 and rows > 64:
        return 1
    return 2
