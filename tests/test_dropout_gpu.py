"""Dropout on a GPU: graphs, streams, no synchronization, one kernel for all seeds, huge tensors."""

import pytest
import torch

import sjlt

# torch's compiler imports names that torch has deprecated.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")]


def new(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda()


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_inductor():
    @torch.compile(fullgraph=True)
    def layer(x, w, seed, step):
        return sjlt.dropout_add(torch.relu(x @ w), x, 0.3, seed, step=step)

    step = torch.tensor(4, device="cuda")
    for seed in (5, 77, 2**40):
        x, w = (new(64, 64, seed=i).requires_grad_() for i in range(2))
        y = layer(x, w, seed, step)
        inner = torch.relu(x @ w)
        torch.testing.assert_close(y, sjlt.dropout(inner, 0.3, seed, step=step) + x)
        y.sum().backward()
        x_grad, w_grad = torch.autograd.grad((sjlt.dropout(inner, 0.3, seed, step=step) + x).sum(), (x, w))
        torch.testing.assert_close(x.grad, x_grad)
        torch.testing.assert_close(w.grad, w_grad)


def test_graph_draws_fresh_masks_from_a_device_step():
    x = torch.ones(1 << 16, device="cuda")
    step, seeds = torch.tensor(3, device="cuda"), torch.arange(16, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # warm up
        sjlt.dropout(x, 0.5, 5, step=step)
        sjlt.dropout(x.view(16, -1), 0.5, seeds, step=step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = sjlt.dropout(x, 0.5, 5, step=step)
        z = sjlt.dropout(x.view(16, -1), 0.5, seeds, step=step)
        step.add_(1)
    for i in range(3, 6):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, sjlt.dropout(x, 0.5, 5, step=i))
        assert torch.equal(z, sjlt.dropout(x.view(16, -1), 0.5, seeds, step=i))
        seeds += 1


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_no_synchronization():
    x, seeds, step = torch.ones(16, 64, device="cuda"), torch.arange(16, device="cuda"), torch.tensor(3, device="cuda")
    x.requires_grad_()
    sjlt.dropout_mask(x.shape, 0.5, 5, device="cuda")  # load the kernels, which may synchronize
    try:
        torch.cuda.set_sync_debug_mode("error")
        for seed in (5, seeds, seeds[0]):
            y = sjlt.dropout_add(sjlt.dropout(x, 0.5, seed, step=step), x, 0.5, seed)
            y.backward(y.detach())
            sjlt.dropout_mask(x.shape, 0.5, seed, step=step, device="cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_one_kernel_for_all_seeds_steps_and_offsets():
    from sjlt.backends.triton import launcher as triton_launches

    x = torch.ones(70, 64, device="cuda")
    sjlt.dropout(x, 0.5, 2)
    sjlt.dropout(x.t(), 0.5, 2)
    known = len(triton_launches._compiled)
    for i, seed in enumerate((0, 1, 16, 17, -1, 2**31, 2**63, 2**64 - 1)):
        for p in (0.1, 0.5):
            sjlt.dropout(x, p, seed, step=2**i, offset=64 * 3**i)
            sjlt.dropout(x.t(), p, seed, step=2**i, offset=70 * 64 * 3**i)
    assert len(triton_launches._compiled) == known


def test_runs_on_the_callers_stream():
    x = torch.full((1 << 20,), torch.nan, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        x.fill_(1)
        y = sjlt.dropout(x, 0.5, 3)
    stream.synchronize()
    assert torch.equal(y, sjlt.dropout(torch.ones_like(x), 0.5, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_more_than_2_32_elements(dtype):
    n = 2**32 + 4099
    x = torch.ones(n, dtype=dtype, device="cuda")
    sjlt.dropout(x, 0.5, 9, inplace=True)
    for begin in (0, 2**31 - 1000, 2**32 - 1000, n - 2000):
        expected = sjlt.dropout(torch.ones(2000, dtype=dtype, device="cuda"), 0.5, 9, offset=begin)
        assert torch.equal(x[begin : begin + 2000], expected)
    transposed = x.fill_(1)[: 2**32].view(2**16, 2**16).t()
    out = sjlt.dropout(transposed, 0.5, 9)
    assert torch.equal(out[-1], sjlt.dropout(torch.ones_like(out[-1]), 0.5, 9, offset=2**32 - 2**16))
