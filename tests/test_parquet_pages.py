"""The fast reader of parquet's pages: the rows that Arrow decodes, and Arrow for everything that is not regular."""

import numpy as np
import pytest
from helpers.cases import pairwise

from sjlt.files.errors import UserError
from sjlt.files.parquet_pages import IrregularError, decoded_levels, thrift_struct
from sjlt.files.parquet_vectors import ParquetVectors

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

N, D = 2500, 70


def numbers(dtype="float32", n=N):
    """Rows of few and of many different numbers, so that dictionaries are begun and given up."""
    x = np.random.default_rng(0).normal(size=(n, D))
    x[:20] = np.round(x[:20])
    return x.astype(dtype)


def lists(x, kind):
    values = pa.array(x.reshape(-1))
    if kind == "fixed":
        return pa.FixedSizeListArray.from_arrays(values, x.shape[1])
    large = kind == "large"
    offsets = pa.array(np.arange(len(x) + 1, dtype=np.int64 if large else np.int32) * x.shape[1])
    return (pa.LargeListArray if large else pa.ListArray).from_arrays(offsets, values)


@pytest.fixture
def decoded(monkeypatch):
    """The ranges of rows whose vectors Arrow has decoded."""
    found, real = [], ParquetVectors._decoded

    def spy(self, start, stop, rows, columns):
        if start < stop and (columns is None or "v" in columns):
            found.append((start, stop))
        return real(self, start, stop, rows, columns)

    monkeypatch.setattr(ParquetVectors, "_decoded", spy)
    return found


def table(opened, start, stop, rows, columns=None):
    return pa.Table.from_batches(opened.tables(start, stop, rows, columns), None if start < stop else opened.schema)


@pairwise(
    kind=["fixed", "list", "large"],
    dtype=["float16", "float32", "float64"],
    compression=["none", "snappy", "zstd", "gzip", "brotli"],
    data_page_version=["1.0", "2.0"],
    data_page_size=[100, 5000, 1 << 20],
    use_dictionary=[False, True],
    row_group_size=[100, 1111, N],
    nullable=[True, False],
)
def test_rows_are_those_of_arrow(
    tmp_path, decoded, kind, dtype, compression, data_page_version, data_page_size, use_dictionary, row_group_size,
    nullable,
):  # fmt: skip
    x = numbers(dtype)
    schema = pa.schema(
        [
            pa.field("a", pa.struct([("b", pa.int64()), ("c", pa.list_(pa.int8()))])),
            pa.field("v", lists(x, kind).type, nullable=nullable),
            pa.field("t", pa.string()),
        ],
        metadata={"k": "v"},
    )
    content = [[{"b": i, "c": [i % 100]} for i in range(N)], lists(x, kind), [str(i) for i in range(N)]]
    pq.write_table(
        pa.table(content, schema=schema), tmp_path / "x.parquet",
        compression=compression, row_group_size=row_group_size, data_page_version=data_page_version,
        data_page_size=data_page_size, use_dictionary=use_dictionary,
        dictionary_pagesize_limit=20_000, write_statistics=True,
    )  # fmt: skip
    expected = pq.read_table(tmp_path / "x.parquet")
    with ParquetVectors(tmp_path / "x.parquet", "v") as opened:
        for start, stop, rows in (
            (0, N, 300),
            (0, N, 10_000),
            (77, 1999, 13),
            (1111, 1112, 5),
            (2499, N, 1),
            (5, 5, 1),
        ):
            assert table(opened, start, stop, rows).equals(expected.slice(start, stop - start)), (start, stop, rows)
        only = table(opened, 3, 400, 50, ["v"])
        assert only.equals(expected.select(["v"]).slice(3, 397))
        assert table(opened, 0, N, 300).schema.metadata == expected.schema.metadata
    assert use_dictionary or decoded == []
    assert decoded == [] or row_group_size == 100  # where 20 rows in a dictionary are a large share


def write(path, column, **options):
    pq.write_table(pa.table({"id": np.arange(len(column)), "v": column}), path, use_dictionary=False, **options)


def ragged(lengths):
    return pa.array([list(np.arange(n, dtype=float)) for n in lengths], pa.list_(pa.float32()))


IRREGULAR = {
    "a longer row": (ragged([4] * 50 + [5] + [4] * 20), "row 50 has 5 numbers, expected 4"),
    "two rows that together are even": (ragged([4] * 50 + [5, 3] + [4] * 20), "row 50 has 5 numbers, expected 4"),
    "an empty row": (ragged([4] * 50 + [0] + [4] * 20), "row 50 has 0 numbers, expected 4"),
    "an empty row beside a double one": (ragged([4] * 50 + [0, 8] + [4] * 20), "row 50 has 0 numbers, expected 4"),
    "a null": (pa.array([[1.0, 2.0]] * 50 + [None] + [[1.0, 2.0]] * 20), "row 50 is null"),
    "a null number": (pa.array([[1.0, 2.0]] * 50 + [[None, 1.0]] * 20), "row 50 has a null"),
}


@pytest.mark.parametrize("case", IRREGULAR)
@pytest.mark.parametrize("row_group_size", [10, 1000])
def test_irregular_rows_are_found_by_arrow(tmp_path, case, row_group_size):
    column, message = IRREGULAR[case]
    write(tmp_path / "x.parquet", column, row_group_size=row_group_size, data_page_size=50)
    with ParquetVectors(tmp_path / "x.parquet", None) as opened, pytest.raises(UserError, match=message):
        for _ in opened.batches(0, 7):
            pass


def test_what_arrow_reads_instead(tmp_path, decoded):
    x = numbers()
    for column, options in (
        (lists(x, "fixed"), {"column_encoding": {"v.list.element": "BYTE_STREAM_SPLIT"}}),
        (lists(x.astype("int8"), "fixed"), {}),
        (lists(np.round(x), "fixed"), {"use_dictionary": True}),
        (lists(x, "fixed"), {"compression": "lz4"}),
    ):
        decoded.clear()
        options = {"use_dictionary": False, **options}
        pq.write_table(pa.table({"id": np.arange(N), "v": column}), tmp_path / "x.parquet", **options)
        with ParquetVectors(tmp_path / "x.parquet", None) as opened:
            assert table(opened, 5, N, 100).equals(pq.read_table(tmp_path / "x.parquet").slice(5))
        assert decoded == [(5, N)], options


@pytest.mark.parametrize("budget", [60, pytest.param(3000, marks=pytest.mark.exhaustive)])
def test_damage_is_an_error_or_other_numbers(tmp_path, budget):
    """Never a crash, a hang, or an exception that is not a message."""
    path, rng = tmp_path / "x.parquet", np.random.default_rng(0)
    column = lists(numbers(n=200), "list")
    for compression in ("none", "snappy"):
        write(path, column, row_group_size=60, data_page_size=2000, compression=compression)
        content = path.read_bytes()
        for _ in range(budget // 2):
            damaged = bytearray(content)
            start = rng.integers(4, len(content) - 2000)  # the footer is Arrow's matter
            size = int(rng.integers(1, 40))
            damaged[start : start + size] = rng.bytes(size)
            path.write_bytes(damaged)
            rows, message = 200, str(path)
            try:
                with ParquetVectors(path, None) as opened:
                    rows = sum(len(batch) for batch in opened.batches(0, 50))
            except UserError as e:
                message = str(e)
            assert (rows, message.count("\n")) == (200, 0)
            assert str(path) in message


@pytest.mark.parametrize("bits", [1, 3, 8, 12])
def test_levels_in_runs_and_in_groups(bits):
    """Against an encoder of a few lines."""
    rng, expected, content = np.random.default_rng(bits), [], bytearray()
    for _ in range(20):
        if rng.integers(2):
            count, value = int(rng.integers(1, 300)), int(rng.integers(2**bits))
            expected += [value] * count
            content += varint(count << 1) + value.to_bytes(-(-bits // 8), "little")
        else:
            groups = int(rng.integers(1, 200))
            values = rng.integers(2**bits, size=8 * groups)
            expected += values.tolist()
            bitmap = (values[:, None] >> np.arange(bits)) & 1
            content += varint(groups << 1 | 1) + np.packbits(bitmap.ravel(), bitorder="little").tobytes()
    np.testing.assert_array_equal(decoded_levels(bytes(content), bits, len(expected)), expected)
    np.testing.assert_array_equal(decoded_levels(bytes(content), bits, 5), expected[:5])
    with pytest.raises(IrregularError):
        decoded_levels(bytes(content), bits, len(expected) + 5000)


def varint(value):
    content = bytearray()
    while value > 127:
        content.append(value & 127 | 128)
        value >>= 7
    return bytes(content) + bytes([value])


def test_headers_end_early():
    header = bytes([0x15, 0x04, 0x15, 0x90, 0x03, 0x2C, 0x15, 0x08, 0x00, 0x00])  # {1: 2, 2: 200, 4: {1: 4}}
    assert thrift_struct(header, 0) == ({1: 2, 2: 200, 4: {1: 4}}, len(header))
    for end in range(len(header)):
        with pytest.raises(IndexError):
            thrift_struct(header[:end], 0)
