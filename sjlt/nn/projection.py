"""The projection and its adjoint as torch layers."""

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
        # An empty tensor that tracks the device and dtype set by `.to()`, `.cuda()`, `.half()` etc.
        self.register_buffer("_like", torch.empty(0, device=device, dtype=dtype), persistent=False)

    def _device_and_dtype(self) -> dict[str, Any]:
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
        """Return the description of the sketch (`Sketch.to_dict`), the only content of the state dict."""
        return self.sketch.to_dict()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError if the state is that of another sketch, because results would differ."""
        loaded = Sketch.from_dict(state)
        if loaded != self.sketch:
            raise ValueError(f"the state dict belongs to {loaded!r}, the layer to {self.sketch!r}")


def _casts(device: str) -> bool:
    """Whether autocast is enabled for a device type ("meta" does not support it)."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


class SparseProjection(_Layer):
    """A layer that applies a sparse Johnson-Lindenstrauss transform, ``x @ S.T`` (see `sjlt.Sketch`).

    It has no parameters: entries are regenerated from the seed, so the layer needs no memory, no optimizer state and no
    communication. Gradients propagate to its input. Its state dict contains the description of the sketch; loading that
    of another sketch raises a ValueError that shows both.

    Parameters
    ----------
    in_features, out_features : int
        `n_features` and `n_components` of the sketch.
    nnz : int or "auto", default "auto"
        Nonzeros per column, as in `Sketch`.
    stacks : int, default 1
        As in `Sketch`: use 4 to preserve a whole subspace or single features.
    seed : int
        Required, because layers with the same seed and out_features have the same entries.
    device, dtype : optional
        If given, inputs must have this device and dtype, as for a layer with weights (RuntimeError otherwise); `.to()`
        changes them. By default inputs may have any device and dtype that `Sketch.project` accepts.

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
        return SparseProjectionAdjoint(self.sketch, **self._device_and_dtype())

    adjoint = T

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        return self.sketch.project(x)

    def extra_repr(self) -> str:
        s = self.sketch
        return f"in_features={s.n_features}, out_features={s.n_components}, {_entries(s)}"


class SparseProjectionAdjoint(_Layer):
    """The transpose of a `SparseProjection`, ``y @ S``, as returned by `SparseProjection.T`.

    Shape
    -----
    (..., out_features) -> (..., in_features), with the names of the `SparseProjection`
    """

    @property
    def T(self) -> SparseProjection:
        """The `SparseProjection` of which this layer is the transpose."""
        s = self.sketch
        return SparseProjection(
            s.n_features, s.n_components, nnz=s.spec.nnz, stacks=s.stacks, seed=s.seed, **self._device_and_dtype()
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
