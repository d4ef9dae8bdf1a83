"""How tensor cores multiply data of each dtype and precision by entries of 16 bits."""

from __future__ import annotations

from .product import Product

NATIVE = 0  # fp16 and bf16 data as it is
BF16, BF16_PAIR, BF16_TRIPLE = 1, 2, 3  # fp32 data as that many bf16 numbers: 8, 16, 24 bits
FP16_PAIR = 4  # fp32 data as two fp16 numbers with a power-of-two scale per vector: 22 bits
FP64 = 5  # fp64 data as it is; iid kernel only

SAMPLE_FEATURES = 8  # features that a vector's FP16_PAIR scale is derived from, in the middle: padding is at the ends
LINE_FEATURES = 32  # features examined next while fewer than two of the sampled ones are nonzero
MIN_PAIR_ELEMENTS = 1 << 22  # elements of data below which launching `scale_vectors` costs more than FP16_PAIR gains
MAX_PAIR_FEATURES = 1 << 23  # beyond this, an outlier in the sample makes the others' rounding errors add up to 1e-6

# Tensor-core accumulation loses up to 4e-8 (relative) per chunk (H200). Longer sums are split into sums of at most:
MAX_CHUNKS = 1024  # chunks of 16-bit data
CHUNKS_PER_SUM = 16  # chunks of fp32 data


def choose_mode(product: Product) -> int:
    """How the data is multiplied on tensor cores."""
    if product.dtype == "float64":
        return FP64
    if product.dtype != "float32":
        return NATIVE
    if product.precision == "high":
        return BF16_PAIR
    if product.precision == "medium":
        return BF16
    if product.adjoint and product.nnz:  # the kernel holds whole vectors and finds their scales itself
        return FP16_PAIR
    d = product.reduce_dim
    sampled = SAMPLE_FEATURES <= d <= MAX_PAIR_FEATURES and product.n * d >= MIN_PAIR_ELEMENTS
    return FP16_PAIR if sampled else BF16_TRIPLE
