"""Seeded dropout: which elements live follows from a seed, and no mask is stored. `dropout_law` has the law.

Check, view as axes, call the backend: NumPy's arrays here, for the CPU; torch's tensors in `torch_ops.dropout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .inputs.checks import integer
from .inputs.containers import is_tensor
from .inputs.dropout import LAST, Numbers, check_shape, check_writable, checked, factor, rule_of

__all__ = ["dropout", "dropout_add", "dropout_mask", "masked_dropout"]

DTYPES = ("float16", "float32", "float64")


def dropout(
    x: Any,
    p: float,
    seed: Any,
    *,
    step: Any = 0,
    offset: int = 0,
    row_stride: int | None = None,
    bits: int = 16,
    training: bool = True,
    inplace: bool = False,
) -> Any:
    """Set each element of x to 0 with probability p, and scale the others by one over the probability to be kept.

    The mask is a function of (seed, step) and of an element's logical place, computed where it is used: in forward, in
    backward and when a forward is recomputed, on every device, for every dtype and memory layout, to the bit. With x
    seen as 2-D, (product of leading dimensions, last dimension), element (row, col) has the index
    ``offset + row * row_stride + col``: a shard of a larger tensor has that tensor's mask if it passes where it begins
    (`offset`), and, where it is a shard of columns, the whole's length of rows (`row_stride`).

    Parameters
    ----------
    x : ndarray or torch tensor of any shape and strides
        fp16, fp32, fp64 or, in torch, bf16; on the CPU or on CUDA.
    p : float, 0 <= p <= 1
        The probability to be dropped, realised as a multiple of 2^-bits, the nearest one. p = 0 copies x bit for bit,
        p = 1 gives zeros; any other p that would round to these is refused.
    seed : int, -2^63 <= seed < 2^64, or int64 array or tensor
        An array holds a seed a row: of shape (x.shape[0],), where an element's index is then counted within x[i], or
        of shape x.shape[:-1], where it is then ``offset + col``. A tensor on x's device is read there, without
        waiting for it; one of shape () is a plain seed.
    step : int, 0 <= step < 2^32, or an array or tensor of one integer
        Gives fresh masks from one seed. A tensor on x's device is read there, mod 2^32, so that a CUDA graph may
        advance it between replays.
    offset : int >= 0
        The index of x's first element. No index may exceed 2^63 - 1.
    row_stride : int >= 0, default x.shape[-1]
        The distance of rows' indices. Where it is smaller than the rows, elements share decisions.
    bits : 8, 16 or 32
        Random bits an element. Fewer are faster where arithmetic counts.
    training : bool
        If False, x is returned as it is, as `torch.nn.functional.dropout` does it.
    inplace : bool
        Write the result into x, of any strides that let no two elements share memory, and return x.

    Returns
    -------
    An array or tensor like x. For a tensor, backward applies the same mask to the gradient and has saved no tensor
    but those of seeds and step.

    Raises
    ------
    TypeError : x is not of a floating dtype above; seeds or step are not integers.
    ValueError : p, bits, seed, step, offset or row_stride out of range; seeds of another shape; x cannot be written.
    RuntimeError : in place, a leaf tensor that requires grad, or a view of which autograd could not tell backward.

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
    if is_tensor(x):
        from .torch_ops import dropout as ops

        ops.check(x)
        numbers = checked(x, x.shape, p, seed, step, offset, row_stride, bits)
        if not training:
            return x
        return ops.drop_in_place(x, numbers) if inplace else ops.drop(x, numbers)
    x = _array(x) if not inplace else _own_array(x)
    numbers = checked(x, x.shape, p, seed, step, offset, row_stride, bits)
    if not training:
        return x
    if inplace and x.dtype.isnative and x.flags.aligned:
        return _drop(numbers, x, None, x)
    result = _drop(numbers, _native(x), None, np.empty_like(x, x.dtype.newbyteorder("="), subok=False))
    if inplace:
        x[...] = result
        return x
    return result


def dropout_add(
    x: Any,
    residual: Any,
    p: float,
    seed: Any,
    *,
    step: Any = 0,
    offset: int = 0,
    row_stride: int | None = None,
    bits: int = 16,
    training: bool = True,
) -> Any:
    """``residual + dropout(x, ...)`` in one pass, as transformer blocks use it: two tensors read, one written.

    Parameters
    ----------
    x : ndarray or torch tensor, as `dropout` takes it.
    residual : of the shape of x and on its device
        Where the dtypes differ, both are taken in the one that torch (NumPy) promotes them to, and so is the result.
    p, seed, step, offset, row_stride, bits : see `dropout`.
    training : bool
        If False, the result is x + residual.

    Returns
    -------
    An array or tensor. In fp32 and fp64 it is the sum of `residual` and of what `dropout` returns, to the bit; in fp16
    and bf16 the sum is rounded once, and not dropout's result too.

    Raises
    ------
    As `dropout`; ValueError for a residual of another shape or on another device.

    Examples
    --------
    >>> import numpy as np, sjlt
    >>> sjlt.dropout_add(np.ones(6), np.full(6, 10.0), 0.5, seed=3)
    array([10., 12., 10., 10., 12., 12.])
    """
    if is_tensor(x):
        from .torch_ops import dropout as ops

        ops.check(x)
        ops.check_beside("residual", residual, x)
        ops.check(residual)
        numbers = checked(x, x.shape, p, seed, step, offset, row_stride, bits)
        return ops.drop_add(x, residual, numbers) if training else x + residual
    x, residual = _array(x), _array(residual, "residual")
    check_shape("residual", residual, x)
    numbers = checked(x, x.shape, p, seed, step, offset, row_stride, bits)
    if not training:
        return x + residual
    dtype = np.result_type(x, residual)
    x, residual = (np.asarray(a, dtype) for a in (x, residual))
    return _drop(numbers, x, residual, np.empty_like(x, subok=False))


def masked_dropout(x: Any, keep: Any, p: float, bits: int | None = None) -> Any:
    """Dropout with a mask that is given: what seeded dropout replaces, to compare it with.

    Parameters
    ----------
    x : ndarray or torch tensor, as `dropout` takes it.
    keep : bool, of the shape of x and on its device
        Which elements live; as from `dropout_mask`.
    p : float, 0 <= p <= 1
        The probability with which elements were dropped. The others are scaled by 1/(1 - p); p = 1 gives zeros.
    bits : 8, 16 or 32, optional
        Scale by the probability that `dropout` realises with so many bits: the results are then equal.

    Returns
    -------
    An array or tensor like x; differentiable in x.

    Raises
    ------
    TypeError : x is not of a dtype that `dropout` takes, or keep not bool.  ValueError : p, bits or a shape is wrong.

    Examples
    --------
    >>> import numpy as np, sjlt
    >>> sjlt.masked_dropout(np.ones(3), np.array([True, False, True]), 0.75)
    array([4., 0., 4.])
    """
    by = factor(p, bits)
    if is_tensor(x):
        from .torch_ops import dropout as ops

        ops.check(x)
        ops.check_beside("keep", keep, x)
        ops.check_bool(keep)
        return ops.masked(x, keep, by)
    x, keep = _array(x), np.asarray(keep)
    if keep.dtype != np.bool_:
        raise TypeError(f"keep must be of bool, got {keep.dtype}")
    check_shape("keep", keep, x)
    x = _native(x)
    out = np.empty_like(x, subok=False)
    if by == 0:
        out[...] = 0
    else:
        _cpu().drop_stored(by, x, keep, out)
    return out


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
    """Which elements of a tensor of this shape `dropout` keeps: True where an element lives.

    For tests, debugging and other frameworks; `dropout` itself makes no mask.

    Parameters
    ----------
    shape : int or sequence of int
    p, seed, step, offset, row_stride, bits : see `dropout`.
    device : torch.device or str, optional
        Where the mask shall lie: the result is a torch tensor then. By default it is a NumPy array, or lies where
        `seed` or `step` does, if one of them is a tensor.

    Returns
    -------
    bool array or tensor of shape `shape`

    Raises
    ------
    As `dropout`.

    Examples
    --------
    >>> import sjlt
    >>> sjlt.dropout_mask((2, 6), 0.5, seed=3).astype(int)
    array([[0, 1, 0, 0, 1, 1],
           [0, 1, 0, 0, 0, 1]])
    """
    shape = _shape(shape)
    if device is None:
        device = next((a.device for a in (seed, step) if is_tensor(a)), None)
    if device is not None:
        from .torch_ops import dropout as ops

        like = ops.device(device)
        return ops.mask(shape, like, checked(like, shape, p, seed, step, offset, row_stride, bits))
    out = np.empty(shape, np.bool_)
    rule, t = rule_of(*checked(None, shape, p, seed, step, offset, row_stride, bits))
    if rule is None:
        out[...] = t == 0
    else:
        _cpu().mask(rule, out)
    return out


# ------------------------------------------------------------------------------------- arrays


def _array(x: Any, name: str = "x") -> Any:
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError("masked arrays are refused: the mask would be lost; fill it first (x.filled(0))")
    x = np.asarray(x)
    if x.dtype.name not in DTYPES:
        raise TypeError(f"{name} must be of {', '.join(DTYPES)}, got {x.dtype}")
    return x


def _own_array(x: Any) -> Any:
    """x, for writing."""
    if not isinstance(x, np.ndarray):
        raise TypeError(f"inplace=True needs a numpy array or a tensor, got {type(x).__name__}")
    if not _array(x).flags.writeable:
        raise ValueError("x is read-only: inplace=True cannot write it")
    check_writable(x, x.strides, x.itemsize)
    return x


def _native(x: np.ndarray) -> np.ndarray:
    """x, copied where it has another machine's byte order or unaligned numbers."""
    return x if x.dtype.isnative and x.flags.aligned else x.astype(x.dtype.newbyteorder("="))


def _drop(numbers: Numbers, x: np.ndarray, residual: np.ndarray | None, out: np.ndarray) -> np.ndarray:
    """out = dropout of x, and residual more where it is given."""
    rule, t = rule_of(*numbers)
    if rule is None:
        if residual is None:
            out[...] = x if t == 0 else 0
        else:
            out[...] = residual + (x if t == 0 else 0)  # -0 + 0 is 0
    elif residual is None:
        _cpu().drop(rule, x, out)
    else:
        _cpu().drop_add(rule, x, residual, out)
    return out


def _cpu() -> Any:
    from .backends.cpu import dropout  # compiles, or loads, machine code: not before it is needed

    return dropout


def _shape(shape: Any) -> tuple[int, ...]:
    if isinstance(shape, int):  # of a number that torch.compile traces nothing more can be asked
        shape = [shape]
    lengths = shape if isinstance(shape, Sequence) or getattr(shape, "ndim", 0) > 0 else [shape]
    return tuple(integer("a length of shape", n, 0, LAST) for n in lengths)
