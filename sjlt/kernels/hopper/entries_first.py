"""Sums of `project_codes_hopper` with the entries as the first operand of the tensor cores, in 16 bits.

The first operand may come from registers. Slots then have codes, which consumers expand where they need them, and no
entries pass through shared memory. Each consumer has half of the rows of a tile, and all vectors.
"""

# (No `from __future__ import annotations`: Gluon would not see the annotations of kernel arguments.)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..config import arithmetic, hopper_loaders
from .common import STEP_COLUMNS as STEP
from .common import TILE, barrier, next_slot

WARPS = gl.constexpr(hopper_loaders.PRODUCER_WARPS)
CODE_VECTOR = gl.constexpr(16)  # codes that a thread copies at a time


@gluon.jit
def copy_codes(tiles, full, slot, codes, done, count, CHOSEN: gl.constexpr):
    """Start to copy the codes of a step's blocks to a slot; `full` receives an arrival from each thread.

    codes : of the list's first block.  done : blocks of earlier steps. Past the last block, whose data is followed by
    zeros, codes are zeros.
    """
    CODES: gl.constexpr = TILE * (STEP >> CHOSEN.log_block)
    layout: gl.constexpr = gl.BlockedLayout([CODE_VECTOR], [32], [WARPS], [0])
    i = done * TILE + gl.arange(0, CODES, layout=layout)
    mask = gl.max_constancy(i < count * TILE, [CODE_VECTOR])
    pointers = gl.max_contiguous(gl.multiple_of(codes + i, [CODE_VECTOR]), [CODE_VECTOR])
    async_copy.async_copy_global_to_shared(tiles.index(slot), pointers, mask=mask)
    async_copy.mbarrier_arrive(full.index(slot), increment_count=False)


@gluon.jit
def pair_of_code(code, DTYPE: gl.constexpr):
    """The 16-bit entries of the pair of columns that contains a code's, one in each half of a word, for int32 codes."""
    ONE: gl.constexpr = arithmetic.ONE_BF16 if gl.bfloat16 == DTYPE else arithmetic.ONE_FP16
    return ((code >> 7) << 15 | ONE) << ((code & 1) << 4)


@gluon.jit
def place_pairs(place, word, pair, DTYPE: gl.constexpr):
    """The entries `pair` where `word`, the index of a register's pair of columns, is `place`; elsewhere zeros."""
    bits = gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.eq.s32 p, $1, $3; selp.b32 $0, $5, 0, p; }", "=r,r,r,r,r,r,r",
        [place, word + place * 0, pair], gl.int16, True, 2,
    )  # fmt: skip
    return bits.to(DTYPE, bitcast=True)


@gluon.jit
def _entries(codes, first_row: gl.constexpr, layout: gl.constexpr, DTYPE: gl.constexpr, CHOSEN: gl.constexpr):
    """The entries [part_rows, STEP] of a consumer, two per register, from the codes of a slot.

    In all lanes, the columns of a register lie among 8 that belong to one block, so the compiler makes the choice among
    blocks.
    """
    ROWS: gl.constexpr = CHOSEN.part_rows
    word = gl.arange(0, STEP, layout=gl.SliceLayout(0, layout))[None, :] >> 1
    place = gl.full([ROWS, STEP], 0, gl.int32, layout=layout)
    pair = place
    for b in gl.static_range(STEP >> CHOSEN.log_block):
        code = codes.slice(b * TILE + first_row, ROWS, 0).load(gl.SliceLayout(1, layout)).to(gl.int32)
        in_block = word >> (CHOSEN.log_block - 1) == b
        place = gl.where(in_block, (((code & 127) >> 1) + (b << CHOSEN.log_block) // 2)[:, None], place)
        pair = gl.where(in_block, pair_of_code(code, DTYPE)[:, None], pair)
    return place_pairs(place, word, pair, DTYPE)


@gluon.jit
def sum_by_rows(
    xs, tiles, full, empty, count, slot, phase, DTYPE: gl.constexpr, CHOSEN: gl.constexpr, CONSUMER: gl.constexpr
):
    """(a consumer's sums [vectors, rows] over the next `count` blocks, next slot, its phase).

    tiles : the slots' memory for codes.
    """
    ROWS: gl.constexpr = CHOSEN.part_rows
    VECTORS: gl.constexpr = CHOSEN.part_vectors
    BOXES: gl.constexpr = STEP * VECTORS // (xs.shape[1] * xs.shape[2])  # they have the layout of one swizzled tile
    x_shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VECTORS, 16])
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, sums_layout, 2)
    acc = gl.zeros((ROWS, VECTORS), gl.float32, layout=sums_layout)
    for _ in range(0, count, STEP >> CHOSEN.log_block):
        mbarrier.wait(full.index(slot), phase)
        entries = _entries(tiles.index(slot), CONSUMER * ROWS, operand_layout, DTYPE, CHOSEN)
        data = xs.index(slot * BOXES)._reinterpret(DTYPE, [STEP, VECTORS], x_shared)
        acc = warpgroup_mma(entries, data, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        barrier()
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, CHOSEN.slots)
    return gl.permute(acc, (1, 0)), slot, phase
