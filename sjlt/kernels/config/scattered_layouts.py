"""Layouts of the sums of `project_scattered` in shared memory: pure functions of a `Product`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from .product import Product, next_power_of_two

LANES, ENTRY_BYTES = 32, 16
WARPS, TEAMS, COLUMN_LANES = (4, 8, 16), (1, 2, 4, 8, 16), (1, 2, 4)
SLOT_ROWS, MIN_SLOT_UNIT_BYTES = 4, 8  # rows per slot, and the shortest access to sums, with sums by slot
BANKS = 32  # of shared memory, of 4 bytes
LINE_BYTES = 4 * BANKS
MAX_UNIT_BYTES = 16  # the widest access to sums
SHARED_ALIGN = 2 << 10  # so that few kernels are compiled
MAX_TABLE_BYTES = 16 << 10
TRITON_BYTES = 1 << 10  # shared memory that Triton and the device reserve
MAX_PROGRAM_VECTORS = 16
MAX_VECTOR_BYTES = 64  # of the sums of all vectors of a program in one row
WORD_BYTES, ACCESS_BYTES = 8, 16  # the widest access to contiguous vectors, in fp64 and otherwise


class Spread(NamedTuple):
    """A choice of the columns of a chunk that lanes take, which lets them use different banks.

    Attributes
    ----------
    lanes : int
        Number of lanes, a power of two, that might use the same banks otherwise.
    stride : int
        Columns from one of them to the next, a power of two. Columns are in order if both are 1.
    """

    lanes: int
    stride: int


IN_ORDER = Spread(1, 1)


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
        Copies of the sums of a team, or of all teams if they are shared, a multiple of the groups of chunks that a
        block of columns belongs to; more of them avoid bank conflicts.
    by_slot : bool
        Whether there is a sum for each slot of a sub-block and each of up to four rows that a chunk may map it to,
        instead of one for each row. Different slots, unlike different rows, can always be in different banks.
    """

    vectors: int
    unit: int
    column_lanes: int
    warps: int
    team: int
    shared: bool
    replicas: int
    by_slot: bool

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
    def copies(self) -> int:
        """The number of copies of the sums of a program."""
        return self.replicas * (1 if self.shared else self.sets)

    def width(self, product: Product) -> int:
        """The number of contiguous vectors that one access reads; 0 if rows are contiguous."""
        return min(contiguous_vectors(product), self.lane_vectors)

    def groups(self, product: Product) -> int:
        """The number of groups of chunks that a block of columns belongs to."""
        return max(1, self.columns // group_columns(product))

    def rows(self, product: Product) -> int:
        """The number of sums of a vector in one copy, rounded up."""
        return round_up_rows((SLOT_ROWS * _slots(product) if self.by_slot else product.k) * product.stacks)

    def shared_bytes(self, product: Product, chunks: int) -> int:
        """The shared memory of a program: the sums, the table of a batch of chunks, and what aligning them may take."""
        sums = self.copies * self.vectors * self.rows(product) * sum_bytes(product)
        return -(-(sums + table_bytes(product, chunks)) // SHARED_ALIGN) * SHARED_ALIGN + ENTRY_BYTES

    def fits(self, product: Product, chunks: int) -> bool:
        """Whether a program fits in shared memory, with batches of so many chunks."""
        return self.shared_bytes(product, chunks) + TRITON_BYTES <= product.device.shared_memory


def layouts(product: Product, by_slot: bool = False) -> Iterator[Layout]:
    """Layouts that fit in shared memory, with replicas up to the least number that avoids bank conflicts.

    Sums by slot are more numerous, so only layouts with wide accesses that avoid conflicts by a spread are listed.
    """
    nnz, group = product.nnz * product.stacks, group_columns(product)
    vectors = min(MAX_PROGRAM_VECTORS, MAX_VECTOR_BYTES // sum_bytes(product), next_power_of_two(product.n))
    blocks = []  # (vectors, unit, column_lanes)
    while vectors:
        for unit in {1, min(vectors, MAX_UNIT_BYTES // sum_bytes(product))}:
            most = vectors // unit if contiguous_vectors(product) > 1 else 1
            if not by_slot or unit * sum_bytes(product) >= MIN_SLOT_UNIT_BYTES:
                blocks += [(vectors, unit, lanes) for lanes in COLUMN_LANES if lanes <= most]
        vectors //= 2
    for warps in WARPS:
        chunks = max_chunks(product, warps)
        teams = [team for team in TEAMS if team <= warps and nnz % team == 0]
        for team, block, shared in itertools.product(teams, blocks, (False, True)):
            layout = Layout(*block, warps, team, shared, 1, by_slot)
            if shared and not 1 < layout.sets <= group // layout.columns:
                continue
            layout = layout._replace(replicas=layout.groups(product))
            while layout.fits(product, chunks):
                conflicts, _, spread = bank_conflicts(product, layout)
                if spread != IN_ORDER or not by_slot:
                    yield layout
                if conflicts == 1:
                    break
                layout = layout._replace(replicas=2 * layout.replicas)


def bank_conflicts(product: Product, layout: Layout) -> tuple[float, int, Spread]:
    """(Cycles per access of as many lanes as the banks can serve in one, and the rotations and spread of a kernel).

    The cycles are averages over all columns of sketches of various shapes.
    """
    line = LINE_BYTES // (layout.unit * sum_bytes(product))  # lanes that use all banks
    columns = max(1, line // layout.column_lanes)  # of these lanes
    rotations = max(1, min(layout.lane_vectors // layout.unit, columns // layout.replicas))
    different = layout.replicas * rotations  # columns that use different banks
    if different >= columns:
        return 1.0, rotations, IN_ORDER
    if layout.by_slot or _slots_are_rows(product):
        for tried in (1, rotations) if layout.column_lanes == 1 else (rotations,):
            spread = _spread(product, layout, columns // (layout.replicas * tried), tried)
            if spread is not None:
                return 1.0, tried, spread
    if layout.column_lanes > 1:
        return (2 - 0.5**different if columns == 2 * different else 2.2), rotations, IN_ORDER
    if line < BANKS:
        return (2.3 if rotations == 1 and product.geometry.log_chunk >= 4 else 1.95), rotations, IN_ORDER
    return (2.0 if product.geometry.log_chunk >= 4 else 2.5), 1, IN_ORDER


def may_be_by_slot(product: Product) -> bool:
    """Whether sums by slot differ from sums by row, and may be faster.

    They are not faster with nnz 1, and not for contiguous vectors, of which lanes then read parts of more lines. In
    microseconds on an H200, by row and by slot: X (2, 22134021) -> 1088 with nnz 1 in fp16 61 and 70, A (6286498, 12)
    -> 576 with nnz 1 98 and 146.
    """
    return are_rows(product) and product.nnz * product.stacks > 1 and not _slots_are_rows(product)


def _slots(product: Product) -> int:
    """The number of slots of all sub-blocks of a stack, 2^p each."""
    return product.geometry.n_tiles * product.nnz << product.geometry.log_chunk


def _slots_are_rows(product: Product) -> bool:
    """Whether all sub-blocks have 2^p rows, so that the slots of a chunk are their rows."""
    return product.k == _slots(product)


def _spread(product: Product, layout: Layout, lanes: int, rotations: int) -> Spread | None:
    """The spread of 2^a lanes that are served at a time and do not differ in replica or rotation, if there is one.

    Column i of a chunk meets slot a2 (z ^ (z >> h)) + b2 mod 2^p of a sub-block, where z = a1 i + b1 mod 2^p, h =
    ceil(p / 2), and a1 and a2 are odd. Lanes use different banks if their slots differ mod 2^a, that is, if the a
    lowest bits of z ^ (z >> h) do. They do if a = p. They do for columns 2^h apart if a <= p - h: then bits h to
    h + a - 1 of z differ, and the lower bits are equal. They do for columns 2^(h - 1) apart if a = h and p is odd: then
    the upper h bits of z differ, which become bits 0 to h - 2 of z >> h and bit h - 1 of z.
    """
    a, p, kept = lanes.bit_length() - 1, product.geometry.log_chunk, layout.replicas * rotations
    h, groups = (p + 1) // 2, layout.groups(product)
    if a == p:
        s = 0
    elif a + h <= p:
        s = h
    elif p % 2 and a == h:
        s = h - 1
    else:
        return None
    if not are_rows(product) and kept // groups != 1 << s:
        return None  # columns out of order, of which an access would read parts of more lines
    run = lanes * max(kept // groups, 1 << s)  # columns that are permuted, all of a block or of a step
    fits = run <= layout.columns // groups or (groups == 1 and run <= layout.columns * layout.sets)
    return Spread(lanes, 1 << s) if fits else None


def loaded_lines(product: Product, layout: Layout) -> float:
    """Cycles of the load path for 32 columns of a vector: one per line of 128 bytes, or per access to a row."""
    width = layout.width(product)
    if width == 0:
        return 1.0
    stride = min(product.x_strides[1] * product.item_bytes, LINE_BYTES)
    return max(1.0, layout.columns * stride / LINE_BYTES) / width


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
    return (chunks << log_parts(product)) * product.nnz * product.stacks * ENTRY_BYTES


def log_parts(product: Product) -> int:
    """A chunk has 2^log_parts table entries per sub-block, one for every 32 columns."""
    return max(0, product.geometry.log_chunk - 5)


def sum_bytes(product: Product) -> int:
    """Bytes per sum."""
    return max(4, product.item_bytes)


def round_up_rows(rows: int) -> int:
    """`rows` rounded up to a multiple of 32 with four significant bits, so that few kernels are compiled."""
    return round_up(rows, 4, LANES)


def round_up(number: int, bits: int, least: int = 1) -> int:
    """`number` rounded up to a multiple of `least`, a power of two, with so many significant bits."""
    step = max(least, 1 << max(0, number.bit_length() - bits))
    return -(-number // step) * step
