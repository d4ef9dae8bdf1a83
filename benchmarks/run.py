"""Time the CPU backend beside its rivals: ``python -m benchmarks.run [CASE ...]``.

Every method runs in a process of its own (thread pools of several libraries in one process disturb each other), on
the same data and, for like-for-like work, with the same number of nonzeros per column. Answers are checked before
anything is timed. What a call of sjlt does includes making the entries of the sketch; scikit-learn's includes `fit`;
the other rivals have their matrix stored. Writes benchmarks/results/cpu.json and prints the tables.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import sjlt

from .cases import CASES, Case, sketch_of

RESULTS = Path(__file__).parent / "results" / "cpu.json"
REPEATS = 15
FIRST_CALL = """
import time; start = time.perf_counter()
import numpy as np, sjlt
x = np.ones((20000, 768), np.float32)
imported = time.perf_counter()
x @ sjlt.Sketch(768, 256, nnz=8).T
print(time.perf_counter() - imported)
"""


def check(case: Case, name: str, data: Any, result: Any) -> None:
    """A sample of the result against a float64 product; for scikit-learn, whose matrix is another, the norms."""
    sample = slice(0, 50)
    if name.startswith("memcpy"):
        return
    if hasattr(result, "float"):
        result = result.float().numpy()
    x = (data[sample] if case.axis == 1 else data.T[sample]).astype(np.float64)
    y = np.asarray(result[sample] if case.axis == 1 else result.T[sample], np.float64)
    if name.startswith("scikit-learn"):
        norms = np.asarray(x.multiply(x).sum(1) if hasattr(x, "multiply") else (x * x).sum(1)).ravel()
        assert abs((y * y).sum(1).mean() / norms.mean() - 1) < 0.1, name
        return
    want = x @ sketch_of(case, data).to_scipy().T
    want = want.toarray() if hasattr(want, "toarray") else want
    error = np.linalg.norm(y - want) / np.linalg.norm(want)
    assert error < (1e-2 if "bf16" in name else 1e-6), (name, error)


def measure(case: Case, name: str) -> dict[str, float]:
    """Median seconds of a call, and the process's peak memory over what it held before."""
    data = case.make()
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    call = case.methods[name](case, data)
    check(case, name, data, call())
    seconds = []
    while len(seconds) < REPEATS and (len(seconds) < 3 or sum(seconds) < 20):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": float(np.median(seconds)), "peak_mib": peak / 1024, "peak_above_data_mib": (peak - held) / 1024}


def in_process(*arguments: str, **environment: str) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


def first_calls() -> dict[str, float]:
    """Seconds of the first call in a process, without and with the compiled kernels on disk."""
    with tempfile.TemporaryDirectory() as cache:
        seconds = [float(in_process("-c", FIRST_CALL, NUMBA_CACHE_DIR=cache)) for _ in range(2)]
    return dict(zip(("after install", "second process"), seconds, strict=True))


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def environment() -> dict[str, Any]:
    packages = ("numpy", "scipy", "scikit-learn", "numba", "torch")
    return {
        "processor": processor(),
        "threads": sjlt.get_num_threads(),
        "python": platform.python_version(),
        "sjlt": sjlt.__version__,
        **{name: version(name) for name in packages},
    }


def show(title: str, rows: dict[str, dict[str, float]]) -> None:
    table = Table("method", "ms", "times sjlt", "peak MiB", "above data MiB", title=title, title_justify="left")
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row['seconds'] * 1e3:.1f}",
            f"{row['seconds'] / rows['sjlt']['seconds']:.2f}",
            f"{row['peak_mib']:.0f}",
            f"{row['peak_above_data_mib']:.0f}",
        )
    Console().print(table)


def main(names: list[str]) -> None:
    results: dict[str, Any] = {"environment": environment(), "cases": {}}
    print(json.dumps(results["environment"]))
    for key in names or CASES:
        case = CASES[key]
        rows = {name: json.loads(in_process("-m", "benchmarks.run", "--measure", key, name)) for name in case.methods}
        results["cases"][case.title] = rows
        show(case.title, rows)
    results["first call, seconds"] = first_calls()
    print("first call, seconds:", results["first call, seconds"])
    if not names:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(CASES[sys.argv[2]], sys.argv[3])))
    else:
        main(sys.argv[1:])
