"""A record of which parts of the data have been added to a sum."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator

from .inputs.checks import integer


class Ledger:
    """A set of integers, stored as half-open ranges, to which each integer may be added once.

    An addition to a sum of sketches cannot be undone, so a retried update must be rejected instead of added again.

    Parameters
    ----------
    ranges : iterable of (start, stop), optional
        As for `add`.

    Examples
    --------
    >>> seen = Ledger()
    >>> seen.add(0, 10)
    >>> seen.add(20, 30)
    >>> seen.add(10, 20)
    >>> list(seen), seen.covers(0, 30)
    ([(0, 30)], True)
    """

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()):
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._is_current = True  # False while the sums and the ledger are updated
        for start, stop in ranges:
            self.add(start, stop)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """The ranges (start, stop) in ascending order; adjacent ranges are merged."""
        return iter(zip(self._starts, self._stops, strict=True))

    def __len__(self) -> int:
        """The number of integers in the ranges."""
        return sum(stop - start for start, stop in self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"Ledger({list(self)})"

    def check(self, start: int, stop: int) -> None:
        """Raise ValueError unless 0 <= start <= stop and none of start, ..., stop - 1 was added before.

        Raise TypeError if start or stop is not an integer.
        """
        start, stop = _integers(start, stop)
        if not 0 <= start <= stop:
            raise ValueError(f"a range needs 0 <= start <= stop, got {start} to {stop}")
        i = bisect_right(self._stops, start)
        if start < stop and i < len(self._starts) and self._starts[i] < stop:
            seen = max(start, self._starts[i]), min(stop, self._stops[i])
            raise ValueError(
                f"{start} to {stop} (exclusive) overlaps {seen[0]} to {seen[1]}, which was added before: adding it "
                "twice would count it twice"
            )

    def add(self, start: int, stop: int) -> None:
        """Add start, ..., stop - 1; an empty range adds nothing.

        Raises
        ------
        TypeError, ValueError
            As in `check`; then nothing is added.
        """
        start, stop = _integers(start, stop)
        self.check(start, stop)
        if start == stop:
            return
        i = bisect_right(self._stops, start - 1)  # the first range with stop >= start
        joins_left = i < len(self._stops) and self._stops[i] == start
        j = i + joins_left
        joins_right = j < len(self._starts) and self._starts[j] == stop
        if joins_left:
            start = self._starts[i]
        if joins_right:
            stop = self._stops[j]
        self._starts[i : j + joins_right] = [start]
        self._stops[i : j + joins_right] = [stop]

    def merge(self, other: Ledger) -> None:
        """Add all ranges of another ledger, or raise ValueError and add none."""
        for start, stop in other:
            self.check(start, stop)
        for start, stop in list(other):
            self.add(start, stop)

    @contextlib.contextmanager
    def adding(self, ranges: Iterable[tuple[int, int]]) -> Iterator[None]:
        """A context in which to add the data of these ranges, which `check` has accepted, to the sums.

        An exception inside may leave the sums partly updated, so `check_current` raises from then on.
        """
        self._is_current = False  # and stays so if an exception interrupts the lines below
        for start, stop in ranges:
            self.add(start, stop)
        yield
        self._is_current = True

    def check_current(self) -> None:
        """Raise RuntimeError if an exception interrupted a context of `adding`."""
        if not self._is_current:
            raise RuntimeError("an update was interrupted while it was being added: return to the last saved state")

    def covers(self, start: int, stop: int) -> bool:
        """Whether start, ..., stop - 1 were all added."""
        return start >= stop or any(a <= start and stop <= b for a, b in self)

    def missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The ranges within start, ..., stop - 1 that were not added."""
        gaps, position = [], start
        for a, b in self:
            if a > position and position < stop:
                gaps.append((position, min(a, stop)))
            position = max(position, b)
        return gaps if position >= stop else [*gaps, (position, stop)]


def _integers(start: int, stop: int) -> tuple[int, int]:
    low, high = -(2**63), 2**63
    return integer("the start of a range", start, low, high), integer("the end of a range", stop, low, high)
