"""bf16: every value is read exactly, and results are rounded to nearest even, as torch rounds."""

import math

import pytest
import torch
from helpers.cases import exhaustive_except
from helpers.products import normal

from sjlt import Sketch

BF16 = torch.bfloat16
PATTERNS = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)

# One nonzero per column, all in one chunk: a signed permutation, which preserves values.
PERMUTATION = Sketch(128, 128, nnz=1, seed=2**63 + 1)
ROWS, SIGNS = (torch.from_numpy(part[0]).long() for part in PERMUTATION.entries())

WAYS = {
    "X @ S.T": lambda x, out: PERMUTATION.project(x, out=out),
    "few rows": lambda x, out: [PERMUTATION.project(a, out=b) for a, b in zip(x.split(3), out.split(3), strict=True)],
    "Y @ S": lambda x, out: PERMUTATION.project_adjoint(x, out=out),
    "few rows @ S": lambda x, out: [
        PERMUTATION.project_adjoint(a, out=b) for a, b in zip(x.split(3), out.split(3), strict=True)
    ],
}
each_way = pytest.mark.parametrize("way", WAYS)

# Layouts of a tensor in memory that `new` allocates.
LAYOUTS = {
    "rows": lambda n, d, new: new(n, d),
    "columns": lambda n, d, new: new(d, n).t(),
    "every second column": lambda n, d, new: new(n, 2 * d)[:, 1::2],
    "odd rows": lambda n, d, new: new(n, d + 3)[:, 1:-2],  # aligned to one element only
    "odd columns": lambda n, d, new: new(d, n + 3)[:, 1:-2].t(),
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def in_layout(layout, x):
    return LAYOUTS[layout](*x.shape, lambda *shape: x.new_full(shape, math.nan)).copy_(x)


def permuted(way, x):
    """The expected result, in fp64."""
    x = x.cpu().double()
    return x[:, ROWS] * SIGNS if "@ S" in way and "S.T" not in way else (x * SIGNS)[:, ROWS.argsort()]


def same_values(actual, expected):
    """Equal dtype and values; NaN payloads and the signs of zero sums may differ."""
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", exhaustive_except([BF16], [BF16, torch.float32, torch.float64]))
@each_layout
@each_way
def test_every_value_is_read(way, layout, dtype):
    """Including infinities, NaNs and subnormals."""
    x = in_layout(layout, PATTERNS.view(BF16).view(512, 128))
    out = torch.full_like(x, 7, dtype=dtype)
    WAYS[way](x, out)
    same_values(out, permuted(way, x).to(dtype))


@pytest.mark.gpu
@each_layout
@each_way
def test_every_value_is_read_by_kernels(way, layout):
    """Finite values only, without subnormals."""
    x = PATTERNS.view(BF16).view(512, 128)
    x = in_layout(layout, x.where(x.isfinite() & (x.abs() >= torch.finfo(BF16).tiny), 0).cuda())
    expected = permuted(way, x)
    for dtype in (BF16, torch.float32, torch.float64):
        out = torch.full_like(x, 7, dtype=dtype)
        WAYS[way](x, out)
        same_values(out, expected.to(dtype))


@pytest.mark.parametrize("layout", exhaustive_except(["rows"], LAYOUTS))
@each_way
def test_results_are_rounded_as_torch_rounds(way, layout):
    """Every bf16 value, the midpoint to the next one, and values next to both; overflow; NaNs."""
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    x = ((PATTERNS.int() << 16)[:, None] + low).view(torch.float32).view(-1, 128)
    assert x.isnan().any()
    assert (x.isfinite() & x.to(BF16).isinf()).any()
    out = in_layout(layout, torch.full_like(x, 7, dtype=BF16))
    WAYS[way](x, out)
    same_values(out, permuted(way, x).float().to(BF16))


@pytest.mark.parametrize("bits", ["7f800001", "7f80ffff", "7fffffff", "ff800001", "ffffffff", "7fc00000"])
def test_nan_is_preserved(bits):
    """Including NaNs whose set payload bits are all truncated."""
    number = torch.tensor([int(bits, 16)]).int().view(torch.float32)
    x = torch.zeros(40, 128)
    x[3, 5] = number
    out = torch.zeros(40, 128, dtype=BF16)
    PERMUTATION.project(x, out=out)
    assert out.isnan().sum() == 1
    assert out[3, ROWS[5]].isnan()


@pytest.mark.exhaustive
def test_fp64_results():
    """Rounded by way of fp32, as in torch."""
    x = torch.tensor([1 + 2.0**-8, 1 + 2.0**-8 + 2.0**-23, 1 + 3 * 2.0**-8, 1e39, -1e300, 1e-300, 9.2e-41, math.pi])
    x = x.double().repeat(16).expand(50, 128)
    for way in WAYS:
        out = torch.full(x.shape, 7, dtype=BF16)
        WAYS[way](x, out)
        same_values(out, permuted(way, x).to(BF16))


@pytest.mark.parametrize("n", exhaustive_except([1, 70], [1, 3, 70]))
def test_sums_are_rounded_once(device, n):
    """Sums run in fp32: the same bits as the rounded fp32 result, and as the result for the data converted to fp32."""
    for S in (Sketch(5000, 70, nnz=3, seed=4), Sketch(200, 300, nnz=4, seed=4)):
        for function, width in ((S.project, S.n_features), (S.project_adjoint, S.n_components)):
            x = normal(device, n, width, dtype=BF16)
            wide = torch.empty_like(function(x), dtype=torch.float32)
            function(x, out=wide)
            assert torch.equal(function(x), wide.to(BF16))
            if device == "cpu":
                assert torch.equal(function(x), function(x.float()).to(BF16))


@each_layout
def test_only_the_elements_of_a_strided_out_are_written(layout):
    x = normal("cpu", 50, 128)
    for way in WAYS:
        memory = []

        def kept(*shape, memory=memory):
            memory.append(torch.full(shape, math.nan, dtype=BF16))
            return memory[0]

        out = LAYOUTS[layout](50, 128, kept)
        WAYS[way](x, out)
        same_values(out, permuted(way, x).to(BF16))
        out.fill_(math.nan)
        assert memory[0].isnan().all(), "what lies beside out was written to"
