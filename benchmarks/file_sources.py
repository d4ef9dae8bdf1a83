"""The files that `benchmarks.files` reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .cases import SEED

D = 768
SHARDS, SMALL_PARTS, SMALL_ROWS = 16, 1000, 300
BLOCK = 10_000  # rows that every file repeats
CELLS, GENES, DENSITY = 200_000, 20_000, 0.05
QUALITY_ROWS = 500_000


def block(rows: int) -> np.ndarray:
    """Normals, fp32."""
    return np.random.default_rng(SEED).standard_normal((rows, D), np.float32)


def make_sources(folder: Path, rows: int) -> None:
    """Write all sources.

    ``fixed.parquet`` and ``list.parquet`` have `rows` vectors, and so have the .npy files in ``shards`` together;
    ``fixed-quarter.parquet`` and ``shards-quarter`` have a quarter of them. ``small`` is a folder of many small files,
    ``cells.h5ad`` is CSR, ``quality.npy`` is for search.
    """
    x = block(BLOCK)
    for kind in ("fixed", "list"):
        write_parquet(folder / f"{kind}.parquet", x, rows, kind)
    write_parquet(folder / "fixed-quarter.parquet", x, rows // 4, "fixed")
    for name, size in (("shards", rows // SHARDS), ("shards-quarter", rows // SHARDS // 4)):
        (folder / name).mkdir()
        for i in range(SHARDS):
            write_npy(folder / name / f"{i}.npy", x, size)
    (folder / "small").mkdir()
    for i in range(SMALL_PARTS):
        np.save(folder / "small" / f"{i}.npy", x[:SMALL_ROWS])
    write_npy(folder / "quality.npy", x, min(QUALITY_ROWS, rows))
    write_h5ad(folder / "cells.h5ad", min(CELLS, rows))


def write_npy(path: Path, x: np.ndarray, rows: int) -> None:
    with open(path, "wb") as file:
        header = {"descr": x.dtype.str, "fortran_order": False, "shape": (rows, x.shape[1])}
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, rows, len(x)):
            file.write(x[: rows - start].data)


def write_parquet(path: Path, x: np.ndarray, rows: int, kind: str) -> None:
    """Row groups of 100,000, plain, not compressed."""
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
    """CSR rows as AnnData writes them: float32 numbers, int32 indices, int64 pointers, contiguous."""
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
