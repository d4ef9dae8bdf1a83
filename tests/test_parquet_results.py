"""Parquet files: result names and formats, their descriptions, and difficult columns."""

import json
import os

import numpy as np
import pytest
from helpers.cases import exhaustive_except
from helpers.cli import run as run
from test_arrow import D, K, N, as_lists, matrix_of, table_of, vectors
from test_arrow_parquet import files_in
from test_arrow_parquet import source as source

import sjlt
from sjlt.files import parquet as files
from sjlt.files.errors import UserError
from sjlt.files.projection import project_file

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def test_existing_names(tmp_path, source):
    out = tmp_path / "y.parquet"
    files.project_parquet(source, out, K)
    with pytest.raises(UserError, match="exists"):
        files.project_parquet(source, out, K, seed=1)
    files.project_parquet(source, out, K, seed=1, force=True)
    assert np.array_equal(matrix_of(pq.read_table(out)["v"]), sjlt.Sketch(D, K, seed=1).project(vectors()))
    with pytest.raises(UserError, match="is the source"):
        files.project_parquet(source, source, K, force=True)
    with pytest.raises(UserError, match="not a regular file"):
        files.project_parquet(source, tmp_path, K, force=True)
    with pytest.raises(UserError, match="no such directory"):
        files.project_parquet(source, tmp_path / "no" / "y.parquet", K)
    with pytest.raises(UserError, match=r"y\.csv: cannot write \.csv files; name the result \.parquet"):
        files.project_parquet(source, tmp_path / "y.csv", K)
    with pytest.raises(FileNotFoundError):
        files.project_parquet(tmp_path / "no.parquet", tmp_path / "z.parquet", K)


def test_suffix_determines_the_format(tmp_path, source, run):
    expected = sjlt.Sketch(D, K).project(vectors())
    for name in ("y.npy", "y.NPY"):
        assert run("project", source, tmp_path / name, "-k", K).code == 0
        assert np.array_equal(np.load(tmp_path / name), expected)
    for name in ("y.parquet", "y.PARQUET", "y.pq", "y", "y.v2"):
        assert run("project", source, tmp_path / name, "-k", K).code == 0
        assert np.array_equal(matrix_of(pq.read_table(tmp_path / name)["v"]), expected)
    before = files_in(tmp_path)
    for suffix in (".fbin", ".Safetensors", ".csv"):
        refused = run("project", source, tmp_path / f"z{suffix}", "-k", K)
        assert refused.code == 2
        assert f"cannot write {suffix} files; name the result .parquet or .npy" in refused.err
        with pytest.raises(UserError, match=r"name the result \.parquet$"):
            files.project_parquet(source, tmp_path / f"z{suffix}", K)
    with pytest.raises(UserError, match="the result is a parquet file"):
        files.project_parquet(source, tmp_path / "z.npy", K)
    assert files_in(tmp_path) == before


def test_result_that_appears_during_the_run_is_kept(tmp_path, source):
    """As if another run had created it."""
    out = tmp_path / "y.parquet"

    def appear(rows, of):
        out.write_bytes(b"precious")

    with pytest.raises(UserError, match=r"y\.parquet: appeared during this run and is kept"):
        files.project_parquet(source, out, K, progress=appear)
    assert out.read_bytes() == b"precious"
    assert files_in(tmp_path) == ["x.parquet", "y.parquet"]
    files.project_parquet(source, out, K, progress=appear, force=True)
    assert np.array_equal(matrix_of(pq.read_table(out)["v"]), sjlt.Sketch(D, K).project(vectors()))


def test_different_result_is_reported(tmp_path, source):
    out = tmp_path / "y.parquet"
    files.project_parquet(source, out, K, seed=1)
    notes = []
    files.project_parquet(source, out, K, seed=1, resume=True, note=notes.append)
    assert notes == [f"{out}: complete already, from the same source and parameters"]
    with pytest.raises(UserError, match=r"not this result: sketch\.seed is 2, was 1 \(--force replaces it\)$"):
        files.project_parquet(source, out, K, seed=2, resume=True)
    pq.write_table(pa.table({"a": [1]}), out)
    with pytest.raises(UserError, match=r"not this result: it has no description \("):
        files.project_parquet(source, out, K, seed=1, resume=True)


FOREIGN = {
    "not json": "the metadata 'sjlt': not JSON",
    "not UTF-8": "the metadata 'sjlt': not JSON",
    "[1]": "not a description of a projected file: the description must be an object",
    '{"result": {}}': "not a description of a projected file: the description has no 'sjlt'",
    "no column": "result has no 'column'",
    "rows": "does not map",
}


@pytest.mark.parametrize("content", FOREIGN)
def test_invalid_description_in_metadata(tmp_path, source, run, content):
    out = tmp_path / "y.parquet"
    files.project_parquet(source, out, K)
    table = pq.read_table(out)
    described = json.loads(table.schema.metadata[b"sjlt"])
    if content == "no column":
        del described["result"]["column"]
    elif content == "rows":
        described["result"]["shape"] = [N + 1, K]
    changes = {"no column": json.dumps(described), "rows": json.dumps(described), "not UTF-8": b"\xff"}
    changed = changes.get(content, content)
    pq.write_table(table.replace_schema_metadata({"sjlt": changed}), out)
    for shown in (run("info", out), run("project", source, out, "-k", K, "--resume")):
        assert shown.code == 2
        assert shown.err.startswith("Error: ")
        assert FOREIGN[content] in shown.err
        assert shown.err.count("\n") == 1


def test_names_that_are_not_utf_8(tmp_path, source, run):
    strange, out = tmp_path / os.fsdecode(b"x\xff.parquet"), tmp_path / os.fsdecode(b"y\xfe.parquet")
    source.rename(strange)
    files.project_parquet(strange, out, K)
    files.project_parquet(strange, out, K, resume=True)
    assert run("info", out).code == 0
    project_file(strange, tmp_path / "y.npy", K)
    with open(out, "rb") as file:
        assert np.array_equal(matrix_of(pq.read_table(file)["v"]), np.load(tmp_path / "y.npy"))


@pytest.mark.parametrize("row_group_size", [7, 100])
def test_struct_field_and_column_with_the_same_path(tmp_path, row_group_size):
    x, inner = vectors(), table_of(vectors(seed=1), "list")["v"].combine_chunks()
    table = pa.table({"v": pa.StructArray.from_arrays([inner], ["x"]), "v.x": table_of(x, "list")["v"]})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=row_group_size)
    expected = sjlt.Sketch(D, K).project(x)
    project_file(tmp_path / "x.parquet", tmp_path / "y.npy", K, column="v.x")
    assert np.array_equal(np.load(tmp_path / "y.npy"), expected)
    files.project_parquet(tmp_path / "x.parquet", tmp_path / "y.parquet", K, column="v.x")
    result = pq.ParquetFile(tmp_path / "y.parquet").read()
    assert np.array_equal(matrix_of(result.column(1)), expected)
    assert result.column(0).equals(table.column(0))


@pytest.mark.parametrize("dtype", exhaustive_except(["float32"], ["float32", "int8"]))
def test_tensor_columns(tmp_path, dtype):
    x = vectors(dtype=dtype)
    lists = as_lists(x, "fixed")
    tensors = pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(lists.type.value_type, [D]), lists)
    pq.write_table(pa.table({"v": tensors, "id": np.arange(N)}), tmp_path / "x.parquet", row_group_size=20)
    expected = sjlt.arrow.Projector("v", K)(table_of(x))["v"]
    files.project_parquet(tmp_path / "x.parquet", tmp_path / "y.parquet", K, output_column="w", batch_rows=7)
    result = pq.read_table(tmp_path / "y.parquet")
    assert np.array_equal(matrix_of(result["w"]), matrix_of(expected))
    assert result["v"].combine_chunks().equals(tensors)
    project_file(tmp_path / "x.parquet", tmp_path / "y.npy", K)
    assert np.array_equal(np.load(tmp_path / "y.npy"), matrix_of(expected))


def test_rows_per_batch(tmp_path):
    pq.write_table(table_of(vectors(dtype="int8"), "list"), tmp_path / "x.parquet")
    for bad in (0, 2**62 + 1, 2**63, 1.5):
        for project, out in ((files.project_parquet, "y.parquet"), (project_file, "y.npy")):
            with pytest.raises(UserError, match=f"^batch_rows must be .*{bad}"):
                project(tmp_path / "x.parquet", tmp_path / out, K, batch_rows=bad)
    assert files_in(tmp_path) == ["x.parquet"]
    files.project_parquet(tmp_path / "x.parquet", tmp_path / "y.parquet", K, batch_rows=2**62)
    project_file(tmp_path / "x.parquet", tmp_path / "y.npy", K, batch_rows=2**62)
    assert np.array_equal(matrix_of(pq.read_table(tmp_path / "y.parquet")["v"]), np.load(tmp_path / "y.npy"))
