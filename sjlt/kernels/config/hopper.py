"""Which products the kernels for Hopper take, and in what shape: as `launch`, decided without a device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ...laws import exact as law
from .exact import BATCH, ITEM_BYTES, MOST_CHUNKS, VECTOR_BYTES, Product, groups_of, is_whole, vectors_last

VECTORS = 128  # of a program
HALF = VECTORS // 2  # that 4 of its warps multiply; those of a block of data
WIDTH = 32  # columns of a block of data and entries, at most
STEP = 64  # columns that `project_hopper` multiplies, and scales, together
MOST_NNZ = 8
# Steps (or chunks, if they are longer) whose sums a program adds one by one in fp32: errors are up to 5e-7 of the norm,
# or 1.5e-6 where one number outweighs all others (H200).
MOST_STEPS = 128
ELEMENTS = 1 << 24  # of the wide side, below which the host takes longer than the device
# X S' takes 0.7 to 0.9 of the other kernels' time in fp32, 0.7 to 1.05 in 16 bits (H200), for this many vectors, and
# where the multiprocessors have products for this share of the time, by bytes of a number.
LEAST_VECTORS = 512
BUSY = {4: 0.75, 2: 0.9}
PRODUCTS = 4  # of a multiprocessor, for Y S, so that few wait for the last ones


@dataclass(frozen=True)
class Hopper:
    """A launch of `project_hopper` or `adjoint_hopper`: constants of the kernel (names as there), and its programs.

    width : columns of a block.  blocks : of a tile, that the columns lie in.  slots : SLOTS.  tiles : TILES, of
    `adjoint_hopper`.  The rest is of `project_hopper`: blocks_per_split x splits cover the blocks.
    """

    programs: int
    width: int
    blocks: int
    slots: int
    tiles: int
    turned: bool
    splits: int
    blocks_per_split: int


@lru_cache(maxsize=4096)
def choose(product: Product, adjoint: bool) -> Hopper | None:
    """The launch of `project_hopper`, or of `adjoint_hopper`; None where they do not suit."""
    if not suits(product, adjoint):
        return None
    geometry = law.geometry(product.k, product.nnz, 0)
    groups, chunk = groups_of(product, geometry), 1 << geometry.log_chunk
    width, fp32 = min(chunk, WIDTH), product.dtype == "float32"
    each, turned = chunk // width, vectors_last(product)
    splits, per_split = (1, groups) if adjoint else _split(product, geometry)
    return Hopper(
        programs=min(_products(product) * splits, product.multiprocessors),
        width=width,
        blocks=groups * each,
        slots=3 if fp32 and not adjoint else 4,
        tiles=2 if geometry.n_tiles == 2 else 1,
        turned=turned,
        splits=splits,
        blocks_per_split=per_split * each,
    )


def suits(product: Product, adjoint: bool) -> bool:
    """Whether a product is for these kernels: as their loads and stores ask, and large enough.

    (That data and result are of one dtype, and begin at multiples of 16 bytes, is for the caller to see.)
    """
    if product.dtype == "float64":
        return False
    turned = vectors_last(product)
    if product.precision == "medium" and product.nnz < MOST_NNZ and not turned:
        return False  # one part in bf16 is faster still, and less exact
    geometry, size = law.geometry(product.k, product.nnz, 0), ITEM_BYTES[product.dtype]
    chunk = 1 << geometry.log_chunk
    rows = (product.strides, product.d), (product.narrow, product.k)
    if turned:
        rows = (product.strides[::-1], product.n), (product.narrow[::-1], product.n)
    if adjoint:
        gains = not turned and _gains_adjoint(product, size)
    elif turned:
        gains = _gains_turned(product, size)
    else:
        gains = product.n >= LEAST_VECTORS and _busy(product, _split(product, geometry)[0]) >= BUSY[size]
    return (
        gains
        and product.nnz <= MOST_NNZ
        and is_whole(product.k, product.nnz)
        and product.offset % (chunk << geometry.log_group) == 0
        and min(chunk, WIDTH) <= product.d < 1 << 30
        and all(_is_loadable(strides, width, size) for strides, width in rows)
        and product.n < 1 << 31
        and product.n * product.d >= ELEMENTS
    )


def _gains_adjoint(product: Product, size: int) -> bool:
    """Whether Y S is stored in whole vectors of memory, in blocks of WIDTH columns (else slow), and is large."""
    stores = size == 4 and product.nnz < MOST_NNZ and product.d * size % VECTOR_BYTES == 0
    return stores and _products(product) >= PRODUCTS * product.multiprocessors


def _gains_turned(product: Product, size: int) -> bool:
    """Whether S A with a row-major A is faster than by the kernels of `rows` and `gather`.

    In fp32 those take 1.0, 1.2, 1.3 and 2.2 times the memory floor for nnz 1, 2, 4 and 8 (H200), for whole blocks of
    64 vectors, else four times as long; these take 1.1 and, for nnz 8, 1.2, but the time of whole blocks of VECTORS.
    """
    n = product.n
    if n < VECTORS or n * size % VECTOR_BYTES:  # sums of splits have rows of n numbers, which are to be loadable
        return False
    wasted = -n % VECTORS
    return size == 2 or product.nnz == MOST_NNZ or (product.nnz > 1 and (n % HALF != 0 or 8 * wasted <= n))


def _is_loadable(strides: tuple[int, ...], width: int, size: int) -> bool:
    """Whether the tensor memory accelerator takes rows of so many numbers."""
    step = strides[0] * size
    return strides[1] == 1 and strides[0] >= width and step % VECTOR_BYTES == 0 and step < 1 << 40


def _split(product: Product, geometry: law.Geometry) -> tuple[int, int]:
    """(splits, groups in each, those of whole steps): accurate, and hardly a multiprocessor is idle.

    All sums of splits together take at most 128 KiB for each multiprocessor; or 4 % of the data, where more splits are
    needed for accuracy.
    """
    groups, unit = groups_of(product, geometry), max(1, STEP >> geometry.log_chunk)
    least = -(-groups // (MOST_STEPS * unit if product.dtype == "float32" else MOST_CHUNKS))
    most = max(least, min(2 * product.multiprocessors // _products(product), groups // BATCH))
    busy = {splits: _busy(product, splits) for splits in range(least, most + 1)}
    splits = next((splits for splits, share in busy.items() if share >= 0.95), max(busy, key=busy.__getitem__))
    per_split = -(-groups // (splits * unit)) * unit
    return -(-groups // per_split), per_split


def _busy(product: Product, splits: int) -> float:
    """The share of the multiprocessors' time for which they have programs."""
    programs, n = _products(product) * splits, product.multiprocessors
    return programs / (-(-programs // n) * n)


def _products(product: Product) -> int:
    """Of a tile of the sketch and VECTORS vectors."""
    return law.count_tiles(product.k) * -(-product.n // VECTORS)
