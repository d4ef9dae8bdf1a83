"""The constants of `project_codes_hopper`, above all how it loads data: pure functions of a `Product`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...laws import exact as law
from .chunk_codes import LOG_RUN, MAX_LOG_BLOCK
from .hopper import PROGRAM_VECTORS, STEP_COLUMNS
from .product import SECTOR_BYTES, VECTOR_BYTES, Product, vectors_contiguous
from .stores import favors_windows, store_width, stores_vectors, tma_stores

if TYPE_CHECKING:
    from .ampere_kernel import AmpereKernel

TMA, COPY, LOAD, STAGE = range(4)  # how data is loaded
ROW_BYTES = 128  # per row of a TMA box that is loaded fastest
SWIZZLE_BYTES = 32  # the narrowest swizzle of shared memory
PRODUCER_WARPS = 4  # of the loader, of each expander, and of those that only store results
BARRIER_BYTES = 1024  # of shared memory, for barriers and alignment
# Results per element of the data, rounds, and their least product in 16 and 32 bits: see `_keeps_in_step`.
MIN_RESULTS, MIN_ROUNDS, MIN_SHARED = 2.5, 100, {2: 320, 4: 140}
MAX_LOG_DENSE, MIN_DENSE_BYTES = 3, 64 << 20  # of blocks of codes; of X: see `_count_expanders`


@dataclass(frozen=True)
class KernelChoice:
    """The constants of `project_codes_hopper`.

    Attributes
    ----------
    loader : {TMA, COPY, LOAD, STAGE}
    vector : int
        Elements that a thread copies at a time if the loader is COPY, else 1.
    expanders : {0, 1, 2}
        Groups of warps that take turns writing entries; 0 if `entries_first`. See `_count_expanders`.
    log_block, log_panel : int
        A block of codes has 2^log_block columns, a panel of data 2^log_panel.
    one_tile : bool
        Whether the sketch has one tile, so that its chunks are adjacent.
    vectors_contiguous, out_vectors_contiguous : bool
        Whether consecutive elements of the data and of the result belong to consecutive vectors.
    adjacent : bool
        Whether consecutive elements of the result are adjacent in memory.
    tma_store : bool
        Whether the TMA stores the result.
    store_width : int
        Adjacent elements of the result that a consumer's thread stores at a time; 1 if consumers do not store it.
    rows : {64, 128}
        Rows per tile, rounded up.
    slots : int
        Steps of data and entries that shared memory holds.
    line_bytes : int
        The distance between lines in shared memory if the loader is STAGE, else 0.
    entries_first : bool
        Whether the entries are the first operand of the tensor cores, and each consumer has half of a tile's rows
        instead of half of the vectors.
    windows : bool
        Whether codes are listed by windows of rows instead of tiles.
    result_line_bytes : int
        The distance between lines of the result in shared memory, if warps that do nothing else store it from there,
        else 0. See `_stages_results`.
    in_step : bool
        Whether programs begin every fourth round together. See `_keeps_in_step`.
    """

    loader: int
    vector: int
    expanders: int
    log_block: int
    log_panel: int
    one_tile: bool
    vectors_contiguous: bool
    out_vectors_contiguous: bool
    adjacent: bool
    tma_store: bool
    store_width: int
    rows: int
    slots: int
    line_bytes: int
    entries_first: bool
    windows: bool
    result_line_bytes: int = 0
    in_step: bool = False

    step_columns, program_vectors = STEP_COLUMNS, PROGRAM_VECTORS

    @property
    def log_run(self) -> int:
        """The binary logarithm of the number of blocks of codes in a run."""
        return LOG_RUN if self.one_tile and self.log_block <= MAX_LOG_BLOCK else 0

    @property
    def part_rows(self) -> int:
        """Rows of a tile that each consumer sums."""
        return self.rows // 2 if self.entries_first else self.rows

    @property
    def part_vectors(self) -> int:
        """Vectors that each consumer sums."""
        return PROGRAM_VECTORS if self.entries_first else PROGRAM_VECTORS // 2

    @property
    def part_lines(self) -> int:
        """Lines of the result, of adjacent elements, in each consumer's part of a product."""
        return self.part_rows if self.out_vectors_contiguous else self.part_vectors

    @property
    def part_run(self) -> int:
        """Elements of such a line."""
        return self.part_vectors if self.out_vectors_contiguous else self.part_rows

    @property
    def other_bytes(self) -> int:
        """The bytes of shared memory that the kernel addresses itself, apart from slots: results of both consumers."""
        return 2 * self.part_lines * self.result_line_bytes


def kernel_choice(product: Product, splits: int, shares_products: bool) -> KernelChoice:
    """The constants for an eligible product whose sums have `splits` parts.

    shares_products : whether programs share products.
    """
    geometry, item, contiguous = product.geometry, product.item_bytes, vectors_contiguous(product)
    one_tile, fp32 = geometry.n_tiles == 1, item == 4
    log_block = _log_block(product)
    log_panel = (5 if fp32 else 6) if one_tile else log_block
    out_contiguous = stores_vectors(product)
    first_loader = _loader(product, log_block, log_panel, True)[0]
    entries_first = first_loader == TMA and _favors_entries_first(product)
    windows = favors_windows(product, splits, first_loader == STAGE and not contiguous, entries_first)
    tma_store = tma_stores(product, splits, windows)
    loader, vector = _loader(product, log_block, log_panel, tma_store)
    if loader in (COPY, LOAD):
        log_panel = 5 if fp32 else 6
    line = line_bytes(contiguous, item << log_panel, item, PROGRAM_VECTORS, STEP_COLUMNS)
    kernel = KernelChoice(
        loader,
        vector,
        0 if entries_first else _count_expanders(product, loader, log_block),
        log_block,
        log_panel,
        one_tile,
        contiguous,
        out_contiguous,
        splits > 1 or product.y_strides[0 if out_contiguous else 1] == 1,
        tma_store,
        1 if tma_store else store_width(product, splits, windows),
        rows_of(product),
        slots=6 if entries_first else 3 if fp32 else 4,
        line_bytes=line if loader == STAGE else 0,
        entries_first=entries_first,
        windows=windows,
    )
    if splits == 1 and not shares_products:
        if _stages_results(product, kernel):
            kernel = replace(kernel, result_line_bytes=_padded_bytes(item * kernel.part_run), store_width=1)
        kernel = replace(kernel, in_step=_keeps_in_step(product, kernel))
    if loader == STAGE:
        kernel = replace(kernel, slots=_fitting_slots(product, kernel, splits, shares_products))
    return kernel


def rows_of(product: Product) -> int:
    """`KernelChoice.rows`."""
    return law.TILE_ROWS if -(-product.k // product.geometry.n_tiles) > 64 else 64


def reaches(product: Product) -> bool:
    """Whether a loader can compute the addresses of all rows of a block: COPY and LOAD have 32 bits for them."""
    log_block = _log_block(product)
    return not _is_far(product) or stages(product, log_block) or _tma_loads_boxes(product, log_block)


def _is_far(product: Product) -> bool:
    """Whether the rows of a block lie too far apart for COPY and LOAD."""
    return PROGRAM_VECTORS * product.x_strides[0] >= 1 << 31


def _log_block(product: Product) -> int:
    """The binary logarithm of the columns of a block of codes."""
    return min(product.geometry.log_chunk, 5 if product.item_bytes == 4 or product.geometry.n_tiles == 1 else 6)


def _fitting_slots(product: Product, kernel: KernelChoice, splits: int, shares_products: bool) -> int:
    """The number of slots with staged lines that fit in shared memory, at most those of the kernel."""
    # Results that the TMA stores, and the memory in which threads exchange sums before they store them, take at most
    # 4 bytes per sum together: half of the sums of a share are exchanged at a time.
    item = product.item_bytes if product.plain and splits == 1 and not shares_products else 4
    results = kernel.other_bytes or kernel.rows * PROGRAM_VECTORS * item
    slot = slot_bytes(kernel) + 2 * kernel.rows * STEP_COLUMNS
    return min(kernel.slots, (product.device.shared_memory - BARRIER_BYTES - results) // slot)


def _favors_entries_first(product: Product) -> bool:
    """Whether entries expanded in registers, as the first operand, are faster than those that a producer writes.

    They are for contiguous 16-bit vectors and several tiles: 0.74 to 1.0 times as long. With one tile they take 0.97 to
    1.15 times as long; for rows, 0.97 to 1.06 times if the TMA stores the results, and 1.0 to 1.3 times if threads do
    (H200). A register holds entries of one block if blocks have at least 8 columns.
    """
    geometry = product.geometry
    several = geometry.n_tiles > 1 and geometry.log_chunk >= 3
    return product.item_bytes == 2 and vectors_contiguous(product) and several


def _stages_results(product: Product, kernel: KernelChoice) -> bool:
    """Whether warps that do nothing else store the result, in whole units, while consumers compute the next product.

    They do so for plain products in 16 bits if the TMA cannot: this takes 0.77 to 1.0 times as long as if consumers
    store the result (30 products, H200), but 1.2 times if each consumer has half of a tile's rows, and rows are
    contiguous. Two expanders leave no registers for it.
    """
    halves = kernel.entries_first and not kernel.out_vectors_contiguous
    stores = not kernel.tma_store and kernel.adjacent and not halves and kernel.expanders < 2
    return stores and product.item_bytes == 2 and product.plain


def _keeps_in_step(product: Product, kernel: KernelChoice) -> bool:
    """Whether programs begin every fourth round together, so that shared sectors are completed in the L2 cache.

    Sectors are shared by two tiles or windows or, if vectors are contiguous, by two blocks of vectors. This is faster
    for large plain results of many rounds: with and without, in microseconds on an H200, X (472599, 384) -> 1759 in
    fp16 813 and 1006, (504792, 384) -> 1345 with nnz 3 in bf16 686 and 839, (236299, 384) -> 1759 in fp32 738 and 933;
    but (300000, 768) -> 1537 in bf16 524 and 513, (60000, 1000) -> 3001 in fp16 with 85 rounds 200 and 178. In 16 bits,
    it takes 1.0 to 1.1 times as long if consumers store the result. In fp32, contiguous vectors leave no registers for
    it unless the TMA stores the result.

    Where the TMA does, or in fp32, the more rounds and results, the more is gained. From MIN_SHARED on, 57 of 64
    products take 0.60 to 0.92 of the time and the others 1.0 to 1.16; with fewer, most take 1.02 to 1.18 times as long:
    with and without, (485159, 512) -> 964 in fp32 989 and 1520, (157953, 384) -> 3320 with nnz 2 in bf16 406 and 643,
    (202683, 1024) -> 1204 with nnz 1 in fp32, by threads, 548 and 655; but (357155, 512) -> 1304 with nnz 2 in fp16 507
    and 450, (30102, 1000) -> 3960 in bf16 133 and 118.
    """
    item, tiles = product.item_bytes, product.geometry.n_tiles
    rounds = product.stacks * tiles * -(-product.n // PROGRAM_VECTORS) / product.device.multiprocessors
    results = product.k * product.stacks / product.d
    far = product.y_strides[1 if kernel.out_vectors_contiguous else 0] * item
    whole_tiles = product.k % tiles == 0 and product.k // tiles * item % SECTOR_BYTES == 0
    whole_runs = kernel.out_vectors_contiguous or kernel.windows or whole_tiles
    if kernel.one_tile or (whole_runs and far % SECTOR_BYTES == 0) or not product.plain:
        return False
    if kernel.result_line_bytes:
        return results >= MIN_RESULTS and rounds >= MIN_ROUNDS
    by_tma = kernel.tma_store and not kernel.out_vectors_contiguous
    by_threads = item == 4 and kernel.adjacent and not (kernel.tma_store or kernel.vectors_contiguous)
    return (by_tma or by_threads) and results * rounds >= MIN_SHARED[item]


def _count_expanders(product: Product, loader: int, log_block: int) -> int:
    """The number of expanders: two for 16-bit data loaded by the TMA where a single one would limit the speed.

    They are used for contiguous vectors, which take 1.12 times as long with one expander if there is one tile, and for
    much data with one tile, 128 rows, and blocks of at most 8 columns, which have many codes: X (254266, 3072) -> 74
    with nnz 8 in fp16 takes 427 instead of 509 microseconds, (20000, 4096) -> 90 76 instead of 80, (60000, 1000) -> 127
    53 instead of 55, but (30000, 1024) -> 120 32 instead of 31 (H200).
    """
    if loader != TMA or product.item_bytes != 2:
        return 1
    many_codes = log_block <= MAX_LOG_DENSE and rows_of(product) == law.TILE_ROWS and product.geometry.n_tiles == 1
    return 2 if vectors_contiguous(product) or (many_codes and product.x_bytes >= MIN_DENSE_BYTES) else 1


def _loader(product: Product, log_block: int, log_panel: int, tma_store: bool) -> tuple[int, int]:
    """(loader, elements per copy).

    In 16 bits, STAGE takes 0.4 to 0.75 times as long as LOAD, and 0.75 to 1.0 times as long as copies of 4 and 8 bytes,
    but 1.03 to 1.07 times if threads also store the results of rows. In fp32, it takes 0.7 to 0.96 times as long as
    copies of 4 bytes, and 0.89 to 1.0 times as long as those of 8 (H200).
    """
    contiguous, item, far = vectors_contiguous(product), product.item_bytes, _is_far(product)
    if _tma_loads_boxes(product, log_panel) and (contiguous or far or _gains_by_tma(product, item << log_panel)):
        return TMA, 1
    vector = copy_width(product, log_block)
    copies = vector * item >= (VECTOR_BYTES if item == 4 or contiguous or tma_store else 4)
    if (far or not copies) and stages(product, log_block):
        return STAGE, 1
    return (COPY, vector) if vector * item >= 4 else (LOAD, 1)


def _gains_by_tma(product: Product, row_bytes: int) -> bool:
    """Whether the TMA is faster than copies of 16 bytes per thread for boxes with rows of `row_bytes`.

    With rows of 64 bytes it is if vectors are long. Times relative to copies, on an H200: in 16 bits with 4096 features
    0.82 to 0.89, with 1536 to 3072 0.93 to 0.95, with 384 to 1000 0.94 to 1.15; in fp32 with 151392 0.84, with 1000 to
    4096 0.92 to 1.10. With rows of 32 bytes 0.93 to 1.16.
    """
    least = 1536 if product.item_bytes == 2 else 1 << 14
    return row_bytes >= ROW_BYTES or (row_bytes == ROW_BYTES // 2 and product.d >= least)


def stages(product: Product, log_block: int) -> bool:
    """Whether STAGE can load the data.

    It needs adjacent elements, blocks that do not begin before the data, and blocks that begin at multiples of a unit's
    features; the last not if there is one tile, whose blocks are adjacent. In fp32, blocks need two units: otherwise
    room for a unit more would leave shared memory for one slot.
    """
    near = product.x_strides[0 if vectors_contiguous(product) else 1]
    units = 1 if product.item_bytes == 2 else 2
    in_units = product.geometry.n_tiles == 1 or product.item_bytes << log_block >= units * VECTOR_BYTES
    return near == 1 and in_units and product.offset % (1 << product.geometry.log_chunk) == 0


def line_bytes(contiguous: bool, panel_bytes: int, item: int, vectors: int, columns: int) -> int:
    """Bytes between two staged lines of a slot in shared memory, which holds `vectors` vectors and `columns` columns.

    Each panel has room for one unit of 16 bytes more than its elements take; if vectors are contiguous, a line is one
    panel of all vectors. The number of units is odd, so that lines begin in different banks.
    """
    return _padded_bytes(vectors * item) if contiguous else _padded_bytes(panel_bytes, columns * item // panel_bytes)


def _padded_bytes(panel_bytes: int, panels: int = 1) -> int:
    """The bytes of an odd number of units that hold `panels` panels, each with room for one unit more."""
    return VECTOR_BYTES * (panels * (panel_bytes // VECTOR_BYTES + 1) | 1)


def slot_bytes(kernel: KernelChoice | AmpereKernel) -> int:
    """The bytes of a slot's staged lines: features if vectors are contiguous, else vectors. 0 for other loaders."""
    return kernel.line_bytes * (kernel.step_columns if kernel.vectors_contiguous else kernel.program_vectors)


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


def _tma_loads_boxes(product: Product, log_panel: int) -> bool:
    """Whether the TMA can load the data in boxes that are as wide as the narrowest swizzle."""
    wide = vectors_contiguous(product) or product.item_bytes << log_panel >= SWIZZLE_BYTES
    return wide and _tma_loads(product)


def copy_width(product: Product, log_block: int) -> int:
    """The number of adjacent elements that one copy may cover: of one block, and either all or none inside the data."""
    contiguous = vectors_contiguous(product)
    far, near = product.x_strides if not contiguous else product.x_strides[::-1]
    if near != 1 or not product.data_aligned:
        return 1
    widest = VECTOR_BYTES // product.item_bytes
    if contiguous:
        return math.gcd(widest, far, product.n)
    return math.gcd(widest, far, product.d, product.offset, 1 << log_block)
