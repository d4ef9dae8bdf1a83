"""Products for which `project_scattered` is faster than other kernels: pure functions of a `Product`."""

from __future__ import annotations

from . import one_tile
from .gathers import (
    MIN_BLOCK_VECTORS,
    SHORT_ROW,
    favors_few_vectors,
    favors_half_block,
    is_half_block,
    is_small_gather,
)
from .product import (
    Product,
    has_power_of_two_tiles,
    is_power_of_two,
    loaded_bytes,
    next_power_of_two,
    vector_alignment,
    vectors_contiguous,
)
from .scattered_layouts import LANES, WORD_BYTES, are_rows, contiguous_vectors, sum_bytes
from .scattered_sums import can_run, column_cycles, cycles

MIN_BYTES = 1 << 20  # of X, below which the launch itself takes most of the time
MAX_VECTORS = 32
MAX_SMALL_BYTES = 32 << 20  # of X, for `eligible_small`
# The estimate below which the kernel is faster for little data: (cycles for the start of other kernels, bytes of X for
# which they take one more).
SMALL_CYCLES = {
    "fp32": (14_000, 1500),  # in fp32 with several tiles, with Hopper's kernels
    "other": (11_000, 1500),  # otherwise, with Hopper's kernels
    "no codes": (28_000, 750),  # with several tiles, without Hopper's kernels
    "no codes, one tile": (16_500, 750),
}
MIN_ADDITION_CYCLES = 2  # for 32 additions, which read and write as many sums
# The time of other kernels, in estimated cycles of a multiprocessor per column: for a block of 128 rows of X, unless
# stated otherwise, or for all contiguous vectors. `loaded_bytes` says how rows are loaded.
MAX_CYCLES = {
    "codes": 45,  # rows in fp32, loaded by 4 bytes, with Hopper's kernels
    "staged": 25,  # rows in 16 bits, loaded by 2 or 4 bytes, with Hopper's kernels
    "no codes": 90,  # rows loaded by 2 to 8 bytes, without Hopper's kernels: in fp32, or with chunks below 8 columns
    "portable codes": 45,  # others
    "few components": 115,  # the same with k <= FEW_COMPONENT_ROWS, for whose columns codes are as long as for k = 128
    "fp32": 40,  # other rows in fp32
    "aligned": 22.5,  # other rows in 16 bits
    "one": 32,  # other rows in 16 bits with nnz 1; twice as many in fp32
    "tensor cores": 40,  # 64 rows, by `tensor_core`
    "simple": 12,  # 64 rows, by `tensor_core` with few instructions
    "fp32 columns": 32,  # up to 64 contiguous vectors in fp32
    "columns": 11.9,  # contiguous vectors in 16 bits
    "power-of-two columns": 10.5,  # contiguous vectors in 16 bits, in a power-of-two geometry
    "columns of many entries": 15,  # contiguous vectors in 16 bits, with nnz > MAX_COLUMN_ENTRIES
}
FEW_COMPONENT_ROWS, MAX_COLUMN_ENTRIES = 32, 7
# The same of portable kernels for 64 contiguous vectors: with nnz 1 in fp32 and, for up to 64 vectors, in 16 bits; in
# fp32 with one tile that `one_tile` does not suit, with a power of two of tiles, and with other numbers of tiles.
MAX_PORTABLE_CYCLES = {"one": 24, "one in 16 bits": 14, "tile": 34, "power of two": 36, "tiles": 44}
# Additional cycles, of all multiprocessors, before other kernels add: mostly to write codes, and if these are short or
# not needed.
START_CYCLES, SHORT_START_CYCLES = 3_000_000, 1_500_000
# The fewest columns, per component and in all, that outweigh setting up and adding sums.
BLOCK_VECTORS, MIN_COLUMNS, MIN_FEATURES = 128, 8, 1 << 12
# For `is_in_registers`: vectors of a block of `few_vectors`, for rows with nnz 1 and otherwise; components, terms, and
# in 16 bits entries and vectors, for contiguous vectors.
MAX_SINGLE_BLOCK, MAX_BLOCK, FEW_COMPONENTS, MAX_FEW_TERMS = 4, 8, 512, 1 << 28
MAX_FEW_ENTRIES, MAX_FEW_ENTRY_VECTORS = 4, 16
# The time of `few_vectors` for rows, in cycles of a multiprocessor: its start, bytes of X per cycle, and cycles for 32
# terms, by nnz and dtype.
REGISTERS_START, REGISTERS_BYTES = 42_000, 17.5
REGISTERS_CYCLES = {"one": 6.3, "two": 7.4, "fp32": 2.8, "16 bits": 3.5}
MAX_MANY_VECTORS, MAX_MANY_ROWS = 128, 64  # vectors, and rows per tile, for `eligible_many`
MAX_VECTOR_SUMS = 108 << 10  # bytes of the sums of a vector; more have not been measured
MAX_NNZ = 16  # over all stacks; the table grows with it


def eligible(product: Product) -> bool:
    """Whether the kernel is faster than others, for up to 32 vectors, or for more by its estimated time.

    Other kernels take the time of 128 vectors, and long to load rows that begin off multiples of 8 bytes. From codes
    and here, in microseconds: (48, 312496) -> 64 with nnz 3 in fp32 65 and 39 (H100). For unaligned rows in 16 bits, on
    an H200: (64, 3835685) -> 32 with nnz 4 515 and 340, (64, 6339766) -> 128 with nnz 2 631 and 359; but (64, 7002786)
    -> 256 with nnz 8 943 and 1531, (238, 1010459) -> 112 with nnz 3 165 and 269.
    """
    if product.n >= MIN_BLOCK_VECTORS and product.stacks == 1 and are_rows(product) and is_small_gather(product):
        return False
    if product.n <= MAX_VECTORS:
        return not favors_half_block(product) and not _are_short_columns(product) and _gains(product)
    if product.dtype == "float64" or is_half_block(product):
        return False
    blocks = -(-product.n // BLOCK_VECTORS)
    few_codes = product.item_bytes == 2 and product.nnz > 1 and is_power_of_two(product.k, product.nnz)
    start = SHORT_START_CYCLES if few_codes or blocks > 1 or not are_rows(product) else START_CYCLES
    limit = _max_cycles(product) * blocks if are_rows(product) else _max_column_cycles(product)
    return limit > 0 and _gains(product) and column_cycles(product) <= limit + start / product.d


def _max_cycles(product: Product) -> float:
    """The estimated cycles of other kernels for a block of more than MAX_VECTORS rows; 0 if they are faster."""
    hopper, fp32 = product.device.hopper, product.dtype == "float32"
    if not _are_long_rows(product):
        return 0
    if not hopper and loaded_bytes(product) <= 8:
        if product.item_bytes == 2 and product.geometry.log_chunk >= 3:
            return MAX_CYCLES["portable codes"]
        return MAX_CYCLES["no codes" if product.k > FEW_COMPONENT_ROWS else "few components"]
    if hopper and loaded_bytes(product) <= 4:
        return MAX_CYCLES["codes" if fp32 else "staged"]
    if product.n > BLOCK_VECTORS:
        return 0
    if product.nnz == 1:
        return MAX_CYCLES["one"] * product.item_bytes / 2
    if fp32:
        return MAX_CYCLES["fp32"]
    few = product.n <= BLOCK_VECTORS // 2
    suits_tensor_cores = product.geometry.n_tiles <= 2 or (few and has_power_of_two_tiles(product))
    return 0 if suits_tensor_cores else MAX_CYCLES["aligned"]


def _max_column_cycles(product: Product) -> float:
    """The estimated cycles of other kernels for more than MAX_VECTORS contiguous vectors; 0 if they are faster.

    Those of portable kernels grow with the number of vectors. In microseconds on an H200, with the fastest of them and
    here, in fp32: A (226727, 1024) -> 1600 with nnz 2 579 and 333, A (12210, 19362) -> 384 with nnz 3 726 and 504, A
    (429226, 300) -> 679 with nnz 4 413 and 336, A (142117, 1000) -> 730 with nnz 1 357 and 240; but A (1627349, 512) ->
    4096 with nnz 3 1598 and 2443, A (107768, 303) -> 2770, whose elements are loaded one by one, 162 and 366, A (71669,
    1000) -> 47 with nnz 2 105 and 118. In 16 bits with nnz 1, A (3829028, 40) -> 576 293 and 212.
    """
    half_blocks = -(-product.n // (BLOCK_VECTORS // 2))
    fp32, few = product.dtype == "float32", half_blocks == 1 and not is_power_of_two(product.k, product.nnz)
    if product.device.hopper or (fp32 and few and product.nnz > 1 and product.geometry.n_tiles == 1):
        return MAX_CYCLES["fp32 columns"] if fp32 and few else 0
    if not _is_long(product):
        return 0
    if not fp32:
        return MAX_PORTABLE_CYCLES["one in 16 bits"] if few and product.nnz == 1 else 0
    if product.k <= MAX_MANY_ROWS and one_tile.eligible(product):
        return 0
    if product.nnz == 1:
        kind = "one"
    elif product.geometry.n_tiles == 1:
        kind = "tile"
    else:
        kind = "power of two" if has_power_of_two_tiles(product) else "tiles"
    return MAX_PORTABLE_CYCLES[kind] * half_blocks


def are_slower_than_codes(product: Product) -> bool:
    """Whether codes, if they are eligible, are faster for up to 32 contiguous vectors, by the estimated time.

    From codes and here, in microseconds on an H200, with nnz 4: A (13643173, 32) -> 256 540 and 647, A (2384256, 32) ->
    4096 132 and 144, but A (4210245, 32) -> 64 206 and 189, A (1811226, 20) -> 512 96 and 80; with nnz 2 A (3410928,
    32) -> 195 147 and 118.
    """
    if product.item_bytes > 2:
        limit = MAX_CYCLES["fp32 columns"]
    elif product.nnz > MAX_COLUMN_ENTRIES:
        limit = MAX_CYCLES["columns of many entries"]
    else:
        limit = MAX_CYCLES["power-of-two columns" if is_power_of_two(product.k, product.nnz) else "columns"]
    return column_cycles(product) > limit + SHORT_START_CYCLES / product.d


def eligible_small(product: Product) -> bool:
    """Whether the kernel can run a projection of more than 32 vectors and little data, and is faster by its estimate.

    The estimate lacks 5 or 6 microseconds, of the launch and of the first loads from memory that is not in the L2
    cache. Most other kernels take at least 12 to 16, because they begin with codes or need many steps. In microseconds
    on an H200, here and with the fastest other kernel: X (316, 1000) -> 576 with nnz 3 in fp32 9.2 and 15.8, (739,
    1536) -> 192 with nnz 2 10.1 and 15.5, (3503, 1027) -> 73 16.5 and 22.4, (171, 3072) -> 221 with nnz 8 in fp16 10.9
    and 15.6, A (1024, 1664) -> 21 10.3 and 13.4; without the Hopper kernels, X (926, 736) -> 257 with nnz 8 in fp16
    14.5 and 27.6; but X (842, 3072) -> 1024 with nnz 4 18.0 and 17.7, (1016, 1024) -> 1536 with nnz 2 in fp16 14.3 and
    11.2. In 16 bits, other kernels are faster with nnz 1, (861, 1000) -> 1063 in bf16 16.1 and 11.5, and in
    power-of-two geometries, (2767, 384) -> 512 with nnz 2 in bf16 13.8 and 8.8.
    """
    if product.n <= MAX_VECTORS or product.item_bytes > 4 or product.x_bytes > MAX_SMALL_BYTES:
        return False
    if product.item_bytes == 2 and (product.nnz == 1 or is_power_of_two(product.k, product.nnz)):
        return False
    if not product.device.hopper and product.n <= BLOCK_VECTORS and _are_short_columns(product):
        return False
    limit = _small_cycles(product)
    additions = product.n * product.d * product.nnz / (LANES * product.device.multiprocessors)
    return additions * MIN_ADDITION_CYCLES <= limit and _gains(product) and cycles(product) <= limit


def _small_cycles(product: Product) -> float:
    """The estimate below which the kernel is faster for a product of little data."""
    several = product.geometry.n_tiles > 1
    if product.device.hopper:
        kind = "fp32" if several and product.item_bytes == 4 else "other"
    else:
        kind = "no codes" if several else "no codes, one tile"
    start, bytes_per_cycle = SMALL_CYCLES[kind]
    return start + product.x_bytes / bytes_per_cycle


def eligible_many(product: Product) -> bool:
    """Whether the kernel can run a product of more contiguous vectors, and is faster than the portable kernels.

    It is if tiles have few rows: `row_gather` and `tensor_core` always take the time of 128 rows. The caller has found
    that `hopper_codes` is not eligible.
    """
    tile_rows = product.k // product.geometry.n_tiles
    in_range = MAX_VECTORS < product.n <= MAX_MANY_VECTORS and tile_rows <= MAX_MANY_ROWS
    return in_range and not are_rows(product) and _gains(product)


def eligible_long_rows(product: Product) -> bool:
    """Whether the kernel can run X Sᵀ of more long rows, and its estimate is below the time of `tensor_core`.

    X (100, 7000000) -> 18 with nnz 3 in fp16 takes 2.9 memory floors here and 10.2 with `tensor_core` (H200). That
    kernel is faster where it needs few instructions, X (64, 1511928) -> 256 with nnz 2 75 us and 115 us here, X (64,
    333716) -> 2048 with nnz 4 47 and 56, X (64, 200928) -> 256 with nnz 3 27 and 47. The caller has ruled out other
    kernels.
    """
    in_range = MAX_VECTORS < product.n <= MAX_MANY_VECTORS and _are_long_rows(product) and product.dtype != "float64"
    wide = product.item_bytes == 2 and loaded_bytes(product) > 4 and product.k > MAX_MANY_ROWS
    simple = is_half_block(product) or (wide and product.n <= BLOCK_VECTORS // 2)
    limit = MAX_CYCLES["simple" if simple else "tensor cores"] * -(-product.n // (BLOCK_VECTORS // 2))
    return in_range and _gains(product) and column_cycles(product) <= limit


def _gains(product: Product) -> bool:
    """Whether the kernel can run a product and is faster than others, the number of vectors aside."""
    return (
        product.device.asynchronous_copies
        and not product.adjoint
        and product.x_bytes >= MIN_BYTES
        and product.d < 1 << 30
        and product.nnz * product.stacks <= MAX_NNZ
        and product.k * product.stacks * sum_bytes(product) <= MAX_VECTOR_SUMS
        and not is_in_registers(product)
        and (are_rows(product) or _are_columns(product))
        and can_run(product)
    )


def is_in_registers(product: Product) -> bool:
    """Whether `few_vectors`, which gathers and keeps sums in registers, is faster (see its rules in `gathers`).

    In power-of-two geometries, it is for one row, and for up to 32 rows that it may compute if its estimated time is
    less. In microseconds on an H200, with sums in shared memory and by `few_vectors`, X (8, 61192527) -> 1024 with nnz
    4 in fp16 takes 691 and 923, X (8, 15283507) -> 512 with nnz 2 in bf16 123 and 347, X (8, 496980) -> 1024 with nnz 4
    19 and 26, X (8, 13392249) -> 512 with nnz 1 in bf16 92 and 117; but X (4, 115411734) -> 4096 with nnz 8 2025 and
    1411, X (16, 17738558) -> 4096 with nnz 4 447 and 433, X (4, 70780297) -> 1024 with nnz 1 340 and 304, X (1,
    47442946) -> 1024 with nnz 4 in bf16 199 and 151, X (1, 30615262) -> 512 with nnz 1 in fp16 60 and 53.
    """
    if not is_power_of_two(product.k, product.nnz) or product.stacks > 1 or product.dtype == "float64":
        return False
    if not are_rows(product):
        return _are_columns_in_registers(product)
    if product.n > MAX_VECTORS or (product.n >= MIN_BLOCK_VECTORS and not favors_few_vectors(product)):
        return False
    if product.n == 1 or not can_run(product):
        return True
    return _register_cycles(product) < cycles(product)


def _register_cycles(product: Product) -> float:
    """The estimated time of `few_vectors` for a product of rows, in cycles of a multiprocessor, apart from launches."""
    if product.nnz <= 2:
        kind = "one" if product.nnz == 1 else "two"
    else:
        kind = "fp32" if product.dtype == "float32" else "16 bits"
    block = min(next_power_of_two(product.n), MAX_SINGLE_BLOCK if product.nnz == 1 else MAX_BLOCK)
    terms = -(-product.n // block) * block * product.d * product.nnz / (LANES * product.device.multiprocessors)
    read = product.x_bytes / (REGISTERS_BYTES * product.device.multiprocessors)
    return REGISTERS_START + max(REGISTERS_CYCLES[kind] * terms, read)


def _are_columns_in_registers(product: Product) -> bool:
    """Whether `few_vectors`, or another kernel for more than 16, is faster for contiguous vectors.

    The geometry is a power of two. Unless up to 32 vectors are, too, `few_vectors` gathers some that do not exist. In
    microseconds on an H200, with sums in shared memory and by `few_vectors`: A (11161142, 7) -> 128 with nnz 1 in bf16
    86 and 168, A (722564, 24) -> 128 with nnz 2 39 and 53; with nnz 4 to 8 and few components, A (430825, 8) -> 512 in
    fp16 30 and 35; but A (896513, 8) -> 2048 with nnz 8 62 and 40, A (18506502, 4) -> 2048 with nnz 4 148 and 128, A
    (3027139, 32) -> 256 with nnz 2 144 and 131. More than a block of 16-bit vectors with few entries is faster in
    shared memory: A (7666831, 16) -> 1024 with nnz 4 237 and 268, A (3313127, 20) -> 256 with nnz 2 95, and 194 by
    `tensor_core`; but with nnz 1 A (3533361, 32) -> 128 takes 119 and 86.
    """
    whole = product.n == next_power_of_two(product.n)
    if product.item_bytes == 2 and product.n > MAX_BLOCK:
        most = MAX_FEW_ENTRIES if product.n <= MAX_FEW_ENTRY_VECTORS else MAX_FEW_ENTRIES // 2
        return whole if product.nnz == 1 else product.nnz > most
    few = product.nnz > 1 and product.k <= FEW_COMPONENTS and product.n * product.d * product.nnz <= MAX_FEW_TERMS
    return product.n > MAX_VECTORS or (whole and not (few and 2 <= product.n <= MAX_BLOCK))


def _are_long_rows(product: Product) -> bool:
    return are_rows(product) and _is_long(product)


def _is_long(product: Product) -> bool:
    """Whether vectors are long enough to outweigh the time for setting up and adding sums."""
    return product.d >= max(MIN_FEATURES, MIN_COLUMNS * product.k * product.stacks)


def _are_short_columns(product: Product) -> bool:
    """Whether `tensor_core` is faster for columns of A in 16 bits that are short compared with the result.

    A (151648, 16) -> 2048 with nnz 3 takes 34 us here and 21 us there, A (57037, 100) -> 1344 with nnz 2 38 and 28; A
    (243118, 20) -> 1600 42 and 56 (H200).
    """
    few_features = product.nnz > 1 and product.d < SHORT_ROW * product.k and product.stacks == 1
    fits = product.n >= MIN_BLOCK_VECTORS and product.item_bytes == 2 and few_features
    return fits and vector_alignment(product) * product.item_bytes >= WORD_BYTES


def _are_columns(product: Product) -> bool:
    """Whether the elements of a feature are contiguous in memory, and `few_vectors` is not faster with nnz 1.

    With nnz 1, (32, 1.5e6) -> 64 in fp32 takes 1.6 times the memory floor with `few_vectors` and 3.5 here, but (32,
    5054743) -> 320 in fp16 5.3 and 2.1. In microseconds, A (1170658, 50) -> 832 in fp32 takes 322 and 187, (205364, 50)
    -> 192 43 and 40, but (97299, 48) -> 448 22 and 26. For other numbers of columns than powers of two, it loads some
    that do not exist: A (2136399, 24) -> 23 in fp32 takes 140 and 103, (3000000, 20) -> 300 182 and 93; but elements
    loaded one by one take longer here, (2000000, 31) -> 500 190 and 480 (H200).
    """
    if product.n <= MAX_VECTORS:
        suits_blocks = product.n == next_power_of_two(product.n) or contiguous_vectors(product) == 1
        gathered = product.item_bytes > 2 and suits_blocks
    else:
        gathered = product.device.hopper and vector_alignment(product) > 2
    single = product.nnz * product.stacks == 1 and product.n > MAX_VECTORS // 2 and gathered
    return vectors_contiguous(product) and product.x_strides[0] == 1 and not single
