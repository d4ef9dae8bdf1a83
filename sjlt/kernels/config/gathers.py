"""Products for which kernels that gather are faster than tensor cores: pure functions of a `Product`.

`few_vectors` and `row_gather` read each element nnz times, mostly from the L1 cache, and add on the ordinary cores.
"""

from __future__ import annotations

from .product import (
    NARROW_VECTORS,
    Product,
    is_power_of_two,
    is_small_and_narrow,
    vector_alignment,
    vectors_contiguous,
    whole_groups,
)

MIN_LONG_FEATURES = 1 << 16  # of a long vector
MIN_BLOCK_VECTORS = 16  # for fewer vectors, a block of 64 for the tensor cores would be mostly empty
MIN_SMALL, MAX_SMALL, MAX_SMALL_TERMS = 1 << 18, 1 << 21, 1 << 23  # data elements and terms, for `is_small_gather`
MAX_READS = 4  # of an element by `row_gather`; twice as many for fp32 projections in power-of-two geometries
# Bytes of A in fp32 from which on tensor cores are faster than `row_gather`, and than `few_vectors` with nnz 2.
MIN_DENSE_BYTES, MAX_GATHERED_BYTES = 8 << 20, 64 << 20
TINY_BYTES = 1 << 20  # of A in fp32, below which `row_gather` is used in all geometries
ROW_GATHER_VECTORS = 64  # per program of `row_gather`


def favors_few_vectors(product: Product) -> bool:
    """Whether `few_vectors` is faster than tensor cores, even with codes, on a projection that both can run.

    It is for two kinds of projections (H200; times in memory floors, tensor cores -> `few_vectors`):

    - X Sᵀ of long rows, if there are so few that a block is mostly empty, and nnz is small, because the time of
      `few_vectors` is proportional to nnz: 16 vectors in bf16 with nnz 4, 24 -> 15; 32 in fp16, 9.3 -> 4.3; 100 in fp32
      with nnz 1, 3.1 -> 1.5.
    - S A in fp32 in a power-of-two geometry, where elements are read without masks: with nnz 1, 1.3 to 2.1 -> 1.0 to
      1.2, and for up to 32 columns of at least 8 MiB, with nnz 4 3.0 -> 2.5 and with nnz 8 6.2 -> 4.1 (H100).
    """
    if product.adjoint:
        return False
    fp32, few = product.dtype == "float32", product.n <= 2 * MIN_BLOCK_VECTORS
    if vectors_contiguous(product):
        few_large = few and product.x_bytes >= MIN_DENSE_BYTES and product.stacks == 1
        return fp32 and is_power_of_two(product.k, product.nnz) and (product.nnz == 1 or few_large)
    if product.d < MIN_LONG_FEATURES or product.nnz > 4:
        return False
    return few or (product.n <= 128 and fp32 and product.nnz == 1)


def favors_few_reads(product: Product) -> bool:
    """Whether `few_vectors` is faster for S A than other kernels that generate entries.

    It is with nnz 1, and in fp32 with nnz 2 for few columns or little data. In memory floors on an H100, with nnz 2 in
    fp32, tensor cores -> `few_vectors`: (64, 316715) -> 768 3.1 -> 2.2; (1640, 3072) -> 512 4.3 -> 2.4; but (256,
    132613) -> 1600 2.6 -> 3.7, and (57, 263153) -> 120, whose elements are loaded one by one, 3.8 -> 5.1.
    """
    if product.adjoint or not vectors_contiguous(product) or is_small_and_narrow(product):
        return False
    small = product.n <= NARROW_VECTORS or product.x_bytes < MAX_GATHERED_BYTES
    wide_fp32 = product.dtype == "float32" and vector_alignment(product) > 1
    return product.nnz == 1 or (product.nnz == 2 and product.stacks == 1 and wide_fp32 and small)


def favors_row_gather(product: Product) -> bool:
    """Whether `row_gather` is faster than tensor cores without codes for contiguous vectors.

    It is for stacks, for adjoints in power-of-two geometries, and for S A in fp32 if A has less than 1 MiB or, in
    power-of-two geometries, if it has less than 8 MiB or needs no masks. For other A, tensor cores take 0.2 to 0.86 of
    the time of `row_gather` (H100, 25 products): in memory floors, (512, 92192) -> 2048 in fp32 1.6 instead of 2.2,
    (300, 243021) -> 192 in fp32 2.2 instead of 3.9, (61, 327868) -> 128 in fp32 3.4 instead of 7.0, and (26823, 1536)
    -> 256 in bf16 2.5 instead of 10.7.
    """
    power_of_two, fp32 = is_power_of_two(product.k, product.nnz), product.dtype == "float32"
    twice = fp32 and power_of_two and not product.adjoint
    if not vectors_contiguous(product) or product.nnz > MAX_READS * (1 + twice) or is_small_and_narrow(product):
        return False
    if product.adjoint:
        return power_of_two
    small = product.x_bytes < MIN_DENSE_BYTES or is_unmasked(product)
    return product.stacks > 1 or (fp32 and (product.x_bytes < TINY_BYTES or (power_of_two and small)))


def is_unmasked(product: Product) -> bool:
    """Whether `row_gather` needs no masks: all vectors of its programs exist, and all columns of A's groups."""
    whole_blocks = product.n % ROW_GATHER_VECTORS == 0
    whole = is_power_of_two(product.k, product.nnz) and whole_groups(product)
    return whole_blocks and (product.adjoint or whole)


def is_small_gather(product: Product) -> bool:
    """Whether a product is so small that `few_vectors`, which needs only one launch, is fastest.

    This is limited to S A in fp32 and to Y S of contiguous rows, and to geometries that are not powers of two, because
    the other kernels take half as long for those. On an H200, S A (4096, 103) -> 1664 in fp32 takes 15 us, against
    63 us by `row_gather` and 23 us from codes; Y (1047, 1536) -> 692 in fp32 takes 9 us, against 17 us by
    `adjoint_tensor_core`.
    """
    size, terms = product.n * product.d, product.n * product.d * product.nnz
    if size < MIN_SMALL or product.dtype == "float64" or is_power_of_two(product.k, product.nnz):
        return False
    if product.adjoint:
        return product.x_strides[1] == product.y_strides[1] == 1 and size <= MAX_SMALL and terms <= MAX_SMALL_TERMS
    return vectors_contiguous(product) and product.dtype == "float32" and terms <= MAX_SMALL_TERMS // 2
