"""The reduction of partial sums: exact where possible, in a fixed order, for few and many results."""

import numpy as np
import pytest
import torch
from helpers.cases import each_value

from sjlt.backends.triton import device, partial_sums
from sjlt.kernels.config.product import MAX_REDUCE_LANES, reduce_lanes

DEVICE = "cpu" if device.INTERPRETED else "cuda"


def partial(splits, rows, columns, transposed, dtype=torch.float32):
    """Integers (splits, rows, columns) in the layout of partial sums, followed by NaN that must not be read."""
    shape = (splits, columns, rows) if transposed else (rows, splits, columns)
    room = torch.full((splits * rows * columns + 64,), float("nan"), dtype=dtype, device=DEVICE)
    memory = room[: splits * rows * columns].view(shape)
    memory.copy_(torch.randint(-99, 100, shape, generator=torch.Generator().manual_seed(splits)))
    return memory.mT if transposed else memory.transpose(0, 1)


@each_value(
    splits=[2, 9, 31, 32, 33, 257, 1000],
    shape=[(1, 1), (2, 56), (1, 16), (7, 33), (3, 300)],
    transposed=[False, True],
    dtype=[torch.float32, torch.float64],
    add=[False, True],
)
def test_sums_are_exact(splits, shape, transposed, dtype, add):
    sums = partial(splits, *shape, transposed, dtype)
    out = torch.full(shape, 5.0 if add else float("nan"), dtype=dtype, device=DEVICE)
    partial_sums.reduce(0.5, sums, out, add)
    assert torch.equal(out, sums.sum(0) * 0.5 + (5 if add else 0))


def test_few_results_use_several_lanes():
    assert reduce_lanes(1000, 2 * 56) == MAX_REDUCE_LANES
    assert reduce_lanes(1000, 1 << 20) == reduce_lanes(31, 1) == 1


@pytest.mark.parametrize("splits", [16, 1000])
def test_non_finite_values_stay_in_their_result(splits):
    sums = partial(splits, 2, 40, False)
    sums[splits // 2, 0, 3], sums[3, 1, 39] = float("nan"), float("inf")
    out = torch.zeros(2, 40, device=DEVICE)
    with np.errstate(invalid="ignore"):  # in Triton's interpreter
        partial_sums.reduce(1.0, sums, out, False)
    assert out[0, 3].isnan()
    assert out[1, 39] == float("inf")
    assert out.isfinite().sum() == 2 * 40 - 2


@pytest.mark.parametrize("splits", [31, 1000])
def test_small_values_survive_large_ones(splits):
    """Values of 1e-3 along with pairs of 1e6 and -1e6: plain fp32 running sums would lose them."""
    sums = torch.full((1, splits, 4), 1e-3, device=DEVICE)
    sums[:, 1::7] += 1e6
    sums[:, 4::7] -= 1e6
    sums = sums.transpose(0, 1)
    out = torch.empty(1, 4, device=DEVICE)
    partial_sums.reduce(1.0, sums, out, False)
    exact, magnitudes = sums.double().sum(0), sums.double().abs().sum(0)
    lanes = reduce_lanes(splits, 4)
    assert ((out - exact).abs() <= (8 + 2 + lanes) * 2.0**-24 * magnitudes).all()
