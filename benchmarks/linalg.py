"""Compare time and error of `sjlt.linalg` with other solvers: ``python -m benchmarks.linalg [--quick] [--cuda]``.

Least squares: time and backward error (the Karlson-Walden estimate, with residuals in extended precision).
Low rank: time, and error relative to that of the best approximation, for 0, 1, ... iterations until it is below 1.01.
A file: see `linalg_files`.

Every method runs in its own process, on the same stored data. A time is the median of REPEATS calls, or fewer if they
are slow; a run takes about 7 minutes on 2 cores. The results are written to benchmarks/results/linalg_cpu.json, with
--cuda to a file named after the GPU, such as linalg_h200.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from . import linalg_files
from .cases import SEED
from .run import environment, in_process, save

RESULTS = Path(__file__).parent / "results" / "linalg_cpu.json"
REPEATS, MAX_SECONDS = 3, 10.0  # calls of a method; total time after which it is not called again
LSQR_STEPS = 150  # for an ill-conditioned A it does not converge in thousands
SHAPES = {"tall": (100_000, 500), "wide": (40_000, 1_500)}
CONDITIONS = (1e2, 1e10)
LOW_RANK, RANK = (200_000, 1_000), 50
ROWS = 4096  # per block when a matrix is generated or read

METHODS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {}


def method(name: str) -> Callable[[Any], Any]:
    """Register a solver, a function of (A, b)."""

    def add(function: Any) -> Any:
        METHODS[name] = function
        return function

    return add


# ------------------------------------------------------------------------------------- least squares


@method("sjlt.linalg.lstsq")
def sketched(A: np.ndarray, b: np.ndarray) -> np.ndarray:
    from sjlt.linalg import lstsq

    return np.asarray(lstsq(A, b).x)


@method("scipy lstsq, gelsd")
def gelsd(A: np.ndarray, b: np.ndarray) -> np.ndarray:
    import scipy.linalg

    return np.asarray(scipy.linalg.lstsq(A, b, lapack_driver="gelsd", check_finite=False)[0])


@method("scipy lstsq, gelsy")
def gelsy(A: np.ndarray, b: np.ndarray) -> np.ndarray:
    import scipy.linalg

    return np.asarray(scipy.linalg.lstsq(A, b, lapack_driver="gelsy", check_finite=False)[0])


@method("normal equations, Cholesky")
def normal_equations(A: np.ndarray, b: np.ndarray) -> np.ndarray:
    import scipy.linalg

    return np.asarray(scipy.linalg.cho_solve(scipy.linalg.cho_factor(A.T @ A), A.T @ b))


@method(f"scipy LSQR, {LSQR_STEPS} steps")
def lsqr(A: np.ndarray, b: np.ndarray) -> np.ndarray:
    from scipy.sparse.linalg import lsqr

    return np.asarray(lsqr(A, b, atol=1e-15, btol=1e-15, conlim=0, iter_lim=LSQR_STEPS)[0])


@method("LSQR, sketched preconditioner")
def preconditioned_lsqr(A: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Blendenpik with a sparse sketch, started from zero: fast, but not backward stable."""
    import scipy.linalg
    from scipy.sparse.linalg import LinearOperator, lsqr

    import sjlt

    m, n = A.shape
    R = np.linalg.qr(sjlt.Sketch(m, -(-4 * n // 512) * 512, nnz=8, stacks=4, seed=SEED) @ A, mode="r")

    def forward(z: np.ndarray) -> np.ndarray:
        return A @ scipy.linalg.solve_triangular(R, z)

    def adjoint(r: np.ndarray) -> np.ndarray:
        return scipy.linalg.solve_triangular(R, A.T @ r, trans="T")

    z = lsqr(LinearOperator((m, n), matvec=forward, rmatvec=adjoint), b, atol=1e-15, btol=1e-15, iter_lim=200)[0]
    return np.asarray(scipy.linalg.solve_triangular(R, z))


def make_problem(m: int, n: int, condition: float, folder: Path) -> None:
    """Store A with this condition number, b with a residual of norm 1e-3, and A's singular values and vectors."""
    rng = np.random.default_rng(SEED)
    V = np.linalg.qr(rng.standard_normal((n, n)))[0]
    A = rng.standard_normal((m, n)) / np.sqrt(m) * np.geomspace(1, 1 / condition, n) @ V.T
    noise = rng.standard_normal(m)
    b = A @ (V @ rng.standard_normal(n) / np.sqrt(n)) + 1e-3 * noise / np.linalg.norm(noise)
    _, s, Vh = np.linalg.svd(np.linalg.qr(A, mode="r"))
    for name, array in (("A", A), ("b", b), ("s", s), ("Vh", Vh)):
        np.save(folder / f"{name}.npy", array)


def backward_error(A: np.ndarray, b: np.ndarray, x: np.ndarray, s: np.ndarray, Vh: np.ndarray) -> float:
    """Return the `karlson_walden` estimate of a solution x, with residuals in extended precision."""
    wide_x, gradient, squares = x.astype(np.longdouble), np.zeros(A.shape[1], np.longdouble), np.longdouble(0)
    for i in range(0, A.shape[0], ROWS):
        block = A[i : i + ROWS].astype(np.longdouble)
        residual = b[i : i + ROWS].astype(np.longdouble) - block @ wide_x
        gradient += residual @ block
        squares += residual @ residual
    return karlson_walden(gradient.astype(float), float(squares), float(np.linalg.norm(b)), x, s, Vh)


def karlson_walden(
    gradient: np.ndarray, squares: float, b_norm: float, x: np.ndarray, s: np.ndarray, Vh: np.ndarray
) -> float:
    """Return the Karlson-Walden estimate of the backward error, relative to ||A||_F, with t = ||A||_F / ||b||.

    Given are A'(b - A x), ||b - A x||^2, ||b||, x, and A's singular values s and right singular vectors Vh.
    """
    norm = np.linalg.norm(s)
    theta = norm / b_norm
    root = np.sqrt(1 + theta**2 * (x @ x))
    eta = theta * np.sqrt(squares) / root
    return float(theta / root * np.linalg.norm((Vh @ gradient) / np.sqrt(s**2 + eta**2)) / norm)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return (result, median seconds)."""
    seconds: list[float] = []
    result = None
    while len(seconds) < REPEATS and sum(seconds) < MAX_SECONDS:
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
    return result, float(np.median(seconds))


def measure_solver(name: str, folder: Path) -> dict[str, float]:
    """Return time and backward error of a method on the stored problem."""
    A, b, s, Vh = (np.load(folder / f"{each}.npy") for each in ("A", "b", "s", "Vh"))
    warm = np.random.default_rng(SEED).standard_normal((4000, 20))
    METHODS[name](warm, warm[:, 0].copy())  # compile and start threads
    try:
        x, seconds = timed(lambda: METHODS[name](A, b))
    except np.linalg.LinAlgError as e:
        return {"failed": str(e)}  # type: ignore[dict-item]
    return {"seconds": seconds, "backward error": backward_error(A, b, x, s, Vh)}


# ------------------------------------------------------------------------------------- low rank


def make_spectrum(shape: tuple[int, int], folder: Path) -> None:
    """Store a float32 matrix whose singular values decay as 1/j, and their squares."""
    rng = np.random.default_rng(SEED)
    m, n = shape
    V = np.linalg.qr(rng.standard_normal((n, n)))[0].astype(np.float32)
    A = np.empty(shape, np.float32)
    for i in range(0, m, ROWS):
        A[i : i + ROWS] = rng.standard_normal((min(ROWS, m - i), n), np.float32) / np.arange(1, n + 1, dtype="f4") @ V
    gram = np.zeros((n, n))
    for i in range(0, m, ROWS):
        gram += A[i : i + ROWS].T.astype(float) @ A[i : i + ROWS]
    np.save(folder / "A.npy", A)
    np.save(folder / "squares.npy", np.linalg.eigvalsh(gram)[::-1])


def error_over_best(A: np.ndarray, squares: np.ndarray, factors: Any) -> float:
    """Return ||A - U s Vh||_F relative to that of the best approximation."""
    U, s, Vh = factors
    total = 0.0
    for i in range(0, A.shape[0], ROWS):
        rest = A[i : i + ROWS] - (U[i : i + ROWS] * s) @ Vh
        total += float((rest * rest).sum())
    return float(np.sqrt(total / squares[len(s) :].sum()))


def low_rank(kind: str, n_iter: int) -> Callable[[np.ndarray], Any]:
    """Return a function that computes a low-rank approximation, with sjlt or scikit-learn."""

    def ours(A: np.ndarray) -> Any:
        from sjlt.linalg import svd_lowrank

        return svd_lowrank(A, RANK, n_iter=n_iter, seed=SEED)

    def theirs(A: np.ndarray) -> Any:
        from sklearn.utils.extmath import randomized_svd

        return randomized_svd(A, RANK, n_iter=n_iter, random_state=SEED)

    return ours if kind == "sjlt" else theirs


def measure_low_rank(kind: str, n_iter: int, folder: Path) -> dict[str, float]:
    """Return time and error of a low-rank approximation of the stored matrix."""
    A, squares = np.load(folder / "A.npy"), np.load(folder / "squares.npy")
    call = low_rank(kind, n_iter)
    call(A[:4000])
    factors, seconds = timed(lambda: call(A))
    return {"seconds": seconds, "error over best": error_over_best(A, squares, factors)}


# ------------------------------------------------------------------------------------- the run


def in_child(*arguments: object) -> dict[str, float]:
    """Run one measurement in a process of its own."""
    found: dict[str, float] = json.loads(in_process("-m", "benchmarks.linalg", "--measure", *map(str, arguments)))
    print(*arguments[:-1], found, file=sys.stderr, flush=True)
    return found


def run_solvers(quick: bool, folder: Path) -> dict[str, Any]:
    found = {}
    for m, n in SHAPES.values():
        if quick:
            m, n = m // 10, n // 5
        for condition in CONDITIONS:
            make_problem(m, n, condition, folder)
            title = f"({m}, {n}), condition {condition:.0e}"
            found[title] = {name: in_child("solver", name, folder) for name in METHODS}
    return found


def run_low_rank(quick: bool, folder: Path) -> dict[str, Any]:
    """Measure 0, 1, ... iterations until the error is within 1 % of the best; the table pairs rows of equal error."""
    shape = (LOW_RANK[0] // (10 if quick else 1), LOW_RANK[1])
    make_spectrum(shape, folder)
    found: dict[str, Any] = {}
    for kind in ("sjlt", "scikit-learn"):
        for n_iter in range(6):
            row = found[f"{kind}, n_iter {n_iter}"] = in_child("low_rank", kind, n_iter, folder)
            if row["error over best"] < 1.01:
                break
    return {f"{shape}, rank {RANK}, singular values 1/j": found}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linalg", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows; the results are not saved")
    parser.add_argument(
        "--file-gb", type=float, default=None, help=f"size of the file in GB, default {linalg_files.GIGABYTES:g}"
    )
    parser.add_argument("--directory", type=Path, default=None, help="folder for the data, 7 GB")
    parser.add_argument("--cuda", action="store_true", help="measure CUDA tensors instead")
    parser.add_argument("--measure", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        kind, *names, folder = arguments.measure
        call: Callable[..., Any] = measure_low_rank if kind == "low_rank" else measure_solver
        values = [int(name) if name.isdigit() else name for name in names]
        print(json.dumps(call(*values, Path(folder))))
        return
    gigabytes = arguments.file_gb or (linalg_files.GIGABYTES / 10 if arguments.quick else linalg_files.GIGABYTES)
    if arguments.cuda:
        from .linalg_gpu import run

        run(arguments.quick, gigabytes, arguments.directory)
        return
    results: dict[str, Any] = {"environment": environment()}
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        folder = Path(name)
        results["least squares"] = run_solvers(arguments.quick, folder)
        results["low rank"] = run_low_rank(arguments.quick, folder)
        results["file"] = linalg_files.run(linalg_files.ON_CPU, gigabytes, folder)
    if not arguments.quick:
        save(RESULTS, results)


if __name__ == "__main__":
    main()
