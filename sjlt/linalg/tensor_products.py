"""Products of torch tensors that have a triangular result or factor, in 10/16 of the operations.

They are computed by blocks of columns, each in its place in the result, without copies.
"""

from __future__ import annotations

from typing import Any

BLOCKS, MIN_COLUMNS = 4, 128  # of a block: products with fewer columns keep a GPU less busy


def add_upper_gram(total: Any, p: Any) -> None:
    """total += p' p, in the blocks on and above the diagonal."""
    for start, stop in _column_blocks(p.shape[1]):
        total[start:stop, start:].addmm_(p[:, start:stop].T, p[:, start:])


def gram(p: Any) -> Any:
    """p' p."""
    total = p.new_zeros((p.shape[1],) * 2)
    add_upper_gram(total, p)
    return symmetric(total)


def symmetric(upper: Any) -> Any:
    """The symmetric matrix with the upper triangle of `upper`."""
    return upper.triu() + upper.triu(1).T


def times_upper(a: Any, W: Any) -> Any:
    """a W for an upper triangular W."""
    import torch  # takes long to load

    out = a.new_empty(a.shape)
    for start, stop in _column_blocks(W.shape[1]):
        torch.mm(a[:, :stop], W[:stop, start:stop], out=out[:, start:stop])
    return out


def _column_blocks(n: int) -> list[tuple[int, int]]:
    width = max(MIN_COLUMNS, -(-n // BLOCKS))
    return [(i, min(i + width, n)) for i in range(0, n, width)]
