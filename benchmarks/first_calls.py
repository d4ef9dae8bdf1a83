"""Time first calls on a GPU, each in a new process: ``python -m benchmarks.first_calls``.

"After install" begins without compiled kernels on disk, "next process" with those of the run before. An empty kernel
shows which part of the time is Triton's own. Results are checked, and go to benchmarks/results.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import sjlt

from .run import first_calls, save, show_first_calls

RESULTS = Path(__file__).parent / "results" / "first_calls_h200.json"
CHECKED = 8  # vectors whose results are compared with the CPU's


class Call(NamedTuple):
    """A product of data whose vectors lie along `axis`. It is not sjlt's if `axis` is None."""

    multiply: Callable[[torch.Tensor], Any]
    shape: tuple[int, int]
    dtype: torch.dtype = torch.float32
    axis: int | None = 0


def launch_empty(x: torch.Tensor) -> None:
    import triton  # imported by the call itself, as it is by sjlt's

    @triton.jit
    def empty(x):
        pass

    empty[(1,)](x)


def project(d: int, k: int) -> Callable[[torch.Tensor], Any]:
    return lambda x: x @ sjlt.Sketch(d, k, seed=1).T


CALLS = {
    "an empty kernel": Call(launch_empty, (1, 1), axis=None),
    "X (100000, 768) → 256, fp32": Call(project(768, 256), (100_000, 768)),
    "X (100000, 1000) → 300, fp32": Call(project(1000, 300), (100_000, 1000)),
    "X (100000, 768) → 64, bf16": Call(project(768, 64), (100_000, 768), torch.bfloat16),
    "X (64, 768) → 256, fp32": Call(project(768, 256), (64, 768)),
    "X (8, 1000000) → 300, fp32": Call(project(1_000_000, 300), (8, 1_000_000)),
    "A (100000, 512) → 400, fp32": Call(lambda a: sjlt.Sketch(100_000, 400, seed=1) @ a, (100_000, 512), axis=1),
    "Y (100000, 300) → 768, fp32": Call(lambda y: y @ sjlt.Sketch(768, 300, seed=1), (100_000, 300)),
}


def seconds(call: Call) -> float:
    """The time of a call in this process, in which CUDA is initialized."""
    x = torch.randn(call.shape, device="cuda", dtype=call.dtype)
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = call.multiply(x)
    torch.cuda.synchronize()
    taken = time.perf_counter() - start
    if call.axis is not None:
        some, found = (t.narrow(call.axis, 0, CHECKED).cpu() for t in (x, result))
        torch.testing.assert_close(found, call.multiply(some), rtol=0.02, atol=0.02)
    return taken


def main() -> None:
    from .gpu import environment  # imports Triton, which calls do themselves

    commands = {name: ("-m", "benchmarks.first_calls", "--call", name) for name in CALLS}
    rows = first_calls(commands, "TRITON_CACHE_DIR")
    show_first_calls("first call", rows)
    print(json.dumps(rows, ensure_ascii=False))
    save(RESULTS, {"environment": environment(), "first call, seconds": rows})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--call"]:
        print(seconds(CALLS[sys.argv[2]]))
    else:
        main()
