"""Folders of shards for plans, and the results of plans."""

import hashlib

import numpy as np
import pytest
import scipy.sparse

from sjlt import plans

D, K = 70, 24
ROWS = (40, 0, 31, 5)


def shards(folder, rows=ROWS, dtype="float32", kind="npy", seed=0):
    """Write files 1, 2, 10 and 11 with the given numbers of rows; return the rows in natural order."""
    folder.mkdir(exist_ok=True)
    rng, blocks = np.random.default_rng(seed), []
    for name, n in zip((1, 2, 10, 11), rows, strict=False):
        block = (rng.normal(size=(n, D)) * 50).astype(dtype)
        blocks.append(block)
        path = folder / f"x{name}.{kind}"
        if kind == "npy":
            np.save(path, block)
        elif kind == "npz":
            scipy.sparse.save_npz(path, scipy.sparse.csr_array(block))
        else:
            write_parquet(path, block)
    return np.concatenate(blocks)


def write_parquet(path, block, **columns):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    lists = pa.FixedSizeListArray.from_arrays(pa.array(block.reshape(-1)), D)
    pq.write_table(pa.table({"id": np.arange(len(block)), "v": lists, **columns}), path, row_group_size=9)


def load(path):
    if path.suffix == ".npy":
        return np.load(path)
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    return np.array(table["v"].combine_chunks().flatten()).reshape(len(table), K)


def result(target):
    return np.concatenate([load(path) for path in plans.committed_parts(target)])


def left(folder):
    return sorted(path.name for path in folder.iterdir())


def contents(folder):
    """A digest of each file but the manifest, so that a failed comparison prints names rather than megabytes."""
    files = sorted(path for path in folder.iterdir() if path.name != "_sjlt.json")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
