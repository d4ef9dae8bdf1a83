"""Eligibility and launches of `project_codes_ampere`: pure functions of a `Product`."""

from __future__ import annotations

from .ampere_kernel import block_vectors, kernel_of, resident_programs
from .codes import Codes, Programs, launch_of, split_of
from .product import Product, is_power_of_two, loaded_bytes, vector_alignment, vectors_contiguous

MIN_VECTORS = 17  # for fewer, blocks of vectors are mostly empty
MIN_BYTES, MIN_ALIGNED_BYTES, MIN_SIMPLE_BYTES = 4 << 20, 8 << 20, 16 << 20  # of X; see `eligible`
ALIGNED_BYTES = 8
MAX_FEW_NNZ = 4


def launch(product: Product) -> Codes:
    """The launch for an eligible product."""
    return launch_of(product, _programs(product), kernel_of, prefetch=None)


def eligible(product: Product) -> bool:
    """Whether the kernel can run a product, and is faster than `project_tensor_core`, which would run it otherwise.

    That kernel is efficient if it can load several elements at a time and every group has a chunk of every tile. In
    microseconds on an H100, with tensor cores and from codes: X (180, 671215) -> 1792 with nnz 8 in fp16 795 and 263,
    A (593877, 1000) -> 1728 in fp16 1978 and 668, X (68394, 1000) -> 192 with nnz 8 in bf16 and an odd row stride 488
    and 208, X (23026, 1536) -> 1344 in fp16 107 and 83; but X (18166, 3072) -> 2048 with nnz 8 in bf16 84 and 102, A
    (1357485, 100) -> 1280 in fp32 436 and 536.
    """
    if product.adjoint or product.dtype == "float64" or product.precision == "medium" or product.stacks > 1:
        return False
    if not product.device.asynchronous_copies or product.n < MIN_VECTORS or product.x_bytes < MIN_BYTES:
        return False
    return _gains(product) and can_run(product)


def _gains(product: Product) -> bool:
    """Whether the kernel is faster, apart from the least number of vectors and bytes."""
    contiguous, power_of_two = vectors_contiguous(product), is_power_of_two(product.k, product.nnz)
    width = loaded_bytes(product)
    if contiguous:
        width = product.item_bytes * (vector_alignment(product) if product.data_aligned else 1)
    if width < ALIGNED_BYTES:
        if power_of_two and product.item_bytes == 2:
            return product.x_bytes >= MIN_SIMPLE_BYTES
        return product.item_bytes == 2 or not contiguous or product.nnz > MAX_FEW_NNZ
    if power_of_two or product.x_bytes < MIN_ALIGNED_BYTES:
        return False
    if product.item_bytes == 2 or product.nnz > MAX_FEW_NNZ:
        return True
    n_tiles = product.geometry.n_tiles
    return not contiguous and n_tiles & (n_tiles - 1) != 0


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
    return Programs(block_vectors(product), resident_programs(product))
