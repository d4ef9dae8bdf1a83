"""Time the stages of ``sjlt project --device cuda``: ``python -m benchmarks.stream [--gb 8] [--directory DIRECTORY]``.

The file is in the page cache, on a file system other than tmpfs (whose small pages are read more slowly). Each stage
first runs alone, with the pipeline's own buffers, threads and sizes; then all run together in `project_file` of
`sjlt.files.projection`, whose result is checked. Rates count bytes of the file, except for copying back and writing,
which count bytes of the result. Writing means writing to the page cache: checkpoints are off, and the last fsync is
timed separately, since it measures the disk. Rates are medians of REPEATS runs. The results go to
benchmarks/results/stream_h200.json.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import sjlt
from sjlt.files import output, projection, stream
from sjlt.files.encoding import Encoding
from sjlt.files.opening import open_source
from sjlt.files.raw import RawMatrix

from .cases import SEED
from .gpu import environment
from .run import save

RESULTS = Path(__file__).parent / "results" / "stream_h200.json"
DEVICE = torch.device("cuda")
REPEATS = 3
WIDTHS = 768, 4096
HEADER = 128  # bytes


class Case(NamedTuple):
    d: int
    k: int
    dtype: str = "float32"  # dtype of the result

    @property
    def title(self) -> str:
        return f"{self.d} to {self.k}, {self.dtype}"


CASES = (Case(768, 16), Case(4096, 256), Case(768, 64, "float16"), Case(768, 64), Case(768, 256))


def write_file(path: Path, size: int) -> int:
    """Write about `size` bytes of fp32 normals in repeated blocks; return the number of values."""
    block = np.random.default_rng(SEED).standard_normal((4096, math.lcm(*WIDTHS)), np.float32)
    times = max(1, size // block.nbytes)
    with open(path, "wb", buffering=0) as file:
        file.write(bytes(HEADER))
        for _ in range(times):
            file.write(block.data)
    subprocess.run(["sync", path], check=True)  # keeps the disk idle during the runs
    return times * block.size


def set_shape(path: Path, numbers: int, d: int) -> None:
    """Rewrite the header for rows of d values."""
    with open(path, "r+b") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (numbers // d, d)})
        assert file.tell() == HEADER


def rate(amount: int, call: Callable[[], object]) -> float:
    """GB/s of a call that moves `amount` bytes."""
    call()
    rates = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        rates.append(amount / (time.perf_counter() - start) / 1e9)
    return statistics.median(rates)


def write_rate(path: Path, results: list[np.ndarray]) -> float:
    """GB/s of writing the results to a new file, without closing or removing it."""
    rates = []
    for _ in range(1 + REPEATS):
        with open(path, "xb", buffering=0) as file:
            start = time.perf_counter()
            for y in results:
                file.write(y.reshape(-1).view(np.uint8))
            rates.append(file.tell() / (time.perf_counter() - start) / 1e9)
        path.unlink()
    return statistics.median(rates[1:])


def stages(case: Case, path: Path, directory: Path) -> dict[str, float]:
    """GB/s of each stage alone."""
    sketch = sjlt.Sketch(case.d, case.k)
    with open_source(path, print) as source:
        assert isinstance(source, RawMatrix)
        encoding = Encoding.of(source.dtype, case.k, case.dtype, normalize=False)
        rows = projection.default_batch_rows(source, encoding, on_gpu=True)
        start = time.perf_counter()
        slots = [stream._Slot(source, sketch, np.dtype(case.dtype), rows, DEVICE) for _ in range(stream.SLOTS)]
        buffers = time.perf_counter() - start
        batches = list(zip(range(0, source.shape[0] - rows, rows), cycle(slots), strict=False))

        def read(readers: ThreadPoolExecutor) -> None:
            parts = (part for i, slot in batches for part in source.pieces(slot.read_x.numpy(), i, stream.PIECE_BYTES))
            list(readers.map(lambda part: source.fill([part]), parts))

        size = len(batches) * slots[0].read_x.nbytes
        size_y = len(batches) * slots[0].read_y.nbytes
        with ThreadPoolExecutor(min(stream.MAX_READERS, sjlt.get_num_threads())) as readers:
            measured = {
                "read": rate(size, lambda: read(readers)),
                "to device": rate(size, lambda: [s.x.copy_(s.read_x, non_blocking=True) for _, s in batches]),
                "project": rate(size, lambda: [sketch.project(s.x, out=s.y) for _, s in batches]),
                "back": rate(size_y, lambda: [s.read_y.copy_(s.y, non_blocking=True) for _, s in batches]),
                "write": write_rate(directory / "written", [slot.read_y.numpy() for _, slot in batches]),
            }
    return {**measured, "batch rows": rows, "buffers, s": buffers}


def whole(case: Case, path: Path, out: Path) -> dict[str, float]:
    """GB/s from file to file."""
    times: list[float] = []
    start = time.perf_counter()
    projection.project_file(
        path, out, case.k, dtype=case.dtype, device="cuda", force=True,
        progress=lambda rows, of: times.append(time.perf_counter()),
    )  # fmt: skip
    end = time.perf_counter()
    size = path.stat().st_size
    return {
        "whole": size / (times[-1] - start) / 1e9,
        "after the first batch": size * (len(times) - 2) / (len(times) - 1) / (times[-1] - times[1]) / 1e9,
        "first batch, s": times[1] - start,
        "fsync, s": end - times[-1],
    }


def check(case: Case, path: Path, out: Path) -> None:
    """Compare rows of the result with a float64 projection."""
    x, y = (np.load(p, mmap_mode="r") for p in (path, out))
    assert y.shape == (x.shape[0], case.k)
    assert y.dtype == case.dtype
    rows = np.unique(np.r_[:50, np.random.default_rng(0).integers(0, len(x), 500), len(x) - 50 : len(x)])
    want = sjlt.Sketch(case.d, case.k).project(x[rows].astype(np.float64))
    error = np.linalg.norm(y[rows] - want) / np.linalg.norm(want)
    assert error <= (1e-6 if case.dtype == "float32" else 5e-4), error


def processes(path: Path, directory: Path) -> dict[str, dict[str, float]]:
    """Seconds of a whole process for 1000 rows and for the whole file, with machine code cached."""
    np.save(directory / "small.npy", np.ones((1000, 768), np.float32))
    seconds: dict[str, dict[str, float]] = {}
    for name, source in (("1000 rows", directory / "small.npy"), ("the file", path)):
        seconds[name] = {}
        for device in ("cuda", "cpu"):
            arguments = source, directory / "z.npy", "-k", "64", "--force", "--device", device
            for _ in range(2):
                start = time.perf_counter()
                subprocess.run([sys.executable, "-m", "sjlt", "project", *arguments], check=True)
                seconds[name][device] = time.perf_counter() - start
    return seconds


def show(results: dict[str, Any]) -> None:
    columns = ["read", "to device", "project", "back", "write", "whole", "of the bus", "first batch, s"]
    table = Table("768 or 4096 features to", *columns, title="GB/s, fp32 in", title_justify="left")
    for title, row in results["cases"].items():
        cells = [f"{row[name]:.1f}" for name in columns[:-2]]
        table.add_row(title, *cells, f"{100 * row['of the bus']:.0f} %", f"{row['first batch, s']:.3f}")
    Console(width=130).print(table)


def main(gigabytes: float, directory: Path) -> None:
    output.CHECKPOINT_SECONDS = math.inf
    path, out = directory / "x.npy", directory / "y.npy"
    start = time.perf_counter()
    numbers = write_file(path, int(gigabytes * 1e9))
    results: dict[str, Any] = {
        "environment": {**environment(), "CPUs": sjlt.get_num_threads()},
        "file, GB": path.stat().st_size / 1e9,
        "readers": stream.MAX_READERS,
        "slots": stream.SLOTS,
        "cases": {},
    }
    print(f"file written in {time.perf_counter() - start:.0f} s", flush=True)
    for case in CASES:
        set_shape(path, numbers, case.d)
        row = stages(case, path, directory)
        torch.cuda.empty_cache()
        whole(case, path, out)  # compile the kernels
        check(case, path, out)
        runs = [whole(case, path, out) for _ in range(REPEATS)]
        row |= {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        row["of the bus"] = row["whole"] / row["to device"]
        results["cases"][case.title] = row
        save(RESULTS, results)
        print(case.title, json.dumps({name: round(value, 3) for name, value in row.items()}), flush=True)
    set_shape(path, numbers, CASES[0].d)
    results["768 to 64 in a process of its own, s"] = processes(path, directory)
    show(results)
    print(json.dumps(results["768 to 64 in a process of its own, s"]), f"{time.perf_counter() - start:.0f} s")
    save(RESULTS, results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stream", description=__doc__.partition("\n")[0])
    parser.add_argument("--gb", type=float, default=8, help="size of the file")
    parser.add_argument("--directory", type=Path, help="where to put the files (default: a temporary directory)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as temporary:
        main(arguments.gb, Path(temporary))
