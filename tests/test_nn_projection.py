"""`sjlt.nn.SparseProjection`: a layer without parameters whose state is the description of its sketch."""

import copy
import io
import pickle

import pytest
import torch
from helpers.ranks import run_ranks
from torch import nn

from sjlt import Sketch
from sjlt.nn import SparseProjection, SparseProjectionAdjoint

S = Sketch(50, 16, nnz=4, seed=7)


def layer(**options):
    return SparseProjection(50, 16, **{"seed": 7, **options})


def test_products(device):
    x = torch.randn((3, 4, 50), device=device)
    assert torch.equal(layer()(x), x @ S.T)
    assert torch.equal(layer().T(x[..., :16]), x[..., :16] @ S)
    assert torch.equal(layer().adjoint(x[..., :16]), x[..., :16] @ S)
    assert isinstance(layer().T, SparseProjectionAdjoint)
    assert layer().T.T.sketch == layer().sketch == layer().T.sketch == S
    assert layer(nnz="auto").sketch.nnz == 4
    assert SparseProjection(50, 3, seed=0).sketch == Sketch(50, 3)  # the law allows at most three nonzeros
    assert layer(nnz=1).sketch == Sketch(50, 16, nnz=1, seed=7)


def test_repr_and_attributes():
    text = "in_features=50, out_features=16, nnz=4, seed=7"
    assert repr(layer()) == f"SparseProjection({text})"
    assert repr(layer().T) == "SparseProjectionAdjoint(in_features=16, out_features=50, nnz=4, seed=7)"
    assert (layer().in_features, layer().out_features) == (50, 16)
    assert not list(layer().parameters())
    with pytest.raises(TypeError, match="seed"):
        SparseProjection(50, 16)


def test_state_is_the_description():
    model = nn.Sequential(nn.Linear(20, 50), layer())
    state = model.state_dict()
    assert list(state) == ["0.weight", "0.bias", "1._extra_state"]
    assert state["1._extra_state"] == S.to_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    twin = nn.Sequential(nn.Linear(20, 50), layer())
    twin.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(twin(torch.ones(20)), model(torch.ones(20)))


@pytest.mark.parametrize("other", [{"seed": 8}, {"nnz": 2}, {"seed": 2**64 - 1}])
def test_state_of_another_sketch_is_refused(other):
    state = layer(**other).state_dict()
    with pytest.raises(ValueError, match="the state dict belongs to") as refusal:
        layer().load_state_dict(state)
    assert repr(S) in str(refusal.value)
    assert repr(layer(**other).sketch) in str(refusal.value)
    with pytest.raises(ValueError, match="law 1, but the description has 2"):
        layer().load_state_dict({"_extra_state": {**S.to_dict(), "law": 2}})
    with pytest.raises(RuntimeError, match="_extra_state"):
        layer().load_state_dict({})


def test_copies():
    x = torch.randn(2, 50)
    for twin in (copy.deepcopy(layer()), copy.copy(layer()), pickle.loads(pickle.dumps(layer()))):
        assert twin.sketch == S
        assert torch.equal(twin(x), x @ S.T)


def test_gradients(device):
    model = nn.Sequential(nn.Linear(20, 50), layer(), nn.ReLU(), layer().T).to(device)
    x = torch.randn((6, 20), device=device)
    model(x).square().sum().backward()
    reference = copy.deepcopy(model[0])
    reference.zero_grad()
    M = torch.from_numpy(S.toarray("float32")).to(device)
    (torch.relu(reference(x) @ M.T) @ M).square().sum().backward()
    torch.testing.assert_close(model[0].weight.grad, reference.weight.grad)


def test_input_dtypes_and_devices():
    x = torch.ones(50)
    assert layer()(x.double()).dtype == torch.float64
    strict = layer(dtype=torch.float64)
    assert strict(x.double()).dtype == torch.float64
    with pytest.raises(RuntimeError, match=r"float64.*float32"):
        strict(x)
    assert strict.float()(x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert strict(x.half()).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match=r"float32.*float16"):
        strict.T(x[:16].half())
    elsewhere = layer(device="meta")
    with pytest.raises(RuntimeError, match=r"meta.*cpu"):
        elsewhere(x)
    assert elsewhere(x.to("meta")).shape == (16,)
    with pytest.raises(RuntimeError, match=r"float64.*float32"):
        layer(device="meta", dtype=torch.float64)(x.to("meta"))
    with torch.device("meta"):
        assert layer()(x).shape == (16,)


@pytest.mark.gpu
def test_moving_to_a_gpu():
    model = layer(device="cpu").to("cuda")
    assert model(torch.ones(50, device="cuda")).is_cuda
    with pytest.raises(RuntimeError, match=r"cuda.*cpu"):
        model(torch.ones(50))


def test_compiled(device):
    model = nn.Sequential(nn.Linear(20, 50), layer()).to(device)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn((6, 20), device=device)
    assert torch.equal(compiled(x), model(x))


DISTRIBUTED = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel
from sjlt.nn import SparseProjection

device, rank = sys.argv[1], int(os.environ["RANK"])
if device == "cuda":
    torch.cuda.set_device(rank)
dist.init_process_group("nccl" if device == "cuda" else "gloo")

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 50), SparseProjection(50, 16, seed=7), nn.Linear(16, 3)).to(device)

x = torch.randn((2, 8, 20), generator=torch.Generator().manual_seed(1)).to(device)
single = model()
(sum(single(part).square().mean() for part in x) / 2).backward()
replicated = DistributedDataParallel(model())
replicated(x[rank]).square().mean().backward()
for a, b in zip(single.parameters(), replicated.module.parameters(), strict=True):
    torch.testing.assert_close(a.grad, b.grad)
mesh = dist.device_mesh.init_device_mesh(device, (2,))
sharded = fully_shard(model(), mesh=mesh)
loss = sharded(x[rank]).square().mean()
loss.backward()
for a, b in zip(single.parameters(), sharded.parameters(), strict=True):
    torch.testing.assert_close(a.grad, b.grad.full_tensor())
state = get_model_state_dict(sharded)
assert state["1._extra_state"]["seed"] == 7, state.keys()
set_model_state_dict(sharded, state)
print("agrees", flush=True)
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # at the interpreter's own exit torch's threads may abort the process
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_ddp_and_fsdp2(device, tmp_path):
    """DDP and FSDP2 over two processes give the gradients of a single process."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    program = tmp_path / "program.py"
    program.write_text(DISTRIBUTED)
    assert all("agrees" in out for out in run_ranks(program, device, world=2))
