"""Shards of a tensor on several devices use the matching parts of one mask: by rows, by columns, and under DDP."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sjlt
from sjlt.nn import SeededDropout

P, SEED = 0.5, 77  # a scale of 2 keeps integer sums exact
ADVANCES = ("forward", "manual")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


def boundaries(n, parts):
    """Boundaries that split n into `parts` unequal parts."""
    return [round(n * (i / parts) ** 1.3) for i in range(parts + 1)]


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("shape", [(7, 64), (5, 37), (2, 3, 50), (96,)], ids=str)
def test_parts_share_one_mask(shape, bits, device):
    """A grid of parts: rows by `offset`, columns by `offset` and `row_stride`, starting anywhere in a Philox call."""
    whole = sjlt.dropout_mask(shape, P, SEED, step=3, bits=bits, device=device)
    width = shape[-1]
    rows = whole.reshape(-1, width)
    x = torch.rand(rows.shape, device=device).add(0.5)
    for top, bottom in zip(boundaries(len(rows), 3), boundaries(len(rows), 3)[1:], strict=False):
        for left, right in zip(boundaries(width, 4), boundaries(width, 4)[1:], strict=False):
            place = {"step": 3, "offset": top * width + left, "row_stride": width, "bits": bits}
            part = sjlt.dropout(x[top:bottom, left:right], P, SEED, **place)
            assert torch.equal(part != 0, rows[top:bottom, left:right])
            mask = sjlt.dropout_mask((bottom - top, right - left), P, SEED, **place, device=device)
            assert torch.equal(mask, rows[top:bottom, left:right])


def test_sequence_parallel(device):
    """(batch, sequence, width) split along the sequence: a part's rows are not consecutive, so one call per sample."""
    batch, length, width = 3, 8, 20
    whole = sjlt.dropout_mask((batch, length, width), P, SEED, device=device)
    for part in range(2):
        for sample in range(batch):
            offset = (sample * length + part * length // 2) * width
            mask = sjlt.dropout_mask((length // 2, width), P, SEED, offset=offset, device=device)
            assert torch.equal(mask, whole[sample, part * length // 2 : (part + 1) * length // 2])


def test_tensor_parallel_gradients(device):
    """Columns on several devices, forward and backward, with unequal widths."""
    x = torch.randint(-8, 9, (6, 45), dtype=torch.float64, device=device)
    w = torch.randint(-8, 9, (6, 45), dtype=torch.float64, device=device)
    single = x.clone().requires_grad_()
    (sjlt.dropout(single, P, SEED) * w).sum().backward()
    for left, right in zip(boundaries(45, 4), boundaries(45, 4)[1:], strict=False):
        part = x[:, left:right].clone().requires_grad_()
        y = sjlt.dropout(part, P, SEED, offset=left, row_stride=45)
        (y * w[:, left:right]).sum().backward()
        assert torch.equal(part.grad, single.grad[:, left:right])


# ------------------------------------------------------------------------------------------- DDP


class Model(nn.Module):
    """Two linear layers with integer weights and dropout between; `first` is the batch index of the first input row."""

    def __init__(self, **kwargs):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.second = nn.Linear(12, 30, bias=False).double(), nn.Linear(30, 4, bias=False).double()
        self.dropout = SeededDropout(P, SEED, **kwargs)
        with torch.no_grad():
            for weight in self.parameters():
                weight.copy_(torch.randint(-4, 5, weight.shape, generator=generator))

    def forward(self, x, first=0):
        return self.second(self.dropout(self.first(x), offset=first * 30))


def batch():
    """Three steps of 8 samples, and the weights of their outputs in the loss."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-4, 5, (3, 2, 8, 12), generator=generator, dtype=torch.float64)


def train(model, module, rows, first):
    """Gradients summed over the steps, without updating the weights."""
    for x, w in batch():
        (model(x[rows], first) * w[rows, :4]).sum().backward()
        if module.dropout.manual:
            module.dropout.advance()
    return [p.grad.clone() for p in module.parameters()]


def in_process(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for advance in ADVANCES:
        module = Model(advance=advance)
        if rank:  # DDP broadcasts rank 0's buffers to every process
            module.dropout.seed.fill_(1)
            module.dropout.counter.fill_(9)
        gradients = train(DistributedDataParallel(module), module, slice(4 * rank, 4 * rank + 4), 4 * rank)
        torch.save((gradients, module.dropout.state_dict()), f"{folder}/{advance}{rank}")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # torch's threads may abort the process during a normal interpreter exit


@pytest.mark.exhaustive
def test_ddp_matches_a_single_device(tmp_path):
    torch.multiprocessing.start_processes(in_process, (tmp_path,), nprocs=2, start_method="spawn")
    for advance in ADVANCES:
        module = Model(advance=advance)
        expected = train(module, module, slice(None), 0)
        for rank in range(2):
            gradients, state = torch.load(f"{tmp_path}/{advance}{rank}")
            assert (state["counter"], state["seed"]) == (3, SEED)
            for ours, single in zip(gradients, expected, strict=True):
                assert torch.equal(ours * 2, single)  # DDP averages


def test_without_an_offset_the_mask_repeats(device):
    """Motivates `offset`: without it, one layer on two processes drops the same positions of each part."""
    x = torch.rand(8, 30, device=device).add(0.5)
    layer = SeededDropout(P, SEED, advance="manual").to(device)
    assert torch.equal(layer(x[:4]) != 0, layer(x[4:]) != 0)
    assert torch.equal(layer(x)[4:], layer(x[4:], offset=4 * 30))
