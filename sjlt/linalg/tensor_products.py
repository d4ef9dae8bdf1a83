"""Products of torch tensors in fewer operations, or fewer reads of A, than two matrix products.

Those with a symmetric result or a triangular factor take 10/16 of the operations. They are computed in blocks of
columns, each directly in the result, without copies, unless the whole product takes no longer than to start its blocks.
"""

from __future__ import annotations

from typing import Any

from ..backends import import_triton

BLOCKS, MIN_COLUMNS = 4, 128  # blocks with fewer columns use a GPU less well
MIN_PRODUCTS = 1 << 32  # rows times columns squared, from which on there are blocks: 0.15 ms on an H100


def add_upper_gram(total: Any, p: Any) -> None:
    """Add p' p to `total`, in the blocks on and above the diagonal."""
    for start, stop in _column_blocks(*p.shape):
        total[start:stop, start:].addmm_(p[:, start:stop].T, p[:, start:])


def gram(p: Any) -> Any:
    """Return p' p."""
    if len(_column_blocks(*p.shape)) == 1:
        return p.T @ p
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
    for start, stop in _column_blocks(*a.shape):
        torch.mm(a[:, :stop], W[:stop, start:stop], out=out[:, start:stop])
    return out


def multiply(a: Any, V: Any) -> Any:
    """Return a V in a's dtype, with its accuracy."""
    if a.is_cuda and (kernel := import_triton("tall_product", "a product")).eligible(a, V):
        return kernel.multiply(a, V)
    return a @ V.to(a.dtype)


def residual_gradient(a: Any, X: Any, B: Any) -> tuple[Any, Any]:
    """Return a'(B - a X) and the squared column norms of B - a X."""
    if (kernel := _single_read()).eligible(a, X):
        return kernel.residual_gradient(a, X, B)  # type: ignore[no-any-return]
    residual = B - a @ X
    return a.T @ residual, (residual * residual).sum(0)


def normal_product(a: Any, Z: Any) -> Any:
    """Return a' a Z."""
    if (kernel := _single_read()).eligible(a, Z):
        return -kernel.residual_gradient(a, Z, a.new_zeros((a.shape[0], 1)))[0]
    return a.T @ (a @ Z)


def _single_read() -> Any:
    return import_triton("residual", "least squares of CUDA tensors")


def _column_blocks(m: int, n: int) -> list[tuple[int, int]]:
    if m * n * n < MIN_PRODUCTS:
        return [(0, n)]
    width = max(MIN_COLUMNS, -(-n // BLOCKS))
    return [(i, min(i + width, n)) for i in range(0, n, width)]
