"""`SJLTProjection`: a projection with stored tables, compatible with another package of the import name ``sjlt``."""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from ..inputs.checks import integer

BLOCK = 1 << 22  # elements of signed data in memory at a time


class SJLTProjection(nn.Module):
    """Run code written for the CUDA extension ``sjlt`` on PyPI, which has the same import name as this package.

    Arguments, tables and results are those of its class of the same name. This one also runs on the CPU, does not need
    nvcc, and is differentiable. Each feature is added with a sign to `c` components drawn with replacement, so a
    component may be drawn twice. The tables take 9 c bytes per feature and cannot be regenerated from a seed of their
    own. New code should use `Sketch`, which stores nothing, has distinct components, and accepts data of any shape::

        SJLTProjection(d, k, c)(x)  ->  sjlt.Sketch(d, k, nnz=c, seed=0).project(x)
        projection.transpose(y)     ->  sketch.project_adjoint(y)

    Sums are computed in float32 (float64 for float64 input); on CUDA with atomic additions, unless
    ``torch.use_deterministic_algorithms(True)`` is set.

    Parameters
    ----------
    original_dim, proj_dim : int, positive
    c : int, 1 to proj_dim, default 1
        Components per feature.
    threads, fixed_blocks : int
        Accepted for compatibility; they have no effect.
    device : str or torch.device, optional
        Device of the tables; by default CUDA if available, else the CPU.

    Attributes
    ----------
    rand_indices : int64 tensor of shape (original_dim, c), from 0 to proj_dim - 1
    rand_signs : int8 tensor of shape (original_dim, c), 1 or -1
        Buffers, drawn in this order by ``torch.randint``, so ``torch.manual_seed`` reproduces them. They may be
        replaced by tensors of the same shape.
    normalization_factor : float, 1/sqrt(c)

    Raises
    ------
    ValueError
        If a dimension or `c` is out of range.

    References
    ----------
    Hu et al., "GraSS: scalable data attribution with gradient sparsification and sparse projection", NeurIPS 2025.

    Examples
    --------
    >>> import torch, sjlt
    >>> projection = sjlt.SJLTProjection(original_dim=1024, proj_dim=128, c=4)
    >>> y = projection(torch.randn(100, 1024))
    >>> y.shape, projection.transpose(y).shape
    (torch.Size([100, 128]), torch.Size([100, 1024]))
    """

    rand_indices: Tensor
    rand_signs: Tensor

    def __init__(
        self,
        original_dim: int,
        proj_dim: int,
        c: int = 1,
        threads: int = 1024,
        fixed_blocks: int = 84,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__()
        self.original_dim = integer("original_dim", original_dim, 1, 2**63 - 1)
        self.proj_dim = integer("proj_dim", proj_dim, 1, 2**63 - 1)
        self.c = integer("c", c, 1, self.proj_dim, f" for proj_dim = {self.proj_dim}")
        self.threads, self.fixed_blocks = threads, fixed_blocks
        self.normalization_factor = 1 / sqrt(self.c)
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        shape = (self.original_dim, self.c)
        self.register_buffer("rand_indices", torch.randint(0, self.proj_dim, shape, device=device))
        self.register_buffer("rand_signs", (torch.randint(0, 2, shape, device=device) * 2 - 1).to(torch.int8))

    @property
    def device(self) -> torch.device:
        """The device of the tables, to which data on other devices is copied."""
        return self.rand_indices.device

    def forward(self, x: Tensor) -> Tensor:
        """Project x of shape (batch, original_dim) to shape (batch, proj_dim), in the dtype of x."""
        x = self._checked(x, self.original_dim, "original_dim")
        sums = x.new_zeros((len(x), self.proj_dim), dtype=_sum_dtype(x))
        for start, stop in self._blocks(x):
            part = x[:, start:stop].to(sums.dtype)
            for index, sign in self._tables(start, stop):
                sums = sums.scatter_add_(1, index.expand(len(x), -1), part * sign)
        return (sums * self.normalization_factor).to(x.dtype)

    def transpose(self, y: Tensor) -> Tensor:
        """Apply the adjoint: y of shape (batch, proj_dim) to shape (batch, original_dim), in the dtype of y."""
        y = self._checked(y, self.proj_dim, "proj_dim")
        wide = y.to(_sum_dtype(y)) * self.normalization_factor
        parts = []
        for start, stop in self._blocks(y):
            terms = (wide.index_select(1, index) * sign for index, sign in self._tables(start, stop))
            parts.append(sum(terms, start=wide.new_zeros(())).to(y.dtype))
        return torch.cat(parts, 1)

    def get_compression_ratio(self) -> float:
        """Return original_dim / proj_dim."""
        return self.original_dim / self.proj_dim

    def get_sparsity_ratio(self) -> float:
        """Return 1 - c / proj_dim: the fraction of zeros among the entries if no component is drawn twice."""
        return 1 - self.c / self.proj_dim

    def extra_repr(self) -> str:
        return f"original_dim={self.original_dim}, proj_dim={self.proj_dim}, c={self.c}, device={self.device}"

    def _checked(self, x: Tensor, width: int, name: str) -> Tensor:
        if not isinstance(x, Tensor):
            raise TypeError(f"a tensor is required, got {type(x).__name__}")
        if x.ndim != 2 or x.shape[1] != width:
            raise ValueError(f"a tensor of shape (batch, {name} = {width}) is required, got {tuple(x.shape)}")
        if not x.is_floating_point():
            raise TypeError(f"a floating-point tensor is required, got {x.dtype}")
        shape = self.original_dim, self.c
        for table_name, table in self.named_buffers():
            if table.shape != shape:  # scatter_add_ would silently drop features
                raise ValueError(f"{table_name} must have shape {shape}, got {tuple(table.shape)}")
        return x.to(self.device)

    def _blocks(self, x: Tensor) -> list[tuple[int, int]]:
        step = max(1, BLOCK // max(1, len(x)))
        return [(i, min(i + step, self.original_dim)) for i in range(0, self.original_dim, step)]

    def _tables(self, start: int, stop: int) -> list[tuple[Tensor, Tensor]]:
        indices, signs = self.rand_indices[start:stop], self.rand_signs[start:stop]
        return [(indices[:, i], signs[:, i]) for i in range(self.c)]


def get_cuda_info() -> dict[str, Any]:
    """Describe torch's CUDA devices in a dict with the keys of the extension's function of the same name."""
    available = torch.cuda.is_available()
    info: dict[str, Any] = {"cuda_available": available, "extension_available": available}
    if available:
        count = torch.cuda.device_count()
        info.update(
            cuda_version=torch.version.cuda,
            device_count=count,
            current_device=torch.cuda.current_device(),
            devices=[torch.cuda.get_device_name(i) for i in range(count)],
        )
    return info


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
