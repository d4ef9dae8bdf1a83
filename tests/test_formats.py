"""File formats: the same rows from every format, in any ranges, and clear refusals."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
from helpers.cases import exhaustive_except, pairwise

import sjlt
from sjlt.files.encoding import to_unit_length
from sjlt.files.errors import UserError
from sjlt.files.opening import open_source
from sjlt.files.projection import project_file

h5py = pytest.importorskip("h5py")

N, D, K = 60, 20, 8


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def integers(dtype):
    return np.random.default_rng(0).integers(0, 2 if dtype == "?" else 9, (N, D)).astype(dtype)


def save_binary(name, x):
    Path(name).write_bytes(struct.pack("<II", *x.shape) + x.tobytes())


def save_hdf5(name, key="X", **options):
    def save(x):
        with h5py.File(name, "w") as file:
            file.create_dataset(key, data=x, **options)
            file["obs/n"] = np.arange(len(x))

    return save


def save_h5ad(x, dense=False):
    with h5py.File("x.h5ad", "w") as file:
        sparse = scipy.sparse.csr_matrix(x)
        group = file.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "shape": x.shape})
        for part in ("data", "indices", "indptr"):
            group[part] = getattr(sparse, part)
        file["layers/counts"] = x


def save_safetensors(x):
    from safetensors.numpy import save_file

    save_file({"vectors": x, "norms": np.ones(N, np.float32)}, "x.safetensors")


FORMATS = {
    ".fbin": ("x.fbin", "f4", lambda x: save_binary("x.fbin", x)),
    ".f16bin": ("x.f16bin", "f2", lambda x: save_binary("x.f16bin", x)),
    ".i8bin": ("x.i8bin", "i1", lambda x: save_binary("x.i8bin", x)),
    ".u8bin": ("x.U8BIN", "u1", lambda x: save_binary("x.U8BIN", x)),
    "HDF5": ("x.h5", "f4", save_hdf5("x.h5")),
    "HDF5, compressed chunks": ("x.h5", "f8", save_hdf5("x.h5", "a/b", chunks=(7, 5), compression="gzip")),
    "HDF5 of integers": ("x.hdf5", "i2", save_hdf5("x.hdf5")),
    ".h5ad, CSR": ("x.h5ad", "f4", save_h5ad),
}


@pairwise(case=list(FORMATS), rows=[7, pytest.param(1, marks=pytest.mark.exhaustive), None])
def test_formats_equal_arrays_bitwise(case, rows):
    name, dtype, save = FORMATS[case]
    x = integers(dtype)
    save(x)
    project_file(Path(name), Path("y.npy"), K, batch_rows=rows)
    project_file(np_file(x), Path("z.npy"), K)
    assert Path("y.npy").read_bytes() == Path("z.npy").read_bytes()
    with open_source(Path(name), print) as source:
        assert source.shape == (N, D)
        part = source.read(13, 29)
        np.testing.assert_array_equal(part.toarray() if scipy.sparse.issparse(part) else part, x[13:29])


def np_file(x):
    np.save("x.npy", x)
    return Path("x.npy")


@pytest.mark.parametrize(
    "dtype", exhaustive_except(["f2", "f4", "f8", "i1"], ["f2", "f4", "f8", "i1", "u1", "i8", "?"])
)
def test_safetensors(dtype):
    pytest.importorskip("safetensors")
    x = integers(dtype)
    save_safetensors(x)
    project_file(Path("x.safetensors"), Path("y.npy"), K)
    project_file(np_file(x), Path("z.npy"), K)
    assert Path("y.npy").read_bytes() == Path("z.npy").read_bytes()
    assert json.loads(Path("y.npy.json").read_bytes())["source"]["column"] == "vectors"


def test_dataset_selected_by_name():
    save_h5ad(integers("f4"))
    with open_source(Path("x.h5ad"), print, "layers/counts") as source:
        np.testing.assert_array_equal(source.read(0, N), integers("f4"))
        assert source.description()["column"] == "layers/counts"
    Path("x.h5ad").rename("x.h5")
    with pytest.raises(UserError, match=r"several datasets with 2 dimensions; name one with --column: X, layers/co"):
        open_source(Path("x.h5"), print)
    with pytest.raises(UserError, match=r"has no dataset 'Y'; it has X, layers/counts"):
        open_source(Path("x.h5"), print, "Y")


def safetensors_of(header, size=100):
    content = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return len(content).to_bytes(8, "little") + content + bytes(size)


def tensor(shape, dtype="F32", offsets=(0, 80)):
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


REFUSED = {
    "fbin without a header": ("x.fbin", b"1234567", "truncated: a .fbin file has a header of 8 bytes, this one has 7"),
    "fbin too short": ("x.fbin", struct.pack("<II", 3, 4) + bytes(47), "needs 48 bytes, the file has 47"),
    "fbin too long": (
        "x.fbin",
        struct.pack("<II", 3, 4) + bytes(49),
        "3 x 4 of float32 needs 56 bytes, the file has 57",
    ),
    "text": ("x.csv", b"0.1,0.2\n", "cannot read text: convert it once with numpy.save(OUT, numpy.loadtxt(IN, ...))"),
    "HDF5 cut": ("x.h5", b"\x89HDF\r\n\x1a\n" + bytes(50), "not a readable HDF5 file"),
    "safetensors: no header": ("x.safetensors", bytes(8), "a header of 0 bytes"),
    "safetensors: a long header": ("x.safetensors", b"\xff" * 8 + b"{}", "a header of"),
    "safetensors: no JSON": ("x.safetensors", safetensors_of(b"{a}"), "not a readable .safetensors file"),
    "safetensors: a list": (
        "x.safetensors",
        safetensors_of([1]),
        "not a readable .safetensors file: the header is not an object",
    ),
    "safetensors: nested": ("x.safetensors", safetensors_of(b"[" * 10**6), "not a readable .safetensors file"),
    "safetensors: a vector": (
        "x.safetensors",
        safetensors_of(tensor([20])),
        "has no tensor with 2 dimensions; it has a",
    ),
    "safetensors: bfloat16": ("x.safetensors", safetensors_of(tensor([4, 5], "BF16")), "'a' holds BF16: needs one of"),
    "safetensors: other size": ("x.safetensors", safetensors_of(tensor([4, 6])), "80 bytes for (4, 6) of float32"),
    "safetensors: negative": ("x.safetensors", safetensors_of(tensor([-4, -5])), "shape (-4, -5) at 0:80"),
    "safetensors: cut": ("x.safetensors", safetensors_of(tensor([4, 5]), 79), "needs 80 bytes, the file has 79"),
    "safetensors: no dtype": ("x.safetensors", safetensors_of({"a": {"shape": [4, 5]}}), "not a readable"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    name, content, message = REFUSED[case]
    Path(name).write_bytes(content)
    with pytest.raises(UserError) as refused:
        open_source(Path(name), print)
    assert str(refused.value).startswith(f"{name}: ")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_csc_matrices_are_refused_by_name():
    save_h5ad(integers("f4"))
    with h5py.File("x.h5ad", "r+") as file:
        file["X"].attrs["encoding-type"] = "csc_matrix"
        file.copy("X", "layers/spliced")
    with pytest.raises(UserError) as refused:
        open_source(Path("x.h5ad"), print)
    assert str(refused.value) == "x.h5ad: X is a CSC matrix: store it as CSR (adata.X = adata.X.tocsr())"
    with pytest.raises(UserError, match=r"layers/spliced is a CSC matrix: store it as CSR \(\.tocsr\(\)\)$"):
        open_source(Path("x.h5ad"), print, "layers/spliced")


def test_strings_are_refused_as_strings():
    with h5py.File("x.h5", "w") as file:
        file["names"] = [["a", "b"]]
        file.create_dataset("ragged", (1, 2), h5py.vlen_dtype(np.float32))
    with pytest.raises(UserError, match=r"^x\.h5: names holds strings \(dtype object\); needs a numeric matrix$"):
        open_source(Path("x.h5"), print, "names")
    with pytest.raises(UserError, match=r"^x\.h5: ragged holds objects \(dtype object\)"):
        open_source(Path("x.h5"), print, "ragged")


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        ("indptr", [0, 1, 1, 5], "indptr ends at 5, but only 3 entries"),
        ("indptr", [0, 2, 1, 3], "nondecreasing integers from 0"),
        ("indptr", [0, 3], "must be 4 nondecreasing"),
        ("indices", [0.0, 1, 2], "indices must be integers, got float64"),
        ("indices", [0, 1, 99], "X cannot be read"),
        ("data", np.ones(3, np.float16), "sparse float16 is refused"),
        ("data", np.ones(3, complex), "dtype complex128 is refused"),
        ("data", np.ones((3, 1)), "malformed CSR: data must be a 1-D array"),
        ("indices", 1, "malformed CSR: indices must be a 1-D array"),
        ("data/inner", np.ones(3), "malformed CSR: data must be a 1-D array"),
        ("data", ["a", "b", "c"], r"X holds strings \(dtype object\)"),
        ("shape", [np.inf, 4], "not a readable HDF5 file: cannot convert float infinity"),
        ("shape", None, "malformed CSR: it has no attribute 'shape'"),
    ],
)
def test_malformed_csr(part, values, message):
    parts = {"data": np.ones(3), "indices": [0, 1, 2], "indptr": [0, 1, 2, 3], part: values}
    if part == "data/inner":
        del parts["data"]
    with h5py.File("x.h5ad", "w") as file:
        group = file.create_group("X")
        group.attrs["encoding-type"] = "csr_matrix"
        if (shape := parts.pop("shape", (3, 4))) is not None:
            group.attrs["shape"] = shape
        for name, content in parts.items():
            group[name] = content
    with pytest.raises(UserError, match=f"^x.h5ad: .*{message}"):
        project_file(Path("x.h5ad"), Path("y.npy"), 2)
    assert not list(Path().glob("y.npy*"))


def test_missing_h5py_names_the_extra(monkeypatch):
    save_hdf5("x.h5")(integers("f4"))
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(UserError, match=r"^x.h5: HDF5 files need h5py: pip install 'sjlt-triton\[hdf5\]'$"):
        open_source(Path("x.h5"), print)


def test_normalized_results():
    x = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32) * np.logspace(-9, 9, N)[:, None].astype("f4")
    x[7], x[8, 3] = 0, np.nan
    np.save("x.npy", x)
    y = sjlt.Sketch(D, K).project(x)
    project_file(Path("x.npy"), Path("unit.npy"), K, normalize=True)
    fine = np.arange(N) != 8
    lengths = np.linalg.norm(np.load("unit.npy")[fine], axis=1)
    np.testing.assert_allclose(lengths, np.where(np.any(y[fine], axis=1), 1, 0), rtol=1e-6)


@pytest.mark.parametrize("scale", [1e39, 1e-46, 1e-300])
def test_normalized_results_of_vectors_beyond_the_stored_dtype(scale):
    x = np.random.default_rng(0).normal(size=(N, D))
    np.save("x.npy", x * scale)
    project_file(Path("x.npy"), Path("unit.npy"), K, dtype="float32", normalize=True)
    y = sjlt.Sketch(D, K).project(x)
    np.testing.assert_allclose(np.load("unit.npy"), y / np.linalg.norm(y, axis=1, keepdims=True), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_have_no_direction(value):
    x = np.ones((3, 50), np.float32)
    x[1, 5] = value
    y = sjlt.Sketch(50, 8, seed=1).project(x)
    assert np.isfinite(y[1]).any()
    to_unit_length(y)
    assert np.isnan(y[1]).all()
    np.testing.assert_allclose(np.linalg.norm(y[[0, 2]], axis=1), 1, rtol=1e-6)
