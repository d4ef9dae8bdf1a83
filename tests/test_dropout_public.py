"""Dropout's values by the public functions: special values, in place, residuals, given masks."""

import doctest
import importlib
import math

import dropout_reference as witness
import numpy as np
import pytest
import torch

import sjlt

BITS = [8, 16, 32]


@pytest.fixture(params=["numpy", "torch", pytest.param("cuda", marks=pytest.mark.gpu)])
def public(request):
    return request.param


def device_of(public):
    return "cuda" if public == "cuda" else "cpu"


def data(shape, device, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device)


def dropout(backend, x, p, **given):
    """Dropout by the public function for the backend's container."""
    if backend == "numpy":
        return torch.from_numpy(sjlt.dropout(x.numpy(), p, 3, **given))
    return sjlt.dropout(x, p, 3, **given)


def test_p_0_preserves_every_bit(public):
    payloads = torch.tensor([0x7FC12345, 0x7F812345, -0x00345678, -0x80000000, 1, 0x7F800000], dtype=torch.int64)
    x = payloads.to(torch.int32).view(torch.float32).to(device_of(public))
    out = dropout(public, x, 0.0)
    assert out.data_ptr() != x.data_ptr()
    assert torch.equal(out.view(torch.int32), x.view(torch.int32))


def test_p_1_gives_zeros(public):
    x = torch.tensor([math.nan, math.inf, -1.0, 0.0], device=device_of(public))
    out = dropout(public, x, 1.0)
    assert torch.equal(out, torch.zeros_like(x))
    assert not out.signbit().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_value(public, dtype):
    """Products are rounded once, to nearest even, including overflow to inf and subnormals."""
    if public == "numpy" and dtype == torch.bfloat16:
        pytest.skip("NumPy has no bf16")
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).to(device_of(public))
    for p in (0.3, 0.001):
        mask = sjlt.dropout_mask(x.shape, p, 3, device=x.device)
        expected = torch.where(mask, (x.float() * torch.tensor(witness.scale(p, 16)).float()).to(dtype), 0.0)
        out = dropout(public, x, p)
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out.nan_to_num(), expected.nan_to_num())


# --------------------------------------------------------------------------------- in place, residuals, masks


def test_in_place(public):
    memory = data((12, 30), device_of(public)).float()
    for view in (lambda m: m, lambda m: m.t(), lambda m: m[1:8, 3:20], lambda m: m[::2, ::3]):
        expected, x = memory.clone(), memory.clone()
        view(expected).copy_(sjlt.dropout(view(memory), 0.3, 4, offset=2))
        given = view(x).numpy() if public == "numpy" else view(x)
        assert sjlt.dropout(given, 0.3, 4, offset=2, inplace=True) is given
        assert torch.equal(x, expected)
    x = memory[0].numpy() if public == "numpy" else memory[0]
    assert sjlt.dropout(x, 1.0, 4, inplace=True) is x
    assert not x.any()


def test_in_place_on_foreign_byte_orders():
    x = np.arange(1, 40, dtype=">f4")
    expected = sjlt.dropout(x, 0.5, 1)
    assert sjlt.dropout(x, 0.5, 1, inplace=True) is x
    assert np.array_equal(x, expected)


def test_dropout_add(public):
    for dtype in (torch.float32, torch.float64):
        x, residual = (data((9, 33), device_of(public), seed=i).to(dtype) for i in range(2))
        x[:, 3:6], residual[:, 3:9] = -0.0, -0.0
        for p in (0.0, 0.3, 1.0):
            expected = sjlt.dropout(x, p, 4, step=1) + residual
            if public == "numpy":
                result = torch.from_numpy(sjlt.dropout_add(x.numpy(), residual.numpy(), p, 4, step=1))
            else:
                result = sjlt.dropout_add(x, residual, p, 4, step=1)
            assert torch.equal(result, expected)
            assert torch.equal(result.signbit(), expected.signbit())
    assert torch.equal(sjlt.dropout_add(x, residual, 0.3, 4, training=False), x + residual)


def test_dropout_add_rounds_once(public):
    if public == "numpy":
        pytest.skip("NumPy has no bf16")
    x, residual = (data((9, 33), device_of(public), seed=i).float().bfloat16() for i in range(2))
    expected = (sjlt.dropout(x.float(), 0.3, 4) + residual.float()).bfloat16()
    assert torch.equal(sjlt.dropout_add(x, residual, 0.3, 4), expected)
    mixed = sjlt.dropout_add(x, residual.float(), 0.3, 4)  # a residual stream under autocast
    assert mixed.dtype == torch.float32
    assert torch.equal(mixed, sjlt.dropout(x.float(), 0.3, 4) + residual.float())


@pytest.mark.parametrize("bits", BITS)
def test_masked_dropout(public, bits):
    x = data((9, 33), device_of(public)).float().t()
    keep = sjlt.dropout_mask(x.shape, 0.3, 4, bits=bits, device=x.device)
    assert keep.dtype == torch.bool
    if public == "numpy":
        arrays = x.numpy(), keep.numpy()
        results = [torch.from_numpy(sjlt.masked_dropout(*arrays, 0.3, b)) for b in (bits, None)]
    else:
        results = [sjlt.masked_dropout(x, keep, 0.3, b) for b in (bits, None)]
    assert torch.equal(results[0], sjlt.dropout(x, 0.3, 4, bits=bits))
    factor = torch.tensor(1 / 0.7, dtype=torch.float32, device=x.device)
    assert torch.equal(results[1], torch.where(keep, x * factor, 0.0))
    assert not sjlt.masked_dropout(x, keep, 1.0).any()
    assert torch.equal(sjlt.masked_dropout(x, keep, 0.0), torch.where(keep, x, 0.0))


def test_masks():
    for shape in (7, (7,), [2, 3], (), (0, 4), np.array([2, 3]), np.array(7)):
        mask = sjlt.dropout_mask(shape, 0.3, 1)
        assert isinstance(mask, np.ndarray)
        assert mask.dtype == np.bool_
        assert mask.tolist() == np.reshape(witness.mask(mask.shape, 0.3, 1), mask.shape).tolist()
    assert sjlt.dropout_mask(5, 0.0, 1).all()
    assert not sjlt.dropout_mask(5, 1, 1).any()
    assert torch.is_tensor(sjlt.dropout_mask(5, 0.5, torch.tensor(1)))
    assert torch.is_tensor(sjlt.dropout_mask(5, 0.5, 1, step=torch.tensor(1)))


def test_docstring_examples():
    failed, tried = doctest.testmod(importlib.import_module("sjlt.seeded_dropout"))
    assert tried > 8
    assert failed == 0


def test_module_does_not_shadow_the_function():
    module = importlib.import_module("sjlt.seeded_dropout")
    assert sjlt.dropout is module.dropout


@pytest.mark.parametrize("columns", [1, 300])
def test_masks_may_be_read_only(columns):
    x, keep = np.ones((3, columns)), np.arange(3 * columns).reshape(3, columns) % 2 == 0
    expected = sjlt.masked_dropout(x, keep, 0.5)
    keep.setflags(write=False)
    assert np.array_equal(sjlt.masked_dropout(x, keep, 0.5), expected)
    row = np.broadcast_to(keep[:1], keep.shape)
    assert np.array_equal(sjlt.masked_dropout(x, row, 0.5), np.where(row, 2 * x, 0))
