"""The sketch law, version 1, in plain Python integers: the independent reference for every other implementation.

Deliberately slow; it shares no line with the library, so that agreement is between independent implementations.
"""

WORD = 0xFFFFFFFF
TAG_KEYS, TAG_SIGNS, TAG_TILES = 1, 2, 3
MAX_COMPONENTS = 128 * 65535


def philox4x32_10(counter, key):
    """Four output words of Philox4x32-10 (Salmon et al. 2011, ten rounds) for a 4-word counter and a 2-word key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low_product = 0xD2511F53 * c0
        high_product = 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (high_product >> 32) ^ c1 ^ k0,
            high_product & WORD,
            (low_product >> 32) ^ c3 ^ k1,
            low_product & WORD,
        )
        k0 = (k0 + 0x9E3779B9) & WORD
        k1 = (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def words(index, sub, tag, seed):
    """The four words at a 64-bit index of the stream ``tag`` of a seed."""
    seed %= 1 << 64
    return philox4x32_10((index & WORD, index >> 32, sub, tag), (seed & WORD, seed >> 32))


def beta(x, a1, b1, a2, b2, p):
    """A keyed bijection of [0, 2^p)."""
    x = (x * (a1 | 1) + b1) % 2**p
    x ^= x >> -(-p // 2)
    return (x * (a2 | 1) + b2) % 2**p


def log2_floor(n):
    """The largest p with 2^p <= n."""
    return n.bit_length() - 1


def count_tiles(k):
    return -(-k // 128)


def max_nnz(k):
    """The number of rows of the smallest tile: no column can have more distinct rows."""
    return k // count_tiles(k)


def chunk_log2(k, nnz):
    """p, where a chunk has B = 2^p columns."""
    return log2_floor(k // count_tiles(k) // nnz)


def tile_rows(k, m):
    """The half-open range of rows of tile m."""
    tiles = count_tiles(k)
    return m * k // tiles, (m + 1) * k // tiles


def sub_block(k, nnz, m, t):
    """The half-open range of rows of sub-block t of tile m."""
    first, end = tile_rows(k, m)
    rows = end - first
    return first + t * rows // nnz, first + (t + 1) * rows // nnz


def tile_of_chunk(k, seed, c, stack=0):
    """The one tile hit by every column of chunk c."""
    tiles = count_tiles(k)
    pm = log2_floor(tiles)
    group, place = c >> pm, c % 2**pm
    w = words(group, 0, TAG_TILES + 256 * stack, seed)
    theta = ((w[1] >> 16) * tiles) >> 16
    return (beta(place, *w, pm) * tiles + theta) >> pm


def entries(n_components, nnz, seed, column, stacks=1):
    """Rows and signs (+1 or -1) of one column, stack by stack, each in the order of its sub-blocks.

    An entry's value is sign / sqrt(nnz).
    """
    assert n_components % stacks == 0
    assert nnz % stacks == 0
    rows, signs = [], []
    for stack in range(stacks):
        stack_rows, stack_signs = stack_entries(n_components // stacks, nnz // stacks, seed, column, stack)
        rows += [stack * (n_components // stacks) + row for row in stack_rows]
        signs += stack_signs
    return rows, signs


def stack_entries(n_components, nnz, seed, column, stack):
    """Rows (within the stack) and signs of one column of one stack of n_components rows, in sub-block order."""
    assert 1 <= n_components <= MAX_COMPONENTS
    assert 1 <= nnz <= max_nnz(n_components)
    p = chunk_log2(n_components, nnz)
    c, i = column >> p, column % 2**p
    m = tile_of_chunk(n_components, seed, c, stack)
    sign_words = words(c, 0, TAG_SIGNS + 256 * stack, seed)
    rows, signs = [], []
    for t in range(nnz):
        first, end = sub_block(n_components, nnz, m, t)
        b = end - first
        w = words(c, t // 4, TAG_KEYS + 256 * stack, seed)[t % 4]
        slot = beta(i, w, w >> 8, w >> 16, w >> 24, p)
        theta = (((w >> 4) & 0xFFF) * b) >> 12
        rows.append(first + ((slot * b + theta) >> p))
        e = t * 2**p + i
        signs.append(-1 if sign_words[e // 32] >> (e % 32) & 1 else 1)
    return rows, signs


def table_row_seed(row, seed):
    """The seed of the sketch that forms one row of a CountSketch table."""
    low, high, _, _ = words(row, 0, 5, seed)
    return high * 2**32 + low
