"""The files that `benchmarks.files` reads."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np

from .cases import SEED

D = 768
SHARDS, SMALL_PARTS, SMALL_ROWS = 16, 1000, 300
BLOCK = 10_000  # rows; every file repeats them
CELLS, GENES, DENSITY = 200_000, 20_000, 0.05
QUALITY_ROWS = 500_000
DASK_ROWS = 20_833  # rows in a block of 64 MB


def block(rows: int) -> np.ndarray:
    """Normal fp32 data."""
    return np.random.default_rng(SEED).standard_normal((rows, D), np.float32)


def make_source(folder: Path, name: str, rows: int) -> None:
    """Write one source with `rows` vectors, unless its kind has a fixed size.

    Parameters
    ----------
    folder : Path
    name : str
        ``fixed.parquet`` and ``list.parquet`` hold `rows` vectors, ``fixed-quarter.parquet`` a quarter of them;
        ``shards`` is a folder of 16 .npy files with four times as many, ``shards-quarter`` one with a quarter of
    these;
        ``blocks`` is a folder as written by `dask.array.to_npy_stack`, ``small`` one of many small files;
    ``cells.h5ad``
        is CSR; ``quality.npy`` is for search.
    rows : int
    """
    x, path = block(BLOCK), folder / name
    if name.endswith(".parquet"):
        write_parquet(path, x, rows // 4 if "quarter" in name else rows, path.stem.removesuffix("-quarter"))
    elif name in ("shards", "shards-quarter"):
        path.mkdir()
        for i in range(SHARDS):
            write_npy(path / f"{i}.npy", x, 4 * rows // SHARDS // (4 if "quarter" in name else 1))
    elif name == "blocks":
        write_blocks(path, x, rows)
    elif name == "small":
        path.mkdir()
        for i in range(SMALL_PARTS):
            np.save(path / f"{i}.npy", x[:SMALL_ROWS])
    elif name == "cells.h5ad":
        write_h5ad(path, min(CELLS, rows))
    else:
        write_npy(path, x, min(QUALITY_ROWS, rows))


def write_blocks(folder: Path, x: np.ndarray, rows: int) -> None:
    """Blocks of 64 MB that `dask.array.from_npy_stack` maps into memory."""
    folder.mkdir()
    sizes = [min(DASK_ROWS, rows - start) for start in range(0, rows, DASK_ROWS)]
    for i, size in enumerate(sizes):
        write_npy(folder / f"{i}.npy", x, size)
    with open(folder / "info", "wb") as file:
        pickle.dump({"chunks": (tuple(sizes), (D,)), "dtype": x.dtype, "axis": 0}, file)


def write_npy(path: Path, x: np.ndarray, rows: int) -> None:
    with open(path, "wb") as file:
        header = {"descr": x.dtype.str, "fortran_order": False, "shape": (rows, x.shape[1])}
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, rows, len(x)):
            file.write(x[: rows - start].data)


def write_parquet(path: Path, x: np.ndarray, rows: int, kind: str) -> None:
    """Plain, uncompressed row groups of 100,000 rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    values = pa.array(x.reshape(-1))
    if kind == "fixed":
        column = pa.FixedSizeListArray.from_arrays(values, x.shape[1])
    else:
        offsets = np.arange(len(x) + 1, dtype=np.int32) * x.shape[1]
        column = pa.ListArray.from_arrays(pa.array(offsets), values)
    table = pa.table({"id": np.arange(len(x)), "v": column})
    with pq.ParquetWriter(path, table.schema, use_dictionary=False, compression="none") as writer:
        for start in range(0, rows, 100_000):
            times = min(100_000, rows - start) // len(x)
            writer.write_table(pa.concat_tables([table] * times), row_group_size=100_000)


def write_h5ad(path: Path, rows: int) -> None:
    """CSR rows as AnnData writes them: float32 values, int32 indices, int64 pointers, contiguous."""
    import h5py

    rng, some = np.random.default_rng(SEED), 2000
    per_row = int(GENES * DENSITY)
    indices = np.argpartition(rng.random((some, GENES), np.float32), per_row, axis=1)[:, :per_row]
    indices = np.sort(indices, axis=1).astype(np.int32).reshape(-1)
    data = rng.gamma(1, size=indices.size).astype(np.float32)
    with h5py.File(path, "w") as file:
        group = file.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": (rows, GENES)})
        group["indptr"] = np.arange(rows + 1) * per_row
        for name, numbers in (("data", data), ("indices", indices)):
            stored = group.create_dataset(name, (rows * per_row,), numbers.dtype)
            for start in range(0, rows * per_row, numbers.size):
                stored[start : start + numbers.size] = numbers[: rows * per_row - start]
