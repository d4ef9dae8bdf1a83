"""Run by each rank of `test_torch_sharding`: trees and matrices of DTensors, compared with the same unsharded data."""

import os
import resource
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from sjlt import CountSketch, Sketch
from sjlt.torch_ops import sharding

DEVICE, RANK, WORLD = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def whole(*shape, dtype=torch.float32, seed=0):
    """Small integers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(-3, 4, shape, generator=generator).to(DEVICE, dtype)


def same_on_all_ranks(x):
    parts = [torch.empty_like(x) for _ in range(WORLD)]
    dist.all_gather(parts, x.contiguous())
    assert all(torch.equal(part, x) for part in parts)


def check_tree(tree, plain, batched=False, dtype=torch.float32):
    n = sum(t[0].numel() if batched else t.numel() for t in plain)
    S = Sketch(n, 96, nnz=4, seed=5)
    expected = S.project_tree(plain, batched=batched)
    result = S.project_tree(tree, batched=batched)
    assert result.dtype == dtype
    assert torch.equal(result, expected), (result - expected).abs().max()
    out = torch.full_like(expected, torch.nan)
    assert S.project_tree(tree, batched=batched, out=out) is out
    assert torch.equal(out, expected)
    same_on_all_ranks(result)
    back = S.adjoint_tree(expected, like=tree, batched=batched)
    for sharded, like, exact in zip(back, tree, S.adjoint_tree(expected, like=plain, batched=batched), strict=True):
        assert sharded.dtype == like.dtype
        if isinstance(like, DTensor):
            assert sharded.device_mesh == like.device_mesh
            assert all(a == b or b.is_partial() for a, b in zip(sharded.placements, like.placements, strict=True))
            sharded = sharded.full_tensor()
        assert torch.equal(sharded, exact)


def one_dimension():
    mesh = init_device_mesh(DEVICE, (WORLD,))
    shapes = [(16, 6), (7, 5), (1, 3), (5,), (WORLD * 3 + 1, 2, 3), (2, 9)]
    for dims in range(3):
        plain = [whole(*shape, seed=i) for i, shape in enumerate(shapes)]
        tree = [
            distribute_tensor(t, mesh, [Shard(dims) if dims < t.ndim else Replicate()])
            for t in plain
        ]  # fmt: skip
        check_tree(tree, plain)
        check_tree([tree[0], *plain[1:]], plain)  # along with tensors that are not sharded
    halves = distribute_tensor(plain[0], mesh, [Replicate()]).to_local() * (RANK + 1)
    total = plain[0] * (WORLD * (WORLD + 1) // 2)
    check_tree([DTensor.from_local(halves, mesh, [Partial()])], [total])
    scalar = torch.tensor(3.0, device=DEVICE)
    check_tree([distribute_tensor(scalar, mesh, [Replicate()]), tree[1]], [scalar, plain[1]])
    batched = [whole(3, 8, 5), whole(3, 7), whole(3)]
    check_tree([distribute_tensor(t, mesh, [Shard(1) if t.ndim > 1 else Replicate()]) for t in batched], batched, True)
    half = [t.to(torch.bfloat16) for t in plain]
    check_tree([distribute_tensor(t, mesh, [Shard(0)]) for t in half[:2]], half[:2], dtype=torch.bfloat16)
    return mesh


def place(t, mesh, *placements):
    """t on a mesh; vectors are replicated rather than sharded along a second axis."""
    return distribute_tensor(t, mesh, [p if not p.is_shard(1) or t.ndim > 1 else Replicate() for p in placements])


def two_dimensions():
    mesh = init_device_mesh(DEVICE, (2, WORLD // 2), mesh_dim_names=("dp", "tp"))
    plain = [whole(9, 7, seed=1), whole(5, 4, seed=2), whole(6, seed=3)]
    places = [Shard(0), Shard(1), Replicate()]
    for first in places:
        for second in places:
            tree = [place(t, mesh, first, second) for t in plain]
            check_tree(tree, plain)
    flat = init_device_mesh(DEVICE, (WORLD,))  # leaves on several meshes
    check_tree([place(plain[0], mesh, Shard(0), Shard(1)), place(plain[1], flat, Shard(0))], plain[:2])
    # FSDP over tensor parallelism, whose shards of one axis are strided.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).to(DEVICE)
    plain = [whole(*p.shape) for p in model.parameters()]
    for p, value in zip(model.parameters(), plain, strict=True):
        p.data.copy_(value)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    with torch.no_grad():
        check_tree([p.detach() for p in model.parameters()], plain)
        named = dict(model.named_parameters())
        S = Sketch(sum(p.numel() for p in plain), 32)
        assert torch.equal(S.project_tree(named), S.project_tree(plain))


def gradients_of_fsdp(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 3)).to(DEVICE)
    x = torch.ones(4, 10, device=DEVICE)
    single = nn.Sequential(nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 3)).to(DEVICE)
    single.load_state_dict(model.state_dict())
    single(x).sum().backward()
    fully_shard(model, mesh=mesh)
    model(x).sum().backward()
    S = Sketch(sum(p.numel() for p in single.parameters()), 40, seed=2)
    result = S.project_tree({name: p.grad for name, p in model.named_parameters()})
    expected = S.project_tree([p.grad for p in single.parameters()])
    torch.testing.assert_close(result, expected, rtol=0, atol=2e-6 * float(expected.norm()))
    assert torch.equal(result, S.project_tree({name: p.grad for name, p in model.named_parameters()}))
    same_on_all_ranks(result)


def matrices(mesh):
    x = whole(13, 50)
    S = Sketch(50, 20, nnz=4, seed=1)
    expected = x @ S.T
    for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
        sharded = distribute_tensor(x, mesh, placements)
        for y in (S.project(sharded), sharded @ S.T):
            assert isinstance(y, DTensor)
            assert y.shape == expected.shape
            assert list(y.placements) == ([Replicate()] if placements == [Shard(1)] else placements)
            assert torch.equal(y.full_tensor(), expected)
    partial = DTensor.from_local(x, mesh, [Partial()])
    assert torch.equal(S.project(partial).full_tensor(), WORLD * expected)


def refusals(mesh):
    """Invalid calls raise on every rank, even if only one rank's call is invalid, for which the others would wait."""
    x = distribute_tensor(whole(8, 6), mesh, [Shard(0)])

    def refused(error, message, call):
        with pytest.raises(error, match=message):
            call()

    refused(ValueError, "ranks disagree in the sketch", lambda: Sketch(48, 20, seed=RANK).project_tree([x]))
    refused(ValueError, "ranks disagree in the sketch", lambda: Sketch(6, 20, seed=RANK).project(x))
    k = 20 + RANK
    refused(ValueError, "ranks disagree in the sketch", lambda: Sketch(48, k).project_tree([x]))
    refused(ValueError, "n_features = 47", lambda: Sketch(47, 20).project_tree([x]))
    refused(ValueError, "n_features = 5,", lambda: Sketch(5, 4).project(x))
    refused(TypeError, "out= and accumulate= are not", lambda: Sketch(6, 4).project(x, out=torch.zeros(8, 4)))
    refused(ValueError, "sharded along the leading dimension", lambda: Sketch(6, 4).project_tree([x], batched=True))
    leaf = x.detach().requires_grad_()
    refused(RuntimeError, "automatic differentiation", lambda: Sketch(48, 4).project_tree([leaf]))
    average = DTensor.from_local(whole(8, 6), mesh, [Partial("avg")])
    refused(ValueError, "a partial DTensor must have reduce_op 'sum'", lambda: Sketch(48, 4).project_tree([average]))
    refused(TypeError, "not sharded", lambda: Sketch(48, 8).adjoint_tree(x, like=[x]))

    # Only the last rank is wrong; its own error says how.
    last, S = RANK == WORLD - 1, Sketch(48, 20)
    own = lambda message: message if last else "another rank rejected its arguments"  # noqa: E731
    refused(ValueError, own("n_features = 47"), lambda: Sketch(48 - last, 20).project_tree([x]))
    refused(ValueError, own("n_features = 5,"), lambda: Sketch(6 - last, 4).project(x))
    foreign = [x, torch.empty(0, device="meta")] if last else [x]
    refused(ValueError, own("must be on one device, got .*, meta"), lambda: S.project_tree(foreign))
    refused(TypeError if last else ValueError, own("containing str"), lambda: S.project_tree([x, "x"] if last else [x]))
    other = distribute_tensor(whole(8, 6), mesh, [Replicate()])
    refused(ValueError, "ranks disagree in placements", lambda: S.project_tree([other if last else x]))
    order = [x, whole(2)] if last else [whole(2), x]
    refused(ValueError, "ranks disagree in the tree", lambda: Sketch(50, 4).project_tree(order))
    one = distribute_tensor(whole(1, 6), mesh, [Replicate()])
    refused(ValueError, "ranks disagree in batched", lambda: Sketch(6, 4).project_tree([one], batched=last))
    if WORLD > 2:  # the same ranks, but meshes of other shapes
        square = init_device_mesh(DEVICE, (2, WORLD // 2))
        flat = [distribute_tensor(whole(8, 6), mesh, [Shard(0)])]
        cut = [distribute_tensor(whole(8, 6), square, [Shard(0), Shard(1)])]
        refused(ValueError, "ranks disagree in .*meshes", lambda: S.project_tree(cut if last else flat))
    assert torch.equal(S.project_tree([x]), S.project_tree([whole(8, 6)]))  # later calls still work

    # Adjoints do not sum, but shards of different sketches would not fit together.
    y = torch.ones(20, device=DEVICE)
    refused(ValueError, "ranks disagree in the sketch", lambda: Sketch(48, 20, seed=RANK).adjoint_tree(y, like=[x]))
    refused(ValueError, "ranks disagree in placements", lambda: S.adjoint_tree(y, like=[other if last else x]))
    refused(ValueError, own(r"needs y of shape \(20,\)"), lambda: S.adjoint_tree(y[last:], like=[x]))
    refused(RuntimeError, "does not support automatic", lambda: S.adjoint_tree(y.clone().requires_grad_(), like=[x]))
    assert not S.adjoint_tree(y, like=[leaf])[0].requires_grad  # parameters serve as `like`

    refused(TypeError, r"S @ A does not support DTensors: use S.project\(A.T\)", lambda: Sketch(8, 4) @ x)
    refused(TypeError, r"S.T @ B does not support DTensors", lambda: Sketch(5, 8).T @ x)
    refused(TypeError, r"Y @ S does not support DTensors", lambda: x @ Sketch(5, 6))
    refused(TypeError, "table does not support DTensors", lambda: CountSketch(9, 8, 6).query(other, [1]))

    # A mesh without this rank. Ranks inside are not affected.
    alone = DeviceMesh(DEVICE, [0])
    inner = DTensor.from_local(whole(8, 6), alone, [Shard(0)], run_check=False)
    calls = [
        lambda: S.project_tree([inner]),
        lambda: S.adjoint_tree(y, like=[inner]),
        lambda: Sketch(6, 4).project(inner),
    ]
    for call in calls:
        if RANK == 0:
            call()
        else:
            refused(ValueError, "this rank is outside", call)
    refused(ValueError, "this rank is outside" if RANK else "another rank rejected its arguments",
            lambda: Sketch(96, 20).project_tree([inner, x]))  # fmt: skip

    # Calls like earlier ones, of which ranks have kept a plan, are compared, too.
    kept = [Sketch(48, 20, seed=seed) for seed in (0, 1)]
    for sketch in kept:
        sketch.project_tree([x])
        sketch.project_tree([other])
    refused(ValueError, "ranks disagree in the sketch", lambda: kept[last].project_tree([x]))
    refused(ValueError, "ranks disagree in placements", lambda: S.project_tree([other if last else x]))
    short = torch.zeros(19 if last else 20, device=DEVICE)
    refused(ValueError, own(r"out must have shape \(20,\)"), lambda: S.project_tree([x], out=short))
    refused(RuntimeError if last else ValueError, own("automatic differentiation"),
            lambda: S.project_tree([leaf if last else x]))  # fmt: skip
    assert torch.equal(kept[1].project_tree([x]), kept[1].project_tree([whole(8, 6)]))


def communicated(mesh):
    """Local tensors that are still being communicated are waited for."""
    x = whole(8, 6)
    with torch.no_grad():
        total = DTensor.from_local(x, mesh, [Partial()]).redistribute(mesh, [Replicate()], async_op=True)
    S = Sketch(48, 20)
    assert torch.equal(S.project_tree([total]), S.project_tree([WORLD * x]))


def uneven(mesh):
    """Shards that are not contiguous, ranks without parameters, and gaps that are filled in many parts."""
    x = whole(12 * WORLD, 10)
    local = x.t().contiguous().t()[RANK * 12 : (RANK + 1) * 12]
    assert not local.is_contiguous()
    check_tree([DTensor.from_local(local, mesh, [Shard(0)], run_check=False)], [x])
    C = CountSketch(x.numel(), 3, 64, seed=2)
    assert torch.equal(C.sketch([distribute_tensor(x, mesh, [Shard(1)])]), C.sketch([x]))
    few = whole(1, 4)
    empty = distribute_tensor(few, mesh, [Shard(0)])
    assert (empty.to_local().numel() == 0) == (RANK > 0)
    check_tree([empty], [few])
    before = sharding.FILLED
    sharding.FILLED = 100
    wide = [whole(9, 5 * WORLD + 1, 3), whole(4, 2, WORLD)]
    check_tree([distribute_tensor(t, mesh, [Shard(i)]) for i, t in enumerate(wide, 1)], wide)
    batched = [whole(3, 8, 5 * WORLD), whole(3, 2, 3, WORLD + 1)]
    check_tree([distribute_tensor(t, mesh, [Shard(i)]) for i, t in enumerate(batched, 2)], batched, True)
    sharding.FILLED = before


def memory(mesh):
    """No rank gathers a parameter: beyond its shards, a rank needs at most 64 MiB and the result."""
    shapes = {Shard(0): (WORLD * 8192, 2048), Shard(1): (8192, WORLD * 2048)}  # 64 MiB per rank
    trees = []
    for placement in shapes:
        local = torch.ones((8192, 2048), device=DEVICE)
        trees.append([DTensor.from_local(local, mesh, [placement], run_check=False)])
    S = Sketch(WORLD << 24, 256)
    for tree in trees:
        small = [DTensor.from_local(torch.ones((8, 64), device=DEVICE), mesh, tree[0].placements, run_check=False)]
        Sketch(WORLD * 512, 256).project_tree(small)
        before = peak(start=True)
        y = S.project_tree(tree)
        more = peak() - before
        assert more <= (64 << 20) + y.nbytes, f"{more / 2**20:.1f} MiB for {tree[0].placements}"
    for tree in trees:
        before = peak(start=True)
        (update,) = S.adjoint_tree(y, like=tree)
        more = peak() - before
        assert more <= (32 << 20) + update.to_local().nbytes, f"{more / 2**20:.1f} MiB back to {tree[0].placements}"
        del update


def peak(start=False):
    """Peak memory in bytes so far or, with `start`, the memory in use now if it can be determined."""
    if DEVICE == "cuda":
        if start:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() if start else torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


warnings.simplefilter("ignore")
if DEVICE == "cuda":
    torch.cuda.set_device(RANK)
dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
flat = one_dimension()
if WORLD > 2:
    two_dimensions()
memory(flat)
uneven(flat)
gradients_of_fsdp(flat)
matrices(flat)
refusals(flat)
communicated(flat)
print("agrees", flush=True)
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # torch's threads may abort the process during a normal interpreter exit
