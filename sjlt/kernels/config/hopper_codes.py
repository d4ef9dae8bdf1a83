"""Eligibility and launches of `project_codes_hopper`: pure functions of a `Product`.

It covers what `project_hopper` does not: any k, nnz and strides, accumulated results, and results of another dtype.
"""

from __future__ import annotations

from ...laws import exact as law
from .codes import Codes, Programs, launch_of, split_of
from .hopper import PROGRAM_VECTORS
from .hopper_loaders import kernel_choice, reaches, rows_of
from .product import (
    VECTOR_BYTES,
    Product,
    alignment,
    is_power_of_two,
    is_small_and_narrow,
    loaded_bytes,
    suits_half_blocks,
    vector_alignment,
    vectors_contiguous,
    visits_few_groups,
)

MIN_BYTES = 1 << 20  # of X; for fewer, two launches cost more host time than the kernel saves
FAST, FAST_16_BITS, MAX_FAST_VECTORS = 8, 16, 1024  # see `_least_factor`
MIN_VECTORS, MIN_COLUMNS = 48, 32  # for fewer rows of X, or columns of A, blocks of vectors are mostly empty
MIN_BYTES_PER_CODE = 6  # data bytes per byte of codes; for fewer, writing and reading codes dominates
MIN_BYTES_PER_MANY = 3  # the same for nnz > 4 and many columns: the time of other kernels is proportional to nnz
MIN_NARROW_BYTES = 8 << 20  # of X, from which on codes of at most 64 rows are faster for more than half a block
MIN_MANY_COLUMNS, MIN_LONG_COLUMNS = 1 << 18, 1 << 20  # see `_gains` and `_favors_half_blocks`
MANY_ENTRIES, MIN_COLUMNS_OF_MANY = 8, 24  # per column of S: so many need fewer columns of A


def launch(product: Product) -> Codes:
    """The launch for an eligible product."""
    near = product.x_strides[0 if vectors_contiguous(product) else 1]
    return launch_of(
        product, _programs(product), lambda p, splits, _, shares: kernel_choice(p, splits, shares), near == 1
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
        and split_of(product, _programs(product)) is not None
    )


def _programs(product: Product) -> Programs:
    return Programs(PROGRAM_VECTORS, resident=1, rows=rows_of(product), share=True)


def _gains(product: Product) -> bool:
    """Whether there are enough vectors to outweigh the cost of the codes and of the padding of a block.

    The portable kernels are faster for S A of few columns in fp32 with nnz <= 2 or, in a power-of-two geometry,
    with nnz <= 4: (64, 2000000) -> 256 with nnz 4 takes 1.3 memory floors with `row_gather` and 2.4 from codes
    (H200), (64, 316715) -> 768 with nnz 2 2.2 with `few_vectors` and 2.7 from codes (H100); but not if elements are
    loaded one by one, (33, 1467847) -> 1664 with nnz 2 319 us from codes and 463 by `tensor_core`. With only 3
    bytes of data per byte of codes, X (50, 6000000) -> 40 with nnz 8 in fp16 takes 7.4 from codes, 10.4 with
    `scattered_sums` and 14.4 with `tensor_core`, A (348687, 100) -> 19 4.6, 10.3 and 32; with 6, X (100, 7000000)
    -> 18 with nnz 3 takes 2.3, 2.9 and 10.1, and A of this shape 2.6, 4.0 and 11.3 (H200). With nnz 1, A (2762733,
    32) -> 32 in fp16 takes 183 us from codes and 88 us by `few_vectors`; with nnz 8, A (338816, 24) -> 1984 in fp32
    74 us, and 118 us by `scattered_sums`. For at most 64 rows, codes take half the memory: from 65 vectors and 8 MB of
    data on, other kernels then take 1.3 to 4.3 times as long: with nnz 8 in bf16, A (40049, 116) -> 21 27 and 18 us,
    X (131, 114897) -> 28 63 and 38, A (4149067, 87) -> 25 2498 and 580, but X (77, 27357) -> 34 19 and 17.
    """
    contiguous = vectors_contiguous(product)
    if is_small_and_narrow(product) or _favors_half_blocks(product):
        return False
    few_entries = product.nnz <= 2 or is_power_of_two(product.k, product.nnz)
    one_by_one = vector_alignment(product) == 1
    if contiguous and _is_narrow(product) and few_entries and (product.nnz == 1 or not one_by_one):
        return False
    least = MIN_VECTORS
    if contiguous and product.nnz > 1:
        least = MIN_COLUMNS if product.nnz < MANY_ENTRIES else MIN_COLUMNS_OF_MANY
    if product.n < least:
        return False
    few_rows = rows_of(product) < law.TILE_ROWS and product.stacks == 1
    if few_rows and product.n > PROGRAM_VECTORS // 2 and product.x_bytes >= MIN_NARROW_BYTES:
        return True
    many = product.nnz > 4 and product.d >= MIN_MANY_COLUMNS
    per_code = MIN_BYTES_PER_MANY if many else MIN_BYTES_PER_CODE
    code_bytes = law.TILE_ROWS * product.stacks  # for the columns of one chunk
    return product.n * product.item_bytes << product.geometry.log_chunk >= per_code * code_bytes


def _favors_half_blocks(product: Product) -> bool:
    """Whether half of a block of PROGRAM_VECTORS vectors is empty, and `tensor_core`, with half as many, is faster.

    From codes and with tensor cores alone, in microseconds on an H200: A (484744, 64) -> 154 with nnz 4 in fp32 100 and
    89; A (312500, 64) -> 4096 with nnz 3 in bf16 44 and 37; X (64, 468744) -> 256 with nnz 3 in fp16 66 and 48; X (64,
    1000000) -> 1000 with nnz 4 in bf16 130 and 122. With nnz 8 only for S A in power-of-two geometries: A (252565, 64)
    -> 128 in bf16 44 and 31 (H100), but A (4342324, 64) -> 640 485 and 701. Not for sums of many columns in 16 bits, X
    (64, 2000000) -> 300 with nnz 4 in fp16 246 and 285, A (12013334, 64) -> 960 in bf16 881 and 1247, except in
    power-of-two geometries, A (6266174, 64) -> 128 in fp16 372 and 324; but A (1982281, 64) -> 487 with nnz 3 in fp32
    306 and 262. Not for S A with nnz 1, or unless `suits_half_blocks`; nor for rows and many tiles, X (64, 446064) ->
    692 with nnz 3 in fp16 48 and 67. In power-of-two geometries, 4 bytes of a row suffice: X (64, 3402166) -> 128 with
    nnz 4 in bf16 345 and 236.
    """
    contiguous, power_of_two = vectors_contiguous(product), is_power_of_two(product.k, product.nnz)
    if product.n > PROGRAM_VECTORS // 2 or product.nnz > (8 if contiguous and power_of_two else 4):
        return False
    many_columns = product.n > MIN_VECTORS and product.d >= MIN_LONG_COLUMNS
    if many_columns and product.item_bytes == 2 and not power_of_two:
        return False
    if not contiguous:
        width = loaded_bytes(product)
        return product.item_bytes == 2 and (width >= 4 if power_of_two else width > 4 and visits_few_groups(product))
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
