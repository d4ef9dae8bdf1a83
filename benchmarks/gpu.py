"""Time the CUDA backend and its rivals: ``python -m benchmarks.gpu [CASE ...] [--baselines-only]``.

A CASE is a key of `CASES` or a pattern of keys such as ``X*``. Every result is checked before it is timed. Times are
device times: calls are queued behind a wait, which hides the host's time (`benchmarks.host` measures that). Each time
is the median over repeats; a repeat runs calls back to back for at least a millisecond, so launch latency matters
little. The data is several times the size of the L2 cache; if one tensor is not, several are used in rotation. The
floor is (bytes of data read once + bytes of result written once) / the bandwidth of a large device copy, counting bytes
read and written, measured in the same run. Without arguments the results also go to benchmarks/results, to a file named
after the GPU.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from . import baselines
from .baselines import AbsentError, Call, Product
from .cases import SEED
from .run import save, versions

RESULTS = Path(__file__).parent / "results"
WARM_UPS, REPEATS = 3, 10
SLOW = 2000  # ms after which a method is not repeated further
LAP = 1.0  # ms, the minimum duration of a repeat
WAIT = 8_000_000  # cycles, about 4 ms: a head start for the host, which meanwhile queues the calls of a repeat
BF16 = torch.bfloat16

GROUPS = {
    "X S'": {
        "X768": Product(2**20, 768, 256, 1.2),
        "X4096": Product(2**18, 4096, 512, 1.25),
        "X4096-nnz2": Product(2**18, 4096, 512, nnz=2),
        "X4096-nnz8": Product(2**18, 4096, 512, nnz=8),
        "X4096-bf16": Product(2**18, 4096, 512, 1.2, dtype=BF16),
        "X4096-256": Product(2**18, 4096, 256),
        "X16384": Product(2**16, 16384, 2048, 1.3),
        "X16384-bf16": Product(2**16, 16384, 2048, 1.3, dtype=BF16),
    },
    "S A": {
        "A512": Product(512, 2**18, 1024, 1.3, axis=0),
        "A512-nnz1": Product(512, 2**18, 1024, 1.15, nnz=1, axis=0),
        "A512-nnz2": Product(512, 2**18, 1024, nnz=2, axis=0),
        "A512-nnz8": Product(512, 2**18, 1024, nnz=8, axis=0),
        "A512-bf16": Product(512, 2**18, 1024, dtype=BF16, axis=0),
        "A1024": Product(1024, 2**16, 4096, 1.35, axis=0),
        "A1024-nnz1": Product(1024, 2**16, 4096, 1.2, nnz=1, axis=0),
        "A1024-short": Product(1024, 2**14, 1024, 2.0, axis=0),
        "A1024-short-nnz1": Product(1024, 2**14, 1024, 1.5, nnz=1, axis=0),
        "A8": Product(8, 2**24, 4096, 2.0, axis=0),
    },
    "X S', few vectors": {
        "rows8": Product(8, 2**27, 4096, 2.5),
        "rows8-nnz1": Product(8, 2**27, 4096, 1.3, nnz=1),
        "rows1": Product(1, 2**28, 4096, 3.0),
        "rows1-nnz1": Product(1, 2**28, 4096, 1.3, nnz=1),
    },
    "adjoints": {
        "adjoint-X768": Product(2**20, 768, 256, 1.3, adjoint=True),
        "adjoint-A512": Product(512, 2**18, 1024, 1.5, axis=0, adjoint=True),
        "adjoint-rows8": Product(8, 2**27, 4096, 2.5, adjoint=True),
    },
    "stacks": {
        "A512-stacks4": Product(512, 2**18, 1024, 2.2, axis=0, stacks=4),
        "A512-stacks2": Product(512, 2**18, 1024, 1.6, axis=0, stacks=2),
        "A1024-stacks4": Product(1024, 2**16, 4096, 2.2, axis=0, stacks=4),
        "A1024-stacks2": Product(1024, 2**16, 4096, 1.6, axis=0, stacks=2),
        "X4096-stacks4": Product(2**18, 4096, 512, 2.5, stacks=4),
        "X4096-stacks2": Product(2**18, 4096, 512, 1.7, stacks=2),
        "A512-fp64": Product(512, 2**20, 2048, dtype=torch.float64, axis=0),
        "A512-fp64-stacks4": Product(512, 2**20, 2048, 2.2, dtype=torch.float64, axis=0, stacks=4),
        "A512-fp64-stacks4-nnz8": Product(512, 2**20, 2048, 2.6, nnz=8, dtype=torch.float64, axis=0, stacks=4),
    },
}
CASES = {key: case for group in GROUPS.values() for key, case in group.items()}


# ------------------------------------------------------------------------------------- methods


class Method(NamedTuple):
    """A function that returns the call to time, the maximum error (None for a copy), and torch's precision."""

    prepare: Callable[[Product, Any], Call]
    error: float | None
    precision: str = "highest"


def sjlt_product(case: Product, device: Any) -> Call:
    return lambda x: case.apply(case.sketch, x)


def sjlt_into(case: Product, x: torch.Tensor) -> torch.Tensor:
    """The product, written to an `out` that was filled with NaN."""
    out = torch.full(case.result_shape, math.nan, dtype=x.dtype, device=x.device)
    function = case.sketch.project_adjoint if case.adjoint else case.sketch.project
    function(case.vectors(x), out=case.vectors(out))
    return out


def methods(case: Product) -> dict[str, Method]:
    """sjlt's methods, whose names start with "sjlt", then the rivals'."""
    if case.dtype == BF16:
        return {
            "sjlt": Method(sjlt_product, 5e-3),
            "cuBLAS bf16": Method(baselines.stored_dense, 5e-3),
            "cuSPARSE": Method(baselines.stored_csr, 5e-3 if case.d < 2**18 else 2e-2),  # its error is 8.6e-3 there
            "index_add_": Method(baselines.index_add, 5e-3),
            "copy": Method(baselines.copy, None),
        }
    if case.dtype == torch.float64:
        return {
            "sjlt": Method(sjlt_product, 1e-14),
            "cuSPARSE": Method(baselines.stored_csr, 1e-14),
            "separate": Method(baselines.separate, None),
            "copy": Method(baselines.copy, None),
        }
    growth = max(1, math.log2(case.d) / 20) ** 0.5  # rounding of long sums
    lower = {"sjlt high": Method(sjlt_product, 2e-5, "high"), "sjlt medium": Method(sjlt_product, 5e-3, "medium")}
    return {
        "sjlt": Method(sjlt_product, 1e-6 * growth),
        **(lower if case.n >= 256 and case.nnz == 4 else {}),  # precision matters only where tensor cores multiply
        "cuBLAS fp32": Method(baselines.stored_dense, 1e-4),
        "cuBLAS tf32": Method(baselines.stored_dense, 1e-3, "high"),
        "cuBLAS bf16": Method(baselines.stored_bf16, 5e-3),
        "cuSPARSE": Method(baselines.stored_csr, 1e-4),
        "index_add_": Method(baselines.index_add, 1e-4),
        **({"separate": Method(baselines.separate, None)} if case.stacks > 1 else {}),
        "copy": Method(baselines.copy, None),
    }


# ------------------------------------------------------------------------------------- measurements


def device_ms(call: Call, data: list[torch.Tensor]) -> float:
    """Median device milliseconds per call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    laps: list[float] = []
    rounds = 1
    while len(laps) < WARM_UPS + REPEATS and sum(laps) < SLOW:
        torch.cuda._sleep(WAIT)
        start.record()
        for x in data * rounds:
            call(x)
        end.record()
        end.synchronize()
        laps.append(start.elapsed_time(end) / rounds)
        if len(laps) == WARM_UPS:
            rounds = math.ceil(LAP / laps[-1])
    return statistics.median(laps[WARM_UPS:] or laps) / len(data)


def host_us(calls: Mapping[str, tuple[Call, torch.Tensor]], each: int = 300) -> dict[str, float]:
    """Median host microseconds per call: many calls in a row without waiting, with the methods taking turns."""
    laps: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(WARM_UPS + 4 * REPEATS):
        for name, (call, x) in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(each):
                call(x)
            laps[name].append((time.perf_counter() - start) / each * 1e6)
    return {name: statistics.median(times[WARM_UPS:]) for name, times in laps.items()}


def extra_bytes(call: Call, x: torch.Tensor) -> int:
    """Peak device memory of a call beyond its input and its result."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    result = call(x)
    return torch.cuda.max_memory_allocated() - held - result.nbytes


def copy_bandwidth() -> float:
    """Bytes read and written per second of a large device copy."""
    source = baselines.normal((2**30,), torch.float32, "cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / device_ms(target.copy_, [source]) * 1e3


def enough_data(case: Product) -> list[torch.Tensor]:
    """Enough tensors that they and their results evict each other from the L2 cache."""
    cache = torch.cuda.get_device_properties("cuda").L2_cache_size
    return [case.data("cuda", SEED + i) for i in range(math.ceil(4 * cache / case.bytes))]


def checked(name: str, method: Method, case: Product, call: Call, x: torch.Tensor, want: torch.Tensor) -> float:
    """The error of the call's result; AssertionError if it is too large."""
    result = call(x)
    error = baselines.relative_error(case, result, want)
    if not error <= method.error:  # also false for NaN
        raise AssertionError(f"{name}: error {error:.2e}, allowed is {method.error:.1e}")
    if name.startswith("sjlt") and not torch.equal(result, sjlt_into(case, x)):
        raise AssertionError(f"{name}: the result in a given `out` differs: elements are unwritten, or runs differ")
    return error


def measure(case: Product, floor: float, names: Callable[[str], bool]) -> dict[str, Any]:
    """Times in ms, errors and, for sjlt, extra memory of all methods; `floor` in ms."""
    data = enough_data(case)
    want = baselines.reference(case, data[0])
    device, rows = data[0].device, {}
    for name, method in methods(case).items():
        if not names(name):
            continue
        torch.set_float32_matmul_precision(method.precision)
        try:
            call = method.prepare(case, device)
        except AbsentError as reason:
            rows[name] = {"absent": str(reason)}
            continue
        row: dict[str, float] = {}
        if method.error is not None:
            row["error"] = checked(name, method, case, call, data[0], want)
        if name == "sjlt":
            row["extra_bytes"] = extra_bytes(call, data[0])
        row["ms"] = device_ms(call, data)
        row["times floor"] = row["ms"] / floor
        rows[name] = row
    torch.set_float32_matmul_precision("highest")
    return {"floor_ms": floor, "target_ratio": case.target_ratio, "tensors": len(data), "methods": rows}


def short_name() -> str:
    """The model of the GPU, such as "h200", for the names of records."""
    return torch.cuda.get_device_name().split()[1].lower()


def environment() -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    gpu = torch.cuda.get_device_name()
    return {"gpu": gpu, "driver": driver, "cuda": torch.version.cuda, **versions("numpy", "torch", "triton")}


# ------------------------------------------------------------------------------------- output

RIVALS = (
    "sjlt high",
    "sjlt medium",
    "cuBLAS fp32",
    "cuBLAS tf32",
    "cuBLAS bf16",
    "cuSPARSE",
    "index_add_",
    "separate",
    "copy",
)
console = Console(width=180)


def judged(value: float, limit: float | None, text: str) -> str:
    return text if limit is None or value <= limit else f"[red]{text} ![/red]"


def show(title: str, results: dict[str, Any]) -> None:
    """One line per case, times in ms; in parentheses, the rival's time over sjlt's."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("case", no_wrap=True)
    for name in ("floor", "sjlt", "x floor", "target", "MiB", *RIVALS):
        table.add_column(name, justify="right", min_width=5)
    notes = []
    for result in results.values():
        case, rows = result["case"], result["methods"]
        ours = rows.get("sjlt")
        cells = ["", "", str(case.target_ratio or ""), ""]
        if ours:
            times, extra = ours["times floor"], ours["extra_bytes"]
            allowed = max(0.05 * math.prod(case.shape) * case.dtype.itemsize, 64 * 2**20)
            cells[:2] = f"{ours['ms']:.3f}", judged(times, case.target_ratio, f"{times:.2f}")
            cells[3] = judged(extra, allowed, f"{extra / 2**20:.0f}")
        for row in (rows.get(name, {}) for name in RIVALS):
            ratio = f" ({row['ms'] / ours['ms']:.1f})" if ours and "ms" in row else ""
            cells.append(f"{row['ms']:.3g}{ratio}" if "ms" in row else "-" if "absent" in row else "")
        table.add_row(case.title, f"{result['floor_ms']:.3f}", *cells)
        note = [f"{name}: {row['absent']}" for name, row in rows.items() if "absent" in row]
        note += [f"{result['tensors']} tensors in rotation"] * (result["tensors"] > 1)
        notes += [f"- {case.title}: {'; '.join(note)}"] * bool(note)
    console.print(table, *notes, sep="\n")


def main(patterns: list[str], baselines_only: bool) -> None:
    keys = [key for key in CASES if any(fnmatch.fnmatch(key, p) for p in patterns or ["*"])]
    if not keys:
        raise SystemExit(f"no case matches {', '.join(patterns)}; the cases are: {', '.join(CASES)}")
    begin = time.perf_counter()
    bandwidth = copy_bandwidth()
    about = {**environment(), "copy bandwidth, TB/s": bandwidth / 1e12}
    print(json.dumps(about), flush=True)
    names = (lambda name: not name.startswith("sjlt")) if baselines_only else lambda name: True
    results: dict[str, Any] = {"environment": about, "cases": {}}
    failures = {}
    for group, cases in GROUPS.items():
        done = {}
        for key in filter(cases.__contains__, keys):
            case, start = cases[key], time.perf_counter()
            try:
                done[key] = {"case": case, **measure(case, case.bytes / bandwidth * 1e3, names)}
            except Exception as error:  # measure the remaining cases; the run fails at its end
                failures[key] = f"{type(error).__name__}: {error}"
            gc.collect()
            torch.cuda.empty_cache()
            print(f"{key}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
        if done:
            show(group, done)
        results["cases"] |= {r["case"].title: {k: v for k, v in r.items() if k != "case"} for r in done.values()}
    print(f"{time.perf_counter() - begin:.0f} s")
    if failures:
        raise SystemExit("\n".join(f"{key} FAILED: {message}" for key, message in failures.items()))
    if not patterns and not baselines_only:
        save(RESULTS / f"{short_name()}.json", results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--baselines-only", action="store_true", help="do not time sjlt")
    arguments = parser.parse_args()
    main(arguments.cases, arguments.baselines_only)
