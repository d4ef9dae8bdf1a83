"""The launches of the iid law's kernels: pure functions of a product's shape and the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from . import exact as launch

FP64 = 5  # a way to multiply beside those of `launch`: fp64 as it is
WHOLE = 1 << 30  # the most inner numbers of a split, which kernels count with 32 bits
LARGE = 1 << 14  # vectors from which on blocks of 256 still give every multiprocessor a program
FEW = 16  # vectors with which programs need few registers
PAIR_TERMS, NATIVE_TERMS = 128, 4096  # of a tensor core's sum: it loses up to 2^-24 of itself in every 16


class Product(NamedTuple):
    """n : data vectors.  inner, outer : what is summed, and what results have.  strides : of the data, along vectors
    and what is summed, in elements.  The rest as in `launch`."""

    n: int
    inner: int
    outer: int
    strides: tuple[int, ...]
    dtype: str
    precision: str
    multiprocessors: int
    shared_memory: int
    hopper: bool = False


@dataclass(frozen=True)
class Multiply:
    """A launch: constants of the kernel (names as there) and options. inner_per_split x splits cover `inner`."""

    vectors: int
    outer: int
    inner: int
    span: int
    mode: int
    even: bool
    align: int
    splits: int
    inner_per_split: int
    num_warps: int
    num_stages: int


class HopperTile(NamedTuple):
    """Constants of `multiply_iid_hopper`: V, OUTER, INNER, STAGES, the warps that multiply and those that make entries.

    maker_registers : of a thread of the latter. All together have 65,536.
    """

    vectors: int
    outer: int
    inner: int
    stages: int
    warps: int
    makers: int
    maker_registers: int


HOPPER = HopperTile(256, 128, 64, 4, 8, 8, 88)
PRODUCTS_EACH = 4  # of a multiprocessor, so that few wait for the last ones


@lru_cache(maxsize=4096)
def suits_hopper(product: Product, offset: int) -> bool:
    """Whether X S', from column `offset` of the sketch on, is for `iid_hopper`: as its loads ask, and large enough."""
    n, inner, outer, (stride_v, stride_i), dtype, *_ = product
    loads = stride_i == 1 and stride_v % 8 == 0 and inner <= stride_v < 1 << 38
    products = -(-n // HOPPER.vectors) * -(-outer // HOPPER.outer)
    return (
        dtype in ("float16", "bfloat16")
        and loads
        and 0 < inner <= NATIVE_TERMS
        and inner % HOPPER.inner == 0
        and offset >> 32 == (offset + inner - 1) >> 32
        and HOPPER.vectors <= n < 1 << 31
        and products >= PRODUCTS_EACH * product.multiprocessors
    )


@lru_cache(maxsize=4096)
def choose(product: Product) -> Multiply:
    """The launch for a product with n, inner and outer > 0."""
    mode = mode_of(product)
    vectors, outer, inner, warps, stages = _tile(product, mode)
    programs = -(-product.n // vectors) * -(-product.outer // outer)
    splits, per_split = _split(product, programs, 24 if vectors <= FEW else 2, inner)
    terms = NATIVE_TERMS if mode == launch.NATIVE else PAIR_TERMS
    align = launch.alignment(as_tiles(product), launch.VECTOR_BYTES)
    even = align > 1 and product.inner % inner == 0
    folded = mode != FP64 and per_split > terms
    span = terms if folded else WHOLE
    return Multiply(vectors, outer, inner, span, mode, even, align, splits, per_split, warps, stages)


def as_tiles(product: Product) -> launch.Product:
    """The product in the words of `launch`, for the questions that are asked there too."""
    n, inner, _, strides, dtype, precision, multiprocessors, shared_memory, _ = product
    return launch.Product(n, inner, 0, 0, 0, strides, (), dtype, precision, multiprocessors, shared_memory)


def mode_of(product: Product) -> int:
    """How data is multiplied."""
    return FP64 if product.dtype == "float64" else launch.mode_of(as_tiles(product), adjoint=False)


def _tile(product: Product, mode: int) -> tuple[int, int, int, int, int]:
    """(V, OUTER, INNER, warps, stages): as many vectors to a tile of entries as registers allow, H200."""
    if mode == FP64:
        return (FEW if product.n <= FEW else 32), 64, 16, 4, 2
    outer, inner = 128, 64
    if product.n <= FEW:
        vectors, warps = FEW, 4
    elif product.n <= 64:
        vectors, warps = 64, 4
    elif mode != launch.NATIVE or product.inner > NATIVE_TERMS:  # a sum of parts takes as many registers again
        vectors, warps = 128, 8
    elif product.inner >= 512 and product.n >= LARGE:
        vectors, warps = 256, 8
    else:
        vectors, warps = 128, 4
    step = vectors * inner * launch.ITEM_BYTES[product.dtype]
    stages = min(4 if vectors == 256 else 3, (product.shared_memory - outer * inner * 2) // step)
    return vectors, outer, inner, warps, max(1, stages)


def _split(product: Product, programs: int, programs_each: int, inner: int) -> tuple[int, int]:
    """(splits, inner numbers in each, of whole tiles): so that every multiprocessor has `programs_each` programs."""
    splits = min(programs_each * product.multiprocessors // programs, product.inner // (8 * inner))
    splits = min(splits, launch.SCRATCH_BYTES // (launch.ITEM_BYTES["float64"] * product.n * product.outer))
    splits = max(splits, 1, -(-product.inner // WHOLE))
    per_split = -(-product.inner // (splits * inner)) * inner
    return -(-product.inner // per_split), per_split
