"""Time the CPU backend and its rivals: ``python -m benchmarks.run [CASE ...]`` (extra "benchmarks", Linux).

Every method runs in a separate process (the thread pools of several libraries in one process disturb each other), on
the same data and with the same number of nonzeros per column. Every result is checked before its time is printed. A
call of sjlt includes generating the entries, scikit-learn's includes `fit`; the other rivals use a stored matrix.
Without arguments the results also go to benchmarks/results/cpu.json.
"""

from __future__ import annotations

import json
import os
import platform
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
import time, numpy as np, scipy.sparse, sjlt
x, y = np.ones((1000, 768), np.float32), np.ones((1000, 256), np.float32)
S, sparse = sjlt.Sketch(768, 256), scipy.sparse.csr_matrix((1000, 768), dtype=np.float32)
start = time.perf_counter()
{call}
print(time.perf_counter() - start)
"""
FIRST_CALLS = {
    "X S'": "x @ S.T",
    "x S', one row": "x[0] @ S.T",
    "S A": "S @ y[:768]",
    "Y S": "y @ S",
    "CSR S'": "sparse @ S.T",
    "CSR S' to CSR": "S.project(sparse, dense_output=False)",
}


def check(case: Case, name: str, data: Any, result: Any) -> None:
    """Check a sample of the result against a float64 product; for scikit-learn, only the norms."""
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


def resident(field: str) -> float:
    """MiB used by this process now (VmRSS) or at its peak (VmHWM); getrusage may report the parent's peak."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field)) / 1024


def measure(case: Case, name: str) -> dict[str, float]:
    """Median seconds of a call, and the peak memory of the process, in total and beyond its size with the data."""
    data = case.make()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    held = resident("VmRSS")
    call = case.methods[name](case, data)
    result, seconds = call(), []
    while len(seconds) < REPEATS and (len(seconds) < 3 or sum(seconds) < 20):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    peak = resident("VmHWM")
    check(case, name, data, result)
    return {"seconds": float(np.median(seconds)), "peak_mib": peak, "peak_above_data_mib": peak - held}


def in_process(*arguments: str, **environment: str) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


def first_calls(commands: dict[str, tuple[str, ...]], cache_variable: str) -> dict[str, dict[str, float]]:
    """Seconds of the first call in a process: after installation, and with machine code on disk.

    commands : arguments of Python for each call, whose time they print.  cache_variable : the environment variable that
    names the folder for machine code.
    """
    seconds = {}
    for name, command in commands.items():
        with tempfile.TemporaryDirectory() as cache:
            runs = [float(in_process(*command, **{cache_variable: cache})) for _ in range(2)]
        seconds[name] = dict(zip(("after install", "next process"), runs, strict=True))
    return seconds


def versions(*packages: str) -> dict[str, str]:
    names = {name: version(name) for name in packages}
    return {"python": platform.python_version(), "sjlt": sjlt.__version__, **names}


def environment() -> dict[str, Any]:
    import cpuinfo

    return {
        "processor": cpuinfo.get_cpu_info()["brand_raw"],
        "threads": sjlt.get_num_threads(),
        **versions("numpy", "scipy", "scikit-learn", "numba", "torch"),
    }


def save(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def show(title: str, rows: dict[str, dict[str, float]]) -> None:
    copy = next((row["seconds"] for name, row in rows.items() if name.startswith("memcpy")), None)
    columns = ["method", "ms", "times sjlt", "times memcpy", "peak MiB", "above data MiB"]
    table = Table(*columns, title=title, title_justify="left")
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row['seconds'] * 1e3:.1f}",
            f"{row['seconds'] / rows['sjlt']['seconds']:.2f}",
            "" if copy is None else f"{row['seconds'] / copy:.2f}",
            f"{row['peak_mib']:.0f}",
            f"{row['peak_above_data_mib']:.0f}",
        )
    Console(width=110).print(table)


def show_first_calls(title: str, seconds: dict[str, dict[str, float]]) -> None:
    table = Table(title, "after install, s", "next process, s")
    for name, row in seconds.items():
        table.add_row(name, *(f"{value:.2f}" for value in row.values()))
    Console(width=110).print(table)


def main(names: list[str]) -> None:
    results: dict[str, Any] = {"environment": environment(), "cases": {}}
    print(json.dumps(results["environment"]))
    for key in names or CASES:
        case = CASES[key]
        rows = {name: json.loads(in_process("-m", "benchmarks.run", "--measure", key, name)) for name in case.methods}
        results["cases"][case.title] = rows
        show(case.title, rows)
    if not names:
        commands = {name: ("-c", FIRST_CALL.format(call=call)) for name, call in FIRST_CALLS.items()}
        results["first call, seconds"] = first_calls(commands, "NUMBA_CACHE_DIR")
        show_first_calls("first call, fp32", results["first call, seconds"])
        save(RESULTS, results)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(CASES[sys.argv[2]], sys.argv[3])))
    else:
        main(sys.argv[1:])
