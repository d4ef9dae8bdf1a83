"""Time files, plans and dask arrays beside their rivals: ``python -m benchmarks.files [--rows N] [--directory D]``.

Each case runs in a process of its own, imports and compilation included, on files in the page cache; results are
compared with `Sketch.project` on some rows before a time counts. A time is the median of REPEATS runs. Peak memory is
the resident set's high-water mark. Writes benchmarks/results/files.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .cases import SEED

RESULTS = Path(__file__).parent / "results" / "files.json"
D, K, NNZ = 768, 256, 4
REPEATS = 3
BATCH = 8192
SHARDS, SMALL_PARTS, SMALL_ROWS = 16, 1000, 300

CASES: dict[str, Callable[[Path], None]] = {}


def case(function: Callable[[Path], None]) -> Callable[[Path], None]:
    """Make a function a case, run by its name in a process of its own."""
    CASES[function.__name__] = function
    return function


# ------------------------------------------------------------------------------------- the sources


def block(rows: int) -> np.ndarray:
    """Normals, fp32."""
    return np.random.default_rng(SEED).standard_normal((rows, D), np.float32)


def make_sources(folder: Path, rows: int) -> None:
    """Two parquet files of `rows`, a folder of as many rows in .npy shards, and one of many small files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    x = block(10_000)
    values = pa.array(x.reshape(-1))
    lists = pa.ListArray.from_arrays(pa.array(np.arange(len(x) + 1, dtype=np.int32) * D), values)
    for name, column in (("fixed", pa.FixedSizeListArray.from_arrays(values, D)), ("list", lists)):
        table = pa.table({"id": np.arange(len(x)), "v": column})
        with pq.ParquetWriter(folder / f"{name}.parquet", table.schema, use_dictionary=False, compression="none") as w:
            for start in range(0, rows, 100_000):
                times = min(100_000, rows - start) // len(x)
                w.write_table(pa.concat_tables([table] * times), row_group_size=100_000)
    (folder / "shards").mkdir()
    for i in range(SHARDS):
        np.save(folder / "shards" / f"{i}.npy", np.resize(x, (rows // SHARDS, D)))
    (folder / "small").mkdir()
    for i in range(SMALL_PARTS):
        np.save(folder / "small" / f"{i}.npy", x[:SMALL_ROWS])


# ------------------------------------------------------------------------------------- parquet


def _sjlt_parquet(folder: Path, kind: str) -> None:
    from sjlt.files.parquet import project_parquet

    project_parquet(folder / f"{kind}.parquet", folder / "y.parquet", K, nnz=NNZ, force=True)


@case
def parquet_fixed_sjlt(folder: Path) -> None:
    _sjlt_parquet(folder, "fixed")


@case
def parquet_list_sjlt(folder: Path) -> None:
    _sjlt_parquet(folder, "list")


def _batches(folder: Path, kind: str) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetFile(folder / f"{kind}.parquet").iter_batches(BATCH)


def _written(folder: Path, batches: Any) -> None:
    """Write record batches in row groups of about 64 MB."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer, group = None, []
    for batch in batches:
        writer = writer or pq.ParquetWriter(
            folder / "y.parquet", batch.schema, use_dictionary=False, compression="none"
        )
        group.append(batch)
        if len(group) == 8:
            writer.write_table(pa.Table.from_batches(group))
            group = []
    writer.write_table(pa.Table.from_batches(group))
    writer.close()


def _rival_parquet(folder: Path, kind: str) -> None:
    import pyarrow as pa
    from sklearn.random_projection import SparseRandomProjection

    transformer = SparseRandomProjection(K, random_state=0).fit(np.empty((1, D), np.float32))

    def projected() -> Any:
        for batch in _batches(folder, kind):
            x = batch.column(1).flatten().to_numpy().reshape(-1, D)
            y = pa.FixedSizeListArray.from_arrays(pa.array(transformer.transform(x).reshape(-1)), K)
            yield pa.record_batch([batch.column(0), y], ["id", "v"])

    _written(folder, projected())


@case
def parquet_fixed_sklearn(folder: Path) -> None:
    _rival_parquet(folder, "fixed")


@case
def parquet_list_sklearn(folder: Path) -> None:
    _rival_parquet(folder, "list")


def _bare_parquet(folder: Path, kind: str) -> None:
    import pyarrow as pa

    y = pa.array(block(BATCH)[:, :K].reshape(-1))

    def copied() -> Any:
        for batch in _batches(folder, kind):
            values = y.slice(0, len(batch) * K)
            yield pa.record_batch([batch.column(0), pa.FixedSizeListArray.from_arrays(values, K)], ["id", "v"])

    _written(folder, copied())


@case
def parquet_fixed_bare(folder: Path) -> None:
    _bare_parquet(folder, "fixed")


@case
def parquet_list_bare(folder: Path) -> None:
    _bare_parquet(folder, "list")


# ------------------------------------------------------------------------------------- plans


def _plan(folder: Path, source: str, workers: int) -> None:
    import shutil

    import sjlt

    sjlt.set_num_threads(workers)  # a process each has one thread
    shutil.rmtree(folder / "out", ignore_errors=True)
    sjlt.plan(folder / source, folder / "out", K, nnz=NNZ).run(workers=workers)


@case
def shards_one_process(folder: Path) -> None:
    _plan(folder, "shards", 1)


@case
def shards_two_processes(folder: Path) -> None:
    _plan(folder, "shards", 2)


@case
def small_parts_plan(folder: Path) -> None:
    _plan(folder, "small", 1)


@case
def small_parts_loop(folder: Path) -> None:
    import sjlt

    sjlt.set_num_threads(1)
    S = sjlt.Sketch(D, K, nnz=NNZ)
    (folder / "loop").mkdir(exist_ok=True)
    for path in (folder / "small").iterdir():
        with open(folder / "loop" / path.name, "wb") as file:
            np.save(file, S.project(np.load(path)))
            file.flush()
            os.fsync(file.fileno())


# ------------------------------------------------------------------------------------- dask


def _dask(folder: Path, project: Callable[[Any], Any]) -> None:
    import dask.array as da
    import distributed

    rows = sum(np.load(path, mmap_mode="r").shape[0] for path in (folder / "shards").iterdir())
    X = da.from_array(np.resize(block(10_000), (20_000, D)), chunks=(20_000, D))
    X = da.concatenate([X] * max(1, rows // 20_000))
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        distributed.Client(cluster),
    ):
        project(X[:40_000]).sum().compute()
        start = time.perf_counter()
        project(X).sum().compute()
        print("seconds", time.perf_counter() - start)


@case
def dask_sjlt(folder: Path) -> None:
    import sjlt

    _dask(folder, lambda X: X @ sjlt.Sketch(D, K, nnz=NNZ).T)


@case
def dask_sklearn(folder: Path) -> None:
    from sklearn.random_projection import SparseRandomProjection

    transformer = SparseRandomProjection(K, random_state=0).fit(np.empty((1, D), np.float32))
    _dask(folder, lambda X: X.map_blocks(transformer.transform, chunks=(X.chunks[0], (K,)), dtype=np.float32))


# ------------------------------------------------------------------------------------- the run


def check(folder: Path, name: str) -> None:
    """The first rows of what a case of sjlt has written are the projection."""
    import sjlt

    expected = sjlt.Sketch(D, K, nnz=NNZ).project(block(10_000)[:100])
    if name.startswith("parquet") and name.endswith("sjlt"):
        import pyarrow.parquet as pq

        rows = next(pq.ParquetFile(folder / "y.parquet").iter_batches(100, columns=["v"])).column(0)
        assert np.array_equal(np.array(rows.flatten()).reshape(100, K), expected), name
    elif name.startswith("shards") or name == "small_parts_plan":
        assert np.array_equal(np.load(folder / "out" / "part-00000.npy", mmap_mode="r")[:100], expected), name


def measured(folder: Path, name: str) -> dict[str, float]:
    """Median seconds of a case, and its peak memory in MB."""
    seconds, peaks = [], []
    command = [sys.executable, "-m", "benchmarks.files", "--case", name, "--directory", str(folder)]
    for _ in range(REPEATS):
        start = time.perf_counter()
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        whole = time.perf_counter() - start
        seconds.append(float(output[output.index("seconds") + 1]) if "seconds" in output else whole)
        peaks.append(int(output[output.index("peak") + 1]) / 1000)
        check(folder, name)
    return {"seconds": statistics.median(seconds), "peak_mb": max(peaks)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the parquet files, and of all shards together")
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--case", choices=CASES, help="run this one here")
    arguments = parser.parse_args()
    if arguments.case:
        CASES[arguments.case](arguments.directory)
        with open("/proc/self/status") as file:
            print("peak", next(line for line in file if line.startswith("VmHWM")).split()[1])
        return
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        make_sources(Path(folder), arguments.rows)
        found = {name: measured(Path(folder), name) for name in CASES}
    for name, values in found.items():
        print(f"{name:26} {values['seconds']:8.2f} s {values['peak_mb']:8.0f} MB")
    about = {"rows": arguments.rows, "features": D, "components": K, "cores": len(os.sched_getaffinity(0))}
    RESULTS.write_text(json.dumps({"about": about, "cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
