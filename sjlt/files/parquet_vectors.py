"""Read the vectors in one column of a parquet file, with or without its other columns."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import arrow
from .description import checked, differences, from_json
from .errors import UserError, one_line
from .parquet_pages import VectorPages
from .source import Source

if TYPE_CHECKING:
    import pyarrow as pa

MAGIC = b"PAR1"
MAX_NUMBERS = 2**31 - 1  # values in one Arrow list array
SAMPLES, SAMPLE_ROWS = 4, 64  # row groups, and rows of each, whose decoded size is measured
READ_BYTES = 256 << 10  # per read, which fits a cache; whole column chunks may be gigabytes


class ParquetVectors(Source):
    """The vectors in one column of a parquet file.

    Parameters
    ----------
    path : Path
    column : str, optional
        Required if several columns hold vectors.

    Attributes
    ----------
    shape : (int, int)
        The number and the length of the vectors. The length is 0 if the file has no rows and the column type does not
        fix it.
    dtype : dtype
    schema : pyarrow.Schema
    row_bytes : int
        Decoded bytes per row, over all columns.
    carried_bytes, stored_bytes : int
        Decoded and stored bytes per row, without the vectors.
    """

    order = "C"
    shape: tuple[int, int]

    def __init__(self, path: Path, column: str | None) -> None:
        try:
            arrow.import_pyarrow()
        except ImportError as e:
            raise UserError(f"{path}: {e}") from None
        import pyarrow as pa
        import pyarrow.parquet

        self.path = path
        with ExitStack() as opened:
            file = opened.enter_context(open(path, "rb", buffering=0))  # first, for clearer errors than pyarrow's
            with self.explained():
                content = opened.enter_context(pa.OSFile(os.fsencode(path)))  # the name may not be UTF-8
                self._file = opened.enter_context(
                    pyarrow.parquet.ParquetFile(content, buffer_size=READ_BYTES, pre_buffer=False)
                )
            if not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                raise UserError(f"{path}: was replaced while it was opened")
            self.schema = self._file.schema_arrow
            self.column = self._chosen(column)
            metadata = self._file.metadata
            groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
            self._starts = np.cumsum([0, *(group.num_rows for group in groups)]).tolist()
            column_type = self.schema.field(self.column).type
            self.dtype = arrow.numbers_of(self.column, column_type)
            self.shape = metadata.num_rows, arrow.fixed_width(column_type) or self._first_width()
            encoded = stored = 0
            for group in groups:
                for i in range(group.num_columns):
                    chunk = group.column(i)
                    if not f"{chunk.path_in_schema}.".startswith(f"{self.column}."):
                        encoded += chunk.total_uncompressed_size
                        stored += chunk.total_compressed_size
            self._pages = VectorPages(file, metadata, self.column, self.shape[1], self.dtype)
            self._opened = opened.pop_all()
        self.stored_bytes, self._encoded_bytes = (size // max(1, metadata.num_rows) for size in (stored, encoded))

    def _chosen(self, column: str | None) -> str:
        fitting = []
        for field in self.schema:
            try:
                arrow.numbers_of(field.name, field.type)
                fitting.append(field.name)
            except TypeError:
                pass
        held = f"columns of vectors: {', '.join(fitting) or 'none'}"
        if column is not None:
            if column not in self.schema.names:
                raise UserError(f"{self.path}: there is no column {column!r}; {held}")
            if (count := self.schema.names.count(column)) > 1:
                raise UserError(f"{self.path}: there are {count} columns {column!r}")
            try:
                arrow.numbers_of(column, self.schema.field(column).type)
            except TypeError as e:
                raise UserError(f"{self.path}: {e}; {held}") from None
            return column
        if not fitting:
            columns = ", ".join(f"{field.name} ({field.type})" for field in self.schema) or "none"
            raise UserError(f"{self.path}: no column holds vectors (lists of numbers); columns: {columns}")
        if len(fitting) > 1:
            raise UserError(f"{self.path}: name one column; {held}")
        return str(fitting[0])

    def _first_width(self) -> int:
        with self.explained():
            for batch in self._file.iter_batches(1, columns=[self.column]):
                return int(arrow.vectors_of(self.column, batch.column(self.column), None, 0).shape[1])
        return 0

    @cached_property
    def row_bytes(self) -> int:  # type: ignore[override]  # only some callers need it, and it reads from the file
        """Decoded bytes per row, over all columns."""
        return self.carried_bytes + self.shape[1] * self.dtype.itemsize

    @cached_property
    def carried_bytes(self) -> int:
        """Decoded bytes per row, without the vectors, of the first rows of some row groups, whichever need the most.

        A dictionary-encoded text may take a byte per row in the file, and thousands in memory.
        """
        import pyarrow as pa

        columns = [f.name for f in self.schema if f.name != self.column and not pa.types.is_dictionary(f.type)]
        groups, largest = len(self._starts) - 1, self._encoded_bytes
        for group in sorted({i * (groups - 1) // (SAMPLES - 1) for i in range(SAMPLES)}) if columns and groups else []:
            with self.explained():
                batch = next(self._file.iter_batches(SAMPLE_ROWS, row_groups=[group], columns=columns), None)
            largest = max(largest, -(-batch.nbytes // len(batch)) if batch else 0)
        return int(largest)

    def tables(self, start: int, stop: int, rows: int, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield rows `start` to `stop` - 1 as record batches of at most `rows` rows; by default with all columns."""
        columns = columns or self.schema.names
        if self.column in columns:
            for batch in self._with_plain_vectors(start, stop, rows, columns):
                yield batch
                start += len(batch)
        yield from self._decoded(start, stop, rows, columns)

    def _with_plain_vectors(self, start: int, stop: int, rows: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Yield batches as long as `VectorPages` can read the vectors; pyarrow decodes the other columns."""
        import pyarrow as pa

        width, position, field = self.shape[1], columns.index(self.column), self.schema.field(self.column)
        others = [name for name in columns if name != self.column]
        if not width:
            return
        for batch in self._decoded(start, stop, min(rows, MAX_NUMBERS // width), others):
            content = pa.allocate_buffer(len(batch) * width * self.dtype.itemsize)  # pooled, so few page faults
            vectors = np.frombuffer(content, self.dtype).reshape(len(batch), width)
            if not self._pages.fill(start, vectors):
                return
            yield batch.add_column(position, field, arrow.lists_of(vectors, field.type))
            start += len(batch)

    def _decoded(self, start: int, stop: int, rows: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Yield batches decoded by pyarrow."""
        groups = [i for i in range(len(self._starts) - 1) if self._starts[i] < stop and self._starts[i + 1] > start]
        if not groups or start >= stop:
            return
        position = self._starts[groups[0]]
        batches = self._file.iter_batches(rows, row_groups=groups, columns=columns)
        while position < stop:
            with self.explained():
                batch = next(batches, None)
                if batch is not None and batch.schema.names != columns:
                    batch = batch.select(columns)  # a name with dots may also be the path of another column's field
            if batch is None:
                raise UserError(f"{self.path}: ends early, at row {position} of {self.shape[0]}")
            first, last = max(start - position, 0), min(stop - position, len(batch))
            if first < last:
                yield batch if last - first == len(batch) else batch.slice(first, last - first)
            position += len(batch)

    def batches(self, start: int, rows: int) -> Iterator[np.ndarray]:
        for batch in self.tables(start, self.shape[0], rows, [self.column]):
            yield self._vectors(batch, start)
            start += len(batch)

    def read(self, start: int, stop: int, out: np.ndarray | None = None) -> np.ndarray:
        if out is None:
            out = np.empty((stop - start, self.shape[1]), self.dtype)
        done = 0
        for batch in self.tables(start, stop, max(1, stop - start), [self.column]):
            out[done : done + len(batch)] = self._vectors(batch, start + done)
            done += len(batch)
        return out

    def _vectors(self, batch: Any, first_row: int) -> np.ndarray:
        with self.explained():
            return arrow.vectors_of(self.column, batch.column(self.column), self.shape[1], first_row)

    def gpu_obstacle(self) -> str | None:
        return "a parquet file, which is projected on the CPU"

    def description(self) -> dict[str, Any]:
        return {**super().description(), "column": self.column}

    def check_unchanged(self, description: dict[str, Any]) -> None:
        """Raise UserError if the file is no longer the one described."""
        if different := differences(description, self.description(), "source."):
            raise UserError(f"{self.path}: changed while it was read: {'; '.join(different)}")

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn errors from pyarrow and errors in the data into one line with the file's name."""
        try:
            yield
        except UserError:
            raise
        except (ValueError, TypeError, OSError, NotImplementedError) as e:  # pyarrow's errors derive from these
            if isinstance(e, OSError) and e.errno is not None and e.filename:
                raise
            raise UserError(f"{self.path}: {one_line(e)}") from None

    def close(self) -> None:
        self._opened.close()


def is_parquet(path: Path) -> bool:
    """Whether a file begins with the magic bytes of parquet; False if it cannot be read."""
    try:
        if not path.is_file():
            return False
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_metadata(path: Path) -> dict[str, Any] | None:
    """Read and validate the description in the metadata of a parquet file written by `project_parquet`.

    Returns None for other parquet files, including parts of a plan's folder.

    Raises
    ------
    UserError
        If the file cannot be read, or its description is invalid.
    """
    import pyarrow as pa
    import pyarrow.parquet

    try:
        with pa.OSFile(os.fsencode(path)) as file:
            content = (pyarrow.parquet.read_schema(file).metadata or {}).get(arrow.METADATA_KEY)
    except (ValueError, OSError) as e:
        raise UserError(f"{path}: {one_line(e)}") from None
    if content is None:
        return None
    place = f"{path}: the metadata {arrow.METADATA_KEY.decode()!r}"
    described = from_json(place, content)
    if isinstance(described, dict) and "plan" in described:
        return None
    return checked(place, described, with_column=True)
