"""Codes and columns of the next steps of `project_codes_hopper`, which its producer copies ahead to shared memory.

The steps of all products of a program are one sequence, so that the first step of a product is copied while the last
ones of the product before it are processed. With registers in place of shared memory, the producer waited for codes and
columns most of the time: their loads queue behind those of data, and copying a register waits for its load (H200).
"""

# (No `from __future__ import annotations`: Gluon would not see the annotations of kernel arguments.)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ..config import hopper
from ..portable import chunk_codes
from .common import TILE

STEP = gl.constexpr(hopper.STEP_COLUMNS)
STEPS_AHEAD = gl.constexpr(4)
NO_ENTRY = gl.constexpr(chunk_codes.NO_ENTRY.value)


@gluon.constexpr_function
def codes_layout(rows, log_block, warps):
    """The layout of entries [rows, blocks of a step, words of a block]: each thread has a part of a row."""
    across, blocks = rows // 32, 64 >> log_block
    parts = warps // across  # of a row
    at_once, split = max(1, blocks // parts), min(blocks, parts)
    return gl.BlockedLayout(
        [1, at_once, (1 << log_block) // 2 * split // parts], [32, 1, 1], [across, split, parts // split], [2, 1, 0]
    )


@gluon.jit
def count_blocks(counts, product, products, lists):
    """The number of blocks of a product. A product without any has a step, too, so that its sums are stored."""
    return gl.load(counts + product % lists, mask=product < products, other=0)


@gluon.jit
def copy_step(held, ahead, slot, codes, columns, position, lists, capacity, CHOSEN: gl.constexpr):
    """Start to copy the codes and columns of a step to a slot of `held`.

    held : codes and columns, for each slot.  ahead : barriers.  position : from `next_position`.
    """
    WARPS: gl.constexpr = CHOSEN.producer_warps
    BLOCKS: gl.constexpr = STEP >> CHOSEN.log_block
    words: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    product, done, count, _ = position
    begin = (product % lists).to(gl.int64) * capacity + done
    block = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, words))[:, None]
    word = gl.arange(0, TILE // 4, layout=gl.SliceLayout(0, words))[None, :]
    pointers = (codes + begin * TILE).to(gl.pointer_type(gl.uint32), bitcast=True) + (block * (TILE // 4) + word)
    exists = (done + block < count) & (word < TILE // 4)
    async_copy.async_copy_global_to_shared(held[0].index(slot), pointers, mask=exists)
    if not CHOSEN.one_tile:
        place: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        i = gl.arange(0, STEP, layout=place) >> CHOSEN.log_block
        async_copy.async_copy_global_to_shared(held[1].index(slot), columns + begin + i, mask=done + i < count)
    async_copy.mbarrier_arrive(ahead.index(slot), increment_count=False)


@gluon.jit
def next_position(position, counts, products, lists, CHOSEN: gl.constexpr):
    """The step after `position`: (product, its first block, blocks of the product, blocks of the product after it)."""
    product, done, count, following = position
    done += STEP >> CHOSEN.log_block
    last = done >= count
    product = gl.where(last, product + gl.num_programs(0), product)
    done, count = gl.where(last, 0, done), gl.where(last, following, count)
    return product, done, count, count_blocks(counts, product + gl.num_programs(0), products, lists)


@gluon.jit
def held_codes(held, slot, done, count, CHOSEN: gl.constexpr):
    """The codes [rows, blocks of a step] of a slot."""
    BLOCKS: gl.constexpr = STEP >> CHOSEN.log_block
    words: gl.constexpr = codes_layout(CHOSEN.rows, CHOSEN.log_block, CHOSEN.producer_warps)
    of_bytes: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    codes = held.index(slot)._reinterpret(gl.uint8, [BLOCKS, TILE], of_bytes).slice(0, CHOSEN.rows, dim=1)
    code = codes.permute((1, 0)).load(gl.SliceLayout(2, words)).to(gl.uint32)
    block = done + gl.arange(0, BLOCKS, layout=gl.SliceLayout(0, gl.SliceLayout(2, words)))[None, :]
    return gl.where(block < count, code, NO_ENTRY)


@gluon.jit
def expand(code, CHOSEN: gl.constexpr, DTYPE: gl.constexpr):
    """The 16-bit entries of codes [rows, blocks of a step], two per 32-bit word: [rows, STEP // 2]."""
    ACROSS: gl.constexpr = CHOSEN.rows // 32
    PARTS: gl.constexpr = CHOSEN.producer_warps // ACROSS
    flat: gl.constexpr = gl.BlockedLayout([1, STEP // 2 // PARTS], [32, 1], [ACROSS, PARTS], [1, 0])
    words: gl.constexpr = codes_layout(CHOSEN.rows, CHOSEN.log_block, CHOSEN.producer_warps)
    ONE: gl.constexpr = 0x3F80 if gl.bfloat16 == DTYPE else 0x3C00
    word = gl.arange(0, (1 << CHOSEN.log_block) // 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, words))).to(gl.uint32)
    i = code & 127
    pair = ((code >> 7) << 15 | ONE) << ((i & 1) << 4)
    entries = gl.where((i >> 1)[:, :, None] == word[None, None, :], pair[:, :, None], 0)
    return gl.convert_layout(gl.reshape(entries, [CHOSEN.rows, STEP // 2]), flat)
