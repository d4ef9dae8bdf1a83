"""Dropout as a layer whose state is a seed and a counter."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from ..inputs.checks import integer, signed
from ..inputs.dropout import check_p
from ..seeded_dropout import dropout

# The counter's value as a number of its own. An operator, which torch.compile does not look into: so a compiled
# backward takes the value that the forward took, and not the counter again, which has advanced since; and what
# recomputes a forward calls it again, in backward, where it can tell.
_library = torch.library.Library("sjlt", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("take_step(Tensor counter) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]


def _take_step(counter: Tensor) -> Tensor:
    if torch._C._current_graph_task_id() != -1:  # so torch.utils.checkpoint, too, sees that it is in a backward
        raise RuntimeError(
            "SeededDropout was called in a backward pass, as activation checkpointing does to compute a forward again: "
            "its counter has advanced since, and the mask would be another. Use SeededDropout(..., advance='manual') "
            "and call .advance() once a training step, or pass step= to its forward"
        )
    return counter.clone()


_library.impl("take_step", _take_step, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("sjlt::take_step", torch.empty_like, lib=_library)


class SeededDropout(nn.Module):
    """Dropout that stores no mask: a drop-in for `torch.nn.Dropout` over `sjlt.dropout`.

    In training, the mask is that of (seed, step), and each forward takes the next step from a counter. Both are
    buffers: they move with the module, and the state dict holds them and `bits`, so that a run that is loaded goes on
    with the masks that it would have had. They are read where they lie: no forward waits for the device, a CUDA graph
    takes new masks at each replay, and one compiled module serves all seeds and steps. In eval the layer is the
    identity.

    **Activation checkpointing** computes a forward again during backward, which has to find the same mask. In the
    default mode the counter has advanced by then: the layer refuses, by a RuntimeError, to be called in a backward
    pass. Use ``advance="manual"``, or pass ``step``:

    >>> import torch
    >>> from torch.utils.checkpoint import checkpoint
    >>> from sjlt.nn import SeededDropout
    >>> block = torch.nn.Sequential(torch.nn.Linear(8, 8), SeededDropout(0.1, advance="manual"))
    >>> for x in torch.ones(2, 4, 8):  # training
    ...     y = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
    ...     y.sum().backward()
    ...     block[1].advance()  # once a training step, after its backward
    >>> block[1].counter
    tensor(2)

    (Whoever computes a forward again outside of a backward pass is not found out: then, too, the step has to be given.)

    Parameters
    ----------
    p : float, 0 <= p <= 1, default 0.5
        Probability to be dropped, as `sjlt.dropout` realises it.
    seed : int, -2^63 to 2^64 - 1, optional
        By default 64 bits from torch's default generator. Layers of one seed drop the same places.
    bits : 8, 16 or 32, default 16
        Random bits an element.
    advance : "forward" or "manual", default "forward"
        "forward": each forward in training that is not given a step takes one, and the counter goes on. "manual": the
        counter goes on by `advance` only, and forwards until then have the same mask: one layer a place in the model.

    Raises
    ------
    ValueError : p out of [0, 1], or out of the reach of `bits`; another `bits`, `advance` or seed.
    RuntimeError : called in a backward pass without a step, unless ``advance="manual"``.

    Notes
    -----
    Copies of a layer (`copy.deepcopy`, which `torch.nn.TransformerEncoder` makes of its layer) have its seed and
    counter, and so its masks; `reset_parameters` draws a seed for each. DistributedDataParallel keeps the buffers of
    all its processes equal, so without an ``offset`` they drop the same places of their parts of a batch.
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
        self.p, self.bits = check_p(p, bits), bits
        self._given_seed = None if seed is None else integer("seed", seed, -(2**63), 2**64 - 1)
        if advance not in ("forward", "manual"):
            raise ValueError(f"advance must be 'forward' or 'manual', got {advance!r}")
        self.manual = advance == "manual"
        self.register_buffer("seed", torch.empty((), dtype=torch.int64))
        self.register_buffer("counter", torch.empty((), dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Begin anew at step 0, with the seed that was given, or else with a new one."""
        seed = self._given_seed
        if seed is None:
            seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_(-(2**63), None))
        self.seed.fill_(signed(seed))
        self.counter.zero_()

    def advance(self) -> None:
        """Go on to the next step."""
        self.counter.add_(1)

    def forward(
        self, x: Tensor, step: int | Tensor | None = None, *, offset: int = 0, row_stride: int | None = None
    ) -> Tensor:
        """Dropout of x in training, else x.

        x : (...) tensor of fp16, bf16, fp32 or fp64, where the layer's buffers are.
        step : instead of the counter's, which then stays: an integer of 32 bits, or a 0-d tensor of one on x's device.
        offset, row_stride : the place of x in a larger tensor, for parts of one mask on several devices: see
            `sjlt.dropout`.
        """
        if not self.training:
            return x
        if step is None and self.manual:
            step = self.counter
        elif step is None:
            step = torch.ops.sjlt.take_step(self.counter)
            self.advance()
        return dropout(  # type: ignore[no-any-return]
            x, self.p, self.seed, step=step, offset=offset, row_stride=row_stride, bits=self.bits
        )

    def get_extra_state(self) -> Tensor:
        """`bits`, for the state dict."""
        return torch.tensor(self.bits, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        check_p(self.p, int(state))
        self.bits = int(state)

    def extra_repr(self) -> str:
        seed = "?" if self.seed.is_meta else self.seed.item()
        return f"p={self.p}, seed={seed}, bits={self.bits}" + (", advance='manual'" if self.manual else "")
