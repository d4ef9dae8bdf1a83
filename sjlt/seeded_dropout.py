"""Seeded dropout: the mask is computed from a seed and never stored. `sjlt.laws.dropout` defines it."""

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

    For given p and bits, the mask depends only on (seed, step) and the logical index of an element. It is recomputed
    whenever it is needed (in forward, in backward, in a recomputed forward) and is the same on every device, for every
    dtype and memory layout. For x viewed as 2-D, (product of leading dimensions, last dimension), element (row, col)
    has the index ``offset + row * row_stride + col``. A shard of a larger tensor thus gets the mask of that tensor if
    it passes the index of its first element (`offset`) and, for a shard of columns, the row length of the full tensor
    (`row_stride`).

    Parameters
    ----------
    x : ndarray or torch tensor of any shape and strides
        fp16, fp32, fp64 or, in torch, bf16; on the CPU or on CUDA.
    p : float, 0 <= p <= 1
        The probability of dropping an element, rounded to the nearest multiple of 2^-bits; kept elements are scaled
        according to the rounded probability. p = 0 copies x bit for bit and p = 1 gives zeros; any other p that would
        round to 0 or 1 is rejected.
    seed : int, -2^63 <= seed < 2^64, or int64 array or tensor
        An array holds one seed for each x[i], with shape (x.shape[0],), or for each row, with shape x.shape[:-1].
        Indices are then counted within x[i], or are ``offset + col``. With shape (), it is one seed for all of x. A
        tensor must be on x's device and is read there without synchronisation.
    step : int, 0 <= step < 2^32, or an array or tensor of one integer, default 0
        Each step gives a new mask from the same seed. A tensor must be on x's device and is read there, mod 2^32, so a
        CUDA graph can advance it between replays.
    offset : int >= 0, default 0
        The index of the first element of x. No index may exceed 2^63 - 1.
    row_stride : int >= 0, default x.shape[-1]
        The difference between the indices of consecutive rows. If it is smaller than the row length, some elements have
        the same index and are dropped together.
    bits : 8, 16 or 32, default 16
        Random bits per element. Fewer bits are faster if the call is limited by arithmetic.
    training : bool, default True
        If False, return x unchanged, as `torch.nn.functional.dropout` does.
    inplace : bool, default False
        Write the result into x and return x. The elements of x must not share memory with each other or with an array
        of seeds.

    Returns
    -------
    out : array or tensor like x
        For a tensor, backward applies the same mask to the gradient; only seeds and step are saved for it, if they are
        tensors.

    Raises
    ------
    TypeError
        If x has another dtype, or if seeds or step are not integers.
    ValueError
        If p, bits, seed, step, offset or row_stride is out of range, seeds have another shape, or x is not writable.
    RuntimeError
        If inplace=True and x is a leaf tensor that requires grad, or a view that autograd cannot track.

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
    """Compute ``residual + dropout(x, ...)``, as in transformer blocks, in one pass over memory.

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
        In fp32 and fp64, bitwise equal to `residual` plus the result of `dropout`. In fp16 and bf16 only the sum is
        rounded, not the result of `dropout`.

    Raises
    ------
    TypeError, RuntimeError
        As in `dropout`.
    ValueError
        As in `dropout`, or if the residual has another shape or is on another device.

    Examples
    --------
    >>> import numpy as np, sjlt
    >>> sjlt.dropout_add(np.ones(6), np.full(6, 10.0), 0.5, seed=3)
    array([10., 12., 10., 10., 12., 12.])
    """
    return frontend.dropout_add(x, residual, p, seed, step, offset, row_stride, bits, training)  # type: ignore[no-any-return]


def masked_dropout(x: Data, keep: Data, p: float, bits: int | None = None) -> Data:
    """Apply dropout with a given mask: the stored form, which seeded dropout replaces.

    Parameters
    ----------
    x : ndarray or torch tensor
        As in `dropout`.
    keep : bool ndarray or tensor of x's shape, on x's device
        True where an element is kept, as from `dropout_mask`.
    p : float, 0 <= p <= 1
        The probability with which elements were dropped. Kept elements are scaled by 1 / (1 - p); p = 1 gives zeros.
    bits : 8, 16 or 32, optional
        Round p as `dropout` does with this many bits, so that the results are equal.

    Returns
    -------
    out : array or tensor like x
        Differentiable in x.

    Raises
    ------
    TypeError
        If x has a dtype that `dropout` does not support, or keep is not bool.
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
    """Return the mask of `dropout` for a tensor of this shape: True where an element is kept.

    This is for tests, debugging and other frameworks; `dropout` itself stores no mask.

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
        As in `dropout`.

    Examples
    --------
    >>> import sjlt
    >>> sjlt.dropout_mask((2, 6), 0.5, seed=3).astype(int)
    array([[0, 1, 0, 0, 1, 1],
           [0, 1, 0, 0, 0, 1]])
    """
    return frontend.dropout_mask(shape, p, seed, step, offset, row_stride, bits, device)
