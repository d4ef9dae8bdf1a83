"""Dropout without a mask in memory: three tables for ten numbers, then the memory used by a deep model.

The tables are those of Triton's tutorial "Low-Memory Dropout", whose kernels `sjlt.dropout` replaces: a stored mask,
the same mask from a seed, and another seed. The model is a 24-layer MLP. It is trained with
`torch.nn.functional.dropout`, which stores one mask per layer, and with `sjlt.nn.SeededDropout`, which stores a seed;
both with and without activation checkpointing, which recomputes the forward pass of each layer during backward.

    python examples/low_memory_dropout.py       (without a GPU: small tensors)
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sjlt
from sjlt.nn import SeededDropout

LAYERS, P = 24, 0.1


# ------------------------------------------------------------------------------------ tutorial


def tables(p: float = 0.5) -> list[Table]:
    """Dropout of ten numbers with a stored mask, with a seed, and with another seed."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(10, generator=torch.Generator().manual_seed(0)).to(device)
    keep = sjlt.dropout_mask(x.shape, p, seed=123, device=device)
    by_mask = sjlt.masked_dropout(x, keep, p)
    by_seed, again, other = (sjlt.dropout(x, p, seed) for seed in (123, 123, 512))
    return [
        table("1. A stored mask", ("input", x), ("keep mask", keep.int()), ("output", by_mask)),
        table("2. A seed", ("input", x), ("output (seed = 123)", by_seed), ("output (seed = 123)", again)),
        table("3. Another seed", ("input", x), ("output (seed = 512)", other)),
    ]


def table(title: str, *rows: tuple[str, Tensor]) -> Table:
    result = Table(title=title, title_justify="left", show_header=False)
    for name, values in rows:
        result.add_row(name, *(f"{v:.3f}" if values.is_floating_point() else str(v) for v in values.tolist()))
    return result


# --------------------------------------------------------------------------------------- model


class Layer(nn.Module):
    """x + dropout(relu(x W)), with a stored mask or with a seed."""

    def __init__(self, width: int, seeded: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        # Checkpointing repeats forward passes, so the counter is advanced explicitly, once per training step.
        self.dropout = SeededDropout(P, advance="manual") if seeded else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).relu()
        return x + (self.dropout(y) if self.dropout else F.dropout(y, P))


def forward(layers: nn.ModuleList, x: Tensor, checkpointed: bool) -> Tensor:
    for layer in layers:
        if checkpointed:  # to repeat torch's masks, the state of its generator must be saved
            x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=layer.dropout is None)
        else:
            x = layer(x)
    return x


def train_step(layers: nn.ModuleList, x: Tensor, checkpointed: bool) -> None:
    forward(layers, x, checkpointed).square().mean().backward()
    for layer in layers:
        if layer.dropout:
            layer.dropout.advance()


def make(width: int, seeded: bool) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([Layer(width, seeded) for _ in range(LAYERS)])


# ------------------------------------------------------------------------------------- memory


def peak_bytes(layers: nn.ModuleList, x: Tensor, checkpointed: bool) -> int:
    """Peak memory of a training step beyond weights, gradients and input on a GPU; `saved_bytes` on a CPU."""
    if not x.is_cuda:
        return saved_bytes(layers, x, checkpointed)
    train_step(layers, x, checkpointed)  # allocates the gradients
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    train_step(layers, x, checkpointed)
    return torch.cuda.max_memory_allocated() - before


def saved_bytes(layers: nn.ModuleList, x: Tensor, checkpointed: bool) -> int:
    """Bytes saved for backward; with checkpointing, the inputs of all layers and the tensors of one layer at a time."""
    if checkpointed:
        return LAYERS * x.nbytes + saved_bytes(layers[:1], x, False)
    weights = {weight.data_ptr() for weight in layers.parameters()}
    saved = {}  # by address, because several operators may save the same tensor

    def record(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        y = forward(layers, x, False)
    del y
    return sum(size for pointer, size in saved.items() if pointer not in weights)


def milliseconds(layers: nn.ModuleList, x: Tensor, checkpointed: bool) -> float:
    """The time of a training step, best of five."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        train_step(layers, x, checkpointed)
        if x.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def compare(rows: int, width: int, device: str) -> Table:
    """Memory and time of an MLP of width `width` on `rows` rows, with torch's dropout and with sjlt's."""
    memory = "peak memory" if device == "cuda" else "saved for backward"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    result = Table(title=f"{LAYERS} layers, {rows} rows of {width}, {dtype}, on {device}", title_justify="left")
    for column in ("dropout", "checkpointed", memory, "training step"):
        result.add_column(column, justify="left" if column == "dropout" else "right")
    x = torch.randn(rows, width, device=device, dtype=dtype)
    for checkpointed in (False, True):
        for seeded in (False, True):
            layers = make(width, seeded).to(device, dtype)
            result.add_row(
                "sjlt.nn.SeededDropout" if seeded else "torch.nn.functional.dropout",
                "yes" if checkpointed else "no",
                f"{peak_bytes(layers, x, checkpointed) / 2**20:.1f} MiB",
                f"{milliseconds(layers, x, checkpointed):.1f} ms",
            )
    return result


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, width = (16384, 2048) if device == "cuda" else (256, 128)
    console = Console(width=120)
    for shown in (*tables(), compare(rows, width, device)):
        console.print(shown)


if __name__ == "__main__":
    main()
