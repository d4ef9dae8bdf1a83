"""Seeded dropout: a seed decides which elements are kept, and no mask is stored. `sjlt.laws.dropout` has the law."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from .frontends import dropout as frontend

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from .operators import Data

__all__ = ["dropout", "dropout_add", "dropout_mask", "masked_dropout"]


def dropout(
    x: Data,
    p: float,
    seed: Any,
    *,
    step: Any = 0,
    offset: int = 0,
    row_stride: int | None = None,
    bits: int = 16,
    training: bool = True,
    inplace: bool = False,
) -> Data:
    """Set each element of x to 0 with probability p, and scale the others by 1 / (1 - p).

    The mask is a function of (seed, step) and an element's logical place. It is computed where it is used: in forward,
    in backward and when a forward is recomputed, with the same bits on every device and for every dtype and memory
    layout. With x seen as 2-D, (product of leading dimensions, last dimension), element (row, col) has the index
    ``offset + row * row_stride + col``. A shard of a larger tensor therefore gets that tensor's mask if it passes the
    index of its first element (`offset`) and, for a shard of columns, the row length of the whole (`row_stride`).

    Parameters
    ----------
    x : ndarray or torch tensor of any shape and strides
        fp16, fp32, fp64 or, in torch, bf16; on the CPU or on CUDA.
    p : float, 0 <= p <= 1
        The probability to drop an element, rounded to the nearest multiple of 2^-bits; kept elements are scaled by the
        rounded probability. p = 0 copies x bit for bit and p = 1 gives zeros; any other p that would round to 0 or 1
        is refused.
    seed : int, -2^63 <= seed < 2^64, or int64 array or tensor
        An array holds one seed per row. With shape (x.shape[0],), an element's index is counted within x[i]; with
        shape x.shape[:-1], it is ``offset + col``. A tensor must lie on x's device and is read there without
        synchronisation. Shape () is one seed for all.
    step : int, 0 <= step < 2^32, or an array or tensor of one integer
        Gives new masks from one seed. A tensor must lie on x's device and is read there, mod 2^32, so a CUDA graph can
        advance it between replays.
    offset : int >= 0
        The index of x's first element. No index may exceed 2^63 - 1.
    row_stride : int >= 0, default x.shape[-1]
        The distance between the indices of consecutive rows. Elements share decisions if it is smaller than the row
        length.
    bits : 8, 16 or 32
        Random bits per element. Fewer bits are faster where the call is bound by arithmetic.
    training : bool
        If False, return x unchanged, as `torch.nn.functional.dropout` does.
    inplace : bool
        Write the result into x and return x. No two elements of x may share memory, nor may x and an array of seeds.

    Returns
    -------
    out : array or tensor like x
        For a tensor, backward applies the same mask to the gradient; only tensors of seeds and step are saved for it.

    Raises
    ------
    TypeError
        If x does not have one of the dtypes above, or seeds or step are not integers.
    ValueError
        If p, bits, seed, step, offset or row_stride is out of range, seeds have another shape, or x cannot be written.
    RuntimeError
        In place, for a leaf tensor that requires grad and for views that autograd cannot track.

    References
    ----------
    Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting", JMLR 2014. A seed instead
    of a mask: Tillet et al., "Low-memory dropout", Triton's tutorials.

    Examples
    --------
    >>> import numpy as np, sjlt
    >>> x = np.ones((2, 6), np.float32)
    >>> sjlt.dropout(x, 0.5, seed=3)
    array([[0., 2., 0., 0., 2., 2.],
           [0., 2., 0., 0., 0., 2.]], dtype=float32)
    >>> second_row = sjlt.dropout(x[1:], 0.5, seed=3, offset=6)
    >>> bool((second_row == sjlt.dropout(x, 0.5, seed=3)[1:]).all())
    True
    """
    return frontend.dropout(x, p, seed, step, offset, row_stride, bits, training, inplace)  # type: ignore[no-any-return]


def dropout_add(
    x: Data,
    residual: Data,
    p: float,
    seed: Any,
    *,
    step: Any = 0,
    offset: int = 0,
    row_stride: int | None = None,
    bits: int = 16,
    training: bool = True,
) -> Data:
    """``residual + dropout(x, ...)`` in one pass, as in transformer blocks: two tensors are read and one is written.

    Parameters
    ----------
    x : ndarray or torch tensor
        As in `dropout`.
    residual : ndarray or torch tensor of x's shape, on x's device
        If the dtypes differ, the operands and the result have the dtype that torch (NumPy) promotes both to.
    p, seed, step, offset, row_stride, bits : see `dropout`.
    training : bool
        If False, return x + residual.

    Returns
    -------
    out : array or tensor
        In fp32 and fp64 it equals `residual` plus the result of `dropout` bit for bit. In fp16 and bf16 the sum is
        rounded once, without rounding the result of `dropout` first.

    Raises
    ------
    TypeError, RuntimeError
        As `dropout`.
    ValueError
        As `dropout`, and for a residual of another shape or on another device.

    Examples
    --------
    >>> import numpy as np, sjlt
    >>> sjlt.dropout_add(np.ones(6), np.full(6, 10.0), 0.5, seed=3)
    array([10., 12., 10., 10., 12., 12.])
    """
    return frontend.dropout_add(x, residual, p, seed, step, offset, row_stride, bits, training)  # type: ignore[no-any-return]


def masked_dropout(x: Data, keep: Data, p: float, bits: int | None = None) -> Data:
    """Dropout with a given mask, the stored form that seeded dropout replaces.

    Parameters
    ----------
    x : ndarray or torch tensor
        As in `dropout`.
    keep : bool ndarray or tensor of x's shape, on x's device
        True where an element is kept, as from `dropout_mask`.
    p : float, 0 <= p <= 1
        The probability with which elements were dropped. Kept elements are scaled by 1 / (1 - p); p = 1 gives zeros.
    bits : 8, 16 or 32, optional
        Scale by the probability that `dropout` realises with this many bits, so that the results are equal.

    Returns
    -------
    out : array or tensor like x
        Differentiable in x.

    Raises
    ------
    TypeError
        If x has a dtype that `dropout` refuses, or keep is not bool.
    ValueError
        If p or bits is out of range or the shapes differ.

    Examples
    --------
    >>> import numpy as np, sjlt
    >>> sjlt.masked_dropout(np.ones(3), np.array([True, False, True]), 0.75)
    array([4., 0., 4.])
    """
    return frontend.masked_dropout(x, keep, p, bits)  # type: ignore[no-any-return]


@overload
def dropout_mask(
    shape: int | Sequence[int],
    p: float,
    seed: int | NDArray[Any],
    *,
    step: int | NDArray[Any] = ...,
    offset: int = ...,
    row_stride: int | None = ...,
    bits: int = ...,
    device: None = ...,
) -> NDArray[np.bool_]: ...
@overload
def dropout_mask(
    shape: int | Sequence[int],
    p: float,
    seed: Any,
    *,
    step: Any = ...,
    offset: int = ...,
    row_stride: int | None = ...,
    bits: int = ...,
    device: torch.device | str,
) -> torch.Tensor: ...
@overload
def dropout_mask(
    shape: int | Sequence[int],
    p: float,
    seed: Any,
    *,
    step: Any = ...,
    offset: int = ...,
    row_stride: int | None = ...,
    bits: int = ...,
    device: Any = ...,
) -> Any: ...
def dropout_mask(
    shape: int | Sequence[int],
    p: float,
    seed: Any,
    *,
    step: Any = 0,
    offset: int = 0,
    row_stride: int | None = None,
    bits: int = 16,
    device: Any = None,
) -> Any:
    """The mask of `dropout` for a tensor of this shape: True where an element is kept.

    For tests, debugging and other frameworks; `dropout` itself stores no mask.

    Parameters
    ----------
    shape : int or sequence of int
    p, seed, step, offset, row_stride, bits : see `dropout`.
    device : torch.device or str, optional
        Return a torch tensor on this device. By default the result is a NumPy array, or a tensor on the device of
        `seed` or `step` if one of them is a tensor.

    Returns
    -------
    mask : bool array or tensor of shape `shape`

    Raises
    ------
    TypeError, ValueError
        As `dropout`.

    Examples
    --------
    >>> import sjlt
    >>> sjlt.dropout_mask((2, 6), 0.5, seed=3).astype(int)
    array([[0, 1, 0, 0, 1, 1],
           [0, 1, 0, 0, 0, 1]])
    """
    return frontend.dropout_mask(shape, p, seed, step, offset, row_stride, bits, device)
