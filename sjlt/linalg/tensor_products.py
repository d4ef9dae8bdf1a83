"""Products of torch tensors with a symmetric result or a triangular factor, in 10/16 of the operations.

They are computed in blocks of columns, each directly in the result, without copies.
"""

from __future__ import annotations

from typing import Any

BLOCKS, MIN_COLUMNS = 4, 128  # blocks with fewer columns use a GPU less well


def add_upper_gram(total: Any, p: Any) -> None:
    """Add p' p to `total`, in the blocks on and above the diagonal."""
    for start, stop in _column_blocks(p.shape[1]):
        total[start:stop, start:].addmm_(p[:, start:stop].T, p[:, start:])


def gram(p: Any) -> Any:
    """Return p' p."""
    total = p.new_zeros((p.shape[1],) * 2)
    add_upper_gram(total, p)
    return symmetric(total)


def symmetric(upper: Any) -> Any:
    """Return the symmetric matrix with the upper triangle of `upper`."""
    return upper.triu() + upper.triu(1).T


def times_upper(a: Any, W: Any) -> Any:
    """Return a W for an upper triangular W."""
    import torch  # slow to import

    out = a.new_empty(a.shape)
    for start, stop in _column_blocks(W.shape[1]):
        torch.mm(a[:, :stop], W[:stop, start:stop], out=out[:, start:stop])
    return out


def _column_blocks(n: int) -> list[tuple[int, int]]:
    width = max(MIN_COLUMNS, -(-n // BLOCKS))
    return [(i, min(i + width, n)) for i in range(0, n, width)]
