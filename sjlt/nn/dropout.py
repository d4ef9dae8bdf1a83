"""A dropout layer whose state is a seed and a counter."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from ..inputs.checks import seed_number, signed
from ..inputs.dropout import check_bits, check_p
from ..seeded_dropout import dropout
from ..torch_ops.compat import is_in_backward

# Copy the counter. This is an operator because those are opaque to torch.compile: a compiled backward then uses the
# value that the forward read, not the counter, which has advanced since. A recomputed forward calls the operator again,
# where it is detected.
_library = torch.library.Library("sjlt", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("take_step(Tensor counter) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]


def _take_step(counter: Tensor) -> Tensor:
    if is_in_backward():
        raise RuntimeError(
            "SeededDropout was called in a backward pass, probably by activation checkpointing to recompute a forward: "
            "its counter has advanced since, so the mask would differ. Use SeededDropout(..., advance='manual') and "
            "call .advance() once per training step, or pass step= to its forward"
        )
    return counter.clone()


_library.impl("take_step", _take_step, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("sjlt::take_step", torch.empty_like, lib=_library)


class SeededDropout(nn.Module):
    """Dropout that stores no mask: a drop-in replacement for `torch.nn.Dropout`, based on `sjlt.dropout`.

    In training, the mask is determined by (seed, step), and each forward uses the next step of a counter. Seed and
    counter are buffers: they move with the module and are saved in its state dict with `bits`, so a resumed run
    continues with the masks of an uninterrupted one. They are read on their device: forward does not synchronise, each
    replay of a CUDA graph has a new mask, and a compiled module is reused for all seeds and steps. In eval mode the
    layer is the identity.

    **Activation checkpointing** recomputes a forward during backward, and this must produce the same mask. In the
    default mode the counter has advanced by then, so the layer raises a RuntimeError if it is called in a backward
    pass. Use ``advance="manual"``, or pass ``step``:

    >>> import torch
    >>> from torch.utils.checkpoint import checkpoint
    >>> from sjlt.nn import SeededDropout
    >>> block = torch.nn.Sequential(torch.nn.Linear(8, 8), SeededDropout(0.1, advance="manual"))
    >>> for x in torch.ones(2, 4, 8):  # training
    ...     y = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
    ...     y.sum().backward()
    ...     block[1].advance()  # once per training step, after its backward
    >>> block[1].counter
    tensor(2)

    Recomputation outside a backward pass cannot be detected; pass `step` explicitly. Do so, too, or use
    ``advance="manual"``, in transforms of `torch.func`, which do not permit a change of the counter.

    Parameters
    ----------
    p : float, 0 <= p <= 1, default 0.5
        The probability of dropping an element, as in `sjlt.dropout`.
    seed : int, -2^63 to 2^64 - 1, optional
        By default 64 bits from torch's default generator. Layers with equal seeds drop the same elements.
    bits : 8, 16 or 32, default 16
        Random bits per element.
    advance : "forward" or "manual", default "forward"
        "forward": each forward in training without an explicit step uses the counter, then advances it. "manual": only
        calls of `advance` do. All forwards between them have the same mask, so do not use a layer twice in a model.

    Raises
    ------
    ValueError
        If p, `bits`, `advance` or the seed is out of range, or if p rounds to 0 or 1 with this number of bits.
    RuntimeError
        If called in a backward pass without a step, unless ``advance="manual"``.

    Notes
    -----
    A copy of a layer (by `copy.deepcopy`, as in `torch.nn.TransformerEncoder`) has the same seed and counter, and thus
    the same masks; `reset_parameters` draws a new seed. DistributedDataParallel keeps the buffers of all processes
    equal, so all processes drop the same elements of their part of a batch unless they pass different offsets.
    """

    seed: Tensor
    counter: Tensor

    def __init__(
        self,
        p: float = 0.5,
        seed: int | None = None,
        bits: int = 16,
        *,
        advance: Literal["forward", "manual"] = "forward",
    ) -> None:
        super().__init__()
        self.bits = check_bits(bits)
        self.p = check_p(p, self.bits)
        self._given_seed = None if seed is None else seed_number(seed)
        if advance not in ("forward", "manual"):
            raise ValueError(f"advance must be 'forward' or 'manual', got {advance!r}")
        self.manual = advance == "manual"
        self.register_buffer("seed", torch.empty((), dtype=torch.int64))
        self.register_buffer("counter", torch.empty((), dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Return to step 0 and to the given seed, or draw a new seed if none was given."""
        seed = self._given_seed
        if seed is None:
            seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_(-(2**63), None))
        self.seed.fill_(signed(seed))
        self.counter.zero_()

    def advance(self) -> None:
        """Advance the counter to the next step."""
        self.counter.add_(1)

    def forward(
        self, x: Tensor, step: int | Tensor | None = None, *, offset: int = 0, row_stride: int | None = None
    ) -> Tensor:
        """Apply dropout to x in training; return x in eval mode.

        Parameters
        ----------
        x : tensor of any shape, fp16, bf16, fp32 or fp64, on the device of the layer's buffers
        step : int, 0 <= step < 2^32, or 0-d integer tensor on x's device, optional
            Used instead of the counter, which then does not advance.
        offset, row_stride : int, optional
            The position of x in a larger tensor, to use one mask across devices: see `sjlt.dropout`.
        """
        if not self.training:
            return x
        if step is None and self.manual:
            step = self.counter
        elif step is None:
            step = torch.ops.sjlt.take_step(self.counter)
            self.advance()
        return dropout(x, self.p, self.seed, step=step, offset=offset, row_stride=row_stride, bits=self.bits)

    def get_extra_state(self) -> Tensor:
        """Return `bits`, for the state dict."""
        return torch.tensor(self.bits, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        bits = check_bits(int(state))
        check_p(self.p, bits)
        self.bits = bits

    def extra_repr(self) -> str:
        seed = "?" if self.seed.is_meta else self.seed.item()
        return f"p={self.p}, seed={seed}, bits={self.bits}" + (", advance='manual'" if self.manual else "")
