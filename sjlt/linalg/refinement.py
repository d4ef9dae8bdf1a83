"""Iterative refinement in a basis from a sketch: the two least-squares solvers, "cg" and "passes"."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .problem import TARGET, Problem
from .products import one_blas_thread
from .sums import Sum
from .triangular import cholesky_solve, on_host
from .whitening import EPS, MAX_GRAM_CONDITION, NOISE, LostRangeError, Whitening, cholesky

MAX_BACKWARD_ERROR = 100 * EPS  # beyond, another sketch is drawn, and after MAX_SKETCHES an error is raised
MAX_SKETCHES = 3
MAX_REFINEMENTS = 12
MAX_CG_STEPS = 120  # A W has a condition number below 4: 16 digits take fewer than 60
CG_REDUCTION = 1e-14  # of the residual, per conjugate gradient solve; the next refinement removes the rest
# The same if A is rounded to float32, at least. Rounding changes the solution, in the basis W, by about 2^-25 times the
# condition number over sqrt(m n); a solve more accurate than that would be in vain.
ROUNDED_REDUCTION, ROUNDED_CHANGE = 1e-7, 2.0**-25
N_PROBES = 2
MIN_SCALE = 1e-100  # smallest scale of a column of A for which A'A is formed
# Refinements in a row that may fail to halve the backward error. At a condition number of 1e14 the first solutions are
# far too large (1e8 for a solution of norm 1), and as ||x|| falls the relative error rises before it falls.
MAX_STALLS = 2


def solve(problem: Problem, seed: int, method: str) -> tuple[Any, np.ndarray, float]:
    """Return (X, squared residual norms, backward error) from the first sketch whose solution is accurate."""
    reasons = []
    is_small = method == "passes" or (method == "auto" and problem.matrix.max_gram_columns == math.inf)
    for attempt in range(MAX_SKETCHES):
        whitening, X, is_direct = problem.sketched(seed + attempt, is_small, may_be_single=attempt == 0)
        try:
            X, squares, errors = _refined(problem, whitening, X, is_direct, method)
            error = float(errors.max())
            if error <= MAX_BACKWARD_ERROR:
                return X, squares, error
            raise LostRangeError(f"backward error {error:.1e}")
        except LostRangeError as lost:
            reasons.append(str(lost))
        if is_direct:
            break
    raise np.linalg.LinAlgError(
        f"no solution with a backward error below {MAX_BACKWARD_ERROR:.1e} for A of shape {problem.matrix.shape} from "
        f"{len(reasons)} sketches: {'; '.join(reasons)}"
    )


def _refined(
    problem: Problem, whitening: Whitening, X: Any, is_direct: bool, method: str
) -> tuple[Any, np.ndarray, np.ndarray]:
    """Refine the sketched solutions X; return (X, squared residual norms, backward errors)."""
    if problem.rcond is not None and problem.cuts_spectrum and not is_direct:
        whitening = _exact_whitening(problem, whitening, problem.rcond)
        X = 0 * X
    problem.set_rank(whitening)
    if whitening.rank == 0:
        _, squares = problem.gradient(X)
        return X, squares, 0 * squares
    probes: list[_NullProbe] = []
    if whitening.null.shape[1] and not is_direct and not problem.cuts_spectrum:
        probes.append(_NullProbe(problem, whitening))
    if _use_passes(problem, whitening, method):
        if is_direct and whitening.is_triangular:
            first, correct = problem.gradient(X, *probes), _normal_solution(whitening)
        elif _is_well_conditioned(problem, whitening):
            gram = problem.gram()
            first = problem.gradient(X, gram, *probes)
            exact = Whitening.from_gram(problem.xp, gram.value / problem.scale / problem.scale.T)
            if exact is None:
                raise LostRangeError("A is far worse conditioned than its sketch")
            whitening, correct = exact, _normal_solution(exact)
        else:
            gram = problem.gram(whitening)
            first = problem.gradient(X, gram, *probes, width=whitening.rank)
            correct = _cholesky_solution(problem, whitening, gram.value)
    else:
        first = problem.gradient(X, *probes)
        correct = _conjugate_gradients(problem, whitening)
    for probe in probes:
        probe.check()
    return _refinement(problem, whitening, X, first, correct)


def _use_passes(problem: Problem, whitening: Whitening, method: str) -> bool:
    """Whether to use "passes"; for "auto", if it is faster than "cg"."""
    if method != "auto":
        return method == "passes"
    columns, limit = problem.matrix.shape[1], problem.matrix.max_gram_columns
    return limit == math.inf or (columns <= limit and _is_well_conditioned(problem, whitening))


def _is_well_conditioned(problem: Problem, whitening: Whitening) -> bool:
    """Whether A'A, which takes a third of the time, gives as good a basis as (A W)'(A W).

    A's condition number is at most 4 times its sketch's. Extreme scales of A's columns would overflow in A'A.
    """
    if not whitening.is_triangular or 8 * whitening.condition > MAX_GRAM_CONDITION:
        return False
    return float(problem.scale.min()) > MIN_SCALE and float(problem.scale.max()) < 1 / MIN_SCALE


@one_blas_thread()  # further threads would still be waiting in busy loops during the next pass
def _refinement(
    problem: Problem, whitening: Whitening, X: Any, first: tuple[Any, np.ndarray], correct: Callable[..., Any]
) -> tuple[Any, np.ndarray, np.ndarray]:
    """Correct X until the backward errors are small or stop falling; return the best solution of each column."""
    xp = problem.xp
    G, squares = first
    errors = problem.backward_errors(whitening, X, G, squares, is_first=True)
    best, best_squares, best_errors = X, squares, errors
    stalled = 0
    for _ in range(MAX_REFINEMENTS):
        todo = errors > TARGET
        if not todo.any():
            break
        X = X + correct(G if todo.all() else G * problem.matrix.array(todo), X)
        G, squares = problem.gradient(X)
        errors = problem.backward_errors(whitening, X, G, squares)
        better = errors < best_errors
        halved = (errors[todo] < 0.5 * best_errors[todo]).any()
        best = X if better.all() else xp.where(problem.matrix.indices(better), X, best)
        best_squares = np.where(better, squares, best_squares)
        best_errors = np.where(better, errors, best_errors)
        stalled = 0 if halved else stalled + 1
        if stalled:  # rounding may have changed A too much
            problem.keep_double()
        if stalled == MAX_STALLS or (stalled and (best_errors <= 2 * TARGET).all()):
            break
    problem.check_size(whitening, best)
    return best, best_squares, best_errors


def _normal_solution(whitening: Whitening) -> Callable[..., Any]:
    """Return corrections from A'A = R'R, where W = R^-1 is A's own basis."""

    def correct(G: Any, X: Any) -> Any:
        return whitening.normal_solution(G)

    return correct


def _conjugate_gradients(problem: Problem, whitening: Whitening) -> Callable[..., Any]:
    """Return corrections by conjugate gradients in the basis W."""

    def correct(G: Any, X: Any) -> Any:
        """Solve (A'A + d^2) dX = G to a relative residual of CG_REDUCTION, or to what a rounded A allows."""
        damp, reduction = problem.damp, CG_REDUCTION
        if problem.round_matrix(whitening):
            change = ROUNDED_CHANGE * whitening.condition / math.sqrt(math.prod(problem.matrix.shape))
            reduction = max(ROUNDED_REDUCTION, change)
        residual = whitening.apply_transposed(G, damp)
        squares = on_host((residual * residual).sum(0))
        goal = np.maximum(reduction**2 * squares, problem.cg_floor(whitening, X) ** 2)
        Y, direction = 0 * residual, residual
        for _ in range(MAX_CG_STEPS):
            if not (squares > goal).any():
                return whitening.apply(Y, damp)
            image = whitening.apply_transposed(problem.normal(whitening.apply(direction, damp)), damp)
            step = problem.factors(squares, on_host((direction * image).sum(0)))
            Y = Y + step * direction
            residual = residual - step * image
            before, squares = squares, on_host((residual * residual).sum(0))
            direction = residual + problem.factors(squares, before) * direction
        raise LostRangeError(f"conjugate gradients did not converge in {MAX_CG_STEPS} steps")

    return correct


def _cholesky_solution(problem: Problem, whitening: Whitening, gram: Any) -> Callable[..., Any]:
    """Return corrections from a Cholesky factorization of W'(A'A + d^2) W for each ridge d."""
    xp = problem.xp
    solvers = []
    for ridge in problem.scaled_ridges.tolist():
        scaling, system = None, gram
        if ridge > 0:
            ratio = whitening.ridges(ridge)
            scaling = 1 / xp.sqrt(1 + ratio**2)[:, None]  # makes the diagonal about 1
            system = (gram + xp.diag(ratio**2)) * scaling * scaling.T
        solvers.append((cholesky(xp, system), scaling))
    basis, q = whitening.matrix(), problem.B.shape[1]

    def correct(G: Any, X: Any) -> Any:
        white, parts = basis.T @ G, []
        for r, (factor, scaling) in enumerate(solvers):
            right = white[:, r * q : (r + 1) * q]
            if scaling is None:
                parts.append(cholesky_solve(xp, factor, right))
            else:
                parts.append(cholesky_solve(xp, factor, right * scaling) * scaling)
        return basis @ (xp.concatenate(parts, 1) if len(parts) > 1 else parts[0])

    return correct


def _exact_whitening(problem: Problem, whitening: Whitening, rcond: float) -> Whitening:
    """Return the basis of A's own singular vectors, truncated by `rcond`, from one pass."""
    xp = problem.xp
    gram = problem.gram(whitening)
    problem.matrix.run(gram, width=whitening.rank)
    refined = whitening.refined(cholesky(xp, gram.value).T, rcond)
    refined.factor = refined.factor * float(problem.scale[0, 0])
    return refined


class _NullProbe(Sum):
    """A times random vectors of the sketch's null space, which A should map to about 0."""

    def __init__(self, problem: Problem, whitening: Whitening):
        null = whitening.null
        signs = np.random.default_rng(0).choice([-1.0, 1.0], (null.shape[1], N_PROBES))
        self._vectors = null @ problem.matrix.array(signs / math.sqrt(null.shape[1])) / problem.scale
        self._allowed = 100 * NOISE * whitening.norm
        self._squares: Any = 0

    def add(self, start: int, block: Any) -> None:
        image = block @ self._vectors
        self._squares = self._squares + (image * image).sum(0)

    def check(self) -> None:
        """Raise LostRangeError if A does not map the vectors to about 0."""
        largest = math.sqrt(float(self._squares.max()))
        if largest > self._allowed:
            raise LostRangeError(f"the sketch has lower rank than A: ||A v|| = {largest:.1e} ||A|| for null vectors v")
