"""The entries of a step of `project_codes_hopper`, from codes."""

# (No `from __future__ import annotations`: Gluon would not see the annotations of kernel arguments.)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..config import arithmetic, hopper, hopper_loaders

STEP = gl.constexpr(hopper.STEP_COLUMNS)
WARPS = gl.constexpr(hopper_loaders.PRODUCER_WARPS)


@gluon.constexpr_function
def codes_layout(rows, log_block):
    """The layout of entries [rows, blocks of a step, words of a block]: each thread has a part of a row."""
    across, blocks = rows // 32, 64 >> log_block
    parts = WARPS.value // across  # of a row
    at_once, split = max(1, blocks // parts), min(blocks, parts)
    return gl.BlockedLayout(
        [1, at_once, (1 << log_block) // 2 * split // parts], [32, 1, 1], [across, split, parts // split], [2, 1, 0]
    )


@gluon.jit
def expand(code, CHOSEN: gl.constexpr, DTYPE: gl.constexpr):
    """The 16-bit entries of codes [rows, blocks of a step], two per 32-bit word: [rows, STEP // 2]."""
    ACROSS: gl.constexpr = CHOSEN.rows // 32
    PARTS: gl.constexpr = WARPS // ACROSS
    flat: gl.constexpr = gl.BlockedLayout([1, STEP // 2 // PARTS], [32, 1], [ACROSS, PARTS], [1, 0])
    words: gl.constexpr = codes_layout(CHOSEN.rows, CHOSEN.log_block)
    ONE: gl.constexpr = arithmetic.ONE_BF16 if gl.bfloat16 == DTYPE else arithmetic.ONE_FP16
    word = gl.arange(0, (1 << CHOSEN.log_block) // 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, words))).to(gl.uint32)
    code = code.to(gl.uint32)
    i = code & 127
    pair = ((code >> 7) << 15 | ONE) << ((i & 1) << 4)
    entries = gl.where((i >> 1)[:, :, None] == word[None, None, :], pair[:, :, None], 0)
    return gl.convert_layout(gl.reshape(entries, [CHOSEN.rows, STEP // 2]), flat)
