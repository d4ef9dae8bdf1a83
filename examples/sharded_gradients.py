"""Find the training examples whose gradients are nearest to a query's, with a model sharded over two processes (FSDP2).

Each process computes and projects the gradients of half of the training examples (`torch.func`, one example per row of
a batch). A query goes through the sharded model, so its gradient exists only in shards: each process projects its own
shard, and the sum is the sketch of the full gradient. Both use the same seed, so their sketches can be compared. The
queries are training examples with a tenth of the characters replaced.

    python examples/sharded_gradients.py [--examples 32] [--width 64]
"""

import argparse
import copy
import os
import socket
import warnings

import torch
import torch.distributed as dist
from gradient_projection import Transformer, examples_of_text, per_example_gradients
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import sjlt

PROCESSES = 2
N_COMPONENTS = 4096


def changed(text: torch.Tensor) -> torch.Tensor:
    """The text with a tenth of its characters replaced."""
    generator = torch.Generator().manual_seed(1)
    letters = torch.randint(97, 123, text.shape, generator=generator)
    return torch.where(torch.rand(text.shape, generator=generator) < 0.1, letters, text)


def training_sketches(S: sjlt.Sketch, model: torch.nn.Module, text: torch.Tensor) -> torch.Tensor:
    """Sketches of shape (examples, N_COMPONENTS); each process projects its share."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = S.project_tree(per_example_gradients(model, text[rank::world]), batched=True)
    parts = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(parts, mine)
    return torch.stack(parts, 1).flatten(0, 1)


def query_sketch(S: sjlt.Sketch, sharded: torch.nn.Module, piece: torch.Tensor) -> torch.Tensor:
    """The sketch of one example's gradient, the same on all processes."""
    sharded.zero_grad()
    F.cross_entropy(sharded(piece[None, :-1])[0], piece[1:]).backward()
    return S.project_tree({name: parameter.grad for name, parameter in sharded.named_parameters()})


def run(rank: int, port: int, examples: int, width: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(PROCESSES))
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # it is not modified in place
    cuda = torch.cuda.device_count() >= PROCESSES
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if cuda else "gloo")
    device = "cuda" if cuda else "cpu"
    torch.manual_seed(0)
    model = Transformer(width).to(device)
    sharded = copy.deepcopy(model)
    mesh = init_device_mesh(device, (PROCESSES,))
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)

    S = sjlt.Sketch(sum(p.numel() for p in model.parameters()), N_COMPONENTS, seed=0)
    text = examples_of_text(examples).to(device)
    known = F.normalize(training_sketches(S, model, text), dim=1)
    queries = torch.stack([query_sketch(S, sharded, piece) for piece in changed(text.cpu()).to(device)])
    cosines = F.normalize(queries, dim=1) @ known.T
    correct = cosines.argmax(1).cpu() == torch.arange(examples)
    shard_size = sum(parameter.grad.to_local().numel() for parameter in sharded.parameters())
    if rank == 0:
        print(f"{examples} training examples, {S.n_features:,} parameters, on {PROCESSES} processes ({device})")
        print(f"no process holds a query's full gradient: process 0 holds {shard_size:,} of its elements")
        print(f"mean cosine with the original example {cosines.diagonal().mean():.2f}, others {_others(cosines):.2f}")
        print(f"the nearest training example is the query's original for {int(correct.sum())} of {examples}")
    dist.destroy_process_group()


def _others(cosines: torch.Tensor) -> float:
    """The mean of the off-diagonal elements."""
    return float((cosines.sum() - cosines.diagonal().sum()) / (cosines.numel() - len(cosines)))


def main(examples: int = 32, width: int = 64) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    multiprocessing.spawn(run, (port, examples, width), nprocs=PROCESSES)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=32)
    parser.add_argument("--width", type=int, default=64)
    main(**vars(parser.parse_args()))
