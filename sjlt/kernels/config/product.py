"""Descriptions of a product and of its device, which are all that the choice of a kernel depends on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ...laws import exact as law

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
VECTOR_BYTES = 16  # the widest memory access of a thread
SECTOR_BYTES = 32  # that the L2 cache writes at a time
NARROW_VECTORS, NARROW_BYTES = 64, 32 << 20  # of the data; see `is_small_and_narrow`
MIN_HALF_BYTES, MANY_TILES, LONG_COLUMN = 8 << 20, 5, 192  # features per component; see `suits_half_blocks`
SCRATCH_BYTES = 64 << 20  # limit on the memory of partial sums
SPLITS_PER_SUM = 8  # partial sums that are loaded together and added without compensation
MAX_REDUCE_LANES = 32  # lanes that add the partial sums of one result
GROUPS_PER_STEP = 32  # groups of chunks whose random words a program derives at a time, one per lane of a warp


class Device(NamedTuple):
    """The properties of a device that the choice of a kernel depends on.

    Attributes
    ----------
    multiprocessors : int
    shared_memory : int
        Bytes of shared memory available to one program.
    hopper : bool
        Whether the device runs the kernels of `kernels.hopper` (compute capability 9).
    programmatic_launch : bool
        Whether a kernel may start before the previous one has ended (NVIDIA, compute capability 9 or later).
    nvidia : bool
        Whether NVIDIA's PTX may be used. False on AMD and in Triton's interpreter.
    interpreted : bool
        Whether Triton's interpreter runs the kernels.
    asynchronous_copies : bool
        Whether the device runs the kernels of `kernels.nvidia` and `kernels.ampere` (compute capability 8 or later).
    """

    multiprocessors: int
    shared_memory: int
    hopper: bool = False
    programmatic_launch: bool = False
    nvidia: bool = True
    interpreted: bool = False
    asynchronous_copies: bool = False


class Product(NamedTuple):
    """A product with a sketch S of shape (k, d): Y = X Sᵀ or, if `adjoint`, X = Y S.

    X has shape (n, d) and Y has shape (n, k). The data is X, or Y if `adjoint`; the other one is the result.

    Attributes
    ----------
    adjoint : bool
    n, d, k : int
        Numbers of vectors, features and components.
    nnz : int
        Nonzeros per column; 0 under the iid law.
    offset : int
        The law's index of column 0.
    x_strides, y_strides : tuple of two ints
        Strides of X and of Y, in elements.
    dtype : str
        Of the data; a key of `ITEM_BYTES`.
    precision : str
        "highest", "high" or "medium", as in `torch.get_float32_matmul_precision`; "highest" unless dtype is float32.
    plain : bool
        Whether data and result have the same dtype and begin at multiples of 16 bytes, and the result is overwritten
        rather than accumulated. `Hopper` launches require this, and `Codes` unless consumers store the result.
    device : Device
    stacks : int
        Number of stacked sketches that one launch computes; k and nnz are those of one of them.
    data_aligned : bool
        Whether the data begins at a multiple of 16 bytes. The wide loads of `Codes` require only this.
    matmul : bool
        Whether torch may multiply 16-bit matrices. If it is set to use deterministic algorithms, it may refuse.
    """

    adjoint: bool
    n: int
    d: int
    k: int
    nnz: int
    offset: int
    x_strides: tuple[int, ...]
    y_strides: tuple[int, ...]
    dtype: str
    precision: str
    plain: bool
    device: Device
    stacks: int = 1
    data_aligned: bool = True
    matmul: bool = False

    @property
    def data_strides(self) -> tuple[int, ...]:
        """Strides of the data along vectors and along the dimension that is summed over."""
        return self.y_strides if self.adjoint else self.x_strides

    @property
    def reduce_dim(self) -> int:
        """The length of the dimension that is summed over."""
        return self.k if self.adjoint else self.d

    @property
    def out_dim(self) -> int:
        """The length of a result vector."""
        return self.d if self.adjoint else self.k

    @property
    def item_bytes(self) -> int:
        """Bytes per element of the data."""
        return ITEM_BYTES[self.dtype]

    @property
    def x_bytes(self) -> int:
        """Bytes of X."""
        return self.n * self.d * self.item_bytes

    @property
    def geometry(self) -> law.Geometry:
        """The tiles, groups and chunks of the exact law, which do not depend on the seed."""
        return _geometry(self.k, self.nnz)


@lru_cache(maxsize=4096)
def _geometry(k: int, nnz: int) -> law.Geometry:
    return law.geometry(k, nnz, 0)


def max_partial_bytes(product: Product) -> int:
    """Bytes that the partial sums of few long vectors may take."""
    return max(SCRATCH_BYTES, product.x_bytes // 16)


def vectors_contiguous(product: Product) -> bool:
    """Whether consecutive elements in memory belong to consecutive vectors, as in S A with a row-major A."""
    return product.n > 1 and 0 < product.x_strides[0] < product.x_strides[1]


def is_small_and_narrow(product: Product) -> bool:
    """Whether A of S A has few columns and little data, and the sketch has several tiles and nnz > 1.

    Then `project_tensor_core`, whose blocks have 64 vectors, is faster than kernels with 128 and than `row_gather`. In
    microseconds on an H100, from codes or by `row_gather`, and with tensor cores: (64, 26168) -> 704 in fp32 27 and 21;
    (64, 25656) -> 241 in fp16 21 and 16.
    """
    narrow = not product.adjoint and vectors_contiguous(product) and product.n <= NARROW_VECTORS
    small = product.x_bytes <= NARROW_BYTES
    return narrow and small and product.geometry.n_tiles > 1 and product.nnz > 1 and suits_half_blocks(product)


def suits_half_blocks(product: Product) -> bool:
    """Whether `project_tensor_core` is efficient for a product of few contiguous vectors.

    It is not if fewer than 8 bytes are loaded at a time, nor, for at least MIN_HALF_BYTES of data in other geometries
    than powers of two, with nnz > 4 or, in 16 bits, for columns of A that are long compared with the result. Unless the
    number of tiles is a power of two, it visits groups that have no chunk of its tile, and is not efficient for more
    than NARROW_BYTES in fp32 or, in 16 bits, for many tiles. In microseconds on an H200, from codes and with tensor
    cores: A (724040, 37) -> 1632 with nnz 3 in fp16 95 and 196, A (229874, 64) -> 785 with nnz 8 in fp16 60 and 105, A
    (334480, 64) -> 704 with nnz 4 in fp16 53 and 65, A (528145, 64) -> 320 61 and 88, A (1023011, 64) -> 1664 with nnz
    4 in fp32 169 and 222, A (2947025, 64) -> 384 460 and 556; but A (173840, 64) -> 415 44 and 44, A (152392, 64) ->
    914 with nnz 4 in fp16 32 and 29, A (163631, 64) -> 256 with nnz 8 in bf16 34 and 23.
    """
    if vector_alignment(product) * product.item_bytes < VECTOR_BYTES // 2:
        return False
    if product.x_bytes < MIN_HALF_BYTES or is_power_of_two(product.k, product.nnz):
        return True
    long = product.d >= LONG_COLUMN * product.k
    if product.nnz > 4 or (product.item_bytes == 2 and long):
        return False
    if product.item_bytes == 2:
        return visits_few_groups(product)
    return product.x_bytes <= NARROW_BYTES or has_power_of_two_tiles(product)


def visits_few_groups(product: Product) -> bool:
    """Whether few of the groups that `project_tensor_core` visits have no chunk of its tile, judging by the tiles."""
    return product.geometry.n_tiles < MANY_TILES or has_power_of_two_tiles(product)


def has_power_of_two_tiles(product: Product) -> bool:
    """Whether the number of tiles is a power of two, so that one chunk of every group meets each tile."""
    n_tiles = product.geometry.n_tiles
    return n_tiles & (n_tiles - 1) == 0


def alignment(product: Product, width: int, strides: tuple[int, ...], limit: int) -> int:
    """The number of consecutive elements that one access may cover; 1 if rows are not contiguous.

    A power of two that divides `limit`, the row stride and the row length `width`, all in elements.
    """
    if strides[1] != 1:
        return 1
    widest = VECTOR_BYTES // product.item_bytes
    return math.gcd(widest, limit, strides[0] if product.n > 1 else 0, width)


def loaded_bytes(product: Product) -> int:
    """The number of consecutive bytes of a row of X that a thread may load at once; those of an element at least."""
    widest = alignment(product, product.d, product.x_strides, product.offset) if product.data_aligned else 1
    return widest * product.item_bytes


def vector_alignment(product: Product) -> int:
    """The number of consecutive vectors that one access may cover; 1 if vectors are not contiguous.

    A power of two that divides the number of vectors and the distance between their elements. For an adjoint, whose
    kernels write about as much as they read, this includes the result.
    """
    widest = VECTOR_BYTES // product.item_bytes
    arrays = [product.x_strides, product.y_strides] if product.adjoint else [product.x_strides]
    if any(near != 1 for near, _ in arrays) or product.n == 1:
        return 1
    return math.gcd(widest, product.n, *(far for _, far in arrays))


def is_power_of_two(k: int, nnz: int) -> bool:
    """Whether k = 128 2^a and nnz = 2^b: the slots of a chunk are rows, and every tile has a chunk of every group."""
    tiles = k // law.TILE_ROWS
    return k % law.TILE_ROWS == 0 and tiles & (tiles - 1) == 0 and nnz & (nnz - 1) == 0


def count_groups(product: Product) -> int:
    """The number of groups of chunks that contain the columns."""
    geometry = product.geometry
    log_width = geometry.log_group + geometry.log_chunk
    return ((product.offset + product.d - 1) >> log_width) - (product.offset >> log_width) + 1


def whole_groups(product: Product) -> bool:
    """Whether the columns form whole groups of chunks."""
    width = 1 << product.geometry.log_group << product.geometry.log_chunk
    return product.offset % width == 0 and product.d % width == 0


def reduce_lanes(splits: int, results: int) -> int:
    """The number of lanes that add the partial sums of one result in `reduce_partial_sums`.

    Few results leave the device mostly idle if each has one thread, and a long sum then takes the latency of its loads.
    """
    return MAX_REDUCE_LANES if splits >= 4 * SPLITS_PER_SUM and results <= 1 << 16 else 1


def next_power_of_two(n: int) -> int:
    """The smallest power of two >= n, for n >= 1."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True)
class KernelGeometry:
    """The geometry of the exact law as one constant argument of a kernel.

    Attributes
    ----------
    k, nnz, n_tiles, log_group, log_chunk : int
        As in `sjlt.laws.exact.Geometry`.
    power_of_two : bool
        See `is_power_of_two`.
    n_keys : int
        Number of sub-blocks that 32 rows of a tile may lie in, rounded up to a power of two.
    n_sign_words : int
        Number of sign words of a chunk that 32 rows of a tile may need.
    stack : int
        Index of the stack; k and nnz are those of one stack.
    fused : int
        Number of stacks that one launch computes. If it is greater than 1, they begin at stack 0 and `stack` is unused.
    scale : float
        Magnitude of the entries: 1 / sqrt(nonzeros per column of all stacks).
    """

    k: int
    nnz: int
    n_tiles: int
    log_group: int
    log_chunk: int
    power_of_two: bool
    n_keys: int
    n_sign_words: int
    stack: int
    fused: int
    scale: float


@lru_cache(maxsize=4096)
def kernel_geometry(k: int, nnz: int, stack: int | None = 0, stacks: int = 1) -> KernelGeometry:
    """The geometry of one stack, or of all `stacks` if `stack` is None; each has k rows and nnz nonzeros per column."""
    g, power_of_two = law.geometry(k, nnz, 0), is_power_of_two(k, nnz)
    n_keys = max(1, nnz // 4) if power_of_two else next_power_of_two(nnz)
    n_sign_words = max(1, 4 // nnz) if power_of_two else 4
    which, fused = (0, stacks) if stack is None else (stack, 1)
    scale = (nnz * stacks) ** -0.5
    return KernelGeometry(
        k, nnz, g.n_tiles, g.log_group, g.log_chunk, power_of_two, n_keys, n_sign_words, which, fused, scale
    )
