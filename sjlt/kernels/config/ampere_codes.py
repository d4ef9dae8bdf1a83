"""Eligibility and launches of `project_codes_ampere`: pure functions of a `Product`."""

from __future__ import annotations

from .ampere_kernel import COPY_BYTES, block_vectors, kernel_of, resident_programs, rows_of
from .codes import Codes, Programs, launch_of, split_of
from .gathers import is_half_block
from .product import (
    Product,
    has_power_of_two_tiles,
    is_power_of_two,
    loaded_bytes,
    vector_alignment,
    vectors_contiguous,
)

MIN_VECTORS = 17  # for fewer, blocks of vectors are mostly empty
MIN_BYTES, MIN_ALIGNED_BYTES, MIN_SIMPLE_BYTES = 4 << 20, 8 << 20, 16 << 20  # of X; see `eligible`
MIN_SINGLE_BYTES = 1 << 20  # of X if single 16-bit elements are loaded, which takes `project_tensor_core` long
MIN_SINGLE_FP32_BYTES = 64 << 20  # of A in fp32, in a power-of-two geometry, whose elements are loaded one by one
ALIGNED_BYTES = 8
MAX_FEW_NNZ = 4
# For `eligible_few`: pairs (fewest vectors, fewest entries per column), most vectors, and bytes of rows.
FEW_CONTIGUOUS, MAX_FEW_CONTIGUOUS = ((16, 8), (17, 3), (28, 2)), 32
FEW_ROWS, MAX_FEW_ROWS, MIN_ROWS_BYTES = ((28, 4), (40, 3)), 64, 48 << 20


def launch(product: Product) -> Codes:
    """The launch for an eligible product."""
    return launch_of(product, _programs(product), lambda p, splits, columns, _: kernel_of(p, splits, columns), None)


def eligible(product: Product) -> bool:
    """Whether the kernel can run a product, and is faster than `project_tensor_core`, which would run it otherwise.

    That kernel is efficient if it can load several elements at a time and every group has a chunk of every tile. In
    microseconds on an H100, with tensor cores and from codes: X (180, 671215) -> 1792 with nnz 8 in fp16 795 and 263,
    A (593877, 1000) -> 1728 in fp16 1978 and 668, X (68394, 1000) -> 192 with nnz 8 in bf16 and an odd row stride 488
    and 208, X (23026, 1536) -> 1344 in fp16 107 and 83; but X (18166, 3072) -> 2048 with nnz 8 in bf16 84 and 102.
    On an H200, A (107768, 303) -> 2770 with nnz 4 in fp32 251 and 162, A (4096, 3911) -> 448 81 and 71, A (1000, 55539)
    -> 4096 with nnz 2 921 and 581, but (1000, 10135) -> 512 with nnz 2 47 and 61, A (1627349,
    512) -> 4096 with nnz 3, with a power of two of tiles, 1598 and 1953, X (64, 5161370) -> 256 with nnz 4 in fp16,
    whose rows begin at multiples of 4 bytes, 372 and 444.
    """
    if not _supports(product) or product.dtype == "float64" or product.precision == "medium":
        return False
    single = product.item_bytes == 2 and not vectors_contiguous(product) and _width(product) < COPY_BYTES
    if product.n < MIN_VECTORS or product.x_bytes < (MIN_SINGLE_BYTES if single else MIN_BYTES):
        return False
    return _gains(product) and can_run(product)


def eligible_few(product: Product) -> bool:
    """Whether the kernel is the fastest for a projection of few 16-bit vectors, on Hopper, too.

    Its blocks have 32 or 64 vectors. In microseconds on an H200, with the fastest other kernel and here, for nnz 4: A
    (13643173, 32) -> 256 746 and 540, A (2176237, 32) -> 133 168 and 128, X (32, 9206512) -> 576 765 and 644, X (64,
    1373584) -> 694 212 and 140, X (64, 16570634) -> 448 2112 and 1652; with nnz 8 X (32, 5563758) -> 1991 840 and 581;
    with nnz 3 X (64, 1036652) -> 1920 142 and 101. But A (2623332, 32) -> 59 with nnz 4 176 and 286, A (243118, 20) ->
    1600 41 and 42, X (32, 506200) -> 125 37 and 45, X (64, 284786) -> 184 52 and 55, X (24, 31273776) -> 1728 with nnz
    8 4008 and 4460, X (32, 27771537) -> 256 with nnz 3 1829 and 2179. For S A, `choose` prefers `scattered_sums` if its
    estimated time is less: A (2228688, 32) -> 354 with nnz 2 takes 90 there and 115 here.
    """
    n, nnz, width, chunk = product.n, product.nnz, _width(product), 1 << product.geometry.log_chunk
    if not _supports(product) or product.item_bytes != 2:
        return False
    if vectors_contiguous(product):
        least = next((vectors for vectors, entries in FEW_CONTIGUOUS if nnz >= entries), MAX_FEW_CONTIGUOUS + 1)
        gains = least <= n <= MAX_FEW_CONTIGUOUS and chunk >= 16 and product.x_bytes >= MIN_ALIGNED_BYTES
        gains = gains and width >= ALIGNED_BYTES
    else:
        least = next((vectors for vectors, entries in FEW_ROWS if nnz >= entries), MAX_FEW_ROWS + 1)
        gains = least <= n <= MAX_FEW_ROWS and chunk >= 8 and product.x_bytes >= MIN_ROWS_BYTES
        gains = gains and (nnz > 4 or width >= COPY_BYTES) and not is_power_of_two(product.k, nnz)
    return gains and can_run(product)


def _supports(product: Product) -> bool:
    """Whether the device runs the kernel, and the product is a projection by one sketch."""
    return product.device.asynchronous_copies and not product.adjoint and product.stacks == 1


def _width(product: Product) -> int:
    """The number of consecutive bytes that a thread may load at once: of vectors if they are contiguous, else a row."""
    if not vectors_contiguous(product):
        return loaded_bytes(product)
    return product.item_bytes * (vector_alignment(product) if product.data_aligned else 1)


def _gains(product: Product) -> bool:
    """Whether the kernel is faster, apart from the least number of vectors and bytes."""
    contiguous, power_of_two = vectors_contiguous(product), is_power_of_two(product.k, product.nnz)
    if _width(product) < ALIGNED_BYTES:
        if power_of_two and product.item_bytes == 2:
            few = is_half_block(product) and product.nnz <= MAX_FEW_NNZ
            return product.x_bytes >= MIN_SIMPLE_BYTES and not few
        simple = power_of_two and contiguous and product.nnz <= MAX_FEW_NNZ
        return product.item_bytes == 2 or not simple or product.x_bytes >= MIN_SINGLE_FP32_BYTES
    if power_of_two or product.x_bytes < MIN_ALIGNED_BYTES:
        return False
    if product.item_bytes == 2 or product.nnz > MAX_FEW_NNZ:
        return True
    return not has_power_of_two_tiles(product)


def can_run(product: Product) -> bool:
    """Whether the kernel can run a projection of 16-bit or fp32 data."""
    programs = _programs(product)
    return (
        product.geometry.log_chunk > 0
        and product.n <= (1 << 31) - programs.vectors
        and product.d < 1 << 30
        and split_of(product, programs) is not None
    )


def _programs(product: Product) -> Programs:
    return Programs(block_vectors(product), resident_programs(product), rows_of(product))
