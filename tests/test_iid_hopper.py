"""The iid law's Hopper kernel: exact on integer data on such a GPU, and used for the intended products."""

import pytest
import torch
from helpers import kernels
from helpers.choices import H200, HOPPER, all_tensors_on, iid_product
from helpers.data import integers
from helpers.kernels import assert_untouched_around, filled, integral_matrix, launches_run, poisoned

from sjlt import Sketch
from sjlt.backends.triton import device
from sjlt.backends.triton import iid as triton_iid
from sjlt.kernels.config import iid as config


@pytest.fixture
def kernel_calls(monkeypatch, hopper_sizes):
    """Record (n, d) of each product the kernel runs; products of all sizes are eligible."""
    if not device.describe(torch.device("cuda")).hopper:
        pytest.skip("needs a GPU of compute capability 9")
    from sjlt.backends.triton import hopper

    calls = []

    def recorded(chosen, spec, x, out, call=hopper.project_iid):
        if launches_run():
            calls.append(tuple(x.shape))
        call(chosen, spec, x, out)

    monkeypatch.setattr(hopper, "project_iid", recorded)
    return calls


def check(S, n, dtype="bfloat16", x_in="rows", out_in="rows"):
    """Check out = x S', rounded once. (k * density is a power of 4, so the scale is a power of two.)"""
    x = integers((n, S.n_features), "float64", seed=n)
    given, out = filled(x_in, x, dtype, "cuda"), poisoned(out_in, (n, S.n_components), dtype, "cuda")
    kernels.project(S, given, out, False)
    scale = (S.n_components * S.density) ** -0.5
    expected = torch.from_numpy((integral_matrix(S) @ x.T).T * scale)
    assert torch.equal(out.cpu(), expected.to(out.dtype))
    assert_untouched_around(out)


@pytest.mark.gpu
@pytest.mark.parametrize(("k", "density"), [(64, 1.0), (16, 0.25), (256, 1 / 16), (1024, 2**-8)])
@pytest.mark.parametrize("n", [256, 300, 1031])
@pytest.mark.parametrize("d", [64, 192, 4096])
def test_products_are_exact(d, n, k, density, kernel_calls):
    check(Sketch(d, k, density=density, seed=-3), n)
    assert kernel_calls == [(n, d)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("k", "density"), [(1, 0.5), (200, 1 / 3), (128, 0.01)])
@pytest.mark.parametrize(("n", "d"), [(256, 128), (300, 768), (256 * 132 * 3 + 5, 64), (256 * 50, 960)])
def test_bits_equal_the_portable_kernel(n, d, k, density, dtype, kernel_calls):
    """Sums that the portable kernel does not split; several tiles per program. Repeated ten times to expose races."""
    S, x = Sketch(d, k, density=density, seed=1), torch.randn(n, d, device="cuda", dtype=dtype)
    expected = torch.empty(n, k, device="cuda")
    kernels.project(S, x, expected, False)  # an fp32 result, which only the portable kernel writes
    assert not kernel_calls
    for _ in range(10):
        result = torch.full((n, k), torch.nan, device="cuda", dtype=dtype)
        kernels.project(S, x, result, False)
        assert torch.equal(result, expected.to(dtype))
    assert kernel_calls == [(n, d)] * 10


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("x_in", ["rows", "aligned part", "every third row"])
@pytest.mark.parametrize("out_in", ["rows", "columns", "inner part", "other axes between"])
def test_layouts(out_in, x_in, dtype, kernel_calls):
    check(Sketch(256, 64, density=0.25, seed=1), 301, dtype, x_in, out_in)
    assert kernel_calls == [(301, 256)]


@pytest.mark.gpu
@pytest.mark.parametrize("start", [1, 64, 2**32 - 128, 2**32, 2**40 + 77])
@pytest.mark.parametrize("seed", [0, 2**63 + 1, 2**64 - 1])
def test_slices_and_seeds(start, seed, kernel_calls):
    check(Sketch(2**41, 64, density=1.0, seed=seed)[:, start : start + 128], 256)
    assert kernel_calls == [(256, 128)]


@pytest.mark.gpu
def test_non_finite_values_stay_in_their_vector(kernel_calls):
    S, x = Sketch(128, 64, density=1.0), torch.ones(300, 128, device="cuda", dtype=torch.bfloat16)
    expected = S.project(x)
    x[7, 100], x[299, 0] = torch.nan, torch.inf
    result = S.project(x)
    assert len(kernel_calls) == 2
    assert result[7].isnan().all()
    assert not result[299].isfinite().any()
    others = [v for v in range(300) if v not in (7, 299)]
    assert torch.equal(result[others], expected[others])


@pytest.mark.gpu
def test_cuda_graph(kernel_calls):
    S, x = Sketch(256, 100, density=0.5), torch.randn(500, 256, device="cuda", dtype=torch.float16)
    expected = S.project(x)  # compile
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = S.project(x)
    result.fill_(torch.nan)
    graph.replay()
    assert torch.equal(result, expected)
    assert len(kernel_calls) == 2


@pytest.mark.gpu
def test_other_products_use_the_portable_kernel(kernel_calls):
    S = Sketch(256, 64, density=0.25, seed=1)
    wide = torch.from_numpy(integers((300, 320), "float64", seed=1)).cuda().half()
    data = {
        "columns": wide[:, :256].t().contiguous().t(),
        "not aligned": wide[:, 1:257],
        "odd rows": torch.as_strided(wide, (300, 256), (257, 1)),
        "repeated": wide[:1, :256].expand(300, 256),
        "few": wide[:255, :256],
        "fp32": wide[:, :256].float(),
    }
    for name, x in data.items():
        assert torch.equal(S.project(x), (S.project(x.double()).to(x.dtype))), name
    x = data["columns"].contiguous()
    assert torch.equal(S.project(x, out=torch.empty(300, 64, device="cuda")).double(), S.project(x.double()))
    summed = S.project(x, out=torch.ones(300, 64, device="cuda"), accumulate=True)
    assert torch.equal(summed.double(), S.project(x.double()) + 1)
    thin = Sketch(200, 64, density=0.25, seed=1)
    assert torch.equal(thin.project(wide[:, 64:264]).double(), thin.project(wide[:, 64:264].double()))
    assert not kernel_calls


# --------------------------------------------------------------------------------- without a GPU


def eligible(n=1 << 20, d=768, k=128, strides=None, dtype="bfloat16", offset=0):
    product = iid_product(n, d, k, dtype, x_strides=strides, offset=offset, device=HOPPER)
    assert config.choose(product._replace(adjoint=True)) != config.HOPPER
    assert config.choose(product._replace(plain=False)) != config.HOPPER
    assert config.choose(product._replace(device=H200)) != config.HOPPER
    return config.choose(product) == config.HOPPER


def test_eligible_products():
    assert eligible()
    assert eligible(1 << 18, 4096, 512, dtype="float16")
    assert eligible(offset=2**32)
    assert eligible(d=64)
    assert not eligible(n=10_000)
    assert not eligible(n=1 << 31)
    assert not eligible(1, 4096, 1 << 20)
    assert not eligible(d=8192)
    assert not eligible(d=800)
    assert not eligible(strides=(769, 1))
    assert not eligible(strides=(0, 1))
    assert not eligible(strides=(1, 1 << 20))
    assert not eligible(dtype="float32")
    assert not eligible(offset=2**32 - 1)


@pytest.mark.usefixtures("hopper_sizes")
def test_accepted_tensors(monkeypatch):
    all_tensors_on(monkeypatch, HOPPER)
    S, wide = Sketch(256, 64, density=0.25), torch.zeros(300, 320, dtype=torch.float16)
    for x, out_dtype, add, expected in (
        (wide[:, :256], torch.float16, False, True),
        (wide[:, 8:264].bfloat16(), torch.bfloat16, False, True),
        (wide[:, 8:264], torch.float16, False, True),
        (wide[:, 1:257], torch.float16, False, False),  # not aligned
        (wide[:, :256].t().contiguous().t(), torch.float16, False, False),
        (wide[:1, :256].expand(300, 256), torch.float16, False, False),
        (wide[:255, :256], torch.float16, False, False),
        (wide[:, :256], torch.float32, False, False),
        (wide[:, :256], torch.float32, True, False),
        (wide[:, :256].float(), torch.float32, False, False),
    ):
        product = triton_iid.describe(S.spec, x, torch.empty(len(x), 64, dtype=out_dtype), add, adjoint=False)
        assert (config.choose(product) == config.HOPPER) == expected, product
