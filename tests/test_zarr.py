"""Zarr stores: the same rows for any format, chunks and compression; CSR matrices; folders of stores; refusals."""

import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
from helpers.cases import pairwise
from helpers.cli import run as run

import sjlt
from sjlt.files.errors import UserError
from sjlt.files.opening import open_source
from sjlt.files.projection import default_batch_rows, project_file

zarr = pytest.importorskip("zarr")

N, D, K = 60, 20, 8


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def integers(dtype="f4"):
    return np.random.default_rng(0).integers(0, 9, (N, D)).astype(dtype)


def save(x, name="x.zarr", **options):
    array = zarr.create_array(name, shape=x.shape, dtype=x.dtype, overwrite=True, **options)
    array[...] = x


def save_csr(x, name="x.zarr", **parts):
    """A store as written by AnnData: X in CSR, a dense layer, a column of obs."""
    root = zarr.create_group(name, overwrite=True, attributes={"encoding-type": "anndata"})
    group = root.create_group("X", attributes={"encoding-type": "csr_matrix", "shape": list(x.shape)})
    sparse = scipy.sparse.csr_matrix(x)
    for part in ("data", "indices", "indptr"):
        group.create_array(part, data=np.asarray(parts.get(part, getattr(sparse, part))), chunks=(50,))
    root.create_group("layers").create_array("counts", data=x)
    root.create_group("obs").create_array("n", data=np.arange(len(x)))


@pairwise(
    dtype=["f2", "f4", "f8", "i2", "i1"],
    chunks=[(7, 5), (60, 20), (1, 20), (100, 3)],
    zarr_format=[2, 3],
    rows=[1, 7, None],
)
def test_arrays_equal_npy_files(dtype, chunks, zarr_format, rows):
    x = integers(dtype)
    save(x, chunks=chunks, zarr_format=zarr_format)
    np.save("x.npy", x)
    project_file(Path("x.zarr"), Path("y.npy"), K, batch_rows=rows)
    project_file(Path("x.npy"), Path("z.npy"), K)
    assert Path("y.npy").read_bytes() == Path("z.npy").read_bytes()
    with open_source(Path("x.zarr"), print) as source:
        np.testing.assert_array_equal(source.read(13, 29), x[13:29])


def test_shards_and_fill_values():
    x = integers()
    x[20:40] = 0  # chunks that are not written
    save(x, chunks=(10, 20), shards=(20, 20), compressors=None)
    with open_source(Path("x.zarr"), print) as source:
        np.testing.assert_array_equal(np.concatenate([batch.copy() for batch in source.batches(0, 13)]), x)


def test_batches_are_whole_chunks():
    """A batch ending inside a chunk would decode it twice."""
    from sjlt.files.encoding import Encoding

    save(np.zeros((10_000, D), np.float32), chunks=(3000, D))
    with open_source(Path("x.zarr"), print) as source:
        rows = default_batch_rows(source, Encoding.of(source.dtype, K, None, False), False)
        assert source.chunk_rows == 3000
        assert rows % 3000 == 0
        assert (rows - 3000) * D * 4 < 16 << 20 <= rows * D * 4


def test_csr_matrices_and_names():
    x = integers()
    save_csr(x)
    project_file(Path("x.zarr"), Path("y.npy"), K, batch_rows=7)
    np.testing.assert_array_equal(np.load("y.npy"), sjlt.Sketch(D, K).project(scipy.sparse.csr_array(x)))
    with open_source(Path("x.zarr"), print, "layers/counts") as source:
        np.testing.assert_array_equal(source.read(0, N), x)
        assert source.description()["column"] == "layers/counts"
    with pytest.raises(UserError, match=r"has no array 'Y'; it has X, layers/counts, obs/n"):
        open_source(Path("x.zarr"), print, "Y")
    zarr.open_group("x.zarr", mode="r+").attrs["encoding-type"] = "other"
    with pytest.raises(UserError, match=r"several arrays with 2 dimensions; name one with --column: X, layers/counts"):
        open_source(Path("x.zarr"), print)


def test_folder_of_stores_and_command_line(run):
    x = integers()
    Path("in").mkdir()
    for i, (a, b) in enumerate([(0, 20), (20, 50), (50, N)]):
        save(x[a:b], f"in/{i}.zarr", chunks=(8, D))
    assert run("project", "in", "out", "-k", K, "--part-rows", 11).code == 0
    found = [np.load(path) for path in sjlt.plans.committed_parts("out")]
    np.testing.assert_array_equal(np.concatenate(found), sjlt.Sketch(D, K).project(x))
    assert run("project", "in/1.zarr", "y.npy", "-k", K).code == 0
    np.testing.assert_array_equal(np.load("y.npy"), sjlt.Sketch(D, K).project(x[20:50]))
    assert "30 x 20 float32" in run("info", "y.npy").out
    assert run("project", "in/*.zarr", "glob", "-k", K).code == 0
    assert len(sjlt.plans.committed_parts("glob")) == 3


def test_changed_store_is_detected():
    x = integers()
    save(x, chunks=(10, D))

    def change(rows, of):
        if rows == 20:
            zarr.open("x.zarr", mode="r+")[55, 3] = 99

    with pytest.raises(UserError, match=r"^x.zarr: changed while it was read: source\."):
        project_file(Path("x.zarr"), Path("y.npy"), K, batch_rows=20, progress=change)
    assert not list(Path().glob("y.npy*"))


def damaged_chunk():
    save(integers(), chunks=(10, D))
    Path("x.zarr/c/3/0").write_bytes(b"not zstd")


def damaged_metadata():
    save(integers())
    Path("x.zarr/zarr.json").write_text('{"zarr_format": 3}')


def csc():
    save_csr(integers())
    zarr.open("x.zarr", mode="r+")["X"].attrs["encoding-type"] = "csc_matrix"


def csr_without_a_shape():
    save_csr(integers())
    del zarr.open("x.zarr", mode="r+")["X"].attrs["shape"]


REFUSED = {
    "CSC": (csc, r"X is a CSC matrix: store it as CSR \(adata\.X = adata\.X\.tocsr\(\)\)$"),
    "CSR without a shape": (csr_without_a_shape, "malformed CSR: it has no attribute 'shape'$"),
    "chunk": (damaged_chunk, "the array cannot be read"),
    "metadata": (damaged_metadata, "not a readable zarr store"),
    "vector": (lambda: save(np.zeros(5)), r"holds an array of shape \(5,\); needs 2 dimensions"),
    "complex": (lambda: save(np.zeros((2, 3), complex)), "dtype complex128 is refused"),
    "empty group": (lambda: zarr.create_group("x.zarr"), "has no array with 2 dimensions; it has nothing"),
    "pointers": (lambda: save_csr(integers(), indptr=np.arange(3)), "indptr must be 61 nondecreasing"),
    "indices": (lambda: save_csr(integers(), indices=np.full(2000, 99)), "X cannot be read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    make, message = REFUSED[case]
    make()
    with pytest.raises(UserError, match=message) as caught:
        project_file(Path("x.zarr"), Path("y.npy"), 2)
    assert str(caught.value).startswith("x.zarr: ")
    assert "\n" not in str(caught.value)
    assert not Path("y.npy").exists()


def test_name_in_a_single_array_store():
    save(integers())
    with pytest.raises(UserError, match="is a single array: it has no array 'X'"):
        open_source(Path("x.zarr"), print, "X")


def test_missing_zarr_names_the_extra(monkeypatch):
    save(integers())
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(UserError, match=r"^x.zarr: zarr stores need zarr: pip install 'sjlt-triton\[zarr\]'$"):
        open_source(Path("x.zarr"), print)
