"""The sketch law, version 1: which rows column j of a sketch hits, and with which signs.

README.md specifies it and says what follows from it; this module is its only implementation in the package. `Geometry`
holds the numbers that are fixed for a sketch. The functions below it are the arithmetic, written for words (see
`philox.py`), and every backend composes exactly these. The symbols are the specification's: k = n_components and
s = nnz of one stack, M tiles, tile m of R_m rows, sub-block t, and chunk c of 2^p columns, dealt to tiles in groups of
2^pm chunks. Entries are +-1 here; the scale 1/sqrt(nnz) is applied once, where a result is stored.

The construction belongs to the family of Kane & Nelson, "Sparser Johnson-Lindenstrauss transforms", JACM 2014
(block construction), and OSNAP of Nelson & Nguyen, FOCS 2013; nnz=1 is the CountSketch of Charikar, Chen &
Farach-Colton, 2002.
"""

from __future__ import annotations

from typing import NamedTuple

from .philox import HALF, LOW, philox

VERSION = 1

# The last word of Philox's counter keeps streams apart.
TAG_KEYS, TAG_SIGNS, TAG_TILES = 1, 2, 3
STACK_TAGS = 256  # stack t has the tags above + 256 t

TILE_ROWS = 128
MAX_N_COMPONENTS = TILE_ROWS * 65535  # tiles are counted in 16 bits

ZERO, ONE, TWO, THREE = 0, 1, 2, 3
FIVE_BITS, TWELVE_BITS, SIXTEEN_BITS, ALL_ONES = 0x1F, 0xFFF, 0xFFFF, 0xFFFFFFFFFFFFFFFF


class Geometry(NamedTuple):
    """The numbers that the law derives from (k, s) alone, and the key.

    k, s : n_components, nnz of one stack.  n_tiles : M.  log_group : pm, chunks dealt together as a power of two.
    log_chunk : p, columns of a chunk as a power of two.  key_low, key_high : the seed's words.  stacks : T.
    """

    k: int
    s: int
    n_tiles: int
    log_group: int
    log_chunk: int
    key_low: int
    key_high: int
    stacks: int


def count_tiles(k: int) -> int:
    """M, the tiles of k rows."""
    return -(-k // TILE_ROWS)


def max_nnz(k: int) -> int:
    """The largest nnz the law allows: the rows of the smallest tile."""
    return k // count_tiles(k)


def geometry(k: int, s: int, seed: int, stacks: int = 1) -> Geometry:
    """The geometry of each of `stacks` stacks with k rows and s nonzeros per column.

    1 <= k <= MAX_N_COMPONENTS, 1 <= s <= max_nnz(k), -2^63 <= seed < 2^64.
    """
    n_tiles = count_tiles(k)
    log_group = n_tiles.bit_length() - 1
    log_chunk = (k // n_tiles // s).bit_length() - 1
    return Geometry(k, s, n_tiles, log_group, log_chunk, seed & LOW, seed >> HALF & LOW, stacks)


# Below: functions of words. `define(FUNCTIONS, jit, word)` binds them to a backend. (`c & ZERO` is a word, which a
# constant is not yet to Triton.)


def part_start(i, n, parts):
    """floor(i n / parts): where part i begins when n rows are cut into parts (tiles of k, sub-blocks of a tile)."""
    return i * n // parts


def beta(x, a1, b1, a2, b2, p):
    """A keyed bijection of [0, 2^p), p <= 16: multiply-add, xor-shift, multiply-add, each invertible mod 2^p."""
    mask = (ONE << p) - ONE
    x = (x * (a1 | ONE) + b1) & mask
    x = x ^ (x >> ((p + ONE) >> ONE))
    return (x * (a2 | ONE) + b2) & mask


def odd_inverse(a):
    """The inverse of an odd a mod 2^16: 3a xor 2 is right in 5 bits, and a step of Newton's doubles them."""
    a = a & SIXTEEN_BITS
    x = ((a * THREE) ^ TWO) & SIXTEEN_BITS
    x = (x * (SIXTEEN_BITS + THREE - ((a * x) & SIXTEEN_BITS))) & SIXTEEN_BITS
    return (x * (SIXTEEN_BITS + THREE - ((a * x) & SIXTEEN_BITS))) & SIXTEEN_BITS


def undo_beta(y, i1, b1, i2, b2, p):
    """`beta_inverse`, given the inverses of a1 | 1 and a2 | 1. (The xor-shift is its own inverse.)"""
    mask = (ONE << p) - ONE
    y = ((y + mask + ONE - (b2 & mask)) * i2) & mask
    y = y ^ (y >> ((p + ONE) >> ONE))
    return ((y + mask + ONE - (b1 & mask)) * i1) & mask


def beta_inverse(y, a1, b1, a2, b2, p):
    """The x whose `beta` is y."""
    return undo_beta(y, odd_inverse(a1 | ONE), b1, odd_inverse(a2 | ONE), b2, p)


def scale_index(i, n, theta, p):
    """Maps [0, 2^p) into [0, n), n >= 2^p, in ascending order: a rounding that starts at theta < n."""
    return (i * n + theta) >> p


def unscale_index(r, n, theta, p):
    """The i whose `scale_index` is r, where there is one: else an i whose `scale_index` is not r."""
    return ((r << p) + (n - ONE - theta)) // n


def select_word(i, w0, w1, w2, w3):
    """Word i, 0 <= i < 4, of the four."""
    pair = (w0 | (w1 << HALF)) ^ (((w0 ^ w2) | ((w1 ^ w3) << HALF)) & ((i >> ONE) * ALL_ONES))
    return (pair >> ((i & ONE) * HALF)) & LOW


def group_words(group, k0, k1, stack=0):
    """The words that deal the chunks of a group to the tiles of a stack."""
    return philox(group & LOW, group >> HALF, group & ZERO, TAG_TILES + stack * STACK_TAGS, k0, k1)


def tile_theta(w1, n_tiles):
    """The start of the rounding that maps a group's places to tiles."""
    return ((w1 >> 16) * n_tiles) >> 16


def chunk_tile(c, n_tiles, log_group, k0, k1, stack=0):
    """The tile m of a stack that chunk c touches."""
    w0, w1, w2, w3 = group_words(c >> log_group, k0, k1, stack)
    mu = beta(c & ((ONE << log_group) - ONE), w0, w1, w2, w3, log_group)
    return scale_index(mu, n_tiles, tile_theta(w1, n_tiles), log_group)


def tile_place(m, group, n_tiles, log_group, k0, k1, stack=0):
    """(i, found): the place i in its group of the chunk that touches tile m, where there is one."""
    w0, w1, w2, w3 = group_words(group, k0, k1, stack)
    theta = tile_theta(w1, n_tiles)
    mu = unscale_index(m, n_tiles, theta, log_group)
    return beta_inverse(mu, w0, w1, w2, w3, log_group), scale_index(mu, n_tiles, theta, log_group) == m


def chunk_keys(c, quad, k0, k1, stack=0):
    """The key words of sub-blocks 4 quad .. 4 quad + 3 of chunk c in a stack."""
    return philox(c & LOW, c >> HALF, quad, TAG_KEYS + stack * STACK_TAGS, k0, k1)


def chunk_signs(c, k0, k1, stack=0):
    """The 128 sign bits of chunk c in a stack as four words."""
    return philox(c & LOW, c >> HALF, c & ZERO, TAG_SIGNS + stack * STACK_TAGS, k0, k1)


def row_theta(w, b):
    """The start of the rounding that maps a chunk's slots to rows."""
    return (((w >> 4) & TWELVE_BITS) * b) >> 12


def row_in_sub_block(i, w, b, p):
    """The row, 0 <= row < b, that place i of a chunk of 2^p takes in a sub-block of b rows with key word w."""
    return scale_index(beta(i, w, w >> 8, w >> 16, w >> 24, p), b, row_theta(w, b), p)


def sub_block_of_row(row, s, rows):
    """The sub-block t that owns a row of a tile of `rows` rows."""
    return ((row + ONE) * s - ONE) // rows


def sign_bit(i, t, p, g0, g1, g2, g3):
    """1 where the entry of place i in sub-block t is negative; g0..g3 are the chunk's sign words."""
    e = (t << p) + i
    return (select_word(e >> 5, g0, g1, g2, g3) >> (e & FIVE_BITS)) & ONE


FUNCTIONS = (
    philox,
    part_start,
    beta,
    odd_inverse,
    undo_beta,
    beta_inverse,
    scale_index,
    unscale_index,
    select_word,
    group_words,
    tile_theta,
    chunk_tile,
    tile_place,
    chunk_keys,
    chunk_signs,
    row_theta,
    row_in_sub_block,
    sub_block_of_row,
    sign_bit,
)
