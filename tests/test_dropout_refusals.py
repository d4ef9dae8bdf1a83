"""Invalid arguments of dropout raise errors that state them, before any work."""

import math

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

import sjlt

X = np.ones((4, 6), np.float32)


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, "p must be from 0 to 1, got -0.1", {"p": -0.1}),
        (ValueError, "p must be from 0 to 1, got 1.5", {"p": 1.5}),
        (ValueError, "p must be from 0 to 1, got nan", {"p": math.nan}),
        (TypeError, "p must be a number, got '0.5'", {"p": "0.5"}),
        (TypeError, "p must be a number, got (array|tensor)", {"p": np.array([0.1, 0.5])}),
        (ValueError, r"p = 0.001 is too close to 0 for bits=8.*use bits=16", {"p": 0.001, "bits": 8}),
        (ValueError, r"p = 0.999999 is too close to 1 for bits=16.*use bits=32", {"p": 0.999999}),
        (ValueError, r"too close to 0 for bits=32.*even bits=32", {"p": 1e-12, "bits": 32}),
        (ValueError, "bits must be 8, 16 or 32, got 4", {"bits": 4}),
        (ValueError, f"seed must be from {-(2**63)} to {2**64 - 1}, got {2**64}", {"seed": 2**64}),
        (TypeError, "seed must be an integer, got 1.5", {"seed": 1.5}),
        (TypeError, "seed must be an integer, got None", {"seed": None}),
        (TypeError, "got the bool True", {"seed": True}),
        (TypeError, "array of seeds must have dtype int64, got int32", {"seed": np.ones(4, np.int32)}),
        (TypeError, "array of seeds must have dtype int64, got float64", {"seed": np.ones(4)}),
        (ValueError, r"must have the shape \(\) or \(4,\), got \(6,\)", {"seed": np.ones(6, np.int64)}),
        (ValueError, r"must have the shape \(\) or \(4,\), got \(4, 6\)", {"seed": np.ones((4, 6), np.int64)}),
        (ValueError, f"step must be from 0 to {2**32 - 1}, got {2**32}", {"step": 2**32}),
        (ValueError, "step must be from 0 .* got -1", {"step": -1}),
        (TypeError, "step must be an integer, got 0.5", {"step": 0.5}),
        (TypeError, "step must be an integer, got float64", {"step": np.ones(1)}),
        (ValueError, r"step must be one integer, got shape \(2,\)", {"step": np.ones(2, np.int64)}),
        (ValueError, "offset must be from 0 .* got -3", {"offset": -3}),
        (ValueError, f"offset {2**63 - 24 + 1} is out of range.*shape .4, 6.*{2**63}", {"offset": 2**63 - 24 + 1}),
        (ValueError, f"offset 1 with row_stride {2**62} is out of range.*index", {"offset": 1, "row_stride": 2**62}),
        (ValueError, "row_stride must be from 0 .* got -1", {"row_stride": -1}),
        (TypeError, "x must have dtype float16, float32, float64, got int64", {"x": np.ones(3, np.int64)}),
        (TypeError, "got complex64", {"x": np.ones(3, np.complex64)}),
        (TypeError, "masked arrays are not supported", {"x": np.ma.ones(3)}),
    ],
)
@pytest.mark.parametrize("container", ["numpy", "torch"])
def test_refusals(error, message, change, container):
    given = {"x": X, "p": 0.5, "seed": 1, **change}
    if container == "torch":
        if isinstance(given["x"], np.ma.MaskedArray):
            return
        message = message.replace("x must have dtype float16, float32, float64, got int64", "torch.int64 is not")
        given = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in given.items()}
        message = message.replace("int64, got ", "int64, got (torch.)?")
        message = message.replace("got complex64", "dtype torch.complex64 is not supported")
    with pytest.raises(error, match=message):
        sjlt.dropout(**given)
    if "x" not in change and container == "numpy":
        with pytest.raises(error, match=message):
            sjlt.dropout_mask(X.shape, **{k: v for k, v in given.items() if k != "x"})
        with pytest.raises(error, match=message):
            sjlt.dropout_add(residual=X, **given)


def test_last_index_is_accepted():
    assert sjlt.dropout(X, 0.5, 1, offset=2**63 - 24).shape == X.shape
    assert sjlt.dropout(X[:, :0], 0.5, 1, offset=2**63 - 1).size == 0


def test_in_place_refusals():
    with pytest.raises(ValueError, match=r"share memory \(strides \(0, 4\)\)"):
        sjlt.dropout(np.lib.stride_tricks.as_strided(X, (4, 6), (0, 4)), 0.5, 1, inplace=True)
    with pytest.raises(ValueError, match=r"share memory \(strides \(0, 1\)\)"):
        sjlt.dropout(torch.ones(6).expand(4, 6), 0.5, 1, inplace=True)
    with pytest.raises(ValueError, match=r"share memory \(strides \(2,\)\)"):  # overlapping halves of elements
        sjlt.dropout(np.lib.stride_tricks.as_strided(X[0].copy(), (3,), (2,)), 0.5, 1, inplace=True)
    with pytest.raises(ValueError, match="read-only"):
        sjlt.dropout(np.broadcast_to(X, (4, 6)), 0.5, 1, inplace=True)
    with pytest.raises(TypeError, match="list"):
        sjlt.dropout([1.0], 0.5, 1, inplace=True)


@pytest.mark.parametrize("shape", [(4, 5, 0), (0, 4), (4, 0)])
def test_empty_tensors_share_no_memory(shape):
    """Although NumPy (for these shapes) or torch (after expand) reports strides of 0."""
    x = np.empty(shape, np.float32)
    assert sjlt.dropout(x, 0.5, 1, inplace=True) is x
    t = torch.empty((*shape, 1)).expand(*shape, 7)
    assert sjlt.dropout(t, 0.5, 1, inplace=True) is t


@pytest.mark.parametrize("shape", [None, 2.0, "ab", (2, -1), [2, None]])
def test_shape_refusals(shape):
    with pytest.raises((TypeError, ValueError), match="a length of shape must be"):
        sjlt.dropout_mask(shape, 0.5, 1)


def test_device_refusals():
    """Never a mask that no backend has filled."""
    with FakeTensorMode(), pytest.raises(TypeError, match=r"device xpu.* not supported"):
        sjlt.dropout_mask(3, 0.5, 1, device="xpu")


def test_tensor_refusals():
    x = torch.ones(4, 6)
    with pytest.raises(TypeError, match="int8"):
        sjlt.dropout(x.to(torch.int8), 0.5, 1)
    with pytest.raises(TypeError, match="layout"):
        sjlt.dropout(x.to_sparse(), 0.5, 1)
    with pytest.raises(TypeError, match="seed must be an integer or a torch tensor"):
        sjlt.dropout(x, 0.5, np.ones(4, np.int64))
    with pytest.raises(TypeError, match="torch tensor, but x is an array"):
        sjlt.dropout(X, 0.5, torch.ones(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="seed must be on cpu, like x, got meta"):
        sjlt.dropout(x, 0.5, torch.ones(4, dtype=torch.int64, device="meta"))
    with pytest.raises(TypeError, match="p must be a number"):
        sjlt.dropout(x, torch.tensor(0.5), 1)
    with pytest.raises(ValueError, match=r"residual must have the shape of x, \(4, 6\), got \(6,\)"):
        sjlt.dropout_add(x, x[0], 0.5, 1)
    with pytest.raises(TypeError, match="residual must be a torch tensor, like x, got ndarray"):
        sjlt.dropout_add(x, X, 0.5, 1)
    with pytest.raises(TypeError, match=r"keep must have dtype torch.bool, got torch.float32"):
        sjlt.masked_dropout(x, x, 0.5)
    with pytest.raises(TypeError, match="keep must have dtype bool, got float32"):
        sjlt.masked_dropout(X, X, 0.5)
    with pytest.raises(ValueError, match="keep must have the shape"):
        sjlt.masked_dropout(X, np.ones(3, np.bool_), 0.5)
    with pytest.raises(TypeError, match="masked arrays are not supported"):
        sjlt.masked_dropout(X, np.ma.masked_array(X > 0, mask=True), 0.5)
    with pytest.raises(ValueError, match="too close to 0 for bits=8"):
        sjlt.masked_dropout(X, X > 0, 0.001, 8)
