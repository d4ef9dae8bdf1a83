"""Solve min ||A x - b|| for a tall, ill-conditioned A: a sketch of A makes a preconditioner, LSQR does the rest.

With SA = QR for a sketch S of a few times n rows, A R^-1 is well conditioned, so LSQR needs a few dozen steps whatever
the condition of A. See Rokhlin, Tygert, "A fast randomized algorithm for overdetermined linear least-squares
regression", PNAS 105(36), 2008, and Avron, Maymounkov, Toledo, "Blendenpik", SISC 32(3), 2010.

    python examples/least_squares.py
"""

from __future__ import annotations

import time

import numpy as np
import scipy.linalg
from scipy.sparse.linalg import LinearOperator, lsqr

import sjlt


def solve(A: np.ndarray, b: np.ndarray, seed: int = 0) -> tuple[np.ndarray, int]:
    """The least-squares solution, and the steps that LSQR took."""
    m, n = A.shape
    S = sjlt.Sketch(m, 4 * n, nnz=8, seed=seed)
    R = np.linalg.qr(S @ A, mode="r")

    def forward(z: np.ndarray) -> np.ndarray:
        return A @ scipy.linalg.solve_triangular(R, z)

    def adjoint(r: np.ndarray) -> np.ndarray:
        return scipy.linalg.solve_triangular(R, A.T @ r, trans="T")

    preconditioned = LinearOperator((m, n), matvec=forward, rmatvec=adjoint, dtype=A.dtype)
    z, _, steps, *_ = lsqr(preconditioned, b, atol=1e-14, btol=1e-14)
    return scipy.linalg.solve_triangular(R, z), steps


def main(m: int = 200_000, n: int = 200) -> None:
    rng = np.random.default_rng(0)
    A = rng.standard_normal((m, n)) * np.geomspace(1, 1e-6, n) @ np.linalg.qr(rng.standard_normal((n, n)))[0]
    b = A @ rng.standard_normal(n) + rng.standard_normal(m)
    sjlt.Sketch(m, 4 * n) @ A[:, :1]  # compile outside the clock

    start = time.perf_counter()
    x, steps = solve(A, b)
    sketched = time.perf_counter() - start
    start = time.perf_counter()
    reference, *_ = scipy.linalg.lstsq(A, b, lapack_driver="gelsd")
    direct = time.perf_counter() - start

    excess = np.linalg.norm(A @ x - b) / np.linalg.norm(A @ reference - b) - 1
    print(f"A of shape {A.shape}, condition number {np.linalg.cond(A):.0e}")
    print(f"sketch + LSQR   {sketched:6.2f} s, {steps} steps, residual {excess:+.1e} of the direct one's")
    print(f"scipy lstsq     {direct:6.2f} s")


if __name__ == "__main__":
    main()
