"""The exact law, version 1: which rows column j of a sketch hits, and with which signs.

README.md specifies the law and its properties; this module is its only implementation in the package. `Geometry` holds
the quantities that are fixed for a sketch. The word functions below it (see `philox.py`) are the arithmetic, and all
backends are composed of them. The symbols are those of the specification: k = n_components and s = nnz of one stack,
M tiles, tile m of R_m rows, sub-block t, and chunk c of 2^p columns; chunks are dealt to tiles in groups of 2^q.
Entries are +-1 here; the scale 1/sqrt(nnz) is applied once, when a result is stored.

The construction is related to Kane & Nelson, "Sparser Johnson-Lindenstrauss transforms", JACM 2014 (block construction)
and to OSNAP of Nelson & Nguyen, FOCS 2013; nnz = 1 is the CountSketch of Charikar, Chen & Farach-Colton, 2002.
"""

from __future__ import annotations

from typing import NamedTuple

from .philox import HALF, LOW, philox

VERSION = 1

# The last word of Philox's counter, which separates the streams.
TAG_KEYS, TAG_SIGNS, TAG_TILES = 1, 2, 3
STACK_TAGS = 256  # stack t adds 256 t to the tags above

TILE_ROWS = 128
MAX_N_COMPONENTS = TILE_ROWS * 65535  # tiles are counted in 16 bits

ZERO, ONE, TWO, THREE = 0, 1, 2, 3
FIVE_BITS, TWELVE_BITS, SIXTEEN_BITS, ALL_ONES = 0x1F, 0xFFF, 0xFFFF, 0xFFFFFFFFFFFFFFFF


class Geometry(NamedTuple):
    """What the law derives from k and s, and the key.

    Attributes
    ----------
    k, s : int
        n_components and nnz of one stack.
    n_tiles : int
        M, the number of tiles of a stack.
    log_group : int
        q: a group has 2^q chunks.
    log_chunk : int
        p: a chunk has 2^p columns.
    key_low, key_high : int
        The words of the seed.
    stacks : int
        T, the number of stacks.
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
    """M, the number of tiles of k rows."""
    return -(-k // TILE_ROWS)


def max_nnz(k: int) -> int:
    """The largest nnz that the law allows: the number of rows of the smallest tile."""
    return k // count_tiles(k)


def geometry(k: int, s: int, seed: int, stacks: int = 1) -> Geometry:
    """The geometry of each of `stacks` stacks with k rows and s nonzeros per column.

    1 <= k <= MAX_N_COMPONENTS, 1 <= s <= max_nnz(k), -2^63 <= seed < 2^64.
    """
    n_tiles = count_tiles(k)
    log_group = n_tiles.bit_length() - 1
    log_chunk = (k // n_tiles // s).bit_length() - 1
    return Geometry(k, s, n_tiles, log_group, log_chunk, seed & LOW, seed >> HALF & LOW, stacks)


# Word functions, which `define(FUNCTIONS, jit, word)` binds to a backend. (`c & ZERO` is a zero of a word's type; a
# constant has another type in Triton.)


def part_start(i, n, parts):
    """floor(i n / parts): the first row of part i if n rows are cut into parts (tiles, or sub-blocks of a tile)."""
    return i * n // parts


def beta(x, a1, b1, a2, b2, p):
    """A keyed bijection of [0, 2^p), p <= 16: multiply-add, xor-shift, multiply-add, each invertible mod 2^p."""
    mask = (ONE << p) - ONE
    x = (x * (a1 | ONE) + b1) & mask
    x = x ^ (x >> ((p + ONE) >> ONE))
    return (x * (a2 | ONE) + b2) & mask


def odd_inverse(a):
    """The inverse of an odd a mod 2^16: 3a xor 2 is correct in 5 bits, and each Newton step doubles their number."""
    a = a & SIXTEEN_BITS
    x = ((a * THREE) ^ TWO) & SIXTEEN_BITS
    x = (x * (SIXTEEN_BITS + THREE - ((a * x) & SIXTEEN_BITS))) & SIXTEEN_BITS
    return (x * (SIXTEEN_BITS + THREE - ((a * x) & SIXTEEN_BITS))) & SIXTEEN_BITS


def undo_beta(y, i1, b1, i2, b2, p):
    """`beta_inverse`, given the inverses i1 and i2 of a1 | 1 and a2 | 1. (The xor-shift is its own inverse.)"""
    mask = (ONE << p) - ONE
    y = ((y + mask + ONE - (b2 & mask)) * i2) & mask
    y = y ^ (y >> ((p + ONE) >> ONE))
    return ((y + mask + ONE - (b1 & mask)) * i1) & mask


def beta_inverse(y, a1, b1, a2, b2, p):
    """The x whose `beta` is y."""
    return undo_beta(y, odd_inverse(a1 | ONE), b1, odd_inverse(a2 | ONE), b2, p)


def scale_index(i, n, theta, p):
    """Map i in [0, 2^p) into [0, n), n >= 2^p, in ascending order; theta < n is the start of the rounding."""
    return (i * n + theta) >> p


def unscale_index(r, n, theta, p):
    """The i whose `scale_index` is r if there is one; otherwise an i whose `scale_index` is not r."""
    return ((r << p) + (n - ONE - theta)) // n


def select_word(i, w0, w1, w2, w3):
    """Word i, 0 <= i < 4, of four words."""
    pair = (w0 | (w1 << HALF)) ^ (((w0 ^ w2) | ((w1 ^ w3) << HALF)) & ((i >> ONE) * ALL_ONES))
    return (pair >> ((i & ONE) * HALF)) & LOW


def group_words(group, k0, k1, stack=0):
    """The words that deal the chunks of a group to the tiles of a stack."""
    return philox(group & LOW, group >> HALF, group & ZERO, TAG_TILES + stack * STACK_TAGS, k0, k1)


def tile_theta(w1, n_tiles):
    """The start of the rounding that maps the places of a group to tiles."""
    return ((w1 >> 16) * n_tiles) >> 16


def chunk_tile(c, n_tiles, log_group, k0, k1, stack=0):
    """The tile m of a stack that chunk c meets."""
    w0, w1, w2, w3 = group_words(c >> log_group, k0, k1, stack)
    mu = beta(c & ((ONE << log_group) - ONE), w0, w1, w2, w3, log_group)
    return scale_index(mu, n_tiles, tile_theta(w1, n_tiles), log_group)


def tile_place(m, group, n_tiles, log_group, k0, k1, stack=0):
    """(i, found): the place i in the group of the chunk that meets tile m, and whether there is such a chunk."""
    w0, w1, w2, w3 = group_words(group, k0, k1, stack)
    theta = tile_theta(w1, n_tiles)
    mu = unscale_index(m, n_tiles, theta, log_group)
    return beta_inverse(mu, w0, w1, w2, w3, log_group), scale_index(mu, n_tiles, theta, log_group) == m


def chunk_keys(c, quad, k0, k1, stack=0):
    """The key words of sub-blocks 4 quad to 4 quad + 3 for chunk c of a stack."""
    return philox(c & LOW, c >> HALF, quad, TAG_KEYS + stack * STACK_TAGS, k0, k1)


def chunk_signs(c, k0, k1, stack=0):
    """The 128 sign bits of chunk c of a stack, as four words."""
    return philox(c & LOW, c >> HALF, c & ZERO, TAG_SIGNS + stack * STACK_TAGS, k0, k1)


def row_theta(w, b):
    """The start of the rounding that maps the slots of a chunk to the b rows of a sub-block."""
    return (((w >> 4) & TWELVE_BITS) * b) >> 12


def row_in_sub_block(i, w, b, p):
    """The row, 0 <= row < b, that column i of a chunk of 2^p hits in a sub-block of b rows with key word w."""
    return scale_index(beta(i, w, w >> 8, w >> 16, w >> 24, p), b, row_theta(w, b), p)


def sub_block_of_row(row, s, rows):
    """The sub-block t, 0 <= t < s, that contains a row of a tile of `rows` rows."""
    return ((row + ONE) * s - ONE) // rows


def sign_bit(i, t, p, g0, g1, g2, g3):
    """1 if the entry of column i of a chunk in sub-block t is negative; g0 to g3 are the sign words of the chunk."""
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
