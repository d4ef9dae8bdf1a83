"""Parquet files: a column of vectors in, projected vectors out, other columns carried through."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .. import __version__, arrow
from .attempts import appearing, sweep, sync_folder
from .description import differences
from .errors import UserError, one_line
from .source import Source

if TYPE_CHECKING:
    import pyarrow as pa

MAGIC = b"PAR1"
BATCH_BYTES = 8 << 20  # decoded; 16 and 32 MiB are no faster with 768 features and take 30 and 100 MB more
ROW_GROUP_BYTES = 64 << 20
READ_BYTES = 4 << 20  # at a time, instead of whole column chunks: these may be gigabytes


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
        Of a row with all columns, decoded.
    """

    order = "C"
    shape: tuple[int, int]

    def __init__(self, path: Path, column: str | None) -> None:
        try:
            arrow.import_pyarrow()
        except ImportError as e:
            raise UserError(f"{path}: {e}") from None
        import pyarrow.parquet

        self.path = path
        with open(path, "rb"):  # the system's own messages for missing files and permissions
            pass
        with self._explained():
            self._file = pyarrow.parquet.ParquetFile(path, buffer_size=READ_BYTES, pre_buffer=False)
        try:
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
                    if chunk.path_in_schema.split(".")[0] == self.column:
                        own += chunk.total_uncompressed_size
        except BaseException:
            self._file.close()
            raise
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
            try:
                arrow.numbers_of(column, self.schema.field(column).type)
            except TypeError as e:
                raise UserError(f"{self.path}: {e}; {held}") from None
            return column
        if len(fitting) != 1:
            raise UserError(f"{self.path}: name one column; {held}")
        return str(fitting[0])

    def _first_width(self) -> int:
        with self._explained():
            for batch in self._file.iter_batches(1, columns=[self.column]):
                return int(arrow.vectors_of(self.column, batch.column(0), None, 0).shape[1])
        return 0

    def tables(self, start: int, stop: int, rows: int, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Record batches of rows `start` to `stop` - 1, at most `rows` in each; of all columns by default."""
        groups = [i for i in range(len(self._starts) - 1) if self._starts[i] < stop and self._starts[i + 1] > start]
        if not groups or start >= stop:
            return
        position = self._starts[groups[0]]
        batches = self._file.iter_batches(rows, row_groups=groups, columns=columns)
        while position < stop:
            with self._explained():
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
        with self._explained():
            return arrow.vectors_of(self.column, batch.column(0), self.shape[1], first_row)

    def gpu_obstacle(self) -> str | None:
        return "a parquet file, which is projected on the CPU"

    def description(self) -> dict[str, Any]:
        return {**super().description(), "column": self.column}

    def check_unchanged(self, description: dict[str, Any]) -> None:
        """UserError where the file is no longer the one that was described."""
        if different := differences(description, self.description(), "source."):
            raise UserError(f"{self.path}: changed while it was read: {'; '.join(different)}")

    @contextmanager
    def _explained(self) -> Iterator[None]:
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
        self._file.close()


# ------------------------------------------------------------------------------------- project


def project_parquet(
    source: Path,
    out: Path,
    n_components: int,
    *,
    column: str | None = None,
    output_column: str | None = None,
    nnz: int | Literal["auto"] = "auto",
    stacks: int = 1,
    density: float | Literal["auto"] | None = None,
    seed: int = 0,
    dtype: str | None = None,
    normalize: bool = False,
    batch_rows: int | None = None,
    resume: bool = False,
    force: bool = False,
    progress: Callable[[int, int], None] = lambda rows, of: None,
    note: Callable[[str], None] = lambda line: None,
) -> None:
    """Write the parquet file `source` to `out`, the vectors in one column projected, the others carried through.

    Parameters
    ----------
    source, out : Path
        `out` appears when it is complete; an interrupted run leaves nothing under its name and starts over.
    column : str, optional
        Required where several columns hold vectors.
    n_components, output_column, nnz, stacks, density, seed, dtype, normalize
        As for `sjlt.arrow.Projector`.
    batch_rows : int >= 1, optional
        Rows decoded at a time, by default about 8 MiB.
    resume : bool
        Do nothing if `out` is this very result already.
    force : bool
        Replace `out`.
    progress : callable
        Called with the rows done and the rows there are.
    note : callable
        Called with lines that the user should see.

    Raises
    ------
    UserError, OSError
        UserError's message is one line with the numbers.
    """
    if batch_rows is not None and batch_rows < 1:
        raise UserError(f"a batch must have at least 1 row, got {batch_rows}")
    if os.path.lexists(out):
        if not out.is_file():
            raise UserError(f"{out}: exists and is not a regular file")
        if source.exists() and out.samefile(source):
            raise UserError(f"{out}: would be written while it is read: it is the source {source}")
        if not force and not resume:
            raise UserError(f"{out}: exists (--force replaces it)")
    if not out.parent.is_dir():
        raise UserError(f"{out.parent}: no such directory")
    with ParquetVectors(source, column) as vectors:
        if not vectors.shape[1]:
            raise UserError(f"{source}: no row of column {vectors.column!r} states the length of its vectors")
        try:
            projector = arrow.Projector(
                vectors.column,
                n_components,
                n_features=vectors.shape[1],
                nnz=nnz,
                stacks=stacks,
                density=density,
                seed=seed,
                output_column=output_column,
                normalize=normalize,
                dtype=dtype,
            )
            projected = projector.schema(vectors.schema)
        except (TypeError, ValueError) as e:
            raise UserError(f"{source}: {one_line(e)}") from None
        batch_rows = batch_rows or max(1, BATCH_BYTES // max(1, vectors.row_bytes))
        described = vectors.description()
        description: dict[str, Any] = {
            "sjlt": __version__,
            "sketch": projector.sketch_for(vectors.schema.field(vectors.column).type).to_dict(),
            "source": described,
            "result": {
                "shape": [vectors.shape[0], n_components],
                "dtype": str(projected.field(projector.output_column).type.value_type.to_pandas_dtype().__name__),
                "column": projector.output_column,
                "normalized": normalize,
            },
            "batch_rows": batch_rows,
            "device": "cpu",
        }
        if resume and out.exists() and not force:
            if read_metadata(out) != description:
                raise UserError(f"{out}: exists and is not this result (--force replaces it)")
            note(f"{out}: complete already, from the same source and parameters")
            return
        check_space(out, vectors.shape[0] * row_bytes(vectors, projector, projected))
        sweep(out.parent, out.name)
        with appearing(out) as temporary:
            write_projected(vectors, projector, temporary, description, (0, vectors.shape[0], batch_rows), progress)
            vectors.check_unchanged(described)
        sync_folder(out.parent)


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
    """The description in the metadata of a parquet file that sjlt has written, else None.

    Raises
    ------
    UserError
        If the file cannot be read.
    """
    import pyarrow.parquet

    try:
        content = (pyarrow.parquet.read_schema(path).metadata or {}).get(arrow.METADATA_KEY)
    except (ValueError, OSError) as e:
        raise UserError(f"{path}: {one_line(e)}") from None
    return None if content is None else dict(json.loads(content))


def check_space(out: Path, needed: int) -> None:
    """UserError where the file system of `out` has less than `needed` bytes."""
    free = shutil.disk_usage(out.parent).free
    if needed > free:
        raise UserError(f"{out}: needs {needed} bytes, the file system has {free} free")


def write_projected(
    source: ParquetVectors,
    projector: arrow.Projector,
    out: Path,
    description: dict[str, Any],
    rows: tuple[int, int, int],
    progress: Callable[[int, int], None] = lambda rows, of: None,
) -> None:
    """Write rows of `source`, their vectors projected, to the parquet file `out`.

    Reading runs one batch ahead in a thread. Row groups hold about 64 MiB; projected numbers are neither
    dictionary-encoded nor compressed, since random fractions gain nothing from either. The bytes of the file follow
    from the arguments.

    Parameters
    ----------
    source, projector, out
    description : dict
        Ready for JSON, under the key "sjlt" of the file's metadata.
    rows : (start, stop, rows per batch)
    progress : callable
        Called with the rows done and the rows there are.
    """
    import pyarrow as pa
    import pyarrow.parquet

    start, stop, batch_rows = rows
    with source._explained():
        schema = projector.schema(source.schema)
    schema = schema.with_metadata({**(schema.metadata or {}), arrow.METADATA_KEY: json.dumps(description).encode()})
    vectors = {projector.output_column, projector.column}
    leaves = _leaves(schema)
    others = [path for path, name in leaves if name not in vectors]
    per_group = max(1, ROW_GROUP_BYTES // (row_bytes(source, projector, schema) * batch_rows))
    with pyarrow.parquet.ParquetWriter(
        out,
        schema,
        use_dictionary=others,
        write_statistics=others,
        compression={path: "none" if name in vectors else "snappy" for path, name in leaves},
    ) as writer:
        group = []
        for batch in _one_ahead(source.tables(start, stop, batch_rows)):
            with source._explained():
                group.append(projector.project(batch, start))
            start += len(batch)
            if len(group) == per_group or start == stop:
                writer.write_table(pa.Table.from_batches(group, schema), row_group_size=stop)
                group = []
            progress(start, stop)


def row_bytes(source: ParquetVectors, projector: arrow.Projector, schema: Any) -> int:
    """Bytes of a row of the result, about."""
    kind = schema.field(projector.output_column).type
    projected = kind.list_size * kind.value_type.bit_width // 8
    kept = source.shape[1] * source.dtype.itemsize if projector.output_column != projector.column else 0
    return max(1, int(projected + kept + source.carried_bytes))


def _leaves(schema: Any) -> list[tuple[str, str]]:
    """The (path, top column) of each column that parquet stores for a schema."""
    from io import BytesIO

    import pyarrow.parquet

    stream = BytesIO()
    pyarrow.parquet.ParquetWriter(stream, schema).close()
    stored = pyarrow.parquet.ParquetFile(stream).schema
    paths = [stored.column(i).path for i in range(len(stored))]
    return [(path, path.split(".")[0]) for path in paths]


def _one_ahead(items: Iterator[Any]) -> Iterator[Any]:
    """The items, each computed in a thread while the caller works on the one before."""
    with ThreadPoolExecutor(1, thread_name_prefix="sjlt-read") as thread:
        following = thread.submit(next, items, None)
        while (item := following.result()) is not None:
            following = thread.submit(next, items, None)
            yield item
