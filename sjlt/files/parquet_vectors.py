"""Parquet files as sources: the vectors in one column, beside the columns that are carried through."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
MAX_NUMBERS = 2**31 - 1  # of one array of lists
READ_BYTES = 256 << 10  # at a time, which a cache holds, instead of whole column chunks: these may be gigabytes


class ParquetVectors(Source):
    """The vectors in one column of a parquet file.

    Parameters
    ----------
    path : Path
    column : str, optional
        Required where several columns hold vectors.

    Attributes
    ----------
    shape : (int, int)
        Rows and the length of the vectors; the latter is 0 in a file without rows whose type does not state it.
    dtype : dtype
    schema : pyarrow.Schema
    row_bytes : int
        Bytes per row with all columns, decoded.
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
            file = opened.enter_context(open(path, "rb", buffering=0))  # the system's own messages
            with self.explained():
                content = opened.enter_context(pa.OSFile(os.fsencode(path)))  # names need not be UTF-8
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
            total, own = 0, 0
            for group in groups:
                for i in range(group.num_columns):
                    chunk = group.column(i)
                    total += chunk.total_uncompressed_size
                    if f"{chunk.path_in_schema}.".startswith(f"{self.column}."):
                        own += chunk.total_uncompressed_size
            self._pages = VectorPages(file, metadata, self.column, self.shape[1], self.dtype)
            self._opened = opened.pop_all()
        self.carried_bytes = (total - own) // max(1, metadata.num_rows)
        self.row_bytes = self.carried_bytes + self.shape[1] * self.dtype.itemsize

    def _chosen(self, column: str | None) -> str:
        fitting = []
        for field in self.schema:
            try:
                arrow.numbers_of(field.name, field.type)
                fitting.append(field.name)
            except TypeError:
                pass
        held = f"the columns of vectors are: {', '.join(fitting) or 'none'}"
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
            raise UserError(f"{self.path}: no column holds vectors, lists of numbers; the columns are: {columns}")
        if len(fitting) > 1:
            raise UserError(f"{self.path}: name one column; {held}")
        return str(fitting[0])

    def _first_width(self) -> int:
        with self.explained():
            for batch in self._file.iter_batches(1, columns=[self.column]):
                return int(arrow.vectors_of(self.column, batch.column(self.column), None, 0).shape[1])
        return 0

    def tables(self, start: int, stop: int, rows: int, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Record batches of rows `start` to `stop` - 1, at most `rows` in each; of all columns by default."""
        columns = columns or self.schema.names
        if self.column in columns:
            for batch in self._plain(start, stop, rows, columns):
                yield batch
                start += len(batch)
        yield from self._decoded(start, stop, rows, columns)

    def _plain(self, start: int, stop: int, rows: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """The first of these batches, as far as the vectors need no decoding; pyarrow decodes the other columns."""
        import pyarrow as pa

        width, place, field = self.shape[1], columns.index(self.column), self.schema.field(self.column)
        others = [name for name in columns if name != self.column]
        if not width:
            return
        for batch in self._decoded(start, stop, min(rows, MAX_NUMBERS // width), others):
            if batch.schema.names != others:  # pyarrow takes a name with dots for a path
                return
            content = pa.allocate_buffer(len(batch) * width * self.dtype.itemsize)  # from a pool: few page faults
            vectors = np.frombuffer(content, self.dtype).reshape(len(batch), width)
            if not self._pages.fill(start, vectors):
                return
            yield batch.add_column(place, field, arrow.lists_of(vectors, field.type))
            start += len(batch)

    def _decoded(self, start: int, stop: int, rows: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """These batches as pyarrow decodes them."""
        groups = [i for i in range(len(self._starts) - 1) if self._starts[i] < stop and self._starts[i + 1] > start]
        if not groups or start >= stop:
            return
        position = self._starts[groups[0]]
        batches = self._file.iter_batches(rows, row_groups=groups, columns=columns)
        while position < stop:
            with self.explained():
                batch = next(batches, None)
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
        """UserError where the file is no longer the one that was described."""
        if different := differences(description, self.description(), "source."):
            raise UserError(f"{self.path}: changed while it was read: {'; '.join(different)}")

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Errors of pyarrow and of the data as one line with the file's name."""
        try:
            yield
        except UserError:
            raise
        except (ValueError, TypeError, OSError, NotImplementedError) as e:  # pyarrow's errors are among them
            if isinstance(e, OSError) and e.errno is not None and e.filename:
                raise
            raise UserError(f"{self.path}: {one_line(e)}") from None

    def close(self) -> None:
        self._opened.close()


def is_parquet(path: Path) -> bool:
    """Whether a file begins as parquet files do; False also for what cannot be read."""
    try:
        if not path.is_file():
            return False
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_metadata(path: Path) -> dict[str, Any] | None:
    """The description in the metadata of a parquet file that `project_parquet` wrote, with types and ranges checked.

    None for other parquet files, parts of folders among them.

    Raises
    ------
    UserError
        If the file cannot be read, or if the metadata of this name is not such a description.
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
