"""The sketches used by `sjlt.linalg`."""

from __future__ import annotations

from ..laws.exact import MAX_N_COMPONENTS
from ..sketch import Sketch

STACKS, NNZ = 4, 8
COMPONENTS_MULTIPLE = 512  # 4 stacks of whole tiles of 128 rows


def embedding(m: int, n: int, k: int, seed: int, nnz: int = NNZ) -> Sketch | None:
    """Return a sketch of m rows to k, rounded up; for k >= 4 n it preserves every n-dimensional subspace.

    Returns None if A, of shape (m, n), has fewer than twice as many rows as the sketch: A itself is used then.
    """
    k = -(-k // COMPONENTS_MULTIPLE) * COMPONENTS_MULTIPLE
    if m < 2 * k:
        return None
    if k > MAX_N_COMPONENTS:
        raise ValueError(
            f"A of shape ({m}, {n}) needs a sketch of {k} components, more than the maximum of {MAX_N_COMPONENTS}"
        )
    return Sketch(m, k, nnz=nnz, stacks=STACKS, seed=seed % 2**64)


def sketch_rows(m: int, n: int, is_on_host: bool) -> int:
    """Return the number of rows for which factoring the sketch and conjugate gradients together take the least time.

    With k rows, conjugate gradients take about 64 / log(k / n) passes over m n numbers, often in float32, and a QR
    factorization of the sketch takes 2 k n^2 operations. On a host with 2 cores, 20 operations take as long as reading
    one float64 number.
    """
    best = min(3 * n + 50 * m // n, m // 5) if is_on_host else m // 5
    return min(max(best, 4 * n), 12 * n)
