"""Projections summed over blocks of features, which may arrive in any order, be retried, and be saved to disk."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .inputs.checks import integer
from .inputs.containers import is_tensor, refuse_foreign
from .ledger import Ledger
from .sketch import Sketch

if TYPE_CHECKING:
    from os import PathLike

FORMAT = 1  # version of `state_dict` and of files


class Accumulator:
    """The projection X S' of data whose features arrive in blocks, and a record of the features added so far.

    Blocks may arrive in any order and at several workers, whose accumulators are then merged. Adding a feature twice
    raises an error, because it would count twice. The same updates and merges in the same order give bitwise equal
    sums.

    Parameters
    ----------
    S : Sketch
    shape : sequence of int, default ()
        The leading shape of X: () for one vector, (n,) for n vectors. To accumulate S A, pass transposed blocks
        of A, ``A[a:b].T``; any strides are accepted.
    dtype : "float32" or "float64" (also as a NumPy or torch dtype), default "float64"
        Dtype of the sum. Blocks may have any dtype that `Sketch.project` accepts.
    device : str or torch.device, optional
        Device of the sum and of the blocks, which are then tensors. By default they are arrays.

    Attributes
    ----------
    sketch, shape, dtype : as given
    seen : Ledger, the ranges of features added

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong type or dtype.
    RuntimeError
        By all methods, after an exception has interrupted an update or a merge: return to the last saved state.

    Examples
    --------
    >>> import numpy as np, sjlt
    >>> S, X = sjlt.Sketch(1000, 64, seed=1), np.random.default_rng(0).normal(size=(3, 1000))
    >>> first, second = sjlt.Accumulator(S, (3,)), sjlt.Accumulator(S, (3,))
    >>> second.update(600, X[:, 600:])
    >>> first.update(0, X[:, :600])
    >>> first.merge(second)
    >>> bool(np.allclose(first.sum, X @ S.T))
    True
    >>> first.update(500, X[:, 500:700])
    Traceback (most recent call last):
    ValueError: 500 to 700 (exclusive) overlaps 500 to 700, which was added before: adding it twice would count it twice
    """

    def __init__(self, S: Sketch, shape: Sequence[int] = (), *, dtype: Any = "float64", device: Any = None) -> None:
        if not isinstance(S, Sketch):
            raise TypeError(f"an Accumulator needs a Sketch, got {type(S).__name__}")
        self.sketch = S
        if not isinstance(shape, Iterable):
            raise TypeError(f"shape must be a sequence of integers, such as ({shape!r},), got {shape!r}")
        self.shape = tuple(integer(f"shape[{i}]", n, 0, 2**63 - 1) for i, n in enumerate(shape))
        self.dtype = str(dtype).removeprefix("torch.") if type(dtype).__module__ == "torch" else np.dtype(dtype).name
        if self.dtype not in ("float32", "float64"):
            raise TypeError(f"the sum must be float32 or float64, got {self.dtype}")
        self.seen = Ledger()
        self._sum = _zeros((*self.shape, S.n_components), self.dtype, device)

    def __repr__(self) -> str:
        return f"Accumulator({self.sketch!r}, shape={self.shape}, seen={len(self.seen)} of {self.sketch.n_features})"

    @property
    def sum(self) -> Any:
        """A copy of the sum so far, of shape (*shape, n_components)."""
        self.seen.check_current()
        return self._sum.clone() if is_tensor(self._sum) else self._sum.copy()

    def missing(self) -> list[tuple[int, int]]:
        """The ranges (start, stop) of features not added yet; empty when the sum is complete."""
        return self.seen.missing(0, self.sketch.n_features)

    def update(self, offset: int, block: Any) -> None:
        """Add a block of consecutive features.

        Parameters
        ----------
        offset : int >= 0
            The index of the block's first feature.
        block : {ndarray, CSR or CSC matrix, tensor on the sum's device} of shape (*shape, features)

        Raises
        ------
        TypeError, ValueError
            If a feature was added before (the message shows both ranges) or is beyond n_features, or if the block has
            another shape, container or device. The accumulator is then unchanged.
        """
        self.seen.check_current()
        if is_tensor(block) != is_tensor(self._sum):
            kind = "tensors" if is_tensor(self._sum) else "arrays or SciPy matrices (tensors with device=)"
            raise TypeError(f"this accumulator sums {kind}, got {type(block).__name__}")
        if is_tensor(block):
            if block.device != self._sum.device:
                raise ValueError(f"the sum is on {self._sum.device}, the block on {block.device}")
            block = block.detach()  # sums are not differentiable
        size: Any = getattr(block, "shape", ())
        if len(size) != len(self.shape) + 1 or tuple(size[:-1]) != self.shape:
            wanted = ", ".join(map(str, (*self.shape, "features")))
            raise ValueError(f"a block must have shape ({wanted}), got {tuple(size)}")
        start = integer("offset", offset, 0, self.sketch.n_features)
        stop = start + int(size[-1])
        if stop > self.sketch.n_features:
            raise ValueError(f"features {start} to {stop} (exclusive) go beyond n_features = {self.sketch.n_features}")
        self.seen.check(start, stop)
        part = _like(self._sum)
        self.sketch[:, start:stop].project(block, out=part)
        self._add(part, [(start, stop)])

    def merge(self, other: Accumulator) -> None:
        """Add the sum and the features of another accumulator with the same sketch.

        Raises
        ------
        TypeError, ValueError
            If `other` has another sketch, shape or dtype, or if a feature was added to both. This accumulator is then
            unchanged.
        """
        if not isinstance(other, Accumulator):
            raise TypeError(f"an Accumulator merges with another, got {type(other).__name__}")
        self.seen.check_current()
        other.seen.check_current()
        mine, theirs = ((a.sketch, a.shape, a.dtype, is_tensor(a._sum)) for a in (self, other))
        if mine != theirs:
            raise ValueError(f"accumulators differ in (sketch, shape, dtype, is a tensor): {mine} and {theirs}")
        for start, stop in other.seen:
            self.seen.check(start, stop)
        self._add(other._sum.to(self._sum.device) if is_tensor(self._sum) else other._sum, list(other.seen))

    def _add(self, part: Any, ranges: Iterable[tuple[int, int]]) -> None:
        with self.seen.adding(ranges):
            self._sum += part

    # --------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the sum and everything else that `from_state_dict` needs to make an equal accumulator."""
        return {"sum": self.sum, **self._description()}

    def _description(self) -> dict[str, Any]:
        self.seen.check_current()
        ranges = [[start, stop] for start, stop in self.seen]
        return {"format": FORMAT, "sketch": self.sketch.to_dict(), "shape": list(self.shape), "ranges": ranges}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Accumulator:
        """Make an accumulator from a `state_dict`; ValueError for anything else."""
        try:
            if integer("format", state["format"], 0, 2**63 - 1) != FORMAT:
                raise ValueError(f"format {state['format']}, but this version of sjlt supports {FORMAT}")
            total, shape = _checked_sum(state["sum"]), tuple(state["shape"])
            S = Sketch.from_dict(state["sketch"])
            if tuple(total.shape) != (*shape, S.n_components):
                raise ValueError(f"a sum of shape {tuple(total.shape)} for vectors of shape {shape} and {S!r}")
            accumulator = cls(S, shape, dtype=total.dtype, device=total.device if is_tensor(total) else None)
            accumulator.seen = Ledger((start, stop) for start, stop in state["ranges"])
            if any(stop > S.n_features for _, stop in accumulator.seen):
                raise ValueError(f"ranges {list(accumulator.seen)} exceed n_features = {S.n_features}")
        except (KeyError, TypeError, AttributeError, ValueError) as e:
            raise ValueError(f"not the state of an Accumulator: {type(e).__name__}: {e}") from None
        accumulator._sum = total.detach().clone() if is_tensor(total) else np.array(total, accumulator.dtype)
        return accumulator

    def save(self, path: str | PathLike[str]) -> None:
        """Write the accumulator to a file, atomically: even after a crash, it has this state or the previous one.

        If the path is a symbolic link, the file that it names is replaced.
        """
        from .files.atomic import write_whole

        total = self._sum.cpu().numpy() if is_tensor(self._sum) else self._sum
        header = np.frombuffer(json.dumps(self._description()).encode(), np.uint8)
        content = io.BytesIO()
        np.savez(content, header=header, sum=total)
        write_whole(Path(path).resolve(), content.getvalue(), replace=True)  # not a link to the file

    @classmethod
    def load(cls, path: str | PathLike[str], *, device: Any = None) -> Accumulator:
        """Read an accumulator from a file written by `save`. It sums tensors on `device` if given, else arrays.

        Raises
        ------
        OSError, ValueError
            If the file cannot be read or was not written by `save`.
        """
        content = Path(path).read_bytes()
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                state = {**json.loads(arrays["header"].tobytes()), "sum": arrays["sum"]}
        except Exception:  # NumPy's own messages recommend allow_pickle
            raise ValueError(f"{path}: not a file that Accumulator.save wrote") from None
        if device is not None:
            import torch

            state["sum"] = torch.from_numpy(state["sum"]).to(device)
        return cls.from_state_dict(state)


def _checked_sum(total: Any) -> Any:
    """`total`, or TypeError unless it is an unmasked array or a dense tensor."""
    refuse_foreign(total)
    if not (isinstance(total, np.ndarray) or (is_tensor(total) and str(total.layout) == "torch.strided")):
        raise TypeError(f"the sum must be an array or a dense tensor, got {type(total).__name__}")
    return total


def _zeros(shape: tuple[int, ...], dtype: str, device: Any) -> Any:
    if device is None:
        return np.zeros(shape, dtype)
    import torch

    return torch.zeros(shape, dtype=getattr(torch, dtype), device=device)


def _like(x: Any) -> Any:
    """New memory with the shape, dtype and device of x."""
    return x.new_empty(x.shape) if is_tensor(x) else np.empty_like(x)
