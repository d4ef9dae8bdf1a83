"""Layouts of the sums of `project_scattered` in shared memory: pure functions of a `Product`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product as pairs_of
from typing import NamedTuple

from .product import Product, next_power_of_two

LANES, ENTRY_BYTES = 32, 16
WARPS = 4, 8, 16  # of a program
MAX_TEAM, MAX_COLUMN_LANES = 16, 4
BANKS = 32  # of shared memory, of 4 bytes
LINE_BYTES = 4 * BANKS
UNIT_BYTES = 16  # the widest access to sums
MAX_TABLE_BYTES = 16 << 10
TRITON_BYTES = 1 << 10  # shared memory that Triton and the device reserve
MAX_PROGRAM_VECTORS = 16
MAX_VECTOR_BYTES = 64  # of the sums of all vectors of a program in one row
WORD_BYTES, ACCESS_BYTES = 8, 16  # the widest access to contiguous vectors, in fp64 and otherwise


class Layout(NamedTuple):
    """A layout of the sums of a program, and how its warps and lanes share them.

    Attributes
    ----------
    vectors : int
        Vectors per program.
    unit : int
        Vectors whose sums a lane reads or writes at once.
    column_lanes : int
        Lanes that divide the vectors of a column among them; more than one only if vectors are contiguous.
    warps : int
        Warps per program.
    team : int
        Warps that share sums and divide the sub-blocks among them.
    shared : bool
        Whether all warps share sums, and work on one group of chunks between two barriers.
    replicas : int
        Copies of the sums of a team, a multiple of the groups of chunks that a block of columns belongs to; more of
        them avoid bank conflicts.
    """

    vectors: int
    unit: int
    column_lanes: int
    warps: int
    team: int
    shared: bool
    replicas: int

    @property
    def columns(self) -> int:
        """The number of columns of a block, which a warp loads at a time."""
        return LANES // self.column_lanes

    @property
    def lane_vectors(self) -> int:
        """The number of vectors of a lane."""
        return self.vectors // self.column_lanes

    @property
    def sets(self) -> int:
        """The number of teams, which process different columns."""
        return self.warps // self.team

    @property
    def parts(self) -> int:
        """The number of copies of the sums of a program."""
        return self.replicas * (1 if self.shared else self.sets)

    def bytes(self, product: Product) -> int:
        """The size of all sums."""
        return self.parts * self.vectors * round_up_rows(product.k * product.stacks) * sum_bytes(product)


def layouts(product: Product) -> Iterator[Layout]:
    """All layouts that fit in shared memory."""
    nnz, group = product.nnz * product.stacks, group_columns(product)
    vectors = min(MAX_PROGRAM_VECTORS, MAX_VECTOR_BYTES // sum_bytes(product), next_power_of_two(product.n))
    blocks = []  # (vectors, unit, column_lanes)
    while vectors:
        for unit in {1, min(vectors, UNIT_BYTES // sum_bytes(product))}:
            most = min(MAX_COLUMN_LANES, vectors // unit) if contiguous_vectors(product) > 1 else 1
            blocks += [(vectors, unit, lanes) for lanes in (1, 2, 4) if lanes <= most]
        vectors //= 2
    teams = [(warps, team) for warps in WARPS for team in (1, 2, 4, 8, 16) if team <= warps and nnz % team == 0]
    for (warps, team), block, shared in pairs_of(teams, blocks, (False, True)):
        layout = Layout(*block, warps, team, shared, 1)
        if shared and not 1 < layout.sets <= group // layout.columns:
            continue
        available = product.device.shared_memory - TRITON_BYTES - table_bytes(product, max_chunks(product, warps))
        layout = layout._replace(replicas=max(1, layout.columns // group))
        while layout.bytes(product) <= available:
            yield layout
            if bank_conflicts(product, layout)[0] == 1:
                break
            layout = layout._replace(replicas=2 * layout.replicas)


def bank_conflicts(product: Product, layout: Layout) -> tuple[float, int]:
    """(Cycles per access of as many lanes as the banks can serve in one, `ScatterConstants.rotations`).

    These are averages over all columns of sketches of various shapes.
    """
    p, line = product.geometry.log_chunk, LINE_BYTES // (layout.unit * sum_bytes(product))  # lanes that use all banks
    columns = max(1, line // layout.column_lanes)  # of these lanes
    rotations = max(1, min(layout.lane_vectors // layout.unit, columns // layout.replicas))
    different = layout.replicas * rotations  # columns that use different banks
    if different >= columns:
        return 1.0, rotations
    if layout.column_lanes > 1:
        return (2 - 0.5**different if columns == 2 * different else 2.2), rotations
    if line < BANKS:
        return (2.3 if rotations == 1 and p >= 4 else 1.95), rotations
    # The columns of a chunk meet different rows, in different banks if a sub-block has at most 32 rows.
    all_rows = p == 5 and product.k == product.geometry.n_tiles * 32 * product.nnz
    return 1.0 if all_rows else (2.0 if p >= 4 else 2.5), 1


def loaded_lines(product: Product, layout: Layout) -> float:
    """Lines of 128 bytes that a warp reads to load 32 columns of a vector."""
    width = contiguous_vectors(product)
    if width == 0:
        return 1.0
    stride = min(product.x_strides[1] * product.item_bytes, LINE_BYTES)
    return max(1.0, layout.columns * stride / LINE_BYTES) / min(width, layout.lane_vectors)


def contiguous_vectors(product: Product) -> int:
    """The number of contiguous vectors that one access can read; 0 if rows are contiguous."""
    if are_rows(product):
        return 0
    most = (WORD_BYTES if product.item_bytes == 8 else ACCESS_BYTES) // product.item_bytes
    return math.gcd(most, product.n, product.x_strides[1]) if product.data_aligned else 1


def are_rows(product: Product) -> bool:
    """Whether the elements of a vector are contiguous in memory."""
    return product.x_strides[1] == 1 and (product.n == 1 or product.x_strides[0] > 1)


def group_columns(product: Product) -> int:
    """The number of columns of a group of chunks."""
    return 1 << product.geometry.log_chunk + product.geometry.log_group


def max_chunks(product: Product, warps: int) -> int:
    """The number of chunks of a large batch, one per thread unless the table would exceed MAX_TABLE_BYTES."""
    chunks = warps * LANES
    while chunks > 2 * LANES and table_bytes(product, chunks) > MAX_TABLE_BYTES:
        chunks //= 2
    return chunks


def table_bytes(product: Product, chunks: int) -> int:
    """The size of the table of a batch of chunks."""
    return (chunks << max(0, product.geometry.log_chunk - 5)) * product.nnz * product.stacks * ENTRY_BYTES


def sum_bytes(product: Product) -> int:
    """Bytes per sum."""
    return max(4, product.item_bytes)


def round_up_rows(rows: int) -> int:
    """`rows` rounded up to 32 or more with four significant bits, so that few kernels are compiled."""
    step = max(LANES, next_power_of_two(rows) // 16)
    return -(-rows // step) * step
