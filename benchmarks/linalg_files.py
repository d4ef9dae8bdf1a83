"""The part of `benchmarks.linalg` about files: least squares with a matrix that may be larger than memory.

Time and peak memory of `sjlt.linalg.lstsq` are compared with normal equations from a memory map and with reading the
file four times, each in a process of its own and from a cold page cache.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .cases import SEED
from .run import in_process, resident

GIGABYTES, COLUMNS = 6.0, 500
MEMORY_GB = 1.0  # limit for sjlt.linalg.lstsq; on a GPU, of the growth in the call, without the CUDA libraries
ROWS = 4096  # per block when the file is generated or read
SMALL_ROWS = 20_000  # of a smaller file that is read before the timed one: several blocks, to compile all kernels

Method = Callable[[Path, Any], dict[str, Any]]  # of (path of A, b); returns what is to be recorded


# ------------------------------------------------------------------------------------- the methods


def sketched(path: Path, b: Any) -> dict[str, Any]:
    from sjlt.linalg import lstsq

    solution = lstsq(path, b)
    return {"reads": solution.iterations, "estimated backward error": solution.backward_error}


def normal_equations(path: Path, b: np.ndarray) -> dict[str, Any]:
    import scipy.linalg

    A = np.load(path, mmap_mode="r")
    gram, rhs = np.zeros((COLUMNS, COLUMNS)), np.zeros(COLUMNS)
    for i in range(0, A.shape[0], ROWS):
        block = np.asarray(A[i : i + ROWS])
        gram += block.T @ block
        rhs += block.T @ b[i : i + ROWS]
    scipy.linalg.cho_solve(scipy.linalg.cho_factor(gram), rhs)
    return {"reads": 1}


def normal_equations_on_gpu(path: Path, b: Any) -> dict[str, Any]:
    import torch

    A = np.load(path, mmap_mode="r")
    gram, rhs = b.new_zeros(COLUMNS, COLUMNS), b.new_zeros(COLUMNS, 1)
    for i in range(0, A.shape[0], ROWS):
        block = torch.from_numpy(np.array(A[i : i + ROWS])).to(b.device)
        gram += block.T @ block
        rhs += block.T @ b[i : i + ROWS, None]
    torch.cholesky_solve(rhs, torch.linalg.cholesky(gram))
    torch.cuda.synchronize()
    return {"reads": 1}


def read_four_times(path: Path, b: Any) -> dict[str, Any]:
    buffer = np.empty(32 << 20, np.uint8)
    for _ in range(4):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):  # type: ignore[attr-defined]
                pass
    return {"reads": 4}


ON_CPU: dict[str, Method] = {
    "sjlt.linalg.lstsq": sketched,
    "memory map, normal equations": normal_equations,
    "reading it 4 times": read_four_times,
}
ON_GPU: dict[str, Method] = {
    "sjlt.linalg.lstsq, b on the GPU": sketched,
    "memory map, normal equations on the GPU": normal_equations_on_gpu,
    "reading it 4 times": read_four_times,
}
METHODS = ON_CPU | ON_GPU


# ------------------------------------------------------------------------------------- the run


def make_file(path: Path, gigabytes: float) -> None:
    """Write a float64 matrix of this size with condition number 1e4, and a right-hand side in the same folder."""
    rows = int(gigabytes * 1e9 / 8 / COLUMNS)
    rng = np.random.default_rng(SEED)
    scales = np.geomspace(1, 1e-4, COLUMNS)
    A = np.lib.format.open_memmap(path, "w+", np.float64, (rows, COLUMNS))
    for i in range(0, rows, ROWS):
        A[i : i + ROWS] = rng.standard_normal((min(ROWS, rows - i), COLUMNS)) * scales
    A.flush()
    del A
    np.save(path.with_name("b.npy"), rng.standard_normal(rows))


def drop_from_page_cache(path: Path) -> None:
    """Ask the operating system to drop the file from its page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Return the time from a cold page cache, the peak resident memory, and its growth in the call.

    Resident memory includes the pages of a memory map.
    """
    b: Any = np.load(folder / "b.npy")
    if "GPU" in name:
        import torch

        b = torch.from_numpy(b).to("cuda")
    small, rows = folder / "small.npy", min(SMALL_ROWS, len(b))
    if not small.exists():
        np.save(small, np.random.default_rng(SEED).standard_normal((rows, COLUMNS)))
    METHODS[name](small, b[:rows])  # compile and start threads
    drop_from_page_cache(folder / "A.npy")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    held = resident("VmRSS")
    start = time.perf_counter()
    found = METHODS[name](folder / "A.npy", b)
    seconds = time.perf_counter() - start
    peak = resident("VmHWM")
    return {"seconds": seconds, "peak_mib": peak, "peak_above_mib": peak - held, **found}


def run(methods: dict[str, Method], gigabytes: float, folder: Path) -> dict[str, Any]:
    """Measure these methods, the first of which is sjlt's; raise SystemExit if it uses more than MEMORY_GB.

    The file is read before the first measurement, because the host of a virtual disk may have a cache of its own: all
    methods then find the file in it.
    """
    make_file(folder / "A.npy", gigabytes)
    drop_from_page_cache(folder / "A.npy")
    read_four_times(folder / "A.npy", None)
    found: dict[str, Any] = {}
    for name in methods:
        found[name] = json.loads(in_process("-m", "benchmarks.linalg_files", name, str(folder)))
        print(name, found[name], file=sys.stderr, flush=True)
    ours = next(iter(found.values()))
    peak = ours["peak_above_mib" if methods is ON_GPU else "peak_mib"]
    if peak > MEMORY_GB * 1e9 / 2**20:
        raise SystemExit(f"lstsq used {peak:.0f} MiB of memory, more than {MEMORY_GB:g} GB")
    return {f"float64, {gigabytes:g} GB, {COLUMNS} columns": found}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]))))
