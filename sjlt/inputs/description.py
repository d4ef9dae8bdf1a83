"""Validate the description of a sketch, the dict that `Sketch.to_dict` returns."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from ..laws import exact as exact_law
from ..laws import iid as iid_law
from .checks import integer

SHAPE = ("n_features", "n_components")
POSITION = ("seed", "feature_offset")
INDEPENDENT = ("bits", "threshold")


def sketch_arguments(description: Any) -> dict[str, Any]:
    """The keyword arguments with which `Sketch` makes the sketch of a description.

    Raises
    ------
    TypeError
        If the description is not a mapping or a value is not an integer.
    ValueError
        If the law has another version, keys are missing or unknown, or values contradict each other.
    """
    if not isinstance(description, Mapping):
        raise TypeError(f"the description of a sketch must be a dict from Sketch.to_dict(), got {description!r}")
    given = dict(description)
    if "law" not in given:
        raise ValueError(f'the description of a sketch must have the key "law", got {_listed(given)}')
    version = given.pop("law")
    if isinstance(version, bool) or not isinstance(version, Integral) or version != exact_law.VERSION:
        raise ValueError(
            f"this version of sjlt supports sketch law {exact_law.VERSION}, but the description has {version!r}"
        )
    independent = "nnz" not in given and not given.keys().isdisjoint((*INDEPENDENT, "density"))
    entries = INDEPENDENT if independent else ("nnz",)
    expected = {*SHAPE, *entries, *POSITION}
    optional = {"density"} if independent else {"stacks"}
    missing, unknown = expected - given.keys(), given.keys() - expected - optional
    if missing or unknown:
        problems = [f"lacks {_listed(missing)}"] if missing else []
        problems += [f"also has {_listed(unknown)}"] if unknown else []
        raise ValueError(
            f"the description of a sketch must have {_listed(['law', *sorted(expected)])}; "
            f"this one {' and '.join(problems)}"
        )
    density = given.pop("density", None)
    integers = {name: integer(name, value, -(2**63), 2**64 - 1) for name, value in given.items()}
    if not independent:
        return integers
    lanes = iid_law.checked(integers.pop("bits"), integers.pop("threshold"))
    if density is not None and not (isinstance(density, Real) and density == lanes.density):
        raise ValueError(f"density {density!r} contradicts {lanes}, which gives {lanes.density}")
    return {**integers, "density": lanes.density}


def _listed(keys: Any) -> str:
    names = sorted(repr(str(key)) for key in keys)
    return f"the key{'s' * (len(names) > 1)} {', '.join(names)}" if names else "no keys"
