"""Products of a sketch with tensors, and their rivals in torch: the sketch stored as a matrix or as its entries.

A baseline is a function of the product. It builds whatever it stores and returns the call to time, a function of the
data; for a product it does not support, it raises `AbsentError` with the reason. All baselines are checked against
`reference`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

import sjlt
from sjlt.backends.cpu import exact as cpu_backend

from .cases import SEED

MAX_STORED = 8e9  # bytes of a stored matrix
SHORT = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16"}
Call = Callable[[torch.Tensor], torch.Tensor]


class AbsentError(Exception):
    """Why a baseline is not measured on a product."""


@dataclass(frozen=True)
class Product:
    """n vectors, the rows (axis 1) or columns (axis 0) of a tensor, from d features to k components or back (adjoint).

    target_ratio : the largest allowed time, as a multiple of the floor; None for a case that is only recorded.
    """

    n: int
    d: int
    k: int
    target_ratio: float | None = None
    nnz: int = 4
    dtype: torch.dtype = torch.float32
    axis: int = 1
    adjoint: bool = False
    stacks: int = 1

    @property
    def sketch(self) -> sjlt.Sketch:
        return sjlt.Sketch(self.d, self.k, nnz=self.nnz, stacks=self.stacks, seed=SEED)

    @property
    def title(self) -> str:
        letter = ("BY" if self.adjoint else "AX")[self.axis]
        shape = ", ".join(map(short, self.shape))
        stacks = f", stacks {self.stacks}" if self.stacks > 1 else ""
        return f"{letter} ({shape}) → {short(self.width)}, {SHORT[self.dtype]}, nnz {self.nnz}{stacks}"

    @property
    def width(self) -> int:
        """The length of a result vector."""
        return self.d if self.adjoint else self.k

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the data."""
        width = self.k if self.adjoint else self.d
        return (self.n, width) if self.axis else (width, self.n)

    @property
    def result_shape(self) -> tuple[int, int]:
        return (self.n, self.width) if self.axis else (self.width, self.n)

    @property
    def bytes(self) -> int:
        """Bytes of the data and the result, which every method has to move."""
        return (math.prod(self.shape) + math.prod(self.result_shape)) * self.dtype.itemsize

    def data(self, device: Any, seed: int = SEED) -> torch.Tensor:
        return normal(self.shape, self.dtype, device, seed)

    def vectors(self, x: torch.Tensor) -> torch.Tensor:
        """The view of the data or the result that has vectors as rows."""
        return x if self.axis else x.T

    def apply(self, operator: Any, x: torch.Tensor) -> torch.Tensor:
        """The product, with `operator` (a sketch or a stored matrix) in place of S."""
        operator = operator.T if self.adjoint else operator
        return x @ operator.T if self.axis else operator @ x


def short(number: int) -> str:
    log = number.bit_length() - 1
    return f"2^{log}" if number == 1 << log >= 1 << 24 else str(number)


def normal(shape: tuple[int, ...], dtype: torch.dtype, device: Any, seed: int = SEED) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, dtype=dtype, device=device, generator=generator)


@lru_cache(maxsize=1)
def entries(sketch: sjlt.Sketch, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`Sketch.entries` on the device: rows (nnz, d) int32 and signs (nnz, d) int8."""
    # Decoded on the device: a billion entries take a second there, and a minute on the host.
    codes = torch.from_numpy(cpu_backend.codes(sketch.spec, 0, sketch.n_features)).to(device).T.contiguous()
    return codes >> 1, 1 - 2 * (codes & 1).to(torch.int8)


# ------------------------------------------------------------------------------------- reference result


def probe(vectors: torch.Tensor) -> torch.Tensor:
    """Three vectors and a random combination of all vectors, as float64 rows; the last depends on every element."""
    sample = torch.linspace(0, len(vectors) - 1, min(len(vectors), 3)).long()
    weights = normal((1, len(vectors)), torch.float64, vectors.device)
    return torch.cat([vectors[sample].double(), weights @ vectors.double()])


def reference(case: Product, x: torch.Tensor) -> torch.Tensor:
    """`probe` of the exact result, computed from the probe of the data, as the product is linear."""
    few = probe(case.vectors(x))
    rows, signs = entries(case.sketch, x.device)
    return indexed(replace(case, n=len(few), axis=1), few, rows, signs.double() / case.nnz**0.5)


def relative_error(case: Product, result: torch.Tensor, want: torch.Tensor) -> float:
    """The largest norm-wise error of the probed vectors."""
    if result.shape != case.result_shape:
        raise ValueError(f"the result has the shape {tuple(result.shape)}, not {case.result_shape}")
    return ((probe(case.vectors(result)) - want).norm(dim=1) / want.norm(dim=1)).max().item()


def indexed(case: Product, x: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The product by indexing along the features, once per entry of a column."""
    out = x.new_zeros(case.result_shape)
    for row, value in zip(rows, values, strict=True):
        value = value if case.axis else value[:, None]
        if case.adjoint:
            out.addcmul_(x.index_select(case.axis, row), value)
        else:
            out.index_add_(case.axis, row, x * value)
    return out


# ------------------------------------------------------------------------------------- baselines


def check_size(stored: float) -> None:
    if stored > MAX_STORED:
        raise AbsentError(f"S would take {stored / 1e9:.0f} GB")


def scaled_entries(case: Product, device: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    rows, signs = entries(case.sketch, device)
    return rows, signs.to(dtype) / case.nnz**0.5


def stored_dense(case: Product, device: Any) -> Call:
    return dense_of(case, device, case.dtype)


def stored_bf16(case: Product, device: Any) -> Call:
    return dense_of(case, device, torch.bfloat16)


def dense_of(case: Product, device: Any, dtype: torch.dtype) -> Call:
    """cuBLAS. Data of another dtype is converted within the call; the result keeps the dtype of the matrix."""
    check_size(case.k * case.d * dtype.itemsize)
    rows, values = scaled_entries(case, device, dtype)
    stored = torch.zeros(case.k, case.d, dtype=dtype, device=device).scatter_(0, rows.long(), values)
    return lambda x: case.apply(stored, x.to(dtype))


def stored_csr(case: Product, device: Any) -> Call:
    """cuSPARSE, with S stored for a projection and its transpose for an adjoint."""
    check_size(case.nnz * case.d * (4 + case.dtype.itemsize))
    rows, values = scaled_entries(case, device, case.dtype)
    if case.adjoint:
        starts = torch.arange(0, rows.numel() + 1, case.nnz, dtype=torch.int32, device=device)
        parts = starts, rows.T.flatten(), values.T.flatten()
    else:  # stable: the entries of a row come from one sub-block, so its columns stay in order
        ordered, order = rows.flatten().sort(stable=True)
        starts = torch.searchsorted(ordered, torch.arange(case.k + 1, dtype=torch.int32, device=device), out_int32=True)
        parts = starts, (order % case.d).int(), values.flatten()[order]
    stored = torch.sparse_csr_tensor(*parts, size=(case.width, case.shape[case.axis]))
    return lambda x: stored @ x if case.axis == 0 else (stored @ x.T).T


def index_add(case: Product, device: Any) -> Call:
    """index_add_, one call per entry of a column; index_select for the adjoint."""
    if case.dtype.itemsize < 4:
        raise AbsentError(f"it sums in {SHORT[case.dtype]}")
    rows, values = scaled_entries(case, device, case.dtype)
    return lambda x: indexed(case, x, rows, values)


def separate(case: Product, device: Any) -> Call:
    """The alternative to stacks: the same number of separate sketches, applied one after the other."""
    parts = [
        sjlt.Sketch(case.d, case.k // case.stacks, nnz=case.nnz // case.stacks, seed=SEED + i)
        for i in range(case.stacks)
    ]
    return lambda x: torch.cat([case.apply(part, x) for part in parts], case.axis)


def copy(case: Product, device: Any) -> Call:
    """A device copy of the wider side: the data or, for an adjoint, a tensor of the result's size."""
    if not case.adjoint:
        return torch.clone
    wide = normal(case.result_shape, case.dtype, device)
    return lambda x: wide.clone()
