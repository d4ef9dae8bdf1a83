"""The entries of a step of `project_codes_hopper`, from codes.

Codes in runs are loaded and held as words of four codes, others one by one. (A step has so many codes of blocks of 2
columns that, loaded one by one, they took 40 % of the kernel's time for X (100, 6302279) -> 22 with nnz 8; H200.)
"""

# (No `from __future__ import annotations`: Gluon would not see the annotations of kernel arguments.)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..config import arithmetic, hopper_loaders
from ..portable import chunk_codes
from .common import STEP_COLUMNS as STEP

NO_ENTRY = gl.constexpr(chunk_codes.NO_ENTRY.value)
NO_ENTRIES = gl.constexpr(chunk_codes.NO_ENTRY.value * 0x01010101)
WORD = gl.constexpr(4)  # codes in a word
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


@gluon.constexpr_function
def _words_layout(CHOSEN):
    """The layout of words [rows, words of a step, WORD]: each thread has the codes of `codes_layout`."""
    at_once = codes_layout(CHOSEN.rows, CHOSEN.log_block).size_per_thread[1]
    across = CHOSEN.rows // 32
    warps = [across, WARPS.value // across, 1]
    return gl.BlockedLayout([1, at_once // WORD.value, WORD.value], [32, 1, 1], warps, [2, 1, 0])


@gluon.constexpr_function
def _loaded_layout(CHOSEN):
    """The layout of what `load_codes` loads."""
    return gl.SliceLayout(2, _words_layout(CHOSEN) if CHOSEN.log_run else codes_layout(CHOSEN.rows, CHOSEN.log_block))


@gluon.constexpr_function
def held_codes(CHOSEN):
    """The registers of a thread that hold the codes of a step."""
    codes = (STEP.value >> CHOSEN.log_block) * CHOSEN.rows // (32 * WARPS.value)
    return codes // WORD.value if CHOSEN.log_run else codes


@gluon.jit
def _indices(CHOSEN: gl.constexpr):
    """(rows, blocks or words) of what `load_codes` loads: the codes or words of a step."""
    layout: gl.constexpr = _loaded_layout(CHOSEN)
    COUNT: gl.constexpr = (STEP >> CHOSEN.log_block) // (WORD if CHOSEN.log_run else 1)
    u = gl.arange(0, COUNT, layout=gl.SliceLayout(0, layout))[None, :]
    r = gl.arange(0, CHOSEN.rows, layout=gl.SliceLayout(1, layout))[:, None]
    return r, u


@gluon.jit
def first_codes(codes, CHOSEN: gl.constexpr):
    """Pointers to what `load_codes` loads of the first step of a list, whose first code is at `codes`."""
    r, u = _indices(CHOSEN)
    if CHOSEN.log_run:
        WORDS: gl.constexpr = (1 << CHOSEN.log_run) // WORD  # in a run, for each row
        pointers = codes.to(gl.pointer_type(gl.uint32)) + ((u // WORDS * CHOSEN.rows + r) * WORDS + u % WORDS)
        pointers = gl.max_contiguous(gl.multiple_of(pointers, [1, WORD * WORDS]), [1, WORDS])
    else:
        pointers = codes + (u * CHOSEN.rows + r)
    return pointers


@gluon.jit
def load_codes(first, begin, count, CHOSEN: gl.constexpr):
    """The codes [rows, blocks] of the step that begins with block `begin` of a list or, in runs, words of four of them.

    Past the list's last block, codes are NO_ENTRY.  first : from `first_codes`.
    """
    r, u = _indices(CHOSEN)
    if CHOSEN.log_run:
        WORDS: gl.constexpr = (1 << CHOSEN.log_run) // WORD
        mask = gl.max_constancy(begin + u // WORDS * (WORD * WORDS) + r * 0 < count, [1, WORDS])
        loaded = gl.load(first + begin * (CHOSEN.rows // WORD), mask=mask, other=NO_ENTRIES)
    else:
        loaded = gl.load(first + begin * CHOSEN.rows, mask=begin + u + r * 0 < count, other=NO_ENTRY)
    return loaded


@gluon.jit
def codes_of(loaded, CHOSEN: gl.constexpr):
    """The codes [rows, blocks of a step] that `load_codes` has loaded, as 32-bit integers."""
    if CHOSEN.log_run:
        layout: gl.constexpr = _words_layout(CHOSEN)
        byte = gl.arange(0, WORD, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout))).to(gl.uint32)
        codes = loaded[:, :, None] >> (8 * byte)[None, None, :] & 255
        codes = gl.reshape(codes, [CHOSEN.rows, STEP >> CHOSEN.log_block])
        codes = gl.convert_layout(codes, gl.SliceLayout(2, codes_layout(CHOSEN.rows, CHOSEN.log_block)))
    else:
        codes = loaded.to(gl.uint32)
    return codes


@gluon.jit
def expand(code, CHOSEN: gl.constexpr, DTYPE: gl.constexpr):
    """The 16-bit entries of codes [rows, blocks of a step], from `codes_of`, two per word: [rows, STEP // 2]."""
    ACROSS: gl.constexpr = CHOSEN.rows // 32
    PARTS: gl.constexpr = WARPS // ACROSS
    flat: gl.constexpr = gl.BlockedLayout([1, STEP // 2 // PARTS], [32, 1], [ACROSS, PARTS], [1, 0])
    words: gl.constexpr = codes_layout(CHOSEN.rows, CHOSEN.log_block)
    ONE: gl.constexpr = arithmetic.ONE_BF16 if gl.bfloat16 == DTYPE else arithmetic.ONE_FP16
    word = gl.arange(0, (1 << CHOSEN.log_block) // 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, words))).to(gl.uint32)
    i = code & 127
    pair = ((code >> 7) << 15 | ONE) << ((i & 1) << 4)
    entries = gl.where((i >> 1)[:, :, None] == word[None, None, :], pair[:, :, None], 0)
    return gl.convert_layout(gl.reshape(entries, [CHOSEN.rows, STEP // 2]), flat)
