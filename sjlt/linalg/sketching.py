"""The sketch that the algorithms of this room work with."""

from __future__ import annotations

from ..laws.exact import MAX_N_COMPONENTS
from ..sketch import Sketch

STACKS, NNZ = 4, 8
ROWS = 512  # k is a multiple of this: 4 stacks of whole tiles of 128 rows


def embedding(m: int, n: int, k: int, seed: int, nnz: int = NNZ) -> Sketch | None:
    """A sketch of m rows to about k; with k of at least 4 n every n-dimensional subspace survives.

    None where A (m, n) has less than twice as many rows as the sketch: A itself is as good then.
    """
    k = -(-k // ROWS) * ROWS
    if m < 2 * k:
        return None
    if k > MAX_N_COMPONENTS:
        raise ValueError(
            f"A of shape ({m}, {n}) needs a sketch of {k} components, and the law allows at most {MAX_N_COMPONENTS}"
        )
    return Sketch(m, k, nnz=nnz, stacks=STACKS, seed=seed % 2**64)
