"""Least squares, as accurate as a QR factorization of A, in a few passes over A."""

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
from .containers import as_matrix, like_input
from .matrix import Matrix, Progress
from .problem import Problem
from .refinement import solve

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


@dataclass(frozen=True, eq=False)
class LstsqResult:
    """The solution of a least-squares problem, and how accurate it is.

    Attributes
    ----------
    x : {ndarray, tensor} of shape (n,) or (n, columns of b), float64
        The solution of minimum norm if A's rank is below n. If `damp` is a sequence, x has a leading axis for its
        values.
    residuals : {ndarray, tensor} of shape () or (columns of b,), with the leading axis of x if it has one, float64
        Squared norm of b - A x for each solution; infinite if it overflows.
    rank : int
        Numerical rank of A: the number of singular values above rcond times the largest.
    singular_values : {ndarray, tensor} of shape (min(m, n),), float64
        Singular values of A in descending order, estimated from the sketch to within a factor of 2 each; exact up to
        rounding if A itself was factored (see the notes of `lstsq`). Computed on first access if `lstsq` did not need
        them.
    iterations : int
        Number of passes over A.
    backward_error : float
        The Karlson-Walden estimate of the smallest ||[dA, t db]||_F / ||A||_F, with t = ||A||_F / ||b||, for which x
        solves the problem (A + dA, b + db) exactly; the largest over the solutions.
    """

    x: Any
    residuals: Any
    rank: int
    iterations: int
    backward_error: float
    _factor: Any = field(repr=False)  # the singular values, or a square matrix that has them

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
    """Solve min ||A x - b||^2 + damp^2 ||x||^2 as accurately as Householder QR.

    A sketch of A gives a basis W such that A W is well conditioned, and iterative refinement in this basis gives the
    solution. The sketch costs no accuracy: if refinement does not converge, A is sketched again, and after three
    sketches an error is raised.

    Parameters
    ----------
    A : {ndarray, CSR or CSC matrix or array, tensor, path of an .npy file} of shape (m, n), float32 or float64
        Intended for m much larger than n. A file may be larger than memory. float32 data is summed in float64.
    b : array_like of shape (m,) or (m, columns), real
        If A is a file and b a CUDA tensor, A's blocks are copied to b's device, where everything is computed.
    damp : float or sequence of floats, each >= 0 and finite, default 0
        Ridge parameter. A sequence is solved for all its values with one sketch, in the same passes.
    rcond : float in [0, 1), optional
        Singular values of A up to rcond times the largest count as zero, as in `scipy.linalg.lstsq`; 10 machine
        epsilons by default. If A is sketched, a larger rcond costs one more pass, which computes A's own singular
        values.
    seed : int, -2^63 to 2^64 - 1, default 0
        Seed of the sketch.
    method : {"auto", "cg", "passes"}, default "auto"
        "cg": conjugate gradients in the basis W, with refinement; 15 to 60 cheap passes. For a C-contiguous float64
        array of at least 100 columns with a condition number up to about 1e5, and one right-hand side, most passes
        read a float32 copy of A. "passes": form and factor (A W)'(A W), or A'A if A is well conditioned; 3 to 5
        passes, one of them expensive. "auto": "passes" for a file, a CUDA tensor of up to 1024 columns, or a
        well-conditioned array of up to 400 columns; otherwise "cg".
    callback : callable, optional
        Called as ``callback(pass, rows_done, m)`` while A is read. An exception raised by it ends the call.

    Returns
    -------
    LstsqResult
        Its values are tensors on A's device if A is a tensor, on b's device if A is a file and b a CUDA tensor;
        otherwise arrays.

    Raises
    ------
    TypeError
        If A is not float32 or float64, b is not real, or A or b is in a container not listed above.
    ValueError
        If A or b is empty or not finite, shapes do not match, a parameter is out of range, or a file changes between
        passes.
    numpy.linalg.LinAlgError
        If three sketches did not give a backward error below 100 machine epsilons, or the solution overflows float64.

    Notes
    -----
    If A has fewer than twice as many rows as its sketch would have, A itself is factored, at the cost of LAPACK. This
    happens for m below 8 n, rounded up to a multiple of 1024.

    References
    ----------
    Epperly, Meier, Nakatsukasa, "Fast randomized least-squares solvers can be just as accurate and stable as classical
    direct solvers", 2024 (arXiv 2406.03468): sketch-and-precondition with iterative refinement ("cg"). Higgins, Szyld,
    Boman, Yamazaki, "Analysis of randomized Householder-Cholesky QR factorization with multisketching", 2023 (arXiv
    2309.05868): related to "passes". Karlson, Walden, "Estimation of optimal backward perturbation bounds for the
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
    matrix = as_matrix(A, "A", callback, _device_for_files(b))
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
        squares = (matrix.array(squares) * problem.b_scale * problem.b_scale).reshape(shape)
    x, squares, factor = (like_input(A, value) for value in (x, squares, problem.factor))
    return LstsqResult(x, squares, problem.rank, matrix.passes, error, factor)


def _device_for_files(b: Any) -> Any:
    """Return the device to which the blocks of a file are copied, or None."""
    return b.device if is_tensor(b) and b.is_cuda else None


def _ridges(damp: float | Sequence[float]) -> tuple[np.ndarray, bool]:
    """Return the values of `damp` as a 1-D array, and whether `damp` is a sequence."""
    values = np.asarray(damp)
    if values.dtype.kind not in "iuf" or values.ndim > 1 or values.size == 0:
        raise TypeError(f"damp must be a number or a sequence of numbers, got {damp!r}")
    values = values.astype(np.float64)
    if not (np.isfinite(values).all() and (values >= 0).all()):
        raise ValueError(f"damp must be finite and not negative, got {damp!r}")
    return np.atleast_1d(values), values.ndim == 1


def _right_hand_sides(matrix: Matrix, b: Any) -> tuple[Any, bool]:
    """Return b as float64 of shape (m, columns), and whether it is a vector."""
    if isinstance(b, (str, os.PathLike)):
        raise TypeError(f"b must be an array, got the path {os.fspath(b)!r}: load it with numpy.load")
    if not is_tensor(b):
        b = as_array("b", b)
    kind = str(b.dtype) if is_tensor(b) else b.dtype.name  # whatever its byte order
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
        index = f"{i}" if is_vector else f"{i}, {j}"
        raise ValueError(f"b[{index}] is {float(B[i, j])}: b must be finite")
    return B, is_vector
