"""The projection and its adjoint as layers."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..sketch import Sketch


class _Layer(nn.Module):
    """A layer without parameters whose state is the description of a sketch."""

    _like: Tensor

    def __init__(self, sketch: Sketch, device: Any, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.sketch = sketch
        self._checks_device, self._checks_dtype = device is not None, dtype is not None
        # Empty: it records the device and dtype that `.to()`, `.cuda()`, `.half()` and the like set.
        self.register_buffer("_like", torch.empty(0, device=device, dtype=dtype), persistent=False)

    def _place(self) -> dict[str, Any]:
        return {
            "device": self._like.device if self._checks_device else None,
            "dtype": self._like.dtype if self._checks_dtype else None,
        }

    def _check(self, x: Tensor) -> None:
        if self._checks_device and x.device != self._like.device:
            raise RuntimeError(f"the layer is on {self._like.device}, its input on {x.device}")
        if self._checks_dtype and x.dtype != self._like.dtype and not _casts(x.device.type):
            raise RuntimeError(f"the layer has dtype {self._like.dtype}, its input {x.dtype}")

    def get_extra_state(self) -> dict[str, Any]:
        """The description of the sketch (`Sketch.to_dict`), the only content of the state dict."""
        return self.sketch.to_dict()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError for the state of another sketch, whose results would differ."""
        loaded = Sketch.from_dict(state)
        if loaded != self.sketch:
            raise ValueError(f"the state dict belongs to {loaded!r}, the layer to {self.sketch!r}")


def _casts(device: str) -> bool:
    """Whether a region of autocast is active for a device type; "meta" has none."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


class SparseProjection(_Layer):
    """A layer that applies a sparse Johnson-Lindenstrauss transform: ``x @ S.T`` (`sjlt.Sketch`).

    It has no parameters: the seed regenerates the entries, so the layer costs no memory, no optimizer state and no
    communication. Gradients pass through it to its input. Its state dict holds the description of the sketch; loading
    that of another sketch raises a ValueError that shows both.

    Parameters
    ----------
    in_features, out_features : int
        `n_features` and `n_components` of the sketch.
    nnz : int or "auto", default "auto"
        Nonzeros per column, as for `Sketch`.
    stacks : int, default 1
        As for `Sketch`: 4 where a whole subspace or single features have to survive.
    seed : int
        There is no default: layers with the same seed and out_features have the same entries.
    device, dtype : optional
        The device and dtype required of inputs, as for a layer with weights (RuntimeError otherwise); `.to()` changes
        them. By default inputs may be on any device, in any dtype of `Sketch.project`.

    Shape
    -----
    (..., in_features) -> (..., out_features)

    Examples
    --------
    >>> import torch
    >>> from sjlt.nn import SparseProjection
    >>> model = torch.nn.Sequential(torch.nn.Linear(10, 4096), SparseProjection(4096, 64, seed=0))
    >>> model(torch.ones(3, 10)).shape
    torch.Size([3, 64])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        nnz: int | Literal["auto"] = "auto",
        stacks: int = 1,
        seed: int,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(Sketch(in_features, out_features, nnz=nnz, stacks=stacks, seed=seed), device, dtype)
        self.in_features, self.out_features = in_features, out_features

    @property
    def T(self) -> SparseProjectionAdjoint:
        """The transpose as a layer, (..., out_features) -> (..., in_features)."""
        return SparseProjectionAdjoint(self.sketch, **self._place())

    adjoint = T

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        return self.sketch.project(x)

    def extra_repr(self) -> str:
        s = self.sketch
        return f"in_features={s.n_features}, out_features={s.n_components}, {_entries(s)}"


class SparseProjectionAdjoint(_Layer):
    """The transpose of a `SparseProjection`, as from `SparseProjection.T`: ``y @ S``.

    Shape
    -----
    (..., out_features) -> (..., in_features), in the terms of the `SparseProjection`
    """

    @property
    def T(self) -> SparseProjection:
        """The layer whose transpose this is."""
        s = self.sketch
        return SparseProjection(
            s.n_features, s.n_components, nnz=s.spec.nnz, stacks=s.stacks, seed=s.seed, **self._place()
        )

    adjoint = T

    def forward(self, y: Tensor) -> Tensor:
        self._check(y)
        return self.sketch.project_adjoint(y)

    def extra_repr(self) -> str:
        s = self.sketch
        return f"in_features={s.n_components}, out_features={s.n_features}, {_entries(s)}"


def _entries(sketch: Sketch) -> str:
    stacks = f", stacks={sketch.stacks}" if sketch.stacks > 1 else ""
    return f"nnz={sketch.nnz}{stacks}, seed={sketch.seed}"
