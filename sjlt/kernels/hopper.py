"""What the kernels for Hopper share. They are in Gluon, Triton's lower level.

There a program says itself what each of its warps does, and what they wait for. So different warps' steps overlap: some
make entries, into a ring of slots in shared memory, and have the data loaded (by the tensor memory accelerator, TMA);
others multiply what is in the slots. Barriers in memory tell when a slot is full, and when it is empty again.

The entries here are those of sketches with nnz = 4 and k = 128 2^a, in at most BATCH groups of chunks: each lane of a
warp derives the words of one group.
"""

# (No annotations from __future__: Gluon would not see those of the kernels' arguments.)
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .. import law, philox
from . import launch, parts, words

BATCH = gl.constexpr(launch.BATCH)
TILE = gl.constexpr(law.TILE_ROWS)
VECTORS = gl.constexpr(launch.HOPPER_VECTORS // 2)  # of 4 warps that multiply
CHUNK, LOG_CHUNK = gl.constexpr(32), gl.constexpr(5)  # columns: of nnz = 4

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.7 and 3.6
_law = philox.define(
    law.FUNCTIONS,
    gluon.jit,
    gl.constexpr,
    gl.static_range,
    philox=gluon.jit(words._philox.fn),
    pick=gluon.jit(words._pick.fn),
)
_tile_place, _chunk_keys, _chunk_signs, _pick = _law.tile_place, _law.chunk_keys, _law.chunk_signs, _law.pick
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


@gluon.jit
def _chunks(m, g, k0, k1, N_TILES: gl.constexpr, LOG_GROUP: gl.constexpr):
    """The chunks of tile m in groups g."""
    place, _ = _tile_place(m.to(gl.uint32), g, N_TILES, LOG_GROUP, k0, k1)
    return (g << LOG_GROUP) + place.to(gl.int64)


@gluon.jit
def columns(m, seed, offset, N_TILES: gl.constexpr, LOG_GROUP: gl.constexpr):
    """The data's first column in the chunk of tile m, for each of BATCH groups from the first on: a lane each."""
    k0, k1 = _seed_words(seed)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    g = (offset >> LOG_GROUP + LOG_CHUNK) + gl.arange(0, BATCH, layout=layout).to(gl.int64)
    return ((_chunks(m, g, k0, k1, N_TILES, LOG_GROUP) << LOG_CHUNK) - offset).to(gl.int32)


@gluon.jit
def at(z, t):
    """Element t of z [BATCH], a lane each."""
    lane = gl.arange(0, BATCH, layout=z.type.layout)
    return gl.sum(gl.where(lane == t, z, 0), 0)


@gluon.jit
def entry_words(m, seed, offset, N_TILES: gl.constexpr, LOG_GROUP: gl.constexpr):
    """(keys, signs) of the chunks of tile m: [sub-blocks, groups], a warp and a lane each."""
    k0, k1 = _seed_words(seed)
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    g = (offset >> LOG_GROUP + LOG_CHUNK) + gl.arange(0, BATCH, layout=gl.SliceLayout(0, layout))[None, :].to(gl.int64)
    t = gl.arange(0, 4, layout=gl.SliceLayout(1, layout))[:, None].to(gl.uint32)
    c = _chunks(m, g, k0, k1, N_TILES, LOG_GROUP)
    w0, w1, w2, w3 = _chunk_keys(c, t >> 2, k0, k1)
    g0, g1, g2, g3 = _chunk_signs(c, k0, k1)
    return _inverse_keys(_pick(t, w0, w1, w2, w3), LOG_CHUNK), _pick(t, g0, g1, g2, g3)


@gluon.jit
def entries(keys, signs, t, DTYPE: gl.constexpr):
    """The tile's entries in chunk t, of 16 bits, two to a word: [TILE, CHUNK // 2]. A thread has a row."""
    ONE: gl.constexpr = 0x3F80 if gl.bfloat16 == DTYPE else 0x3C00
    layout: gl.constexpr = gl.BlockedLayout([1, CHUNK // 2], [32, 1], [4, 1], [1, 0])
    index = gl.full([4, 32], 0, gl.int32, layout=keys.type.layout) + t
    row = gl.arange(0, 32, layout=gl.SliceLayout(0, keys.type.layout))[None, :].to(gl.uint32)
    i = _permute(row, gl.gather(keys, index, 1), LOG_CHUNK)
    negative = (gl.gather(signs, index, 1) >> i) & 1
    pair = (negative << 15 | ONE) << ((i & 1) << 4)
    i = gl.convert_layout(gl.reshape(i >> 1, [TILE]), gl.SliceLayout(1, layout))
    pair = gl.convert_layout(gl.reshape(pair, [TILE]), gl.SliceLayout(1, layout))
    j = gl.arange(0, CHUNK // 2, layout=gl.SliceLayout(0, layout)).to(gl.uint32)
    return gl.where(i[:, None] == j[None, :], pair[:, None], 0)


@gluon.jit
def next_slot(slot, phase, SLOTS: gl.constexpr):
    """The slot that follows, and the phase of its barriers."""
    last = slot == SLOTS - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)
