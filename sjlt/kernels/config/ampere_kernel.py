"""The constants of `project_codes_ampere`: pure functions of a `Product`."""

from __future__ import annotations

from dataclasses import dataclass

from .hopper_loaders import copy_width, line_bytes, stages
from .product import VECTOR_BYTES, Product, next_power_of_two, vectors_contiguous
from .stores import store_width, stores_vectors

LOG_SLICE = 5
SLICE_COLUMNS = 1 << LOG_SLICE  # columns that the kernel multiplies at a time
WARPS = 4
ENTRY_LINE_BYTES = 2 * SLICE_COLUMNS  # of the entries of a row
COPY_BYTES = 4  # the narrowest asynchronous copy
MIN_SLOTS, MAX_SLOTS = 4, 8
RESERVED_BYTES = 1 << 10  # of shared memory, for each program
# A program's sums pass through so many bytes of shared memory before they are stored: usually, and at most.
RESULT_BYTES, MAX_RESULT_BYTES = 16 << 10, 32 << 10
MAX_SUMS = 64 * 128  # of a program that are multiplied at a time, so that registers hold their operands, too
# Programs that share the registers of a multiprocessor, by bytes of an element and vectors of a block.
RESIDENT = {2: {32: 4, 64: 3, 128: 2}, 4: {32: 4, 64: 2}}
ALL_REGISTERS, MAX_REGISTERS = 1 << 16, 255  # of a multiprocessor, of a thread
# A program multiplies several products if each has at most MAX_SLICES slices, and each program at least MIN_PRODUCTS.
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
        Warps along the vectors; WARPS // warps lie along the rows.
    log_block : int
        A block of codes has 2^log_block columns.
    slots : int
        Slices of data and codes that shared memory holds.
    vector : int
        Elements that a thread copies or loads at a time; 1 if lines are staged.
    copies : bool
        Whether data is copied asynchronously rather than loaded through registers.
    line_bytes : int
        The distance between lines in shared memory if they are staged (`ampere.staged_slices`), else 0.
    several : bool
        Whether programs multiply several products, one after the other.
    vectors_contiguous, out_vectors_contiguous, adjacent : bool
    store_width : int
        As in `KernelChoice`.
    registers : int
        Limit per thread.
    """

    vectors: int
    rows: int
    warps: int
    log_block: int
    slots: int
    vector: int
    copies: bool
    line_bytes: int
    several: bool
    vectors_contiguous: bool
    out_vectors_contiguous: bool
    adjacent: bool
    store_width: int
    registers: int

    tma_store = windows = one_tile = False
    log_run, step_columns = 0, SLICE_COLUMNS

    @property
    def other_bytes(self) -> int:
        """The bytes of the entries of two slices in shared memory."""
        return 2 * self.rows * ENTRY_LINE_BYTES

    @property
    def parts(self) -> int:
        """The number of parts of a tile's rows that are multiplied one after the other."""
        return max(1, self.vectors * self.rows // MAX_SUMS)

    @property
    def log_panel(self) -> int:
        """The binary logarithm of the number of adjacent columns of a slice that lie in one block."""
        return min(self.log_block, LOG_SLICE)

    @property
    def program_vectors(self) -> int:
        """Vectors of a block."""
        return self.vectors

    @property
    def staged(self) -> bool:
        """Whether lines of the data are staged."""
        return self.line_bytes > 0

    @property
    def part_rows(self) -> int:
        """Rows of a tile that a program sums."""
        return self.rows

    @property
    def part_vectors(self) -> int:
        """Vectors that a program sums."""
        return self.vectors


def block_vectors(product: Product) -> int:
    """Vectors per block: at most 64 in fp32, of staged rows, and of data loaded through registers.

    Blocks of 128 would exceed the registers, or leave shared memory for few slots of rows.
    """
    wide = product.item_bytes == 2 and _copies(product) and (vectors_contiguous(product) or not _stages(product))
    return next((vectors for vectors in (32, 64) if product.n <= vectors), 128 if wide else 64)


def _copies(product: Product) -> bool:
    """Whether asynchronous copies can load the data."""
    return _vector(product) * product.item_bytes >= COPY_BYTES or _stages(product)


def _stages(product: Product) -> bool:
    """Whether lines of the data are staged: in 16 bits, if elements would be loaded one by one.

    Blocks of codes then need at least a unit's columns. Of 38 such products, contiguous vectors take 0.61 to 1.04 of
    the time without staging (0.80 on average), rows 0.58 to 1.0 (0.82), or 0.92 with blocks of 128 vectors. Lines that
    begin at multiples of 4 bytes take 0.91 to 1.15 of the time of copies (7 products, H200).
    """
    item, log_block = product.item_bytes, _log_block(product)
    narrow = _vector(product) * item < COPY_BYTES
    return item == 2 and narrow and item << log_block >= VECTOR_BYTES and stages(product, log_block)


def _line_bytes(product: Product) -> int:
    """`AmpereKernel.line_bytes`."""
    if not _stages(product):
        return 0
    item, vectors = product.item_bytes, block_vectors(product)
    panel = item << min(_log_block(product), LOG_SLICE)
    return line_bytes(vectors_contiguous(product), panel, item, vectors, SLICE_COLUMNS)


def _vector(product: Product) -> int:
    """Elements that a thread copies or loads at a time, all of one block of codes."""
    return copy_width(product, min(product.geometry.log_chunk, LOG_SLICE))


def resident_programs(product: Product) -> int:
    """The number of programs that a multiprocessor runs at a time, as registers and shared memory allow."""
    most = RESIDENT[product.item_bytes][block_vectors(product)]
    return next((resident for resident in range(most, 1, -1) if _slots(product, resident) >= MIN_SLOTS), 1)


def _slots(product: Product, resident: int) -> int:
    """The number of slots of each of `resident` programs, beside what passes through shared memory.

    Where results need more than is usual, fewer programs are resident, but one always fits.
    """
    vectors, rows, log_block = block_vectors(product), rows_of(product), _log_block(product)
    slice_bytes = vectors * SLICE_COLUMNS * product.item_bytes
    memory, results = product.device.shared_memory, 4 * vectors * rows
    available = min(memory // resident - min(RESULT_BYTES, results), memory - min(MAX_RESULT_BYTES, results))
    available -= RESERVED_BYTES + 2 * rows * ENTRY_LINE_BYTES
    if _stages(product):  # besides, a slice of aligned lines
        available -= slice_bytes
        slice_bytes = _line_bytes(product) * (SLICE_COLUMNS if vectors_contiguous(product) else vectors)
    slice_bytes += rows * max(1, SLICE_COLUMNS >> log_block)
    return min(MAX_SLOTS, available // slice_bytes)


def _log_block(product: Product) -> int:
    return min(product.geometry.log_chunk, 6)


def rows_of(product: Product) -> int:
    """Rows per tile, rounded up to 32, 64 or 128."""
    return max(32, next_power_of_two(-(-product.k // product.geometry.n_tiles)))


def kernel_of(product: Product, splits: int, columns_per_split: int) -> AmpereKernel:
    """The constants for a product whose sums are split."""
    n_tiles, vectors, rows = product.geometry.n_tiles, block_vectors(product), rows_of(product)
    out_contiguous = stores_vectors(product)
    short = columns_per_split <= MAX_SLICES * SLICE_COLUMNS * n_tiles
    products = product.stacks * n_tiles * -(-product.n // vectors) * splits
    resident = resident_programs(product)
    return AmpereKernel(
        vectors,
        rows,
        _warps_along_vectors(vectors, rows, _stages(product)),
        _log_block(product),
        max(MIN_SLOTS, _slots(product, resident)),
        _vector(product),
        copies=_copies(product),
        line_bytes=_line_bytes(product),
        several=short and products >= MIN_PRODUCTS * product.device.multiprocessors * resident,
        vectors_contiguous=vectors_contiguous(product),
        out_vectors_contiguous=out_contiguous,
        adjacent=splits > 1 or product.y_strides[0 if out_contiguous else 1] == 1,
        store_width=store_width(product, splits),
        registers=min(MAX_REGISTERS, ALL_REGISTERS // (32 * WARPS * resident) // 8 * 8),
    )


def _warps_along_vectors(vectors: int, rows: int, staged: bool) -> int:
    """`AmpereKernel.warps`: each warp loads the entries of its rows, and the data of its vectors."""
    if staged and vectors == 64 and rows == 128:
        return 1
    return WARPS if rows < 64 <= vectors else 2
