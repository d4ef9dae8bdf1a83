"""What the kernels for Hopper share. They are in Gluon, Triton's lower level.

There a program says itself what each of its warps does, and what they wait for. So different warps' steps overlap: some
make entries, into a ring of slots in shared memory, and have the data loaded (by the tensor memory accelerator, TMA);
others multiply what is in the slots. Barriers in memory tell when a slot is full, and when it is empty again.

The entries here are those of sketches with k = 128 2^a and nnz = 1, 2, 4 or 8. They are made and multiplied in blocks:
a chunk or, where it has more, WIDTH columns of it. Words are derived for BATCH lanes at a time. A block takes a lane;
with nnz = 8, where 32 rows have two sub-blocks, a lane for each.
"""

# (No annotations from __future__: Gluon would not see those of the kernels' arguments.)
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...laws import exact as law
from ...laws import philox
from ..config import exact as launch
from ..config import hopper as hopper_launch
from ..portable import fp32_split as parts
from ..portable import law as words

BATCH = gl.constexpr(launch.BATCH)
TILE = gl.constexpr(law.TILE_ROWS)
VECTORS = gl.constexpr(hopper_launch.HALF)
WIDTH = gl.constexpr(hopper_launch.WIDTH)

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.7 and 3.6
_law = philox.define(
    law.FUNCTIONS,
    gluon.jit,
    gl.constexpr,
    gl.static_range,
    philox=gluon.jit(words._philox.fn),
    select_word=gluon.jit(words._select_word.fn),
)
_tile_place, _chunk_keys, _chunk_signs, _select_word = (
    _law.tile_place,
    _law.chunk_keys,
    _law.chunk_signs,
    _law.select_word,
)
_words = philox.define(
    [f.fn for f in (words.pair, words._key_pair, words._odd_inverse, words.inverse_keys, words.permute)],
    gluon.jit,
    gl.constexpr,
    gl.static_range,
    tl=tl,
)
_inverse_keys, _permute = _words.inverse_keys, _words.permute
_seed_words = gluon.jit(words.seed_words.fn)
_parts = (parts.largest_of, parts.scale_of, parts.inverse, parts.pair_of)
largest_of, scale_of, inverse, pair_of = (gluon.jit(f.fn) for f in _parts)


@gluon.constexpr_function
def subs_of(LOG_CHUNK):
    """Sub-blocks that 32 rows have: lanes that a block takes."""
    return max(1, BATCH >> LOG_CHUNK)


@gluon.constexpr_function
def blocks_of(LOG_CHUNK):
    """Blocks of a chunk."""
    return max(1, (1 << LOG_CHUNK) // WIDTH)


@gluon.jit
def _chunks(m, block, k0, k1, offset, N_TILES: gl.constexpr, LOG_GROUP: gl.constexpr, LOG_CHUNK: gl.constexpr):
    """The chunks that blocks of tile m lie in."""
    g = (offset >> LOG_GROUP + LOG_CHUNK) + (block // blocks_of(LOG_CHUNK)).to(gl.int64)
    place, _ = _tile_place(m.to(gl.uint32), g, N_TILES, LOG_GROUP, k0, k1)
    return (g << LOG_GROUP) + place.to(gl.int64)


@gluon.jit
def columns(m, start, seed, offset, N_TILES: gl.constexpr, LOG_GROUP: gl.constexpr, LOG_CHUNK: gl.constexpr):
    """The data's first column in the blocks of tile m from `start` on: [BATCH] lanes."""
    k0, k1 = _seed_words(seed)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    block = start + gl.arange(0, BATCH, layout=layout) // subs_of(LOG_CHUNK)
    c = _chunks(m, block, k0, k1, offset, N_TILES, LOG_GROUP, LOG_CHUNK)
    return ((c << LOG_CHUNK) - offset).to(gl.int32) + block % blocks_of(LOG_CHUNK) * WIDTH


@gluon.jit
def at(z, lane):
    """The element of z [BATCH] that a lane has."""
    return gl.sum(gl.gather(z, gl.full([1], 0, gl.int32, layout=z.type.layout) + lane, 0), 0)


@gluon.jit
def entry_words(m, start, seed, offset, N_TILES: gl.constexpr, LOG_GROUP: gl.constexpr, LOG_CHUNK: gl.constexpr):
    """(keys, signs) for the blocks of tile m from `start` on: [4, BATCH], a warp for 32 rows, and lanes."""
    SUBS: gl.constexpr = subs_of(LOG_CHUNK)
    BLOCKS: gl.constexpr = blocks_of(LOG_CHUNK)
    k0, k1 = _seed_words(seed)
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    warp = gl.arange(0, 4, layout=gl.SliceLayout(1, layout))[:, None]
    lane = gl.arange(0, BATCH, layout=gl.SliceLayout(0, layout))[None, :]
    block = start + lane // SUBS
    c = _chunks(m, block, k0, k1, offset, N_TILES, LOG_GROUP, LOG_CHUNK)
    t = ((warp * SUBS + lane % SUBS) // BLOCKS).to(gl.uint32)  # of sub-blocks
    word = (warp // BLOCKS * BLOCKS + block % BLOCKS).to(gl.uint32)  # of signs
    w0, w1, w2, w3 = _chunk_keys(c, t >> 2, k0, k1)
    g0, g1, g2, g3 = _chunk_signs(c, k0, k1)
    return _inverse_keys(_select_word(t, w0, w1, w2, w3), LOG_CHUNK), _select_word(word, g0, g1, g2, g3)


@gluon.jit
def entries(keys, signs, block, LOG_CHUNK: gl.constexpr, DTYPE: gl.constexpr):
    """A block's entries, of 16 bits, two to a word: [TILE, half of its columns]. A thread has a row.

    block : its number among those that the words are for.
    """
    ONE: gl.constexpr = 0x3F80 if gl.bfloat16 == DTYPE else 0x3C00
    CHUNK: gl.constexpr = 1 << LOG_CHUNK
    COLUMNS: gl.constexpr = CHUNK // blocks_of(LOG_CHUNK)
    layout: gl.constexpr = gl.BlockedLayout([1, COLUMNS // 2], [32, 1], [4, 1], [1, 0])
    warp = gl.arange(0, 4, layout=gl.SliceLayout(1, keys.type.layout))[:, None]
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, keys.type.layout))[None, :]
    index = gl.full([4, 32], 0, gl.int32, layout=keys.type.layout) + block * subs_of(LOG_CHUNK) + lane // CHUNK
    row = (warp * 32 + lane).to(gl.uint32)
    i = _permute(row % CHUNK, gl.gather(keys, index, 1), LOG_CHUNK)
    negative = (gl.gather(signs, index, 1) >> (row // CHUNK * CHUNK + i) % 32) & 1
    pair = (negative << 15 | ONE) << ((i & 1) << 4)
    i -= (block % blocks_of(LOG_CHUNK) * COLUMNS).to(gl.uint32)  # beyond all columns where it is another block's
    i = gl.convert_layout(gl.reshape(i >> 1, [TILE]), gl.SliceLayout(1, layout))
    pair = gl.convert_layout(gl.reshape(pair, [TILE]), gl.SliceLayout(1, layout))
    j = gl.arange(0, COLUMNS // 2, layout=gl.SliceLayout(0, layout)).to(gl.uint32)
    return gl.where(i[:, None] == j[None, :], pair[:, None], 0)


@gluon.jit
def next_slot(slot, phase, SLOTS: gl.constexpr):
    """The slot that follows, and the phase of its barriers."""
    last = slot == SLOTS - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)
