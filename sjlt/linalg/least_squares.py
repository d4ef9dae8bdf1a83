"""Least squares as accurate as a QR factorization of A, in a few passes over A."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..inputs.checks import below_one, seed_number
from ..inputs.containers import is_tensor
from .checks import as_array
from .containers import like_input, matrix_of
from .matrix import Matrix, Progress
from .problem import Problem
from .refinement import solve

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


@dataclass(frozen=True, eq=False)
class LstsqResult:
    """The solution of a least-squares problem, with evidence.

    Attributes
    ----------
    x : {ndarray, tensor} of shape (n,) or (n, columns of b); for a sequence of `damp` one axis more in front, float64
        Where A's rank is below n, the solution of minimum norm.
    residuals : {ndarray, tensor}, float64
        Squared norms of b - A x, one per solution; infinite where they exceed the largest float64.
    rank : int
        Numerical rank of A: its singular values above rcond times the largest.
    singular_values : {ndarray, tensor} of shape (min(m, n),), float64
        Estimates from the sketch, descending: each within a factor of 2 of A's. (Exact to rounding where A
        itself is factored; see the notes of `lstsq`.) Computed at the first access if the solution did without.
    iterations : int
        Passes over A.
    backward_error : float
        The largest, over the solutions, of the Karlson-Walden estimate of the smallest ||[dA, t db]||_F / ||A||_F, with
        t = ||A||_F / ||b||, for which x solves the problem (A + dA, b + db) exactly.
    """

    x: Any
    residuals: Any
    rank: int
    iterations: int
    backward_error: float
    _factor: Any = field(repr=False)  # a square matrix of A's singular values, or these themselves

    @functools.cached_property
    def singular_values(self) -> Any:
        if self._factor.ndim == 1:
            return self._factor
        if is_tensor(self._factor):
            import torch

            return torch.linalg.svdvals(self._factor)
        return np.linalg.svd(self._factor, compute_uv=False)


def lstsq(
    A: Any,
    b: ArrayLike,
    *,
    damp: float | Sequence[float] = 0.0,
    rcond: float | None = None,
    seed: int = 0,
    method: Literal["auto", "cg", "passes"] = "auto",
    callback: Progress | None = None,
) -> LstsqResult:
    """Solve min ||A x - b||^2 + damp^2 ||x||^2, as accurately as Householder QR does.

    A sketch of A gives a basis W in which A W is well conditioned; refinement in this basis gives the solution. No
    digit is lost to the sketch: if refinement does not converge, A is sketched anew, and at last an error is raised.

    Parameters
    ----------
    A : {ndarray, CSR or CSC matrix or array, tensor, path of an .npy file} of shape (m, n), float32 or float64
        Meant for m much larger than n. A file may be larger than memory. Sums run in float64 for float32 data, too.
    b : array_like of shape (m,) or (m, columns), real
    damp : float or sequence of floats, each >= 0 and finite, default 0
        Ridge parameter. All values of a sequence are solved from one sketch, in the same passes.
    rcond : float in [0, 1), optional
        Singular values of A up to rcond times the largest count as zero, as in `scipy.linalg.lstsq`; by default 10
        machine epsilons. With rcond above that, and a sketch, one more pass determines the singular values to rounding.
    seed : int, -2^63 to 2^64 - 1, default 0
        Seed of the sketch.
    method : {"auto", "cg", "passes"}, default "auto"
        "cg": conjugate gradients in the basis W, with refinement; 15 to 60 passes, each of few operations. "passes":
        (A W)'(A W), or A'A where A is well conditioned, is formed and factored; 3 to 5 passes, one of many operations.
        "auto" is "passes" for a file, for a CUDA tensor of up to 1024 columns, and for an array of up to 800 columns
        that is well conditioned; else "cg".
    callback : callable, optional
        Called as ``callback(pass, rows done, m)`` while A is read. An exception that it raises ends the solution.

    Returns
    -------
    LstsqResult
        Tensors on A's device where A is a tensor, else arrays.

    Raises
    ------
    TypeError
        For complex, integer or other dtypes than float32 and float64 of A, and containers not listed above.
    ValueError
        For empty or non-finite A or b, shapes that do not match, parameters out of range, and a file that changes
        between passes.
    numpy.linalg.LinAlgError
        Where three sketches did not give a backward error below 100 machine epsilons, and where the solution is beyond
        the largest float64.

    Notes
    -----
    A itself is factored, which costs what LAPACK costs, where it has fewer than twice as many rows as its sketch would
    have: fewer than about 8 n (by "cg" up to 24 n), and any A with fewer than 1024 rows or with m < n.

    References
    ----------
    Epperly, Meier, Nakatsukasa, "Fast randomized least-squares solvers can be just as accurate and stable as classical
    direct solvers", 2024 (arXiv 2406.03468): sketch-and-precondition with iterative refinement ("cg"). Higgins, Szyld,
    Boman, Yamazaki, "Analysis of randomized Householder-Cholesky QR factorization with multisketching", 2023 (arXiv
    2309.05868): the relative of "passes". Karlson, Walden, "Estimation of optimal backward perturbation bounds for the
    linear least squares problem", BIT 37, 1997.

    Examples
    --------
    >>> import numpy as np, sjlt.linalg
    >>> rng = np.random.default_rng(0)
    >>> A = rng.normal(size=(5000, 20)) * np.geomspace(1, 1e-8, 20)
    >>> solution = sjlt.linalg.lstsq(A, A @ np.ones(20))
    >>> solution.rank, bool(np.abs(solution.x - 1).max() < 1e-6)
    (20, True)
    """
    if method not in ("auto", "cg", "passes"):
        raise ValueError(f'method must be "auto", "cg" or "passes", got {method!r}')
    seed = seed_number(seed)
    ridges, is_sequence = _ridges(damp)
    rcond = None if rcond is None else below_one("rcond", rcond)
    matrix = matrix_of(A, "A", callback)
    try:
        B, is_vector = _right_hand_sides(matrix, b)
        problem = Problem(matrix, B, ridges, rcond)
        X, squares, error = solve(problem, seed, method)
    finally:
        matrix.close()
    n, q = matrix.shape[1], B.shape[1]
    shape = (*((ridges.size,) if is_sequence else ()), *(() if is_vector else (q,)))
    x = problem.xp.moveaxis(problem.unscaled(X).reshape(n, ridges.size, q), 0, 1)
    x = x.reshape((*shape[:is_sequence], n, *shape[is_sequence:]))
    with np.errstate(over="ignore"):
        squares = (squares * problem.b_scale * problem.b_scale).reshape(shape)
    x, squares, factor = (like_input(A, value) for value in (x, squares, problem.factor))
    return LstsqResult(x, squares, problem.rank, matrix.passes, error, factor)


def _ridges(damp: float | Sequence[float]) -> tuple[np.ndarray, bool]:
    values = np.asarray(damp)
    if values.dtype.kind not in "iuf" or values.ndim > 1 or values.size == 0:
        raise TypeError(f"damp must be a number or a sequence of numbers, got {damp!r}")
    values = values.astype(np.float64)
    if not (np.isfinite(values).all() and (values >= 0).all()):
        raise ValueError(f"damp must be finite and not negative, got {damp!r}")
    return np.atleast_1d(values), values.ndim == 1


def _right_hand_sides(matrix: Matrix, b: Any) -> tuple[Any, bool]:
    """b as (m, columns) in float64, and whether it is a vector."""
    if isinstance(b, (str, os.PathLike)):
        raise TypeError(f"b must be an array, got the path {os.fspath(b)!r}: load it with numpy.load")
    if not is_tensor(b):
        b = as_array("b", b)
    kind = str(b.dtype)
    if "complex" in kind or not any(name in kind for name in ("float", "int", "bool")):
        raise TypeError(f"b must be real, dtype {kind} is refused")
    if b.ndim not in (1, 2) or b.shape[0] != matrix.shape[0] or 0 in b.shape:
        m = matrix.shape[0]
        raise ValueError(f"b must have shape ({m},) or ({m}, columns) for A of shape {matrix.shape}, got {b.shape}")
    B = matrix.array(b)
    is_vector = B.ndim == 1
    B = B.reshape(B.shape[0], -1)
    finite = matrix.xp.isfinite(B)
    if not bool(finite.all()):
        i, j = divmod(int((~finite).reshape(-1).nonzero()[0][0]), B.shape[1])
        place = f"{i}" if is_vector else f"{i}, {j}"
        raise ValueError(f"b[{place}] is {float(B[i, j])}: b must be finite")
    return B, is_vector
