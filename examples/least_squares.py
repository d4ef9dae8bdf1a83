"""Least squares for tall matrices: `sjlt.linalg.lstsq` compared with LAPACK, the normal equations and LSQR.

All solvers are given the same well-conditioned and ill-conditioned problems, and compared by time and backward error:
the smallest relative change of A and b for which x is the exact solution (estimated by the method of Karlson and
Walden). For a backward stable method, this is about 1e-16 whatever the condition number of A.

    python examples/least_squares.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import scipy.linalg
from scipy.sparse.linalg import LinearOperator, lsqr

import sjlt
import sjlt.linalg


def sjlt_lstsq(A: np.ndarray, b: np.ndarray) -> np.ndarray:
    return sjlt.linalg.lstsq(A, b).x


def lapack(A: np.ndarray, b: np.ndarray) -> np.ndarray:
    return scipy.linalg.lstsq(A, b, lapack_driver="gelsd")[0]


def lapack_pivoted(A: np.ndarray, b: np.ndarray) -> np.ndarray:
    return scipy.linalg.lstsq(A, b, lapack_driver="gelsy")[0]


def normal_equations(A: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The fastest method if it works, but it squares the condition number."""
    return scipy.linalg.cho_solve(scipy.linalg.cho_factor(A.T @ A), A.T @ b)


def plain_lsqr(A: np.ndarray, b: np.ndarray) -> np.ndarray:
    return lsqr(A, b, atol=1e-15, btol=1e-15, conlim=0, iter_lim=300)[0]


def preconditioned_lsqr(A: np.ndarray, b: np.ndarray) -> np.ndarray:
    """LSQR on A R^-1, where SA = QR for a sketch S, as in Blendenpik: well conditioned, so few steps suffice.

    Started from zero, it is not backward stable: the error grows with the condition number, though less than above.
    """
    m, n = A.shape
    S = sjlt.Sketch(m, 4 * n, nnz=8, stacks=4)
    R = np.linalg.qr(S @ A, mode="r")

    def forward(z: np.ndarray) -> np.ndarray:
        return A @ scipy.linalg.solve_triangular(R, z)

    def adjoint(r: np.ndarray) -> np.ndarray:
        return scipy.linalg.solve_triangular(R, A.T @ r, trans="T")

    preconditioned = LinearOperator((m, n), matvec=forward, rmatvec=adjoint, dtype=A.dtype)
    return scipy.linalg.solve_triangular(R, lsqr(preconditioned, b, atol=1e-15, btol=1e-15, iter_lim=200)[0])


SOLVERS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "sjlt.linalg.lstsq": sjlt_lstsq,
    "LAPACK gelsd": lapack,
    "LAPACK gelsy": lapack_pivoted,
    "normal equations": normal_equations,
    "LSQR": plain_lsqr,
    "LSQR, sketched preconditioner": preconditioned_lsqr,
}


def problem(m: int, n: int, condition: float) -> tuple[np.ndarray, np.ndarray]:
    """A with this condition number, up to a small factor, and b with a residual of norm 1e-3."""
    rng = np.random.default_rng(0)
    V = np.linalg.qr(rng.standard_normal((n, n)))[0]
    A = rng.standard_normal((m, n)) / np.sqrt(m) * np.geomspace(1, 1 / condition, n) @ V.T
    noise = rng.standard_normal(m)
    return A, A @ (V @ rng.standard_normal(n)) + 1e-3 * noise / np.linalg.norm(noise)


def singular(A: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The singular values and right singular vectors of A."""
    _, s, Vh = np.linalg.svd(np.linalg.qr(A, mode="r"))
    return s, Vh


def backward_error(A: np.ndarray, b: np.ndarray, x: np.ndarray, s: np.ndarray, Vh: np.ndarray) -> float:
    """The Karlson-Walden estimate for x, relative to ||A||_F, with the residual in extended precision."""
    gradient, squares = np.zeros(x.size, np.longdouble), np.longdouble(0)
    for i in range(0, len(A), 1000):
        block = A[i : i + 1000].astype(np.longdouble)
        residual = b[i : i + 1000].astype(np.longdouble) - block @ x.astype(np.longdouble)
        gradient += residual @ block
        squares += residual @ residual
    norm = np.linalg.norm(s)
    theta = norm / np.linalg.norm(b)
    root = np.sqrt(1 + theta**2 * (x @ x))
    eta = theta * float(np.sqrt(squares)) / root
    return float(theta / root * np.linalg.norm((Vh @ gradient.astype(float)) / np.sqrt(s**2 + eta**2)) / norm)


def compare(m: int, n: int, condition: float) -> dict[str, tuple[float, float]]:
    """(seconds, backward error) of each solver, NaN if it fails."""
    A, b = problem(m, n, condition)
    s, Vh = singular(A)
    results = {}
    for name, solve in SOLVERS.items():
        start = time.perf_counter()
        try:
            x = solve(A, b)
        except np.linalg.LinAlgError:
            results[name] = np.nan, np.nan
        else:
            results[name] = time.perf_counter() - start, backward_error(A, b, x, s, Vh)
    return results


def main(m: int = 100_000, n: int = 300) -> None:
    rng = np.random.default_rng(0)
    for solve in SOLVERS.values():  # compile and start threads before timing
        solve(rng.standard_normal((5000, 20)), rng.standard_normal(5000))
    for condition in (1e2, 1e10):
        print(f"A of shape ({m}, {n}), condition number {condition:.0e}")
        for name, (seconds, error) in compare(m, n, condition).items():
            answer = "not positive definite" if np.isnan(error) else f"{seconds:6.2f} s, backward error {error:.0e}"
            print(f"  {name:30} {answer}")


if __name__ == "__main__":
    main()
