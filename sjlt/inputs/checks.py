"""Validation of arguments that several public functions share."""

from __future__ import annotations

import numbers
import operator
from typing import Any

import numpy as np

from ..laws import exact as exact_law
from ..laws import iid as iid_law


def integer(name: str, value: Any, low: int, high: int, condition: str = "") -> int:
    """`value` as an int from `low` to `high`; otherwise raise a TypeError or ValueError that shows it."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an integer, got the bool {value}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}") from None
    if not low <= number <= high:
        raise ValueError(f"{name} must be from {low} to {high}{condition}, got {number}")
    return number


def flag(name: str, value: Any) -> bool:
    """`value` as a bool; otherwise raise a TypeError that shows it."""
    if value is True or value is False:
        return value
    if not isinstance(value, np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r} of type {type(value).__name__}")
    return bool(value)


def below_one(name: str, value: Any) -> float:
    """`value` as a float in [0, 1); otherwise raise a TypeError or ValueError that shows it."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    number = float(value)
    if not 0 <= number < 1:
        raise ValueError(f"{name} must be at least 0 and less than 1, got {value}")
    return number


def stack_count(stacks: Any, n_components: int) -> int:
    """`stacks` as an int that divides n_components."""
    count = integer("stacks", stacks, 1, n_components, f" for n_components = {n_components}")
    if n_components % count:
        raise ValueError(f"stacks must divide n_components, got stacks = {count} and n_components = {n_components}")
    return count


def seed_number(seed: Any) -> int:
    """`seed` as an int, -2^63 <= seed < 2^64."""
    return integer("seed", seed, -(2**63), 2**64 - 1)


def signed(seed: int) -> int:
    """A seed, -2^63 <= seed < 2^64, as the signed 64-bit integer with the same bits, as torch and Triton require."""
    return seed - 2**64 if seed >= 2**63 else seed


def nnz_or_lanes(
    nnz: Any, density: Any, n_features: int, n_components: int, stacks: int = 1
) -> tuple[Any, iid_law.Lanes | None]:
    """(nnz, None) for exactly nnz nonzeros per column, (None, lanes) for independent entries."""
    auto = isinstance(nnz, str) and nnz == "auto"
    if density is None:
        largest = stacks * exact_law.max_nnz(n_components // stacks)
        if auto:
            return min(-(-4 // stacks) * stacks, largest), None
        if isinstance(nnz, str):
            raise TypeError(f'nnz must be an integer or "auto", got {nnz!r}')
        in_stacks = f" and stacks = {stacks}" if stacks > 1 else ""
        nnz = integer("nnz", nnz, 1, largest, f" for n_components = {n_components}{in_stacks}")
        if nnz % stacks:
            raise ValueError(f"stacks must divide nnz, got stacks = {stacks} and nnz = {nnz}")
        return nnz, None
    if not auto and nnz is not None:
        raise ValueError(f"nnz and density exclude each other, got nnz={nnz!r} and density={density!r}")
    if stacks > 1:
        raise ValueError(f"stacks and density exclude each other, got stacks={stacks} and density={density!r}")
    return None, iid_law.lanes_of(density, n_features)
