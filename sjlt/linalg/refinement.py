"""Iterative refinement in a basis that a sketch makes: the two solvers of least-squares problems."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .problem import TARGET, Problem
from .products import one_blas_thread
from .sums import Sum
from .triangular import cholesky_solve
from .whitening import EPS, MAX_GRAM_CONDITION, NOISE, LostRangeError, Whitening, cholesky

ACCEPTED = 100 * EPS  # backward error beyond which the sketch is made anew, and at last an error is raised
SKETCHES = 3
MAX_REFINEMENTS = 12
MAX_CG_STEPS = 120  # A W has a condition number below 4: 16 digits take fewer than 60
CG_REDUCTION = 1e-14  # of the residual of one conjugate gradient solve; what rounding left, the next refinement removes
PROBES = 2
MIN_SCALE = 1e-100  # of a column of A, for A'A
# Refinements in a row that may fail to halve the backward error. At condition 1e14 the first solutions are far too
# large (1e8 for a solution of norm 1), and as ||x|| falls the relative error rises before it falls.
STALLS = 2


def solve(problem: Problem, seed: int, method: str) -> tuple[Any, Any, float]:
    """(X, squared norms of residuals, backward error) from the first of a few sketches that serves."""
    reasons = []
    is_small = method == "passes" or (method == "auto" and problem.matrix.gram_columns == math.inf)
    for attempt in range(SKETCHES):
        whitening, X, is_direct = problem.sketched(seed + attempt, is_small)
        try:
            X, squares, errors = _refined(problem, whitening, X, is_direct, method)
            error = float(errors.max())
            if error <= ACCEPTED:
                return X, squares, error
            raise LostRangeError(f"backward error {error:.1e}")
        except LostRangeError as lost:
            reasons.append(str(lost))
        if is_direct:
            break
    raise np.linalg.LinAlgError(
        f"no solution with a backward error below {ACCEPTED:.1e} for A of shape {problem.matrix.shape} from "
        f"{len(reasons)} sketches: {'; '.join(reasons)}"
    )


def _refined(problem: Problem, whitening: Whitening, X: Any, is_direct: bool, method: str) -> tuple[Any, Any, Any]:
    if problem.rcond is not None and problem.cuts_spectrum and not is_direct:
        whitening = _exact(problem, whitening, problem.rcond)
        X = 0 * X
    problem.set_rank(whitening)
    if whitening.rank == 0:
        _, squares = problem.gradient(X)
        return X, squares, 0 * squares
    sums: list[Sum] = []
    if whitening.null.shape[1] and not is_direct and not problem.cuts_spectrum:
        sums.append(_NullProbe(problem, whitening))
    if _use_passes(problem, whitening, method):
        if is_direct and whitening.is_triangular:
            first, correct = problem.gradient(X, *sums), _normal_solution(whitening)
        elif _is_moderate(problem, whitening):
            gram = problem.gram()
            first = problem.gradient(X, gram, *sums)
            exact = Whitening.of_gram(problem.xp, gram.value / problem.scale / problem.scale.T)
            if exact is None:
                raise LostRangeError("A is far worse conditioned than its sketch")
            whitening, correct = exact, _normal_solution(exact)
        else:
            gram = problem.gram(whitening)
            first = problem.gradient(X, gram, *sums, width=whitening.rank)
            correct = _cholesky(problem, whitening, gram.value)
    else:
        first = problem.gradient(X, *sums)
        correct = _conjugate_gradients(problem, whitening)
    for probe in sums:
        probe.check()  # type: ignore[attr-defined]
    return _refinement(problem, whitening, X, first, correct)


def _use_passes(problem: Problem, whitening: Whitening, method: str) -> bool:
    """Whether a Gram matrix is formed: by "auto" A'A itself, where that is possible and takes less time than "cg"."""
    if method != "auto":
        return method == "passes"
    columns, limit = problem.matrix.shape[1], problem.matrix.gram_columns
    return limit == math.inf or (columns <= limit and _is_moderate(problem, whitening))


def _is_moderate(problem: Problem, whitening: Whitening) -> bool:
    """Whether A'A gives a basis as good as (A W)'(A W) does, in a third of the time.

    A's condition number is at most 4 times its sketch's. (A wide range of scales would overflow in A'A.)
    """
    if not whitening.is_triangular or 8 * whitening.condition > MAX_GRAM_CONDITION:
        return False
    return float(problem.scale.min()) > MIN_SCALE and float(problem.scale.max()) < 1 / MIN_SCALE


def _refinement(
    problem: Problem, whitening: Whitening, X: Any, first: tuple[Any, Any], correct: Callable[..., Any]
) -> tuple[Any, Any, Any]:
    """Corrections until the backward error is small enough or does not fall any more; the best X of each column."""
    xp = problem.xp
    G, squares = first
    errors = problem.backward_errors(whitening, X, G, squares, is_first=True)
    best = X, squares, errors
    stalled = 0
    for _ in range(MAX_REFINEMENTS):
        todo = errors > TARGET
        if not bool(todo.any()):
            break
        X = X + correct(xp.where(todo, G, 0 * G), X)
        G, squares = problem.gradient(X)
        errors = problem.backward_errors(whitening, X, G, squares)
        better = errors < best[2]
        halved = bool((errors[todo] < 0.5 * best[2][todo]).any())
        best = tuple(xp.where(better, new, old) for new, old in zip((X, squares, errors), best, strict=True))
        stalled = 0 if halved else stalled + 1
        if stalled == STALLS or (stalled and bool((best[2] <= 2 * TARGET).all())):
            break
    problem.check_size(whitening, best[0])
    return best


def _normal_solution(whitening: Whitening) -> Callable[..., Any]:
    """Corrections by A'A = R'R, where W = R^-1 is A's own basis."""

    def correct(G: Any, X: Any) -> Any:
        return whitening.normal_solution(G)

    return correct


def _conjugate_gradients(problem: Problem, whitening: Whitening) -> Callable[..., Any]:
    @one_blas_thread()  # more would still wait for work in loops while the next pass runs
    def correct(G: Any, X: Any) -> Any:
        """The solution of (A'A + d^2) dX = G in the basis W, to a relative residual of CG_REDUCTION."""
        damp, xp = problem.damp, problem.xp
        residual = whitening.apply_transposed(G, damp)
        squares = (residual * residual).sum(0)
        goal = xp.maximum(CG_REDUCTION**2 * squares, problem.cg_floor(whitening, X) ** 2)
        Y, direction = 0 * residual, residual
        for _ in range(MAX_CG_STEPS):
            if not bool((squares > goal).any()):
                return whitening.apply(Y, damp)
            image = whitening.apply_transposed(problem.normal(whitening.apply(direction, damp)), damp)
            curvature = (direction * image).sum(0)
            step = xp.where(curvature > 0, squares / xp.where(curvature > 0, curvature, 1 + 0 * curvature), 0 * squares)
            Y = Y + step * direction
            residual = residual - step * image
            before, squares = squares, (residual * residual).sum(0)
            direction = residual + direction * (squares / xp.where(before > 0, before, 1 + 0 * before))
        raise LostRangeError(f"conjugate gradients did not converge in {MAX_CG_STEPS} steps")

    return correct


def _cholesky(problem: Problem, whitening: Whitening, gram: Any) -> Callable[..., Any]:
    """Corrections by a factorization of W'(A'A + d^2) W for each ridge d."""
    xp = problem.xp
    solvers = []
    for ridge in problem.scaled_ridges:
        scaling = xp.ones_like(gram[0])
        system = gram
        if not whitening.is_triangular:
            ratio = whitening.ridges(ridge[None])[:, 0]
            scaling = 1 / xp.sqrt(1 + ratio**2)  # to a diagonal of about 1
            system = (gram + xp.diag(ratio**2)) * scaling[:, None] * scaling
        solvers.append((cholesky(xp, system), scaling))
    basis = whitening.matrix()

    def correct(G: Any, X: Any) -> Any:
        white = basis.T @ G
        out = 0 * white
        for r, (factor, scaling) in enumerate(solvers):
            columns = np.flatnonzero(problem.ridge_of == r)
            right = white[:, columns] * scaling[:, None]
            out[:, columns] = cholesky_solve(xp, factor, right) * scaling[:, None]
        return basis @ out

    return correct


def _exact(problem: Problem, whitening: Whitening, rcond: float) -> Whitening:
    """The basis of A's own singular vectors, from one pass, cut at rcond."""
    xp = problem.xp
    gram = problem.gram(whitening)
    problem.matrix.run(gram, width=whitening.rank)
    refined = whitening.refined(cholesky(xp, gram.value).T, rcond)
    refined.factor = refined.factor * float(problem.scale[0, 0])
    return refined


class _NullProbe(Sum):
    """Whether A, too, maps random vectors of the sketch's null space to about 0."""

    def __init__(self, problem: Problem, whitening: Whitening):
        null = whitening.null
        signs = np.random.default_rng(0).choice([-1.0, 1.0], (null.shape[1], PROBES))
        self._vectors = null @ problem.matrix.array(signs / math.sqrt(null.shape[1])) / problem.scale
        self._allowed = 100 * NOISE * whitening.norm
        self._squares: Any = 0

    def add(self, start: int, block: Any) -> None:
        image = block @ self._vectors
        self._squares = self._squares + (image * image).sum(0)

    def check(self) -> None:
        largest = math.sqrt(float(self._squares.max()))
        if largest > self._allowed:
            raise LostRangeError(f"the sketch has rank below A's: ||A v|| = {largest:.1e} ||A|| for its null vectors v")
