"""The ledger is a set of integers that refuses to add one twice."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sjlt.ledger import Ledger

ranges = st.tuples(st.integers(0, 40), st.integers(0, 8)).map(lambda r: (r[0], r[0] + r[1]))


@given(st.lists(ranges, max_size=12))
def test_behaves_like_a_set(updates):
    ledger, held = Ledger(), set()
    for start, stop in updates:
        new = set(range(start, stop))
        if new & held:
            before = list(ledger)
            with pytest.raises(ValueError, match="added before"):
                ledger.add(start, stop)
            assert list(ledger) == before
        else:
            ledger.add(start, stop)
            held |= new
            assert ledger.covers(start, stop)
        assert len(ledger) == len(held)
        assert {i for a, b in ledger for i in range(a, b)} == held
        assert all(b < c for (_, b), (c, _) in zip(ledger, list(ledger)[1:], strict=False))  # adjacent ranges merge
        assert {i for a, b in ledger.missing(0, 50) for i in range(a, b)} == set(range(50)) - held


@given(st.lists(ranges, max_size=6), st.lists(ranges, max_size=6))
def test_merge(left, right):
    def made(updates):
        ledger = Ledger()
        for update in updates:
            try:
                ledger.add(*update)
            except ValueError:
                continue
        return ledger

    a, b = made(left), made(right)
    held = [{i for x, y in ledger for i in range(x, y)} for ledger in (a, b)]
    if held[0] & held[1]:
        before = list(a)
        with pytest.raises(ValueError, match="added before"):
            a.merge(b)
        assert list(a) == before
    else:
        a.merge(b)
        assert a == Ledger(a)
        assert {i for x, y in a for i in range(x, y)} == held[0] | held[1]


@pytest.mark.parametrize("bad", [(-1, 3), (5, 4)])
def test_invalid_ranges(bad):
    with pytest.raises(ValueError, match="0 <= start <= stop"):
        Ledger().add(*bad)


@pytest.mark.parametrize("bad", [(0, 10.5), (0.0, 10), (False, 10), ("0", "10"), (None, 3)])
def test_non_integer_ranges(bad):
    ledger = Ledger()
    with pytest.raises(TypeError, match="must be an integer"):
        ledger.add(*bad)
    with pytest.raises(TypeError, match="must be an integer"):
        Ledger([bad])
    assert list(ledger) == []


def test_ranges_are_stored_as_plain_integers():
    ((start, stop),) = Ledger([(np.int64(3), np.uint8(7))])
    assert (type(start), type(stop)) == (int, int)
