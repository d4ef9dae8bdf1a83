"""The exact law's Hopper kernels: exact on integer data, and accurate."""

import math

import pytest
import torch
from helpers import kernels
from helpers.cases import pairwise
from helpers.choices import changed_choices
from helpers.kernels import LAYOUTS, check_adjoint, check_project, large_first, of_many_sizes, product_error, steep

from sjlt import Sketch
from sjlt.backends.triton import device

pytestmark = pytest.mark.gpu
SPLITS = {  # splits due to the size, into short sums, or for accuracy only
    "by size": {},
    "short": {"hopper.MAX_STEPS": 4, "hopper.MAX_CHUNKS": 16},
    "long": {"hopper.GROUPS_PER_STEP": 1 << 30},
}
both_ways = {"project": check_project, "adjoint": check_adjoint}


@pytest.fixture
def kernel_calls(monkeypatch, hopper_sizes):
    """Record the shape of X for each product the kernels run; products of all sizes are eligible."""
    if not device.describe(torch.device("cuda")).hopper:
        pytest.skip("needs a GPU of compute capability 9")
    from sjlt.backends.triton import hopper

    calls = []

    def recorded(prepare):
        def prepare_recorded(*arguments):
            call = prepare(*arguments)

            def record(spec, data, out):
                if kernels.launches_run():
                    calls.append((len(data), spec.n_features))
                call(spec, data, out)

            return record

        return prepare_recorded

    for name in ("prepare_project", "prepare_adjoint"):
        monkeypatch.setattr(hopper, name, recorded(getattr(hopper, name)))
    return calls


@pairwise(
    n=[16, 129, 300],
    nnz=[1, 2, 4, 8],
    shape=[(32, 128), (100, 128), (768, 256), (1000, 512), (1024, 128), (4096, 512)],
    dtype=["float32", "float16", "bfloat16"],
)
def test_projections_are_exact(n, nnz, shape, dtype, kernel_calls):
    d, k = shape
    if d == 100 and dtype != "float32":
        d = 104  # rows start at multiples of 16 bytes
    check_project(Sketch(d, k, nnz=nnz, seed=-3), n, dtype, device="cuda")
    assert kernel_calls == [(n, d)]


@pairwise(
    shape=[(3000, 128), (16384, 128), (2**15, 512)], nnz=[1, 2, 4, 8], dtype=["float32", "float16"], splits=list(SPLITS)
)
def test_many_features_per_component(shape, nnz, dtype, splits, kernel_calls):
    """More features than the words of one step cover."""
    d, k = shape
    with changed_choices(SPLITS[splits]):
        check_project(Sketch(d, k, nnz=nnz, seed=-3), 150, dtype, device="cuda")
    assert kernel_calls == [(150, d)]


@pairwise(
    shape=[(33, 128), (36, 128), (101, 128), (700, 256), (702, 256), (304, 4096)], nnz=[1, 2, 4, 8], way=list(both_ways)
)
def test_rows_of_any_length(shape, nnz, way, kernel_calls):
    """Other data follows each row directly; some tiles have no column of a chunk."""
    d, k = shape
    both_ways[way](Sketch(d, k, nnz=nnz, seed=4), 200, device="cuda", x_in="padded rows", out_in="padded rows")
    assert kernel_calls == ([(200, d)] if way == "project" or (d % 4 == 0 and nnz < 8) else [])


@pairwise(
    n=[16, 129, 300],
    nnz=[1, 2, 4],
    shape=[(32, 128), (100, 128), (768, 256), (1000, 512), (5000, 256), (1024, 128), (300, 4096)],
)
def test_adjoints_are_exact(n, nnz, shape, kernel_calls):
    d, k = shape
    check_adjoint(Sketch(d, k, nnz=nnz, seed=-3), n, device="cuda")
    assert kernel_calls == [(n, d)]


@pytest.mark.parametrize("check", [check_project, check_adjoint])
@pytest.mark.parametrize("x_in", ["rows", "aligned part", "every third row"])
@pytest.mark.parametrize("out_in", ["rows", "aligned part", "every third row"])
def test_layouts(out_in, x_in, check, kernel_calls):
    check(Sketch(768, 256, seed=1), 301, device="cuda", x_in=x_in, out_in=out_in)
    assert kernel_calls == [(301, 768)]


@pairwise(
    law=[(4, 0), (4, 2**63 + 1), (1, 2**64 - 1), (2, 5), (8, 2**63)],
    group=[1, 2**26, 2**30 - 1, 2**50],
    way=list(both_ways),
)
def test_slices_and_seeds(law, group, way, kernel_calls):
    nnz, seed = law
    start = 256 // nnz * group
    both_ways[way](Sketch(2**60, 256, nnz=nnz, seed=seed)[:, start : start + 700], 200, device="cuda")
    assert kernel_calls == ([(200, 700)] if way == "project" or nnz < 8 else [])


@pytest.mark.parametrize("check", [check_project, check_adjoint])
def test_more_tiles_than_programs(check, kernel_calls):
    check(Sketch(96, 256), 128 * 200 + 1, device="cuda")
    assert len(kernel_calls) == 1


@pairwise(
    shape=[(20_000, 768, 256), (3000, 4096, 512), (700, 16384, 2048), (3000, 20_000, 256), (300, 2**17, 128)],
    nnz=[1, 2, 4, 8],
    precision=["highest", "high"],
)
def test_accuracy_and_determinism(shape, nnz, precision, kernel_calls, set_precision):
    """Vectors of very different scales, some all zero; "high" is as accurate as "highest"."""
    n, d, k = shape
    S, x = Sketch(d, k, nnz=nnz, seed=7), of_many_sizes(n, d)
    set_precision(precision)
    projected = [S.project(x) for _ in range(5)]
    y = projected[0]
    back = [S.project_adjoint(y) for _ in range(5)]
    assert len(kernel_calls) == (10 if nnz < 8 else 5)
    assert product_error(y, S.project(x.double())) < 1e-6
    other_way = nnz == 8 and precision == "high"
    assert product_error(back[0], S.project_adjoint(y.double())) < (2e-5 if other_way else 1e-6)
    assert not y[5].any()
    assert not back[0][n - 1].any()
    for results in (projected, back):
        assert all(torch.equal(result, results[0]) for result in results)


@pairwise(shape=[(2048, 256), (4096, 512), (50_000, 256), (2**16, 128)], nnz=[1, 2, 4, 8], splits=["by size", "long"])
def test_sums_with_large_first_terms(shape, nnz, splits, kernel_calls):
    """Tensor cores round such sums down, so they only accumulate over few columns."""
    with changed_choices(SPLITS[splits]):
        check_large_first(*shape, nnz, kernel_calls)


def check_large_first(d, k, nnz, kernel_calls):
    S = Sketch(d, k, nnz=nnz, seed=7)
    x = torch.randn(304, d, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    cases = list(large_first(x))
    for data, bound in cases:
        exact = S.project(data.double())
        assert product_error(S.project(data), exact) < bound
        assert product_error(as_left_product(S, data), exact) < bound
    assert len(kernel_calls) == len(cases) * (1 if nnz == 1 else 2)


@pytest.mark.parametrize("where", [0, 3, 400, 767])
@pytest.mark.parametrize("outlier", [1e-30, 1e3, 1e30])
def test_scales_follow_the_data(outlier, where, kernel_calls):
    """Values of any size, first or last, and after zeros; the other vectors' results keep their bits."""
    S, n = Sketch(768, 256, seed=7), 20_000
    x = torch.randn(n, 768, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    x[torch.rand(n, 768, device="cuda", generator=torch.Generator("cuda").manual_seed(1)) < 0.9] = 0
    plain = S.project(x)
    outliers = torch.arange(n, device="cuda") % 50 == 7
    x[outliers, where] = outlier
    y = S.project(x)
    assert len(kernel_calls) == 2
    assert product_error(y, S.project(x.double())) < 1e-6
    assert torch.equal(y[~outliers], plain[~outliers])


@pytest.mark.parametrize("rising", [True, False])
@pytest.mark.parametrize("d", [1000, 5000])
def test_steadily_changing_scales(d, rising, kernel_calls):
    """Over 80 decades within a vector, so that contributions to the first sums vanish in the end."""
    S, x = Sketch(d, 256, seed=7), steep(300, d, rising)
    assert product_error(S.project(x), S.project(x.double())) < 1e-6
    assert len(kernel_calls) == 1


@pytest.mark.parametrize("d", [768, 2500])
def test_extreme_magnitudes(d, kernel_calls):
    """From fp32's largest value down to subnormals: powers of two are exact where fp32 can represent them."""
    S = Sketch(d, 256, seed=7)
    x = torch.zeros(268, d, device="cuda")
    powers = torch.arange(-140, 128)
    x[torch.arange(268), torch.arange(268) * 2] = torch.exp2(powers.double()).float().cuda()
    y = S.project(x)
    assert len(kernel_calls) == 1
    assert torch.equal(y.double(), S.project(x.double()))


@pytest.mark.parametrize(("d", "nnz"), [(768, 4), (5000, 2)])
def test_non_finite_values_stay_in_their_vector(d, nnz, kernel_calls):
    for dtype in (torch.float32, torch.bfloat16):
        S, x = Sketch(d, 256, nnz=nnz), torch.ones(300, d, device="cuda", dtype=dtype)
        y = torch.ones(300, 256, device="cuda", dtype=dtype)
        expected = S.project(x), S.project_adjoint(y)
        x[7, 100], x[299, 0], y[7, 100], y[299, 0] = torch.nan, torch.inf, torch.nan, torch.inf
        others = [v for v in range(300) if v not in (7, 299)]
        dense = S.to_scipy().toarray()
        for result, before, reached in (
            (S.project(x), expected[0], dense[:, [100, 0]].T),
            (S.project_adjoint(y), expected[1], dense[[100, 0]]),
        ):
            assert torch.equal(result[others], before[others])
            for v, entries in zip((7, 299), reached, strict=True):
                assert not result[v].isfinite().cpu().numpy()[entries != 0].any()
    assert len(kernel_calls) == 6  # 16-bit adjoints run on other kernels


def test_cuda_graph(kernel_calls):
    S, x = Sketch(768, 256), torch.randn(500, 768, device="cuda")
    y = S.project(x)  # compile
    assert product_error(y, S.project(x.double())) < 1e-6
    back = S.project_adjoint(y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = S.project(x)
        back_again = S.project_adjoint(again)
    again.fill_(math.nan)
    back_again.fill_(math.nan)
    graph.replay()
    assert torch.equal(again, y)
    assert torch.equal(back_again, back)
    assert len(kernel_calls) == 4


def test_other_stream(kernel_calls):
    S, x = Sketch(768, 256), torch.randn(5000, 768, device="cuda")
    expected, stream = S.project(x), torch.cuda.Stream()
    assert product_error(expected, S.project(x.double())) < 1e-6
    late = torch.zeros_like(x)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        late.copy_(x)
        result = S.project(late)
    stream.synchronize()
    assert torch.equal(result, expected)
    assert len(kernel_calls) == 2


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_no_synchronization(kernel_calls):
    S, x = Sketch(768, 256), torch.randn(500, 768, device="cuda")
    y = S.project(x)
    S.project_adjoint(y)  # compile
    before = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        S.project_adjoint(S.project(x))
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert len(kernel_calls) == 4


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_non_current_device(kernel_calls):
    S, x = Sketch(768, 256), torch.randn(500, 768, device="cuda:0")
    y = S.project(x)
    elsewhere = S.project(x.to("cuda:1"))
    back = S.project_adjoint(elsewhere)
    assert elsewhere.device == back.device == torch.device("cuda:1")
    assert torch.equal(elsewhere.cpu(), y.cpu())
    assert torch.equal(back.cpu(), S.project_adjoint(y).cpu())
    assert len(kernel_calls) == 4


# ------------------------------------------------------------------------------------- S A, with a row-major A


def check_transposed(S, n, dtype="float32", layout="columns"):
    check_project(S, n, dtype, device="cuda", x_in=layout, out_in=layout)


def as_left_product(S, x):
    """x S' computed as S A."""
    return (S @ x.t().contiguous()).t()


@pairwise(
    n=[128, 136, 304],
    nnz=[1, 2, 4, 8],
    shape=[(32, 128), (101, 128), (768, 256), (1000, 512), (4096, 512)],
    dtype=["float32", "float16", "bfloat16"],
)
def test_transposed_products_are_exact(n, nnz, shape, dtype, kernel_calls):
    d, k = shape
    check_transposed(Sketch(d, k, nnz=nnz, seed=-3), n, dtype)
    assert kernel_calls == ([(n, d)] if (dtype, nnz) != ("float32", 1) else [])


@pairwise(
    shape=[(3000, 128), (9001, 512), (2**16, 512), (2**17, 128)],
    nnz=[2, 4, 8],
    dtype=["float32", "float16"],
    splits=list(SPLITS),
)
def test_transposed_splits(shape, nnz, dtype, splits, kernel_calls):
    d, k = shape
    with changed_choices(SPLITS[splits]):
        check_transposed(Sketch(d, k, nnz=nnz, seed=9), 152, dtype)
    assert kernel_calls == [(152, d)]


@pytest.mark.parametrize(
    "layout",
    [
        lambda n, d, new: new(d, n + 32).t()[16:-16],
        lambda n, d, new: new(d + 5, n).t()[:, 3:-2],
        lambda n, d, new: new(3 * d, n)[::3].t(),
    ],
    ids=["aligned part", "some rows", "every third row"],
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_transposed_layouts(layout, dtype, kernel_calls, monkeypatch):
    monkeypatch.setitem(LAYOUTS, "here", layout)
    for d in (768, 20_000):
        check_transposed(Sketch(d, 256, seed=1), 304, dtype, "here")
    assert len(kernel_calls) == 2


@pairwise(law=[(4, 0), (4, 2**63 + 1), (2, 5), (8, 2**63)], group=[1, 2**26, 2**30 - 1, 2**50])
def test_transposed_slices_and_seeds(law, group, kernel_calls):
    nnz, seed = law
    start = 256 // nnz * group
    check_transposed(Sketch(2**60, 256, nnz=nnz, seed=seed)[:, start : start + 9000], 136)
    assert kernel_calls == [(136, 9000)]


@pairwise(
    shape=[(20_096, 768, 256), (3072, 4096, 512), (640, 2**15, 1024)],
    nnz=[2, 4, 8],
    precision=["highest", "high", "medium"],
)
def test_transposed_accuracy_and_determinism(shape, nnz, precision, kernel_calls, set_precision):
    """Vectors of very different scales, some all zero."""
    n, d, k = shape
    S, x = Sketch(d, k, nnz=nnz, seed=7), of_many_sizes(n, d)
    set_precision(precision)
    results = [as_left_product(S, x) for _ in range(5)]
    assert len(kernel_calls) == 5
    assert product_error(results[0], S.project(x.double())) < 1e-6
    assert not results[0][[5, n - 1]].any()
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize(("d", "rising"), [(1000, True), (1000, False), (50_000, True), (50_000, False)])
def test_transposed_scales(d, rising, kernel_calls):
    S, x = Sketch(d, 256, seed=7), steep(304, d, rising)
    result = as_left_product(S, x)
    assert len(kernel_calls) == 1
    assert product_error(result, S.project(x.double())) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("d", [768, 20_000])
def test_transposed_non_finite_values_stay_in_their_vector(d, dtype, kernel_calls):
    S, x = Sketch(d, 256), torch.ones(304, d, device="cuda", dtype=dtype)
    expected = as_left_product(S, x)
    x[7, 100], x[303, 0] = torch.nan, torch.inf
    result, others = as_left_product(S, x), [v for v in range(304) if v not in (7, 303)]
    assert torch.equal(result[others], expected[others])
    for v, j in ((7, 100), (303, 0)):
        reached = S[:, j : j + 1].to_scipy().toarray()[:, 0] != 0
        assert not result[v].isfinite().cpu().numpy()[reached].any()
    assert len(kernel_calls) == 2


@pytest.mark.parametrize("d", [768, 20_000])
def test_transposed_products_in_graphs_streams_and_devices(d, kernel_calls):
    """In a graph, on another stream, and on another device: the same bits."""
    S, a = Sketch(d, 256), torch.randn(d, 512, device="cuda")
    expected, stream = S @ a, torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = S @ a
    again.fill_(math.nan)
    graph.replay()
    assert torch.equal(again, expected)
    late = torch.zeros_like(a)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        late.copy_(a)
        result = S @ late
    stream.synchronize()
    assert torch.equal(result, expected)
    if torch.cuda.device_count() > 1:
        assert torch.equal((S @ a.to("cuda:1")).cpu(), expected.cpu())
    assert len(kernel_calls) == 3 + (torch.cuda.device_count() > 1)
