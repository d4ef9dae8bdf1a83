"""Read vectors of equal length from parquet files without decoding the levels of each value.

Parquet stores two levels with every value of a list: the repetition level (whether the value begins a row) and the
definition level (which of its ancestors are null). pyarrow decodes them all, which takes eight times as long as reading
the values (1e6 vectors of 768 fp32, one core: 4.1 s against 0.5 s). If all vectors have the same length and nothing is
null, the levels are known in advance and need only be checked. In most files nearly all pages have identical levels, so
a cache makes most checks free. The values of a page are contiguous and follow the levels. Plain values are read
directly into the output, and pages compressed with Snappy or zstd are decompressed first. Column chunks written by
pyarrow begin with a dictionary, which is abandoned once there are too many distinct values; values in such pages are
looked up. Everything else, including pages of very many vectors and anything unexpected, is left to pyarrow, which also
reports the errors.

Format: https://parquet.apache.org/docs/file-format/, data pages of versions 1 and 2. Page headers are Thrift structs in
the compact protocol. Levels and dictionary indices are stored as runs of a repeated value or of bit-packed values.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .raw import read_numbers

if TYPE_CHECKING:
    import pyarrow.parquet as pq

STORED_AS = {"FLOAT": "float32", "DOUBLE": "float64", "FIXED_LEN_BYTE_ARRAY": "float16"}
CODECS = ("UNCOMPRESSED", "SNAPPY", "ZSTD")
DATA_PAGE, DICTIONARY_PAGE, DATA_PAGE_V2 = 0, 2, 3  # page types
PLAIN, PLAIN_DICTIONARY, RLE, RLE_DICTIONARY = 0, 2, 3, 8  # encodings
HEADER_BYTES = 512  # read to parse a page header; headers of float pages are about 60 bytes long
MOSTLY_PLAIN = (
    0.9  # smallest size, relative to plain values, of a chunk read here: pyarrow looks up dictionaries faster
)
MAX_COUNT = 1 << 23  # values per page
MAX_BYTES = 128 << 20  # of a page in memory, compressed or decompressed
MAX_RUNS = 5000  # runs of levels, two per vector; beyond this, pyarrow decodes the page faster
MAX_DEPTH = 8  # nesting of structs in a page header
PIECE = 1 << 16  # packed levels or indices unpacked at a time
CACHED_BYTES = 64 << 10  # largest levels of a page that are cached
# Raised for unexpected pages, which are then left to pyarrow.
UNEXPECTED = (ArithmeticError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)


class Numbers(NamedTuple):
    """A contiguous run of values, in memory or at a byte position of the file.

    Attributes
    ----------
    size : int
        The number of values.
    source : ndarray or int
        The values, or the position of the first one in the file.
    """

    size: int
    source: np.ndarray | int

    def after(self, count: int, itemsize: int) -> Numbers:
        """The same run without its first `count` values."""
        rest = self.source + count * itemsize if isinstance(self.source, int) else self.source[count:]
        return Numbers(self.size - count, rest)


@dataclass
class Body:
    """Bytes `position` to `stop` - 1 of a page, in the open file or, if `content` is given, in memory."""

    file: int
    position: int
    stop: int
    content: memoryview | None = None

    def take(self, size: int) -> bytes:
        """Read the next `size` bytes."""
        if not 0 <= size <= min(self.stop - self.position, MAX_BYTES):
            raise ValueError("beyond the end of the page, or too large for memory")
        self.position += size
        if self.content is None:
            return os.pread(self.file, size, self.position - size)
        return bytes(self.content[self.position - size : self.position])

    def rest(self) -> bytes:
        """Read the remaining bytes."""
        return self.take(self.stop - self.position)

    def levels(self) -> bytes:
        """Read levels, which are preceded by their length in bytes."""
        return self.take(int.from_bytes(self.take(4), "little"))

    def decompress(self, codec: str, size: int) -> Body:
        """The remaining bytes, decompressed to `size` bytes."""
        import pyarrow as pa

        if codec == "UNCOMPRESSED":
            if self.stop - self.position != size:
                raise ValueError("sizes differ")
            return self
        if not 0 <= size <= MAX_BYTES >= self.stop - self.position:
            raise ValueError("too large for memory")
        content = self.rest()
        if codec == "SNAPPY" and varint(content, 0)[0] != size:  # pyarrow would leave the end uninitialized
            raise ValueError("the decompressed size differs")
        return Body(-1, 0, size, memoryview(pa.Codec(codec.lower()).decompress(content, size)))


class VectorPages:
    """Reader of the vectors in one column of a parquet file, up to the first page that is left to pyarrow.

    Parameters
    ----------
    file : FileIO
        The caller must close it.
    metadata : pyarrow.parquet.FileMetaData
    column : str
    width : int
        The length of the vectors.
    dtype : dtype
    """

    def __init__(self, file: FileIO, metadata: pq.FileMetaData, column: str, width: int, dtype: np.dtype) -> None:
        self._path, self._file = Path(os.fsdecode(file.name)), file.fileno()
        self._metadata, self._width, self._dtype = metadata, width, dtype
        leaves = [i for i in range(metadata.num_columns) if metadata.schema.column(i).path.startswith(f"{column}.")]
        self._leaf = leaves[0] if len(leaves) == 1 else None
        sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        self._starts = np.cumsum([0, *sizes]).tolist()
        self._row = -1  # row at which `_left`, then `_following`, begin
        self._left, self._following = Numbers(0, 0), self._from(0)

    def fill(self, start: int, out: np.ndarray) -> bool:
        """Read the vectors from row `start` on into the rows of `out`; return False if pyarrow must decode some.

        Reading is fastest in order: a call that continues where the last one ended does not scan pages again.
        """
        if start != self._row:
            self._left, self._following = Numbers(0, 0), self._from(start)
        self._row, numbers, done = -1, out.reshape(-1), 0
        while done < len(numbers):
            try:
                self._left = self._left if self._left.size else next(self._following)
            except UNEXPECTED:
                return False
            count = min(self._left.size, len(numbers) - done)
            self._copy(numbers[done : done + count])
            done += count
        self._row = start + len(out)
        return True

    def _copy(self, out: np.ndarray) -> None:
        if isinstance(self._left.source, int):
            read_numbers(self._file, self._left.source, out, self._path)
        else:
            out[...] = self._left.source[: len(out)]
        self._left = self._left.after(len(out), self._dtype.itemsize)

    def _from(self, start: int) -> Iterator[Numbers]:
        """Yield the values from row `start` on, page by page."""
        first = bisect_right(self._starts, start) - 1
        before = (start - self._starts[first]) * self._width
        for group in range(first, len(self._starts) - 1):
            for numbers in self._pages(group):
                skipped = min(before, numbers.size)
                before -= skipped
                yield numbers.after(skipped, self._dtype.itemsize)

    # --------------------------------------------------------------------------------- pages

    def _pages(self, group: int) -> Iterator[Numbers]:
        """Yield the values of a row group, page by page; raise one of UNEXPECTED if pyarrow must decode a page."""
        if self._leaf is None:
            raise ValueError("no column, or several")
        chunk, rows = self._metadata.row_group(group).column(self._leaf), self._starts[group + 1] - self._starts[group]
        if (
            self._metadata.schema.column(self._leaf).max_repetition_level != 1
            or STORED_AS.get(chunk.physical_type) != self._dtype.name
            or chunk.compression not in CODECS
            or chunk.num_values != rows * self._width
            or chunk.total_uncompressed_size < MOSTLY_PLAIN * chunk.num_values * self._dtype.itemsize
        ):
            raise ValueError("not a column chunk of plain vectors of this length")
        position, first, dictionary = chunk.data_page_offset, 0, None
        if chunk.has_dictionary_page:
            position = min(position, chunk.dictionary_page_offset or position)
        while first < chunk.num_values:
            header, size = thrift_struct(os.pread(self._file, HEADER_BYTES, position))
            stop = position + size + header[3]
            if stop > os.fstat(self._file).st_size:
                raise ValueError("beyond the end of the file")
            body, position = Body(self._file, position + size, stop), stop
            if header[1] == DICTIONARY_PAGE:
                if header[7][2] not in (PLAIN, PLAIN_DICTIONARY) or dictionary is not None:
                    raise ValueError("an encoded dictionary, or a second one")
                dictionary = np.frombuffer(body.decompress(chunk.compression, header[2]).rest(), self._dtype)
                continue
            numbers = self._data(header, body, chunk.compression, first % self._width, dictionary)
            first += numbers.size
            if first > chunk.num_values:
                raise ValueError("more values than the column chunk has")
            yield numbers

    def _data(self, header: dict[int, Any], body: Body, codec: str, first: int, dictionary: Any) -> Numbers:
        """The values of a data page. The page begins with value `first` of a vector."""
        if header[1] == DATA_PAGE:
            count, encoding = header[5][1], header[5][2]
            if not header[5][3] == header[5][4] == RLE:
                raise ValueError("unsupported encoding of levels")
            body = body.decompress(codec, header[2])
            repetition, definition = body.levels(), body.levels()
        elif header[1] == DATA_PAGE_V2:
            count, nulls, rows, encoding = (header[8][field] for field in (1, 2, 3, 4))
            if nulls or rows * self._width != count:
                raise ValueError("nulls, or vectors of another length")
            repetition, definition = body.take(header[8][6]), body.take(header[8][5])
            codec = codec if header[8].get(7, True) else "UNCOMPRESSED"
            body = body.decompress(codec, header[2] - len(repetition) - len(definition))
        else:
            raise ValueError("not a data page")
        size = count * self._dtype.itemsize
        if not 0 < count <= MAX_COUNT or (encoding == PLAIN and body.stop - body.position != size):
            raise ValueError("the size does not match the count")
        highest = self._metadata.schema.column(self._leaf).max_definition_level
        if not is_regular(repetition, definition, highest, count, first, self._width):
            raise ValueError("nulls, or vectors of another length")
        if encoding in (PLAIN_DICTIONARY, RLE_DICTIONARY):
            bits = body.take(1)[0]
            return Numbers(count, dictionary[decode_runs(body.rest(), bits, count)])
        if encoding != PLAIN:
            raise ValueError("unsupported encoding")
        if body.content is None:
            return Numbers(count, body.position)
        return Numbers(count, np.frombuffer(body.content, self._dtype, count, body.position))


# ------------------------------------------------------------------------------------- levels


def is_regular(repetition: bytes, definition: bytes, highest: int, count: int, first: int, width: int) -> bool:
    """Whether the levels of `count` values describe vectors of length `width` without nulls.

    Repetition levels must be 0 where a vector begins and 1 elsewhere; the first value is number `first` of its vector.
    Definition levels must all be `highest`.
    """
    check = _is_regular if len(repetition) + len(definition) <= CACHED_BYTES else _is_regular.__wrapped__
    return check(repetition, definition, highest, count, first, width)


@lru_cache(256)
def _is_regular(repetition: bytes, definition: bytes, highest: int, count: int, first: int, width: int) -> bool:
    begins = np.flatnonzero(decode_runs(repetition, 1, count) == 0)
    return bool(
        np.array_equal(begins, np.arange(-first % width, count, width))
        and (decode_runs(definition, highest.bit_length(), count) == highest).all()
    )


def decode_runs(content: bytes, bits: int, count: int) -> np.ndarray:
    """Decode `count` levels or indices of `bits` bits from the hybrid of run-length encoding and bit packing.

    Each run begins with a varint n. If n is even, one value follows that is repeated n / 2 times; if n is odd,
    (n - 1) / 2 groups of 8 packed values follow. Raises one of UNEXPECTED for more than 24 bits or malformed content.
    """
    if bits > 24:
        raise ValueError("more bits than fp32 can represent")
    out, done, position = np.empty(count, np.uint32), 0, 0
    for _ in range(MAX_RUNS):
        if done == count:
            return out
        n, position = varint(content, position)
        size = min((n >> 1) * (8 if n & 1 else 1), count - done)
        if not size:
            raise ValueError("an empty run")
        if n & 1:
            packed = np.frombuffer(content, np.uint8, (n >> 1) * bits, position)
            unpack(packed, bits, out[done : done + size])
            position += len(packed)
        else:
            value = np.frombuffer(content, np.uint8, (bits + 7) // 8, position)
            out[done : done + size], position = int.from_bytes(value.tobytes(), "little"), position + len(value)
        done += size
    raise ValueError("too many runs")


def unpack(packed: np.ndarray, bits: int, out: np.ndarray) -> None:
    """Unpack integers of `bits` bits each, least significant bit first, into `out`."""
    powers = np.float32(2) ** np.arange(bits)
    for start in range(0, len(out), PIECE):
        stop = min(start + PIECE, len(out))
        part = np.unpackbits(packed[start // 8 * bits : -(-stop // 8) * bits], bitorder="little").reshape(-1, bits)
        out[start:stop] = (part.astype(np.float32) @ powers)[: stop - start]


# ------------------------------------------------------------------------------------- Thrift


def thrift_struct(content: bytes, position: int = 0, depth: int = 0) -> tuple[dict[int, Any], int]:
    """Parse a struct of the compact protocol; return its fields by number, and the position of its end.

    Raises ValueError for types that page headers do not use, and IndexError at the end of `content`.
    """
    if depth > MAX_DEPTH:
        raise ValueError("structs nested too deeply")
    fields, number = dict[int, Any](), 0
    while head := content[position]:
        step, kind, position = head >> 4, head & 15, position + 1
        if step:
            number += step
        else:
            number, position = zigzag(content, position)
        if kind in (1, 2):
            fields[number] = kind == 1
        elif kind in (4, 5, 6):
            fields[number], position = zigzag(content, position)
        elif kind == 8:
            size, position = varint(content, position)
            fields[number], position = content[position : position + size], position + size
        elif kind == 12:
            fields[number], position = thrift_struct(content, position, depth + 1)
        else:
            raise ValueError(f"a field of type {kind}")
    return fields, position + 1


def zigzag(content: bytes, position: int) -> tuple[int, int]:
    """Decode a zigzag-encoded signed integer; return it and the position of its end."""
    n, position = varint(content, position)
    return (n >> 1) ^ -(n & 1), position


def varint(content: bytes, position: int) -> tuple[int, int]:
    """Decode an integer stored in groups of 7 bits; return it and the position of its end."""
    n = shift = 0
    while (byte := content[position]) & 128:
        n, shift, position = n | (byte & 127) << shift, shift + 7, position + 1
    return n | byte << shift, position + 1
