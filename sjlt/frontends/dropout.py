"""Seeded dropout of NumPy arrays and torch tensors.

Validate the arguments, then call the CPU backend for arrays or the operators of `sjlt.torch_ops.dropout` for tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..inputs.checks import integer
from ..inputs.containers import arrays_overlap, check_shape, is_tensor, refuse_foreign
from ..inputs.dropout import LAST, DropoutArguments, check_writable, checked_arguments, factor, rule_of

DTYPES = ("float16", "float32", "float64")


def dropout(
    x: Any, p: Any, seed: Any, step: Any, offset: Any, row_stride: Any, bits: Any, training: bool, inplace: bool
) -> Any:
    """See `sjlt.dropout`."""
    if is_tensor(x):
        import sjlt.torch_ops.dropout as ops  # the fastest way to look up a module that is already imported

        ops.checks.check_tensor(x, "dropout")
        arguments = checked_arguments(x, x.shape, p, seed, step, offset, row_stride, bits)
        if not training:
            return x
        return ops.drop_in_place(x, arguments) if inplace else ops.drop(x, arguments)
    x = _array(x) if not inplace else _writable_array(x, seed, step)
    arguments = checked_arguments(x, x.shape, p, seed, step, offset, row_stride, bits)
    if not training:
        return x
    if inplace and x.dtype.isnative and x.flags.aligned:
        return _drop(arguments, x, None, x)
    result = _drop(arguments, _native(x), None, np.empty_like(x, x.dtype.newbyteorder("="), subok=False))
    if inplace:
        x[...] = result
        return x
    return result


def dropout_add(
    x: Any, residual: Any, p: Any, seed: Any, step: Any, offset: Any, row_stride: Any, bits: Any, training: bool
) -> Any:
    """See `sjlt.dropout_add`."""
    if is_tensor(x):
        from ..torch_ops import dropout as ops

        ops.checks.check_tensor(x, "dropout")
        ops.checks.check_like("residual", residual, x)
        ops.checks.check_tensor(residual, "dropout")
        arguments = checked_arguments(x, x.shape, p, seed, step, offset, row_stride, bits)
        return ops.drop_add(x, residual, arguments) if training else x + residual
    x, residual = _array(x), _array(residual, "residual")
    check_shape("residual", residual, x)
    arguments = checked_arguments(x, x.shape, p, seed, step, offset, row_stride, bits)
    if not training:
        return x + residual
    dtype = np.result_type(x, residual)
    x, residual = (np.asarray(a, dtype) for a in (x, residual))
    return _drop(arguments, x, residual, np.empty_like(x, subok=False))


def masked_dropout(x: Any, keep: Any, p: Any, bits: Any) -> Any:
    """See `sjlt.masked_dropout`."""
    scale = factor(p, bits)
    if is_tensor(x):
        from ..torch_ops import dropout as ops

        ops.checks.check_tensor(x, "dropout")
        ops.checks.check_like("keep", keep, x)
        ops.checks.check_bool(keep)
        return ops.masked(x, keep, scale)
    refuse_foreign(keep)
    x, keep = _array(x), np.asarray(keep)
    if keep.dtype != np.bool_:
        raise TypeError(f"keep must have dtype bool, got {keep.dtype}")
    check_shape("keep", keep, x)
    x = _native(x)
    out = np.empty_like(x, subok=False)
    if scale == 0:
        out[...] = 0
    else:
        _cpu().drop_stored(scale, x, keep, out)
    return out


def dropout_mask(shape: Any, p: Any, seed: Any, step: Any, offset: Any, row_stride: Any, bits: Any, device: Any) -> Any:
    """See `sjlt.dropout_mask`."""
    shape = _shape(shape)
    if device is None:
        device = next((a.device for a in (seed, step) if is_tensor(a)), None)
    if device is not None:
        from ..torch_ops import dropout as ops

        like = ops.tensor_on(device)
        return ops.mask(shape, like, checked_arguments(like, shape, p, seed, step, offset, row_stride, bits))
    out = np.empty(shape, np.bool_)
    rule, t = rule_of(checked_arguments(None, shape, p, seed, step, offset, row_stride, bits))
    if rule is None:
        out[...] = t == 0
    else:
        _cpu().mask(rule, out)
    return out


# ------------------------------------------------------------------------------------- arrays


def _array(x: Any, name: str = "x") -> Any:
    refuse_foreign(x)
    array = np.asarray(x)
    if array.dtype.name not in DTYPES:
        given = array.dtype if array.ndim or array.dtype != object else f"{x!r} of type {type(x).__name__}"
        raise TypeError(f"{name} must have dtype {', '.join(DTYPES)}, got {given}")
    return array


def _writable_array(x: Any, *read: Any) -> Any:
    """x, if it is writable and shares no memory with the arrays in `read`."""
    if not isinstance(x, np.ndarray):
        raise TypeError(f"inplace=True needs a numpy array or a tensor, got {type(x).__name__}")
    if not _array(x).flags.writeable:
        raise ValueError("x is read-only, so inplace=True cannot write to it")
    check_writable(x, x.strides, x.itemsize)
    if any(isinstance(a, np.ndarray) and arrays_overlap(x, a) for a in read):
        raise ValueError("seed or step shares memory with x, which inplace=True overwrites: pass a copy of it")
    return x


def _native(x: np.ndarray) -> np.ndarray:
    """x, or a copy of it if it is not aligned and in native byte order."""
    return x if x.dtype.isnative and x.flags.aligned else x.astype(x.dtype.newbyteorder("="))


def _drop(arguments: DropoutArguments, x: np.ndarray, residual: np.ndarray | None, out: np.ndarray) -> np.ndarray:
    """out = dropout of x, plus `residual` if given."""
    rule, t = rule_of(arguments)
    if rule is None:
        if residual is None:
            out[...] = x if t == 0 else 0
        else:
            out[...] = residual + (x if t == 0 else 0)  # not a copy of the residual: -0 + 0 is 0
    elif residual is None:
        _cpu().drop(rule, x, out)
    else:
        _cpu().drop_add(rule, x, residual, out)
    return out


def _cpu() -> Any:
    from ..backends.cpu import dropout  # imported late: this loads or compiles machine code

    return dropout


def _shape(shape: Any) -> tuple[int, ...]:
    if isinstance(shape, int):  # the checks below would make torch.compile specialise on it
        shape = [shape]
    lengths = shape if isinstance(shape, Sequence) or getattr(shape, "ndim", 0) > 0 else [shape]
    return tuple(integer("a length of shape", n, 0, LAST) for n in lengths)
