"""Parquet files: equal to `Sketch.project`, written completely or not at all, in bounded memory; one-line errors."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from helpers.cases import pairwise
from test_arrow import D, K, N, matrix_of, table_of, vectors

import sjlt
from sjlt.files import parquet as files
from sjlt.files.errors import UserError
from sjlt.files.parquet_vectors import ParquetVectors

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(table_of(vectors()), path, row_group_size=20)
    return path


def files_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pairwise(
    kind=["fixed", "list", "large"],
    dtype=["float16", "float32", "float64"],
    batch_rows=[1, 7, 20, 1000, None],
    row_group_size=[8, 1000],
    compression=["none", "snappy", "zstd"],
    output=[None, "w"],
)
def test_files_equal_project(tmp_path, kind, dtype, batch_rows, row_group_size, compression, output):
    x, out = vectors(dtype=dtype), tmp_path / "y.parquet"
    pq.write_table(table_of(x, kind), tmp_path / "x.parquet", row_group_size=row_group_size, compression=compression)
    files.project_parquet(tmp_path / "x.parquet", out, K, seed=4, batch_rows=batch_rows, output_column=output)
    result, before = pq.read_table(out), pq.read_table(tmp_path / "x.parquet")
    assert np.array_equal(matrix_of(result[output or "v"]), sjlt.Sketch(D, K, seed=4).project(x))
    assert result.column_names == before.column_names + ([output] if output else [])
    for other in ("id", "text", *(["v"] if output else [])):
        assert result[other].equals(before[other])
    assert files_in(tmp_path) == ["x.parquet", "y.parquet"]


def test_bytes_are_reproducible(tmp_path, source):
    for name, threads in (("a", 1), ("b", 2)):
        sjlt.set_num_threads(threads)
        files.project_parquet(source, tmp_path / name, K)
    sjlt.set_num_threads(2)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_metadata_describes_sketch_and_source(tmp_path, source):
    files.project_parquet(source, tmp_path / "y.parquet", K, seed=6, normalize=True)
    schema = pq.read_schema(tmp_path / "y.parquet")
    described = json.loads(schema.metadata[b"sjlt"])
    assert sjlt.Sketch.from_dict(described["sketch"]) == sjlt.Sketch(D, K, seed=6)
    assert described["source"]["name"] == "x.parquet"
    assert described["source"]["shape"] == [N, D]
    assert described["result"] == {"shape": [N, K], "dtype": "float32", "column": "v", "normalized": True}
    assert json.loads(schema.field("v").metadata[b"sjlt"]) == described["sketch"]


def test_row_groups_and_encodings(tmp_path, monkeypatch, source):
    monkeypatch.setattr(files, "ROW_GROUP_BYTES", 1000)
    files.project_parquet(source, tmp_path / "y.parquet", K, batch_rows=3)
    metadata = pq.read_metadata(tmp_path / "y.parquet")
    rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    assert sum(rows) == N
    assert len(rows) > 3
    with files.ParquetVectors(source, None) as vectors:
        projector = sjlt.arrow.Projector("v", K, n_features=D)
        size = files.row_bytes(vectors, projector, projector.schema(vectors.schema), vectors.carried_bytes)
    # At least ROW_GROUP_BYTES, by less than one batch.
    assert all(1000 <= each * size < 1000 + 3 * size for each in rows[:-1])
    column = metadata.row_group(0).column(1)
    assert column.path_in_schema.startswith("v.")
    assert not column.has_dictionary_page
    assert column.compression == "UNCOMPRESSED"
    assert metadata.row_group(0).column(2).has_dictionary_page  # the text column


@pytest.mark.parametrize(("start", "stop"), [(0, N), (0, 20), (20, 40), (13, 47), (56, 57), (5, 5), (40, N)])
@pytest.mark.parametrize("batch_rows", [4, 100])
def test_row_ranges(source, start, stop, batch_rows):
    x = vectors()
    with files.ParquetVectors(source, None) as opened:
        parts = [batch.column(0).to_numpy() for batch in opened.tables(start, stop, batch_rows)]
        assert np.array_equal(np.concatenate([[], *parts]), np.arange(start, stop))
        assert all(len(part) <= batch_rows for part in parts)
        assert np.array_equal(opened.read(start, stop), x[start:stop])
        assert np.array_equal(np.concatenate([np.empty((0, D)), *opened.batches(start, batch_rows)]), x[start:])


def test_ambiguous_columns_must_be_named(tmp_path):
    table = table_of(vectors()).append_column("u", table_of(vectors(seed=1))["v"])
    pq.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(UserError, match="name one column; columns of vectors: v, u"):
        files.project_parquet(tmp_path / "x.parquet", tmp_path / "y.parquet", K)
    files.project_parquet(tmp_path / "x.parquet", tmp_path / "y.parquet", K, column="u")
    result = pq.read_table(tmp_path / "y.parquet")
    assert np.array_equal(matrix_of(result["u"]), sjlt.Sketch(D, K).project(vectors(seed=1)))
    assert result["v"].equals(table["v"])


def test_named_column_must_hold_vectors(tmp_path):
    pq.write_table(pa.table({"v": [[1.0]], "w": [[[1.0]]], "id": [1]}), tmp_path / "x.parquet")
    pq.write_table(pa.Table.from_arrays([pa.array([[1.0]])] * 2, ["v", "v"]), tmp_path / "twice.parquet")
    with pytest.raises(UserError, match="there are 2 columns 'v'"):
        files.project_parquet(tmp_path / "twice.parquet", tmp_path / "y.parquet", 1, column="v")
    cases = {"w": "nested lists", "id": "is of type int64", "u": "no column 'u'; columns of vectors: v"}
    for column, message in cases.items():
        with pytest.raises(UserError, match=message):
            files.project_parquet(tmp_path / "x.parquet", tmp_path / "y.parquet", 1, column=column)


def write_bytes(path, content):
    path.write_bytes(content)


BAD = {
    "null row": (lambda p: pq.write_table(pa.table({"v": [[1.0, 2.0]] * 30 + [None]}), p), "row 30 is null"),
    "null number": (lambda p: pq.write_table(pa.table({"v": [[1.0, 2.0], [None, 2.0]]}), p), "row 1 contains a null"),
    "ragged": (
        lambda p: pq.write_table(pa.table({"v": [[1.0, 2.0]] * 30 + [[1.0]]}), p, row_group_size=7),
        "row 30 has length 1, expected 2",
    ),
    "nested": (
        lambda p: pq.write_table(pa.table({"v": [[[1.0]]]}), p),
        r"no column holds vectors.*: v \(list<element: list<",
    ),
    "no vectors": (lambda p: pq.write_table(pa.table({"a": [1]}), p), r"no column holds vectors.*: a \(int64\)"),
    "no rows": (
        lambda p: pq.write_table(pa.table({"v": pa.array([], pa.list_(pa.float32()))}), p),
        "no row of column 'v' states the length",
    ),
    "length 0": (
        lambda p: pq.write_table(pa.table({"v": pa.array([[], []], pa.list_(pa.float32()))}), p),
        "the vectors in 'v' have length 0",
    ),
    "empty": (lambda p: write_bytes(p, b""), "Parquet|0 bytes"),  # the command line says "is empty"
    "not parquet": (lambda p: write_bytes(p, b"PAR1" + bytes(100)), "Parquet|parquet"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_give_one_line_and_no_output(tmp_path, name):
    write, message = BAD[name]
    write(tmp_path / "x.parquet")
    with pytest.raises(UserError, match=message) as caught:
        files.project_parquet(tmp_path / "x.parquet", tmp_path / "y.parquet", 2, batch_rows=8)
    assert str(tmp_path / "x.parquet") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert files_in(tmp_path) == ["x.parquet"]


@pytest.mark.parametrize("kept", [0.3, 0.9, -1])
def test_truncated_files(tmp_path, source, kept):
    content = source.read_bytes()
    source.write_bytes(content[: int(kept * len(content)) if kept > 0 else -1])
    with pytest.raises(UserError, match=str(source)):
        files.project_parquet(source, tmp_path / "y.parquet", K)
    assert files_in(tmp_path) == ["x.parquet"]


def test_damaged_pages_raise(tmp_path, source):
    content = bytearray(source.read_bytes())
    offset = pq.read_metadata(source).row_group(1).column(1).data_page_offset
    content[offset : offset + 20] = bytes(range(200, 220))
    source.write_bytes(content)
    with pytest.raises(UserError, match=str(source)):
        files.project_parquet(source, tmp_path / "y.parquet", K)
    assert files_in(tmp_path) == ["x.parquet"]


def test_source_modified_during_the_run(tmp_path, source):
    def change(rows, of):
        os.utime(source, (1, 1))

    with pytest.raises(UserError, match=r"changed while it was read: source\.mtime_ns"):
        files.project_parquet(source, tmp_path / "y.parquet", K, progress=change)
    assert files_in(tmp_path) == ["x.parquet"]


def test_disk_space_is_checked_first(tmp_path, source, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(UserError, match=r"needs \d+ bytes, the file system has 10 free"):
        files.project_parquet(source, tmp_path / "y.parquet", K)


RUN = """
import resource, sys
from pathlib import Path
from sjlt.files.parquet import project_parquet
limit = int(sys.argv[3])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
project_parquet(Path(sys.argv[1]), Path(sys.argv[2]), 256, batch_rows=int(sys.argv[4]), force=True)
if sys.platform == "linux":
    print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


def start(source, out, limit=0, batch_rows=2000):
    return subprocess.Popen(
        [sys.executable, "-c", RUN, str(source), str(out), str(limit), str(batch_rows)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def write_large(path, n, row_group_size=None):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1000, 768), np.float32)
    batch = pa.record_batch([pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 768)], names=["v"])
    table = pa.Table.from_batches([batch] * (n // 1000))
    pq.write_table(table, path, row_group_size=row_group_size or n, use_dictionary=False, compression="none")
    return x


@pytest.mark.exhaustive
def test_full_disk_leaves_no_output(tmp_path):
    write_large(tmp_path / "x.parquet", 8000)
    process = start(tmp_path / "x.parquet", tmp_path / "y.parquet", limit=2_000_000)
    _, error = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "File too large" in error
    assert files_in(tmp_path) == ["x.parquet"]


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_memory_is_independent_of_file_and_row_group_size(tmp_path):
    peaks = []
    for n in (120_000, 300_000):  # both long enough to fill the queues
        write_large(tmp_path / "x.parquet", n)  # one row group of 369 and 922 MB
        output, error = start(tmp_path / "x.parquet", tmp_path / "y.parquet").communicate(timeout=300)
        peaks.append(int(output) / 1024)
        assert not error
    assert peaks[1] < peaks[0] + 200, peaks  # for 553 MB more data; allocators vary by dozens of MB
    assert peaks[1] < 572, peaks  # MiB: 600 MB


@pytest.mark.exhaustive
def test_kills_leave_no_partial_file(tmp_path):
    """After each of 20 SIGKILLs the output is absent or complete, and the run after them gives the same bytes."""
    write_large(tmp_path / "x.parquet", 20_000)
    wanted = tmp_path / "wanted.parquet"
    files.project_parquet(tmp_path / "x.parquet", wanted, 256, batch_rows=500)
    expected, rng, out = wanted.read_bytes(), np.random.default_rng(1), tmp_path / "y.parquet"
    began = time.monotonic()
    start(tmp_path / "x.parquet", out, batch_rows=500).communicate(timeout=120)
    whole = time.monotonic() - began
    assert out.read_bytes() == expected
    orphans = 0
    for _ in range(20):
        out.unlink(missing_ok=True)
        process = start(tmp_path / "x.parquet", out, batch_rows=500)
        time.sleep(rng.uniform(0.5, 1.1) * whole)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not out.exists() or out.read_bytes() == expected
        orphans += sum(name.startswith(".sjlt-") for name in files_in(tmp_path))
    _, error = start(tmp_path / "x.parquet", out, batch_rows=500).communicate(timeout=120)
    assert not error
    assert out.read_bytes() == expected
    assert files_in(tmp_path) == ["wanted.parquet", "x.parquet", "y.parquet"], f"{orphans} orphans seen"


def test_columns_named_like_fields(tmp_path):
    """A name with dots may also be the path of a field of another column."""
    columns = {"m.id": range(N), "text": ["t"] * N, "m": pa.array([{"id": i} for i in range(N)])}
    columns |= {"a.list": range(N), "a": pa.array([[i] for i in range(N)])}
    table = pa.table(columns | {"v": table_of(vectors())["v"]})
    pq.write_table(table, tmp_path / "x.parquet")
    files.project_parquet(tmp_path / "x.parquet", tmp_path / "y.parquet", K, seed=1)
    result = pq.read_table(tmp_path / "y.parquet")
    assert result.column_names == table.column_names
    for name in columns:
        assert result[name].to_pylist() == table[name].to_pylist()
    assert np.array_equal(matrix_of(result["v"]), sjlt.Sketch(D, K, seed=1).project(vectors()))


def write_repeated_texts(path):
    """Texts of 5 kB that take a byte per row in the file, and little space when compressed."""
    vectors_of_rows = pa.FixedSizeListArray.from_arrays(np.random.default_rng(0).normal(size=4000 * 16), 16)
    texts = [f"{i:02}" * 2500 for i in range(4)]
    pq.write_table(pa.table({"v": vectors_of_rows, "t": [texts[i // 1000] for i in range(4000)]}), path)


def test_batches_of_dictionary_encoded_texts_are_small(tmp_path):
    write_repeated_texts(tmp_path / "x.parquet")
    with ParquetVectors(tmp_path / "x.parquet", None) as source:
        assert 5000 <= source.carried_bytes <= 5200
        assert source.stored_bytes < 100
        rows = files.BATCH_BYTES // source.row_bytes
        assert all(batch.nbytes <= 2 * files.BATCH_BYTES for batch in source.tables(0, 4000, rows))


def test_compressible_columns_need_little_space(tmp_path, monkeypatch):
    write_repeated_texts(tmp_path / "x.parquet")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1 << 20})())
    notes = []
    files.project_parquet(tmp_path / "x.parquet", tmp_path / "y.parquet", 8, note=notes.append)
    sjlt.plan(tmp_path / "x.parquet", tmp_path / "out", 8, note=notes.append).run()
    assert notes == []
