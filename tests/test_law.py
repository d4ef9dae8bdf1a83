"""The sketch law: golden vectors, an independent reference, and the properties that the law guarantees."""

import json
import math
from pathlib import Path

import numba
import numpy as np
import pytest
import reference
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sjlt import Sketch
from sjlt.laws import exact as law
from sjlt.laws.philox import define

VECTORS = json.loads((Path(__file__).parent / "vectors" / "sketch_law_v1.json").read_text())
LAST = 2**63 - 1  # features of the widest sketch

# (n_components, nnz): full and partial tiles, one and several, one row, the most nonzeros, a prime, one-column chunks.
SHAPES = [(1, 1), (6, 4), (100, 3), (127, 63), (127, 127), (128, 16), (256, 4), (257, 5), (512, 128), (700, 5),
          (1009, 8), (1024, 32), (5000, 1), (8_388_480, 2)]  # fmt: skip
WHOLE = [(128, 1), (128, 16), (256, 4), (1024, 8), (4096, 2)]  # 128 * 2^a rows and a power-of-two nnz


def checked_entries(k, nnz, seed, start, stop):
    """`Sketch.entries`, after checking shapes and dtypes."""
    rows, signs = Sketch(stop, k, nnz=nnz, seed=seed).entries(start, stop)
    assert rows.shape == signs.shape == (nnz, stop - start)
    assert rows.dtype == np.int64
    assert signs.dtype == np.int8
    assert np.isin(signs, (-1, 1)).all()
    return rows, signs


def expected_entries(k, nnz, seed, start, stop):
    columns = [reference.entries(k, nnz, seed, j) for j in range(start, stop)]
    return tuple(np.array(part).T for part in zip(*columns, strict=True))


# --------------------------------------------------------------------------------- golden vectors


@pytest.mark.parametrize("answer", VECTORS["philox4x32_10"], ids=lambda a: f"{a['counter'][0]:x}")
def test_philox_known_answers(answer):
    assert list(reference.philox4x32_10(answer["counter"], answer["key"])) == answer["words"]
    words = define(law.FUNCTIONS, lambda f: f, int).philox(*answer["counter"], *answer["key"])
    assert list(words) == answer["words"]


@pytest.mark.parametrize("v", VECTORS["sketch"], ids=lambda v: "-".join(str(x) for x in list(v.values())[:4]))
def test_golden_vectors(v):
    assert VECTORS["law"] == law.VERSION
    law_of = v["n_components"], v["nnz"], v["seed"]
    start, stop = v["first_column"], v["first_column"] + len(v["rows"])
    witness = [reference.entries(*law_of, j) for j in range(start, stop)]
    assert [list(x) for x in zip(*witness, strict=True)] == [v["rows"], v["signs"]]
    rows, signs = checked_entries(*law_of, start, stop)
    assert rows.T.tolist() == v["rows"]
    assert signs.T.tolist() == v["signs"]


# --------------------------------------------------------------------------------- reference


@st.composite
def sketches(draw):
    """(k, nnz, seed, first column, width), over everything the law allows."""
    k = draw(
        st.integers(1, 1300)
        | st.integers(1, reference.MAX_COMPONENTS)
        | st.integers(0, 16).map(lambda a: 128 << a).filter(lambda k: k <= reference.MAX_COMPONENTS)
        | st.integers(reference.MAX_COMPONENTS - 300, reference.MAX_COMPONENTS)
    )
    nnz = draw(st.integers(1, reference.max_nnz(k)) | st.just(reference.max_nnz(k)))
    seed = draw(st.integers(-(2**63), 2**64 - 1))
    width = draw(st.integers(1, 5))
    near = st.integers(0, 10**6) | st.integers(2**32 - 9, 2**32 + 9) | st.integers(2**33, 2**34)
    start = draw(near | st.integers(0, LAST - width) | st.integers(LAST - width - 300, LAST - width))
    return k, nnz, seed, start, width


@settings(max_examples=300, derandomize=True)
@given(sketches())
@example((reference.MAX_COMPONENTS, 128, 2**64 - 1, LAST - 4, 4))
@example((1, 1, -(2**63), LAST - 4, 4))
def test_entries_equal_the_reference(sketch):
    k, nnz, seed, start, width = sketch
    rows, signs = checked_entries(k, nnz, seed, start, start + width)
    expected_rows, expected_signs = expected_entries(k, nnz, seed, start, start + width)
    np.testing.assert_array_equal(rows, expected_rows)
    np.testing.assert_array_equal(signs, expected_signs)


@pytest.mark.parametrize(("k", "nnz"), [(5, 4), (16, 8), (21, 5), (18, 4), (35, 3), (40, 4), (63, 7)])
@pytest.mark.parametrize("start", [0, 5, 2**40 + 3])
def test_entries_of_small_chunks_equal_the_reference(k, nnz, start):
    """Chunks of 1 to 8 columns of one tile, many of which are generated together."""
    assert law.geometry(k, nnz, 0).log_chunk <= 3
    found, expected = (f(k, nnz, 9, start, start + 203) for f in (checked_entries, expected_entries))
    np.testing.assert_array_equal(found, expected)


def test_long_run_of_entries_equals_the_reference():
    # Longer than one task of any backend, starting in the middle of a chunk.
    start, stop = 2**33 + 5, 2**33 + 70_000
    rows, signs = checked_entries(700, 5, 11, start, stop)
    for j in range(0, stop - start, 331):
        assert (rows[:, j].tolist(), signs[:, j].tolist()) == reference.entries(700, 5, 11, start + j)


# --------------------------------------------------------------------------------- one source for all backends


def words(seed, bits=32, n=40):
    """Words, including the extremes."""
    drawn = np.random.default_rng(seed).integers(0, 2**bits, n).tolist()
    return [0, 1, 2**bits - 1, 2 ** (bits - 1), *drawn]


def calls():
    """Admissible arguments for each function of the law, as Python integers."""
    keys = words(1), words(2)
    chunks = [c % 2**63 for c in words(3, 63)]
    tiles = [1 + t % 65535 for t in words(4)]
    groups = [t.bit_length() - 1 for t in tiles]
    p = [i % 8 for i in range(len(chunks))]
    four = [words(s) for s in (5, 6, 7, 8)]
    places = [w % 2**q for w, q in zip(words(9), p, strict=True)]
    quads, stacks = [w % 32 for w in words(10)], [i % 5 for i in range(len(chunks))]
    pm = [i % 17 for i in range(len(chunks))]
    blocks = [2**q + w % 2**q for q, w in zip(p, words(11), strict=True)]
    seats, dealt = words(15), [m % t for m, t in zip(words(16), tiles, strict=True)]
    rows = [1 + w % 128 for w in words(18)]
    return {
        "philox": (*four, *keys),
        "part_start": ([w % t for w, t in zip(words(12), tiles, strict=True)], [128 * t - 1 for t in tiles], tiles),
        "beta": ([w % 2**q for w, q in zip(words(13), pm, strict=True)], *four, pm),
        "odd_inverse": ([w | 1 for w in four[0]],),
        "undo_beta": (
            [w % 2**q for w, q in zip(words(19), pm, strict=True)],
            *([w | 1 for w in words] if i % 2 == 0 else words for i, words in enumerate(four)),
            pm,
        ),
        "beta_inverse": ([w % 2**q for w, q in zip(words(19), pm, strict=True)], *four, pm),
        "scale_index": (
            [w % 2**q for w, q in zip(seats, groups, strict=True)],
            tiles,
            [w % t for w, t in zip(words(17), tiles, strict=True)],
            groups,
        ),
        "unscale_index": (dealt, tiles, [w % t for w, t in zip(words(17), tiles, strict=True)], groups),
        "select_word": ([i % 4 for i in range(len(chunks))], *four),
        "group_words": ([c >> g for c, g in zip(chunks, groups, strict=True)], *keys, stacks),
        "tile_theta": (four[0], tiles),
        "tile_place": (dealt, [c >> g for c, g in zip(chunks, groups, strict=True)], tiles, groups, *keys, stacks),
        "chunk_tile": (chunks, tiles, groups, *keys, stacks),
        "chunk_keys": (chunks, quads, *keys, stacks),
        "chunk_signs": (chunks, *keys, stacks),
        "row_in_sub_block": (places, words(14), blocks, p),
        "row_theta": (words(14), blocks),
        "sub_block_of_row": (
            [w % r for w, r in zip(words(25), rows, strict=True)],
            [1 + w % r for w, r in zip(words(26), rows, strict=True)],
            rows,
        ),
        "sign_bit": (places, [q % (128 >> a) for q, a in zip(quads, p, strict=True)], p, *four),
    }


def test_every_word_function_is_covered():
    assert set(calls()) == {f.__name__ for f in law.FUNCTIONS}


def as_ints(result):
    """Words of one call, or of an array of calls, as lists of Python integers."""
    parts = result if isinstance(result, tuple) else (result,)
    return [np.asarray(part, np.uint64).tolist() for part in parts]


@pytest.mark.parametrize("name", [f.__name__ for f in law.FUNCTIONS])
def test_word_functions_agree_across_backends(name, compiled_words):
    arguments = calls()[name]
    plain = getattr(define(law.FUNCTIONS, lambda f: f, int), name)
    arrays = getattr(define(law.FUNCTIONS, lambda f: f, np.uint64), name)
    compiled = getattr(compiled_words, name)
    expected = [as_ints(plain(*a)) for a in zip(*arguments, strict=True)]
    as_array = as_ints(arrays(*(np.array(a, np.uint64) for a in arguments)))
    assert [list(parts) for parts in zip(*as_array, strict=True)] == expected
    assert [as_ints(compiled(*map(np.uint64, a))) for a in zip(*arguments, strict=True)] == expected


@pytest.fixture(scope="module")
def compiled_words():
    return define(law.FUNCTIONS, numba.njit, np.uint64)


@pytest.mark.parametrize("p", range(17))
def test_beta_is_a_bijection(p, compiled_words):
    arrays = define(law.FUNCTIONS, lambda f: f, np.uint64)
    x = np.arange(2**p, dtype=np.uint64)
    for keys in zip(*(words(s, n=5) for s in (21, 22, 23, 24)), strict=True):
        image = arrays.beta(x, *map(np.uint64, keys), np.uint64(p))
        np.testing.assert_array_equal(np.sort(image), x)
        assert image[-1] == reference.beta(2**p - 1, *keys, p)
        np.testing.assert_array_equal(arrays.beta_inverse(image, *map(np.uint64, keys), np.uint64(p)), x)


# --------------------------------------------------------------------------------- consequences of the law


def tiles_and_chunks(k, nnz, rows, start):
    """For each column, its chunk and the tiles of its rows."""
    first_rows = [reference.tile_rows(k, m)[0] for m in range(reference.count_tiles(k))]
    chunks = (start + np.arange(rows.shape[1])) >> reference.chunk_log2(k, nnz)
    return chunks, np.searchsorted(first_rows, rows, side="right") - 1


@pytest.mark.parametrize(("k", "nnz"), SHAPES)
@pytest.mark.parametrize("start", [pytest.param(0, marks=pytest.mark.exhaustive), 2**33 + 12_345])
def test_columns_tiles_and_sub_blocks(k, nnz, start):
    rows, _ = checked_entries(k, nnz, 3, start, start + 1500)
    assert rows.min() >= 0
    assert rows.max() < k
    # Exactly nnz distinct rows per column: sub-block t lies entirely below sub-block t + 1.
    assert (np.diff(rows, axis=0) > 0).all()
    chunks, tiles = tiles_and_chunks(k, nnz, rows, start)
    for c in np.unique(chunks):
        own = tiles[:, chunks == c]
        assert (own == own[0, 0]).all(), "a chunk touches one tile"
        for t, block in enumerate(rows[:, chunks == c]):
            first, end = reference.sub_block(k, nnz, int(own[0, 0]), t)
            assert first <= block.min()
            assert block.max() < end
            assert len(np.unique(block)) == len(block), "columns of one chunk never meet"


@pytest.mark.parametrize(("k", "nnz"), [(128, 4), (100, 3), (1024, 8), (1009, 1)])
def test_chunks_are_embedded_exactly(k, nnz):
    B = 2 ** reference.chunk_log2(k, nnz)
    S = Sketch(4 * B, k, nnz=nnz, seed=8)
    for c in range(4):
        chunk = np.rint(S[:, c * B : (c + 1) * B].toarray() * math.sqrt(nnz)).astype(int)
        np.testing.assert_array_equal(chunk.T @ chunk, nnz * np.eye(B, dtype=int))


@pytest.mark.parametrize(("k", "nnz"), WHOLE)
def test_group_fills_a_power_of_two_sketch(k, nnz):
    M, B = k // 128, 2 ** reference.chunk_log2(k, nnz)
    assert B * nnz == 128
    for group in (0, 1, 2**40):
        start = group * M * B
        rows, _ = checked_entries(k, nnz, 5, start, start + M * B)
        # Every chunk fills its tile and every tile has one chunk, so each row occurs once.
        np.testing.assert_array_equal(np.sort(rows, axis=None), np.arange(k))


@pytest.mark.parametrize(("k", "nnz"), [(700, 5), (1009, 8), (5000, 1)])
def test_chunks_of_a_group_use_distinct_tiles(k, nnz):
    group = 2 ** reference.log2_floor(reference.count_tiles(k))
    B = 2 ** reference.chunk_log2(k, nnz)
    rows, _ = checked_entries(k, nnz, 5, 0, 3 * group * B)
    _, tiles = tiles_and_chunks(k, nnz, rows, 0)
    for three in tiles[0, ::B].reshape(3, group):
        assert len(set(three.tolist())) == group


@pytest.mark.parametrize(("k", "nnz"), [s for s in SHAPES if s[0] < 10_000])
def test_every_row_is_used(k, nnz):
    # 60 entries are expected in a row. If rows were independent, one of 5000 would stay empty with 5000 e^-60 < 1e-22.
    rows, _ = checked_entries(k, nnz, 9, 0, math.ceil(60 * k / nnz))
    np.testing.assert_array_equal(np.unique(rows), np.arange(k))


@pytest.mark.parametrize(("k", "nnz"), SHAPES)
def test_entries_are_independent_of_width_and_slicing(k, nnz):
    rows, signs = Sketch(400, k, nnz=nnz, seed=1).entries()
    wide = Sketch(LAST, k, nnz=nnz, seed=1)
    for a, b in ((0, 400), (0, 1), (33, 33), (31, 65), (399, 400)):
        for part in (wide.entries(a, b), wide[:, a:b].entries(), wide[:, a:][:, : b - a].entries()):
            np.testing.assert_array_equal(part[0], rows[:, a:b])
            np.testing.assert_array_equal(part[1], signs[:, a:b])


@pytest.mark.parametrize(
    ("k", "most"), [(1, 1), (2, 2), (127, 127), (128, 128), (129, 64), (255, 127), (257, 85), (8_388_480, 128)]
)
def test_max_nnz(k, most):
    assert law.max_nnz(k) == reference.max_nnz(k) == most
    assert Sketch(10, k, nnz=most).nnz == most
    assert Sketch(10, k).nnz == min(4, most)
    for nnz in (most + 1, 1000):
        with pytest.raises(ValueError, match=rf"nnz must be .*\b{most}\b.*\b{nnz}\b"):
            Sketch(10, k, nnz=nnz)


# --------------------------------------------------------------------------------- independence


def chance_bound(coincidences, comparisons, false_alarms=1e-6):
    """A bound on the absolute sum of independent fair signs, exceeded in any comparison with the given probability.

    Hoeffding: P(|sum of n signs| > t) <= 2 exp(-t^2 / 2n), and a union bound over the comparisons.
    """
    return np.sqrt(2 * coincidences * math.log(2 * comparisons / false_alarms))


@pytest.mark.parametrize(("k", "nnz"), [(64, 4), (256, 4), (250, 16)])
def test_signs_of_two_rows_are_independent(k, nnz):
    """False-alarm rate below 1e-6: given the rows, the products of signs are independent and fair.

    A law that used one key for all rows would give equal or empty rows.
    """
    S = np.rint(Sketch(20_000, k, nnz=nnz, seed=17).toarray() * math.sqrt(nnz))
    sums, meetings = S @ S.T, np.abs(S) @ np.abs(S).T
    other = ~np.eye(k, dtype=bool)
    assert (np.abs(sums) <= chance_bound(meetings, k * (k - 1) / 2))[other].all()
    assert meetings[other].sum() == 20_000 * nnz * (nnz - 1)  # every pair of entries of a column was compared
    assert (np.abs(S.sum(1)) <= chance_bound(np.abs(S).sum(1), k)).all()


SEEDS = (0, 1, 2, 2**31, 2**32, 2**32 + 1, 2**63, 2**64 - 1)


@pytest.mark.parametrize(("k", "nnz"), [(128, 8), pytest.param(1024, 4, marks=pytest.mark.exhaustive)])
def test_seeds_are_independent(k, nnz):
    """Two seeds share as many entries as chance predicts, and the signs of these are independent.

    False-alarm rate below 1e-6 for signs (Hoeffding). Shared places: chunks of a group share the keys of their
    tiles, so a group is one observation; its mean lies within 5.5 standard errors of nnz/k of the entries but for
    28 * 3.8e-8 = 1.1e-6 of all runs.
    """
    d, pairs = 2**15, len(SEEDS) * (len(SEEDS) - 1) // 2
    group = k // nnz  # columns of a group of chunks, for k = 128 * 2^a
    matrices = [np.rint(Sketch(d, k, nnz=nnz, seed=s).toarray(np.float32) * math.sqrt(nnz)) for s in SEEDS]
    for a, first in enumerate(matrices):
        for second in matrices[:a]:
            shared = first * second
            places = np.abs(shared).sum(0).reshape(-1, group).sum(1)
            expected = group * nnz * nnz / k
            standard_error = places.std(ddof=1) / math.sqrt(len(places))
            assert standard_error > 0
            assert abs(places.mean() - expected) <= 5.5 * standard_error
            assert abs(shared.sum()) <= chance_bound(places.sum(), pairs)
