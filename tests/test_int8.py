"""int8 results (codes and one scale per vector) in .npy and parquet files, tables and folders, read as floats."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.cases import pairwise
from helpers.plans import D, K, shards, write_parquet

import sjlt
from sjlt.files.errors import UserError
from sjlt.files.parquet import project_parquet
from sjlt.files.projection import project_file

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

N = 60


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def vectors():
    """Vectors with lengths from 1e-9 to 1e9, a zero row, and a row with a NaN."""
    x = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32) * np.logspace(-9, 9, N)[:, None].astype("f4")
    x[7], x[8, 3] = 0, np.nan
    return x


def assert_within_half_a_step(found, y):
    fine = np.isfinite(y).all(axis=1)
    assert np.isnan(found[~fine]).all()
    step = np.abs(y[fine]).max(axis=1, keepdims=True) / 127
    assert (np.abs(found[fine] - y[fine]) <= 0.501 * step).all()


@pairwise(rows=[7, 60], normalize=[False, True], kind=["npy", "parquet"])
def test_files_are_read_as_floats(rows, normalize, kind):
    x, out = vectors(), Path(f"y.{kind}")
    y = sjlt.Sketch(D, K).project(x)
    if normalize:
        y /= np.maximum(np.linalg.norm(y.astype(np.float64), axis=1, keepdims=True), 1e-300)
    if kind == "npy":
        np.save("x.npy", x)
        project_file(Path("x.npy"), out, K, dtype="int8", batch_rows=rows, normalize=normalize)
    else:
        write_parquet(Path("x.parquet"), x, text=[str(i) for i in range(N)])
        project_parquet(Path("x.parquet"), out, K, dtype="int8", batch_rows=rows, normalize=normalize)
    found = sjlt.load_int8(out)
    assert found.dtype == np.float32
    assert_within_half_a_step(found, y)
    for a, b in ((10, 20), (-3, None), (50, 99), (20, 10)):
        np.testing.assert_array_equal(sjlt.load_int8(str(out), a, b), found[a:b])


def test_columns_of_a_parquet_file():
    x = vectors()
    write_parquet(Path("x.parquet"), x, text=[str(i) for i in range(N)])
    project_parquet(Path("x.parquet"), Path("y.parquet"), K, dtype="int8", output_column="w")
    table = pq.read_table("y.parquet")
    assert table.column_names == ["id", "v", "text", "w", "w_scale"]
    assert table.schema.field("w").type == pa.list_(pa.int8(), K)
    assert table.schema.field("w_scale").type == pa.float32()
    described = json.loads(table.schema.metadata[b"sjlt"])["result"]
    assert (described["dtype"], described["scale"]) == ("int8", "one float32 per vector, in the column w_scale")
    for path in ("w", "w_scale"):
        place = table.column_names.index(path)
        column = pq.read_metadata("y.parquet").row_group(0).column(place)
        assert column.path_in_schema.split(".")[0] == path
        assert column.compression == "UNCOMPRESSED"
        assert not column.has_dictionary_page
    project_parquet(Path("x.parquet"), Path("z.parquet"), K, dtype="int8")
    assert pq.read_schema("z.parquet").names == ["id", "v", "v_scale", "text"]
    np.testing.assert_array_equal(sjlt.load_int8("z.parquet"), sjlt.load_int8("y.parquet", column="w"))


def test_cosine_similarities_without_scales():
    x = np.random.default_rng(1).normal(size=(N, D)).astype(np.float32)
    np.save("x.npy", x)
    project_file(Path("x.npy"), Path("y.npy"), K, dtype="int8")
    codes = np.load("y.npy", mmap_mode="r")["codes"].astype(np.float64)
    found = sjlt.load_int8("y.npy").astype(np.float64)
    unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (codes, found)]
    np.testing.assert_allclose(unit[0] @ unit[0].T, unit[1] @ unit[1].T, atol=1e-6)
    assert Path("y.npy").stat().st_size <= N * (K + 4) + 256


@pytest.mark.parametrize("list_type", ["fixed", "list"])
def test_tables(list_type):
    x = vectors()
    lists = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), D)
    table = pa.concat_tables(
        [pa.table({"v": lists[:13], "id": range(13)}), pa.table({"v": lists[13:], "id": range(47)})]
    )
    P = sjlt.arrow.Projector("v", K, dtype="int8", list_type=list_type)
    projected = P(table)
    assert projected.column_names == ["v", "v_scale", "id"]
    assert projected.schema == P.schema(table.schema)
    assert projected["v"].num_chunks == projected["v_scale"].num_chunks == 2
    codes = np.array([row.as_py() for row in projected["v"]])
    scale = projected["v_scale"].to_numpy()[:, None]
    assert_within_half_a_step(codes * scale, sjlt.Sketch(D, K).project(x))
    assert P(table.slice(0, 0)).schema == projected.schema
    with pytest.raises(ValueError, match="there is a column 'v_scale' already"):
        P(table.append_column("v_scale", pa.array(range(N))))


@pytest.mark.parametrize("kind", ["npy", "parquet"])
def test_folders(kind):
    x = shards(Path("in"), kind=kind)
    plan = sjlt.plan("in", "out", K, dtype="int8", part_rows=9)
    assert plan.record["result"]["scale"].startswith("one float32 per vector, in the ")
    plan.run_part(3)
    with pytest.raises(UserError, match="not committed"):
        sjlt.load_int8("out")
    plan.run(workers=1)
    found = sjlt.load_int8("out")
    assert_within_half_a_step(found, sjlt.Sketch(D, K).project(x))
    np.testing.assert_array_equal(sjlt.load_int8("out", 35, 50), found[35:50])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY",
        np.zeros(3, [("codes", "i1"), ("scale", "f4")]),
        np.zeros(3, [("codes", "f8", 4), ("scale", "f4")]),
        np.zeros(3, [("codes", "i1", 4), ("scale", "U3")]),
        np.zeros((), [("codes", "i1", 4), ("scale", "f4")]),
        np.zeros((2, 3), [("codes", "i1", 4), ("scale", "f4")]),
        np.zeros(3, [("codes", "i1", (4, 2)), ("scale", "f4")]),
    ],
)
def test_damaged_npy_files_are_refused(content):
    if isinstance(content, bytes):
        Path("bad.npy").write_bytes(content)
    else:
        np.save("bad.npy", content)
    with pytest.raises(ValueError, match=r"bad.npy: (not a readable|holds)") as refused:
        sjlt.load_int8("bad.npy")
    assert "allow_pickle" not in str(refused.value)


def test_other_contents_are_refused():
    np.save("float.npy", np.ones((2, 3)))
    with pytest.raises(ValueError, match=r"float.npy: holds float64, not int8 codes with a scale"):
        sjlt.load_int8("float.npy")
    with pytest.raises(ValueError, match=r"float.npy: not a parquet file: it has no column 'v'"):
        sjlt.load_int8("float.npy", column="v")
    write_parquet(Path("x.parquet"), vectors())
    with pytest.raises(ValueError, match=r"x.parquet: int8 columns with a scale: none"):
        sjlt.load_int8("x.parquet")
    codes, scale = pa.array([[1, 2]], pa.list_(pa.int8(), 2)), pa.array([0.5], pa.float32())
    pq.write_table(pa.table({"a": codes, "a_scale": scale, "b": codes, "b_scale": scale}), "two.parquet")
    with pytest.raises(ValueError, match="name one column; int8 columns with a scale: a, b"):
        sjlt.load_int8("two.parquet")
    with pytest.raises(ValueError, match="'c' is not a column of int8 codes; int8 columns with a scale: a, b"):
        sjlt.load_int8("two.parquet", column="c")
    np.testing.assert_array_equal(sjlt.load_int8("two.parquet", column="b"), [[0.5, 1]])
    with pytest.raises(FileNotFoundError):
        sjlt.load_int8("missing.npy")
