"""Time seeded dropout and torch's own: ``python -m benchmarks.dropout`` on a GPU, ``... --cpu`` on a CPU.

Every result is checked before it is timed; on the GPU against the CPU backend, which shares no kernel with it. Times
are device times, medians over repeats (`benchmarks.host` measures host times). The floor is a device copy of the same
bytes with the same strides in the same run (one and a half copies for operations on three tensors; for a stored mask,
additionally its share of a copy). On the CPU every method runs in a separate process. Results go to benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from rich import box
from rich.console import Console
from rich.table import Table

import sjlt

from . import run
from .gpu import device_ms
from .gpu import environment as gpu_environment

RESULTS = Path(__file__).parent / "results"
N = 2**28
P, SEED = 0.1, 12345
CHECKED = 2**17  # elements compared at the start and at the end of a result
BF16, FP32 = torch.bfloat16, torch.float32
Call = Callable[[torch.Tensor], torch.Tensor]
console = Console(width=150)


class Row(NamedTuple):
    """A case: the call to time on x, the time of the floor, and the expected result.

    target_speed : the lowest allowed speed, as a fraction of the floor's; None for a case that is only recorded.
    expected : computes the correct `sample` of the result on the CPU; None for rivals.
    """

    name: str
    call: Call
    x: torch.Tensor
    floor_ms: float
    target_speed: float | None = None
    expected: Call | None = None


# ------------------------------------------------------------------------------------- rivals


@triton.jit
def one_call_an_element(x, out, n, p, seed, BLOCK: tl.constexpr):
    """Triton's tutorial "Low-Memory Dropout"."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n)
    keep = tl.rand(seed, i) > p
    tl.store(out + i, tl.where(keep, value / (1 - p), 0.0), mask=i < n)


def tutorial(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    one_call_an_element[(-(-x.numel() // 1024),)](x, out, x.numel(), P, SEED, BLOCK=1024)
    return out


def torch_backward(x: torch.Tensor) -> Call:
    y, leaf = differentiated(lambda x: torch.nn.functional.dropout(x, P), x)
    return lambda gradient: torch.autograd.grad(y, leaf, gradient, retain_graph=True)[0]


def differentiated(function: Call, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = x.detach().requires_grad_()
    return function(leaf), leaf


# ------------------------------------------------------------------------------------- cases


def seeded(**given: Any) -> Call:
    return lambda x: sjlt.dropout(x, P, **{"seed": SEED, **given})


def on_cpu(**given: Any) -> Call:
    """The `sample` of the same result, computed by the CPU backend."""

    def expected(x: torch.Tensor) -> torch.Tensor:
        ours = {"seed": SEED, **given}
        width = x.shape[-1] if x.ndim > 1 else 1
        rows = max(1, CHECKED // width)
        parts = []
        for begin in (0, len(x) - rows):
            mine = dict(ours)
            if torch.is_tensor(ours["seed"]):
                mine["seed"] = ours["seed"][begin : begin + rows].cpu()
            else:
                mine["offset"] = ours.get("offset", 0) + begin * width
            parts.append(sjlt.dropout(x[begin : begin + rows].cpu(), P, **mine))
        return torch.cat(parts)

    return expected


def sample(out: torch.Tensor) -> torch.Tensor:
    rows = max(1, CHECKED // (out.shape[-1] if out.ndim > 1 else 1))
    return torch.cat([out[:rows], out[len(out) - rows :]]).cpu()


def normal(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(N, generator=generator, device="cuda").to(dtype)


def copy_ms(x: torch.Tensor) -> float:
    """Milliseconds to copy x into a tensor with the layout of dropout's result."""
    out = torch.empty_like(x)
    return device_ms(lambda x: out.copy_(x), [x])


def rows_of(dtype: torch.dtype) -> list[Row]:
    """All cases for one dtype."""
    x, rows = normal(dtype), []
    flat = copy_ms(x)
    for bits, target in ((16, 0.97), (8, 0.95), (32, 0.90)):
        y, leaf = differentiated(seeded(bits=bits), x)
        backward = lambda g, y=y, leaf=leaf: torch.autograd.grad(y, leaf, g, retain_graph=True)[0]  # noqa: E731
        rows.append(Row(f"forward, bits={bits}", seeded(bits=bits), x, flat, target, on_cpu(bits=bits)))
        rows.append(Row(f"backward, bits={bits}", backward, x, flat, target, on_cpu(bits=bits)))
        del y, leaf
    rows.append(Row("torch forward", lambda x: torch.nn.functional.dropout(x, P), x, flat))
    rows.append(Row("torch forward, with its mask", lambda x: torch.native_dropout(x, P, True)[0], x, flat))
    rows.append(Row("torch backward", torch_backward(x), x, flat))
    rows.append(Row("Triton's tutorial", tutorial, x, flat))
    seed, step = torch.tensor(SEED, device="cuda"), torch.tensor(3, device="cuda")
    rows.append(Row("seed and step on the device", seeded(seed=seed, step=step), x, flat, 0.97, on_cpu(step=3)))
    rows.append(Row("offset 3", seeded(offset=3), x, flat, None, on_cpu(offset=3)))
    matrix = x.view(262144, 1024)
    seeds = torch.arange(len(matrix), device="cuda") * 7919
    rows.append(Row("one seed per row, (262144, 1024)", seeded(seed=seeds), matrix, flat, 0.95, on_cpu(seed=seeds)))
    square = x.view(16384, 16384)
    transposed, part = square.t(), square[:, 1024:9216]
    rows.append(Row("transposed view", seeded(), transposed, copy_ms(transposed), 0.8, on_cpu()))
    rows.append(Row("columns 1024 to 9216 of 16384", seeded(), part, copy_ms(part), 0.8, on_cpu()))
    odd = square[:, 1:8001]
    rows.append(Row("columns 1 to 8001 of 16384", seeded(), odd, copy_ms(odd), 0.8, on_cpu()))
    residual = normal(dtype, 1)
    added = lambda x: sjlt.dropout_add(x, residual, P, SEED)  # noqa: E731
    sums = lambda x: sample_sum(x, residual)  # noqa: E731
    rows.append(Row("dropout_add", added, x, 1.5 * flat, 0.95, sums))
    rows.append(Row("torch dropout + residual", lambda x: torch.nn.functional.dropout(x, P) + residual, x, 1.5 * flat))
    keep = sjlt.dropout_mask((N,), P, SEED, device="cuda")
    share = (2 * x.itemsize + 1) / (2 * x.itemsize)
    stored = lambda x: sjlt.masked_dropout(x, keep, P, 16)  # noqa: E731
    rows.append(Row("masked_dropout", stored, x, share * flat, None, on_cpu()))
    return rows


def sample_sum(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    ends = (slice(0, CHECKED), slice(N - CHECKED, N))
    parts = [sjlt.dropout_add(x[e].cpu(), residual[e].cpu(), P, SEED, offset=e.start) for e in ends]
    return torch.cat(parts)


def measure(row: Row) -> dict[str, Any]:
    if row.expected is not None:
        result = row.call(row.x)
        if not torch.equal(sample(result), row.expected(row.x)):
            raise AssertionError(f"{row.name}: wrong result")
        rate = (result != 0).double().mean().item()
        if row.name != "dropout_add" and abs(rate - 1 + P) > 2e-3:
            raise AssertionError(f"{row.name}: {rate:.4f} of the elements are kept, expected {1 - P}")
        del result
    ms = device_ms(row.call, [row.x])
    return {
        "ms": ms,
        "floor_ms": row.floor_ms,
        "of the floor's speed": row.floor_ms / ms,
        "target_speed": row.target_speed,
    }


# ------------------------------------------------------------------------------------- memory


def saved_bytes() -> dict[str, float]:
    """Bytes per element held for the backward pass, in addition to input and result."""
    x = torch.randn(N // 4, device="cuda", requires_grad=True)
    found = {}
    for name, call in (("torch", lambda x: torch.nn.functional.dropout(x, P)), ("sjlt", seeded())):
        before = torch.cuda.memory_allocated()
        y = call(x)
        found[name] = (torch.cuda.memory_allocated() - before - y.nbytes) / y.numel()
        del y
    return found


def on_gpu() -> None:
    begin = time.perf_counter()
    about = gpu_environment()
    print(json.dumps(about), flush=True)
    results: dict[str, Any] = {"environment": about, "elements": N, "p": P, "cases": {}}
    failures = []
    table = Table("case", "ms", "floor", "of its speed", "target", title=f"{N} elements", box=box.SIMPLE)
    for dtype in (BF16, FP32):
        for row in rows_of(dtype):
            name = f"{row.name}, {str(dtype)[6:]}"
            try:
                found = results["cases"][name] = measure(row)
            except Exception as error:  # measure the remaining cases; the run fails at its end
                failures.append(f"{name} FAILED: {type(error).__name__}: {error}")
                continue
            share = found["of the floor's speed"]
            missed = row.target_speed is not None and share < row.target_speed
            text = f"[red]{share:.3f} ![/red]" if missed else f"{share:.3f}"
            table.add_row(name, f"{found['ms']:.3f}", f"{row.floor_ms:.3f}", text, str(row.target_speed or ""))
        torch.cuda.empty_cache()
    console.print(table)
    results["bytes per element held for backward"] = saved_bytes()
    print(json.dumps({k: v for k, v in results.items() if "held" in k}))
    print(f"{time.perf_counter() - begin:.0f} s")
    if failures:
        raise SystemExit("\n".join(failures))
    run.save(RESULTS / "dropout_h200.json", results)


# ------------------------------------------------------------------------------------- CPU

CPU_METHODS: dict[str, Callable[[np.ndarray], Callable[[], Any]]] = {
    **{f"sjlt, bits={b}": lambda x, b=b: lambda: sjlt.dropout(x, P, SEED, bits=b) for b in (16, 8, 32)},  # type: ignore[misc]
    "sjlt, in place": lambda x: lambda: sjlt.dropout(x, P, SEED, inplace=True),
    "torch": lambda x: partial(torch.nn.functional.dropout, torch.from_numpy(x), P),
    "memcpy": lambda x: lambda: x.copy(),
    "memcpy into memory in use": lambda x: partial(np.copyto, x.copy(), x),
}


def cpu_seconds(name: str) -> float:
    x = np.random.default_rng(0).normal(size=2**24).astype(np.float32)
    expected = sjlt.masked_dropout(x, sjlt.dropout_mask(x.shape, P, SEED), P, bits=16)
    call = CPU_METHODS[name](x)
    if name == "sjlt, bits=16":
        assert np.array_equal(call(), expected)
    laps = []
    for _ in range(run.REPEATS):
        start = time.perf_counter()
        call()
        laps.append(time.perf_counter() - start)
    return statistics.median(laps)


def on_cpus() -> None:
    results: dict[str, Any] = {"environment": run.environment(), "elements": 2**24, "dtype": "float32", "seconds": {}}
    seconds = results["seconds"]
    for name in CPU_METHODS:
        seconds[name] = json.loads(run.in_process("-m", "benchmarks.dropout", "--cpu-method", name))
    table = Table("method", "ms", "times memcpy", title="16 Mi fp32, 2 threads" if sjlt.get_num_threads() == 2 else "")
    for name, value in seconds.items():
        table.add_row(name, f"{value * 1e3:.1f}", f"{value / seconds['memcpy']:.2f}")
    console.print(table)
    run.save(RESULTS / "dropout_cpu.json", results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dropout", description=__doc__.partition("\n")[0])
    parser.add_argument("--cpu", action="store_true", help="time the CPU backend")
    parser.add_argument("--cpu-method", choices=CPU_METHODS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cpu_method:
        print(cpu_seconds(arguments.cpu_method))
    elif arguments.cpu:
        on_cpus()
    else:
        on_gpu()
