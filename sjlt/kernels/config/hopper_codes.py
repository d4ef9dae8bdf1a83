"""Eligibility and launches of `project_codes_hopper`: pure functions of a `Product`.

It covers what `project_hopper` does not: any k and nnz, any strides, results that are accumulated or of another dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...laws import exact as law
from .arithmetic import MAX_CHUNKS
from .hopper import MAX_STEPS, PROGRAM_VECTORS, STEP_COLUMNS
from .product import (
    SCRATCH_BYTES,
    VECTOR_BYTES,
    Product,
    alignment,
    count_groups,
    is_power_of_two,
    vectors_contiguous,
)

TMA, COPY, LOAD = range(3)  # how data is loaded
INTEGERS = ["n", "d", "k", "products", "splits", "n_tiles", "capacity", "scale"]
INTEGERS += ["stride_v", "stride_f", "stride_os", "stride_ov", "stride_or"]

MIN_BYTES = 8 << 20  # of X, below which the host time of two launches outweighs what the kernel gains
SLOW_SHARE = 8  # where the portable kernels load the data slowly, this fraction of MIN_BYTES is enough
MIN_VECTORS = 48  # below which blocks of PROGRAM_VECTORS vectors are mostly empty
MIN_BYTES_PER_CODE = 32  # bytes of data for each byte of codes, below which making the codes dominates
MIN_COLUMNS, MIN_COLUMN_BYTES_PER_CODE = 32, 8  # the same for S A
MIN_STEPS = 8  # of a split
ROW_BYTES = 128  # of a TMA box, below which threads copy faster


@dataclass(frozen=True)
class KernelChoice:
    """The constants of `project_codes_hopper` that it is compiled for.

    Attributes
    ----------
    loader : {TMA, COPY, LOAD}
    vector : int
        Numbers that a thread copies at a time, if the loader is COPY.
    log_block, log_panel : int
        Columns of a block of codes and of a panel of data, as powers of two.
    one_tile : bool
        The sketch has one tile: its chunks lie side by side.
    vectors_contiguous, out_vectors_contiguous : bool
        Whether consecutive numbers of the data, of the result, belong to consecutive vectors.
    tma_store : bool
    rows : int
        Rows per tile, 64 or 128.
    slots : int
    """

    loader: int
    vector: int
    log_block: int
    log_panel: int
    one_tile: bool
    vectors_contiguous: bool
    out_vectors_contiguous: bool
    tma_store: bool
    rows: int
    slots: int


@dataclass(frozen=True)
class HopperCodes:
    """A launch of `encode_chunks` and `project_codes_hopper`.

    Attributes
    ----------
    kernel : KernelChoice
    splits, groups_per_split : int
        Parts that the sums are split into, each of so many groups of chunks.
    capacity : int
        Blocks that a list of codes has room for.
    products : int
        Products of a tile, a split and a block of vectors.
    """

    kernel: KernelChoice
    splits: int
    groups_per_split: int
    capacity: int
    products: int


def launch(product: Product) -> HopperCodes:
    """The launch for an eligible product."""
    geometry = product.geometry
    splits, groups_per_split = _split(product)
    kernel = _kernel(product, splits)
    return HopperCodes(
        kernel,
        splits,
        groups_per_split,
        groups_per_split << (geometry.log_chunk - kernel.log_block),
        _count_products(product) * splits,
    )


def eligible(product: Product) -> bool:
    """Whether the kernel can run a product and, by its size, gains by it. `Device.hopper` is not examined here."""
    if product.adjoint or product.dtype == "float64" or product.precision == "medium":
        return False
    geometry, stride = product.geometry, product.x_strides[0]
    least = MIN_BYTES // SLOW_SHARE if _others_are_slow(product) else MIN_BYTES
    return (
        geometry.log_chunk > 0
        and product.n * product.d * product.item_bytes >= least
        and _gains(product)
        and product.n < 1 << 31
        and product.d < 1 << 30
        and PROGRAM_VECTORS * stride < 1 << 31
        and _code_bytes(product) <= SCRATCH_BYTES
    )


def _gains(product: Product) -> bool:
    """Whether vectors are enough to be worth the codes, and the padding of a block.

    Where vectors are contiguous, the portable kernels are slow but for fp32 with few nonzeros: (100, 681349) -> 61 in
    bf16 takes them 32 times the memory floor, and these 3.5; (64, 2000000) -> 256 in fp32 1.3 and 2.4 (H200, nnz 4).
    In other than power-of-two geometries they are slow with more than one nonzero in fp32, too: (37, 3372990) -> 1344
    takes 17. These take 2.1 for (100, 1719527) -> 960, and about as long for fewer vectors, whose block is padded.
    """
    contiguous = vectors_contiguous(product)
    if contiguous and _is_narrow(product) and (product.nnz == 1 or is_power_of_two(product.k, product.nnz)):
        return False
    least, per_code = (MIN_VECTORS, MIN_BYTES_PER_CODE) if not contiguous else (MIN_COLUMNS, MIN_COLUMN_BYTES_PER_CODE)
    code_bytes = law.TILE_ROWS * product.stacks  # of as many columns as a chunk has
    return product.n >= least and product.n * product.item_bytes << product.geometry.log_chunk >= per_code * code_bytes


def _is_narrow(product: Product) -> bool:
    """Whether a row of fp32 data is at most half of a block, and read from the L1 cache few times."""
    return product.dtype == "float32" and product.nnz <= 4 and product.n <= PROGRAM_VECTORS // 2


def _others_are_slow(product: Product) -> bool:
    """Whether the portable kernels load the data slowly: contiguous vectors, or rows off 16 bytes.

    In a power-of-two geometry they do not. (H200, in us: (906, 4096) -> 192 in bf16 with odd row strides 31 for 55,
    S A (3072, 1028) -> 1465 in bf16 17 for 65.)
    """
    widest = VECTOR_BYTES // product.item_bytes
    if vectors_contiguous(product):
        off = not _is_narrow(product)
    else:
        off = alignment(product, product.d, product.x_strides, widest) < widest
    return off and not is_power_of_two(product.k, product.nnz)


def _kernel(product: Product, splits: int) -> KernelChoice:
    geometry, item, contiguous = product.geometry, product.item_bytes, vectors_contiguous(product)
    one_tile, fp32 = geometry.n_tiles == 1, item == 4
    log_block = min(geometry.log_chunk, 5 if fp32 or one_tile else 6)
    log_panel = (5 if fp32 else 6) if one_tile else log_block
    if _tma_loads(product) and (contiguous or item << log_panel >= ROW_BYTES):
        loader, vector = TMA, 1
    else:
        log_panel = 5 if fp32 else 6
        vector = _copy_width(product, log_block)
        loader = COPY if vector * item >= 4 else LOAD
        vector = vector if loader == COPY else 1
    out_contiguous = product.n > 1 and product.y_strides[0] < product.y_strides[1]
    return KernelChoice(
        loader,
        vector,
        log_block,
        log_panel,
        one_tile,
        contiguous,
        out_contiguous,
        _tma_stores(product, splits, out_contiguous),
        rows=law.TILE_ROWS if -(-product.k // geometry.n_tiles) > 64 else 64,
        slots=3 if fp32 else 4,
    )


def _tma_loads(product: Product) -> bool:
    """Whether rows and, within them, all panels begin at multiples of 16 bytes, as the TMA demands."""
    contiguous = vectors_contiguous(product)
    far, near = product.x_strides if not contiguous else product.x_strides[::-1]
    width = product.n if contiguous else product.d
    widest = VECTOR_BYTES // product.item_bytes
    geometry = product.geometry
    least = 8 if contiguous else widest  # columns of a panel: of rows of 128 bytes, swizzled in eights
    return (
        product.data_aligned
        and near == 1
        and far >= width
        and far % widest == 0
        and far * product.item_bytes < 1 << 40
        and (contiguous or product.offset % widest == 0)
        and (geometry.n_tiles == 1 or 1 << geometry.log_chunk >= least)
    )


def _copy_width(product: Product, log_block: int) -> int:
    """The numbers a thread may copy at once: neighbours in memory, in one block, all inside the data or all outside."""
    contiguous = vectors_contiguous(product)
    far, near = product.x_strides if not contiguous else product.x_strides[::-1]
    if near != 1 or not product.data_aligned:
        return 1
    widest = VECTOR_BYTES // product.item_bytes
    if contiguous:
        return math.gcd(widest, far, product.n)
    return math.gcd(widest, far, product.d, product.offset, 1 << log_block)


def _tma_stores(product: Product, splits: int, contiguous: bool) -> bool:
    """Whether tiles have equally many rows, and what is stored of each begins at a multiple of 16 bytes."""
    n_tiles = product.geometry.n_tiles
    if product.k % n_tiles or (splits == 1 and not product.plain):
        return False
    item = product.item_bytes if splits == 1 else 4
    far, near = product.y_strides[::-1] if contiguous else product.y_strides
    if splits > 1:  # partial sums have no gaps
        far, near = (product.n if contiguous else product.k * product.stacks), 1
    rows = 0 if contiguous else product.k // n_tiles
    return near == 1 and far > 0 and far * item % VECTOR_BYTES == 0 and rows * item % VECTOR_BYTES == 0


def _split(product: Product) -> tuple[int, int]:
    """(splits, groups in each, whole steps): enough for accuracy, and for hardly any multiprocessor to be idle."""
    geometry, groups = product.geometry, count_groups(product)
    unit = max(1, STEP_COLUMNS >> geometry.log_chunk)
    steps = (groups << geometry.log_chunk + geometry.log_group) // (STEP_COLUMNS * geometry.n_tiles) + 1
    fewest = -(-steps // (MAX_STEPS if product.dtype == "float32" else MAX_CHUNKS))
    products, multiprocessors = _count_products(product), product.device.multiprocessors
    fitting = (SCRATCH_BYTES - _code_bytes(product)) // (4 * product.n * product.k * product.stacks)
    most = max(fewest, min(2 * multiprocessors // products, steps // MIN_STEPS, fitting))
    shares = {}
    for splits in range(fewest, most + 1):
        busy = products * splits / (-(-products * splits // multiprocessors) * multiprocessors)
        shares[splits] = min(busy, 0.95)
    splits = max(shares, key=shares.__getitem__)  # the first of equals
    per_split = -(-groups // (splits * unit)) * unit
    return -(-groups // per_split), per_split


def _code_bytes(product: Product) -> int:
    """Bytes of all codes and of the columns where their blocks begin, at most."""
    geometry = product.geometry
    chunks = product.stacks * geometry.n_tiles * count_groups(product)
    return chunks * (1 << max(0, geometry.log_chunk - 5)) * (law.TILE_ROWS + 4)


def _count_products(product: Product) -> int:
    """Pairs of a tile of any stack and a block of vectors."""
    return product.stacks * product.geometry.n_tiles * -(-product.n // PROGRAM_VECTORS)
