"""Time sketches with independent entries on CUDA: ``python -m benchmarks.iid [CASE ...]``, CASE a key of `CASES`.

The rival is cuBLAS with a stored matrix. Methods and floor are those of `benchmarks.gpu`. "entries/s" is the number of
entries that the kernel generates, once per block of data vectors, over the time of the whole call. Without arguments
the results go to benchmarks/results/iid_h200.json.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

import sjlt
from sjlt.backends.triton import iid as triton_iid
from sjlt.kernels.config.iid import choose

from .baselines import normal, short
from .cases import SEED
from .gpu import console, copy_bandwidth, device_ms, environment, judged
from .run import save

RESULTS = Path(__file__).parent / "results" / "iid_h200.json"
MAX_STORED = 1 << 27  # maximum number of entries of a matrix that is stored as a rival and as a reference
ERRORS = {torch.bfloat16: 5e-3, torch.float32: 1e-6, torch.float64: 1e-14}


@dataclass(frozen=True)
class Case:
    """n vectors of d features to k components, or back.

    target_ratio : the largest allowed time, as a multiple of cuBLAS with a stored matrix.
    target_rate : the 10^12 entries per second to reach if the matrix is too large to store.
    """

    n: int
    d: int
    k: int
    density: float
    dtype: torch.dtype = torch.bfloat16
    adjoint: bool = False
    target_ratio: float | None = None
    target_rate: float | None = None

    @property
    def sketch(self) -> sjlt.Sketch:
        return sjlt.Sketch(self.d, self.k, density=self.density, seed=SEED)

    @property
    def title(self) -> str:
        name, wide, narrow = ("Y", self.k, self.d) if self.adjoint else ("X", self.d, self.k)
        kind = str(self.dtype).removeprefix("torch.")
        return f"{name} ({short(self.n)}, {short(wide)}) → {short(narrow)}, {kind}, density {self.density:.3g}"

    def apply(self, sketch: sjlt.Sketch, x: torch.Tensor) -> torch.Tensor:
        return x @ sketch if self.adjoint else x @ sketch.T

    def generated(self, x: torch.Tensor) -> int:
        """The number of entries generated: all of them, for every block of data vectors."""
        out = x.new_empty((self.n, self.d if self.adjoint else self.k))
        product = triton_iid.describe(self.sketch.spec, x, out, accumulate=False, adjoint=self.adjoint)
        return -(-self.n // choose(product).block_vectors) * self.d * self.k


CASES = {
    "X768": Case(2**20, 768, 128, 1 / 3, target_ratio=1.1),
    "X4096": Case(2**18, 4096, 512, 1 / 3, target_ratio=1.5),
    "X768-fp32": Case(2**20, 768, 128, 1 / 3, torch.float32),
    "X768-thin": Case(2**20, 768, 128, 0.01),
    "adjoint-X768": Case(2**20, 768, 128, 1 / 3, adjoint=True),
    "X768-fp64": Case(2**16, 768, 128, 1 / 3, torch.float64),
    "rows8": Case(8, 2**24, 4096, 1.0, target_rate=2.6),
    "rows8-fp32": Case(8, 2**24, 4096, 1.0, torch.float32),
}


def check(case: Case, x: torch.Tensor, stored: torch.Tensor | None) -> float:
    """The error of a sample of rows or, if the matrix is too large to store, of the first features' product.

    Raises AssertionError if it is too large.
    """
    if stored is None:
        part, sketch = x[:, :4096], case.sketch[:, :4096]
        matrix = torch.from_numpy(sketch.toarray()).to(x.device).T
        result, want = part @ sketch.T, part.double() @ matrix
    else:
        rows = torch.linspace(0, case.n - 1, 100, device=x.device).long()
        result, want = case.apply(case.sketch, x)[rows], x[rows].double() @ stored
    error = ((result - want).norm() / want.norm()).item()
    if not error <= ERRORS[case.dtype]:  # also false for NaN
        raise AssertionError(f"{case.title}: error {error:.2e}, allowed is {ERRORS[case.dtype]:.1e}")
    return error


def measure(case: Case, bandwidth: float) -> dict[str, Any]:
    sketch = case.sketch
    x = normal((case.n, case.k if case.adjoint else case.d), case.dtype, "cuda")
    stored = None
    if case.d * case.k <= MAX_STORED:
        stored = torch.from_numpy(sketch.toarray()).cuda()
        stored = stored if case.adjoint else stored.T
    error = check(case, x, stored)
    ms = device_ms(lambda x: case.apply(sketch, x), [x])
    floor = (x.nbytes + case.n * (case.d if case.adjoint else case.k) * x.itemsize) / bandwidth * 1e3
    found = {"error": error, "floor_ms": floor, "ms": ms, "times floor": ms / floor}
    found["entries/s"] = case.generated(x) / ms * 1e3
    if stored is not None:
        matrix = stored.to(case.dtype).contiguous()
        found["cuBLAS, stored, ms"] = device_ms(lambda x: x @ matrix, [x])
    return found | {"target_ratio": case.target_ratio, "target_rate": case.target_rate}


def show(results: dict[str, dict[str, Any]]) -> None:
    table = Table(
        "case", "floor", "sjlt, ms", "x floor", "cuBLAS", "x cuBLAS", "10^12 entries/s", "error", box=box.SIMPLE
    )
    for title, row in results.items():
        rival = row.get("cuBLAS, stored, ms")
        times = judged(row["ms"] / rival, row["target_ratio"], f"{row['ms'] / rival:.2f}") if rival else ""
        rate, target = row["entries/s"] / 1e12, row["target_rate"]
        rate_text = judged(-rate, -target if target else None, f"{rate:.2f}")
        cells = (
            f"{row['floor_ms']:.3f}",
            f"{row['ms']:.3f}",
            f"{row['times floor']:.2f}",
            f"{rival:.3f}" if rival else "",
            times,
        )
        table.add_row(title, *cells, rate_text, f"{row['error']:.1e}")
    console.print(table)


def main(names: list[str]) -> None:
    bandwidth = copy_bandwidth()
    about = {**environment(), "copy bandwidth, TB/s": bandwidth / 1e12}
    print(json.dumps(about), flush=True)
    results = {}
    for name in names or CASES:
        results[CASES[name].title] = measure(CASES[name], bandwidth)
        torch.cuda.empty_cache()
    show(results)
    if not names:
        save(RESULTS, {"environment": about, "cases": results})


if __name__ == "__main__":
    main(sys.argv[1:])
