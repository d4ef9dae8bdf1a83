"""Time the host in calls on small CUDA tensors, compared with torch's: ``python -m benchmarks.host [NAME ...]``.

A NAME is a key of `cases` or a pattern of keys. Results are checked before they are timed. Calls are queued without
waiting for the device, and all calls of a run take turns, so that a busy host slows them all. Without arguments the
results go to benchmarks/results.
"""

from __future__ import annotations

import fnmatch
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import sjlt
import sjlt.nn

from .baselines import normal
from .gpu import environment, host_us, judged
from .run import save

RESULTS = Path(__file__).parent / "results" / "host_h200.json"
P, SEED = 0.1, 12345
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3}  # for fp32 sums of both the sketch and torch
Call = Callable[[torch.Tensor], torch.Tensor]


class Case(NamedTuple):
    """A call on x, torch's call on it, the largest allowed ratio of their times, and the expected first result."""

    ours: Call
    theirs: Call
    rival: str
    x: torch.Tensor
    target: float
    expected: torch.Tensor


def cases() -> dict[str, Case]:
    sketch, long = sjlt.Sketch(768, 128, seed=SEED), sjlt.Sketch(200_000, 256, seed=SEED)
    stored, stored_long = (torch.from_numpy(s.T.toarray("float32")).cuda() for s in (sketch, long))
    x, a, row = (normal(shape, torch.float32, "cuda") for shape in ((64, 768), (768, 64), (1, 200_000)))
    leaf, gradient = x.clone().requires_grad_(), normal((64, 128), torch.float32, "cuda")
    weight, transposed = stored.t().contiguous(), sketch.T
    layer, linear = sjlt.nn.SparseProjection(768, 128, seed=SEED), torch.nn.Linear(768, 128, bias=False, device="cuda")
    linear.requires_grad_(False).weight.copy_(weight)
    codes, left = sjlt.Sketch(1024, 300, seed=SEED), sjlt.Sketch(30_000, 198, seed=SEED)  # large enough for codes
    stored_half = torch.from_numpy(codes.T.toarray("float32")).cuda().half()
    stored_left = torch.from_numpy(left.toarray("float32")).cuda()
    half, tall = normal((4096, 1024), torch.float16, "cuda"), normal((30_000, 100), torch.float32, "cuda")
    compiled, compiled_matmul = torch.compile(sketch.project), torch.compile(lambda x: torch.matmul(x, stored))
    y = x @ stored
    found = {
        "project": Case(sketch.project, lambda x: torch.matmul(x, stored), "torch.matmul", x, 2, y),
        "x @ S.T": Case(lambda x: x @ transposed, lambda x: x @ stored, "torch.matmul", x, 2, y),
        "S @ A": Case(lambda a: sketch @ a, lambda a: weight @ a, "torch.matmul", a, 3, weight @ a),
        "split sum": Case(
            long.project, lambda x: torch.matmul(x, stored_long), "torch.matmul", row, 3, row @ stored_long
        ),
        "from codes, fp16": Case(
            codes.project, lambda x: torch.matmul(x, stored_half), "torch.matmul", half, 3, half @ stored_half
        ),
        "S @ A from codes": Case(
            lambda a: left @ a, lambda a: stored_left @ a, "torch.matmul", tall, 3, stored_left @ tall
        ),
        "with a gradient to come": Case(
            sketch.project, lambda x: torch.nn.functional.linear(x, weight), "F.linear", leaf, 2.5, y
        ),
        "SparseProjection, with a gradient to come": Case(layer, linear, "nn.Linear", leaf, 2.5, y),
        "forward and backward": Case(
            lambda x: torch.autograd.grad(sketch.project(x), x, gradient)[0],
            lambda x: torch.autograd.grad(torch.nn.functional.linear(x, weight), x, gradient)[0],
            "F.linear",
            leaf,
            2.5,
            gradient @ weight,
        ),
        "compiled": Case(compiled, compiled_matmul, "compiled torch.matmul", x, 1.5, y),
        "compiled, with a gradient to come": Case(compiled, compiled_matmul, "compiled torch.matmul", leaf, 1.5, y),
    }
    seed, step = torch.tensor(SEED, device="cuda"), torch.tensor(3, device="cuda")
    rival = lambda x: torch.nn.functional.dropout(x, P)  # noqa: E731
    for name, given, data in (
        ("dropout", {"seed": SEED}, x),
        ("dropout, seed and step on the device", {"seed": seed, "step": step}, x),
        ("dropout, with a gradient to come", {"seed": SEED}, leaf),
    ):
        wanted = sjlt.dropout(x.cpu(), P, SEED, step=int(given.get("step", 0))).cuda()
        ours: Call = lambda x, given=given: sjlt.dropout(x, P, **given)  # type: ignore[misc]  # noqa: E731
        found[name] = Case(ours, rival, "F.dropout", data, 2, wanted)
    return found


def check(name: str, case: Case) -> None:
    """Check the first result, whose call prepares and compiles, and later ones."""
    for _ in range(3):
        result = case.ours(case.x).detach()
        error = float((result - case.expected).double().norm() / case.expected.double().norm())
        if not error <= TOLERANCES[result.dtype]:
            raise AssertionError(f"{name}: the relative error is {error:.1e}")


def main(patterns: list[str]) -> None:
    chosen = {n: case for n, case in cases().items() if not patterns or any(fnmatch.fnmatch(n, p) for p in patterns)}
    if not chosen:
        raise SystemExit(f"no case matches {', '.join(patterns)}; the cases are: {', '.join(cases())}")
    for name, case in chosen.items():
        check(name, case)
    calls: dict[str, Any] = {}
    for name, case in chosen.items():
        calls[name], calls[f"{name}: {case.rival}"] = (case.ours, case.x), (case.theirs, case.x)
    times = host_us(calls)
    table = Table("call", "µs", "rival", "µs", "ratio", "target", box=box.SIMPLE)
    rows: dict[str, Any] = {}
    for name, case in chosen.items():
        ours, theirs = times[name], times[f"{name}: {case.rival}"]
        rows[name] = {"us": ours, "rival": case.rival, "rival_us": theirs, "target_ratio": case.target}
        ratio = judged(ours / theirs, case.target, f"{ours / theirs:.2f}")
        table.add_row(name, f"{ours:.1f}", case.rival, f"{theirs:.1f}", ratio, f"{case.target:g}")
    Console(width=120).print(table)
    print(json.dumps(rows, ensure_ascii=False))
    if not patterns:
        save(RESULTS, {"environment": environment(), "calls": rows})


if __name__ == "__main__":
    main(sys.argv[1:])
