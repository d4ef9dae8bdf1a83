"""Checks of arguments that several callables take."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from ..laws import exact as law
from ..laws import iid as iid_law


def integer(name: str, value: Any, low: int, high: int, condition: str = "") -> int:
    """`value` as an int from `low` to `high`; else TypeError or ValueError, with the numbers."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an integer, got the bool {value}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}") from None
    if not low <= number <= high:
        raise ValueError(f"{name} must be from {low} to {high}{condition}, got {number}")
    return number


def signed(seed: int) -> int:
    """A seed, -2^63 <= seed < 2^64, as the signed number of 64 bits that torch and Triton take it for."""
    return seed - 2**64 if seed >= 2**63 else seed


def nnz_or_lanes(nnz: Any, density: Any, n_features: int, n_components: int) -> tuple[Any, iid_law.Lanes | None]:
    """(nnz, None) for a sketch of exactly nnz nonzeros a column, (None, lanes) for independent entries."""
    auto = isinstance(nnz, str) and nnz == "auto"
    given = not auto and nnz is not None
    if density is None:
        most = law.max_nnz(n_components)
        return min(4, most) if auto else integer("nnz", nnz, 1, most, f" for n_components = {n_components}"), None
    if given:
        raise ValueError(f"nnz and density exclude each other, got nnz={nnz!r} and density={density!r}")
    return None, iid_law.lanes_of(density, n_features)
