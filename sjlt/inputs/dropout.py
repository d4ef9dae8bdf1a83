"""Validation of dropout's arguments, for both arrays and tensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..laws.dropout import WIDTHS, Rule, scale, threshold
from . import checks
from .containers import elements_overlap, is_tensor
from .dropout_axes import last_index

LAST = 2**63 - 1  # the largest allowed index of an element


class DropoutArguments(NamedTuple):
    """The validated arguments of one call.

    Attributes
    ----------
    threshold : int
        An element is dropped if its random bits are below this: 0 drops none, 2^bits drops all.
    seeds : int64 array or tensor on the device of the data, or None
        One seed per row, or a 0-d array with one seed.
    seed : int
        The seed as a signed 64-bit integer, if `seeds` is None.
    steps : array or tensor with one integer, on the device of the data, or None
    step : int
        The step, if `steps` is None.
    offset : int
        The index of the first element.
    row_stride : int or None
        The difference between the indices of consecutive rows. None means the length of the last axis.
    bits : int
        Random bits per element.
    """

    threshold: int
    seeds: Any
    seed: int
    steps: Any
    step: int
    offset: int
    row_stride: int | None
    bits: int


def checked_arguments(
    x: Any, shape: Sequence[int], p: Any, seed: Any, step: Any, offset: Any, row_stride: Any, bits: Any
) -> DropoutArguments:
    """Validate the arguments of a call on x of `shape`. seed and step may be arrays, or tensors on the device of x."""
    bits = check_bits(bits)
    t = _checked_threshold(_probability(p), bits)
    seeds, steps = None, None
    if type(seed) is not int and (isinstance(seed, np.ndarray) or is_tensor(seed)):
        seeds, seed = _checked_seeds(x, shape, seed), 0
    else:
        seed = checks.signed(_integer("seed", seed, -(2**63), 2**64 - 1))
    if type(step) is not int and (isinstance(step, np.ndarray) or is_tensor(step)):
        steps, step = _checked_step(x, step), 0
    else:
        step = _integer("step", step, 0, 2**32 - 1)
    offset = _integer("offset", offset, 0, LAST)
    if row_stride is not None:
        row_stride = _integer("row_stride", row_stride, 0, LAST)
    if offset or row_stride is not None:  # otherwise no tensor that exists is large enough to exceed the range
        _check_last(shape, 0 if seeds is None else seeds.ndim, offset, row_stride)
    return DropoutArguments(t, seeds, seed, steps, step, offset, row_stride, bits)


def _check_last(shape: Sequence[int], seeds_ndim: int, offset: int, row_stride: int | None) -> None:
    """Raise ValueError if the index of the last element exceeds `LAST`."""
    if row_stride is None and not seeds_ndim:
        last = prod(shape) - 1
    else:
        row_step = row_stride if row_stride is not None else shape[-1] if len(shape) else 1
        last = last_index(shape, row_step, seeds_ndim) if 0 not in shape else 0
    if offset + last > LAST:
        given = f"offset {offset}" if row_stride is None else f"offset {offset} with row_stride {row_stride}"
        raise ValueError(
            f"{given} is out of range: the last element of shape {tuple(shape)} would have the index "
            f"{offset + last}, and the largest is 2^63 - 1 = {LAST}"
        )


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if type(value) is int and low <= value <= high:  # checks.integer would make torch.compile specialise on the value
        return value
    return checks.integer(name, value, low, high)


def check_bits(bits: Any) -> int:
    """`bits` as an int, 8, 16 or 32."""
    if type(bits) is not int and isinstance(bits, np.integer):
        bits = int(bits)
    if type(bits) is not int or bits not in WIDTHS:
        raise ValueError(f"bits must be 8, 16 or 32, got {bits!r}")
    return bits


def check_p(p: Any, bits: int) -> float:
    """`p` as a float; ValueError if it would round to 0 or 1 with `bits` (8, 16 or 32) random bits."""
    p = _probability(p)
    _checked_threshold(p, bits)
    return p  # type: ignore[no-any-return]


def _checked_threshold(p: float, bits: int) -> int:
    """The threshold for p; ValueError if p, which is neither, would round to 0 or 1."""
    t = threshold(p, bits)
    if 0 < p < 1 and not 0 < t < 2**bits:
        wider = next((b for b in WIDTHS if 0 < threshold(p, b) < 2**b), None)
        advice = f"use bits={wider}" if wider else f"even bits=32 gives only multiples of {2.0**-32:.3g}"
        raise ValueError(
            f"p = {p} is too close to {round(p)} for bits={bits}: it would be rounded to {round(p)}, a multiple of "
            f"{2.0**-bits:.3g}; {advice}"
        )
    return t


def _probability(p: Any) -> float:
    if type(p) is not float:
        several = is_tensor(p) or (isinstance(p, np.ndarray) and p.ndim > 0)
        if several or isinstance(p, (bool, np.bool_, str)) or not hasattr(p, "__float__"):
            raise TypeError(f"p must be a number, got {p!r} of type {type(p).__name__}")
        p = float(p)
    if not 0 <= p <= 1:
        raise ValueError(f"p must be from 0 to 1, got {p}")
    return p  # type: ignore[no-any-return]


def factor(p: Any, bits: int | None) -> float:
    """The scale of kept elements, or 0 if p is 1."""
    if bits is not None:
        bits = check_bits(bits)
    p = _probability(p)
    if bits is None:
        return 0.0 if p == 1 else 1 / (1 - p)
    t = _checked_threshold(p, bits)
    return 0.0 if p == 1 else scale(t, bits)


def _checked_seeds(x: Any, shape: Sequence[int], seeds: Any) -> Any:
    """`seeds`, if they have an allowed shape and dtype and are on the device of x."""
    seeds = _on_device_of(x, "seed", seeds)
    if str(seeds.dtype).removeprefix("torch.") != "int64":
        raise TypeError(f"an array of seeds must have dtype int64, got {seeds.dtype}")
    if seeds.ndim == 0:
        return seeds
    allowed = [(), tuple(shape[:1]), tuple(shape[:-1])] if len(shape) else [()]
    if tuple(seeds.shape) not in allowed:
        raise ValueError(
            f"seeds for x of shape {tuple(shape)} must have the shape {' or '.join(map(str, dict.fromkeys(allowed)))}, "
            f"got {tuple(seeds.shape)}"
        )
    return seeds


def _checked_step(x: Any, step: Any) -> Any:
    step = _on_device_of(x, "step", step)
    name = str(step.dtype).removeprefix("torch.")
    if not name.lstrip("u").startswith("int"):
        raise TypeError(f"step must be an integer, got {name}")
    if step.ndim and prod(step.shape) != 1:
        raise ValueError(f"step must be one integer, got shape {tuple(step.shape)}")
    return step


def _on_device_of(x: Any, name: str, value: Any) -> Any:
    """`value` as an array if x is an array or None; otherwise it must be a tensor on the device of the tensor x."""
    if x is None or isinstance(x, np.ndarray):
        if is_tensor(value):
            raise TypeError(f"{name} is a torch tensor, but x is an array: pass {name}.numpy()")
        return np.asarray(value)
    if type(value) is not type(x) and not is_tensor(value):
        raise TypeError(f"{name} must be an integer or a torch tensor, like x, got {type(value).__name__}")
    if value.device != x.device:
        raise ValueError(f"{name} must be on {x.device}, like x, got {value.device}: move it, or pass an int")
    return value


def check_writable(x: Any, strides: Sequence[int], size: int = 1) -> None:
    """Raise ValueError if elements of x share memory. `size` is the size of an element, in the unit of the strides."""
    if elements_overlap(x.shape, strides, size):
        raise ValueError(
            f"x of shape {tuple(x.shape)} has elements that share memory (strides {tuple(strides)}): inplace=True "
            "would drop them several times"
        )


def rule_of(arguments: DropoutArguments) -> tuple[Rule | None, int]:
    """(the rule for the backends, the threshold). The rule is None if no or all elements are dropped."""
    t, seeds, seed, steps, step, offset, row_stride, bits = arguments
    if t in (0, 2**bits):
        return None, t
    return Rule(bits, t, scale(t, bits), seed, step, offset, row_stride, seeds, steps), t
