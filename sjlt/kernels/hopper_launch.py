"""Which products the kernels for Hopper take, and in what shape: as `launch`, decided without a device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .. import law
from .launch import BATCH, ITEM_BYTES, MOST_CHUNKS, VECTOR_BYTES, Product, groups_of, is_whole

VECTORS = 128  # of a program
HALF = VECTORS // 2  # that 4 of its warps multiply; those of a block of data
WIDTH = 32  # columns of a block of data and entries, at most
MOST_NNZ = 8
PRODUCTS = 4  # of a multiprocessor, so that few wait for the last ones
ELEMENTS = 1 << 24  # of the wide side, below which the host takes longer than the device


@dataclass(frozen=True)
class Hopper:
    """A launch of `project_hopper` or `adjoint_hopper`: constants of the kernel (names as there), and its programs.

    width : columns of a block.  blocks : of a tile, that the columns lie in.  slots : SLOTS.  fold : FOLD, of
    `project_hopper`.  tiles : TILES, of `adjoint_hopper`.
    """

    programs: int
    width: int
    blocks: int
    slots: int
    fold: bool
    tiles: int


@lru_cache(maxsize=4096)
def choose(product: Product, adjoint: bool) -> Hopper | None:
    """The launch of `project_hopper`, or of `adjoint_hopper`; None where they do not suit."""
    if not suits(product, adjoint):
        return None
    geometry = law.geometry(product.k, product.nnz, 0)
    groups, chunk = groups_of(product, geometry), 1 << geometry.log_chunk
    width, parted = min(chunk, WIDTH), product.dtype == "float32" and not adjoint
    return Hopper(
        programs=min(_products(product), product.multiprocessors),
        width=width,
        blocks=groups * (chunk // width),
        slots=3 if parted else 4,
        fold=parted and groups > BATCH,
        tiles=2 if geometry.n_tiles == 2 else 1,
    )


def suits(product: Product, adjoint: bool) -> bool:
    """Whether a product is for these kernels: as their loads and stores ask, and large enough.

    (That data and result are of one dtype, and begin at multiples of 16 bytes, is for the caller to see.)
    """
    if product.dtype == "float64":
        return False
    if product.precision == "medium" and product.nnz < MOST_NNZ:  # one part in bf16 is faster still, and less exact
        return False
    geometry, size = law.geometry(product.k, product.nnz, 0), ITEM_BYTES[product.dtype]
    chunk, fp32 = 1 << geometry.log_chunk, product.dtype == "float32"
    if adjoint:  # which stores whole vectors of memory; stores of less than WIDTH columns are slow
        fits = fp32 and product.nnz < MOST_NNZ and product.d * size % VECTOR_BYTES == 0
    else:
        fits = fp32 or groups_of(product, geometry) <= MOST_CHUNKS
    return (
        fits
        and product.nnz <= MOST_NNZ
        and is_whole(product.k, product.nnz)
        and product.offset % (chunk << geometry.log_group) == 0
        and min(chunk, WIDTH) <= product.d < 1 << 30
        and _is_loadable(product.strides, product.d, size)
        and _is_loadable(product.narrow, product.k, size)
        and product.n < 1 << 31
        and product.n * product.d >= ELEMENTS
        and _products(product) >= PRODUCTS * product.multiprocessors
    )


def _is_loadable(strides: tuple[int, ...], width: int, size: int) -> bool:
    """Whether the tensor memory accelerator takes rows of so many numbers."""
    step = strides[0] * size
    return strides[1] == 1 and strides[0] >= width and step % VECTOR_BYTES == 0 and step < 1 << 40


def _products(product: Product) -> int:
    """Of a tile of the sketch and VECTORS vectors."""
    return law.count_tiles(product.k) * -(-product.n // VECTORS)
