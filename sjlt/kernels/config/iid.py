"""The choice of a kernel for the iid law: pure functions of a `Product`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .arithmetic import FP64, NATIVE, choose_mode
from .product import SCRATCH_BYTES, VECTOR_BYTES, Product, alignment

MAX_SPLIT_TERMS = 1 << 30  # terms of the sums of one split, which kernels count in 32 bits
MANY_VECTORS = 1 << 14  # with at least so many, every multiprocessor has a program, even with blocks of 256 vectors
FEW_VECTORS = 16  # up to so many, programs need few registers
# Terms of one sum; these sums are added to a total. On tensor cores, a sum loses up to 2^-24 (relative) per 16 terms.
SPLIT_FP32_TERMS, NATIVE_TERMS, FP64_TERMS = 128, 4096, 1024


@dataclass(frozen=True)
class Iid:
    """A launch of `multiply_iid`.

    Attributes
    ----------
    block_vectors, block_out, block_reduce, terms_per_sum, mode, unmasked, align
        Constants of the kernel.
    splits, terms_per_split : int
        Number of parts that the sums are split into, and of terms in each part.
    num_warps, num_stages : int
        Compiler options.
    """

    block_vectors: int
    block_out: int
    block_reduce: int
    terms_per_sum: int
    mode: int
    unmasked: bool
    align: int
    splits: int
    terms_per_split: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class IidHopper:
    """A launch of `multiply_iid_hopper`.

    Attributes
    ----------
    block_vectors, block_out, block_reduce, stages
        Constants of the kernel.
    consumer_warps, producer_warps : int
        Number of warps that multiply, and of warps that generate entries.
    producer_registers : int
        Registers per thread of the producer warps; all threads of a multiprocessor share 65,536.
    splits : int
        1, because sums are not split.
    """

    block_vectors: int = 256
    block_out: int = 128
    block_reduce: int = 64
    stages: int = 4
    consumer_warps: int = 8
    producer_warps: int = 8
    producer_registers: int = 88
    splits: int = 1


HOPPER = IidHopper()
MIN_PRODUCTS = 4  # per multiprocessor; then few multiprocessors are idle during the last products


class _Block(NamedTuple):
    """The block of results and terms of a program, and its compiler options."""

    vectors: int
    out: int
    reduce: int
    warps: int
    stages: int


def choose(product: Product) -> IidHopper | Iid:
    """The launch for a product whose n, d and k are positive, by the first rule that applies."""
    if product.plain and product.device.hopper and eligible_for_hopper(product):
        return HOPPER
    return choose_portable(product)


def eligible_for_hopper(product: Product) -> bool:
    """Whether the Hopper kernel can run a product (X Sᵀ in 16 bits, with aligned rows) that is large enough for a gain.

    The caller checks `Product.plain` and `Device.hopper`.
    """
    n, d, (stride_v, stride_f) = product.n, product.d, product.x_strides
    blocks = -(-n // HOPPER.block_vectors) * -(-product.k // HOPPER.block_out)
    return (
        not product.adjoint
        and product.dtype in ("float16", "bfloat16")
        and stride_f == 1
        and stride_v % 8 == 0
        and d <= stride_v < 1 << 38
        and 0 < d <= NATIVE_TERMS
        and d % HOPPER.block_reduce == 0
        and product.offset >> 32 == (product.offset + d - 1) >> 32
        and HOPPER.block_vectors <= n < 1 << 31
        and blocks >= MIN_PRODUCTS * product.device.multiprocessors
    )


def choose_portable(product: Product) -> Iid:
    """The launch of the portable kernel for a product whose n, d and k are positive."""
    mode = choose_mode(product)
    block = _block(product, mode)
    programs = -(-product.n // block.vectors) * -(-product.out_dim // block.out)
    splits, per_split = _split(product, programs, 24 if block.vectors <= FEW_VECTORS else 2, block.reduce)
    max_terms = {NATIVE: NATIVE_TERMS, FP64: FP64_TERMS}.get(mode, SPLIT_FP32_TERMS)
    align = alignment(product, product.reduce_dim, product.data_strides, VECTOR_BYTES)
    chunked = per_split > max_terms
    return Iid(
        block_vectors=block.vectors,
        block_out=block.out,
        block_reduce=block.reduce,
        terms_per_sum=max_terms if chunked else MAX_SPLIT_TERMS,
        mode=mode,
        unmasked=align > 1 and product.reduce_dim % block.reduce == 0,
        align=align,
        splits=splits,
        terms_per_split=per_split,
        num_warps=block.warps,
        num_stages=block.stages,
    )


def _block(product: Product, mode: int) -> _Block:
    """The block of a program: as many vectors per tile of entries as registers allow (tuned on an H200)."""
    if mode == FP64:
        return _Block(FEW_VECTORS if product.n <= FEW_VECTORS else 32, 64, 16, 4, 2)
    out, reduce = 128, 64
    if product.n <= FEW_VECTORS:
        vectors, warps = FEW_VECTORS, 4
    elif product.n <= 64:
        vectors, warps = 64, 4
    elif mode != NATIVE or product.reduce_dim > NATIVE_TERMS:  # a chunked sum needs twice as many registers
        vectors, warps = 128, 8
    elif product.reduce_dim >= 512 and product.n >= MANY_VECTORS:
        vectors, warps = 256, 8
    else:
        vectors, warps = 128, 4
    step_bytes = vectors * reduce * product.item_bytes
    stages = min(4 if vectors == 256 else 3, (product.device.shared_memory - out * reduce * 2) // step_bytes)
    return _Block(vectors, out, reduce, warps, max(1, stages))


def _split(product: Product, programs: int, programs_per_multiprocessor: int, unit: int) -> tuple[int, int]:
    """(splits, terms per split, a multiple of `unit`), for the given number of programs per multiprocessor."""
    terms = product.reduce_dim
    splits = min(programs_per_multiprocessor * product.device.multiprocessors // programs, terms // (8 * unit))
    splits = min(splits, SCRATCH_BYTES // (8 * product.n * product.out_dim))
    splits = max(splits, 1, -(-terms // MAX_SPLIT_TERMS))
    per_split = -(-terms // (splits * unit)) * unit
    return -(-terms // per_split), per_split
