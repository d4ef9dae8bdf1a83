"""Vectors read from plain pages equal those that pyarrow decodes; other pages are left to pyarrow."""

import os
import random
import tracemalloc
from contextlib import contextmanager

import numpy as np
import pytest
from helpers.cases import each_value
from test_arrow import as_lists, vectors

from sjlt.files.errors import UserError
from sjlt.files.parquet_pages import VectorPages, decode_runs, thrift_struct
from sjlt.files.parquet_vectors import ParquetVectors

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

PLAIN = {"use_dictionary": False, "compression": "none"}
N = 1000


def write(path, column, **options):
    table = pa.table({"id": np.arange(len(column)), "v": column, "text": [str(i) for i in range(len(column))]})
    pq.write_table(table, path, **{**PLAIN, **options})
    return table


@contextmanager
def opened(path, width, dtype="float32"):
    with open(path, "rb", buffering=0) as file:
        yield VectorPages(file, pq.read_metadata(path), "v", width, np.dtype(dtype))


@each_value(
    width=[1, 7, 8, 64, 300],
    dtype=["float16", "float32", "float64"],
    kind=["fixed", "list", "large"],
    data_page_size=[100, None],
    data_page_version=["1.0", "2.0"],
    row_group_size=[300, N],
    compression=["none", "snappy", "zstd"],
    dictionary_pagesize_limit=[0, 500],
)
def test_pages_are_read(
    tmp_path,
    width,
    dtype,
    kind,
    data_page_size,
    data_page_version,
    row_group_size,
    compression,
    dictionary_pagesize_limit,
):
    x = vectors(N, width, dtype)
    write(
        tmp_path / "x.parquet",
        as_lists(x, kind),
        data_page_size=data_page_size,
        data_page_version=data_page_version,
        row_group_size=row_group_size,
        write_batch_size=50,
        compression=compression,
        use_dictionary=dictionary_pagesize_limit > 0,
        dictionary_pagesize_limit=dictionary_pagesize_limit or None,
    )
    ranges = [(0, N), (0, 1), (N - 1, N), (299, 301), (13, 750), *((i, min(i + 77, N)) for i in range(0, N, 77))]
    with opened(tmp_path / "x.parquet", width, dtype) as pages:
        for start, stop in ranges:
            out = np.full((stop - start, width), np.nan, dtype)
            assert pages.fill(start, out)
            assert np.array_equal(out, x[start:stop])


def test_non_nullable_columns(tmp_path):
    x = vectors(N, 24)
    for kind in (pa.list_(pa.field("element", pa.float32(), nullable=False), 24), pa.list_(pa.float32(), 24)):
        for nullable in (True, False):
            array = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), type=kind)
            schema = pa.schema([pa.field("v", kind, nullable=nullable)])
            pq.write_table(pa.Table.from_arrays([array], schema=schema), tmp_path / "x.parquet", **PLAIN)
            out = np.empty((N, 24), np.float32)
            with opened(tmp_path / "x.parquet", 24) as pages:
                assert pages.fill(0, out)
            assert np.array_equal(out, x)


x = vectors(N, 6)
ROWS = x.tolist()
OTHERS = {
    "gzip": (as_lists(x, "list"), {"compression": "gzip"}),
    "dictionary": (as_lists(np.round(x / 100), "list"), {"use_dictionary": True}),
    "byte streams": (as_lists(x, "list"), {"column_encoding": {"v.list.element": "BYTE_STREAM_SPLIT"}}),
    "float64": (as_lists(x.astype("float64"), "list"), {}),
    "null row": (pa.array([None, *ROWS[1:]], pa.list_(pa.float32())), {}),
    "null number": (pa.array([*ROWS[:-1], [*ROWS[-1][:5], None]], pa.list_(pa.float32())), {}),
    "ragged": (pa.array([*ROWS[:500], ROWS[500][:5], [*ROWS[501], 1.0], *ROWS[502:]], pa.list_(pa.float32())), {}),
    "an empty row": (pa.array([*ROWS[:500], [], [*ROWS[501], *ROWS[500]], *ROWS[502:]], pa.list_(pa.float32())), {}),
}


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("case", OTHERS)
def test_other_pages_are_left_to_pyarrow(tmp_path, case, version):
    column, options = OTHERS[case]
    write(tmp_path / "x.parquet", column, data_page_version=version, **options)
    with opened(tmp_path / "x.parquet", 6) as pages:
        assert not pages.fill(0, np.empty((N, 6), np.float32))


def test_file_with_some_plain_row_groups(tmp_path):
    tables = [pa.table({"id": np.arange(i, i + 100), "v": as_lists(x[i : i + 100], "list")}) for i in (0, 100, 200)]
    with pq.ParquetWriter(tmp_path / "x.parquet", tables[0].schema, **PLAIN) as writer:
        writer.write_table(tables[0])
        writer.write_table(tables[1].slice(0, 60))
        ragged = pa.array([*ROWS[160:198], ROWS[198][:5], [*ROWS[199], 1.0]], pa.list_(pa.float32()))
        writer.write_table(pa.table({"id": np.arange(160, 200), "v": ragged}))
        writer.write_table(tables[2])
    with ParquetVectors(tmp_path / "x.parquet", None) as source:
        batches = list(source.tables(10, 300, 70))
        assert np.array_equal(np.concatenate([batch.column(0).to_numpy() for batch in batches]), np.arange(10, 300))
        values = np.concatenate([batch.column(1).flatten().to_numpy() for batch in batches])
        assert np.array_equal(values[: 188 * 6], x[10:198].reshape(-1))
        assert np.array_equal(values[190 * 6 :], x[200:300].reshape(-1))
        with pytest.raises(UserError, match="row 198 has length 5"):
            source.read(10, 300)


def test_file_replaced_while_opening(tmp_path, monkeypatch):
    """Otherwise vectors and other columns would come from different files."""
    for name in "ab":
        write(tmp_path / name, as_lists(x, "list"))
    parquet_file = pq.ParquetFile

    def replaced(*arguments, **options):
        os.replace(tmp_path / "b", tmp_path / "a")
        return parquet_file(*arguments, **options)

    monkeypatch.setattr(pq, "ParquetFile", replaced)
    with pytest.raises(UserError, match="was replaced while it was opened"):
        ParquetVectors(tmp_path / "a", None)


def test_names_with_dots_and_common_prefixes(tmp_path):
    y = vectors(N, 6, seed=1)
    table = pa.table({"v.list": as_lists(x, "list"), "v": as_lists(y, "list"), "a.b": np.arange(N)})
    pq.write_table(table, tmp_path / "x.parquet", **PLAIN)
    for column, expected in (("v.list", x), ("v", y)):
        with ParquetVectors(tmp_path / "x.parquet", column) as source:
            (batch,) = source.tables(0, N, N)
            assert pa.Table.from_batches([batch]).equals(table)
            assert np.array_equal(source.read(0, N), expected)


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
@pytest.mark.parametrize("budget", [100, pytest.param(5000, marks=pytest.mark.exhaustive)])
def test_damaged_pages_are_left_to_pyarrow(tmp_path, version, compression, budget):
    """Random bytes are changed (only in headers and levels if uncompressed): rows are correct or left to pyarrow."""
    path = tmp_path / "x.parquet"
    write(path, as_lists(x, "list"), data_page_version=version, data_page_size=3000, compression=compression)
    good, rng, places = path.read_bytes(), random.Random(0), []
    chunk = pq.read_metadata(path).row_group(0).column(1)
    position, stop = chunk.data_page_offset, chunk.data_page_offset + chunk.total_compressed_size
    if compression == "none":
        with opened(path, 6) as pages:
            for numbers in pages._pages(0):
                places += range(position, numbers.source)
                position = numbers.source + numbers.size * 4
        assert position == stop
    read = 0
    for _ in range(budget):
        content = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            content[rng.choice(places or range(position, stop))] = rng.randrange(256)
        path.write_bytes(content)
        out = np.empty((N, 6), np.float32)
        with opened(path, 6) as pages:
            if pages.fill(0, out):
                column = x if compression == "none" else pq.read_table(path, columns=["v"])["v"].to_pylist()
                assert np.array_equal(out, np.array(column, np.float32), equal_nan=True)
                read += 1
    assert 0 < read < budget


class FalseMetadata:
    """A file's metadata with some values falsified."""

    def __init__(self, metadata, **claims):
        self._metadata, self._claims = metadata, claims

    def __getattr__(self, name):
        if name in self._claims:
            return self._claims[name]
        value = getattr(self._metadata, name)
        return (lambda i: FalseMetadata(value(i), **self._claims)) if name in ("row_group", "column") else value


def test_page_larger_than_its_column_chunk(tmp_path):
    """The extra values would be mistaken for the first ones of the next row group."""
    write(tmp_path / "x.parquet", as_lists(x, "list"), **PLAIN)
    metadata = FalseMetadata(pq.read_metadata(tmp_path / "x.parquet"), num_rows=N - 1, num_values=(N - 1) * 6)
    with open(tmp_path / "x.parquet", "rb", buffering=0) as file:
        pages = VectorPages(file, metadata, "v", 6, np.dtype("float32"))
        assert not pages.fill(0, np.empty((N - 1, 6), np.float32))


def test_deeply_nested_header():
    with pytest.raises(ValueError, match="structs nested too deeply"):
        thrift_struct(bytes([0x1C] * 500))


def test_too_many_runs():
    with pytest.raises(ValueError, match="too many runs"):
        decode_runs(bytes([1 << 1, 0, 11 << 1, 1] * 3000), 1, 36_000)


def test_only_needed_levels_are_unpacked():
    packed = bytes([0x81, 0x81, 0x81, 0x01]) + bytes(1 << 21)  # a run of 2^20 groups of 8, and a few values needed
    tracemalloc.start()
    try:
        assert decode_runs(packed, 1, 9).tolist() == [0] * 9
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    with pytest.raises((ValueError, IndexError)):
        decode_runs(packed[:100], 1, 1 << 23)


def test_levels():
    assert decode_runs(bytes([8 << 1, 3, (2 << 1) | 1, 0b11100100, 0, 0xFF, 0xFF]), 2, 20).tolist() == (
        [3] * 8 + [0, 1, 2, 3] + [0] * 4 + [3] * 4
    )
    with pytest.raises((ValueError, IndexError)):
        decode_runs(bytes([8 << 1, 3]), 2, 20)
    with pytest.raises((ValueError, IndexError)):  # three groups of 8 declared, one present (and enough)
        decode_runs(bytes([(3 << 1) | 1, 0b11100100, 0]), 2, 8)
    with pytest.raises(ValueError, match="empty run"):
        decode_runs(bytes([0, 3] * 20), 2, 20)


def test_thrift():
    # fields 1: i32 -2, 2: true, 4: false, 5: struct {16: "ab"}, 20: i64 300, then the end
    content = bytes([0x15, 3, 0x11, 0x22, 0x1C, 0x08, 32, 2, 97, 98, 0, 0xF6, 0xD8, 0x04, 0])
    assert thrift_struct(content) == ({1: -2, 2: True, 4: False, 5: {16: b"ab"}, 20: 300}, len(content))
    with pytest.raises(ValueError, match="a field of type 9"):
        thrift_struct(bytes([0x19, 0x15, 0]))
    with pytest.raises(IndexError):
        thrift_struct(content[:-1])
