"""`project_parquet`: project the vectors in one column of a parquet file, and copy the other columns."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__, arrow
from .attempts import appearing, named, sweep, sync_folder
from .description import differences
from .encoding import SCALE
from .errors import UserError, one_line
from .names import check_batch_rows, check_format, check_names, check_space
from .parquet_vectors import ParquetVectors, read_metadata
from .projection import note_poor_choices

BATCH_BYTES = 8 << 20  # decoded; 16 and 32 MiB are no faster with 768 features and need 30 and 100 MB more
ROW_GROUP_BYTES = 64 << 20
READ_AHEAD = 8  # batches, enough to keep reading while a row group is written


def project_parquet(
    source: Path,
    out: Path,
    n_components: int,
    *,
    column: str | None = None,
    batch_rows: int | None = None,
    resume: bool = False,
    force: bool = False,
    progress: Callable[[int, int], None] = lambda rows, of: None,
    note: Callable[[str], None] = lambda line: None,
    **parameters: Any,
) -> None:
    """Copy the parquet file `source` to `out`, with the vectors in one column projected.

    Parameters
    ----------
    source, out : Path
        `out` appears only when it is complete. An interrupted run leaves nothing under its name and must start over.
    n_components : int
    column : str, optional
        The column to project. Required if several columns hold vectors.
    batch_rows : int >= 1, optional
        Rows decoded at a time. By default, as many as fill about 8 MiB.
    resume : bool
        Do nothing if `out` is already the result of this call.
    force : bool
        Replace `out`. Without it, a file that has appeared by the end of the run is kept, and the result discarded.
    progress : callable
        Called with the number of projected rows and the total.
    note : callable
        Called with messages for the user.
    **parameters
        Of `sjlt.arrow.Projector`: nnz and stacks, or density; seed, output_column, dtype, normalize.

    Raises
    ------
    UserError, OSError
        UserErrors have one-line messages.
    """
    batch_rows = check_batch_rows(batch_rows)
    check_names(source, out, "parquet")
    if os.path.lexists(out) and not (force or resume):
        raise UserError(f"{out}: exists (--force replaces it)")
    with ParquetVectors(source, column) as vectors:
        check_format(out, "parquet")
        _check_length(vectors)
        try:
            projector = arrow.Projector(vectors.column, n_components, n_features=vectors.shape[1], **parameters)
            schema = projector.schema(vectors.schema)
        except (TypeError, ValueError) as e:
            raise UserError(f"{source}: {one_line(e)}") from None
        batch_rows = batch_rows or max(1, BATCH_BYTES // max(1, vectors.row_bytes))
        description = _description(vectors, projector, batch_rows)
        if resume and out.exists() and not force:
            _check_is_result(out, description)
            note(f"{out}: complete already, from the same source and parameters")
            return
        size = vectors.shape[0] * row_bytes(vectors, projector, schema, vectors.stored_bytes)
        check_space(out, size)
        note_poor_choices(out, (vectors.shape[1], n_components), (size, description["source"]["size"]), note)
        sweep(out.parent, out.name)
        with named(out), appearing(out, existing="replace" if force else "refuse") as temporary:
            write_projected(vectors, projector, temporary, description, (0, vectors.shape[0], batch_rows), progress)
            vectors.check_unchanged(description["source"])
        sync_folder(out.parent)


def _description(vectors: ParquetVectors, projector: arrow.Projector, batch_rows: int) -> dict[str, Any]:
    """The description stored in the metadata of the result; it has the format of ``OUT.json``."""
    column_type = vectors.schema.field(vectors.column).type
    return {
        "sjlt": __version__,
        "sketch": projector.sketch_for(column_type).to_dict(),
        "source": vectors.description(),
        "result": {
            **projector.encoding(column_type).description(vectors.shape[0], projector.output_column),
            "column": projector.output_column,
            "normalized": projector.normalize,
        },
        "batch_rows": batch_rows,
        "device": "cpu",
    }


def _check_length(vectors: ParquetVectors) -> None:
    if vectors.shape[1]:
        return
    if vectors.shape[0] or arrow.fixed_width(vectors.schema.field(vectors.column).type) is not None:
        raise UserError(f"{vectors.path}: the vectors in {vectors.column!r} have length 0")
    raise UserError(f"{vectors.path}: no row of column {vectors.column!r} states the length of its vectors")


def _check_is_result(out: Path, description: dict[str, Any]) -> None:
    """Raise UserError with the differences unless `out` is the described result."""
    try:
        recorded = read_metadata(out)
    except UserError as e:
        different = [str(e)]
    else:
        different = ["it has no description"] if recorded is None else differences(recorded, description)
    if different:
        raise UserError(f"{out}: exists and is not this result: {'; '.join(different)} (--force replaces it)")


def write_projected(
    source: ParquetVectors,
    projector: arrow.Projector,
    out: Path,
    description: dict[str, Any],
    rows: tuple[int, int, int],
    progress: Callable[[int, int], None] = lambda rows, of: None,
) -> None:
    """Write a range of rows of `source`, with the vectors projected, to the parquet file `out`.

    A thread reads a few batches ahead, and a row group is written while the next one is projected. Each row group is
    flushed to disk as soon as it is written; a single flush at the end would take a tenth of the run. Row groups hold
    64 MiB and at most one batch more. Projected values are neither dictionary-encoded nor compressed, because random
    fractions gain nothing from either. The bytes of the file depend on the arguments alone.

    Parameters
    ----------
    source, projector, out
    description : dict
        Written as JSON under the key "sjlt" of the file's metadata.
    rows : (start, stop, rows per batch)
    progress : callable
        Called with the number of projected rows and the total.
    """
    import pyarrow as pa

    start, stop, batch_rows = rows
    with source.explained():
        schema = projector.schema(source.schema)
    schema = schema.with_metadata({**(schema.metadata or {}), arrow.METADATA_KEY: json.dumps(description).encode()})
    vectors = {projector.column, projector.output_column, projector.output_column + SCALE}
    per_group = max(1, -(-ROW_GROUP_BYTES // (row_bytes(source, projector, schema, source.carried_bytes) * batch_rows)))
    with (
        pa.OSFile(os.fsencode(out), "wb") as sink,  # names need not be UTF-8
        _writer(sink, schema, vectors) as writer,
        open(out, "rb") as file,
        ThreadPoolExecutor(1, thread_name_prefix="sjlt-flush") as flusher,
        ThreadPoolExecutor(1, thread_name_prefix="sjlt-write") as thread,
        closing(_read_ahead(source.tables(start, stop, batch_rows))) as batches,
    ):
        group, written, flushed = [], deque[Any](), list[Any]()

        def write(table: Any) -> None:
            writer.write_table(table, row_group_size=stop)
            flushed.append(flusher.submit(os.fsync, file.fileno()))

        progress(start, stop)
        for batch in batches:
            with source.explained():
                group.append(projector.project(batch, start))
            start += len(batch)
            if len(group) == per_group or start == stop:
                while written:
                    written.popleft().result()
                written.append(thread.submit(write, pa.Table.from_batches(group, schema)))
                group = []
            progress(start, stop)
        for each in (*written, *flushed):
            each.result()


def row_bytes(source: ParquetVectors, projector: arrow.Projector, schema: Any, carried: int) -> int:
    """The approximate number of bytes per row in the result, of which `carried` belong to copied columns."""
    kind = schema.field(projector.output_column).type
    projected = kind.list_size * kind.value_type.bit_width // 8 + 4 * (projector.dtype == np.int8)
    kept = source.shape[1] * source.dtype.itemsize if projector.output_column != projector.column else 0
    return max(1, int(projected + kept + carried))


def _writer(sink: Any, schema: Any, vectors: set[str]) -> Any:
    """A writer that dictionary-encodes and compresses all columns except `vectors`."""
    import pyarrow.parquet

    leaves = _leaves(schema)
    others = [path for path, name in leaves if name not in vectors]
    return pyarrow.parquet.ParquetWriter(
        sink,
        schema,
        use_dictionary=others,
        write_statistics=others,
        compression={path: "none" if name in vectors else "snappy" for path, name in leaves},
    )


def _leaves(schema: Any) -> list[tuple[str, str]]:
    """The path and the top-level column of each leaf column that parquet stores for a schema."""
    from io import BytesIO

    import pyarrow as pa
    import pyarrow.parquet

    leaves = []
    for field in schema:  # one at a time, because column names may contain dots
        stream = BytesIO()
        pyarrow.parquet.ParquetWriter(stream, pa.schema([field])).close()
        stored = pyarrow.parquet.ParquetFile(stream).schema
        leaves += [(stored.column(i).path, field.name) for i in range(len(stored))]
    return leaves


def _read_ahead(items: Iterator[Any], count: int = READ_AHEAD) -> Generator[Any]:
    """Yield the items, which a thread computes up to `count` ahead of the caller."""
    with ThreadPoolExecutor(1, thread_name_prefix="sjlt-read") as thread:
        following = deque(thread.submit(next, items, None) for _ in range(count))
        while (item := following.popleft().result()) is not None:
            following.append(thread.submit(next, items, None))
            yield item
