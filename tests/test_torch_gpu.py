"""On a GPU: streams, several devices, asynchronous execution, and numerics."""

import math

import numpy as np
import pytest
import torch
from helpers.data import exact_adjoint, exact_project, integers

from sjlt import Sketch

pytestmark = pytest.mark.gpu
S = Sketch(5000, 300, nnz=4, seed=1)


def products(x, y):
    """Every call that accepts rows x of 5000 features or y of 300 components, with the exact function."""
    yield lambda: x @ S.T
    yield lambda: (S @ x.T.contiguous()).T
    yield lambda: S.project(x[0])
    yield lambda: S.project(x, out=torch.ones((len(x), 300), device=x.device), accumulate=True)
    yield lambda: y @ S
    yield lambda: (S.T @ y.T.contiguous()).T
    yield lambda: S.project_adjoint(y[0])


def data(n=70, dtype=torch.float32, device="cuda"):
    return (torch.from_numpy(integers((n, width))).to(device, dtype) for width in (5000, 300))


def test_runs_on_the_callers_stream():
    """A call is ordered after earlier work and before later work of the current stream."""
    x, y = data()
    expected = [product() for product in products(x, y)]
    late_x, late_y = torch.full_like(x, math.nan), torch.full_like(y, math.nan)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late_x.copy_(x)
        late_y.copy_(y)
        results = [product().clone() for product in products(late_x, late_y)]
    stream.synchronize()
    for result, exact in zip(results, expected, strict=True):
        assert torch.equal(result, exact)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_no_synchronization():
    x, y = data()
    leaf = x.clone().requires_grad_()

    def everything():
        for product in products(x, y):
            product()
        torch.autograd.grad((leaf @ S.T).square().sum(), leaf)
        torch.vmap(lambda x: x @ S.T)(x)

    everything()
    mode = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        everything()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def test_graph_capture():
    x, y = data()
    expected = [product() for product in products(x, y)]  # compile
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [product() for product in products(x, y)]
    for result in results:
        result.fill_(math.nan)
    graph.replay()
    for result, exact in zip(results, expected, strict=True):
        assert torch.equal(result, exact)


def gradients(x):
    """Functions of both products whose bits depend only on the device and the shape."""
    x.grad = None
    y = x @ S.T
    (y.square().sum() + (y @ S).sin().sum() + (S @ x.t()).sum()).backward()
    return x.grad


def test_graph_capture_of_gradients():
    x = torch.randn((70, 5000), device="cuda", requires_grad=True)
    fresh = torch.randn_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # torch requires the first backward pass to run on a side stream
        gradients(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    x.grad = None
    with torch.cuda.graph(graph):
        captured = gradients(x)
    for values in (fresh, 2 * fresh):
        with torch.no_grad():
            x.copy_(values)
        graph.replay()
        assert torch.equal(captured, gradients(values.clone().requires_grad_()))


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")  # raised by torch's own warm-up
def test_make_graphed_callables():
    class Projected(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(300, 5000)

        def forward(self, x):
            return self.linear(x) @ S.T

    module = Projected().cuda()
    x = torch.randn((70, 300), device="cuda", requires_grad=True)
    expected = module(x)
    slopes = torch.autograd.grad(expected.square().sum(), (x, *module.parameters()))
    expected = expected.detach()  # its history belongs to another stream, which a capture cannot use
    graphed = torch.cuda.make_graphed_callables(module, (torch.randn_like(x).requires_grad_(),))
    y = graphed(x)
    assert torch.equal(y, expected)
    for slope, exact in zip(torch.autograd.grad(y.square().sum(), (x, *module.parameters())), slopes, strict=True):
        torch.testing.assert_close(slope, exact)  # torch may choose another algorithm for its own part


@pytest.mark.filterwarnings(  # raised by torch
    "ignore:.torch.jit.script.*:DeprecationWarning", "ignore:The CUDA Graph is empty:UserWarning"
)
def test_torch_compile_with_graphs():
    """torch.compile in the mode that captures graphs and replays them from the third call on."""
    faster = torch.compile(lambda x: (x @ S.T).relu() @ S, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn((70, 5000), device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(faster(x).clone(), (x @ S.T).relu() @ S)
    torch._dynamo.reset()


def test_gradients_run_on_the_stream_of_their_product():
    x = torch.randn((70, 5000), device="cuda")
    expected = gradients(x.clone().requires_grad_())
    late = torch.full_like(x, math.nan)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late.copy_(x)
        result = gradients(late.requires_grad_()).clone()
    stream.synchronize()
    assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_runs_on_the_tensors_device(dtype):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    expected = [product() for product in products(*data(dtype=dtype))]
    with torch.cuda.device(0):
        for product, exact in zip(products(*data(dtype=dtype, device="cuda:1")), expected, strict=True):
            result = product()
            assert result.device == torch.device("cuda:1")
            assert torch.equal(result.cpu(), exact.cpu())
        assert torch.cuda.current_device() == 0
        near = torch.from_numpy(integers((70, 5000))).to("cuda:0", dtype).requires_grad_()
        far = near.detach().to("cuda:1").requires_grad_()
        assert gradients(far).device == torch.device("cuda:1")
        assert torch.equal(gradients(far).cpu(), gradients(near).cpu())
        x, _ = data()
        with pytest.raises(ValueError, match=r"cuda:0.*cuda:1"):
            S.project(x, out=torch.zeros((70, 300), device="cuda:1"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_bits_are_reproducible(dtype):
    torch.manual_seed(0)
    for n in (1, 70):
        x, y = (torch.randn((n, width), device="cuda", dtype=dtype) for width in (5000, 300))
        first = [product() for product in products(x, y)]
        for _ in range(3):
            for result, before in zip([product() for product in products(x, y)], first, strict=True):
                assert torch.equal(result, before)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("n", [1, 3, 70])
def test_non_finite_values(n, dtype, value):
    """They reach every component with one of their entries, none outside its tile, and no other vector."""
    row, feature = n // 2, 1234
    array = integers((n, 5000))
    x = torch.from_numpy(array).to("cuda", dtype)
    x[row, feature] = value
    entries = S.entries(feature, feature + 1)[0][:, 0]
    tile = np.arange(300) // 100
    for result in (x @ S.T, (S @ x.T.contiguous()).T):
        bad = ~torch.isfinite(result[row]).cpu().numpy()
        assert bad[entries].all()
        assert not bad[tile != tile[entries[0]]].any()
        others = np.arange(n) != row
        np.testing.assert_array_equal(result.cpu().double().numpy()[others], exact_project(S, array[others]))
    array = integers((n, 300))
    y = torch.from_numpy(array).to("cuda", dtype)
    component = int(entries[0])
    y[row, component] = value
    for result in (y @ S, (S.T @ y.T.contiguous()).T):
        bad = ~torch.isfinite(result[row]).cpu().numpy()
        assert bad[S.to_scipy("csr")[[component]].indices].all()
        others = np.arange(n) != row
        np.testing.assert_array_equal(result.cpu().double().numpy()[others], exact_adjoint(S, array[others]))
