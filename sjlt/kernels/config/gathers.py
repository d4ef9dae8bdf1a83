"""Products for which kernels that gather are faster than tensor cores: pure functions of a `Product`.

`few_vectors` and `row_gather` read each element nnz times, mostly from the L1 cache, and add on the ordinary cores.
"""

from __future__ import annotations

import math

from .product import (
    NARROW_VECTORS,
    Product,
    is_power_of_two,
    is_small_and_narrow,
    loaded_bytes,
    vector_alignment,
    vectors_contiguous,
    whole_groups,
)

MIN_LONG_FEATURES = 1 << 16  # of a long vector
MIN_BLOCK_VECTORS = 16  # for fewer vectors, a block of 64 for the tensor cores would be mostly empty
# For `is_small_gather`: elements of X, terms, vectors of Y with one tile, and elements of the result.
MIN_SMALL, MAX_SMALL, MAX_SMALL_TERMS = 1 << 18, 1 << 21, 1 << 23
MAX_SMALL_VECTORS, MAX_SMALL_RESULT = 1 << 11, 1 << 17
MAX_READS = 4  # of an element by `row_gather`; twice as many for fp32 projections in power-of-two geometries
# Bytes of A in fp32 for `favors_few_vectors`, and from which on tensor cores are faster than `few_vectors` with nnz 2.
MIN_DENSE_BYTES, MAX_GATHERED_BYTES = 8 << 20, 64 << 20
MAX_SINGLE_BYTES = 8 << 20  # of A in 16 bits with nnz 1
MAX_LOADED_SINGLY = 32 << 20  # bytes of A in fp32 with nnz 1 whose elements are loaded one by one
MAX_EXPANSION = 2  # components per feature; see `_expands`
TINY_BYTES = 1 << 20  # of A in fp32, below which `row_gather` is used in all geometries
MIN_LOADED_BYTES = 4  # that a thread loads at once; see `is_half_block`
MANY_TERMS, SHORT_ROW = 128, 96  # of a feature; features per component; see `favors_half_block`
ROW_GATHER_VECTORS = 64  # per program of `row_gather`


def favors_few_vectors(product: Product) -> bool:
    """Whether `few_vectors` is faster than tensor cores, even with codes, on a projection that both can run.

    It is for two kinds of projections (H200; times in memory floors, tensor cores -> `few_vectors`):

    - X Sᵀ of long rows, if there are so few that a block is mostly empty, and nnz is small, because the time of
      `few_vectors` is proportional to nnz: 16 vectors in bf16 with nnz 4, 24 -> 15; 32 in fp16, 9.3 -> 4.3; 100 in fp32
      with nnz 1, 3.1 -> 1.5.
    - S A in a power-of-two geometry, where elements are read without masks: with nnz 1 in fp32, 1.3 to 2.1 -> 1.0 to
      1.2, in 16 bits, (300, 37630) -> 4096 3.7 -> 3.0 and (100, 466145) -> 1024 2.1 -> 1.9, but not if they are loaded
      one by one; in fp32, for up to 32 columns of at least 8 MiB, with nnz 4 3.0 -> 2.5 and with nnz 8 6.2 -> 4.1
      (H100).
    """
    if product.adjoint:
        return False
    fp32, few = product.dtype == "float32", product.n <= 2 * MIN_BLOCK_VECTORS
    if vectors_contiguous(product):
        if _expands(product):
            return False
        few_large = fp32 and few and product.x_bytes >= MIN_DENSE_BYTES and product.stacks == 1
        single = product.nnz == 1 and (fp32 or (product.item_bytes == 2 and vector_alignment(product) > 1))
        return is_power_of_two(product.k, product.nnz) and (single or few_large)
    if product.d < MIN_LONG_FEATURES or product.nnz > 4 or favors_half_block(product):
        return False
    return few or (product.n <= 128 and fp32 and product.nnz == 1)


def is_half_block(product: Product) -> bool:
    """Whether at most a block of `tensor_core` of 16-bit rows is projected in a power-of-two geometry.

    That kernel then needs few instructions, unless elements are loaded one by one.
    """
    fits = MIN_BLOCK_VECTORS <= product.n <= NARROW_VECTORS and product.item_bytes == 2 and not product.adjoint
    simple = is_power_of_two(product.k, product.nnz) and product.stacks == 1
    return fits and simple and product.x_strides[1] == 1 and loaded_bytes(product) >= MIN_LOADED_BYTES


def favors_half_block(product: Product) -> bool:
    """Whether `tensor_core` is faster than kernels that add terms one by one, on at most 32 rows of `is_half_block`.

    It is for many terms, and for rows that are short compared with the result. In microseconds on an H200, with
    `scattered_sums` and with tensor cores: X (32, 3106848) -> 2048 with nnz 4 224 and 144, X (32, 104824) -> 2048 33
    and 15, X (16, 228898) -> 256 with nnz 8 27 and 24, X (32, 154814) -> 2048 with nnz 1 33 and 21.
    """
    if not is_half_block(product) or product.n > 2 * MIN_BLOCK_VECTORS:
        return False
    return product.n * product.nnz >= MANY_TERMS or product.d < SHORT_ROW * product.k


def _expands(product: Product) -> bool:
    """Whether A has so few rows that results take most of the time, and codes can be used.

    From codes and by `few_vectors`, in microseconds on an H200: A (214, 4337) -> 2048 with nnz 2 in fp32 23 and 38, A
    (384, 4054) -> 2048 with nnz 1 in fp16 18 and 29, A (768, 954) -> 1592 with nnz 4 in fp32 14 and 18.
    """
    return product.device.hopper and product.k > MAX_EXPANSION * product.d


def favors_few_reads(product: Product) -> bool:
    """Whether `few_vectors` is faster for S A than other kernels that generate entries.

    It is with nnz 1, except for much data in 16 bits or whose elements are loaded one by one, and in fp32 with nnz 2
    for few columns or little data. In memory floors on an H100, with nnz 2 in fp32, tensor cores -> `few_vectors`: (64,
    316715) -> 768 3.1 -> 2.2; (1640, 3072) -> 512 4.3 -> 2.4; but (256, 132613) -> 1600 2.6 -> 3.7, and (57, 263153) ->
    120, whose elements are loaded one by one, 3.8 -> 5.1. In microseconds on an H200, with nnz 1, codes -> here:
    (11227, 1000) -> 1536 in fp32 77 -> 137; in 16 bits (1210, 214965) -> 576 336 -> 753, (100, 1467092) -> 448 220 ->
    241; in power-of-two geometries (289261, 512) -> 256 339 -> 393, but (8981, 1536) -> 128 57 -> 32.
    """
    if product.adjoint or not vectors_contiguous(product) or is_small_and_narrow(product):
        return False
    small = product.n <= NARROW_VECTORS or product.x_bytes < MAX_GATHERED_BYTES
    wide_fp32 = product.dtype == "float32" and vector_alignment(product) > 1
    if product.nnz == 1:
        return product.stacks > 1 or product.x_bytes < _most_single_bytes(product)
    return product.nnz == 2 and product.stacks == 1 and wide_fp32 and small


def _most_single_bytes(product: Product) -> float:
    """The bytes of A up to which `few_vectors` is faster with nnz 1."""
    if product.item_bytes == 2:
        return MAX_GATHERED_BYTES if is_power_of_two(product.k, product.nnz) else MAX_SINGLE_BYTES
    loaded_singly = product.n > NARROW_VECTORS and vector_alignment(product) == 1
    return MAX_LOADED_SINGLY if loaded_singly else math.inf


def favors_row_gather(product: Product) -> bool:
    """Whether `row_gather` is faster than tensor cores without codes for contiguous vectors.

    It is for stacks, for adjoints in power-of-two geometries, and for S A in fp32 if A has less than 1 MiB or, in
    power-of-two geometries, needs no masks. For other A, tensor cores take 0.2 to 0.86 of the time of `row_gather`
    (H100, 25 products): in memory floors, (512, 92192) -> 2048 in fp32 1.6 instead of 2.2, (300, 243021) -> 192 in fp32
    2.2 instead of 3.9, (61, 327868) -> 128 in fp32 3.4 instead of 7.0, and (26823, 1536) -> 256 in bf16 2.5 instead of
    10.7.
    """
    power_of_two, fp32 = is_power_of_two(product.k, product.nnz), product.dtype == "float32"
    twice = fp32 and power_of_two and not product.adjoint
    if not vectors_contiguous(product) or product.nnz > MAX_READS * (1 + twice) or is_small_and_narrow(product):
        return False
    if product.adjoint:
        return power_of_two
    return product.stacks > 1 or (fp32 and (product.x_bytes < TINY_BYTES or is_unmasked(product)))


def is_unmasked(product: Product) -> bool:
    """Whether `row_gather` needs no masks: all vectors of its programs exist, and all columns of A's groups."""
    whole_blocks = product.n % ROW_GATHER_VECTORS == 0
    whole = is_power_of_two(product.k, product.nnz) and whole_groups(product)
    return whole_blocks and (product.adjoint or whole)


def is_small_gather(product: Product) -> bool:
    """Whether a product is so small that `few_vectors` is fastest, which needs only one launch.

    In microseconds on an H200, here and with the fastest other kernel than `scattered_sums`, which is checked before:

    - Y S of contiguous rows: Y (1047, 1536) -> 692 in fp32 9 and 17; with one tile, (544, 768) -> 32 with nnz 4 7.2 and
      8.5, (1080, 1536) -> 128 with nnz 4, a power-of-two geometry, 8.7 and 9.7; but (2683, 384) -> 56 with nnz 8 12.7
      and 10.0, (4718, 119) -> 64 with nnz 1 16.0 and 8.1, (1260, 1024) -> 256 with nnz 1 14.3 and 7.9.
    - S A in fp32, and with nnz 1 in 16 bits: (1047, 384) -> 512 with nnz 4 7.9 and 13.3, (2001, 512) -> 128 with nnz 1
      in bf16 8.4 and 13.1; but (225, 2680) -> 128 with nnz 8 16.5 and 15.0, (2421, 1216) -> 318 with nnz 1 in fp16 24
      and 15, (351, 3072) -> 256 with nnz 3, whose elements are loaded one by one, 25 and 15. In power-of-two geometries
      with nnz 4, (64, 53326) -> 4096 19.6 and 21.0, (256, 13019) -> 128 18 and 24, but (300, 17465) -> 4096 30 and 23
      (H100).
    - X Sᵀ with nnz 1 and small results: (439, 1024) -> 128 9.3 and 13.5, (247, 3072) -> 64 9.7 and 12.4; but (744, 768)
      -> 698 32 and 11. Without codes, (239, 4311) -> 896 18 and 52.
    """
    size, terms = product.n * product.d, product.n * product.d * product.nnz
    power_of_two = is_power_of_two(product.k, product.nnz)
    if size < MIN_SMALL or product.dtype == "float64":
        return False
    if product.adjoint:
        if product.x_strides[1] != 1 or product.y_strides[1] != 1 or (power_of_two and product.nnz == 1):
            return False
        if product.geometry.n_tiles == 1:
            return product.n <= MAX_SMALL_VECTORS and terms <= MAX_SMALL_TERMS // (1 if power_of_two else 2)
        return size <= MAX_SMALL and terms <= MAX_SMALL_TERMS
    if vectors_contiguous(product):
        if _expands(product):
            return False
        if product.dtype == "float32" and power_of_two and product.nnz <= MAX_READS:
            return terms <= 2 * MAX_SMALL_TERMS
        single = product.nnz == 1 and (power_of_two or product.n * product.k <= 4 * MAX_SMALL_RESULT)
        most = MAX_SMALL_TERMS // (2 if power_of_two or vector_alignment(product) > 1 else 4)
        return (product.dtype == "float32" or single) and terms <= most
    largest = MAX_SMALL_RESULT * (1 if product.device.hopper else 2)
    return product.nnz == 1 and size <= MAX_SMALL and product.n * product.k <= largest
