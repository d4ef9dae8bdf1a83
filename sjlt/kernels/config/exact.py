"""The choice of a kernel for the exact law: pure functions of a `Product`.

The thresholds come from the times of all kernels that can run a product, on an H100 and an H200: see "The kernel chosen
and the fastest one" in kernels/MEASUREMENTS.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...laws import exact as law
from . import (
    ampere_codes,
    dense_matrix,
    hopper,
    hopper_codes,
    lane_sums,
    one_tile,
    scattered_rules,
    scattered_sums,
    staged_adjoint,
    staged_gather,
    warp_tiles,
)
from .arithmetic import BF16, CHUNKS_PER_SUM, MAX_CHUNKS, NATIVE, choose_mode
from .codes import Codes
from .dense_matrix import DenseMatrix
from .gathers import (
    MIN_BLOCK_VECTORS,
    ROW_GATHER_VECTORS,
    favors_few_reads,
    favors_few_vectors,
    favors_row_gather,
    is_small_gather,
    is_unmasked,
)
from .hopper import Hopper
from .lane_sums import LaneSums
from .one_tile import OneTile
from .product import (
    GROUPS_PER_STEP,
    SCRATCH_BYTES,
    Product,
    alignment,
    count_groups,
    is_power_of_two,
    kernel_geometry,
    next_power_of_two,
    vector_alignment,
    vectors_contiguous,
    whole_groups,
)
from .scattered_sums import ScatteredSums
from .staged_adjoint import StagedAdjoint
from .staged_gather import StagedGather
from .warp_tiles import WarpTiles

MIN_SPLIT_ELEMENTS = 1 << 20  # data elements; for fewer, the second launch that adds splits costs more than they gain
MAX_UNSPLIT_COLUMNS = 1024  # per tile; for more, an unsplit sum takes longer than a second launch
MAX_KEYS = 64  # pairs of a sub-block and a chunk that a thread of a tensor-core kernel searches in a step
MAX_GATHERED_GROUPS = 1024  # groups in one sum of `row_gather`; a separate total doubles the registers of the sums
BATCHES_PER_SUM = 16  # of `FewVectors`; adding each such sum to a total shortens the sums at hardly any cost


@dataclass(frozen=True)
class TensorCore:
    """A launch of `project_tensor_core` or `adjoint_tensor_core`.

    Attributes
    ----------
    block_vectors, chunks_per_dot, mode, chunked_sum, unmasked, align, vector_align
        Constants of the kernel.
    splits, groups_per_split : int
        Number of parts that the sums are split into, and of groups of chunks in each part.
    num_stages, registers : int
        Compiler options; `registers` is the limit per thread, or 0 for no limit.
    """

    block_vectors: int
    chunks_per_dot: int
    mode: int
    chunked_sum: bool
    unmasked: bool
    align: int
    vector_align: int
    splits: int
    groups_per_split: int
    num_stages: int
    registers: int


@dataclass(frozen=True)
class RowGather:
    """A launch of `project_row_gather` or `adjoint_row_gather`.

    Attributes are as in `TensorCore`, and

    prefetch : bool
        Whether the rows of the next chunk are prefetched into the L2 cache (NVIDIA).
    """

    block_vectors: int
    prefetch: bool
    chunked_sum: bool
    unmasked: bool
    align: int
    splits: int
    groups_per_split: int
    registers: int


@dataclass(frozen=True)
class ThreadLayout:
    """The axes that kernels for few vectors distribute over registers, warps and lanes; see `few_vectors_layout`."""

    sub_blocks: int
    rows_outer: int
    rows_inner: int
    chunks_outer: int
    chunks_inner: int


@dataclass(frozen=True)
class FewVectors:
    """A launch of `project_few_vectors` or `adjoint_few_vectors`.

    Attributes
    ----------
    layout, segments, block_vectors, unmasked, align, load_chunks, vectors_contiguous
        Constants of the kernel.
    fp64 : bool
        Whether sums are in fp64.
    offsets_64 : bool
        Whether offsets within a batch need 64 bits.
    splits, batches_per_split : int
        Number of parts that the sums are split into, and of batches in each part.
    registers : int
        Limit per thread, or 0 for no limit.
    """

    layout: ThreadLayout
    segments: int
    block_vectors: int
    unmasked: bool
    align: int
    load_chunks: bool
    vectors_contiguous: bool
    fp64: bool
    offsets_64: bool
    splits: int
    batches_per_split: int
    registers: int


OnTheFly = FewVectors | RowGather | TensorCore
FewLongVectors = LaneSums | WarpTiles | ScatteredSums
Launch = DenseMatrix | Hopper | Codes | FewLongVectors | StagedGather | StagedAdjoint | OneTile | OnTheFly


def choose(product: Product) -> Launch:
    """The launch for a product with n > 0 and d > 0, by the first rule that applies."""
    if dense_matrix.eligible(product):
        return dense_matrix.launch(product)
    if one_tile.is_narrow(product):
        return one_tile.launch(product)
    if lane_sums.eligible(product):
        return lane_sums.launch(product)
    if warp_tiles.eligible(product):
        return warp_tiles.launch(product)
    few_from_codes = ampere_codes.eligible_few(product)
    if few_from_codes and not vectors_contiguous(product):
        return ampere_codes.launch(product)
    if scattered_rules.eligible(product) and not _favors_codes_of_columns(product, few_from_codes):
        return scattered_sums.launch(product)
    if few_from_codes:
        return ampere_codes.launch(product)
    if product.plain and product.device.hopper and hopper.eligible(product):
        return hopper.launch(product)
    if scattered_rules.eligible_small(product):
        return scattered_sums.launch(product)
    if is_small_gather(product):
        return few_vectors(product)
    if one_tile.is_small(product):
        return one_tile.launch(product)
    if staged_adjoint.eligible(product):
        return staged_adjoint.launch(product)
    if product.device.hopper and hopper_codes.eligible(product) and not favors_few_vectors(product):
        return hopper_codes.launch(product)
    if scattered_rules.eligible_many(product):
        return scattered_sums.launch(product)
    if staged_gather.eligible(product):
        return staged_gather.launch(product)
    if one_tile.eligible(product):
        return one_tile.launch(product)
    if not favors_few_vectors(product) and scattered_rules.eligible_long_rows(product):
        return scattered_sums.launch(product)
    chosen = choose_on_the_fly(product)
    if isinstance(chosen, TensorCore) and not product.device.hopper and ampere_codes.eligible(product):
        return ampere_codes.launch(product)
    return chosen


def _favors_codes_of_columns(product: Product, few_from_codes: bool) -> bool:
    """Whether A has few columns, codes support them, and they are faster than `scattered_sums` by its estimate.

    `few_from_codes` : `ampere_codes.eligible_few` of the product.
    """
    if not vectors_contiguous(product) or product.n > scattered_rules.MAX_VECTORS:
        return False
    possible = few_from_codes or (product.device.hopper and hopper_codes.eligible(product))
    return possible and scattered_rules.are_slower_than_codes(product)


def choose_on_the_fly(product: Product) -> OnTheFly:
    """The launch of a portable kernel that generates the entries itself, for a product with n > 0 and d > 0."""
    if product.dtype == "float64" or product.n < MIN_BLOCK_VECTORS:
        return few_vectors(product)
    if favors_few_vectors(product) or favors_few_reads(product):
        return few_vectors(product)
    if favors_row_gather(product):
        return row_gather(product)
    chosen = tensor_core(product)
    if product.adjoint and chosen.align == 1 and product.x_strides[1] == 1:
        return few_vectors(product)  # Y (3187, 3279) -> 300 in fp32: 37 us against 256 us (H200)
    keys = kernel_geometry(product.k, product.nnz).n_keys
    return chosen if keys * chosen.chunks_per_dot <= MAX_KEYS else few_vectors(product)


def tensor_core(product: Product) -> TensorCore:
    """The launch of `project_tensor_core` or `adjoint_tensor_core`."""
    geometry, adjoint = product.geometry, product.adjoint
    chunk, power_of_two = 1 << geometry.log_chunk, is_power_of_two(product.k, product.nnz)
    mode = choose_mode(product)
    groups = count_groups(product)
    # The rounding of data to one bf16 value exceeds any accumulation error, so those sums need not be short.
    max_groups = {NATIVE: MAX_CHUNKS, BF16: GROUPS_PER_STEP}.get(mode, CHUNKS_PER_SUM)
    chunked = not adjoint and groups > max_groups
    # 64 features per dot; 32 for blocks of 128 fp32 vectors, whose loads in flight need the registers, and for chunked
    # sums of smaller chunks, which could exceed MAX_KEYS.
    wide = mode == NATIVE or adjoint or (chunked and chunk >= 16)
    chunks_per_dot = min(GROUPS_PER_STEP, max(1, (64 if wide else 32) // chunk))
    swap_operands = mode == NATIVE and power_of_two and not adjoint  # then 3 programs with 64 vectors fit
    small = chunked or adjoint or swap_operands or product.n <= 64 or chunk > (64 if mode == NATIVE else 32)
    block_vectors = 64 if small else 128
    splits, per_split = split_groups(product, block_vectors, groups, 2, chunks_per_dot)
    # Two programs share a multiprocessor. Each holds a tile of entries, and the data of a step for every stage but one.
    step_bytes = block_vectors * chunks_per_dot * chunk * product.item_bytes
    entry_bytes = law.TILE_ROWS * chunks_per_dot * chunk * 2
    stages = 1 + (product.device.shared_memory // 2 - entry_bytes) // step_bytes
    return TensorCore(
        block_vectors=block_vectors,
        chunks_per_dot=chunks_per_dot,
        mode=mode,
        chunked_sum=chunked and per_split > max_groups,
        unmasked=power_of_two and whole_groups(product) and groups % chunks_per_dot == 0,
        align=alignment(product, product.d, product.x_strides, math.gcd(chunk, product.offset)),
        vector_align=vector_alignment(product),
        splits=splits,
        groups_per_split=per_split,
        num_stages=max(1, min(stages, 6 if mode == NATIVE else 3 if chunk >= 64 else 4)),
        registers=168 if chunk == 64 and mode != NATIVE else 0,
    )


def row_gather(product: Product) -> RowGather:
    """The launch of `project_row_gather` or `adjoint_row_gather`."""
    groups, block_vectors = count_groups(product), ROW_GATHER_VECTORS
    splits, per_split = split_groups(product, block_vectors, groups, 4, 1)
    return RowGather(
        block_vectors=block_vectors,
        prefetch=product.device.nvidia and product.x_strides[0] == 1 and product.n % block_vectors == 0,
        chunked_sum=not product.adjoint and per_split > MAX_GATHERED_GROUPS,
        unmasked=is_unmasked(product),
        align=vector_alignment(product),
        splits=splits,
        groups_per_split=per_split,
        registers=128,
    )


def few_vectors(product: Product) -> FewVectors:
    """The launch of `project_few_vectors` or `adjoint_few_vectors`."""
    geometry, adjoint, contiguous = product.geometry, product.adjoint, vectors_contiguous(product)
    layout, block_vectors, load_chunks = _few_vectors_layout(product)
    sub_blocks, chunks = layout.sub_blocks, layout.chunks_outer * layout.chunks_inner
    segments = min(8 if sub_blocks == 1 else 4, max(2, 8 // block_vectors))
    while segments > 1 and sub_blocks > 4 and segments * chunks * sub_blocks > 2048:
        segments //= 2
    width = segments * chunks << geometry.log_group << geometry.log_chunk  # columns of a batch
    splits, batches_per_split = _split_batches(product, width, block_vectors)
    longest = product.k * product.y_strides[1] if adjoint else width * product.x_strides[1]
    return FewVectors(
        layout=layout,
        segments=segments,
        block_vectors=block_vectors,
        unmasked=product.n % block_vectors == 0,
        align=math.gcd(product.n, product.x_strides[1], product.y_strides[1] if adjoint else 0, 16),
        load_chunks=load_chunks,
        vectors_contiguous=contiguous,
        fp64=product.dtype == "float64",
        offsets_64=longest >= 1 << 32,
        splits=splits,
        batches_per_split=batches_per_split,
        registers=128 if sub_blocks <= 2 and block_vectors > 1 and not contiguous and not adjoint else 0,
    )


def _few_vectors_layout(product: Product) -> tuple[ThreadLayout, int, bool]:
    """(layout, block_vectors, load_chunks) of `few_vectors`."""
    geometry, adjoint, contiguous = product.geometry, product.adjoint, vectors_contiguous(product)
    chunk, sub_blocks = 1 << geometry.log_chunk, next_power_of_two(product.nnz)
    tile_rows = -(-product.k // geometry.n_tiles)
    rows = chunk if adjoint else next_power_of_two(-(-tile_rows // product.nnz))  # columns of a chunk; of a sub-block
    rows_outer = 1 if contiguous else max(1, rows // 32)
    rows_inner = rows // rows_outer
    warp_chunks = max(1, 128 // rows_inner)  # so many chunks occupy the 128 threads of a program exactly
    max_held = 16384 >> (product.dtype == "float64")  # values that a program holds in registers
    block_vectors = next_power_of_two(product.n)
    if contiguous:
        block_vectors = min(block_vectors, 8 if product.n <= 8 else 32)
    else:
        block_vectors = min(block_vectors, 4 if sub_blocks == 1 else 8)
    while block_vectors > 1 and block_vectors * sub_blocks * warp_chunks * rows > max_held:
        block_vectors //= 2
    load_chunks = (
        not adjoint
        and 1 < sub_blocks <= 16
        and rows_outer == 1
        and rows_inner <= 32
        and (not contiguous or product.n <= 16)
        and block_vectors * sub_blocks * warp_chunks * rows_inner <= max_held
    )
    if load_chunks or adjoint:
        chunks_inner = warp_chunks
    elif contiguous:
        chunks_inner = max(1, 128 // (sub_blocks * rows))
    else:
        chunks_inner = max(1, min(warp_chunks, 512 // (sub_blocks * rows)))
    held = block_vectors * sub_blocks * chunks_inner * rows
    if load_chunks or adjoint:
        chunks_outer = max(1, min(8, max_held // held))
    else:
        chunks_outer = max(1, min(4 if sub_blocks == 1 else 8, max_held // (2 if contiguous else 4) // held))
    return ThreadLayout(sub_blocks, rows_outer, rows_inner, chunks_outer, chunks_inner), block_vectors, load_chunks


def _split_batches(product: Product, width: int, block_vectors: int) -> tuple[int, int]:
    """(splits, batches per split) for `few_vectors`; a batch has `width` columns."""
    log_width = product.geometry.log_group + product.geometry.log_chunk
    start = product.offset >> log_width << log_width
    batches = -(-(product.offset + product.d - start) // width)
    programs = product.geometry.n_tiles * -(-product.n // block_vectors)
    bytes_per_split = max(4, product.item_bytes) * product.n * product.k
    wanted = max(256, 2048 // block_vectors) // programs
    splits = max(1, min(batches, wanted, SCRATCH_BYTES // bytes_per_split))
    per_split = -(-batches // splits)
    return -(-batches // per_split), per_split


def split_groups(
    product: Product, block_vectors: int, groups: int, programs_per_multiprocessor: int, unit: int
) -> tuple[int, int]:
    """(splits, groups per split) with which every multiprocessor has the given number of programs, if possible.

    The number of groups per split is a multiple of `unit`. An adjoint does not sum over columns: its splits are parts
    of the result.
    """
    is_short = product.d <= MAX_UNSPLIT_COLUMNS * product.geometry.n_tiles
    if product.n * product.d < MIN_SPLIT_ELEMENTS and is_short and not product.adjoint:
        return 1, -(-groups // unit) * unit
    programs = product.stacks * product.geometry.n_tiles * -(-product.n // block_vectors)
    wanted = programs_per_multiprocessor * product.device.multiprocessors // programs
    splits = min(wanted, -(-groups // (4 * unit)))
    if not product.adjoint:
        splits = min(splits, SCRATCH_BYTES // (4 * product.n * product.k * product.stacks))
    per_split = -(-groups // max(1, splits))
    per_split = -(-per_split // unit) * unit
    return -(-groups // per_split), per_split
