"""Eligibility for products by torch with a dense matrix of the entries: pure functions of a `Product`."""

from __future__ import annotations

from dataclasses import dataclass

from ...laws import exact as law
from .arithmetic import MAX_CHUNKS
from .product import (
    SCRATCH_BYTES,
    SECTOR_BYTES,
    VECTOR_BYTES,
    Product,
    count_groups,
    is_power_of_two,
    next_power_of_two,
)

COLUMNS = 64  # of the matrix, per program that writes it
MIN_SUB_BLOCKS, MAX_NNZ = 8, 32  # one compiled kernel serves every smaller nnz
ALIGN = 16  # entries; rows of the matrix begin at multiples of these

# Bytes of data and result, those per byte of the matrix, multiplications per element of data and result, and
# components: see the functions that use them.
MIN_BYTES, MIN_LARGE_BYTES, MIN_HOPPER_BYTES, MIN_RATIO = 16 << 20, 64 << 20, 256 << 20, 16
MAX_INTENSITY, MAX_INTENSITY_MANY = 175, 245
MIN_COMPONENTS, MAX_COMPONENTS = 40, 512
SEVERAL_ENTRIES, MANY_ENTRIES = 4, 8  # per column


@dataclass(frozen=True)
class DenseMatrix:
    """A launch of `write_dense_matrix`, and a product by torch.

    Attributes
    ----------
    row_stride : int
        Entries from row to row of the matrix.
    sub_blocks : int
        Constant of the kernel.
    """

    row_stride: int
    sub_blocks: int

    @property
    def splits(self) -> int:
        """1: torch computes whole sums."""
        return 1


def is_possible(product: Product) -> bool:
    """Whether torch can compute a product with the accuracy of other kernels, in place, and in wide accesses.

    If lines of the data or of the result do not begin at multiples of 16 bytes, torch takes several times as long, and
    somewhat longer if they do not end there. It copies data whose lines overlap. Projections have one tile, because a
    NaN or infinity times the zeros of S reaches all components of its vector.
    """
    result = product.x_strides if product.adjoint else product.y_strides
    widths = (product.k, product.d) if product.adjoint else (product.d, product.k)
    rows = product.data_strides[1] == 1
    near, far = product.data_strides[::-1] if rows else product.data_strides
    width = widths[0] if rows else product.n
    whole = all(size * product.item_bytes % VECTOR_BYTES == 0 for size in (*widths, width, far, result[0]))
    return (
        product.matmul
        and product.item_bytes == 2
        and product.plain
        and product.stacks == 1
        and product.nnz <= MAX_NNZ
        and product.n > 1
        and near == result[1] == 1
        and far >= width
        and whole
        and matrix_bytes(product) <= SCRATCH_BYTES
        and (product.adjoint or (product.geometry.n_tiles == 1 and count_groups(product) <= MAX_CHUNKS))
    )


def matrix_bytes(product: Product) -> int:
    """Bytes of the matrix."""
    return 2 * product.k * launch(product).row_stride


def launch(product: Product) -> DenseMatrix:
    """The launch for a possible product."""
    return DenseMatrix(-(-product.d // ALIGN) * ALIGN, max(MIN_SUB_BLOCKS, next_power_of_two(product.nnz)))


def eligible(product: Product) -> bool:
    """Whether torch can compute a product and is faster than the kernels of this library.

    Up to about 150 multiplications per element of data and result, torch takes little longer than reading and writing
    these; beyond, its time is proportional to the multiplications. (Measured on an H200, whose ratio of arithmetic to
    bandwidth is 1.3 times that of an A100.) Writing the matrix takes 3 to 5 microseconds if it is small in comparison.
    """
    size = product.n * (product.d + product.k) * product.item_bytes
    if not (product.device.asynchronous_copies and is_possible(product)) or size < MIN_RATIO * matrix_bytes(product):
        return False
    return _gains_adjoint(product, size) if product.adjoint else _gains(product, size)


def _gains_adjoint(product: Product, size: int) -> bool:
    """Whether torch is faster for an adjoint.

    With `staged_adjoint` or `one_tile` and by torch, in microseconds on an H200: Y (586312, 136) -> 512 with nnz 8 in
    fp16 415 and 243, (237338, 296) -> 768 with nnz 8 256 and 207, (180520, 128) -> 3072 with nnz 4 518 and 362,
    (940064, 256) -> 512 456 and 417, (163528, 64) -> 384 55 and 53; but (143809, 32) -> 768 75 and 78, (58484, 256) ->
    1024 59 and 68, (57897, 192) -> 1536 with nnz 3 73 and 81, (213844, 512) -> 1000 with nnz 8 294 and 356, (64440, 40)
    -> 4096 with nnz 1 155 and 171. Rows of the result that begin within sectors are slow for torch, too: (228141, 128)
    -> 1000 with nnz 4 216 and 233. More components were not measured.
    """
    if size < MIN_LARGE_BYTES or not MIN_COMPONENTS <= product.k <= MAX_COMPONENTS or product.nnz < SEVERAL_ENTRIES:
        return False
    intensity = product.d * product.k / (product.d + product.k)
    if product.nnz >= MANY_ENTRIES:
        return intensity <= MAX_INTENSITY_MANY
    return intensity <= MAX_INTENSITY and product.x_strides[0] * product.item_bytes % SECTOR_BYTES == 0


def _gains(product: Product, size: int) -> bool:
    """Whether torch is faster for a projection.

    On Hopper, it is only for much data with many entries in a whole tile. In microseconds on an H200, by
    `project_hopper` and by torch: X (646337, 3072) -> 128 with nnz 8 1255 and 984, (473982, 1000) -> 128 343 and 296;
    but from codes and by torch (72639, 4096) -> 128 with nnz 3 169 and 164, (216469, 1000) -> 80 with nnz 8 131 and
    136, (627689, 768) -> 16 257 and 249. Without Hopper's kernels, other kernels take up to 2.8 times as long, except
    in power-of-two geometries for little data: (1008296, 384) -> 104 542 and 273, (224698, 1536) -> 64 246 and 203,
    (449773, 384) -> 128 with nnz 2 132 and 126, (199768, 1536) -> 16 with nnz 1 161 and 162; but (24160, 1000) -> 128,
    contiguous vectors, 27 and 28. For little data, the host would take longer than the device.
    """
    if product.device.hopper:
        rows = product.x_strides[1] == 1
        return rows and product.k == law.TILE_ROWS and product.nnz >= MANY_ENTRIES and size >= MIN_HOPPER_BYTES
    power_of_two = is_power_of_two(product.k, product.nnz)
    return size >= (MIN_LARGE_BYTES if power_of_two else MIN_BYTES)
