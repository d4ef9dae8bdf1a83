"""The inverses of the law's functions: which chunk touches a tile, and which of its columns hits a row."""

import numpy as np
import pytest
import reference
from test_law import words

from sjlt.laws import exact as law
from sjlt.laws.philox import define


@pytest.fixture(scope="module")
def law_of_arrays():
    return define(law.FUNCTIONS, lambda f: f, np.uint64)


def test_inverses_of_odd_numbers(law_of_arrays):
    a = np.arange(1, 2**17, 2, dtype=np.uint64)
    np.testing.assert_array_equal((a * law_of_arrays.odd_inverse(a)) % np.uint64(2**16), 1)


@pytest.mark.parametrize("p", range(8))
def test_unspread_inverts_spread(p, law_of_arrays):
    i = np.arange(2**p, dtype=np.uint64)
    for n in {2**p, 2**p + 1, 3 * 2**p // 2, 2 ** (p + 1) - 1, 2 ** (p + 1), 3 * 2**p + 1}:
        every = np.arange(n, dtype=np.uint64)
        for theta in {0, 1 % n, n // 2, n - 1}:
            size = tuple(map(np.uint64, (n, theta, p)))
            taken = law_of_arrays.scale_index(i, *size)
            assert (np.diff(taken.astype(int)) > 0).all()
            assert taken.max() < n
            np.testing.assert_array_equal(law_of_arrays.unscale_index(taken, *size), i)
            free = np.setdiff1d(every, taken)
            found = law_of_arrays.unscale_index(free, *size)
            assert not (law_of_arrays.scale_index(found, *size) == free).any(), "a free row passes for a taken one"


@pytest.mark.parametrize("k", [1, 128, 129, 300, 384, 700, 1024, 1100, 5000, 12_900, 8_388_480])
def test_tile_place_finds_the_chunk_of_a_tile(k, law_of_arrays):
    n_tiles, pm = reference.count_tiles(k), reference.log2_floor(reference.count_tiles(k))
    tiles, places = np.arange(n_tiles, dtype=np.uint64), np.arange(2**pm, dtype=np.uint64)
    for stack, group in enumerate((0, 1, 2**32 - 1, 2**32, (2**63 - 1) >> pm)):
        for seed in (0, 2**64 - 1, 12_345_678_901_234_567):
            fixed = tuple(map(np.uint64, (n_tiles, pm, seed % 2**32, seed >> 32, stack)))
            touched = law_of_arrays.chunk_tile((np.uint64(group) << np.uint64(pm)) + places, *fixed)
            assert touched[-1] == reference.tile_of_chunk(k, seed, (group << pm) + 2**pm - 1, stack)
            place, found = law_of_arrays.tile_place(tiles, np.uint64(group), *fixed)
            np.testing.assert_array_equal(np.flatnonzero(found), np.sort(touched))
            np.testing.assert_array_equal(place[touched.astype(int)], places)


@pytest.mark.parametrize("p", range(8))
def test_inverses_find_the_place_of_a_row(p, law_of_arrays):
    places = np.arange(2**p, dtype=np.uint64)
    for b in {2**p, min(128, 2**p + 1), min(128, 3 * 2**p // 2), min(128, 2 ** (p + 1) - 1)}:
        rows = np.arange(b, dtype=np.uint64)
        for w in words(27):
            fixed = tuple(map(np.uint64, (w, b, p)))
            taken = law_of_arrays.row_in_sub_block(places, *fixed)
            assert len(np.unique(taken)) == 2**p
            assert taken.max() < b
            size = np.uint64(b), law_of_arrays.row_theta(*fixed[:2]), np.uint64(p)
            slot = law_of_arrays.unscale_index(rows, *size)
            found = law_of_arrays.scale_index(slot, *size) == rows
            keys = (np.uint64(w >> shift) for shift in (0, 8, 16, 24))
            place = law_of_arrays.beta_inverse(slot, *keys, np.uint64(p))
            np.testing.assert_array_equal(np.flatnonzero(found), np.sort(taken))
            np.testing.assert_array_equal(place[taken.astype(int)], places)


@pytest.mark.parametrize("rows", [1, 2, 3, 64, 100, 101, 127, 128])
def test_sub_block_of_row(rows, law_of_arrays):
    row = np.arange(rows, dtype=np.uint64)
    for s in range(1, rows + 1):
        starts = [t * rows // s for t in range(s)]
        expected = np.searchsorted(starts, np.arange(rows), side="right") - 1
        t = law_of_arrays.sub_block_of_row(row, np.uint64(s), np.uint64(rows))
        np.testing.assert_array_equal(t, expected)
