"""Which kernel runs, in what shape: pure functions of a product's shapes and the device, decided without a device.

What was tuned was tuned on an H200, in fp32; benchmarks/results/h200.json has the cases. (Those that suit the kernels
for Hopper, see `hopper_launch`, are timed there with these, no longer with `tiles` and `rows`.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ...laws import exact as law

BATCH = 32  # groups of chunks that a program of the tile kernels takes at a time
NATIVE, BF16, BF16_PAIR, BF16_TRIPLE, FP16_PAIR = range(5)  # how tiles multiply: BF16 and the next are 1, 2, 3 parts
SAMPLE = 8  # features of a data vector that give its scale, from its middle: padding lies at the ends
LINE = 32  # that are looked at next, where fewer than two of those are not 0
PAIR_ELEMENTS = 1 << 22  # of data below which a launch for the scales costs more than it gains
PAIR_FEATURES = 1 << 23  # beyond which, next to an outlier in the sample, the others' rounding adds up to 1e-6
SMALL = 1 << 20  # elements of data for which a second launch, to sum splits, takes longer than they gain
SCRATCH_BYTES = 64 << 20  # that partial results may take
VECTOR_BYTES = 16  # of the widest access to memory
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
FEW = 16  # vectors for which a block of 64 for the tensor cores would be mostly empty
MOST_KEYS = 64  # of sub-blocks and chunks that a thread of a tile kernel looks through in a step
# Sums of tensor cores lose up to 4e-8 of themselves with each chunk (H200). Those of more chunks are made in parts:
MOST_CHUNKS = 1024  # of 16-bit numbers
PART = 16  # of data in fp32; and the chunks of a part
MOST_READS = 4  # of an element of A from the L1 cache, beyond which tensor cores are faster (but see `most_reads`)


class Product(NamedTuple):
    """X S' or Y S, as it comes.

    n : vectors.  d : features.  k, nnz : of the sketch.  offset : its first column.  strides : of the wide side, x or
    the adjoint's out, along vectors and features, in elements.  narrow : of the other side.  dtype : of the data.
    precision : as torch names it.  multiprocessors, shared_memory : of the device, and bytes of a program there.
    hopper : whether the kernels for Hopper run there.
    """

    n: int
    d: int
    k: int
    nnz: int
    offset: int
    strides: tuple[int, ...]
    narrow: tuple[int, ...]
    dtype: str
    precision: str
    multiprocessors: int
    shared_memory: int
    hopper: bool = False


@dataclass(frozen=True)
class Rows:
    """A launch of `project_rows` or `adjoint_rows`. vectors : V.  The rest as in `Tiles`."""

    vectors: int
    prefetch: bool
    whole: bool
    keys: int
    signs: int
    fold: bool
    even: bool
    align: int
    splits: int
    groups_per_split: int
    registers: int


@dataclass(frozen=True)
class Gather:
    """A launch of a gather kernel: constants of the kernel (names as there), how the work is split, and options.

    t, h, lane, parts, qi, qw, vectors : T, H, L, PARTS, QI, QW, V.  wide : sums in fp64.  long : offsets in a batch
    need 64 bits.  batches x splits cover the columns.
    """

    whole: bool
    t: int
    h: int
    lane: int
    parts: int
    qi: int
    qw: int
    vectors: int
    even: bool
    align: int
    lines: bool
    vectors_last: bool
    wide: bool
    long: bool
    splits: int
    batches: int
    registers: int


@dataclass(frozen=True)
class Tiles:
    """A launch of a tile kernel: constants of the kernel (names as there), how the work is split, and options.

    vectors : V.  chunks : U.  groups_per_split x splits cover the groups.  registers : at most, a thread; 0 is free.
    """

    vectors: int
    chunks: int
    whole: bool
    keys: int
    signs: int
    mode: int
    fold: bool
    even: bool
    align: int
    splits: int
    groups_per_split: int
    num_stages: int
    registers: int


def is_whole(k: int, nnz: int) -> bool:
    """k = 128 2^a and nnz = 2^b: every slot of a chunk is a row, every group has a chunk for every tile."""
    tiles = k // law.TILE_ROWS
    return k % law.TILE_ROWS == 0 and tiles & (tiles - 1) == 0 and nnz & (nnz - 1) == 0


def mode_of(product: Product, adjoint: bool) -> int:
    if product.dtype != "float32":
        return NATIVE
    if product.precision == "highest":
        scaled = adjoint or (SAMPLE <= product.d <= PAIR_FEATURES and product.n * product.d >= PAIR_ELEMENTS)
        return FP16_PAIR if scaled else BF16_TRIPLE
    return {"high": BF16_PAIR, "medium": BF16}[product.precision]


def groups_of(product: Product, geometry: law.Geometry) -> int:
    """The groups of chunks that the columns lie in."""
    log_width = geometry.log_group + geometry.log_chunk
    return ((product.offset + product.d - 1) >> log_width) - (product.offset >> log_width) + 1


def alignment(product: Product, chunk: int) -> int:
    """Neighbouring features that one access may take, by strides, widths and offsets (the base address aside)."""
    if product.strides[1] != 1:
        return 1
    widest = VECTOR_BYTES // ITEM_BYTES[product.dtype]
    stride = product.strides[0] if product.n > 1 else 0
    return math.gcd(widest, chunk, stride, product.d, product.offset)


@lru_cache(maxsize=4096)
def choose(product: Product, adjoint: bool = False) -> Tiles | Rows | Gather:
    """The launch for a product with n > 0 and d > 0."""
    if product.dtype == "float64" or product.n < FEW:
        return gather(product, adjoint)
    if vectors_last(product) and product.nnz <= most_reads(product, adjoint):
        if product.nnz == 1 and not adjoint:
            return gather(product)
        if not adjoint or is_whole(product.k, product.nnz):
            return rows(product, adjoint)
    chosen = tiles(product, adjoint)
    return chosen if chosen.keys * chosen.chunks <= MOST_KEYS else gather(product, adjoint)


def most_reads(product: Product, adjoint: bool) -> int:
    """The largest nnz for the kernels of `rows`: twice as large for sums of fp32 data in whole geometries."""
    twice = product.dtype == "float32" and not adjoint and is_whole(product.k, product.nnz)
    return 2 * MOST_READS if twice else MOST_READS


def vectors_last(product: Product) -> bool:
    """Whether neighbours in memory belong to neighbouring vectors: S A with a row-major A."""
    return product.n > 1 and 0 < product.strides[0] < product.strides[1]


def tiles(product: Product, adjoint: bool = False) -> Tiles:
    """The launch of `project_tiles`, or of `adjoint_tiles`."""
    geometry = law.geometry(product.k, product.nnz, 0)
    chunk, whole = 1 << geometry.log_chunk, is_whole(product.k, product.nnz)
    mode = mode_of(product, adjoint)
    groups = groups_of(product, geometry)
    most = {NATIVE: MOST_CHUNKS, BF16: BATCH}.get(mode, PART)  # (one part in bf16 is less exact than any sum)
    fold = not adjoint and groups > most
    # 64 features a step; of 128 vectors in fp32, 32 (64 take the registers that loads in flight need).
    wide = mode == NATIVE or adjoint or (fold and chunk >= 16)  # smaller chunks may have more than MOST_KEYS
    chunks = min(BATCH, max(1, (64 if wide else 32) // chunk))
    rows_first = mode == NATIVE and whole and not adjoint  # the kernel's sums of 64 vectors leave room for 3 programs
    small = fold or adjoint or rows_first or product.n <= 64 or chunk > (64 if mode == NATIVE else 32)
    vectors = 64 if small else 128
    splits, per_split = split(product, geometry, vectors, groups, 2, chunks, adjoint)
    # Two programs share a multiprocessor; each holds a tile of entries and a step of data for every stage but one.
    step = vectors * chunks * chunk * ITEM_BYTES[product.dtype]
    stages = 1 + (product.shared_memory // 2 - law.TILE_ROWS * chunks * chunk * 2) // step
    return Tiles(
        vectors=vectors,
        chunks=chunks,
        whole=whole,
        keys=keys_of(product, whole),
        signs=signs_of(product, whole),
        mode=mode,
        fold=fold and per_split > most,
        even=whole and is_even(product, geometry) and groups % chunks == 0,
        align=alignment(product, chunk),
        splits=splits,
        groups_per_split=per_split,
        num_stages=max(1, min(stages, 6 if mode == NATIVE else 3 if chunk >= 64 else 4)),
        registers=168 if chunk == 64 and mode != NATIVE else 0,
    )


def rows(product: Product, adjoint: bool = False) -> Rows:
    """The launch of `project_rows`, or of `adjoint_rows`."""
    geometry = law.geometry(product.k, product.nnz, 0)
    whole = is_whole(product.k, product.nnz)
    groups = groups_of(product, geometry)
    vectors = 64
    widest = VECTOR_BYTES // ITEM_BYTES[product.dtype]
    splits, per_split = split(product, geometry, vectors, groups, 4, 1, adjoint)
    return Rows(
        vectors=vectors,
        prefetch=product.strides[0] == 1 and product.n % vectors == 0,
        whole=whole,
        keys=keys_of(product, whole),
        signs=signs_of(product, whole),
        fold=not adjoint and per_split > 1024,
        even=product.n % vectors == 0 and (adjoint or (whole and is_even(product, geometry))),
        align=math.gcd(widest, product.strides[1], product.narrow[1] if adjoint else 0),
        splits=splits,
        groups_per_split=per_split,
        registers=128,
    )


def gather(product: Product, adjoint: bool = False) -> Gather:
    """The launch of `project_gather`, or of `adjoint_gather`."""
    geometry = law.geometry(product.k, product.nnz, 0)
    last, wide = vectors_last(product), product.dtype == "float64"
    chunk, sub_blocks = 1 << geometry.log_chunk, above(product.nnz)
    tile_rows = -(-product.k // geometry.n_tiles)
    inner = chunk if adjoint else above(-(-tile_rows // product.nnz))
    h = 1 if last else max(1, inner // 32)
    lane = inner // h
    lines_qw = max(1, 128 // lane)  # with which a program's threads hold whole chunks, no more
    most = 16384 >> wide  # numbers that a program holds in registers
    vectors = min(above(product.n), (8 if product.n <= 8 else 32) if last else 4 if sub_blocks == 1 else 8)
    while vectors > 1 and vectors * sub_blocks * lines_qw * inner > most:
        vectors //= 2
    lines = (
        not adjoint
        and 1 < sub_blocks <= 16
        and h == 1
        and lane <= 32
        and (not last or product.n <= 16)
        and vectors * sub_blocks * lines_qw * lane <= most
    )
    if lines or adjoint:
        qw = lines_qw
    elif last:
        qw = max(1, 128 // (sub_blocks * inner))
    else:
        qw = max(1, min(lines_qw, 512 // (sub_blocks * inner)))
    held = vectors * sub_blocks * qw * inner
    if lines or adjoint:
        qi = max(1, min(8, most // held))
    else:
        qi = max(1, min(4 if sub_blocks == 1 else 8, most // (2 if last else 4) // held))
    parts = min(8 if sub_blocks == 1 else 4, max(2, 8 // vectors))
    while parts > 1 and sub_blocks > 4 and parts * qi * qw * sub_blocks > 2048:
        parts //= 2
    width = parts * qi * qw << geometry.log_group << geometry.log_chunk
    log_width = geometry.log_group + geometry.log_chunk
    start = product.offset >> log_width << log_width
    batches = -(-(product.offset + product.d - start) // width)
    programs = geometry.n_tiles * -(-product.n // vectors)
    bytes_of_split = (8 if wide else 4) * product.n * product.k
    wanted = max(256, 2048 // vectors) // programs
    splits = max(1, min(batches, wanted, SCRATCH_BYTES // bytes_of_split))
    per_split = -(-batches // splits)
    splits = -(-batches // per_split)
    return Gather(
        whole=is_whole(product.k, product.nnz),
        t=sub_blocks,
        h=h,
        lane=lane,
        parts=parts,
        qi=qi,
        qw=qw,
        vectors=vectors,
        even=product.n % vectors == 0,
        align=math.gcd(product.strides[1], product.narrow[1] if adjoint else 0, 16),
        lines=lines,
        vectors_last=last,
        wide=wide,
        long=(product.k * product.narrow[1] if adjoint else width * product.strides[1]) >= 1 << 32,
        splits=splits,
        batches=per_split,
        registers=128 if sub_blocks <= 2 and vectors > 1 and not last and not adjoint else 0,
    )


def split(
    product: Product, geometry: law.Geometry, vectors: int, groups: int, programs_each: int, unit: int, adjoint: bool
) -> tuple[int, int]:
    """(splits, groups in each, of whole units): so that every multiprocessor has `programs_each` programs."""
    if product.n * product.d < SMALL:
        return 1, -(-groups // unit) * unit
    programs = geometry.n_tiles * -(-product.n // vectors)
    splits = min(programs_each * product.multiprocessors // programs, -(-groups // (4 * unit)))
    if not adjoint:
        splits = min(splits, SCRATCH_BYTES // (4 * product.n * product.k))
    per_split = -(-groups // max(1, splits))
    per_split = -(-per_split // unit) * unit
    return -(-groups // per_split), per_split


def is_even(product: Product, geometry: law.Geometry) -> bool:
    """Whether the columns are whole groups of chunks."""
    width = 1 << geometry.log_group << geometry.log_chunk
    return product.offset % width == 0 and product.d % width == 0


def keys_of(product: Product, whole: bool) -> int:
    """Sub-blocks that 32 rows of a tile may lie in, as a power of two."""
    return max(1, product.nnz // 4) if whole else above(product.nnz)


def signs_of(product: Product, whole: bool) -> int:
    """Sign words of a chunk that 32 rows of a tile may need."""
    return max(1, 4 // product.nnz) if whole else 4


def above(n: int) -> int:
    """The smallest power of two that is n or more."""
    return 1 << (n - 1).bit_length()
