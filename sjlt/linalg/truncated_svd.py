"""Truncated SVD of a matrix, from sketches of its rows and columns or from a few passes over it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..sketch import Sketch
from .checks import check_finite
from .matrix import Matrix
from .products import multiply, normal_product, one_blas_thread
from .sketching import STACKS, embedding
from .sums import Gram
from .triangular import inverse, reduced_qr
from .whitening import NOISE, LostRangeError, Whitening, cholesky, power_of_two

ROWS_PER_COLUMN = 16  # rows of the sketch for n_iter > 0, per column of V: within 1 to 3 % of the best error
SKETCH_ITERATIONS = 6  # subspace iterations on that sketch
# Condition number of Y up to which Y'Y is accurate enough: Q'Q = I up to its square times eps.
MAX_UNWHITENED_CONDITION = 1e2
# The same for a Y with columns of norm 1, for the squared norm of its pseudoinverse.
MAX_SCALED_INVERSE = 1e2
MIN_EMBEDDING = 0.01  # smallest singular value allowed for Psi Q; with twice as many rows as columns it is above 0.2
HOST_COLUMNS = 256  # of a square tensor, up to which the host's SVD is faster: 5 ms for 200, and 19 ms on an H200

Factors = tuple[Any, Any, Any]


class _Basis(NamedTuple):
    """Y = P E T for a tall Y, where Q = P E has orthonormal columns (E = None stands for I), and S Q = U C^-1.

    U has orthonormal columns, and C is upper triangular.
    """

    P: Any
    E: Any
    T: Any
    U: Any
    C: Any


def from_sketches(xp: Any, Y: Any, psi: Sketch | None, Z: Any, rank: int) -> Factors:
    """Return the truncated SVD of A's projection onto the range of Y, from Y = A Omega' and Z = Psi A.

    psi = None stands for the identity. Raises LostRangeError if Psi maps part of the range of Y to about 0.
    """
    if psi is None:
        P, E = reduced_qr(xp, Y)[0], None
        X = P.T @ Z
    else:
        basis = _sketched_basis(xp, Y, psi, min(Y.shape[0], Z.shape[1]))
        if basis is None:
            raise LostRangeError(f"the sketch of {psi.n_components} rows lost part of A's range: use another seed")
        P, E = basis.P, basis.E
        if basis.U.shape[1] == 0:
            return _padded(xp, Y[:, :0], Z[0, :0], Z[:0], rank)
        X = _coordinates(xp, basis, Z)
    U, s, Vh = _svd(xp, X)
    return _padded(xp, _times(P, E, U[:, :rank]), s[:rank], Vh[:rank], rank)


def _coordinates(xp: Any, basis: _Basis, Z: Any) -> Any:
    """Return X such that Q X is close to A; raise LostRangeError if Psi maps part of the range of Q to about 0.

    X solves the least-squares problem Psi Q X = Z, without a pseudoinverse or a product of ill-conditioned factors.
    """
    if xp is not np and float(xp.linalg.norm(basis.C)) <= 1 / MIN_EMBEDDING:
        return basis.C @ (basis.U.T @ Z)  # the singular values of Psi Q are those of C^-1
    U, s, Vh = _svd(xp, basis.U @ inverse(xp, basis.C))
    if float(s[-1]) < MIN_EMBEDDING:
        raise LostRangeError(
            f"the sketch of {len(Z)} rows nearly lost part of A's range (smallest singular value {float(s[-1]):.1e}): "
            "use another seed"
        )
    return Vh.T @ ((U.T @ Z) / s[:, None])


def by_iterations(matrix: Matrix, rank: int, width: int, n_iter: int, seed: int) -> Factors:
    """Return the truncated SVD of A V V', for singular vectors V of a sketch after n_iter - 1 subspace iterations.

    The sketch has ROWS_PER_COLUMN times as many rows as V has columns, so its singular vectors are nearly A's, and it
    is small: computing them costs almost nothing compared with a pass over A.
    """
    xp = matrix.xp
    S = embedding(*matrix.shape, ROWS_PER_COLUMN * width, seed, nnz=STACKS)
    Z = matrix.dense() if S is None else matrix.quick_sketch(S)
    check_finite(matrix, Z)
    top = power_of_two(float(abs(Z).max()))  # A'A might overflow
    V = _leading_vectors(matrix, Z / top, width, seed)
    for _ in range(n_iter - 1):
        V = _orthonormal(xp, matrix.normal_times(V / top))
    Y = matrix.times(V)
    P, E, T = _orthogonal_basis(matrix, Y, S, width)
    U, s, Vh = _svd(xp, T)
    return _times(P, E, U[:, :rank]), s[:rank], Vh[:rank] @ V.T


def _leading_vectors(matrix: Matrix, Z: Any, width: int, seed: int) -> Any:
    """Return approximate leading right singular vectors of a sketch Z of the matrix, as orthonormal columns."""
    xp = matrix.xp
    V = matrix.random((matrix.shape[1], width), seed)
    if xp is not np:
        for _ in range(SKETCH_ITERATIONS):
            V = _orthonormal(xp, Z.T @ (Z @ V))
        return V
    # The last iteration, in float64, removes the rounding errors of those in float32.
    narrow = Z.astype(matrix.dtype, copy=False)
    for z in [narrow] * (SKETCH_ITERATIONS - 1) + [Z]:
        V = _orthonormal(xp, normal_product(z, V.astype(z.dtype)))
    return V


def _orthonormal(xp: Any, W: Any) -> Any:
    """Return an orthonormal basis of the range of W, whose first columns span the range of W's first columns."""
    if xp is not np:
        return reduced_qr(xp, W)[0]
    W = W.astype(np.float64, copy=False)
    factors = _by_scaled_columns(W)
    return reduced_qr(xp, W)[0] if factors is None else W @ factors[0]


def _orthogonal_basis(matrix: Matrix, Y: Any, S: Sketch | None, width: int) -> Factors:
    """Return (P, E, T) such that Y = P E T and P E, or P for E = None, has orthonormal columns."""
    xp = matrix.xp
    if xp is np and (factors := _by_scaled_columns(Y)) is not None:
        return Y, *factors
    check_finite(matrix, Y)
    if xp is np:
        Y = Y.astype(np.float64, copy=False)
    basis = None if S is None else _sketched_basis(xp, Y, S, width)
    if basis is None or basis.U.shape[1] < width:
        P, T = reduced_qr(xp, Y)
        return P, None, T
    return basis.P, basis.E, basis.T


def _by_scaled_columns(Y: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Return (T^-1, T) for the Cholesky factor T of Y'Y; None if that might be inaccurate or Y is not finite.

    After subspace iterations the columns of Y are nearly orthogonal, though their norms may differ by many orders of
    magnitude. The accuracy of a Cholesky factorization does not depend on those norms.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        gram = _gram(Y)
    scales = np.sqrt(np.diag(gram))
    if not (scales.min() > 1e-100 and scales.max() < 1e100):  # or NaN
        return None
    try:
        C = cholesky(np, gram / scales / scales[:, None]).T
    except LostRangeError:
        return None
    E = inverse(np, C)
    # The squared 2-norm of E is at most the one in the Frobenius norm, less n - 2, since C has columns of norm 1.
    if not (E * E).sum() < MAX_SCALED_INVERSE + len(E) - 2:
        return None
    return E / scales[:, None], C * scales


def _sketched_basis(xp: Any, Y: Any, S: Sketch, max_rank: int) -> _Basis | None:
    """Return the basis of the range of Y, with at most `max_rank` columns; None if S Y has lost part of the range.

    This takes a fraction of the time of Householder QR: in a basis in which Y is well conditioned, according to its
    sketch, a Cholesky factorization is as accurate.
    """
    SY = S @ Y
    top = float(abs(SY).max())
    top = 1.0 if top == 0 or 1e-60 < top < 1e60 else power_of_two(top)  # squares neither overflow nor vanish
    if top != 1:
        Y, SY = Y / top, SY / top
    found = None if xp is np or max_rank < Y.shape[1] else _by_triangle(xp, SY)
    found = found or _by_singular_vectors(xp, Y, SY, max_rank)
    if found is None:
        return None
    U, sigma, Vh, W, is_well_conditioned = found
    if U.shape[1] == 0:
        return _Basis(Y[:, :0], None, Vh, U, U[:0])
    P = Y if is_well_conditioned else _times(Y, None, W)
    try:
        C = cholesky(xp, W.T @ _gram(Y) @ W if is_well_conditioned else _gram(P)).T
    except LostRangeError:
        return None
    E = inverse(xp, C)
    return _Basis(P, W @ E if is_well_conditioned else E, (C * sigma) @ Vh * top, U, C)


Whitened = tuple[Any, Any, Any, Any, bool]


def _by_singular_vectors(xp: Any, Y: Any, SY: Any, max_rank: int) -> Whitened | None:
    """Return (U, sigma, Vh, W, whether Y is well conditioned), with SY = U diag(sigma) Vh and W = V / sigma.

    Returns None if SY has lost part of the range of Y.
    """
    U, sigma, Vh = _svd(xp, SY)
    r = int((sigma > NOISE * sigma[0]).sum())
    largest, smallest = float(sigma[0]), float(sigma[-1])
    # If the rank of Y is below its number of columns, the smallest singular value shows float32 data's rounding errors.
    allowed = 100 * max(NOISE * largest, smallest)
    if r < Y.shape[1] and float(xp.linalg.norm(Y - (Y @ Vh[:r].T) @ Vh[:r])) > allowed:
        return None
    r = min(r, max_rank)
    U, sigma, Vh = U[:, :r], sigma[:r], Vh[:r]
    return U, sigma, Vh, Vh.T / sigma, r > 0 and largest < MAX_UNWHITENED_CONDITION * float(sigma[-1])


def _by_triangle(xp: Any, SY: Any) -> Whitened | None:
    """Return (Q, 1, R, R^-1, whether Y is well conditioned), with SY = Q R; None if R is nearly singular.

    On a GPU, QR is faster than an SVD.
    """
    Q, R = reduced_qr(xp, SY)
    whitening = Whitening.triangular(xp, R)
    if whitening is None:
        return None
    # The condition number in the 2-norm is at most the one in the Frobenius norm, less n - 2.
    is_well_conditioned = whitening.condition < MAX_UNWHITENED_CONDITION + R.shape[1] - 2
    return Q, 1.0, R, whitening.matrix(), is_well_conditioned


def _svd(xp: Any, a: Any) -> tuple[Any, Any, Any]:
    """Return (U, s, Vh) of the reduced SVD; for tensors, from their triangular factor."""
    m, n = a.shape
    if xp is np or (m == n and n > HOST_COLUMNS):
        U, s, Vh = xp.linalg.svd(a, full_matrices=False)
        return U, s, Vh
    if m < n:
        U, s, Vh = _svd(xp, a.T)
        return Vh.T, s, U.T
    if m > n:
        Q, R = reduced_qr(xp, a)
        U, s, Vh = _svd(xp, R)
        return Q @ U, s, Vh
    with one_blas_thread():  # 3.7 ms for 128 columns, and 5 with 16 threads
        U, s, Vh = (a.new_tensor(factor) for factor in np.linalg.svd(a.cpu().numpy()))
    return U, s, Vh


def _padded(xp: Any, U: Any, s: Any, Vh: Any, rank: int) -> Factors:
    """Return the factors, extended to `rank` by singular values of 0."""
    sigma = s.new_zeros(rank) if xp is not np else np.zeros(rank)
    sigma[: s.shape[0]] = s
    return _extended(xp, U, rank), sigma, _extended(xp, Vh.T, rank).T


def _extended(xp: Any, Q: Any, count: int) -> Any:
    """Return Q, whose columns are orthonormal, extended to `count` orthonormal columns."""
    extra = count - Q.shape[1]
    if extra == 0:
        return Q
    more = np.random.default_rng(0).standard_normal((Q.shape[0], extra))
    more = more if xp is np else Q.new_tensor(more)
    for _ in range(2):  # once leaves rounding errors
        more = xp.linalg.qr(more - Q @ (Q.T @ more))[0]
    return xp.concatenate([Q, more], 1)


def _gram(Y: Any) -> Any:
    """Return Y' Y."""
    total = Gram(None)
    total.add(0, Y)
    return total.value


def _times(P: Any, E: Any, U: Any) -> Any:
    """Return P E U."""
    U = U if E is None else E @ U
    return multiply(P, U) if isinstance(P, np.ndarray) else P @ U
