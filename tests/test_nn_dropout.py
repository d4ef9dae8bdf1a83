"""SeededDropout: the law's masks at consecutive steps, however a model is trained."""

import copy
import doctest
import io
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sjlt
from sjlt.nn import SeededDropout

P, SEED = 0.3, 2**63 + 12345


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture
def x(device):
    """Data without zeros, so any zero after dropout was dropped."""
    return torch.rand(6, 40, generator=torch.Generator().manual_seed(1)).add(0.5).to(device)


def expected(x, step, p=P, seed=SEED, bits=16, **place):
    return sjlt.dropout(x, p, seed, step=step, bits=bits, **place)


# ---------------------------------------------------------------------------------------- the law


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_each_forward_uses_the_next_step(x, device, bits):
    layer = SeededDropout(P, SEED, bits).to(device)
    results = [layer(x) for _ in range(4)]
    for step, result in enumerate(results):
        assert torch.equal(result, expected(x, step, bits=bits))
    assert layer.counter.item() == 4
    assert not torch.equal(results[0], results[1])


def test_eval_is_the_identity(x, device):
    layer = SeededDropout(P, SEED).to(device).eval()
    assert layer(x) is x
    assert layer(x, step=3) is x
    assert layer.counter.item() == 0


def test_explicit_step(x, device):
    for layer in (SeededDropout(P, SEED), SeededDropout(P, SEED, advance="manual")):
        layer.to(device)
        assert torch.equal(layer(x, 7), expected(x, 7))
        assert torch.equal(layer(x, step=torch.tensor(9, device=device)), expected(x, 9))
        assert layer.counter.item() == 0


def test_manual_advance(x, device):
    layer = SeededDropout(P, SEED, advance="manual").to(device)
    for step in range(3):
        assert torch.equal(layer(x), expected(x, step))
        assert torch.equal(layer(x), expected(x, step))
        layer.advance()


def test_shard(x, device):
    layer = SeededDropout(P, SEED, advance="manual").to(device)
    whole = layer(x)
    assert torch.equal(layer(x[2:5], offset=2 * 40), whole[2:5])
    assert torch.equal(layer(x[:, 7:20], offset=7, row_stride=40), whole[:, 7:20])


def test_p_of_0_and_1(x, device):
    assert torch.equal(SeededDropout(0.0).to(device)(x), x)
    assert torch.equal(SeededDropout(1).to(device)(x), torch.zeros_like(x))
    assert SeededDropout().p == nn.Dropout().p


def test_like_nn_dropout_in_sequential(x, device):
    """In nn.Sequential, for 0-d, empty and strided inputs, like nn.Dropout."""
    model = nn.Sequential(nn.Identity(), SeededDropout(P, SEED)).to(device)
    assert torch.equal(model(x.T), expected(x.T, 0))
    assert model(x[:0]).shape == (0, 40)
    assert model(x[0, 0]).shape == ()


# ------------------------------------------------------------------------------------ state


@pytest.mark.parametrize("strict", [True, False])
def test_state_dict_continues_a_run(x, device, strict):
    """A state loaded from a file into a layer with another seed and bits continues the original run."""
    model = nn.Sequential(SeededDropout(P, SEED, bits=8)).to(device)
    for _ in range(3):
        model(x)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = nn.Sequential(SeededDropout(P, seed=1)).to(device)
    assert loaded.load_state_dict(torch.load(file, weights_only=True), strict=strict) == ([], [])
    for step in (3, 4):
        assert torch.equal(loaded(x), expected(x, step, bits=8))
        assert torch.equal(model(x), expected(x, step, bits=8))


def test_state_with_bits_unsuited_to_p_is_refused():
    layer = SeededDropout(0.001)
    with pytest.raises(ValueError, match="too close to 0 for bits=8"):
        layer.load_state_dict(SeededDropout(P, bits=8).state_dict())
    assert layer.bits == 16


def test_state_without_a_seed_is_refused():
    with pytest.raises(RuntimeError, match=r'Missing key.*"seed".*"counter"'):
        SeededDropout(P).load_state_dict({})


def test_default_seeds_use_torchs_generator():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        seeds = [SeededDropout(P).seed.item() for _ in range(64)]
        torch.manual_seed(5)
        assert seeds == [SeededDropout(P).seed.item() for _ in range(64)]
    # Each of the 64 bits takes both values (false alarm: 2^-57), and no seed occurs twice (2^-52).
    assert math.prod(any(s >> i & 1 for s in seeds) and not all(s >> i & 1 for s in seeds) for i in range(64))
    assert len(set(seeds)) == 64


def test_explicit_seed_draws_nothing():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        before = torch.get_rng_state()
        SeededDropout(P, 1)
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, -(2**63)])
def test_64_bit_seeds(x, device, seed):
    layer = SeededDropout(P, seed).to(device)
    assert torch.equal(layer(x), expected(x, 0, seed=seed))
    assert torch.equal(SeededDropout(P, seed % 2**64).to(device)(x), expected(x, 0, seed=seed))


def test_copies_and_reset_parameters(x, device):
    layer = SeededDropout(P).to(device)
    layer(x)
    twin = copy.deepcopy(layer)
    assert torch.equal(layer(x), twin(x))
    layer(x)
    assert twin.counter.item() == 2  # the counters are independent
    twin.reset_parameters()
    assert twin.counter.item() == 0
    assert twin.seed.item() != layer.seed.item()
    given = copy.deepcopy(SeededDropout(P, SEED))
    given.reset_parameters()
    assert given.seed.item() == SEED - 2**64


def test_buffers_move_and_stay_integers(x):
    layer = SeededDropout(P, SEED).half().to("meta")
    assert {b.dtype for b in layer.buffers()} == {torch.int64}
    assert {b.device.type for b in layer.buffers()} == {"meta"}
    assert "p=0.3, seed=?, bits=16" in repr(layer)
    layer.to_empty(device="cpu").reset_parameters()
    assert torch.equal(layer(x.cpu()), expected(x.cpu(), 0))
    with torch.device("meta"):
        built = SeededDropout(P)
    assert built.seed.is_meta
    assert built.state_dict()["_extra_state"].item() == 16


def test_repr():
    assert repr(SeededDropout(0.1, 7, bits=8)) == "SeededDropout(p=0.1, seed=7, bits=8)"
    assert repr(SeededDropout(0.1, 7, advance="manual")) == "SeededDropout(p=0.1, seed=7, bits=16, advance='manual')"


# ------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"p": -0.1}, ValueError, r"from 0 to 1, got -0\.1"),
        ({"p": 1.5}, ValueError, r"from 0 to 1, got 1\.5"),
        ({"p": math.nan}, ValueError, "from 0 to 1, got nan"),
        ({"p": 1e-4, "bits": 8}, ValueError, "use bits=16"),
        ({"bits": 12}, ValueError, "12"),
        ({"seed": 2**64}, ValueError, str(2**64)),
        ({"seed": -(2**63) - 1}, ValueError, str(-(2**63) - 1)),
        ({"seed": True}, TypeError, "True"),
        ({"seed": 1.5}, TypeError, r"1\.5"),
        ({"advance": "never"}, ValueError, "'never'"),
    ],
    ids=str,
)
def test_refusals(arguments, error, message):
    with pytest.raises(error, match=message):
        SeededDropout(**{"p": P, **arguments})


# ---------------------------------------------------------------------------------- derivatives


def test_gradients_use_the_mask_of_their_forward(x, device):
    """Even if other forwards come between, and if backward is called twice."""
    layer = SeededDropout(P, SEED).to(device)
    x.requires_grad_()
    results = [layer(x) for _ in range(3)]
    for step in (1, 2, 0, 0):
        (gradient,) = torch.autograd.grad(results[step].sum(), x, retain_graph=True)
        assert torch.equal(gradient, expected(torch.ones_like(x), step))


def test_nothing_is_saved_for_backward(x, device):
    saved = []
    x.requires_grad_()
    for layer in (SeededDropout(P, SEED), SeededDropout(P, SEED, advance="manual")):
        layer.to(device)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
            layer(x)
    assert max(saved) == 1


def test_advance_before_backward_is_detected(x, device):
    layer = SeededDropout(P, SEED, advance="manual").to(device)
    y = layer(x.requires_grad_())
    layer.advance()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class Block(nn.Module):
    """Dropout between functions whose gradients depend on its output."""

    def __init__(self, **kwargs):
        super().__init__()
        self.linear, self.dropout = nn.Linear(40, 40, dtype=torch.float64), SeededDropout(P, SEED, **kwargs)

    def forward(self, x, step=None):
        return self.dropout(self.linear(x).sin(), step).cos() * x


def gradients_of_blocks(run, x, **kwargs):
    """The gradients of three steps of two blocks; `run` calls a block with the model's step, which it may ignore."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        blocks = nn.ModuleList([Block(**kwargs), Block(**kwargs)]).to(x.device)
    gradients = []
    for step in range(3):
        y = x.double().requires_grad_()
        given = torch.tensor(step, device=x.device)
        for block in blocks:
            y = run(block, y, given)
        blocks.zero_grad()
        y.square().sum().backward()
        gradients += [p.grad.clone() for p in blocks.parameters()]
        for block in blocks:
            block.dropout.advance()
    return gradients


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_is_exact(x, reentrant):
    """With a counter that is advanced once per step, and with the step as an input."""
    options = {"use_reentrant": reentrant, "preserve_rng_state": False}
    plain = gradients_of_blocks(lambda block, y, step: block(y), x, advance="manual")
    manual = gradients_of_blocks(lambda block, y, step: checkpoint(block, y, **options), x, advance="manual")
    given = gradients_of_blocks(lambda block, y, step: checkpoint(block, y, step, **options), x)
    for a, b, c in zip(plain, manual, given, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_refuses_the_default_mode(x, reentrant):
    """It would differentiate another mask, which must be an error rather than a wrong gradient."""

    def run(block, y, step):
        return checkpoint(block, y, use_reentrant=reentrant, preserve_rng_state=False)

    with pytest.raises(RuntimeError, match=r"SeededDropout was called in a backward pass.*advance='manual'.*step="):
        gradients_of_blocks(run, x)


# ---------------------------------------------------------------------------------- torch.compile

# Uses Inductor's choice of what backward recomputes, without its compiler.
PARTITIONED = "aot_eager_decomp_partition"
compiling = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # raised by torch's own modules


@pytest.fixture
def compile_fresh():
    torch._dynamo.reset()
    yield lambda f, backend=PARTITIONED: torch.compile(f, fullgraph=True, backend=backend)
    torch._dynamo.reset()


@compiling
def test_compiled(x, device, compile_fresh):
    backend = "inductor" if device == "cuda" else PARTITIONED
    layer = SeededDropout(P, SEED).to(device)
    compiled = compile_fresh(layer, backend)
    x.requires_grad_()
    results = [compiled(x) for _ in range(3)]
    for step, result in enumerate(results):
        assert torch.equal(result, expected(x, step))
        assert torch.equal(torch.autograd.grad(result.sum(), x)[0], expected(torch.ones_like(x), step))
    assert layer.counter.item() == 3
    assert torch.equal(layer.eval()(x), x)


@compiling
def test_one_compilation_for_all_seeds(x, device, compile_fresh):
    """As in a model whose blocks have different seeds."""
    layers = [SeededDropout(P, seed).to(device) for seed in (1, 2**63, 5)]
    compiled = compile_fresh(lambda layer, x: layer(x))
    with torch.compiler.set_stance("default"):
        compiled(layers[0], x)
    with torch.compiler.set_stance("fail_on_recompile"):
        for layer in layers[1:]:
            compiled(layer, x)
            assert torch.equal(compiled(layer, x), expected(x, 1, seed=layer.seed.item()))


@compiling
def test_compiled_checkpointing(x, device, compile_fresh):
    """Exact in manual mode; in the default mode an error, raised by the layer or by torch."""

    def run(block, y, step):
        return checkpoint(block, y, use_reentrant=False, preserve_rng_state=False)

    plain = gradients_of_blocks(lambda block, y, step: block(y), x, advance="manual")
    for a, b in zip(plain, gradients_of_blocks(compile_fresh(run), x, advance="manual"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    with pytest.raises(RuntimeError, match=r"called in a backward pass|modified by an inplace operation"):
        gradients_of_blocks(compile_fresh(run), x)


# ------------------------------------------------------------------------------------------ CUDA


@pytest.mark.gpu
def test_graph_replays_draw_new_masks():
    x = torch.rand(64, 100, device="cuda").add(0.5).requires_grad_()
    layer = SeededDropout(P, SEED).to("cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # compile
        layer(x).sum().backward()
    torch.cuda.synchronize()
    layer.reset_parameters()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [layer(x), layer(x)]
        gradients = [torch.autograd.grad(y.sum(), x)[0] for y in results]
    layer.reset_parameters()
    for replay in range(3):
        graph.replay()
        for i, (y, gradient) in enumerate(zip(results, gradients, strict=True)):
            assert torch.equal(y, expected(x.detach(), 2 * replay + i))
            assert torch.equal(gradient, expected(torch.ones_like(x), 2 * replay + i))
    assert layer.counter.item() == 6


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_no_synchronization():
    x = torch.rand(64, 100, device="cuda", requires_grad=True)
    layers = [SeededDropout(P).to("cuda"), SeededDropout(P, advance="manual").to("cuda")]

    def train():
        for layer in layers:
            layer(x).sum().backward()
            layer.advance()

    train()
    mode = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        train()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def test_opcheck(device):
    torch.library.opcheck(torch.ops.sjlt.take_step.default, (torch.tensor(3, device=device),))


def test_docstring_example():
    import sjlt.nn.dropout

    failed, tried = doctest.testmod(sjlt.nn.dropout)
    assert tried > 0
    assert failed == 0
