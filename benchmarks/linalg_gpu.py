"""The CUDA part of `benchmarks.linalg`: least squares, low rank, and a file, compared with torch.

Times are for whole calls, between two synchronizations, because the solvers read values on the host between steps.
Backward errors are the estimate that is also computed for the CPU, from residuals in doubled precision on the GPU.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from sjlt.linalg import lstsq, svd_lowrank

from . import linalg_files
from .cases import SEED
from .doubled import residual_sums
from .gpu import environment, short_name
from .linalg import karlson_walden
from .run import save

RESULTS = Path(__file__).parent / "results"
SHAPES = ((2**20, 512), (2**18, 2048))
CONDITIONS = (1e2, 1e10)
LOW_RANK, RANK = (2**20, 2048), 100
REPEATS = 5
ROWS = 1 << 16  # per block


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return (result, median milliseconds), after a first call that compiles."""
    result, laps = call(), []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = call()
        torch.cuda.synchronize()
        laps.append((time.perf_counter() - start) * 1e3)
    return result, statistics.median(laps)


class Problem(NamedTuple):
    """A least-squares problem, and A's singular values and right singular vectors on the host."""

    A: torch.Tensor
    b: torch.Tensor
    s: np.ndarray
    Vh: np.ndarray

    def backward_error(self, x: torch.Tensor) -> float:
        """Return the estimate of `linalg.backward_error`, with residuals in doubled precision on A's device."""
        gradient, squares = residual_sums(self.A, self.b, x)
        on_host = gradient.cpu().numpy(), squares, float(self.b.norm()), x.cpu().numpy()
        return karlson_walden(*on_host, self.s, self.Vh)


def problem(m: int, n: int, condition: float, device: str = "cuda") -> Problem:
    """Return a problem with this condition number of A, and a residual of norm 1e-3.

    A = Q diag(s) V' with known s and V, whose rounding changes s by a few machine epsilons.
    """
    generator = torch.Generator(device).manual_seed(SEED)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, device=device, generator=generator)

    V = torch.linalg.qr(normal(n, n))[0]
    Q = normal(m, n)
    for _ in range(2):  # QR by Cholesky factorizations: a random tall matrix is well conditioned
        R = torch.linalg.cholesky(Q.T @ Q, upper=True)
        Q = torch.linalg.solve_triangular(R, Q, upper=True, left=False)
    s = torch.logspace(0, -math.log10(condition), n, dtype=torch.float64, device=device)
    A = (Q * s) @ V.T
    noise = normal(m)
    b = A @ (V @ normal(n) / n**0.5) + 1e-3 * noise / noise.norm()
    return Problem(A, b, s.cpu().numpy(), V.T.cpu().numpy())


def cholesky(A: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cholesky_solve((A.T @ b)[:, None], torch.linalg.cholesky(A.T @ A))[:, 0]


SOLVERS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "sjlt.linalg.lstsq": lambda A, b: lstsq(A, b).x,
    'sjlt.linalg.lstsq, method="cg"': lambda A, b: lstsq(A, b, method="cg").x,
    'sjlt.linalg.lstsq, method="passes"': lambda A, b: lstsq(A, b, method="passes").x,
    "torch.linalg.lstsq, gels": lambda A, b: torch.linalg.lstsq(A, b[:, None], driver="gels").solution[:, 0],
    "normal equations, Cholesky": cholesky,
}


def solvers(m: int, n: int, condition: float) -> dict[str, Any]:
    """Return time and backward error of every solver on a problem with this condition number."""
    given = problem(m, n, condition)
    found: dict[str, Any] = {}
    for name, solver in SOLVERS.items():
        try:
            x, ms = timed(lambda solver=solver: solver(given.A, given.b))
        except torch.linalg.LinAlgError as e:
            found[name] = {"failed": " ".join(str(e).split())}
            continue
        found[name] = {"seconds": ms / 1e3, "backward error": given.backward_error(x)}
        print(f"({m}, {n}) {condition:.0e}", name, found[name], file=sys.stderr, flush=True)
    return found


def low_rank(m: int, n: int) -> dict[str, Any]:
    """Measure float32 data with singular values 1/j, for 0, 1, ... iterations until the error is below 1.01 × best."""
    generator = torch.Generator("cuda").manual_seed(SEED)
    V = torch.linalg.qr(torch.randn(n, n, device="cuda", generator=generator))[0]
    A = torch.empty(m, n, device="cuda")
    gram = torch.zeros(n, n, dtype=torch.float64, device="cuda")
    for i in range(0, m, ROWS):
        block = torch.randn(min(ROWS, m - i), n, device="cuda", generator=generator)
        A[i : i + ROWS] = block / torch.arange(1, n + 1, device="cuda") @ V
        gram += A[i : i + ROWS].double().T @ A[i : i + ROWS].double()
    best = torch.linalg.eigvalsh(gram)[:-RANK].sum()

    def error(U: torch.Tensor, s: torch.Tensor, Vh: torch.Tensor) -> float:
        rests = (
            A[i : i + ROWS].double() - (U[i : i + ROWS].double() * s.double()) @ Vh.double() for i in range(0, m, ROWS)
        )
        return float((sum((rest * rest).sum() for rest in rests) / best).sqrt())

    def theirs(n_iter: int) -> Any:
        U, s, V = torch.svd_lowrank(A, RANK + 10, niter=n_iter)
        return U[:, :RANK], s[:RANK], V[:, :RANK].T

    methods: dict[str, Callable[[int], Any]] = {
        "sjlt": lambda n_iter: svd_lowrank(A, RANK, n_iter=n_iter),
        "torch.svd_lowrank": theirs,
    }
    found: dict[str, Any] = {}
    for name, method in methods.items():
        for n_iter in range(6):
            factors, ms = timed(lambda method=method, n_iter=n_iter: method(n_iter))
            row = found[f"{name}, n_iter {n_iter}"] = {"seconds": ms / 1e3, "error over best": error(*factors)}
            print(name, n_iter, row, file=sys.stderr, flush=True)
            if row["error over best"] < 1.01:
                break
    return found


def _path() -> Path:
    return RESULTS / f"linalg_{short_name()}.json"


def run(quick: bool, gigabytes: float, directory: Path | None) -> None:
    """Measure everything, and save each case once it is measured; `quick`: an eighth of the rows, nothing is saved.

    The file of `gigabytes` GB is written to a temporary folder in `directory`.
    """
    if not torch.cuda.is_available():
        raise SystemExit("--cuda needs a CUDA device")
    factor = 8 if quick else 1
    results = _record(environment())
    for m, n in SHAPES:
        for condition in CONDITIONS:
            title = f"({m // factor}, {n}), condition {condition:.0e}"
            results["least squares"][title] = solvers(m // factor, n, condition)
            torch.cuda.empty_cache()
            if not quick:
                save(_path(), results)
    m, n = LOW_RANK[0] // factor, LOW_RANK[1]
    results["low rank"][f"({m}, {n}), rank {RANK}, singular values 1/j"] = low_rank(m, n)
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory(dir=directory) as name:
        results["file"] = linalg_files.run(linalg_files.ON_GPU, gigabytes, Path(name))
    if not quick:
        save(_path(), results)


def _record(taken_with: dict[str, Any]) -> dict[str, Any]:
    """Return the record, whose cases are replaced one by one; an empty one unless it was taken in this environment."""
    held: dict[str, Any] = json.loads(_path().read_text()) if _path().exists() else {}
    if held.get("environment") == taken_with:
        return held
    return {"environment": taken_with, "least squares": {}, "low rank": {}, "file": {}}
