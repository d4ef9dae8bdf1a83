"""Modes in which tensor cores multiply data of each dtype and precision by 16-bit entries."""

from __future__ import annotations

from .product import Product

NATIVE = 0  # fp16 and bf16 data, unchanged
BF16, BF16_PAIR, BF16_TRIPLE = 1, 2, 3  # fp32 data as the sum of that many bf16 values: 8, 16, 24 bits
FP16_PAIR = 4  # fp32 data as the sum of two fp16 values, with a power-of-two scale per vector: 22 bits
FP64 = 5  # fp64 data, unchanged; iid kernel only
ONE_FP16, ONE_BF16 = 0x3C00, 0x3F80  # the bits of 1

SAMPLE_FEATURES = 8  # features that set a vector's FP16_PAIR scale; from its middle, because padding is at the ends
LINE_FEATURES = 32  # features to examine next while fewer than two of those sampled are nonzero
MIN_PAIR_ELEMENTS = 1 << 22  # of the data; for fewer, launching `scale_vectors` costs more than FP16_PAIR saves
MAX_PAIR_FEATURES = 1 << 23  # for more, rounding errors add up to 1e-6 if the sample contains an outlier

# Tensor-core accumulation loses up to 4e-8 (relative) per chunk (H200), so the length of a sum is limited.
MAX_CHUNKS = 1024  # for 16-bit data
CHUNKS_PER_SUM = 16  # for fp32 data


def choose_mode(product: Product) -> int:
    """The mode in which tensor cores multiply the data of a product."""
    if product.dtype == "float64":
        return FP64
    if product.dtype != "float32":
        return NATIVE
    if product.precision == "high":
        return BF16_PAIR
    if product.precision == "medium":
        return BF16
    if product.adjoint and product.nnz:  # the kernel holds whole vectors and determines their scales
        return FP16_PAIR
    d = product.reduce_dim
    sampled = SAMPLE_FEATURES <= d <= MAX_PAIR_FEATURES and product.n * d >= MIN_PAIR_ELEMENTS
    return FP16_PAIR if sampled else BF16_TRIPLE
