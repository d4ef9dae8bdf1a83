"""Time files, plans and dask arrays and their rivals: ``python -m benchmarks.files [--rows N] [--directory D]``.

Each case runs in a separate process, imports included, with machine code cached and files in the page cache. Cases to
compare take turns. Some rows of each result are compared with `Sketch.project` before a time counts. Times are medians
of REPEATS runs. Peak memory is the resident set's high-water mark, of the largest process if there are several. Takes
about 10 minutes and 17 GB below D; writes benchmarks/results/files.json.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .file_sources import BLOCK, DASK_ROWS, SMALL_PARTS, D, block, make_source

RESULTS = Path(__file__).parent / "results" / "files.json"
K, NNZ = 256, 4
CELL_COMPONENTS = 512
REPEATS = 3
BATCH = 8192

CASES: dict[str, Callable[[Path], None]] = {}
# (source, cases that take turns, cases that run once) of each group. A source is removed after its group, so that the
# page cache can hold the next one.
GROUPS = (
    ("fixed.parquet", ("parquet_fixed_sjlt", "parquet_fixed_sklearn", "parquet_fixed_bare"), ()),
    ("list.parquet", ("parquet_list_sjlt", "parquet_list_sklearn", "parquet_list_bare"), ()),
    ("fixed-quarter.parquet", (), ("parquet_quarter_sjlt",)),
    ("shards", ("shards_two_workers", "shards_one_process"), ()),
    ("shards-quarter", (), ("shards_quarter",)),
    ("small", ("small_parts_plan", "small_parts_loop"), ()),
    ("blocks", ("dask_sjlt", "dask_sklearn"), ()),
    ("cells.h5ad", ("h5ad_sjlt", "h5ad_sklearn"), ()),
    ("quality.npy", (), ("quality",)),
)


def case(function: Callable[[Path], None]) -> Callable[[Path], None]:
    """Register a function as a case, to be run by name in a separate process."""
    CASES[function.__name__] = function
    return function


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


@case
def parquet_quarter_sjlt(folder: Path) -> None:
    _sjlt_parquet(folder, "fixed-quarter")


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
    if group:
        writer.write_table(pa.Table.from_batches(group))
    writer.close()


def _rival_parquet(folder: Path, kind: str) -> None:
    import pyarrow as pa
    from sklearn.random_projection import SparseRandomProjection

    transformer = SparseRandomProjection(K, random_state=0).fit(np.zeros((1, D), np.float32))

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
    """Run a plan with the given number of single-threaded processes."""
    import sjlt

    sjlt.set_num_threads(workers)  # the workers share them
    sjlt.plan(folder / source, folder / "out", K, nnz=NNZ).run(workers=workers)


@case
def shards_one_process(folder: Path) -> None:
    _plan(folder, "shards", 1)


@case
def shards_two_workers(folder: Path) -> None:
    _plan(folder, "shards", 2)


@case
def shards_quarter(folder: Path) -> None:
    _plan(folder, "shards-quarter", 2)


@case
def small_parts_plan(folder: Path) -> None:
    _plan(folder, "small", 1)


@case
def small_parts_loop(folder: Path) -> None:
    import sjlt

    sjlt.set_num_threads(1)
    S = sjlt.Sketch(D, K, nnz=NNZ)
    (folder / "loop").mkdir()
    for path in (folder / "small").iterdir():
        with open(folder / "loop" / path.name, "wb") as file:
            np.save(file, S.project(np.load(path)))
            file.flush()
            os.fsync(file.fileno())


# ------------------------------------------------------------------------------------- dask


def _reset_peak() -> int:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # reset the peak
    return _peak()


def _peak() -> int:
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("VmHWM")).split()[1]) * 1024


def _dask(folder: Path, project: Callable[[Any], Any], expected: Callable[[np.ndarray], np.ndarray]) -> None:
    """Time the projection of blocks, mapped from .npy files as `dask.array.from_npy_stack` does, and a sum over it.

    Without the sum, sending the result to this process would dominate. Mapped pages count as memory.
    """
    import dask.array as da
    import distributed

    X = da.from_npy_stack(str(folder / "blocks"))
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0", memory_limit=0
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        for worker in client.scheduler_info()["workers"]:  # load the code; dask may otherwise leave a worker idle
            client.compute(project(X[:DASK_ROWS]).sum(), workers=worker).result()
        found = project(X[:DASK_ROWS]).compute()
        np.testing.assert_allclose(found[:100], expected(block(BLOCK)[:100]), rtol=1e-5, atol=1e-5)
        before = client.run(_reset_peak)
        start = time.perf_counter()
        project(X).sum().compute()
        print("seconds", time.perf_counter() - start)
        after = client.run(_peak)
        print("blocks", max(after[worker] - before[worker] for worker in before) / (DASK_ROWS * D * 4))


@case
def dask_sjlt(folder: Path) -> None:
    import sjlt

    S = sjlt.Sketch(D, K, nnz=NNZ)
    _dask(folder, lambda X: X @ S.T, S.project)


@case
def dask_sklearn(folder: Path) -> None:
    from sklearn.random_projection import SparseRandomProjection

    transformer = SparseRandomProjection(K, random_state=0).fit(np.zeros((1, D), np.float32))

    def project(X: Any) -> Any:
        return X.map_blocks(transformer.transform, chunks=(X.chunks[0], (K,)), dtype=np.float32)

    _dask(folder, project, lambda x: x @ transformer.components_.T.toarray())


# ------------------------------------------------------------------------------------- cells, search


@case
def h5ad_sjlt(folder: Path) -> None:
    from sjlt.files.projection import project_file

    project_file(folder / "cells.h5ad", folder / "cells.npy", CELL_COMPONENTS, nnz=NNZ, force=True)


@case
def h5ad_sklearn(folder: Path) -> None:
    """As in scanpy: load the whole matrix into memory, then apply scikit-learn's transformer."""
    import h5py
    import scipy.sparse
    from sklearn.random_projection import SparseRandomProjection

    with h5py.File(folder / "cells.h5ad", "r") as file:
        group = file["X"]
        parts = (group["data"][:], group["indices"][:], group["indptr"][:])
        X = scipy.sparse.csr_matrix(parts, shape=tuple(group.attrs["shape"]))
    Y = SparseRandomProjection(CELL_COMPONENTS, random_state=0, dense_output=True).fit_transform(X)
    np.save(folder / "cells-sklearn.npy", Y)


@case
def quality(folder: Path) -> None:
    from sjlt.evaluation.quality import quality as search
    from sjlt.files.opening import open_source

    with open_source(folder / "quality.npy", print) as source:
        (folder / "quality.txt").write_text(str(search(source)))


# ------------------------------------------------------------------------------------- the run


def check(folder: Path, name: str) -> None:
    """Check the first rows that a case of sjlt has written."""
    import sjlt

    expected = sjlt.Sketch(D, K, nnz=NNZ).project(block(BLOCK)[:100])
    if name.startswith("parquet") and name.endswith("sjlt"):
        import pyarrow.parquet as pq

        rows = next(pq.ParquetFile(folder / "y.parquet").iter_batches(100, columns=["v"])).column(0)
        assert np.array_equal(np.array(rows.flatten()).reshape(100, K), expected), name
    elif name.startswith("shards") or name == "small_parts_plan":
        assert np.array_equal(np.load(folder / "out" / "part-00000.npy", mmap_mode="r")[:100], expected), name
        assert len(sjlt.plans.committed_parts(folder / "out")) in (16, SMALL_PARTS), name
    elif name == "h5ad_sjlt":
        import h5py
        import scipy.sparse

        with h5py.File(folder / "cells.h5ad", "r") as file:
            end = int(file["X/indptr"][100])
            parts = (file["X/data"][:end], file["X/indices"][:end], file["X/indptr"][:101])
            x = scipy.sparse.csr_array(parts, shape=(100, int(file["X"].attrs["shape"][1])))
        y = sjlt.Sketch(x.shape[1], CELL_COMPONENTS, nnz=NNZ).project(x)
        assert np.array_equal(np.load(folder / "cells.npy", mmap_mode="r")[:100], y), name


def run_case(folder: Path, name: str) -> dict[str, float]:
    """Seconds of a case, its peak memory in MB and, for dask, the largest number of blocks held by a worker."""
    command = [sys.executable, "-m", "benchmarks.files", "--case", name, "--directory", str(folder)]
    for result in ("out", "loop"):  # of the previous case
        shutil.rmtree(folder / result, ignore_errors=True)
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    whole = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr}")
    words = done.stdout.split()
    said = {key: float(words[words.index(key) + 1]) for key in ("seconds", "peak_mb", "blocks") if key in words}
    check(folder, name)
    return {"seconds": whole, **said}


def measured(folder: Path, names: tuple[str, ...], repeats: int) -> dict[str, dict[str, float]]:
    """Run the cases in turns; return median seconds and largest peaks."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(repeats):
        for name in names:
            runs[name].append(run_case(folder, name))
    found = {}
    for name, several in runs.items():
        found[name] = {key: max(each[key] for each in several) for key in several[0]}
        found[name]["seconds"] = statistics.median(each["seconds"] for each in several)
        print(f"{name:24}", "  ".join(f"{key} {value:.3g}" for key, value in found[name].items()), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", type=int, default=1_000_000, help="rows per file; results for fewer are printed, not recorded"
    )
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--case", choices=CASES, help="run only this case, in this process")
    arguments = parser.parse_args()
    if arguments.case:
        CASES[arguments.case](arguments.directory)
        peak = max(_peak(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
        print("peak_mb", peak / 1e6)
        return
    from .run import environment, save

    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        folder, found = Path(name), {}
        for source, names, once in GROUPS:
            make_source(folder, source, arguments.rows)
            path = folder / source
            size = sum(each.stat().st_size for each in (path.iterdir() if path.is_dir() else (path,)))
            run_case(folder, (*names, *once)[0])  # compile, and read the file into the page cache
            for name, row in {**measured(folder, names, REPEATS), **measured(folder, once, 1)}.items():
                found[name] = {**row, "source_gb": size / 1e9}
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    if arguments.rows == parser.get_default("rows"):
        save(RESULTS, {"environment": environment(), "cases": found})


if __name__ == "__main__":
    main()
