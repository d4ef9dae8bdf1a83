"""Per-example gradients of a transformer, projected to 4096 dimensions without concatenating them.

Methods that compare training examples by their gradients (influence functions, data attribution, data selection) need
inner products of per-example gradients, each with as many elements as the model has parameters. Here `torch.func`
computes the gradients of a batch, `Sketch.project_tree` projects them tensor by tensor, and the inner products of the
sketches are compared with the true ones. The training text is the source of a module of Python's standard library.

    python examples/gradient_projection.py [--examples 32] [--width 128]
"""

import argparse
import inspect
import time

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import sjlt

CONTEXT = 64  # characters per example
N_COMPONENTS = 4096


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-3, -2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(-3, -2).flatten(-2))
        return x + self.mlp(self.norm_2(x))


class Transformer(nn.Module):
    """A character-level language model."""

    def __init__(self, width: int, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(128, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, 128)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.tokens(text) + self.positions(torch.arange(text.shape[-1], device=text.device))
        return self.head(self.blocks(x))


def examples_of_text(n: int) -> torch.Tensor:
    """Evenly spaced pieces of the text, of shape (n, CONTEXT + 1)."""
    text = torch.frombuffer(bytearray(inspect.getsource(argparse).encode("ascii", "replace")), dtype=torch.uint8)
    starts = torch.linspace(0, len(text) - CONTEXT - 1, n).long()
    return text[starts[:, None] + torch.arange(CONTEXT + 1)].long()


def per_example_gradients(model: nn.Module, text: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of shape (examples, *shape of the parameter), by name of the parameter."""

    def loss(parameters: dict[str, torch.Tensor], text: torch.Tensor) -> torch.Tensor:
        logits = functional_call(model, parameters, (text[None, :-1],))
        return F.cross_entropy(logits[0], text[1:])

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with sdpa_kernel(SDPBackend.MATH):  # the only backend that vmap can batch
        return vmap(grad(loss), in_dims=(None, 0))(parameters, text)


def nearest(products: torch.Tensor) -> torch.Tensor:
    """For each example, the index of the other example with the largest cosine."""
    norms = products.diagonal().sqrt()
    return (products / norms - torch.diag(torch.full_like(norms, torch.inf))).argmax(1)


def main(examples: int = 32, width: int = 128) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = Transformer(width).to(device)
    gradients = per_example_gradients(model, examples_of_text(examples).to(device))

    n_features = sum(parameter.numel() for parameter in model.parameters())
    S = sjlt.Sketch(n_features, N_COMPONENTS, seed=0)
    S.project_tree(gradients, batched=True)  # compiles or loads the kernels
    start = time.perf_counter()
    sketches = S.project_tree(gradients, batched=True)  # (examples, N_COMPONENTS)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start

    after = sketches @ sketches.T
    flat = torch.cat([gradient.flatten(1) for gradient in gradients.values()], dim=1)  # only for comparison
    before = flat @ flat.T
    norms = before.diagonal().sqrt()
    error = (after - before) / (norms[:, None] * norms)
    same = (nearest(before) == nearest(after)).float().mean()
    print(f"{examples} gradients of {n_features:,} elements in {len(gradients)} tensors, on {device}")
    print(f"projected to {N_COMPONENTS} elements ({n_features / N_COMPONENTS:.0f}x smaller) in {1e3 * seconds:.1f} ms")
    print(f"error of cosines: standard deviation {error.std():.4f}, maximum {error.abs().max():.4f}")
    print(f"    (expected for unrelated vectors: 1/sqrt({N_COMPONENTS}) = {N_COMPONENTS**-0.5:.4f})")
    print(f"error of squared norms: at most {error.diagonal().abs().max():.2%}")
    print(f"nearest other example unchanged for {same:.0%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=32)
    parser.add_argument("--width", type=int, default=128)
    main(**vars(parser.parse_args()))
