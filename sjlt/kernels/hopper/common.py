"""Functions shared by the kernels in Gluon, Triton's lower-level language: those for Hopper and, of some, `ampere`.

A Gluon program assigns roles to its warps and controls what each waits for, so that their work overlaps. Producer warps
write entries to a ring of slots in shared memory, and start loads of the data to the same slots by the tensor memory
accelerator (TMA). Consumer warps multiply the contents of the slots. For each slot, two barriers in shared memory
signal when it is `full` and when it is `empty`.

The entries are those of sketches with k = 128 2^a and nnz 1, 2, 4 or 8. They are generated and multiplied in blocks: a
block is a chunk or, for wider chunks, MAX_COLUMNS columns of one. Words are derived for GROUPS_PER_STEP lanes at a
time; a block occupies one lane or, for nnz 8, where 32 rows belong to two sub-blocks, two lanes.
"""

# (No `from __future__ import annotations`: Gluon would not see the annotations of kernel arguments.)
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...laws import exact as law
from ...laws import philox
from ..config import arithmetic, hopper, product
from ..portable import fp32_split
from ..portable import law as portable_law

GROUPS_PER_STEP = gl.constexpr(product.GROUPS_PER_STEP)
TILE = gl.constexpr(law.TILE_ROWS)
WARPGROUP_VECTORS = gl.constexpr(hopper.WARPGROUP_VECTORS)
MAX_COLUMNS = gl.constexpr(hopper.MAX_COLUMNS)
STEP_COLUMNS = gl.constexpr(hopper.STEP_COLUMNS)

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.7 and 3.6


def gluon_functions(*functions):
    """Triton device functions compiled by Gluon; each may call those before it."""
    return philox.define([f.fn for f in functions], gluon.jit, gl.constexpr, gl.static_range, tl=tl)


_law = philox.define(
    law.FUNCTIONS,
    gluon.jit,
    gl.constexpr,
    gl.static_range,
    philox=gluon.jit(portable_law.philox_words.fn),
    select_word=gluon.jit(portable_law.select_word.fn),
)
_permutation = gluon_functions(
    portable_law.pair,
    portable_law.key_pair,
    portable_law.odd_inverse,
    portable_law.inverse_keys,
    portable_law.permute,
)
seed_words = gluon.jit(portable_law.seed_words.fn)
largest_of, scale_of, inverse = (
    gluon.jit(f.fn) for f in (fp32_split.largest_of, fp32_split.scale_of, fp32_split.inverse)
)
_split = gluon_functions(fp32_split.high_of, fp32_split.low_of, fp32_split.pair_of)
high_of, low_of, pair_of = _split.high_of, _split.low_of, _split.pair_of
_tile_place, _select_word = _law.tile_place, _law.select_word
_chunk_keys, _chunk_signs = _law.chunk_keys, _law.chunk_signs
_inverse_keys, _permute = _permutation.inverse_keys, _permutation.permute


@gluon.jit
def wait_for_previous_kernel():
    """In a programmatic dependent launch, wait until the kernel before has ended and its stores are visible."""
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1)


@gluon.constexpr_function
def lanes_per_block(LOG_CHUNK):
    """Lanes that a block occupies: the number of sub-blocks that 32 rows belong to."""
    return max(1, GROUPS_PER_STEP >> LOG_CHUNK)


@gluon.constexpr_function
def blocks_per_chunk(LOG_CHUNK):
    """The number of blocks in a chunk."""
    return max(1, (1 << LOG_CHUNK) // MAX_COLUMNS)


@gluon.jit
def _chunks(m, block, k0, k1, offset, GEOMETRY: gl.constexpr):
    """The chunks of blocks `block` of tile m. Block 0 lies in the group of the first column of the data."""
    LOG_GROUP: gl.constexpr = GEOMETRY.log_group
    LOG_CHUNK: gl.constexpr = GEOMETRY.log_chunk
    g = (offset >> LOG_GROUP + LOG_CHUNK) + (block // blocks_per_chunk(LOG_CHUNK)).to(gl.int64)
    place, _ = _tile_place(m.to(gl.uint32), g, GEOMETRY.n_tiles, LOG_GROUP, k0, k1, GEOMETRY.stack)
    return (g << LOG_GROUP) + place.to(gl.int64)


@gluon.jit
def columns(m, start, seed, offset, GEOMETRY: gl.constexpr):
    """The first column of the data of each block of tile m from `start` on: [GROUPS_PER_STEP], by lane."""
    LOG_CHUNK: gl.constexpr = GEOMETRY.log_chunk
    k0, k1 = seed_words(seed)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    block = start + gl.arange(0, GROUPS_PER_STEP, layout=layout) // lanes_per_block(LOG_CHUNK)
    c = _chunks(m, block, k0, k1, offset, GEOMETRY)
    return ((c << LOG_CHUNK) - offset).to(gl.int32) + block % blocks_per_chunk(LOG_CHUNK) * MAX_COLUMNS


@gluon.jit
def lane_value(z, lane):
    """Element `lane` of z [GROUPS_PER_STEP], as a scalar."""
    return gl.sum(gl.gather(z, gl.full([1], 0, gl.int32, layout=z.type.layout) + lane, 0), 0)


@gluon.jit
def entry_words(m, start, seed, offset, GEOMETRY: gl.constexpr):
    """(keys, sign words) of the blocks of tile m from `start` on: [4, GROUPS_PER_STEP], for 32 rows per warp."""
    LOG_CHUNK: gl.constexpr = GEOMETRY.log_chunk
    LANES: gl.constexpr = lanes_per_block(LOG_CHUNK)
    BLOCKS: gl.constexpr = blocks_per_chunk(LOG_CHUNK)
    k0, k1 = seed_words(seed)
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    warp = gl.arange(0, 4, layout=gl.SliceLayout(1, layout))[:, None]
    lane = gl.arange(0, GROUPS_PER_STEP, layout=gl.SliceLayout(0, layout))[None, :]
    block = start + lane // LANES
    c = _chunks(m, block, k0, k1, offset, GEOMETRY)
    t = ((warp * LANES + lane % LANES) // BLOCKS).to(gl.uint32)  # sub-block
    word = (warp // BLOCKS * BLOCKS + block % BLOCKS).to(gl.uint32)  # sign word
    w0, w1, w2, w3 = _chunk_keys(c, t >> 2, k0, k1, GEOMETRY.stack)
    g0, g1, g2, g3 = _chunk_signs(c, k0, k1, GEOMETRY.stack)
    return _inverse_keys(_select_word(t, w0, w1, w2, w3), LOG_CHUNK), _select_word(word, g0, g1, g2, g3)


@gluon.jit
def entries(keys, signs, block, LOG_CHUNK: gl.constexpr, DTYPE: gl.constexpr):
    """A block's 16-bit entries, two per 32-bit word: [TILE, columns / 2], one row per thread.

    block : its index among the blocks of keys and signs, from `entry_words`.
    """
    ONE: gl.constexpr = arithmetic.ONE_BF16 if gl.bfloat16 == DTYPE else arithmetic.ONE_FP16
    CHUNK: gl.constexpr = 1 << LOG_CHUNK
    COLUMNS: gl.constexpr = CHUNK // blocks_per_chunk(LOG_CHUNK)
    layout: gl.constexpr = gl.BlockedLayout([1, COLUMNS // 2], [32, 1], [4, 1], [1, 0])
    warp = gl.arange(0, 4, layout=gl.SliceLayout(1, keys.type.layout))[:, None]
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, keys.type.layout))[None, :]
    index = gl.full([4, 32], 0, gl.int32, layout=keys.type.layout) + block * lanes_per_block(LOG_CHUNK) + lane // CHUNK
    row = (warp * 32 + lane).to(gl.uint32)
    i = _permute(row % CHUNK, gl.gather(keys, index, 1), LOG_CHUNK)
    negative = (gl.gather(signs, index, 1) >> (row // CHUNK * CHUNK + i) % 32) & 1
    pair = (negative << 15 | ONE) << ((i & 1) << 4)
    i -= (block % blocks_per_chunk(LOG_CHUNK) * COLUMNS).to(gl.uint32)  # out of range unless in this block
    i = gl.convert_layout(gl.reshape(i >> 1, [TILE]), gl.SliceLayout(1, layout))
    pair = gl.convert_layout(gl.reshape(pair, [TILE]), gl.SliceLayout(1, layout))
    j = gl.arange(0, COLUMNS // 2, layout=gl.SliceLayout(0, layout)).to(gl.uint32)
    return gl.where(i[:, None] == j[None, :], pair[:, None], 0)


@gluon.jit
def next_slot(slot, phase, SLOTS: gl.constexpr):
    """(the next slot of the ring, the phase of its barriers); the phase flips with each round of the ring."""
    last = slot == SLOTS - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)
