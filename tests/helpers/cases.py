"""Parameter combinations: a covering subset in the default run, the full product under the `exhaustive` marker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from heapq import heapify, heapreplace
from itertools import combinations, product
from operator import or_
from typing import Any

import pytest

Case = tuple[Any, ...]

leaves_out_exhaustive = False  # set by conftest.py: tens of thousands of cases then need not be collected


def all_pairs(
    axes: Sequence[Sequence[Any]], allowed: Callable[..., bool] | None = None
) -> tuple[list[Case], list[Case]]:
    """Return (cases that together contain every possible pair of values, the remaining cases of the full product).

    Greedy and deterministic: each step takes the first case with the most uncovered pairs.
    """
    indices = [range(len(axis)) for axis in axes]
    cases = [c for c in product(*indices) if allowed is None or allowed(*(axes[a][i] for a, i in enumerate(c)))]
    numbers: dict[Any, int] = {}  # of the pairs of values: sets of pairs are the bits of an integer

    def pairs(c: Case) -> int:
        found = [((a, c[a]), (b, c[b])) for a, b in combinations(range(len(axes)), 2)] or [c]
        return sum(1 << numbers.setdefault(pair, len(numbers)) for pair in found)

    pairs_of = [pairs(c) for c in cases]
    missing = reduce(or_, pairs_of, 0)
    # A case covers fewer uncovered pairs with every step: only those that seemed best need be counted again.
    order = [(-p.bit_count(), i) for i, p in enumerate(pairs_of)]
    heapify(order)
    chosen: set[Case] = set()
    while missing:
        seemed, i = order[0]
        uncovered = (pairs_of[i] & missing).bit_count()
        if uncovered < -seemed:
            heapreplace(order, (-uncovered, i))
            continue
        chosen.add(cases[i])
        missing &= ~pairs_of[i]

    def values(c: Case) -> Case:
        return tuple(axes[a][i] for a, i in enumerate(c))

    return [values(c) for c in cases if c in chosen], [values(c) for c in cases if c not in chosen]


def pairwise(allowed: Callable[..., bool] | None = None, /, **axes: Sequence[Any]) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` over the product of `axes`.

    The default run covers every pair of values; the other cases are marked `exhaustive`. If `allowed` is given, only
    combinations for which it returns True exist. Values may be `pytest.param` objects.
    """
    return _parametrized(all_pairs, allowed, axes)


def each_value(allowed: Callable[..., bool] | None = None, /, **axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Like `pairwise`, but the default run only covers every value of each axis.

    For parameters that do not interact.
    """
    return _parametrized(_all_values, allowed, axes)


def each_value_then_pairs(allowed: Callable[..., bool] | None = None, /, **axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Like `each_value`, but `exhaustive` adds only the cases of `pairwise`'s default run, not the full product.

    For kernels in Triton's interpreter, where each case takes seconds.
    """
    return _parametrized(_values_and_pairs, allowed, axes)


def _values_and_pairs(
    axes: Sequence[Sequence[Any]], allowed: Callable[..., bool] | None = None
) -> tuple[list[Case], list[Case]]:
    """Return (cases that together contain every possible value, further cases that contain every possible pair)."""
    few, _ = _all_values(axes, allowed)
    pairs, _ = all_pairs(axes, allowed)
    return few, [case for case in pairs if case not in few]


def _all_values(
    axes: Sequence[Sequence[Any]], allowed: Callable[..., bool] | None = None
) -> tuple[list[Case], list[Case]]:
    """Return (cases that together contain every possible value, the remaining cases of the full product)."""
    cases = [c for c in product(*axes) if allowed is None or allowed(*c)]
    missing = {(a, value) for c in cases for a, value in enumerate(c)}
    chosen: set[Case] = set()
    while missing:
        best = max(cases, key=lambda c: sum(pair in missing for pair in enumerate(c)))
        chosen.add(best)
        missing -= set(enumerate(best))
    return [c for c in cases if c in chosen], [c for c in cases if c not in chosen]


def exhaustive_except(default: Sequence[Any], values: Iterable[Any]) -> list[Any]:
    """`values` for `pytest.mark.parametrize`, all marked `exhaustive` except those in `default`."""
    return [v if v in default else pytest.param(v, marks=pytest.mark.exhaustive) for v in values]


def _parametrized(
    cover: Callable[..., tuple[list[Case], list[Case]]],
    allowed: Callable[..., bool] | None,
    axes: Mapping[str, Sequence[Any]],
) -> pytest.MarkDecorator:
    plain = [[v.values[0] if _is_param(v) else v for v in axis] for axis in axes.values()]
    marks = [{i: v.marks for i, v in enumerate(axis) if _is_param(v)} for axis in axes.values()]
    places = [range(len(axis)) for axis in plain]

    def values(case: Case) -> list[Any]:
        return [plain[a][i] for a, i in enumerate(case)]

    few, rest = cover(places, None if allowed is None else lambda *case: allowed(*values(case)))
    params = []
    if leaves_out_exhaustive:
        rest = []
    for cases, extra in ((few, ()), (rest, (pytest.mark.exhaustive,))):
        for case in cases:
            own = [mark for a, i in enumerate(case) for mark in marks[a].get(i, ())]
            params.append(pytest.param(*values(case), marks=(*own, *extra)))
    return pytest.mark.parametrize(",".join(axes), params)


def _is_param(value: Any) -> bool:
    return hasattr(value, "marks") and hasattr(value, "values")
